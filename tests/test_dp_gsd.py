"""DP-GSD: sensitivities attacked with neighbouring data, noise scales, the exact sampler against integrals, budgets."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from pubsel.data import Split
from pubsel.distances import dp_gsd, gsd
from pubsel.distances.dp_gsd import DPPCA
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.subspace import from_triangle, triangle
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import SystemEntropy, stream
from tests.made import hurtful, network, secret
from tests.synthetic import distance


def settings(**changes):
    return distance("dp_gsd", **({"k": 5, "m": 60, "initialisations": 2} | changes))


# Sensitivity


@pytest.mark.parametrize("s", [3, 40, 600])
def test_one_row_moves_what_is_released_by_at_most_one(s):
    rows, others = dp_gsd.unit(hurtful(s)), dp_gsd.unit(torch.randn(30, s))
    assert torch.isfinite(rows).all()
    without, reached = triangle(others.T @ others), 0.0
    for row in rows.split(1):
        alone = row.T @ row
        assert triangle(alone).norm() <= 1
        more = torch.cat([others, row])
        moved = triangle(more.T @ more) - without
        assert moved.norm() <= 1 + 1e-12
        scores = torch.linalg.eigvalsh(alone)  # of v^T g g^T v over unit vectors v
        assert scores.min() > -1e-14
        assert scores.max() <= 1
        reached = max(reached, float(moved.norm()))
    assert reached > 1 - 1e-9


def test_the_triangle_is_the_frobenius_norm_and_can_be_undone():
    """Without the root of two, entries beside the diagonal would get too much noise, or count for too little."""
    a = torch.randn(12, 12, dtype=torch.float64)
    a = a + a.T
    assert float(triangle(a).norm()) == pytest.approx(float(a.norm()))
    torch.testing.assert_close(from_triangle(triangle(a), 12), a)


@pytest.mark.parametrize("labels", ["given", "random"])
def test_rows_are_made_of_their_own_example_alone(digits, labels):
    """Bit for bit: whichever example leaves, whatever it holds. Random labels of the others are those they had."""
    train, _, _ = digits
    x = train.x[:300].clone()
    x[7], x[200] = 255, 0
    split, side = Split(x, train.y[:300]), dp_gsd.Side(settings(labels=labels), network(0), 10, False, 50, "key", 0)

    class Given:  # the labels that example i would have drawn
        def __init__(self, chosen):
            self.uniform = stream("test", "labels").random(300)[chosen.numpy()]

        def random(self, n):
            assert n == len(self.uniform)
            return self.uniform

    every = torch.arange(300)
    rows = torch.cat(list(side.private(split, every, Given(every))))
    assert rows.shape == (300, 50)
    assert (rows.norm(dim=1) <= 1).all()
    for out in (0, 7, 200, 299):
        chosen = every[every != out]
        assert torch.equal(torch.cat(list(side.private(split, chosen, Given(chosen)))), rows[chosen])


def test_rows_are_computed_in_float64(digits):
    """In float32 a processor rounds a row another way beside others."""
    train, _, _ = digits
    side = dp_gsd.Side(settings(labels="given"), network(0), 10, False, 50, "key", 0)
    (rows,) = side.private(train, torch.arange(9), secret("labels", 0))
    exact = PerExampleGradients(network(0).double(), names=list(side.engine.offsets)).matrix(train.x[:9], train.y[:9])
    torch.testing.assert_close(rows, dp_gsd.unit(side.sketch(exact.rows)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mechanism", DPPCA)
def test_every_subspace_is_drawn_anew_with_the_noise_of_the_plan(digits, mechanism, monkeypatch):
    """And what comes of the noise is what is compared: here, unit vectors that the noise has chosen."""
    train, test, _ = digits
    distance = settings(mechanism=mechanism, sketch=30)
    plan, seen, asked, compared = distance.plan(len(train.x)), [], [], []

    def noisy(second, noise_multiplier, source):
        seen.append(noise_multiplier)
        return torch.diag(torch.arange(30.0, dtype=torch.float64))

    def subspace(second, k, epsilon, source):
        seen.append(1 / epsilon)
        return torch.eye(30, dtype=torch.float64)[:, -k:].flip(1)

    monkeypatch.setattr(dp_gsd, "noisy", noisy)
    monkeypatch.setattr(dp_gsd, "exponential_subspace", subspace)
    monkeypatch.setattr(dp_gsd, "projection_metric", lambda own, other: compared.append(own.abs()) or 0.5)
    distance.release(
        network, train, {"a": test}, 10, "key", source=lambda *given: asked.append(given) or secret(*given)
    )
    assert seen == pytest.approx([plan.noise_multiplier] * 2)
    assert asked == [("DP-GSD", 0), ("DP-GSD", 1)]
    for own in compared:
        assert torch.equal(own, torch.eye(30, dtype=torch.float64)[:, -5:].flip(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-30, 0.0])
def test_features_of_any_content_leave_rows_of_at_most_one(value):
    x = torch.randn(40, 6)
    x[3], x[5, 2] = value, value
    side = dp_gsd.Side(settings(), nn.Linear(6, 3, bias=False), 3, False, 8, "key", 0)
    rows = torch.cat(list(side.private(Split(x, torch.zeros(40).long()), torch.arange(40), secret("a", 0))))
    assert torch.isfinite(rows).all()
    assert (rows.norm(dim=1) <= 1).all()


def test_what_is_sampled_is_what_is_accounted(digits, monkeypatch):
    train, test, _ = digits
    rates = []

    def spy(source, n, rate):
        rates.append((n, rate))
        return torch.arange(n)[np.asarray(source.random(n)) < rate]

    monkeypatch.setattr(dp_gsd, "poisson_sample", spy)
    measured, n = settings(private_m=200, mechanism="bingham", sketch=30), len(train.x)
    measured.release(network, train, {"a": test}, 10, "key", source=secret)
    plan = measured.plan(n)
    assert rates == [(n, 200 / n)] * 2 == [(n, plan.rate)] * plan.steps


# Noise


@pytest.mark.parametrize("scale", [1.0, 1.03, 0.97])
def test_noise_has_the_scale_of_the_plan(scale):
    """sigma on the diagonal, sigma / sqrt(2) beside it; the same test rejects 3 % more or less."""
    draws = [triangle(dp_gsd.noisy(torch.zeros(60, 60).double(), 3.0 * scale, secret("noise", i))) for i in range(30)]
    total, count = float((torch.cat(draws) / 3).square().sum()), 30 * 60 * 61 // 2
    p = 2 * min(stats.chi2.cdf(total, count), stats.chi2.sf(total, count))
    assert (p > 1e-6) == (scale == 1.0)


def test_noise_is_symmetric_and_less_beside_the_diagonal():
    a = torch.stack([dp_gsd.noisy(torch.zeros(9, 9).double(), 2.0, secret("noise", i)) for i in range(3000)])
    assert torch.equal(a, a.mT)
    std = a.std(0)
    torch.testing.assert_close(std.diagonal(), torch.full((9,), 2.0).double(), rtol=0.06, atol=0)
    torch.testing.assert_close(std[0, 1:], torch.full((8,), 2.0 / 2**0.5).double(), rtol=0.06, atol=0)


# The exact sampler


def moments(m):
    """E[x x^T] of the density exp(x^T m x) on the unit sphere of three dimensions, by quadrature."""

    def of(f):
        def density(theta, phi):
            x = np.array([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)])
            return f(x) * np.exp(x @ m @ x) * np.sin(theta)

        return integrate.dblquad(density, 0, 2 * np.pi, 0, np.pi, epsabs=1e-7, epsrel=1e-7)[0]

    total = of(lambda x: 1.0)
    return np.array([of(lambda x, i=i: x[i] ** 2) / total for i in range(3)])


@pytest.mark.parametrize("values", [(0, 0, 0), (3, 1, 0), (12, 11, 0), (0, -2, -30)])
def test_vectors_have_the_moments_of_the_bingham_distribution(values):
    q = np.linalg.qr(stream("test", "turn").standard_normal((3, 3)))[0]
    source = stream("test", str(values))
    draws = np.stack([dp_gsd.vector_bingham(q @ np.diag(values) @ q.T, source) for _ in range(2000)]) @ q
    np.testing.assert_allclose(np.linalg.norm(draws, axis=1), 1, rtol=1e-12)
    want = moments(np.diag(values).astype(float))
    error = (draws**2).std(0) / math.sqrt(len(draws)) + 1e-9
    assert (np.abs((draws**2).mean(0) - want) < 5 * error).all()


@pytest.mark.parametrize(("scale", "fits"), [(1.0, True), (1.2, False), (0.8, False)])
def test_angles_follow_the_density_and_another_epsilon_would_show(scale, fits):
    """On the circle, exp(4 cos^2 t): chi-squared test of 4000 draws in 20 bins."""
    source, edges = stream("test", "circle"), np.linspace(0, np.pi / 2, 21)
    draws = [dp_gsd.vector_bingham(np.diag([4 * scale, 0.0]), source) for _ in range(4000)]
    counts = np.histogram([np.arctan2(abs(v[1]), abs(v[0])) for v in draws], edges)[0]
    bins = itertools.pairwise(edges)
    mass = np.array([integrate.quad(lambda t: np.exp(4 * np.cos(t) ** 2), *ends)[0] for ends in bins])
    assert (stats.chisquare(counts, 4000 * mass / mass.sum()).pvalue > 1e-4) == fits


def test_a_vector_has_epsilon_over_k_of_the_budget():
    """Of two vectors with epsilon 8, the first has density exp(4 v^T A v)."""
    source, a = stream("test", "share"), torch.diag(torch.tensor([1.0, 0, 0])).double()
    first = torch.stack([dp_gsd.exponential_subspace(a, 2, 8.0, source)[:, 0] for _ in range(1500)])
    want, error = moments(np.diag([4.0, 0, 0]))[0], float((first[:, 0] ** 2).std()) / math.sqrt(1500)
    assert abs(float((first[:, 0] ** 2).mean()) - want) < 5 * error


@pytest.mark.parametrize("k", [1, 3, 6])
def test_subspaces_are_orthonormal_and_near_the_top_with_much_budget(k):
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    a = q @ torch.diag(torch.tensor([900.0, 800, 700, 3, 2, 1]).double()) @ q.T
    v = dp_gsd.exponential_subspace(a, k, 50.0, stream("test", "subspace", k))
    torch.testing.assert_close(v.T @ v, torch.eye(k, dtype=torch.float64))
    near = torch.linalg.svdvals(q[:, :3].T @ v)[: min(k, 3)]
    assert near.min() > 0.99
    far = dp_gsd.exponential_subspace(a, k, 1e-6, stream("test", "subspace", k))
    assert k == 6 or torch.linalg.svdvals(q[:, :3].T @ far)[: min(k, 3)].min() < 0.99


def log_density(a, turns, epsilon):
    """Of one vector on the circle, at the angles `turns`."""

    def score(t):
        v = np.stack([np.cos(t), np.sin(t)])
        return epsilon * np.einsum("i...,ij,j...->...", v, a, v)

    grid = np.linspace(0, 2 * np.pi, 4001)[:-1]
    return score(turns) - np.log(np.exp(score(grid) - score(grid).max()).mean()) - score(grid).max()


def test_densities_of_neighbours_are_within_epsilon_and_reach_it():
    """The derivation of exponential_subspace, by integration: no row moves a log density by more than epsilon, and for
    some data one nearly does, so that less noise would not do."""
    random, turns, worst = stream("test", "neighbours"), np.linspace(0, np.pi, 60), 0.0
    for trial in range(60):
        rows = dp_gsd.unit(torch.from_numpy(random.standard_normal((trial, 2)))).numpy()
        a = rows.T @ rows * (40 if trial % 3 == 0 else 1) if trial else np.zeros((2, 2))
        g = dp_gsd.unit(torch.from_numpy(random.standard_normal((1, 2)))).numpy()
        moved = np.abs(log_density(a + g.T @ g, turns, 0.8) - log_density(a, turns, 0.8)).max()
        worst = max(worst, moved)
    e1 = np.diag([1.0, 0.0])
    worst = max(worst, np.abs(log_density(1001 * e1, turns, 0.8) - log_density(1000 * e1, turns, 0.8)).max())
    assert 0.79 < worst <= 0.8 + 1e-6


def test_system_entropy_can_draw_everything():
    source = SystemEntropy()
    a = torch.eye(4, dtype=torch.float64)
    assert dp_gsd.exponential_subspace(a, 2, 1.0, source).shape == (4, 2)
    assert torch.isfinite(dp_gsd.noisy(a, 1.0, source)).all()


# Sketch and public side


def test_the_sketch_is_linear_and_keeps_inner_products_on_average():
    torch.manual_seed(0)
    x, y = torch.randn(2, 400, dtype=torch.float64)
    products = []
    for i in range(300):
        sketch = dp_gsd.Sketch(400, 64, stream("test", "sketch", i), torch.device("cpu"))
        a, b, c = sketch(torch.stack([x, y, x + 2 * y]))
        torch.testing.assert_close(a + 2 * b, c)
        products.append(float(a @ b))
    assert abs(np.mean(products) - float(x @ y)) < 5 * np.std(products) / math.sqrt(300)
    small = dp_gsd.Sketch(30, 64, stream("test", "sketch"), torch.device("cpu"))
    assert torch.equal(small(x[None, :30]), x[None, :30])


def test_a_candidate_without_gradients_or_dimensions_is_named(digits):
    side = dp_gsd.Side(settings(), nn.Linear(6, 3, bias=False), 3, False, 8, "key", 0)
    with pytest.raises(UsageError, match=r"^dark: all its gradients are zero"):
        side.public("dark", Split(torch.zeros(60, 6), torch.zeros(60).long()))
    one = Split(digits[1].x[:1].repeat(60, 1, 1, 1), digits[1].y[:60])
    side = dp_gsd.Side(settings(k=20), network(0), 10, False, 50, "key", 0)
    with pytest.raises(UsageError, match=r"^distance\.k=20: the gradients of same span \d+ dimensions"):
        side.public("same", one)
    with pytest.raises(UsageError, match=r"^distance\.m=60: few has 3 examples"):
        side.public("few", Split(one.x[:3], one.y[:3]))


# The whole


def test_with_much_budget_it_is_gsd(digits):
    """No sketch (s >= p), all examples, little noise: the distance of gsd.measure's subspaces."""
    train, test, _ = digits
    few = Split(train.x[:60], train.y[:60])
    measured = settings(labels="given", sketch=640, epsilon=5e3, delta=0.5, initialisations=1)
    found = measured.release(network, few, {"a": Split(test.x[:60], test.y[:60])}, 10, "key", source=secret)
    engines = [gsd.engine_of(network(0), measured) for _ in range(2)]
    sides = [gsd.gradients_of(e, measured, s.x[:60], s.y[:60]) for e, s in zip(engines, (few, test), strict=True)]
    want = gsd.gsd(*sides, 5)
    assert found["a"][0] == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize("mechanism", DPPCA)
def test_values_do_not_depend_on_other_candidates_and_follow_the_secret(digits, mechanism):
    """The private side is drawn once for all: a hundred candidates cost no more than one."""
    train, test, noise = digits
    measured = settings(mechanism=mechanism, sketch=30)

    def measure(candidates, source=secret):
        return measured.release(network, train, candidates, 10, "key", source=source)

    both, alone = measure({"a": test, "b": test, "noise": noise}), measure({"a": test})
    assert both["a"] == both["b"] == alone["a"]
    assert measure({"a": test}, lambda purpose, i: stream("other", purpose, i)) != alone
    assert all(0 < value < 1 for values in both.values() for value in values)


def test_an_empty_sample_is_a_sample(digits):
    none = Split(digits[0].x[:0], digits[0].y[:0])
    for mechanism in DPPCA:
        measured = settings(private_m=1, mechanism=mechanism, sketch=30)
        side, plan = dp_gsd.Side(measured, network(0), 10, False, 30, "key", 0), measured.plan(1)
        assert measured.private_subspace(side, none, plan, secret("a", 0)).shape == (30, 5)


@pytest.mark.parametrize(("private_m", "initialisations"), [(math.inf, 1), (math.inf, 4), (200, 3)])
def test_all_initialisations_together_cost_what_was_asked_for(private_m, initialisations):
    measured = settings(private_m=private_m, initialisations=initialisations)
    plan = measured.plan(1000)
    assert (plan.rate, plan.steps) == (min(1, private_m / 1000), initialisations)
    assert 0.99 < accountant.spent(plan.noise_multiplier, plan.rate, initialisations, 1e-5, about=1.0) <= 1
    plan = settings(private_m=private_m, initialisations=initialisations, mechanism="bingham").plan(1000)
    each = math.log1p(plan.rate * math.expm1(1 / plan.noise_multiplier))
    assert 1 - 1e-9 < initialisations * each <= 1
    assert plan.delta == 0


def test_a_budget_for_what_is_not_private_is_refused():
    """Nobody should believe that distance=gsd spends distance.epsilon."""
    for key, value in {"epsilon": 1.0, "delta": 1e-5, "private_m": 10, "sketch": 9}.items():
        with pytest.raises(UsageError, match=rf"^unknown key distance\.{key}"):
            distance("gsd", **{key: value})


def test_more_dimensions_than_the_sketch_has_are_refused(digits):
    with pytest.raises(UsageError, match=r"^distance\.k=5: more than the 4 dimensions of distance\.sketch"):
        settings(sketch=4).release(network, digits[0], {"a": digits[1]}, 10, "key", source=secret)
