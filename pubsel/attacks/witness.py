"""The adversary of a white-box audit: it follows every private sum of one training.

It sees every noisy sum (the mechanism passes it to `decode`), knows all real examples and their samples, and compares
for each canary the likelihood of the sums with it and without it. Differential privacy allows for so much knowledge: it
hides one example from an adversary who knows all others, their number and, because samples are independent, theirs.

The witness also knows the exact sums, hence the noise, unlike any adversary. So it tests each assumption of the
accounting (`Witness.checks`):

- sensitivity: the contribution of a row to the sum, in the program as it runs. Real rows and canaries are removed from
  blocks of the batch, canaries inserted, and the sum recomputed; also of one row. No norm may exceed the declared one.
- noise scale: no less noise than planned, in all, at any step, in any coordinate. More is no fault.
- noise drawn anew: no two steps share noise.
- denominator: the release is the sum plus noise over a fixed number: the noise contains nothing of the sum, and its
  scale does not depend on the batch size.
- decoding: `decode` returns the same before the private sum and after it, so it reads nothing else of private data.
- sampling rate, batch sizes, samples of one example, samples drawn anew: of Poisson samples at the planned rate,
  independent between steps.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from pubsel.algorithms import Algorithm, Mechanism, View
from pubsel.attacks.canaries import HUGE, WithCanaries, arrays_in, with_arrays
from pubsel.attacks.noise import followed, watched
from pubsel.gradients.matrix import GradientMatrix
from pubsel.messages import UsageError
from pubsel.privacy.sampling import Schedule

KEPT = 2000  # numbers of each step's noise, and examples, to compare steps by
SURE = 1e-6  # a check fails below this p-value: no false alarm in a million audits
ALLOWED = 1.001  # of the declared sensitivity: the sums are of float32 numbers
PROBED = 256  # rows of a block, at most, from which single rows are removed
PROBES = 200  # rows that are removed or inserted, about, in one training


class Witness:
    """An observer of the private sums of one training.

    Results: ratios [m], the log likelihood ratio of the sums with each canary against without it; counts [n], the
    number of samples of each example; sizes of the batches; worst, the largest norm of a row's contribution, over the
    declared sensitivity. Only canaries with as large a contribution as possible are weighed: `weighed` [m].
    """

    def __init__(self, engine: WithCanaries, plan: Schedule, noise_multiplier: float):
        self.engine, self.plan, self.noise_multiplier = engine, plan, noise_multiplier
        magnitudes = engine.canaries.magnitudes
        self.weighed = magnitudes >= HUGE
        self.ratios = torch.zeros(len(magnitudes), dtype=torch.float64)
        self.counts = np.zeros(plan.n, np.int64)
        self.sizes: list[int] = []
        self.worst = self.changed = 0.0

        self._random = np.random.default_rng(engine.canaries.seed)
        self._tracked = np.sort(self._random.permutation(plan.n)[:KEPT])
        self._samples: list[NDArray[np.bool_]] = []
        self._noise: list[Tensor] = []  # over its declared deviation
        self._squares: list[tuple[float, int]] = []  # of each step's noise: sum, numbers
        self._columns: dict[int, tuple[Tensor, int]] = {}  # size of a sum -> squares of each coordinate, steps
        self._leaning: list[float] = []  # cosine of each step's noise to its sum, times the root of the size

    def watching(self, algorithm: Algorithm) -> Algorithm:
        """Return the same algorithm with every mechanism observed."""
        return watched(algorithm, self._watch)

    def _watch(self, inner: Mechanism, view: View, step: int) -> Mechanism:
        if inner.contributions is None:
            raise UsageError("audit.kind=white_box: this algorithm does not show contributions: take black_box")

        self._scale(inner)
        batch: list[Tensor] = []
        first_weight = next(view.model.parameters())
        device = first_weight.device

        # decoding the same numbers before and after shows whether `decode` read the private sum
        drawn = self._random.standard_normal(inner.size)
        test = torch.from_numpy(drawn).to(device, first_weight.dtype)
        before = inner.decode(test)
        probes = max(2, PROBES // max(1, 4 * self.plan.steps))

        def look(gradients: GradientMatrix) -> None:
            batch.append(self.engine.next_rows(len(gradients)))
            if len(batch) <= 4:
                self._probe(inner, gradients, batch[-1], probes)

        def judge(noise: Tensor, exact: Tensor) -> None:
            sample = torch.cat([torch.zeros(0, dtype=torch.int64), *batch])
            in_batch = np.zeros(self.plan.n, bool)
            in_batch[sample.numpy()] = True
            np.add.at(self.counts, sample.numpy(), 1)
            self.sizes.append(len(sample))
            self._samples.append(in_batch[self._tracked])

            self._keep(noise, exact, inner.sensitivity)
            self._weigh(noise, inner, set(self.engine.whose[sample].tolist()))
            change = (inner.decode(test) - before).norm() / before.norm().clamp(min=1e-30)
            self.changed = max(self.changed, float(change))

        return followed(inner, view.batch_size, device, judge, look)

    def _scale(self, inner: Mechanism) -> None:
        """Set the scales of the canaries to the norms at which clipping begins: tiny rows count in proportion."""
        kept = self.engine.scales.clone()
        for kind in (0, 1):
            # From 1 down, until the contribution is surely below the clipping bound.
            tiny = 1.0
            for _ in range(12):
                self.engine.scales[kind] = tiny / self.engine.canaries.magnitudes[kind]
                ((_, row),) = self.engine.rows(torch.tensor([kind]))
                added = float(inner.clipped_sum(row).double().norm()) / inner.sensitivity
                if added < 0.5:
                    break
                tiny /= 100

            kept[kind] = tiny / added if added > 1e-12 else 1.0

        self.engine.scales = kept.clamp(1e-12, 1e12)

    def _probe(self, inner: Mechanism, gradients: GradientMatrix, rows: Tensor, count: int) -> None:
        """Measure the contributions of single rows to the sum over a block of the `rows` [n]: `count` of its canaries
        and half as many real rows, removed, and `count` canaries, inserted."""
        first = int(self._random.integers(max(1, len(gradients) - PROBED + 1)))
        arrays = [array[first : first + PROBED] for array in arrays_in(gradients)]
        whose = self.engine.whose[rows[first : first + PROBED]]
        whole = inner.clipped_sum(with_arrays(gradients, [array.clone() for array in arrays]))
        n = len(whose)

        # The largest canaries first: a wrong bound lets those through.
        canaries = self._some((whose >= 0).nonzero().flatten(), n)
        real = (whose < 0).nonzero().flatten()
        magnitudes = self.engine.canaries.magnitudes[whose[canaries]]
        order = torch.argsort(magnitudes, descending=True, stable=True)
        largest, others = canaries[order[: count // 2]], canaries[order[count // 2 :]]
        taken = [largest, self._some(others, count - len(largest)), self._some(real, max(1, count // 2))]

        for row in torch.cat(taken).tolist():
            rest = [torch.cat([array[:row], array[row + 1 :]]) for array in arrays]
            less = inner.clipped_sum(with_arrays(gradients, rest)) if n > 1 else torch.zeros_like(whole)
            self._added(whole - less, inner)

        for canary in self._some(torch.arange(len(self.engine.canaries.columns)), count).tolist():
            ((_, new),) = self.engine.rows(torch.tensor([canary]), gradients.dtype)
            row = int(self._random.integers(n + 1))
            inserted = zip(arrays, arrays_in(new), strict=True)
            more = [torch.cat([array[:row], extra, array[row:]]) for array, extra in inserted]
            self._added(inner.clipped_sum(with_arrays(gradients, more)) - whole, inner)

    def _some(self, of: Tensor, count: int) -> Tensor:
        return of[torch.from_numpy(self._random.permutation(len(of))[:count])]

    def _added(self, what: Tensor, inner: Mechanism) -> None:
        norm = float(what.double().norm()) / inner.sensitivity
        self.worst = max(self.worst, norm if math.isfinite(norm) else math.inf)

    def _weigh(self, noise: Tensor, inner: Mechanism, sampled: set[int]) -> None:
        """Add log(1 - q + q exp(<seen, c> / s^2 - |c|^2 / (2 s^2))) to the ratio of each contribution c, q the sampling
        rate, s the noise's deviation. seen: the noisy sum minus all other contributions, so the noise, plus that of
        the canary if it was sampled."""
        assert inner.contributions is not None
        deviation = max(float(noise.square().mean().sqrt()), 1e-12)

        for chosen, gradients in self.engine.rows(self.weighed.nonzero().flatten()):
            rows = inner.contributions(gradients)  # [n, size]
            exponent = (rows @ noise.to(rows.dtype)).double() - rows.double().square().sum(1) / 2

            for k, i in enumerate(chosen.tolist()):
                if i in sampled:
                    ((_, single),) = self.engine.rows(chosen[[k]])
                    contribution = inner.clipped_sum(single)
                    self._added(contribution, inner)
                    exponent[k] += contribution.double() @ rows[k].double()

            exponent /= deviation**2

            # The sum is a mixture: with probability q the canary was sampled.
            if self.plan.rate < 1:
                out = torch.full_like(exponent, math.log1p(-self.plan.rate))
                exponent = torch.logaddexp(out, exponent + math.log(self.plan.rate))

            self.ratios[chosen] += exponent.cpu()

    def _keep(self, noise: Tensor, exact: Tensor, sensitivity: float) -> None:
        unit = noise / (self.noise_multiplier * sensitivity)
        squares = unit.square()
        self._squares.append((float(squares.sum()), len(unit)))
        total, steps = self._columns.get(len(unit), (torch.zeros_like(squares), 0))
        self._columns[len(unit)] = total.add_(squares), steps + 1
        self._noise.append(unit[:KEPT].float().cpu())
        norms = float(noise.norm() * exact.norm())
        self._leaning.append(float(noise @ exact) / max(norms, 1e-30) * math.sqrt(len(noise)))

    def checks(self) -> dict[str, float]:
        """Return the p-value of each check under the claimed plan; 0 or 1 for certain ones."""

        # Sums may differ in size between steps: compare the coordinates that all of them have.
        shared = min(len(noise) for noise in self._noise)
        same = torch.stack([noise[:shared] for noise in self._noise]).numpy()
        return {
            "sensitivity": float(self.worst <= ALLOWED),
            "decoding": float(self.changed <= 1e-4),
            "noise scale": self._least_noise(),
            "noise drawn anew": repeated_noise(same),
            "denominator": self._moving_denominator(),
            **uneven_samples(np.array(self.sizes), self.counts, self.plan.n, self.plan.rate),
            "samples drawn anew": repeated_samples(np.stack(self._samples), self.plan.rate),
        }

    def _least_noise(self) -> float:
        """Return the p-value of the noise in all, and of the step and the coordinate with least: three tests."""
        squares, numbers = np.array(self._squares).T
        in_all = stats.chi2.cdf(squares.sum(), numbers.sum())
        least_step = len(squares) * stats.chi2.cdf(squares, numbers).min()
        p_values = [in_all, least_step]
        coordinates = sum(len(total) for total, _ in self._columns.values())
        for total, steps in self._columns.values():
            p_values.append(coordinates * stats.chi2.cdf(float(total.min()), steps))
        return float(min(1.0, 3 * min(p_values)))

    def _moving_denominator(self) -> float:
        """Return the p-value of two tests: of the cosines of noise and sum, whose squares are chi-squared; and of the
        slope of the noise's scale over the batch size, in logarithms."""
        leaning = float(np.square(self._leaning).sum())
        p_values = [stats.chi2.sf(leaning, len(self._leaning))]
        squares, numbers = np.array(self._squares).T
        sizes = np.log(np.maximum(self.sizes, 1))
        sizes = sizes - np.average(sizes, weights=numbers)
        spread = float((numbers * sizes**2).sum())
        if spread > 1e-9 and (squares > 0).all():
            # The logarithm of a root mean square of k normal numbers has a deviation of 1 / sqrt(2 k)
            slope = float((numbers * sizes * np.log(squares / numbers) / 2).sum()) / spread
            p_values.append(2 * stats.norm.sf(abs(slope) * math.sqrt(2 * spread)))
        return float(min(1.0, 2 * min(p_values)))


def repeated_noise(noise: NDArray[np.float32]) -> float:
    """Return the p-value of the largest cosine between two rows of `noise` [steps, k], k >= 2, if they are independent
    and isotropic."""
    steps, k = noise.shape
    if steps < 2:
        return 1.0
    unit = noise / np.linalg.norm(noise, axis=1, keepdims=True).clip(1e-30)
    # Blocks of rows: all pairs at once would not fit into memory.
    largest = 0.0
    for i in range(0, steps, 500):
        cosines = np.triu(unit[i : i + 500] @ unit.T, i + 1)
        largest = max(largest, float(np.abs(cosines).max()))

    t = largest * math.sqrt((k - 1) / max(1 - largest**2, 1e-12))
    return float(min(1.0, steps * (steps - 1) * stats.t.sf(t, k - 1)))  # two-sided, of steps (steps - 1) / 2 pairs


def repeated_samples(samples: NDArray[np.bool_], rate: float) -> float:
    """Return the p-value of the pair of `samples` [steps, k] with most examples in common, if each of k is in each
    sample independently with probability `rate`."""
    steps = len(samples)
    if rate == 1 or steps < 2:
        return 1.0

    rows = samples.astype(np.float32)
    sizes, least = rows.sum(1), 1.0

    # Blocks of rows: all pairs at once would not fit into memory.
    for i in range(0, steps, 500):
        shared = np.triu(rows[i : i + 500] @ rows.T, i + 1)
        drawn = np.broadcast_to(sizes[i : i + 500, None], shared.shape)

        # Only the pairs that differ most: the tails of all of them would take long.
        gap = (shared - drawn * rate) / np.sqrt(np.maximum(drawn, 1) * rate * (1 - rate))
        most = np.argpartition(gap.ravel(), -min(100, gap.size))[-min(100, gap.size) :]
        tails = stats.binom.sf(shared.ravel()[most] - 1, drawn.ravel()[most], rate)
        least = min(least, float(tails.min()))

    return float(min(1.0, steps * (steps - 1) / 2 * least))


def uneven_samples(sizes: NDArray[np.int64], counts: NDArray[np.int64], n: int, rate: float) -> dict[str, float]:
    """Return p-values of batch `sizes` [steps] and of `counts` [m], the numbers of samples of some of n examples, if
    each was in each batch independently with probability `rate`."""
    steps = len(sizes)
    if rate == 1:
        return {"sampling rate": float((sizes == n).all())}

    total, trials = sizes.sum(), steps * n
    spread = float(((sizes - n * rate) ** 2).sum() / (n * rate * (1 - rate)))  # near chi-squared of `steps` degrees

    variance = rate * (1 - rate)  # of one draw
    uneven = float(((counts - steps * rate) ** 2).sum() / (steps * variance)) - len(counts)
    fourth = (1 - 6 * variance) / (steps * variance)
    deviation = math.sqrt(max(1, len(counts)) * (2 + fourth))  # of the sum of squares

    z = uneven / deviation
    fewer, more = stats.binom.cdf(total, trials, rate), stats.binom.sf(total - 1, trials, rate)
    return {
        "sampling rate": _two_sided(fewer, more),
        "batch sizes": _two_sided(stats.chi2.cdf(spread, steps), stats.chi2.sf(spread, steps)),
        "samples of one example": _two_sided(stats.norm.cdf(z), stats.norm.sf(z)),
    }


def _two_sided(below: float, above: float) -> float:
    return float(min(1.0, 2 * min(below, above)))
