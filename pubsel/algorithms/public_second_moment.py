"""Least squares on features that public second moments transform. Cao, Zhang: Enhancing Differentially Private Linear
Regression via Public Second-Moment, 2025, arXiv:2508.18037.

With S = sum_i x_i x_i^T / m of public rows, private rows become S^-1/2 x, whose second moments are near the identity.
They are clipped to a public norm, the median one of the public rows, and their sufficient statistics are released as by
AdaSSP, whose ridge then costs little. The transform stays in front of the classifier: that is the same as weights for
the features themselves, S^-1/2 times those that were learned. Directions in which public rows do not vary are left out,
so there should be more public examples than features.
"""

from dataclasses import dataclass

import torch

from pubsel.algorithms import Frozen, Random, needed
from pubsel.algorithms.adassp import AdaSSP
from pubsel.data import Split
from pubsel.messages import UsageError


@dataclass
class PublicSecondMoment(AdaSSP):
    """Settings of least squares on transformed features. The sensitivity is AdaSSP's: transform and clip norm are of
    public data, and each row is clipped after both."""

    uses_public = True

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        """Return x -> S^-1/2 x over the clip norm, in the basis of the eigenvectors of S, which changes nothing.
        UsageError if S is zero or not finite."""
        x = needed(public, self.name).x.double()
        values, vectors = torch.linalg.eigh(x.T @ x / len(x))
        if not 0 < values[-1] < torch.inf:
            raise UsageError("pair.public: its features are zero, or not finite: take other public data")

        vary = values > 1e-10 * values[-1]
        directions = vectors[:, vary] / values[vary].sqrt()
        bound = (x @ directions).norm(dim=1).median()
        return Frozen(projection=(directions / bound).float())
