"""Spec strings and policies: canonical text, and refusals in words."""

import pytest

from compression import Layout, Role, TensorSpec, check_policy
from compression.policy import parse_policy, travels_exactly
from compression.spec import parse
from umbel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "canonical", "wire"),
    [
        ("int8", "int8(256,rtn)", "int8(256,rtn)"),
        ("int4( 64 , sr )", "int4(64,sr)", "int4(64,sr)"),
        ("topk(4096,64)|sign2|rice", "topk(4096,64)|sign2|rice", "topk(4096,64)|sign2|rice"),
        ("had(4096)|lm2", "had(4096,2)|lm2(contractive)", "had(4096,2)|lm2(contractive)"),
        ("ecsq(rate=0.25)", "ecsq(rate=0.25)", "ecsq(rate=0x1.0000000000000p-2)"),
        (
            "ecsq(theta=0.5,step=0x1p-3)",
            "ecsq(step=0.125,theta=0.5)",
            "ecsq(step=0x1.0000000000000p-3,theta=0x1.0000000000000p-1)",
        ),
        ("randk(.5)", "randk(0.5,contractive)", "randk(0x1.0000000000000p-1,contractive)"),
    ],
)
def test_canonical_text(text, canonical, wire):
    pipeline = parse(text)
    assert (str(pipeline), pipeline.wire()) == (canonical, wire)
    assert parse(canonical) == parse(wire) == pipeline


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9", "Did you mean 'int8'"),
        ("int8(100)", "bad block, got '100'"),
        ("int8(256,up)", "Allowed: rtn, sr"),
        ("int8(256,sr,1)", "too many arguments"),
        ("ecsq(rate=nan)", "bad rate"),
        ("ecsq(rate=0x1p99999)", "bad rate"),
        ("ecsq(speed=1)", "bad argument"),
        ("ecsq()", "one of rate=, step=, rms="),
        ("ecsq(rate=1,step=1)", "one of rate=, step=, rms="),
        ("rice", "without a selection"),
        ("int8|rans", "no integer symbols"),
        ("lm2", "without a rotation"),
        ("sign|lm1", "without a rotation"),
        ("randk(0.1)|rice", "seeded selection"),
        ("had(4096)", "without quantising"),
        ("topk(4096,64)", "how values and indices travel"),
        ("topk(64,65)|fp32|flat", "more than a chunk holds"),
        ("dct|topk(64,4)|fp32|flat", "chunks of 4096"),
        ("lora_a=int8;lora_a=int4", "each role once"),
        ("int8;min=many", "not a number of elements"),
        ("", "unknown stage"),
        ("int8(256", "unknown stage"),
    ],
)
def test_illegal_policies_are_refused_in_words(text, words):
    with pytest.raises(ConfigError) as caught:
        check_policy(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["int8(256,rtn)", "lora_a=int8(256,sr);lora_b=bf16;*=exact", "sign(4096);min=0", "delta=int4(64,rtn)"],
)
def test_policies_round_trip(text):
    assert str(parse_policy(text)) == text
    assert parse_policy(parse_policy(text).wire()) == parse_policy(text)


def test_fixed_part_travels_exactly():
    def spec(name="w", shape=(64, 64), dtype="float32", role=Role.PARAM):
        return TensorSpec(name, shape, dtype, role)

    assert not travels_exactly(spec())
    assert not travels_exactly(spec(shape=(4096,)))
    assert travels_exactly(spec(shape=(4095,)))
    assert travels_exactly(spec(dtype="int64"))
    assert travels_exactly(spec(role=Role.BUFFER))
    for name in (
        "h.0.ln_1.weight",
        "model.norm.weight",
        "post_attention_layernorm.weight",
        "c_fc.bias",
        "bias",
    ):
        assert travels_exactly(spec(name=name, shape=(8192,))), name
    assert not travels_exactly(spec(name="normal.weight", shape=(64, 64)))


def test_groups_collect_entries_by_pipeline_not_by_tensor():
    names = [f"{i}.{kind}" for i in range(5) for kind in ("bias", "weight")]
    layout = Layout(
        tuple(TensorSpec(n, (8, 1024) if "w" in n else (8,), "float32", Role.PARAM) for n in names)
    )
    groups = parse_policy("int8").groups(layout)
    assert [(str(p), len(i)) for p, i in groups] == [("exact", 5), ("int8(256,rtn)", 5)]
