"""PILLAR's Algorithm 2: its losses, its budget, its noise, and attacks on what is declared about them."""

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from pubsel.algorithms import noisy_sgd as module
from pubsel.algorithms.noisy_sgd import (
    LOGISTIC,
    base_run,
    chances,
    hinge,
    noisy_sgd,
    poisson_samples,
    signed_examples,
)
from pubsel.commands.audit import lower_bounds_of
from pubsel.data import Split
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import SystemEntropy, stream
from pubsel.release import adversary
from pubsel.settings.keys import Audit
from tests.made import build

LOSSES = {"logistic": LOGISTIC, "hinge 1": hinge(1.0), "hinge 0.3": hinge(0.3), "hinge 0.05": hinge(0.05)}
by_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def mixture(n, d, source):
    """Example 1 at unit norm: x = y mu + noise, wider along w*, which is orthogonal to mu. It is mu that separates."""
    y = np.where(source.random(n) < 0.5, -1, 1)
    x = 3 / np.sqrt(d) * source.standard_normal((n, d))
    x[:, 0] += y
    x[:, 1] += np.sqrt(0.1) * source.standard_normal(n)
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


# Losses


@by_loss
def test_slope_lipschitz_constant_and_spread(loss):
    z = np.linspace(-1, 1, 20_001)
    middle = (z[1:] + z[:-1]) / 2
    differences = np.diff(loss.value(z)) / np.diff(z)
    smooth = np.abs(np.diff(loss.slope(z))) < 0.01  # not across the hinge
    np.testing.assert_allclose(loss.slope(middle)[smooth], differences[smooth], rtol=1e-6, atol=1e-6)
    assert np.abs(loss.slope(z)).max() <= loss.lipschitz
    assert np.abs(differences).max() == pytest.approx(loss.lipschitz, rel=1e-4)  # no smaller constant would do
    assert np.ptp(loss.value(z)) == pytest.approx(loss.spread, rel=1e-12)
    assert (np.diff(loss.slope(z)) >= 0).all()  # convex


@pytest.mark.parametrize("margin", [0, -1, 1.5, float("nan")])
def test_margins_that_are_refused(margin):
    with pytest.raises(UsageError, match="margin"):
        hinge(margin)


# Sensitivity


def attack_rows(d):
    """Rows made to hurt: long, tiny, zero, overflowing, not finite."""
    draw = stream("noisy_sgd", "attack")
    rows = draw.random((9, d)) * np.array([1e-8, 1, 1e8, 1e154, 1e200, 1e308, 0, 1, 1])[:, None] - 1e-3
    rows[7, 0], rows[8, 0] = np.nan, -np.inf
    return np.vstack([rows, np.eye(d)[:1], np.full((1, d), 3e38)])


@by_loss
def test_one_row_moves_a_sum_of_gradients_by_at_most_the_lipschitz_constant(loss):
    reached = 0.0
    for label in (-1, 1, 0, 5, -1e300, np.nan, np.inf):
        rows = attack_rows(6)
        signed = signed_examples(rows, np.full(len(rows), label))
        assert np.isfinite(signed).all()
        for w in (np.eye(6)[0], -np.eye(6)[0], *signed):
            gradients = loss.slope(np.clip(signed @ w, -1, 1))[:, None] * signed
            norms = np.linalg.norm(gradients, axis=1)
            assert norms.max() <= loss.lipschitz * (1 + 1e-12)
            reached = max(reached, norms.max())
    assert reached > 0.999 * loss.lipschitz


def test_rows_are_scaled_one_by_one():
    x = stream("noisy_sgd", "rows").standard_normal((20, 5))
    y = np.where(np.arange(20) % 3 == 0, 1, -1)
    signed = signed_examples(x, y)
    short = np.linalg.norm(x, axis=1) <= 1
    np.testing.assert_allclose(signed[short], (y[:, None] * x)[short])
    np.testing.assert_allclose(np.linalg.norm(signed[~short], axis=1), 1)
    for i in (0, 7):
        np.testing.assert_array_equal(signed_examples(np.delete(x, i, 0), np.delete(y, i)), np.delete(signed, i, 0))


def worst_log_ratio(loss, epsilon):
    """The largest change of a log probability when any attacking row is added to, or removed from, any data set."""
    draw = stream("noisy_sgd", "choice")
    candidates = np.vstack([np.eye(4)[0], -np.eye(4)[0], draw.standard_normal((3, 4)) / 20])
    sets = [np.zeros((0, 4)), draw.standard_normal((30, 4)) / 4]
    many = round(20 * loss.spread / epsilon)
    sets += [np.tile(side * np.eye(4)[0], (count, 1)) for side in (-1, 1) for count in (1, many)]
    rows = np.vstack([signed_examples(attack_rows(4), np.full(11, label)) for label in (-1, 1)])
    worst = 0.0
    for data in sets:
        before = chances(data, candidates, loss, epsilon)
        for row in rows:
            after = chances(np.vstack([data, row]), candidates, loss, epsilon)
            worst = max(worst, np.abs(np.log(after / before)).max())
    return worst


@by_loss
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_the_choice_is_private_and_its_bound_is_reached(loss, epsilon):
    worst = worst_log_ratio(loss, epsilon)
    assert 0.99 * epsilon < worst <= epsilon * (1 + 1e-9)
    assert worst_log_ratio(loss._replace(spread=0.98 * loss.spread), epsilon) > epsilon  # the attack finds a wrong one


def test_the_choice_prefers_the_smaller_loss():
    signed = np.tile(np.eye(3)[0], (100, 1))
    probabilities = chances(signed, np.eye(3), LOGISTIC, 1.0)
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities[0] > 0.999
    np.testing.assert_allclose(chances(signed, np.eye(3), LOGISTIC, 0.0), 1 / 3)


# Noise and samples


@pytest.mark.parametrize("make", [lambda: stream("noisy_sgd", "sample"), SystemEntropy], ids=["seeded", "system"])
def test_each_step_draws_each_row_with_chance_one_in_n(make):
    n, steps = 300, 30_000  # several blocks
    samples = list(poisson_samples(n, steps, make()))
    assert len(samples) == steps
    sizes, rows = np.array([len(s) for s in samples]), np.concatenate(samples)
    expected = stats.binom(n, 1 / n).pmf(np.arange(5)) * steps
    assert (
        stats.chisquare([*np.bincount(sizes)[:5], (sizes > 4).sum()], [*expected, steps - expected.sum()]).pvalue > 1e-9
    )
    assert stats.chisquare(np.bincount(rows, minlength=n)).pvalue > 1e-9
    assert all(len(set(s)) == len(s) for s in samples)


def released_noise(deviation, d=20_000):
    """The noise of one step on examples without a gradient, recovered from the iterate: [d - 1], in gradient units.

    Across the starting point w0 the projected iterate is -size noise / (1 - size noise_0) of what it is along it.
    """
    start = stream("noisy_sgd", "noise").standard_normal(d)
    start /= np.linalg.norm(start)
    w = base_run(np.zeros((3, d)), LOGISTIC, deviation, 1, stream("noisy_sgd", "noise"))
    size = 2 / np.sqrt(2 * LOGISTIC.lipschitz**2 + d * deviation**2)
    along = w @ start
    return (w - along * start) / along / size


def test_the_noise_has_the_scale_that_is_asked_for():
    def p_value(noise, deviation):
        return stats.chi2(len(noise) - 1).cdf((noise**2).sum() / deviation**2)

    for deviation in (1e-4, 1e-3):
        noise = released_noise(deviation)
        assert 1e-4 < p_value(noise, deviation) < 1 - 1e-4
        assert p_value(noise, 1.05 * deviation) < 1e-4  # a scale that is 5 % off is found
        assert p_value(noise, deviation / 1.05) > 1 - 1e-4
        assert stats.kstest(noise, "norm", (0, deviation)).pvalue > 1e-4


@pytest.mark.parametrize(("beta", "known"), [(0.5, True), (0.1, False)])
def test_the_curve_of_the_noise_is_no_bound_of_the_choice(beta, known):
    """A single run is all noise. With a choice, what its epsilon alone allows is more than the curve of the runs."""
    x, y = torch.ones(300, 1), torch.arange(300) % 2
    algorithm = build("noisy_sgd", k=1, beta=beta, steps=1)
    cost = algorithm.solve(Split(x, y), None, 2, 2.0, 1e-5, stream("noisy_sgd", "curve"))[1]
    variation = adversary.variation_of([cost._asdict()], cost.epsilon, cost.delta)
    assert (variation < np.tanh(1 / 4)) == known
    scores = np.linspace(-1, 1, 40)
    audit = Audit(kind="black_box", canaries=40, guesses=40, confidence=0.95)
    assert ("planned_curve" in lower_bounds_of(scores, scores > 0, cost, None, audit)) == known


@by_loss
def test_runs_and_choice_are_given_what_was_accounted_for(loss, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "base_run", lambda signed, loss, deviation, *_: asked.append(deviation) or np.zeros(2))
    monkeypatch.setattr(module, "chances", lambda *given: asked.append(given[3]) or np.ones(3) / 3)
    learned = noisy_sgd(np.zeros((50, 2)), np.ones(50), loss, (2.0, 1e-5), 0.1, 40, stream("noisy_sgd", "asked"))
    made = accountant.plan(1.0, 1e-5, 1 / 50, 3 * 40, 1.0)
    assert learned.base == made
    assert asked == [accountant.deviation(made.noise_multiplier, loss.lipschitz)] * 3 + [1.0]
    assert learned.epsilon == made.epsilon + 1.0 <= 2.0


# Budget


@pytest.mark.parametrize(("beta", "runs"), [(0.5, 1), (0.3, 2), (0.1, 3), (0.01, 5)])
def test_the_budget_adds_up(beta, runs):
    x, y = mixture(100, 5, stream("noisy_sgd", "data"))
    learned = noisy_sgd(x, y, LOGISTIC, (1.0, 1e-5), beta, 30, stream("noisy_sgd", "run"))
    choice = 0.5 if runs > 1 else 0.0  # with one run there is nothing to choose
    assert learned.runs == runs
    assert learned.base.steps == 30 * runs
    assert learned.base.rate == 1 / 100
    assert 0.998 < learned.epsilon == learned.base.epsilon + choice <= 1
    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=learned.base.noise_multiplier, sensitivity=1, sampling_prob=1 / 100
    )
    true = step.self_compose(30 * runs).get_epsilon_for_delta(1e-5)  # by a second accountant
    assert 0.99 * (1 - choice) < true <= 1 - choice
    assert learned.w.shape == (5,)
    assert np.linalg.norm(learned.w) <= 1 + 1e-12


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 0},
        {"beta": 1},
        {"budget": (1.0, 0)},
        {"budget": (0, 1e-5)},
        {"steps": 0},
        {"y": np.ones(3)},
        {"x": np.ones((0, 2))},
    ],
)
def test_settings_that_are_refused(change):
    good = {"x": np.zeros((4, 2)), "y": np.ones(4), "loss": LOGISTIC, "budget": (1.0, 1e-5), "beta": 0.1}
    with pytest.raises(UsageError, match="needs"):
        noisy_sgd(**good | {"steps": 3, "source": stream("noisy_sgd", "run")} | change)


# Learning


@pytest.mark.parametrize("loss", [LOGISTIC, hinge(0.3)], ids=["logistic", "hinge"])
def test_it_learns_in_two_principal_components_what_it_cannot_in_full_dimension(loss):
    draw = stream("noisy_sgd", "mixture")
    (public, _), (x, y), (x_test, y_test) = (mixture(n, 1000, draw) for n in (500, 500, 2000))
    top = np.linalg.svd(public, full_matrices=False)[2][:2].T  # [d, 2], as in Algorithm 1

    def accuracy(basis, seed):
        w = noisy_sgd(x @ basis, y, loss, (0.2, 1e-5), 0.05, 500, stream("noisy_sgd", "learn", seed)).w
        return np.mean(np.sign(x_test @ basis @ w) == y_test)

    projected, full = ([accuracy(basis, seed) for seed in range(5)] for basis in (top, np.eye(1000)))
    assert np.mean(projected) > 0.97
    assert np.mean(full) < 0.9


def test_a_run_is_reproducible_and_takes_system_entropy():
    x, y = mixture(200, 4, stream("noisy_sgd", "data"))

    def learn(source):
        return noisy_sgd(x, y, LOGISTIC, (1.0, 1e-5), 0.1, 30, source).w

    first, again, other = (learn(stream("noisy_sgd", "run", seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert 0 < np.linalg.norm(learn(SystemEntropy())) <= 1 + 1e-12
