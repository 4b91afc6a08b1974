"""A sweep of many cells at a time: each cell has a log and a state in files, and one view shows them all.

A launcher of Hydra runs them (joblib or submitit, in hydra_plugins/pubsel_launchers.py); this file has what these lack.
RESULTS/sweeps/TIME contains for cell number N: N.json, its state, written whole; N.log, all that it printed. This file
imports no torch.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pubsel.files import PRIVATE_FILE
from pubsel.messages import UserError, duration, on_terminal, stopped_by_signals, traced
from pubsel.records import readable, write_record
from pubsel.training.workers import GRACE, die_with_parent, leave_to_parent

POLL_SECONDS = 0.5
SHOWN = 16  # running cells in the view
ENDED = ("done", "failed")  # states of a cell

finished: list[tuple[Path, str]] = []  # results folder and output of each cell of a sweep that this process leads


def telling(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return for each cell the words that not all of them have."""
    # words that all cells share tell nothing about one of them
    common = set(cells[0]).intersection(*cells) if len(cells) > 1 else set()
    return [" ".join(word for word in cell if word not in common) for cell in cells]


def new_folder(results: str) -> Path:
    """Make and return a folder for one sweep; its name contains the time, and a unique part. UserError if it
    cannot be made."""
    parent = Path(results) / "sweeps"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S_"), dir=parent))
    except OSError as error:
        raise UserError(f"cannot write to {parent}: {error.strerror}; set results=FOLDER") from None


def best_finished() -> list[str]:
    """Return what it spends to publish the best of the finished runs, in sentences."""
    from pubsel.privacy import composition, ledger  # and with it scipy: half a second

    paths = [results / "runs" / text.partition(":")[0] / "result.json" for results, text in finished]
    runs = [*readable(sorted({path for path in paths if path.exists()}))]
    places = dict.fromkeys(results for results, _ in finished)
    return composition.best_of(runs, [lines for place in places for lines in ledger.ledgers(place)]) if runs else []


# In the process of a cell


def late_imports(values: DictConfig) -> list[str]:
    """Return the modules that a cell imports late, if at all: a worker imports them once, and its children have
    them."""
    # SGD on the features of a backbone needs neither a network nor torch's other optimizers, which import _dynamo
    on_features = OmegaConf.select(values, "model.backbone") is not None
    sgd = OmegaConf.select(values, "training.optimizer") == "sgd"
    of_networks = [] if on_features else ["timm"]
    of_optimizer = [] if on_features and sgd else ["torch._dynamo"]
    return [*of_networks, *of_optimizer, "sklearn.metrics", "pubsel.release.run"]


class CellTask:
    """The task of a cell, with its state and log in `folder`; if `apart`, in a separate process, so that nothing that
    happens to it (memory that runs out, an error of the GPU) happens to the worker and to the cells after it.

    task: returns why the cell failed, or None.
    """

    def __init__(self, task: Callable[[Any], str | None], folder: Path, apart: bool):
        self.task, self.folder, self.apart = task, folder, apart

    def __call__(self, values: Any) -> str | None:
        if self.apart:
            for module in late_imports(values):
                importlib.import_module(module)

        # the state of a cell is a file, which the leader reads whatever happens to the process
        job = HydraConfig.get()
        state = Path(self.folder) / f"{job.job.num:04}.json"
        start = time.monotonic()

        def write(what: str, text: str) -> None:
            seconds = round(time.monotonic() - start, 2)
            write_record(state, {"state": what, "seconds": seconds, "text": text, "pid": os.getpid()})

        def whole() -> str | None:
            write("running", "")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                failure = self.task(values)
            print(printed.getvalue(), end="", flush=True)
            write("failed" if failure else "done", failure or printed.getvalue().strip())
            return failure

        # how a child ended tells more than an error that it may not have been able to write
        if not self.apart:
            return whole()
        code = _forked(whole, state.with_suffix(".log"), " ".join(job.overrides.task))
        if code < 0:
            name = signal.Signals(-code).name
            write("failed", f"killed by {name}{', perhaps since memory ran out' if name == 'SIGKILL' else ''}")
        elif code > 0:
            write("failed", f"ended with exit code {code}: see {state.with_suffix('.log')}")
        ended = json.loads(state.read_text())
        return str(ended["text"]) if ended["state"] == "failed" else None


def _forked(work: Callable[[], object], log: Path, title: str) -> int:
    """Run `work` in a child that prints into `log`, and return its exit code: 1 if it raises, -N by signal N."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: those of numpy, which outlive a fork
        child = os.fork()

    # the child never returns: what the parent would do after this is not for it
    if child == 0:
        code = 1
        try:
            die_with_parent()
            leave_to_parent()
            # all that the cell prints goes into its log
            sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            print(title)
            with stopped_by_signals():
                work()
            code = 0
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            code = -signal.SIGTERM if stopped else 1
            print("interrupted" if stopped else traced(error), file=sys.stderr)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)

    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        # It cleans up, for which it has as long as its parent has.
        os.kill(child, signal.SIGTERM)
        until = time.monotonic() + GRACE
        while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


# In the process that leads the sweep


class Display:
    """A view of a sweep while it runs: on a terminal one live table, at the end of all cells, else a line for each cell
    that ends. The result of a finished cell goes to stdout, the rest to stderr."""

    def __init__(self, folder: Path, cells: Sequence[str], first: int, workers: int):
        self.folder, self.cells, self.first, self.workers = folder, cells, first, workers
        self.states: dict[int, dict[str, Any]] = {}  # of cells that have started
        self.began: dict[int, float] = {}
        self.start = time.monotonic()
        self.stop, self.lock = threading.Event(), threading.RLock()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.live: Any = None

    def __enter__(self) -> "Display":
        print(f"sweep of {len(self.cells)} cells, {self.workers} at a time; logs in {self.folder}", file=sys.stderr)
        if on_terminal():
            from rich.console import Console
            from rich.live import Live

            console, both = Console(stderr=True), sys.stdout.isatty()
            self.live = Live(console=console, get_renderable=self.table, refresh_per_second=2, redirect_stdout=both)
            self.live.start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        self.look()
        if self.live is not None:
            self.live.stop()

    def count(self, kind: str) -> int:
        """Count the cells that are in a state."""
        return sum(state["state"] == kind for state in self.states.values())

    def failed(self) -> list[str]:
        """Return each failed cell and why, in order."""
        return [
            f"{self.cells[number - self.first]}: {state['text']}"
            for number, state in sorted(self.states.items())
            if state["state"] == "failed"
        ]

    def lose(self, number: int, why: str) -> None:
        """Record as failed a cell that ended without a state."""
        with self.lock:
            self.look()
            if self.states.get(number, {}).get("state") not in ENDED:
                seconds = time.monotonic() - self.began.get(number, time.monotonic())
                now = {"state": "failed", "seconds": round(seconds, 2), "text": why}
                write_record(self.folder / f"{number:04}.json", now)
                self._ended(number, now)

    def _watch(self) -> None:
        while not self.stop.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Read the states that may have changed, and print which cells have ended."""
        with self.lock:
            for number in range(self.first, self.first + len(self.cells)):
                if self.states.get(number, {}).get("state") in ENDED:
                    continue
                try:
                    now = json.loads((self.folder / f"{number:04}.json").read_text())
                except (OSError, ValueError):
                    continue
                self.states[number] = now
                self.began.setdefault(number, time.monotonic())
                if now["state"] in ENDED:
                    self._ended(number, now)

    def _ended(self, number: int, now: dict[str, Any]) -> None:
        self.states[number] = now
        if now["state"] == "done" and now["text"]:
            finished.append((self.folder.parent.parent, now["text"]))
            print(now["text"], flush=True)
        if self.live is None or now["state"] == "failed":
            what = f"{now['state']} {self.cells[number - self.first]} ({now['seconds']:.0f} s)"
            why = f": {now['text']}" if now["state"] == "failed" else ""
            print(f"[{self.summary()}] {what}{why}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Return the progress of the sweep, in one line."""
        # the time left follows from the cells that have ended
        done, failed = self.count("done"), self.count("failed")
        left = len(self.cells) - done - failed
        text = f"{done} of {len(self.cells)} done, {self.count('running')} running, {failed} failed"
        if done and left:
            each = sum(state["seconds"] for state in self.states.values() if state["state"] == "done") / done
            text += f", about {duration(each * left / min(self.workers, left))} left"
        return text

    def table(self) -> Any:
        """Return the live view: the summary, and each running cell with its last line; at the end all cells."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.summary()}  ({duration(time.monotonic() - self.start)})", title_justify="left")
        for column in ("cell", "time", "settings", "result" if self.stop.is_set() else "last line"):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        if self.stop.is_set():
            for number, state in sorted(self.states.items()):
                text = Text(f"{state['state']}: {state['text']}".partition("\n")[0])
                table.add_row(str(number), duration(state["seconds"]), Text(self.cells[number - self.first]), text)
            return table

        running = [number for number, state in sorted(self.states.items()) if state["state"] == "running"]
        for number in running[:SHOWN]:
            lines = [""]
            with contextlib.suppress(OSError), (self.folder / f"{number:04}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 500))
                lines += file.read().decode(errors="replace").splitlines()
            elapsed = duration(time.monotonic() - self.began[number])
            table.add_row(str(number), elapsed, Text(self.cells[number - self.first]), Text(lines[-1].strip()))
        return table
