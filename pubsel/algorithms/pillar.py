"""PILLAR. Pinto, Hu, Yang, Sanyal: PILLAR: How to make semi-private learning more effective, SaTML 2024,
arXiv:2306.03962, Algorithm 1, with DP-SGD as in its experiments; and the projections that it is compared with.

All are DP-SGD for a linear classifier on projected features; they differ in where the projection comes from.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler
from sklearn.random_projection import GaussianRandomProjection
from torch import Tensor

from pubsel.algorithms import FirstRelease, Frozen, Mechanism, Random, View, needed
from pubsel.algorithms.dp_sgd import FixedClipping
from pubsel.data import Split
from pubsel.gradients.matrix import clipped_rows, row_norms
from pubsel.gradients.subspace import from_triangle, triangle
from pubsel.messages import UsageError
from pubsel.settings.schema import setting

WIDE = 4097  # features, from which on only the top components are computed
Projection = Enum("Projection", ["pca", "jl", "dp_pca", "scale"])


def public_pca(x: Tensor, k: int) -> Frozen:
    """Project on the top k principal components of public features x [m, d] (Algorithm 1), which are standardised
    before, as in the authors' code; the paper does not say so.

    UsageError if x, standardised, has rank less than k.
    """
    if k > min(x.shape):
        raise UsageError(f"algorithm.k={k}: {len(x)} public examples with {x.shape[1]} features have no {k} components")

    scaler = StandardScaler().fit(x.double().numpy())
    # the covariance of wide features, such as 15,552 of scattering, takes minutes to decompose
    wide = x.shape[1] >= WIDE and k < min(x.shape)
    pca = PCA(k, svd_solver="arpack" if wide else "covariance_eigh", random_state=0)
    pca.fit(scaler.transform(x.double().numpy()))

    variances = pca.explained_variance_
    if not variances[-1] > 1e-10 * variances[0]:
        rank = int((variances > 1e-10 * variances[0]).sum())
        raise UsageError(f"algorithm.k={k}: the public features have rank {rank}: lower algorithm.k or raise pair.m")

    # One matrix for both steps: the scaling goes into the directions.
    directions = pca.components_.T / scaler.scale_[:, None]  # [d, k]; PCA's mean is 0
    return Frozen(torch.from_numpy(scaler.mean_).float(), torch.from_numpy(directions).float())


def random_projection(d: int, k: int, seed: int) -> Frozen:
    """Return a Gaussian random projection to k dimensions (Nguyen, Ullman, Zakynthinou 2020), which reads no data."""
    projection = GaussianRandomProjection(k, random_state=seed).fit(np.zeros((1, d)))
    return Frozen(projection=torch.from_numpy(projection.components_.T).float())


def noisy_covariance(public: Tensor, k: int) -> FirstRelease:
    """Return the top k eigenvectors of a noisy second-moment matrix (Dwork, Talwar, Thakurta, Zhang: Analyze Gauss,
    STOC 2014).

    Private features are standardised with the mean and deviation of the public ones [m, d], and clipped to their median
    norm R. The release is the `triangle` of sum_i x_i x_i^T / R^2, added in float64, whose norm is the matrix's
    Frobenius norm: one example more or less moves it by |x_i|^2 / R^2 <= 1. UsageError if R is 0 or not finite.
    """
    d = public.shape[1]
    scaler = StandardScaler().fit(public.double().numpy())
    shift = torch.from_numpy(scaler.mean_).float()
    scale = torch.from_numpy(scaler.scale_).float()

    bound = float(row_norms((public - shift) / scale).median())
    if not 0 < bound < math.inf:
        raise UsageError(
            f"pair.public: the median norm of its standardised features is {bound:g}: take other public data"
        )

    def sums(x: Tensor) -> Tensor:  # [n, d] -> [d (d + 1) / 2]
        x = clipped_rows((x - shift) / scale, bound)
        return triangle(x.T @ x)

    def decode(noisy: Tensor) -> Frozen:
        top = torch.linalg.eigh(from_triangle(noisy, d)).eigenvectors[:, -k:].flip(1)  # [d, k]
        return Frozen(shift, (top / scale[:, None]).float())

    return FirstRelease(sums, decode, 1.0, d * (d + 1) // 2)


@dataclass
class Pillar(FixedClipping):
    """Settings of PILLAR, and of DP-SGD after a random projection (jl), after a private PCA (dp_pca), and on features
    that public ones standardise (dp_sgd_standardised)."""

    projection: Projection = setting(
        "pca: PCA of the public features (PILLAR); jl: random; dp_pca: private PCA of the private features; scale: "
        "none, public features standardise all"
    )
    k: int = setting("dimensions after the projection; of no effect with scale", at_least=1)
    share: float = setting("dp_pca: share of epsilon and delta that the PCA spends", at_least=0, below=1)

    @property
    def directions(self) -> int:
        return self.k

    @property
    def uses_public(self) -> bool:
        """Return True except for jl; dp_pca takes mean, deviation and clip norm from public features."""
        return self.projection != Projection.jl

    @property
    def first_share(self) -> float:
        """Return the share of epsilon and delta for the release before training."""
        return self.share if self.projection == Projection.dp_pca else 0.0

    def numbers(self, view: View) -> int:
        return 0

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen | FirstRelease:
        # PILLAR without its PCA: its authors' code does so for the methods that it compares with
        if self.projection == Projection.scale:
            scaler = StandardScaler().fit(needed(public, self.name).x.double().numpy())
            scale = torch.from_numpy(1 / scaler.scale_).float().diag()
            return Frozen(torch.from_numpy(scaler.mean_).float(), scale)
        if self.k > d:
            raise UsageError(f"algorithm.k={self.k} is more than the {d} features: lower algorithm.k")

        if self.projection == Projection.jl:
            return random_projection(d, self.k, int(random("projection", 0).integers(2**31)))
        release = public_pca if self.projection == Projection.pca else noisy_covariance
        return release(needed(public, self.name).x, self.k)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD on features that are projected already: by public data, at random, or by a
        release before it."""
        return self.clipped(view, self.clip_norm)
