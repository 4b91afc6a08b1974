"""Quality of a model on private held-out examples, as it may be published: noisy counts, and what follows from them
alone.

Neighbours differ by one held-out unit, which is there or counts as nothing: an example, or a person with several, each
of which then counts as one over their number (`privacy.people`). The number n of units is public, how many are of a
class is not. What is released is one vector with Gaussian noise, a plan of one step at rate 1 (`accountant.plan`):

- `confusion` [C, C], of which one unit moves counts by one together, so by at most 1 in L2; and beside it sums over the
  same counts, of which a unit also moves one by at most 1: how many answers are `right`, or the `sizes` of the classes.
  Sensitivity sqrt(2). A sum of its own has the noise of one count, where a sum over noisy counts has that of all.
- or `histograms` of the scores of L labels. One unit has one entry in the histogram of each label, or parts of one, so
  it moves the histograms of L labels by at most 1 each: sensitivity sqrt(L). Two classes are one label, "the second
  class": sensitivity 1.

Counts are whole numbers of steps of 1 / UNIT, so sums are exact, in whatever order, of up to 8 million units; whatever
an example contains (NaN, labels out of range) its unit moves no more than that. The noise consists of whole numbers of
steps too, drawn exactly (`lattice.discrete_gaussian`), and the result is rounded to a tenth: no digit of it tells which
counts were behind it. All figures and intervals are computed from the noisy counts, n and the deviation of the noise,
and cost nothing more.

**Intervals.** Each figure is a ratio p = E[T] / E[R] of two sums over the table, so T - p R has mean 0 at the true p,
and at p a variance, by sampling and by noise, that is known up to counts (Fieller 1954; for the accuracy without noise
this is Wilson's interval, 1927). The interval has every p at which (T - p R) / deviation is one of the 95 % likeliest
values, in the order of Feldman and Cousins (1998, arXiv:physics/9711021), likelihood over the largest that any p in
[0, 1] has. So noise that carries T below 0 or above R leaves no interval empty, and none narrow by accident. The
intervals are for other examples of the same kind and other noise; they do not cover the training.

Of people, a figure is for images of which each person's weigh as much as another's, and intervals contain the true
value in 95 % of cases or more: the variance by sampling is at most that of examples, which is assumed. With weights w_i
that add up to 1 and errors e_i of a person's images, (sum w_i e_i)^2 <= sum w_i e_i^2, which is what they would add as
examples with these weights; likewise over the classes of a mean of recalls, if one person has images of several.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from pubsel.privacy.accountant import Plan, deviation
from pubsel.privacy.lattice import discrete_gaussian
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import Sources
from pubsel.training.evaluation import HARDLY

BINS = 32  # of the scores, of equal width on [0, 1]
LEVEL = 0.95  # of the intervals
DEVIATIONS = float(ndtri((1 + LEVEL) / 2))  # of a normal number, on either side
HALVINGS = 24  # of [0, 1], in searching the end of an interval
FAR = 8.0  # from the estimate: an interval that is wider is without end

Array = NDArray[np.float64]
Steps = NDArray[np.int64]


class Released(NamedTuple):
    """Noisy counts, which may be published.

    counts: [..., C, C] of a confusion matrix, or [..., L, 2, BINS] of histograms. deviation: of the noise on each
    number. n: the number of held-out units, public. right: [...], the number of right answers, as a sum with noise of
    its own; sizes: [..., C], the number of units of each class. None: not released.
    """

    counts: Array
    deviation: float
    n: int
    right: Array | None = None
    sizes: Array | None = None


class Answered(NamedTuple):
    """Classes by how often they are answered, as far as noisy counts say it, bool [..., C]. hardly_answered: never or
    hardly ever; perhaps_unanswered: the noise hides whether they ever are."""

    hardly_answered: NDArray[np.bool_]
    perhaps_unanswered: NDArray[np.bool_]


class Estimate(NamedTuple):
    """An estimate in [0, 1] and its 95 % interval, arrays of one shape."""

    estimate: Array
    low: Array
    high: Array


class Moment(NamedTuple):
    """T - p R at some p: its value, the parts of its variance, and R, by how much it falls with p."""

    value: Array
    sampling: Array
    noise: Array
    slope: Array


class Ratio(NamedTuple):
    """T / R, which need not be in [0, 1], and T - p R at each p."""

    estimate: Array
    moment: Callable[[Array], Moment]


# Counts and their release


def confusion(y: Tensor, predicted: Tensor, classes: int, weights: Tensor) -> Steps:
    """Return how many examples of class i were taken for class j, in steps of 1 / UNIT, int64 [classes, classes], from
    y [n] and predicted [n]. NOT private. weights: int64 [n] of `people.weights_of`.

    Each example adds its weight to one count, or nothing if its label or prediction is not in 0, ..., classes - 1: with
    one unit more or less the table moves by at most 1 in L2.
    """
    # what is out of range counts as nothing, so that no example moves more than its weight
    valid = (y >= 0) & (y < classes) & (predicted >= 0) & (predicted < classes)
    places = y[valid].long() * classes + predicted[valid].long()
    return _sums(places, weights[valid], classes**2).reshape(classes, classes)


def histograms(y: Tensor, scores: Tensor, weights: Tensor) -> Steps:
    """Return how many examples without and with each label have a score in each bin, in steps of 1 / UNIT, int64
    [L, 2, BINS], from 0/1 y [n, L] and scores [n, L] in [0, 1]. NOT private. Two classes: y[:, None], and the
    probability of the second class. weights: as in `confusion`.

    An example adds its weight to one count of each label: with one unit more or less the tables move by at most sqrt(L)
    in L2; or nothing, to that of a label that is not known (NaN). A score that is NaN goes into the lowest bin, scores
    beyond [0, 1] into the first and the last; each other y but 1 is "without".
    """
    bins = (scores.double().nan_to_num(0.0, 1.0, 0.0).clamp(0, 1) * BINS).long().clamp(max=BINS - 1)
    places = (y == 1).long() * BINS + bins
    known = weights[:, None] * ~y.isnan()
    columns = zip(places.unbind(1), known.unbind(1), strict=True)
    return np.stack([_sums(column, counted, 2 * BINS).reshape(2, BINS) for column, counted in columns])


def _sums(places: Tensor, weights: Tensor, size: int) -> Steps:
    """Return the sum of the weights [n] in each of the places [n], [size]."""
    sums = torch.zeros(size, dtype=torch.int64, device=places.device)
    return sums.index_add_(0, places, weights).cpu().numpy()


def sensitivity(counts: Steps) -> float:
    """Return by how much one unit moves what `release` adds noise to, in L2 and in ones, at most: sqrt(2) for a
    confusion matrix [C, C] and its sums, sqrt(L) for histograms [L, 2, BINS]."""
    return math.sqrt(counts.shape[0] if counts.ndim == 3 else 2)


def release(counts: Steps, n: int, plan: Plan, source: Sources, balanced: bool = False) -> Released:
    """Return counts of n units with the noise of a plan of one step at rate 1; of a confusion matrix with the number of
    right answers, or with the sizes of the classes, if the metric is the `balanced` accuracy.

    source: the `randomness.secret` of this release, which follows from all that decides it. ValueError for another
    plan.
    """
    if (plan.rate, plan.steps) != (1, 1):
        raise ValueError("the quality is one release of all held-out examples: a plan of one step at rate 1")

    # release the sum separately: a sum over noisy counts would add up their noise
    sums = np.zeros(0, np.int64)
    if counts.ndim == 2:
        sums = counts.sum(1) if balanced else np.trace(counts)[None]
    exact = [*counts.ravel().tolist(), *sums.tolist()]

    # Counts, noise and its deviation are whole numbers of steps.
    sigma = math.ceil(deviation(plan.noise_multiplier, sensitivity(counts)) * UNIT)
    draw = source(f"noise of the quality {counts.shape}", 0)
    noisy = np.array([round((steps + discrete_gaussian(sigma, draw)) / UNIT, 1) for steps in exact])

    released = Released(noisy[: counts.size].reshape(counts.shape), sigma / UNIT, n)
    if counts.ndim == 3:
        return released
    beside = noisy[counts.size :]
    return released._replace(sizes=beside) if balanced else released._replace(right=beside[0])


# Figures of a noisy confusion matrix


def accuracy(matrix: Released) -> Estimate:
    """Return the accuracy, shapes [...].

    T from the table: the diagonal, plus 1/C of what the noisy counts lack of n, so that its noise has the variance
    (C - 1) sigma^2 instead of C sigma^2: sigma^2 times the squared length of the diagonal's indicator off the constant
    table. With `right`, whose noise is independent, T is the mean of both by their variances, which has the variance
    (1 - 1/C) sigma^2. R = n. Sampling: n p (1 - p).
    """
    # two measurements of the right answers, weighted by their variances
    counts, sigma, n = matrix[:3]
    classes = counts.shape[-1]
    right = np.trace(counts, axis1=-2, axis2=-1) + (n - counts.sum((-2, -1))) / classes
    variance = (classes - 1) * sigma**2
    if matrix.right is not None:
        right = matrix.right + (right - matrix.right) / classes
        variance /= classes

    return _figure(_share(right, variance, n))


def recalls(matrix: Released) -> Estimate:
    """Return the recall of each class, shapes [..., C].

    T: the count on the diagonal; R = T + O, with O the rest of its row. Noise of T and O: sigma^2 and (C - 1) sigma^2,
    independent; with `sizes`, which measure T + O once more, T and O are those of least squares, and their covariance
    is the inverse of the sum of both measurements' information. T - p R = (1 - p) T - p O. Errors are independent
    between classes. Sampling: E[R] p (1 - p). A class that drowns in the noise has an interval of about [0, 1].
    """
    return _figure(_recalls(matrix))


def noisy_balanced_accuracy(matrix: Released) -> Estimate:
    """Return the mean of the recalls, shapes [...]; their errors are independent (`_mean`)."""
    return _mean(_recalls(matrix), together=False)


def _recalls(matrix: Released) -> Ratio:
    """Return the moments of `recalls`."""
    # least squares of the diagonal and the rest of each row, by what was measured of both
    counts, sigma = matrix[:2]
    diagonal = np.diagonal(counts, axis1=-2, axis2=-1)
    information = np.diag([1.0, 1 / max(1, counts.shape[-1] - 1)])  # of T and O, in units of 1 / sigma^2
    measured = np.stack([diagonal, counts.sum(-1) - diagonal], -1) @ information
    if matrix.sizes is not None:
        information += 1
        measured += matrix.sizes[..., None]

    covariance = np.linalg.inv(information)
    right, wrong = np.moveaxis(measured @ covariance, -1, 0)
    rows = right + wrong
    positive = rows.clip(0)

    def moment(p: Array) -> Moment:
        part = np.stack([1 - p, -p], -1)
        noise = sigma**2 * ((part @ covariance) * part).sum(-1)
        return Moment(right - p * rows, positive * (p * (1 - p)).clip(0), noise, positive)

    return Ratio(_quotient(right, rows), moment)


# Classes: how large they are, and how often they are answered


def largest_class(matrix: Released) -> Estimate:
    """Return the share of the largest class, shapes [...]: the accuracy of a model that always answers it.

    Each class has a share of n, from `_class_sizes`. Noise makes the largest of C noisy shares too large, the more so
    the more classes are about as large. So the low end is the largest of C low ends, each of which is above the share
    of its class in at most 2.5 / C % of cases: unless one is, the largest of them is below the largest share. The
    largest of the high ends needs no such care: it is above that of the class that is in fact the largest. Some class
    has at least 1/C.
    """
    sizes, variance = _class_sizes(matrix)
    classes, ratio = sizes.shape[-1], _share(sizes, variance, matrix.n)
    each = _figure(ratio)

    # low ends that hold for all classes together
    likely = _within(ratio, float(ndtri(1 - (1 - LEVEL) / (2 * classes))))
    low = _end(each.estimate, np.zeros_like(each.estimate), likely).max(-1).clip(1 / classes)
    estimate = each.estimate.max(-1)
    return Estimate(estimate, np.minimum(low, estimate), each.high.max(-1))


def answered(matrix: Released) -> Answered:
    """Return which classes the model never or hardly ever answered among the n held-out units, and of which the noise
    hides it, shapes [..., C].

    A is how often a class was answered, its column, plus 1/C of what the noisy counts lack of n: noise of variance
    (C - 1) sigma^2. S is its size (`_class_sizes`), whose noise is independent of that of A: the indicators of a row
    and of a column share one count, which is 1/C of each, so off the constant table their product is 1 - C^2 / C^2 = 0.

    - hardly answered: A is below HARDLY S, and A - S / 2 is below 0 by more than its noise, whose variance is that of A
      and a quarter of that of S. Here A counts as 0 if it is negative, which names a class more rarely. Of C classes,
      each is named by mistake in at most 5 / C % of cases; so with 95 % no class is named that was answered half as
      often as it occurs, or more. A class that hardly occurs is not named: S / 2 is within the noise.
    - perhaps unanswered: the others whose A is within DEVIATIONS of its noise of 0.

    Sampling is left out: it is about these units, of which the noise alone is unknown.
    """
    counts, sigma, n = matrix[:3]
    classes = counts.shape[-1]
    sizes, of_sizes = _class_sizes(matrix)
    answers, of_answers = _totals(counts.sum(-2), counts, n), (classes - 1) * sigma**2

    # one-sided, and for all classes together
    far = float(ndtri(1 - (1 - LEVEL) / classes)) * math.sqrt(of_answers + of_sizes / 4)
    hardly = (answers < HARDLY * sizes) & (answers.clip(0) - sizes / 2 < -far)
    return Answered(hardly, ~hardly & (answers <= DEVIATIONS * math.sqrt(of_answers)))


def _class_sizes(matrix: Released) -> tuple[Array, float]:
    """Return the sizes of the classes, [..., C], which add up to n, and the variance of their noise.

    Of the table: its rows, of variance (C - 1) sigma^2 (`_totals`). `sizes` measure the same with (C - 1) / C sigma^2,
    as independently, so the mean by the variances has (C - 1) / (C + 1) sigma^2.
    """
    counts, sigma, n = matrix[:3]
    classes = counts.shape[-1]
    rows, variance = _totals(counts.sum(-1), counts, n), (classes - 1) * sigma**2
    if matrix.sizes is None:
        return rows, variance
    released = matrix.sizes + (n - matrix.sizes.sum(-1))[..., None] / classes
    return (rows + classes * released) / (classes + 1), variance / (classes + 1)


def _totals(sums: Array, counts: Array, n: int) -> Array:
    """Return the sums of rows or of columns of noisy counts, plus for each 1/C of what the counts lack of n, so that
    they add up to n: their noise has the variance (C - 1) sigma^2 instead of C sigma^2, as in `accuracy`."""
    total: Array = sums + (n - counts.sum((-2, -1)))[..., None] / counts.shape[-1]
    return total


# Figures of noisy histograms


def at_half(table: Released) -> Released:
    """Return the confusion matrix [..., 2, 2] of two classes whose noisy histograms [..., 1, 2, BINS] were released.

    The second class is answered if its probability is at least 1/2, which is an edge between bins, so that each count
    is the sum of half of the bins: a tie, which a model answers with the first class, is all that differs. The noise is
    larger than that of a confusion matrix, sqrt(BINS / 2) times that of a bin, and nothing more is spent.
    """
    counts = table.counts[..., 0, :, :]
    halves = counts.reshape(*counts.shape[:-1], 2, BINS // 2).sum(-1)
    return Released(halves, table.deviation * math.sqrt(BINS / 2), table.n)


def aucs(table: Released) -> Estimate:
    """Return the area under the ROC curve of each label, shapes [..., L], of scores as they are binned: two in one bin
    are a tie, which counts half.

    With a, b the counts of negatives and positives, K_ij = 1 for i < j, 1/2 for i = j and 0 otherwise, it is the p at
    which a^T (K - p) b = 0. With g = (K - p) b, h = (K - p)^T a and F = |K - p|^2, the sum of squares:

    - sampling: each negative in bin i adds g_i, each positive in bin j h_j, of mean 0 at the true p: to first order sum
      a_i g_i^2 + sum b_j h_j^2;
    - noise of a and b: sigma^2 (|g|^2 + |h|^2) + sigma^4 F.

    Both are for counts without noise. With it |g|^2 and |h|^2 are sigma^2 F too large on average, and g_i^2 by sigma^2
    times the squares in row i, which is subtracted.
    """
    return _figure(_aucs(table))


def noisy_auc(table: Released) -> Estimate:
    """Return the mean of the labels' AUC, shapes [...]. One example has all labels, so that their sampling errors may
    go together (`_mean`)."""
    ratio = _aucs(table)
    if ratio.estimate.shape[-1] == 1:
        return Estimate(*(part[..., 0] for part in _figure(ratio)))
    return _mean(ratio, together=True)


def _aucs(table: Released) -> Ratio:
    """Return the moments of `aucs`."""
    counts, sigma = table[:2]
    negatives, positives = counts[..., 0, :], counts[..., 1, :]
    bins = counts.shape[-1]
    kernel = np.triu(np.ones((bins, bins)), 1) + np.eye(bins) / 2
    below, above = positives @ kernel.T, negatives @ kernel  # [..., bins]: K b and K^T a
    pairs = negatives.sum(-1) * positives.sum(-1)
    ordered = (negatives * below).sum(-1)
    slope = negatives.sum(-1).clip(0) * positives.sum(-1).clip(0)

    def moment(p: Array) -> Moment:
        q = p[..., None]
        g, h = below - q * positives.sum(-1)[..., None], above - q * negatives.sum(-1)[..., None]
        by_row, by_column = (  # [..., bins], the squares of K - p
            (kernel**2).sum(axis) - 2 * q * kernel.sum(axis) + bins * q**2 for axis in (1, 0)
        )
        excess = sigma**4 * by_row.sum(-1)

        sampling = (negatives * (g**2 - sigma**2 * by_row) + positives * (h**2 - sigma**2 * by_column)).sum(-1)
        noise = sigma**2 * ((g**2).sum(-1) + (h**2).sum(-1)) - excess
        return Moment(ordered - p * pairs, sampling.clip(0), np.maximum(noise, excess), slope)

    # The product of two negative sums is no number of pairs.
    return Ratio(_quotient(ordered, np.where(slope > 0, pairs, 0)), moment)


# Intervals


def _share(part: Array, variance: float, n: int) -> Ratio:
    """Return the moments of a part of n units, [...], of whose noise the variance is known."""

    def moment(p: Array) -> Moment:
        return Moment(part - p * n, n * p * (1 - p), np.full_like(p, variance), np.full_like(p, n))

    return Ratio(part / n, moment)


def _within(ratio: Ratio, deviations: float) -> Callable[[Array], NDArray[np.bool_]]:
    """Return the test of whether T - p R, at p, is within `deviations` of its standard deviation."""

    def within(p: Array) -> NDArray[np.bool_]:
        at = ratio.moment(p)
        return np.abs(at.value) <= deviations * np.sqrt(at.sampling + at.noise)

    return within


def _quotient(top: Array, bottom: Array) -> Array:
    """Return top / bottom, or 1/2 if bottom is not positive: nothing is known then."""
    return np.divide(top, bottom, out=np.full_like(top, 0.5), where=bottom > 0)


def _figure(ratio: Ratio) -> Estimate:
    """Return the ratio, kept in [0, 1], and on each of its sides the p at which T - p R leaves what is likely at p."""
    estimate = np.asarray(ratio.estimate, np.float64).clip(0, 1)

    def likely(p: Array) -> NDArray[np.bool_]:
        return _likely(ratio.moment(p), p)

    return Estimate(estimate, *(_end(estimate, np.full_like(estimate, edge), likely) for edge in (0.0, 1.0)))


def _end(inside: Array, farthest: Array, likely: Callable[[Array], NDArray[np.bool_]]) -> Array:
    """Return the first point from `inside` to `farthest` that is not likely; farthest, if that is."""
    # bisection: the likely side is that of `inside`
    whole, outside = likely(farthest), farthest
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        within = likely(middle)
        inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
    return np.where(whole, farthest, outside)


def _likely(moment: Moment, p: Array) -> NDArray[np.bool_]:
    """Return whether the values are among the LEVEL likeliest at p.

    In deviations, the value d is N(x, 1) with x = 0 at p itself, and from -l = -p R to u = (1 - p) R at other p. Its
    -2 log of the likelihood ratio is d^2 - (d - x)^2 at the nearest such x: d^2 inside, 2 u d - u^2 above u, 2 l |d| -
    l^2 below -l. It is at most c for d from -lower(c) to upper(c), and c is such that these contain LEVEL.
    """
    scale = np.sqrt(moment.sampling + moment.noise)
    below, above = p * moment.slope / scale, (1 - p) * moment.slope / scale

    def limit(c: Array, edge: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            beyond = np.where(edge > 0, (c + edge**2) / (2 * edge), np.inf)
        return np.where(c <= edge**2, np.sqrt(c), beyond)

    low, high = np.zeros_like(scale), np.full_like(scale, 3.85)  # chi^2 of a single free value: 3.84 always suffices
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = ndtr(limit(middle, above)) - ndtr(-limit(middle, below)) >= LEVEL
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)

    d = moment.value / scale
    likely: NDArray[np.bool_] = (-limit(high, below) <= d) & (d <= limit(high, above))
    return likely


def _mean(ratio: Ratio, together: bool) -> Estimate:
    """Return the mean of ratios [..., k] over the last axis.

    Each end is as far from it as independent errors of the parts' sizes on that side add up: by the root of the sum of
    squares (Zou and Donner 2008, Statistics in Medicine 27, "MOVER"). The parts' intervals are those with T - p R
    within 1.96 deviations, beyond [0, 1] too: cut off, errors would no longer add up to 0. A part without an end, R
    being lost in the noise, may be all of [0, 1], which is added in full: the interval of a mean with such parts, or
    with parts that hardly stand out, covers the true value more than 95 % of the time.

    together: sampling errors of any dependence. The deviation of a sum is at most the sum of deviations, so the
    interval is wide enough for each, and too wide for most.
    """

    # a part whose interval has no end is lost in the noise, and counts as all of [0, 1]
    likely = _within(ratio, DEVIATIONS)
    ends = [_end(ratio.estimate, ratio.estimate + far, likely) for far in (-FAR, FAR)]
    bounded = (ends[0] > ratio.estimate - FAR) & (ends[1] < ratio.estimate + FAR)
    # The noise of R shifts T / R, which a mean of many ratios would keep: to second order by (p Var(R) - Cov(T, R)) /
    # R^2 (Cochran 1977, Sampling Techniques, Section 6.8), half the derivative by p of Var(T - p R); here a difference.
    step = 1e-3
    after, before = ratio.moment(ratio.estimate + step), ratio.moment(ratio.estimate - step)
    bias = (after.noise - before.noise) / (4 * step * np.maximum(after.slope, 1e-99) ** 2)
    estimates = np.where(bounded, ratio.estimate - bias, ratio.estimate.clip(0, 1))

    at = ratio.moment(estimates.clip(0, 1))
    sampled = np.sqrt(at.sampling / (at.sampling + at.noise))  # the share of sampling in the deviation

    def distance(sides: Array) -> Array:
        known, lost = np.where(bounded, np.abs(sides), 0), np.where(bounded, 0, sides)
        sampling, noise = known * sampled, known * np.sqrt(1 - sampled**2)
        dependent = sampling.sum(-1) ** 2 if together else (sampling**2).sum(-1)
        total: Array = (np.sqrt((noise**2).sum(-1) + dependent) + lost.sum(-1)) / sides.shape[-1]
        return total

    low = distance(np.where(bounded, ratio.estimate - ends[0], estimates))
    high = distance(np.where(bounded, ends[1] - ratio.estimate, 1 - estimates))
    estimate = estimates.mean(-1).clip(0, 1)
    return Estimate(estimate, (estimate - low).clip(0), (estimate + high).clip(None, 1))
