"""Which layers get an adapter, and the refusals that keep a wrong list from training in silence.

A name that matches nothing is an error even when other names match; a name that also matches something which
is no linear layer is an error; a tied matrix is refused, because merging into the head would change the
embedding; a task head outside the exchange is refused, because it would be random on each site.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.models.lora import ALL_LINEAR, LoraSettings, check, fits, names_in, parse_pattern
from umbel.models.problem import first_three, model_error
from umbel.models.quantised import plain_kind
from umbel.models.state import is_tied

if TYPE_CHECKING:
    from torch import nn

KINDS = ("Linear", "Conv1D")


def resolve_targets(model: Any, settings: LoraSettings) -> dict[str, nn.Module]:
    """Return the modules to adapt by name, in model order."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    saved = names_in(settings.modules_to_save)
    linear = {name: module for name, module in modules.items() if plain_kind(module) in KINDS}
    if settings.target_modules.strip() == ALL_LINEAR:
        return {
            name: module
            for name, module in linear.items()
            if module is not head and not any(_ends_with(name, part) for part in saved)
        }
    wanted = names_in(settings.target_modules)
    for part in wanted:
        found = [name for name in modules if _ends_with(name, part)]
        others = [name for name in found if name not in linear]
        if not found or others:
            raise model_error(
                f"lora.target-modules: {part!r} matches "
                + (f"layers that cannot be adapted ({first_three(others)})" if others else "no layer"),
                got=settings.target_modules,
                allowed=f"{ALL_LINEAR}, or names among {', '.join(_last_parts(linear))}",
                remedy="Correct or remove the name; the other names do not make up for it.",
            )
    targets = {n: m for n, m in linear.items() if any(_ends_with(n, part) for part in wanted)}
    _refuse_tied(model, "lora.target-modules", [name for name, module in targets.items() if module is head])
    return targets


def check_saved(model: Any, saved: list[str]) -> None:
    """Refuse names that match nothing, tied matrices, and a task head neither trained nor sent."""
    modules = dict(model.named_modules())
    for part in saved:
        found = [name for name in modules if _ends_with(name, part)]
        allowed = ", ".join(name for name, _ in model.named_children())
        check(f"modules_to_save: {part!r} matches no module", part, bool(found), allowed, "Correct it.")
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        _refuse_tied(model, "modules_to_save", [n for n in found if any(modules[n] is end for end in ends)])
    head = model.get_output_embeddings()
    for name, child in model.named_children():
        inside = name == model.base_model_prefix or child is head or name in saved
        if not inside and any(True for _ in child.parameters()):
            raise model_error(
                f"task head {name!r} would stay frozen at its random first values",
                got=",".join(saved),
                allowed=f"modules_to_save that contains {name}",
                remedy=f"Set modules_to_save = {name!r}: it is then trained, exchanged and exported.",
            )


def check_patterns(settings: LoraSettings, targets: dict[str, nn.Module]) -> None:
    """Refuse a rank or alpha pattern that fits no adapted layer."""
    for key, text in (
        ("lora.rank-pattern", settings.rank_pattern),
        ("lora.alpha-pattern", settings.alpha_pattern),
    ):
        for pattern in parse_pattern(key, text):
            matched = any(fits(pattern, name) for name in targets)
            allowed = f"patterns for {', '.join(_last_parts(targets))}"
            check(f"{key}: {pattern!r} matches no adapted layer", text, matched, allowed, "Correct it.")


def short_names(model: Any, targets: dict[str, nn.Module]) -> list[str]:
    """Return last parts when they select exactly the targets (what other tools expect), else full names."""
    short = _last_parts(targets)
    selected = {name for name, _ in model.named_modules() if any(_ends_with(name, part) for part in short)}
    return short if selected == set(targets) else sorted(targets)


def _refuse_tied(model: Any, key: str, names: list[str]) -> None:
    if names and is_tied(model):
        raise model_error(
            f"{key} names a matrix that is tied to another",
            got=names[0],
            allowed="matrices of their own",
            remedy="Input and output share it: adapt the layers between them, or train in full mode.",
        )


def _ends_with(module_name: str, part: str) -> bool:
    return module_name == part or module_name.endswith(f".{part}")


def _last_parts(names: Any) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
