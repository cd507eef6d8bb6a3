"""From a pipeline to the codec that runs it; combinations that make no sense are refused here, in words."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from compression.codecs.exact import ExactCodec
from compression.codecs.int_block import IntBlockCodec
from compression.spec import KEY, Pipeline
from umbel.errors import ConfigError


def build(pipeline: Pipeline) -> Any:
    """The codec of a pipeline. Raises ConfigError for stages that do not fit together."""
    return _build(pipeline)


@lru_cache(maxsize=256)
def _build(pipeline: Pipeline) -> Any:
    head = pipeline.stages[0]
    if pipeline.names == ("exact",):
        return ExactCodec()
    if len(pipeline.stages) == 1 and head.name in ("int8", "int4", "int2"):
        return IntBlockCodec(int(head.name[3:]), head["block"], head["rounding"])
    raise ConfigError(KEY, "is no pipeline", got=str(pipeline))
