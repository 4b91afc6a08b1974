"""Spectra of gradients, and the loss of their projection on a subspace: GSD, Lemma 4.1; GEP, Figures 2 to 5."""

from typing import NamedTuple

import torch
from torch import Tensor

from pubsel.gradients.matrix import Basis
from pubsel.gradients.subspace import top_eigenpairs


def singular_values(gram: Tensor) -> Tensor:
    """Return the singular values of G [n, p] from G G^T [n, n] -> [n], descending (GSD, Figure 3).

    Those below sqrt(eps) of the largest, eps that of the precision of G G^T, are rounding: 1e-8 of it in float64.
    """
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()


def residual_gram(gram: Tensor, w: Tensor) -> Tensor:
    """Return R R^T [n, n] of the residual rows R = G - W B^T, W = G B [n, k] (GEP, Algorithm 1, line 11), from G G^T: B
    is orthonormal, so it is G G^T - W W^T. In float64, since it is a difference."""
    return gram - w @ w.T


def stable_rank(gram: Tensor) -> float:
    """Return ||G||_F^2 / ||G||_2^2 from float64 G G^T [n, n] (GEP, Figures 2 and 5): 1 to the rank of G; nan for
    zeros."""
    largest = float(top_eigenpairs(gram, 1)[0])
    return float(gram.trace()) / largest if largest > 0 else float("nan")


def projection_error(g: Tensor, basis: Basis) -> float:
    """Return ||g - B B^T g|| / ||g|| of one gradient [p]: if g is the mean of the rows of G and r the sum of their
    residuals, it is ||r / n|| / ||g|| (GEP, Figure 4). In [0, 1]; nan for a zero gradient."""
    w = torch.cat([b.T @ g[s].to(b.dtype) for s, b in zip(basis.slices, basis.blocks, strict=True)])
    return float((g - basis.expand(w)).norm() / g.norm())


class Reconstruction(NamedTuple):
    """The loss of projecting G on a public subspace, and what bounds it (GSD, Lemma 4.1).

    R = G - G V V^T, V [p, k] the public basis; V' is that of the top k right singular vectors of G, the private one.
    After the paper's proof: with projections P on V' and Q on V, R = G P (I - Q) + G (I - P) (I - Q). The columns of
    the first part lie in the span of the first k left singular vectors of G, those of the second in that of the others,
    so ||R||^2 is at most the sum of their squared norms; ||P (I - Q)|| is the sine of the largest principal angle, and
    ||G (I - P)|| = s_{k+1}:

        ||R|| <= sqrt(s_1^2 sine^2 + s_{k+1}^2)        (sharp)
              <= s_1 sine + s_{k+1}  <=  sqrt(2) s_1 gsd + s_{k+1}  (stated)

    - The stated bound is true, and sqrt(2) looser than its proof needs: ||P - Q||_2 is the sine itself. The paper's
      remark that ||P - Q||_2 = ||P - Q||_F for k = 1 is wrong: they are sine and sqrt(2) sine.
    - ||R|| <= s_1 holds for any V, and says more than the stated bound wherever gsd >= 1 / sqrt(2).
    - gsd is the projection metric, in [0, sqrt(k)]. With the distance that the tables report, gsd / sqrt(k), the
      inequality is false: one angle of 90 degrees among k = 4 is a counterexample.
    - V' is of G. Algorithm 1 takes random labels, and its authors' code rows of unit length: another matrix, of which
      the lemma says nothing.
    """

    error: float  # ||R||_2
    largest_row: float  # max_i ||R_i||: r_t of GEP's Theorem 3.3, for which GSD's Theorem 4.2 takes ||R||_2
    s_1: float
    s_next: float  # s_{k+1}
    gsd: float  # projection metric of V' and V
    sine: float  # of the largest angle between them
    stated: float
    sharp: float


def reconstruction(gram: Tensor, w: Tensor) -> Reconstruction:
    """Return both sides of Lemma 4.1 from G G^T [n, n] and W = G V [n, k] in float64: with G = U S V'^T, V'^T V is
    S_k^-1 U_k^T W.

    Raises ValueError if G has rank less than k.
    """
    k = w.shape[1]
    squares, u = top_eigenpairs(gram, min(k + 1, len(gram)))
    squares, u = squares.flip(0), u.flip(1)  # descending
    if k > len(gram) or squares[k - 1] <= 1e-12 * squares[0]:
        raise ValueError(f"the gradients span fewer dimensions than k = {k}")

    s = squares.clamp(min=0).sqrt()
    s_1, s_next = float(s[0]), float(s[k]) if k < len(s) else 0.0
    cos = torch.linalg.svdvals(u[:, :k].T @ w / s[:k, None]).clamp(max=1)
    gsd, sine = (float((1 - c.square()).sum().sqrt()) for c in (cos, cos[-1]))

    residual = residual_gram(gram, w)
    return Reconstruction(
        error=float(top_eigenpairs(residual, 1)[0].clamp(min=0).sqrt()),
        largest_row=float(residual.diagonal().max().clamp(min=0).sqrt()),
        s_1=s_1,
        s_next=s_next,
        gsd=gsd,
        sine=sine,
        stated=2**0.5 * s_1 * gsd + s_next,
        sharp=((s_1 * sine) ** 2 + s_next**2) ** 0.5,
    )
