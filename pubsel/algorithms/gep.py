"""Gradient embedding perturbation. Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient Embedding
Perturbation for Private Learning, ICLR 2021, Algorithms 1 and 2; Biased GEP (Remark 1) with residual=false."""

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from pubsel.algorithms import Algorithm, Mechanism, View, added, needed, weighted_rows
from pubsel.algorithms.dp_sgd import ABOUT_CLIP, Clip, clip_weights, clipped_sum, unit_weights
from pubsel.gradients.matrix import Basis, DenseGradients, GradientMatrix, gpu_precision
from pubsel.gradients.subspace import allocate, orthonormal, power_basis
from pubsel.messages import UsageError
from pubsel.models import parameter_groups
from pubsel.settings.keys import ABOUT_LABELS, MOST_EPOCHS, Labels
from pubsel.settings.schema import setting

Groups = Enum("Groups", ["layers", "slices"])
Precision = Enum("Precision", ["float32", "ieee", "bfloat16"])
BLOCK = 256  # rows of G that meet a basis at once: a basis is far larger, and read for each block
NEAR = 1e-2  # of a row's squared norm: the residual that is written out is smaller
SLACK = 1e-3  # of a row's squared norm, added to its residual's


def embed_and_clip(
    gradients: GradientMatrix, basis: Basis, clip_embedding: float, clip: Clip = Clip.norm
) -> tuple[Tensor, Tensor]:
    """Return the embeddings W = G B [n, k], and their sum after clipping to `clip_embedding` and division by it,
    float64 [k]."""
    w = gradients.project(basis)
    weights = unit_weights(w.double().norm(dim=1), clip_embedding, clip)
    return w, w.double().T @ weights


def residual_sum(
    gradients: GradientMatrix,
    basis: Basis,
    w: Tensor,
    clip_residual: float,
    error: Tensor | float,
    clip: Clip = Clip.norm,
) -> Tensor:
    """Sum the residual rows r_i = g_i - B w_i, each clipped to `clip_residual` and divided by it -> float64 [p].

    Almost no residual is written out: sum_i c_i r_i = G^T c - B W^T c, and for an orthonormal B
    |r_i|^2 = |g_i|^2 - |w_i|^2. A norm read too small would clip too little, so what both roundings may hide is added:
    with E = B^T B - I and w_i = B^T g_i + e_i, |r_i|^2 = |g_i|^2 - |w_i|^2 + 2 w_i^T e_i + w_i^T E w_i. `error`, at
    least |E|, is measured on this basis (`subspace.orthonormal`); SLACK |g_i|^2 is for e_i, the float32 product.

    Rows with |r_i|^2 below NEAR |g_i|^2 would lose their digits, and the slack would clip them by more than 5 %: those
    rows, few or none, are written out, and their norms are of what is summed.

    The other rows enter both sums with a norm of at most 10 (the root of 1 / NEAR), so that sums of a block of n rows
    and k columns are off by 20 n (n + k) 2^-53: within `privacy.ROUNDING`.
    """
    squares = gradients.row_norms().square()  # [n], float64
    left = (squares - w.double().square().sum(1)).clamp(min=0)
    near = left < NEAR * squares

    weights = unit_weights((left + (SLACK + error) * squares).sqrt(), clip_residual, clip)  # [n]
    weights = torch.where(near, 0, weights)
    total = gradients.combine(weights) - basis.expand(w.double().T @ weights)

    # A small difference of large squares has lost its digits: these residuals are written out. On a GPU all are, and
    # the others count as zero, because the host would have to wait to know which they are.
    if near.is_cuda:
        residuals = torch.where(near[:, None], gradients.written_out() - basis.expand(w), 0)  # [n, p]
        total += clipped_sum(DenseGradients(residuals), clip_residual, clip=clip)
    elif near.any():
        residuals = gradients.written_out(near) - basis.expand(w[near])  # [n', p]
        total += clipped_sum(DenseGradients(residuals), clip_residual, clip=clip)

    return total


def clipped_parts(
    gradients: GradientMatrix,
    basis: Basis,
    clip_embedding: float,
    clip_residual: float | None,
    clip: Clip = Clip.norm,
) -> Tensor:
    """Return the rows (embedding, residual) [n, k + p] that the two sums add up, all residuals written out; None:
    [n, k]."""
    w = gradients.project(basis)
    embeddings = DenseGradients(w.clone())
    parts = [weighted_rows(embeddings, clip_weights(embeddings, clip_embedding, clip=clip))]

    if clip_residual is not None:
        residuals = DenseGradients(gradients.written_out() - basis.expand(w))
        parts.append(weighted_rows(residuals, clip_weights(residuals, clip_residual, clip=clip)))

    return torch.cat(parts, dim=1)


@dataclass
class GEP(Algorithm):
    """Settings of GEP and Biased GEP."""

    k: int = setting("basis vectors in all", at_least=1)
    clip_embedding: float = setting("bound S1 on the L2 norm of an example's embedding", at_least=1e-12)
    clip_residual: float = setting("bound S2 on the L2 norm of an example's residual", at_least=1e-12)
    residual: bool = setting("release the residual too (GEP); false: only the embedding (Biased GEP)")
    groups: Groups = setting("layers: as in the paper; slices: three equal flat slices, as in the official code")
    power_iterations: int = setting("power iterations for the basis", at_least=1, at_most=MOST_EPOCHS)
    labels: Labels = setting(ABOUT_LABELS)
    redraw: bool = setting("draw random labels at each step (paper) or once (official code)")
    public_precision: Precision = setting(
        "precision of computations on public data, which only choose the subspace; float32: on GPUs with products in "
        "TF32; ieee: exact float32 on GPUs too; bfloat16: much slower on CPUs without bfloat16 arithmetic"
    )
    clip: Clip = setting(ABOUT_CLIP, default=Clip.norm)

    @property
    def directions(self) -> int:
        return self.k

    def sensitivity(self) -> float:
        """Return sqrt(1 + 1), or 1 without the residual: both are scaled to norm at most 1 and released as ONE
        vector."""
        return math.sqrt(2) if self.residual else 1.0

    def numbers(self, view: View) -> int:
        """Count the numbers of a block of rows, of the basis and what it is made from, and of the workspace of the QR
        of its largest group."""
        sizes = [s.stop - s.start for s in self.columns(view)]
        limit = len(view.public.x) if view.public is not None else self.k
        ranks = allocate(self.k, sizes, limit)
        entries = [size * rank for size, rank in zip(sizes, ranks, strict=True)]
        return BLOCK * view.gradients.size + 2 * sum(entries) + 2 * max(entries)

    def mechanism(self, view: View, step: int) -> Mechanism:
        basis = self.basis(view, step)
        k = basis.size
        error = torch.zeros(1, dtype=torch.float64, device=basis.blocks[0].device)

        # Norms of residuals are computed from an orthonormal basis, so its error enters them.
        if self.residual:
            basis, error[0] = orthonormal(basis)

        def sums(gradients: GradientMatrix, total: Tensor | None = None) -> Tensor:  # [k + p] or [k]
            w, embedding = embed_and_clip(gradients, basis, self.clip_embedding, self.clip)
            if not self.residual:
                return added(embedding, total)
            residual = residual_sum(gradients, basis, w, self.clip_residual, error, self.clip)
            return added(torch.cat([embedding, residual]), total)

        def decode(mean: Tensor) -> Tensor:  # [p]
            direction = basis.expand(mean[:k] * self.clip_embedding)
            if not self.residual:
                return direction
            return direction + mean[k:] * self.clip_residual

        size = k + view.gradients.size if self.residual else k
        clip_residual = self.clip_residual if self.residual else None
        return Mechanism(
            sums,
            decode,
            self.sensitivity(),
            size,
            rows=BLOCK,
            contributions=lambda gradients: clipped_parts(
                gradients, basis, self.clip_embedding, clip_residual, self.clip
            ),
            shared=(*basis.blocks, error),
        )

    def check(self, view: View) -> None:
        m = len(view.labels(self.labels, 0, self.name))
        if self.k > m:
            raise UsageError(
                f"algorithm.k={self.k} is more than the {m} public examples: lower algorithm.k or raise pair.m"
            )

    def basis(self, view: View, step: int) -> Basis:
        """Return the anchor subspace at the current weights, from public images alone; groups of columns as
        configured."""
        public = needed(view.public, self.name)
        y = view.labels(self.labels, step if self.redraw else 0, self.name)
        slices = self.columns(view)
        ranks = allocate(self.k, [s.stop - s.start for s in slices], len(public.x))

        # Lower precision chooses another subspace at most: no private gradient passes through it.
        parameter = next(view.model.parameters())
        precision = torch.bfloat16 if self.public_precision == Precision.bfloat16 else parameter.dtype
        generator = torch.Generator(parameter.device).manual_seed(int(view.random("basis", step).integers(2**63)))

        def start(size: int, rank: int) -> Tensor:
            return torch.randn(size, rank, generator=generator, dtype=parameter.dtype, device=parameter.device)

        with gpu_precision("ieee" if self.public_precision == Precision.ieee else "tf32"):
            return power_basis(
                lambda: view.gradients.blocks(public.x, y, BLOCK, precision),
                slices,
                [start(s.stop - s.start, rank).to(precision) for s, rank in zip(slices, ranks, strict=True)],
                self.power_iterations,
            )

    def columns(self, view: View) -> list[slice]:
        """Return the columns of G of each parameter group."""
        if self.groups == Groups.layers:
            return list(parameter_groups(view.model, view.gradients.offsets).values())

        cuts = [round(i * view.gradients.size / 3) for i in range(4)]
        return [slice(a, b) for a, b in pairwise(cuts)]
