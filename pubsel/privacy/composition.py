"""The cost of several releases together, less than the sum of their epsilons.

A release is known to be Gaussian noise on all examples (full batches, whose steps compose) or on Poisson samples, or
only by its epsilon and delta. Each is dominated by a pair of distributions, the most that the best adversary sees of
two neighbours (one unit is there, or counts as nothing; see `accountant`):

- Gaussian noise by N(mu, 1) and N(0, 1), where mu is the sensitivity over the standard deviation. Several of these are
  one with the root of the sum of mu^2 (Dong, Roth, Su 2019, arXiv:1905.02383, Corollary 3.3).
- Gaussian noise on samples at rate q by (1 - q) N(0, s^2) + q N(1, s^2) and N(0, s^2) in each step, for a unit that is
  there. If it counts as nothing, the two are exchanged in every release; that this is less, also together with other
  releases, was checked numerically against a second accountant.
- (epsilon, delta) by: everything is revealed with probability delta, otherwise an answer whose privacy loss is epsilon
  with probability e^epsilon / (1 + e^epsilon) and -epsilon otherwise (Kairouz, Oh, Viswanath 2015, arXiv:1311.0776).
  This is the worst of all mechanisms with that guarantee.

The product of dominating pairs dominates the releases together, also if each depends on the outputs before it (Zhu,
Dong, Wang 2022, arXiv:2106.08567, on adaptive composition). So with L the sum of the losses of the answers and samples,
and delta_G the curve of the Gaussian one, at each epsilon

    1 - delta = (1 - E[delta_G(epsilon - L)]) prod_i (1 - delta_i).

Without Gaussian noise this is the optimal composition of Kairouz, Oh and Viswanath (Theorem 3.3) and, of unequal
epsilons, of Murtagh and Vadhan (2016, arXiv:1507.03113, Theorem 1.5).

It holds if the number of releases, their epsilons and deltas were decided without looking at earlier outputs (Rogers et
al. 2016, arXiv:1605.08294); all else in a release may depend on these. The sum of the epsilons needs no such condition:
a cap on it and on the sum of the deltas, decided beforehand, is a privacy filter (ibid., basic composition).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, log_ndtr

from pubsel.messages import UsageError, at_most
from pubsel.privacy.accountant import RELATIVE_ERROR, gaussian_epsilon, sampled_losses
from pubsel.privacy.ledger import Line, Spent, cost_of, lacking, per_unit, sides
from pubsel.records import guarantee_kind

POINTS = 2**15  # of the grid of losses: epsilons are rounded up to 1 / POINTS of their sum
MOST_SAMPLED = 32  # kinds of sampled noise, a few tenths of a second each; more of them count as pairs
IF = "if nobody looked at earlier results to decide how many releases to make, and with which epsilon and delta"
NAMED = 5  # runs without a guarantee that a sentence names
LESS = 0.9  # of the sum of the epsilons: a bound above that is not worth its condition

Array = NDArray[np.float64]
Pair = tuple[float, float]  # epsilon and delta


class Components(NamedTuple):
    """Releases that compose: mu of all Gaussian ones together (0: none), epsilon and delta of each other one, and the
    number of steps at each (rate, noise multiplier) of samples."""

    mu: float
    pairs: tuple[Pair, ...]
    sampled: Mapping[tuple[float, float], int] = {}


def composed_epsilon(delta: float, parts: Components, about: float = 1.0) -> float:
    """Return an upper bound of epsilon at `delta`, at most 1e-9 and (number of pairs) / POINTS of it above the smallest
    one, with samples 3 RELATIVE_ERROR of `about` more; inf if there is none, because the pairs alone have such a
    delta."""
    deltas = [of_pair for _, of_pair in parts.pairs]
    if delta >= 1:
        return 0.0
    if any(of_pair >= 1 for of_pair in deltas):
        return math.inf

    # The pairs leave 1 - (1 - delta) / prod (1 - delta_i) of delta; a rest as small as rounding is 0.
    left = -math.expm1(math.log1p(-delta) - math.fsum(math.log1p(-of_pair) for of_pair in deltas))
    left = 0.0 if abs(left) < 1e-12 * (delta + sum(deltas)) else left
    if left < 0 or (left == 0 and (parts.mu > 0 or parts.sampled)):
        return math.inf

    # The largest loss of the others, with all of the remaining delta for the Gaussian.
    losses, chances = _answers(parts.pairs)
    if parts.sampled:
        losses, chances = _with_samples(losses, chances, parts.sampled, RELATIVE_ERROR * about, left / 1000)
        left -= left / 1000
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


def _with_samples(
    losses: Array, chances: Array, sampled: Mapping[tuple[float, float], int], error: float, delta_error: float
) -> tuple[Array, Array]:
    """Return the losses of answers and of samples together, ascending, and their probabilities, both [K]: on one grid,
    to which they are rounded up. error, delta_error: as in `sampled_losses`."""
    from scipy.signal import fftconvolve  # slow to import, and rarely needed

    step = error / 8
    lowest, grids = 0, list[Array]()
    for values, weights in ((losses, chances), sampled_losses(sampled, error, delta_error)):
        places = np.ceil(values / step).astype(np.int64)
        lowest += int(places[0])
        grids.append(np.bincount(places - places[0], weights).astype(np.float64))
    both: Array = np.maximum(fftconvolve(*grids), 0.0)
    return step * (lowest + np.arange(len(both), dtype=np.float64)), both


def components_of(lines: Iterable[Line]) -> Components:
    """Return the components of the releases of a ledger. A line without the noise of its release is a pair.

    A run either trains on an example or measures it, never both. The result dominates both sides: of the Gaussians the
    larger mu, of the pairs, ordered, the larger epsilon and the larger delta. Samples count as such only in a run with
    one side.
    """
    runs = list(sides(lines).values())
    single = [line for run in runs if not all(run) for line in (*run[0], *run[1]) if 0 < (line.get("rate") or 0) < 1]
    sampled = Counter[tuple[float, float]]()
    for line in single:
        sampled[line["rate"], line["noise_multiplier"]] += line["steps"]
    if len(sampled) > MOST_SAMPLED:
        sampled.clear()
    named = {line["release"] for line in single if sampled}

    squared, pairs = 0.0, []
    for run in runs:
        squared += max(sum(mu_of(line) ** 2 for line in side) for side in run)
        rest = [
            sorted(
                ((line["epsilon"], line["delta"]) for line in side if not mu_of(line) and line["release"] not in named),
                reverse=True,
            )
            for side in run
        ]
        for both in zip_longest(*rest, fillvalue=(0.0, 0.0)):
            pairs.append((max(epsilon for epsilon, _ in both), max(delta for _, delta in both)))
    return Components(math.sqrt(squared), tuple(pairs), dict(sampled))


def mu_of(line: Line) -> float:
    """Return the sensitivity over the standard deviation of Gaussian noise on all examples; 0 for any other release."""
    return float(math.sqrt(line["steps"]) / line["noise_multiplier"]) if line.get("rate") == 1 else 0.0


def tighter(lines: Sequence[Line]) -> Spent | None:
    """Return an epsilon clearly below the sum over all releases, at the sum of their deltas or else at twice that; None
    if there is none at either."""
    total, parts = cost_of(lines), components_of(lines)
    for delta in (total.delta, 2 * total.delta):
        epsilon = math.inf
        if 0 < delta < 1:
            with suppress(UsageError, ValueError, RuntimeError, FloatingPointError, OverflowError):
                epsilon = composed_epsilon(delta, parts, total.epsilon)
        if epsilon <= LESS * total.epsilon:
            return Spent(epsilon, delta, total.releases)
    return None


def sums_text(lines: Sequence[Line]) -> str:
    """Return what releases spend for one unit, in words: their sum, and what is less under a condition."""
    total, less = cost_of(lines), tighter(lines)
    text = f"epsilon {at_most(total.epsilon)} at delta {at_most(total.delta)}, the sum"
    if less is None:
        return text
    return f"{text}; or {at_most(less.epsilon)} at delta {at_most(less.delta)}, composed, {IF}"


def best_of(records: Iterable[dict[str, Any]], ledgers: Iterable[Iterable[Line]]) -> list[str]:
    """Return for each private data set of several runs what it spends to publish the best of them, in a sentence.
    ledgers: lines of releases, of these runs and others; what they lack is taken from the records."""
    listed = [line for lines in ledgers for line in lines]
    of_data: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        of_data.setdefault(record["private"], []).append(record)

    sentences = []
    for private, runs in of_data.items():
        covered = {run["identity"]: run for run in runs if guarantee_kind(run) != "none"}
        lines = [line for line in listed if line["cell"] in covered]
        lines += lacking(lines, covered.values())
        if len(covered) < 2 or not lines:
            continue
        spent = "; ".join(f"for one {unit} {sums_text(of_unit)}" for unit, of_unit in per_unit(lines).items())
        without = [str(run["identity"]) for run in runs if run["identity"] not in covered]
        several = f" and {len(without) - NAMED} more" if len(without) > NAMED else ""
        others = f" Without a guarantee: {', '.join(without[:NAMED])}{several}." if without else ""
        sentences.append(
            f"If you publish the best of these {len(covered)} runs on {private}, what all of them spend counts: "
            f"{spent}. What they were compared by is not covered, unless it was released.{others}"
        )
    return sentences
