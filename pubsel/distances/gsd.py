"""Gradient Subspace Distance. Choosing Public Datasets for Private Machine Learning via Gradient Subspace Distance,
Algorithm 1 (and its workshop version, of the same title). Rows of unit length are a step of the authors' code, which
the algorithm does not have (`normalise_rows`).

GSD is NOT differentially private: it is computed from private gradients without noise.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients, random_labels, row_norms
from pubsel.gradients.subspace import projection_metric, top_k
from pubsel.messages import UsageError
from pubsel.settings.schema import setting

Labelling = Enum("Labelling", ["random", "given"])
Parameters = Enum("Parameters", ["weights", "all"])
TINY = 1e-12  # norm of a row some of whose squares may be 0 in float32


def gsd(private: DenseGradients, public: DenseGradients, k: int) -> float:
    """Return the projection metric between the top-k right singular subspaces of two gradient matrices [m, p], divided
    by sqrt(k): 0 for equal subspaces, 1 for orthogonal ones. Multiply by sqrt(k) for the raw metric of Algorithm 1."""
    return projection_metric(top_k(private, k), top_k(public, k)) / math.sqrt(k)


@dataclass
class Subspaces(Distance):
    """Settings of distances between the top-k subspaces of per-example gradients."""

    k: int = setting("dimension of the two subspaces", at_least=1)
    normalise_rows: bool = setting("scale every per-example gradient to unit length before the decomposition")
    labels: Labelling = setting("labels: random, or given; for given, both sides need labels of the private task")
    parameters: Parameters = setting("use the gradients of only the weights, or of all parameters")

    reads = "images, through per-example gradients with random labels"

    def statement(self) -> dict[str, str]:
        statement = super().statement()
        if self.labels == Labelling.given:
            statement["reads"] = "images and labels, through per-example gradients"
        return statement


@dataclass
class GSD(Subspaces):
    """Settings of GSD. UsageError if the gradients of a side do not span k dimensions."""

    title = "GSD"

    def to_private(self, draw: Draw) -> Between:
        """Return what measures candidates, with the same labels on both sides if these are random. UsageError if
        k is more than m."""
        if self.k > self.m:
            raise UsageError(f"distance.k={self.k} is more than distance.m={self.m}: lower distance.k")

        engine = engine_of(draw.model(), self)
        drawn = random_labels(draw.random, self.m, draw.classes, multi_label=draw.private.y.dim() == 2)

        def side(name: str, split: Split) -> Tensor:
            return basis_of(name, split, drawn, self, engine, draw.classes)

        private = side("the private data", draw.private)
        return lambda name, public: projection_metric(private, side(name, public)) / math.sqrt(self.k)


def engine_of(model: nn.Module, distance: Subspaces) -> PerExampleGradients:
    """Return the engine for all sides of one initialisation: what it decides about the model, and the memory of G, are
    kept."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if distance.parameters == Parameters.weights:
        names = [name for name in names if not name.endswith("bias")]
    return PerExampleGradients(model, names=names)


def basis_of(
    name: str, split: Split, drawn: Tensor, distance: Subspaces, engine: PerExampleGradients, classes: int
) -> Tensor:
    """Return the top-k subspace [p, k] of the gradients at `split`, with the labels `drawn` [m] or the given ones.
    UsageError if all of them are zero, or fewer than k are independent."""
    device = next(engine.model.parameters()).device
    y = drawn if distance.labels == Labelling.random else given_labels(split, name, classes)
    gradients = gradients_of(engine, distance, split.x.to(device), y.to(device))
    if not gradients.row_norms().any():
        raise UsageError(f"distance=gsd: on {name}, all gradients are zero: leave it out")

    try:
        return top_k(gradients, distance.k)
    except ValueError as error:
        raise UsageError(f"distance.k={distance.k}: on {name}, {error}; lower distance.k") from None


def gradients_of(engine: PerExampleGradients, distance: Subspaces, x: Tensor, y: Tensor) -> DenseGradients:
    """Return G [m, p], whole, in the memory of `engine`: gone at the next call."""
    (gradients,) = engine.blocks(x, y, rows=len(x))
    return unit_rows(gradients) if distance.normalise_rows else gradients


def unit_rows(gradients: DenseGradients) -> DenseGradients:
    """Return G in place with each row divided by its norm; rows of zeros stay."""
    rows, norms = gradients.rows, gradients.row_norms()

    # The squares of tiny numbers are 0 in float32, so such rows are scaled up first.
    small = norms < TINY
    if small.any():
        largest = rows[small].abs().amax(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        rows[small] = rows[small] / largest
        norms = row_norms(rows)

    return DenseGradients(rows.div_(norms.clamp(min=1e-30).to(rows.dtype)[:, None]))


def given_labels(split: Split, name: str, classes: int) -> Tensor:
    """Return the labels of `split`; UsageError if they are not of the private task."""
    if split.y.dim() == 1 and int(split.y.max()) >= classes:
        raise UsageError(
            f"distance.labels=given: {name} has labels outside the private task's {classes} classes; use random labels"
        )
    return split.y
