"""How much noise a guarantee needs, and what a run has spent. The only file that knows an accountant.

The mechanism accounted for: `steps` times, a Poisson sample at `rate` of the private data, a sum whose L2 sensitivity
to adding or removing one example is Delta, plus Gaussian noise of standard deviation noise_multiplier * Delta.

- rate < 1: the PRV accountant (Gopi et al. 2021, arXiv:2106.02848), its upper bound, never its estimate. It models the
  removal of an example; that this direction dominates addition was checked numerically against a second accountant.
- rate = 1: the exact curve of the composed Gaussian mechanism (Dong et al. 2019, arXiv:1905.02383, Corollary 2.13).

A step that releases several sums from ONE sample (GEP: embedding and residual) is one release of their concatenation,
with sensitivity sqrt(2) when each is scaled to sensitivity 1: by definition of the joint Gaussian mechanism. Doubling
the RDP of one release, as GEP's published code does, understates the cost, because the two share the sample.
"""

import math
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.special import log_ndtr

from pubsel.config import Accounting, UsageError

RELATIVE_ERROR = 0.01  # of epsilon, in the numerical accountant; part of the upper bound
MAX_GRID = 2**24  # points of its discretisation; above, memory would be unbounded
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(11, 512))


class Plan(NamedTuple):
    """What will be spent. Noise: standard deviation noise_multiplier * sensitivity on each step's sum."""

    epsilon: float
    delta: float
    rate: float
    steps: int
    noise_multiplier: float
    accountant: str
    valid: bool
    claimed_epsilon: float


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of a Gaussian mechanism with sensitivity over standard deviation mu, exact."""
    a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    return math.exp(log_ndtr(a)) - math.exp(min(epsilon + log_ndtr(b), 700))


def _gaussian_epsilon(noise_multiplier: float, steps: int, delta: float) -> float:
    mu = math.sqrt(steps) / noise_multiplier
    if gaussian_delta(0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # from the concentrated-DP bound
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0, high, xtol=1e-12)) * (1 + 1e-9)


@lru_cache(maxsize=8)
def _prv(noise_multiplier: float, rate: float, steps: int, eps_error: float, delta_error: float) -> Any:
    from prv_accountant import PRVAccountant
    from prv_accountant.accountant import compute_safe_domain_size
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    prv = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise_multiplier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half_width = compute_safe_domain_size([prv], [steps], eps_error, delta_error)
        mesh = eps_error / math.sqrt(steps / 2 * math.log(12 / delta_error))
        if not 2 * half_width / mesh < MAX_GRID:
            raise UsageError(
                f"epsilon is too large to account for at noise multiplier {noise_multiplier:.3g}, {steps} steps: "
                "lower epsilon or training.epochs"
            )
        return PRVAccountant([prv], eps_error=eps_error, delta_error=delta_error, max_self_compositions=[steps])


def spent(
    noise_multiplier: float, rate: float, steps: int, delta: float, done: int | None = None, about: float | None = None
) -> float:
    """Upper bound of epsilon after `done` of `steps` steps (all by default). 0 <= rate <= 1, 0 < delta < 1.

    about: the expected epsilon; the accountant's error, part of the bound, is 1 % of it (of the RDP bound by default).
    """
    done = steps if done is None else done
    if done == 0 or rate == 0:
        return 0.0
    if rate == 1:
        return _gaussian_epsilon(noise_multiplier, done, delta)
    error = RELATIVE_ERROR * (about if about is not None else rdp_epsilon(noise_multiplier, rate, steps, delta))
    try:
        bounds = _prv(noise_multiplier, rate, steps, error, delta / 1000).compute_epsilon(delta, [done])
        return max(0.0, float(bounds[2]))
    except (ValueError, RuntimeError, FloatingPointError, OverflowError) as failure:
        raise UsageError(
            f"epsilon with privacy.delta={delta}: the accountant fails at noise multiplier {noise_multiplier:.3g} "
            f"({failure}); lower epsilon, or take a delta from 1e-12 to 0.1"
        ) from None


def rdp_epsilon(noise_multiplier: float, rate: float, steps: int, delta: float, releases: int = 1) -> float:
    """epsilon from Renyi DP; `releases` multiplies the RDP of a step (GEP's published accounting: 2, not sound)."""
    from opacus.accountants.analysis import rdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curve = rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=steps, orders=ORDERS)
        return float(rdp.get_privacy_spent(orders=ORDERS, rdp=curve * releases, delta=delta)[0])


def _bracket(epsilon_at: Any, epsilon: float) -> tuple[float, float]:
    """Noise multipliers, a factor of 2 apart, between which `epsilon_at` crosses epsilon."""
    high = 1.0
    while epsilon_at(high) > epsilon:
        high *= 2
        if high > 1e7:
            raise UsageError(f"epsilon={epsilon}: needs more noise than can be calibrated; raise it")
    while epsilon_at(high / 2) <= epsilon:
        high /= 2
        if high < 1e-2:
            raise UsageError(f"epsilon={epsilon}: so large that it hardly protects; lower it or use non_private")
    return high / 2, high


@lru_cache(maxsize=64)
def calibrate(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Smallest noise multiplier, to 1e-3 relative, whose upper bound of epsilon is at most `epsilon`."""
    if rate == 1:

        def mu_gap(log_mu: float) -> float:
            return gaussian_delta(epsilon, math.exp(log_mu)) - delta

        if mu_gap(math.log(1e3)) < 0:
            raise UsageError(f"epsilon={epsilon}: so large that it hardly protects; lower it or use non_private")
        sigma = math.sqrt(steps) / math.exp(brentq(mu_gap, math.log(1e-9), math.log(1e3), xtol=1e-12))
        while spent(sigma, rate, steps, delta) > epsilon:
            sigma *= 1 + 1e-7
        return sigma

    low, high = _bracket(lambda s: rdp_epsilon(s, rate, steps, delta), epsilon)

    def gap(log_sigma: float) -> float:
        return math.log(max(spent(math.exp(log_sigma), rate, steps, delta, about=epsilon), 1e-9) / epsilon)

    while gap(math.log(high)) > 0:  # the accountant's own error may outweigh RDP's slack at tiny epsilon
        high *= 1.5
    while gap(math.log(low)) < 0:  # RDP overstates epsilon: the true multiplier may be smaller
        low /= 1.5
    sigma = math.exp(brentq(gap, math.log(low), math.log(high), xtol=5e-4))
    while spent(sigma, rate, steps, delta, about=epsilon) > epsilon:
        sigma *= 1 + 2.5e-4
    return sigma


def plan(
    epsilon: float, delta: float, rate: float, steps: int, sensitivity: float, accounting: Accounting = Accounting.prv
) -> Plan:
    """The noise for (epsilon, delta) over `steps` steps, and the epsilon that this noise really costs.

    accounting=paper takes the noise scale of GEP's publication (sensitivity^2 times the RDP of one release, though the
    releases share a sample): such a plan is not valid for the epsilon asked for, and says so.
    """
    if accounting == Accounting.paper:
        releases = round(sensitivity**2)
        low, high = _bracket(lambda s: rdp_epsilon(s, rate, steps, delta, releases), epsilon)
        scale = brentq(lambda s: rdp_epsilon(s, rate, steps, delta, releases) - epsilon, low, high, xtol=1e-3)
        sigma = scale / sensitivity
        true = spent(sigma, rate, steps, delta)
        return Plan(true, delta, rate, steps, sigma, "paper: RDP per release, summed", False, epsilon)
    sigma = calibrate(epsilon, delta, rate, steps)
    name = "exact Gaussian" if rate == 1 else "PRV upper bound"
    return Plan(spent(sigma, rate, steps, delta, about=epsilon), delta, rate, steps, sigma, name, True, epsilon)


def statement(made: Plan | None, sensitivity: float, secure: bool, distance_used: bool) -> dict[str, Any]:
    """What a record says of privacy: the guarantee in full, and what it does not cover. None: no guarantee."""
    if made is None:
        return {"valid": False, "epsilon": None, "statement": "No privacy: trained without clipping and noise."}
    not_covered = [
        "the choice of hyper-parameters, data sets and seeds, and the utility on the test data",
        "what is read off the private data before training, which is treated as public: the number of examples, their "
        "shape and classes, the split into training and test data, the notes, and the time that the run took",
        "the training loss on the screen, which is computed on private data: do not publish it",
    ]
    if distance_used:
        not_covered.append("the distance (GSD) in this record, which is computed on private data without noise")
    if not secure:
        not_covered.append(
            "an adversary who knows the seed, which stands in this record: publish weights only from a run with "
            "privacy.secure_noise=true"
        )
    secret = "" if secure else " against whoever does not know the seed"
    sound = (
        f"The trained weights are ({made.epsilon:.4g}, {made.delta:g})-differentially private{secret}."
        if made.valid
        else f"NOT a valid guarantee for epsilon {made.claimed_epsilon:g}: the published accounting is unsound; "
        f"this noise costs epsilon {made.epsilon:.4g} at delta {made.delta:g}."
    )
    return {
        "valid": made.valid,
        "epsilon": made.epsilon,
        "claimed_epsilon": made.claimed_epsilon,
        "delta": made.delta,
        "adjacency": "add or remove one training example; sampling rate, steps and batch size stay",
        "sampling": "full batch" if made.rate == 1 else "Poisson",
        "sampling_rate": made.rate,
        "steps": made.steps,
        "noise_multiplier": made.noise_multiplier,
        "sensitivity": sensitivity,
        "accountant": made.accountant,
        "noise_source": "operating system" if secure else "seeded",
        "statement": sound,
        "not_covered": not_covered,
    }
