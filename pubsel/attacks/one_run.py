"""Lower bounds on epsilon from one run.

Each of m canaries is in the data with probability 1/2, independently. An adversary who sees the output guesses for each
whether it was in, or abstains. The more guesses are right, the less private the program. To flip one coin is to let one
example be there, or count as nothing, with the same rate, steps and batch size, as between the neighbours of pubsel's
guarantees. There are three bounds with different assumptions:

- `epsilon_of_any`, of any program. Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023,
  arXiv:2305.08846, Theorem 5.2 and Corollary 5.4. It assumes nothing, so it is far below the truth for Gaussian
  noise: a program that is exactly (2, 1e-5)-private gets a bound of about 0.5 from 1,000 canaries.
- `epsilon_of_curve`, of any program whose outputs for neighbours are as hard to distinguish as the accountant states,
  at every delta at once: its trade-off curve, over noise multipliers. After Mahloujifar, Melis, Chaudhuri:
  Auditing f-Differential Privacy in One Run, ICML 2025, arXiv:2410.22235. About twice the former.
- `epsilon_of_plan`, of a program that draws Poisson samples at the planned rate and adds Gaussian noise of any scale,
  if the canaries' contributions do not overlap, so that each is an independent trial. Close to the truth. After
  Nasr et al.: Tight Auditing of Differentially Private Machine Learning, USENIX Security 2023, arXiv:2302.07956 (the
  trade-off curve of the mechanism in place of epsilon alone), and Andrew et al.: One-shot Empirical Privacy Estimation
  for Federated Learning, ICLR 2024, arXiv:2302.03098 (many canaries in one run).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtr, ndtri

from pubsel.messages import UsageError
from pubsel.privacy import accountant

LARGEST = 50.0  # epsilon; larger ones are not distinguished
FAR = 4.0  # times less noise than planned is not distinguished from still less
WIDTH = 1.01  # largest ratio of the noise multipliers around a bound


class Guesses(NamedTuple):
    """Numbers of canaries, of guesses, and of right guesses."""

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
    """Guess that a canary is in if its log likelihood ratio [m], in against out, is above 0."""
    return Guesses(len(ratios), len(ratios), int(((ratios > 0) == included).sum()))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the largest chance of at least that number of right guesses for an (epsilon, delta)-DP program (Steinke et
    al.).

    Without delta each guess is right with chance q = e^epsilon / (1 + e^epsilon) at most, whatever the others are: the
    tail of Binomial(guessed, q). With delta it is larger by at most 2 m delta max_i P[right - i <= Bin < right] / i.
    """
    m, guessed, right = guesses
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guessed, q))
    falling = np.arange(right - 1, -1, -1)
    below = np.cumsum(stats.binom.pmf(falling, guessed, q))  # P[right - i <= Bin < right], i = 1, ...
    worst = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, tail + 2 * m * delta * worst)


def epsilon_of_any(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return the largest epsilon at which (epsilon, delta)-DP is refuted with this confidence, or 0."""
    return last_refuted(lambda epsilon: p_value(guesses, epsilon, delta) < 1 - confidence, LARGEST, 1e-6)


def last_refuted(refuted: Callable[[float], bool], largest: float, width: float) -> float:
    """Return the largest value from 0 to `largest` that is refuted, by bisection, at most `width` too small."""
    low, high = 0.0, largest
    while high - low > width:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def is_consistent(
    guesses: Guesses, plan: accountant.Plan, confidence: float, noise_multiplier: float | None = None
) -> bool:
    """Return whether the number of right guesses is likely under `plan`, or under it with another noise multiplier.

    The best adversary is right with chance (1 + delta(0)) / 2, delta(0) being that of the steps at epsilon 0; of
    independent canaries the number of right guesses is then below a binomial one.
    """
    sigma = plan.noise_multiplier if noise_multiplier is None else noise_multiplier
    chance = (1 + accountant.advantage(sigma, plan.rate, plan.steps)) / 2
    return bool(stats.binom.sf(guesses.right - 1, guesses.made, chance) >= 1 - confidence)


def may_be_right(guesses: Guesses, chance: float, least: Callable[[float], float]) -> bool:
    """Return whether a program with a trade-off curve can have that number of right guesses, or more, with this chance.

    least(y): the least probability of an event under one of two neighbours that has probability y under the other.

    Proof: let r be the number of guesses, q_k the chance that k are right, f the curve. Fix all coins
    but one, i, and take the outputs that guess i right while k - 1 or more others are right: with coin i turned over
    they guess i wrong, and k - 1 right or more. So P[i right, >= k right] <= 1 - f(P[i wrong, >= k - 1 right]). By
    concavity, averaged over i: sum_{j >= k} j q_j / m <= 1 - f(sum_{j >= k - 1} (r - j) q_j / m). From the top down,
    q_{k - 1} is the least that this allows; if they add up to more than 1, the chance is impossible.
    """
    m, guessed, right = guesses
    total = chance
    rights, wrongs = right / m * chance, (guessed - right) / m * chance

    # From the top down: q is the least chance of exactly k right guesses
    for k in range(right - 1, -1, -1):
        q = max(0.0, (least(min(rights, 1.0)) - wrongs) * m / (guessed - k))
        total += q
        rights += k / m * q
        wrongs += (guessed - k) / m * q
        if total > 1:
            return False
    return True


def trade_off(plan: accountant.Plan, noise_multiplier: float) -> Callable[[float], float]:
    """Return `least` of `may_be_right`, for the steps of the plan with another noise multiplier."""
    if plan.rate == 1:
        mu = math.sqrt(plan.steps) / noise_multiplier
        return lambda y: float(ndtr(ndtri(y) - mu))

    # The lines whose upper envelope is the curve: one for each (epsilon, delta) pair and its mirror image.
    epsilons = np.linspace(0, 3 * plan.claimed_epsilon + 3, 60)
    delta = np.array(accountant.deltas(noise_multiplier, plan.rate, plan.steps, epsilons.tolist()))
    slopes = np.exp(epsilons)

    def least(y: float) -> float:
        line = float(((y - delta) / slopes).max())
        mirrored = float((1 - delta - slopes * (1 - y)).max())
        return max(0.0, line, mirrored)

    return least


def epsilon_of_curve(guesses: Guesses, plan: accountant.Plan, confidence: float) -> float:
    """Return the least epsilon at plan.delta that the guesses allow among the curves of the plan with other noise, or
    0."""
    return _least(plan, lambda noise: may_be_right(guesses, 1 - confidence, trade_off(plan, noise)))[0]


def epsilon_of_plan(guesses: Guesses, plan: accountant.Plan, confidence: float) -> tuple[float, float]:
    """Return (least epsilon at plan.delta, largest noise multiplier) that the guesses allow; (0, inf) if they exclude
    nothing.

    The plan is refuted if that noise multiplier is plan.noise_multiplier or less.
    """
    return _least(plan, lambda noise: is_consistent(guesses, plan, confidence, noise))


def _least(plan: accountant.Plan, allows: Callable[[float], bool]) -> tuple[float, float]:
    """Return (epsilon at plan.delta, noise multiplier) of the most noise that `allows` permits; (0, inf) if it permits
    all. epsilon is the accountant's, like the claimed one: both are exact to half a percent."""
    low = high = plan.noise_multiplier  # from the loops on, low is allowed and high is refuted
    try:
        # More noise until the evidence refutes it, then less until it is allowed.
        while allows(high):
            low, high = high, 1.3 * high
            if high > 100 * plan.noise_multiplier:
                return 0.0, math.inf
        while low == high or not allows(low):
            high, low = low, low / 1.3
            if high < plan.noise_multiplier / FAR:
                break

        while high / low > WIDTH:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if allows(middle) else (low, middle)
    except UsageError:  # too little noise for the accountant: the last refuted one is a bound
        pass

    while True:
        try:
            return accountant.spent(high, plan.rate, plan.steps, plan.delta), high
        except UsageError:
            high *= 1.1  # more noise costs less, so this is a bound too
