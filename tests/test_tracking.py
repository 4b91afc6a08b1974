"""A run's course in TensorBoard."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pubsel.training.loop
from pubsel.algorithms.dp_sgd import DPSGD
from pubsel.cli import main
from pubsel.messages import UsageError
from pubsel.privacy.sampling import schedule
from pubsel.settings import CONF
from pubsel.settings.keys import Tracking
from pubsel.training.loop import Job, Progress, Watch, fit
from pubsel.training.tracking import track
from tests.synthetic import secret_named
from tests.test_training import network, task, training

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one second are read in the order of a process's counter as text: 10 before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def read(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_a_run_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    words = ["+experiment=quickstart", "training.epochs=3", "training.batch_size=1297", "epsilon=2", "distance=none",
             "estimate=false", "threads=1"]  # fmt: skip
    page = (CONF.parent / "docs" / "guarantees.md").read_text().partition("## Files")[2]
    names = []
    for tracking in ("tensorboard", "none"):
        assert main(["run", *words, f"tracking={tracking}", f"results={tracking}"]) == 0
        (folder,) = Path(tracking).glob("runs/*/")
        assert {path.name for path in folder.iterdir() if path.name not in page} <= {"lock"}
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
            write([Progress(step, 9, step, loss, 0.0, 0.0, 0.1)], {step: 0.5})
    for curve, last in (("loss (not covered)", (5, 6)), ("epsilon spent", (0.5, 0.5))):
        found = [(one.step, one.value) for one in read(tmp_path).Scalars(curve)]
        assert found == list(zip((1, 2, 3), (1 if last == (5, 6) else 0.5, *last), strict=True))


class Killed(BaseException):
    """As by a signal: nothing catches it."""


def norms(folder: Path) -> list[tuple[int, float]]:
    """Every point that any event file of the folder holds, those that were written over too."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((folder / "tensorboard").glob("events*")) if (folder / "tensorboard").exists() else []
    return [
        (event.step, value.tensor.float_val[0])
        for file in files for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value if value.tag == "norm of the noisy direction"
    ]  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("killed", ["in a step", "behind a checkpoint", "in the first epochs"])
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "seeded"])
def test_no_norm_of_a_step_that_is_drawn_anew_is_ever_written(
    killed: str, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint every third of ten steps, each of which ends an epoch. What the files hold after a kill are steps
    that the checkpoint holds; after the resume they hold each step, and the curve shows each once."""
    clock = iter(range(10**6))  # read once a step, and once more at its epoch's end
    monkeypatch.setattr(pubsel.training.loop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    mean, steps, directions = pubsel.training.loop.noisy_mean, [], []

    def step(*given, **named):
        steps.append(1)
        if len(steps) == {"in a step": 9, "in the first epochs": 3}.get(killed):
            raise Killed
        directions.append(mean(*given, **named))
        return directions[-1]

    def train() -> None:
        write = track(Tracking.tensorboard, tmp_path)

        def keep(points: list[Progress]) -> None:
            if killed == "behind a checkpoint" and points[-1].step > 3 and not (tmp_path / "resumed").exists():
                raise Killed
            write(points, {})

        model, settings = network(torch.float32), training(epochs=10, batch_size=50, checkpoint_seconds=5)
        fit(
            model,
            task(),
            Job(DPSGD("dp_sgd", 1.0), schedule(50, settings), 1.0, settings, "name", tmp_path / "checkpoint.pt"),
            secret_named(secure=secure),
            Watch(keep=keep),
        )

    monkeypatch.setattr(pubsel.training.loop, "noisy_mean", step)
    with pytest.raises(Killed):
        train()
    at = tmp_path / "checkpoint.pt"
    saved = torch.load(at, weights_only=True)["step"] if at.exists() else 0
    done = len(directions)
    assert saved < done or killed == "behind a checkpoint"  # steps were lost
    assert all(one <= saved for one, _ in norms(tmp_path))
    assert bool(saved) == (killed != "in the first epochs")

    (tmp_path / "resumed").touch()
    steps.extend([1] * 100)
    train()
    curve = [(one.step, one.value) for one in read(tmp_path).Scalars("norm of the noisy direction")]
    taken = [*directions[:saved], *directions[done:]]
    assert curve == [(i, pytest.approx(float(mean.norm()), rel=1e-4)) for i, (mean, _) in enumerate(taken, 1)]
    assert len(set(norms(tmp_path))) == 10  # no other norm in any file, also of those that were written over


def test_without_tensorboard_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install pubsel\[tensorboard\]"):
        track(Tracking.tensorboard, tmp_path)
    assert track(Tracking.none, tmp_path)([Progress(1, 1, 1.0, 0.0, 0.0, 0.0, 0.1)], {}) is None
