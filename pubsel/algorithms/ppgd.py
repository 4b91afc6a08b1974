"""PPGD. Wang and Zhou: Differentially Private Learning with Small Public Data, AAAI 2020 (PPSGD), with full batches,
after what AdaMix says of it (Sections 2, 3.2 and 4): private training whose clip norm follows the mean public gradient,
then public training that stays near its result. Gradients and learning rates are of sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pubsel.algorithms import Frozen, Mechanism, View
from pubsel.algorithms.adamix import public_gradient, train_on_public
from pubsel.algorithms.dp_sgd import clipped_rows, clipped_sum
from pubsel.data import Split
from pubsel.settings.keys import MOST_EPOCHS
from pubsel.settings.schema import setting


@dataclass
class PPGD:
    """Settings of PPGD."""

    name: str = setting("its name in records and tables")
    unit: bool = setting("features are divided by their norms")
    clip_factor: float = setting("the clip norm is this times the norm of the mean public gradient", over=0)
    finish_epochs: int = setting(
        "full-batch epochs on public data after private training", at_least=0, at_most=MOST_EPOCHS
    )
    finish_rate: float = setting("their learning rate, on sums", over=0)
    reuse: float = setting("pull back to the private result: this / 2 |w - w_private|^2", at_least=0)

    uses_public: ClassVar[bool] = True
    private: ClassVar[bool] = True

    def sensitivity(self) -> float:
        """As in DP-SGD: the clip norm is of public gradients. What follows is post-processing."""
        return 1.0

    def numbers(self, view: View) -> int:
        return 2 * view.gradients.size

    def frozen(self, public: Split | None, d: int, random: Callable[[str, int], np.random.Generator]) -> Frozen:
        return Frozen(unit=self.unit)

    def mechanism(self, view: View, step: int) -> Mechanism:
        public = view.labelled(self.name)
        mean_norm = float(public_gradient(view.gradients, public).norm()) / len(public.x)
        tau = torch.tensor(max(self.clip_factor * mean_norm, 1e-12), dtype=torch.float64)
        return Mechanism(
            clipped_sum=lambda gradients: clipped_sum(gradients, tau.item()),
            decode=lambda mean: mean * view.batch_size * tau.item(),
            sensitivity=self.sensitivity(),
            size=view.gradients.size,
            contributions=lambda gradients: clipped_rows(gradients, tau.item()),
            shared=(tau,),
        )

    def finish(self, view: View) -> None:
        train_on_public(view, view.labelled(self.name), self.finish_epochs, self.finish_rate, self.reuse)
