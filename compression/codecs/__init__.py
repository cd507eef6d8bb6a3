"""One file per codec. Each states its format, its bound and its reference; `registry.py` puts them
together."""
