"""Gradient Subspace Distance. Choosing Public Datasets for Private Machine Learning via Gradient Subspace Distance,
Algorithm 1 (and its workshop version, Private Data Selection by Gradient Subspace Distance).

GSD is NOT differentially private: it is computed from private gradients without noise.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances.pairing import Between, Build, Report, paired, silent
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients, random_labels, row_norms
from pubsel.gradients.subspace import projection_metric, top_k
from pubsel.messages import UsageError
from pubsel.settings.keys import Distance, Labels, Parameters

TINY = 1e-12  # norm of a row some of whose squares may be 0 in float32


def gsd(private: DenseGradients, public: DenseGradients, k: int) -> float:
    """Projection metric between the top-k right singular subspaces of two gradient matrices [m, p], divided by
    sqrt(k): 0 for equal subspaces, 1 for orthogonal ones. Multiply by sqrt(k) for the raw metric of Algorithm 1."""
    return projection_metric(top_k(private, k), top_k(public, k)) / math.sqrt(k)


def measure(
    distance: Distance,
    build: Build,
    private: Split,
    candidates: Mapping[str, Split],
    classes: int,
    key: str,
    report: Report = silent,
) -> dict[str, list[float]]:
    """GSD of each candidate to `private`, one value for each of `distance.initialisations` random networks.

    Values of one initialisation are paired: same weights, same m private examples, same labels for all candidates.
    build(i): the network of initialisation i, in eval mode, on its device. key: names the random streams.
    Raises UsageError where a side has fewer than m examples or the gradients do not span k dimensions.
    """
    if distance.k > distance.m:
        raise UsageError(f"distance.k={distance.k} is more than distance.m={distance.m}: lower distance.k")

    def prepare(i: int, sample: Split, rng: np.random.Generator) -> Between:
        engine = engine_of(build(i), distance)
        drawn = random_labels(rng, distance.m, classes, multi_label=private.y.dim() == 2)
        own = basis_of("the private data", sample, drawn, distance, engine, classes)

        def between(name: str, split: Split) -> float:
            return projection_metric(own, basis_of(name, split, drawn, distance, engine, classes)) / math.sqrt(
                distance.k
            )

        return between

    return paired(distance, private, candidates, key, report, prepare)


def engine_of(model: nn.Module, distance: Distance) -> PerExampleGradients:
    """For all sides of one initialisation: what it decides about the model, and the memory of G, are kept."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if distance.parameters == Parameters.weights:
        names = [name for name in names if not name.endswith("bias")]
    return PerExampleGradients(model, names=names)


def basis_of(
    name: str, split: Split, drawn: Tensor, distance: Distance, engine: PerExampleGradients, classes: int
) -> Tensor:
    """Top-k subspace [p, k] of the gradients at `split`, with the labels `drawn` [m] or the given ones."""
    device = next(engine.model.parameters()).device
    y = drawn if distance.labels == Labels.random else given_labels(split, name, classes)
    gradients = gradients_of(engine, distance, split.x.to(device), y.to(device))
    if not gradients.row_norms().any():
        raise UsageError(f"distance=gsd: on {name}, all gradients are zero: leave it out")
    try:
        return top_k(gradients, distance.k)
    except ValueError as error:
        raise UsageError(f"distance.k={distance.k}: on {name}, {error}; lower distance.k") from None


def gradients_of(engine: PerExampleGradients, distance: Distance, x: Tensor, y: Tensor) -> DenseGradients:
    """G [m, p], whole, in the memory of `engine`: gone at the next call."""
    (gradients,) = engine.blocks(x, y, rows=len(x))
    return unit_rows(gradients) if distance.normalise_rows else gradients


def unit_rows(gradients: DenseGradients) -> DenseGradients:
    """G in place with each row divided by its norm; rows of zeros stay."""
    rows, norms = gradients.rows, gradients.row_norms()
    small = norms < TINY
    if small.any():
        largest = rows[small].abs().amax(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        rows[small] = rows[small] / largest
        norms = row_norms(rows)
    return DenseGradients(rows.div_(norms.clamp(min=1e-30).to(rows.dtype)[:, None]))


def given_labels(split: Split, name: str, classes: int) -> Tensor:
    """The labels of `split`; UsageError where they are not of the private task."""
    if split.y.dim() == 1 and int(split.y.max()) >= classes:
        raise UsageError(
            f"distance.labels=given: {name} has labels outside the private task's {classes} classes; use random labels"
        )
    return split.y
