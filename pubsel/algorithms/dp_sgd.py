"""DP-SGD. Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy,
CCS 2016, arXiv:1607.00133, Algorithm 1. GEP's tables call it GP."""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from pubsel.algorithms import Algorithm, Mechanism, View, sum_of_rows
from pubsel.gradients.matrix import GradientMatrix, clip_factors
from pubsel.settings.schema import setting

Clip = Enum("Clip", ["norm", "automatic"])
ABOUT_CLIP = (
    "norm: rows of gradients longer than the clip norm are scaled to it; automatic: each row is divided by its norm + "
    "0.01, times the clip norm"
)
GAMMA = 0.01  # that automatic clipping adds to a norm
NOISE = 1.2  # deviation of a logit's noise after all steps, if momentum needed no steps to build up
CORRECTION = 0.6  # the same, if a public classifier is corrected with a large budget
UNIT_ROW = math.sqrt(2)  # norm of a row of norm 1 with the constant feature of the bias
STABLE = 1.1  # curvature over its bound: at the bound gradient descent would oscillate


def unit_weights(norms: Tensor, bound: float, clip: Clip = Clip.norm) -> Tensor:
    """Return the weights, float64 [n], with which rows of these norms have L2 norm at most 1: each is clipped to
    `bound` and divided by it.

    automatic: it is divided by its norm + GAMMA (Bu, Wang, Zha, Karypis: Automatic Clipping, NeurIPS 2023,
    arXiv:2206.07136; Yang, Zhang, Chen, Liu, arXiv:2206.13033). As |g| / (|g| + GAMMA) < 1, the norm is below 1,
    whatever g is. A norm that is read low by 1e-6 of it could bring a long row above 1: the margin of 1e-5 is that of
    `clip_factors`.
    """
    if clip == Clip.automatic:
        return (1 - 1e-5) / (norms.double() + GAMMA)
    return clip_factors(norms, bound) / bound


def clip_weights(
    gradients: GradientMatrix, bound: float, columns: Tensor | None = None, clip: Clip = Clip.norm
) -> Tensor:
    """Return the `unit_weights` [n] of the rows of G [n, p], their columns times `columns` [p] if given."""
    norms = gradients.row_norms() if columns is None else gradients.scaled_norms(columns)
    return unit_weights(norms, bound, clip)


def clipped_sum(
    gradients: GradientMatrix, bound: float, columns: Tensor | None = None, clip: Clip = Clip.norm
) -> Tensor:
    """Sum the rows of G [n, p], each clipped to L2 norm `bound` and divided by it -> float64 [p]."""
    return sum_of_rows(gradients, clip_weights(gradients, bound, columns, clip), columns)


def curvature(classes: int, multi_label: bool) -> float:
    """Return the largest curvature of the loss of one row of norm 1. In the logits, that of cross-entropy is at most
    1/2, since it is a variance of their direction; that of one of L labels, whose mean is taken, at most 1/4. In the
    weights it is multiplied by the squared norm of the row, which is 2 with the bias."""
    return UNIT_ROW**2 / (4 * classes if multi_label else 2)


def residual_at_zero(classes: int, multi_label: bool) -> float:
    """Return the norm of the residual of an example at zero weights, p - y: sqrt(1 - 1/C) with probabilities 1/C of C
    classes; with L labels, whose loss is their mean, L numbers of 1 / (2 L)."""
    return 1 / (2 * math.sqrt(classes)) if multi_label else math.sqrt(1 - 1 / classes)


def noise_of_correction(n_mu: float, m: int, k: int, classes: int) -> float:
    """Return the deviation of the noise in a logit after all steps that correct a public classifier.

    The more it knows, the less its correction is worth. In one of k directions, the m / C public examples of a class,
    with variance 1 / k each, give its mean with variance C / (m k); a release of the sum of the private ones gives it
    with variance (C / (n mu))^2. The noise is CORRECTION times the root of the share that the second has of the
    precision of both."""
    public_over_private = m * k * classes / n_mu**2  # of the precisions
    return CORRECTION / math.sqrt(1 + public_over_private)


def stable_rate(momentum: float, curvature: float) -> float:
    """Return the largest learning rate at which gradient descent is stable without noise."""
    return 2 * (1 + momentum) / curvature


def steps_by_noise(
    row: float, bound: float, mu: float, batch_size: int, momentum: float, curvature: float, deviation: float = NOISE
) -> float:
    """Return the number of full-batch steps from which on the rate of `rate_by_noise` is stable, if mu is the budget of
    all of them.

    T steps then have a noise multiplier of sqrt(T) / mu each, so that the rate times T is the same whatever T is:
    deviation (1 - momentum) batch_size mu / (row bound). That is how far the noise lets gradient descent go. If the
    rate of T steps is not stable, more steps of the largest stable rate go as far, for the same budget and noise.
    """
    reach = deviation * (1 - momentum) * batch_size * mu / (row * bound)
    return reach / stable_rate(momentum, curvature)


def rate_by_noise(
    row: float,
    bound: float,
    noise_multiplier: float,
    steps: int,
    batch_size: int,
    momentum: float,
    curvature: float,
    deviation: float = NOISE,
) -> float:
    """Return the learning rate of a linear classifier for the mean gradient of a batch, clipped to `bound`.

    With it, the noise of all T steps adds up to `deviation` in a logit, whatever the task: a step moves weights by the
    rate times noise of deviation noise_multiplier bound / batch_size, momentum multiplies it by 1 / (1 - momentum), and
    a row of norm `row`, the bias's constant feature included, sees sqrt(T) times that. It is at most the largest rate
    at which gradient descent is stable without noise, at this curvature.
    """
    stable = stable_rate(momentum, curvature)
    noise = noise_by_rate(row, bound, noise_multiplier, steps, batch_size, momentum)
    return min(deviation / noise, stable) if noise > 0 else stable


def noise_by_rate(
    row: float, bound: float, noise_multiplier: float, steps: int, batch_size: int, momentum: float
) -> float:
    """Return the deviation of the noise of all steps in a logit, over the learning rate (`rate_by_noise`)."""
    return noise_multiplier * bound * row * math.sqrt(steps) / ((1 - momentum) * batch_size)


@dataclass
class Clipping(Algorithm):
    """Common parts of methods that sum rows clipped to a bound, which is fixed or from public data."""

    def sensitivity(self) -> float:
        """Return 1. Rows are clipped to the bound and divided by it: one row more or less adds or removes one vector of
        norm at most 1. The bound depends on no private example."""
        return 1.0

    def clipped(
        self, view: View, bound: float | Tensor, columns: Tensor | None = None, clip: Clip = Clip.norm
    ) -> Mechanism:
        """Return the mechanism of DP-SGD: rows of G [n, p] clipped to `bound`, after multiplication by `columns` [p] if
        these are given; decoded to the mean of the clipped rows."""
        tau = torch.as_tensor(bound, dtype=torch.float64, device="cpu")
        return self.row_weighted(
            view,
            lambda gradients: clip_weights(gradients, tau.item(), columns, clip),
            lambda mean: mean * tau.item(),
            columns,
            shared=(tau,) if columns is None else (tau, columns),
        )


@dataclass
class FixedClipping(Clipping):
    """Common parts of DP-SGD and methods that change only the features: one clip norm for all steps."""

    clip_norm: float = setting("bound C on the L2 norm of an example's gradient", at_least=1e-12)

    def learning_rate(self, noise_multiplier: float, steps: int, batch_size: int, momentum: float) -> float:
        """Return the learning rate that follows from the noise for a linear classifier on rows of norm 1
        (`rate_by_noise`): cross-entropy has a `curvature` of at most 1."""
        return rate_by_noise(UNIT_ROW, self.clip_norm, noise_multiplier, steps, batch_size, momentum, STABLE)


@dataclass
class DPSGD(FixedClipping):
    """Settings of DP-SGD."""

    clip: Clip = setting(ABOUT_CLIP, default=Clip.norm)

    uses_public = False

    def mechanism(self, view: View, step: int) -> Mechanism:
        return self.clipped(view, self.clip_norm, clip=self.clip)
