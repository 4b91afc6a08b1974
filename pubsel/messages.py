"""Messages to the terminal (stderr) and to the run's log. Results go to stdout."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Something the user can fix: one line that names the key or file, and the remedy. Exit code 1."""

    exit_code = 1


class UsageError(UserError):
    """The command line or the configuration is wrong; nothing was started. Exit code 2."""

    exit_code = 2


class CellsFailed(UserError):
    """Cells of a sweep that failed, each with why; the others are done."""

    def __init__(self, cells: list[str]):
        super().__init__(f"{len(cells)} cells failed")
        self.cells = cells


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end what runs inside as Ctrl-C does, by a KeyboardInterrupt that has their number, so
    that it cleans up. A signal that is ignored, as under nohup, or that another library handles stays so."""
    before: dict[int, Any] = {}

    def stop(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # no second one stops the cleaning
        raise KeyboardInterrupt(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_logs: list[Path] = []  # files that `say` writes to as well; only the last one counts


def say(text: str) -> None:
    """Print a line at once; within a program that shows results itself, warnings alone."""
    names = RENAMED.get()
    if names is None or "warning: " in text:
        print(with_names(text, names or {}), file=sys.stderr, flush=True)
    log(text)


def on_terminal() -> bool:
    """Return whether a person sees what is printed to stderr, at a terminal on which lines can be drawn again."""
    return RENAMED.get() is None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Bars:
    """A bar for each long phase that is under way: on a terminal only. Whatever shows one closes them at its end."""

    def __init__(self) -> None:
        self.view: Any = None  # of rich, while there is a bar
        self.tasks: dict[str, Any] = {}
        self.began: dict[str, float] = {}
        self.drawn = 0.0

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        if self.view is not None:
            self.view.stop()
        self.view, self.tasks, self.began, self.drawn = None, {}, {}, 0.0

    def show(self, what: str, done: int, total: int) -> None:
        """Show how far a phase is; with the last part its bar disappears."""
        now = time.monotonic()
        first = self.began.setdefault(what, now)
        if done >= total:
            del self.began[what]
            if what in self.tasks:
                self.view.update(self.tasks.pop(what), visible=False, refresh=True)
            if not self.tasks and self.view is not None:
                self.view.stop()
                self.view = None
        elif now >= max(first + LONG, self.drawn + REDRAWN) and on_terminal():
            self.drawn = now
            if self.view is None:
                self._start()
            if what not in self.tasks:
                self.tasks[what] = self.view.add_task(what, total=total, completed=done, note="")
            self.view.update(self.tasks[what], completed=done, refresh=True)

    def line(self, what: str, text: str, note: str = "", say: Callable[[str], None] = say) -> None:
        """Print a line about a phase; if it has a bar, write the line to the log only, and `note` next to the bar."""
        if what in self.tasks:
            log(text)
            self.view.update(self.tasks[what], note=note)
        else:
            say(text)

    def _start(self) -> None:
        from rich import progress
        from rich.console import Console

        # no thread draws, so that a process may be forked; stdout may be a file
        text = progress.TextColumn("{task.description}", markup=False), progress.TextColumn("{task.fields[note]}")
        columns = (
            text[0],
            progress.BarColumn(20),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            text[1],
        )
        console, both = Console(stderr=True), sys.stdout.isatty()
        self.view = progress.Progress(
            *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=both
        )
        self.view.start()


LONG, REDRAWN = 0.5, 0.1  # seconds of a phase before it has a bar, and between two drawings
bars = Bars()


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text with other names of data."""
    for name, other in names.items():
        text = text.replace(name, other)
    return text


RENAMED: ContextVar[Mapping[str, str] | None] = ContextVar("RENAMED", default=None)  # of data in memory, for messages
NO_HOME = "a path begins with ~ and the name of no user: give the whole path, from / on"
ROOM = "make room, or take a folder on another disk (results=, data_root=, to=)"
LIMITS = {  # of the system, with what helps: nothing is wrong with the file that was opened or written then
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EROFS: "take a folder that can be written to (results=, data_root=, to=)",
    errno.EFBIG: "raise the limit of the size of a file: ulimit -f unlimited",
    errno.ENFILE: "close other programs of this machine, or raise fs.file-max",  # its words begin like those below
    errno.EMFILE: "raise the limit of open files of a process: ulimit -n 4096",
    errno.EAGAIN: "raise the limit of processes and threads: ulimit -u unlimited, or set threads=1",
    errno.ENOMEM: "close other programs, or lower training.chunk, algorithm.k or pair.m",
}


def needs_extra(name: str) -> str:
    """Return how to install an extra, as all pages say it."""
    return f'python -m pip install ".[{name}]" in a clone of pubsel'


def limit(error: BaseException) -> str:
    """Return which limit of the system an error says was met, and what helps; empty if none was."""
    # Python raises this one without a number of the system
    if "can't start new thread" in str(error):
        return f"can't start new thread: {LIMITS[errno.EAGAIN]}"

    # Libraries put the words of the system into errors without its number.
    number = getattr(error, "errno", None)
    met = [code for code in LIMITS if number == code or (number is None and os.strerror(code) in str(error))]
    return f"{os.strerror(met[0])}: {LIMITS[met[0]]}" if met else ""


def cannot_write(what: object, error: BaseException) -> UserError:
    """Return the error of a file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "make room, fix permissions, or take another folder (results=, data_root=, to=)"
    return UserError(f"cannot write {what}: {limit(error) or f'{reason}; {remedy}'}")


def log(text: str) -> None:
    """Write a line, with the time, to the log only. A log that cannot be written ends no run."""
    if _logs:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), os.fdopen(os.open(_logs[-1], APPENDED, 0o600), "ab") as file:
            file.write("".join(f"{now}  {line}\n" for line in text.splitlines()).encode())


def traced(error: BaseException) -> str:
    """Return the traceback of an error, without the folders of this machine in its paths."""
    text = "".join(traceback.format_exception(error))

    # The longest first: a folder may lie within another one of them.
    for folder in sorted({*sys.path, os.getcwd(), sys.base_prefix}, key=len, reverse=True):
        if folder.strip(os.sep):
            text = text.replace(f"{folder.rstrip(os.sep)}{os.sep}", "")

    return text


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Write what is said inside to the file `path` too, after what it already contains."""
    _logs.append(path)
    try:
        yield
    finally:
        _logs.pop()


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row of texts, in columns that are as wide as their widest text."""
    columns = list(zip(*rows, strict=True))
    padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def above(value: float) -> str:
    """Return a bound with four digits, rounded up: printed, it may not be less than it is."""
    up = Context(prec=4, rounding=ROUND_CEILING)
    return f"{float(up.plus(Decimal(repr(float(value))))):.4g}"


def at_most(value: float) -> str:
    """Return a bound with four digits, rounded up, but not for what adding in float64 puts behind the last digit."""
    return above(value * (1 - 1e-12))


def at_least(value: float) -> str:
    """Return what is left, at least 0, with four digits, rounded down."""
    return above(-max(0.0, value) * (1 + 1e-12)).lstrip("-")


def gib(size: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a number of seconds as people read it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


FULL = ("can't allocate", "could not create a primitive", "failed to map segment")  # of torch, oneDNN, an import


def raised_by_torch(error: RuntimeError) -> bool:
    """Return whether torch may have raised it, and not a handler of a signal: these may raise one anywhere, which
    ends the run, and submitit's raise one of a class of their own."""
    return type(error) in (RuntimeError, NotImplementedError)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of the machine or of a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(text in str(error) for text in FULL)
