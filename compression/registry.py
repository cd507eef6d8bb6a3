"""From a pipeline to the codec that runs it; combinations that make no sense are refused here, in words."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from compression.codecs.cast import CastCodec
from compression.codecs.clip import ClipCodec
from compression.codecs.dct import DctCodec
from compression.codecs.ecsq import EcsqCodec
from compression.codecs.exact import ExactCodec
from compression.codecs.int_block import IntBlockCodec
from compression.codecs.lossless import LosslessCodec
from compression.codecs.lowrank import LowRankCodec
from compression.codecs.randk import RandKCodec
from compression.codecs.rotation import RotationCodec
from compression.codecs.sign import SignCodec
from compression.codecs.token import TokenCodec
from compression.codecs.topk import TopKCodec
from compression.spec import KEY, Pipeline, Stage
from umbel.errors import ConfigError


def build(pipeline: Pipeline) -> Any:
    """The codec of a pipeline. Raises ConfigError for stages that do not fit together."""
    return _build(pipeline)


@lru_cache(maxsize=256)
def _build(pipeline: Pipeline) -> Any:
    head, names = pipeline.stages[0], pipeline.names
    if names in _ALONE:
        return _ALONE[names](head)
    if head.name == "ecsq":
        return _ecsq(pipeline)
    if head.name == "topk":
        return _topk(pipeline)
    if head.name == "dct" and len(names) > 1 and names[1] == "topk":
        inner = _topk(Pipeline(pipeline.stages[1:]))
        if inner.block != 4096:
            raise ConfigError(
                KEY, "dct works on chunks of 4096", got=str(pipeline), allowed="dct|topk(4096,k)|..."
            )
        return DctCodec(inner)
    if head.name == "had" and len(names) == 2 and names[1] in _LEVELS:
        level = pipeline.stages[1]
        return RotationCodec(head["block"], head["rounds"], int(level.name[2:]), level["scaling"])
    raise ConfigError(KEY, _why_not(names), got=str(pipeline), allowed=_ALLOWED)


_LEVELS = ("lm1", "lm2", "lm3", "lm4")
_ALLOWED = (
    "exact, lossless, xor, bf16, fp16, fp32, int8, int4, int2, int8cb, tok8, sign, randk, lowrank, "
    "topk|sign2, bf16 or fp32|rice or flat, dct|topk|..., had|lm1 to lm4, ecsq with or without |rans or |zstd"
)


def _int_block(head: Stage) -> IntBlockCodec:
    return IntBlockCodec(int(head.name[3:]), head["block"], head["rounding"])


_ALONE: dict[tuple[str, ...], Callable[[Stage], Any]] = {
    ("exact",): lambda head: ExactCodec(),
    ("lossless",): lambda head: LosslessCodec(),
    ("xor",): lambda head: LosslessCodec(xor=True),
    ("bf16",): lambda head: CastCodec("bf16"),
    ("fp16",): lambda head: CastCodec("fp16"),
    ("fp32",): lambda head: CastCodec("fp32"),
    ("int8",): _int_block,
    ("int4",): _int_block,
    ("int2",): _int_block,
    ("int8cb",): lambda head: ClipCodec(),
    ("tok8",): lambda head: TokenCodec(head["rounding"]),
    ("sign",): lambda head: SignCodec(head["block"]),
    ("randk",): lambda head: RandKCodec(head["fraction"], head["scaling"]),
    ("lowrank",): lambda head: LowRankCodec(head["rank"]),
}


def _why_not(names: tuple[str, ...]) -> str:
    """The reason an illegal pipeline is illegal, in words."""
    if any(name in _LEVELS for name in names) and names[0] != "had":
        return "uses lm levels without a rotation, but they assume normally distributed values"
    if "randk" in names:
        return "codes indices or values of a seeded selection, whose support both sides know"
    if "rice" in names or "flat" in names:
        return "codes indices without a selection that has any"
    if "rans" in names or "zstd" in names:
        return "entropy-codes something that has no integer symbols"
    if names[0] in ("had", "dct"):
        return "transforms without quantising or selecting"
    return "puts stages together that do not fit"


def _ecsq(pipeline: Pipeline) -> EcsqCodec:
    head = pipeline.stages[0]
    if pipeline.names[1:] not in ((), ("rans",), ("zstd",)):
        raise ConfigError(
            KEY, _why_not(pipeline.names), got=str(pipeline), allowed="ecsq(...), then |rans or |zstd"
        )
    given = [name for name in ("rate", "step", "rms") if head[name] is not None]
    if len(given) != 1:
        raise ConfigError(f"{KEY} stage ecsq", "needs one of rate=, step=, rms=", got=str(pipeline))
    coder = pipeline.names[1] if len(pipeline.names) == 2 else None
    return EcsqCodec(head["rate"], head["step"], head["rms"], head["theta"], coder)


def _topk(pipeline: Pipeline) -> TopKCodec:
    allowed = "topk(C,k)|sign2, bf16 or fp32|rice or flat"
    if len(pipeline.stages) != 3:
        raise ConfigError(
            KEY, "does not say how values and indices travel", got=str(pipeline), allowed=allowed
        )
    head, values, indices = pipeline.stages
    if values.name not in ("sign2", "bf16", "fp32") or indices.name not in ("rice", "flat"):
        raise ConfigError(
            KEY, "does not say how values and indices travel", got=str(pipeline), allowed=allowed
        )
    if head["k"] > head["block"]:
        raise ConfigError(KEY, "keeps more than a chunk holds", got=str(pipeline), allowed="k <= block")
    return TopKCodec(head["block"], head["k"], values.name, indices.name)
