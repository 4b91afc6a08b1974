"""`tracking=tensorboard`: the progress of a run as curves, in its folder under tensorboard/.

It shows only what the loop knows anyway: loss, learning rate, norm of the noisy direction, epsilon spent. Nothing here
changes a result. A point is written once a checkpoint on disk contains its step: with noise from the operating system,
a resumed run draws the steps after it anew, and the norm of a discarded step would be a second release."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pubsel.files import guarded
from pubsel.messages import UsageError
from pubsel.settings.keys import Tracking
from pubsel.training.loop import Progress

Track = Callable[[Sequence[Progress], Mapping[int, float]], None]

WARNING = (
    "The loss is computed on private data without noise: the guarantee does not cover it, so do not publish it. "
    "The norm of the direction is computed from what the mechanism releases, and the guarantee covers it; epsilon and "
    "learning rate depend on no private example. A point appears with the checkpoint that contains its step."
)


def track(how: Tracking, folder: Path) -> Track:
    """Return what takes the ends of epochs that a checkpoint contains, at least one, and the epsilon spent by some
    steps. A resumed run overwrites the points after its checkpoint. UsageError if TensorBoard is not installed."""
    if how == Tracking.none:
        return lambda points, epsilons: None

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("tracking=tensorboard: pip install pubsel[tensorboard]") from None

    writers: list[SummaryWriter] = []  # opened with the first point, whose step it needs

    def write(points: Sequence[Progress], epsilons: Mapping[int, float]) -> None:
        with guarded():
            write_values(points, epsilons)

    def write_values(points: Sequence[Progress], epsilons: Mapping[int, float]) -> None:
        if not writers:
            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=points[0].step))
            writers[0].add_text("what the guarantee covers", WARNING, points[0].step)

        for point in points:
            values = {
                "loss (not covered)": point.loss,
                "norm of the noisy direction": point.norm,
                "learning rate": point.learning_rate,
                "epsilon spent": epsilons.get(point.step),
            }
            for name, value in values.items():
                if value is not None:
                    writers[0].add_scalar(name, value, point.step)

        writers[0].flush()

    return write
