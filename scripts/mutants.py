"""Planted faults, and whether the tests find them: `python scripts/mutants.py [--only PATTERN] [--jobs N]`.

mutants.toml has the faults: by file, what would be wrong, a piece of the file's text, what takes its place, and tests
that must then fail. Each fault is planted alone, in a copy of the checkout. First the tests run in a copy without a
fault: a test that fails there finds nothing.

A fault is found if a test fails. If all pass it SURVIVED: a test is missing. The rest are mistakes in mutants.toml: the
old text is not in the file exactly once, or the tests cannot be collected or take too long. Exit code 1 unless all are
found.
"""

import argparse
import compileall
import contextlib
import importlib
import os
import py_compile
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
LIMIT = 300  # seconds that the tests of one fault may take
FOUND, SURVIVED = "found", "SURVIVED"
STATES = {0: SURVIVED, 1: FOUND, 5: SURVIVED, -signal.SIGALRM: "takes too long"}  # by the exit code of pytest

# What tests and the package import, without the package: read once, by the process that all others are forked from
LIBRARIES = (
    "pytest torch torch._dynamo torchvision scipy.stats sklearn.datasets pandas hydra prv_accountant "
    "dp_accounting.pld opacus.accountants.analysis rich.console"
).split()


class Fault(NamedTuple):
    """A fault planted in a file, and the tests that must notice it. `old` is in `file` exactly once; `new` takes its
    place."""

    file: str
    wrong: str
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids, as pytest takes them

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault; LookupError if the old text is not there exactly once."""
        if text.count(self.old) != 1:
            raise LookupError(f"does not apply: the old text is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """The outcome of a fault, or of tests without one. by: the test that failed, or the last line that was printed."""

    fault: Fault | None
    state: str
    by: str = ""
    seconds: float = 0.0


def faults(table: Path = TABLE) -> list[Fault]:
    """Return all faults of a table."""
    made = []
    for file, rows in tomllib.loads(table.read_text(encoding="utf-8")).items():
        for row in rows:
            tests = row.pop("tests")
            made.append(Fault(file, tests=tuple([tests] if isinstance(tests, str) else tests), **row))
    return made


class Copy:
    """A copy of a checkout, in which one process at a time runs tests, with a fault or without."""

    def __init__(self, root: Path, tree: Path):
        self.tree, self.output = tree, tree.with_name(f"{tree.name}.txt")
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)

        # compiled code is compared with its source by a hash: by its date, a fault of the same length could be missed
        compileall.compile_dir(tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def start(self, tests: Sequence[str], fault: Fault | None, limit: int) -> int:
        """Plant the fault and fork a process that runs the tests until the first failure; its id."""
        self.fault, self.began = fault, time.monotonic()
        if fault is not None:
            self.whole = (self.tree / fault.file).read_text(encoding="utf-8")
            (self.tree / fault.file).write_text(fault.planted(self.whole), encoding="utf-8")
        return os.fork() or self._run(tests, limit)

    def _run(self, tests: Sequence[str], limit: int) -> int:
        """Run the tests in the new process, as `python -m pytest` in the copy."""
        code = 70
        try:
            os.setsid()
            signal.alarm(limit)
            with self.output.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.chdir(self.tree)
            sys.path.insert(0, str(self.tree))
            os.environ["PYTHONPATH"] = str(self.tree)  # for the processes that tests start
            options = ["-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
            code = importlib.import_module("pytest").main([*options, f"--basetemp={self.tree}-scratch", *tests])
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def ended(self, process: int, status: int) -> Outcome:
        """Take the fault out again, after the process has ended with `status`; what became of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what its tests have left running
        if self.fault is not None:
            (self.tree / self.fault.file).write_text(self.whole, encoding="utf-8")

        said, code = self.output.read_text(errors="replace"), os.waitstatus_to_exitcode(status)
        failed = re.search(r"^(?:FAILED|ERROR):? (.*)", said, re.MULTILINE)
        by = failed[1] if failed else said.strip().rpartition("\n")[2]
        state = STATES.get(code, f"the tests do not run (exit code {code})")
        return Outcome(self.fault, state, by, time.monotonic() - self.began)


def outcomes(free: list[Copy], todo: Iterable[tuple[Sequence[str], Fault | None]], limit: int) -> Iterator[Outcome]:
    """Run tests, each with its fault, in as many copies as are free; what became of them, as they end."""
    running: dict[int, Copy] = {}

    def next_end() -> Outcome:
        process, status = os.waitpid(-1, 0)
        free.append(running.pop(process))
        return free[-1].ended(process, status)

    for tests, fault in todo:
        if not free:
            yield next_end()
        copy = free.pop()
        try:
            running[copy.start(tests, fault, limit)] = copy
        except LookupError as error:
            free.append(copy)
            yield Outcome(fault, str(error))
    while running:
        yield next_end()


def by_file(tests: Iterable[str]) -> list[list[str]]:
    """Return different tests, those of one file together."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    return list(files.values())


def prepare() -> None:
    """Import what all tests share, in one thread, since a process with several must not fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PUBSEL_DATA", None)
    for library in LIBRARIES:
        importlib.import_module(library)


def main(words: Sequence[str] | None = None, root: Path = ROOT, table: Path = TABLE) -> int:
    """Plant the faults, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description="Plant faults, and see whether the tests find them.")
    parser.add_argument("--only", default="", help="faults whose file, description or tests contain this expression")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds that the tests of one fault may take")
    chosen = parser.parse_args(words)
    wanted = [fault for fault in faults(table) if re.search(chosen.only, " ".join([*fault[:2], *fault.tests]))]
    if not wanted:
        parser.error(f"--only {chosen.only}: no such fault in {table.name}")

    began, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(root, Path(folder) / f"{number}") for number in range(chosen.jobs)]
        tests = by_file(test for fault in wanted for test in fault.tests)
        ends = outcomes(copies, ((some, None) for some in tests), 4 * chosen.limit)
        broken = [end for end in ends if end.state != SURVIVED]
        for end in broken:
            print(f"without a fault: {end.by}")
        if broken:
            return 1

        for end in outcomes(copies, ((fault.tests, fault) for fault in wanted), chosen.limit):
            assert end.fault is not None
            missed += end.state != FOUND
            print(f"{end.state:8}  {end.fault.file}: {end.fault.wrong} [{end.seconds:.1f} s, {end.by}]", flush=True)

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = f"{(time.monotonic() - began) / 60:.1f} minutes, {(used.ru_utime + used.ru_stime) / 60:.1f} of a CPU"
    print(f"{len(wanted)} faults, {len(wanted) - missed} found ({minutes})")
    return int(missed > 0)


if __name__ == "__main__":
    prepare()
    sys.exit(main())
