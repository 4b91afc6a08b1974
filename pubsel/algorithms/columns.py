"""Centres and scales of a table's columns, by public data or by one noisy histogram. pubsel's own: no paper.

Columns of a table differ by orders, so that a row of norm 1 would be one column alone. Each column is brought to
(x - centre) / scale, at most LIMIT in absolute value; a missing number is in the centre.

A histogram of each column has bins at half octaves of the magnitude, from 2^-20 to 2^20, of both signs: nobody needs
to know in which unit a column is. Counts that noise alone may reach are zero; of the others come mean and deviation,
of values clipped to the quantiles TAIL and 1 - TAIL. results/study_columns.md compares it with others.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pubsel.algorithms import FirstRelease, Frozen, Scaling
from pubsel.data import Split

SHARE = 0.15  # of mu^2, for the histogram
FEWEST = 2.0  # n mu of the histogram over the root of the number of columns, from which it is worth its price
LIMIT = 4.0  # scales from the centre
OCTAVES, PER_OCTAVE = 20, 2
TAIL = 0.02


def edges() -> Tensor:
    """Return the edges of the bins, float64 [K + 1], symmetric: the middle bin has what is nearly zero."""
    magnitudes = 2.0 ** (
        torch.arange(-OCTAVES * PER_OCTAVE, OCTAVES * PER_OCTAVE + 1, dtype=torch.float64) / PER_OCTAVE
    )
    return torch.cat([-magnitudes.flip(0), magnitudes])


def counts_in_bins(x: Tensor) -> Tensor:
    """Return the counts of numbers x [n, d] in each bin, float64 [d, K]; those beyond the last edges are in the last
    bins, and missing ones (NaN) in none."""
    bins = len(edges()) - 1
    place = (torch.bucketize(x.double(), edges(), right=True) - 1).clamp(0, bins - 1)  # [n, d]
    place += bins * torch.arange(x.shape[1])
    return place[~x.isnan()].bincount(minlength=bins * x.shape[1]).double().view(-1, bins)


def scaling_of(counts: Tensor, noise: float = 0.0) -> Scaling:
    """Return the scaling of columns from their counts in bins [d, K]. noise: the deviation of the noise on each."""
    counts, low, high = counts.double(), edges()[:-1], edges()[1:]
    middle, width = (low + high) / 2, high - low
    nearly_zero = len(middle) // 2
    middle[nearly_zero] = width[nearly_zero] = 0.0

    # what the largest of all counts of pure noise may be; a column without any other keeps the best of three
    kept = torch.where(counts < noise * math.sqrt(2 * math.log(counts.numel())), 0.0, counts)
    three = torch.nn.functional.avg_pool1d(counts[:, None], 3, 1, 1)[:, 0].argmax(1, keepdim=True)  # [d, 1]
    near = (torch.arange(counts.shape[1]) - three).abs() <= 1
    empty = kept.sum(1, keepdim=True) <= 0
    kept = torch.where(empty & near, counts.clamp(min=1e-3), kept)

    # mean and deviation of the values, clipped to the two quantiles
    shares = kept / kept.sum(1, keepdim=True)
    below = shares.cumsum(1)
    first = (below < TAIL).sum(1).clamp(max=len(middle) - 1)
    last = (below < 1 - TAIL).sum(1).clamp(max=len(middle) - 1)
    values = middle.expand_as(shares).clamp(middle[first][:, None], middle[last][:, None])
    centre = (shares * values).sum(1)
    variance = (shares * (values - centre[:, None]).square()).sum(1)
    inside = (torch.arange(len(middle)) >= first[:, None]) & (torch.arange(len(middle)) <= last[:, None])
    variance += (shares * inside * width.square() / 12).sum(1)
    scale = torch.where(variance > 0, variance, 1.0).sqrt()
    return centre.float(), scale.float(), torch.tensor(LIMIT)


def widened(scaling: Scaling, d: int) -> Scaling:
    """Return a scaling of the first columns as one of all d: the others have a scale of their own already."""
    centre, scale, limit = scaling
    more = d - len(centre)
    return torch.cat([centre, centre.new_zeros(more)]), torch.cat([scale, scale.new_ones(more)]), limit


def by_public(public: Tensor, raw: int) -> Scaling:
    """Return the scaling of columns by public rows [m, d], of which the first `raw` columns have no scale yet."""
    none = torch.zeros(0), torch.ones(0), torch.tensor(LIMIT)
    return widened(scaling_of(counts_in_bins(public[:, :raw])) if raw else none, public.shape[1])


def in_one_scale(private: Split, public: Mapping[str, Split], raw: int | None) -> tuple[Split, dict[str, Split]]:
    """Return private and public rows with their first `raw` columns in the scale of all public ones, each row by
    itself, so that no column alone decides a distance; what is no table (raw None) as it is."""
    if raw is None:
        return private, dict(public)
    scaled = Frozen().scaled(by_public(torch.cat([split.x for split in public.values()]), raw))
    return Split(scaled(private.x), private.y), {name: Split(scaled(x), y) for name, (x, y) in public.items()}


def released(raw: int, d: int, mu: float, length: float) -> FirstRelease:
    """Return the noisy histogram of the first `raw` of d columns, with what is made of it: the columns in their scale,
    in rows of norm `length`.

    Sensitivity sqrt(raw): a row adds 1 to at most one count of each column, so a vector of norm at most sqrt(raw); a
    row whose numbers are missing adds less. mu: that the noise has, sensitivity over deviation.
    """
    sensitivity = math.sqrt(raw)

    def decode(noisy: Tensor) -> Frozen:
        scaling = scaling_of(noisy.view(raw, -1), sensitivity / mu)
        return Frozen(unit=True, length=length).scaled(widened(scaling, d))

    return FirstRelease(lambda x: counts_in_bins(x[:, :raw]).flatten(), decode, sensitivity, raw * (len(edges()) - 1))
