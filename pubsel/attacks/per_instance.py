"""Per-instance privacy loss: the actual risk of each private example in a training, along its path of weights.

Wang: Per-instance Differential Privacy, 2019, arXiv:1707.07708; for full batches Golatkar et al.: AdaMix, CVPR 2022,
Proposition 14 and Figure 3. An example whose clipped contribution at step t has norm c_t, under noise of deviation s,
has the loss of a Gaussian mechanism with sensitivity c_t, not the worst-case sensitivity Delta:

- full batches: the steps compose to mu_i = sqrt(sum_t c_t^2) / s, whose (epsilon, delta) is exact. Both formulas of
  Proposition 14 are this: the second one with the clipped and projected gradient as c_t and s = sigma tau_t.
- Poisson samples at rate q: the Renyi DP of a sampled Gaussian with noise multiplier s / c_t adds up over steps, as in
  Feldman and Zrnic: Individual Privacy Accounting via a Renyi Filter, NeurIPS 2021, arXiv:2008.11193, and Yu, Kamath,
  Kulkarni, Liu, Yin, Zhang: Individual Privacy Accounting for DP-SGD, TMLR 2023, arXiv:2206.02617. c_t counts at every
  step, sampled or not. Renyi DP is up to 15 % too high, so the worst case limits it.

- A release before training (dp_pca) is one more Gaussian mechanism; its squares, or its Renyi DP, are added.

s is measured: the noisy sum minus the exact one. A training with less noise than planned shows a larger loss, one
without noise an infinite one. c_t is measured too: the actual contribution, even above the declared sensitivity.

Assumptions: the noise is Gaussian, independent between steps, and equally large in all directions; samples are Poisson
at the planned rate; `Mechanism.contributions` is the contribution of a row to the sum, whatever the other rows are. The
white-box audit tests these; this file does not.

These losses are no guarantee: c_t depends on the weights, which are random. A guarantee for an example would need a
bound of c_t for all possible weights (the proof of Proposition 14 composes as if the weights were fixed), or a filter
that drops it when its budget is spent (Feldman and Zrnic). These are the losses of ONE outcome, and computed from
private data: they must not be published.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from pubsel.algorithms import Algorithm, FirstRelease, Freezes, Frozen, Mechanism, View
from pubsel.attacks.noise import followed, watched
from pubsel.attacks.witness import SURE
from pubsel.data import Split
from pubsel.gradients.matrix import CPU_ENTRIES, row_norms
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.accountant import Plan

# Contribution over sensitivity, divided by actual over planned noise. A value between two levels counts as the upper
# one; the last level is for all larger ones.
LEVELS = np.array([*np.arange(0, 111) / 100, *1.1 * 1.03 ** np.arange(1, 200), math.inf])


class Losses:
    """Losses in one training: the norm of every private example's contribution to the sum of each step, and the noise.

    private: the examples of the steps. first: the plan of a release before training.
    """

    def __init__(self, labels: Tensor, plan: Plan, every: int, first: Plan | None = None):
        n = len(labels)
        self.plan, self.first, self.every = plan, first, every
        self.squares = np.zeros(n)  # sum over steps of (c_t / Delta)^2, each over the relative noise
        self.levels = np.zeros((n, len(LEVELS)), np.int32)  # steps at each level of the same, without the square
        self.noise: list[tuple[float, int]] = []  # of each step: squares over the planned ones, and their number
        self.first_mus = np.zeros(n)  # contributions to the first release over its noise
        self.private: Split | None = None
        self._norms = np.zeros(n)

    def watching(self, algorithm: Algorithm) -> Algorithm:
        """Return the same algorithm, observed: all private examples at each `every`-th step, whose norms then hold
        until the next, and before them at its first release."""
        other = watched(algorithm, self._look)
        if isinstance(algorithm, Freezes):
            frozen = algorithm.frozen

            def wrapped(*arguments: Any) -> Frozen | FirstRelease:
                result = frozen(*arguments)
                return self._look_at_release(result) if isinstance(result, FirstRelease) else result

            other.frozen = wrapped  # type: ignore[attr-defined]
        return other

    def _look(self, mechanism: Mechanism, view: View, step: int) -> Mechanism:
        def judge(noise: Tensor, exact: Tensor) -> None:
            assert self.private is not None
            # Between two looks the norms of the last one hold.
            if step % self.every == 0:
                self._norms = contribution_norms(mechanism, view, self.private) / mechanism.sensitivity

            planned = self.plan.noise_multiplier * mechanism.sensitivity
            self.noise.append((float(noise.square().sum()) / planned**2, len(noise)))

            # Noise that cannot be distinguished from the planned one is measured over all steps together.
            apart = differs(*self.noise[-1])
            norms = self._norms.copy()
            norms[norms > 0] *= more(*self.noise[-1]) if apart else 1

            self.squares += norms**2
            self.levels[np.arange(len(norms)), np.searchsorted(LEVELS, norms - 1e-12)] += 1

        return followed(mechanism, view.batch_size, next(view.model.parameters()).device, judge)

    def _look_at_release(self, release: FirstRelease) -> FirstRelease:
        """Return the release, which now records the contribution of each row, and its noise."""
        assert self.first is not None
        planned = self.first.noise_multiplier * release.sensitivity
        norms: list[float] = []
        exact = torch.zeros(release.size, dtype=torch.float64)

        def clipped_sum(x: Tensor) -> Tensor:
            norms.extend(float(release.clipped_sum(row).double().norm()) for row in x.split(1))
            total = release.clipped_sum(x)
            exact.add_(total)
            return total

        def decode(noisy: Tensor) -> Frozen:
            noise = (float((noisy.double() - exact).square().sum()) / planned**2, release.size)
            self.noise.append(noise)
            added = np.array(norms)
            self.first_mus = np.where(added > 0, added / planned * more(*noise), 0)
            return release.decode(noisy)

        return release._replace(clipped_sum=clipped_sum, decode=decode)

    def noise_multiplier(self) -> float:
        """Return the noise multiplier, measured over all steps whose noise does not certainly differ from the plan."""
        planned = [step for step in self.noise if not differs(*step)]
        squares, numbers = np.array(planned or [(1, 1)]).T
        return float(self.plan.noise_multiplier * math.sqrt(squares.sum() / numbers.sum()))

    def least_noise(self) -> float:
        """Return the p-value of the noise of all steps, and of the step with least, under the plan."""
        squares, numbers = np.array(self.noise).T
        least = len(squares) * stats.chi2.cdf(squares, numbers).min()
        return float(min(1.0, 2 * min(least, stats.chi2.cdf(squares.sum(), numbers.sum()))))

    def epsilons(self) -> NDArray[np.float64]:
        """Return the loss of each example at the plan's delta, with that of the first release, [n]."""
        plan, sigma = self.plan, self.noise_multiplier()
        delta = plan.delta + (self.first.delta if self.first else 0)

        # Full batches compose exactly.
        if plan.rate == 1:
            mus = np.sqrt(self.squares / sigma**2 + self.first_mus**2)
            epsilons = [accountant.gaussian_epsilon(mu, delta) if mu < 1e4 else math.inf for mu in mus]
            return np.array(epsilons)

        # Samples go through Renyi DP, with one curve for each level that occurs.
        used = np.flatnonzero(self.levels.any(0))
        used = used[used > 0]
        orders = np.array(accountant.FEW_ORDERS)
        curves = np.stack([accountant.rdp_of_step(sigma / LEVELS[level], plan.rate) for level in used] or [0 * orders])
        counts = self.levels[:, used] if len(used) else np.zeros((len(self.levels), 1))

        with np.errstate(invalid="ignore"):  # none of an infinite loss is none
            total = sum(
                np.where(count[:, None] > 0, count[:, None] * curve, 0)
                for count, curve in zip(counts.T, curves, strict=True)
            )
        total = total + self.first_mus[:, None] ** 2 / 2 * orders

        losses = accountant.epsilons_of_rdp(total, delta)
        losses[total.max(1) == 0] = 0  # nothing was ever added
        return np.minimum(losses, self._most(sigma, LEVELS[used].max(initial=0.0)))

    def _most(self, sigma: float, level: float) -> float:
        """Return the loss of an example with the largest contribution of any example at every step. Renyi DP would
        overestimate it."""
        plan, most = self.plan, 0.0
        try:
            if level:
                most = accountant.spent(sigma / level, plan.rate, plan.steps, plan.delta)
        except (UsageError, ZeroDivisionError):  # too little noise for the accountant
            return math.inf
        if self.first is not None and self.first_mus.any():
            mu = self.first_mus.max()
            most += accountant.gaussian_epsilon(mu, self.first.delta) if mu < 1e4 else math.inf
        return most


def differs(squares: float, numbers: int) -> bool:
    """Return whether `numbers` squares with this sum, over the planned ones, are certainly of other noise."""
    chi2 = stats.chi2(numbers)
    return bool(chi2.cdf(squares) < SURE or chi2.sf(squares / 1.005**2) < SURE)


def more(squares: float, numbers: int) -> float:
    """Return the factor on an example's loss under this noise, compared with the planned one."""
    return math.sqrt(numbers / squares) if squares > 0 else math.inf


@torch.no_grad()
def contribution_norms(mechanism: Mechanism, view: View, examples: Split) -> NDArray[np.float64]:
    """Return the norm of the contribution of each of the n examples to the mechanism's sum: [n]. UsageError if the
    algorithm does not show it."""
    if mechanism.contributions is None:
        raise UsageError("audit.kind=per_instance: this algorithm does not show contributions")
    norms: list[Tensor] = []
    at_once = max(8, CPU_ENTRIES // mechanism.size)
    for x, y in zip(examples.x.split(at_once), examples.y.split(at_once), strict=True):
        for block in view.gradients.blocks(x, y):
            norms.append(row_norms(mechanism.contributions(block)).cpu())
    return torch.cat(norms).numpy()
