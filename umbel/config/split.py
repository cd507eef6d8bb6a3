"""Settings of split learning (`run.task = "split"`): where the model is cut, what crosses the cut, and how."""

from __future__ import annotations

from dataclasses import dataclass

from umbel.config.keys import key


@dataclass(frozen=True)
class Split:
    """Split learning; without effect unless run.task = 'split'."""

    gradient: str = key(
        "true",
        "where the gradient at the cut comes from: the server's own, FSL-SAGE's estimate, CSE-FSL's local loss, or none "
        "(frozen head)",
        choices=("true", "aux-estimate", "aux-loss", "none"),
    )
    client_optimizer: str = key(
        "first", "optimiser of the site's half: first or zeroth order", choices=("first", "zeroth")
    )
    shape: str = key(
        "u",
        "'u' keeps the last blocks and the labels at the site, 'two-part' does not",
        choices=("u", "two-part"),
    )
    server_copies: str = key(
        "per-site",
        "a body adapter a site, averaged at the round's end, or one shared and stepped in order of arrival",
        choices=("per-site", "shared"),
    )
    head: int = key(1, "first blocks at the site, with the embedding", low=0, high=10_000)
    tail: int = key(1, "last blocks at the site, with norm and LM head (shape 'u' only)", low=0, high=10_000)
    chunk: int = key(4, "batches K in flight; every part takes one step a chunk", low=1, high=4096)
    tail_step: str = key(
        "chunk", "the tail's step: once a chunk (exact) or once a batch", choices=("chunk", "batch")
    )
    tied: str = key(
        "refuse",
        "a trained tied embedding cut in two: refuse, untie, or sync its gradient",
        choices=("refuse", "untie", "sync"),
    )
    labels: str = key(
        "shared",
        "'private' refuses every setting that would show labels to the server",
        choices=("shared", "private"),
    )
    transport: str = key(
        "auto",
        "a stream from the site to the server, plain messages, or a stream where one can be had",
        choices=("auto", "stream", "messages"),
    )
    bind: str = key("127.0.0.1:0", "host:port the server listens on; port 0: a free one")
    address: str = key("", "host:port as sites see it; empty: as bound, on loopback only")
    tls_cert: str = key("", "PEM file of the stream's certificate chain, on the server")
    tls_key: str = key("", "PEM file of its key, on the server")
    keepalive_s: float = key(10.0, "seconds between keepalive pings of the stream", low=0.1, high=3600.0)
    grace_s: float = key(
        30.0, "seconds a broken stream may stay away before its site is dead", low=0.1, high=3600.0
    )
    connect_s: float = key(10.0, "seconds a site tries to open the stream", low=0.1, high=600.0)
    session_ttl_s: float = key(
        86_400.0, "seconds a session's token is good for at most", low=1.0, high=604_800.0
    )
    max_sessions: int = key(64, "streams open at once at most", low=1, high=4096)
    max_message_bytes: int = key(
        256 * 2**20, "bytes of one message of transport 'messages' at most", low=2**16, high=2**31 - 1
    )
    activation_codec: str = key(
        "bf16",
        "codec of activations and outputs: float32, bfloat16, or 8 bits with one scale a token, stochastic",
        choices=("raw", "bf16", "int8"),
    )
    gradient_codec: str = key(
        "bf16",
        "codec of gradients at the cut, as activation-codec; float16 underflows",
        choices=("raw", "bf16", "int8"),
    )
    loss_block: int = key(256, "token rows of the LM head at once in the chunked loss", low=1, high=1_048_576)
    on_death: str = key(
        "drop",
        "a site that dies in mid round: both halves are dropped, or count with the chunks it saved",
        choices=("drop", "last-saved"),
    )
    save_every: int = key(
        0, "chunks between two saves of the site's half at the server; 0: none", low=0, high=100_000
    )
    upload_every: int = key(5, "aux-*: every so many batches the activation is uploaded", low=1, high=100_000)
    aux_blocks: int = key(1, "aux-*: blocks of the auxiliary model", low=1, high=1000)
    align: str = key("interval", "aux-estimate: what triggers alignment", choices=("interval", "staleness"))
    align_every: int = key(5, "aux-estimate: rounds between two alignments", low=1, high=100_000)
    align_threshold: float = key(0.5, "aux-estimate: relative error that triggers one", low=0.0, high=1e6)
    align_steps: int = key(40, "aux-estimate: steps of one alignment", low=1, high=100_000)
    align_rate: float = key(1e-3, "aux-estimate: learning rate of alignment", low=0.0, high=10.0)
    buffer: int = key(64, "aux-estimate: batches kept a site", low=1, high=100_000)
