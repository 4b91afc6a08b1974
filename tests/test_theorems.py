"""Theorems of the papers in closed form, against numbers: GSD's and GEP's, and AdaMix's, with what fails as printed.

GSD's Lemma 4.1 is in test_subspace.py, its Theorem C.1 in the text of pubsel/distances/dp_gsd.py."""

import numpy as np
import pytest
import torch

from pubsel.distances.dp_gsd import vector_bingham
from pubsel.gradients.subspace import projection_metric
from pubsel.papers.theory.spectra import reconstruction
from tests.synthetic import secret_named
from tests.test_subspace import gram_and_embedding


def logistic(n, p, seed=0):
    """Return rows [n, p] of norm 1 times their labels: the loss of one is log(1 + exp(-a w)), 1-Lipschitz and
    1/4-smooth."""
    rows = np.random.RandomState(seed).standard_normal((n, p)) + 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def loss(w, a):
    """Return the mean loss of each row of w [r, p]."""
    return np.logaddexp(0, -w @ a.T).mean(1)


def gradients(w, a):
    """Return the gradients of all examples [r, n, p]."""
    return -a / (1 + np.exp(w @ a.T))[:, :, None]


def minimum(a, radius):
    """Return the weights [p] of smallest loss in a ball, by projected descent."""
    w = np.zeros((1, a.shape[1]))
    for _ in range(3000):
        w = inside(w - 4 * gradients(w, a).mean(1), radius)
    return w[0]


def inside(w, radius):
    return w * np.minimum(1, radius / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-30))


# GEP


@pytest.mark.parametrize("m", [3, 4, 9])
def test_gep_lemma_3_1_as_many_anchors_as_the_rank_leave_no_residual(m):
    """Of rank 4, whatever the anchors are."""
    draw = np.random.RandomState(m)
    span = np.linalg.qr(draw.standard_normal((30, 4)))[0]
    private, anchors = (draw.standard_normal((n, 4)) * [9, 3, 1, 0.1] @ span.T for n in (50, m))
    _, s, basis = np.linalg.svd(anchors, full_matrices=False)
    basis = basis[s > 1e-9 * s[0]].T
    residual = np.abs(private - private @ basis @ basis.T).max()
    if m >= 4:
        assert basis.shape[1] == 4
        assert projection_metric(torch.from_numpy(span), torch.from_numpy(basis)) == pytest.approx(0, abs=1e-6)
        assert residual < 1e-9
    else:
        assert residual > 1e-3


def test_gep_lemma_3_2_bounds_the_mean_residual_and_falls_with_anchors_and_k():
    """Over a population that is known whole; delta = 2, so that the bound may fail in 27 % of draws."""
    draw, delta = np.random.RandomState(0), 2.0
    population = draw.standard_normal((400, 12)) * np.linspace(1, 0.05, 12)
    population /= np.linalg.norm(population, axis=1).max() * 1.001
    tail = np.linalg.eigvalsh(population.T @ population / 400)[::-1]
    residuals = {}
    for k, m in ((2, 20), (2, 2000), (6, 2000)):
        held = []
        for _ in range(50):
            anchors = population[draw.randint(400, size=m)]
            values, vectors = np.linalg.eigh(anchors.T @ anchors / m)
            basis = vectors[:, -k:]
            residual = ((population - population @ basis @ basis.T) ** 2).sum(1).mean()
            fourth = [(np.linalg.norm(rows, axis=1) ** 4).mean() for rows in (population, anchors)]
            c = fourth[0] - (tail**2).sum() + fourth[1] - (values**2).sum()
            held.append(tail[k:].sum() <= residual <= tail[k:].sum() + np.sqrt(k * c / m) + np.sqrt(2 * delta / m))
            residuals.setdefault((k, m), []).append(residual)
        assert np.mean(held) >= 1 - 2 * np.exp(-delta)
    means = [np.mean(values) for values in residuals.values()]
    assert means[0] > means[1] > means[2]


# GSD


@pytest.mark.parametrize("angle", [0.1, 1.2])
def test_gsd_theorem_4_2_bounds_the_excess_risk_of_gep(angle):
    """By the inequality of GEP's proof, for noise sigma a coordinate of the embedding and r_t sigma of the residual:
    beta |w_1 - w*|^2 / 2T + sigma^2 (k + p mean r_t^2) / (beta n^2); d_t >= r_t makes it GSD's. With the T of both
    theorems its first term is sqrt(p) |w_1 - w*|^2 / (2 n epsilon), which is not within sqrt(k log(1/delta)) /
    (n epsilon): it is so with T = n beta epsilon / sqrt(k)."""
    n, p, sigma, steps, beta, runs = 60, 10, 2.0, 40, 0.25, 60
    a, draw = logistic(n, p), np.random.RandomState(1)
    w, total, r, d = np.zeros((runs, p)), 0.0, [], []
    for _ in range(steps):
        total = total + w / steps
        rows = gradients(w, a)
        first = np.linalg.svd(rows[0])[2][0]
        aside = draw.standard_normal(p)
        aside -= aside @ first * first
        public = np.cos(angle) * first + np.sin(angle) * aside / np.linalg.norm(aside)
        along = (rows @ public)[:, :, None] * public
        r.append(np.linalg.norm(rows - along, axis=2).max())
        d.append(
            reconstruction(*gram_and_embedding(torch.from_numpy(rows[0]), torch.from_numpy(public[:, None]))).stated
        )
        noise = sigma * (draw.standard_normal((runs, 1)) * public + r[-1] * draw.standard_normal((runs, p)))
        w = w - (rows.sum(1) + noise) / n / beta
    best = minimum(a, 50.0)
    excess = loss(total, a).mean() - loss(best[None], a)[0]
    bounds = [
        beta * (best @ best) / (2 * steps) + sigma**2 / (beta * n**2) * (1 + p * np.mean(np.square(size)))
        for size in (r, d)
    ]
    assert 0 < excess < bounds[0] < bounds[1]


def bingham_distances(rows, epsilon, public, runs):
    """Return how far from GSD that of Algorithm 4 is, k = 1."""
    m, secret = len(rows), secret_named("bingham")
    a = rows.T @ rows / m
    top = np.linalg.eigh(a)[1][:, -1]
    drawn = [vector_bingham(m * epsilon / 2 * a, secret("noise", i)) for i in range(runs)]
    return np.array([abs(np.sqrt(1 - (v @ public) ** 2) - np.sqrt(1 - (top @ public) ** 2)) for v in drawn])


@pytest.mark.parametrize("c", [1.0, 0.1])
def test_gsd_theorem_c_2_holds_without_clipping_and_fails_with_it(c):
    """lambda~ = lambda + 2 |c^2 - 1| sigma_1^2 is an upper bound of the gap of the clipped gradients, where the proof
    needs a lower one: of gradients of norm 1 that are clipped to 0.1, one example would be enough, and 80 are not."""
    p, epsilon, rho, eta = 5, 8.0, 0.5, 0.1
    draw = np.random.RandomState(0)
    rows = draw.standard_normal((2000, p)) * [3, 0.5, 0.5, 0.5, 0.5]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)

    def needed(rows):
        values = np.linalg.eigvalsh(rows.T @ rows / len(rows))[::-1]
        gap = values[0] - values[1] + 2 * abs(c**2 - 1) * values[0]
        size = 4 * np.log(1 / eta) / p + 2 * np.log(8 * values[0] / (rho**2 * gap))
        return p * c**2 / (epsilon * gap * (1 - np.sqrt(1 - rho**2))) * size

    m = 80
    assert needed(rows[:m]) < (m if c == 1 else 1)
    within = np.mean(bingham_distances(c * rows[:m], epsilon, np.eye(p)[0], 200) <= rho)
    assert within >= 1 - eta if c == 1 else within < 1 - eta


# AdaMix


def test_adamix_theorem_3_holds_with_twice_its_constant_and_another_lambda():
    """Of NoisyGD with rates 2 / (lambda (t + 1)) and the ensemble 2 / (T (T + 1)) sum_t t w_t. Its proof has
    2 (N L + lambda B)^2 / (lambda T) + d L^2 / (lambda rho) + lambda D^2 / 2, D = |w* - w_ref|, whose last two terms
    are least at lambda = sqrt(2 d L^2 / rho) / D: 2 sqrt(d) L D / sqrt(2 rho), twice what is printed, and for another
    lambda."""
    n, d, rho, steps, radius, runs = 40, 4, 2.0, 3000, 1.0, 100
    a, draw = logistic(n, d), np.random.RandomState(2)
    best = minimum(a, radius)
    distance = np.linalg.norm(best)

    def last_two(rate):
        return d / (rate * rho) + rate * distance**2 / 2

    least, printed = np.sqrt(2 * d / rho) / distance, np.sqrt(rho / (2 * distance * d))
    second = np.sqrt(d) * distance / np.sqrt(2 * rho)
    assert last_two(least) == pytest.approx(2 * second)
    assert min(last_two(rate) for rate in np.geomspace(0.01, 100, 400)) > 1.99 * second
    assert last_two(printed) > 4 * second

    w, total, sigma = np.zeros((runs, d)), 0.0, np.sqrt(steps / (2 * rho))
    for t in range(1, steps + 1):
        total = total + 2 * t / (steps * (steps + 1)) * w
        summed = gradients(w, a).sum(1) + least * w + sigma * draw.standard_normal((runs, d))
        w = inside(w - 2 / (least * (t + 1)) * summed, radius)
    excess = n * (loss(total, a).mean() - loss(best[None], a)[0])
    assert 0 < excess <= 2 * (n + least * radius) ** 2 / (least * steps) + last_two(least)


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_adamix_theorem_4_public_weights_are_as_near_as_its_proof_needs(n):
    """One pass of SGD ends within 4 L^2 / (c^2 N_pub) of w* in mean square; with twice the constant of Theorem 3, as
    there, the first term is the printed 4 sqrt(d) L^2 / (c sqrt(N_pub) N sqrt(2 rho)) after all."""
    draw, runs = np.random.RandomState(n), 400
    z = draw.standard_normal((n, runs, 3)) + np.array([0.5, 0, 0])
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    best = np.mean(z, axis=(0, 1))  # of the loss |w - z|^2 / 2, c = 1; L = 2 in the unit ball
    w = np.zeros((runs, 3))
    for t in range(n):
        w = inside(w - 2 / (t + 2) * (w - z[t]), 1.0)
    assert ((w - best) ** 2).sum(1).mean() <= 4 * 2**2 / n
    assert ((w - best) ** 2).sum(1).mean() >= 0.5 / n  # and not much nearer
