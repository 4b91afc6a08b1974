"""`tracking=tensorboard`: a run's course as curves, in its folder under tensorboard/.

Only what the loop knows anyway: loss, learning rate, norm of the noisy direction, epsilon spent. Nothing here changes a
result."""

from collections.abc import Callable
from pathlib import Path

from pubsel.config import Tracking, UsageError
from pubsel.training import Progress

Track = Callable[[Progress, float | None], None]

WARNING = (
    "The loss is computed on private data without noise: the guarantee does not cover it, so do not publish it. "
    "The norm of the direction is computed from what the mechanism releases, and the guarantee covers it; epsilon and "
    "learning rate depend on no private example."
)


def track(how: Tracking, folder: Path) -> Track:
    """What is called at each end of an epoch, with the epsilon spent so far where it is known. A run that goes on
    writes over what lies behind its checkpoint. UsageError where TensorBoard is not installed."""
    if how == Tracking.none:
        return lambda progress, epsilon: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("tracking=tensorboard: pip install pubsel[tensorboard]") from None
    writers: list[SummaryWriter] = []

    def write(now: Progress, epsilon: float | None) -> None:
        if not writers:
            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=now.step))
            writers[0].add_text("what the guarantee covers", WARNING, now.step)
        values = {
            "loss (not covered)": now.loss,
            "norm of the noisy direction": now.norm,
            "learning rate": now.learning_rate,
            "epsilon spent": epsilon,
        }
        for name, value in values.items():
            if value is not None:
                writers[0].add_scalar(name, value, now.step)
        writers[0].flush()

    return write
