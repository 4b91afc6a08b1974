"""Exact draws of whole numbers, and sums with noise on a lattice: their distribution, and that no digit tells more."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.algorithms import FirstRelease, Mechanism
from pubsel.data import Split
from pubsel.distances import dp_gsd
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.subspace import triangle
from pubsel.privacy import accountant
from pubsel.privacy.lattice import FINEST, coin, discrete_gaussian, discrete_laplace, noised, step_of
from pubsel.privacy.randomness import Ahead, Secret, SystemEntropy, of_system, stream
from pubsel.training import loop


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(27, 10), Fraction(0.1)])
def test_coins_show_heads_as_often_as_they_should(gamma):
    source = stream("test", "coin")
    heads = sum(coin(gamma, source) for _ in range(4000))
    p = math.exp(-gamma)
    assert stats.binomtest(heads, 4000, min(p, 1.0)).pvalue > 1e-4
    assert stats.binomtest(heads, 4000, p * 0.85).pvalue < 1e-4 or p < 0.3


@pytest.mark.parametrize("epsilon", [Fraction(1, 3), Fraction(1), Fraction(5, 2)])
def test_the_discrete_laplace_distribution(epsilon):
    source, n = stream("test", "noise"), 6000
    drawn = np.array([discrete_laplace(epsilon, source) for _ in range(n)])
    p = math.exp(-epsilon)
    for z in range(-3, 4):
        expected = (1 - p) / (1 + p) * p ** abs(z)
        seen = np.mean(drawn == z)
        assert abs(seen - expected) < 5 * math.sqrt(expected / n), z


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_the_discrete_gaussian_distribution(sigma):
    """Each probability, and the test finds a deviation that is a tenth too small or too large."""
    source, n = stream("test", "noise"), 4000
    drawn = np.array([discrete_gaussian(sigma, source) for _ in range(n)])
    z = np.arange(-3 * sigma, 3 * sigma + 1)

    def p_value(deviation):
        expected = np.exp(-(z**2) / (2 * deviation**2))
        expected *= n / np.exp(-(np.arange(-60, 61) ** 2) / (2 * deviation**2)).sum()
        seen = np.array([(drawn == value).sum() for value in z])
        return stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(z))

    assert p_value(sigma) > 1e-4
    assert p_value(0.9 * sigma) < 1e-4
    assert p_value(1.1 * sigma) < 1e-4

    # With a deviation in steps as counts have it: the continuous distribution.
    drawn = np.array([discrete_gaussian(sigma * 2**30, source) / sigma / 2**30 for _ in range(1000)])
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert stats.kstest(drawn, "norm", (0, 1.3)).pvalue < 1e-3
    assert len({*drawn}) == 1000


@pytest.mark.attack
@pytest.mark.parametrize("sigma", [0.6, 1.0, 4.0, 40.0])
def test_the_curve_of_counts_is_at_most_the_gaussian_one_that_is_accounted(sigma):
    """Of the discrete Gaussian in steps of 1/4096, moved by one: at all epsilons, delta is no more than that of the
    deviation without the margin for rounding. In steps of one it would be more, by 4 % at deviation 1 and epsilon 0."""
    steps = 4096
    z = np.arange(-12 * sigma * steps, (12 * sigma + 1) * steps)
    scale = sigma * (1 + accountant.ROUNDING) * steps
    p, q = (stats.norm.pdf(z - shift, scale=scale) for shift in (0, steps))
    for epsilon in (0.0, 0.1, 1.0, 3.0):
        delta = np.maximum(q / q.sum() - math.exp(epsilon) * p / p.sum(), 0).sum()
        assert delta <= accountant.gaussian_delta(epsilon, 1 / sigma)


SYSTEM = Secret({}, {}, ["0 here"], secure=True)


@pytest.mark.parametrize(("p", "scale", "sensitivity"), [(1, 0.5, 1.0), (500, 20.0, 3.0), (10_000, 1e-3, 1e-4)])
def test_sum_and_noise_are_whole_steps(p, scale, sensitivity):
    """Whatever the sum is: huge, tiny, between two steps. So no bit pattern is impossible for a neighbour."""
    step = step_of(p, sensitivity)
    total = torch.from_numpy(np.random.default_rng(0).standard_normal(p)) * sensitivity
    for large in (1e-12, 1.0, 1e9):
        for source in (SystemEntropy(), Ahead(SYSTEM, 3)("noise", 0)):
            noisy = noised(large * total, scale, sensitivity, source)
            assert torch.equal(noisy / step, (noisy / step).round())
    noise = noised(torch.zeros(p, dtype=torch.float64), scale, sensitivity, SystemEntropy())
    assert float(noise.norm()) / scale < math.sqrt(p) + 7


@pytest.mark.attack
def test_rounding_to_the_lattice_moves_neighbours_apart_by_what_the_margin_covers():
    """The worst case: each number of a sum just below half a step, and of its neighbour just above."""
    for p in (1, 1000, 10**6):
        step = step_of(p, 1.0)
        row = torch.full((p,), 1 / math.sqrt(p), dtype=torch.float64)
        others = step / 2 - row.remainder(step) + torch.tensor(1e-9) * step
        rounded = [(total / step).round() * step for total in (others, others + row)]
        assert float((rounded[1] - rounded[0]).norm()) <= 1 + FINEST
    assert accountant.MOST_EXAMPLES**2 * 2.0**-52 + FINEST <= accountant.ROUNDING


def test_neighbouring_steps_are_alike_probable(monkeypatch):
    """Shown where a step contains few float64: rounded to even, every second step would have two more of them."""
    step = 2.0**-50
    monkeypatch.setattr("pubsel.privacy.lattice.FINEST", step * 2**9)
    noise = noised(torch.zeros(2**18, dtype=torch.float64), 1.0, 1.0, SystemEntropy())
    even = int((noise / step % 2 == 0).sum())
    assert stats.binomtest(even, 2**18).pvalue > 1e-9


def of_a_step(sums, source):
    engine = LinearGradients(torch.nn.Linear(2, 2, bias=False).double())
    empty = Split(torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
    mechanism = Mechanism(lambda g, total=None: sums.clone(), lambda mean: mean, 1.0, len(sums))
    return loop.noisy_mean(mechanism, engine, empty, 2.0, source, 1)[0] - sums


def of_a_first_release(sums, source):
    release = FirstRelease(lambda x: sums.clone(), lambda total: total, 1.0, len(sums))
    return loop.noisy_sum(release, torch.zeros(1, 2), 2.0, source) - sums


def of_second_moments(sums, source):
    return triangle(dp_gsd.noisy(torch.zeros(16, 16, dtype=torch.float64), 2.0, source))


RELEASES = {"a step": of_a_step, "a first release": of_a_first_release, "second moments of dp_gsd": of_second_moments}


@pytest.mark.attack
@pytest.mark.parametrize("name", RELEASES)
def test_every_release_is_on_its_lattice(name):
    """Wherever noise of the operating system is added to a sum: what remains if the sum is taken away is a whole number
    of steps, up to what the test's own subtraction rounds."""
    p = 136
    sums = (torch.arange(p, dtype=torch.float64) * 1000).floor() * step_of(p, 1.0)
    steps = RELEASES[name](sums, SystemEntropy()) / step_of(p, 1.0)
    assert float((steps - steps.round()).abs().max()) < 1e-3
    assert float(steps.abs().median()) > 1000  # and there is noise


def test_what_the_operating_system_draws_is_known_through_the_thread_that_draws_ahead():
    seeded = Secret({}, {}, ["0 here"], secure=False)
    for known, secret in ((True, SYSTEM), (False, seeded)):
        assert of_system(secret("noise", 0)) is known
        assert of_system(Ahead(secret, 2)("noise", 0)) is known


def test_seeded_noise_is_added_as_it_is():
    """Records can be repeated bit for bit."""
    total = torch.arange(5, dtype=torch.float64) / 3
    drawn = torch.from_numpy(stream("test", "noise").standard_normal(5))
    assert torch.equal(noised(total.clone(), 2.0, 1.0, stream("test", "noise")), total.add(drawn, alpha=2.0))
