"""The stream of split learning over real sockets: who gets in, what ends a session, what survives a cut."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from support.proxy import Proxy

from client_app.split_stream import Dial, SplitStream, Unreachable
from server_app.split_stream import Endpoint, Session, Standing
from umbel.errors import ConfigError, Refusal
from umbel.split import Frame, FrameKind, SplitError, pack_frame
from umbel.split_link import PATH, TOKEN_BYTES, TOKEN_KEY

HELLO = Frame(FrameKind.HELLO, 0, 0, b"hello")
STEPS = 4
ROOT = Path(__file__).resolve().parents[3]


class Doubler:
    """A server half that answers FWD and GRAD with the payload twice, and remembers every call."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.seconds = seconds

    def __call__(self, frame: Frame) -> Frame:
        if frame.kind is FrameKind.HELLO:
            return Frame(FrameKind.READY, 0, 0, b"ready")
        self.calls.append((frame.kind.name, frame.chunk, frame.step))
        time.sleep(self.seconds)
        kind = {FrameKind.FWD: FrameKind.OUT, FrameKind.GRAD: FrameKind.BWD}.get(frame.kind, frame.kind)
        return Frame(kind, frame.chunk, frame.step, frame.payload * 2)


@contextmanager
def endpoint(**options) -> Iterator[Endpoint]:
    made = Endpoint(**{"keepalive_seconds": 2.0, "max_frame_bytes": 1 << 20, **options})
    try:
        yield made
    finally:
        made.stop()


def session(work=None, **options) -> Session:
    wanted = {"num_steps": STEPS, "max_frame_bytes": 1 << 20, "ttl_seconds": 60.0, **options}
    return Session("a", work or Doubler(), **wanted)


def dial(point: Endpoint, token: bytes, **options) -> Dial:
    wanted = {
        "connect_seconds": 3.0,
        "patience_seconds": 5.0,
        "keepalive_seconds": 2.0,
        "window": STEPS,
        **options,
    }
    return Dial(wanted.pop("address", point.address), token, **wanted)


def fwd(chunk: int, step: int, payload: bytes = b"x") -> Frame:
    return Frame(FrameKind.FWD, chunk, step, payload)


def wait_for(what, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_round_of_frames_keeps_order_and_counts_every_byte() -> None:
    with endpoint() as point:
        work = Doubler()
        held = point.open(session(work))
        with SplitStream(dial(point, held.token)) as stream:
            assert stream.greet(HELLO).payload == b"ready"
            for step in range(STEPS):
                stream.send(fwd(1, step, bytes([step]) * 10))
            answers = [stream.receive() for _ in range(STEPS)]
            assert [(a.kind, a.step, a.payload) for a in answers] == [
                (FrameKind.OUT, s, bytes([s]) * 20) for s in range(STEPS)
            ]
            done = stream.exchange(Frame(FrameKind.DONE, 1, 0, b""))
            assert done.kind is FrameKind.DONE
        assert held.standing is Standing.DONE
        assert (held.traffic.up_bytes, held.traffic.down_bytes) == (
            stream.traffic.up_bytes,
            stream.traffic.down_bytes,
        )
        assert work.calls == [("FWD", 1, s) for s in range(STEPS)] + [("DONE", 1, 0)]


@pytest.mark.parametrize("token", [b"", b"\x00" * TOKEN_BYTES, b"short"])
def test_an_unknown_token_is_refused_and_no_payload_is_read_s11(token: bytes) -> None:
    with endpoint() as point:
        work = Doubler()
        point.open(session(work))
        with SplitStream(dial(point, token)) as stream, pytest.raises(SplitError, match="does not know"):
            stream.greet(HELLO)
        assert work.calls == []


def test_the_refusal_comes_before_any_frame_is_sent_s11() -> None:
    with endpoint() as point:
        point.open(session())
        with grpc.insecure_channel(point.address) as channel:
            never = iter(lambda: time.sleep(60), None)
            call = channel.stream_stream(PATH)(never, metadata=((TOKEN_KEY, b"no"),))
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_an_expired_a_closed_and_a_foreign_token_are_refused_s11() -> None:
    with endpoint() as point, endpoint() as other:
        expired = point.open(session(ttl_seconds=0.0))
        closed = point.open(session())
        foreign = other.open(session())
        point.close(closed)
        for token in (expired.token, closed.token, foreign.token):
            with SplitStream(dial(point, token)) as stream, pytest.raises(SplitError, match="does not know"):
                stream.greet(HELLO)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "frame"),
        (b"\x80\x04K\x01.", "frame"),
        (pack_frame(fwd(1, 0))[:-1], "frame"),
        (pack_frame(fwd(1, 0)) + b"!", "frame"),
        (pack_frame(fwd(9, 0)), "chunk 9"),
        (pack_frame(fwd(1, STEPS)), "outside a chunk"),
        (pack_frame(Frame(FrameKind.OUT, 1, 0, b"")), "not the site's"),
    ],
)
def test_a_malformed_frame_ends_that_stream_only_s11(data: bytes, reason: str) -> None:
    with endpoint() as point:
        bad, good = point.open(session()), point.open(session())
        with SplitStream(dial(point, good.token)) as neighbour:
            neighbour.greet(HELLO)
            with grpc.insecure_channel(point.address) as channel:
                frames = iter([pack_frame(HELLO), data])
                call = channel.stream_stream(PATH)(frames, metadata=((TOKEN_KEY, bad.token),))
                answers = list(call)
            assert len(answers) == 2
            assert bad.standing is Standing.FAILED
            assert reason in bad.reason
            assert neighbour.exchange(fwd(1, 0)).payload == b"xx"
            assert good.standing is Standing.CONNECTED


def test_the_first_frame_must_be_hello() -> None:
    with endpoint() as point:
        held = point.open(session())
        with grpc.insecure_channel(point.address) as channel:
            call = channel.stream_stream(PATH)(
                iter([pack_frame(fwd(1, 0))]), metadata=((TOKEN_KEY, held.token),)
            )
            assert len(list(call)) == 1
        assert "HELLO" in held.reason


def test_a_payload_above_the_sessions_cap_ends_the_session() -> None:
    with endpoint() as point:
        work = Doubler()
        held = point.open(session(work, max_frame_bytes=100))
        with SplitStream(dial(point, held.token)) as stream:
            stream.greet(HELLO)
            with pytest.raises(SplitError, match="ended the session"):
                stream.exchange(fwd(1, 0, bytes(101)))
        assert work.calls == []


def test_a_message_above_the_endpoints_cap_is_never_taken() -> None:
    with endpoint(max_frame_bytes=1000) as point:
        work = Doubler()
        held = point.open(session(work))
        with SplitStream(dial(point, held.token, max_frame_bytes=1 << 20, patience_seconds=0.5)) as stream:
            stream.greet(HELLO)
            with pytest.raises(SplitError):
                stream.exchange(fwd(1, 0, bytes(50_000)))
        assert work.calls == []


def test_no_more_sessions_than_allowed() -> None:
    with endpoint(max_sessions=1) as point:
        first = point.open(session())
        with pytest.raises(SplitError, match="max-sessions"):
            point.open(session())
        point.close(first)
        point.open(session())


def test_the_site_never_has_more_frames_in_flight_than_its_window() -> None:
    with endpoint() as point:
        held = point.open(session(Doubler(seconds=0.02)))
        with SplitStream(dial(point, held.token, window=2)) as stream:
            stream.greet(HELLO)
            for step in range(STEPS):
                stream.send(fwd(1, step))
                assert len(stream._unanswered) <= 2
            assert [stream.receive().step for _ in range(STEPS)] == list(range(STEPS))


def test_a_cut_in_mid_chunk_resumes_and_nothing_is_worked_out_twice_s12() -> None:
    with endpoint() as point, Proxy(point.port) as link:
        work = Doubler(seconds=0.05)
        held = point.open(session(work))
        with SplitStream(dial(point, held.token, address=f"127.0.0.1:{link.port}")) as stream:
            stream.greet(HELLO)
            for step in range(STEPS):
                stream.send(fwd(1, step, bytes([step]) * 1000))
            first = stream.receive()
            link.reset_all()
            answers = [first] + [stream.receive() for _ in range(STEPS - 1)]
            assert [a.payload for a in answers] == [bytes([s]) * 2000 for s in range(STEPS)]
            assert stream.exchange(fwd(2, 0)).payload == b"xx"
            assert stream.traffic.connections == held.traffic.connections == 2
        assert work.calls == [("FWD", 1, s) for s in range(STEPS)] + [("FWD", 2, 0)]


def test_a_second_stream_of_one_site_takes_over() -> None:
    with endpoint() as point:
        held = point.open(session())
        with SplitStream(dial(point, held.token)) as old, SplitStream(dial(point, held.token)) as new:
            old.greet(HELLO)
            assert old.exchange(fwd(1, 0)).payload == b"xx"
            new.greet(HELLO)
            assert new.exchange(fwd(1, 1)).payload == b"xx"
            assert held.standing is Standing.CONNECTED
            wait_for(lambda: old._link._inbox.qsize() > 0)


def test_a_stream_that_stays_away_is_seen_at_once() -> None:
    with endpoint() as point:
        held = point.open(session())
        stream = SplitStream(dial(point, held.token))
        stream.greet(HELLO)
        assert held.broken_seconds(time.monotonic()) == 0.0
        stream.close()
        wait_for(lambda: held.standing is Standing.BROKEN)
        assert held.broken_seconds(time.monotonic() + 5.0) >= 5.0


def test_an_error_of_the_servers_half_ends_the_session_with_its_type_only() -> None:
    def work(frame: Frame) -> Frame:
        if frame.kind is FrameKind.HELLO:
            return Frame(FrameKind.READY, 0, 0, b"")
        raise KeyError("a secret of another site")

    with endpoint() as point:
        held = point.open(session(work))
        with SplitStream(dial(point, held.token)) as stream:
            stream.greet(HELLO)
            with pytest.raises(SplitError, match="KeyError") as ended:
                stream.exchange(fwd(1, 0))
    assert "secret" not in str(ended.value)


def test_nobody_there_is_unreachable_within_the_time() -> None:
    with endpoint() as point:
        address = point.address
    with (
        SplitStream(Dial(address, b"x" * TOKEN_BYTES, connect_seconds=0.5)) as stream,
        pytest.raises(Unreachable),
    ):
        stream.greet(HELLO)


def test_plaintext_off_loopback_is_refused_on_both_sides_s11() -> None:
    with pytest.raises(ConfigError, match=r"split.bind .* in the clear.*tls-cert"):
        Endpoint("0.0.0.0:0")
    with pytest.raises(Refusal, match="not sent in the clear"):
        Dial("192.0.2.7:443", b"").check()
    with pytest.raises(Refusal, match="split-addresses"):
        Dial("127.0.0.1:443", b"").check(("127.0.0.1:444",))
    assert Dial("127.0.0.1:443", b"").check(("127.0.0.1:443",))


def certificate(name: str) -> tuple[bytes, bytes]:
    """Return (key, certificate) for 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, made.public_bytes(serialization.Encoding.PEM)


def test_tls_with_the_servers_own_certificate_and_not_with_another() -> None:
    key, chain = certificate("server")
    stranger = certificate("stranger")[1]
    with endpoint(bind="0.0.0.0:0", certificate=(key, chain)) as point:
        held = point.open(session())
        address = f"127.0.0.1:{point.port}"
        with SplitStream(dial(point, held.token, address=address, certificate=chain)) as stream:
            stream.greet(HELLO)
            assert stream.exchange(fwd(1, 0)).payload == b"xx"
        for wrong in (stranger, b""):
            options = {"address": address, "certificate": wrong, "connect_seconds": 0.5}
            with SplitStream(dial(point, held.token, **options)) as stream, pytest.raises(Unreachable):
                stream.greet(HELLO)


def test_sites_slowed_by_1_2_4_do_their_own_number_of_calls_and_nobody_waits_s10() -> None:
    chunks = {"a": 8, "b": 4, "c": 2}
    ended: dict[str, float] = {}
    with endpoint() as point:
        works = {name: Doubler() for name in chunks}
        held = {name: point.open(session(works[name])) for name in chunks}

        def site(name: str, pause: float) -> None:
            with SplitStream(dial(point, held[name].token)) as stream:
                stream.greet(HELLO)
                for chunk in range(1, chunks[name] + 1):
                    time.sleep(pause)
                    for step in range(STEPS):
                        stream.send(fwd(chunk, step))
                    for _ in range(STEPS):
                        stream.receive()
                stream.exchange(Frame(FrameKind.DONE, chunks[name], 0))
            ended[name] = time.monotonic()

        began = time.monotonic()
        threads = [
            threading.Thread(target=site, args=(n, p)) for n, p in (("a", 0.05), ("b", 0.1), ("c", 0.2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert {n: s.standing for n, s in held.items()} == dict.fromkeys(chunks, Standing.DONE)
    # FWD of every batch and one DONE: the server's calls are the sum of the sites' own.
    assert {n: len(w.calls) for n, w in works.items()} == {n: STEPS * c + 1 for n, c in chunks.items()}
    assert len(ended) == 3 and all(t - began >= 0.4 for t in ended.values())


VICTIM = """
import sys, time
from client_app.split_stream import Dial, SplitStream
from umbel.split import Frame, FrameKind
stream = SplitStream(Dial(sys.argv[1], bytes.fromhex(sys.argv[2])))
stream.greet(Frame(FrameKind.HELLO, 0, 0, b"hello"))
stream.exchange(Frame(FrameKind.FWD, 1, 0, b"x"))
print("in mid chunk", flush=True)
time.sleep(60)
"""


def test_a_site_killed_with_9_is_missed_within_the_keepalive_and_its_neighbour_goes_on_s12() -> None:
    with endpoint() as point:
        victim, neighbour = point.open(session()), point.open(session())
        command = [sys.executable, "-c", VICTIM, point.address, victim.token.hex()]
        with (
            SplitStream(dial(point, neighbour.token)) as stream,
            subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process,
        ):
            stream.greet(HELLO)
            assert process.stdout.readline() == b"in mid chunk\n"
            assert victim.standing is Standing.CONNECTED
            process.kill()
            wait_for(lambda: victim.standing is Standing.BROKEN, seconds=4.0)
            assert stream.exchange(fwd(1, 0)).payload == b"xx"
            assert neighbour.standing is Standing.CONNECTED
