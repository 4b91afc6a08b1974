"""DP mirror descent in its first-order form. Amid, Ganesh, Mathews, Ramaswamy, Song, Steinke, Suriyakumar, Thakkar,
Thakurta: Public Data-Assisted Mirror Descent for Private Model Training, ICML 2022, arXiv:2112.00193, Section 5:
the noisy private gradient is mixed with the public one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pubsel.algorithms import Mechanism, View, needed
from pubsel.algorithms.adamix import public_gradient
from pubsel.algorithms.dp_sgd import Clipping
from pubsel.data import Split
from pubsel.files import sent
from pubsel.settings.keys import ABOUT_LABELS, Labels
from pubsel.settings.schema import setting


def alpha(step: int, steps: int, cycle: float | None, constant: float) -> float:
    """Return the weight of the private gradient at step 0, ..., steps - 1: cos(pi t / (cycle T)), or `constant`."""
    return constant if cycle is None else math.cos(math.pi * step / (cycle * steps))


def mean_public_gradient(view: View, public: Split, size: int, draw: int) -> Tensor:
    """Return the mean gradient of a batch of public examples, [p]; draw: another one for another batch."""
    order = view.random("public batch", draw).permutation(len(public.y))
    chosen = sent(torch.from_numpy(order[:size]), public.y.device)
    return public_gradient(view.gradients, Split(public.x[chosen], public.y[chosen])) / len(chosen)


@dataclass
class DPMD(Clipping):
    """Settings of DP-MD."""

    clip_norm: float = setting("bound C on the L2 norm of a private example's gradient", at_least=1e-12)
    cycle: float | None = setting(
        "K of the weight of the private gradient, alpha_t = cos(pi t / (K T)), which is never negative for K >= 2; "
        "null: alpha",
        at_least=2,
    )
    alpha: float = setting("the weight if cycle is null", over=0, at_most=1)
    public_batch: int = setting("public examples a step", at_least=1)
    fresh: bool = setting("draw new public examples at each step; false: always the same ones")
    labels: Labels = setting(ABOUT_LABELS)

    def check(self, view: View) -> None:
        view.labels(self.labels, 0, self.name)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD, of sensitivity 1; the public gradient is added after the noise."""
        x = needed(view.public, self.name).x
        y = view.labels(self.labels, 0, self.name)
        public = mean_public_gradient(view, Split(x, y), self.public_batch, step if self.fresh else 0)  # [p]

        weight = alpha(step, view.steps, self.cycle, self.alpha)
        plain = self.clipped(view, self.clip_norm)
        return plain._replace(decode=lambda mean: weight * plain.decode(mean) + (1 - weight) * public)
