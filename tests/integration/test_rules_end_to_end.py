"""D03: every method end to end with the very objects that our sites produce, against the sites' live models."""

from __future__ import annotations

import numpy as np
import pytest
from support.rules import GPT2, Finished, distance, effective, exported, logits, run_method, served

from umbel.config.schema import METHODS as ALL_METHODS

EXACT = ("ffa", "rolora", "carry", "fedex", "flora", "fedsb", "ravan")
MIXED = ("lora.site-ranks=clinic=2",)
PLAIN = ("lora_A.weight", "lora_B.weight")
# What may travel: (down, up), by the last parts of a tensor's name.
WIRE = {
    "fedavg": (PLAIN, PLAIN),
    "fedit": (PLAIN, PLAIN),
    "ffa": (("lora_B.weight",), ("lora_B.weight",)),
    "rolora": (PLAIN, PLAIN),
    "carry": ((*PLAIN, "carry_A", "carry_B"), PLAIN),
    "fedex": ((*PLAIN, "carry_A", "carry_B"), PLAIN),
    "flora": ((*PLAIN, "carry_A", "carry_B"), PLAIN),
    "flexlora": (PLAIN, PLAIN),
    "hetlora": (PLAIN, PLAIN),
    "raflora": (PLAIN, PLAIN),
    "fedplora": ((*PLAIN, "carry_A", "carry_B"), PLAIN),
    "fedsa": (("lora_A.weight",), ("lora_A.weight",)),
    "fedsb": ((*PLAIN, "lora_B.core"), (*PLAIN, "lora_B.core")),
    "ravan": (("lora_B.core",), ("lora_B.core",)),
    "fedask": ((*PLAIN, "sketch_out"), ("sketch_out", "sketch_in")),
    "ecolora": (PLAIN, ("segment",)),
    "sparseloco": (PLAIN, PLAIN),
}
# What a method cannot run without.
NEEDED = {"sparseloco": ("compression.up=topk(64,4)|sign2|flat;min=1", "compression.feedback=0.95")}
# `delayed` has no rounds that every site is part of: tests/unit/outer has its engine, its oracle and its bytes.
METHODS = tuple(m for m in ALL_METHODS if m != "delayed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that runs a method once and keeps the result for all tests of this module."""
    known: dict[tuple[str, ...], Finished] = {}

    def run(method: str, *overrides: str) -> Finished:
        key = (method, *overrides)
        if key not in known:
            with pytest.MonkeyPatch.context() as patch:
                settings = (*NEEDED.get(method, ()), *overrides)
                known[key] = run_method(patch, tmp_path_factory.mktemp(method), method, *settings)
            assert known[key].code == 0, (known[key].folder / "run" / "server.log").read_text()[-2000:]
        return known[key]

    return run


def test_every_method_is_tested_here() -> None:
    """D09: each accepted name builds and completes rounds."""
    assert set(WIRE) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_d03_d09_what_travels_is_what_the_method_says(runs, method: str) -> None:
    """Also: two rounds are committed, every site's update counts, and the loss is a number."""
    done = runs(method)
    assert [len(r["accepted"]) for r in done.records] == [2, 2]
    assert all(np.isfinite(r["train_loss"]) for r in done.records)
    for direction, allowed in zip(("down", "up"), WIRE[method], strict=True):
        names = {n for w in done.wire for n in getattr(w, direction)}
        assert {n for n in names if not n.endswith(allowed)} == set()
        assert {end for end in allowed if not any(n.endswith(end) for n in names)} == set()


def test_ffa_d04_a_never_travels_and_never_moves(runs) -> None:
    """D04: A is frozen after it is attached; both ends draw it, and its bits stay those of the start."""
    done = runs("ffa")
    start = done.session.start
    from umbel.models.adapter import initial_adapter

    drawn = initial_adapter(start.modules, start.settings, done.session.config.run.seed)
    state = done.session.engine.state
    for name, array in drawn.items():
        same = np.array_equal(state[name], array)
        assert same == name.endswith("lora_A.weight"), name


def test_rolora_trains_b_first_and_one_factor_a_round(runs) -> None:
    done = runs("rolora")
    assert [w.exchange.trains for w in done.wire] == ["B", "B", "A", "A"]
    start, end = done.wire[0].down, done.session.engine.state
    second = next(w for w in done.wire if w.round == 2).down
    # Both sites were in the first commit: what was frozen there, A, is not sent again.
    assert {n for n in end if n.endswith("lora_B.weight")} == set(second)
    for name in end:
        if name.endswith("lora_A.weight"):
            assert not np.array_equal(end[name], start[name])
        else:
            assert not np.array_equal(second[name], start[name])
            assert np.array_equal(end[name], second[name])


@pytest.mark.parametrize("method", ["rolora", "fedsb"])
def test_a_site_that_lost_what_it_held_is_sent_it_again(tmp_path, monkeypatch, method: str) -> None:
    """Its disk is wiped after round 2: it refuses round 3 once, the retry carries everything, and that is exact."""
    import shutil

    def fault(point: str, round_index: int) -> None:
        if point == "after_checkpoint" and round_index == 2:
            for folder in (tmp_path / "state").glob("*/*/*/v-*"):
                shutil.rmtree(folder)

    done = run_method(monkeypatch, tmp_path, method, "run.rounds=4", fault=fault)
    assert done.code == 0
    sent = [
        sorted({n.rsplit(".", 2)[-2] for n in w.down if n.endswith("weight")})
        for w in done.wire
        if w.site == "clinic"
    ]
    once = {
        "rolora": [["lora_B"], ["lora_A", "lora_B"], ["lora_B"]],
        "fedsb": [["lora_A", "lora_B"]] * 2 + [[]],
    }
    assert sent[1:] == once[method]
    assert [r["attempt"] for r in done.records] == [1, 1, 2, 1]
    assert distance(effective(exported(done)[0]), done.ideal(4)) <= 1e-6


@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_serve_the_mean_of_the_sites_updates(runs, method: str) -> None:
    """T1, D05: alpha = 4 x rank, unequal weights; the truth is read off the sites' live models."""
    done = runs(method)
    model, _ = exported(done)
    assert distance(effective(model), done.ideal(2)) <= 1e-6
    last = done.records[-1]["exactness"]
    assert last["relative_error"] <= 1e-6
    assert last["worst_layer"] in done.ideal(2)


def test_h20_fedit_is_the_negative_control(runs) -> None:
    """H20: the certificate of a round is the error measured from outside, and it is not small."""
    done = runs("fedit")
    got = distance(effective(exported(done)[0]), done.ideal(2))
    assert got > 1e-3
    assert done.records[-1]["exactness"]["relative_error"] == pytest.approx(got, rel=1e-3)


@pytest.mark.parametrize("method", ["carry", "flora"])
def test_mixed_ranks_stay_exact(runs, method: str) -> None:
    """T7: one site at half the rank; what it does not train it carries."""
    done = runs(method, *MIXED)
    ranks = {w.site: len(next(a for n, a in w.up.items() if n.endswith("lora_A.weight"))) for w in done.wire}
    assert ranks == {"clinic": 2, "kitchen": 4}
    assert distance(effective(exported(done)[0]), done.ideal(2)) <= 1e-6


@pytest.mark.parametrize("overrides", [(), MIXED, GPT2], ids=["equal", "mixed", "conv1d"])
def test_d08_flexlora_serves_the_best_approximation(runs, overrides) -> None:
    """D08: the product of what is served is the truncated dense SVD of the ideal, and the tail is the error."""
    done = runs("flexlora", *overrides)
    got, ideal = effective(exported(done)[0]), done.ideal(2)
    best = {}
    for name, dense in ideal.items():
        u, s, vt = np.linalg.svd(dense, full_matrices=False)
        best[name] = (u[:, :4] * s[:4]) @ vt[:4]
    assert distance(got, best) <= 2e-6
    record = done.records[-1]["exactness"]
    assert record["relative_error"] == pytest.approx(distance(got, ideal), rel=1e-3)
    assert record["tail"] == pytest.approx(record["relative_error"], rel=1e-3)


@pytest.mark.parametrize("method", ["carry", "ffa"])
def test_d02_layers_that_store_their_weight_transposed(runs, method: str) -> None:
    """D02: Conv1D, not square."""
    done = runs(method, *GPT2)
    assert distance(effective(exported(done)[0]), done.ideal(2)) <= 1e-6


def test_a_bounded_carry_states_what_it_cuts(runs) -> None:
    """The reported error of a cut side adapter is the dense one."""
    done = runs("carry", "lora.carry-rank=2")
    got = distance(effective(exported(done)[0]), done.ideal(2))
    record = done.records[-1]["exactness"]
    assert 1e-6 < got < runs("fedit").records[-1]["exactness"]["relative_error"]
    assert record["relative_error"] == pytest.approx(got, rel=1e-3)


def test_raflora_and_hetlora_with_ranks_that_differ(runs) -> None:
    """Both take sites of different rank, and say how far from the mean of products they serve."""
    for method in ("raflora", "hetlora"):
        done = runs(method, *MIXED)
        got = distance(effective(exported(done)[0]), done.ideal(2))
        assert done.records[-1]["exactness"]["relative_error"] == pytest.approx(got, rel=1e-3)


def test_fedask_is_exact_but_for_the_cut_to_its_rank(runs) -> None:
    """The sum of the ranks in the sketch: what is served is the best rank-r part of the ideal of stage 1."""
    done = runs("fedask")
    got, ideal = effective(exported(done)[0]), done.ideal(1)
    best = {}
    for name, dense in ideal.items():
        u, s, vt = np.linalg.svd(dense, full_matrices=False)
        best[name] = (u[:, :4] * s[:4]) @ vt[:4]
    assert distance(got, best) <= 1e-5
    assert done.records[-1]["exactness"]["tail"] == pytest.approx(distance(got, ideal), rel=1e-2)


def test_fedplora_modules_nobody_trained_keep_their_bits(runs) -> None:
    """Rest and selected are the whole adapter before training; the untrained modules are bit-equal after it."""
    done = runs("fedplora", "run.rounds=1", "lora.site-ranks=clinic=1,kitchen=1")
    from umbel.models.adapter import initial_adapter

    start = done.session.start
    first = initial_adapter(start.modules, start.settings, done.session.config.run.seed)
    name = next(n for n in first if n.endswith("lora_A.weight"))
    same = [
        bool(np.array_equal(a, b)) for a, b in zip(first[name], done.session.engine.state[name], strict=True)
    ]
    assert same == [False, False, True, True]


def test_ecolora_sends_half_and_covers_every_segment(runs) -> None:
    """Two sites, two segments: each is delivered once a round; a segment is half of the adapter to 2 %."""
    done = runs("ecolora")
    assert [r["coverage"] for r in done.records] == [[1, 1], [1, 1]]
    for w in done.wire:
        whole = sum(a.size for a in w.down.values())
        assert w.up["segment"].size == pytest.approx(whole / 2, rel=0.02)
    assert [w.exchange.up.part[0] for w in done.wire] == [1, 0, 0, 1]


def test_fedsb_and_ravan_send_cores_only(runs) -> None:
    """r^2 numbers a layer and round (h q^2 with h heads), and no factor after the first round of fedsb."""
    layers = len(runs("ravan").session.start.modules)
    for method, numbers, first in (("ravan", 2 * 2 * 2, 1), ("fedsb", 4 * 4, 2)):
        sent = [w for w in runs(method).wire if w.round >= first]
        assert {sum(a.size for a in w.up.values()) for w in sent} == {layers * numbers}
    assert runs("fedsb").wire[0].exchange.trains == "gradient"


def test_fedsa_sites_keep_their_b_and_export_their_own_adapter(runs) -> None:
    """B_i is durable at the site, differs between sites, and base + s B_i A is what the site exports."""
    done = runs("fedsa")
    from safetensors.numpy import load_file

    shared, own = {}, {}
    for site in ("clinic", "kitchen"):
        (folder,) = (done.folder / "state" / site).glob(f"*/{site}/adapter")
        arrays = load_file(folder / "adapter_model.safetensors")
        own[site] = {n: a for n, a in arrays.items() if "lora_B" in n}
        shared[site] = {n.removeprefix("base_model.model."): a for n, a in arrays.items() if "lora_A" in n}
    for name, array in shared["clinic"].items():
        assert np.array_equal(array, shared["kitchen"][name])
        assert np.array_equal(array, done.session.engine.state[name])
    assert all(np.abs(b).max() > 0 for b in own["clinic"].values())
    assert any(not np.array_equal(own["clinic"][n], own["kitchen"][n]) for n in own["clinic"])
    assert not (done.folder / "run" / "adapter").exists()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "fedsa"])
def test_t8_d07_the_export_is_one_peft_adapter_with_the_served_logits(runs, method: str) -> None:
    """T8, D07: PeftModel.from_pretrained and merge_and_unload give the logits that the sites are served."""
    done = runs(method)
    model, _ = exported(done)
    want, got = logits(served(done)), logits(model)
    assert np.abs(got - want).max() <= 1e-5
    assert np.abs(logits(model.merge_and_unload()) - want).max() <= 1e-5


@pytest.mark.parametrize("method", ["carry", "ffa", "fedask", "ecolora", "ravan", "rolora", "fedsa"])
def test_a_lossy_codec_fits_every_form(runs, method: str) -> None:
    """Changes are taken against the same start at both ends, whatever it is that travels."""
    lossy, plain = runs(method, "compression.up=int8(64,rtn);min=1"), runs(method)
    assert [len(r["accepted"]) for r in lossy.records] == [2, 2]
    if method != "ravan":  # its cores here are smaller than a frame's own header
        assert lossy.records[0]["bytes_up"] < 0.5 * plain.records[0]["bytes_up"]
    for name, array in plain.session.engine.state.items():
        if name.endswith(("lora_B.weight", "core")):
            assert np.abs(lossy.session.engine.state[name] - array).max() <= 0.5 * np.abs(array).max() + 1e-9


@pytest.mark.parametrize(("method", "forms"), [("fedit", 1), ("rolora", 2), ("ecolora", 3), ("fedsb", 2)])
def test_each_form_of_a_method_has_a_residual_of_its_own(runs, method: str, forms: int) -> None:
    """What was dropped from one factor or segment waits for that factor or segment; nothing is refused or lost."""
    done = runs(
        method,
        "compression.up=int4(64,rtn);min=1",
        "compression.feedback=1",
        "lora.segments=3",
        "run.rounds=4",
    )
    assert [len(r["accepted"]) for r in done.records] == [2] * 4
    for site in ("clinic", "kitchen"):
        assert len(list((done.folder / "state" / site).rglob("residual-*.safetensors"))) == forms


@pytest.mark.parametrize(
    ("method", "overrides"),
    [*((m, ()) for m in METHODS), ("carry", MIXED), ("flora", MIXED), ("hetlora", MIXED)],
)
def test_the_plan_agrees_with_the_bytes_of_the_run(runs, method: str, overrides) -> None:
    """Within 5 %, in every round and direction, from the configuration alone."""
    from server_app.byte_plan import BytePlan
    from umbel.cli.plan import make_plan

    done = runs(method, *overrides)
    sites = ["clinic", "kitchen"]
    # A method with a codec of its own: the plan of real frames.
    coded = method in NEEDED
    rounds = (
        BytePlan(done.session.config, sites).rounds()
        if coded
        else make_plan(done.session.config, sites)["rounds"]
    )
    for planned, record in zip(rounds, done.records, strict=True):
        assert sum(planned["up"].values()) == pytest.approx(record["bytes_up"], rel=0.05)
        assert sum(planned["down"].values()) == pytest.approx(record["bytes_down"], rel=0.05)


@pytest.mark.parametrize("method", ["rolora", "carry", "fedplora", "ecolora", "fedsa", "ravan"])
def test_a_site_that_is_asked_only_now_and_then(runs, method: str) -> None:
    """One of two sites a round: whoever returns gets all it needs, and a report is written of what there is."""
    done = runs(method, "clients.goal=1", "clients.over-provision=1", "run.rounds=4", "telemetry.report=true")
    asked = [r["selected"] for r in done.records]
    assert [len(a) for a in asked] == [1] * 4
    assert [[e["site"] for e in r["accepted"]] for r in done.records] == asked
    assert len({r["state_crc"] for r in done.records}) == 4
    assert (done.folder / "run" / "report.html").stat().st_size > 1000
    if method in ("rolora", "carry", "ravan"):
        assert all(r["exactness"]["relative_error"] <= 1e-6 for r in done.records)
