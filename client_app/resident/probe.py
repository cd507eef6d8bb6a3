"""Is a site's key on the server's list? Asked without coming online.

    python -m client_app.resident.probe HOST:PORT --ca ca.crt --key st-mary.key

prints `registered`, `unknown` or what else was answered. The question is an activation with a heartbeat interval that
the server must refuse: it looks for the key first and at the interval then, so the two refusals tell the two cases
apart and no state changes either way.
"""

from __future__ import annotations

import argparse
import ssl
from base64 import b64encode
from pathlib import Path
from typing import Any

# Flower's error codes: the interval was refused, the key was.
INTERVAL_REFUSED, KEY_REFUSED = "2003", "2004"
SECONDS = 5.0


def signed_headers(key: Any, public: bytes) -> dict[str, str]:
    """Return the headers of a request signed now."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import sign_message

    stamp = now().isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
        "Content-Type": "application/protobuf",
        "Accept": "application/protobuf",
    }


def ask(address: str, ca: Path, key_file: Path) -> str:
    """Return `registered`, `unknown`, or the server's answer in short; raises OSError, ValueError, httpx errors."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: Any = load_ssh_private_key(key_file.read_bytes(), None)
    public = public_key_to_bytes(key.public_key())
    body = ActivateNodeRequest(public_key=public, heartbeat_interval=-1.0).SerializeToString()
    answer = httpx.post(
        f"https://{address}/v1/fleet/activate-node",
        content=body,
        headers=signed_headers(key, public),
        verify=ssl.create_default_context(cafile=str(ca)),
        timeout=SECONDS,
    )
    if INTERVAL_REFUSED in answer.text:
        return "registered"
    if KEY_REFUSED in answer.text:
        return "unknown"
    return f"HTTP {answer.status_code}: {answer.text[:80]}"


def main() -> None:
    """Ask once and print the answer; exit code 0 for `registered`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    given = parser.parse_args()
    try:
        answer = ask(given.address, given.ca, given.key)
    except Exception as error:
        answer = f"no answer ({type(error).__name__}: {str(error)[:80]})"
    print(answer)
    raise SystemExit(answer != "registered")


if __name__ == "__main__":
    main()
