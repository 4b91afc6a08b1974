"""Differentially private GSD (DP-GSD). Choosing Public Datasets for Private Machine Learning via Gradient Subspace
Distance, Appendix C, Algorithms 3 and 4, in a form that holds for networks of any size.

Neighbours differ by one private example, which is there or counts as nothing; their number stays. Each initialisation
of the network is one release:

1. A Poisson sample of the private examples, with random labels, both from the secret source of the noise. Sample and
   labels are independent from example to example, so that one example more or less changes nothing about the others.
2. Each per-example gradient [p] is mapped by a public linear sketch to s numbers, and then scaled to norm 1 (`unit`).
   Scaling comes after the sketch, so that the bound c = 1 needs no property of the sketch. With c = 1 and
   A = sum_i g_i g_i^T [s, s], one example more or less moves A by g g^T, |g| <= 1.
3. The top-k subspace of A is drawn privately, in one of two ways. Public gradients pass through the same sketch, and
   any number of public sets is compared with the subspace: that is post-processing, and costs nothing.

`gauss`: A plus Gaussian noise (Dwork, Talwar, Thakurta, Zhang: Analyze Gauss, STOC 2014). What is released is
`subspace.triangle(A)`, whose norm is the Frobenius norm of A; |g g^T|_F = |g|^2 <= 1 is the sensitivity. T
initialisations are T steps of `privacy.plan`, (epsilon, delta) in all.

`bingham`: the exponential mechanism, as in Algorithm 4, with delta = 0 (`exponential_subspace`). T initialisations have
epsilon / T each.

What the paper has otherwise:
- Theorem C.1 says that Algorithm 4 is (epsilon / c^2)-private. Its density is exp(m epsilon / 2 tr(V^T A V)) with
  A = X^T X / m, so the exponent is epsilon / 2 times sum_i |V^T x_i|^2. Replacing a row moves that sum by at most c^2,
  the normalising constant as much, so that Algorithm 4 as printed is (epsilon c^2)-private. The proof scales by
  m epsilon / (2 c^2), which gives epsilon. No reading gives epsilon / c^2. It also has A = G G^T / m for G^T G / m.
- Adding or removing a row moves the sum in one direction only: the factor 1/2 is then not needed (below).
- The sampler that it cites is a Markov chain, whose draws have the wanted distribution in the limit alone. A guarantee
  for its draws is not known, so here is an exact sampler, of one vector after the other. The joint density of k
  vectors would need 1/k of the epsilon, but its known exact sampler (rejection from the matrix angular central
  Gaussian) accepts one of e^477 draws at k = 2, epsilon 0.1, on gradients of Fashion-MNIST (n = 60,000, s = 256): it is
  left out.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances import Build, Report, silent
from pubsel.distances.gsd import Labelling, Subspaces, engine_of, given_labels
from pubsel.gradients.matrix import random_labels
from pubsel.gradients.subspace import from_triangle, projection_metric, top_eigenpairs, triangle
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.accountant import Plan
from pubsel.privacy.lattice import noised
from pubsel.privacy.randomness import Source, Sources, stream, without_gaps
from pubsel.privacy.sampling import poisson_sample
from pubsel.settings.schema import setting

DPPCA = Enum("DPPCA", ["gauss", "bingham"])
ROWS, PART = 256, 16  # rows of G at once, and of a copy of them
PROPOSALS = 64  # of the rejection sampler at once


class Sketch:
    """A public linear map from gradients [p] to s dimensions (count sketch, Charikar, Chen, Farach-Colton 2002):
    the columns, in a random order, are dealt out to s sums, each with a random sign. For p <= s it changes nothing."""

    def __init__(self, p: int, s: int, random: np.random.Generator, device: torch.device):
        self.s = min(p, s)
        # columns are dealt out evenly, so that no sum takes many more than another
        place, sign = np.arange(p), np.ones(p, dtype=np.float32)
        if p > s:
            place = random.permutation(p) % s
            sign = np.float32(2) * random.integers(2, size=p, dtype=np.int8) - 1

        self.place = torch.from_numpy(place).to(device)
        self.sign = torch.from_numpy(sign).to(device)

    def __call__(self, rows: Tensor) -> Tensor:  # [n, p] -> [n, s], on the CPU
        sums = torch.zeros(len(rows), self.s, dtype=rows.dtype, device=rows.device)
        sign = self.sign.to(rows.dtype)
        for total, part in zip(sums.split(PART), rows.split(PART), strict=True):
            total.index_add_(1, self.place, part * sign)
        return sums.cpu()


def unit(rows: Tensor) -> Tensor:
    """Return rows [n, s] scaled to norm 1, float64; never more than 1, whatever is rounded. Rows of zeros, and those
    that are not finite, are zero."""
    rows = rows.double()
    rows = rows / rows.abs().amax(1, keepdim=True).clamp(min=1e-300)  # squares of 1e-200 would be 0
    rows = rows.masked_fill(~torch.isfinite(rows).all(1, keepdim=True), 0)
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1) * (1 - 1e-12)  # a norm is at least 1, or 0


def noisy(second: Tensor, noise_multiplier: float, source: Source) -> Tensor:
    """Return A [s, s], a sum of g g^T with |g| <= 1, plus symmetric noise (Analyze Gauss).

    Sensitivity: one row more or less moves triangle(A) by |g g^T|_F = |g|^2 <= 1, so the noise on it has the
    `privacy.deviation` of that: this much on the diagonal of A, 1 / sqrt(2) of it off the diagonal.
    """
    scale = accountant.deviation(noise_multiplier, 1.0)
    return from_triangle(noised(triangle(second), scale, 1.0, source), len(second))


def exponential_subspace(second: Tensor, k: int, epsilon: float, source: Source) -> Tensor:
    """Return k orthonormal vectors [s, k] by the exponential mechanism, epsilon-private; A [s, s] a sum of g g^T, |g|
    <= 1.

    One vector after the other is drawn from the unit sphere of what is orthogonal to those before, with density
    exp(epsilon / k v^T A v) / Z(A). A row g more adds (v^T g)^2, in [0, 1], to the score v^T A v of every v: the
    density before it is divided by Z grows by a factor in [1, e^(epsilon / k)], and so does Z, its integral. The
    density itself changes by a factor in [e^(-epsilon / k), e^(epsilon / k)], without a factor 2. Vectors before are
    given, so the k factors multiply (adaptive composition): epsilon in all.
    """
    a = second.numpy()
    vectors = np.zeros((len(a), 0))
    for _ in range(k):
        rest = np.eye(len(a))
        if vectors.size:
            rest = np.linalg.qr(vectors, mode="complete")[0][:, vectors.shape[1] :]
        v = rest @ vector_bingham(epsilon / k * (rest.T @ a @ rest), source)
        vectors = np.column_stack([vectors, v])
    return torch.from_numpy(np.linalg.qr(vectors)[0])


def vector_bingham(m: NDArray[np.float64], source: Source) -> NDArray[np.float64]:
    """Return a vector [q] of the unit sphere with density proportional to exp(x^T m x), m [q, q] symmetric; exactly.

    By rejection from the angular central Gaussian distribution (Kent, Ganeiber, Mardia: A New Unified Approach for the
    Simulation of a Wide Class of Directional Distributions, 2018, Section 3). With B = lambda_max - m, u = x^T B x and
    any b in (0, q], e^(-u) <= e^(-(q - b) / 2) (q / b)^(q / 2) (1 + 2 u / b)^(-q / 2), the density of the envelope,
    whose matrix is 1 + 2 B / b. The b with sum_i 1 / (b + 2 beta_i) = 1 accepts most often; no b makes the draw
    inexact.
    """
    values, vectors = np.linalg.eigh(m)
    q, beta = len(values), values[-1] - values
    b = 1.0
    if q > 1:
        b = float(brentq(lambda b: float((1 / (b + 2 * beta)).sum()) - 1, 1, q))

    while True:
        normals = without_gaps(source, PROPOSALS * q).reshape(PROPOSALS, q)
        z = normals / np.sqrt(1 + 2 * beta / b)
        x = z / np.linalg.norm(z, axis=1, keepdims=True)

        # The first proposal that is accepted is the draw; those after it are not looked at.
        u = x**2 @ beta
        accept = -u + q / 2 * np.log1p(2 * u / b) + (q - b) / 2 - q / 2 * math.log(q / b)
        accepted = np.flatnonzero(np.log1p(-np.asarray(source.random(PROPOSALS))) < accept)
        if len(accepted):
            drawn: NDArray[np.float64] = vectors @ x[accepted[0]]
            return drawn


class Side:
    """One initialisation: its network, its public sketch, and what both make of private and public examples.

    key: names the public streams of the sketch and of the public sets' random labels.
    """

    def __init__(
        self, distance: Subspaces, network: nn.Module, classes: int, multi_label: bool, s: int, key: str, i: int
    ):
        self.distance = distance
        self.classes = classes
        self.multi_label = multi_label
        self.device = next(network.parameters()).device
        self.engine = engine_of(network, distance)

        random = stream(key, "sketch", i)
        self.sketch = Sketch(self.engine.size, s, random, self.device)
        self.drawn = random_labels(random, distance.m, classes, multi_label)

    def private(self, split: Split, chosen: Tensor, source: Source) -> Iterator[Tensor]:
        """Return the rows of the examples `chosen` [n'] of a private set, in blocks [<= ROWS, s] float64, each of norm
        at most 1 and made from its own example alone: random labels are drawn one by one from the secret source. All in
        float64, since a processor rounds a row differently next to others, by 1e-7 of it in float32, and more if that
        turns a ReLU; the sensitivities are of rows that do not depend on others."""
        y = split.y[chosen]
        if self.distance.labels == Labelling.random:
            y = torch.from_numpy((np.asarray(source.random(len(chosen))) * self.classes).astype(np.int64))
            y = nn.functional.one_hot(y, self.classes).float() if self.multi_label else y
        return map(unit, self._blocks(split, chosen, y, torch.float64))

    def public(self, name: str, split: Split) -> Tensor:
        """Return the top-k subspace [s, k], float64, of the first m examples of a public set. UsageError if there are
        fewer, or if their gradients are all zero, or span fewer dimensions."""
        m = self.distance.m
        if len(split.x) < m:
            raise UsageError(f"distance.m={m}: {name} has {len(split.x)} examples; lower distance.m")

        split, y = Split(split.x[:m], split.y[:m]), self.drawn
        if self.distance.labels == Labelling.given:
            y = given_labels(split, name, self.classes)

        blocks = self._blocks(split, torch.arange(m), y)
        rows = torch.cat([unit(block) if self.distance.normalise_rows else block for block in blocks]).double()

        # [s, s] whatever m is, and its eigenvectors are the right singular vectors
        second, k = rows.T @ rows, self.distance.k
        if not second.any():
            raise UsageError(f"{name}: all its gradients are zero: leave it out, or take another model")
        values, vectors = top_eigenpairs(second, min(k, len(second)))
        if k > len(second) or not values[0] > 1e-10 * values[-1]:
            rank = int((torch.linalg.eigvalsh(second) > 1e-10 * values[-1]).sum())
            raise UsageError(f"distance.k={k}: the gradients of {name} span {rank} dimensions: lower distance.k")
        return vectors.flip(1)

    def _blocks(self, split: Split, chosen: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Return sketched gradients at the examples `chosen` with labels y, in blocks [<= ROWS, s], computed in
        `dtype`."""
        for part, labels in zip(chosen.split(ROWS), y.split(ROWS), strict=True):
            x = split.x[part].to(self.device)
            for block in self.engine.blocks(x, labels.to(self.device), len(x), dtype):
                yield self.sketch(block.rows)


def sampling_rate(expected: float, n: int) -> float:
    """Return the rate of the Poisson sample that a private measurement takes of n examples, `expected` of them on
    average. n counts as public."""
    return min(1.0, expected / n)


@dataclass
class DPGSD(Subspaces):
    """Settings of DP-GSD. Rows of the private side are always of norm 1."""

    epsilon: float | None = setting("epsilon of all released values together", over=0)
    delta: float | None = setting("gauss: delta of all released values together", over=0, below=1)
    mechanism: DPPCA = setting("gauss: noise on second moments; bingham: the exponential mechanism, delta 0")
    private_m: float = setting("expected size of the private sample; inf: all examples", at_least=1, infinite=True)
    sketch: int = setting("gradients are projected to this many dimensions", at_least=1)

    title = "DP-GSD"

    def plan(self, n: int) -> Plan:
        """Return what all values on n private examples cost together. UsageError if epsilon or delta is missing."""
        steps, rate = self.initialisations, sampling_rate(self.private_m, n)
        if self.epsilon is None:
            raise UsageError("distance=dp_gsd needs a budget: give distance.epsilon")

        if self.mechanism == DPPCA.bingham:
            return accountant.pure(self.epsilon, rate, steps, "exponential mechanism")
        if self.delta is None:
            raise UsageError("distance.mechanism=gauss: give distance.delta, such as 1e-5")
        return accountant.plan(self.epsilon, self.delta, rate, steps, 1.0)

    def release(
        self,
        build: Build,
        private: Split,
        candidates: Mapping[str, Split],
        classes: int,
        key: str,
        source: Sources,
        report: Report = silent,
    ) -> dict[str, list[float]]:
        """Return DP-GSD of each candidate to `private`, one value for each initialisation; all of them together cost
        `plan`.

        key: names the public streams; source(purpose, step): where sample, labels and noise come from, which nobody may
        know. UsageError if k is more than the dimensions of the sketch.
        """
        plan = self.plan(len(private.x))
        values: dict[str, list[float]] = {name: [] for name in candidates}

        for i in range(self.initialisations):
            side = Side(self, build(i), classes, private.y.dim() == 2, self.sketch, key, i)
            if self.k > side.sketch.s:
                raise UsageError(f"distance.k={self.k}: more than the {side.sketch.s} dimensions of distance.sketch")
            subspace = self.private_subspace(side, private, plan, source("DP-GSD", i))

            # From here on post-processing: any number of candidates costs nothing more.
            for name, split in candidates.items():
                began = time.perf_counter()
                values[name].append(projection_metric(subspace, side.public(name, split)) / math.sqrt(self.k))
                report(i, name, values[name][-1], time.perf_counter() - began)
        return values

    def private_subspace(self, side: Side, private: Split, plan: Plan, source: Source) -> Tensor:
        """Return, as one release, the top-k subspace [s, k] of a Poisson sample of the private examples."""
        second = torch.zeros(side.sketch.s, side.sketch.s, dtype=torch.float64)
        chosen = poisson_sample(source, len(private.x), plan.rate)
        for rows in side.private(private, chosen, source):
            second += rows.T @ rows

        if self.mechanism == DPPCA.gauss:
            second = noisy(second, plan.noise_multiplier, source)
            return torch.linalg.eigh(second).eigenvectors[:, -self.k :].flip(1)
        return exponential_subspace(second, self.k, 1 / plan.noise_multiplier, source)
