"""The report opens from disk in a real browser, asks nothing of any network, and a picture of it is kept.

The picture is `build/artifacts/report.png` (or in $UMBEL_ARTIFACTS): look at it after a change of the page.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.runs import full_run

from umbel.telemetry.history import History
from umbel.telemetry.report import render_report

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
QUIET = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
]
QUIET += [
    "--disable-features=NetworkTimeServiceQuerying,OptimizationHints,MediaRouter",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-extensions",
]
# What a browser asks by itself, whatever the page.
OWN = {
    "clients2.google.com",
    "accounts.google.com",
    "update.googleapis.com",
    "mtalk.google.com",
    "www.google.com",
}
OWN |= {
    "android.clients.google.com",
    "optimizationguide-pa.googleapis.com",
    "content-autofill.googleapis.com",
}

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")


def look_at(page: Path, folder: Path, *more: str) -> list[str]:
    """Open a page and return the addresses that the browser's own network log says were asked for."""
    log = folder / "net.json"
    command = [str(BROWSER), *QUIET, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", *more]
    subprocess.run([*command, page.as_uri()], capture_output=True, timeout=120, check=True)
    text = log.read_text()
    found = json.loads(text if text.rstrip().endswith("}") else text.rstrip().rstrip(",") + "]}")
    params = (event.get("params") or {} for event in found["events"])
    urls = {str(p["url"]) for p in params if "url" in p}
    return sorted(url for url in urls if url.startswith(("http", "ws")) and urlsplit(url).hostname not in OWN)


def png_size(path: Path) -> tuple[int, int]:
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_the_report_asks_for_nothing_and_is_photographed(tmp_path) -> None:
    history = History.from_events(full_run())
    rows = [
        {"site": site, "steps": 10 * rounds, "signed": rounds, "loss_change": 0.01 * i}
        for i, (site, (rounds, _)) in enumerate(sorted(history.contributions().items()))
    ]
    page = tmp_path / "report.html"
    page.write_text(render_report(history, name="notes", ledger=rows, config='[run]\nmethod = "carry"\n'))
    folder = Path(os.environ.get("UMBEL_ARTIFACTS") or ROOT / "build" / "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "report.png"
    picture.unlink(missing_ok=True)
    asked = look_at(page, tmp_path, "--window-size=1040,5600", f"--screenshot={picture}")
    assert asked == []
    assert png_size(picture) == (1040, 5600)
    # A page that failed to draw is nearly empty.
    assert picture.stat().st_size > 150_000


def test_a_page_that_asks_is_noticed(tmp_path) -> None:
    """The log names what the report must not do: else the test above could not fail."""
    hits: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = tmp_path / "page.html"
    page.write_text(f'<img src="http://127.0.0.1:{server.server_port}/x.png">')
    asked = look_at(page, tmp_path, f"--screenshot={tmp_path / 'x.png'}")
    server.shutdown()
    assert "/x.png" in hits
    assert f"http://127.0.0.1:{server.server_port}/x.png" in asked


def test_closed_parts_are_open_on_paper(tmp_path) -> None:
    """Printed, the tables behind the charts stand there too: the PDF holds the pages of all of them."""
    rows = full_run(rounds=60)
    page = tmp_path / "report.html"
    page.write_text(render_report(History.from_events(rows)))
    look_at(page, tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", "--no-pdf-header-footer")
    pages = (tmp_path / "report.pdf").read_bytes().count(b"/Type /Page\n")
    # Five tables of 60 rows alone are more than six pages.
    assert pages >= 10
