"""Per-instance privacy loss: what a training really risked of each private example, along the weights that it took.

Wang: Per-instance Differential Privacy, 2019, arXiv:1707.07708; for full batches Golatkar et al.: AdaMix, CVPR 2022,
Proposition 14 and Figure 3. An example whose clipped contribution at step t has norm c_t, under noise of deviation s,
loses what a Gaussian mechanism with sensitivity c_t would, not with the worst-case sensitivity Delta:

- full batches: the steps compose to mu_i = sqrt(sum_t c_t^2) / s, whose (epsilon, delta) is exact. Both formulas of
  Proposition 14 are this: the second one with the clipped and projected gradient as c_t and s = sigma tau_t.
- Poisson samples at rate q: the Renyi DP of a sampled Gaussian with noise multiplier s / c_t adds up over steps, as in
  Feldman and Zrnic: Individual Privacy Accounting via a Renyi Filter, NeurIPS 2021, arXiv:2008.11193, and Yu, Kamath,
  Kulkarni, Liu, Yin, Zhang: Individual Privacy Accounting for DP-SGD, TMLR 2023, arXiv:2206.02617. c_t counts at every
  step, sampled or not. Renyi DP is up to 15 % too high, so the worst case limits it.

- A release before training (dp_pca) is one more Gaussian mechanism; its squares, or its Renyi DP, are added.

s is measured: the noisy sum less the exact one. A training that adds less noise than planned shows a larger
loss, one that adds none an infinite one. Likewise c_t is what the example does add, also if that is more than the
declared sensitivity.

What is assumed: that the noise is Gaussian, independent from step to step, and as large in one direction as in another;
that samples are Poisson at the planned rate; that `Mechanism.contributions` is what a row adds to the sum, whatever the
other rows are. The white-box audit tests these; this does not.

What it is not: c_t depends on the weights, which are random. A guarantee for an example would need a bound of c_t for
all weights that might have come (the proof of Proposition 14 composes as if the weights were fixed), or a filter that
drops it when its budget is spent (Feldman and Zrnic). These are the losses of ONE outcome. And they are computed from
private data: they must not be published.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from pubsel.algorithms import Algorithm, Freezes, Frozen, Mechanism, Release, View
from pubsel.attacks.noise import followed, watched
from pubsel.attacks.witness import SURE
from pubsel.data import Split
from pubsel.gradients.matrix import CPU_ENTRIES, row_norms
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.accountant import Plan

# What an example adds over the sensitivity, divided by the noise over the planned one. What lies between two levels
# counts as the upper one; the last level is for all that is more.
LEVELS = np.array([*np.arange(0, 111) / 100, *1.1 * 1.03 ** np.arange(1, 200), math.inf])


class Losses:
    """Follows one training: the norm of what every private example would add to the sum of each step, and the noise.

    private: what the steps see. first: the plan of a release before training.
    """

    def __init__(self, labels: Tensor, plan: Plan, every: int, first: Plan | None = None):
        n = len(labels)
        self.plan, self.first, self.every = plan, first, every
        self.squares = np.zeros(n)  # sum over steps of (c_t / Delta)^2, each over the noise as it should be
        self.levels = np.zeros((n, len(LEVELS)), np.int32)  # steps at each level of the same, without the square
        self.noise: list[tuple[float, int]] = []  # of each step: squares over the planned ones, and how many
        self.first_mus = np.zeros(n)  # contributions to the first release over its noise
        self.private: Split | None = None
        self._norms = np.zeros(n)

    def watching(self, algorithm: Algorithm) -> Algorithm:
        """Return the same algorithm, observed: at each of its steps all private examples are looked at (at each
        `every`-th; its norms then hold until the next), and before them at its first release."""
        other = watched(algorithm, self._look)
        if isinstance(algorithm, Freezes):
            frozen = algorithm.frozen

            def wrapped(*arguments: Any) -> Frozen | Release:
                result = frozen(*arguments)
                return self._look_at_release(result) if isinstance(result, Release) else result

            other.frozen = wrapped  # type: ignore[attr-defined]
        return other

    def _look(self, mechanism: Mechanism, view: View, step: int) -> Mechanism:
        def judge(noise: Tensor, exact: Tensor) -> None:
            assert self.private is not None
            # in between, the norms of the last look stand
            if step % self.every == 0:
                self._norms = contribution_norms(mechanism, view, self.private) / mechanism.sensitivity

            planned = self.plan.noise_multiplier * mechanism.sensitivity
            self.noise.append((float(noise.square().sum()) / planned**2, len(noise)))

            # noise that cannot be told from the planned one is measured over all steps together
            apart = differs(*self.noise[-1])
            norms = self._norms.copy()
            norms[norms > 0] *= more(*self.noise[-1]) if apart else 1

            self.squares += norms**2
            self.levels[np.arange(len(norms)), np.searchsorted(LEVELS, norms - 1e-12)] += 1

        return followed(mechanism, view.batch_size, next(view.model.parameters()).device, judge)

    def _look_at_release(self, release: Release) -> Release:
        """Return the release, which now records what each row adds to it, and its noise."""
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
        """Return the planned noise multiplier times the noise over the planned noise, of all steps whose noise is not
        known to differ."""
        planned = [step for step in self.noise if not differs(*step)]
        squares, numbers = np.array(planned or [(1, 1)]).T
        return float(self.plan.noise_multiplier * math.sqrt(squares.sum() / numbers.sum()))

    def least_noise(self) -> float:
        """Return the p-value of the noise of all steps, and of the step that has least, if it is the planned one."""
        squares, numbers = np.array(self.noise).T
        least = len(squares) * stats.chi2.cdf(squares, numbers).min()
        return float(min(1.0, 2 * min(least, stats.chi2.cdf(squares.sum(), numbers.sum()))))

    def epsilons(self) -> NDArray[np.float64]:
        """Return the loss of each example at the plan's delta, with that of the first release, [n]."""
        plan, sigma = self.plan, self.noise_multiplier()
        delta = plan.delta + (self.first.delta if self.first else 0)

        # full batches compose exactly
        if plan.rate == 1:
            mus = np.sqrt(self.squares / sigma**2 + self.first_mus**2)
            epsilons = [accountant.gaussian_epsilon(mu, delta) if mu < 1e4 else math.inf for mu in mus]
            return np.array(epsilons)

        # samples go through Renyi DP, one curve for each level that occurs
        used = np.flatnonzero(self.levels.any(0))
        used = used[used > 0]
        orders = np.array(accountant.FEW_ORDERS)
        curves = np.stack([_rdp(sigma / LEVELS[level], plan.rate) for level in used] or [0 * orders])
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
        """Return the loss of an example that adds at each step as much as any example adds at any step. Renyi DP would
        overestimate it."""
        plan, most = self.plan, 0.0
        try:
            if level:
                most = accountant.spent(sigma / level, plan.rate, plan.steps, plan.delta)
        except (UsageError, ZeroDivisionError):  # so little noise that it cannot be accounted for
            return math.inf
        if self.first is not None and self.first_mus.any():
            mu = self.first_mus.max()
            most += accountant.gaussian_epsilon(mu, self.first.delta) if mu < 1e4 else math.inf
        return most


def differs(squares: float, numbers: int) -> bool:
    """Return whether `numbers` squares with this sum, over the planned ones, are for certain of other noise."""
    chi2 = stats.chi2(numbers)
    too_little = chi2.cdf(squares) < SURE
    too_much = chi2.sf(squares / 1.005**2) < SURE
    return bool(too_little or too_much)


def more(squares: float, numbers: int) -> float:
    """Return how many times more an example tells under such noise than under the planned one."""
    return math.sqrt(numbers / squares) if squares > 0 else math.inf


def _rdp(noise_multiplier: float, rate: float) -> NDArray[np.float64]:
    if noise_multiplier < 0.05:  # so little that a sum reveals everything
        return np.full(len(accountant.FEW_ORDERS), math.inf)
    return accountant.rdp_of_step(noise_multiplier, rate)


@torch.no_grad()
def contribution_norms(mechanism: Mechanism, view: View, examples: Split) -> NDArray[np.float64]:
    """Return the norm of what each of the n examples would add to the mechanism's sum, up to what is released: [n]."""
    if mechanism.contributions is None:
        raise UsageError("audit.kind=per_instance: this algorithm does not show contributions")
    norms: list[Tensor] = []
    at_once = max(8, CPU_ENTRIES // mechanism.size)
    for x, y in zip(examples.x.split(at_once), examples.y.split(at_once), strict=True):
        for block in view.gradients.blocks(x, y):
            norms.append(row_norms(mechanism.contributions(block)).cpu())
    return torch.cat(norms).numpy()
