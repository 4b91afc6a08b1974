"""What several releases cost together, less than the sum of their epsilons.

Of each release it is known either that it is Gaussian noise on all examples (full batches, whose steps compose), or
only its epsilon and delta. Each is dominated by a pair of distributions, which are what the best adversary sees at most
for two neighbours (one unit is there, or counts as nothing; see `accountant`):

- Gaussian noise by N(mu, 1) and N(0, 1), where mu is the sensitivity over the standard deviation. Several of these are
  one with the root of the sum of mu^2 (Dong, Roth, Su 2019, arXiv:1905.02383, Corollary 3.3).
- (epsilon, delta) by: all is told with probability delta, otherwise an answer whose privacy loss is epsilon with
  probability e^epsilon / (1 + e^epsilon) and -epsilon otherwise (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776). This is
  the worst of all mechanisms with that guarantee.

The product of dominating pairs dominates the releases together, also if each depends on the outputs before it (Zhu,
Dong, Wang 2022, arXiv:2106.08567, on adaptive composition). So with L the sum of the losses of the answers, and delta_G
the curve of the Gaussian one, at each epsilon

    1 - delta = (1 - E[delta_G(epsilon - L)]) prod_i (1 - delta_i).

Without a Gaussian this is the optimal composition of Kairouz, Oh and Viswanath (Theorem 3.3) and, of unequal epsilons,
of Murtagh and Vadhan (2016, arXiv:1507.03113, Theorem 1.5).

It holds for releases whose number, epsilon and delta were decided without looking at the outputs before them (Rogers et
al. 2016, arXiv:1605.08294); what else a release does may depend on these. The sum of the epsilons needs no such
condition.
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
from pubsel.privacy.ledger import Line, Spent, is_measurement, spent

POINTS = 2**15  # of the grid of losses: epsilons are rounded up to 1 / POINTS of their sum
LESS = 0.9  # of the sum of the epsilons: what is not below that is not worth its condition

Array = NDArray[np.float64]
Pair = tuple[float, float]  # epsilon and delta


class Parts(NamedTuple):
    """Releases that compose: mu of all Gaussian ones together (0: there is none), and epsilon and delta of each
    other."""

    mu: float
    pairs: tuple[Pair, ...]


def epsilon_of(delta: float, parts: Parts) -> float:
    """Return an upper bound of epsilon at `delta`, at most 1e-9 and (number of pairs) / POINTS of it above the smallest
    one; inf if there is none, since the pairs alone have such a delta."""
    left = _left(delta, parts)
    if left < 0:
        return math.inf
    losses, chances = _answers(parts.pairs)

    # The largest loss of the answers, with all of delta that is left for the Gaussian.
    high = float(losses[-1])
    if parts.mu > 0:
        if left <= 0:
            return math.inf
        high += gaussian_epsilon(parts.mu, left)

    def excess(epsilon: float) -> float:
        return float(chances @ _delta(epsilon - losses, parts.mu)) - left

    if excess(0.0) <= 0:
        return 0.0
    return high if excess(high) >= 0 else float(brentq(excess, 0.0, high, xtol=1e-12)) * (1 + 1e-9)


def _left(delta: float, parts: Parts) -> float:
    """Return 1 - (1 - delta) / prod (1 - delta_i): what the deltas of the pairs leave of delta. What is not more than
    rounding is 0."""
    deltas = [of_pair for _, of_pair in parts.pairs]
    if delta >= 1 or any(of_pair >= 1 for of_pair in deltas):
        return 1.0 if delta >= 1 else -1.0
    left = -math.expm1(math.log1p(-delta) - math.fsum(math.log1p(-of_pair) for of_pair in deltas))
    return 0.0 if abs(left) < 1e-12 * (delta + sum(deltas)) else left


def _answers(pairs: Sequence[Pair]) -> tuple[Array, Array]:
    """Return the privacy losses of all answers together, ascending, and their probabilities, both [K]. The epsilons
    are rounded up to a grid, which can only add to the loss."""
    epsilons = [epsilon for epsilon, _ in pairs if epsilon > 0]
    if not epsilons:
        return np.zeros(1), np.ones(1)
    step = math.fsum(epsilons) / POINTS
    units = [math.ceil(epsilon / step) for epsilon in epsilons]

    # chances[j]: that the answers with loss +epsilon have j units together, the others having loss -epsilon
    chances = np.zeros(sum(units) + 1)
    chances[0], reached = 1.0, 0
    for unit in units:
        up = expit(unit * step)
        before = chances[: reached + 1] * up
        chances[: reached + 1] *= expit(-unit * step)
        chances[unit : reached + unit + 1] += before
        reached += unit
    return step * (2 * np.arange(reached + 1.0) - reached), chances


def _delta(epsilon: Array, mu: float) -> Array:
    """Return delta of N(mu, 1) and N(0, 1) at each epsilon [K], which may be below 0; mu = 0: they are alike."""
    if mu == 0:
        return -np.expm1(np.minimum(epsilon, 0.0))
    inside = np.exp(log_ndtr(mu / 2 - epsilon / mu)) - np.exp(np.minimum(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0))
    return np.maximum(inside, 0.0)


def parts_of(lines: Iterable[Line], gaussian: Mapping[str, float]) -> Parts:
    """Return releases of a ledger as what composes. gaussian: mu of the releases that are known to be Gaussian, by the
    name of the release.

    An example is either trained on or measured in a run, never both. What is returned dominates both sides: of the
    Gaussians the larger mu, of the pairs, ordered, the larger epsilon and the larger delta.
    """
    sides: dict[str, dict[bool, list[Line]]] = {}
    for line in {line["release"]: line for line in lines}.values():
        sides.setdefault(line["cell"], {}).setdefault(is_measurement(line), []).append(line)

    squared, pairs = 0.0, []
    for of_cell in sides.values():
        known = [sum(gaussian.get(line["release"], 0.0) ** 2 for line in side) for side in of_cell.values()]
        squared += max(known)
        rest = [
            sorted(((line["epsilon"], line["delta"]) for line in side if line["release"] not in gaussian), reverse=True)
            for side in of_cell.values()
        ]
        for both in zip_longest(*rest, fillvalue=(0.0, 0.0)):
            pairs.append((max(epsilon for epsilon, _ in both), max(delta for _, delta in both)))
    return Parts(math.sqrt(squared), tuple(pairs))


def tighter(lines: Sequence[Line], gaussian: Mapping[str, float]) -> Spent | None:
    """Return an epsilon that is clearly less than the sum of those of all releases, at the sum of their deltas or, if
    there is none, at twice that; None if there is none at either. For gaussian see `parts_of`."""
    total, parts = spent(lines), parts_of(lines, gaussian)
    for delta in (total.delta, 2 * total.delta):
        epsilon = epsilon_of(delta, parts) if 0 < delta < 1 else math.inf
        if epsilon <= LESS * total.epsilon:
            return Spent(epsilon, delta, total.releases)
    return None
