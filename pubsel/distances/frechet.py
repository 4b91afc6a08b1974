"""Fréchet distance between Gaussians (Dowson and Landau 1982), as FID takes it (Heusel et al. 2017, arXiv:1706.08500,
Equation 6): here of the features of the backbone, or of what the head of the network takes.

It reads private images, and no labels. It is NOT differentially private: it is computed without noise.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import penultimate


class Gaussian(NamedTuple):
    """A Gaussian by its mean and a root of its covariance: S = R^T R."""

    mean: Tensor  # float64 [d]
    root: Tensor  # float64 [r, d], r <= d


def gaussian(x: Tensor) -> Gaussian:
    """Return the mean and sample covariance of the rows x [n, d] (of a single row: no covariance)."""
    mean = x.double().mean(0)
    root = (x - mean) / max(1, len(x) - 1) ** 0.5
    if len(x) > x.shape[1]:  # a smaller root of the same covariance
        root = torch.linalg.qr(root, mode="r").R
    return Gaussian(mean, root)


def frechet(a: Gaussian, b: Gaussian) -> float:
    """Return |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a^(1/2) S_b S_a^(1/2))^(1/2)): the squared 2-Wasserstein distance, in
    squared units of the rows. At least 0; 0 for equal Gaussians.

    The trace of the root is the sum of the singular values of R_a R_b^T: nothing is squared, and if there are fewer
    examples than dimensions no d x d matrix is needed.
    """
    overlap = torch.linalg.svdvals(a.root @ b.root.T).sum()
    spread = a.root.square().sum() + b.root.square().sum() - 2 * overlap
    return max(0.0, float((a.mean - b.mean).square().sum() + spread))


@dataclass
class Frechet(Distance):
    """Settings of the squared Fréchet distance, as FID has it.

    m examples give less than all d directions their variance: values at different m, or of different networks, do not
    compare, and two samples of one distribution are not at 0.
    """

    title = "Fréchet distance"
    reads = "images, as features"

    def to_private(self, draw: Draw) -> Between:
        model = draw.model()
        private = gaussian(penultimate(model, draw.private.x))
        return lambda name, public: frechet(private, gaussian(penultimate(model, public.x)))
