"""Sampling of private data: the accountant and the loop use the same schedule."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.messages import UsageError
from pubsel.privacy.randomness import Source
from pubsel.settings.keys import MOST_STEPS, Training


class Schedule(NamedTuple):
    """Schedule of the samples of private data: each of n examples, or of people with all of theirs, is in each of
    `steps` batches with probability rate."""

    n: int
    rate: float
    steps: int
    batch_size: int  # expected, public, and the fixed denominator of the mean


def schedule(n: int, training: Training) -> Schedule:
    """Return the steps and the sampling rate for n private examples; a batch of n or more is the full batch, taken
    every time. UsageError for more steps than MOST_STEPS."""
    # Epochs count expected passes, so the steps follow from the expected batch.
    batch = min(training.batch_size, n)
    steps = training.steps or max(1, round(min(training.epochs * n / batch, 2 * MOST_STEPS)))
    if steps > MOST_STEPS:
        raise UsageError(f"training.epochs={training.epochs:g}: more than {MOST_STEPS:,} steps: lower it")

    return Schedule(n, batch / n, steps, batch)


def poisson_sample(source: Source, n: int, rate: float) -> Tensor:
    """Return the indices of a sample that contains each of n examples independently with probability `rate` (all at
    rate 1)."""
    return torch.from_numpy(np.flatnonzero(np.asarray(source.random(n)) < rate))
