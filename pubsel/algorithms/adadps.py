"""AdaDPS. Li, Zaheer, Reddi, Smith: Private Adaptive Optimization with Side Information, ICML 2022, arXiv:2202.05963,
Algorithm 1, with RMSProp's conditioner from labelled public data; clipped per example. The published code clips means
of micro-batches, whose sensitivity is twice the bound that it accounts for."""

from dataclasses import dataclass

import torch

from pubsel.algorithms import Mechanism, View
from pubsel.algorithms.dp_sgd import Clipping
from pubsel.settings.schema import setting


@dataclass
class AdaDPS(Clipping):
    """Settings of AdaDPS. The conditioner is made anew at each step, from the gradients of all public examples at the
    current weights; the paper averages single public batches over steps instead."""

    clip_norm: float = setting("bound C on the L2 norm of an example's conditioned gradient", at_least=1e-12)
    damping: float = setting(
        "epsilon_c, which is added to the root mean square of the public gradients", at_least=1e-12
    )

    def check(self, view: View) -> None:
        view.labelled(self.name)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD on rows that are conditioned before they are clipped; the conditioner is made
        from public data."""
        public = view.labelled(self.name)
        squares = torch.zeros(view.gradients.size, dtype=torch.float64, device=public.x.device)
        for block in view.gradients.blocks(public.x, public.y):
            squares += block.squared_sum()

        scale = 1 / ((squares / len(public.x)).sqrt() + self.damping)
        return self.clipped(view, self.clip_norm, scale.to(next(view.model.parameters()).dtype))
