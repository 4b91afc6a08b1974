"""Calibration and accounting against closed forms, published figures and a second accountant."""

import math

import numpy as np
import pytest
from dp_accounting import pld
from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism
from scipy import integrate, stats

from pubsel import privacy
from pubsel.config import Accounting, UsageError


def second_opinion(noise_multiplier, rate, steps, delta, interval=1e-3):
    """epsilon by dp-accounting's privacy loss distributions."""
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=rate, value_discretization_interval=interval, use_connect_dots=True
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "delta", "per_release"),
    [
        (2, 0.02, 2500, 1e-5, 3.03),  # CIFAR-10, facts of GEP: the sound sigma of each of two releases
        (5, 0.02, 5000, 1e-5, 2.06),
        (8, 0.02, 10_000, 1e-5, 1.97),
        (2, 1000 / 604_388, 3022, 1e-6, 0.97),  # SVHN with extra
    ],
)
def test_noise_of_gep_is_that_of_one_joint_release(epsilon, rate, steps, delta, per_release):
    plan = privacy.plan(epsilon, delta, rate, steps, math.sqrt(2))
    assert plan.noise_multiplier * math.sqrt(2) == pytest.approx(per_release, rel=0.01)
    assert plan.valid
    assert 0.99 * epsilon <= plan.epsilon <= epsilon


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (1.5, 0.04, 2250, 1e-5),
        (2.0, 1 / 60, 3000, 1e-5),
        (1.0, 0.1, 130, 1e-3),
        (0.8, 0.005, 500, 1e-6),
        (0.5, 0.9, 1, 1e-5),
        (1.0, 0.5, 5, 1e-5),
    ],
)
def test_the_bound_lies_just_above_a_second_accountant(sigma, rate, steps, delta):
    ours, other = privacy.spent(sigma, rate, steps, delta), second_opinion(sigma, rate, steps, delta)
    assert -1e-2 <= ours - other <= 0.02 * other + 1e-2
    assert ours >= other - 1e-3  # an upper bound


def test_prv_fixture():
    """sigma 1.5, q 0.04, T 2250, delta 1e-5: lower, estimate, upper are 6.758, 6.769, 6.779."""
    assert 6.769 <= privacy.spent(1.5, 0.04, 2250, 1e-5, about=1.0) <= 6.781


@pytest.mark.parametrize("epsilon", [0.1, 1, 4])
@pytest.mark.parametrize(("rate", "steps"), [(0.0228, 500), (1.0, 100)])
def test_round_trip(epsilon, rate, steps):
    sigma = privacy.calibrate(epsilon, 1e-5, rate, steps)
    assert privacy.spent(sigma, rate, steps, 1e-5, about=epsilon) <= epsilon
    assert privacy.spent(sigma * 0.99, rate, steps, 1e-5, about=epsilon) > epsilon


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "delta"),
    [
        (0.1, 0.0228, 500, 1e-5),  # opacus: sigma 17.5 where 15.76 suffices
        (0.3, 0.02, 3000, 1e-5),
        (1, 0.02, 3000, 1e-5),
        (2, 1 / 60, 3000, 1e-5),
        (8, 0.02, 3000, 1e-5),
        (2, 1000 / 604_388, 3022, 1e-6),
        (10, 0.1745, 33, 8e-4),
        (3, 0.6, 1, 1e-5),
    ],
)
def test_noise_is_at_most_half_a_percent_more_than_it_must_be(epsilon, rate, steps, delta):
    sigma = privacy.calibrate(epsilon, delta, rate, steps)
    assert second_opinion(sigma * (1 + 1e-4), rate, steps, delta, 1e-4) <= epsilon
    assert second_opinion(sigma / 1.005, rate, steps, delta, 1e-4) > epsilon


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"),
    [(1, 0.02, 1000), (8, 0.02, 3000), (24, 0.02, 80)],  # the last needs a second look at the bound
)
def test_a_plan_reports_the_upper_bound_of_prv_accountant(epsilon, rate, steps):
    """The package as it comes, over its own grid; ours is a little wider."""
    plan = privacy.plan(epsilon, 1e-5, rate, steps, 1.0)
    step = PoissonSubsampledGaussianMechanism(rate, plan.noise_multiplier)
    peer = PRVAccountant([step], privacy.RELATIVE_ERROR * epsilon, 1e-8, [steps])
    _, estimate, upper = peer.compute_epsilon(1e-5, [steps])
    assert estimate < 0.998 * epsilon
    assert plan.epsilon == pytest.approx(upper, rel=1e-4)
    assert 0.999 * epsilon <= plan.epsilon <= epsilon


@pytest.mark.parametrize(("sigma", "rate"), [(0.3, 0.9), (1.0, 0.02), (12.4, 0.02), (400.0, 1e-3)])
def test_the_loss_of_a_step_is_that_of_prv_accountant(sigma, rate):
    ours, peer = privacy._SampledGaussian(sigma, rate), PoissonSubsampledGaussianMechanism(rate, sigma)
    for span in (1e-3, 0.1, 10, 100):
        t = np.linspace(-span, span, 2001, dtype=np.longdouble)
        assert np.array_equal(ours.cdf(t), peer.cdf(t))
    assert ours.cdf(0.01) == peer.cdf(0.01)


def test_no_bound_is_an_error_and_not_epsilon_zero():
    with pytest.raises(UsageError, match="no finite bound"):
        privacy.spent(0.057, 0.9, 100, 1e-5, about=7e5)


@pytest.mark.parametrize(("epsilon", "last"), [(1, 28), (3, 206)])
def test_full_batch_fixture_of_adamix(epsilon, last):
    """sigma = 20, delta = 1e-5 gives 28 steps at epsilon 1 and 206 at epsilon 3."""
    assert privacy.spent(20, 1.0, last, 1e-5) <= epsilon < privacy.spent(20, 1.0, last + 1, 1e-5)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_gaussian_curve_is_the_integral(mu):
    """delta(epsilon) = integral of (P - e^epsilon Q)_+ for P = N(mu, 1), Q = N(0, 1)."""
    for epsilon in (0.0, 0.5, 2.0):
        start = epsilon / mu + mu / 2
        want, _ = integrate.quad(lambda t: stats.norm.pdf(t - mu) - math.exp(epsilon) * stats.norm.pdf(t), start, 40)  # noqa: B023
        assert privacy.gaussian_delta(epsilon, mu) == pytest.approx(want, abs=1e-9)


def test_spending_grows_with_steps_and_starts_at_zero():
    spent = [privacy.spent(1.2, 0.05, 100, 1e-5, done) for done in (0, 1, 10, 50, 100)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert len(set(spent)) == 5


def test_the_papers_accounting_is_never_called_valid():
    """GEP's published sigmas for epsilon 2 on SVHN really cost about 3 or more."""
    plan = privacy.plan(2, 1e-6, 1000 / 604_388, 3022, math.sqrt(2), Accounting.paper)
    assert not plan.valid
    assert plan.epsilon > 2.9
    said = privacy.statement(plan, math.sqrt(2), secure=False, distance_used=True)
    assert said["statement"].startswith("NOT a valid guarantee")
    assert said["valid"] is False


def test_statement_names_what_is_not_covered():
    plan = privacy.plan(2, 1e-5, 0.1, 50, 1.0)
    seeded = privacy.statement(plan, 1.0, secure=False, distance_used=True)
    secure = privacy.statement(plan, 1.0, secure=True, distance_used=False)
    assert any("GSD" in line for line in seeded["not_covered"])
    assert any("seed" in line for line in seeded["not_covered"])
    assert not any("GSD" in line or "knows the seed" in line for line in secure["not_covered"])
    assert seeded["sampling"] == "Poisson"
    assert privacy.statement(None, 1.0, False, False)["epsilon"] is None


def test_absurd_budgets_end_at_once():
    with pytest.raises(UsageError, match="epsilon"):
        privacy.calibrate(5e4, 1e-5, 0.02, 1000)
    with pytest.raises(UsageError, match="epsilon"):
        privacy.calibrate(1e-9, 1e-5, 0.02, 1000)
    with pytest.raises(UsageError, match="epsilon"):
        privacy.calibrate(1e8, 1e-5, 1.0, 10)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta", "true"),
    [
        (3.64, 0.02, 2500, 1e-5, 1.60),
        (2.24, 0.02, 5000, 1e-5, 4.41),
        (2.09, 0.02, 10_000, 1e-5, 7.28),
        (0.87, 1000 / 604_388, 3022, 1e-6, 3.06),
        (0.65, 1000 / 604_388, 6044, 1e-6, 10.55),
        (0.60, 1000 / 604_388, 12_088, 1e-6, 18.44),
    ],
)
def test_what_the_official_noise_of_gep_really_costs(sigma, rate, steps, delta, true):
    """The official code's noise for "epsilon 2, 5, 8", accounted for as the joint release that it is."""
    assert privacy.spent(sigma / math.sqrt(2), rate, steps, delta) == pytest.approx(true, rel=0.02)
