"""Sets that torchvision reads and, with their checksums, downloads."""

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torchvision.datasets as sets
from torchvision.datasets.utils import download_url

from pubsel.data import folders
from pubsel.data.convert import Shape
from pubsel.data.images import fitted
from pubsel.data.splits import Listing, Parts, Split, cat, from_arrays, missing
from pubsel.files import plain
from pubsel.messages import UserError, limit
from pubsel.settings.datasets import Dataset, is_there

PHOTOGRAPHS = {
    "Flowers102": ("train", "val", "test"),
    "GTSRB": ("train", "test"),
    "OxfordIIITPet": ("trainval", "test"),
}


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts | Listing:
    """Return the parts of a set of torchvision from its files in `root`, which are fetched if `download` allows it;
    errors as `fetching_files` says."""
    with fetching_files(name, info, root, download):
        if info.options["set"] == "Caltech256":
            sets.Caltech256(str(root), download=download)
            return folders.read(name, info, root, download)
        return arrays(info, root, download)


@contextmanager
def fetching_files(name: str, info: Dataset, root: Path, download: bool) -> Iterator[None]:
    """Raise Missing if what is done within fails because `options.files` are not there and cannot be fetched, and
    UserError if they are there but do not read."""
    there = all(is_there(root / file) for file in info.options["files"])
    if not there and not download:
        raise missing(name, root)
    for file in info.options["files"]:
        plain(root / file)

    # The same error means a damaged file, or a download that failed: what was there before tells which.
    try:
        yield
    except (RuntimeError, OSError, ValueError, AssertionError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if met := limit(error):
            raise UserError(f"dataset {name} cannot be read now: {met}") from None
        if there:
            files = ", ".join(str(root / file) for file in info.options["files"])
            raise UserError(
                f"dataset {name}: corrupt or incomplete files ({reason}): "
                f"delete {files} and run `pubsel data prepare {name}`"
            ) from None
        raise missing(name, root, f"download failed: {reason}") from None


def fetch(name: str, info: Dataset, root: Path, file: str, download: bool) -> None:
    """Download the one file of a set into `root`. Missing if that is not allowed, has no checksum, or fails."""
    if not download or "md5" not in info.options:
        raise missing(name, root)
    try:
        download_url(info.url, root, file, info.options["md5"])
    except (OSError, RuntimeError) as error:
        raise missing(name, root, f"download failed: {error}") from None


def arrays(info: Dataset, root: Path, download: bool) -> Parts:
    """Return the parts of a set that fits into memory."""
    kind: str = info.options["set"]
    if kind in ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"):
        train, test = (getattr(sets, kind)(root, train=part, download=download) for part in (True, False))
        train, test = (from_arrays(np.asarray(part.data), np.asarray(part.targets)) for part in (train, test))
        return Parts(train, test)

    if kind in ("SVHN", "SVHN_extra"):
        train, test = _svhn(root, "train", download), _svhn(root, "test", download)
        if kind == "SVHN_extra":
            train = cat(train, _svhn(root, "extra", download))
        return Parts(train, test)

    *training, test = (_photographs(kind, root, part, download, info.image_shape) for part in PHOTOGRAPHS[kind])
    if kind == "GTSRB":  # an absent folder would shift the numbers of the classes
        folders.expected_classes(root / "gtsrb/GTSRB/Training", info)
    return Parts(functools.reduce(cat, training), test)


def _svhn(root: Path, part: str, download: bool) -> Split:
    data = sets.SVHN(root, split=part, download=download)  # data [n, 3, 32, 32]
    return from_arrays(data.data.transpose(0, 2, 3, 1), data.labels)


def _photographs(kind: str, root: Path, part: str, download: bool, shape: Shape) -> Split:
    """Return photographs of varying sizes at `shape`."""
    data = getattr(sets, kind)(root, split=part, download=download, transform=lambda image: fitted(image, shape))

    images = torch.empty((len(data), *shape), dtype=torch.uint8)
    labels = torch.empty(len(data), dtype=torch.int64)
    for i in range(len(data)):
        images[i], labels[i] = data[i]
    return Split(images, labels)
