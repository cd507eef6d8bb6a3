"""F43: a masked sum equals the plain fixed-point sum of those who sent, to 0 ulp, or halts; whoever falls silent when."""

from __future__ import annotations

import hashlib
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compression import EncodeError, FrameError
from compression.secure_sum import SumPlan, add, decode_sum, residues
from compression.secure_sum_masks import add_mask, agree, new_pair, public_of, seal, unseal
from compression.secure_sum_protocol import (
    STAGES,
    Collector,
    Keys,
    Member,
    Revealed,
    SecureSumHalted,
    Terms,
    mask_key,
    run_in_process,
)
from compression.secure_sum_shares import PRIME, combine, split
from umbel.errors import ConfigError

pytestmark = pytest.mark.fault

NAMES = ("clinic", "garage", "kitchen", "office", "workshop")
PLAN = SumPlan(step=2.0**-10, max_level=4096, max_sites=5)
NUMEL = 17


def terms(threshold: int = 0, session: str = "run-1/round-1", plan: SumPlan = PLAN) -> Terms:
    return Terms(session, NAMES, NUMEL, plan, threshold)


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(-3, 3, NUMEL) for name in NAMES}


def plain(values: dict[str, np.ndarray], names: set[str], plan: SumPlan = PLAN) -> np.ndarray:
    return decode_sum(add([residues(values[n], plan) for n in sorted(names)], plan), plan)


def test_f43_without_a_fault_the_sum_is_the_plain_one() -> None:
    values = inputs()
    got, sent = run_in_process(values, terms())
    assert sent == set(NAMES)
    assert got.tobytes() == plain(values, sent).tobytes()
    assert np.abs(got - sum(values.values())).max() < len(NAMES) * PLAN.step


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num", [1, 2, 3])
def test_f43_sites_fall_silent_at_every_stage(stage, num) -> None:
    """F43: with a threshold of 3 of 5, two may go at any stage; a third halts the sum, whatever it had sent."""
    values, gone = inputs(), dict.fromkeys(NAMES[:num], stage)
    if num == 3:
        with pytest.raises(SecureSumHalted, match=r"2 of 5 sites are left, 3 are needed"):
            run_in_process(values, terms(3), gone)
        return
    got, sent = run_in_process(values, terms(3), gone)
    # Who is silent only in the last stage has sent its value and is in the sum.
    assert sent == (set(NAMES) if stage == "unmask" else set(NAMES) - set(gone))
    assert got.tobytes() == plain(values, sent).tobytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([None, *STAGES]), min_size=5, max_size=5), st.integers(3, 5))
def test_f43_any_pattern_of_silence_is_exact_or_halts(pattern, threshold) -> None:
    gone = {name: stage for name, stage in zip(NAMES, pattern, strict=True) if stage}
    values = inputs(threshold)
    left = [sum(s is None or STAGES.index(s) > at for s in pattern) for at in range(len(STAGES))]
    if min(left) < threshold:
        with pytest.raises(SecureSumHalted):
            run_in_process(values, terms(threshold), gone)
        return
    got, sent = run_in_process(values, terms(threshold), gone)
    assert sent == {n for n in NAMES if gone.get(n) in (None, "unmask")}
    assert got.tobytes() == plain(values, sent).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_f43_low_precision_inputs_lose_nothing_on_the_way(dtype) -> None:
    """F43: values that are multiples of the step come back exactly, whatever dtype they were kept in."""
    base = (np.arange(NUMEL) - 8) / 16
    values = {name: (base * (i + 1)).astype(dtype) for i, name in enumerate(NAMES)}
    got, sent = run_in_process(values, terms())
    assert got.tolist() == sum(v.astype(np.float64) for v in values.values()).tolist()
    assert sent == set(NAMES)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 4097 * PLAN.step, -1e300])
def test_f43_a_value_that_cannot_be_summed_drops_its_site_and_no_other(bad) -> None:
    """F43: NaN, infinity and range: the site sends nothing; the others' sum is exact."""
    values = inputs()
    values["garage"][3] = bad
    got, sent = run_in_process(values, terms(3))
    assert sent == set(NAMES) - {"garage"}
    assert got.tobytes() == plain(values, sent).tobytes()


@pytest.mark.parametrize("sign", [1, -1])
def test_f43_the_largest_legal_sum_does_not_wrap(sign) -> None:
    edge = np.full(NUMEL, sign * PLAN.max_level * PLAN.step)
    got, _ = run_in_process(dict.fromkeys(NAMES, edge), terms())
    assert got.tolist() == (5 * edge).tolist()


def played(values: dict[str, np.ndarray], agreed: Terms, silent: str = ""):
    """Return (server, members, revealed) just before the last step; `silent` shares and sends nothing after that."""
    members, server = {n: Member(n, agreed) for n in NAMES}, Collector(agreed)
    keys = server.take_keys({n: m.advertise() for n, m in members.items()})
    mail = server.take_shares({n: m.share(keys) for n, m in members.items()})
    sent = server.take_masked({n: members[n].mask(values[n], mail[n]) for n in NAMES if n != silent})
    return server, members, {n: members[n].unmask(sent) for n in sorted(sent)}


def test_f43_a_wrong_share_halts_and_gives_no_number() -> None:
    """F43: of a seed (all sent) and of a mask key (one silent); each is recognised by its hash or its public key."""
    for silent, part in (("", "seeds"), ("office", "keys")):
        server, _, revealed = played(inputs(), terms(3), silent)
        good = server.finish(revealed)
        first = sorted(revealed)[0]
        shares = dict(getattr(revealed[first], part))
        target = sorted(shares)[0]
        shares[target] = (shares[target] + 1) % PRIME
        revealed[first] = revealed[first]._replace(**{part: shares})
        with pytest.raises(SecureSumHalted, match="unmask"):
            server.finish(revealed)
        assert np.isfinite(good).all()


def test_f43_too_few_answers_at_the_end_halt() -> None:
    server, _, revealed = played(inputs(), terms(4))
    few = dict(list(revealed.items())[:3])
    with pytest.raises(SecureSumHalted, match="3 of 5"):
        server.finish(few)
    # Enough answers, but one of them holds nothing.
    hollow = {**dict(list(revealed.items())[:4]), "clinic": Revealed({}, {})}
    with pytest.raises(SecureSumHalted, match="3 shares, 4 are needed"):
        server.finish(hollow)


def test_f43_a_site_answers_once_and_for_one_set() -> None:
    """Both shares of one peer would lay its input bare: the second question is refused, whatever it is."""
    _, members, _ = played(inputs(), terms(3))
    for asked in (set(NAMES), set(NAMES) - {"office"}):
        with pytest.raises(SecureSumHalted, match="once"):
            members["clinic"].unmask(asked)


def test_f43_a_late_value_stays_hidden_although_the_server_knows_its_mask_key() -> None:
    """Double masking: `office` was given up, its key reconstructed, and then its value arrives."""
    values, agreed = inputs(), terms(3)
    members, server = {n: Member(n, agreed) for n in NAMES}, Collector(agreed)
    keys = server.take_keys({n: m.advertise() for n, m in members.items()})
    mail = server.take_shares({n: m.share(keys) for n, m in members.items()})
    late = members["office"].mask(values["office"], mail["office"])
    sent = server.take_masked({n: members[n].mask(values[n], mail[n]) for n in NAMES if n != "office"})
    revealed = {n: members[n].unmask(sent) for n in sorted(sent)}
    server.finish(revealed)
    secret = combine({agreed.point(n): r.keys["office"] for n, r in revealed.items()}, 3)
    assert public_of(secret) == keys["office"].masking
    for peer in sorted(set(NAMES) - {"office"}):
        key = mask_key(agreed, secret, keys[peer].masking, "office", peer)
        add_mask(late, key, PLAN, -1 if peer > "office" else 1)
    bare = residues(values["office"], PLAN)
    assert (late != bare).mean() > 0.9
    assert all("office" not in r.seeds for r in revealed.values())


def test_one_masked_value_looks_uniform() -> None:
    """A zero input: mean and spread of the masked residues are those of the uniform distribution mod 2^m."""
    wide = Terms("uniform", NAMES, 40_000, PLAN, 3)
    members, server = {n: Member(n, wide) for n in NAMES}, Collector(wide)
    keys = server.take_keys({n: m.advertise() for n, m in members.items()})
    mail = server.take_shares({n: m.share(keys) for n, m in members.items()})
    y = members["clinic"].mask(np.zeros(40_000), mail["clinic"]).astype(np.float64) / (PLAN.mask + 1)
    assert abs(y.mean() - 0.5) < 6 / np.sqrt(12 * y.size)
    assert abs(y.var() - 1 / 12) < 6 * np.sqrt(1 / 180 / y.size)


def test_a_share_is_bound_to_its_sender_and_its_receiver() -> None:
    agreed = terms(3)
    members, server = {n: Member(n, agreed) for n in NAMES}, Collector(agreed)
    keys = server.take_keys({n: m.advertise() for n, m in members.items()})
    mail = server.take_shares({n: m.share(keys) for n, m in members.items()})
    swapped = {**mail["clinic"], "garage": mail["clinic"]["kitchen"]}
    with pytest.raises(FrameError, match="changed or is for somebody else"):
        members["clinic"].mask(np.zeros(NUMEL), swapped)
    with pytest.raises(FrameError, match="changed"):
        unseal(b"k" * 32, seal(b"k" * 32, b"text")[:-1] + b"\x00")


def test_keys_that_are_not_ours_or_are_used_twice_are_refused() -> None:
    agreed = terms(3)
    members = {n: Member(n, agreed) for n in NAMES}
    keys = {n: m.advertise() for n, m in members.items()}
    stolen = {**keys, "garage": keys["kitchen"]}
    for name, wrong in (("garage", stolen), ("clinic", stolen), ("clinic", {n: keys[n] for n in NAMES[1:]})):
        with pytest.raises(SecureSumHalted):
            members[name].share(wrong)
    with pytest.raises(FrameError, match="unusable"):
        agree(new_pair().secret, b"\x00" * 32, "x")
    assert isinstance(keys["clinic"], Keys)


def test_a_wrong_shape_of_a_masked_value_halts() -> None:
    agreed = terms(3)
    for bad in (np.zeros(NUMEL - 1, np.uint64), np.zeros(NUMEL), np.full(NUMEL, PLAN.mask + 1, np.uint64)):
        server = Collector(agreed)
        server.keys, server.sharing = dict.fromkeys(NAMES), set(NAMES)
        with pytest.raises(SecureSumHalted, match="is not 17 residues"):
            server.take_masked({**dict.fromkeys(NAMES, np.zeros(NUMEL, np.uint64)), "office": bad})
    members, server = {n: Member(n, agreed) for n in NAMES}, Collector(agreed)
    keys = server.take_keys({n: m.advertise() for n, m in members.items()})
    mail = server.take_shares({n: m.share(keys) for n, m in members.items()})
    with pytest.raises(EncodeError, match="16 values"):
        members["clinic"].mask(np.zeros(NUMEL - 1), mail["clinic"])


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.data())
@settings(max_examples=30, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_back(secret, threshold, data) -> None:
    shares = split(secret, threshold, range(1, 8))
    some = data.draw(st.permutations(sorted(shares)))
    assert combine({p: shares[p] for p in some[:threshold]}, threshold) == secret
    with pytest.raises(FrameError, match="are needed"):
        combine({p: shares[p] for p in some[: threshold - 1]}, threshold)


def test_fewer_shares_say_nothing_about_the_secret() -> None:
    """Over a small field the t - 1 shares of two secrets take every value equally often; here: they are never fixed."""
    seen = {split(b"\x00" * 32, 2, [1, 2])[1] for _ in range(50)}
    assert len(seen) == 50
    with pytest.raises(ValueError, match="distinct"):
        split(b"\x00" * 32, 2, [1, 1, 2])
    # Shares of two different secrets do not silently make a third one.
    one, two = split(b"\x01" * 32, 2, [1, 2]), split(b"\x02" * 32, 2, [1, 2])
    with pytest.raises(FrameError, match="do not fit"):
        combine({1: one[1], 2: two[2]}, 2)


def test_terms_that_cannot_protect_are_refused() -> None:
    assert terms().threshold == 4
    for bad in (
        {"members": ("a",)},
        {"members": ("a", "a", "b")},
        {"members": tuple("abcdef")},
        {"threshold": 2},
        {"threshold": 6},
    ):
        with pytest.raises(ConfigError):
            Terms(**({"session": "s", "members": NAMES, "numel": 3, "plan": PLAN} | bad))
    with pytest.raises(SecureSumHalted, match="no member"):
        terms().require("advertise", [*NAMES, "stranger"])


def test_masks_of_every_pair_cancel_in_every_order() -> None:
    key = hashlib.sha256(b"pair").digest()
    for first, second in product((1, -1), repeat=2):
        values = np.arange(9, dtype=np.uint64)
        add_mask(values, key, PLAN, first)
        masked = values.copy()
        add_mask(values, key, PLAN, second)
        assert (values.tolist() == list(range(9))) == (first != second)
        assert masked.tolist() != list(range(9))
