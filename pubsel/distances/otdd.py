"""Optimal transport dataset distance. Alvarez-Melis and Fusi: Geometric Dataset Distances via Optimal Transport,
NeurIPS 2020, arXiv:2002.02923, with p = 2.

It costs |x - x'|^2 + W2(alpha_y, alpha_y')^2 to carry an example to another, where alpha_y are the examples with label
y: as a Gaussian (Section 4), or, `exact`, as they are. The distance of two datasets is the root of the least mean cost;
here of the optimum itself (POT), without the entropic term of the authors' code, which also halves the squares and
takes no root.

It reads private images and labels. It is NOT differentially private: it is computed without noise.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import class_numbers, products
from pubsel.settings.schema import setting

ITERATIONS = 10**7  # of the network simplex, at most: 2,000 examples a side take some 10^5


class Labelled(NamedTuple):
    """A dataset as OTDD needs it."""

    x: Tensor  # [n, d]
    y: Tensor  # [n], 0, ..., C - 1, each of them there
    squares: Tensor  # squared norms of the rows, [n]
    means: Tensor  # of the classes, [C, d]
    spreads: Tensor  # traces of their sample covariances, [C]; 0 for a class of one example


def labelled_examples(x: Tensor, y: Tensor) -> Labelled:
    """Return examples x: images [n, c, h, w] of 0 to 255, which count as numbers in [0, 1] side by side, or rows
    [n, d]; of classes y [n] = 0, ..., C - 1."""
    x = x.flatten(1).float() / 255 if x.dim() > 2 else x
    squares = torch.stack([row.double().square().sum() for row in x])

    counts = y.bincount()
    means = torch.stack([x[y == c].double().mean(0) for c in range(len(counts))])
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, y, squares)
    spreads = (sums - counts * means.square().sum(1)) / (counts - 1).clamp(min=1)
    return Labelled(x, y, squares, means, spreads.clamp(min=0))


def otdd(a: Labelled, b: Labelled, exact: bool = False) -> float:
    """Return the distance of two datasets, in units of x: the root of the least mean cost of carrying one to the other.

    0 for equal datasets, up to rounding: about 1e-7 of the norm of an example.
    """
    import ot  # seconds, that other distances need not wait

    inner = products(a.x, b.x)  # [n_a, n_b]
    cost = (a.squares[:, None] + b.squares - 2 * inner).clamp(min=0)

    between = _classes_exactly(a, b, cost) if exact else _gaussians(a, b, inner)  # [C_a, C_b]
    cost += between[a.y][:, b.y]

    return float(ot.emd2([], [], cost.numpy(), numItermax=ITERATIONS)) ** 0.5


def _gaussians(a: Labelled, b: Labelled, inner: Tensor) -> Tensor:
    """Return the squared W2 distances between classes as Gaussians, [C_a, C_b], from the inner products [n_a, n_b] of
    examples.

    The trace of (S_a^(1/2) S_b S_a^(1/2))^(1/2) is the sum of the singular values of R_a R_b^T for roots S = R^T R; a
    root is the centred examples over sqrt(n - 1), and their products are centred inner products: no d x d matrix.
    """
    squares = (a.means[:, None] - b.means).square().sum(2) + a.spreads[:, None] + b.spreads
    for i in range(len(a.means)):
        for j in range(len(b.means)):
            block = inner[a.y == i][:, b.y == j]
            block = block - block.mean(0) - block.mean(1, keepdim=True) + block.mean()
            freedom = max(1, len(block) - 1) * max(1, block.shape[1] - 1)
            squares[i, j] -= 2 * torch.linalg.svdvals(block).sum() / freedom**0.5
    return squares.clamp(min=0)


def _classes_exactly(a: Labelled, b: Labelled, cost: Tensor) -> Tensor:
    """Return the squared W2 distances between the examples of classes, [C_a, C_b], from squared distances
    [n_a, n_b]."""
    import ot

    squares = torch.zeros(len(a.means), len(b.means), dtype=torch.float64)
    for i in range(len(a.means)):
        for j in range(len(b.means)):
            block = cost[a.y == i][:, b.y == j].numpy()
            squares[i, j] = float(ot.emd2([], [], block, numItermax=ITERATIONS))
    return squares


@dataclass
class OTDD(Distance):
    """Settings of OTDD.

    On the pixels of the images in the private shape, or on the features of the backbone; no network is built, so that
    initialisations differ in the m private examples alone. Several labels at once: each different set of them is a
    class. UsageError if a side has no labels.
    """

    exact: bool = setting("compare two classes by optimal transport between their examples instead of their Gaussians")

    title = "OTDD"
    reads = "images, as pixels or features, and labels"

    def to_private(self, draw: Draw) -> Between:
        def side(name: str, split: Split) -> Labelled:
            return labelled_examples(split.x, class_numbers(name, split.y, "otdd"))

        private = side("the private data", draw.private)
        return lambda name, public: otdd(private, side(name, public), self.exact)
