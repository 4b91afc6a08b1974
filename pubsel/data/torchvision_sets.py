"""Sets that torchvision reads and, with their checksums, downloads."""

import pickle
from pathlib import Path

import numpy as np
import torchvision.datasets as sets

from pubsel.config import Dataset, UserError, is_there
from pubsel.data.convert import Shape
from pubsel.data.folders import read_images
from pubsel.data.splits import Parts, Split, cat, from_arrays, missing


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """The parts of a set of torchvision from its files in `root`, which are fetched where `download` allows it.

    Missing where they are not there and cannot be fetched; UserError where they are there but do not read.
    """
    there = all(is_there(root / file) for file in info.options["files"])
    if not there and not download:
        raise missing(name, root)
    shape: Shape = tuple(info.shape)  # type: ignore[assignment]
    try:
        return _read(info.options["set"], root, download, shape)
    except (RuntimeError, OSError, ValueError, AssertionError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if there:
            files = ", ".join(str(root / file) for file in info.options["files"])
            raise UserError(
                f"dataset {name}: corrupt or incomplete files ({reason}): "
                f"delete {files} and run `pubsel data prepare {name}`"
            ) from None
        raise missing(name, root, f"download failed: {reason}") from None


def _read(kind: str, root: Path, download: bool, shape: Shape) -> Parts:
    if kind in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"):
        train, test = (getattr(sets, kind)(root, train=part, download=download) for part in (True, False))
        train, test = (from_arrays(np.asarray(part.data), np.asarray(part.targets)) for part in (train, test))
        return Parts(train, test)
    if kind in ("SVHN", "SVHN_extra"):
        train, test = _svhn(root, "train", download), _svhn(root, "test", download)
        return Parts(cat(train, _svhn(root, "extra", download)) if kind == "SVHN_extra" else train, test)
    train, val, test = (_flowers(root, part, download, shape) for part in ("train", "val", "test"))
    return Parts(cat(train, val), test)


def _svhn(root: Path, part: str, download: bool) -> Split:
    data = sets.SVHN(root, split=part, download=download)  # data [n, 3, 32, 32]
    return from_arrays(data.data.transpose(0, 2, 3, 1), data.labels)


def _flowers(root: Path, part: str, download: bool, shape: Shape) -> Split:
    """The photographs (500 pixels or more) at `shape`."""
    data = sets.Flowers102(root, split=part, download=download, loader=lambda path: Path(path))
    paths, labels = zip(*(data[i] for i in range(len(data))), strict=True)
    return Split(read_images(paths, shape), from_arrays(np.zeros((0, 1, 1), np.uint8), np.asarray(labels)).y)
