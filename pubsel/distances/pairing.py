"""What all distances have in common: the examples of both sides, and the order in which they are measured.

Candidates are taken one at a time, and the private side is computed once for each initialisation, so that neither
memory nor the private side's time grows with the number of candidates.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.data.splits import NO_CLASS
from pubsel.messages import UsageError
from pubsel.models.trained import head
from pubsel.privacy.randomness import stream
from pubsel.settings.keys import Distance

Report = Callable[[int, str, float, float], None]  # initialisation, candidate, value, seconds that it took
Build = Callable[[int], nn.Module]  # the network of an initialisation, in eval mode, on its device
Between = Callable[[str, Split], float]  # the distance of a named candidate to the private side

CHUNK = 256  # examples per pass through a network
COLUMNS = 4096  # of rows in float64 at once


def silent(i: int, name: str, value: float, seconds: float) -> None:
    """A Report that says nothing."""


def paired(
    distance: Distance,
    private: Split,
    candidates: Mapping[str, Split],
    key: str,
    report: Report,
    prepare: Callable[[int, Split, np.random.Generator], Between],
) -> dict[str, list[float]]:
    """The distance of each candidate to `private`, one value for each of `distance.initialisations`.

    prepare(i, sample, rng): the private side of initialisation i, from m private examples; rng goes on from the draw of
    these. The same m private examples, whatever the distance (the stream keeps the name of the first one). Of a
    candidate its first m examples. UsageError where a side has fewer.
    """
    for name, split in {"the private data": private, **candidates}.items():
        if len(split.x) < distance.m:
            raise UsageError(f"distance.m={distance.m}: {name} has {len(split.x)} examples; lower distance.m")
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(distance.initialisations):
        rng = stream(key, "gsd", i)
        chosen = torch.from_numpy(np.sort(rng.choice(len(private.x), distance.m, replace=False)))
        between = prepare(i, Split(private.x[chosen], private.y[chosen]), rng)
        for name, split in candidates.items():
            began = time.perf_counter()
            value = between(name, Split(split.x[: distance.m], split.y[: distance.m]))
            values[name].append(value)
            report(i, name, value, time.perf_counter() - began)
    return values


@torch.no_grad()
def penultimate(model: nn.Module, x: Tensor) -> Tensor:
    """What the last linear layer of `model` takes, float64 [n, d] on the CPU, for images x [n, c, h, w]; of examples
    that are features [n, d] already, these. UsageError for a network without a linear layer."""
    if x.dim() == 2:
        return x.double()
    layer, device = model.get_submodule(head(model)), next(model.parameters()).device
    found: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].flatten(1).cpu().double()))
    try:
        for part in x.split(CHUNK):
            model(part.to(device))
    finally:
        hook.remove()
    return torch.cat(found)


def products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T, [n, m], of rows x [n, d] and y [m, d], in float64 without a copy of either in float64."""
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for a, b in zip(x.split(COLUMNS, dim=1), y.split(COLUMNS, dim=1), strict=True):
        total.addmm_(a.double(), b.double().T)
    return total


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances [n, m], float64, of rows x [n, d] and y [m, d]."""
    a, b = (rows.double().square().sum(1) for rows in (x, y))
    return (a[:, None] + b - 2 * products(x, y)).clamp_(min=0)


def class_numbers(name: str, y: Tensor, distance: str) -> Tensor:
    """Classes 0, 1, ..., C - 1 of labels y: [n] classes, whatever their numbers, or [n, labels] of 0/1, each different
    row of which is a class. UsageError where there are no labels, or one class alone: `distance` compares labels."""
    if y.dim() == 1 and bool((y == NO_CLASS).any()):
        raise UsageError(
            f"distance={distance} needs labels, and {name} combines sets of different classes: give them one by one, "
            "or take distance=gsd, frechet or mmd"
        )
    classes, numbers = torch.unique(y, dim=0, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(
            f"distance={distance} needs labels, and {name} has none, or one class alone among its examples: give a "
            "folder of class folders, or take distance=gsd, frechet or mmd"
        )
    return numbers
