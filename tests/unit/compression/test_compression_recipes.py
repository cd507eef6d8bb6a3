"""The recipe table, its refusals, and frames as Flower arrays."""

import warnings

import numpy as np
import pytest

from compression import FrameError, Layout, check_policy, decode, encode
from compression.flower import STYPE, array_to_frame, frame_to_array
from compression.recipes import RECIPES, check, recipe
from umbel.errors import ConfigError


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_legal_by_its_own_rules(name):
    entry = recipe(name)
    assert str(check_policy(entry.policy)) == str(check_policy(str(check_policy(entry.policy))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(
            entry.policy,
            residual=entry.decay is not None,
            momentum=min(entry.max_momentum, 0.5),
            pretraining=True,
        )


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("sign(4096)", {"residual": True, "momentum": 0.9}, "both are momenta"),
        ("topk(4096,64)|sign2|rice", {"residual": False}, "what is dropped is lost"),
        ("randk(0.1)", {"residual": True, "pretraining": True}, "random-k for pretraining"),
        ("sign(4096)", {"residual": True, "activations": True}, "residual on activations"),
        ("ecsq(rate=1)", {"residual": False, "secure_sum": True}, "cannot be summed under masks"),
    ],
)
def test_refusals_in_words_and_by_force_a_warning(policy, options, words):
    with pytest.raises(ConfigError, match=words):
        check(policy, **options)
    with pytest.warns(UserWarning, match=words):
        notes = check(policy, force=True, **options)
    assert any(note.startswith("forced: ") for note in notes)


def test_an_unbiased_codec_with_a_residual_is_refused_even_by_force():
    with pytest.raises(ConfigError, match="only bound is Unbiased"):
        check("int4(64,sr)", residual=True, force=True)


def test_between_half_and_nine_tenths_momentum_warns():
    with pytest.warns(UserWarning, match="not known to be sound"):
        check("int2(256,rtn)", residual=True, momentum=0.7)


def test_unknown_recipe_lists_the_known():
    with pytest.raises(ConfigError, match="sparse128"):
        recipe("tiny")


def test_a_frame_travels_as_a_flower_array():
    arrays = {"w": np.ones((3, 3), np.float32)}
    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout)
    array = frame_to_array(memoryview(frame))
    assert (array.dtype, array.stype, tuple(array.shape)) == ("uint8", STYPE, (len(frame),))
    assert array_to_frame(array) == frame
    assert decode(array_to_frame(array), layout)["w"].tolist() == arrays["w"].tolist()
    with pytest.raises(TypeError):
        array.numpy()  # Flower refuses to take a frame for numbers


def test_an_array_that_is_no_frame_is_refused():
    from flwr.app import Array

    good = {"dtype": "uint8", "shape": (3,), "stype": STYPE, "data": b"abc"}
    assert array_to_frame(Array(**good)) == b"abc"
    for change, code in [
        ({"stype": "numpy.ndarray"}, "stype"),
        ({"dtype": "int8"}, "dtype"),
        ({"shape": (4,)}, "shape"),
        ({"shape": (1, 3)}, "shape"),
    ]:
        with pytest.raises(FrameError) as caught:
            array_to_frame(Array(**(good | change)))
        assert caught.value.code == code
