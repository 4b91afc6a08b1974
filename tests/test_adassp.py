"""Least squares by noisy sufficient statistics: AdaSSP, and on features that public second moments transform."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LinearRegression, Ridge

from pubsel.algorithms import adassp
from pubsel.algorithms.adassp import regression, statistics
from pubsel.data import Split
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import SystemEntropy, stream
from tests.made import build, hurtful, secret
from tests.test_pillar import features

C = 3


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def examples(n, d=6, seed=0):
    return Split(unit(features(n, d, seed)), torch.arange(n) % C)


def joined(one, two):
    return Split(torch.cat([one.x, two.x]), torch.cat([one.y, two.y]))


# Sensitivity


@pytest.mark.attack
@pytest.mark.parametrize("d", [1, 6, 40])
def test_one_row_moves_the_statistics_by_at_most_their_sensitivity(d):
    """Alone, and among others whose smallest eigenvalue is far below the next: there the bound is reached."""
    bound, reached = build("adassp").sensitivity(), 0.0
    apart = torch.cat([torch.eye(d)[:-1].repeat(5, 1), torch.eye(d)[-1:].repeat(2, 1)])
    for others in (Split(torch.zeros(1, d), torch.zeros(1)), examples(30, d), Split(apart, torch.zeros(len(apart)))):
        without = statistics(others, C)
        assert without.shape == (1 + d * (d + 1) // 2 + C * d,)
        for row in torch.cat([hurtful(d), torch.eye(d), -torch.eye(d)]).split(1):
            for label in range(C):
                moved = statistics(joined(others, Split(row, torch.tensor([label]))), C) - without
                assert moved.isfinite().all()
                assert moved.norm() <= bound * (1 + accountant.ROUNDING)
                reached = max(reached, float(moved.norm()))
    assert reached > 0.9999 * bound == 0.9999 * math.sqrt(3)


def test_a_row_that_is_not_finite_counts_as_nothing():
    others = examples(30)
    for row in (torch.full((1, 6), math.nan), torch.full((1, 6), math.inf), torch.full((1, 6), 3e38)):
        more = statistics(joined(others, Split(row, torch.tensor([1]))), C)
        torch.testing.assert_close(more, statistics(others, C))


def test_statistics_are_those_of_all_rows(monkeypatch):
    """Also in parts; an integer of any type is a class."""
    some = examples(50)
    x, y = some.x.double() * (1 - 1e-5), torch.nn.functional.one_hot(some.y).double()
    rows, columns = np.triu_indices(6)
    whole = (x.T @ x)[rows, columns] * torch.from_numpy(np.where(rows == columns, 1, np.sqrt(2)))
    want = torch.cat([torch.linalg.eigvalsh(x.T @ x)[:1], whole, (y.T @ x).flatten()])
    torch.testing.assert_close(statistics(some, C), want)
    monkeypatch.setattr(adassp, "ROWS", 7)
    torch.testing.assert_close(statistics(Split(some.x, some.y.int()), C), want)


# Noise


def test_all_three_have_the_noise_that_is_accounted_for(monkeypatch):
    """mu of one Gaussian release of sensitivity sqrt(3), which is all of the budget; each alone has 1 / sqrt(3) of it.
    The paper's thirds of epsilon take more noise."""
    asked = []
    monkeypatch.setattr(adassp, "noised", lambda total, scale, bound, _: asked.append((scale, bound)) or total)
    for name in ("adassp", "public_second_moment"):
        _, cost = build(name).solve(examples(30), None, C, 1.0, 1e-5, secret("noise", 0))
        assert cost == build(name).account(30, 1.0, 1e-5)
        assert 0.999 < cost.epsilon <= 1
        assert (cost.delta, cost.steps, cost.rate) == (1e-5, 1, 1.0)
        assert 1 / cost.noise_multiplier == pytest.approx(accountant.gaussian_mu(1.0, 1e-5), rel=1e-6)
    scale = accountant.deviation(cost.noise_multiplier, math.sqrt(3))
    assert asked == [(scale, math.sqrt(3))] * 2
    assert scale < math.sqrt(math.log(6 / 1e-5)) / (1 / 3)


@pytest.mark.parametrize("make", [lambda: stream("test", "solve"), SystemEntropy], ids=["seeded", "system"])
def test_the_noise_is_added_to_each_number(make, monkeypatch):
    drawn = []
    monkeypatch.setattr(adassp, "statistics", lambda *_: torch.zeros(1 + 40 * 41 // 2 + C * 40, dtype=torch.float64))
    monkeypatch.setattr(adassp, "regression", lambda noisy, d, classes, scale, delta: drawn.append(noisy / scale))
    build("adassp").solve(examples(30, 40), None, C, 1.0, 1e-5, make())
    assert stats.kstest(drawn[0], "norm").pvalue > 1e-6
    assert drawn[0].all()  # the eigenvalue's, too


# Regression


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_without_noise_it_is_ridge_regression(scale):
    """The ridge for noise of this scale, which is then not added: none if the smallest eigenvalue makes up for it."""
    some = examples(400, 4)
    x, y = some.x.double().numpy() * (1 - 1e-5), np.eye(C)[some.y]
    least = np.linalg.eigvalsh(x.T @ x)[0] - scale * math.sqrt(math.log(6 / 1e-5))
    ridge = max(0, scale * math.sqrt(4 * math.log(2 * 4**2 / 0.05)) - max(least, 0))
    assert (ridge > 0) == (scale > 1)
    want = Ridge(alpha=ridge, fit_intercept=False).fit(x, y).coef_
    np.testing.assert_allclose(regression(statistics(some, C), 4, C, scale, 1e-5), want, rtol=1e-4, atol=1e-6)


def test_the_ridge_covers_the_norm_of_the_noise():
    """Of 40 noisy matrices without data, all are positive definite with it."""
    d, scale = 30, 2.0
    for i in range(40):
        noisy = scale * torch.from_numpy(stream("test", "noise", i).standard_normal(1 + d * (d + 1) // 2 + d))
        noisy[0] = 0
        ridge = scale * math.sqrt(d * math.log(2 * d**2 / 0.05))
        matrix = adassp.from_triangle(noisy[1 : 1 + d * (d + 1) // 2], d)
        assert torch.linalg.eigvalsh(matrix)[0] + ridge > 0


@pytest.mark.parametrize("name", ["adassp", "public_second_moment"])
def test_it_learns(name):
    """Three classes along three of twenty directions, which differ in variance."""
    draw = np.random.RandomState(0)
    y = torch.from_numpy(draw.randint(C, size=4000))
    x = torch.from_numpy(draw.standard_normal((4000, 20)) * np.logspace(0, -1, 20)).float()
    x[torch.arange(4000), y] += 2
    algorithm = build(name)
    frozen = algorithm.frozen(Split(x[:500], y[:500]), 20, secret)
    weight, _ = algorithm.solve(Split(frozen(x[500:3000]), y[500:3000]), None, C, 2.0, 1e-5, secret("solve", 0))
    assert weight.shape == (C, 20)
    right = (frozen(x[3000:]) @ weight.T).argmax(1) == y[3000:]
    assert right.double().mean() > 0.85


# Public second moments


def test_public_rows_are_transformed_to_unit_second_moments_and_median_norm_one():
    public = features(60)
    rows = build("public_second_moment").frozen(Split(public, None), 12, secret)(public).double()
    assert float(rows.norm(dim=1).median()) == pytest.approx(1, rel=1e-3)
    moments = rows.T @ rows
    torch.testing.assert_close(moments, moments[0, 0] * torch.eye(12, dtype=torch.float64), rtol=1e-2, atol=2e-2)


def test_what_was_learned_is_of_the_features_themselves():
    """Without noise, the transform and its weights are least squares on the features, if no row is clipped."""
    public, private = features(60), 0.2 * features(60)
    y = torch.arange(60) % C
    frozen = build("public_second_moment").frozen(Split(public, None), 12, secret)
    weight = regression(statistics(Split(frozen(private), y), C), 12, C, 0.0, 1e-5)
    want = LinearRegression(fit_intercept=False).fit(private.double(), np.eye(C)[y]).coef_
    np.testing.assert_allclose(frozen(private) @ weight.T, private.double() @ want.T, rtol=1e-2, atol=1e-3)


def test_directions_without_public_variance_are_left_out():
    frozen = build("public_second_moment").frozen(Split(features(40, rank=5), None), 12, secret)
    assert frozen(features(3)).shape == (3, 6)  # five, and that of the mean


@pytest.mark.parametrize(
    ("public", "says"),
    [
        (None, "algorithm=public_second_moment needs public data"),
        (Split(torch.zeros(40, 12), None), "pair.public: its features are zero, or not finite"),
    ],
)
def test_public_data_that_give_no_transform_are_refused(public, says):
    with pytest.raises(UsageError, match=says):
        build("public_second_moment").frozen(public, 12, secret)
