"""Is this machine fit to run Umbel? Checks without side effects that outlive them, each with a remedy.

Nothing is downloaded, started or created except a file without a name in a folder that is tested for writing.
Values of environment variables are never shown: a proxy address may hold a password.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from umbel.telemetry.runfolder import runs_root
from umbel.telemetry.units import size

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
_GB = 1e9
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY", "NO_PROXY")


class Check(NamedTuple):
    """One finding: PASS, WARN or FAIL, what was found, and what to do about it ("" with PASS)."""

    name: str
    status: str
    found: str
    remedy: str = ""


def places(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The folders Umbel writes to on this machine, by what they hold."""
    return {
        "runs": runs_root(),
        "state": Path(environ.get("UMBEL_STATE") or "~/.umbel/state").expanduser(),
        "cache": Path(environ.get("UMBEL_CACHE") or "~/.cache/umbel").expanduser(),
    }


def machine_checks(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """All checks that need no recipe, in the order they are shown; `environ` is that of the service."""
    yield check_python(platform.python_version(), requirements()[0])
    yield from check_packages(requirements()[1])
    yield check_numba()
    yield check_torch()
    yield check_flower_cli(shutil.which("flwr", path=_search_path()))
    yield check_runtime_installs(environ)
    for name, folder in places(environ).items():
        yield check_writable(name, folder)
        yield check_disk(name, shutil.disk_usage(existing_part(folder)).free)
    yield check_shared_memory(Path("/dev/shm"))
    yield check_memory()
    yield check_proxies(environ)


def requirements() -> tuple[str, list[str]]:
    """(requires-python, requirements) as the package declares them, from its metadata or its source tree."""
    try:
        metadata = importlib.metadata.metadata("umbel")
        return metadata["Requires-Python"] or "", importlib.metadata.requires("umbel") or []
    except importlib.metadata.PackageNotFoundError:
        pass
    import tomllib

    source = Path(__file__).parents[2] / "pyproject.toml"
    if not source.is_file():
        return "", []
    project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
    return project["requires-python"], project["dependencies"]


def check_python(version: str, bounds: str) -> Check:
    from packaging.specifiers import SpecifierSet

    if version in SpecifierSet(bounds):
        return Check("python", PASS, version)
    return Check(
        "python", FAIL, version, f"Umbel needs Python {bounds}: make the environment with such a one."
    )


def check_packages(declared: Iterable[str], extra: str = "") -> Iterator[Check]:
    """One check a required package, those of its named extras after it; other platforms' are passed over.

    With `extra`, only the requirements that this extra adds.
    """
    from packaging.requirements import Requirement

    for text in declared:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        if extra and "extra" not in str(need.marker):
            continue
        remedy = f"Install it: pip install '{need.name}{need.specifier}'"
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(need.name, FAIL, f"not installed, needs {need.specifier}", remedy)
            continue
        if need.specifier.contains(version, prereleases=True):
            yield Check(need.name, PASS, version)
        else:
            yield Check(need.name, FAIL, f"{version}, needs {need.specifier}", remedy)
        for added in sorted(need.extras):
            yield from check_packages(importlib.metadata.requires(need.name) or [], added)


def check_numba() -> Check:
    try:
        return Check("numba", PASS, importlib.metadata.version("numba"))
    except importlib.metadata.PackageNotFoundError:
        remedy = "The codecs run slower without it: pip install 'umbel[fast]'"
        return Check("numba", WARN, "not installed (optional)", remedy)


def check_torch() -> Check:
    """What torch would compute on."""
    try:
        import torch
    except Exception as error:
        remedy = "Install torch for this machine's processor or CUDA version."
        return Check("device", FAIL, f"torch cannot be imported ({type(error).__name__})", remedy)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Check("device", PASS, f"CUDA {torch.version.cuda}: {names}")
    if Path("/dev/nvidiactl").exists():
        remedy = "Install the CUDA build of torch that fits the driver, or go on with CPU."
        return Check("device", WARN, "a GPU is here but torch cannot use it", remedy)
    return Check("device", PASS, f"CPU, {torch.get_num_threads()} threads")


def check_flower_cli(found: str | None) -> Check:
    if found:
        return Check("flwr command", PASS, "found")
    return Check("flwr command", FAIL, "not found", "Activate the environment in which flwr is installed.")


def check_runtime_installs(environ: Mapping[str, str]) -> Check:
    """Flower may install an app's dependencies when a run starts; an institution wants that off."""
    name = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
    if environ.get(name) == "1":
        return Check("runtime installs", PASS, f"off ({name}=1)")
    remedy = (
        f"Export {name}=1 before the SuperLink starts: a run then installs no packages and starts sooner."
    )
    return Check("runtime installs", WARN, "not switched off", remedy)


def existing_part(folder: Path) -> Path:
    """The folder, or the nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_writable(name: str, folder: Path) -> Check:
    """Can `folder` be written to, or made? Tried with a file that has no name."""
    there = existing_part(folder)
    variable = f"UMBEL_{name.upper()}"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"umbel")
            file.flush()
    except OSError as error:
        remedy = f"Give this user write access, or set {variable} to a folder that has it."
        return Check(f"{name} folder", FAIL, f"{folder} is not writable ({error.strerror})", remedy)
    return Check(
        f"{name} folder", PASS, f"{folder} is writable" if there == folder else f"{folder} can be made"
    )


def check_disk(name: str, free_bytes: int) -> Check:
    """Free space where `name` lies: 5 GB hold a small model and its checkpoints, below 0.5 GB runs break."""
    found = f"{size(free_bytes)} free"
    remedy = f"Free some space, or set UMBEL_{name.upper()} to a larger disk."
    if free_bytes < 0.5 * _GB:
        return Check(f"{name} disk", FAIL, found, remedy)
    return (
        Check(f"{name} disk", WARN, found, remedy)
        if free_bytes < 5 * _GB
        else Check(f"{name} disk", PASS, found)
    )


def check_shared_memory(folder: Path, total_bytes: int | None = None) -> Check:
    """Simulations hand arrays between processes in shared memory; a container gets 64 MB by default."""
    if total_bytes is None:
        if not folder.is_dir():
            return Check("shared memory", PASS, "not used on this system")
        total_bytes = shutil.disk_usage(folder).total
    if total_bytes >= _GB:
        return Check("shared memory", PASS, f"{size(total_bytes)}")
    remedy = "Only simulations need it. In a container: --shm-size=2g, or shm_size: 2g in compose."
    return Check("shared memory", WARN, f"{size(total_bytes)}", remedy)


def check_memory() -> Check:
    import psutil

    free = psutil.virtual_memory().available
    if free >= 2 * _GB:
        return Check("memory", PASS, f"{size(free)} available")
    return Check("memory", WARN, f"{size(free)} available", "Close other programs or choose a smaller model.")


def check_proxies(environ: Mapping[str, str]) -> Check:
    """Which proxy variables are set, never to what; loopback must not go through a proxy."""
    values = {name: environ.get(name) or environ.get(name.lower()) for name in _PROXIES}
    found = ", ".join(f"{name} {'set' if value else 'unset'}" for name, value in values.items())
    exempt = values.pop("NO_PROXY") or ""
    local = exempt.strip() == "*" or "localhost" in exempt or "127.0.0.1" in exempt
    if any(values.values()) and not local:
        remedy = "Add localhost,127.0.0.1 to NO_PROXY: processes of one machine talk over loopback."
        return Check("proxy", WARN, found, remedy)
    return Check("proxy", PASS, found)


def _search_path() -> str:
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
