"""What a part of a dataset is, and how examples are put in order or held out. All by fixed seeds, so that every
machine has the same examples in the same places."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.config import UsageError, UserError

SEED = 0  # of every fixed order and split; numpy's RandomState stream is frozen across versions


class Split(NamedTuple):
    """Examples: images and their labels, row by row."""

    x: Tensor  # uint8 [n, channels, height, width]
    y: Tensor  # int64 [n] classes, or float32 [n, labels] of 0/1 for multi-label sets


class Parts(NamedTuple):
    """What a reader returns: both parts of a dataset as they lie on disk, and what it did to them."""

    train: Split
    test: Split
    notes: tuple[str, ...] = ()


class Missing(UserError):
    """The dataset is not there. It may be prepared, downloaded, or looked for elsewhere."""


def missing(name: str, root: Path, why: str = "") -> Missing:
    """The one line for a dataset that is not in `root`; `why` says what was tried."""
    reason = f" ({' '.join(why.split())})" if why else ""
    return Missing(
        f"dataset {name} is not in {root}{reason}: run `pubsel data prepare {name}`, "
        f"or set data_root= or PUBSEL_DATA to the folder that has it"
    )


def from_arrays(images: np.ndarray, labels: np.ndarray) -> Split:
    """A split from uint8 images [n, h, w] or [n, h, w, 3] and labels [n] (classes) or [n, labels] (0/1)."""
    x = torch.from_numpy(images)
    x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)  # [n, c, h, w]
    y = torch.from_numpy(labels.astype(np.float32 if labels.ndim == 2 else np.int64))
    return Split(x.contiguous(), y)


def to_arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, h, w] or [n, h, w, 3] and labels of a split: the inverse of `from_arrays`."""
    x = split.x.permute(0, 2, 3, 1).numpy()  # [n, h, w, c]
    return np.ascontiguousarray(x[..., 0] if x.shape[-1] == 1 else x), split.y.numpy()


def cat(first: Split, second: Split) -> Split:
    """The examples of both, the first ones first."""
    return Split(torch.cat([first.x, second.x]), torch.cat([first.y, second.y]))


def sorted_by_class(labels: Tensor) -> bool:
    """Whether labels [n] never decrease and have more than one class: the first m would be one class."""
    return labels.ndim == 1 and len(labels) > 1 and bool((labels.diff() >= 0).all() and labels[0] != labels[-1])


def shuffled(split: Split) -> Split:
    """The split in a fixed random order, the same for every split of this length."""
    order = torch.from_numpy(np.random.RandomState(SEED).permutation(len(split.y)))
    return Split(split.x[order], split.y[order])


def draw(name: str, y: Tensor, m: int, shots: int | None) -> Tensor:
    """Indices [m], ascending, of a fixed random draw: `shots` of each class of y [n], or m of all where it is None.

    UsageError where there are fewer.
    """
    order = torch.from_numpy(np.random.RandomState(SEED).permutation(len(y)))
    if shots is None:
        if m > len(y):
            raise UsageError(
                f"pair.m={m}: the training split of {name} has only {len(y)} examples: use a smaller pair.m"
            )
        return order[:m].sort().values
    if y.dim() != 1:
        raise UsageError(f"pair.shots={shots}: {name} has several labels an example: give pair.m instead")
    groups = [order[y[order] == label] for label in y.unique()]
    for label, members in zip(y.unique().tolist(), groups, strict=True):
        if len(members) < shots:
            raise UsageError(f"pair.shots={shots}: class {label} of {name} has only {len(members)} examples: lower it")
    return torch.cat([members[:shots] for members in groups]).sort().values


def held_out(groups: Sequence[str], fraction: float) -> np.ndarray:
    """Which of n examples are test examples: bool [n]. Whole groups (patients, lesions) are drawn in a fixed random
    order until at least `fraction` of the examples is reached, so no group is on both sides."""
    names, members = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    order = np.random.RandomState(SEED).permutation(len(names))
    sizes = np.bincount(members, minlength=len(names))[order]
    before = np.cumsum(sizes) - sizes  # examples held out before each group is
    chosen = np.zeros(len(names), dtype=bool)
    chosen[order[before < fraction * len(groups)]] = True
    if chosen.all():  # never all of them
        chosen[order[-1]] = False
    return chosen[members]


def group_of(file_name: str, pattern: str | None) -> str:
    """The part of a file name that names its patient; the whole name where there is no pattern or no match."""
    match = re.search(pattern, file_name) if pattern else None
    return match.group(0) if match else file_name
