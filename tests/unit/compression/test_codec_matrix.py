"""Every codec family in every use: bytes and error per cell, and the cells that are refused, by name."""

import numpy as np
import pytest

from compression import Layout, Role, decode, encode
from compression.recipes import check
from umbel.errors import ConfigError


def pretrain() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "wte": rng.laplace(size=(256, 64)) * 1e-3,
        "mlp": rng.laplace(size=(128, 64)) * 1e-3,
        "ln_f": rng.laplace(size=64),
    }


def lora() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"q.lora_A": rng.laplace(size=(8, 1024)) * 1e-2, "q.lora_B": rng.laplace(size=(1024, 8)) * 1e-4}


def activations() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {"h": rng.laplace(size=(4, 32, 128)) * (1 + 20 * (np.arange(128) == 5))}


def auxiliary() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {"aux.proj": rng.laplace(size=(96, 96)), "aux.bias": rng.laplace(size=96)}


USES = {"pretrain": pretrain, "lora": lora, "activations": activations, "auxiliary": auxiliary}
# policy -> (largest bytes as a share of fp32, largest NMSE)
CELLS = {
    "exact": (1.02, 0.0),
    "fp16": (0.52, 1e-6),
    "int8(256,rtn)": (0.27, 1e-3),
    "tok8(rtn)": (0.29, 1e-3),
    "sign(4096)": (0.05, 0.9),
    "topk(4096,64)|fp32|flat": (0.06, 0.95),
    "topk(4096,64)|sign2|rice": (0.04, 0.95),
}


@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("policy", list(CELLS))
def test_bytes_and_error(policy, use):
    arrays = {name: array.astype(np.float32) for name, array in USES[use]().items()}
    layout = Layout.from_arrays(arrays, lambda name: Role.ACTIVATION if name == "h" else Role.PARAM)
    if policy.startswith("tok8") and use != "activations":
        policy = f"activation={policy}"  # by role: nothing else in the set is touched
        assert decode(encode(arrays, layout, policy), layout).keys() == arrays.keys()
        return
    frame = encode(arrays, layout, policy)
    received = decode(frame, layout)
    share, limit = CELLS[policy]
    assert len(frame) <= share * layout.raw_bytes + 500
    for name, array in arrays.items():
        error = float(
            ((received[name] - array).astype(np.float64) ** 2).sum() / (array.astype(np.float64) ** 2).sum()
        )
        assert error <= limit, name


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("topk(4096,64)|sign2|rice", {"residual": False, "activations": True}),
        ("sign(4096)", {"residual": True, "activations": True}),
        ("tok8(rtn)", {"residual": True}),
        ("int8cb", {"residual": True}),
        ("randk(0.1)", {"residual": True, "pretraining": True}),
        ("topk(4096,64)|sign2|rice", {"residual": True, "secure_sum": True}),
    ],
)
def test_unsupported_cells_are_refused_by_name(policy, options):
    with pytest.raises(ConfigError, match="compression"):
        check(policy, **options)
