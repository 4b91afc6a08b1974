"""Public examples from a pool of many kinds: those that are like the private ones. pubsel's own: no paper.

A user may have no public set of the private kind, but a large mixed collection. Neighbours differ by one private
example, or one person with all their examples, that is there or counts as nothing; their number n stays. One noisy
histogram is released:

1. `clusters_of`, of the pool's features alone: their principal directions, and k-means of the directions of examples in
   these.
2. A private example is in the cluster whose centre is nearest, unless it is farther from that than nearly all of the
   pool's examples in the cluster are: then it is in none.
3. `histogram`: how many private examples are in each cluster, with discrete Laplace noise. It has half of epsilon.
4. `shares` and `draw_by_cluster`: of each cluster whose noisy count is more than noise alone would be expected to
   reach in any, as many of the pool's examples as its share of the private ones, at random. If these clusters have less
   than 60 % of the private examples, no public data is used.
5. Whitening by public data of another kind costs accuracy, and the nearest clusters of a pool may be of another kind.
   `covered`, with the other half of epsilon: whether the drawn examples, as a set, cover 60 % of the private ones, as
   `pubsel.selection.coverage` counts; otherwise no public data is used.

**Sensitivity.** One example more raises one count by one, and changes no other: clusters are of public data, and an
example's cluster is computed from this example alone. A person's examples weigh one together, so the counts move by at
most one in L1. With noise of P(z) proportional to exp(-epsilon |z|), independent for each cluster, the histogram is
epsilon-private for any number of clusters (Dwork, McSherry, Nissim and Smith 2006). The draw follows from the noisy
histogram, the pool, public random numbers and n, which is public, and spends nothing more; so step 5 is a choice
between a public set and none, whose scores one example raises by at most one. Epsilons of the two add up. How many
examples are of each set may be shown, since all of it follows from what is released.

**In floating point.** Counts are whole numbers of steps of 1 / UNIT, and the noise is drawn exactly, by integers
(`discrete_laplace`). Features are rounded as `coverage` says: the record has its caution.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data.embeddings import BLOCK, Part, feature_rows
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.lattice import discrete_laplace
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import Source, Sources
from pubsel.selection import permute_and_flip
from pubsel.selection.coverage import FEWEST, LEAST, Private, counts, regions, score

SAMPLE = 50_000  # examples of the pool that clusters are made from
MOST_CLUSTERS, EACH = 400, 20  # clusters; examples of the sample that each should have on average
DIRECTIONS = 64
FEWEST_OF_POOL = 40
TYPICAL, MARGIN = 0.95, 1.1  # an example is in a cluster up to so many times the squared distance of 95 % of the pool's
NAME, NAME_ALONE = "discrete Laplace, permute-and-flip", "discrete Laplace"

Array = NDArray[np.float64]


class Features(NamedTuple):
    """A set whose features are in memory, or mapped, [n, d]."""

    x: Tensor

    @property
    def n(self) -> int:
        """Return how many examples there are."""
        return len(self.x)

    def blocks(self) -> Iterator[Tensor]:
        """Return all features in order, BLOCK rows at a time."""
        return iter(self.x.split(BLOCK))

    def rows(self, places: NDArray[np.int64]) -> Tensor:
        """Return the features of some examples."""
        return self.x[torch.from_numpy(places)]


def sample_of(parts: Sequence[Part], random: np.random.Generator) -> Tensor:
    """Return features of at most SAMPLE examples of a pool, at random, [s, d]."""
    many = sum(part.n for part in parts)
    return feature_rows(parts, np.sort(random.choice(many, min(SAMPLE, many), replace=False)))


class Clusters(NamedTuple):
    """Places of a pool's examples. shift: [d]; directions: [k, d], orthonormal; centres: [K, k]; shares: how many
    examples of the sample are in each of the K; limits: [K], the largest squared distance of an example from its
    centre."""

    shift: Array
    directions: Array
    centres: Array
    shares: list[int]
    limits: Array

    def of(self, row: Array) -> int | None:
        """Return the cluster of one example, the roots of its features [d]; None: it is in none, or not finite."""
        with np.errstate(all="ignore"):  # what is not finite is in no cluster
            inside = self.directions @ (row - self.shift)
            length = math.sqrt(float(inside @ inside))
            if not 0 < length < math.inf:
                return None
            squared = np.square(self.centres - inside / length).sum(1)
        nearest = int(squared.argmin())
        return nearest if squared[nearest] <= MARGIN * self.limits[nearest] else None

    def nearest(self, x: Tensor) -> NDArray[np.int64]:
        """Return the nearest centre of each of many public examples, features [m, d]."""
        rows = directed(self, x)
        squared = np.square(self.centres).sum(1) - 2 * rows @ self.centres.T
        return squared.argmin(1)


def directed(clusters: Clusters, x: Tensor) -> Array:
    """Return the directions of examples within those of the clusters: rows of norm 1 (or 0), [m, k], of features
    [m, d]."""
    inside = (_roots(x).numpy() - clusters.shift) @ clusters.directions.T
    return np.asarray(inside / np.sqrt(np.maximum(np.square(inside).sum(1), 1e-300))[:, None])


def _roots(x: Tensor) -> Tensor:
    """Return the roots of features, as `algorithms.roots`, in float64 and in half the memory."""
    x = x.to(torch.float64, copy=True)
    return x.abs().sqrt_().copysign_(x)


def clusters_of(sample: Tensor) -> Clusters:
    """Return the clusters of features [s, d] of a pool. UsageError if there are too few, or all are the same.

    The sample should be drawn at random from the pool, at most SAMPLE of it."""
    from sklearn.cluster import MiniBatchKMeans  # half a second, only if it is used

    # principal directions: distances in all d dimensions would be those of noise
    s, d = sample.shape
    if s < FEWEST_OF_POOL:
        raise UsageError(f"pair.pool: {s} examples are too few for a pool: give {FEWEST_OF_POOL} or more")
    x = _roots(sample).numpy()
    shift = x.mean(0)
    x -= shift
    _, directions = np.linalg.eigh(x.T @ x)
    if not x.any():
        raise UsageError("pair.pool: the features of all its examples are the same: give other public data")
    directions = np.ascontiguousarray(directions[:, ::-1][:, : min(DIRECTIONS, d)].T)

    several = max(2, min(MOST_CLUSTERS, s // EACH))
    places = Clusters(shift, directions, np.zeros((0, len(directions))), [], np.zeros(0))
    rows = directed(places, sample)
    kmeans = MiniBatchKMeans(several, random_state=0, n_init=1, batch_size=2048).fit(rows)
    places = places._replace(centres=kmeans.cluster_centers_.astype(np.float64))

    # What is typical of a cluster; one that has none of the sample takes no private example.
    nearest = places.nearest(sample)
    squared = np.square(rows - places.centres[nearest]).sum(1)
    limits = [np.quantile(squared[nearest == c], TYPICAL) if (nearest == c).any() else -1.0 for c in range(several)]
    return places._replace(shares=np.bincount(nearest, minlength=several).tolist(), limits=np.array(limits))


def noisy_counts(sums: list[int], plan: accountant.Plan, source: Source) -> list[float]:
    """Return counts with the noise of a plan of `accountant.pure`, to a tenth, from sums in steps of 1 / UNIT."""
    epsilon = Fraction(1 / plan.noise_multiplier) / UNIT
    return [round((inside + discrete_laplace(epsilon, source)) / UNIT, 1) for inside in sums]


def histogram(epsilon: float, private: Private, clusters: Clusters, with_none: bool, secret: Sources) -> list[float]:
    """Return the noisy histogram [K] of the private examples over the clusters. It has half of epsilon if none may be
    chosen (`with_none`), otherwise all of it. Nothing else that is computed here may be shown."""
    # whole numbers, so that the noise can be exact
    sums = counts(clusters, private.x, private.weights)
    return noisy_counts(sums, plan_of(epsilon, with_none), secret("selection", 0))


def covered(epsilon: float, x: Tensor | None, private: Private, secret: Sources) -> bool:
    """Return whether the features x [m, d] of examples that were drawn by a histogram, or none, are of the private
    kind: a choice with the other half of epsilon. Nothing else that is computed here may be shown.

    Fewer than FEWEST examples, and examples that are all the same, are not: they have no regions."""
    if x is None or len(x) < FEWEST:
        return False
    try:
        places = regions(x, "the examples that were drawn from pair.pool")
    except UsageError:
        return False
    inside = score(places, counts(places, private.x, private.weights), private.units)
    exponent = Fraction(1 / plan_of(epsilon, True).noise_multiplier)
    return permute_and_flip([inside, int(LEAST * private.units * UNIT)], exponent, secret("selection", 1)) == 0


def plan_of(epsilon: float, with_none: bool) -> accountant.Plan:
    """Return the plan of the histogram: half of epsilon, or all of it."""
    return accountant.pure(epsilon / 2 if with_none else epsilon, 1.0, 1, NAME if with_none else NAME_ALONE)


def pool_cost(epsilon: float, with_none: bool) -> accountant.Plan:
    """Return what both releases cost together, with the noise of the histogram."""
    return plan_of(epsilon, with_none)._replace(epsilon=epsilon, claimed_epsilon=epsilon)


def shares(noisy: list[float], n: int, plan: accountant.Plan, with_none: bool) -> Array | None:
    """Return the share of the private examples that each cluster has [K], which sum to one. None if the clusters above
    the noise have less than 60 % of the n private units, and none may be chosen: what they are like would be a part of
    the private data. Otherwise the same for all clusters if all may be noise."""
    # Noise exceeds `least` in a cluster with probability 1 / 2K: in half a cluster in all.
    inside, least = np.array(noisy), math.log(len(noisy)) * plan.noise_multiplier
    inside = np.where(inside > least, inside, 0.0)
    if with_none and inside.sum() < LEAST * n:
        return None
    return inside / inside.sum() if inside.any() else np.full(len(noisy), 1 / len(noisy))


def draw_by_cluster(
    wanted: Array, nearest: NDArray[np.integer], m: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return the places of at most m of the pool's examples, in random order: of each cluster as many as its share of
    m, or all that there are.

    wanted: `shares` [K]; nearest: the cluster of each of the pool's examples."""
    many = np.floor(m * wanted).astype(int)
    rest = min(m, round(m * float(wanted.sum()))) - many.sum()
    many[np.argsort(many - m * wanted, kind="stable")[:rest]] += 1  # to those that lost most by rounding down

    # of each cluster at random, so that which examples it is does not depend on their order
    chosen = []
    for cluster in np.flatnonzero(many):
        members = np.flatnonzero(nearest == cluster)
        chosen.append(random.choice(members, min(len(members), many[cluster]), replace=False))
    return random.permutation(np.concatenate(chosen))
