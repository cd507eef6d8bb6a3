"""What the run leaves behind: an adapter that PEFT loads, or a whole model, with a card that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_app.start import Start
from umbel import __version__
from umbel.config import Config
from umbel.methods import PERSONAL
from umbel.telemetry.history import History
from umbel.telemetry.runfolder import RunFolder


def model_card(config: Config, start: Start, history: History) -> str:
    """Return the model card (Markdown with a YAML head): rounds, sites, tokens, method and measured loss."""
    first, last = history.first_last_heldout()
    adapter = config.train.mode == "lora"
    head = ["---", f"base_model: {start.spec.portable_name}", "tags: [federated-learning, umbel]"]
    head += ["library_name: peft" if adapter else "library_name: transformers", "---", ""]
    what = f"LoRA adapter (rank {config.lora.rank}, alpha {config.lora.alpha:g})" if adapter else "model"
    lines = [
        f"# {what} trained across {len(history.contributions())} sites",
        "",
        "Trained with Umbel: the sites' data never left them.",
        "",
        "| | |",
        "|---|---|",
        f"| base model | {start.spec.portable_name} |",
        f"| base fingerprint (sha256) | {start.reference.get('model') or 'unknown to the server'} |",
        f"| method | {config.run.method} |",
        f"| rounds committed | {len(history.committed)} |",
        f"| sites | {', '.join(sorted(history.contributions())) or 'none'} |",
        f"| target tokens trained | {history.tokens()} |",
        f"| held-out loss before, after | {_number(first)}, {_number(last)} |",
        f"| umbel | {__version__} |",
        "",
        "An adapter or model trained on private text can reveal parts of that text; share it accordingly.",
        "",
    ]
    return "\n".join(head + lines)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def export(config: Config, start: Start, state: dict[str, Any], folder: RunFolder, history: History) -> Path:
    """Write `adapter/` (or `model/` in full mode) of the run folder and return its path.

    Whatever a method keeps becomes one plain adapter. A method without a global model leaves only the card: its
    sites hold their adapters, in `adapter/` of their own state.
    """
    from umbel.models.combine import one_adapter
    from umbel.models.export import save_adapter, save_full

    card = model_card(config, start, history)
    if config.run.method in PERSONAL:
        path = folder.path / "PERSONAL.md"
        path.write_text(
            f"{card}\nEvery site has its own adapter, in its state folder; there is no global one.\n"
        )
        return path
    if config.train.mode == "lora":
        arrays, settings = one_adapter(state, start.settings)
        save_adapter(folder.adapter, arrays, settings, start.spec, card=card)
        return folder.adapter
    save_full(folder.model, start.spec, state, card=card)
    return folder.model
