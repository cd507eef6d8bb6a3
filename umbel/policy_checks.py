"""Is this message, or this answer, within the site's policy? Pure functions; each broken rule is one sentence.

They return sentences instead of raising, so that an audit line names every broken rule at once. `umbel.policy` says
what the rules mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from umbel.config import Config, to_flat
from umbel.policy import Bounds, SitePolicy

PUBLIC = ("demo:", "hub:", "stdlib:")
# Flower installs a bundle in a folder that ends with this many digits of its hash: all that an app can know of it.
KNOWN_DIGITS = 8


@dataclass(frozen=True)
class BundleFacts:
    """What is known of the code that came with a message.

    `hash` is the whole hash where the site's own code saw the bundle (`by_site`), else its first 8 digits.
    """

    hash: str
    publisher: str
    by_site: bool


def bundle_problems(policy: SitePolicy, facts: BundleFacts) -> list[str]:
    """Return what speaks against this code, and against who is checking it."""
    problems = []
    if policy.enforced_by == "site" and not facts.by_site:
        problems.append(
            "this policy must be enforced by the site, and here the run's own code is asked to: start the site with "
            "`umbel site start`, or write enforced-by = 'app' knowing that only honest code obeys"
        )
    rules = policy.bundle
    if rules.hashes is not None and not any(_same_hash(h, facts.hash) for h in rules.hashes):
        problems.append(f"bundle {facts.hash[:16] or '(unknown)'} is not among bundle.hashes")
    if rules.publishers is not None and facts.publisher not in rules.publishers:
        problems.append(f"publisher {facts.publisher or '(unknown)'!r} is not among bundle.publishers")
    return problems


def _same_hash(allowed: str, known: str) -> bool:
    return bool(known) and (
        known.startswith(allowed) or (len(known) == KNOWN_DIGITS and allowed.startswith(known))
    )


def run_problems(policy: SitePolicy, config: Config) -> list[str]:
    """Return what speaks against a run's settings."""
    rules, flat = policy.run, to_flat(config)
    problems = [
        f"{key} = {flat[key]!r} is not among run.{name}"
        for name, key, allowed in (
            ("tasks", "run.task", rules.tasks),
            ("modes", "train.mode", rules.modes),
            ("methods", "run.method", rules.methods),
        )
        if allowed is not None and flat[key] not in allowed
    ]
    if rules.models is not None and not any(fnmatchcase(config.model.name, m) for m in rules.models):
        problems.append(f"model.name = {config.model.name!r} is not among run.models")
    if rules.max_rounds and config.run.rounds > rules.max_rounds:
        problems.append(f"run.rounds = {config.run.rounds} is more than run.max-rounds = {rules.max_rounds}")
    return problems + [p for bound in policy.require if (p := _outside(bound, flat[bound.key]))]


def _outside(bound: Bounds, value: Any) -> str:
    if bound.values is not None and value not in bound.values:
        return f"{bound.key} = {value!r} is not one of {list(bound.values)!r}, which the site requires"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    for limit, wrong, word in (
        (bound.low, lambda v, x: v < x, "at least"),
        (bound.high, lambda v, x: v > x, "at most"),
    ):
        if limit is not None and (not number or wrong(value, limit)):
            return f"{bound.key} = {value!r}, the site requires {word} {limit:g}"
    return ""


def round_problems(
    policy: SitePolicy, round_index: int, directives: Mapping[str, Any], spent_seconds: float
) -> list[str]:
    """Return what speaks against one round. `directives.quorum` is the fewest updates the server says it will sum."""
    rules, problems = policy.run, []
    if rules.max_rounds and round_index > rules.max_rounds:
        problems.append(f"round {round_index} is past run.max-rounds = {rules.max_rounds}")
    if rules.max_hours and spent_seconds >= rules.max_hours * 3600:
        problems.append(
            f"{spent_seconds / 3600:.2f} h were spent on this run, run.max-hours = {rules.max_hours:g}"
        )
    if rules.min_sites:
        quorum = directives.get("quorum")
        fewest = quorum if isinstance(quorum, int) and not isinstance(quorum, bool) else 0
        if fewest < rules.min_sites:
            said = f"{fewest} updates" if fewest else "nothing said of how many"
            problems.append(
                f"the round may commit with {said}, run.min-sites = {rules.min_sites} (clients.quorum)"
            )
    return problems


def data_problems(policy: SitePolicy, node_config: Mapping[str, Any], config: Config) -> list[str]:
    """Return what speaks against the rows this site would use; links are followed before paths are compared."""
    rules = policy.data
    source = str(node_config.get("data") or config.data.source)
    if source.startswith(PUBLIC):
        return [] if rules.public else [f"the rows are {source!r} and data.public is false"]
    if rules.paths is None:
        return []
    real = Path(source).expanduser().resolve()
    if any(real.is_relative_to(Path(p).expanduser().resolve()) for p in rules.paths):
        return []
    return [f"the rows lie in {str(real)!r}, outside of data.paths"]


def allowed_metrics(
    policy: SitePolicy, metrics: Mapping[str, Any], needed: tuple[str, ...]
) -> dict[str, Any]:
    """Return the metrics that may leave; `needed` are those the protocol cannot do without."""
    allowed = policy.metrics.allowed
    return {k: v for k, v in metrics.items() if allowed is None or k in allowed or k in needed}
