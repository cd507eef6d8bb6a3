"""Is the code on the disk the code of the bundle? Compared before it is run.

Flower installs a bundle in a folder named by the first 8 digits of its hash, and takes a folder of that name as it is
when there is one: neither a change on the disk nor another bundle with the same 8 digits would be noticed.
"""

from __future__ import annotations

import hashlib
import io
import tomllib
import zipfile
from pathlib import Path

from umbel.policy_checks import BundleFacts


def check_installed(folder: Path, content: bytes, digest: str) -> None:
    """Raise PermissionError when `folder` does not hold exactly the files of the bundle `content`."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise PermissionError("the bundle's bytes are not those its hash names")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        wanted = {
            name: archive.read(name)
            for name in archive.namelist()
            if not name.endswith("/") and not name.startswith(".info/")
        }
    found = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    for name in sorted({*wanted, *found}):
        if name not in found or name not in wanted or found[name].read_bytes() != wanted[name]:
            raise PermissionError(
                f"the installed bundle {digest[:12]} differs from what was sent, in {name}; remove {folder}"
            )


def facts_of(digest: str, folder: Path) -> BundleFacts:
    """Return what the site's own code knows of an installed bundle; `publisher` is the bundle's own word."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        publisher = str(table["tool"]["flwr"]["app"]["publisher"])
    except (OSError, KeyError, TypeError, ValueError):
        publisher = ""
    return BundleFacts(digest, publisher, True)
