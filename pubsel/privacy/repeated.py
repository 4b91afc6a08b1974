"""The best of a secret number of runs as one release: what the whole costs, and what is left for each run.

A run Q draws one of several settings, trains with it and scores the model, all with noise, so it is (e, delta(e))-
private for a whole curve delta of e >= 0. The number of runs K is drawn: P(K = k) = g (1 - g)^(k - 1), k = 1, 2, ...,
whose mean is m = 1 / g (the geometric distribution, eta = 1 of the truncated negative binomial ones of Papernot and
Steinke 2022, arXiv:2110.03620). Only the run with the best score is released; K and the other runs never are.

**Theorem.** If (m - 1) delta(a) <= e^a - 1, the whole is (e + 2 a, m delta(e))-private for each e >= 0.

Proof (as Papernot and Steinke, Lemma 7, with the curve of Q in place of its Renyi divergences; curves are those of
Koskela, Redberg and Wang 2024, arXiv:2402.06701). Let Q and Q' be the outcomes of a run on neighbours, in one order
that does not depend on the data: the score, ties broken at random. With q(y) = Q(at most y), the best of K runs has
density f'(q) dQ, where f(x) = E[x^K] and f'(x) = g / (1 - (1 - g) x)^2 <= m. By privacy of Q, 1 - q' <= e^a (1 - q) +
delta(a), so 1 - (1 - g) q' = g + (1 - g) (1 - q') is at most e^a (g + (1 - g) (1 - q)) - g (e^a - 1) + (1 - g)
delta(a), and the last two terms are not positive by the condition. So f'(q) <= e^(2 a) f'(q'), and for any set S
P(S) - e^(e + 2 a) P'(S) <= int_S f'(q) (dQ - e^e dQ') <= m delta(e).

The settings need not have the same curve: Q draws one of them, and its curve is a mean of theirs, at most the largest.
Why geometric: at least one run is made, and for the same chance that the best of 3 to 30 settings is tried (60 % or
80 %) a run needs less noise than with a Poisson or logarithmic number of them, and at most 2 % more than with eta = 1/2
or 2. Renyi divergences (Theorem 2 of the paper) leave less for each run (tests/test_repeated.py).
"""

import math
from collections.abc import Callable, Sequence

from pubsel.messages import UsageError
from pubsel.privacy.accountant import Plan, deltas, gaussian_epsilon, gaussian_mu
from pubsel.privacy.randomness import Source

ACCOUNTANT = "best of a geometric number of runs"
HIDDEN = (
    "how many runs there were, and the other runs with their scores: they are parts of one tuned release and have been "
    "deleted; the guarantee does not hold against anyone who learns of them"
)
HALVINGS = 12  # of the interval in which the price of the choice is sought
LEAST = 0.99  # of epsilon that a calibration has to use
TRIES = 25
SEEN = 0.05  # chance of a number of runs that the plan names


def number(runs: float, source: Source) -> int:
    """Return the number of runs, geometric with mean `runs` >= 1."""
    drawn = 1
    while source.random(1)[0] >= 1 / runs:
        drawn += 1
    return drawn


def most_runs(runs: float) -> int:
    """Return the number of runs that is reached with probability SEEN at most."""
    return 1 if runs == 1 else 1 + math.ceil(math.log(SEEN) / math.log1p(-1 / runs))


def chance_to_try(runs: float, settings: int) -> float:
    """Return the probability that at least one run draws a given one of `settings` settings: 1 - f(1 - 1 / settings),
    f(x) = g x / (1 - (1 - g) x)."""
    return runs / (runs + settings - 1)


def curve(parts: Sequence[Plan], share: float) -> float:
    """Return a bound of delta at `share` of the sum of the epsilons of several releases, 0 <= share <= 1: the sum of
    their deltas at this share of each epsilon (basic composition).

    A release with delta 0 is known by its epsilon alone: randomised response has the largest curve of these (Kairouz,
    Oh, Viswanath 2015, arXiv:1311.0776).
    """
    total = 0.0
    for part in parts:
        at = share * part.epsilon
        if part.delta == 0:
            total += -math.expm1(at - part.epsilon) / (1 + math.exp(-part.epsilon))
        elif part.steps:
            total += deltas(part.noise_multiplier, part.rate, part.steps, [at])[0]
    return min(1.0, total)


def price(runs: float, parts: Sequence[Plan]) -> float:
    """Return what choosing among runs adds to the epsilon of one, 2 a; a is at most that epsilon. parts: the releases
    of one run."""
    each = sum(part.epsilon for part in parts)

    def enough(share: float) -> bool:
        return (runs - 1) * curve(parts, share) <= math.expm1(share * each)

    # Bisection, upwards: the share that is returned fulfils the condition of the theorem.
    low, high = 0.0, 1.0
    if runs == 1 or enough(low):
        return 0.0
    if not enough(high):
        return math.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return 2 * high * each


def budget_of_run(
    epsilon: float, delta: float, runs: float, costs: Callable[[float, float], Sequence[Sequence[Plan]]]
) -> tuple[float, float]:
    """Return epsilon and delta of each run, such that the best of them is (epsilon, delta)-private. costs: the releases
    of a run that has an epsilon and a delta, for each setting. UsageError if so little is left that none can be
    planned."""
    delta_each = delta / runs

    # start where Gaussian noise on all examples would end, of which a bisection is quick
    low, high = 0.0, epsilon
    for _ in range(HALVINGS):
        each = (low + high) / 2
        mu = gaussian_mu(each, delta_each)
        gaussian = Plan(gaussian_epsilon(mu, delta_each), delta_each, 1.0, 1, 1 / mu, "", True, each)
        low, high = (low, each) if each + price(runs, [gaussian]) > epsilon else (each, high)

    # then by what the runs really cost
    each, best = max(low, high / 2), 0.0
    for _ in range(TRIES):
        total = each + max(price(runs, parts) for parts in set(map(tuple, costs(each, delta_each))))
        best = max(best, each) if total <= epsilon else best
        if LEAST * epsilon <= total <= epsilon:
            break
        each *= 0.5 if total == math.inf else (1 + LEAST) / 2 * epsilon / total
    if not best:
        raise UsageError(
            f"runs={runs:g}: leaves too little of epsilon={epsilon:g} for a run: lower it, or raise epsilon"
        )
    return best, delta_each
