"""How much noise a guarantee needs, and what a run has spent. The only file that knows an accountant.

Neighbours: one unit, an example or a person with all their examples, is there, or counts as nothing; the number of
units stays the same and is known (the zero-out adjacency of Kairouz et al. 2021, arXiv:2103.00039). Rate, steps and
batch size follow from it. Exchanging a unit for another takes one out and puts one in: twice the sensitivity
(`adversary.exchanged`).

The mechanism: `steps` times, a Poisson sample at `rate` of the private data, a sum that one unit moves by at most Delta
in L2, plus Gaussian noise of standard deviation noise_multiplier * Delta.

- rate < 1: the PRV accountant (Gopi et al. 2021, arXiv:2106.02848), its upper bound, never its estimate. It models a
  unit that drops out; that this direction dominates the other was checked numerically against a second accountant.
- rate = 1: the exact curve of the composed Gaussian mechanism (Dong et al. 2019, arXiv:1905.02383, Corollary 2.13).

A step that releases several sums of ONE sample (GEP: embedding and residual) is one release of their concatenation,
with sensitivity sqrt(2) if each has sensitivity 1. Doubling the RDP of one release, as GEP's published code does,
understates the cost, because the two share the sample.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import next_fast_len
from scipy.optimize import brentq
from scipy.special import log_ndtr

from pubsel.messages import UsageError, above
from pubsel.settings.keys import Accounting, is_weak

ROUNDING = 1e-3  # of a sensitivity: the most that floating point may add to it (see `deviation`)
MOST_EXAMPLES = 2**21  # for which ROUNDING is derived
RELATIVE_ERROR = 0.0045  # of epsilon, in the numerical accountant; part of the upper bound
SEARCH_ERROR = 0.07  # the same while searching, which uses the estimate alone: off by far less than its error
MAX_GRID = 2**25  # points of its discretisation, at about 130 bytes; above, memory would be unbounded
FEW_ORDERS = [1.5, *range(2, 33), 40, 48, 64, 96, 128, 256, 512]  # for many curves at once
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(11, 512))
GAUSSIAN = ("exact Gaussian", "PRV upper bound")  # accountants of sums with Gaussian noise, whose curve is known


class Plan(NamedTuple):
    """Privacy cost and noise: standard deviation noise_multiplier * sensitivity on each step's sum."""

    epsilon: float
    delta: float
    rate: float
    steps: int
    noise_multiplier: float
    accountant: str
    valid: bool
    claimed_epsilon: float


NOTHING = Plan(0.0, 0.0, 0.0, 0, 0.0, "none: private examples are not read", True, 0.0)


def deviation(noise_multiplier: float, sensitivity: float) -> float:
    """Return the standard deviation of the noise on a sum of declared sensitivity, with a margin for rounding.

    A sum of n rows a_i, each of norm at most the sensitivity D, is computed in float64, in an order that may depend on
    the data. It is off by at most (n - 1) 2^-53 sum_i |a_i| <= n^2 2^-53 D in L2, to first order (Higham: Accuracy and
    Stability of Numerical Algorithms, 2002, Section 4.2). So the computed sums of two neighbours differ by at most D (1
    + n^2 2^-52), which is at most D (1 + ROUNDING) for up to MOST_EXAMPLES examples. Of up to half as many, float32
    may add up the rows of a slot, which one example changes: 4.9e-4 more (gradients/slots.py). GEP adds rows of norm up
    to 10 D that cancel, but in blocks of a few hundred rows, with smaller errors (gep.residual_sum).

    The rows are computed in float32, with a margin for the rounding of their norms (gradients.clip_factors). On paper
    each is a function of its own example; a processor may round it differently next to other rows, by some 1e-7 of it:
    with 60,000 examples, sums moved by 1.5e-7 D in the attacks of tests/test_rounding.py.

    That is why passes over private data do not use TF32 on a GPU, although clipping would bring rows of any precision
    to norm 1. With one example more, a pass has another shape, for which a kernel without TF32 may be chosen: the sum
    of 499 equal rows of a perceptron would then move by 0.1 D (tests/test_cuda.py). It would take passes whose shape no
    example changes.
    """
    return noise_multiplier * sensitivity * (1 + ROUNDING)


def check_delta(
    delta: float, n: int, permitted: bool, key: str = "privacy.delta", permit: str = "privacy.weak"
) -> None:
    """Raise UsageError if a guarantee for n private examples would be weak, unless that is permitted."""
    if is_weak(delta, n) and not permitted:
        raise UsageError(
            f"{key}={delta:g} is above 1/n = {1 / n:.3g} of {n} private examples: lower it, or set {permit}=true, and "
            "the guarantee is called weak"
        )


def _stated(guarantee: str, total: Plan, n: int, secure: bool) -> dict[str, Any]:
    """Return what all guarantees for n examples state in a record: the sentence, the mark of a weak one, and where the
    noise is from."""
    weak = is_weak(total.delta, n)
    if weak:
        guarantee = f"WEAK, since delta is above 1/{n}, which publishing a random example has too: {guarantee}"
    source = "operating system" if secure else "seeded"
    return {"valid": total.valid, "statement": guarantee, "noise_source": source} | ({"weak": True} if weak else {})


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta(epsilon) of a Gaussian mechanism with sensitivity over standard deviation mu, exact."""
    # Balle and Wang 2018, Theorem 8, by logarithms so that a large epsilon does not overflow
    a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    return math.exp(log_ndtr(a)) - math.exp(min(epsilon + log_ndtr(b), 700))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon(delta) of a Gaussian mechanism with sensitivity over standard deviation mu >= 0, exact."""
    if mu == 0 or gaussian_delta(0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # from the concentrated-DP bound
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0, high, xtol=1e-12)) * (1 + 1e-9)


def _sampled_gaussian(noise_multiplier: float, rate: float) -> Any:
    """Return prv-accountant's model of one step, with a distribution function that is computed only where it is not
    flat.

    The values are the same: it is 0 up to log(1 - rate), and 1 once both of its erfc(x) have x > 27.
    """
    from prv_accountant import PoissonSubsampledGaussianMechanism  # a second, of scipy.signal

    shift = (54 * math.sqrt(2) * noise_multiplier + 1) / (2 * noise_multiplier**2)
    low, high = math.log1p(-rate), np.logaddexp(math.log1p(-rate), math.log(rate) + shift)

    class SampledGaussian(PoissonSubsampledGaussianMechanism):  # type: ignore[misc]
        def cdf(self, t: Any) -> Any:
            t = np.asarray(t)
            inside = (t > low) & (t < high)
            values = np.array(t >= high, dtype=np.longdouble)
            values[inside] = super().cdf(t[inside])
            return values

    return SampledGaussian(rate, noise_multiplier)


@lru_cache(maxsize=64)
def _half_width(noise_multiplier: float, rate: float, steps: int, delta_error: float) -> float:
    """Return the half-width of the domain of privacy losses, by prv-accountant's rule; it falls with the noise."""
    from prv_accountant.accountant import compute_safe_domain_size

    prv = _sampled_gaussian(noise_multiplier, rate)
    return float(compute_safe_domain_size([prv], [steps], 0.0, delta_error))


def _mean_loss(noise_multiplier: float, rate: float, most: float) -> float:
    """Return the mean of the privacy loss of one step, given that it is within +-`most`.

    The loss is log(1 - rate + rate e^z), z = (x - 1/2) / sigma^2, of x from a mixture of N(0, sigma^2) and, at `rate`,
    N(1, sigma^2). prv-accountant integrates the distribution function over one long interval. At rates above 0.1 and
    with little noise, the mean is then off by up to 0.2: it rejects such settings, or overstates epsilon by 1 %.
    """
    variance = noise_multiplier**2

    def place(loss: float) -> float:  # x at this loss
        z = loss + math.log1p(-(1 - rate) * math.exp(-loss)) if loss > math.log1p(-rate) else -math.inf
        return variance * (z - math.log(rate)) + 0.5

    # Gauss and Legendre's rule on pieces as long as the scale of the integrands; beyond 12 sigma they are 1e-31
    low, high = max(place(-most), -12 * noise_multiplier), min(place(most), 1 + 12 * noise_multiplier)
    edges = np.linspace(low, high, math.ceil((high - low) / min(noise_multiplier, variance)) + 1)
    nodes, weights = np.polynomial.legendre.leggauss(16)
    x = (edges[:-1, None] + edges[1:, None]) / 2 + (edges[1] - edges[0]) / 2 * nodes  # [pieces, 16]

    z = (x - 0.5) / variance
    losses = np.where(
        z < 1, np.log1p(rate * np.expm1(np.minimum(z, 1))), np.logaddexp(math.log1p(-rate), math.log(rate) + z)
    )
    density = (1 - rate) * np.exp(-(x**2) / (2 * variance)) + rate * np.exp(-((x - 1) ** 2) / (2 * variance))
    return float((weights * density * losses).sum() / (weights * density).sum())


def _composer(sums: Mapping[tuple[float, float], int], error: float, delta_error: float, half_width: float) -> Any:
    """Return the composer that PRVAccountant of prv-accountant has, with the mean of a step's loss by `_mean_loss`.
    sums: the largest number of steps at each (rate, noise multiplier); half_width: of the domain of privacy losses."""
    from prv_accountant.accountant import PrivacyRandomVariableTruncated
    from prv_accountant.composers import Heterogeneous
    from prv_accountant.discretisers import CellCentred
    from prv_accountant.domain import Domain

    class Truncated(PrivacyRandomVariableTruncated):  # type: ignore[misc]
        def mean(self) -> float:
            return _mean_loss(float(self.prv.sigma), float(self.prv.p), self.t_max)

    domain = Domain.create_aligned(-half_width, half_width, _mesh(sum(sums.values()), error, delta_error))
    steps = [Truncated(_sampled_gaussian(noise, rate), domain.t_min(), domain.t_max()) for rate, noise in sums]
    return Heterogeneous([CellCentred().discretise(step, domain) for step in steps])


def _mesh(steps: int, error: float, delta_error: float) -> float:
    """Return the distance between privacy losses on the grid; Gopi et al. 2021, Theorem 5.5."""
    return error / math.sqrt(steps / 2 * math.log(12 / delta_error))


@lru_cache(maxsize=1)
def _prv(noise_multiplier: float, rate: float, steps: int, eps_error: float, delta_error: float) -> Any:
    # The noise is rounded, so that a search computes few widths; less noise has a larger width, which is safe.
    less_noise = 1.1 ** math.floor(math.log(noise_multiplier, 1.1))
    half_width = max(_half_width(less_noise, rate, steps, delta_error), 3 + eps_error)

    mesh = _mesh(steps, eps_error, delta_error)
    if not 2 * half_width / mesh < MAX_GRID:
        raise UsageError(
            f"epsilon is too small or too large to account for at noise multiplier {noise_multiplier:.3g}, "
            f"{steps} steps: change it, or lower training.epochs"
        )

    half = next_fast_len(math.ceil(half_width / mesh) + 2, real=True)  # a little wider, for a quick FFT
    return _composer({(rate, noise_multiplier): steps}, eps_error, delta_error, (half - 1.5) * mesh)


def _prv_epsilon(
    noise_multiplier: float, rate: float, steps: int, done: int, delta: float, error: float
) -> tuple[float, float]:
    """Return the estimate and upper bound of epsilon after `done` of `steps` steps, about `error` apart."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = _prv(noise_multiplier, rate, steps, error, delta / 1000).compute_composition([done])
            _, estimate, upper = losses.compute_epsilon(delta, delta / 1000, error)

        # A bound that does not exist must not pass for epsilon 0.
        if not math.isfinite(upper):
            raise FloatingPointError("no finite bound")
        return estimate, upper
    except (ValueError, RuntimeError, FloatingPointError, OverflowError) as failure:
        raise UsageError(
            f"epsilon with privacy.delta={delta}: the accountant fails at noise multiplier {noise_multiplier:.3g} "
            f"({failure}); change epsilon, or take a delta from 1e-12 to 0.1"
        ) from None


@lru_cache(maxsize=64)
def spent(
    noise_multiplier: float, rate: float, steps: int, delta: float, done: int | None = None, about: float | None = None
) -> float:
    """Return an upper bound of epsilon after `done` of `steps` steps (all by default). 0 <= rate <= 1, 0 < delta < 1.

    about: the expected epsilon; RELATIVE_ERROR is of it, and by default of the RDP bound.
    """
    done = steps if done is None else done
    if done == 0 or rate == 0:
        return 0.0
    if rate == 1:
        return gaussian_epsilon(math.sqrt(done) / noise_multiplier, delta)

    # The error is relative, so it needs a first guess of epsilon.
    if about is None:
        about = rdp_epsilon(noise_multiplier, rate, steps, delta)
    error = RELATIVE_ERROR * about
    return max(0.0, _prv_epsilon(noise_multiplier, rate, steps, done, delta, error)[1])


def sampled_losses(
    sums: Mapping[tuple[float, float], int], error: float, delta_error: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the privacy losses of noisy sums of samples together, ascending, and their probabilities, both [K]. sums:
    the number of steps at each (rate, noise multiplier).

    The true loss is at most the returned one, except with probability `delta_error` (Gopi et al. 2021, Theorem 5.5); it
    is about `error` less. UsageError if memory would be unbounded.
    """
    from prv_accountant.accountant import compute_safe_domain_size

    prvs, steps = [_sampled_gaussian(noise, rate) for rate, noise in sums], list(sums.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half_width = float(compute_safe_domain_size(prvs, steps, error, delta_error))
        if not 2 * half_width / _mesh(sum(steps), error, delta_error) < MAX_GRID:
            raise UsageError("too many steps, or too little noise, to be accounted for")
        together = _composer(sums, error, delta_error, half_width).compute_composition(steps)

    # the FFT leaves probabilities just below 0
    losses = np.asarray(together.domain.ts(), dtype=np.float64) + error
    return losses, np.maximum(np.asarray(together.pmf, dtype=np.float64), 0.0)


def advantage(noise_multiplier: float, rate: float, steps: int) -> float:
    """Return an upper bound of delta at epsilon 0, the total variation between the outputs of neighbours: the best
    adversary recognises one of the two with probability (1 + this) / 2. 0 < rate <= 1."""
    return deltas(noise_multiplier, rate, steps, (0.0,))[0]


def deltas(noise_multiplier: float, rate: float, steps: int, epsilons: Sequence[float]) -> list[float]:
    """Return upper bounds of delta at each of `epsilons`. 0 < rate <= 1. UsageError for too little noise."""
    if rate == 1:
        return [gaussian_delta(epsilon, math.sqrt(steps) / noise_multiplier) for epsilon in epsilons]

    # With little noise the accountant needs a larger error of epsilon.
    for error in (0.02, 0.1, 0.5):
        with warnings.catch_warnings(), contextlib.suppress(UsageError, ValueError, RuntimeError, OverflowError):
            warnings.simplefilter("ignore")
            losses = _prv(noise_multiplier, rate, steps, error, 1e-8).compute_composition([steps])
            rounded = abs(float(losses.pmf.sum()) - 1)  # with little noise it is no longer far below 1e-8
            bounds = [losses.compute_delta_estimate(epsilon - error) + 1e-8 + rounded for epsilon in epsilons]
            return [min(1.0, float(bound)) for bound in bounds]
    raise UsageError(f"noise multiplier {noise_multiplier:.3g}: too little to be accounted for")


def rdp_epsilon(noise_multiplier: float, rate: float, steps: int, delta: float, releases: int = 1) -> float:
    """Return epsilon by Renyi DP; `releases` multiplies the RDP of a step (2 in GEP's published accounting, which is
    not sound)."""
    from opacus.accountants.analysis import rdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curve = rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=steps, orders=ORDERS)
        return float(rdp.get_privacy_spent(orders=ORDERS, rdp=curve * releases, delta=delta)[0])


def rdp_of_step(noise_multiplier: float, rate: float) -> NDArray[np.float64]:
    """Return the Renyi DP of one step at FEW_ORDERS; infinite with so little noise that a sum reveals everything."""
    if noise_multiplier < 0.05:
        return np.full(len(FEW_ORDERS), math.inf)

    from opacus.accountants.analysis import rdp

    return np.asarray(rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=FEW_ORDERS))


def epsilons_of_rdp(curves: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Return the epsilon at delta of each curve [n, FEW_ORDERS]; Balle et al. 2020, arXiv:1905.09982, Theorem 21."""
    a = np.array(FEW_ORDERS)
    at_orders = curves + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return np.asarray(at_orders.min(1).clip(0))


def _crossing(epsilon_at: Callable[[float], float], epsilon: float, start: float) -> float:
    """Return the noise multiplier, to 2e-5 relative, at which the falling `epsilon_at` crosses epsilon; search from
    `start`."""

    @cache
    def gap(log_sigma: float) -> float:
        return math.log(max(epsilon_at(math.exp(log_sigma)), 1e-12) / epsilon)

    # Steps that double find a bracket from any start, and few of them if the start is near.
    low = high = math.log(start)
    step = 0.03
    while gap(high) > 0:
        low, high, step = high, high + step, 2 * step
        if high > math.log(1e7):
            raise UsageError(f"epsilon={epsilon}: needs more noise than can be calibrated; raise it")
    while gap(low) < 0:
        low, high, step = low - step, low, 2 * step
        if low < math.log(1e-2):
            raise UsageError(f"epsilon={epsilon}: so large that it hardly protects; lower it or use non_private")

    if low == high:
        return start
    return math.exp(brentq(gap, low, high, xtol=2e-5))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the sensitivity over standard deviation of the Gaussian mechanism that is exactly (epsilon,
    delta)-private. UsageError if epsilon is too large or too small."""

    def gap(log_mu: float) -> float:
        return gaussian_delta(epsilon, math.exp(log_mu)) - delta

    # A budget outside of this bracket is refused.
    if gap(math.log(1e3)) < 0:
        raise UsageError(f"epsilon={epsilon}: so large that it hardly protects; lower it or use non_private")
    if gap(math.log(1e-14)) > 0:
        raise UsageError(f"epsilon={epsilon}: needs more noise than can be calibrated; raise it")
    return math.exp(brentq(gap, math.log(1e-14), math.log(1e3), xtol=1e-12))


@lru_cache(maxsize=64)
def calibrate(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return a noise multiplier whose upper bound of epsilon is at most `epsilon`, and at least 99.9 % of it.

    rate < 1: the search starts at the central limit (Bu et al. 2020, arXiv:1911.11607) and uses the estimate over a
    coarse grid, times the ratio of the bound over a fine grid to it; it is repeated until the bound itself is right.
    UsageError if no noise gives this epsilon.
    """
    mu = gaussian_mu(epsilon, delta)
    if rate == 1:
        sigma = math.sqrt(steps) / mu
        while spent(sigma, rate, steps, delta) > epsilon:
            sigma *= 1 + 1e-7
        return sigma

    def coarse(noise_multiplier: float) -> float:
        return _prv_epsilon(noise_multiplier, rate, steps, steps, delta, SEARCH_ERROR * epsilon)[0]

    # The search aims 1e-4 low: more than its tolerance, less than what is accepted.
    sigma = 1 / math.sqrt(math.log1p((mu / rate) ** 2 / steps))
    ratio = 1 + RELATIVE_ERROR
    for _ in range(10):
        sigma = _crossing(lambda s: (1 + 1e-4) * ratio * coarse(s), epsilon, sigma)  # noqa: B023
        bound = spent(sigma, rate, steps, delta, about=epsilon)
        if 0.999 * epsilon <= bound <= epsilon:
            return sigma
        ratio = bound / coarse(sigma)

    raise UsageError(f"epsilon={epsilon}: cannot be calibrated over {steps} steps; change it or training.epochs")


def plan(
    epsilon: float, delta: float, rate: float, steps: int, sensitivity: float, accounting: Accounting = Accounting.prv
) -> Plan:
    """Return the noise for (epsilon, delta) over `steps` steps, and the epsilon that this noise really costs.

    accounting=paper takes the noise scale of GEP's publication (sensitivity^2 times the RDP of one release, although
    the releases share a sample): such a plan is marked as not valid for the requested epsilon.
    """
    if accounting == Accounting.paper:
        releases = round(sensitivity**2)
        scale = _crossing(lambda s: rdp_epsilon(s, rate, steps, delta, releases), epsilon, 1.0)
        sigma = scale / sensitivity
        true = spent(sigma, rate, steps, delta)
        return Plan(true, delta, rate, steps, sigma, "paper: RDP per release, summed", False, epsilon)

    sigma = calibrate(epsilon, delta, rate, steps)
    true = spent(sigma, rate, steps, delta, about=epsilon)
    return Plan(true, delta, rate, steps, sigma, GAUSSIAN[rate < 1], True, epsilon)


def pure(epsilon: float, rate: float, steps: int, name: str) -> Plan:
    """Return `steps` releases, together epsilon-private (delta 0), each on a separate Poisson sample at `rate`.

    On its sample a release may be epsilon'-private, epsilon' = log(1 + (e^(epsilon / steps) - 1) / rate). Proof: with
    an additional example the release follows (1 - rate) P + rate P', where P' is within e^(+- epsilon') of P. Divided
    by P that is between 1 - rate + rate e^(-epsilon') and 1 - rate + rate e^epsilon' = e^(epsilon / steps), whose
    product is at least 1. The noise multiplier is 1 / epsilon', the scale of exponential noise.
    """
    each = epsilon / steps
    if each < 1:
        inner = math.log1p(math.expm1(each) / rate)
    else:  # the same without the overflow of e^each
        inner = each - math.log(rate) + math.log1p(-math.exp(-each) * (1 - rate))

    # epsilon' is rounded down, so that its noise is rounded up.
    return Plan(epsilon, 0.0, rate, steps, 1 / (inner * (1 - 1e-12)), name, True, epsilon)


def most_steps(epsilon: float, delta: float, noise_multiplier: float) -> int:
    """Return the number of full-batch steps that are (epsilon, delta)-private with this noise: the largest T with
    sqrt(T) / sigma at most the exact Gaussian mu (AdaMix, Proposition 5, with rho = T / (2 sigma^2)).
    UsageError if it is 0."""
    steps = int((gaussian_mu(epsilon, delta) * noise_multiplier * (1 - 1e-9)) ** 2)
    if steps < 1:
        raise UsageError(
            f"privacy.noise_multiplier={noise_multiplier}: one step already costs more than epsilon={epsilon}: raise "
            "epsilon or privacy.noise_multiplier"
        )
    return steps


ROUNDED = "differences in the last digits, because a processor may round an example differently next to others"
SEVERAL_VALUES = "a person whose examples have several values of {unit}, who counts as several people"
KNOWN_SEED = "an adversary who knows the seed, which is in this record: publish {what} only from a run with {key}=true"


def statement(
    training: Plan | None,
    sensitivity: float,
    secure: bool,
    distance_used: bool,
    before: Sequence[tuple[str, Plan]] = (),
    selected: str | None = None,
    *,
    examples: int,
    unit: str | None = None,
) -> dict[str, Any]:
    """Return the `privacy` of a record: the full guarantee, and what it does not cover. training None: no guarantee.
    before: releases before training, whose epsilon and delta are added. selected: the thing that one of them chooses,
    such as the public set. examples: the number of private examples; with a `unit`, that of people, each with all
    examples that share a value of it."""
    if training is None:
        return {"valid": False, "epsilon": None, "statement": "No privacy: trained without noise."}

    # Basic composition: what was released before training and training itself add up.
    total = training
    composition: dict[str, Any] = {"unit": unit} if unit else {}
    if before:
        total = training._replace(
            epsilon=sum((p.epsilon for _, p in before), training.epsilon),
            delta=sum((p.delta for _, p in before), training.delta),
            claimed_epsilon=sum((p.claimed_epsilon for _, p in before), training.claimed_epsilon),
        )
        parts = [{"what": what, **p._asdict()} for what, p in (*before, ("training", training))]
        composition |= {"composition": "basic", "parts": parts}

    released = f"The choice of {selected} and the trained weights" if selected else "The trained weights"
    secret = "" if secure else " against whoever does not know the seed"
    whose = f" for a person with all their examples (those with one {unit})" if unit else ""
    if total.valid:
        sound = f"{released} are ({above(total.epsilon)}, {total.delta:g})-differentially private{whose}{secret}."
    else:
        sound = (
            f"NOT a valid guarantee for epsilon {total.claimed_epsilon:g}: the published accounting is unsound; "
            f"this noise costs epsilon {above(total.epsilon)} at delta {total.delta:g}."
        )
    return {
        **_stated(sound, total, examples, secure),
        "epsilon": total.epsilon,
        "claimed_epsilon": total.claimed_epsilon,
        "delta": total.delta,
        "adjacency": neighbours(unit),
        "sampling": "full batch" if total.rate == 1 else "Poisson",
        "sampling_rate": total.rate,
        "steps": total.steps,
        "noise_multiplier": total.noise_multiplier,
        "sensitivity": sensitivity,
        "accountant": total.accountant,
        "not_covered": _not_covered(secure, distance_used, selected, unit),
        **composition,
    }


def neighbours(unit: str | None, kind: str = "training", distinct: bool = False) -> str:
    """Return the definition of neighbours for a record; kind: of the released examples, such as training.
    distinct: an example is an image with all its copies."""
    if unit is None:
        copies = " (an image with all its copies)" if distinct else ""
        return f"one {kind} example{copies} is there, or counts as nothing; the number of {kind} examples is known"
    return (
        f"one person with all their {kind} examples (those with one {unit}) is there, or counts as nothing; the "
        f"number of people and that of all {kind} examples are known"
    )


def _not_covered(secure: bool, distance_used: bool, selected: str | None, unit: str | None) -> list[str]:
    """Return sentences on everything that the guarantee of a training does not cover."""
    choices = "hyper-parameters, data sets and seeds"
    if selected:
        choices = "hyper-parameters, candidates for public data and seeds"

    whole = "the number of people and of their examples together" if unit else "the number of examples"
    not_covered = [
        f"the choice of {choices}, and the utility on test and validation data, with its interval",
        f"what is read off the private data before training, which is treated as public: {whole}, their "
        "shape, the number and names of their classes, on which side each of them is (training, public, validation, "
        "test), the notes, and the time that the run took",
        "the training loss on the screen, which is computed on private data: do not publish it",
    ]

    if unit:
        not_covered.append(SEVERAL_VALUES.format(unit=unit))
    if distance_used:
        not_covered.append("the distance (GSD) in this record, which is computed on private data without noise")
    if not secure:
        not_covered.append(KNOWN_SEED.format(what="weights", key="privacy.secure_noise"))

    return not_covered


def measurement_statement(
    what: str,
    plan: Plan,
    secure: bool,
    examples: int,
    sensitivity: float = 1.0,
    kind: str = "training",
    unit: str | None = None,
) -> dict[str, Any]:
    """Return the `privacy` of a record of a private measurement. what: the subject of its sentence, such as "The choice
    is". examples: the number of private examples of this kind; with a `unit`, that of people."""
    not_covered = [
        "the choice of settings, candidates and seeds",
        "what is treated as public: the number of private examples, their shape, the number and names of their "
        "classes, which of them are training examples, the notes, and the time that it took",
        "another measurement: with another seed, other candidates or other settings it is one more release, and their "
        "epsilons add up",
    ]
    if unit:
        not_covered.append(SEVERAL_VALUES.format(unit=unit))
    if not secure:
        not_covered.append(KNOWN_SEED.format(what="it", key="secure_noise"))

    secret = "" if secure else " against whoever does not know the seed"
    guarantee = f"{what} ({above(plan.epsilon)}, {plan.delta:g})-differentially private{secret}."
    return {
        **plan._asdict(),
        **_stated(guarantee, plan, examples, secure),
        "adjacency": neighbours(unit, kind),
        "sampling": "all examples" if plan.rate == 1 else "Poisson",
        "sensitivity": sensitivity,
        "not_covered": not_covered,
        **({"unit": unit} if unit else {}),
    }
