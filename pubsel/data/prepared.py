"""Prepared data: one npz with train_images and test_images (uint8 [n, h, w] or [n, h, w, 3]), train_labels and
test_labels (integers [n], or 0/1 [n, labels] for multi-label sets). Other arrays in the file are ignored."""

import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import psutil
from torch import Tensor

from pubsel.data.convert import Shape, describe
from pubsel.data.splits import Listing, Parts, Split, Unread, from_arrays, labels_from, to_arrays
from pubsel.messages import UserError

CORRUPT = (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read(path: Path, classes: int | None = None, shape: Shape | None = None) -> Parts:
    """Return both parts of a prepared npz. Labels must be below `classes` and images of `shape`, if these are given.
    UserError names the file and what is wrong with it."""
    arrays = arrays_of(path, ARRAYS)
    train = _split(path, "train", arrays["train_images"], arrays["train_labels"])
    test = _split(path, "test", arrays["test_images"], arrays["test_labels"])
    _check_both(path, (train.x.shape[1:], test.x.shape[1:]), (train.y, test.y), classes, shape)
    return Parts(train, test)


def listing(path: Path, classes: int, shape: Shape) -> Listing:
    """Return both parts, checked as in `read`, with no image read yet: for a file whose arrays are larger than
    memory."""
    labels = arrays_of(path, ("train_labels", "test_labels"))
    train, train_shape = _stream(path, "train", labels["train_labels"])
    test, test_shape = _stream(path, "test", labels["test_labels"])
    _check_both(path, (train_shape, test_shape), (train.y, test.y), classes, shape)
    return Listing(train, test)


def _stream(path: Path, part: str, labels: np.ndarray) -> tuple[Unread, Sequence[int]]:
    """Return a part whose images are taken from their compressed member of the npz one after another, and their shape.
    Reading an image before the last one starts again from the beginning."""
    broken = f"{path}: corrupt, truncated or not a plain npz: delete it and prepare it again"
    try:
        archive = zipfile.ZipFile(path)
        member = archive.open(f"{part}_images.npy")  # open as long as images are read
        shape, fortran, dtype = _header(member)
        first = member.tell()
        has = archive.getinfo(member.name).file_size - first
    except KeyError:
        raise UserError(f"{path}: no array {part}_images in it: it needs {', '.join(ARRAYS)}") from None
    except CORRUPT:
        raise UserError(broken) from None

    # A header may claim any shape; the archive knows how many bytes there are.
    y = labels_from(_checked(path, part, shape, dtype, labels))
    if math.prod(shape) != has:
        raise UserError(broken)
    if fortran:
        raise UserError(f"{path}: {part}_images is in Fortran order: store it in C order")
    size = math.prod(shape[1:])

    def image(i: int) -> Tensor:
        try:
            member.seek(first + i * size)
            data = member.read(size)
        except CORRUPT:
            raise UserError(broken) from None
        if len(data) < size:
            raise UserError(broken)
        return from_arrays(np.frombuffer(data, np.uint8).reshape(1, *shape[1:]).copy(), np.zeros(1)).x[0]

    channels = shape[3] if len(shape) == 4 else 1
    return Unread(image, y), (channels, *shape[1:3])


def _check_both(
    path: Path,
    shapes: tuple[Sequence[int], Sequence[int]],
    labels: tuple[Tensor, Tensor],
    classes: int | None,
    shape: Shape | None,
) -> None:
    """Raise UserError if train and test do not fit each other, or are not as conf/dataset says."""
    if tuple(shapes[0]) != tuple(shapes[1]) or labels[0].shape[1:] != labels[1].shape[1:]:
        raise UserError(f"{path}: train and test differ in the shape of their images or labels: make both alike")

    have: Shape = tuple(shapes[0])  # type: ignore[assignment]
    if shape is not None and have != shape:
        raise UserError(f"{path}: images are {describe(have)}, not {describe(shape)}: prepare it again at that size")

    for part, y in zip(("train", "test"), labels, strict=True):
        count = 0
        if y.ndim == 2:
            count = y.shape[1]
        elif len(y):
            count = int(y.max()) + 1
        if classes is not None and (count > classes or (y.ndim == 2 and count != classes)):
            raise UserError(f"{path}: {part}_labels out of range: {count} classes or labels, {classes} expected")


def arrays_of(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the named arrays of an npz. UserError if the file is absent, corrupt or lacks one of them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            absent = [name for name in names if name not in file.files]
            if absent:
                raise UserError(f"{path}: no array {', '.join(absent)} in it: it needs {', '.join(names)}")

            for name in names:
                _check_size(path, file.zip, name)
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not an npz file") from None
    except PermissionError:
        raise UserError(f"{path}: may not be read: change its permissions") from None
    except CORRUPT:
        raise UserError(f"{path}: corrupt, truncated or not a plain npz: delete it and prepare it again") from None


def _check_size(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    """Raise UserError if the header of an array claims a size that the archive does not have, or more than there is
    memory for: it may be made to fill memory. Nothing of the array is read."""
    with archive.open(f"{name}.npy") as member:
        shape, _, dtype = _header(member)
        has = archive.getinfo(f"{name}.npy").file_size - member.tell()

    takes = math.prod(shape) * dtype.itemsize
    if takes != has and not dtype.hasobject:  # a pickle is as long as it is, and refused when it is read
        raise UserError(
            f"{path}: {name} claims {takes:.3g} bytes and has {has:.3g}: corrupt, truncated or not a plain npz: delete "
            "it and prepare it again"
        )
    if takes > (free := psutil.virtual_memory().available):
        raise UserError(f"{path}: {name} takes {takes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free")


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether it is in Fortran order, and type of an array, whose file is read up to its first
    number."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)


def write(path: Path, train: Split, test: Split) -> None:
    """Write the npz of both parts, whole or not at all."""
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
    return from_arrays(images, _checked(path, part, images.shape, images.dtype, labels))


def _checked(path: Path, part: str, shape: Sequence[int], dtype: np.dtype, labels: np.ndarray) -> np.ndarray:
    """Return the labels, [n] or [n, labels], of images of this shape and type. UserError if one of them is not as it
    has to be."""
    if dtype != np.uint8:
        raise UserError(f"{path}: {part}_images is {dtype}, not uint8: store values 0 to 255 as uint8")
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] != 3) or 0 in shape[1:]:
        raise UserError(f"{path}: {part}_images has shape {list(shape)}, not [n, h, w] or [n, h, w, 3]")

    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST stores classes
    if labels.ndim not in (1, 2) or labels.dtype.kind not in ("iub" if labels.ndim == 1 else "iubf"):
        raise UserError(
            f"{path}: {part}_labels is {labels.dtype} of shape {list(labels.shape)}, "
            f"not integers [n] or 0/1 [n, labels]"
        )
    if len(labels) != shape[0]:
        raise UserError(f"{path}: {shape[0]} {part}_images but {len(labels)} {part}_labels")

    if labels.ndim == 2 and not np.isin(labels, (0, 1)).all():
        raise UserError(f"{path}: {part}_labels out of range: a multi-label array holds only 0 and 1")
    if labels.ndim == 1 and len(labels) and labels.min() < 0:
        raise UserError(f"{path}: {part}_labels out of range: {labels.min()} is below 0")
    return labels
