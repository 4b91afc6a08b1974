"""DP-SGD. Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy,
CCS 2016, arXiv:1607.00133, Algorithm 1. GEP's tables call it GP."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pubsel.algorithms import Mechanism, View
from pubsel.gradients.matrix import GradientMatrix, clip_factors
from pubsel.settings.schema import setting


def clipped_sum(gradients: GradientMatrix, bound: float) -> Tensor:
    """Sum of the rows of G [n, p], each clipped to L2 norm `bound` and divided by it -> float64 [p].

    Sensitivity 1: one row more or less adds or removes one vector of norm at most 1; in floating point at most
    1 + `privacy.ROUNDING`, since the sum is in float64.
    """
    return gradients.combine(clip_factors(gradients.row_norms(), bound) / bound)


def clipped_rows(gradients: GradientMatrix, bound: float) -> Tensor:
    """The rows that `clipped_sum` adds up, [n, p]."""
    weights = clip_factors(gradients.row_norms(), bound) / bound  # [n]
    return gradients.written_out(torch.ones_like(weights, dtype=torch.bool)) * weights.to(gradients.dtype)[:, None]


@dataclass
class DPSGD:
    """Settings of DP-SGD."""

    name: str = setting("its name in records and tables")
    clip_norm: float = setting("bound C on the L2 norm of an example's gradient", at_least=1e-12)

    uses_public: ClassVar[bool] = False
    private: ClassVar[bool] = True

    def sensitivity(self) -> float:
        return 1.0

    def numbers(self, view: View) -> int:
        return 0

    def mechanism(self, view: View, step: int) -> Mechanism:
        return Mechanism(
            clipped_sum=lambda gradients: clipped_sum(gradients, self.clip_norm),
            decode=lambda mean: mean * self.clip_norm,
            sensitivity=self.sensitivity(),
            size=view.gradients.size,
            contributions=lambda gradients: clipped_rows(gradients, self.clip_norm),
        )
