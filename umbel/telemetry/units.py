"""Numbers as people read them. None is a dash; sizes are decimal (1 MB = 1e6 bytes), as on a network bill."""

from __future__ import annotations

from datetime import UTC, datetime

DASH = "-"


def size(num_bytes: float | None) -> str:
    """1_234_567 -> '1.2 MB'."""
    if num_bytes is None:
        return DASH
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.95 or unit == "TB":
            break
        value /= 1000.0
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """0.82 -> '0.8s', 75 -> '1m15s', 4000 -> '1h06m'."""
    if seconds is None:
        return DASH
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def loss(value: float | None) -> str:
    """A loss with three decimals; a large or tiny one in exponent form."""
    if value is None:
        return DASH
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def change(value: float | None, before: float | None) -> str:
    """The signed difference to an earlier value, '' when one of them is not known."""
    return "" if value is None or before is None else f"{value - before:+.3f}"


def count(value: float | None) -> str:
    """1234567 -> '1,234,567'."""
    return DASH if value is None else f"{value:,.0f}"


def moment(unix_seconds: float | None) -> str:
    """1764556800.0 -> '2025-12-01 02:40 UTC'."""
    if unix_seconds is None:
        return DASH
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return DASH


def one_line(text: str) -> str:
    """Text of others without line breaks or terminal control codes, for a console."""
    return "".join(c if c.isprintable() else " " for c in text)
