"""The run in one flat object: what summary.json holds and the tables of runs show."""

from __future__ import annotations

from typing import Any

from umbel.telemetry.history import History


def summarise(history: History) -> dict[str, Any]:
    """Return plain JSON values; a loss is in nats a token, None where it is not known."""
    first, last = history.first_last_heldout()
    exact, train = history.exactness(), history.train_curve()
    outcomes = [row.outcome for row in history.rounds]
    return {
        "run": history.run,
        "method": history.method,
        "model": history.model,
        "task": history.task,
        "outcome": history.outcome,
        "reason": history.reason,
        "exit_code": history.exit_code,
        "num_starts": history.num_starts,
        "rounds_asked": history.num_rounds,
        "rounds_committed": len(history.committed),
        "rounds_skipped": outcomes.count("skip"),
        "rounds_aborted": outcomes.count("abort"),
        "rounds_interrupted": outcomes.count("interrupted"),
        "rounds_undone": outcomes.count("undone"),
        "num_sites": len(history.sites),
        "sites_contributed": sorted(history.contributions()),
        "refusals": len(history.refused),
        "heldout_loss_first": first,
        "heldout_loss_last": last,
        "train_loss_last": train[-1][1] if train else None,
        "tokens": history.tokens(),
        "bytes_up": history.bytes_up(),
        "bytes_down": history.bytes_down(),
        "wire_bytes_up": history.wire_bytes("up"),
        "wire_bytes_down": history.wire_bytes("down"),
        "traffic": history.traffic(),
        "elapsed_seconds": history.elapsed_seconds(),
        "exactness_relative_error": exact[0] if exact else None,
        "privacy_epsilon": history.privacy.get("epsilon"),
        "privacy_delta": history.privacy.get("delta"),
        "state_crc": history.committed[-1].state_crc if history.committed else None,
    }
