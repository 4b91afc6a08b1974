"""SGD without clipping and without noise, in the same loop: the ceiling that private learning is measured against."""

import math
from dataclasses import dataclass

import torch

from pubsel.algorithms import Algorithm, Mechanism, View


@dataclass
class NonPrivate(Algorithm):
    """Training without noise, and without settings."""

    uses_public = False
    private = False

    def sensitivity(self) -> float:
        """Return infinity: rows are not clipped."""
        return math.inf

    def mechanism(self, view: View, step: int) -> Mechanism:
        return self.row_weighted(
            view,
            weights=lambda gradients: torch.ones_like(gradients.row_norms()),
            decode=lambda mean: mean,
        )
