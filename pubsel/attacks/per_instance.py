"""Per-instance privacy loss: what a training really risked of each private example, along the weights that it took.

Wang: Per-instance Differential Privacy, 2019, arXiv:1707.07708; for full batches Golatkar et al.: AdaMix, CVPR 2022,
Proposition 14 and Figure 3. An example whose clipped contribution at step t has norm c_t, under noise of deviation s,
loses what a Gaussian mechanism with sensitivity c_t would, not with the worst-case sensitivity Delta:

- full batches: the steps compose to mu_i = sqrt(sum_t c_t^2) / s, whose (epsilon, delta) is exact. Both formulas of
  Proposition 14 are this: the second one with the clipped and projected gradient as c_t and s = sigma tau_t.
- Poisson samples at rate q: the Renyi DP of a sampled Gaussian with noise multiplier s / c_t adds up over steps, as in
  Feldman and Zrnic: Individual Privacy Accounting via a Renyi Filter, NeurIPS 2021, arXiv:2008.11193, and Yu, Kamath,
  Kulkarni, Liu, Yin, Zhang: Individual Privacy Accounting for DP-SGD, TMLR 2023, arXiv:2206.02617. c_t counts at every
  step, sampled or not. Renyi DP reads up to 15 % high, so the worst case caps it.

What it is not: c_t depends on the weights, which are random. A guarantee for an example would need a bound of c_t for
all weights that might have come (the proof of Proposition 14 composes as if the weights were fixed), or a filter that
drops it when its budget is spent (Feldman and Zrnic). These are the losses of ONE outcome. And they are computed from
private data: they must not be published.
"""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel import privacy
from pubsel.algorithms import Algorithm, Mechanism, View
from pubsel.config import UsageError
from pubsel.data import Split
from pubsel.gradients import CPU_ENTRIES, row_norms
from pubsel.privacy import Plan

LEVELS = 100  # of the norm of a contribution, from 0 to the sensitivity; a norm counts as the level above it


class Losses:
    """Follows one training: the norm of what every private example would add to the sum of each step."""

    def __init__(self, private: Split, plan: Plan, every: int):
        self.private, self.plan, self.every = private, plan, every
        self.squares = np.zeros(len(private.x))  # sum over steps of (c_t / Delta)^2
        self.levels = np.zeros((len(private.x), LEVELS + 1), np.int32)  # steps at each level of c_t / Delta
        self._norms = np.zeros(len(private.x))

    def watching(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, at each of whose steps (each `every`-th: the norms then hold for those between) all
        private examples are looked at."""
        watched = copy.copy(algorithm)
        made = algorithm.mechanism
        watched.mechanism = lambda view, step: self._look(made(view, step), view, step)  # type: ignore[method-assign]
        return watched

    def _look(self, mechanism: Mechanism, view: View, step: int) -> Mechanism:
        if step % self.every == 0:
            self._norms = contribution_norms(mechanism, view, self.private) / mechanism.sensitivity
        self.squares += self._norms**2
        level = np.ceil(self._norms.clip(0, 1) * LEVELS).astype(np.int64)
        self.levels[np.arange(len(level)), level] += 1
        return mechanism

    def epsilons(self) -> NDArray[np.float64]:
        """The loss of each example at plan.delta, [n]; never above that of the worst case."""
        plan = self.plan
        if plan.rate == 1:
            mus = np.sqrt(self.squares) / plan.noise_multiplier
            return np.array([min(plan.epsilon, privacy.gaussian_epsilon(mu, plan.delta)) for mu in mus])
        levels = np.arange(1, LEVELS + 1) / LEVELS
        curves = np.stack([privacy.rdp_of_step(plan.noise_multiplier / level, plan.rate) for level in levels])
        found = privacy.epsilons_of_rdp(self.levels[:, 1:] @ curves, plan.delta)
        found[self.levels[:, 1:].sum(1) == 0] = 0  # nothing was ever added
        return found.clip(0, plan.epsilon)


@torch.no_grad()
def contribution_norms(mechanism: Mechanism, view: View, examples: Split) -> NDArray[np.float64]:
    """Norm of what each of the n examples would add to the mechanism's sum, as far as it is released: [n]."""
    if mechanism.contributions is None:
        raise UsageError("audit.kind=per_instance: this algorithm does not show contributions")
    norms: list[Tensor] = []
    at_once = max(8, CPU_ENTRIES // mechanism.size)
    for x, y in zip(examples.x.split(at_once), examples.y.split(at_once), strict=True):
        for block in view.gradients.blocks(x, y):
            norms.append(row_norms(mechanism.contributions(block)).cpu())
    return torch.cat(norms).numpy()
