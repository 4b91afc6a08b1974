"""Centres and scales of a table's columns, by public data or by one noisy histogram. pubsel's own: no paper.

Columns of a table differ by orders, so that a row of norm 1 would be one column alone. Each column is brought to
(x - centre) / scale, at most LIMIT in absolute value; a missing number is in the centre.

A histogram of each column has bins at half octaves of the magnitude, from 2^-20 to 2^20, of both signs: nobody needs
to know in which unit a column is. Counts that noise alone may reach are zero; of the others come mean and deviation,
of values clipped to the quantiles TAIL and 1 - TAIL. A column most of whose rows are lost in the noise has those of the
normal distribution that explains its counts best (`likeliest`). results/study_columns.md compares it with others.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pubsel.algorithms import FirstRelease, Frozen, Scaling
from pubsel.data import Split

SHARE = 0.3  # of mu^2, for the histogram
FEWEST = 2.6  # n mu of the histogram over the root of the number of columns, from which it is worth its price
LIMIT = 4.0  # scales from the centre
OCTAVES, PER_OCTAVE = 20, 2
TAIL = 0.02
ROWS = 0.2  # the least share of the rows that is looked for in one distribution; others are missing, or elsewhere
AROUND_ZERO = 6.0  # times likelier than another centre
ROUNDS = 10  # of expectation and maximisation


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


def likeliest(counts: Tensor, noise: float, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return centre, scale and number of rows, float64 [d], of the normal distribution that is likeliest for each
    column. counts: float64 [d, K], of n rows, with noise of this deviation on each.

    A centre is 0 or +-2^i, a scale 2^j. How likely a distribution is before its column is seen is the mean of a prior,
    which prefers centre 0 and scale 1, and of what all columns say (empirical Bayes): columns in one unit help each
    other.
    """
    sizes = 2.0 ** torch.arange(-OCTAVES, OCTAVES + 1, dtype=torch.float64)
    centre, scale = torch.cartesian_prod(torch.cat([sizes.new_zeros(1), sizes, -sizes]), sizes).T
    # wider than twice its centre, it is as one with centre 0; narrower than a 32nd of it, all of it is in one bin
    apart = (centre == 0) | ((scale <= 2 * centre.abs()) & (scale >= centre.abs() / 32))
    centre, scale = centre[apart], scale[apart]  # [H]
    below = torch.special.ndtr((edges() - centre[:, None]) / scale[:, None])
    below[:, 0], below[:, -1] = 0.0, 1.0
    shares = below.diff(dim=1)  # [H, K]

    # the logarithm of the likelihood, with the number of rows that makes it largest
    products, squares = counts @ shares.T, shares.square().sum(1)  # [d, H], [H]
    rows = (products / squares).clamp(ROWS * n, n)
    fit = rows * (products - rows * squares / 2) / noise**2

    prior = torch.where(centre == 0, AROUND_ZERO, 1.0) * (-scale.log2().abs()).exp()
    prior = weights = prior / prior.sum()
    for _ in range(ROUNDS):
        weights = (prior + (fit + weights.log()).softmax(1).mean(0)) / 2
    best = (fit + weights.log()).argmax(1)
    return centre[best], scale[best], rows.gather(1, best[:, None]).squeeze(1)


def scaling_of(counts: Tensor, noise: float = 0.0, n: int = 0) -> Scaling:
    """Return the scaling of columns from their counts in bins [d, K], of n rows. noise: the deviation of the noise on
    each; without noise, n is not used. A column without a number is as it is."""
    counts, low, high = counts.double(), edges()[:-1], edges()[1:]
    middle, width = (low + high) / 2, high - low
    nearly_zero = len(middle) // 2
    middle[nearly_zero] = width[nearly_zero] = 0.0

    # what the largest of all counts of pure noise may be
    kept = torch.where(counts < noise * math.sqrt(2 * math.log(counts.numel())), 0.0, counts)

    # mean and deviation of the values, clipped to the two quantiles
    shares = kept / kept.sum(1, keepdim=True).clamp(min=1e-30)
    below = shares.cumsum(1)
    first = (below < TAIL).sum(1).clamp(max=len(middle) - 1)
    last = (below < 1 - TAIL).sum(1).clamp(max=len(middle) - 1)
    values = middle.expand_as(shares).clamp(middle[first][:, None], middle[last][:, None])
    centre = (shares * values).sum(1)
    variance = (shares * (values - centre[:, None]).square()).sum(1)
    inside = (torch.arange(len(middle)) >= first[:, None]) & (torch.arange(len(middle)) <= last[:, None])
    variance += (shares * inside * width.square() / 12).sum(1)
    scale = torch.where(variance > 0, variance, 1.0).sqrt()

    if noise > 0:
        *others, rows = likeliest(counts, noise, n)
        lost = kept.sum(1) <= rows / 2
        centre, scale = (torch.where(lost, *pair) for pair in zip(others, (centre, scale), strict=True))
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


def released(raw: int, d: int, n: int, mu: float, length: float) -> FirstRelease:
    """Return the noisy histogram of the first `raw` of d columns of n rows, with what is made of it: the columns in
    their scale, in rows of norm `length`.

    Sensitivity sqrt(raw): a row adds 1 to at most one count of each column, so a vector of norm at most sqrt(raw); a
    row whose numbers are missing adds less. mu: that the noise has, sensitivity over deviation.
    """
    sensitivity = math.sqrt(raw)

    def decode(noisy: Tensor) -> Frozen:
        scaling = scaling_of(noisy.view(raw, -1), sensitivity / mu, n)
        return Frozen(unit=True, length=length).scaled(widened(scaling, d))

    return FirstRelease(lambda x: counts_in_bins(x[:, :raw]).flatten(), decode, sensitivity, raw * (len(edges()) - 1))
