"""Which checks a server and a site get, in the order they are shown.

Groups can be asked for alone (`--only profile`): `profile`, `files`, `network`, `machine`, `recipe`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from umbel.doctor import certificates, network, profile, recipe
from umbel.doctor.settings import node_facts
from umbel.telemetry.machine import FAIL, PASS, WARN, Check, check_writable, existing_part, machine_checks

GROUPS = ("profile", "files", "network", "machine", "recipe")
Settings = Mapping[str, str]


def role_checks(
    role: str, settings: Settings, recipe_path: Path | None = None, only: tuple[str, ...] = ()
) -> Iterator[Check]:
    """All checks of a role, or those of the named groups alone."""
    parts: dict[str, Callable[[], Iterator[Check]]] = {
        "profile": lambda: _profile(role, settings),
        "files": lambda: _files(role, settings),
        "network": lambda: _network(role, settings),
        "machine": lambda: _machine(settings),
        "recipe": lambda: _recipe(role, settings, recipe_path),
    }
    for name in GROUPS:
        if not only or name in only:
            yield from parts[name]()


def _profile(role: str, settings: Settings) -> Iterator[Check]:
    yield profile.check_profile(role, settings)
    if role == profile.SERVER:
        yield profile.check_private_control(settings)
    yield from profile.check_switches(settings)


def _files(role: str, settings: Settings) -> Iterator[Check]:
    if settings.get("UMBEL_PROFILE") != profile.SECURE:
        return
    if any(not settings.get(name) for name in profile.NEEDED[role]):
        return
    path = {name: Path(value) for name, value in settings.items()}
    if role == profile.SERVER:
        yield from certificates.server_files(
            path["UMBEL_CA"], path["UMBEL_CERT"], path["UMBEL_KEY"], path["UMBEL_SECRET"]
        )
        database = existing_part(path["UMBEL_DATABASE"].parent)
        found = check_writable("database", database)
        yield found._replace(remedy=found.remedy and "Give the service's user write access to this folder.")
    else:
        yield certificates.check_certificate("authority", path["UMBEL_CA"])
        yield certificates.check_site_key(path["UMBEL_SITE_KEY"])


def _network(role: str, settings: Settings) -> Iterator[Check]:
    if role == profile.SERVER:
        yield from _server_port(settings)
        return
    plain = settings.get("UMBEL_PROFILE") == profile.OPEN
    host, port = profile.split_address(settings.get("UMBEL_SUPERLINK", ""))
    if not port:
        remedy = "Set UMBEL_SUPERLINK=HOST:PORT."
        yield Check("superlink", FAIL, f"{settings.get('UMBEL_SUPERLINK', '')!r} is no HOST:PORT", remedy)
        return
    ca = Path(settings["UMBEL_CA"]) if settings.get("UMBEL_CA") else None
    talks = list(network.server_reached(host, port, ca, plain=plain))
    yield from talks
    trusted = all(check.status != FAIL for check in talks if check.name != "clock")
    if trusted and not plain and ca is not None and settings.get("UMBEL_SITE_KEY"):
        yield check_registered(f"{host}:{port}", ca, Path(settings["UMBEL_SITE_KEY"]))


def _server_port(settings: Settings) -> Iterator[Check]:
    """A server that is not up yet is no fault; one that is up has to show the right certificate."""
    host, port = settings.get("UMBEL_HOST", "127.0.0.1"), int(settings.get("UMBEL_PORT", "8000"))
    dialled = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if network.check_port(dialled, port).status == FAIL:
        yield Check("port", WARN, f"nothing answers on {dialled}:{port}", "Start the SuperLink.")
        return
    yield Check("port", PASS, f"{dialled}:{port} is open")
    if settings.get("UMBEL_PROFILE") == profile.SECURE and settings.get("UMBEL_CA"):
        yield network.check_tls(dialled, port, Path(settings["UMBEL_CA"]))


def check_registered(address: str, ca: Path, key: Path) -> Check:
    """Is this site's key on the server's list? Asked by the site's own room, in a process of its own."""
    command = [sys.executable, "-m", "client_app.resident.probe", address]
    command += ["--ca", str(ca), "--key", str(key)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        words = (done.stdout.strip().splitlines() or ["no answer"])[-1]
    except subprocess.TimeoutExpired:
        words = "no answer in 60 s"
    if words == "registered":
        return Check("registered", PASS, "the server knows this key")
    if words == "unknown":
        remedy = (
            f"Send {key.with_suffix('.pub').name} to the server's operator: flwr supernode register FILE."
        )
        return Check("registered", FAIL, "the server does not know this key", remedy)
    return Check(
        "registered", FAIL, words, "See the checks of TLS and clock; the key is asked for after both."
    )


def _machine(settings: Settings) -> Iterator[Check]:
    yield from machine_checks(settings)


def _recipe(role: str, settings: Settings, path: Path | None) -> Iterator[Check]:
    offline = settings.get("HF_HUB_OFFLINE") == "1"
    if path is not None:
        yield from recipe.recipe_checks(path, offline=offline)
        if role == profile.SITE:
            yield recipe.memory_check(path)
    policy = ""
    if role == profile.SITE:
        facts = node_facts(settings)
        yield recipe.site_data_check(facts.get("data", ""))
        policy = facts.get("policy", "")
    yield recipe.bundle_check(policy)
