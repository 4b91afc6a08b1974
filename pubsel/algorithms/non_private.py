"""SGD without clipping and without noise, in the same loop: the ceiling that private learning is measured against."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pubsel.algorithms import Mechanism, View
from pubsel.settings.schema import setting


@dataclass
class NonPrivate:
    """It has no settings."""

    name: str = setting("its name in records and tables")

    uses_public: ClassVar[bool] = False
    private: ClassVar[bool] = False

    def sensitivity(self) -> float:
        return float("inf")

    def numbers(self, view: View) -> int:
        return 0

    def mechanism(self, view: View, step: int) -> Mechanism:
        return Mechanism(
            clipped_sum=lambda gradients: gradients.combine(torch.ones_like(gradients.row_norms())),
            decode=lambda mean: mean,
            sensitivity=self.sensitivity(),
            size=view.gradients.size,
        )
