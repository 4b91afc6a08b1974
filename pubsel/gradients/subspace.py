"""Subspaces of gradients: the top-k basis of G, the power-method basis of GEP, distances between subspaces, and a
symmetric matrix as the vector that Analyze Gauss releases."""

from collections.abc import Callable, Iterable

import scipy.linalg
import torch
from torch import Tensor

from pubsel.gradients.matrix import (
    GPU_ENTRIES,
    PRODUCT_BLOCK,
    Basis,
    DenseGradients,
    GradientMatrix,
    gpu_precision,
    gram,
)

BUCKETS, WIDTH = 32, 32  # columns of G in each column of its sketch, which has at least WIDTH for each dimension
POWERS = 5  # of the sketch's Gram matrix, for its top eigenvectors
ROUNDS = 12  # of Davidson's method, before the Gram matrix is taken after all
FILL, SHIFT = 1e-7, 1e-13  # of a column's norm, in a random direction; of its square, on the diagonal
NEARLY = 5e-4  # |B^T B - I| of a basis that is taken for orthonormal
ANGLE = 1e-4  # sines of the angles to the true subspace, all together, by the estimate


def top_k(gradients: GradientMatrix, k: int) -> Tensor:
    """Return the top-k right singular vectors of G [m, p] -> orthonormal float64 [p, k] (GSD, Algorithm 1, lines 5 and
    6).

    From the top k eigenvectors U_k of the Gram matrix G G^T [m, m], decomposed in float64: V_k = G^T U_k / s_k, made
    orthonormal once more by QR in float64. The QR, not the Gram matrix, decides the accuracy: float32 columns of
    268,346 entries come out 4e-5 too long, which moves the distance by 2e-4; so it stays within 1e-6 of a float64 SVD.
    Of many float32 rows `davidson` finds it faster, and distances within some 1e-5 of their size.

    Raises ValueError if G has rank less than k, up to the rounding of the Gram matrix, since the subspace is then not
    determined.
    """
    least = max(1e-10, 10 * torch.finfo(gradients.dtype).eps)  # of the largest eigenvalue; below it is rounding
    if type(gradients) is DenseGradients and gradients.dtype == torch.float32:
        shorter = is_shorter(len(gradients), gradients.rows.shape[1], k)
        if shorter and (basis := davidson(gradients.rows, k, least)) is not None:
            return torch.linalg.qr(basis.double()).Q

    # The Gram matrix is small, so it is decomposed in float64.
    products = gradients.gram().double()
    if k <= len(products):
        values, vectors = top_eigenpairs(products, k)
        if values[0] > least * values[-1]:
            u = (vectors / values.sqrt()).flip(1)  # [m, k], descending
            return torch.linalg.qr(gradients.combine(u.to(gradients.dtype)).double()).Q

    # The message says how many directions there are, so that a user knows which k to take.
    spectrum = torch.linalg.eigvalsh(products)
    rank = int((spectrum > least * spectrum[-1]).sum())
    raise ValueError(f"the gradients span {rank} dimensions, fewer than k = {k}")


def is_shorter(m: int, p: int, k: int) -> bool:
    """Return whether `davidson` takes less time than the Gram matrix and its eigenvectors, by counted work: its weights
    were chosen so that at m = 250 to 2,000, p = 2,000 to 268,346 and k = 16 the faster one is taken."""
    return m * m * p + 5 * m**3 > 30 * m * p * k + 400 * m**2 * k


def davidson(rows: Tensor, k: int, least: float) -> Tensor | None:
    """Return the basis [p, k], float32, of the top-k right singular subspace of G [m, p], by block Davidson's method
    (Davidson 1975; Saad: Numerical Methods for Large Eigenvalue Problems, chapter 8) on G G^T, which is never made.

    It starts from the top 2 k eigenvectors of the Gram matrix of a sketch, and corrects by the inverse of that matrix
    less the eigenvalue: of its top 8 k eigenvectors, the others taken for equal. Five to seven products with G and G^T.

    It ends when the sines of the angles to the true subspace are estimated at ANGLE, all together. None: if they are
    not after ROUNDS, or theta_k is at most `least` of theta_1. The estimate, of second order in the residuals R = K S y
    - theta S y of all Ritz vectors S y, K = G G^T: the top k miss R_i / (theta_i - theta_min) of what lies outside of
    S, and mix with the Ritz vectors j below by R_j^T R_i / ((theta_i - theta_min) (theta_i - theta_j)). On gradients of
    ResNet20 at images of three sets (m = 2,000, k = 16) it was 2.5 to 3.5 times the truth. A bound by
    ||R|| / (theta_k - theta_{k+1}) (Davis and Kahan, with Ritz values for eigenvalues) is some 20 times as large.
    """
    # What the sketch says of G G^T: its top eigenvectors, and the mean of its other eigenvalues.
    width = min(rows.shape[1], max(rows.shape[1] // BUCKETS, WIDTH * k))
    near = gram(sketch(rows, width))  # [m, m]
    u = torch.randn(len(near), 8 * k, generator=torch.Generator().manual_seed(0)).to(near)
    for _ in range(POWERS):
        u = torch.linalg.qr(near @ u).Q
    values, y = torch.linalg.eigh((u.T @ (near @ u)).double())  # [8 k], ascending
    u = u.double() @ y  # [m, 8 k]
    rest = (near.double().trace() - values.sum()) / (len(near) - 8 * k)

    new = u[:, -2 * k :]
    s, ks = new[:, :0], new[:, :0]
    z: list[Tensor] = []  # G^T s, in the pieces that it came in: to join them would take as long as to make one
    for _ in range(ROUNDS):
        # Twice, since the first time leaves something of s in new by rounding.
        new = torch.linalg.qr(new - s @ (s.T @ new)).Q
        new = torch.linalg.qr(new - s @ (s.T @ new)).Q
        s, right = torch.cat([s, new], 1), rows.T @ new.float()  # [m, b], [p, b']
        z.append(right)
        ks = torch.cat([ks, (rows @ right).double()], 1)  # G G^T s

        # Ritz values and vectors, and how far each pair is from an eigenpair.
        h = s.T @ ks
        theta, y = torch.linalg.eigh((h + h.T) / 2)
        residuals = ks @ y - (s @ y) * theta  # [m, b]
        below, residuals, top = residuals[:, :-k], residuals[:, -k:], theta[-k:]
        if not top[0] > least * top[-1]:
            return None

        # The estimate of the angles, with which it may end.
        outside = residuals / (top - theta[0])  # [m, k]
        mixed = below.T @ outside / (top - theta[:-k, None])  # [b - k, k]
        if outside.norm() + mixed.norm() <= ANGLE:
            parts = y[:, -k:].float().split([piece.shape[1] for piece in z])
            return sum((piece @ part for piece, part in zip(z, parts, strict=True)), start=rows.new_zeros(()))

        # Davidson's correction, by the inverse of what the sketch says.
        part = u.T @ residuals
        new = u @ (part / _away(values[:, None] - top, top)) + (residuals - u @ part) / _away(rest - top, top)

    return None


def _away(difference: Tensor, theta: Tensor) -> Tensor:
    """Return what a correction is divided by: not nearer to zero than a twentieth of theta."""
    return torch.where(difference.abs() < 0.05 * theta, -0.05 * theta, difference)


def sketch(rows: Tensor, width: int) -> Tensor:
    """Return S [m, width] with E S S^T = G G^T: column j of G [m, p], with a random sign, is added to column j mod
    width (CountSketch; Charikar, Chen, Farach-Colton 2002). The signs are always the same."""
    signs = torch.randint(2, (rows.shape[1],), generator=torch.Generator().manual_seed(0)).to(rows) * 2 - 1
    total = rows.new_zeros(len(rows), width)
    for part, sign in zip(rows.split(width, 1), signs.split(width), strict=True):
        total[:, : len(sign)].addcmul_(part, sign)
    return total


def top_eigenpairs(gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest k eigenvalues [k], ascending, and their vectors [m, k], of a symmetric float64 matrix [m, m].

    On a CPU, LAPACK computes only these, three times as fast as all of them.
    """
    if gram.is_cuda:
        values, vectors = torch.linalg.eigh(gram)
        return values[-k:], vectors[:, -k:]

    m = len(gram)
    wanted = [m - k, m - 1]
    pairs = scipy.linalg.eigh(gram.numpy(), subset_by_index=wanted, driver="evr", check_finite=False)
    return torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1])


def triangle(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix [d, d] as the vector of its diagonal and sqrt(2) times what is above it,
    [d (d + 1) / 2].

    Its norm is the Frobenius norm of the matrix, since each entry off the diagonal occurs twice in it. So x x^T has
    norm |x|^2, and noise on this vector has the scale that the matrix needs (Dwork, Talwar, Thakurta, Zhang: Analyze
    Gauss, STOC 2014).
    """
    rows, columns = torch.triu_indices(len(matrix), len(matrix), device=matrix.device)
    return matrix[rows, columns] * torch.where(rows == columns, 1.0, 2**0.5)


def from_triangle(vector: Tensor, d: int) -> Tensor:
    """Return the symmetric matrix [d, d], float64, whose `triangle` is `vector` [d (d + 1) / 2]."""
    rows, columns = torch.triu_indices(d, d, device=vector.device)
    matrix = torch.zeros(d, d, dtype=torch.float64, device=vector.device)
    matrix[rows, columns] = vector.double() / torch.where(rows == columns, 1.0, 2**0.5)
    return torch.triu(matrix) + torch.triu(matrix, 1).T


def cosines(v1: Tensor, v2: Tensor) -> Tensor:
    """Return the cosines of the principal angles between two orthonormal bases [p, k] -> [k], descending (GSD,
    Definition 2)."""
    return torch.linalg.svdvals(v1.double().T @ v2.double()).clamp(max=1)


def projection_metric(v1: Tensor, v2: Tensor) -> float:
    """Return sqrt(k - sum_i cos^2 theta_i) between two orthonormal bases [p, k] (GSD, Definition 3). In
    [0, sqrt(k)]."""
    c = cosines(v1, v2)
    return float((len(c) - c.square().sum()).clamp(min=0).sqrt())


def allocate(k: int, sizes: list[int], limit: int) -> list[int]:
    """Return the number of basis vectors for each parameter group: floor(k sqrt(p_i) / sum_j sqrt(p_j)) (GEP,
    Section 4).

    Never more than the group has parameters or `limit`, the number of public examples; at least one.
    """
    roots = [size**0.5 for size in sizes]
    return [max(1, min(int(k * root / sum(roots)), size, limit)) for root, size in zip(roots, sizes, strict=True)]


def power_basis(
    gradients: Callable[[], Iterable[GradientMatrix]], slices: list[slice], basis: list[Tensor], iterations: int
) -> Basis:
    """Return an orthonormal basis of each parameter group by power iterations on G^T G (GEP, Algorithm 1, lines 3 to
    7).

    gradients(): G [m, p] in blocks of rows, requested once an iteration, so that G is never held. slices: the groups'
    columns of G. basis: the start of each, [p_i, k_i]. An iteration is B = G^T (G B), summed over the blocks and
    orthogonalised by QR: the same span as the paper's Gram-Schmidt. Products run in the precision of the start; sums
    over blocks, the QR and the result are at least float32.
    """
    dtype = basis[0].dtype
    precise = torch.promote_types(dtype, torch.float32)

    for _ in range(iterations):
        basis = [b.to(dtype) for b in basis]
        sums = [torch.zeros_like(b.T, dtype=precise, memory_format=torch.contiguous_format).T for b in basis]
        for part in gradients():
            for s, b, total in zip(slices, basis, sums, strict=True):
                part.add_power(total, s, b)

        # The basis is large, so it is freed before the QR takes its workspace.
        del b
        basis = []
        basis = [orthogonalised(sums.pop(0)) for _ in slices]

    return Basis(slices, basis)


def orthogonalised(b: Tensor) -> Tensor:
    """Return an orthonormal basis [p, k] of the columns of B [p, k]: by Householder's QR, on a GPU by `cholesky_qr`,
    which is products where the other is a thousand small kernels."""
    return cholesky_qr(b) if b.is_cuda else torch.linalg.qr(b).Q


@gpu_precision("ieee")
def cholesky_qr(b: Tensor) -> Tensor:
    """Return an orthonormal basis [p, k] of the columns of B [p, k] from Cholesky factors of its Gram matrix, twice
    (CholeskyQR2; Yamamoto, Nakatsukasa, Yanagisawa, Fukaya 2015), whatever its rank, and without a question to the
    host.

    Squaring doubles the digits that a condition number costs: so the first Gram matrix is in float64 (Yamazaki, Tomov,
    Dongarra 2015), with SHIFT added to its diagonal, and each column, of norm 1, gets a random direction of norm FILL,
    which is no more than float32 has rounded off. Columns that depend on each other, or are zero, then have factors
    too. What float32 rounds off leaves the first basis well conditioned, so that its Gram matrix needs no float64. The
    basis spans what B does within FILL times its condition number, as Householder's in float32 does.
    """
    generator = torch.Generator(b.device).manual_seed(0)
    fill = torch.randn(b.shape, generator=generator, dtype=b.dtype, device=b.device)
    q = b / b.norm(dim=0).clamp(min=torch.finfo(b.dtype).tiny) + FILL / len(b) ** 0.5 * fill

    identity = torch.eye(b.shape[1], dtype=torch.float64, device=b.device)
    exact = torch.zeros_like(identity)
    for piece in q.split(max(1, GPU_ENTRIES // b.shape[1])):
        piece = piece.double()
        exact.addmm_(piece.T, piece)
    q = q @ _inverse(exact + SHIFT * identity)[0].T.to(q.dtype)
    return q @ _inverse(_products(q))[0].T.to(q.dtype)


@gpu_precision("ieee")
def orthonormal(basis: Basis) -> tuple[Basis, Tensor]:
    """Return the basis, made orthonormal again if rounding has left it further than NEARLY from that, and a bound of
    |B^T B - I|_2, float64 []: the Frobenius norm of what is measured, in float64 over blocks of float32 products. On a
    GPU, which would have to be waited for, `cholesky_qr` has made it, and it is only measured.

    Householder's QR in float32 errs by more the longer the columns are: 4e-5 at 200,000 entries, 1.6e-3 at 8.4 M. One
    step of Cholesky QR (Fukaya et al. 2014) from such a basis leaves what rounding its entries costs, some 1e-6.
    """
    blocks, errors = [], []
    for block in basis.blocks:
        # The error of the last attempt is measured too: it is the bound that is returned.
        for attempt in range(3):
            products = _products(block)
            error = (products - torch.eye(len(products), dtype=torch.float64, device=block.device)).norm()
            if block.is_cuda or attempt == 2 or error <= NEARLY:
                break
            inverse, failed = _inverse(products)
            block = block if failed else block @ inverse.T.to(block.dtype)

        blocks.append(block)
        errors.append(error)
    return Basis(basis.slices, blocks), torch.stack(errors).max()


def _inverse(products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of the Cholesky factor L of B^T B = L L^T, float64 [k, k], and whether there is none."""
    factor, failed = torch.linalg.cholesky_ex(products)
    identity = torch.eye(len(products), dtype=torch.float64, device=products.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False), failed


def _products(block: Tensor) -> Tensor:
    """Return B^T B, float64 [k, k], of B [p, k]: float32 products of a few rows, whose sums err little, added in
    float64."""
    if block.is_cuda:  # each product would be a kernel to start
        whole = len(block) // PRODUCT_BLOCK
        pieces, rest = (
            block[: whole * PRODUCT_BLOCK].unflatten(0, (whole, PRODUCT_BLOCK)),
            block[whole * PRODUCT_BLOCK :],
        )
        return torch.bmm(pieces.mT, pieces).sum(0, dtype=torch.float64) + rest.T @ rest
    k = block.shape[1]
    total = torch.zeros(k, k, dtype=torch.float64, device=block.device)
    for piece in block.split(PRODUCT_BLOCK):
        total += piece.T @ piece
    return total
