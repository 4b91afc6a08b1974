"""AdaSSP. Wang: Revisiting differentially private linear regression: optimal and adaptive prediction & estimation in
unbounded domain, UAI 2018, arXiv:1803.02596, Algorithm 2, for least squares on one-hot labels.

Noisy X^T X and X^T Y give the weights (X^T X + lambda I)^-1 X^T Y, with a ridge lambda that is smaller the larger the
noisy smallest eigenvalue of X^T X is. There is no intercept.

The paper spends epsilon / 3 on each of the three. Here they are one Gaussian release: the vector of all three has
sensitivity sqrt(3), so that mu = sqrt(3) over the deviation, by the exact curve. That is tight: a row along the
eigenvector of the smallest eigenvalue, if the others are larger by 1 or more, moves each of the three by exactly 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pubsel.algorithms import View
from pubsel.algorithms.adamix import OnFeatures
from pubsel.data import Split
from pubsel.gradients.matrix import clipped_rows
from pubsel.gradients.subspace import from_triangle, triangle
from pubsel.privacy.accountant import Plan, deviation, plan
from pubsel.privacy.lattice import noised
from pubsel.privacy.randomness import Source

RHO = 0.05  # the probability that the ridge is too small for the noise, as in the paper's experiments
ROWS = 2**14  # at a time in float64


def statistics(private: Split, classes: int) -> Tensor:
    """Return the smallest eigenvalue of X^T X, the `triangle` of X^T X, and Y^T X, float64 [1 + d (d + 1) / 2 + C d],
    of rows x [n, d], clipped to norm 1, and one-hot rows of their classes y [n]."""
    d = private.x.shape[1]
    moments = torch.zeros(d, d, dtype=torch.float64)
    products = torch.zeros(classes, d, dtype=torch.float64)
    for x, y in zip(private.x.split(ROWS), private.y.split(ROWS), strict=True):
        rows = clipped_rows(x, 1.0)
        moments += rows.T @ rows
        products += nn.functional.one_hot(y.long(), classes).double().T @ rows
    return torch.cat([torch.linalg.eigvalsh(moments)[:1], triangle(moments), products.flatten()])


def regression(noisy: Tensor, d: int, classes: int, scale: float, delta: float) -> Tensor:
    """Return the weights [C, d] that follow from noisy `statistics`, with noise of deviation `scale` on each number.

    The smallest eigenvalue is taken as lower by sqrt(log(6 / delta)) deviations, and the ridge makes up for what it
    lacks of the norm of the noise on X^T X, sqrt(d log(2 d^2 / rho)) deviations at most, but with probability RHO."""
    least, moments, products = noisy.split([1, d * (d + 1) // 2, classes * d])
    certain = max(float(least) - scale * math.sqrt(math.log(6 / delta)), 0.0)
    ridge = max(scale * math.sqrt(d * math.log(2 * d**2 / RHO)) - certain, 0.0)
    return torch.linalg.solve(from_triangle(moments, d) + ridge * torch.eye(d), products.view(classes, d).T).T.float()


@dataclass
class AdaSSP(OnFeatures):
    """Settings of AdaSSP."""

    uses_public = False

    def sensitivity(self) -> float:
        """Return sqrt(1 + 1 + 1). One row x more or less, |x| <= 1, moves the smallest eigenvalue by at most |x|^2
        (Weyl), the triangle of X^T X by |x|^2, its Frobenius norm, and one row of Y^T X by x. A row that is not finite
        counts as zero. Rounding: an eigenvalue of a matrix of norm at most n is off by some d n 2^-53, far below
        `accountant.ROUNDING`."""
        return math.sqrt(3)

    def numbers(self, view: View) -> int:
        return 0

    def account(self, n: int, epsilon: float, delta: float) -> Plan:
        """Return what the release costs, whatever n is."""
        return plan(epsilon, delta, 1.0, 1, self.sensitivity())

    def solve(
        self, private: Split, public: Split | None, classes: int, epsilon: float, delta: float, source: Source
    ) -> tuple[Tensor, Plan]:
        """Return the weights [C, d] of least squares, and what they cost."""
        cost = self.account(len(private.x), epsilon, delta)
        scale = deviation(cost.noise_multiplier, self.sensitivity())
        noisy = noised(statistics(private, classes), scale, self.sensitivity(), source)
        return regression(noisy, private.x.shape[1], classes, scale, delta), cost
