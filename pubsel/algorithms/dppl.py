"""DPPL-Public. Wahdany, Jagielski, Dziedzic, Boenisch: Differentially Private Prototypes for Imbalanced Transfer
Learning, AAAI 2025, arXiv:2406.08039.

For each class, the exponential mechanism chooses one public example as its prototype, by the sum over the private rows
of the class of their cosine similarity to it, clipped to [low, high]. Public labels are not used. A new example gets
the class of the prototype with the largest cosine similarity. delta is 0.

**Sensitivity.** Neighbours: one example is there, or counts as nothing. In units of high - low, it adds a_j in [0, 1]
to the score of public example j for its class, and nothing to scores for other classes: it changes a single choice.
There it multiplies the weight exp(epsilon q_j) by exp(epsilon a_j), and the sum of all weights by a mean of these
factors, so each probability changes by a factor in [e^-epsilon, e^epsilon], without the factor 2 of scores that may
move in opposite directions. The choices are independent: together they cost epsilon, however many classes there are.

**In floating point.** Scores and choices are exact integers and coins. A similarity, computed in float64, may be
rounded in another way next to other rows, by a step of 1 / UNIT at most: that moves the differences of scores by 2 n /
UNIT in all, for all classes together. epsilon is divided by 1 + this + `accountant.ROUNDING`, the room that all sums
have for rows in float32 that a processor rounds in another way (`accountant.deviation`).
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from pubsel.algorithms import Algorithm, Frozen, Random, View, needed
from pubsel.data import Split
from pubsel.gradients.matrix import clipped_rows
from pubsel.messages import UsageError
from pubsel.privacy.accountant import ROUNDING, Plan, pure
from pubsel.privacy.lattice import coin
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import Source, below
from pubsel.settings.schema import setting

ENTRIES = 2**23  # similarities at a time


def prototype_scores(private: Split, public: Tensor, classes: int, low: float, high: float) -> Tensor:
    """Return the score of each public row [m, d] for each class, int64 [C, m] in steps of 1 / UNIT, from private rows
    x [n, d] of norm 1 with classes y [n]. A row that is not finite adds nothing to its class."""
    total = torch.zeros(classes, len(public), dtype=torch.int64)
    columns = clipped_rows(public, 1.0).T
    for x, y in zip(*(part.split(max(1, ENTRIES // len(public))) for part in private), strict=True):
        shares = ((clipped_rows(x, 1.0) @ columns - low) / (high - low)).clamp(0, 1)
        shares[~x.isfinite().all(1)] = 0  # of its similarity, which is zero, it would add a share
        total.index_add_(0, y.long(), (shares * UNIT).round().long())
    return total


def exponential(scores: list[int], epsilon: Fraction, source: Source) -> int:
    """Return a place j with probability proportional to exp(epsilon scores_j / UNIT), exactly: each place is as likely
    to be drawn, and kept by a coin with probability exp(epsilon (scores_j - largest) / UNIT)."""
    best = max(scores)
    while True:
        j = below(len(scores), source)
        if coin(epsilon * (best - scores[j]) / UNIT, source):
            return j


@dataclass
class DPPLPublic(Algorithm):
    """Settings of DPPL-Public."""

    low: float = setting("least cosine similarity that counts: smaller ones count as it", at_least=-1, below=1)
    high: float = setting("largest cosine similarity that counts", over=-1, at_most=1)

    def sensitivity(self) -> float:
        """Return 1: what one example adds to each score for its class is between 0 and 1, in units of high - low."""
        return 1.0

    def numbers(self, view: View) -> int:
        return 2 * ENTRIES

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        needed(public, self.name)
        return Frozen(unit=True)

    def account(self, n: int, epsilon: float, delta: float) -> Plan:
        """Return what the choices cost together. UsageError if no similarity is left between the bounds."""
        if self.low >= self.high:
            raise UsageError(f"algorithm.low={self.low}: give a number below algorithm.high={self.high}")
        return pure(epsilon, 1.0, 1, "exponential mechanism")

    def solve(
        self, private: Split, public: Split | None, classes: int, epsilon: float, delta: float, source: Source
    ) -> tuple[Tensor, Plan]:
        """Return the prototypes [C, d], and what they cost."""
        n, x = len(private.x), needed(public, self.name).x
        cost = self.account(n, epsilon, delta)
        exponent = Fraction(1 / cost.noise_multiplier) / (1 + Fraction(ROUNDING) + Fraction(2 * n, UNIT))
        each = prototype_scores(private, x, classes, self.low, self.high).tolist()
        places = [exponential(of_class, exponent, source) for of_class in each]
        return clipped_rows(x[places], 1.0).float(), cost
