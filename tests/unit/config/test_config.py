"""Settings: typed, ranged, named in errors, and the same in schema, pyproject and instruction."""

from __future__ import annotations

import math

import pytest

from umbel.config import Config, from_json, from_run_config, resolve, to_flat, to_json, to_toml
from umbel.config.load import parse_override
from umbel.errors import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(None, list(overrides))
    return str(caught.value)


def test_an_unknown_key_names_the_nearest_one() -> None:
    text = message("train.learning-rat=0.1")
    assert "train.learning-rat is not a setting, got 0.1" in text
    assert "Did you mean 'train.learning-rate'?" in text


def test_a_key_without_its_group_is_found() -> None:
    assert "'train.learning-rate'" in message("learning-rate=0.1")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.rounds=0", ["run.rounds", "got 0", "[1, 1e+06]"]),
        ("run.rounds=two", ["run.rounds", "an integer", "'two'", "default is 3"]),
        ("run.rounds=1.5", ["run.rounds", "an integer", "1.5"]),
        ("run.rounds=true", ["run.rounds", "an integer", "True"]),
        ("train.learning-rate=nan", ["train.learning-rate", "finite"]),
        ("train.learning-rate=inf", ["train.learning-rate", "finite"]),
        ("model.dtype=fp8", ["model.dtype", "'fp8'", "'bfloat16'"]),
        ("run.method=fedadagrad2", ["run.method", "'fedavg'"]),
        ("clients.minimum=0", ["clients.minimum", "[1, 100000]"]),
        ("clients.minimum=-1", ["clients.minimum", "-1"]),
    ],
)
def test_h39_wrong_values_name_key_value_and_range(override, parts) -> None:
    """H39: zero or negative minimum is a config error before anything starts."""
    text = message(override)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["clients.quorum=5", "clients.goal=3"], "clients.goal = 3"),
        (
            ["clients.grace-seconds=50", "clients.deadline-seconds=40", "clients.min-deadline-seconds=1"],
            "clients.deadline-seconds = 40",
        ),
        (["data.partition=dirichlet"], "data.label-column"),
        (["train.max-tokens=100", "data.max-length=200"], "data.max-length = 200"),
        (["clients.late=weight", "clients.normalise=fixed"], "clients.normalise"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, part) -> None:
    assert part in message(*overrides)


def test_overrides_parse_as_toml_and_strings_need_no_quotes() -> None:
    assert parse_override("run.rounds=7") == ("run.rounds", 7)
    assert parse_override("model.name=org/name") == ("model.name", "org/name")
    assert parse_override('model.name="a b"') == ("model.name", "a b")
    assert parse_override("model.revision=123") == ("model.revision", "123")
    assert parse_override("data.packing=false") == ("data.packing", False)
    with pytest.raises(ConfigError, match="key=value"):
        parse_override("run.rounds")


def test_an_integer_is_taken_where_a_number_is_wanted() -> None:
    assert resolve(None, ["clients.grace-seconds=3"]).clients.grace_seconds == 3.0


def test_recipe_then_overrides(tmp_path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[run]\nrounds = 5\nname = "x"\n[train]\nlearning-rate = 1\n')
    config = resolve(recipe, ["run.rounds=6"])
    assert (config.run.rounds, config.run.name, config.train.learning_rate) == (6, "x", 1.0)


def test_a_missing_or_broken_recipe_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(tmp_path / "no.toml")
    broken = tmp_path / "b.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="not TOML"):
        resolve(broken)


def test_round_trips() -> None:
    config = resolve(
        None, ["run.rounds=9", 'eval.sample-prompt=say "hi" # not a comment', "data.dirichlet-alpha=0.25"]
    )
    assert from_run_config(to_flat(config)) == config
    back = from_json(to_json(config))
    assert (back.run, back.data, back.train) == (config.run, config.data, config.train)


def test_resolved_toml_reads_back_equal(tmp_path) -> None:
    config = resolve(None, ['eval.sample-prompt=line "one" \\ two # three', "model.name=/a b/c"])
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config))
    assert resolve(path) == config


def test_every_default_is_inside_its_own_range() -> None:
    flat = to_flat(Config())
    assert from_run_config(flat) == Config()
    assert all(not (isinstance(v, float) and math.isnan(v)) for v in flat.values())
