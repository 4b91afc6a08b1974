"""What is made from private data is for its owner alone, and says nothing of this machine."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pubsel import records
from pubsel.cli import main
from pubsel.messages import log, logged, traced
from pubsel.records import lock_folder
from pubsel.training import loop
from tests.made import write_npz

TINY = """
+experiment=quickstart training.epochs=1 epsilon=2 download=false device=cpu threads=1
training.batch_size=1297 training.chunk=256 distance=gsd_m200 distance.initialisations=1
distance.k=4 distance.m=100
""".split()
SHOWN = ("tables", "figures", "report.html")  # what is made to be shown


@pytest.fixture(params=[0, 0o022], ids=["umask 0", "umask 022"])
def folder(request, folder: Path) -> Iterator[Path]:
    before = os.umask(request.param)
    yield folder
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Files and folders below results/KIND that are not for their owner alone."""
    found = [path for path in folder.glob("results/*/**/*") if path.relative_to(folder).parts[1] not in SHOWN]
    return [str(path) for path in found if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)]


@pytest.mark.attack
@pytest.mark.parametrize("folder", [0], indirect=True, ids=["umask 0"])
def test_nobody_else_reads_a_run_a_sweep_or_a_choice(folder: Path) -> None:
    assert main(["run", "-m", *TINY, "seed=1"]) == 0
    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "distance.m=100", "distance.k=4"]
    assert main(["rank", *words, "distance.initialisations=1", "epsilon_select=0.5"]) == 0
    assert main(["attack", "loss", "run=all"]) == 0
    kinds = {path.name for path in Path("results").iterdir()}
    assert kinds >= {"runs", "distances", "ranks", "attacks", "ledger", "tables"}
    names = {path.name.partition(".")[0] for path in Path("results/runs").glob("*/**/*") if path.is_file()}
    assert names >= {"result", "model", "log", "settings", "lock"}
    assert open_to_others(folder) == []
    assert stat.S_IMODE(Path("results/tables/loss_attack.csv").stat().st_mode) == 0o666  # made to be shown


def test_each_file_is_made_private_not_only_left_so(folder: Path) -> None:
    """As one sees it who looks while a run works, or behind one that was killed."""
    with lock_folder(folder / "results/runs/a"):
        inside = folder / "results/runs/a"
        records.write_record(inside / "result.json", {})
        loop.save(inside / "model.pt", {"w": torch.zeros(2)})
        with logged(inside / "log.txt"):
            log("a line")
        assert open_to_others(folder) == []
        Path(inside / "other.npy").write_bytes(b"of a library")
    assert stat.S_IMODE((inside / "other.npy").stat().st_mode) == 0o600
    umask = os.umask(0)
    os.umask(umask)
    records.write_whole(folder / "results/tables/a.csv", "1")
    assert stat.S_IMODE((folder / "results/tables/a.csv").stat().st_mode) == 0o666 & ~umask  # made to be shown


def test_what_an_older_version_left_open_is_closed(folder: Path) -> None:
    old = folder / "results/runs/a"
    old.mkdir(parents=True, mode=0o777)
    (old / "checkpoint.pt").write_bytes(b"weights")
    (old / "link").symlink_to(folder)
    mode = folder.stat().st_mode
    with lock_folder(old):
        assert stat.S_IMODE(old.stat().st_mode) == 0o700
        assert stat.S_IMODE((old / "checkpoint.pt").stat().st_mode) == 0o600
        assert folder.stat().st_mode == mode


@pytest.mark.attack
def test_no_path_is_told_that_was_not_typed(folder: Path) -> None:
    x, y = np.random.RandomState(0).randint(0, 255, (150, 8, 8)).astype(np.uint8), np.arange(150) % 2
    write_npz("mine.npz", (x[50:], y[50:]), (x[:50], y[:50]))
    assert main(["run", "-m", *TINY, "pair.private=./mine.npz", "algorithm=dp_sgd", "budget=9"]) == 0
    assert main(["report"]) == 0
    written = [path for path in Path("results").glob("**/*") if path.is_file()]
    assert not [path for path in written if str(folder).encode() in path.read_bytes()]


def test_a_traceback_names_no_folder_of_this_machine() -> None:
    try:
        records.read_record(Path("nothing.json"))
    except Exception as error:
        text = traced(error)
    assert 'File "pubsel/records.py", line' in text
    assert not re.search(r'File "/', text)
