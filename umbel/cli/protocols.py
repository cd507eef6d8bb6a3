"""Three ways to read a comparison: what a method reaches, what reaching costs, and what a disturbance takes away.

    Quality-under-Budget   the loss of the last state whose bytes so far (up + down) are within the budget
    Cost-to-Target         rounds, target tokens, bytes and seconds until the loss is first at or below the target
    Robustness             loss with the disturbing settings - loss without, same seeds; always the spread over the seeds

A budget of 0 is the smallest total that one of the methods moved; a target of 0 the worst final loss of a method, means
over the seeds. An arm that exchanges nothing (`local`, `centralised`) fits any budget and is not asked what it costs in
bytes. Means and standard deviations are over the seeds; nothing here says that a difference is more than noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from umbel.cli.arms import ARMS
from umbel.telemetry import units
from umbel.telemetry.history import History

Row = dict[str, Any]
DISTURBED = " disturbed"


def curve(history: History, stages: int = 1) -> list[Row]:
    """Return {round, loss, bytes, tokens, seconds} of every state with a held-out loss; all but the loss so far.

    Joint loss of the sites, else the server's. `stages` is how many engine rounds train on the same rows once.
    """
    known = dict(history.heldout_curve()) or dict(history.heldout_curve("server"))
    found, moved, tokens, seconds = [], 0, 0, 0.0
    rounds = {row.round: row for row in history.committed}
    for index in range(max([*known, *rounds], default=-1) + 1):
        if index in rounds:
            row = rounds[index]
            moved += row.bytes_up + row.bytes_down
            tokens += sum(int(row.updates.get(s, {}).get("tokens") or 0) for s in row.accepted)
            seconds += row.total_seconds or 0.0
        if index in known:
            point = {"round": index, "loss": known[index], "bytes": moved}
            found.append({**point, "tokens": tokens // stages, "seconds": seconds})
    return found


def plain_and_disturbed(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Return completed runs that have a curve by method: (undisturbed, disturbed)."""
    found: tuple[dict[str, list[Row]], dict[str, list[Row]]] = ({}, {})
    for row in rows:
        if row.get("outcome") == "completed" and row.get("curve"):
            method = str(row["method"])
            found[method.endswith(DISTURBED)].setdefault(method.removesuffix(DISTURBED), []).append(row)
    return found


def quality(rows: Sequence[Row], budget: float = 0) -> Row:
    """Return {budget_bytes, methods: {name: {loss, spread, seeds, rounds}}}; a method too dear has loss None."""
    runs, _ = plain_and_disturbed(rows)
    totals = [
        statistics.fmean(r["curve"][-1]["bytes"] for r in of) for m, of in runs.items() if m not in ARMS
    ]
    budget = budget or min(totals, default=0)
    found = {}
    for method, of in runs.items():
        free = method in ARMS
        last = [[p for p in r["curve"] if free or p["bytes"] <= budget] for r in of]
        # State 0 costs nothing and is nobody's achievement.
        ends = [points[-1] for points in last if points and points[-1]["round"] > 0]
        whole = len(ends) == len(of)
        found[method] = {
            **_mean_and_spread([p["loss"] for p in ends] if whole else []),
            "rounds": statistics.fmean(p["round"] for p in ends) if whole else None,
        }
    return {"budget_bytes": budget, "methods": found}


def cost(rows: Sequence[Row], target: float = 0) -> Row:
    """Return {target_loss, methods: {name: {reached, runs, rounds, tokens, bytes, seconds}}}, means over who reached."""
    runs, _ = plain_and_disturbed(rows)
    finals = [statistics.fmean(r["curve"][-1]["loss"] for r in of) for m, of in runs.items() if m not in ARMS]
    target = target or max(finals, default=0)
    found = {}
    for method, of in runs.items():
        first = [next((p for p in r["curve"] if p["loss"] <= target), None) for r in of]
        there = [p for p in first if p is not None]
        found[method] = {"reached": len(there), "runs": len(of)} | {
            key.removesuffix("s") + "s": statistics.fmean(p[key] for p in there) if there else None
            for key in ("round", "tokens", "bytes", "seconds")
        }
    return {"target_loss": target, "methods": found}


def robustness(rows: Sequence[Row]) -> Row:
    """Return {methods: {name: {loss, spread, seeds, disturbed_loss, increase, increase_spread, pairs}}}."""
    runs, disturbed = plain_and_disturbed(rows)
    found = {}
    for method, of in runs.items():
        last = {r["seed"]: r["curve"][-1]["loss"] for r in of}
        there = {r["seed"]: r["curve"][-1]["loss"] for r in disturbed.get(method, ())}
        pairs = sorted(set(last) & set(there))
        rise = _mean_and_spread([there[s] - last[s] for s in pairs])
        found[method] = {
            **_mean_and_spread(list(last.values())),
            "disturbed_loss": statistics.fmean(there[s] for s in pairs) if pairs else None,
            "increase": rise["loss"],
            "increase_spread": rise["spread"],
            "pairs": len(pairs),
        }
    return {"methods": found}


def protocols(rows: Sequence[Row], budget: float = 0, target: float = 0) -> Row:
    """Return the three under their names."""
    return {
        "quality_under_budget": quality(rows, budget),
        "cost_to_target": cost(rows, target),
        "robustness": robustness(rows),
    }


def text(found: Row, disturb: Sequence[str] = ()) -> list[str]:
    """Return the three as Markdown tables."""
    q, c, r = found["quality_under_budget"], found["cost_to_target"], found["robustness"]
    lines = [f"Quality under a budget of {units.size(q['budget_bytes'])}, up and down of all sites", ""]
    lines += _table(
        ("method", "held-out loss", "round"),
        [
            [
                m,
                _loss(v["loss"], v["spread"], "dearer than the budget"),
                "-" if v["rounds"] is None else f"{v['rounds']:.1f}",
            ]
            for m, v in q["methods"].items()
        ],
    )
    lines += ["", f"Cost to a held-out loss of {c['target_loss']:.4f}", ""]
    lines += _table(
        ("method", "reached", "rounds", "target tokens", "bytes", "seconds"),
        [
            [m, f"{v['reached']} of {v['runs']}"]
            + (
                [
                    f"{v['rounds']:.1f}",
                    f"{v['tokens']:.0f}",
                    "-" if m in ARMS else units.size(v["bytes"]),
                    f"{v['seconds']:.1f}",
                ]
                if v["reached"]
                else ["-"] * 4
            )
            for m, v in c["methods"].items()
        ],
    )
    what = ", ".join(disturb) or "nothing: no disturbed runs were asked for"
    lines += ["", f"Robustness, disturbed by {what}", ""]
    lines += _table(
        ("method", "seeds", "held-out loss", "disturbed", "increase"),
        [
            [
                m,
                str(v["seeds"]),
                _loss(v["loss"], v["spread"]),
                _loss(v["disturbed_loss"]),
                _loss(v["increase"], v["increase_spread"]),
            ]
            for m, v in r["methods"].items()
        ],
    )
    return lines


def _mean_and_spread(losses: Sequence[float]) -> Row:
    return {
        "loss": statistics.fmean(losses) if losses else None,
        "spread": statistics.stdev(losses) if len(losses) > 1 else None,
        "seeds": len(losses),
    }


def _loss(mean: float | None, spread: float | None = None, none: str = "-") -> str:
    if mean is None:
        return none
    return f"{mean:.4f}" + ("" if spread is None else f" +- {spread:.4f}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]
