"""The best of a secret number of runs: the bound holds for the worst programs, and is below that by divergences."""

import math
from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from pubsel.messages import UsageError
from pubsel.privacy import repeated
from pubsel.privacy.accountant import NOTHING, Plan, deltas, gaussian_delta, gaussian_epsilon, gaussian_mu, plan, pure
from pubsel.privacy.randomness import stream

DELTA = 1e-5


def full_batch(epsilon: float, delta: float) -> list[list[Plan]]:
    return [[plan(epsilon, delta, 1.0, 1, 1.0)]]


def best_of(q: np.ndarray, runs: float) -> np.ndarray:
    """The outcome of the best of a geometric number of runs, by that of a run [n], from the worst to the best."""
    at_most = np.concatenate([[0.0], np.cumsum(q)])
    at_most /= at_most[-1]
    return np.diff(at_most / runs / (1 - (1 - 1 / runs) * at_most))


def delta_of(p: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """The exact delta of two outcomes, in the worse direction."""
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, other), (other, p)))


def response(epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Randomised response: the two outcomes of the worst program with this epsilon."""
    p = np.array([1.0, math.exp(epsilon)]) / (1 + math.exp(epsilon))
    return p, p[::-1].copy()


def gaussians(mu: float) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(-9, 9 + mu, 2001)
    return tuple(np.diff(norm.cdf(edges, shift)) for shift in (0, mu))


@pytest.mark.parametrize("runs", [1.0, 1.5, 3.0, 10.0, 100.0])
def test_the_density_of_the_best_is_that_of_the_mean_number_of_runs(runs):
    """`best_of` against the sum over the number of runs."""
    q = np.array([0.5, 0.3, 0.2])
    numbers = np.arange(1, 40_000)
    chances = (1 - 1 / runs) ** (numbers - 1) / runs
    below = [(chances * x**numbers).sum() for x in (0.5, 0.8, 1.0)]
    assert best_of(q, runs) == pytest.approx(np.diff([0, *below]), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("runs", [1.0, 2.0, 10.0, 300.0])
def test_no_order_of_gaussian_outcomes_leaks_more(epsilon, runs):
    """The best by the privacy loss, against it, by its size, and in random orders: exactly, on a fine grid."""
    each, delta = repeated.budget_of_run(epsilon, DELTA, runs, full_batch)
    mu = gaussian_mu(each, delta)
    p, other = gaussians(mu)
    middle = np.abs(np.arange(len(p)) - len(p) // 2)
    orders = [np.arange(len(p)), np.arange(len(p))[::-1], middle.argsort(), (-middle).argsort()]
    orders += [np.random.RandomState(i).permutation(len(p)) for i in range(5)]
    exact = [delta_of(best_of(p[order], runs), best_of(other[order], runs), epsilon) for order in orders]
    assert max(exact) <= DELTA
    half = [delta_of(best_of(p[order], runs), best_of(other[order], runs), epsilon / 2) for order in orders]
    assert max(half) > DELTA  # the bound is no more than twice what leaks


@pytest.mark.parametrize("runs", [1.0, 2.0, 10.0, 300.0])
def test_no_order_of_randomised_response_leaks_more(runs):
    """A program of which only epsilon is known, alone and together with Gaussian noise."""
    each, _ = repeated.budget_of_run(2.0, DELTA, runs, lambda epsilon, _: [[pure(epsilon, 1.0, 1, "")]])
    p, other = response(each)
    for order in permutations(range(2)):
        assert delta_of(best_of(p[[*order]], runs), best_of(other[[*order]], runs), 2.0) <= DELTA

    def both(epsilon, delta):
        return [[plan(epsilon / 2, delta, 1.0, 1, 1.0), pure(epsilon / 2, 1.0, 1, "")]]

    each, delta = repeated.budget_of_run(2.0, DELTA, runs, both)
    one, two = gaussians(gaussian_mu(each / 2, delta)), response(each / 2)
    p, other = (np.outer(one[i], two[i]).ravel() for i in range(2))
    loss = np.log(np.maximum(p, 1e-300) / np.maximum(other, 1e-300))
    for order in (
        loss.argsort(),
        (-loss).argsort(),
        np.abs(loss).argsort(),
        np.random.RandomState(0).permutation(len(p)),
    ):
        assert delta_of(best_of(p[order], runs), best_of(other[order], runs), 2.0) <= DELTA


@pytest.mark.parametrize(
    "fault",
    [
        lambda p, runs: np.diff(np.concatenate([[0.0], np.cumsum(p)]) ** runs),
        lambda p, runs: best_of(response(2.0)[int(p[0] > p[1])], runs),
    ],
    ids=["the number is fixed", "each run has all of epsilon"],
)
def test_a_fault_breaks_the_bound(fault):
    """The same check finds programs that lack what the theorem takes for granted."""
    runs, epsilon = 3.0, 2.0
    each, _ = repeated.budget_of_run(epsilon, DELTA, runs, lambda epsilon, _: [[pure(epsilon, 1.0, 1, "")]])
    p, other = response(each)
    assert delta_of(best_of(p, runs), best_of(other, runs), epsilon) <= DELTA
    assert delta_of(fault(p, runs), fault(other, runs), epsilon) > 0.01


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("runs", [2, 10, 30])
def test_the_bound_is_below_that_of_renyi_divergences(epsilon, runs):
    """An independent implementation of the paper's theorem bounds the same program by more."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    each, delta = repeated.budget_of_run(epsilon, DELTA, runs, full_batch)
    noise = accounting.GaussianDpEvent(1 / gaussian_mu(each, delta))
    renyi = RdpAccountant()
    renyi.compose(accounting.dp_event.RepeatAndSelectDpEvent(noise, mean=runs, shape=1))
    assert epsilon < renyi.get_epsilon(DELTA) < 4 * epsilon


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (1.0, 50), (0.05, 60)])
def test_a_calibrated_run_uses_the_budget(rate, steps):
    """All of epsilon but a hundredth, and never more."""

    def costs(epsilon, delta):
        return [[plan(epsilon, delta, rate, steps, 1.0)]]

    each, delta = repeated.budget_of_run(2.0, DELTA, 8.0, costs)
    (parts,) = costs(each, delta)
    total = each + repeated.price(8.0, parts)
    assert 0.98 * 2 <= total <= 2
    assert delta == DELTA / 8

    # the condition of the theorem, at the price that was found
    a = repeated.price(8.0, parts) / 2
    assert 7 * deltas(parts[0].noise_multiplier, rate, steps, [a])[0] <= math.expm1(a) * (1 + 1e-9)


def test_the_price_grows_with_the_number_of_runs_and_one_run_costs_nothing():
    (parts,) = full_batch(1.0, DELTA)
    prices = [repeated.price(runs, parts) for runs in (1.0, 1.5, 2.0, 5.0, 50.0, 5000.0)]
    assert prices[0] == 0
    assert prices == sorted(prices)
    assert 0.1 < prices[3] < prices[-1] < 2
    assert repeated.budget_of_run(1.0, DELTA, 1.0, full_batch)[0] > 0.98
    assert repeated.price(9.0, [NOTHING]) == 0


def test_the_setting_that_costs_most_decides():
    def costs(epsilon, delta):
        return [*full_batch(epsilon, delta), [pure(epsilon, 1.0, 1, "")]]

    alone = repeated.budget_of_run(1.0, DELTA, 5.0, full_batch)[0]
    assert repeated.budget_of_run(1.0, DELTA, 5.0, costs)[0] < 0.9 * alone
    assert (
        repeated.budget_of_run(1.0, DELTA, 5.0, lambda *of: costs(*of)[1:])[0]
        == repeated.budget_of_run(1.0, DELTA, 5.0, costs)[0]
    )


def test_too_many_runs_are_refused():
    with pytest.raises(UsageError, match="leaves too little of epsilon=1 for a run"):
        repeated.budget_of_run(1.0, DELTA, 5.0, lambda *_: [[pure(9.0, 1.0, 1, "")]])


def test_the_curve_of_several_releases_is_the_sum_of_theirs():
    gaussian, exact = plan(1.0, DELTA, 1.0, 4, 1.0), pure(0.5, 1.0, 1, "")
    mu = math.sqrt(4) / gaussian.noise_multiplier
    for share in (0.0, 0.3, 1.0):
        of_response = delta_of(*response(0.5), 0.5 * share)
        expected = gaussian_delta(gaussian.epsilon * share, mu) + of_response
        assert repeated.curve([gaussian, exact], share) == pytest.approx(expected, abs=1e-12)


def test_the_number_of_runs_is_geometric():
    source = stream("test", "runs")
    drawn = np.array([repeated.number(4.0, source) for _ in range(20_000)])
    counts = np.bincount(drawn, minlength=12)
    expected = 20_000 * 0.75 ** np.arange(11) / 4
    assert counts[0] == 0
    assert chisquare([*counts[1:12], counts[12:].sum()], [*expected, 20_000 * 0.75**11]).pvalue > 1e-4
    assert {repeated.number(1.0, source) for _ in range(100)} == {1}
    assert np.mean(drawn >= repeated.most_runs(4.0)) <= repeated.SEEN < np.mean(drawn >= repeated.most_runs(4.0) - 2)
    assert repeated.most_runs(1.0) == 1

    some = np.random.RandomState(0)
    found = np.mean([0 in some.randint(6, size=k) for k in drawn])
    assert found == pytest.approx(repeated.chance_to_try(4.0, 6), abs=0.02)


@pytest.mark.parametrize("settings", [3, 10, 30])
def test_a_poisson_number_would_leave_less(settings):
    """For the same chance that the best setting is tried: e^(m TV) in place of e^(2 a), by the same proof."""
    chance = 0.6
    runs = chance * (settings - 1) / (1 - chance)
    assert repeated.chance_to_try(runs, settings) == pytest.approx(chance)
    each, delta = repeated.budget_of_run(1.0, DELTA, runs, full_batch)
    of_poisson = -settings * math.log(1 - chance)
    mu = gaussian_mu(each, delta)
    poisson = gaussian_epsilon(mu, DELTA / of_poisson) + of_poisson * gaussian_delta(0.0, mu)
    assert poisson > 1
