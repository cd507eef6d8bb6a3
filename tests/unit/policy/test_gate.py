"""The gate: what comes in is checked before anybody works, what goes out is bounded, signed and recorded."""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compression
from client_app.gate import gated, own_bundle
from client_app.resident.installed import check_installed, facts_of
from client_app.resident.site import main as site_main
from client_app.resident.site import names_policy
from client_app.sent import Outbox, keep_layout
from compression import Layout
from compression.payload import delta_layout
from umbel.config import resolve, to_json
from umbel.digest import state_crc
from umbel.ledger import chain
from umbel.ledger.manifest import manifest_in, manifest_problem
from umbel.messages import EVALUATE, JOIN, TRAIN, Instruction, Reply
from umbel.policy_checks import BundleFacts

BUNDLE = BundleFacts("ab" * 32, "umbel", True)
START = {"w": np.zeros((2, 3), np.float32), "n": np.array(7, np.int64)}
LAYOUT = Layout.from_arrays(START)


def order(**fields: Any) -> Instruction:
    base = {"run": "r", "round": 1, "attempt": 1, "base": state_crc(START), "site": "clinic"}
    rest = {
        "remaining_seconds": 60.0,
        "config": to_json(resolve(None, ["run.rounds=2"])),
        "layout": LAYOUT.digest(),
    }
    return Instruction(**(base | rest | fields))


class Worker:
    """Stands for the site's worker: answers with an update that moves `w` by `step`, and counts calls."""

    def __init__(self, folder: Path, step: float = 1.0, up: str = "exact", metrics: str = "{}") -> None:
        self.folder, self.step, self.up, self.metrics = folder, step, up, metrics
        self.seen: list[Instruction] = []

    def __call__(
        self, kind: str, instruction: Instruction, frame: Any, **node: Any
    ) -> tuple[Reply, bytes | None]:
        self.seen.append(instruction)
        echo = dataclasses.asdict(instruction)
        reply = Reply(
            **{k: echo[k] for k in ("run", "round", "attempt", "base")}, site="clinic", metrics=self.metrics
        )
        if kind != TRAIN:
            return reply, None
        values = {"w": START["w"] + np.float32(self.step), "n": START["n"]}
        layout = LAYOUT if self.up == "exact" else delta_layout(LAYOUT)
        keep_layout(self.folder / "r" / "clinic", layout)
        out = compression.encode(values, layout, self.up, seed=1, round_index=1, base=instruction.base)
        return dataclasses.replace(reply, tokens=10, steps=2, weight=10.0, loss=1.5), bytes(out)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return (node config, state folder, write(policy text))."""
    monkeypatch.delenv("UMBEL_SITE_POLICY", raising=False)
    state = tmp_path / "state"
    node = {"name": "clinic", "data": "demo:clinic", "state-dir": str(state)}

    def write(text: str) -> None:
        (tmp_path / "policy.toml").write_text(text)
        node["policy"] = str(tmp_path / "policy.toml")

    return node, state, write


def down() -> bytes:
    return bytes(compression.encode(START, LAYOUT, "exact", seed=0, round_index=1, base=state_crc(START)))


def call(worker: Worker, node: dict, kind: str = TRAIN, bundle: BundleFacts | None = BUNDLE, **fields: Any):
    keep_layout(worker.folder / "r" / "clinic", LAYOUT)
    frame = None if kind == JOIN else down()
    return gated(worker, bundle=bundle)(kind, order(**fields), frame, node_config=node, node_id=5)


def audit(state: Path) -> list[dict[str, Any]]:
    path = Outbox(state, "clinic").audit
    assert chain.first_break(path) == ""
    return chain.records(path)


def test_without_a_policy_the_answer_passes_signed_and_recorded(site) -> None:
    node, state, _ = site
    reply, frame = call(Worker(state, metrics='{"seconds": {"train": 1.0}}'), node, bundle=None)
    manifest = manifest_in(reply.metrics)
    assert manifest is not None
    assert manifest_problem(manifest, {"run": "r", "site": "clinic", "tokens": 10, "prev": ""}, frame) == ""
    (record,) = chain.records(state / "r" / "clinic" / "sent.jsonl")
    assert record["bytes"] == len(frame)
    assert record["metrics"] == {"seconds": {"train": 1.0}}
    assert (state / "r" / "clinic" / "last.frame").read_bytes() == frame
    key = state / "clinic.key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    totals = Outbox(state, "clinic").counters()
    assert totals["answers"] == {"train:ok": 1}
    assert (totals["bytes_up"], totals["bytes_down"], totals["tokens"]) == (len(frame), len(down()), 10)
    assert not Outbox(state, "clinic").audit.exists()


def test_the_next_manifest_names_the_one_that_the_server_says_counted(site) -> None:
    node, state, _ = site
    worker = Worker(state)
    first = manifest_in(call(worker, node)[0].metrics)
    call(worker, node, attempt=2)
    third = manifest_in(call(worker, node, round=2, settled="[1, 1]")[0].metrics)
    lost = manifest_in(call(worker, node, round=3, settled="[2, 9]")[0].metrics)
    from umbel.ledger.manifest import manifest_hash

    assert third["prev"] == manifest_hash(first)
    assert lost["prev"] == "unknown"


def test_a_broken_rule_is_refused_before_anybody_works_and_written_down(site) -> None:
    node, state, write = site
    write('[run]\ntasks = ["pretrain"]\nmax-rounds = 1\n')
    worker = Worker(state)
    reply, frame = call(worker, node)
    assert (reply.status, frame, worker.seen) == ("policy", None, [])
    assert reply.reason == (
        "run.task = 'sft' is not among run.tasks; run.rounds = 2 is more than run.max-rounds = 1"
    )
    (line,) = audit(state)
    assert line["event"] == "refused"
    assert line["bundle"] == BUNDLE.hash
    assert line["reason"] == reply.reason
    assert Outbox(state, "clinic").counters()["answers"] == {"train:policy": 1}


def test_a_policy_that_cannot_be_read_refuses_everything(site, tmp_path) -> None:
    node, state, write = site
    node["policy"] = str(tmp_path / "absent.toml")
    worker = Worker(state)
    for kind in (JOIN, TRAIN, EVALUATE):
        assert call(worker, node, kind)[0].status == "policy"
    write("[run]\nmax-roundz = 1\n")
    assert "max-roundz" in call(worker, node)[0].reason
    assert worker.seen == []


def test_code_in_a_bundle_knows_eight_digits_and_a_site_policy_does_not_trust_it(site, monkeypatch) -> None:
    node, state, write = site
    write("")
    assert "umbel site start" in call(Worker(state), node, bundle=None)[0].reason
    monkeypatch.setattr("client_app.gate.__file__", "/x/apps/umbel.umbel.0.1.0.abababab/client_app/gate.py")
    assert own_bundle() == BundleFacts("abababab", "umbel", False)
    write(f'enforced-by = "app"\n[bundle]\nhashes = ["{"ab" * 32}"]\npublishers = ["umbel"]\n')
    assert call(Worker(state), node, bundle=None)[0].status == "ok"
    write(f'enforced-by = "app"\n[bundle]\nhashes = ["{"cd" * 32}"]\n')
    assert "bundle abababab is not among" in call(Worker(state), node, bundle=None)[0].reason


def test_time_is_cut_and_hours_and_the_quorum_are_kept(site) -> None:
    node, state, write = site
    write("[run]\nmax-seconds-a-round = 20\nmin-sites = 3\nmax-hours = 0.001\n")
    worker = Worker(state)
    assert "run.min-sites = 3" in call(worker, node, directives='{"quorum": 2}')[0].reason
    assert call(worker, node, directives='{"quorum": 3}')[0].status == "ok"
    assert worker.seen[-1].remaining_seconds == 20.0
    path = Outbox(state, "clinic").counters_path
    totals = json.loads(path.read_text())
    totals["runs"]["r"] = 3.7
    path.write_text(json.dumps(totals))
    assert "run.max-hours" in call(worker, node, directives='{"quorum": 3}')[0].reason


def test_metrics_that_may_not_leave_stay_and_joining_still_works(site) -> None:
    node, state, write = site
    write('[metrics]\nallowed = ["seconds"]\n')
    metrics = '{"seconds": {"train": 1.0}, "epoch": 3, "heldout": {"loss_sum": 2.0}}'
    reply, _ = call(Worker(state, metrics=metrics), node)
    assert set(json.loads(reply.metrics)) == {"seconds", "manifest"}
    facts = '{"model": "m", "tokenizer": "t", "layout": "l", "rows_train": 7}'
    reply, _ = call(Worker(state, metrics=facts), node, JOIN)
    assert set(json.loads(reply.metrics)) == {"model", "tokenizer", "layout", "key"}
    withheld = [line["names"] for line in audit(state) if line["event"] == "metrics_withheld"]
    assert withheld == [["epoch", "heldout"], ["rows_train"]]


def test_an_update_beyond_the_norm_is_refused_or_clipped(site) -> None:
    """Six coordinates moved by 1: the norm is sqrt(6); clipped to 1 each moves by 1/sqrt(6), integers stay."""
    node, state, write = site
    write("[update]\nmax-norm = 2.45\n")
    assert call(Worker(state), node)[0].status == "ok"
    write("[update]\nmax-norm = 2.44\n")
    assert "norm is 2.449" in call(Worker(state), node)[0].reason
    write('[update]\nmax-norm = 1.0\non-excess = "clip"\n')
    reply, frame = call(Worker(state), node)
    got = compression.decode(frame, LAYOUT)
    np.testing.assert_allclose(got["w"], np.full((2, 3), 1 / math.sqrt(6)), rtol=1e-6)
    assert got["n"] == 7
    assert manifest_problem(manifest_in(reply.metrics), {}, frame) == ""
    assert audit(state)[-1]["clipped_to"] == 1.0


def test_noise_is_the_sites_own_and_needs_an_exact_codec(site) -> None:
    node, state, write = site
    write("[update]\nnoise-std = 0.5\n")
    first, second = (compression.decode(call(Worker(state), node)[1], LAYOUT)["w"] for _ in range(2))
    assert not np.array_equal(first, second)
    assert 0.05 < np.std(np.stack([first, second]) - 1.0) < 2.0
    reply, frame = call(Worker(state, up="int8(256,rtn)"), node, up="int8(256,rtn)")
    assert frame is None
    assert "needs an exact codec" in reply.reason


def test_a_lossy_update_is_measured_too(site) -> None:
    node, state, write = site
    write("[update]\nmax-norm = 2.0\n")
    assert (
        "the update's norm is 2.4"
        in call(Worker(state, up="int8(256,rtn)"), node, up="int8(256,rtn)")[0].reason
    )
    write("[update]\nmax-norm = 3.0\n")
    assert call(Worker(state, up="int8(256,rtn)"), node, up="int8(256,rtn)")[0].status == "ok"


def test_an_update_whose_names_are_unknown_cannot_be_measured_and_stays(site) -> None:
    node, state, write = site
    write("[update]\nmax-norm = 100.0\n")

    class Silent(Worker):
        def __call__(self, *args: Any, **node_: Any) -> Any:
            answer = super().__call__(*args, **node_)
            for path in (self.folder / "r" / "clinic").glob("layout-*"):
                path.write_text(path.read_text().replace('"w"', '"v"'))
            return answer

    assert "not known here" in call(Silent(state), node)[0].reason


def test_without_room_for_the_record_a_site_with_a_policy_sends_nothing(site, monkeypatch) -> None:
    node, state, write = site

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Outbox, "keep", full)
    assert call(Worker(state), node)[1] is not None
    write("")
    reply, frame = call(Worker(state), node)
    assert (reply.status, frame) == ("policy", None)


def bundle_bytes(files: dict[str, str]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def test_installed_code_is_compared_with_what_was_sent(tmp_path) -> None:
    """Flower names a bundle's folder by 8 digits of its hash and takes an existing one as it is."""
    import hashlib

    files = {
        "pyproject.toml": '[tool.flwr.app]\npublisher = "umbel"\n',
        "client_app/app.py": "app = 1\n",
        ".info/CONTENT": "x",
    }
    content = bundle_bytes(files)
    digest = hashlib.sha256(content).hexdigest()
    for name in ("pyproject.toml", "client_app/app.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name])
    check_installed(tmp_path, content, digest)
    assert facts_of(digest, tmp_path) == BundleFacts(digest, "umbel", True)
    with pytest.raises(PermissionError, match="not those its hash names"):
        check_installed(tmp_path, content, "00" * 32)
    (tmp_path / "client_app" / "extra.py").write_text("")
    with pytest.raises(PermissionError, match=r"in client_app/extra\.py"):
        check_installed(tmp_path, content, digest)
    (tmp_path / "client_app" / "extra.py").unlink()
    (tmp_path / "client_app" / "app.py").write_text("app = 2\n")
    with pytest.raises(PermissionError, match=r"in client_app/app\.py"):
        check_installed(tmp_path, content, digest)


def test_a_site_with_a_policy_never_falls_back_to_code_that_checks_itself(monkeypatch, capsys) -> None:
    monkeypatch.delenv("UMBEL_SITE_POLICY", raising=False)
    assert not names_policy(["--node-config", 'name="a"'])
    assert names_policy(["--node-config", 'name="a" policy="/etc/p.toml"'])
    assert site_main(["--isolation", "process", "--node-config=policy=/etc/p.toml"]) == 78
    assert "check the site's policy" in capsys.readouterr().err
