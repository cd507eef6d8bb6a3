"""What a run leaves behind and how it is shown: events, run folder, history, console, metrics, report.

`events` is written while the run goes on; `history` computes every number shown from it; the others draw.
"""
