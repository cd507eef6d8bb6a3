"""What both ends of a split stream agree on: names, channel options, what loopback is. No gRPC import.

The token travels in the call's metadata, as bytes, under a `-bin` key as gRPC demands for bytes.
"""

from __future__ import annotations

import ipaddress

SERVICE = "umbel.split"
METHOD = "Session"
PATH = f"/{SERVICE}/{METHOD}"
TOKEN_KEY = "umbel-token-bin"
TOKEN_BYTES = 32
# gRPC's own framing and our header around a payload.
MESSAGE_SLACK_BYTES = 4096


def host_of(address: str) -> str:
    """Return the host of host:port, without the brackets of an IPv6 one."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine: 127.0.0.0/8, ::1 or localhost; any other name is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def channel_options(
    keepalive_seconds: float, max_frame_bytes: int, *, server: bool = False, local: bool = False
) -> list[tuple[str, int]]:
    """Return gRPC's channel options: keepalive both ways, size caps, no second server on one port.

    A dead peer is noticed within twice `keepalive_seconds`. `local` leaves HTTP proxies alone.
    """
    milliseconds = max(1, int(1000 * keepalive_seconds))
    options = [
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_frame_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", max_frame_bytes + MESSAGE_SLACK_BYTES),
    ]
    if server:
        options += [
            ("grpc.http2.min_recv_ping_interval_without_data_ms", milliseconds // 2),
            ("grpc.http2.min_ping_interval_without_data_ms", milliseconds // 2),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ]
    else:
        options += [("grpc.enable_retries", 0)]
    if local:
        options += [("grpc.enable_http_proxy", 0)]
    return options
