"""Settings of split learning: each wrong pair is refused by key, with value and remedy; what the plan counts is exact."""

from __future__ import annotations

import pytest

from umbel.cli.plan_split import SAYS, Row, SplitPlan, lines, parse_bytes
from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.split_bundle import BundleError, pack_bundle, unpack_bundle

SPLIT = "run.task=split"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["split.gradient=aux-loss"], "split.shape"),
        (["split.gradient=none"], "split.shape"),
        (["split.shape=two-part", "split.labels=private"], "split.shape"),
        (["split.gradient=aux-estimate", "split.shape=two-part"], "model.attention"),
        (["split.client-optimizer=zeroth"], "split.client-optimizer"),
        (["split.tied=sync"], "split.tied"),
        (["split.bind=0.0.0.0:7000"], "split.bind"),
        (["split.bind=nowhere"], "split.bind"),
        (["split.tls-cert=a.pem"], "split.tls-key"),
        (["split.tls-cert=a", "split.tls-key=b", "split.bind=0.0.0.0:7000"], "split.address"),
        (["split.gradient=none", "split.shape=two-part", "split.transport=stream"], "split.transport"),
        (["split.on-death=last-saved"], "split.save-every"),
        (["train.accumulation=2"], "train.accumulation"),
        (["train.mode=full"], "train.mode"),
        (["lora.dropout=0.1"], "lora.dropout"),
        (["run.method=rolora"], "run.method"),
        (["clients.late=weight"], "clients.late"),
    ],
)
def test_what_cannot_be_is_refused_by_key_s13(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(None, [SPLIT, *overrides])
    assert refused.value.key == key
    assert "Allowed:" in str(refused.value)
    # The same settings are nobody's business in a run that is not split.
    if overrides[0].startswith("split.") and len(overrides) == 1:
        resolve(None, overrides)


def test_the_plan_says_it_plainly_and_recommends_what_fits() -> None:
    config = resolve(
        None, [SPLIT, "model.name=builtin:tiny-llama-4", "train.batch-size=2", "data.max-length=32"]
    )
    plan = SplitPlan(config, link_mbit=8.0, latency_ms=0.0, device_bytes=0.0)
    lora, qlora, two_part, u, frozen = plan.rows_of()
    # 10 steps x 4 batches of 2 x 32 tokens, width 64, bf16.
    assert plan.tensor("bf16") == 2 * 32 * 64 * 2
    assert u.up_bytes == pytest.approx(40 * (2 * 8192 + 8 + 128) + plan.sizes.adapter(2) + 266)
    assert two_part.up_bytes == pytest.approx(40 * (8192 + 256 + 8 + 64) + plan.sizes.adapter(1) + 266)
    assert u.seconds == pytest.approx((u.up_bytes + u.down_bytes) / 1e6)
    assert frozen.memory_bytes < two_part.memory_bytes < u.memory_bytes
    assert qlora.memory_bytes < lora.memory_bytes
    assert [row.labels_leave for row in (lora, qlora, two_part, u, frozen)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    text = "\n".join(lines(plan.report()))
    assert "100 to 1,000 times more bytes" in text and "invert activations" in text and SAYS in text


@pytest.mark.parametrize(
    ("memory", "overrides", "says"),
    [
        ("50", [], "federated LoRA"),
        ("40", [], "QLoRA"),
        ("30", [], "split u"),
        ("20", [], "split two-part"),
        ("20", ["split.labels=private"], "none"),
        ("10", [], "split-frozen"),
        ("30", ["clients.deadline-seconds=50", "clients.grace-seconds=50"], "split-frozen"),
        ("9", [], "none"),
    ],
)
def test_the_recommendation_is_the_first_that_fits(memory: str, overrides: list[str], says: str) -> None:
    config = resolve(None, [SPLIT, "model.name=builtin:tiny-llama-4", *overrides])
    plan = SplitPlan(config, link_mbit=100.0, latency_ms=0.0, device_bytes=parse_bytes(memory))
    ways = {
        "federated LoRA": 50,
        "QLoRA (4 bit)": 40,
        "split two-part": 20,
        "split u": 30,
        "split-frozen": 10,
    }
    rows = [
        Row(way, 1.0, 1.0, size, 100.0, way in ("split two-part", "split-frozen"), fits=size <= float(memory))
        for way, size in ways.items()
    ]
    assert plan.recommend(rows).startswith(says)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes(t) for t in ("", "8G", "512M", "6e9", "1.5GB", "2GiB")] == [
        0,
        8e9,
        5.12e8,
        6e9,
        1.5e9,
        2e9,
    ]


def test_a_bundle_holds_every_byte_or_is_none() -> None:
    parts = {"adapter": b"abc", "FWD.1.0": b"", "FWD.1.1": bytes(1000)}
    data = pack_bundle(parts)
    assert unpack_bundle(data) == parts and list(unpack_bundle(data)) == list(parts)
    for wrong in (b"", b"\x80\x04", data[:-1], data + b"!", b"XXXX" + data[4:], data[:9]):
        with pytest.raises(BundleError):
            unpack_bundle(wrong)


def test_codecs_that_underflow_or_do_not_exist_are_no_choice() -> None:
    for key in ("split.gradient-codec", "split.activation-codec"):
        with pytest.raises(ConfigError, match=key):
            resolve(None, [SPLIT, f"{key}=fp16"])
