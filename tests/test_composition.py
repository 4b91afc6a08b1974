"""The cost of several releases: against the optimal composition counted out, and known curves."""

import functools
import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters
from scipy.integrate import quad
from scipy.stats import norm

from pubsel.messages import at_most
from pubsel.privacy import accountant
from pubsel.privacy.composition import POINTS, Components, best_of, components_of, composed_epsilon, tighter
from pubsel.privacy.ledger import Spent, cost_of

UNEQUAL = ((0.3, 1e-6), (1.1, 0.0), (0.05, 2e-6), (0.7, 0.0), (0.7, 1e-7), (0.21, 0.0))


def counted_out(epsilon: float, pairs: tuple[tuple[float, float], ...]) -> float:
    """delta at epsilon, over all subsets: Murtagh and Vadhan 2016, Theorem 1.5."""
    total = 0.0
    for signs in itertools.product((1, -1), repeat=len(pairs)):
        plus = sum(e for (e, _), sign in zip(pairs, signs, strict=True) if sign > 0)
        minus = sum(e for (e, _), sign in zip(pairs, signs, strict=True) if sign < 0)
        total += max(0.0, math.exp(plus) - math.exp(epsilon + minus))
    total /= math.prod(1 + math.exp(e) for e, _ in pairs)
    return 1 - (1 - total) * math.prod(1 - d for _, d in pairs)


@pytest.mark.parametrize("delta", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("pairs", [UNEQUAL, ((0.1, 1e-7),) * 12], ids=["unequal", "equal"])
def test_releases_are_composed_optimally(pairs: tuple[tuple[float, float], ...], delta: float) -> None:
    epsilon = composed_epsilon(delta, Components(0.0, pairs))
    whole = sum(e for e, _ in pairs)
    assert counted_out(epsilon, pairs) <= delta  # an upper bound, never less
    assert counted_out(epsilon - len(pairs) * whole / POINTS - 1e-6, pairs) > delta  # and hardly more
    assert epsilon <= whole * (1 + 1e-3)


@pytest.mark.parametrize("mu", [0.05, 0.3, 2.0])
def test_gaussian_noise_alone_has_its_exact_curve(mu: float) -> None:
    """Rounded up: at no delta is its own less than the delta of what is stated."""
    for delta in np.geomspace(1e-9, 1e-2, 40).tolist():
        epsilon = composed_epsilon(delta, Components(mu, ()))
        assert epsilon == pytest.approx(accountant.gaussian_epsilon(mu, delta), abs=1e-6)
        assert accountant.gaussian_delta(epsilon, mu) <= delta


@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_gaussian_noise_and_answers_together_are_integrated(mu: float) -> None:
    pairs = ((0.4, 1e-4), (0.9, 0.0))
    for delta in (2e-3, 0.05):
        epsilon = composed_epsilon(delta, Components(mu, pairs))

        def integrated(epsilon: float) -> float:
            total = 0.0
            for signs in itertools.product((1, -1), repeat=len(pairs)):
                here = math.prod(1 / (1 + math.exp(-s * e)) for (e, _), s in zip(pairs, signs, strict=True))
                there = math.prod(1 / (1 + math.exp(s * e)) for (e, _), s in zip(pairs, signs, strict=True))

                def height(x: float, here: float = here, there: float = there) -> float:
                    return max(0.0, here * norm.pdf(x, mu) - math.exp(epsilon) * there * norm.pdf(x))

                total += quad(height, -12, 12, limit=400, points=[0, mu])[0]
            return 1 - (1 - total) * math.prod(1 - d for _, d in pairs)

        assert integrated(epsilon) <= delta * (1 + 1e-4)
        assert integrated(epsilon - 1e-3) > delta


def test_what_has_no_bound_says_so() -> None:
    assert composed_epsilon(1e-6, Components(0.0, ((1.0, 1e-5),))) == math.inf
    assert composed_epsilon(1e-5, Components(0.3, ((1.0, 1e-5),))) == math.inf
    assert composed_epsilon(1e-5, Components(0.0, ((1.0, 1e-5),))) == pytest.approx(1.0)
    assert composed_epsilon(0.0, Components(0.0, ((1.0, 0.0), (2.0, 0.0)))) == pytest.approx(3.0, rel=1e-3)
    assert composed_epsilon(1e-5, Components(0.0, ())) == 0
    assert composed_epsilon(0.9, Components(0.1, ((0.1, 0.0),))) == 0
    assert composed_epsilon(0.5, Components(0.0, ((1.0, 1.0),))) == math.inf


def test_many_and_large_releases_stay_finite_and_below_the_sum() -> None:
    for pairs in (((0.02, 1e-9),) * 2000, ((300.0, 0.0),) * 3, ((1e-9, 0.0), (50.0, 0.0))):
        whole = sum(e for e, _ in pairs)
        assert 0 < composed_epsilon(1e-5, Components(0.0, pairs)) <= whole * (1 + len(pairs) / POINTS + 1e-6)


# Of a ledger


def line(cell: str, what: str, epsilon: float, delta: float, mu: float = 0.0, **noise: float) -> dict:
    """A line of the ledger. mu: of Gaussian noise on all examples; noise: rate, steps and noise multiplier of any."""
    noise = {"rate": 1.0, "steps": 4, "noise_multiplier": 2 / mu} if mu else noise
    return {"cell": cell, "what": what, "epsilon": epsilon, "delta": delta, "release": f"{cell} {what}"} | noise


def test_a_run_counts_the_larger_of_what_it_trained_on_and_measured() -> None:
    def lines(mu: float, measured: float) -> list[dict]:
        choice = line("a", "choice", 0.05, 0.0)
        return [choice, line("a", "training", 0.95, 1e-5, mu), line("a", "measurement", 1.0, 2e-5, measured)]

    assert components_of(lines(0, 0)) == Components(0.0, ((1.0, 2e-5), (0.05, 0.0)))
    assert components_of(lines(0.3, 0.4)) == Components(0.4, ((0.05, 0.0),))
    assert components_of(2 * lines(0.5, 0.4)).mu == 0.5  # a release counts once
    other = [line("b", "measurement", 1.0, 1e-5, 0.3)]
    assert components_of(lines(0.3, 0.4) + other).mu == pytest.approx(0.5)


@pytest.mark.attack
def test_the_bound_holds_for_an_example_on_either_side() -> None:
    """Each example is trained on in some runs and measured in others; whoever sees all releases knows which."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        names = itertools.product("abc", ("choice", "training", "measurement"))
        lines = [line(*name, float(rng.uniform(0.05, 1)), float(rng.choice([0.0, 1e-6]))) for name in names]
        lines = [entry for entry in lines if rng.uniform() < 0.8]
        epsilon = composed_epsilon(1e-4, components_of(lines))
        for sides in itertools.product((True, False), repeat=3):
            side_of = dict(zip("abc", sides, strict=True))
            on = [entry for entry in lines if (entry["what"] == "measurement") == side_of[entry["cell"]]]
            assert counted_out(epsilon, tuple((entry["epsilon"], entry["delta"]) for entry in on)) <= 1e-4


def test_the_bound_is_less_than_the_sum_at_a_delta_that_is_stated() -> None:
    mu = accountant.gaussian_mu(1.0, 1e-5)
    kinds = ("training", "measurement")
    fits = [line(str(i), what, 1.0, 1e-5, mu) for i in range(4) for what in kinds]
    less = tighter(fits)
    assert less == Spent(pytest.approx(accountant.gaussian_epsilon(2 * mu, 4e-5), abs=1e-6), pytest.approx(4e-5), 8)
    assert less.epsilon < 2.1 < cost_of(fits).epsilon

    # Of four releases whose noise is not known, nothing less than 4 is known; of a hundred small ones it is.
    assert tighter([line(str(i), what, 1.0, 1e-5) for i in range(4) for what in kinds]) is None
    assert tighter(fits[:2]) is None
    small = [line(str(i), "training", 0.1, 1e-7) for i in range(100)]
    assert 4 < tighter(small).epsilon < 7
    assert tighter(small).delta == pytest.approx(1e-5)

    # One delta leaves nothing of itself for the others, so the bound is at twice that.
    choices = [line(str(i), "choice", 0.1, 0.0) for i in range(99)]
    less = tighter([*choices, line("z", "training", 0.1, 1e-5)])
    assert less.delta == pytest.approx(2e-5)
    assert 4 < less.epsilon < 6
    assert tighter([]) is None


# Of noise on samples

SAMPLED = {(0.02, 1.2): 300, (0.2, 3.0): 50}


def second_opinion(delta: float, mu: float, pairs: tuple, sampled: dict, interval: float = 1e-3) -> float:
    """epsilon by dp-accounting's privacy loss distributions, the larger one of the two directions."""
    kinds = privacy_loss_distribution
    parts = [
        kinds.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=interval, use_connect_dots=True
        ).self_compose(steps)
        for (rate, sigma), steps in sampled.items()
    ]
    parts += [kinds.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)] if mu else []
    stated = [DifferentialPrivacyParameters(*pair) for pair in pairs]
    parts += [kinds.from_privacy_parameters(each, value_discretization_interval=interval) for each in stated]
    return functools.reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta)


@pytest.mark.parametrize(
    ("mu", "pairs", "sampled"),
    [
        (0.0, (), SAMPLED),
        (0.4, (), {(0.02, 1.2): 300}),
        (0.0, ((0.5, 1e-6), (1.2, 0.0)), {(0.2, 3.0): 50}),
        (0.3, ((0.5, 1e-6), (0.2, 0.0)), SAMPLED),
        (0.0, ((0.05, 0.0),), {(0.9, 0.8): 1, (0.5, 1.0): 2}),
    ],
)
def test_samples_and_others_together_lie_just_above_a_second_accountant(mu: float, pairs: tuple, sampled: dict) -> None:
    """Also with one release that is all but the unit itself, where the two directions differ most."""
    other = second_opinion(3e-5, mu, pairs, sampled)
    epsilon = composed_epsilon(3e-5, Components(mu, pairs, sampled), about=other)
    assert other - 1e-3 <= epsilon <= 1.02 * other + 1e-2


def test_samples_and_others_together_are_what_is_drawn() -> None:
    """delta at the stated epsilon, of losses that are simulated, is at most the stated one and hardly less."""
    rng, n, (rate, sigma, steps), mu, answer = np.random.default_rng(0), 400_000, (0.3, 2.0, 5), 0.5, 0.4
    there = rng.random((n, steps)) < rate
    x = rng.standard_normal((n, steps)) * sigma + there
    loss = np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2))).sum(1)
    loss += rng.standard_normal(n) * mu + mu**2 / 2
    loss += np.where(rng.random(n) < 1 / (1 + math.exp(-answer)), answer, -answer)

    parts = Components(mu, ((answer, 0.0),), {(rate, sigma): steps})
    for delta in (0.02, 0.1):
        drawn = [
            np.maximum(0.0, -np.expm1(composed_epsilon(delta, parts) - slack - loss)).mean() for slack in (0, 0.03)
        ]
        assert drawn[0] <= delta + 4 * math.sqrt(delta / n)
        assert drawn[1] > delta


def test_a_sampled_release_is_one_only_in_a_run_with_one_side() -> None:
    noise = {"rate": 0.1, "steps": 20, "noise_multiplier": 3.0}
    alone, trained = line("a", "training", 1.0, 1e-5, **noise), line("b", "training", 1.0, 1e-5, **noise)
    measured = line("b", "measurement", 1.0, 1e-5, 0.3)
    assert components_of([alone, trained]) == Components(0.0, (), {(0.1, 3.0): 40})
    assert components_of([alone, trained, measured]) == Components(0.3, ((1.0, 1e-5),), {(0.1, 3.0): 20})
    many = [line(str(i), "training", 1.0, 0.0, rate=0.1, steps=1, noise_multiplier=1.0 + i) for i in range(33)]
    assert components_of(many) == Components(0.0, ((1.0, 0.0),) * 33)
    assert len(components_of(many[:32]).sampled) == 32
    old = {key: value for key, value in alone.items() if key not in noise}
    assert components_of([old]) == Components(0.0, ((1.0, 1e-5),))


def test_the_best_of_a_sweep_costs_what_all_its_runs_cost() -> None:
    sigma = accountant.calibrate(1.0, 1e-5, 0.1, 20)
    noise = {"rate": 0.1, "steps": 20, "noise_multiplier": sigma}
    valid = {"valid": True, "epsilon": 1.0, "delta": 1e-5}
    runs = [{"identity": str(i), "private": "digits", "privacy": valid} for i in range(24)]
    lines = [[line(run["identity"], "training", 1.0, 1e-5, **noise) | {"state": "begun"} for run in runs]]
    (sentence,) = best_of([*runs, {"identity": "open", "private": "digits", "privacy": {"valid": False}}], lines)
    assert "the best of these 24 runs on digits" in sentence
    assert "for one example epsilon 24 at delta 0.00024, the sum; or " in sentence
    assert sentence.endswith("Without a guarantee: open.")
    less = tighter(lines[0])
    assert less == Spent(pytest.approx(accountant.spent(sigma, 0.1, 480, 2.4e-4), rel=0.03), pytest.approx(2.4e-4), 24)
    assert f"or {at_most(less.epsilon)} at delta 0.00024, composed, if nobody looked at earlier results" in sentence

    # what no ledger has is taken from the records, by its epsilon and delta alone
    (sentence,) = best_of([*runs[:2], *[run | {"private": "other"} for run in runs[2:3]]], [])
    assert "for one example epsilon 2 at delta 2e-05, the sum. What" in sentence
    assert best_of(runs[:1], lines) == []
