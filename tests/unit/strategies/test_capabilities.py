"""Flags of the rules, and the refusal of what a rule cannot do (T10)."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from strategies.aggregation import rules
from strategies.aggregation.rules.capabilities import Capabilities, Needs, check
from umbel.errors import ConfigError

# rule: mixed ranks, secure sums, DP-linear, base moves, 4-bit safe, DoRA, exact
TABLE = {
    "fedit": (0, 1, 0, 0, 1, "average", 0),
    "ffa": (0, 1, 1, 0, 1, "refuse", 1),
    "rolora": (0, 1, 1, 0, 1, "phases", 1),
    "fedsa": (0, 1, 0, 0, 1, "refuse", 0),
    "flora": (1, 0, 0, 1, 0, "refuse", 1),
    "flexlora": (1, 0, 0, 0, 1, "refuse", 0),
    "fedex": (0, 0, 0, 1, 0, "refuse", 1),
    "carry": (1, 0, 0, 0, 1, "refuse", 1),
    "hetlora": (1, 0, 0, 0, 1, "refuse", 0),
    "raflora": (1, 0, 0, 0, 1, "refuse", 0),
    "fedplora": (1, 1, 0, 0, 1, "refuse", 0),
    "fedsb": (1, 1, 1, 0, 1, "refuse", 1),
    "fedask": (1, 1, 1, 0, 1, "refuse", 1),
    "ravan": (1, 1, 1, 0, 1, "refuse", 1),
    "ecolora": (0, 1, 0, 0, 1, "refuse", 0),
}


def of(rule: str) -> Capabilities:
    return importlib.import_module(f"strategies.aggregation.rules.{rule}").CAPABILITIES


@pytest.mark.parametrize("rule", TABLE)
def test_flags_are_those_of_the_table(rule):
    can = of(rule)
    got = (
        can.heterogeneous_rank,
        can.secure_sums,
        can.dp_linear,
        can.moves_base,
        can.safe_4bit,
        can.dora,
        can.exact,
    )
    assert got == TABLE[rule]
    assert can.joiner_needs


def test_every_rule_file_is_in_the_table():
    files = {m.name for m in pkgutil.iter_modules(rules.__path__)} - {"common", "capabilities", "sums"}
    assert files == set(TABLE)


@pytest.mark.parametrize("rule", ["flora", "fedex"])
@pytest.mark.parametrize("need", ["quantised_base", "fixed_reference"])
def test_rules_that_move_the_base_are_refused_and_carry_is_named_t10_d14(rule, need):
    with pytest.raises(ConfigError, match=rf"{rule}.*{need}.*carry"):
        check(rule, of(rule), Needs(**{need: True}))
    check("carry", of("carry"), Needs(quantised_base=True, fixed_reference=True))


@pytest.mark.parametrize(
    ("rule", "need"),
    [
        ("fedit", "heterogeneous_rank"),
        ("carry", "secure_sums"),
        ("fedit", "dp_linear"),
        ("flexlora", "stale_updates"),
        ("rolora", "stale_updates"),
        ("carry", "dora"),
    ],
)
def test_an_unmet_need_names_rule_key_and_alternative(rule, need):
    with pytest.raises(ConfigError, match=rf"{rule}.*{need}.*Use "):
        check(rule, of(rule), Needs(**{need: True}))


def test_no_need_is_no_refusal():
    for rule in TABLE:
        check(rule, of(rule), Needs())
