"""White-box canaries: gradients that an adversary puts among those of the private examples, in the loop that trains.

A canary is a row of private data whose gradient is one huge entry in a coordinate of its own. `WithCanaries` stands
before the engine that makes per-example gradients; from there on a canary is an example like any other: training.fit
samples it, the algorithm clips it and sums it up, the loop adds its noise. `Witness` is the adversary: it sees every
noisy sum (the mechanism hands it to `decode`), knows all real examples and which of them were sampled, and weighs for
each canary how likely the sums are with it against without it. Differential privacy allows for one who knows so much:
it hides one example from whoever knows all others, and, as each is sampled independently, their samples too.

The witness also knows what no adversary does, the noise itself, and tests it against what is claimed.
"""

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from pubsel.algorithms import Algorithm, Mechanism, View
from pubsel.config import UsageError
from pubsel.data import Split, Task
from pubsel.gradients import CPU_ENTRIES, DenseGradients, Engine, GradientMatrix
from pubsel.training import Schedule

HUGE = 1e4  # the entry of a canary's gradient: every clip norm is smaller
KEPT = 2000  # numbers of each step's noise that are kept, to compare steps
SURE = 1e-6  # a check fails below this p-value: no false alarm in a million audits


class Canaries(NamedTuple):
    """columns: [m], of G, each canary's own. included: [m], the coins."""

    columns: Tensor
    included: Tensor

    def join(self, private: Split) -> Split:
        """Private examples with a row for each canary that is in: its label, -1 - i, says which; its image is blank."""
        chosen = self.included.nonzero().flatten()
        x = private.x.new_zeros(len(chosen), *private.x.shape[1:])
        y = (-1 - chosen).to(private.y.dtype).view(-1, *[1] * (private.y.dim() - 1))
        return Split(torch.cat([private.x, x]), torch.cat([private.y, y.expand(-1, *private.y.shape[1:])]))


class CanaryGradients(DenseGradients):
    """Rows of G that belong to the canaries `whose` [n]."""

    def __init__(self, rows: Tensor, whose: Tensor):
        super().__init__(rows)
        self.whose = whose


def draw(m: int, size: int, random: np.random.Generator, device: torch.device) -> Canaries:
    """m canaries among `size` parameters, each in with probability 1/2. UsageError where there are fewer parameters."""
    if m > size:
        raise UsageError(f"audit.canaries={m}: each takes one of the {size} trained parameters: lower it")
    columns = random.permutation(size)[:m]
    return Canaries(torch.from_numpy(columns).to(device), torch.from_numpy(random.random(m) < 0.5).to(device))


def mislabelled(task: Task, m: int, random: np.random.Generator) -> tuple[Split, NDArray[np.bool_], Task]:
    """Black-box canaries: m private examples with a wrong label each (0/1 labels: all turned round); which are in, with
    probability 1/2 each; and the task with those in place of the m examples as they were."""
    x, y = task.private
    if 2 * m > len(x):
        raise UsageError(f"audit.canaries={m} is more than half of the {len(x)} private examples: lower it")
    order = torch.from_numpy(random.permutation(len(x)))
    chosen, rest = order[:m], order[m:].sort().values
    if y.dim() == 2:
        wrong = 1 - y[chosen]
    else:
        wrong = (y[chosen] + torch.from_numpy(random.integers(1, task.classes, m))) % task.classes
    included = random.random(m) < 0.5
    coins = torch.from_numpy(included)
    private = Split(torch.cat([x[rest], x[chosen][coins]]), torch.cat([y[rest], wrong[coins]]))
    return Split(x[chosen], wrong), included, task._replace(private=private)


class WithCanaries:
    """An engine that makes the gradients of canaries itself, and those of all other examples by `inner`."""

    def __init__(self, inner: Engine, canaries: Canaries):
        self.inner, self.canaries = inner, canaries
        self.offsets, self.size = inner.offsets, inner.size

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def chunk(self, x: Tensor) -> int:
        return self.inner.chunk(x)

    def blocks(self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None) -> Iterator[GradientMatrix]:
        """The real examples among x [n, ...], y [n, ...] first, then the canaries."""
        labels = y if y.dim() == 1 else y[:, 0]
        real = labels >= 0
        if bool(real.all()):
            yield from self.inner.blocks(x, y, rows, dtype)
            return
        yield from self.inner.blocks(x[real], y[real], rows, dtype)
        yield from self.rows((-1 - labels[~real]).long(), dtype)

    def rows(self, chosen: Tensor, dtype: torch.dtype | None = None) -> Iterator["CanaryGradients"]:
        """The gradients of the canaries `chosen` [n], some at a time."""
        dtype = dtype or next(self.model.parameters()).dtype
        for whose in chosen.split(max(8, CPU_ENTRIES // self.size)):
            rows = torch.zeros(len(whose), self.size, dtype=dtype, device=whose.device)
            rows[torch.arange(len(whose)), self.canaries.columns[whose]] = HUGE
            yield CanaryGradients(rows, whose)


class Witness:
    """Follows the private sums of one training.

    After it: ratios [m], log likelihood of what was seen with each canary against without it; counts [m], how often
    each was sampled; sizes, of the batches; worst, the largest norm of what a single canary added.
    """

    def __init__(self, engine: WithCanaries, plan: Schedule, noise_multiplier: float):
        self.engine, self.plan, self.noise_multiplier = engine, plan, noise_multiplier
        columns = engine.canaries.columns
        self.every = torch.arange(len(columns), device=columns.device)
        self.ratios = torch.zeros(len(columns), dtype=torch.float64, device=columns.device)
        self.counts = torch.zeros_like(self.every)
        self.sizes: list[int] = []
        self.worst = 0.0
        self._squares, self._numbers = 0.0, 0  # of all noise over its declared deviation
        self._noise: list[Tensor] = []

    def watching(self, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, whose every mechanism is watched."""
        watched = copy.copy(algorithm)
        made = algorithm.mechanism
        watched.mechanism = lambda view, step: self._watch(made(view, step), view, step)  # type: ignore[method-assign]
        return watched

    def _watch(self, inner: Mechanism, view: View, step: int) -> Mechanism:
        if inner.contributions is None:
            raise UsageError("audit.kind=white_box: this algorithm does not show contributions: take black_box")
        real = torch.zeros(inner.size, dtype=torch.float64, device=self.every.device)
        everything = torch.zeros_like(real)
        self.sizes.append(0)
        (single,) = self.engine.rows(self.every[[step % len(self.every)]])
        self.worst = max(self.worst, float(inner.clipped_sum(single).double().norm()))

        def clipped_sum(gradients: GradientMatrix) -> Tensor:
            total = inner.clipped_sum(gradients)
            self.sizes[-1] += len(gradients)
            everything.add_(total)
            if isinstance(gradients, CanaryGradients):
                self.counts[gradients.whose] += 1
            else:
                real.add_(total)
            return total

        def decode(mean: Tensor) -> Tensor:
            noisy = mean.double() * view.batch_size
            self._keep((noisy - everything) / (self.noise_multiplier * inner.sensitivity))
            self._weigh(noisy - real, inner)
            return inner.decode(mean)

        return inner._replace(clipped_sum=clipped_sum, decode=decode)

    def _weigh(self, seen: Tensor, inner: Mechanism) -> None:
        """Adds log(1 - q + q exp(<seen, c> / s^2 - |c|^2 / (2 s^2))) for each contribution c, q the sampling rate; s is
        the noise's deviation as it shows in `seen` [size], few entries of which any canary touches."""
        assert inner.contributions is not None
        deviation = max(float(seen.abs().median()) / stats.norm.ppf(0.75), 1e-12)
        for gradients in self.engine.rows(self.every):
            rows = inner.contributions(gradients)  # [n, size]
            exponent = (rows @ seen.to(rows.dtype)).double() - rows.double().square().sum(1) / 2
            exponent /= deviation**2
            if self.plan.rate < 1:
                out = torch.full_like(exponent, math.log1p(-self.plan.rate))
                exponent = torch.logaddexp(out, exponent + math.log(self.plan.rate))
            self.ratios[gradients.whose] += exponent

    def _keep(self, noise: Tensor) -> None:
        self._squares += float(noise.square().sum())
        self._numbers += len(noise)
        self._noise.append(noise[:KEPT].float().cpu())

    def checks(self, sensitivity: float) -> dict[str, float]:
        """p-values, under the claimed plan, of what was done: `noise scale`; `noise drawn anew`, for two steps that
        share noise; `sampling rate`, of the number of all that was sampled; `batch sizes`, `samples of one example`,
        for too even or uneven ones. `clipping`: 0 where a canary added more than the declared sensitivity, else 1."""
        scale = stats.chi2(self._numbers)
        found = {
            "noise scale": _two_sided(scale.cdf(self._squares), scale.sf(self._squares)),
            "noise drawn anew": repeated_noise(torch.stack(self._noise).numpy()),
            "clipping": float(self.worst <= sensitivity * (1 + 1e-4)),
        }
        counts = self.counts[self.engine.canaries.included].cpu().numpy()
        return found | uneven_samples(np.array(self.sizes), counts, self.plan.n, self.plan.rate)


def repeated_noise(noise: NDArray[np.float32]) -> float:
    """p-value of the largest cosine between two rows of `noise` [steps, k], independent and isotropic, k >= 2."""
    steps, k = noise.shape
    if steps < 2:
        return 1.0
    unit = noise / np.linalg.norm(noise, axis=1, keepdims=True).clip(1e-30)
    largest = max(float(np.abs(np.triu(unit[i : i + 500] @ unit.T, i + 1)).max()) for i in range(0, steps, 500))
    t = largest * math.sqrt((k - 1) / max(1 - largest**2, 1e-12))
    return float(min(1.0, steps * (steps - 1) * stats.t.sf(t, k - 1)))  # two-sided, of steps (steps - 1) / 2 pairs


def uneven_samples(sizes: NDArray[np.int64], counts: NDArray[np.int64], n: int, rate: float) -> dict[str, float]:
    """p-values of batch `sizes` [steps] and of how often some of the n examples were sampled, `counts` [m], if each was
    in each batch independently with probability `rate`."""
    steps = len(sizes)
    if rate == 1:
        return {"sampling rate": float((sizes == n).all())}
    total, trials = sizes.sum(), steps * n
    spread = float(((sizes - n * rate) ** 2).sum() / (n * rate * (1 - rate)))  # near chi-squared of `steps` degrees
    own = rate * (1 - rate)
    uneven = float(((counts - steps * rate) ** 2).sum() / (steps * own)) - len(counts)
    deviation = math.sqrt(max(1, len(counts)) * (2 + (1 - 6 * own) / (steps * own)))  # of the sum of squares
    return {
        "sampling rate": _two_sided(stats.binom.cdf(total, trials, rate), stats.binom.sf(total - 1, trials, rate)),
        "batch sizes": _two_sided(stats.chi2.cdf(spread, steps), stats.chi2.sf(spread, steps)),
        "samples of one example": _two_sided(stats.norm.cdf(uneven / deviation), stats.norm.sf(uneven / deviation)),
    }


def _two_sided(below: float, above: float) -> float:
    return float(min(1.0, 2 * min(below, above)))
