"""`umbel doctor --role`: a good set-up passes, and each planted fault is named, by that check and no other.

The good server is a real SuperLink started from the shipped unit; the servers with a wrong clock and with an expired
certificate are small TLS servers, for the doctor sees no more of any server than a handshake and a Date.
"""

from __future__ import annotations

import email.utils
import http.server
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.deployed import Deployment

from umbel.cli.flower import free_port

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(240)]


class Shifted(http.server.BaseHTTPRequestHandler):
    """Answers every GET with a Date that is off by the server's `shift` seconds."""

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", email.utils.formatdate(time.time() + self.server.shift, usegmt=True))  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Quiet(http.server.ThreadingHTTPServer):
    """A TLS server in a thread; clients that refuse its certificate are no error of the test's."""

    def __init__(self, certs: Path, shift: float) -> None:
        super().__init__(("127.0.0.1", 0), Shifted)
        self.shift = shift
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "server.crt", certs / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Iterator[tuple[Deployment, Path, Path]]:
    """A server that runs, a site that is registered, a recipe with a model that is here."""
    folder: Path = tmp_path_factory.mktemp("doctor")
    rows = folder / "rows.jsonl"
    rows.write_text('{"question": "a?", "answer": "b"}\n' * 3)
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[model]\nname = "builtin:tiny-llama"\n[data]\nsource = "{rows}"\n')
    with Deployment(folder) as d:
        site = d.site("st-mary", f'data="{rows}"')
        d.register("st-mary")
        yield d, site, recipe


def changed(site: Path, folder: Path, **values: str) -> Path:
    """Return a copy of a settings file with some lines set anew."""
    lines = [x for x in site.read_text().splitlines() if x.split("=")[0] not in values]
    copy = folder / "site.env"
    copy.write_text("\n".join([*lines, *(f"{k}={v}" for k, v in values.items())]) + "\n")
    return copy


def failed(found: dict[str, Any]) -> set[str]:
    return {name for name, check in found.items() if check["status"] == "FAIL"}


def test_a_good_site_and_a_good_server_pass(good) -> None:
    d, site, recipe = good
    code, found = d.doctor(str(recipe), "--role", "site", "--settings", str(site))
    assert (code, failed(found)) == (0, set()), found
    assert {"profile", "site key", "registered", "clock", "model", "recipe memory", "bundle"} <= set(found)
    assert "3 rows" in found["site data"]["found"]
    server = str(d.etc / "server.env")
    code, found = d.doctor("--role", "server", "--settings", server, "--only", "files", "--only", "profile")
    assert (code, {c["status"] for c in found.values()}) == (0, {"PASS"}), found


def test_the_doctor_s_commands_of_the_deployment_page_run(good) -> None:
    """H40: with the settings of this test's server and site where the page has those of a real machine."""
    d, site, _ = good
    page = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text("utf-8")
    lines = [x.split() for x in page.splitlines() if x.startswith("umbel doctor --role")]
    assert [words[3] for words in lines] == ["server", "site"]
    for words in lines:
        assert (Path(d.placed(words[-1]))) in (d.etc / "server.env", site)
        _, found = d.doctor(*words[2:-1], d.placed(words[-1]), "--only", "files", "--only", "network")
        assert failed(found) == set(), found


def test_an_expired_certificate_is_named(good, tmp_path) -> None:
    d, site, _ = good
    d.make("ca", folder=tmp_path)
    d.make("server", "--host", "localhost", "--days", "-1", folder=tmp_path)
    server = Quiet(tmp_path, 0.0)
    ca, address = str(tmp_path / "ca.crt"), f"127.0.0.1:{server.server_port}"
    broken = changed(site, tmp_path, UMBEL_SUPERLINK=address, UMBEL_CA=ca)
    began = time.monotonic()
    code, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "network")
    server.shutdown()
    assert (code, failed(found)) == (1, {"tls"}), found
    assert "expired" in found["tls"]["found"]
    assert "--renew" in found["tls"]["remedy"]
    assert time.monotonic() - began < 15


def test_the_server_s_own_expired_certificate_is_named_before_it_starts(good, tmp_path) -> None:
    d, _, _ = good
    d.make("ca", folder=tmp_path)
    d.make("server", "--host", "localhost", "--days", "-1", folder=tmp_path)
    names = {"UMBEL_CA": "ca.crt", "UMBEL_CERT": "server.crt", "UMBEL_KEY": "server.key"}
    broken = changed(d.etc / "server.env", tmp_path, **{k: str(tmp_path / v) for k, v in names.items()})
    code, found = d.doctor("--role", "server", "--settings", str(broken), "--only", "files")
    assert (code, failed(found)) == (1, {"certificate"}), found
    assert "expired" in found["certificate"]["found"]


def test_a_wrong_authority_is_named(good, tmp_path) -> None:
    d, site, _ = good
    d.make("ca", folder=tmp_path)
    broken = changed(site, tmp_path, UMBEL_CA=str(tmp_path / "ca.crt"))
    code, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "network")
    assert (code, failed(found)) == (1, {"tls"}), found
    assert "authority" in found["tls"]["remedy"]


@pytest.mark.parametrize(
    ("shift", "status"), [(-60.0, "FAIL"), (1200.0, "FAIL"), (200.0, "WARN"), (0.0, "PASS")]
)
def test_a_clock_outside_the_window_is_named(good, tmp_path, shift, status) -> None:
    """Allowed: 5 s ahead of the server, 300 s behind it."""
    d, site, _ = good
    server = Quiet(d.certs, shift)
    # The open profile asks for no key: only the clock is looked at.
    broken = changed(site, tmp_path, UMBEL_SUPERLINK=f"127.0.0.1:{server.server_port}", UMBEL_SITE_KEY="")
    _, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "network")
    server.shutdown()
    assert found["clock"]["status"] == status, found
    assert found["tls"]["status"] == "PASS"


def test_a_cache_that_cannot_be_written_is_named(good, tmp_path) -> None:
    """Root may write anywhere but below a file."""
    d, site, _ = good
    (tmp_path / "file").write_text("")
    broken = changed(site, tmp_path, UMBEL_CACHE=str(tmp_path / "file" / "cache"))
    code, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "machine")
    assert (code, failed(found)) == (1, {"cache folder"}), found


def test_a_model_that_is_missing_is_named(good, tmp_path) -> None:
    d, site, recipe = good
    absent = tmp_path / "recipe.toml"
    absent.write_text(recipe.read_text().replace("builtin:tiny-llama", str(tmp_path / "model")))
    code, found = d.doctor(str(absent), "--role", "site", "--settings", str(site), "--only", "recipe")
    assert (code, failed(found)) == (1, {"model"}), found
    hub = tmp_path / "hub.toml"
    hub.write_text(recipe.read_text().replace("builtin:tiny-llama", "example/not-in-the-cache"))
    code, found = d.doctor(str(hub), "--role", "site", "--settings", str(site), "--only", "recipe")
    assert (code, failed(found)) == (1, {"model"}), found


def test_a_closed_port_is_named(good, tmp_path) -> None:
    d, site, _ = good
    broken = changed(site, tmp_path, UMBEL_SUPERLINK=f"127.0.0.1:{free_port()}")
    code, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "network")
    assert (code, failed(found)) == (1, {"port"}), found


def test_a_key_that_others_can_read_and_rows_that_are_missing_are_named(good, tmp_path) -> None:
    d, site, _ = good
    key = tmp_path / "st-mary.key"
    key.write_bytes((d.certs / "sites" / "st-mary.key").read_bytes())
    key.chmod(0o644)
    facts = f'\'name="st-mary" data="{tmp_path / "none.jsonl"}"\''
    broken = changed(site, tmp_path, UMBEL_SITE_KEY=str(key), UMBEL_NODE_CONFIG=facts)
    code, found = d.doctor("--role", "site", "--settings", str(broken), "--only", "files", "--only", "recipe")
    assert (code, failed(found)) == (1, {"site key", "site data"}), found


@pytest.mark.parametrize(
    ("role", "values"),
    [("server", {"UMBEL_HOST": "0.0.0.0"}), ("site", {"UMBEL_SUPERLINK": "flower.example.org:8000"})],
)
def test_the_open_profile_off_loopback_is_refused(good, tmp_path, role, values) -> None:
    d, _, _ = good
    shipped = Path(__file__).resolve().parents[2] / "deploy" / "profiles" / f"open-{role}.env"
    good_code, _ = d.doctor("--role", role, "--settings", str(shipped), "--only", "profile")
    broken = changed(shipped, tmp_path, **values)
    code, found = d.doctor("--role", role, "--settings", str(broken), "--only", "profile")
    assert (good_code, code) == (0, 1)
    assert "profile" in failed(found)
    assert "not loopback" in found["profile"]["found"]
