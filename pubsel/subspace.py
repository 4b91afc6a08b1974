"""Subspaces of gradients: the top-k basis of G, the power-method basis of GEP, distances between subspaces, and a
symmetric matrix as the vector that Analyze Gauss releases."""

from collections.abc import Callable, Iterable

import scipy.linalg
import torch
from torch import Tensor

from pubsel.gradients import Basis, GradientMatrix


def top_k(gradients: GradientMatrix, k: int) -> Tensor:
    """Top-k right singular vectors of G [m, p] -> orthonormal float64 [p, k] (GSD, Algorithm 1, lines 5 and 6).

    From the top k eigenvectors U_k of the Gram matrix G G^T [m, m], decomposed in float64: V_k = G^T U_k / s_k, made
    orthonormal once more by QR in float64. The QR, not the Gram matrix, decides the accuracy: float32 columns of
    268,346 entries come out 4e-5 too long, which moves the distance by 2e-4; so it stays within 1e-6 of a float64 SVD.

    Raises ValueError if G has rank less than k, up to the rounding of the Gram matrix, since the subspace is then not
    determined.
    """
    gram = gradients.gram().double()
    least = max(1e-10, 10 * torch.finfo(gradients.dtype).eps)  # of the largest eigenvalue; below it is rounding
    if k <= len(gram):
        values, vectors = top_eigenpairs(gram, k)
        if values[0] > least * values[-1]:
            u = (vectors / values.sqrt()).flip(1)  # [m, k], descending
            return torch.linalg.qr(gradients.combine(u.to(gradients.dtype)).double()).Q
    spectrum = torch.linalg.eigvalsh(gram)
    rank = int((spectrum > least * spectrum[-1]).sum())
    raise ValueError(f"the gradients span {rank} dimensions, fewer than k = {k}")


def top_eigenpairs(gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Largest k eigenvalues [k], ascending, and their vectors [m, k], of a symmetric float64 matrix [m, m].

    On a CPU LAPACK computes them alone, three times as fast as all of them.
    """
    if gram.is_cuda:
        values, vectors = torch.linalg.eigh(gram)
        return values[-k:], vectors[:, -k:]
    m = len(gram)
    found = scipy.linalg.eigh(gram.numpy(), subset_by_index=[m - k, m - 1], driver="evr", check_finite=False)
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def triangle(matrix: Tensor) -> Tensor:
    """A symmetric matrix [d, d] as the vector of its diagonal and sqrt(2) times what is above it, [d (d + 1) / 2].

    Its norm is the Frobenius norm of the matrix, since each entry beside the diagonal stands there twice. So x x^T has
    norm |x|^2, and noise on this vector has the scale that the matrix needs (Dwork, Talwar, Thakurta, Zhang: Analyze
    Gauss, STOC 2014).
    """
    rows, columns = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, 2**0.5)


def from_triangle(vector: Tensor, d: int) -> Tensor:
    """The symmetric matrix [d, d], float64, whose `triangle` is `vector` [d (d + 1) / 2]."""
    rows, columns = torch.triu_indices(d, d, device=vector.device)
    matrix = torch.zeros(d, d, dtype=torch.float64, device=vector.device)
    matrix[rows, columns] = vector.double() / torch.where(rows == columns, 1.0, 2**0.5)
    return torch.triu(matrix) + torch.triu(matrix, 1).T


def cosines(v1: Tensor, v2: Tensor) -> Tensor:
    """Cosines of the principal angles between two orthonormal bases [p, k] -> [k], descending (GSD, Definition 2)."""
    return torch.linalg.svdvals(v1.double().T @ v2.double()).clamp(max=1)


def projection_metric(v1: Tensor, v2: Tensor) -> float:
    """sqrt(k - sum_i cos^2 theta_i) between two orthonormal bases [p, k] (GSD, Definition 3). In [0, sqrt(k)]."""
    c = cosines(v1, v2)
    return float((len(c) - c.square().sum()).clamp(min=0).sqrt())


def allocate(k: int, sizes: list[int], limit: int) -> list[int]:
    """Basis vectors for each parameter group: floor(k sqrt(p_i) / sum_j sqrt(p_j)) (GEP, Section 4).

    Never more than the group has parameters or `limit`, the number of public examples; at least one.
    """
    roots = [size**0.5 for size in sizes]
    return [max(1, min(int(k * root / sum(roots)), size, limit)) for root, size in zip(roots, sizes, strict=True)]


def power_basis(
    gradients: Callable[[], Iterable[GradientMatrix]], slices: list[slice], basis: list[Tensor], iterations: int
) -> Basis:
    """Orthonormal basis of each parameter group by power iterations on G^T G (GEP, Algorithm 1, lines 3 to 7).

    gradients(): G [m, p] in blocks of rows, asked for once an iteration, so that G is never held. slices: the groups'
    columns of G. basis: the start of each, [p_i, k_i]. An iteration is B = G^T (G B), summed over the blocks and
    orthogonalised by QR: the same span as the paper's Gram-Schmidt. Products run in the precision of the start; sums
    over blocks, the QR and the result are at least float32.
    """
    dtype = basis[0].dtype
    precise = torch.promote_types(dtype, torch.float32)
    for _ in range(iterations):
        basis = [b.to(dtype) for b in basis]
        sums = [torch.zeros_like(b, dtype=precise) for b in basis]
        for part in gradients():
            for s, b, total in zip(slices, basis, sums, strict=True):
                part.add_power(total, s, b)
        del b
        basis = []  # large: let go before the QR
        basis = [torch.linalg.qr(sums.pop(0)).Q for _ in slices]
    return Basis(slices, basis)
