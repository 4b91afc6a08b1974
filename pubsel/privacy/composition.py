"""The cost of several releases together, less than the sum of their epsilons.

A release is known either to be Gaussian noise on all examples (full batches, whose steps compose), or only by its
epsilon and delta. Each is dominated by a pair of distributions, the most that the best adversary sees of two neighbours
(one unit is there, or counts as nothing; see `accountant`):

- Gaussian noise by N(mu, 1) and N(0, 1), where mu is the sensitivity over the standard deviation. Several of these are
  one with the root of the sum of mu^2 (Dong, Roth, Su 2019, arXiv:1905.02383, Corollary 3.3).
- (epsilon, delta) by: everything is revealed with probability delta, otherwise an answer whose privacy loss is epsilon
  with probability e^epsilon / (1 + e^epsilon) and -epsilon otherwise (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776).
  This is the worst of all mechanisms with that guarantee.

The product of dominating pairs dominates the releases together, also if each depends on the outputs before it (Zhu,
Dong, Wang 2022, arXiv:2106.08567, on adaptive composition). So with L the sum of the losses of the answers, and delta_G
the curve of the Gaussian one, at each epsilon

    1 - delta = (1 - E[delta_G(epsilon - L)]) prod_i (1 - delta_i).

Without a Gaussian this is the optimal composition of Kairouz, Oh and Viswanath (Theorem 3.3) and, of unequal epsilons,
of Murtagh and Vadhan (2016, arXiv:1507.03113, Theorem 1.5).

It holds if the number of releases, their epsilons and deltas were decided without looking at earlier outputs (Rogers et
al. 2016, arXiv:1605.08294); all else in a release may depend on these. The sum of the epsilons needs no such condition.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr

from pubsel.privacy.accountant import gaussian_epsilon
from pubsel.privacy.ledger import Line, Spent, cost_of, sides

POINTS = 2**15  # of the grid of losses: epsilons are rounded up to 1 / POINTS of their sum
LESS = 0.9  # of the sum of the epsilons: a bound above that is not worth its condition

Array = NDArray[np.float64]
Pair = tuple[float, float]  # epsilon and delta


class Components(NamedTuple):
    """Releases that compose: mu of all Gaussian ones together (0: none), and epsilon and delta of each other one."""

    mu: float
    pairs: tuple[Pair, ...]


def composed_epsilon(delta: float, parts: Components) -> float:
    """Return an upper bound of epsilon at `delta`, at most 1e-9 and (number of pairs) / POINTS of it above the smallest
    one; inf if there is none, because the pairs alone have such a delta."""
    deltas = [of_pair for _, of_pair in parts.pairs]
    if delta >= 1:
        return 0.0
    if any(of_pair >= 1 for of_pair in deltas):
        return math.inf

    # The pairs leave 1 - (1 - delta) / prod (1 - delta_i) of delta; a rest as small as rounding is 0.
    left = -math.expm1(math.log1p(-delta) - math.fsum(math.log1p(-of_pair) for of_pair in deltas))
    left = 0.0 if abs(left) < 1e-12 * (delta + sum(deltas)) else left
    if left < 0 or (left == 0 and parts.mu > 0):
        return math.inf

    # The largest loss of the answers, with all of the remaining delta for the Gaussian.
    losses, chances = _answers(parts.pairs)
    high = float(losses[-1]) + (gaussian_epsilon(parts.mu, left) if parts.mu > 0 else 0.0)

    def excess(epsilon: float) -> float:
        above = epsilon - losses
        if parts.mu == 0:
            return float(chances @ -np.expm1(np.minimum(above, 0.0))) - left

        # delta of N(mu, 1) and N(0, 1) at each epsilon, which may be below 0 here
        shifts = -above / parts.mu
        deltas = np.exp(log_ndtr(shifts + parts.mu / 2))
        deltas -= np.exp(np.minimum(above + log_ndtr(shifts - parts.mu / 2), 0))
        return float(chances @ np.maximum(deltas, 0.0)) - left

    if excess(0.0) <= 0:
        return 0.0
    return high if excess(high) >= 0 else float(brentq(excess, 0.0, high, xtol=1e-12)) * (1 + 1e-9)


def _answers(pairs: Sequence[Pair]) -> tuple[Array, Array]:
    """Return the privacy losses of all answers together, ascending, and their probabilities, both [K]. The epsilons are
    rounded up to a grid, which can only increase the loss."""
    epsilons = [epsilon for epsilon, _ in pairs if epsilon > 0]
    if not epsilons:
        return np.zeros(1), np.ones(1)
    step = math.fsum(epsilons) / POINTS
    units = [math.ceil(epsilon / step) for epsilon in epsilons]

    # chances[j]: the answers with loss +epsilon have j units together, all others loss -epsilon
    chances = np.zeros(sum(units) + 1)
    chances[0], reached = 1.0, 0
    for unit in units:
        up = expit(unit * step)
        before = chances[: reached + 1] * up
        chances[: reached + 1] *= expit(-unit * step)
        chances[unit : reached + unit + 1] += before
        reached += unit
    return step * (2 * np.arange(reached + 1.0) - reached), chances


def components_of(lines: Iterable[Line], gaussian: Mapping[str, float]) -> Components:
    """Return the components of the releases of a ledger. gaussian: mu of each release that is known to be Gaussian, by
    name.

    A run either trains on an example or measures it, never both. The result dominates both sides: of the Gaussians the
    larger mu, of the pairs, ordered, the larger epsilon and the larger delta.
    """
    squared, pairs = 0.0, []
    for run in sides(lines).values():
        squared += max(sum(gaussian.get(line["release"], 0.0) ** 2 for line in side) for side in run)
        rest = [
            sorted(((line["epsilon"], line["delta"]) for line in side if line["release"] not in gaussian), reverse=True)
            for side in run
        ]
        for both in zip_longest(*rest, fillvalue=(0.0, 0.0)):
            pairs.append((max(epsilon for epsilon, _ in both), max(delta for _, delta in both)))
    return Components(math.sqrt(squared), tuple(pairs))


def tighter(lines: Sequence[Line], gaussian: Mapping[str, float]) -> Spent | None:
    """Return an epsilon clearly below the sum over all releases, at the sum of their deltas or else at twice that; None
    if there is none at either. For gaussian see `components_of`."""
    total, parts = cost_of(lines), components_of(lines, gaussian)
    for delta in (total.delta, 2 * total.delta):
        epsilon = composed_epsilon(delta, parts) if 0 < delta < 1 else math.inf
        if epsilon <= LESS * total.epsilon:
            return Spent(epsilon, delta, total.releases)
    return None
