"""Bases and distances between subspaces, against scipy and closed forms."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from pubsel.gradients.matrix import GRAM_BLOCK, Basis, DenseGradients
from pubsel.gradients.subspace import (
    NEARLY,
    allocate,
    cholesky_qr,
    cosines,
    davidson,
    is_shorter,
    power_basis,
    projection_metric,
    sketch,
    top_k,
)
from pubsel.gradients.subspace import orthonormal as make_orthonormal
from pubsel.papers.theory.spectra import projection_error, reconstruction, residual_gram, singular_values, stable_rank

MANY = 500  # rows of which Davidson's method takes less time


def basis_of(rows, start, iterations=1):
    """Of one group of all columns, from G in two blocks."""
    blocks = lambda: (DenseGradients(part.clone()) for part in rows.split(-(-len(rows) // 2)))  # noqa: E731
    return power_basis(blocks, [slice(0, rows.shape[1])], [start.to(rows.dtype)], iterations).blocks[0]


def orthonormal(p, k, seed=0):
    return torch.linalg.qr(torch.randn(p, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).Q


def test_angles_are_scipys():
    a, b = orthonormal(50, 6, 1), orthonormal(50, 6, 2)
    want = np.cos(subspace_angles(a.numpy(), b.numpy()))
    np.testing.assert_allclose(np.sort(cosines(a, b)), np.sort(want), atol=1e-12)
    np.testing.assert_allclose(projection_metric(a, b), np.linalg.norm(np.sin(subspace_angles(a.numpy(), b.numpy()))))


def test_metric_is_symmetric_zero_on_itself_and_one_on_orthogonal_subspaces():
    q = orthonormal(40, 10)
    a, b = q[:, :5], q[:, 5:]
    assert projection_metric(a, a) == pytest.approx(0, abs=1e-7)
    assert projection_metric(a, b) == pytest.approx(5**0.5)
    c = orthonormal(40, 5, 3)
    assert projection_metric(a, c) == pytest.approx(projection_metric(c, a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 7, GRAM_BLOCK, GRAM_BLOCK + 1, 2 * GRAM_BLOCK + 37])  # fewer than a block, odd, whole
def test_gram_is_the_whole_symmetric_product(m, dtype):
    rows = torch.randn(m, 53, dtype=dtype)
    gram = DenseGradients(rows.clone()).gram()
    assert gram.dtype == dtype
    want = (rows.double() @ rows.double().T).to(dtype)
    torch.testing.assert_close(gram, want)
    torch.testing.assert_close(gram.T, want)


@pytest.mark.parametrize(
    ("m", "p", "k"), [(1, 40, 1), (5, 40, 5), (60, 40, 7), (231, 300, 1), (231, 300, 64), (231, 300, 231)]
)
def test_top_k_of_every_size_in_the_order_of_the_singular_values(m, p, k):
    rows = torch.randn(m, p, dtype=torch.float64)
    v = top_k(DenseGradients(rows.clone()), k)
    want = torch.linalg.svd(rows, full_matrices=False).Vh[:k].T
    torch.testing.assert_close((v * want).sum(0).abs(), torch.ones(k, dtype=torch.float64), atol=1e-6, rtol=0)


def test_top_k_in_float32_is_as_orthonormal_as_the_metric_needs():
    """In float32, columns of many entries come out too long, and the distance too short."""
    torch.manual_seed(0)
    a = torch.randn(40, 200_000) * torch.logspace(0, -2, 40)[:, None]
    b = a + 0.2 * torch.randn(40, 200_000) * torch.logspace(0, -2, 40)[:, None]
    v, w = (top_k(DenseGradients(rows.clone()), 8) for rows in (a, b))
    torch.testing.assert_close(v.T @ v, torch.eye(8, dtype=torch.float64), atol=1e-12, rtol=0)
    exact = [top_k(DenseGradients(rows.double()), 8) for rows in (a, b)]
    assert projection_metric(v, w) == pytest.approx(projection_metric(*exact), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [20, 231])
def test_top_k_refuses_what_the_rows_do_not_span(m, dtype):
    rows = (torch.randn(m, 3, dtype=torch.float64) @ torch.randn(3, 400, dtype=torch.float64)).to(dtype)
    assert top_k(DenseGradients(rows.clone()), 3).shape == (400, 3)
    with pytest.raises(ValueError, match=r"span 3 dimensions, fewer than k = 4$"):
        top_k(DenseGradients(rows.clone()), 4)


def decaying(m, p, power):
    """Rows [m, p] in float32 whose singular values fall as i^-power."""
    g = torch.Generator().manual_seed(m)
    left = torch.linalg.qr(torch.randn(m, m, generator=g)).Q
    right = torch.linalg.qr(torch.randn(p, m, generator=g)).Q
    return (left * torch.arange(1, m + 1) ** -power) @ right.T


def exact_top(rows, k):
    """By LAPACK from the Gram matrix in float64, which loses nothing here: the top k are well above its rounding."""
    rows = rows.double()
    return torch.linalg.qr(rows.T @ torch.linalg.eigh(rows @ rows.T).eigenvectors[:, -k:].flip(1)).Q


@pytest.mark.parametrize("m", [MANY, pytest.param(2 * MANY, marks=pytest.mark.slow)])
def test_many_rows_need_no_gram_matrix(m, monkeypatch):
    rows = decaying(m, 32 * m, 0.7)
    exact = exact_top(rows, 7)
    with monkeypatch.context() as patch:
        patch.setattr(DenseGradients, "gram", lambda self: pytest.fail("made"))
        found = top_k(DenseGradients(rows), 7)
    other = torch.linalg.qr(torch.randn(32 * m, 7, dtype=torch.float64) + 2 * exact).Q
    assert projection_metric(found, exact) < 1e-4  # ANGLE
    assert projection_metric(found, other) == pytest.approx(projection_metric(exact, other), abs=1e-6)
    assert torch.allclose(found.T @ found, torch.eye(7, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize(
    ("m", "p", "shorter"),
    [
        (250, 1998, False),  # the Gram matrix took 0.3 times as long, process time of one thread
        (1000, 1998, False),  # 0.9
        (2000, 1998, True),  # 2.5
        (250, 26_010, False),  # 0.4
        (500, 26_010, False),  # 0.6
        (1000, 26_010, True),  # 1.03
        (2000, 26_010, True),  # 1.9
        (500, 268_346, True),  # 1.2
    ],
)
def test_the_way_that_takes_less_time_is_taken(m, p, shorter):
    assert is_shorter(m, p, 16) == shorter


def test_nearly_equal_subspaces_of_few_columns_are_as_far_apart_as_exactly():
    """Their distance moves by as much as the angles do; of so few columns the sketch has to be wider."""
    rows, g = decaying(800, 1600, 0.7), torch.Generator().manual_seed(5)
    other = rows + 0.05 * rows.std() * torch.randn(rows.shape, generator=g)
    assert is_shorter(800, 1600, 7)
    distance = projection_metric(*(top_k(DenseGradients(part.clone()), 7) for part in (rows, other)))
    assert distance == pytest.approx(projection_metric(exact_top(rows, 7), exact_top(other, 7)), rel=1e-5)


def test_many_rows_without_a_gap_fall_back_to_the_gram_matrix():
    rows = torch.randn(MANY, 32 * MANY, generator=torch.Generator().manual_seed(0))
    assert davidson(rows, 5, 1e-6) is None
    assert projection_metric(top_k(DenseGradients(rows), 5), exact_top(rows, 5)) < 1e-3


def test_many_rows_of_too_low_a_rank_are_refused():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(MANY, 4, generator=g) @ torch.randn(4, 32 * MANY, generator=g)
    with pytest.raises(ValueError, match="span 4 dimensions, fewer than k = 5"):
        top_k(DenseGradients(rows), 5)


def test_a_sketch_keeps_products_up_to_its_width():
    rows = torch.randn(6, 10_007, generator=torch.Generator().manual_seed(0))
    s = sketch(rows, 1000)
    assert s.shape == (6, 1000)
    norms = rows.norm(dim=1)
    off = (s @ s.T - rows @ rows.T) / (norms[:, None] * norms)
    assert 0 < off.abs().max() < 4 * (2 / 1000) ** 0.5
    one = torch.eye(10_007)[[3, 1003]]  # the same bucket
    assert sketch(one, 1000).abs().argmax(1).tolist() == [3, 3]
    assert sketch(one, 1000).abs().sum(1).tolist() == [1, 1]


def test_top_k_refuses_more_than_there_are_rows_and_zeros():
    with pytest.raises(ValueError, match="span 5 dimensions, fewer than k = 6"):
        top_k(DenseGradients(torch.randn(5, 40)), 6)
    with pytest.raises(ValueError, match="span 0 dimensions, fewer than k = 1"):
        top_k(DenseGradients(torch.zeros(5, 40)), 1)


def test_power_iterations_find_the_top_subspace():
    u, v = orthonormal(30, 30, 1), orthonormal(50, 30, 2)
    values = torch.cat([torch.full((4,), 10.0), torch.full((26,), 0.1)]).double()
    rows = u @ torch.diag(values) @ v.T
    found = basis_of(rows, torch.randn(50, 4, dtype=torch.float64), iterations=3)
    assert projection_metric(found, v[:, :4]) < 1e-6


def test_one_power_iteration_spans_what_gram_schmidt_spans():
    """GEP, Algorithm 1, lines 3 to 7, written out with Gram-Schmidt over rows of B [k, p]."""
    rows, start = torch.randn(12, 20, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    b = (rows @ start).T @ rows
    for i in range(4):
        for j in range(i):
            b[i] -= (b[i] @ b[j]) * b[j]
        b[i] /= b[i].norm()
    assert projection_metric(basis_of(rows, start), b.T) < 1e-7


def test_groups_are_orthonormal_each():
    g = DenseGradients(torch.randn(10, 30))
    basis = power_basis(lambda: [g], [slice(0, 12), slice(12, 30)], [torch.randn(12, 3), torch.randn(18, 4)], 1)
    for block in basis.blocks:
        torch.testing.assert_close(block.T @ block, torch.eye(block.shape[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("p", "k"), [(3000, 60), (64, 64), (16, 16), (1, 1)])
@pytest.mark.parametrize("condition", [0, 4, 8, 12])
def test_bases_by_cholesky_factors_are_those_of_householder(p, k, condition):
    """Orthonormal at any condition number, nearly of square ones; and no more of B lies outside, up to what float32
    rounds off."""
    scale = torch.logspace(0, -condition, k, dtype=torch.float64)
    b = (orthonormal(p, k, 1) * scale @ orthonormal(k, k, 2)).float()
    q = cholesky_qr(b)
    assert (q.double().T @ q.double() - torch.eye(k)).norm() < (2e-6 if p > k or condition <= 4 else NEARLY / 4)
    outside = [(b - basis @ (basis.T @ b)).norm() / b.norm() for basis in (q, torch.linalg.qr(b).Q)]
    assert outside[0] < outside[1] + 1e-6
    # the directions in which B is large are found exactly
    large = int((scale > 1e-2).sum())
    ours, theirs = (
        torch.linalg.svd(b.double(), full_matrices=False).U[:, :large].T @ basis
        for basis in (q.double(), torch.linalg.qr(b.double()).Q)
    )
    torch.testing.assert_close(ours.norm(dim=1), theirs.norm(dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_bases_by_cholesky_factors_are_orthonormal_whatever_the_rank(rank):
    b = torch.randn(500, rank) @ torch.randn(rank, 40)
    b[:, 3] = 0
    q = cholesky_qr(b)
    assert (q.double().T @ q.double() - torch.eye(40)).norm() < 2e-6
    assert (b - q @ (q.T @ b)).norm() <= 1e-5 * b.norm()
    assert torch.equal(q, cholesky_qr(b))


def test_a_basis_is_made_orthonormal_and_what_is_left_is_that_of_its_worst_group():
    """Two groups: the first is exact, the second 1 % too long and askew."""
    exact, askew = orthonormal(40, 3, 1), orthonormal(60, 4, 2) @ (1.01 * torch.eye(4).double() + 1e-3)
    basis = Basis([slice(0, 40), slice(40, 100)], [exact.float(), askew.float()])
    found, error = make_orthonormal(basis)
    assert error <= NEARLY
    for before, after in zip(basis.blocks, found.blocks, strict=True):
        excess = after.double().T @ after.double() - torch.eye(after.shape[1])
        assert float(excess.norm()) <= error + 1e-6  # read off float32 products
        assert projection_metric(torch.linalg.qr(before.double()).Q, torch.linalg.qr(after.double()).Q) < 1e-5
    nearly = Basis(basis.slices, [exact.float(), (orthonormal(60, 4, 2) * (1 + NEARLY / 10)).float()])
    assert make_orthonormal(nearly)[1] == pytest.approx(2 * 2 * NEARLY / 10, rel=0.05)  # |B^T B - I|_F of the second


def test_bfloat16_public_gradients_choose_nearly_the_same_subspace():
    """The basis stays orthonormal in float32, and captures the same energy of fresh gradients."""
    torch.manual_seed(0)
    decay = torch.logspace(0, -3, 200)
    rows, fresh = torch.randn(100, 200) * decay, torch.randn(100, 200) * decay
    start = torch.randn(200, 20)
    energy = []
    for dtype in (torch.float32, torch.bfloat16):
        b = basis_of(rows.to(dtype), start)
        assert b.dtype == torch.float32
        torch.testing.assert_close(b.T @ b, torch.eye(20), atol=1e-5, rtol=0)
        energy.append(float((fresh @ b).square().sum() / fresh.square().sum()))
    assert energy[0] == pytest.approx(energy[1], abs=1e-3)


def test_allocation_follows_square_roots():
    """GEP, Section 4: quotas by the square root of the group's size; never more than parameters or examples."""
    assert allocate(100, [100, 400, 900], limit=1000) == [16, 33, 50]
    assert allocate(100, [4, 10_000], limit=30) == [1, 30]
    assert sum(allocate(1000, [432, 13824, 50688, 202752, 650], limit=2000)) <= 1000


def gram_and_embedding(rows, v):
    return rows @ rows.T, rows @ v


@pytest.mark.parametrize(("n", "p"), [(20, 50), (50, 20)])
def test_singular_values_and_stable_rank_are_those_of_the_matrix(n, p):
    rows = torch.randn(n, p, dtype=torch.float64) * torch.logspace(0, -2, p, dtype=torch.float64)
    want = torch.linalg.svdvals(rows)
    torch.testing.assert_close(singular_values(rows @ rows.T)[: len(want)], want, rtol=1e-6, atol=1e-7)
    assert stable_rank(rows @ rows.T) == pytest.approx(float(want.square().sum() / want[0] ** 2))


def test_stable_rank_of_equal_orthogonal_and_zero_rows():
    rows = torch.randn(1, 30, dtype=torch.float64).expand(12, 30)
    assert stable_rank(rows @ rows.T) == pytest.approx(1)
    assert stable_rank(3 * torch.eye(12, dtype=torch.float64)) == pytest.approx(12)
    assert np.isnan(stable_rank(torch.zeros(4, 4, dtype=torch.float64)))


def test_residuals_and_projection_error_of_a_block_diagonal_basis_written_out():
    rows = torch.randn(9, 30, dtype=torch.float64)
    basis = Basis([slice(0, 12), slice(12, 30)], [orthonormal(12, 3, 1), orthonormal(18, 4, 2)])
    whole = torch.block_diag(*basis.blocks)
    residuals = rows - rows @ whole @ whole.T
    w = DenseGradients(rows.clone()).project(basis)
    torch.testing.assert_close(residual_gram(rows @ rows.T, w), residuals @ residuals.T)
    g = rows.mean(0)
    assert projection_error(g, basis) == pytest.approx(float(residuals.mean(0).norm() / g.norm()))
    assert projection_error(whole @ torch.randn(7, dtype=torch.float64), basis) == pytest.approx(0, abs=1e-12)
    assert np.isnan(projection_error(torch.zeros(30), basis))


@pytest.mark.parametrize(("n", "k"), [(40, 1), (40, 6), (6, 6)])
def test_reconstruction_is_dense_linear_algebra_and_keeps_lemma_4_1(n, k):
    for seed in range(20):
        torch.manual_seed(seed)
        rows = torch.randn(n, 60, dtype=torch.float64) * torch.logspace(0, -seed / 5, 60, dtype=torch.float64)
        public = torch.linalg.qr(rows.T[:, :k] + seed / 20 * torch.randn(60, k, dtype=torch.float64)).Q
        found = reconstruction(*gram_and_embedding(rows, public))
        residuals = rows - rows @ public @ public.T
        _, s, vt = torch.linalg.svd(rows, full_matrices=False)
        private = vt[:k].T
        angles = subspace_angles(private.numpy(), public.numpy())
        want = {
            "error": float(torch.linalg.matrix_norm(residuals, 2)),
            "largest_row": float(residuals.norm(dim=1).max()),
            "s_1": float(s[0]),
            "s_next": float(s[k]) if k < n else 0.0,
            "gsd": projection_metric(private, public),
            "sine": float(np.sin(angles.max())),
        }
        assert {key: getattr(found, key) for key in want} == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert found.error <= found.sharp * (1 + 1e-9) + 1e-6  # of float32
        assert found.sharp <= found.stated * (1 + 1e-6)
        assert found.largest_row <= found.error * (1 + 1e-9)


def test_the_sharp_bound_is_met_with_equality_and_the_reported_distance_breaks_the_lemma():
    """Four equal singular values, three of whose directions are public: the fourth is lost whole."""
    rows = torch.zeros(4, 10, dtype=torch.float64)
    rows[:, :4] = 2 * torch.eye(4)
    public = torch.eye(10, dtype=torch.float64)[:, [0, 1, 2, 9]]
    found = reconstruction(*gram_and_embedding(rows, public))
    assert (found.error, found.sharp, found.gsd) == pytest.approx((2, 2, 1))
    assert found.stated == pytest.approx(2 * 2**0.5)
    reported = found.gsd / 4**0.5
    assert 2**0.5 * found.s_1 * reported + found.s_next < found.error


def test_of_one_dimension_the_difference_of_projections_has_two_norms():
    """GSD, Appendix E, says that they are equal."""
    a, b = orthonormal(30, 1, 1), orthonormal(30, 1, 2)
    difference = a @ a.T - b @ b.T
    assert float(torch.linalg.matrix_norm(difference, 2)) == pytest.approx(projection_metric(a, b))
    assert float(difference.norm()) == pytest.approx(2**0.5 * projection_metric(a, b))


def test_reconstruction_refuses_what_the_rows_do_not_span():
    rows = torch.randn(20, 3, dtype=torch.float64) @ torch.randn(3, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match="span fewer dimensions than k = 4"):
        reconstruction(*gram_and_embedding(rows, orthonormal(40, 4)))
