"""Is the server there, is it the right one, and do the two clocks agree? Every wait is bounded."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from umbel.telemetry.machine import FAIL, PASS, WARN, Check
from umbel.telemetry.units import duration

SECONDS = 5.0
# Flower refuses a signature that is older than 300 s, or more than 5 s ahead of the server's clock.
ALLOWED_BEHIND, ALLOWED_AHEAD = 300.0, 5.0


def check_dns(host: str) -> Check:
    """Does the server's name lead to an address?"""
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        remedy = "Correct the name, or this machine's resolver (/etc/resolv.conf)."
        return Check("dns", FAIL, f"{host} has no address ({error.strerror})", remedy)
    return Check("dns", PASS, f"{host}: {', '.join(found[:3])}")


def check_port(host: str, port: int) -> Check:
    """Does something answer on the server's port?"""
    try:
        with socket.create_connection((host, port), SECONDS):
            return Check("port", PASS, f"{host}:{port} is open")
    except OSError as error:
        why = error.strerror or type(error).__name__
        remedy = "Is the server up, and does the firewall let HTTPS to this address out?"
        return Check("port", FAIL, f"{host}:{port} does not answer ({why})", remedy)


def check_tls(host: str, port: int, ca: Path | None) -> Check:
    """Does the server show a certificate that this authority signed for this name, and which holds?"""
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca else None)
        raw = socket.create_connection((host, port), SECONDS)
        with raw, context.wrap_socket(raw, server_hostname=host) as talk:
            shown = talk.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return Check("tls", FAIL, f"{host}:{port}: {error.verify_message}", _tls_remedy(error.verify_code))
    except ssl.SSLError as error:
        why = error.reason or str(error)
        return Check("tls", FAIL, f"{host}:{port} does not talk TLS ({why})", "Is this the secure server?")
    except OSError as error:
        return Check("tls", FAIL, f"no TLS with {host}:{port} ({error})", "See the check before this one.")
    end = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    left = end - time.time()
    until = f"{datetime.datetime.fromtimestamp(end, datetime.UTC):%Y-%m-%d}"
    if left < 30 * 86400:
        return Check("tls", WARN, f"certificate expires on {until}", "Tell the server's operator.")
    return Check("tls", PASS, f"certificate until {until}")


def _tls_remedy(code: int) -> str:
    """Say what to do about one of OpenSSL's verification errors."""
    if code in (10, 9):
        return "The server's certificate has to be renewed (or this machine's clock is wrong): certs.py server --renew."
    if code in (18, 19, 20, 21, 7, 30):
        return "Another authority signed it: get ca.crt of this federation, and do not go on without it."
    return "The certificate has to name the host that sites dial: certs.py server DIR --host NAME --renew."


def server_date(host: str, port: int, ca: Path | None, *, plain: bool = False) -> float:
    """Return the server's clock from the Date header of any answer, in seconds since 1970; raises OSError, ValueError."""
    if plain:
        talk = http.client.HTTPConnection(host, port, timeout=SECONDS)
    else:
        # The clock is asked for even of a server that is not trusted: nothing is sent, and TLS is a check of its own.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        talk = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
    try:
        talk.request("GET", "/health")
        date = talk.getresponse().getheader("Date")
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP answer ({type(error).__name__})") from None
    finally:
        talk.close()
    if not date:
        raise ValueError("the answer has no Date")
    return email.utils.parsedate_to_datetime(date).timestamp()


def check_clock(
    host: str,
    port: int,
    ca: Path | None,
    *,
    plain: bool = False,
    now: Callable[[], float] = time.time,
) -> Check:
    """Is this clock within the window in which the server takes a signature?"""
    try:
        ahead = now() - server_date(host, port, ca, plain=plain)
    except (OSError, ValueError) as error:
        return Check("clock", WARN, f"the server's time is not known ({error})", "See the checks before.")
    # The header counts whole seconds, so a second of difference says nothing.
    ahead = 0.0 if abs(ahead) <= 1.5 else ahead
    words = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the server"
    remedy = (
        "Set the clocks by NTP (timedatectl set-ntp true): the server refuses signatures outside the window."
    )
    if ahead > ALLOWED_AHEAD or -ahead > ALLOWED_BEHIND:
        return Check("clock", FAIL, f"{words}; allowed: 300 s behind, 5 s ahead", remedy)
    if -ahead > 30:
        return Check("clock", WARN, words, remedy)
    return Check("clock", PASS, words if ahead else "agrees with the server's")


def server_reached(host: str, port: int, ca: Path | None, *, plain: bool) -> Iterator[Check]:
    """Name, port, TLS and clock, as far as each makes sense after the one before."""
    yield check_dns(host)
    reached = check_port(host, port)
    yield reached
    if reached.status == FAIL:
        return
    if not plain:
        yield check_tls(host, port, ca)
    yield check_clock(host, port, ca, plain=plain)
