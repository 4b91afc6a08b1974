"""Prepared data: one npz with train_images and test_images (uint8 [n, h, w] or [n, h, w, 3]), train_labels and
test_labels (integers [n], or 0/1 [n, labels] for multi-label sets). Other arrays in the file are ignored."""

import os
import pickle
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from pubsel.config import UserError
from pubsel.data.convert import Shape, describe
from pubsel.data.splits import Parts, Split, from_arrays, to_arrays

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read(path: Path, classes: int | None = None, shape: Shape | None = None) -> Parts:
    """Both parts of a prepared npz. Labels must be below `classes` and images of `shape`, where these are given.
    UserError names the file and what is wrong with it."""
    arrays = arrays_of(path, ARRAYS)
    train = _split(path, "train", arrays["train_images"], arrays["train_labels"])
    test = _split(path, "test", arrays["test_images"], arrays["test_labels"])
    if train.x.shape[1:] != test.x.shape[1:] or train.y.shape[1:] != test.y.shape[1:]:
        raise UserError(f"{path}: train and test differ in the shape of their images or labels: make both alike")
    have: Shape = tuple(train.x.shape[1:])  # type: ignore[assignment]
    if shape is not None and have != shape:
        raise UserError(f"{path}: images are {describe(have)}, not {describe(shape)}: prepare it again at that size")
    for part, split in (("train", train), ("test", test)):
        count = split.y.shape[1] if split.y.ndim == 2 else int(split.y.max()) + 1 if len(split.y) else 0
        if classes is not None and (count > classes or (split.y.ndim == 2 and count != classes)):
            raise UserError(f"{path}: {part}_labels out of range: {count} classes or labels, {classes} expected")
    return Parts(train, test)


def arrays_of(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """The named arrays of an npz. UserError where the file is absent, corrupt or lacks one of them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            absent = [name for name in names if name not in file.files]
            if absent:
                raise UserError(f"{path}: no array {', '.join(absent)} in it: it needs {', '.join(names)}")
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not an npz file") from None
    except PermissionError:
        raise UserError(f"{path}: may not be read: change its permissions") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError):
        raise UserError(f"{path}: corrupt, truncated or not a plain npz: delete it and prepare it again") from None


def write(path: Path, train: Split, test: Split) -> None:
    """The npz of both parts, written whole or not at all."""
    values = (*to_arrays(train), *to_arrays(test))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **dict(zip(ARRAYS, values, strict=True)))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _split(path: Path, part: str, images: np.ndarray, labels: np.ndarray) -> Split:
    if images.dtype != np.uint8:
        raise UserError(f"{path}: {part}_images is {images.dtype}, not uint8: store values 0 to 255 as uint8")
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3) or 0 in images.shape[1:]:
        raise UserError(f"{path}: {part}_images has shape {list(images.shape)}, not [n, h, w] or [n, h, w, 3]")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST stores classes
    if labels.ndim not in (1, 2) or labels.dtype.kind not in ("iub" if labels.ndim == 1 else "iubf"):
        raise UserError(
            f"{path}: {part}_labels is {labels.dtype} of shape {list(labels.shape)}, "
            f"not integers [n] or 0/1 [n, labels]"
        )
    if len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} {part}_images but {len(labels)} {part}_labels")
    if labels.ndim == 2 and not np.isin(labels, (0, 1)).all():
        raise UserError(f"{path}: {part}_labels out of range: a multi-label array holds only 0 and 1")
    if labels.ndim == 1 and len(labels) and labels.min() < 0:
        raise UserError(f"{path}: {part}_labels out of range: {labels.min()} is below 0")
    return from_arrays(images, labels)
