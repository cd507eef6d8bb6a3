"""The rank a site asks for: by its operator, from its free memory, and in the facts of its joining."""

from __future__ import annotations

import json

import pytest

import client_app.service
from client_app.service import Service
from client_app.site_rank import asked_rank, largest_rank, trained_bytes, wants_negotiation
from umbel.config import resolve, to_json
from umbel.errors import Refusal
from umbel.messages import JOIN, Instruction

LAYERS = [(64, 64), (64, 160)]


def test_a_rank_is_halved_until_it_takes_half_of_what_is_free() -> None:
    """352 numbers a rank, four times, four bytes: 5632 B a rank."""
    assert trained_bytes(LAYERS, 1) == 5632
    assert largest_rank(LAYERS, 16, 2 * 16 * 5632) == 16
    assert largest_rank(LAYERS, 16, 2 * 16 * 5632 - 1) == 8
    assert largest_rank(LAYERS, 12, 2 * 5 * 5632) == 3
    assert largest_rank(LAYERS, 16, 0) == 1


@pytest.mark.parametrize(("value", "rank", "found"), [("auto", 0, True), (4, 4, False), ("4", 4, False)])
def test_a_node_config_names_a_rank_or_asks_for_one(value, rank: int, found: bool) -> None:
    assert asked_rank({"rank": value}) == rank
    assert wants_negotiation({"rank": value}) is found
    assert (asked_rank({}), wants_negotiation({})) == (0, False)


def test_nonsense_is_refused_in_words() -> None:
    with pytest.raises(Refusal, match="neither a whole number nor 'auto'"):
        asked_rank({"rank": "big"})


def test_a_site_joins_with_the_rank_its_memory_carries(monkeypatch, tmp_path) -> None:
    config = resolve(
        None,
        [
            "run.method=flexlora",
            "lora.rank=8",
            "model.name=builtin:tiny-llama",
            "data.limit=8",
            "train.threads=1",
        ],
    )
    service = Service()
    model, _ = service.bench.model(config)
    layers = [(m.in_features, m.out_features) for m in model.modules]
    monkeypatch.setattr(client_app.service, "free_bytes", lambda device: 2 * trained_bytes(layers, 3))

    def rank_of(**more) -> int:
        order = Instruction("r", 0, 0, "", "clinic", 60.0, config=to_json(config))
        node = {"name": "clinic", "data": "demo:clinic", "state-dir": str(tmp_path), **more}
        reply, _ = service.handle(JOIN, order, None, node_config=node, node_id=1)
        return json.loads(reply.metrics)["rank"]

    assert [rank_of(rank="auto"), rank_of(rank=5), rank_of()] == [2, 5, 0]
