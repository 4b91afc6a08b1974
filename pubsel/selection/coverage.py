"""Private selection by coverage: which of several public sets is like the private examples, or whether none is.
pubsel's own: no paper.

Whitening by public data of another kind costs accuracy, so a choice must be able to say "none". Neighbours differ by
one private example, or one person with all their examples, that is there or counts as nothing; their number n stays.
What is released is one name, by permute-and-flip (`pubsel.selection`) on counts:

1. `regions`, of a candidate's public features alone: the principal directions of half of its examples, and how much of
   each example of the other half these leave over. The clusters of that other half are the regions.
2. A private example is in the region whose centre is nearest, if the directions leave over no more of it than of 95 %
   of the candidate's own examples; otherwise it is in none.
3. The score of a candidate counts the private examples in its regions, in each region at most its share of all n: a
   large number of private examples in one region does not count as many. This is n times the overlap of the two
   distributions over regions, sum_c min(p_c, q_c).
4. "None" has the score 0.6 n, whatever the private data are.

**Sensitivity.** n is public and stays, and so do the shares of n and the score of "none". One example that counts
raises one count of each candidate by one, and the smaller of this count and its share by at most one: no score falls,
and none rises by more than one. A person's examples weigh one together. As `pubsel.selection` shows, permute-and-flip
on such scores is epsilon-private without the factor 2 of scores that may move in opposite directions, however many
candidates there are. Were n to grow with the example, all shares would grow too, and a score could rise by almost two.

**In floating point.** The region of an example is computed from this example alone, one after another, in a buffer of
its own: the same numbers give the same region, whatever the others are. Scores, thresholds and coins are exact
integers. But the features themselves come from blocks of images: with one image more, those of others may differ in the
last digits, and an image that lies on the edge of a region can then change its place. The sensitivity does not bound
that; the record says so (`accountant.ROUNDED`).
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from pubsel.algorithms import roots
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT, weights_of
from pubsel.privacy.randomness import Sources
from pubsel.selection import permute_and_flip

NONE = "none"  # the candidate that is no public set
LEAST = Fraction(3, 5)  # of the private examples that a candidate must cover to be ahead of none
FEWEST = 20  # public examples of which regions can be made
MOST_REGIONS, EACH = 10, 10  # regions; examples that each should have
MOST_DIRECTIONS = 20
TYPICAL = 0.95  # of the candidate's own examples are in a region

Array = NDArray[np.float64]


class Regions(NamedTuple):
    """Places of a public set's examples. shift, scale: [d]; directions: [k, d], orthonormal; centres: [K, k], of
    rows of norm 1; shares: how many public examples are in each of the K; leftover: the largest share of an example's
    squared norm that may lie outside of the directions."""

    shift: Array
    scale: Array
    directions: Array
    centres: Array
    shares: list[int]
    leftover: float

    def of(self, row: Array) -> int | None:
        """Return the region of one example, the roots of its features [d]; None: it is in none, or not finite."""
        with np.errstate(all="ignore"):  # what is not finite is in no region
            row = (row - self.shift) * self.scale
            inside = self.directions @ row
            squared, whole = float(inside @ inside), float(row @ row)
        if not (squared > 0 and math.isfinite(whole) and 1 - squared / whole <= self.leftover):
            return None
        return int(np.square(self.centres - inside / math.sqrt(squared)).sum(1).argmin())


def regions(public: Tensor, name: str) -> Regions:
    """Return the regions of public features [m, d]. UsageError names the set if it has too few examples, or all are the
    same."""
    from sklearn.cluster import KMeans  # half a second, only if it is used

    m = len(public)
    if m < FEWEST:
        raise UsageError(f"{name}: {m} public examples are too few to choose by: give {FEWEST} or more")
    x = roots(public.double()).numpy()

    # Directions follow from one half, and the other tells what is typical of examples that they have not seen.
    first, other = x[: m // 2], x[m // 2 :]
    deviations = first.std(0)
    if not deviations.any():
        raise UsageError(f"{name}: its features are the same for all examples: take other public data")
    shift, scale = first.mean(0), np.where(deviations > 0, deviations, np.inf) ** -0.5

    # The principal directions: by far fewer than examples and features, or nothing would be left over.
    k = min(MOST_DIRECTIONS, m // 4, max(1, first.shape[1] // 4))
    directions = np.linalg.svd((first - shift) * scale, full_matrices=False)[2][:k]

    rows = (other - shift) * scale
    inside = rows @ directions.T
    squared = np.square(inside).sum(1)
    leftover = np.nan_to_num(1 - squared / np.square(rows).sum(1), nan=1.0)
    inside /= np.sqrt(np.maximum(squared, 1e-300))[:, None]

    # of few features rows of norm 1 may be few different ones, and no two regions have one centre
    different = len(np.unique(inside.round(9), axis=0))
    several = max(1, min(MOST_REGIONS, m // EACH, different))
    clusters = KMeans(several, n_init=3, random_state=0).fit(inside)
    shares = np.bincount(clusters.labels_, minlength=several).tolist()
    return Regions(
        shift,
        scale,
        np.ascontiguousarray(directions),
        clusters.cluster_centers_.astype(np.float64),
        shares,
        float(np.quantile(leftover, TYPICAL)),
    )


class Places(Protocol):
    """Several places, in one of which an example may be."""

    @property
    def shares(self) -> list[int]:
        """Return how many public examples are in each place."""
        ...

    def of(self, row: Array) -> int | None:
        """Return the place of one example, the roots of its features [d]; None: it is in none, or not finite."""
        ...


def one_by_one(x: Tensor) -> Iterator[Array]:
    """Yield the roots of each example's features [d], computed from this example alone, in a buffer of its own: what
    follows from a row is the same whatever the others are. x: [n, d]."""
    row = np.empty(x.shape[1])
    with threadpool_limits(1):  # products of one row are too small for several threads
        for example in x:
            row[:] = roots(example.double()).numpy()
            yield row


def counts(places: Places, x: Tensor, weights: list[int]) -> list[int]:
    """Return the weights of the private examples x [n, d] in each place, in steps of 1 / UNIT. NOT private.

    weights: of each example, in the same steps."""
    sums = [0] * len(places.shares)
    for row, weight in zip(one_by_one(x), weights, strict=True):
        region = places.of(row)
        if region is not None:
            sums[region] += weight
    return sums


def score(places: Regions, sums: list[int], n: int) -> int:
    """Return the score of a candidate, in steps of 1 / UNIT: over its regions, the sum of the smaller of what is in it
    and of its share of n."""
    m = sum(places.shares)
    return sum(min(inside, n * UNIT * share // m) for inside, share in zip(sums, places.shares, strict=True))


class Private(NamedTuple):
    """Private examples that score candidates. x: features [n, d]; weights: of each example, in steps of 1 / UNIT;
    units: how many examples or people there are."""

    x: Tensor
    weights: list[int]
    units: int

    @classmethod
    def of(cls, x: Tensor, people: Tensor | None) -> "Private":
        """Return private examples x [n, d], each a unit or one of a person's (`weights_of`)."""
        return cls(x, weights_of(people, len(x)), len(x) if people is None else len(people))


def scores(private: Private, candidates: Mapping[str, Tensor], with_none: bool) -> dict[str, int]:
    """Return the score of each candidate, and of NONE if it is one, in steps of 1 / UNIT. NOT private.

    candidates: the public features [m, d] of each. UsageError if one has too few examples."""
    places = {name: regions(public, name) for name, public in candidates.items()}

    # From here on private examples are read.
    each = {
        name: score(place, counts(place, private.x, private.weights), private.units) for name, place in places.items()
    }
    return each | ({NONE: int(LEAST * private.units * UNIT)} if with_none else {})


def select(
    epsilon: float,
    private: Tensor,
    people: Tensor | None,
    candidates: Mapping[str, Tensor],
    with_none: bool,
    secret: Sources,
) -> tuple[str, accountant.Plan]:
    """Return the name of one candidate, or NONE, and what the choice spends; nothing else that is computed here may be
    shown.

    private: features [n, d]; people: as in `weights_of`; candidates: the public features [m, d] of each. with_none:
    NONE is a candidate. A single candidate is chosen without reading any private example. UsageError if a candidate has
    too few examples.
    """
    names = sorted(candidates)
    if len(names) + with_none == 1:
        return names[0], accountant.NOTHING

    each = scores(Private.of(private, people), {name: candidates[name] for name in names}, with_none)

    plan = accountant.pure(epsilon, 1.0, 1, "permute-and-flip")
    place = permute_and_flip([*each.values()], Fraction(1 / plan.noise_multiplier), secret("selection", 0))
    return [*each][place], plan
