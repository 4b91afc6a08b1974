"""Noisy SGD for halfspaces, the learner of PILLAR's Theorem 1. Pinto, Hu, Yang, Sanyal: PILLAR, SaTML 2024,
arXiv:2306.03962, Algorithm 2 and Table I, after Bassily, Smith, Thakurta: Private Empirical Risk Minimization, FOCS
2014 (BST14), Algorithm 1.

Several runs of projected SGD on the unit ball, of which the exponential mechanism chooses one by its loss. Adjacency:
one example is there, or counts as nothing; the number of examples n is public, and the sampling rate 1/n stays. What
differs:

- As printed, the runs spend epsilon and the choice spends epsilon again: (2 epsilon, delta). Here each has half.
- As printed, each run is given (epsilon / runs, delta / runs). Here all their steps are one composition, which needs
  less noise.
- A step draws a Poisson sample at rate 1/n (one example in the mean), not exactly one example: this is what the
  accountant accounts for.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, softmax
from torch import Tensor

from pubsel.algorithms import Algorithm, Frozen, Random, View, needed
from pubsel.algorithms.pillar import public_pca
from pubsel.data import Split
from pubsel.messages import UsageError
from pubsel.privacy.accountant import Plan, deviation, plan
from pubsel.privacy.lattice import noised
from pubsel.privacy.randomness import Source
from pubsel.settings.schema import setting

DRAWN = 2**20  # uniform numbers at once, for the samples of several steps

Array = NDArray[np.float64]


class Loss(NamedTuple):
    """A convex loss of the margin z = y <w, x>, which is in [-1, 1] because w and x are in the unit ball.

    value, slope: elementwise, of z and its derivative.
    lipschitz: largest |slope|. The gradient in w is slope(z) y x, whose norm is at most this.
    spread: largest less smallest value.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    lipschitz: float
    spread: float


# log2(1 + exp(-z)). Table I says 2-Lipschitz; it is 1 / log 2 = 1.44 over all z, and 1.05 over [-1, 1].
LOGISTIC = Loss(
    value=lambda z: np.logaddexp(0, -z) / math.log(2),
    slope=lambda z: -expit(-z) / math.log(2),
    lipschitz=float(expit(1)) / math.log(2),
    spread=1 / math.log(2),
)


def hinge(margin: float) -> Loss:
    """Return the scaled hinge max(0, 1 - z / margin), 0 < margin <= 1 (or UsageError). Theorem 1 takes margin =
    0.9 gamma_0 (1 - xi_0)."""
    if not 0 < margin <= 1:
        raise UsageError(f"margin={margin}: use a number above 0 and at most 1")
    return Loss(
        value=lambda z: np.maximum(0, 1 - z / margin),
        slope=lambda z: np.where(z < margin, -1 / margin, 0.0),
        lipschitz=1 / margin,
        spread=1 + 1 / margin,
    )


class Halfspace(NamedTuple):
    """sign(<w, x>), and what learning it has spent."""

    w: Array  # [d], in the unit ball
    epsilon: float  # of the runs and the choice together; at most the requested one
    delta: float
    runs: int
    base: Plan  # of all runs: noise_multiplier is in units of the loss's Lipschitz constant


def signed_examples(x: Array, y: Array) -> Array:
    """Return y x [n, d], rows above norm 1 scaled to it; each row by itself, so that whatever it contains moves no
    other.

    A label is its sign. A row that is not finite, or whose norm is not, counts as 0.
    """
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(x, axis=1)
        rows = x * (np.where(y > 0, 1.0, -1.0) / np.maximum(norms, 1))[:, None]
    rows[~np.isfinite(norms)] = 0
    return rows


def poisson_samples(n: int, steps: int, source: Source) -> Iterator[NDArray[np.intp]]:
    """Return the rows of each step's sample: each of n by itself with probability 1/n."""
    block = max(1, DRAWN // n)
    for start in range(0, steps, block):
        size = min(block, steps - start)
        step, rows = np.nonzero(source.random(size * n).reshape(size, n) < 1 / n)
        yield from np.split(rows, np.searchsorted(step, np.arange(1, size)))


def base_run(signed: Array, loss: Loss, deviation: float, steps: int, source: Source) -> Array:
    """Return the last iterate [d] of projected SGD on signed examples [n, d] (Algorithm 2, A_Base).

    Each step releases the sum of its sample's gradients plus noise of standard deviation `deviation` a coordinate. One
    example more or less moves the sum by at most loss.lipschitz. The step size is BST14's, D / (G sqrt t) with diameter
    D = 2 and G^2 a bound on the mean squared norm of what is released: 2 lipschitz^2 + d deviation^2. (In the paper
    gradient, noise and G carry a factor n, which cancels.)
    """
    n, d = signed.shape
    w = np.asarray(source.standard_normal(d))
    w /= np.linalg.norm(w)

    size = 2 / math.sqrt(2 * loss.lipschitz**2 + d * deviation**2)
    for t, rows in enumerate(poisson_samples(n, steps, source), 1):
        # An empty sample gets its noise too, or the step would show that it was empty.
        sample = signed[rows]
        total = torch.from_numpy(loss.slope(np.clip(sample @ w, -1, 1)) @ sample)
        gradient = noised(total, deviation, loss.lipschitz, source).numpy()

        w -= size / math.sqrt(t) * gradient
        w /= max(1.0, float(np.linalg.norm(w)))
    return w


def chances(signed: Array, candidates: Array, loss: Loss, epsilon: float) -> Array:
    """Return the probabilities [k] with which the exponential mechanism chooses each of candidates [k, d], by the sum
    of losses of examples [n, d].

    Private with epsilon: a candidate's weight is exp(-epsilon sum / spread). One example more adds between the smallest
    value a and a + spread to each sum, so it multiplies each weight by exp(-epsilon a / spread) times a number between
    exp(-epsilon) and 1. The first factor cancels; weight and total both fall, each by at most exp(epsilon). This is the
    paper's exp(epsilon score / (2 Delta)) with Delta = spread / 2, the sensitivity of the score once a + spread / 2 is
    taken from each loss, which changes no probability.
    """
    sums = loss.value(np.clip(signed @ candidates.T, -1, 1)).sum(0)
    return np.asarray(softmax(-epsilon * sums / loss.spread))


def noisy_sgd(
    x: Array,
    y: Array,
    loss: Loss,
    budget: tuple[float, float],
    beta: float,
    steps: int,
    source: Source,
) -> Halfspace:
    """Return a halfspace through 0, (epsilon, delta)-private for a row that is there or counts as nothing (Algorithm
    2). budget: both of them.

    x: [n, d], rows of norm at most 1 (longer ones are scaled to it). y: [n], -1 or +1. beta: the probability that no
    run is good; there are ceil(log(1 / beta)) runs. steps: of each run; the paper takes n^2 - 1. The noise is what the
    accountant finds for all steps of all runs together. UsageError for values out of range.
    """
    n, (epsilon, delta) = len(x), budget
    if not (0 < beta < 1 and 0 < delta < 1 and epsilon > 0 and steps >= 1 and n >= 1 and y.shape == (n,)):
        raise UsageError("noisy_sgd: needs 0 < beta, delta < 1, epsilon > 0, steps >= 1, and one label for each row")

    runs = runs_of(beta)
    choice = choice_of(epsilon, beta)
    base = _plan(epsilon - choice, delta, n, steps, runs)

    signed = signed_examples(x, y)
    scale = deviation(base.noise_multiplier, loss.lipschitz)
    candidates = np.stack([base_run(signed, loss, scale, steps, source) for _ in range(runs)])

    # Sums of floating-point numbers may end just below 1, so the last run takes what is left.
    cumulative = np.cumsum(chances(signed, candidates, loss, choice))
    chosen = min(int(np.searchsorted(cumulative, source.random(1)[0], side="right")), runs - 1)
    return Halfspace(candidates[chosen], base.epsilon + choice, delta, runs, base)


def runs_of(beta: float) -> int:
    """Return how many runs it takes so that all of them are bad with probability at most beta."""
    return math.ceil(math.log(1 / beta))


def choice_of(epsilon: float, beta: float) -> float:
    """Return what the choice among the runs spends of epsilon."""
    return epsilon / 2 if runs_of(beta) > 1 else 0.0


def _plan(epsilon: float, delta: float, n: int, steps: int, runs: int) -> Plan:
    return plan(epsilon, delta, 1 / n, runs * steps, 1.0)


LossName = Enum("LossName", ["logistic", "hinge"])


@dataclass
class NoisySGD(Algorithm):
    """Settings of PILLAR with Algorithm 2 for two classes: public PCA, rows of norm 1, noisy_sgd."""

    k: int = setting("dimensions after the projection", at_least=1)
    loss: LossName = setting("logistic loss, or scaled hinge loss")
    margin: float = setting("hinge: margin of the loss", over=0, at_most=1)
    beta: float = setting("probability that no run is good; there are ceil(log(1 / beta)) runs", over=0, below=1)
    steps: int = setting("steps of each run; training.* is not used", at_least=1)

    @property
    def directions(self) -> int:
        return self.k

    def sensitivity(self) -> float:
        """Return the sensitivity of a step's sum; the noise multiplier is in units of it."""
        return self._loss().lipschitz

    def check(self, view: View) -> None:
        if view.classes != 2:
            raise UsageError(f"algorithm={self.name} learns a halfspace: take a task of two classes")

    def numbers(self, view: View) -> int:
        return 0

    def _loss(self) -> Loss:
        return LOGISTIC if self.loss == LossName.logistic else hinge(self.margin)

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        pca = public_pca(needed(public, self.name).x, self.k)
        return Frozen(pca.shift, pca.projection, unit=True)

    def solve(
        self, private: Split, public: Split | None, classes: int, epsilon: float, delta: float, source: Source
    ) -> tuple[Tensor, Plan]:
        """Return the weights [2, k] of a linear classifier, and what they cost."""
        # the paper's labels are -1 and 1, and its loss has one weight vector
        x = private.x.double().numpy()
        y = 2.0 * private.y.numpy() - 1
        halfspace = noisy_sgd(x, y, self._loss(), (epsilon, delta), self.beta, self.steps, source)

        w = torch.from_numpy(halfspace.w).float()
        cost = halfspace.base._replace(epsilon=halfspace.epsilon, claimed_epsilon=epsilon)
        if halfspace.runs > 1:  # the curve of the noise of the runs is not that of the choice
            cost = cost._replace(accountant=f"{cost.accountant}, and exponential mechanism")
        return torch.stack([-w, w]), cost

    def account(self, n: int, epsilon: float, delta: float) -> Plan:
        """Return what all runs on n examples cost; the accountant remembers it."""
        return _plan(epsilon - choice_of(epsilon, self.beta), delta, n, self.steps, runs_of(self.beta))
