"""DP-FC. Mehta, Krichene, Thakurta, Kurakin, Cutkosky: Differentially Private Image Classification from Features,
TMLR 2023, arXiv:2211.13403.

Full-batch gradient descent for a linear classifier on rows of norm 1. Each noisy mean gradient is multiplied by
(A + lambda I)^-1, where A = sum_i x_i x_i^T plus noise is released once, before training, and shared by all classes and
steps. As in the authors' code, A has the noise multiplier of a step, its negative eigenvalues are set to zero, and no
bias is trained. What differs:

- The loss is cross-entropy, that of every other method here, in place of a sigmoid for each class.
- The paper tunes the learning rate, lambda and the clip norm. Here the first and the last follow from bounds,
  `CURVATURE` and the norm of a gradient at zero weights, and so may lambda (`DPFC.lambda_`).
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from pubsel.algorithms import Facts, FirstRelease, Frozen, Mechanism, Random, View
from pubsel.algorithms.adamix import weight_of
from pubsel.algorithms.dp_sgd import Clipping, residual_at_zero
from pubsel.algorithms.whitened_head import FULL_BATCHES
from pubsel.data import Split
from pubsel.gradients.matrix import clipped_rows
from pubsel.gradients.subspace import from_triangle, triangle
from pubsel.settings.keys import MOST_EPOCHS
from pubsel.settings.schema import setting

CURVATURE = 0.5  # the Hessian of cross-entropy is at most this times A, for each class (Boehning 1992)
SMALLEST = 1e-6  # lambda over n, at least: without noise, A may be singular


@dataclass
class DPFC(Clipping):
    """Settings of DP-FC."""

    steps: int = setting("steps of gradient descent; training.* is not used", at_least=1, at_most=MOST_EPOCHS)
    rate: float = setting("learning rate, times the largest curvature", over=0)
    ridge: float | None = setting("lambda, added to the second moments; null: the norm of their noise", over=0)

    uses_public = False
    first_steps = 1
    facts = Facts()  # of no task; `derived` has those of one

    @property
    def training(self) -> dict[str, Any]:
        """Return full batches and plain gradient descent; `mechanism` multiplies by the learning rate."""
        return FULL_BATCHES | {"steps": self.steps, "momentum": 0.0}

    def derived(self, facts: Facts) -> Self:
        """Return the algorithm for a task."""
        algorithm = copy.copy(self)
        algorithm.facts = facts
        return algorithm

    def values(self, steps: int) -> dict[str, Any]:
        """Return what follows from the task, for the record."""
        return {"steps": steps, "ridge": self.lambda_, "clip_norm": self.bound, "steps_of_moments": self.first_steps}

    @property
    def lambda_(self) -> float:
        """Return what is added to the eigenvalues of A. If ridge is null, the norm of its noise, 2 sqrt(d / 2) times
        the noise multiplier sqrt(steps + 1) / mu, since noise of variance 1/2 is above the diagonal: A + lambda I is
        then hardly less than without noise. With the settings of the authors' code that is 78, and lambda there is
        100, as in the preset."""
        noise = math.sqrt(2 * self.facts.d * (self.steps + 1)) / self.facts.mu
        return max(noise if self.ridge is None else self.ridge, SMALLEST * self.facts.n)

    @property
    def bound(self) -> float:
        """Return the clip norm: that of a gradient at zero weights."""
        return residual_at_zero(self.facts.classes, self.facts.multi_label)

    def numbers(self, view: View) -> int:
        """Count some matrices [d, d] in float64."""
        return 16 * weight_of(view).shape[1] ** 2

    def frozen(self, public: Split | None, d: int, random: Random) -> FirstRelease:
        """Return the release of A, the `triangle` of sum_i x_i x_i^T of rows of norm 1, and rows of norm 1.

        Sensitivity 1: one example more or less moves it by x x^T, whose Frobenius norm is |x|^2 <= 1, and the norm of
        the triangle is that of the matrix. A row that is not finite counts as zero."""

        def sums(x: Tensor) -> Tensor:  # [n, d] -> [d (d + 1) / 2]
            rows = clipped_rows(Frozen(unit=True)(x), 1.0)
            return triangle(rows.T @ rows)

        def decode(noisy: Tensor) -> Frozen:
            values, vectors = torch.linalg.eigh(from_triangle(noisy, d))
            inverse = (vectors / (values.clamp(min=0) + self.lambda_)) @ vectors.T
            frozen = Frozen(unit=True)
            frozen.preconditioner = (self.facts.n * inverse).float()
            return frozen

        return FirstRelease(sums, decode, 1.0, d * (d + 1) // 2)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return DP-SGD's mechanism for the weights, whose mean is multiplied by the inverse of A / n; the bias, whose
        gradients count as zero, stays zero."""
        c, d = weight_of(view).shape
        columns = torch.zeros(view.gradients.size).to(weight_of(view))
        columns[: c * d] = 1
        plain = self.clipped(view, residual_at_zero(view.classes, view.multi_label), columns)
        curvature = 1 / (4 * c) if view.multi_label else CURVATURE

        def decode(mean: Tensor) -> Tensor:
            rows = plain.decode(mean)[: c * d].view(c, d)
            if view.preconditioner is not None:
                rows = rows @ view.preconditioner.to(rows)
            return torch.cat([(self.rate / curvature * rows).flatten(), torch.zeros_like(mean[c * d :])])

        return plain._replace(decode=decode)
