"""`pubsel WORDS` in a process of its own, forked from one that has imported torch and computed nothing.

It starts in a tenth of a second, where a fresh process takes four to import what a training needs.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from pubsel.cli import main

CHECKOUT = Path(__file__).resolve().parent.parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])


def forked(target: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """A process that does `target`. It starts in the checkout, where the server finds its modules."""
    process = PROCESSES.Process(target=target, args=arguments)
    with contextlib.chdir(CHECKOUT):
        process.start()
    return process


def heard(target: Callable[..., object], *arguments: Any, words: int, processes: int = 1, killed: bool = False) -> list:
    """Return so many words of processes that do target(*arguments, queue); then they are waited for, or killed."""
    context = multiprocessing.get_context("fork")
    said = context.Queue()  # one for each call: whoever is killed may leave it locked
    started = [context.Process(target=target, args=(*arguments, said)) for _ in range(processes)]
    for process in started:
        process.start()
    found = [said.get(timeout=60) for _ in range(words)]
    for process in started:
        if killed:
            process.kill()
        process.join()
    return found


class Command:
    """A command that runs, in a group of its own, with `environment` beside that of the tests (None: not set)."""

    def __init__(self, folder: Path, *words: str, **environment: str | None):
        self.number = len(list(folder.glob("*.stdout")))
        self.out_file, self.err_file = (folder / f"{self.number}.{name}" for name in ("stdout", "stderr"))
        for file in (self.out_file, self.err_file):
            file.touch()
        self.process = forked(_typed, folder, self.number, words, environment)
        self.pid: int = self.process.pid  # type: ignore[assignment]

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self.err_file.read_text()

    def code(self, timeout: float = 120) -> int:
        """Exit code once it has ended, -N by signal N. TimeoutError ends it."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.err)
        return self.process.exitcode


def _typed(folder: Path, number: int, words: tuple[str, ...], environment: dict[str, str | None]) -> None:
    os.setsid()
    os.chdir(folder)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for handle, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_APPEND), handle)
        setattr(sys, name, os.fdopen(handle, "w", buffering=1))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background would ignore
    sys.exit(main(list(words)))
