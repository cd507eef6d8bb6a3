"""The exactness benchmark runs, meets its bounds, and its control fails as it must (D14)."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[3] / "benchmarks" / "lora_exactness.py"
    spec = importlib.util.spec_from_file_location("lora_exactness", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quick_run_meets_its_bounds_d14(benchmark):
    result = benchmark.measure(quick=True)
    assert benchmark.failures(result) == []
    assert json.loads(json.dumps(result)) == result
    rules = result["rules"]
    assert all(r["relative_error"] < 1e-12 for r in rules.values() if r["exact"])
    assert all(r["relative_error"] > 1e-3 for r in rules.values() if not r["exact"])
    small = result["nf4"]["residuals"]["0.03"]
    assert small["fold_kept"] < 0.1
    assert small["carry_error_bf16"] < 0.01


def test_a_worse_result_is_reported(benchmark):
    good = {
        "worst_exact_weight_error": 1e-7,
        "worst_exact_logit_error": 1e-6,
        "fedit_error": 0.5,
        "svd": {"relative_difference": 1e-12},
    }
    assert benchmark.failures(good) == []
    for path, value in (
        (("worst_exact_weight_error",), 2e-6),
        (("worst_exact_logit_error",), float("nan")),
        (("fedit_error",), 0.01),
        (("svd", "relative_difference"), 1e-3),
    ):
        bad = copy.deepcopy(good)
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert len(benchmark.failures(bad)) == 1
