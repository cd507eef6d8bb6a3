"""The two ways to run a federation, and nothing between them.

    open      no TLS, no keys: on loopback only, whoever reaches the port can run code on every site
    secure    TLS, site keys, process isolation with a secret, nothing installed at run time

A SuperLink has one port for sites, submitters and its own processes: from outside only the path of the Fleet API may
be reachable (`deploy/proxy`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from umbel.telemetry.machine import FAIL, PASS, WARN, Check

SERVER, SITE = "server", "site"
OPEN, SECURE = "open", "secure"
NEEDED = {
    SERVER: ("UMBEL_CA", "UMBEL_CERT", "UMBEL_KEY", "UMBEL_SECRET", "UMBEL_DATABASE"),
    SITE: ("UMBEL_CA", "UMBEL_SITE_KEY"),
}
# What an institution wants off or on, and why.
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": ("0", "Flower's own telemetry would leave this network"),
    "FLWR_DISABLE_UPDATE_CHECK": ("1", "Flower would ask for updates at each start"),
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": ("1", "a run could install packages"),
}
Settings = Mapping[str, str]


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT; port 0 where there is none."""
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return text.strip(), 0
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; a name other than localhost counts as outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_profile(role: str, settings: Settings) -> Check:
    """Which profile, whether all its files are named, and that the open one does not leave loopback."""
    name = settings.get("UMBEL_PROFILE", "")
    if name not in (OPEN, SECURE):
        remedy = f"Set UMBEL_PROFILE={OPEN} or {SECURE}; start from a file of deploy/profiles."
        return Check("profile", FAIL, f"{name!r} is no profile" if name else "none is set", remedy)
    if name == OPEN:
        where = settings.get("UMBEL_HOST", "127.0.0.1")
        if role == SITE:
            where = split_address(settings.get("UMBEL_SUPERLINK", ""))[0]
        if not is_loopback(where):
            remedy = "The open profile has no TLS and no keys: use UMBEL_PROFILE=secure (docs/deployment.md)."
            return Check("profile", FAIL, f"open on {where or 'no address'}, which is not loopback", remedy)
        return Check("profile", PASS, "open, on loopback only")
    missing = [key for key in NEEDED[role] if not settings.get(key)]
    if missing:
        remedy = "Name the files; deploy/certs/certs.py makes them."
        return Check("profile", FAIL, "secure, without " + ", ".join(missing), remedy)
    return Check("profile", PASS, "secure")


def check_private_control(settings: Settings) -> Check:
    """Only the proxy is seen from outside: the SuperLink's port holds the Control and Runtime APIs too."""
    host = settings.get("UMBEL_HOST", "127.0.0.1")
    if is_loopback(host):
        return Check("control api", PASS, f"on {host}")
    if settings.get("UMBEL_PROFILE") == OPEN:
        return Check("control api", FAIL, f"on {host}, open to everybody", "Set UMBEL_HOST=127.0.0.1.")
    remedy = "Set UMBEL_HOST=127.0.0.1 and put deploy/proxy before it, which passes the Fleet API alone."
    return Check("control api", WARN, f"on {host}, with the Fleet API", remedy)


def check_switches(settings: Settings) -> Iterator[Check]:
    """What Flower would do by itself. Under the open profile it is a remark, under the secure one a fault."""
    status = FAIL if settings.get("UMBEL_PROFILE") == SECURE else WARN
    for name, (wanted, why) in SWITCHES.items():
        if settings.get(name) == wanted:
            yield Check(name, PASS, wanted)
        else:
            yield Check(
                name, status, f"not {wanted}: {why}", f"Set {name}={wanted} in the service's settings."
            )
