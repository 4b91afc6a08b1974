"""The meaning of a guarantee: success of the best adversary, who knows every other unit and how many there are.

The adversary sees what was released and decides whether one unit was there, or counted as nothing. With false alarms
at rate a and misses at rate b, (epsilon, delta)-differential privacy is a + e^epsilon b >= 1 - delta and
e^epsilon a + b >= 1 - delta (Wasserman and Zhou 2010, Theorem 2.4; Kairouz et al. 2015, arXiv:1311.0776, Theorem 2.1).
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.accountant import GAUSSIAN


class Bounds(NamedTuple):
    """Bounds of releases together: epsilon and delta, and the total variation that is known apart from them."""

    epsilon: float
    delta: float
    variation: float


def total_variation(epsilon: float, delta: float) -> float:
    """Return the largest total variation between outputs for two neighbours, in [0, 1]: 1 - a - b at the corner
    a = b = (1 - delta) / (1 + e^epsilon) of the two bounds."""
    return 1 - 2 * (1 - min(delta, 1.0)) * math.exp(-epsilon) / (1 + math.exp(-epsilon))


def variation_of(parts: Iterable[dict[str, Any]], epsilon: float, delta: float) -> float:
    """Return a bound of the total variation for releases whose noise is known, which is less than epsilon alone allows
    for. parts: of each its epsilon, delta, accountant, noise_multiplier, rate and steps, as in a record; epsilon,
    delta: of all of them.

    The total variations of several releases add up at most: it is a metric, and one release after the other is
    exchanged.
    """
    return min(total_variation(epsilon, delta), sum(_of_part(part) for part in parts))


def _of_part(part: dict[str, Any]) -> float:
    bound = total_variation(part["epsilon"], part["delta"])
    if part["accountant"] not in GAUSSIAN or not part["steps"]:
        return bound
    try:
        return min(bound, accountant.advantage(part["noise_multiplier"], part["rate"], part["steps"]))
    except UsageError:  # with so little noise, what epsilon and delta allow for is all that is known
        return bound


def success(epsilon: float, delta: float, variation: float) -> float:
    """Return how often the best adversary is right at most, in [1/2, 1], if the unit was there in half of all cases:
    (1 + total variation) / 2. variation: a bound that is known apart from epsilon and delta."""
    return (1 + min(total_variation(epsilon, delta), variation)) / 2


def recognised(epsilon: float, delta: float, variation: float, alarms: float) -> float:
    """Return the largest share of units that are recognised where they were there, 1 - b, by an adversary who accuses
    a share `alarms` of those that counted as nothing, a. variation: as in `success`; it bounds 1 - b - a."""
    least_misses = max(1 - delta - math.exp(min(epsilon, 700)) * alarms, (1 - delta - alarms) * math.exp(-epsilon))
    return min(1.0, 1 - max(0.0, least_misses), alarms + variation)


def of_group(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """Return epsilon and delta for somebody with `size` examples in the data: size epsilon, and delta times the sum of
    e^(i epsilon) for i < size (Vadhan 2017, The Complexity of Differential Privacy, Lemma 2.2)."""
    exponents = [min(i * epsilon, 700.0) for i in range(size)]
    return size * epsilon, min(1.0, delta * sum(math.exp(exponent) for exponent in exponents))


def exchanged(parts: Iterable[dict[str, Any]]) -> Bounds:
    """Return the bounds if one unit is exchanged for another, in the same place. parts: as in `variation_of`.

    The unit is taken out, and the other put in. This moves a sum by twice the sensitivity, so Gaussian noise on all
    examples has twice the mu; for any other release it is a group of two.
    """
    together = Bounds(0.0, 0.0, 0.0)
    for part in parts:
        if part["accountant"] == GAUSSIAN[0] and part["steps"]:
            mu = 2 * math.sqrt(part["steps"]) / part["noise_multiplier"]
            epsilon, delta = accountant.gaussian_epsilon(mu, part["delta"]), part["delta"]
            variation = accountant.gaussian_delta(0.0, mu)
        else:
            epsilon, delta = of_group(part["epsilon"], part["delta"], 2)
            variation = min(total_variation(epsilon, delta), 2 * _of_part(part))
        together = Bounds(*map(sum, zip(together, (epsilon, delta, variation), strict=True)))
    return together
