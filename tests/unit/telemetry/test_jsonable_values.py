"""H38: a metric's type must never cost the update."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.telemetry.jsonable import jsonable


class Kind(StrEnum):
    OOM = "oom"


@dataclass
class Point:
    x: float
    y: object


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1), 1.0),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (np.array([1, 2]), [1, 2]),
        (np.array([2.5]), 2.5),
        (None, None),
        (True, True),
        ([1, 2.0], [1, 2.0]),
        (float("nan"), None),
        (float("-inf"), None),
        (np.float64("inf"), None),
        (np.array([1.0, np.nan]), [1.0, None]),
        ("text", "text"),
        ("\ud800", "?"),
        (Kind.OOM, "oom"),
        (Point(1.0, np.float16(2)), {"x": 1.0, "y": 2.0}),
        ({Kind.OOM: 1, 2: (3,)}, {"oom": 1, "2": [3]}),
        (Path("a/b"), "a/b"),
        ({3, 1}, [1, 3]),
    ],
)
def test_values_become_plain_json_h38(value, plain):
    found = jsonable(value)
    assert found == plain
    assert type(found) is type(plain)


def test_torch_scalars_and_tensors_h38():
    torch = pytest.importorskip("torch")
    assert jsonable(torch.tensor(1.5)) == 1.5
    assert jsonable(torch.tensor(float("nan"))) is None
    assert jsonable(torch.tensor([1, 2])) == [1, 2]
    assert jsonable(torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)) == 1.0


def test_an_unknown_object_leaves_its_type_and_not_its_content():
    class Row:
        def __repr__(self) -> str:
            return "patient text"

    assert jsonable(Row()) == "<Row>"
    assert jsonable(b"patient text") == "<bytes>"


def test_a_structure_that_holds_itself_ends():
    loop: list = []
    loop.append(loop)
    json.dumps(jsonable(loop))


_leaf = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
)
_tree = st.recursive(
    _leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=20
)


@settings(deadline=None)
@given(_tree)
def test_every_value_can_be_written_and_read_back_unchanged(value):
    plain = jsonable(value)
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode("utf-8")
    assert json.loads(line) == plain
    assert jsonable(plain) == plain
