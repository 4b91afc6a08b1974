"""Lower bounds on epsilon from one run.

Each of m canaries is in the data with probability 1/2, independently. Whoever sees the output guesses of each whether
it was in, or abstains. The more guesses are right, the less private the program. To flip one coin is to add or remove
one example, which is the adjacency of pubsel's guarantees. There are two bounds; they rest on different things:

- `epsilon_of_any`, of any program. Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023,
  arXiv:2305.08846, Theorem 5.2 and Corollary 5.4. Nothing is assumed, so it lies far below the truth where noise is
  Gaussian: a program that is exactly (2, 1e-5)-private reads about 0.5 from 1,000 canaries.
- `epsilon_of_plan`, of a program that draws Poisson samples at the planned rate and adds Gaussian noise, of whatever
  scale, where the canaries' contributions do not overlap, so that each is a trial of its own. Close to the truth. After
  Nasr et al.: Tight Auditing of Differentially Private Machine Learning, USENIX Security 2023, arXiv:2302.07956 (the
  trade-off curve of the mechanism in place of epsilon alone), and Andrew et al.: One-shot Empirical Privacy Estimation
  for Federated Learning, ICLR 2024, arXiv:2302.03098 (many canaries in one run).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pubsel import privacy
from pubsel.config import UsageError

LARGEST = 50.0  # epsilon; more is not told apart
FAR = 4.0  # times less noise than planned is not told from still less
WIDTH = 1.01  # ratio of the noise multipliers between which a bound is found


class Guesses(NamedTuple):
    """Of so many canaries, so many were guessed, so many of them rightly."""

    canaries: int
    made: int
    right: int


def guess_extremes(scores: NDArray[np.float64], included: NDArray[np.bool_], share: float) -> Guesses:
    """Guess a `share` of the canaries, fixed beforehand: by their scores [m] the upper half as in, the lower as out."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
    return Guesses(len(scores), 2 * half, right)


def guess_all(ratios: NDArray[np.float64], included: NDArray[np.bool_]) -> Guesses:
    """Guess that those canaries are in whose log likelihood ratio [m], in against out, is above 0."""
    return Guesses(len(ratios), len(ratios), int(((ratios > 0) == included).sum()))


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """The largest chance that an (epsilon, delta)-DP program allows so many right guesses, or more (Steinke et al.).

    Without delta each guess is right with chance q = e^epsilon / (1 + e^epsilon) at most, whatever the others are: the
    tail of Binomial(made, q). With delta it is larger by at most 2 m delta max_i P[right - i <= Bin < right] / i.
    """
    m, made, right = found
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, made, q))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), made, q))  # P[right - i <= Bin < right], i = 1, ...
    worst = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, tail + 2 * m * delta * worst)


def epsilon_of_any(found: Guesses, delta: float, confidence: float) -> float:
    """The largest epsilon at which (epsilon, delta)-DP is refuted with this confidence, or 0."""
    if p_value(found, 0.0, delta) >= 1 - confidence:
        return 0.0
    low, high = 0.0, LARGEST
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(found, middle, delta) < 1 - confidence else (low, middle)
    return low


def stands(found: Guesses, plan: privacy.Plan, confidence: float, noise_multiplier: float | None = None) -> bool:
    """Whether so many right guesses are no surprise under `plan`, or under it with another noise multiplier.

    The best adversary is right with chance (1 + delta(0)) / 2, delta(0) being that of the steps at epsilon 0; of
    independent canaries the number of right guesses is then below a binomial one.
    """
    sigma = plan.noise_multiplier if noise_multiplier is None else noise_multiplier
    chance = (1 + privacy.advantage(sigma, plan.rate, plan.steps)) / 2
    return bool(stats.binom.sf(found.right - 1, found.made, chance) >= 1 - confidence)


def epsilon_of_plan(found: Guesses, plan: privacy.Plan, confidence: float) -> tuple[float, float]:
    """(least epsilon at plan.delta, largest noise multiplier) that the guesses leave; (0, inf) where they say nothing.

    The plan is refuted where that noise multiplier is plan.noise_multiplier or less. epsilon is the accountant's, like
    the claimed one: both up to half a percent.
    """
    low = high = plan.noise_multiplier  # then: low stands, high is refuted
    try:
        while stands(found, plan, confidence, high):
            low, high = high, 1.3 * high
            if high > 100 * plan.noise_multiplier:
                return 0.0, math.inf
        while low == high or not stands(found, plan, confidence, low):
            high, low = low, low / 1.3
            if high < plan.noise_multiplier / FAR:
                break
        while high / low > WIDTH:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if stands(found, plan, confidence, middle) else (low, middle)
    except UsageError:  # so little noise that it cannot be accounted for: what is refuted already is a bound
        pass
    return privacy.spent(high, plan.rate, plan.steps, plan.delta), high
