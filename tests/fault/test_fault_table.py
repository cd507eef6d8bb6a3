"""The table of faults and its tests: a row cannot lose its test without this file failing.

A row counts as tested when its number stands in the name or the docstring of a test function. U rows are tested in
one process, P rows with real processes (a test under the marker `federation`, or one that starts its own server
processes), N rows by a nightly test or by a script under `benchmarks/`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROWS = {
    "F00": ("UP", "none, run twice"),
    "F01": ("P", "SIGKILL of a SuperNode in training"),
    "F02": ("UP", "the ClientApp raises"),
    "F03": ("P", "the ClientApp is killed for memory or exits"),
    "F04": ("P", "a SuperNode is stopped for 30 s"),
    "F05": ("P", "a SuperNode is killed and restarted"),
    "F06": ("P", "all nodes gone"),
    "F07": ("P", "fewer nodes than the quorum at the start"),
    "F08": ("P", "a slow, cut and reset link"),
    "F09": ("UP", "a reply arrives a round late"),
    "F10": ("UP", "the server is killed at each of six points"),
    "F11": ("U", "the newest checkpoint is damaged"),
    "F12": ("U", "the disk refuses a checkpoint"),
    "F13": ("U", "resume with changed settings"),
    "F14": ("P", "the SuperLink is killed for 20 s"),
    "F15": ("P", "the SuperLink is down for 120 s; a run is stopped"),
    "F16": ("P", "a node joins during a commit or leaves during a download"),
    "F17": ("UP", "rejoin after three missed rounds"),
    "F18": ("U", "a site crashes between data read and reply"),
    "F19": ("P", "clock skew"),
    "F20": ("N", "a server evaluation of 5 min"),
    "F21": ("N", "a site silent for 15 min"),
    "F22": ("P", "a site's SuperExec is dead"),
    "F23": ("P", "a node hangs in mid upload"),
    "F24": ("U", "a duplicate or replayed message"),
    "F25": ("P", "two ServerApps of one run"),
    "F30": ("UP", "NaN or infinity in tensors, metrics, weight"),
    "F31": ("U", "the local loss becomes NaN"),
    "F32": ("U", "wrong keys, shapes, dtypes, records"),
    "F33": ("U", "weights that are no weights"),
    "F34": ("U", "an update out of proportion"),
    "F35": ("U", "corrupt payload, decompression bomb"),
    "F36": ("N", "sign flip, ALIE, IPM, label flip"),
    "F37": ("N", "a back door by a rare token"),
    "F40": ("U", "privacy with dropouts and errors"),
    "F41": ("U", "privacy: zero update, NaN, wrong n"),
    "F42": ("U", "the privacy budget is exhausted"),
    "F43": ("U", "secure sum: dropout at every stage"),
    "F44": ("N", "gradient inversion"),
    "F50": ("P", "unknown node, revoked key, wrong CA, replay, bundle, open profile"),
    "S1": ("N", "chaos"),
    "S2": ("N", "16 nodes on 2 cores"),
    "S3": ("N", "500 rounds"),
    "S4": ("N", "the SuperLink restarts every minute"),
}
NUMBER = re.compile(r"(?<![a-zA-Z0-9])([FS]\d{1,2})(?![0-9])", re.IGNORECASE)


def numbers_in(text: str) -> set[str]:
    """Return the row numbers in a name (`test_f10_f14_...`) or a sentence; `F40-F42` names its ends only."""
    return {match.upper() for match in NUMBER.findall(text.replace("_", " "))}


def rows_in_tests() -> dict[str, list[tuple[Path, str, bool]]]:
    """Return row -> (file, test, whether it uses real processes)."""
    found: dict[str, list[tuple[Path, str, bool]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path == Path(__file__).resolve():
            continue
        text = path.read_text("utf-8")
        real = "mark.federation" in text or "Federation(" in text or "subprocess.run(" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                for row in numbers_in(node.name) | numbers_in(ast.get_docstring(node) or ""):
                    found.setdefault(row, []).append((path, node.name, real))
    return found


def rows_in_scripts() -> dict[str, list[Path]]:
    """Return row -> benchmark scripts whose docstring names it."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for row in numbers_in(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""):
            found.setdefault(row, []).append(path)
    return found


TESTS, SCRIPTS = rows_in_tests(), rows_in_scripts()


@pytest.mark.parametrize("row", [row for row, (level, _) in ROWS.items() if level != "N"])
def test_every_row_for_each_commit_has_a_test(row) -> None:
    assert TESTS.get(row), f"{row} ({ROWS[row][1]}) is in no test's name or docstring"


@pytest.mark.parametrize("row", [row for row, (level, _) in ROWS.items() if "P" in level])
def test_every_row_with_real_processes_has_a_test_that_starts_some(row) -> None:
    real = [name for _, name, is_real in TESTS.get(row, []) if is_real]
    assert real, f"{row} ({ROWS[row][1]}): tests {[n for _, n, _ in TESTS.get(row, [])]} start no process"


@pytest.mark.parametrize("row", [row for row, (level, _) in ROWS.items() if level == "N"])
def test_every_nightly_row_has_a_test_or_a_script(row) -> None:
    assert TESTS.get(row) or SCRIPTS.get(row), f"{row} ({ROWS[row][1]}) has neither"


@pytest.mark.parametrize("case", ["unknown", "revoked", "authority", "replayed", "bundle", "open_profile"])
def test_every_case_of_f50_has_a_test(case) -> None:
    """F50 is six refusals in one row: none of them may lose its test behind the others."""
    assert any(case in name for _, name, real in TESTS["F50"] if real), sorted(n for _, n, _ in TESTS["F50"])


def test_the_list_is_that_of_the_table() -> None:
    """The rows and their number: one that is taken off the list would not be missed by the tests above."""
    assert len(ROWS) == 44
    assert sum(level != "N" for level, _ in ROWS.values()) == 35
    assert sum("P" in level for level, _ in ROWS.values()) == 21


def test_numbers_are_read_out_of_names_and_sentences() -> None:
    assert numbers_in("test_f10_f14_a_killed_server") == {"F10", "F14"}
    assert numbers_in("F02, F30 and S1: typed") == {"F02", "F30", "S1"}
    assert numbers_in("float32, SF12, F123, rf40, f(x), H24") == set()
