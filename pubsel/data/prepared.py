"""Prepared data: one npz with train_images and test_images (uint8 [n, h, w] or [n, h, w, 3]), train_labels and
test_labels (integers [n], or 0/1 [n, labels] for multi-label sets). Other arrays in the file are ignored."""

import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from pubsel.data.convert import Shape, describe
from pubsel.data.examples import people_of
from pubsel.data.images import MOST
from pubsel.data.splits import (
    Images,
    Listed,
    Listing,
    Parts,
    Split,
    Unread,
    from_arrays,
    labels_from,
    numbered,
    stamp,
    to_arrays,
)
from pubsel.files import plain, reading, unreadable, whole
from pubsel.messages import UserError, gib

CORRUPT = (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
BROKEN = "corrupt, truncated or not a plain npz: delete it and prepare it again"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read(path: Path, classes: int | None = None, shape: Shape | None = None, unit: str | None = None) -> Parts:
    """Return both parts of a prepared npz. Labels must be below `classes` and images of `shape`, if these are given.
    unit: the arrays train_UNIT and test_UNIT, or UNIT_train and UNIT_test, name the person of each example. UserError
    names the file and what is wrong with it."""
    arrays = arrays_of(path, ARRAYS)
    train = _split(path, "train", arrays["train_images"], arrays["train_labels"])
    test = _split(path, "test", arrays["test_images"], arrays["test_labels"])
    _check_both(path, (train.x.shape[1:], test.x.shape[1:]), (train.y, test.y), classes, shape)
    if not unit:
        return Parts(train, test)
    people = _people(path, unit, ("train", "test"), (len(train.y), len(test.y)))
    return Parts(train, test, groups=numbered(people[: len(train.y)], people[len(train.y) :]))


def _people(path: Path, unit: str, parts: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Return the names of the people that the examples of all parts are of, by the arrays that `unit` names; counts: of
    examples of each part."""
    # published files put the name of a part first or last
    has = set(names_in(path))
    names = [f"{part}_{unit}" for part in parts]
    if not has.issuperset(names) and has.issuperset(other := [f"{unit}_{part}" for part in parts]):
        names = other

    arrays = arrays_of(path, names)
    for name, n in zip(names, counts, strict=True):
        if arrays[name].shape != (n,) or arrays[name].dtype.kind not in "iuUS":
            raise UserError(f"{path}: {name} does not name the person of each image: store {n} integers or texts in it")
    people = [person for name in names for person in arrays[name].tolist()]
    return [person.decode(errors="replace") if isinstance(person, bytes) else str(person) for person in people]


def listing(path: Path, classes: int, shape: Shape) -> Listing:
    """Return both parts, checked as in `read`, with no image read yet: for a file whose arrays are larger than
    memory."""
    (train, test), labels = _streams(path, ("train", "test"), classes, shape)
    return Listing(Unread(train.image, labels[0]), Unread(test.image, labels[1]))


def listed_arrays(path: Path, unit: str | None) -> Listed:
    """Return a user's npz, checked as in `read`, with no image read yet. The validation part is one with the test part,
    as of a folder; without either, a fifth of its units is drawn. Classes are the labels that occur."""
    arrays = image_arrays(path)
    parts = ["train", *(part for part in ("val", "test") if f"{part}_images" in arrays)]
    streams, labels = _streams(path, parts)
    y, names = _classes(path, torch.cat(labels))

    # all parts are one listing, as of a folder, and those that are held out follow the training part
    starts = np.cumsum([0, *map(len, labels)])
    test = np.arange(len(y)) >= starts[1] if len(parts) > 1 else None

    def image(i: int) -> tuple[Tensor, None]:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return streams[part].image(i - int(starts[part])), None

    listed = Listed(
        y,
        test,
        classes=len(names),
        files=(stamp(path),),
        images=lambda: Images(streams[0].shape, image, any_order=False),
        class_names=() if names == tuple(map(str, range(len(names)))) else names,
    )
    if not unit:
        return listed
    people, findings = people_of(path.name, _people(path, unit, parts, [len(part) for part in labels]))
    return listed._replace(people=people, findings=findings)


def classes_of(path: Path, labels: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of a user's arrays, integers or texts [n] or 0/1 [n, labels], with classes numbered from 0, and
    their names. UserError if they are malformed."""
    if labels.dtype.kind not in "US":
        return _classes(path, labels_from(_checked_labels(path, "all", len(labels), labels)))
    texts = [text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in labels.tolist()]
    names, numbers = np.unique(texts, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, names))


def _classes(path: Path, y: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of a user's arrays, with classes numbered from 0, and their names. Rows of 0 and 1 are classes
    if nine tenths of them have a single 1; UserError for the others then."""
    if y.dim() == 1:
        values, numbers = y.unique(return_inverse=True)
        return numbers, tuple(map(str, values.tolist()))
    names, ones = tuple(map(str, range(y.shape[1]))), y.sum(1)
    if not len(y) or y.shape[1] < 2 or float((ones == 1).float().mean()) < MOST:
        return y, names
    if other := int((ones != 1).sum()):
        text = f"{path}: {other} of {len(y)} images have no label or several, and all others have one"
        raise UserError(f"{text}: give each one label, or leave them out")
    return y.argmax(1), names


def _streams(
    path: Path, parts: Sequence[str], classes: int | None = None, shape: Shape | None = None
) -> tuple[list["Stream"], list[Tensor]]:
    """Return the images and the labels of each part, checked as in `read`."""
    streams = [array_stream(path, f"{part}_images") for part in parts]
    arrays = arrays_of(path, [f"{part}_labels" for part in parts])
    labels = [
        labels_from(_checked_labels(path, part, stream.n, arrays[f"{part}_labels"]))
        for part, stream in zip(parts, streams, strict=True)
    ]
    _check_both(path, (streams[0].shape, streams[-1].shape), (labels[0], labels[-1]), classes, shape)
    return streams, labels


def classes_from(y: Tensor) -> int:
    """Return the number of classes of labels [n], or of labels of labels [n, labels]."""
    if y.dim() == 2:
        return y.shape[1]
    return int(y.max()) + 1 if len(y) else 0


class Stream(NamedTuple):
    """The images of an array in a npz. Reading one before the last one starts again from the beginning."""

    n: int
    shape: Shape  # channels, height, width
    image: Callable[[int], Tensor]  # image i, uint8 of this shape; UserError if the file is damaged


def names_in(path: Path) -> list[str]:
    """Return the names of a npz's arrays."""
    with reading(path, BROKEN, CORRUPT), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def image_arrays(path: Path) -> list[str]:
    """Return the names of a npz's arrays that end in images, sorted; UserError if it has none."""
    names = sorted(name for name in names_in(path) if name.endswith("images"))
    if not names:
        raise UserError(f"{path}: no array of images in it: its name must end in images, such as test_images")
    return names


def array_stream(path: Path, array: str) -> Stream:
    """Return the images of an array, which are taken from their compressed member of the npz one after another."""
    broken = f"{path}: {BROKEN}"
    try:
        archive = zipfile.ZipFile(plain(path))
        member = archive.open(f"{array}.npy")  # open as long as images are read
        shape, fortran, dtype = _header(member)
        first = member.tell()
        has = archive.getinfo(member.name).file_size - first
    except KeyError:
        raise UserError(f"{path}: no array {array} in it: it needs {', '.join(ARRAYS)}") from None
    except CORRUPT as error:
        raise unreadable(path, error, BROKEN) from None

    # A header may claim any shape; the archive knows how many bytes there are.
    _check_images(path, array, shape, dtype)
    if (claimed := math.prod(shape)) != has:
        raise UserError(f"{path}: {array} claims {claimed:.3g} bytes and has {has:.3g}: {BROKEN}")
    if fortran:
        raise UserError(f"{path}: {array} is in Fortran order: store it in C order")
    size = math.prod(shape[1:])

    def image(i: int) -> Tensor:
        with reading(path, BROKEN, CORRUPT):
            member.seek(first + i * size)
            data = member.read(size)
        if len(data) < size:
            raise UserError(broken)
        return from_arrays(np.frombuffer(data, np.uint8).reshape(1, *shape[1:]).copy(), np.zeros(1)).x[0]

    channels = shape[3] if len(shape) == 4 else 1
    return Stream(shape[0], (channels, shape[1], shape[2]), image)


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

    # the shape in conf/dataset decides models and kept features
    have: Shape = tuple(shapes[0])  # type: ignore[assignment]
    if shape is not None and have != shape:
        raise UserError(f"{path}: images are {describe(have)}, not {describe(shape)}: prepare it again at that size")

    for part, y in zip(("train", "test"), labels, strict=True):
        count = classes_from(y)
        if classes is not None and (count > classes or (y.ndim == 2 and count != classes)):
            raise UserError(f"{path}: {part}_labels out of range: {count} classes or labels, {classes} expected")


def arrays_of(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the named arrays of an npz. UserError if the file is absent, corrupt or lacks one of them."""
    try:
        with np.load(plain(path), allow_pickle=False) as file:
            absent = [name for name in names if name not in file.files]
            if absent:
                raise UserError(f"{path}: no array {', '.join(absent)} in it: it needs {', '.join(names)}")

            # An archive may be made to fill the memory.
            for name in names:
                takes, free = _claimed(path, file.zip, name), psutil.virtual_memory().available
                if takes > free:
                    raise UserError(f"{path}: {name} takes {gib(takes)}, and {gib(free)} of memory are free")
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not an npz file") from None
    except PermissionError:
        raise UserError(f"{path}: may not be read: change its permissions") from None
    except CORRUPT as error:
        raise unreadable(path, error, BROKEN) from None


def _claimed(path: Path, archive: zipfile.ZipFile, name: str) -> int:
    """Return how many bytes the header of an array claims. UserError if the archive does not have them. Nothing of the
    array is read."""
    with archive.open(f"{name}.npy") as member:
        shape, _, dtype = _header(member)
        has = archive.getinfo(f"{name}.npy").file_size - member.tell()

    takes = math.prod(shape) * dtype.itemsize
    if takes != has and not dtype.hasobject:  # a pickle is as long as it is, and refused when it is read
        raise UserError(
            f"{path}: {name} claims {takes:.3g} bytes and has {has:.3g}: corrupt, truncated or not a plain npz: delete "
            "it and prepare it again"
        )
    return takes


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
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **dict(zip(ARRAYS, values, strict=True)))


def _split(path: Path, part: str, images: np.ndarray, labels: np.ndarray) -> Split:
    _check_images(path, f"{part}_images", images.shape, images.dtype)
    return from_arrays(images, _checked_labels(path, part, len(images), labels))


def _check_images(path: Path, array: str, shape: Sequence[int], dtype: np.dtype) -> None:
    """Raise UserError if an array does not contain images."""
    if dtype != np.uint8:
        raise UserError(f"{path}: {array} is {dtype}, not uint8: store values 0 to 255 as uint8")
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] != 3) or 0 in shape[1:]:
        raise UserError(f"{path}: {array} has shape {list(shape)}, not [n, h, w] or [n, h, w, 3]")


def _checked_labels(path: Path, part: str, n: int, labels: np.ndarray) -> np.ndarray:
    """Return the labels, [n] or [n, labels], of n images. UserError if they are malformed."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST stores classes
    if labels.ndim not in (1, 2) or labels.dtype.kind not in ("iub" if labels.ndim == 1 else "iubf"):
        raise UserError(
            f"{path}: {part}_labels is {labels.dtype} of shape {list(labels.shape)}, "
            f"not integers [n] or 0/1 [n, labels]"
        )
    if len(labels) != n:
        raise UserError(f"{path}: {n} {part}_images but {len(labels)} {part}_labels")

    if labels.ndim == 2 and not np.isin(labels, (0, 1)).all():
        raise UserError(f"{path}: {part}_labels out of range: a multi-label array holds only 0 and 1")
    if labels.ndim == 1 and len(labels) and labels.min() < 0:
        raise UserError(f"{path}: {part}_labels out of range: {labels.min()} is below 0")
    return labels
