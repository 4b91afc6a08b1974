"""The parts of a dataset, their order, and what is held out. All by fixed seeds, so that every
machine has the same examples in the same places."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pubsel.data.convert import Shape
from pubsel.data.findings import Finding
from pubsel.messages import UsageError, UserError

SEEDS = 2**32  # that numpy's RandomState takes
SEED = 0  # of every fixed order and split; numpy's RandomState stream is frozen across versions

NO_CLASS = 2**31 - 1  # for an example whose label belongs to another task: no task has this class


class Split(NamedTuple):
    """Examples: images and their labels, row by row."""

    x: Tensor  # uint8 [n, channels, height, width]
    y: Tensor  # int64 [n] classes, or float32 [n, labels] of 0/1 for multi-label sets


class Files(NamedTuple):
    """The image files of n examples."""

    names: tuple[str, ...]
    digests: Tensor  # int64 [n], of each as it was decoded, at its own size (overlap.digest)


Groups = tuple[Tensor, Tensor]  # int64 [n] each: who each training and each test example is of, a number for a person


class Parts(NamedTuple):
    """The result of a reader: both parts of a dataset as they are on disk, and what it did to them."""

    train: Split
    test: Split
    notes: tuple[str, ...] = ()
    files: tuple[Files, Files] | None = None  # of train and test, if each image is a file of the user's
    names: tuple[str, ...] = ()  # of the classes in order, if files tell
    groups: Groups | None = None  # of the people, if they were requested


class Unread(NamedTuple):
    """Examples whose images are read one at a time: together they may be larger than memory."""

    image: Callable[[int], Tensor]  # image i, uint8 [channels, height, width]; Unreadable if it is corrupt
    y: Tensor  # as in Split
    names: tuple[str, ...] = ()  # folder and name of each, if images are files
    groups: tuple[str, ...] = ()  # who each is of, if the set tells


class Listing(NamedTuple):
    """The result of a reader of many images: as Parts, with no image read yet."""

    train: Unread
    test: Unread
    notes: tuple[str, ...] = ()
    unit: str = ""  # what `groups` are, such as patient


class Images(NamedTuple):
    """The images of a user's data, each read when it is needed."""

    shape: Shape
    image: Callable[[int], tuple[Tensor, int | None]]  # image i, uint8 [*shape], and its digest as it was decoded
    # (overlap.digest; None: that of the image as it is). Unreadable for a damaged file.
    findings: Callable[[], tuple[Finding, ...]] = tuple  # once all images were read
    again: Callable[[], "Images | None"] = lambda: None  # then the same in another shape, if that is the shape of most
    any_order: bool = True  # whether they can be read in any order, several at a time


class Listed(NamedTuple):
    """The result of a reader of a user's data: n examples of both parts, with no image read yet."""

    y: Tensor  # as in Split
    test: np.ndarray | None  # bool [n], the examples of the test part; None: a fifth of the units is drawn
    classes: int
    files: tuple[str, ...]  # a stamp of each file, and what is read of it: another one if it changes
    images: Callable[[], Images]
    names: tuple[str, ...] = ()  # of the n files, as the user knows them; empty: images are no files of their own
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    shuffle: bool = False  # whether both parts are shuffled, or only one that is sorted by class
    people: np.ndarray | None = None  # int64 [n], who each example is of (examples.unit_of), if that was requested
    findings: tuple[Finding, ...] = ()
    image_column: str | None = None  # of a table, that has or names its images


Examples = TypeVar("Examples", Split, Unread)


class Unreadable(UserError):
    """A file that is there but is no image, or a damaged one."""

    def __init__(
        self, path: object, name: str, why: str = "not a readable image", remedy: str = "remove it or replace it"
    ):
        super().__init__(f"{path}: {why}: {remedy}")
        self.name = name  # of the file, without its folder


class Missing(UserError):
    """The dataset is not there. It may be prepared, downloaded, or looked for elsewhere."""


def missing(name: str, root: Path, why: str = "") -> Missing:
    """Return the one line for a dataset that is not in `root`; `why` says what was tried."""
    reason = f" ({' '.join(why.split())})" if why else ""
    return Missing(
        f"dataset {name} is not in {root}{reason}: run `pubsel data prepare {name}`, "
        f"or set data_root= or PUBSEL_DATA to the folder that has it"
    )


def check_lists(name: str, root: Path, files: Iterable[Path]) -> None:
    """Raise Missing if one of the tables or lists of a dataset is not there, in `root`."""
    for file in files:
        if not file.is_file():
            raise missing(name, root, f"no {file.relative_to(root)}")


def stamp(path: Path) -> str:
    """Return what tells a file from another one, or from an earlier state of it: whole path, size and both times, or
    that it is absent. An archive may give all its files one time of change; that of their inode is of this machine.
    UserError for a file that cannot be read."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return f"{os.path.abspath(path)}\0absent"
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return f"{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"


def from_arrays(images: np.ndarray, labels: np.ndarray) -> Split:
    """Return a split from uint8 images [n, h, w] or [n, h, w, 3] and labels [n] (classes) or [n, labels] (0/1)."""
    # channels come first here, and last in arrays
    x = torch.from_numpy(images)
    x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)  # [n, c, h, w]
    return Split(x.contiguous(), labels_from(labels))


def labels_from(labels: np.ndarray) -> Tensor:
    """Return the labels of a split from those of an array, [n] or [n, labels]."""
    return torch.from_numpy(labels.astype(np.float32 if labels.ndim == 2 else np.int64))


def to_arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [n, h, w] or [n, h, w, 3] and labels of a split: the inverse of `from_arrays`."""
    x = split.x.permute(0, 2, 3, 1).numpy()  # [n, h, w, c]
    return np.ascontiguousarray(x[..., 0] if x.shape[-1] == 1 else x), split.y.numpy()


def cat(first: Split, second: Split) -> Split:
    """Return the examples of both, the first ones first."""
    return Split(torch.cat([first.x, second.x]), torch.cat([first.y, second.y]))


def in_turn(parts: Sequence[Tensor]) -> Tensor:
    """Return rows of s tensors dealt out in turn: row i is of parts[i mod s]. A part may have one row less than the
    first."""
    # a prefix of the rows has as many of each part as can be
    dealt = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for place, part in enumerate(parts):
        dealt[place :: len(parts)] = part
    return dealt


def sorted_by_class(labels: Tensor) -> bool:
    """Return whether labels [n] never decrease and have more than one class: the first m would then be of one class."""
    return labels.ndim == 1 and len(labels) > 1 and bool((labels.diff() >= 0).all() and labels[0] != labels[-1])


def shuffled(split: Examples) -> Examples:
    """Return the split in a fixed random order, the same for every split of this length."""
    # a stream that is frozen, so that an order is the same with every version
    order = torch.from_numpy(np.random.RandomState(SEED).permutation(len(split.y)))
    if isinstance(split, Split):
        return Split(split.x[order], split.y[order])
    groups = tuple(split.groups[i] for i in order.tolist()) if split.groups else ()
    return Unread(lambda i: split.image(int(order[i])), split.y[order], groups=groups)


def in_order(what: str, split: Examples) -> tuple[Examples, tuple[str, ...]]:
    """Return the split in the order that is used: shuffled if it is sorted by class; and a note."""
    if sorted_by_class(split.y):
        return shuffled(split), (f"{what} was sorted by class, shuffled with seed {SEED}",)
    return split, ()


def listing_in_order(name: str, parts: Parts | Listing) -> Listing:
    """Return a named set in the order that is used, with no image moved yet."""
    train, test = (
        Unread(split.x.__getitem__, split.y) if isinstance(split, Split) else split
        for split in (parts.train, parts.test)
    )
    train, train_notes = in_order(f"{name}: train", train)
    test, test_notes = in_order(f"{name}: test", test)
    unit = parts.unit if isinstance(parts, Listing) else ""
    return Listing(train, test, parts.notes + train_notes + test_notes, unit)


def numbered(train: Sequence[str], test: Sequence[str]) -> Groups:
    """Return the groups of training and test examples by number, the same number for the same name on both sides."""
    _, numbers = np.unique(np.asarray([*train, *test], dtype=str), return_inverse=True)
    first, second = torch.from_numpy(numbers.astype(np.int64)).split([len(train), len(test)])
    return first, second


def draw_indices(
    name: str, y: Tensor, m: int, shots: int | None, seed: int, places: np.ndarray | None = None
) -> Tensor:
    """Return indices [m], ascending, of a random draw that follows from a seed: `shots` of each class of y [n], or all
    that it has if these are fewer; or m of all if `shots` is None, UsageError if there are fewer. places: the random
    order of all [n], which they are drawn in, where it does not follow from the seed and n.
    """
    # even seeds draw public examples, odd ones the held-out share (`_part`): the two draws stay independent
    order = torch.from_numpy(np.random.RandomState((SEED + 2 * seed) % SEEDS).permutation(len(y)))
    if places is not None:
        order = torch.from_numpy(places)
    if shots is None:
        if m > len(y):
            raise UsageError(
                f"pair.m={m}: the training split of {name} has only {len(y)} examples: use a smaller pair.m"
            )
        return order[:m].sort().values
    if y.dim() != 1:
        raise UsageError(f"pair.shots={shots}: {name} has several labels an example: give pair.m instead")

    # The first of each class in the order, so that fewer shots are a part of more.
    return torch.cat([order[y[order] == label][:shots] for label in y.unique()]).sort().values


def held_out(groups: Sequence[str], fraction: float) -> np.ndarray:
    """Return which of n examples are test examples: bool [n]. Whole groups (patients, lesions) are drawn in a fixed
    random order until at least `fraction` of the examples is reached, so no group is on both sides."""
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
    """Return the part of a file name that names its patient; the whole name if there is no pattern or no match."""
    match = re.search(pattern, file_name) if pattern else None
    return match.group(0) if match else file_name
