"""Maximum mean discrepancy. Gretton et al.: A Kernel Two-Sample Test, JMLR 13 (2012), Lemma 6: the unbiased estimate of
its square, with a Gaussian kernel, here of the features of the backbone, or of what the head of the network takes.

It reads private images, and no labels. It is NOT differentially private: it is computed without noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import penultimate, squared_distances
from pubsel.messages import UsageError


def mmd(x: Tensor, y: Tensor, bandwidth: float) -> float:
    """Return MMD^2 of rows x [n, d] and y [m, d], n, m > 1, with k(x, y) = exp(-|x - y|^2 / (2 bandwidth^2)).

    Unbiased: 0 on average if both are of one distribution, so it may be NEGATIVE. Of a sample and itself it is 2 (w -
    1) / n, where w is `within` of the sample. At most 2.
    """
    return within(x, bandwidth) + within(y, bandwidth) - 2 * _between(x, y, bandwidth)


def within(x: Tensor, bandwidth: float) -> float:
    """Return the mean of the kernel between different rows of x [n, d]."""
    n = len(x)
    kernel = _kernel(x, x, bandwidth).fill_diagonal_(0)
    return float(kernel.sum()) / (n * (n - 1))


def median_distance(x: Tensor) -> float:
    """Return the median distance between different rows of x [n, d]: Gretton et al., Section 8, take it as the
    bandwidth."""
    i, j = torch.triu_indices(len(x), len(x), offset=1)
    return float(squared_distances(x, x)[i, j].median().sqrt())


def _between(x: Tensor, y: Tensor, bandwidth: float) -> float:
    return float(_kernel(x, y, bandwidth).mean())


def _kernel(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    return squared_distances(x, y).div_(-2 * bandwidth**2).exp_()


@dataclass
class MMD(Distance):
    """Settings of MMD^2.

    The bandwidth is the median distance between the private examples only: the same for all candidates of an
    initialisation, so that their values compare, and none depends on the others.
    """

    title = "MMD^2"
    reads = "images, as features"

    def to_private(self, draw: Draw) -> Between:
        model = draw.model()
        x = penultimate(model, draw.private.x)
        bandwidth = median_distance(x)
        if not bandwidth > 0:
            raise UsageError("distance=mmd: most private examples have the same features: take another model")

        # The private side's own term is the same for all candidates.
        spread = within(x, bandwidth)

        def between(name: str, public: Split) -> float:
            y = penultimate(model, public.x)
            return spread + within(y, bandwidth) - 2 * _between(x, y, bandwidth)

        return between
