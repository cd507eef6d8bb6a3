"""One cell of the matrix method x codec as a real Flower simulation; `benchmarks/codec_matrix.py` runs the others."""

from __future__ import annotations

from support.cells import CODECS

from benchmarks.codec_matrix import judged, simulated


def test_a_cell_as_a_flower_simulation(tmp_path) -> None:
    """Carry with 8-bit blocks: one round of two sites, bytes as planned."""
    found = simulated("carry", CODECS["int8"], tmp_path / "cell")
    line = judged(found, "carry", CODECS["int8"], tmp_path / "plan")
    assert line["ok"], line
    assert line["exact"]
