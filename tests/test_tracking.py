"""A run's course in TensorBoard."""

import sys
from pathlib import Path

import pytest

from pubsel.cli import main
from pubsel.config import Tracking, UsageError
from pubsel.tracking import track
from pubsel.training import Progress

pytest.importorskip("tensorboard")


def read(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_a_run_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    words = ["+experiment=quickstart", "training.epochs=3", "training.batch_size=1297", "epsilon=2", "distance=none"]
    names = []
    for tracking in ("tensorboard", "none"):
        assert main(["run", *words, "estimate=false", f"tracking={tracking}", f"results={tracking}"]) == 0
        (folder,) = Path(tracking).glob("runs/*/")
        names.append(folder.name)
    assert names[0] == names[1]  # it is the same run
    assert not (folder / "tensorboard").exists()
    events = read(Path("tensorboard/runs") / names[0])
    norms = events.Scalars("norm of the noisy direction")
    assert [one.step for one in norms] == [1, 2, 3]
    assert all(one.value > 0 for one in norms)
    assert [one.step for one in events.Scalars("loss (not covered)")] == [1, 2, 3]
    assert events.Scalars("learning rate")[0].value > 0
    last = events.Scalars("epsilon spent")[-1]
    assert (last.step, last.value) == (3, pytest.approx(2, abs=0.01))
    (text,) = events.Tensors("what the guarantee covers/text_summary")
    assert b"do not publish" in text.tensor_proto.string_val[0]


def test_a_run_that_goes_on_writes_over_what_is_behind_its_checkpoint(tmp_path: Path) -> None:
    for losses, first in (([1.0, 2.0, 3.0], 1), ([5.0, 6.0], 2)):
        write = track(Tracking.tensorboard, tmp_path)
        for step, loss in enumerate(losses, first):
            write(Progress(step, 9, step, loss, 0.0, 0.0, 0.1), None)
    assert [(one.step, one.value) for one in read(tmp_path).Scalars("loss (not covered)")] == [(1, 1), (2, 5), (3, 6)]


def test_without_tensorboard_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install pubsel\[tensorboard\]"):
        track(Tracking.tensorboard, tmp_path)
    assert track(Tracking.none, tmp_path)(Progress(1, 1, 1.0, 0.0, 0.0, 0.0, 0.1), None) is None
