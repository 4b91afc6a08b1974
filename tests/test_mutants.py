"""The table of planted faults applies to the package as it is, and what plants them tells found faults from others."""

import ast
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from mutants import ROOT, Fault, faults

TABLE = faults()


def defined(file: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")}


def test_every_fault_can_be_planted():
    """Its old text is in its file exactly once, and another one takes its place."""
    for fault in TABLE:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault
        assert fault.planted(text) != text, fault
    assert len(TABLE) >= 60
    assert len({(fault.file, fault.wrong) for fault in TABLE}) == len(TABLE)


def test_every_test_that_must_find_one_is_there():
    tests = {test for fault in TABLE for test in fault.tests}
    there = {file: defined(file) for file in {test.partition("::")[0] for test in tests}}
    for test in tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in there[file], test
    assert all(fault.tests for fault in TABLE)


SUMS = """
def total(a, b):
    return a + b


def mean(a, b):
    return (a + b) / 2
"""
TESTS = """
import time

from sums import total


def test_total():
    assert total(1, 2) == 3


def test_that_waits():
    if total(1, 2) != 3:
        time.sleep(60)


def test_that_fails():
    assert total(1, 2) == 4
"""


def planted(tmp_path: Path, *made: Fault, words: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """Exit code and lines of a run over a small checkout."""
    tmp_path.joinpath("sums.py").write_text(SUMS)
    tmp_path.joinpath("test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    rows = [
        f"[[\"{fault.file}\"]]\nwrong = '{fault.wrong}'\nold = '{fault.old}'\nnew = '{fault.new}'\n"
        f"tests = {list(fault.tests)}\n"
        for fault in made
    ]
    (tmp_path / "table.toml").write_text("\n".join(rows))
    code = "import sys, mutants, pathlib as p; sys.exit(mutants.main(sys.argv[1:], p.Path(), p.Path('table.toml')))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(
        [sys.executable, "-c", code, "--jobs", "1", *words],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
    )
    assert not run.stderr, run.stderr
    assert (tmp_path / "sums.py").read_text() == SUMS
    return run.returncode, run.stdout.splitlines()


TOTAL = ("test_sums.py::test_total",)
MINUS = Fault("sums.py", "the difference", "return a + b", "return a - b", TOTAL)


def test_faults_that_are_found_and_others(tmp_path):
    code, lines = planted(
        tmp_path,
        MINUS,
        Fault("sums.py", "a mean that nobody tests", "(a + b) / 2", "(a + b) / 3", TOTAL),
        Fault("sums.py", "no such line", "return b + a", "return 0", TOTAL),
        Fault("sums.py", "two such lines", "a + b", "a - b", TOTAL),
        Fault("sums.py", "no program", "return a + b", "return a +", TOTAL),
    )
    assert code == 1
    states = {line.partition("sums.py: ")[2].partition(" [")[0]: line.partition("  ")[0] for line in lines[:-1]}
    assert states == {
        "the difference": "found",
        "a mean that nobody tests": "SURVIVED",
        "no such line": "does not apply: the old text is there 0 times",
        "two such lines": "does not apply: the old text is there 2 times",
        "no program": "the tests do not run (exit code 4)",
    }
    assert "test_sums.py::test_total - assert -1 == 3" in lines[0]
    assert lines[-1].startswith("5 faults, 1 found (")


def test_a_fault_without_end_is_no_find(tmp_path):
    code, lines = planted(tmp_path, MINUS._replace(tests=("test_sums.py::test_that_waits",)), words=("--limit", "2"))
    assert (code, lines[0].partition("  ")[0]) == (1, "takes too long")


def test_exit_codes(tmp_path):
    assert planted(tmp_path, MINUS)[0] == 0
    code, lines = planted(tmp_path, MINUS._replace(tests=("test_sums.py::test_that_fails",)))
    assert (code, lines) == (1, ["without a fault: test_sums.py::test_that_fails - assert 3 == 4"])
