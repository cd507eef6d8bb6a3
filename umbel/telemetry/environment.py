"""What a run ran on: versions and hardware, and nothing that names a person, a machine or a path.

The run folder is meant to be handed on, so there is no host name, user name, address, environment variable or
path in it. Hardware is named as the vendor names it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("umbel", "flwr", "torch", "transformers", "peft", "numpy", "safetensors", "datasets", "numba")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Return the installed version of each package, None where it is not installed; imports none of them."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def describe_environment() -> dict[str, Any]:
    """Return {python, packages, platform, num_cpus, memory_bytes, gpus}; imports torch for the GPU names."""
    return {
        "python": platform.python_version(),
        "packages": versions(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpu_names(),
    }


def gpu_names() -> list[str]:
    """Return the names of the CUDA devices torch sees; empty without torch or without a GPU."""
    try:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception:
        return []


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
