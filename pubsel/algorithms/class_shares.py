"""Shares of classes by a noisy count of private examples, and the weights of examples that follow. pubsel's method: no
paper.

Where classes are unbalanced, most of what a budget can learn is that the frequent ones are frequent. `counted` releases
the counts, next to whatever is released before the steps. The loss of an example is then multiplied by a weight of its
class (`weights_by_rarity`) before its gradient is clipped, so the sensitivity of a step stays as it is.
"""

import math

import torch
from torch import Tensor

from pubsel.algorithms import FirstRelease, Frozen

SHARE = 0.03  # of mu^2, for the counts


def shares_of(counts: Tensor, noise: float) -> Tensor:
    """Return the shares [C] of classes by counts [C] whose noise has this deviation: a count is at least that, and at
    least 1."""
    counts = counts.clamp(min=max(noise, 1.0))
    return counts / counts.sum()


def weights_by_rarity(shares: Tensor, exponent: float) -> Tensor:
    """Return the weights [C] of examples by the shares of their classes: these to a power below 0, with a largest
    weight of 1, which the rarest class has."""
    weights = shares**exponent
    return (weights / weights.max()).float()


def counted(before: Frozen | FirstRelease, classes: int, mu: float, share: float, exponent: float) -> FirstRelease:
    """Return a release of the numbers of examples of C classes, with that of `before`, if it is one; the map that is
    decoded has `Frozen.class_weights`.

    share: of the budget mu^2 of both, for the counts; all of it if `before` is a map. mu: 1 over the deviation of the
    noise on all numbers.

    Sensitivity 1. A row adds sqrt(1 - share) times what it adds to the sum of `before`, over its sensitivity, and
    sqrt(share) to the count of its class. The two parts are of different numbers, so the squares of their norms add up
    to at most 1.
    """
    if isinstance(before, FirstRelease):
        other = before
    else:  # a release of no number
        other, share = FirstRelease(lambda x: torch.zeros(0, dtype=torch.float64), lambda _: before, 1.0, 0), 1.0
    count, rest = math.sqrt(share), math.sqrt(1 - share)  # what the two parts are multiplied by

    def clipped_sum(x: Tensor) -> Tensor:  # [n, d + C] -> [size + C]
        part = other.clipped_sum(x[:, :-classes])
        return torch.cat([rest / other.sensitivity * part, count * x[:, -classes:].sum(0, dtype=torch.float64)])

    def decode(noisy: Tensor) -> Frozen:
        frozen = other.decode(noisy[:-classes] / rest * other.sensitivity)
        frozen.class_weights = weights_by_rarity(shares_of(noisy[-classes:] / count, 1 / (mu * count)), exponent)
        return frozen

    return FirstRelease(clipped_sum, decode, 1.0, other.size + classes, classes)
