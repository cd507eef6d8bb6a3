"""`umbel doctor`: is this machine, and this recipe on it, fit to run? Every WARN and FAIL says what to do.

Nothing is downloaded: a model on the hub counts as present only when it lies in the local cache.
"""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umbel.errors import UmbelError
from umbel.telemetry.machine import FAIL, PASS, WARN, Check, machine_checks
from umbel.telemetry.units import one_line

_WIDTH = 18


def doctor(config_path: str | os.PathLike[str] | None = None, json: bool = False) -> int:
    """Print the findings and return 0, or 1 when one of them is a FAIL.

    `config_path` names a recipe whose model and data are checked too; `json` prints one object, no text.
    """
    checks = [*machine_checks()]
    if config_path is not None:
        checks += recipe_checks(Path(config_path))
    failed = any(check.status == FAIL for check in checks)
    if json:
        print(jsonlib.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print(render(checks))
    return int(failed)


def render(checks: list[Check]) -> str:
    """The block of findings as plain text, a count of each at the end."""
    lines = []
    for check in checks:
        lines.append(f"{check.status}  {check.name:<{_WIDTH}} {one_line(check.found)}")
        if check.remedy and check.status != PASS:
            lines.append(f"      {'':<{_WIDTH}} -> {one_line(check.remedy)}")
    counts = {status: sum(c.status == status for c in checks) for status in (PASS, WARN, FAIL)}
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return "\n".join(lines)


def recipe_checks(path: Path) -> Iterator[Check]:
    """Settings, model and data of one recipe; later checks are left out when the settings are wrong."""
    from umbel.config import resolve

    try:
        config = resolve(path)
    except UmbelError as error:
        yield Check("recipe", FAIL, str(error), "Correct the key that is named.")
        return
    yield Check("recipe", PASS, path.name)
    yield model_check(config)
    yield data_check("data.source", config.data.source)
    if config.eval.central_data:
        yield data_check("eval.central-data", config.eval.central_data)


def model_check(config: Any) -> Check:
    """Is the base model on this machine? Its weights are not read."""
    name = config.model.name
    remedy = "Copy the model to this machine and name its folder in model.name."
    try:
        from umbel.models.source import ModelSpec, load_config

        spec = ModelSpec(name=name, revision=config.model.revision)
        if name.startswith("package:"):
            from umbel.models.gguf import package_file

            package_file(name.removeprefix("package:"))
            return Check("model", PASS, f"{name} is installed")
        path = Path(name).expanduser()
        if path.is_file():
            return Check("model", PASS, f"{name}, {path.suffix or 'file'}")
        if not spec.is_builtin and not path.exists() and name[:1] not in "/.~":
            return _hub_check(name, config.model.revision, remedy)
        return Check("model", PASS, f"{name}, {load_config(spec).model_type}")
    except UmbelError as error:
        return Check("model", FAIL, str(error), remedy)
    except Exception as error:
        # A broken model folder fails in many ways inside the model library; the operator needs one line.
        return Check("model", FAIL, f"{name} cannot be read ({type(error).__name__})", remedy)


def _hub_check(name: str, revision: str, remedy: str) -> Check:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
        return Check("model", PASS, f"{name} is in the hub cache")
    return Check("model", WARN, f"{name} is not in the hub cache and would be fetched at the start", remedy)


def data_check(key: str, source: str) -> Check:
    """Can the first rows be read, and in which format are they?"""
    if source == "demo:":
        return Check(key, PASS, "the built-in demonstration data")
    if source.startswith("hub:"):
        remedy = "Copy the rows to a file on this machine and name it."
        return Check(key, WARN, f"{source} would be fetched at the start", remedy)
    try:
        from umbel.data.formats import detect_format
        from umbel.data.sources import load_rows

        rows = load_rows(source, limit=20)
        return Check(key, PASS, f"{source}: rows of the format {detect_format(rows).value}")
    except (UmbelError, OSError) as error:
        return Check(key, FAIL, str(error), "Real sites name their own file in node-config, key data.")
