"""Inputs of distances: features, distances between rows, numbers of classes."""

import torch
from torch import Tensor, nn

from pubsel.data.splits import NO_CLASS
from pubsel.messages import UsageError
from pubsel.models.trained import head

CHUNK = 256  # examples per pass through a network
COLUMNS = 4096  # of rows in float64 at once


@torch.no_grad()
def penultimate(model: nn.Module, x: Tensor) -> Tensor:
    """Return what the last linear layer of `model` takes, float64 [n, d] on the CPU, for images x [n, c, h, w]; of
    examples that are features [n, d] already, these. UsageError for a network without a linear layer."""
    if x.dim() == 2:
        return x.double()
    layer, device = model.get_submodule(head(model)), next(model.parameters()).device

    features: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].flatten(1).cpu().double()))
    try:
        for part in x.split(CHUNK):
            model(part.to(device))
    finally:
        hook.remove()
    return torch.cat(features)


def products(x: Tensor, y: Tensor) -> Tensor:
    """Return x y^T, [n, m], of rows x [n, d] and y [m, d], in float64 without a copy of either in float64."""
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for a, b in zip(x.split(COLUMNS, dim=1), y.split(COLUMNS, dim=1), strict=True):
        total.addmm_(a.double(), b.double().T)
    return total


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return squared distances [n, m], float64, of rows x [n, d] and y [m, d]."""
    a, b = (rows.double().square().sum(1) for rows in (x, y))
    return (a[:, None] + b - 2 * products(x, y)).clamp_(min=0)


def class_numbers(name: str, y: Tensor, distance: str) -> Tensor:
    """Return classes 0, 1, ..., C - 1 of labels y: [n] classes, whatever their numbers, or [n, labels] of 0/1, each
    different row of which is a class. UsageError if there are no labels, only one class, or labels that are not known:
    `distance` compares labels."""
    if y.dim() == 1 and bool((y == NO_CLASS).any()):
        raise UsageError(
            f"distance={distance} needs labels, and {name} combines sets of different classes: give them one by one, "
            "or take distance=gsd, frechet or mmd"
        )

    if y.isnan().any():
        raise UsageError(
            f"distance={distance} compares labels, and {name} has some that are not known: leave these examples out, "
            "or take distance=gsd, frechet or mmd"
        )

    classes, numbers = torch.unique(y, dim=0, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(
            f"distance={distance} needs labels, and {name} has none, or one class alone among its examples: give a "
            "folder of class folders, or take distance=gsd, frechet or mmd"
        )
    return numbers
