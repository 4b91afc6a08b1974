"""Private selection by votes: which of several public sets explains the private examples best, or whether none does.
pubsel's own: no paper.

`pubsel.selection.coverage` counts for each candidate the private examples that are like its own; many are like several
candidates, which then have almost the same score. Here an example counts in full only for the candidate that explains
it best. Neighbours differ by one private example, or one person with all their examples, that is there or counts as
nothing; their number n stays:

1. `gaussians`, of the public features alone: the directions in which all candidates together vary most, and the mean
   and the covariance (Ledoit and Wolf 2004) of each candidate's examples in these directions, and in what they leave
   over.
2. A candidate explains a private example that lies in one of its regions (`coverage.regions`) and is not less likely
   under its Gaussian than 95 % of its own examples are. The example has a whole vote for the candidate under which it
   is most likely, of those that explain it, and OTHERS of a vote for each other one that explains it. If no candidate
   explains it, it has none.
3. The score of a candidate counts the votes in its regions, in each region at most its share of all n, as in coverage.
   "None" has the score 0.6 n, whatever the private data are.

With whole votes for the others, this would be much like coverage. With no votes for them, parts of one set would share
the votes of the examples that are like it, and "none" would be ahead of each.

**Sensitivity.** n is public, and so are regions and Gaussians. One example more adds from 0 to 1 to the count of one
region of each candidate, and nothing to the others: what it adds depends on this example alone. The smaller of a count
and a constant rises by no more than the count. So no score falls, and none rises by more than one. The examples of a
person have weights that sum to at most one, and each vote is at most the weight. As `pubsel.selection` shows,
permute-and-flip on such scores is epsilon-private without the factor 2 of scores that may move in opposite directions,
however many candidates there are.

**In floating point.** Regions and likelihoods of an example are computed from this example alone, one after another
(`coverage.one_by_one`); votes, scores and coins are exact integers. As for coverage, the features themselves may be
rounded differently next to other images (coverage.ROUNDED).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pubsel.privacy.people import UNIT
from pubsel.selection.coverage import LEAST, NONE, TYPICAL, Array, Private, halves, one_by_one, regions, scale_of, score

OTHERS = (3, 4)  # of a vote, for a candidate that explains an example, though another one explains it better
DIRECTIONS = 10  # that the candidates have in common
EACH = 200  # examples of a candidate that these follow from, at most: with many candidates, all would fill the memory


class Gaussians(NamedTuple):
    """How the examples of J candidates are distributed. shift, scale: [d]; directions: [k, d], orthonormal; means: [J,
    k + 1]; whiten: [J, k + 1, k + 1], by which deviations from a mean are brought to variance 1; logs: [J], of the
    volumes of the covariances; least: [J], what a likelihood must reach if the candidate is to explain an example."""

    shift: Array
    scale: Array
    directions: Array
    means: Array
    whiten: Array
    logs: Array
    least: Array

    def place(self, rows: Array) -> Array:
        """Return the coordinates [..., k + 1] of the roots of features [..., d]: along the directions, and how far from
        them."""
        rows = (rows - self.shift) * self.scale
        inside = rows @ self.directions.T
        rest = np.square(rows).sum(-1) - np.square(inside).sum(-1)
        return np.concatenate([inside, np.sqrt(np.maximum(rest, 0))[..., None]], -1)

    def of(self, row: Array) -> Array:
        """Return the logarithms [J] of the likelihoods of one example, the roots of its features [d], less a constant;
        NaN if it is not finite."""
        with np.errstate(all="ignore"):
            return log_likelihood(self.place(row), self.means, self.whiten, self.logs)


def log_likelihood(place: Array, mean: Array, whiten: Array, log: Array) -> Array:
    """Return log likelihoods [...], less a constant, of a place [..., c] under Gaussians [...]: mean [..., c], whiten
    [..., c, c], log [...]."""
    z = whiten @ (place - mean)[..., None]  # [..., c, 1]
    likely: Array = -np.square(z[..., 0]).sum(-1) / 2 - log
    return likely


def gaussians(candidates: Mapping[str, Tensor]) -> Gaussians:
    """Return the Gaussians of candidates with public features [m, d]. UsageError as for `coverage.halves`."""
    from sklearn.covariance import ledoit_wolf  # half a second, only if it is used
    from sklearn.utils.extmath import randomized_svd

    # The common directions: each candidate counts alike, however many examples it has.
    every = [halves(public[: 2 * EACH], name)[0] for name, public in candidates.items()]
    weights = np.concatenate([np.full(len(rows), len(rows) ** -0.5) for rows in every])
    x = np.concatenate(every)
    shift, scale = np.average(x, axis=0, weights=weights**2), scale_of(x)
    k = max(1, min(DIRECTIONS, len(x) // 2, x.shape[1] // 2))
    directions = randomized_svd((x - shift) * scale * weights[:, None], k, random_state=0)[2]

    # The first half of each candidate's examples makes its Gaussian, the other tells how likely its own are.
    common = Gaussians(shift, scale, np.ascontiguousarray(directions), *[np.zeros(0)] * 4)
    each = []
    for name, public in candidates.items():
        first, other = (common.place(rows) for rows in halves(public, name))
        values, vectors = np.linalg.eigh(ledoit_wolf(first)[0])
        values = np.maximum(values, 1e-12 * values[-1])
        mean, whiten, log = first.mean(0), vectors.T / np.sqrt(values)[:, None], np.log(values).sum() / 2
        least = np.quantile(log_likelihood(other, mean, whiten, log), 1 - TYPICAL)
        each.append((mean, whiten, log, least))
    means, whitens, logs, leasts = map(np.array, zip(*each, strict=True))
    return common._replace(means=means, whiten=whitens, logs=logs, least=leasts)


def ballot(likely: Array, explained: NDArray[np.bool_], weight: int) -> list[int]:
    """Return what one example adds to each of J candidates, from 0 to its weight, in steps of 1 / UNIT.

    likely: [J]; explained: bool [J], by which candidates; weight: of the example, in the same steps."""
    best = explained & (likely == likely.max(initial=-np.inf, where=explained))
    some = weight * OTHERS[0] // OTHERS[1]
    return [weight if first else some if other else 0 for first, other in zip(best, explained, strict=True)]


def scores(private: Private, candidates: Mapping[str, Tensor], with_none: bool) -> dict[str, int]:
    """Return the score of each candidate, and of NONE if it is one, in steps of 1 / UNIT. NOT private.

    candidates: the public features [m, d] of each. UsageError if one has too few examples."""
    places = [regions(public, name) for name, public in candidates.items()]
    gaussian = gaussians(candidates)

    # From here on private examples are read.
    sums = [[0] * len(place.shares) for place in places]
    for row, weight in zip(one_by_one(private.x), private.weights, strict=True):
        inside = [place.of(row) for place in places]
        likely = gaussian.of(row)
        explained = np.array([region is not None for region in inside]) & (likely >= gaussian.least)
        for each, region, vote in zip(sums, inside, ballot(likely, explained, weight), strict=True):
            if region is not None:
                each[region] += vote

    counted = zip(candidates, places, sums, strict=True)
    each_score = {name: score(place, each, private.units) for name, place, each in counted}
    return each_score | ({NONE: int(LEAST * private.units * UNIT)} if with_none else {})
