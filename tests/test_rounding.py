"""Sums in floating point: what one example more or less can move, whatever the others are and in whatever order."""

import math

import numpy as np
import pytest
import torch

from pubsel.algorithms import dp_sgd, gep
from pubsel.algorithms.pillar import noisy_covariance
from pubsel.gradients.factored import FactoredGradients, LinearGradients
from pubsel.gradients.matrix import Basis, DenseGradients, weighted_sum
from pubsel.gradients.subspace import orthonormal
from pubsel.privacy import accountant

ALLOWED = 1 + accountant.ROUNDING
LONG = [pytest.mark.slow, pytest.mark.long]


def edge(n: int, unit: float) -> list[tuple[int, float]]:
    """Of n rows, how many add `unit` so that a sum in float32 just reaches a power of two, and what the others may then
    take away in vain: less than half of its last digit. With one large row less the sum stays below the power, where
    digits are half as coarse, and each of the others counts, rounded up."""
    power = math.floor(math.log2(0.45 * n * unit))
    large = math.ceil(2**power / unit)
    return [(number, share * 2.0 ** (power - 23)) for number in (large, large + 1) for share in (0.3, 0.45)]


def moved(total, n: int) -> float:
    """The most by which total(kept) moves, of the sum over those rows of n that are kept, if one of them is removed."""
    every = torch.ones(n, dtype=torch.bool)
    whole, most = total(every), 0.0
    for removed in (0, n - 1):
        kept = every.clone()
        kept[removed] = False
        most = max(most, float((whole - total(kept)).norm()))
    return most


@pytest.mark.attack
@pytest.mark.parametrize(("n", "d"), [(20_000, 512), pytest.param(50_000, 2048, marks=LONG)])
def test_a_linear_classifier_in_full_batches(n, d):
    """Through the engine, as the loop sums them up: in float32 a row moved the sum by 5.9 and by 27.5."""
    model = torch.nn.Linear(d, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    for large, small in edge(n, math.sqrt(0.5)):
        x, y = torch.zeros(n, d), torch.zeros(n, dtype=torch.long)
        x[:large, 0], x[large:, 0], y[large:] = 100, 2 * small, 1

        def total(kept, x=x, y=y):
            return sum(dp_sgd.clipped_sum(b, 1.0) for b in LinearGradients(model).blocks(x[kept], y[kept]))

        assert moved(total, n) <= ALLOWED


@pytest.mark.attack
def test_rows_that_are_written_out():
    """In blocks of 256: by 1.001 a block."""
    for large, small in edge(256, 1.0):
        rows = torch.zeros(256 * 8, 3)
        for block in rows.split(256):
            block[:large, 0], block[large:, 0] = 5, -small

        def total(kept, rows=rows):
            return sum(dp_sgd.clipped_sum(DenseGradients(part.clone()), 1.0) for part in rows[kept].split(256))

        assert moved(total, len(rows)) <= ALLOWED


@pytest.mark.attack
@pytest.mark.parametrize("d", [2, 16])
def test_second_moments(d):
    """By 2.9 for two features."""
    n = 2**14
    torch.manual_seed(0)
    public = torch.randn(500, d)
    release, mean, scale = noisy_covariance(public, 1), public.mean(0), public.std(0, correction=0)
    bound = float(((public - mean) / scale).norm(dim=1).median())
    for large, small in edge(n, 0.5):
        rows = torch.zeros(n, d)
        rows[:large, :2], rows[large:, 0], rows[large:, 1] = 50, small**0.5 * bound, -(small**0.5) * bound
        x = rows * scale + mean
        assert moved(lambda kept, x=x: release.clipped_sum(x[kept]), n) <= ALLOWED


@pytest.mark.attack
def test_residuals_of_gep():
    torch.manual_seed(0)
    basis, error = orthonormal(Basis([slice(0, 40)], [torch.linalg.qr(torch.randn(40, 5)).Q]))
    for large, small in edge(5_000, 1.0):
        rows = torch.zeros(5_000, 40)
        rows[:large, 0], rows[large:, 0] = 50, -small

        def total(kept, rows=rows):
            parts = [DenseGradients(part.clone()) for part in rows[kept].split(256)]
            return sum(gep.residual_sum(part, basis, part.project(basis), 1.0, error) for part in parts)

        assert moved(total, len(rows)) <= ALLOWED


def test_sums_are_those_of_float64():
    """In blocks of rows and columns of any size, on either layout; the same for examples of a linear classifier."""
    torch.manual_seed(0)
    rows, weights = torch.randn(37, 2**15 + 11), torch.rand(37, dtype=torch.float64)
    want = rows.double().T @ weights
    for found in (weighted_sum(rows, weights), weighted_sum(rows.T.contiguous().T, weights)):
        torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)
    r, x = torch.randn(5000, 7), torch.randn(5000, 300)
    weights = torch.rand(5000, dtype=torch.float64)
    found = FactoredGradients(r, x, True).combine(weights)
    want = torch.cat([((r.double() * weights[:, None]).T @ x.double()).flatten(), r.double().T @ weights])
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_the_bound_covers_the_rounding_it_is_derived_for():
    """n^2 2^-52, up to the number of examples that is promised."""
    assert accountant.MOST_EXAMPLES**2 * 2**-52 <= accountant.ROUNDING
    assert accountant.deviation(2.0, 3.0) == 6.0 * (1 + accountant.ROUNDING)


def test_noise_has_the_scale_that_covers_rounding(monkeypatch):
    """Wherever noise is added to a sum: 1.001 times what is planned, and no less."""
    from pubsel.algorithms import FirstRelease, Mechanism
    from pubsel.algorithms.noisy_sgd import LOGISTIC, noisy_sgd
    from pubsel.data import Split
    from pubsel.distances import dp_gsd
    from pubsel.privacy.randomness import stream
    from pubsel.training import loop

    model = torch.nn.Linear(2, 2, bias=False).double()
    empty = Split(torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
    drawn = torch.from_numpy(stream("test", "noise").standard_normal(4))
    mechanism = Mechanism(lambda g, total=None: torch.zeros(4, dtype=torch.float64), lambda mean: mean, 3.0, 4)
    found, _ = loop.noisy_mean(mechanism, LinearGradients(model), empty, 2.0, stream("test", "noise"), 1)
    torch.testing.assert_close(found, 6.006 * drawn)

    kept = []
    release = FirstRelease(lambda x: torch.zeros(4, dtype=torch.float64), kept.append, 3.0, 4)
    loop.noisy_sum(release, torch.zeros(1, 2), 2.0, stream("test", "noise"))
    torch.testing.assert_close(kept[0], 6.006 * drawn)

    made = dp_gsd.noisy(torch.zeros(1, 1, dtype=torch.float64), 2.0, stream("test", "noise"))
    torch.testing.assert_close(made[0], 2.002 * drawn[:1])

    scales = []

    def base_run(signed, loss, scale, *_):
        scales.append(scale)
        return np.zeros(2)

    monkeypatch.setattr("pubsel.algorithms.noisy_sgd.base_run", base_run)
    learned = noisy_sgd(np.zeros((9, 2)), np.ones(9), LOGISTIC, (1.0, 1e-5), 0.1, 5, stream("test", "noise"))
    assert scales[0] == pytest.approx(1.001 * learned.base.noise_multiplier * LOGISTIC.lipschitz, rel=1e-12)


@pytest.mark.attack
@pytest.mark.parametrize("p", [268_346, pytest.param(8_400_000, marks=LONG)])
def test_a_residual_of_gep_on_large_layers(p):
    """QR in float32 leaves B^T B - I at 1.6e-3, and products of 8.4 million numbers err by 2 %: rows whose residual was
    read too small contributed 1.048."""
    k = 12
    torch.manual_seed(0)
    start = torch.randn(p, k)
    start[:, 0] = 1
    made = torch.linalg.qr(start).Q
    del start
    basis, error = orthonormal(Basis([slice(0, p)], [made]))
    b = basis.blocks[0]
    excess = sum(part.double().T @ part.double() for part in b.split(2**18)) - torch.eye(k)
    assert float(torch.linalg.matrix_norm(excess, 2)) <= error * 1.01 + 1e-7
    assert error <= 1e-3

    inside = b.sum(1) / math.sqrt(k)
    half = torch.cat([torch.full((p // 2,), 1e-4), torch.ones(p - p // 2)]) / math.sqrt(p)
    flat = [values / math.sqrt(p) for values in (torch.ones(p), torch.linspace(0, 1, p), torch.randn(p))]
    for row in [*flat, half, b[:, 0].clone(), inside + 0.15 * flat[2], inside + 0.05 * half]:
        g = DenseGradients(row[None])
        w, embedding = gep.embed_and_clip(g, basis, 1e-3)
        assert float(embedding.norm()) <= 1
        assert float(gep.residual_sum(g, basis, w, 1e-3, error).norm()) <= 1
