"""Export of a run from its checkpoints, on the machine that holds the run folder."""

from __future__ import annotations

from pathlib import Path

from umbel import checkpoints
from umbel.config import Config, resolve
from umbel.errors import ConfigError, DataError
from umbel.methods import PERSONAL
from umbel.models.described import described
from umbel.models.source import ModelSpec
from umbel.telemetry.runfolder import RunFolder


def export_run(
    run_dir: Path,
    *,
    merge: bool = False,
    output: str = "",
    round_index: int = 0,
    own: str = "",
    share: float = 0.5,
    one_rank: bool = False,
) -> Path:
    """Write the adapter (or, with `merge`, the merged model) of a checkpoint and return the folder.

    `own` is the folder of a site's own adapter, of which the export takes the share `share`; `one_rank` writes rank and
    alpha patterns out (`umbel.models.personal`).
    Raises DataError when the run has no such checkpoint, ModelError when base and state do not fit.
    """
    from umbel.models.combine import one_adapter
    from umbel.models.export import merge_adapter, save_adapter, save_full
    from umbel.models.personal import interpolated, read_adapter, uniform

    folder = RunFolder.open(run_dir)
    config = resolve(folder.config_toml)
    memory = pick(folder, round_index)
    spec, settings = described(config)
    card = card_text(config, spec, memory)
    state = memory.state
    if config.run.method in PERSONAL:
        raise ConfigError(
            "run.method",
            "has no global model to export",
            got=config.run.method,
            allowed="a method with one",
            remedy="Each site's state folder holds its adapter after the final evaluation.",
        )
    if config.train.mode == "lora":
        state, settings = one_adapter(memory.state, settings)
        if own:
            state, settings = interpolated((state, settings), read_adapter(own, settings), share)
        if one_rank:
            state, settings = uniform(state, settings)
    elif own or one_rank:
        raise ConfigError(
            "train.mode", "has no adapter to mix or reshape", got=config.train.mode, allowed="'lora'"
        )
    if config.train.mode == "full":
        target = Path(output or folder.model)
        save_full(target, spec, memory.state, card=card)
    elif merge:
        target = Path(output or folder.path / "merged")
        merge_adapter(spec, state, settings, target, card=card)
    else:
        target = Path(output or folder.adapter)
        save_adapter(target, state, settings, spec, card=card)
    return target.absolute()


def pick(folder: RunFolder, round_index: int) -> checkpoints.Memory:
    """Return the checkpoint of a round, or the newest good one."""
    if round_index:
        path = folder.checkpoints / f"round-{round_index:06d}"
        if not path.is_dir():
            kept = ", ".join(
                str(int(p.name.split("-")[1])) for p in sorted(folder.checkpoints.glob("round-[0-9]*[0-9]"))
            )
            raise ConfigError(
                "--checkpoint",
                "is not kept",
                got=round_index,
                allowed=f"one of the rounds {kept or '(none)'}",
            )
        return checkpoints.read(path)
    memory = checkpoints.load_newest(folder.checkpoints)
    if memory is None:
        raise DataError(
            f"the run {folder.name!r} has no checkpoint: no round was committed. Nothing can be exported."
        )
    return memory


def card_text(config: Config, spec: ModelSpec, memory: checkpoints.Memory) -> str:
    """Return a short model card of a checkpoint."""
    sites = sorted(entry["site"] for entry in memory.meta.get("record", {}).get("accepted", []))
    return "\n".join(
        [
            "---",
            f"base_model: {spec.portable_name}",
            "tags: [federated-learning, umbel]",
            "---",
            "",
            f"# Trained with Umbel: {config.run.method} on {spec.portable_name}",
            "",
            f"State after round {memory.round} of {config.run.rounds}; sites of that round: {', '.join(sites)}.",
            "",
        ]
    )
