"""/metrics of server and site: exact numbers, nothing open unless asked, and a board that shows only what exists."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.telemetry import prometheus
from umbel.telemetry.gauges import GPU, SERVER, SITE, Gpus, gpu_values, server_values, site_values
from umbel.telemetry.history import History

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "deploy" / "monitoring"


def scrape(endpoint: prometheus.Endpoint) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def counters(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "clinic.counters.json").write_text(
        json.dumps(
            {
                "site": "clinic",
                "answers": {"train:ok": 3, "train:policy": 1, "query.join:ok": 1},
                "bytes_up": 300,
                "bytes_down": 400,
                "tokens": 900,
                "update": {"round": 3, "loss": 2.5, "seconds": 7.0, "residual_ratio": 0.25},
                "last": {"t": 1000.0},
            }
        )
    )
    (folder / ".resident").mkdir(exist_ok=True)
    facts = {"site": "clinic", "busy": True, "memory_bytes": 5, "tokens_per_second": 12.5}
    (folder / ".resident" / "a.json").write_text(json.dumps(facts))


def test_the_server_shows_the_numbers_of_its_run(two_site_run) -> None:
    pytest.importorskip("prometheus_client")
    history = History.from_events([{"t": 100.0 + i, **e} for i, e in enumerate(two_site_run)])
    endpoint = prometheus.serve_run("127.0.0.1", 0, lambda: history)
    try:
        found = scrape(endpoint)
    finally:
        endpoint.close()
    assert found["umbel_rounds_committed_total"] == 2
    assert found["umbel_rounds_skipped_total"] == 1
    assert found["umbel_train_loss"] == 3.0
    assert found['umbel_heldout_loss{where="sites"}'] == 2.0
    assert found['umbel_heldout_loss{where="server"}'] == 2.2
    assert found['umbel_bytes_total{direction="up"}'] == history.bytes_up()
    assert found['umbel_updates_total{result="failed",site="south"}'] == 1
    assert found['umbel_updates_total{result="missing",site="south"}'] == 1
    assert found['umbel_tokens_total{site="north"}'] == 500
    assert found['umbel_refusals_total{kind="oom"}'] == 1
    assert found['umbel_round_seconds{phase="total"}'] == 20.0
    assert found["umbel_exactness_error"] == 5e-8
    assert {name.split("{")[0] for name in found} <= {*SERVER, *GPU}
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=1)


def test_time_since_the_last_commit_grows_while_the_run_goes_on() -> None:
    history = History.from_events(
        [
            {"t": 100.0, "event": "run_started", "run": "r"},
            {"t": 150.0, "event": "round_committed", "round": 1, "outcome": "skip"},
        ]
    )
    assert ("umbel_seconds_since_commit", (), 60.0) in list(server_values(history, 160.0))
    history.add({"t": 170.0, "event": "round_committed", "round": 1, "outcome": "commit"})
    assert ("umbel_seconds_since_commit", (), 5.0) in list(server_values(history, 175.0))
    history.add({"t": 180.0, "event": "run_finished", "outcome": "completed"})
    assert not [v for v in server_values(history, 1e6) if v[0] == "umbel_seconds_since_commit"]


def test_a_site_shows_what_it_sent(tmp_path) -> None:
    pytest.importorskip("prometheus_client")
    counters(tmp_path)
    endpoint = prometheus.serve_sites("127.0.0.1", 0, [tmp_path])
    try:
        found = scrape(endpoint)
    finally:
        endpoint.close()
    assert found['umbel_site_answers_total{kind="train",site="clinic",status="ok"}'] == 3
    assert found['umbel_site_refused_by_policy_total{site="clinic"}'] == 1
    assert found['umbel_site_bytes_total{direction="up",site="clinic"}'] == 300
    assert found['umbel_site_residual_ratio{site="clinic"}'] == 0.25
    assert found['umbel_site_busy{site="clinic"}'] == 1
    assert found['umbel_site_tokens_a_second{site="clinic"}'] == 12.5


def test_the_sites_own_endpoint_is_a_command_of_its_own(tmp_path) -> None:
    pytest.importorskip("prometheus_client")
    counters(tmp_path)
    # A shell that starts the tests in the background hands down a process that ignores the interrupt.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from umbel.cli.main import main; main()"
    command = [sys.executable, "-c", code, "site", "metrics", "--port", "0", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            address = process.stdout.readline().strip()  # type: ignore[union-attr]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=10) as answer:
                assert 'umbel_site_round{site="clinic"} 3.0' in answer.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def test_files_that_are_damaged_cost_a_value_and_not_the_scrape(tmp_path) -> None:
    (tmp_path / "a.counters.json").write_text("{")
    (tmp_path / "b.counters.json").write_text('{"answers": 3, "update": [], "bytes_up": "x"}')
    names = [v[0] for v in site_values(tmp_path, 0.0)]
    assert names.count("umbel_site_info") == 2


def test_gpus_from_nvidia_smi(tmp_path, monkeypatch) -> None:
    text = "0, NVIDIA H200, 50, 1024, 143771\n1, NVIDIA H200, [N/A], 0, 143771\nbroken\n"
    found = {(n, labels): v for n, labels, v in gpu_values(text)}
    assert found["umbel_gpu_utilization_ratio", ("0", "NVIDIA H200")] == 0.5
    assert found["umbel_gpu_memory_used_bytes", ("0", "NVIDIA H200")] == 2**30
    assert ("umbel_gpu_utilization_ratio", ("1", "NVIDIA H200")) not in found
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\necho '0, GPU, 100, 1, 2'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = Gpus(every_seconds=3600)
    assert gpus.values() == gpus.values() != []
    assert (tmp_path / "asked").read_text() == "x\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert Gpus().values() == []


def test_it_is_off_and_on_loopback_by_default_and_a_taken_port_is_named() -> None:
    pytest.importorskip("prometheus_client")
    config = resolve(None, []).telemetry
    assert (config.metrics_port, config.metrics_host) == (0, "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be listened on"):
            prometheus.start("127.0.0.1", taken.getsockname()[1], SERVER, list)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bumbel_[a-z_]+", text))


def test_every_metric_of_board_alerts_and_scrape_config_is_exported() -> None:
    known = {*SERVER, *SITE, *GPU}
    board = json.loads((MONITORING / "grafana-umbel.json").read_text())
    asked = {t["expr"] for p in board["panels"] for t in p.get("targets", [])}
    assert len(board["panels"]) >= 12
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    assert all(names_in(expr) for expr in asked)
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 6
    for rule in alerts:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]
    used = names_in("\n".join([*asked, *(rule["expr"] for rule in alerts)]))
    assert used <= known, used - known
    # What the project promises to show is on the board.
    for promised in (
        "umbel_heldout_loss",
        "umbel_sites",
        "umbel_bytes_total",
        "umbel_updates_total",
        "umbel_round_seconds",
    ):
        assert promised in used
    for promised in ("umbel_seconds_since_commit", "umbel_residual_ratio", "umbel_gpu_utilization_ratio"):
        assert promised in used


def test_labels_in_queries_exist() -> None:
    table = {**SERVER, **SITE, **GPU}
    board = json.loads((MONITORING / "grafana-umbel.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    texts = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    texts += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    for text in texts:
        for name, inside in re.findall(r"\b(umbel_[a-z_]+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)\s*(?:=|!)", inside))
            assert labels <= {*table[name].labels, "job", "instance"}, (name, labels)


def test_the_scrape_config_names_loopback_and_the_documented_ports() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    jobs = {j["job_name"]: j["static_configs"][0]["targets"] for j in config["scrape_configs"]}
    assert set(jobs) == {"umbel-server", "umbel-site"}
    ports = {target.rpartition(":")[2] for targets in jobs.values() for target in targets}
    documented = (MONITORING / "README.md").read_text()
    assert all(port in documented for port in ports)


def test_the_library_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any("prometheus-client" in need for need in project["optional-dependencies"]["metrics"])
    assert not any("prometheus" in need for need in project["dependencies"])
