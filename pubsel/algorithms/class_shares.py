"""How frequent classes are, by a noisy count of private examples, and weights with which rare classes count. pubsel's
own method: no paper.

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

    Sensitivity 1. A row adds sqrt(1 - share) times what it adds to the sum of `before`, over its sensitivity, and
    sqrt(share), or 1 if `before` releases nothing, to the count of its class. The two parts are of different numbers,
    so the squares of their norms add up to at most 1. mu: that the noise on all numbers has, 1 over its deviation.
    """
    own = math.sqrt(share) if isinstance(before, FirstRelease) else 1.0  # scale of counts
    rest = math.sqrt(1 - own**2)

    def clipped_sum(x: Tensor) -> Tensor:  # [n, d + C] -> [size + C]
        counts = own * x[:, -classes:].sum(0, dtype=torch.float64)
        if not isinstance(before, FirstRelease):
            return counts
        return torch.cat([rest / before.sensitivity * before.clipped_sum(x[:, :-classes]), counts])

    def decode(noisy: Tensor) -> Frozen:
        shares = shares_of(noisy[-classes:] / own, 1 / (mu * own))
        frozen = before
        if isinstance(before, FirstRelease):
            frozen = before.decode(before.sensitivity / rest * noisy[:-classes])
        assert isinstance(frozen, Frozen)
        frozen.class_weights = weights_by_rarity(shares, exponent)
        return frozen

    size = before.size if isinstance(before, FirstRelease) else 0
    return FirstRelease(clipped_sum, decode, 1.0, size + classes, classes)
