"""Private selection by votes: which of several public sets explains the private examples best, or whether none does.
pubsel's own: no paper.

`pubsel.selection.coverage` counts for each candidate the private examples that are like its own; many are like several
candidates, which then have almost the same score. Here an example counts in full only for the candidate that explains
it best. Neighbours differ by one private example, or one person with all their examples, that is there or not:

1. `gaussians`, of the public features alone: the directions in which all candidates together vary most, and the mean
   and the covariance (Ledoit and Wolf 2004) of each candidate's examples in these directions, and in what they leave
   over.
2. A candidate explains a private example that lies in one of its regions (`coverage.regions`). The example has a whole
   vote for the candidate under whose Gaussian it is most likely, of those that explain it, and OTHERS of a vote for
   each other one that explains it. If no candidate explains it, it has none.
3. The score of a candidate counts the votes in its regions, in each region at most its share of all n, as in coverage.
   "None" has the score 0.6 n, whatever the private data are.

With whole votes for the others, this would be coverage. With no votes for them, parts of one set would share the votes
of the examples that are like it, and "none" would be ahead of each.

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
from torch import Tensor

from pubsel.privacy.people import UNIT
from pubsel.selection.coverage import LEAST, NONE, Array, Private, halves, one_by_one, regions, scale_of, score

OTHERS = (3, 4)  # of a vote, for a candidate that explains an example, though another one explains it better
DIRECTIONS = 20  # that the candidates have in common
EACH = 200  # examples of a candidate that these follow from, at most: with many candidates, all would fill the memory


class Gaussians(NamedTuple):
    """How the examples of J candidates are distributed. shift, scale: [d]; directions: [k, d], orthonormal; means: [J,
    k + 1]; whiten: [J, k + 1, k + 1], by which deviations from a mean are brought to variance 1; logs: [J], of the
    volumes of the covariances."""

    shift: Array
    scale: Array
    directions: Array
    means: Array
    whiten: Array
    logs: Array

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
            z = self.whiten @ (self.place(row) - self.means)[..., None]  # [J, k + 1, 1]
            likely: Array = -np.square(z[..., 0]).sum(-1) / 2 - self.logs
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

    # Of each candidate the half that its regions' directions follow from.
    places = Gaussians(shift, scale, np.ascontiguousarray(directions), *[np.zeros(0)] * 3)
    means, whiten, logs = [], [], []
    for name, public in candidates.items():
        q = places.place(halves(public, name)[0])
        values, vectors = np.linalg.eigh(ledoit_wolf(q)[0])
        values = np.maximum(values, 1e-12 * values[-1])
        means.append(q.mean(0))
        whiten.append(vectors.T / np.sqrt(values)[:, None])
        logs.append(np.log(values).sum() / 2)
    return places._replace(means=np.array(means), whiten=np.array(whiten), logs=np.array(logs))


def ballot(likely: Array, regions: list[int | None], weight: int) -> list[int]:
    """Return what one example adds to each of J candidates, from 0 to its weight, in steps of 1 / UNIT.

    likely: [J]; regions: of the example, None where it is in none; weight: of the example, in the same steps."""
    best = max((value for value, region in zip(likely, regions, strict=True) if region is not None), default=0.0)
    some = weight * OTHERS[0] // OTHERS[1]
    return [
        0 if region is None else weight if value == best else some
        for value, region in zip(likely, regions, strict=True)
    ]


def scores(private: Private, candidates: Mapping[str, Tensor], with_none: bool) -> dict[str, int]:
    """Return the score of each candidate, and of NONE if it is one, in steps of 1 / UNIT. NOT private.

    candidates: the public features [m, d] of each. UsageError if one has too few examples."""
    places = [regions(public, name) for name, public in candidates.items()]
    likelihoods = gaussians(candidates)

    # From here on private examples are read.
    sums = [[0] * len(place.shares) for place in places]
    for row, weight in zip(one_by_one(private.x), private.weights, strict=True):
        inside = [place.of(row) for place in places]
        if any(region is not None for region in inside):
            for each, region, vote in zip(sums, inside, ballot(likelihoods.of(row), inside, weight), strict=True):
                if region is not None:
                    each[region] += vote

    counted = zip(candidates, places, sums, strict=True)
    each_score = {name: score(place, each, private.units) for name, place, each in counted}
    return each_score | ({NONE: int(LEAST * private.units * UNIT)} if with_none else {})
