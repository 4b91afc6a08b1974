"""The private labels that the whitened head (`algorithms.whitened_head`) would leave unexplained, with a candidate
as its public data, or with none. pubsel's own measure: no paper.

The head maps features to rows z [r] of norm ROW, among them the constant feature of the bias, by a whitening that the
candidate defines. From zero weights it then descends as far as the noise allows. Let the residual r_i [C] be the label
of example i less what zero weights say: e_y - 1/C of C classes, (y - 1/2) / L of L labels. To second order in weights W
[C, r], the mean loss falls below that of zero weights by

    gain(W) = tr(W G^T) - h/2 tr(W M W^T),    G = 1/n sum_i r_i z_i^T,    M = 1/n sum_i z_i z_i^T,

with h = 1/C, or 1 / (4 L): it depends on first and second moments of the private rows, and on nothing else.

**Signal.** Let u_j be the directions of M, with second moments lambda_j. Small steps whose learning rates add up to tau
lead to W u_j = (1 - e^(-h tau lambda_j)) / (h lambda_j) G u_j: a direction is learned if lambda_j is large against 1 /
(h tau).

**Noise.** The noise of all steps gives each weight the variance v if nothing corrects it. Descent does: along u_j,
later steps undo the noise of earlier ones, and v psi(2 h tau lambda_j) is left, with psi(x) = (1 - e^-x) / x. So the
noise costs h/2 (C - 1) v sum_j lambda_j psi(2 h tau lambda_j) of the gain, with L in place of C - 1 for labels.

**Budget.** With learning rate eta, momentum beta and T steps, tau = CLIP T eta / (1 - beta), since each gradient at
zero weights is clipped to that share of its norm, and sqrt(v) = T eta bound / ((1 - beta) n mu). The head takes the eta
that makes v ROW^2 a constant (NOISE), so tau grows with n mu. If a candidate's whitening makes private rows alike, one
lambda_j, that of their mean, is large, and the others are too small to be learned, or to have their noise corrected.

G, M and u_j are of one half of the private examples; gain and cost are taken with the moments of the other half, and
the other way round, so that weights which fit chance alone gain nothing. The distance is 1 - (gain - cost) / (|r|^2 /
(2 h)). The divisor is the gain of weights that explain each label. So 0 means that all is explained, 1 that nothing is
learned; it is more than 1 if the noise costs more than is learned.

What this leaves out: far from zero weights the loss is no parabola, and fewer gradients are clipped; momentum needs
steps to build up. It reads private images and labels, through sums. It is NOT differentially private: it is computed
without noise.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.algorithms import Facts, FirstRelease
from pubsel.algorithms.dp_sgd import residual_at_zero
from pubsel.algorithms.whitened_head import MOMENTUM, WhitenedHead
from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import class_numbers, penultimate
from pubsel.messages import UsageError
from pubsel.privacy.accountant import gaussian_mu
from pubsel.privacy.randomness import stream
from pubsel.settings.keys import PublicLabels
from pubsel.settings.schema import setting


class Descent(NamedTuple):
    """The progress of a head. h: curvature of the loss in a logit at zero weights; reach: tau, the sum of its learning
    rates; noise: sqrt(v), the deviation of a weight if nothing corrects it."""

    h: float
    reach: float
    noise: float


class Learned(NamedTuple):
    """The result of a descent. directions: u_j [r, q], those in which rows vary; weights: W u_j, [C, q]; left: the
    share of its variance that the noise of weights keeps in each direction, [q]; it is 1 in all others."""

    directions: Tensor
    weights: Tensor
    left: Tensor


def learned(z: Tensor, residuals: Tensor, descent: Descent) -> Learned:
    """Return where a descent on rows z [n, r] with residuals [n, C] leads, all float64."""
    # second moments [q] and their directions [r, q], without those in which all rows are zero
    n, r = z.shape
    values, vectors = torch.linalg.eigh(z @ z.T / n if n < r else z.T @ z / n)  # the smaller of the two
    vary = values > 1e-10 * values[-1]
    values, vectors = values[vary], vectors[:, vary]
    directions = z.T @ vectors / (n * values).sqrt() if n < r else vectors
    way = descent.h * descent.reach * values
    gradients = residuals.T @ (z @ directions) / len(z)
    return Learned(directions, gradients * _mean_decay(way) * descent.reach, _mean_decay(2 * way))


def _mean_decay(x: Tensor) -> Tensor:
    """Return psi(x) = (1 - e^-x) / x of positive numbers."""
    return -torch.expm1(-x) / x


def net_gain(head: Learned, z: Tensor, residuals: Tensor, descent: Descent, noisy: int) -> float:
    """Return by how much what is learned lowers the mean loss of examples with rows z [n, r] and residuals [n, C], less
    what its noise costs. noisy: how many of the logits' noises change the loss."""
    along = z @ head.directions  # [n, q]
    logits = along @ head.weights.T
    gain = (residuals * logits).sum(1).mean() - descent.h / 2 * logits.square().sum(1).mean()

    corrected = along.square().mean(0) @ (1 - head.left)
    variance = descent.noise**2 * (z.square().sum(1).mean() - corrected)  # of a logit
    return float(gain - descent.h / 2 * noisy * variance)


def residuals_of(y: Tensor, classes: int) -> Tensor:
    """Return what zero weights leave of labels y, classes [n] or 0/1 [n, L]: float64 [n, C]."""
    if y.dim() == 2:
        return (y.double() - 0.5) / classes
    return nn.functional.one_hot(y.long(), classes).double() - 1 / classes


def descent_of(head: WhitenedHead) -> Descent:
    """Return how far a head gets whose task is known (`WhitenedHead.derived`)."""
    n, classes, several, mu = head.facts.n, head.facts.classes, head.facts.multi_label, head.facts.mu
    way = head.steps * head.rate(n, head.steps) / (1 - MOMENTUM)
    noise = way * head.bound / (n * mu)
    return Descent(1 / (4 * classes) if several else 1 / classes, head.clip * way, noise)


@dataclass
class Whitening(Distance):
    """Settings of what the whitened head leaves unexplained."""

    epsilon: float = setting("epsilon of the training that is planned; inf: without noise", over=0, infinite=True)
    delta: float = setting("delta of the training that is planned", over=0, below=1)
    n: int | None = setting("private examples that will be trained on; null: all", at_least=1)
    private_m: float = setting("private examples that are looked at, at most; inf: all", at_least=2, infinite=True)

    title = "Whitening distance"
    reads = "images, as features, and labels, through sums"
    without = True

    def private_examples(self, n: int) -> int:
        return int(min(n, self.private_m))

    def to_private(self, draw: Draw) -> Between:
        # the private side is the same for all candidates
        model = draw.model()
        x = penultimate(model, draw.private.x)
        class_numbers("the private data", draw.private.y, self.name)  # labels of two classes, or an error
        residuals = residuals_of(draw.private.y, draw.classes)
        halves = torch.from_numpy(draw.random.permutation(len(x))).chunk(2)

        def random(purpose: str, step: int) -> np.random.Generator:
            return stream(draw.key, purpose, step)

        several, mu = draw.private.y.dim() == 2, math.inf
        if math.isfinite(self.epsilon):
            mu = gaussian_mu(self.epsilon, self.delta)

        def between(name: str, public: Split) -> float:
            features = penultimate(model, public.x) if len(public.x) else x[:0]
            facts = Facts(
                self.n or draw.n, x.shape[1], len(features), draw.classes, several, mu, public=features.float()
            )
            head = WhitenedHead("whitened_head", k=None, public_labels=PublicLabels.none).derived(facts)
            try:
                frozen = head.frozen(Split(features, public.y) if len(features) else None, x.shape[1], random)
            except UsageError:
                same = f"distance=whitening: the features of {name} are the same for all examples: leave it out"
                raise UsageError(same) from None
            if isinstance(frozen, FirstRelease):  # the mean of private rows, here without noise
                frozen = frozen.decode(frozen.clipped_sum(x.float()))
            z = nn.functional.pad(frozen(x.float()).double(), (0, 1), value=1.0)  # with the feature of the bias
            return unexplained(z, residuals, halves, descent_of(head), several)

        return between


def unexplained(z: Tensor, residuals: Tensor, halves: tuple[Tensor, ...], descent: Descent, multi_label: bool) -> float:
    """Return the distance, from all rows z [n, r] with residuals [n, C], and the places of two halves of them."""
    classes = residuals.shape[1]
    noisy = classes if multi_label else classes - 1  # what all classes have in common changes nothing
    gains = []
    for here, there in (halves, halves[::-1]):
        weights = learned(z[here], residuals[here], descent)
        gains.append(net_gain(weights, z[there], residuals[there], descent, noisy))

    most = residual_at_zero(classes, multi_label) ** 2 / (2 * descent.h)
    return 1 - sum(gains) / len(gains) / most
