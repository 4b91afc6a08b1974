"""Faults, made to happen: nothing finished is lost, nothing half-written is read as finished, no cell counts twice, and
what goes on ends with the weights of a run that nothing happened to.

Each attempt is a process of its own, forked from one that has imported torch and computed nothing.
"""

import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pubsel import records as results
from pubsel.cli import main
from pubsel.commands import list_runs, sweep
from pubsel.messages import UserError
from tests.forked import forked
from tests.made import FINISHED

WORDS = (
    "+experiment=quickstart training.epochs=5 training.batch_size=1297 training.chunk=256 pair.m=100 distance=none "
    "download=false threads=1 training.checkpoint_seconds=0"
).split()
Fault = Callable[..., None]


def attempt(folder: Path, said: Path, fault: Fault | None, arguments: tuple, words: list[str]) -> None:
    """In a process of its own: `pubsel run` in `folder`, with a fault. All that is said goes to the file `said`."""
    sink = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    if fault is not None:
        fault(*arguments)
    code = main(["run", *WORDS, *words])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def begun(folder: Path, fault: Fault | None = None, *arguments: Any, words: tuple[str, ...] = (), said: str = "said"):
    return forked(attempt, folder, folder / said, fault, arguments, list(words))


def tried(folder: Path, fault: Fault | None = None, *arguments: Any, words: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code of an attempt (-N: signal N), and the last line that it said."""
    process = begun(folder, fault, *arguments, words=words)
    process.join(300)
    lines = (folder / "said").read_text().splitlines()
    return process.exitcode, lines[-1] if lines else ""


# Faults


def replaced(place: str, call: int, act: Callable[..., None]) -> None:
    """The n-th call of module.name does `act` with its arguments first."""
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(module)
    original, calls = getattr(owner, name), [0]

    def instead(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, instead)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place: str, call: int) -> None:
    replaced(place, call, die)


def die_in_the_middle(content: Any, path: Path, *_: object) -> None:
    Path(path).write_bytes(b"PK\x03\x04 and no more")
    die()


def kill_while_saving(call: int) -> None:
    """In the n-th torch.save, behind a few bytes."""
    replaced("torch.save", call, die_in_the_middle)


def small_files(limit: int) -> None:
    """As on a full disk: no file grows over `limit` bytes, and the write that would is an error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def little_memory(_: int) -> None:
    """As torch says that memory ran out. Were it really so, another library could crash first."""
    from pubsel.training import loop

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    loop.clipped_sum = full


def bound_by_permissions() -> None:
    """Without what lets root write where nobody may: CAP_DAC_OVERRIDE."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~2
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def clock(offset: float) -> None:
    """A clock that goes back by a second each time it is asked, from `offset` on."""
    now = [time.time() + offset]

    def back() -> float:
        now[0] -= 1
        return now[0]

    time.time = back


# What must hold


def records(folder: Path) -> list[dict]:
    """The records that a table would read, without what each run has differently."""
    different = ("seconds", "finished", "commit")
    return [{k: v for k, v in r.items() if k not in different} for r in results.read_records(folder / "results")]


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "results" / "runs").glob("*/")
    return found


def state(folder: Path) -> str:
    return list_runs.look(run_folder(folder)).state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The record of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    assert tried(folder)[0] == 0
    assert sorted(os.listdir(run_folder(folder))) == FINISHED
    return records(folder)


KILLS: dict[str, tuple] = {
    "before the lock": (kill_at, "pubsel.cell.choose_device", 1),
    "with the lock": (kill_at, "pubsel.records.write_record", 1),
    "writing the settings": (kill_at, "os.replace", 1),
    "loading data": (kill_at, "pubsel.cell.load_task", 1),
    "in preparation": (kill_at, "pubsel.cell.guarantee", 1),
    "in the first epoch": (kill_at, "pubsel.training.loop.noisy_mean", 1),
    "writing the first checkpoint": (kill_while_saving, 1),
    "before the first checkpoint takes its place": (kill_at, "os.replace", 2),
    "in a later epoch": (kill_at, "pubsel.training.loop.noisy_mean", 2),
    "writing a later checkpoint": (kill_while_saving, 1),
    "in evaluation": (kill_at, "pubsel.release.run.logits", 1),
    "writing the weights": (kill_while_saving, 1),
    "writing the record": (kill_at, "os.fsync", 5),
    "before the record takes its place": (kill_at, "os.replace", 3),
}


def test_a_run_that_is_killed_at_every_stage_ends_the_same(tmp_path: Path, whole: list[dict]) -> None:
    """One run, killed at each stage in turn, each time going on from where it is."""
    for stage, fault in KILLS.items():
        code, _ = tried(tmp_path, *fault)
        assert code == -signal.SIGKILL, stage
        assert records(tmp_path) == [], stage
        if stage != "before the lock":
            assert state(tmp_path) == "unfinished", stage
    code, _ = tried(tmp_path, kill_at, "pubsel.release.run.log", 1)  # the record is there, its checkpoint too
    assert code == -signal.SIGKILL
    assert records(tmp_path) == whole
    assert tried(tmp_path)[0] == 0
    assert records(tmp_path) == whole
    assert sorted(os.listdir(run_folder(tmp_path))) == FINISHED


@pytest.mark.attack
def test_a_choice_that_is_killed_leaves_no_candidates(tmp_path: Path) -> None:
    """13 of 18 kills left a folder as large as all candidates."""
    auto = tuple(
        (
            "pair.public=auto pair.candidates=[digits,noise] epsilon_select=0.5 distance=gsd distance.m=100 "
            "distance.initialisations=1 distance.k=4"
        ).split()
    )
    assert tried(tmp_path, kill_at, "pubsel.release.run.map_split", 2, words=auto)[0] == -signal.SIGKILL
    (left,) = run_folder(tmp_path).glob("candidates-*")
    assert [path.name for path in left.iterdir()] == ["0.npy"]
    (run_folder(tmp_path) / ".result.json.0abc.part").touch()
    code, said = tried(tmp_path, words=auto)
    assert code == 0, said
    assert sorted(os.listdir(run_folder(tmp_path))) == FINISHED


@pytest.mark.attack
def test_a_rank_cleans_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "rank private=digits public=[digits,noise] model=digits_cnn distance.m=100 distance.k=4 "
        "distance.initialisations=1 epsilon_select=0.5"
    ).split()
    assert main(words) == 0
    (folder,) = Path("results/ranks").glob("*/")
    left = folder / "candidates-abc"
    left.mkdir()
    (left / "0.npy").touch()
    (folder / "result.json").rename("kept")
    assert main(words) == 0
    assert not left.exists()
    assert (folder / "result.json").exists()


def test_a_full_disk_is_told_and_harms_nothing(tmp_path: Path, whole: list[dict]) -> None:
    for limit, file in ((600, "settings.json"), (20_000, "checkpoint.pt")):
        code, line = tried(tmp_path, small_files, limit)
        assert (code, line.startswith("pubsel: cannot write")) == (1, True)
        assert file in line
        assert ("make room" if file == "checkpoint.pt" else "File too large: raise the limit") in line
        assert records(tmp_path) == []
        assert not [path for path in run_folder(tmp_path).iterdir() if path.suffix in (".part", ".tmp")]
    assert state(tmp_path) == "failed"
    assert tried(tmp_path)[0] == 0
    assert records(tmp_path) == whole


def test_results_that_cannot_be_written_are_told_and_those_that_are_there_are_read(
    tmp_path: Path, whole: list[dict]
) -> None:
    (tmp_path / "results").mkdir(mode=0o555)
    code, line = tried(tmp_path, bound_by_permissions)
    assert code == 1
    assert line.startswith("pubsel: cannot write to results/runs/")
    assert "Permission denied" in line
    (tmp_path / "results").chmod(0o755)
    assert tried(tmp_path)[0] == 0
    for path in (tmp_path / "results").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code, line = tried(tmp_path, bound_by_permissions)
    assert code == 0, line
    assert records(tmp_path) == whole
    for path in (tmp_path / "results").rglob("*/"):
        path.chmod(0o755)


def test_a_record_that_is_cut_short_is_never_read(tmp_path: Path, whole: list[dict]) -> None:
    path = tmp_path / "results" / "runs" / "a" / "result.json"
    results.write_record(path, whole[0])
    text = path.read_bytes()
    for length in [*range(0, len(text) - 2, 61), len(text) - 2]:
        path.write_bytes(text[:length])
        with pytest.raises(UserError, match="delete it to run the cell again"):
            results.read_record(path)
        assert results.read_records(tmp_path / "results") == []
        assert list_runs.look(path.parent).state == "corrupt"


def test_a_checkpoint_that_does_not_fit_is_named_and_starts_nothing(tmp_path: Path, whole: list[dict]) -> None:
    assert tried(tmp_path, kill_at, "pubsel.training.loop.noisy_mean", 4)[0] == -signal.SIGKILL
    path = run_folder(tmp_path) / "checkpoint.pt"
    good = path.read_bytes()
    saved = torch.load(path)
    assert saved["step"] == 3
    older = {"step": 3, "state": saved["state"], "version": "0.0"}
    for bad in (good[:0], good[: len(good) // 2], good[:-1], older, saved | {"state": {}}):
        path.write_bytes(bad) if isinstance(bad, bytes) else torch.save(bad, path)
        code, line = tried(tmp_path)
        assert code == 1
        assert "checkpoint.pt cannot be read" in line
        assert "delete it to start this run again" in line
        assert records(tmp_path) == []
        assert state(tmp_path) == "failed"
    path.write_bytes(good)
    assert tried(tmp_path)[0] == 0
    assert records(tmp_path) == whole


def test_one_who_waits_for_a_run_takes_it_over(tmp_path: Path, whole: list[dict]) -> None:
    """Two start one cell; the first is killed, the second goes on; a third finds it finished."""
    first = begun(tmp_path, replaced, "pubsel.training.loop.noisy_mean", 3, hang, said="first")
    until(lambda: (tmp_path / "results").exists() and list(tmp_path.glob("results/runs/*/checkpoint.pt")))
    second = begun(tmp_path, said="second")
    said = tmp_path / "second"
    until(lambda: said.exists() and "another process works on it" in said.read_text())
    assert state(tmp_path) == "running"
    assert list_runs.deleted(run_folder(tmp_path)) is False
    first.kill()
    second.join(120)
    assert second.exitcode == 0
    assert records(tmp_path) == whole
    assert "finished before" in "".join([tried(tmp_path)[1], (tmp_path / "said").read_text()])
    assert len(records(tmp_path)) == 1


def hang(*_: object) -> None:
    time.sleep(300)


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, whole: list[dict]) -> None:
    assert tried(tmp_path, kill_at, "pubsel.training.loop.noisy_mean", 3)[0] == -signal.SIGKILL
    assert tried(tmp_path, clock, -1e6)[0] == 0
    assert records(tmp_path) == whole
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["seconds"] >= 0


def test_two_sweeps_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-01-01_00-00-00_")
    assert sweep.new_folder(str(tmp_path)) != sweep.new_folder(str(tmp_path))


def test_a_run_out_of_memory_is_told_and_goes_on_later(tmp_path: Path, whole: list[dict]) -> None:
    code, line = tried(tmp_path, little_memory, 2**24)
    assert (code, line) == (1, "pubsel: out of memory: lower training.chunk, algorithm.k or pair.m")
    assert records(tmp_path) == []
    assert state(tmp_path) == "failed"
    assert tried(tmp_path)[0] == 0
    assert records(tmp_path) == whole


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pubsel import messages

    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with messages.logged(tmp_path / "log.txt"):
        messages.say("on")
