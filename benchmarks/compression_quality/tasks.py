"""Two small trainings that codecs are compared on, and the sites that hold their rows.

    lora       adapters of rank 16 on a random tiny model, three sites with different topics (the built-in demo rows)
    pretrain   all weights of the same model from their first values, three sites with different parts of a text

The text is tinyshakespeare where `../shared/data` has it, else the demo rows as plain text.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.inprocess import Deployed

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare.txt"
SITES = ("clinic", "kitchen", "workshop")
LINES_A_ROW = 8
ROWS_A_SITE = 400

COMMON = (
    "train.threads=1",
    "train.schedule=cosine",
    "train.warmup-steps=4",
    "clients.minimum=3",
    "eval.every=0",
    "eval.final=true",
    "telemetry.report=false",
    "clients.max-norm-ratio=0",
)
SETTINGS = {
    "lora": (
        "run.method=fedit",
        "lora.rank=16",
        "lora.alpha=32",
        "train.learning-rate=0.01",
        "train.batch-size=8",
        "data.max-length=128",
        "data.heldout-max=32",
    ),
    "pretrain": (
        "run.method=fedavg",
        "train.mode=full",
        "train.learning-rate=0.003",
        "train.batch-size=8",
        "data.format=text",
        "data.completion-only=false",
        "data.max-length=256",
        "data.heldout-max=32",
    ),
}


def sites(task: str, root: Path) -> list[Deployed]:
    """Return the three sites of a task; what they read and keep lies under `root`."""
    if task == "lora":
        return [Deployed(name, f"demo:{name}", root / "state") for name in SITES]
    import json

    parts = texts()
    found = []
    for i, name in enumerate(SITES):
        size = len(parts) // len(SITES)
        rows = parts[i * size : (i + 1) * size][:ROWS_A_SITE]
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
        found.append(Deployed(name, str(path), root / "state"))
    return found


def texts() -> list[str]:
    """Return short passages of one text, in order."""
    if TEXT.exists():
        lines = [line for line in TEXT.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        from umbel.data.sources import load_rows

        rows = [row for name in SITES for row in load_rows(f"demo:{name}")]
        lines = [str(value) for row in rows for value in row.values() if isinstance(value, str)]
    return ["\n".join(lines[i : i + LINES_A_ROW]) for i in range(0, len(lines) - LINES_A_ROW, LINES_A_ROW)]
