"""`umbel inspect`: what has left this site, exactly; what its policy decided; which bundle is installed here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from umbel.cli.bundle import make_bundle
from umbel.cli.flower import FlowerError, flower_env, tool


def inspect(arguments: list[str]) -> int:
    """Run the site's own reader in a process of its own; the command line knows nothing of a site's files."""
    return subprocess.call([sys.executable, "-m", "client_app.inspect", *arguments])


def bundle_hash(app: Path | None = None) -> str:
    """Return the hash of an app's bundle; without one, of what `umbel run --federation` submits from here."""
    with tempfile.TemporaryDirectory() as scratch:
        app = app or make_bundle(Path(scratch) / "umbel")
        done = subprocess.run(
            [tool("flwr"), "build", "--app", str(app)],
            env=flower_env(Path(scratch) / "flwr"),
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        files = sorted(Path(scratch).glob("*.fab"))
        if not files:
            raise FlowerError(f"`flwr build` made no bundle: {(done.stderr or done.stdout).strip()[-400:]}")
        return hashlib.sha256(files[0].read_bytes()).hexdigest()
