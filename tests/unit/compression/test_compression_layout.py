"""The layout: order, digest, JSON, and what cannot travel (hazards H14, H16)."""

import json

import ml_dtypes
import numpy as np
import pytest

from compression import EncodeError, Layout, LayoutError, Role, TensorSpec


def two_tensors() -> dict[str, np.ndarray]:
    return {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(7, dtype=np.int64)}


def test_entries_are_sorted_by_name_and_counted():
    layout = Layout.from_arrays(two_tensors())
    assert [e.name for e in layout.entries] == ["a", "b"]
    assert layout.entries[0] == TensorSpec("a", (), "int64", Role.PARAM)
    assert (layout.numel, layout.raw_bytes) == (7, 8 + 24)
    assert layout.offsets == (0, 1, 7)


def test_role_follows_the_name_of_lora_factors():
    arrays = {"x.lora_A.weight": np.zeros((2, 3)), "x.lora_B.weight": np.zeros((3, 2)), "y": np.zeros(1)}
    roles = [e.role for e in Layout.from_arrays(arrays).entries]
    assert roles == [Role.LORA_A, Role.LORA_B, Role.PARAM]


def test_digest_changes_with_name_shape_dtype_and_role():
    base = [TensorSpec("a", (2, 3), "float32", Role.PARAM)]
    others = [
        TensorSpec("b", (2, 3), "float32", Role.PARAM),
        TensorSpec("a", (3, 2), "float32", Role.PARAM),
        TensorSpec("a", (2, 3), "bfloat16", Role.PARAM),
        TensorSpec("a", (2, 3), "float32", Role.DELTA),
    ]
    digests = {Layout((entry,)).digest() for entry in base + others}
    assert len(digests) == 5
    assert all(len(d) == 64 for d in digests)


def test_json_round_trip_and_golden_digest():
    layout = Layout.from_arrays(two_tensors())
    assert Layout.from_json(layout.to_json()) == layout
    text = '{"entries":[["a",[],"int64","param"],["b",[2,3],"float32","param"]],"layout":1}'
    assert layout.to_json() == text


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["entries"].append(d["entries"][0]),
        lambda d: d["entries"][0].__setitem__(2, "float8_e4m3fn"),
        lambda d: d["entries"][0].__setitem__(3, "weights"),
        lambda d: d["entries"][1].__setitem__(1, [2, -3]),
        lambda d: d["entries"][1].__setitem__(1, [2.0, 3]),
        lambda d: d.__setitem__("layout", 2),
        lambda d: d.pop("entries"),
    ],
)
def test_damaged_json_is_refused(damage):
    document = json.loads(Layout.from_arrays(two_tensors()).to_json())
    damage(document)
    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(document, separators=(",", ":"), sort_keys=True))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.complex64, object])
def test_h16_a_dtype_that_cannot_travel_is_refused_by_name(dtype):
    with pytest.raises(LayoutError, match=r"'w'.*cannot travel"):
        Layout.from_arrays({"w": np.zeros(2, dtype=dtype)})


def test_flatten_and_unflatten_restore_shapes_and_dtypes():
    arrays = {
        "a": np.array(7, np.int64),
        "b": np.array([[1.5, -2]], ml_dtypes.bfloat16),
        "c": np.array([True, False]),
        "d": np.zeros((0, 4), np.float16),
    }
    layout = Layout.from_arrays(arrays)
    flat = layout.flatten(arrays)
    assert flat.dtype == np.float32
    assert flat.tolist() == [7, 1.5, -2, 1, 0]
    back = layout.unflatten(flat + np.float32(0.25))
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == {
        k: (v.dtype, v.shape) for k, v in arrays.items()
    }
    assert back["a"] == 7  # integers are rounded, not cut
    assert back["b"].astype(np.float32).tolist() == [[1.75, -1.75]]


def test_arrays_that_do_not_match_are_named():
    layout = Layout.from_arrays(two_tensors())
    cases = [
        ({"a": np.array(7)}, "b"),
        (two_tensors() | {"z": np.zeros(1)}, "z"),
        (two_tensors() | {"b": np.zeros((3, 2), np.float32)}, "b"),
        (two_tensors() | {"b": np.zeros((2, 3))}, "b"),
    ]
    for arrays, name in cases:
        with pytest.raises(EncodeError) as caught:
            layout.flatten(arrays)
        assert caught.value.tensor == name
