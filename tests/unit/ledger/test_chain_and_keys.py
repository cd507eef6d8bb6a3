"""The chain of lines and the site's key: every change, removal and insertion is named by its line."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.errors import ConfigError
from umbel.ledger import chain, keys


def filled(path, number: int = 4) -> list[str]:
    for i in range(number):
        chain.append(path, {"i": i})
    return path.read_text().splitlines()


def test_a_chain_that_nobody_touched_is_whole(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    lines = filled(path)
    assert chain.first_break(path) == ""
    assert json.loads(lines[0])["prev"] == ""
    assert json.loads(lines[1])["prev"] == json.loads(lines[0])["hash"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert chain.first_break(tmp_path / "absent") == ""


@settings(max_examples=40, deadline=None)
@given(line=st.integers(0, 3), how=st.sampled_from(["change", "remove", "swap", "insert", "rehash"]))
def test_whatever_is_done_to_a_line_before_the_last_is_named(tmp_path_factory, line, how) -> None:
    path = tmp_path_factory.mktemp("chain") / "a.jsonl"
    lines = filled(path)
    if how == "change":
        lines[line] = lines[line].replace(f'"i":{line}', f'"i":{line + 10}')
    elif how == "remove":
        # Cutting the end off cannot be seen in the file itself.
        line = min(line, 2)
        del lines[line]
    elif how == "swap":
        line = min(line, 2)
        lines[line], lines[line + 1] = lines[line + 1], lines[line]
    elif how == "insert":
        lines.insert(line, lines[line])
        line += 1
    else:
        line = min(line, 2)
        record = json.loads(lines[line]) | {"i": 99}
        record["hash"] = chain.hash_of(record)
        lines[line] = chain.canonical(record).decode()
        line += 1
    path.write_text("\n".join(lines) + "\n")
    assert chain.first_break(path).startswith(f"a.jsonl line {line + 1} ")


def test_a_killed_writer_leaves_a_torn_line_and_the_chain_goes_on(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    filled(path, 2)
    with open(path, "a") as file:
        file.write('{"i": 7, "pr')
    chain.append(path, {"i": 2})
    assert chain.first_break(path) == ""
    assert [r["i"] for r in chain.records(path)] == [0, 1, 2]


def test_a_line_longer_than_the_window_is_still_linked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chain, "_TAIL_BYTES", 64)
    path = tmp_path / "a.jsonl"
    for size in (10, 5000, 100, 70):
        chain.append(path, {"text": "x" * size})
    assert chain.first_break(path) == ""


def test_two_writers_make_one_chain(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    threads = [threading.Thread(target=filled, args=(path, 20)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert chain.first_break(path) == ""
    assert len(chain.records(path)) == 80


def test_a_number_that_is_none_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError):
        chain.append(tmp_path / "a.jsonl", {"loss": float("nan")})


def test_a_key_is_made_once_private_and_read_again(tmp_path) -> None:
    path = tmp_path / "state" / "clinic.key.pem"
    first = keys.public_hex(keys.load_or_make(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.public_hex(keys.load_or_make(path)) == first
    assert os.listdir(path.parent) == ["clinic.key.pem"]
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.load_or_make(path)
    os.chmod(path, 0o600)
    path.write_text("-----BEGIN PRIVATE KEY-----\nno\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="ed25519"):
        keys.load_or_make(path)


def test_a_signature_holds_for_one_key_and_one_message(tmp_path) -> None:
    a, b = (keys.load_or_make(tmp_path / n) for n in "ab")
    signature = a.sign(b"m").hex()
    assert keys.signature_holds(keys.public_hex(a), signature, b"m")
    assert not keys.signature_holds(keys.public_hex(a), signature, b"n")
    assert not keys.signature_holds(keys.public_hex(b), signature, b"m")
    assert not keys.signature_holds("zz", signature, b"m")
    assert not keys.signature_holds(keys.public_hex(a), "", b"m")
