"""Gradient embedding perturbation. Yu, Zhang, Chen, Liu: Do Not Let Privacy Overbill Utility: Gradient Embedding
Perturbation for Private Learning, ICLR 2021, Algorithms 1 and 2; Biased GEP (Remark 1) with residual=false."""

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from pubsel.algorithms import Mechanism, View
from pubsel.config import Labels, UsageError, setting
from pubsel.gradients import Basis, GradientMatrix, clip_factors, random_labels
from pubsel.models import parameter_groups
from pubsel.subspace import allocate, group_basis

Groups = Enum("Groups", ["layers", "slices"])
Precision = Enum("Precision", ["float32", "bfloat16"])
SLACK = 1e-3  # of a row's squared norm, added to its residual's


def embed_and_clip(gradients: GradientMatrix, basis: Basis, clip_embedding: float) -> tuple[Tensor, Tensor]:
    """Embeddings W = G B [n, k], and their sum after clipping to `clip_embedding` and division by it, [k]."""
    w = gradients.project(basis)
    weights = clip_factors(w.double().norm(dim=1), clip_embedding) / clip_embedding
    return w, w.T @ weights.to(w.dtype)


def residual_sum(gradients: GradientMatrix, basis: Basis, w: Tensor, clip_residual: float) -> Tensor:
    """Sum of the residual rows r_i = g_i - B w_i, each clipped to `clip_residual` and divided by it -> [p].

    No residual is written out. B is orthonormal, so |r_i|^2 = |g_i|^2 - |w_i|^2, and sum_i c_i r_i = G^T c - B W^T c.
    In float32 B^T B - I has eigenvalues up to 4e-5 at p = 200,000, and the difference of squares loses digits where the
    residual is small: a norm read too small would clip too little. So SLACK |g_i|^2 is added to |r_i|^2, 25 times that
    error. It also keeps every weight below S2 / (0.03 |g_i|), which bounds the rounding of the two sums. The price: a
    row that lies outside the basis altogether is clipped 0.05 % more.
    """
    squares = gradients.row_norms().square()  # [n], float64
    norms = ((squares - w.double().square().sum(1)).clamp(min=0) + SLACK * squares).sqrt()
    weights = (clip_factors(norms, clip_residual) / clip_residual).to(w.dtype)  # [n]
    return gradients.combine(weights) - basis.expand(w.T @ weights)


@dataclass
class GEP:
    """Settings of GEP and Biased GEP."""

    name: str = setting("its name in records and tables")
    k: int = setting("basis vectors in all", at_least=1)
    clip_embedding: float = setting("bound S1 on the L2 norm of an example's embedding", at_least=1e-12)
    clip_residual: float = setting("bound S2 on the L2 norm of an example's residual", at_least=1e-12)
    residual: bool = setting("release the residual too (GEP); false: Biased GEP")
    groups: Groups = setting("layers: as in the paper; slices: three equal flat slices, as in the official code")
    power_iterations: int = setting("power iterations for the basis", at_least=1)
    labels: Labels = setting("labels of the public images: random, or given: their own, of the private task")
    redraw: bool = setting("draw random labels at each step (paper) or once (official code)")
    public_precision: Precision = setting("of the public gradients; they only choose the subspace")

    uses_public: ClassVar[bool] = True
    private: ClassVar[bool] = True

    def sensitivity(self) -> float:
        """Embedding and residual, each scaled to norm at most 1, are released as ONE vector: sqrt(1 + 1), or 1."""
        return math.sqrt(2) if self.residual else 1.0

    def mechanism(self, view: View, step: int) -> Mechanism:
        basis = self.basis(view, step)
        k = basis.size

        def clipped_sum(gradients: GradientMatrix) -> Tensor:  # [k + p] or [k]
            w, embedding = embed_and_clip(gradients, basis, self.clip_embedding)
            if not self.residual:
                return embedding
            return torch.cat([embedding, residual_sum(gradients, basis, w, self.clip_residual)])

        def decode(mean: Tensor) -> Tensor:  # [p]
            direction = basis.expand(mean[:k] * self.clip_embedding)
            return direction + mean[k:] * self.clip_residual if self.residual else direction

        size = k + view.gradients.size if self.residual else k
        return Mechanism(clipped_sum, decode, self.sensitivity(), size)

    def basis(self, view: View, step: int) -> Basis:
        """The anchor subspace at the current weights, from public images alone; groups of columns as configured."""
        public = view.public
        if public is None:
            raise UsageError(f"algorithm={self.name} needs public data: give pair.public=NAME")
        if self.k > len(public.x):
            raise UsageError(
                f"algorithm.k={self.k} is more than the {len(public.x)} public examples: "
                "lower algorithm.k or raise pair.m"
            )
        y = public.y
        if self.labels == Labels.random:
            source = view.random("labels", step if self.redraw else 0)
            y = random_labels(source, len(public.x), view.classes, view.multi_label).to(public.x.device)
        elif y.dim() == 1 and int(y.max()) >= view.classes:
            raise UsageError(
                f"algorithm.labels=given: the public images have labels outside the private task's {view.classes} "
                "classes; use random labels"
            )
        gradients = view.gradients.matrix(public.x, y)
        slices = self.columns(view)
        ranks = allocate(self.k, [s.stop - s.start for s in slices], len(public.x))
        rows = gradients.rows
        generator = torch.Generator(rows.device).manual_seed(int(view.random("basis", step).integers(2**63)))
        starts = [
            torch.randn(s.stop - s.start, rank, generator=generator, dtype=rows.dtype, device=rows.device)
            for s, rank in zip(slices, ranks, strict=True)
        ]
        if self.public_precision == Precision.bfloat16:
            gradients.rows = gradients.rows.bfloat16()
        return group_basis(gradients, slices, starts, self.power_iterations)

    def columns(self, view: View) -> list[slice]:
        """The columns of G of each parameter group."""
        if self.groups == Groups.layers:
            return list(parameter_groups(view.model, view.gradients.offsets).values())
        cuts = [round(i * view.gradients.size / 3) for i in range(4)]
        return [slice(a, b) for a, b in pairwise(cuts)]
