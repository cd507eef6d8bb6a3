"""The site's policy: what is written, what it allows, and that an unreadable one allows nothing."""

from __future__ import annotations

import pytest

from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.policy import SitePolicy, parse_policy, policy_path, read_policy
from umbel.policy_checks import (
    BundleFacts,
    allowed_metrics,
    bundle_problems,
    data_problems,
    round_problems,
    run_problems,
)

HASH = "ab" * 32
BY_SITE = BundleFacts(HASH, "umbel", True)


def test_an_empty_policy_allows_what_the_sites_own_code_checks() -> None:
    policy = parse_policy({})
    assert policy == SitePolicy()
    config = resolve(None, [])
    assert bundle_problems(policy, BY_SITE) == run_problems(policy, config) == []
    assert round_problems(policy, 10_000, {}, 1e9) == data_problems(policy, {"data": "/x"}, config) == []
    assert allowed_metrics(policy, {"a": 1}, ()) == {"a": 1}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"buندle": {}}, "policy buندle"),
        ({"run": {"max-round": 3}}, "policy run.max-round"),
        ({"run": {"max-rounds": True}}, "policy run.max-rounds"),
        ({"run": {"max-rounds": -1}}, "policy run.max-rounds"),
        ({"run": {"max-hours": "2"}}, "policy run.max-hours"),
        ({"run": {"tasks": "sft"}}, "policy run.tasks"),
        ({"data": {"public": 1}}, "policy data.public"),
        ({"update": {"on-excess": "drop"}}, "policy update.on-excess"),
        ({"enforced-by": "me"}, "policy enforced-by"),
        ({"bundle": {"hashes": ["AB" * 32]}}, "bundle.hashes"),
        ({"bundle": {"hashes": ["abcdef12"]}}, "bundle.hashes"),
        ({"bundle": ["x"]}, "policy bundle"),
        ({"require": {"train.clip": {"max": 1}}}, "train.clip"),
        ({"require": {"clients.quorum": {"min": 3}}}, "policy require.clients.quorum"),
        ({"require": {"train.clip-norm": {"most": 1}}}, "policy require.train.clip-norm.most"),
        ({"require": {"train.clip-norm": {"max": "1"}}}, "policy require.train.clip-norm.max"),
    ],
)
def test_every_wrong_entry_is_named(table, named) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(table)
    assert caught.value.key == named


def test_the_file_is_named_by_the_node_config_or_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("UMBEL_SITE_POLICY", raising=False)
    assert policy_path({}) is None
    monkeypatch.setenv("UMBEL_SITE_POLICY", "/etc/umbel/policy.toml")
    assert str(policy_path({})) == "/etc/umbel/policy.toml"
    assert str(policy_path({"policy": "/srv/p.toml"})) == "/srv/p.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("run = {")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_policy(bad)
    bad.write_text('[run]\ntasks = ["sft"]\nmax-hours = 2\n')
    assert read_policy(bad).run.tasks == ("sft",)
    assert read_policy(bad).run.max_hours == 2.0


@pytest.mark.parametrize(
    ("allowed", "known", "fits"),
    [
        (HASH, HASH, True),
        (HASH[:16], HASH, True),
        (HASH, HASH[:8], True),
        ("cd" * 32, HASH, False),
        ("cd" * 32, HASH[:8], False),
        (HASH, "", False),
        ("ab" * 8 + "00" * 24, HASH, False),
    ],
)
def test_a_bundle_is_compared_by_all_that_is_known_of_its_hash(allowed, known, fits) -> None:
    policy = parse_policy({"enforced-by": "app", "bundle": {"hashes": [allowed]}})
    assert (bundle_problems(policy, BundleFacts(known, "umbel", False)) == []) is fits


def test_code_that_checks_itself_is_refused_unless_the_site_wants_that() -> None:
    itself = BundleFacts(HASH[:8], "umbel", False)
    (problem,) = bundle_problems(parse_policy({}), itself)
    assert "umbel site start" in problem
    assert bundle_problems(parse_policy({"enforced-by": "app"}), itself) == []
    (problem,) = bundle_problems(parse_policy({"bundle": {"publishers": ["clinic"]}}), BY_SITE)
    assert problem == "publisher 'umbel' is not among bundle.publishers"


def test_run_rules_name_the_setting_the_value_and_the_rule() -> None:
    policy = parse_policy(
        {
            "run": {
                "tasks": ["pretrain"],
                "modes": ["full"],
                "methods": ["carry"],
                "models": ["/m/*"],
                "max-rounds": 2,
            },
            "require": {
                "train.clip-norm": {"min": 0.1, "max": 0.5},
                "train.learning-rate": {"max": 1e-4},
                "model.dtype": {"values": ["bfloat16"]},
                "data.limit": {"min": 1},
            },
        }
    )
    found = run_problems(policy, resolve(None, ["run.rounds=3"]))
    assert found == [
        "run.task = 'sft' is not among run.tasks",
        "train.mode = 'lora' is not among run.modes",
        "run.method = 'fedavg' is not among run.methods",
        "model.name = 'builtin:tiny-llama' is not among run.models",
        "run.rounds = 3 is more than run.max-rounds = 2",
        "train.clip-norm = 1.0, the site requires at most 0.5",
        "train.learning-rate = 0.0003, the site requires at most 0.0001",
        "model.dtype = 'float32' is not one of ['bfloat16'], which the site requires",
        "data.limit = 0, the site requires at least 1",
    ]
    good = ["run.task=sft", "train.clip-norm=0.5"]
    policy = parse_policy(
        {"run": {"models": ["builtin:*"], "max-rounds": 3}, "require": {"train.clip-norm": {"max": 0.5}}}
    )
    assert run_problems(policy, resolve(None, good)) == []


def test_round_rules_at_their_edges() -> None:
    policy = parse_policy({"run": {"max-rounds": 5, "max-hours": 1, "min-sites": 3}})
    assert round_problems(policy, 5, {"quorum": 3}, 3599.0) == []
    assert [p.split(" ")[0] for p in round_problems(policy, 6, {"quorum": 2}, 3600.0)] == [
        "round",
        "1.00",
        "the",
    ]
    for claimed in (None, True, "3", 2):
        assert round_problems(policy, 1, {"quorum": claimed}, 0.0), claimed


def test_rows_lie_where_they_may_and_links_do_not_help(tmp_path) -> None:
    config = resolve(None, [])
    inside, outside = tmp_path / "rows", tmp_path / "other"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.jsonl").write_text("{}")
    (inside / "link.jsonl").symlink_to(outside / "secret.jsonl")
    policy = parse_policy({"data": {"paths": [str(inside)], "public": False}})
    assert data_problems(policy, {"data": str(inside / "a.jsonl")}, config) == []
    assert data_problems(policy, {"data": str(inside / "link.jsonl")}, config)
    assert data_problems(policy, {"data": str(inside / ".." / "other" / "secret.jsonl")}, config)
    assert data_problems(policy, {"data": str(tmp_path / "rows2" / "a")}, config)
    assert data_problems(policy, {}, config) == ["the rows are 'demo:' and data.public is false"]


def test_metrics_that_may_not_leave_stay() -> None:
    policy = parse_policy({"metrics": {"allowed": ["seconds"]}})
    assert allowed_metrics(policy, {"seconds": 1, "epoch": 2, "model": "x"}, ("model",)) == {
        "seconds": 1,
        "model": "x",
    }
