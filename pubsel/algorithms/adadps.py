"""AdaDPS. Li, Zaheer, Reddi, Smith: Private Adaptive Optimization with Side Information, ICML 2022, arXiv:2202.05963,
Algorithm 1, with RMSProp's conditioner from labelled public data; clipped per example. The published code clips means
of micro-batches, whose sensitivity is twice the bound that it accounts for."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pubsel.algorithms import Mechanism, View
from pubsel.gradients.matrix import GradientMatrix, clip_factors
from pubsel.settings.schema import setting


def conditioned_sum(gradients: GradientMatrix, scale: Tensor, bound: float) -> Tensor:
    """Sum of the rows of G diag(scale), each clipped to L2 norm `bound` and divided by it -> float64 [p]. scale: [p],
    public.

    Sensitivity 1: one row more or less adds or removes one vector of norm at most 1.
    """
    return gradients.combine(clip_factors(gradients.scaled_norms(scale), bound) / bound) * scale


def conditioned_rows(gradients: GradientMatrix, scale: Tensor, bound: float) -> Tensor:
    """The rows that `conditioned_sum` adds up, [n, p]."""
    weights = clip_factors(gradients.scaled_norms(scale), bound) / bound
    rows = gradients.written_out(torch.ones_like(weights, dtype=torch.bool))
    return rows * scale * weights.to(gradients.dtype)[:, None]


@dataclass
class AdaDPS:
    """Settings of AdaDPS. The conditioner is made anew at each step, of the gradients of all public examples at the
    current weights: where the paper averages single public batches over steps."""

    name: str = setting("its name in records and tables")
    clip_norm: float = setting("bound C on the L2 norm of an example's conditioned gradient", at_least=1e-12)
    damping: float = setting("epsilon_c: added to the root mean square of the public gradients", at_least=1e-12)

    uses_public: ClassVar[bool] = True
    private: ClassVar[bool] = True

    def sensitivity(self) -> float:
        """As in DP-SGD: the conditioner depends on no private example."""
        return 1.0

    def numbers(self, view: View) -> int:
        return 2 * view.gradients.size

    def mechanism(self, view: View, step: int) -> Mechanism:
        public = view.labelled(self.name)
        squares = torch.zeros(view.gradients.size, dtype=torch.float64, device=public.x.device)
        for block in view.gradients.blocks(public.x, public.y):
            squares += block.squared_sum()
        scale = 1 / ((squares / len(public.x)).sqrt() + self.damping)
        scale = scale.to(next(view.model.parameters()).dtype)
        return Mechanism(
            clipped_sum=lambda gradients: conditioned_sum(gradients, scale, self.clip_norm),
            decode=lambda mean: mean * self.clip_norm,
            sensitivity=self.sensitivity(),
            size=view.gradients.size,
            contributions=lambda gradients: conditioned_rows(gradients, scale, self.clip_norm),
            shared=(scale,),
        )
