"""What the whitened head (`algorithms.whitened_head`) would leave unexplained of the private labels, with a candidate
as its public data, or with none. pubsel's own measure: no paper.

The head maps features to rows z [r] of norm ROW, among them the constant feature of the bias, by a whitening that the
candidate defines. From zero weights it then descends as far as the noise allows. Let the residual r_i [C] be the label
of example i less what zero weights say: e_y - 1/C of C classes, (y - 1/2) / L of L labels. To second order in weights W
[C, r], the mean loss falls below that of zero weights by

    gain(W) = tr(W G^T) - h/2 tr(W M W^T),    G = 1/n sum_i r_i z_i^T,    M = 1/n sum_i z_i z_i^T,

with h = 1/C, or 1 / (4 L): it depends on first and second moments of the private rows, and on nothing else. Small steps
whose learning rates add up to tau lead to

    W = G U diag((1 - e^(-h tau lambda_j)) / (h lambda_j)) U^T,    M = U diag(lambda) U^T:

direction j is learned if its second moment lambda_j is large against 1 / (h tau). The noise sets tau. With learning
rate eta, momentum beta and T steps, tau = CLIP T eta / (1 - beta), since each gradient at zero weights is clipped to
that share of its norm. The noise of a logit has the deviation s = T eta bound ROW / ((1 - beta) n mu), and costs h/2 (C
- 1) s^2 of the gain, or h/2 L s^2. The head takes the eta that makes s a constant (NOISE), so tau grows with n mu. If
the candidate's whitening makes private rows alike, one lambda_j, that of their mean, is large, and the others are too
small to be learned.

W is computed from one half of the private examples and its gain from the moments of the other half, and the other way
round, so that weights which fit chance alone gain nothing. The distance is 1 - gain / (|r|^2 / (2 h)). The divisor is
the gain of weights that explain each label. So 0 means that all is explained, 1 that nothing is learned; it is more
than 1 if the noise costs more than is learned.

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

from pubsel.algorithms import Facts
from pubsel.algorithms.whitened_head import MOMENTUM, ROW, WhitenedHead, residual_at_zero
from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import penultimate
from pubsel.messages import UsageError
from pubsel.privacy.accountant import gaussian_mu
from pubsel.privacy.randomness import stream
from pubsel.settings.keys import PublicLabels
from pubsel.settings.schema import setting


class Descent(NamedTuple):
    """How far a head gets. h: curvature of the loss in a logit at zero weights; reach: tau, the sum of its learning
    rates; noise: s, the deviation of a logit."""

    h: float
    reach: float
    noise: float


def weights(z: Tensor, residuals: Tensor, descent: Descent) -> Tensor:
    """Return W [C, r] after a descent without noise on rows z [n, r] with residuals [n, C], all float64."""
    n, r = z.shape

    def share(values: Tensor) -> Tensor:  # of the gradient in a direction with this second moment
        way = descent.h * descent.reach * values.clamp(min=0)
        return torch.where(way > 1e-9, -torch.expm1(-way) / way, 1.0) * descent.reach

    # The nonzero eigenvalues of z^T z are those of z z^T: the smaller of the two is decomposed.
    if n < r:
        values, vectors = torch.linalg.eigh(z @ z.T / n)
        return (residuals.T / n @ vectors * share(values)) @ (vectors.T @ z)
    values, vectors = torch.linalg.eigh(z.T @ z / n)
    return (residuals.T @ z / n @ vectors * share(values)) @ vectors.T


def gain(weight: Tensor, z: Tensor, residuals: Tensor, h: float) -> float:
    """Return by how much weights [C, r] lower the mean loss of examples with rows z [n, r] and residuals [n, C]."""
    logits = z @ weight.T
    return float((residuals * logits).sum(1).mean() - h / 2 * logits.square().sum(1).mean())


def residuals_of(y: Tensor, classes: int) -> Tensor:
    """Return what zero weights leave of labels y, classes [n] or 0/1 [n, L]: float64 [n, C]."""
    if y.dim() == 2:
        return (y.double() - 0.5) / classes
    return nn.functional.one_hot(y.long(), classes).double() - 1 / classes


def descent_of(head: WhitenedHead) -> Descent:
    """Return how far a head gets whose task is known (`WhitenedHead.derived`)."""
    n, classes, several, mu = head.facts.n, head.facts.classes, head.facts.multi_label, head.facts.mu
    way = head.steps * head.rate(n, head.steps) / (1 - MOMENTUM)
    noise = way * head.clip_norm(classes, several) * ROW / (n * mu)
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
        model = draw.model()
        x = penultimate(model, draw.private.x)
        residuals = residuals_of(draw.private.y, draw.classes)
        halves = torch.from_numpy(draw.random.permutation(len(x))).chunk(2)

        def random(purpose: str, step: int) -> np.random.Generator:
            return stream(draw.key, purpose, step)

        several, mu = draw.private.y.dim() == 2, math.inf
        if math.isfinite(self.epsilon):
            mu = gaussian_mu(self.epsilon, self.delta)

        def between(name: str, public: Split) -> float:
            features = penultimate(model, public.x) if len(public.x) else x[:0]
            facts = Facts(self.n or draw.n, x.shape[1], len(features), draw.classes, several, mu)
            head = WhitenedHead("whitened_head", k=None, public_labels=PublicLabels.none).derived(facts)
            try:
                frozen = head.frozen(Split(features, public.y) if len(features) else None, x.shape[1], random)
            except UsageError:
                same = f"distance=whitening: the features of {name} are the same for all examples: leave it out"
                raise UsageError(same) from None
            z = nn.functional.pad(frozen(x.float()).double(), (0, 1), value=1.0)  # with the feature of the bias
            return unexplained(z, residuals, halves, descent_of(head), several)

        return between


def unexplained(z: Tensor, residuals: Tensor, halves: tuple[Tensor, ...], descent: Descent, multi_label: bool) -> float:
    """Return the distance, from all rows z [n, r] with residuals [n, C], and the places of two halves of them."""
    classes = residuals.shape[1]
    gains = []
    for here, there in (halves, halves[::-1]):
        weight = weights(z[here], residuals[here], descent)
        gains.append(gain(weight, z[there], residuals[there], descent.h))

    noisy = classes if multi_label else classes - 1  # logits whose noise changes the loss
    cost = descent.h / 2 * noisy * descent.noise**2
    most = residual_at_zero(classes, multi_label) ** 2 / (2 * descent.h)
    return 1 - (sum(gains) / len(gains) - cost) / most
