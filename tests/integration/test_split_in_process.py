"""Split runs in one process over real sockets: stream, messages and no link at all give the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.inprocess import commits, crcs, make_session
from support.proxy import Proxy

from client_app.clock import Clock
from client_app.tasks.split import Progress, finish, train_chunks
from client_app.tasks.split_parts import TrueHalf, load_parts, padded
from server_app.split_half import Body
from strategies import SiteUpdate
from strategies.registry import build
from umbel.cli.flower import free_port
from umbel.config import resolve
from umbel.data.cursor import Cursor
from umbel.digest import state_crc
from umbel.split import HEADER, Frame, FrameKind, LocalTransport
from umbel.telemetry.events import read_events

SITES = ("clinic", "kitchen")
CUT = (
    "run.task=split",
    "model.name=builtin:tiny-llama-4",
    "run.rounds=2",
    "clients.minimum=2",
    "train.local-steps=2",
    "train.batch-size=2",
    "train.clip-norm=0",
    "train.optimizer-state=reset",
    "split.chunk=3",
    "split.activation-codec=raw",
    "split.gradient-codec=raw",
)


def run(folder: Path, *overrides: str, sites=SITES, wrap=lambda name, answer: answer):
    session = make_session(folder, *CUT, *overrides, sites=sites, wrap=wrap)
    assert session.run() == 0, session.history.reason
    return session


@pytest.fixture(scope="module", params=["u", "two-part"])
def streamed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"stream-{request.param}")
    session = run(folder, f"split.shape={request.param}", "split.transport=stream")
    return request.param, folder, session


def test_messages_give_the_bits_of_the_stream_s4(streamed, tmp_path) -> None:
    shape, folder, _ = streamed
    run(tmp_path, f"split.shape={shape}", "split.transport=messages")
    assert crcs(tmp_path) == crcs(folder)
    for where, transport in ((folder, "stream"), (tmp_path, "messages")):
        for record in commits(where):
            assert {row["transport"] for row in record["split"].values()} == {transport}
            assert {row["chunks"] for row in record["split"].values()} == {2}
            assert {a["steps"] for a in record["accepted"]} == {2}


def by_hand(session, shape: str, seen=lambda data: None) -> tuple[dict, dict]:
    """Do round 1 of a run without a link, in one thread; returns (next state, site -> label tokens)."""
    config, start = session.config, session.start
    strategy = build(config, start.layout, start.scales)
    body = Body(config, [e.name for e in start.layout.entries])
    strategy.set_site_names(body.site_names())
    body.begin(1, 1, start.state, 0, config.run.rounds * config.train.local_steps)
    updates, tokens = [], {}
    for site in SITES:
        half = TrueHalf(config, *load_parts(config))
        half.start({n: start.state[n] for n in half.named}, {}, site=site, round_index=1)
        server = body.open(site)
        transport = LocalTransport(server.answer, seen=seen)
        half.check_ready(transport.exchange(Frame(FrameKind.HELLO, 0, 0, half.hello())))
        options = {"first_step": 0, "total_steps": 4, "num_chunks": 2}
        progress = train_chunks(
            half,
            rows_of(session, site),
            config,
            Clock(1e6),
            transport,
            Progress(Cursor()),
            site=site,
            **options,
        )
        result = finish(half, transport, progress, 2)
        joined = {**start.state, **result.arrays, **server.result(2).arrays}
        updates.append(SiteUpdate(site, float(result.tokens), joined))
        tokens[site] = result.tokens
    return strategy.aggregate(start.state, updates).state, tokens


def rows_of(session, site: str):
    from client_app.identity import Identity
    from client_app.workbench import load_site_data
    from umbel.models.described import described
    from umbel.models.source import load_tokenizer

    tokenizer = load_tokenizer(described(session.config)[0])
    return load_site_data(
        session.config, Identity(site, f"demo:{site}", (0, 1), "iid", Path("/")), tokenizer
    ).train


def test_without_a_link_the_same_bits_s4(streamed) -> None:
    shape, folder, session = streamed
    state, tokens = by_hand(session, shape)
    first = commits(folder)[0]
    assert state_crc(state) == first["state_crc"]
    assert {a["site"]: a["weight"] for a in first["accepted"]} == tokens


def test_a_chunk_is_gradient_accumulation_s1_s4(streamed, tmp_path) -> None:
    """The unsplit run with train.accumulation = K, row by row: equal but for the order of the sums."""
    session = streamed[2]
    flat = (*CUT, "run.task=sft", "train.accumulation=3", "data.packing=false", "eval.final=false")
    plain = make_session(tmp_path, *flat, sites=SITES)
    assert plain.run() == 0
    moved = 0.0
    for name, value in plain.engine.state.items():
        np.testing.assert_allclose(session.engine.state[name], value, atol=2e-5, rtol=2e-4, err_msg=name)
        moved = max(moved, float(np.abs(value - plain.start.state[name]).max()))
    assert moved > 1e-3


def test_labels_never_leave_the_site_in_u_s13(streamed) -> None:
    shape, _, session = streamed
    frames: list[bytes] = []
    by_hand(session, shape, frames.append)
    rows = [row for site in SITES for row in rows_of(session, site)]
    found = leaks(frames, rows)
    # The scan itself is checked by the shape that shows its labels.
    assert bool(found) == (shape == "two-part")


def leaks(frames: list[bytes], rows) -> list[str]:
    """Return which frames hold eight token ids of a row in a row, in any integer width."""
    needles = [
        np.ascontiguousarray(row.input_ids[at : at + 8], dtype).tobytes()
        for row in rows
        for dtype in ("<i4", "<i8", "<i2", "u1")
        for at in range(0, max(1, len(row.input_ids) - 8), 8)
    ]
    return [f"{data[5]}" for data in frames if any(needle in data for needle in needles)]


def test_shared_body_ends_where_the_last_site_left_it(tmp_path) -> None:
    session = run(tmp_path, "split.server-copies=shared", "split.transport=stream", "run.rounds=1")
    shared = session.engine.ctx.split.body.shared.arrays()
    for name, value in shared.items():
        np.testing.assert_array_equal(session.engine.state[name], value)
        assert not np.array_equal(value, session.start.state[name]) or name.endswith("lora_A.weight")


def test_auto_without_a_port_falls_back_and_says_so(tmp_path) -> None:
    run(tmp_path, "split.transport=auto", "split.address=127.0.0.1:9", "split.connect-s=0.3", "run.rounds=1")
    record = commits(tmp_path)[0]
    assert {row["transport"] for row in record["split"].values()} == {"messages"}
    assert all("gave no split stream" in row["fallback"] for row in record["split"].values())
    events = read_events(tmp_path / "run" / "events.jsonl")
    said = [(e["site"], e["transport"]) for e in events if e["event"] == "split_transport"]
    assert sorted(said) == [(site, "messages") for site in SITES]


def test_the_ledger_is_what_the_sockets_carried_s3(tmp_path) -> None:
    port = free_port()
    with Proxy(port) as link:
        run(
            tmp_path,
            "split.transport=stream",
            f"split.bind=127.0.0.1:{port}",
            f"split.address=127.0.0.1:{link.port}",
            "split.chunk=8",
            "run.rounds=1",
            "train.batch-size=4",
        )
        rows = commits(tmp_path)[0]["split"].values()
        up, down = (sum(row[key] for row in rows) for key in ("cut_up_bytes", "cut_down_bytes"))
        assert up == pytest.approx(link.up_bytes, rel=0.01)
        assert down == pytest.approx(link.down_bytes, rel=0.01)
    for row in rows:
        of = row["bytes"]
        assert of["act_up"] > 0 < of["out_down"] and of["grad_up"] > 0 < of["grad_down"]
        assert of["label_up"] == 0 < of["adapter_up"]
        cut = of["act_up"] + of["grad_up"] + of["control"]
        # HELLO and DONE are control; each frame has its header.
        assert row["cut_up_bytes"] - cut == pytest.approx(HEADER.size * (row["calls"] + 1), abs=600)


def test_a_cut_link_in_mid_chunk_changes_no_bit_s12(streamed, tmp_path) -> None:
    shape, folder, _ = streamed
    port = free_port()
    with Proxy(port) as link:
        link.reset_after_bytes = 60_000
        run(
            tmp_path,
            f"split.shape={shape}",
            "split.transport=stream",
            f"split.bind=127.0.0.1:{port}",
            f"split.address=127.0.0.1:{link.port}",
        )
        assert link.num_resets == 1
    assert crcs(tmp_path) == crcs(folder)
    assert sum(row["connections"] for row in commits(tmp_path)[0]["split"].values()) == 3


def test_a_site_that_dies_drops_both_halves_and_the_others_are_exact_s12(tmp_path) -> None:
    """The dead site's stream ends without DONE and its reply never comes; the round is that of the other site."""

    def dies(name, answer):
        def handle(kind, message):
            reply = answer(kind, message)
            return None if name == "kitchen" and kind == "train" else reply

        return handle

    overrides = ("run.rounds=1", "split.transport=stream", "clients.quorum=1", "clients.deadline-seconds=40")
    run(tmp_path / "dead", *overrides, "clients.grace-seconds=10", wrap=dies)
    run(tmp_path / "alone", *overrides, "clients.grace-seconds=10", "clients.minimum=1", sites=("clinic",))
    assert crcs(tmp_path / "dead") == crcs(tmp_path / "alone")


def test_an_early_stop_counts_with_its_chunks_on_both_sides_s12(tmp_path) -> None:
    """One site does one chunk of two: weight and steps are those of one chunk, and the body half is the one after it."""
    import client_app.split_round as site_side

    original = site_side.train_chunks

    def stops_early(half, rows, config, clock, transport, progress, **options):
        if options["site"] == "kitchen":
            clock = Clock(1e6)
            note = clock.note
            clock.note = lambda steps, tokens: (note(steps, tokens), setattr(clock, "_end", 0.0))
        return original(half, rows, config, clock, transport, progress, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_side, "train_chunks", stops_early)
        run(tmp_path, "run.rounds=1", "split.transport=stream")
    record = commits(tmp_path)[0]
    assert {a["site"]: a["steps"] for a in record["accepted"]} == {"clinic": 2, "kitchen": 1}
    events = read_events(tmp_path / "run" / "events.jsonl")
    partial = {e["site"]: e["partial"] for e in events if e["event"] == "update_accepted"}
    assert partial == {"clinic": False, "kitchen": True}


def test_no_token_of_a_session_is_written_down(streamed) -> None:
    """What lies in the run folder and at the sites after a run holds no 64 hex digits after the word token."""
    _, folder, _ = streamed
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".jsonl", ".json", ".log", ".toml", ".csv"):
            assert not re.search(r"token\W+[0-9a-f]{64}", path.read_text("utf-8", "replace"))


def test_bf16_halves_and_int8_quarters_what_crosses(tmp_path) -> None:
    sizes = {}
    for codec in ("raw", "bf16", "int8"):
        session = make_session(
            tmp_path / codec,
            *CUT,
            f"split.activation-codec={codec}",
            f"split.gradient-codec={codec}",
            "run.rounds=1",
            "split.transport=messages",
            sites=SITES,
        )
        assert session.run() == 0
        rows = commits(tmp_path / codec)[0]["split"].values()
        sizes[codec] = sum(row["bytes"]["act_up"] for row in rows)
    assert sizes["bf16"] == pytest.approx(0.5 * sizes["raw"], rel=0.02)
    assert sizes["int8"] == pytest.approx((64 + 4) / 256 * sizes["raw"], rel=0.03)


def test_a_saved_half_counts_when_its_site_dies_if_the_run_says_so_s12(tmp_path) -> None:
    """on-death = last-saved: the chunk that was saved counts, with its tokens; with drop, nothing of that site does."""
    import client_app.split_round as site_side

    def killed(half, transport, progress, num_chunks):
        if half.site_name == "kitchen":
            transport.inner.close()
            raise RuntimeError("killed")
        return finish(half, transport, progress, num_chunks)

    def lost(name, answer):
        def handle(kind, message):
            reply = answer(kind, message)
            return None if name == "kitchen" and kind == "train" else reply

        return handle

    overrides = ("run.rounds=1", "split.transport=stream", "split.save-every=1", "split.grace-s=0.1")
    overrides += ("clients.quorum=1", "clients.grace-seconds=90000", "clients.deadline-seconds=100000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_side, "finish", killed)
        run(tmp_path, *overrides, "split.on-death=last-saved", wrap=lost)
    record = commits(tmp_path)[0]
    assert {a["site"]: a["steps"] for a in record["accepted"]} == {"clinic": 2, "kitchen": 1}
    assert record["split"]["kitchen"]["bytes"]["adapter_up"] > 0


def test_source_none_uploads_once_and_trains_the_body_alone_s8(tmp_path) -> None:
    session = run(tmp_path, "split.gradient=none", "split.shape=two-part", "split.activation-codec=bf16")
    first, second = commits(tmp_path)
    assert {row["bytes"]["act_up"] > 0 for row in first["split"].values()} == {True}
    assert {row["bytes"]["act_up"] for row in second["split"].values()} == {0}
    assert first["server_steps"] == second["server_steps"] == 4
    assert second["train_loss"] < first["train_loss"]
    body = set(session.engine.ctx.split.body.body_names())
    for name, value in session.engine.state.items():
        same = np.array_equal(value, session.start.state[name])
        assert same == (name not in body), name


def test_padding_changes_no_result() -> None:
    """A right padded row's labels are those of the row alone."""
    config = resolve(None, [*CUT])

    class Row:
        def __init__(self, size: int) -> None:
            self.input_ids = np.arange(size) + 5
            self.labels = np.arange(size) + 5

    ids, labels = padded([Row(3), Row(6)])
    assert ids.shape == labels.shape == (2, 6)
    assert (labels[0, 3:] == -100).all() and config.split.chunk == 3
    assert json.dumps(ids[1].tolist()) == json.dumps(list(range(5, 11)))
