"""Which local work an instruction asks for: training, a low-rank gradient, or an answer from what was trained before."""

from __future__ import annotations

from typing import Any

from client_app.clock import Clock
from client_app.tasks.sft import TrainResult, train
from umbel.config.schema import Config
from umbel.errors import Refusal, RefusalKind

FACTOR_OF = {"AB": "", "A": "A", "B": "B", "core": "core"}
# Keys of a snapshot's arrays that are no optimiser moments.
NOT_MOMENTS = ("own/", "kept/", "held/")


def local_work(
    trains: str, model: Any, rows: list[Any], config: Config, clock: Clock, *, remembered: Any, **options: Any
) -> TrainResult:
    """Do the work named by `trains` ("AB", "A", "B", "core", "gradient", "") and return its result.

    `remembered` is the site's snapshot (meta, arrays); `options` are those of `sft.train`.
    """
    if trains == "":
        return answer_again(model, remembered, options["cursor"])
    if trains == "gradient":
        from client_app.tasks.gradient import low_rank_gradient

        return low_rank_gradient(model, rows, config, clock, **options)
    moments = {k: v for k, v in remembered.arrays.items() if not k.startswith(NOT_MOMENTS)}
    return train(model, rows, config, clock, moments=moments, factor=FACTOR_OF[trains], **options)


def answer_again(model: Any, remembered: Any, cursor: Any) -> TrainResult:
    """Return the adapter in the model with the weight of the round that trained it."""
    from umbel.models.state import read_state

    cost = remembered.meta.get("spent")
    if not cost:
        raise Refusal(RefusalKind.REFUSED, "the first stage of this round was not done here")
    return TrainResult(
        read_state(model, "lora"), {}, cursor, cost["tokens"], cost["steps"], cost["loss"], cost["partial"]
    )


def spent(result: TrainResult) -> dict[str, Any]:
    """Return what a round cost, for a later stage that answers with the same weight."""
    return {"tokens": result.tokens, "steps": result.steps, "loss": result.loss, "partial": result.partial}
