"""AdaMix. Golatkar, Achille, Wang, Roth, Kearns, Soatto: Mixed Differential Privacy in Computer Vision, CVPR 2022,
arXiv:2203.11481, Algorithm 2; with its ablations (NGD, fully private) and its baseline that uses public data alone.

Losses, gradients and learning rates are of SUMS over examples, as in the paper. A rate that is null follows from the
curvature of the sum, which grows with the number of examples, so that more of them never make a step too long.
"""

import copy
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.algorithms import Facts, Frozen, Mechanism, Random, View, weighted_rows
from pubsel.algorithms.dp_sgd import (
    NOISE,
    STABLE,
    UNIT_ROW,
    Clipping,
    clip_weights,
    curvature,
    noise_of_correction,
    rate_by_noise,
    residual_at_zero,
    stable_rate,
)
from pubsel.data import Split
from pubsel.gradients.factored import BLOCK, LinearGradients
from pubsel.gradients.matrix import Engine
from pubsel.gradients.slots import SlottedGradients
from pubsel.messages import UsageError, UserError
from pubsel.models.class_names import zero_shot
from pubsel.settings.keys import MOST_EPOCHS
from pubsel.settings.schema import setting

ABOUT_RATE = (
    "learning rate of {}, for summed gradients; null: accelerated descent, whose rate follows from the number of "
    "public examples"
)
ABOUT_TEXT_MODEL, ABOUT_TEXT_WEIGHTS = "name of the backbone in open_clip", "name of its published weights, or a file"
Centre = Enum("Centre", ["zero", "start"])


def flat_weights(model: nn.Module) -> Tensor:
    """Return all weights, [p], in the order of the columns of G."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def public_gradient(gradients: Engine, public: Split, norms: list[Tensor] | None = None) -> Tensor:
    """Sum the gradients of all public examples, [p], and append their norms to `norms`."""
    parameter = next(gradients.model.parameters())
    total = torch.zeros(gradients.size, dtype=torch.float64, device=parameter.device)
    for block in gradients.blocks(public.x, public.y):
        total += block.combine(torch.ones(len(block), dtype=torch.float64, device=parameter.device))
        if norms is not None:
            norms.append(block.row_norms())
    return total.to(parameter.dtype)


def public_rate(m: int, classes: int, multi_label: bool, weight_decay: float) -> float:
    """Return the learning rate for the summed loss of m public rows of norm 1, the inverse of its largest curvature."""
    return 1 / (m * curvature(classes, multi_label) + weight_decay)


def train_on_public(view: View, public: Split, epochs: int, rate: float | None, weight_decay: float = 0.0) -> None:
    """Run full-batch gradient descent on the summed loss of `public` plus weight_decay / 2 |w - w_0|^2, in place.

    rate: None: accelerated (Nesterov 1983) at `public_rate`, with which it converges for any rows of norm 1.
    UserError if the weights stop being finite."""
    accelerated = rate is None
    rate = rate or public_rate(len(public.x), view.classes, view.multi_label, weight_decay)
    start = w = flat_weights(view.model)
    gradients = view.gradients
    if isinstance(gradients, LinearGradients) and len(public.x) <= BLOCK:
        # one block without slots, whose features do not change: their norms are computed once
        gradients = SlottedGradients(gradients, [], gradients.squares(public.x))
    for t in range(epochs):
        ahead = flat_weights(view.model)
        last, w = w, ahead - rate * (public_gradient(gradients, public) + weight_decay * (ahead - start))
        if not w.isfinite().all():
            raise UserError("training on public data diverged: lower algorithm.pretrain_rate or algorithm.finish_rate")
        ahead = w + t / (t + 3) * (w - last) if accelerated else w
        nn.utils.vector_to_parameters(ahead, view.model.parameters())
    nn.utils.vector_to_parameters(w, view.model.parameters())


def one_pass(view: View, public: Split, convexity: float, radius: float) -> None:
    """Run SGD over `public` once, one example at a time in random order, with rate 2 / (convexity (t + 1)), weights
    kept in the ball of `radius` (Algorithm 3, public phase). In place."""
    order = view.random("order", 0).permutation(len(public.x))
    for t, i in enumerate(order, start=1):
        example = Split(public.x[i : i + 1], public.y[i : i + 1])
        rate = 2 / (convexity * (t + 1))
        w = flat_weights(view.model) - rate * public_gradient(view.gradients, example)
        w *= min(1.0, radius / max(float(w.norm()), 1e-30))
        nn.utils.vector_to_parameters(w, view.model.parameters())


def subspace_around(gradient: Tensor, rank: int, source: np.random.Generator) -> tuple[Tensor, bool]:
    """Return a subspace of `rank` feature dimensions around the public gradient [C, d]: (basis, True) if the
    orthonormal basis [d, rank] spans it, (basis, False) if the basis [d, d - rank] spans what is left out.

    The public gradient has rank at most C, and C - 1 with softmax, whose residuals sum to zero. Its singular vectors
    come first, the largest first; a larger rank is filled with random directions from `source`; the paper leaves open
    which ones.
    """
    d = gradient.shape[1]
    u, s, _ = torch.linalg.svd(gradient.T, full_matrices=False)  # [d, min(c, d)]
    u = u[:, s > 1e-5 * s[0]]  # the others are rounding
    if rank <= u.shape[1]:
        return u[:, :rank], True

    # What is left out is drawn, since it is the smaller part; twice, since rounding leaves something of u in it.
    random = torch.from_numpy(source.standard_normal((d, d - rank))).to(u)
    outside = torch.linalg.qr(random - u @ (u.T @ random)).Q
    return torch.linalg.qr(outside - u @ (u.T @ outside)).Q, False


def project(rows: Tensor, basis: Tensor, inside: bool) -> Tensor:
    """Return rows [C, d] projected onto the span of `basis`, or onto its orthogonal complement."""
    part = (rows @ basis) @ basis.T
    return part if inside else rows - part


@dataclass
class OnFeatures(Clipping):
    """Common parts of methods that train a linear classifier on features of norm 1."""

    unit: bool = setting("scale features to unit norm")

    facts = Facts()  # of no task; `derived` has those of one

    @property
    def null_rate(self) -> tuple[str, float] | None:
        """Return the key of the learning rate on public data, if it is null, and the weight decay of that training."""
        return None

    def derived(self, facts: Facts) -> Self:
        algorithm = copy.copy(self)
        algorithm.facts = facts
        return algorithm

    def values(self, steps: int) -> dict[str, Any]:
        """Return the learning rate on public data, if it is null, for the record."""
        if self.null_rate is None:
            return {}
        key, decay = self.null_rate
        return {key: public_rate(self.facts.m, self.facts.classes, self.facts.multi_label, decay)}

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        if self.null_rate is not None and not self.unit:
            key = f"algorithm.{self.null_rate[0]}"
            raise UsageError(f"{key}=null is for rows of norm 1: set algorithm.unit=true, or give a number")
        return Frozen(unit=self.unit)


@dataclass
class AdaMix(OnFeatures):
    """Settings of AdaMix and its ablations."""

    pretrain_epochs: int = setting(
        "full-batch epochs on public data before private training", at_least=0, at_most=MOST_EPOCHS
    )
    pretrain_rate: float | None = setting(ABOUT_RATE.format("pretrain_epochs"), over=0)
    one_pass: float | None = setting(
        "pre-train by one pass over public data with this strong convexity (Algorithm 3); null: by pretrain_epochs",
        over=0,
    )
    public_gradient: bool = setting("add the public gradient to the private one at each step")
    clip_norm: float | None = setting("fixed clip norm; null: a quantile of the public gradients' norms", over=0)
    quantile: float = setting("the quantile of the public gradients' norms, if clip_norm is null", over=0, at_most=1)
    rank: int | None = setting("feature dimensions that the private gradient is projected onto; null: all", at_least=1)
    weight_decay: float = setting("weight decay lambda, for the summed loss", at_least=0)
    centre: Centre = setting("weights decay to zero, or to the start of private training")

    @property
    def uses_public(self) -> bool:
        starts = self.pretrain_epochs > 0 or self.one_pass is not None
        return starts or self.public_gradient or self.clip_norm is None or self.rank is not None

    @property
    def null_rate(self) -> tuple[str, float] | None:
        pretrains = self.pretrain_epochs > 0 and self.one_pass is None
        return ("pretrain_rate", 0.0) if pretrains and self.pretrain_rate is None else None

    def learning_rate(self, noise_multiplier: float, steps: int, batch_size: int, momentum: float) -> float:
        """Return the learning rate for summed gradients that follows from the noise (`rate_by_noise`), for the clip
        norm of zero weights if public gradients set it (`stretch`). After public examples, private ones correct a
        classifier (`noise_of_correction`)."""
        deviation, facts = NOISE, self.facts
        if facts.m > 0:
            n_mu = batch_size * math.sqrt(steps) / noise_multiplier if noise_multiplier > 0 else math.inf
            deviation = noise_of_correction(n_mu, facts.m, self.rank or facts.d, facts.classes)
        largest = self.largest_curvature(batch_size)
        return rate_by_noise(UNIT_ROW, self.first_bound, noise_multiplier, steps, 1, momentum, largest, deviation)

    def stretch(self, view: View, bound: float) -> float:
        """Return the factor of the learning rate with clip norm `bound`, if the rate follows from the noise: the noise
        is in proportion to the clip norm. At most what is stable."""
        if view.rate is None:
            return 1.0
        stable = stable_rate(0.0, self.largest_curvature(view.batch_size)) / view.rate
        return min(self.first_bound / bound, max(1.0, stable))

    @property
    def first_bound(self) -> float:
        """Return the clip norm, or, if public gradients set it, the norm of all gradients at zero weights."""
        return self.clip_norm or UNIT_ROW * residual_at_zero(self.facts.classes, self.facts.multi_label)

    def largest_curvature(self, batch_size: int) -> float:
        """Return the largest curvature of the loss summed over a batch, and over public examples if their gradient is
        added."""
        summed = batch_size + (self.facts.m if self.public_gradient else 0)
        return STABLE * summed * curvature(self.facts.classes, self.facts.multi_label) + self.weight_decay

    def numbers(self, view: View) -> int:
        return 4 * view.gradients.size

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        if self.rank is not None and self.rank >= d:
            raise UsageError(f"algorithm.rank={self.rank} projects nothing out of {d} features: lower it, or set null")
        return super().frozen(public, d, random)

    def check(self, view: View) -> None:
        of_step = self.public_gradient or self.clip_norm is None or self.rank is not None
        if of_step or self.pretrain_epochs or self.one_pass is not None:
            view.labelled(self.name)

    def pretrain(self, view: View) -> None:
        if self.one_pass is not None:
            one_pass(view, view.labelled(self.name), self.one_pass, radius=1e3)
        elif self.pretrain_epochs:
            train_on_public(view, view.labelled(self.name), self.pretrain_epochs, self.pretrain_rate)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return DP-SGD's mechanism, whose mean is projected and completed by what public data says.

        The paper projects before it adds noise. An isotropic Gaussian projected is the same as Gaussian noise on the
        projected gradient, so the projection is left to `decode`, and cannot enlarge the release."""
        # weight decay is of the summed loss, towards the centre
        w = flat_weights(view.model)
        centred = w - view.start if self.centre == Centre.start and view.start is not None else w
        shift = self.weight_decay * centred
        basis: tuple[Tensor, bool] | None = None
        bound = self.clip_norm

        # What public data says at the current weights: the clip norm, the subspace, a gradient.
        if self.public_gradient or bound is None or self.rank is not None:
            norms: list[Tensor] = []
            gradient = public_gradient(view.gradients, view.labelled(self.name), norms)
            if bound is None:
                bound = max(float(torch.cat(norms).quantile(self.quantile)), 1e-12)
            weight = weight_of(view)
            if self.rank is not None and self.rank < weight.shape[1]:
                whole = gradient[: weight.numel()].view_as(weight)
                basis = subspace_around(whole, self.rank, view.random("directions", step))
            if self.public_gradient:
                shift = shift + gradient

        def projected(rows: Tensor) -> Tensor:  # [..., p]; the bias stays as it is
            if basis is None:
                return rows
            c, d = weight_of(view).shape
            weights = project(rows[..., : c * d].unflatten(-1, (c, d)), *basis)
            return torch.cat([weights.flatten(-2), rows[..., c * d :]], dim=-1)

        # clipped and summed as by DP-SGD: what public data adds is added after the noise
        plain, factor = self.clipped(view, bound), self.stretch(view, bound)
        return plain._replace(
            decode=lambda mean: factor * (projected(plain.decode(mean * view.batch_size)) + shift),
            contributions=lambda gradients: projected(weighted_rows(gradients, clip_weights(gradients, bound))),
        )


def weight_of(view: View) -> Tensor:
    """Return the weights [C, d] of the linear classifier."""
    return next(view.model.parameters()).detach()


@dataclass
class AdaMixCLIP(AdaMix):
    """AdaMix that starts from CLIP's embeddings of the names of the classes (Section 3.3), before it sees an image."""

    class_names: list[str] | None = setting("names of the classes, in order; null: those that the private data has")
    text_model: str | None = setting(f"{ABOUT_TEXT_MODEL}; null: start from zero")
    text_weights: str | None = setting(ABOUT_TEXT_WEIGHTS)
    text_scale: float = setting("beta, the norm of the weights of each class", over=0)

    def pretrain(self, view: View) -> None:
        if self.text_model is not None:
            weight, names = weight_of(view), self.class_names or self.facts.names
            (classes, features), text = weight.shape, (self.text_model, self.text_weights, self.text_scale)
            weight.copy_(zero_shot(classes, features, names, *text))
        super().pretrain(view)


@dataclass
class OnlyPublic(OnFeatures):
    """Settings of training on public data only: private examples are not read, so the guarantee is epsilon 0."""

    pretrain_epochs: int = setting("full-batch epochs on public data", at_least=1, at_most=MOST_EPOCHS)
    pretrain_rate: float | None = setting(ABOUT_RATE.format("pretrain_epochs"), over=0)
    weight_decay: float = setting("weight decay lambda, for the summed loss", at_least=0)

    def sensitivity(self) -> float:
        """Return 0: no private example is read."""
        return 0.0

    @property
    def null_rate(self) -> tuple[str, float] | None:
        return ("pretrain_rate", self.weight_decay) if self.pretrain_rate is None else None

    def pretrain(self, view: View) -> None:
        train_on_public(view, view.labelled(self.name), self.pretrain_epochs, self.pretrain_rate, self.weight_decay)
