"""Prepared data: one npz with train_images and test_images (uint8 [n, h, w] or [n, h, w, 3]), train_labels and
test_labels (integers [n], or 0/1 [n, labels] for multi-label sets). Other arrays in the file are ignored. A user's
arrays may have other usual names (`arrays_called`), channels first, and texts as labels."""

import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from pubsel.data.convert import Shape, describe
from pubsel.data.examples import people_of
from pubsel.data.findings import ERROR, NOTE, Finding, first_of
from pubsel.data.folders import TEST, TRAIN, VALIDATION, words_in
from pubsel.data.identifiers import about_values, left_out, may_be_ids
from pubsel.data.images import DIM, MOST, nearly_black
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
from pubsel.data.tables import label_words, may_be_sides
from pubsel.files import plain, reading, unreadable, whole
from pubsel.messages import UserError, gib
from pubsel.settings.keys import Fold

CORRUPT = (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
BROKEN = "corrupt, truncated or not a plain npz: delete it and prepare it again"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
PARTS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
OF_IMAGES = ("images", "image", "imgs", "img", "data", "x")
OF_LABELS = ("labels", "label", "targets", "target", "classes", "class", "y")
LABEL = "label"


def read(path: Path, classes: int, shape: Shape, unit: str | None = None) -> Parts:
    """Return both parts of a prepared npz. Labels must be below `classes` and images of `shape`. unit: the arrays
    train_UNIT and test_UNIT, or UNIT_train and UNIT_test, name the person of each example. UserError names the file and
    what is wrong with it."""
    arrays = arrays_of(path, ARRAYS)
    train = _split(path, "train", arrays["train_images"], arrays["train_labels"])
    test = _split(path, "test", arrays["test_images"], arrays["test_labels"])
    _check_both(path, (train.x.shape[1:], test.x.shape[1:]), (train.y, test.y), classes, shape)
    if not unit:
        return Parts(train, test)
    people = people_in(path, unit, ("train", "test"), (len(train.y), len(test.y)))
    return Parts(train, test, groups=numbered(people[: len(train.y)], people[len(train.y) :]))


def people_in(path: Path, unit: str, parts: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Return the names of the people that the examples of all parts are of, by the arrays that `unit` names; counts: of
    examples of each part. UserError for an array that does not name one person for each example."""
    # published files put the name of a part first or last
    has = set(names_in(path))
    names = [f"{part}_{unit}" for part in parts]
    if not has.issuperset(names) and has.issuperset(other := [f"{unit}_{part}" for part in parts]):
        names = other
    elif len(parts) == 1 and unit in has:
        names = [unit]

    arrays = arrays_of(path, names)
    for name, n in zip(names, counts, strict=True):
        if arrays[name].shape != (n,) or arrays[name].dtype.kind not in "iuUS":
            raise UserError(
                f"{path}: {name} does not name the person of each example: store {n} integers or texts in it"
            )
    people = [person for name in names for person in arrays[name].tolist()]
    return [person.decode(errors="replace") if isinstance(person, bytes) else str(person) for person in people]


def listing(path: Path, classes: int, shape: Shape) -> Listing:
    """Return both parts, checked as in `read`, with no image read yet: for a file whose arrays are larger than
    memory."""
    arrays = arrays_of(path, ("train_labels", "test_labels"))
    train, test = (array_stream(path, f"{part}_images") for part in ("train", "test"))
    labels = [
        labels_from(_checked_labels(path, name, stream.n, arrays[name]))
        for name, stream in zip(arrays, (train, test), strict=True)
    ]
    _check_both(path, (train.shape, test.shape), (labels[0], labels[1]), classes, shape)
    return Listing(Unread(train.image, labels[0]), Unread(test.image, labels[1]))


def unread_arrays(path: Path, used: Collection[str], unit: str | None) -> list[Finding]:
    """Return findings on the arrays of a user's npz that are not read: those that name people, and others. used: the
    names of those that are, but for the arrays that `unit` names."""
    words = {word for part in PARTS.values() for word in part}
    columns = dict[str, list[str]]()  # the same array of all parts
    for name in names_in(path):
        plain_name = "_".join(word for word in name.split("_") if word.lower() not in words)
        if name not in used and (unit is None or plain_name != unit):
            columns.setdefault(plain_name, []).append(name)
    values, lengths = dict[str, list[object] | None](), {shape_in(path, name)[:1] for name in used}
    for column in columns:
        heads = [_head(path, name) for name in columns[column]]
        if all(len(shape) == 1 and (may_be_ids(column) or shape in lengths) for shape, _ in heads):
            # objects, such as texts of pandas, are not read
            objects = any(dtype.hasobject for _, dtype in heads)
            arrays = {} if objects else arrays_of(path, columns[column])
            values[column] = None if objects else [value for array in arrays.values() for value in array.tolist()]
    left, findings = left_out(path.name, values, unit, "array")
    rest = {column: each for column, each in values.items() if each is not None and column not in left}
    findings += about_values(path.name, rest, unit, "example")
    sides = [name for name in {*names_in(path)} - {*used} if may_be_sides(name) and len(shape_in(path, name)) == 1]
    if sides and not any(words_in(name) & {*TRAIN} for name in used):
        text = f"{path.name}: array {min(sides)} may say train or test, and is not read"
        findings.append(Finding("split", ERROR, text, "store x_train, y_train, x_test and y_test in place of x and y"))
    if others := [name for column, names in columns.items() if column not in left for name in names]:
        findings.append(Finding("columns", NOTE, f"{path.name}: arrays that are not read: {first_of(others, 10)}"))
    return findings


def listed_arrays(path: Path, unit: str | None) -> Listed:
    """Return a user's npz, checked as in `read`, with no image read yet. The validation part is one with the test part,
    as of a folder; without either, a fifth of its units is drawn. Classes are the labels that occur; without labels it
    is one."""
    arrays = _usual_names(path)
    parts = ["train", *(part for part in ("val", "test") if f"{part}_images" in arrays)]
    streams = [array_stream(path, arrays.get(f"{part}_images", f"{part}_images")) for part in parts]
    if len({stream.shape for stream in streams}) > 1:
        raise UserError(f"{path}: {' and '.join(parts)} differ in the shape of their images: make them alike")
    counts, findings = [stream.n for stream in streams], tuple[Finding, ...]()
    if any(f"{part}_labels" in arrays for part in parts):
        wanted = [arrays.get(f"{part}_labels", f"{part}_labels") for part in parts]
        y, names, findings = user_labels(path, arrays_of(path, wanted), counts)
    else:
        y, names = torch.zeros(sum(counts), dtype=torch.int64), ("0",)
        findings = (Finding("one", NOTE, f"{path.name}: no array of labels in it", "add train_labels"),)
    used = {name for kind, name in arrays.items() if kind.partition("_")[0] in parts}
    findings = (*findings, *unread_arrays(path, used, unit))

    # all parts are one listing, as of a folder, and those that are held out follow the training part
    starts = np.cumsum([0, *counts])
    test = np.arange(len(y)) >= starts[1] if len(parts) > 1 else None

    dark = set[int]()

    def image(i: int) -> tuple[Tensor, None]:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        x = streams[part].image(i - int(starts[part]))
        if x.max() <= DIM:
            dark.add(i)
        return x, None

    listed = Listed(
        y,
        test,
        classes=len(names),
        files=(stamp(path),),
        images=lambda: Images(
            streams[0].shape, image, lambda: nearly_black(path.name, len(dark), len(y)), any_order=False
        ),
        class_names=() if names == tuple(map(str, range(len(names)))) else names,
        findings=findings,
    )
    if not unit:
        return listed
    people, about_people = people_of(path.name, people_in(path, unit, parts, counts))
    return listed._replace(people=people, findings=(*findings, *about_people))


def _usual_names(path: Path) -> dict[str, str]:
    """Return the arrays of images and labels of a user's npz by their names here, such as train_images: x_train, X and
    others. Rows of numbers are no images. UserError if two have the same meaning."""
    usual = {f"{part}_{kind}" for part in PARTS for kind in ("images", "labels")}
    arrays = {name: name for name in names_in(path) if name in usual}
    of_images = [name for name in names_in(path) if len(shape_in(path, name)) >= 3]
    for what, words, names in (("images", OF_IMAGES, of_images), ("labels", OF_LABELS, names_in(path))):
        for part, called in arrays_called(names, words).items():
            kind = f"{part or 'train'}_{what}"
            for name in (name for name in called if name not in arrays):
                if (first := arrays.setdefault(kind, name)) not in (name, kind):
                    text = f"{first} or {name} may be {kind}: call one of them {kind}, or leave it out"
                    raise UserError(f"{path}: {text}")
    return arrays


def arrays_called(names: Sequence[str], usual: Sequence[str]) -> dict[str, list[str]]:
    """Return the arrays that have one of some usual names, in any case, the first of these first, by the part whose
    name is before or after it, such as x_train; "": no part is named. names: of all arrays."""
    arrays = {}
    for part, words in {"": ("",), **PARTS}.items():
        pairs = [pair for word in words for name in usual for pair in ((name, word), (word, name))]
        ways = dict.fromkeys(mark.join(pair).strip("_") for pair in pairs for mark in ("_", ""))
        arrays[part] = [name for way in ways for name in names if name.lower() == way]
    return arrays


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays of a npz, sorted."""
    with reading(path, BROKEN, CORRUPT), zipfile.ZipFile(path) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))


def user_labels(
    path: Path, arrays: Mapping[str, np.ndarray], counts: Sequence[int]
) -> tuple[Tensor, tuple[str, ...], tuple[Finding, ...]]:
    """Return the labels of a user's images or rows, int64 [n] with classes numbered from 0, or float32 [n, labels], the
    names of the classes, and findings. arrays: those of all parts by their names, integers or texts [n] or 0/1
    [n, labels]; counts: of examples of each part. UserError if they are malformed."""
    labels = [
        _checked_labels(path, name, n, array, of_user=True)
        for (name, array), n in zip(arrays.items(), counts, strict=True)
    ]
    if len({part.shape[1:] for part in labels}) > 1:
        raise UserError(f"{path}: {' and '.join(arrays)} differ in their shape: make them alike")
    if any(part.dtype.kind in "US" for part in labels):
        return _in_words(path, [label for part in labels for label in part.tolist()])
    return *_classes(path, torch.cat([labels_from(part) for part in labels])), ()


def _in_words(path: Path, labels: Sequence[object]) -> tuple[Tensor, tuple[str, ...], tuple[Finding, ...]]:
    """Return labels in words as `user_labels` does, numbered as those of a table."""
    rows = [{LABEL: label.decode(errors="replace") if isinstance(label, bytes) else str(label)} for label in labels]
    words, findings = label_words(path, rows, LABEL, Fold.apart)
    unknown = [row[LABEL] for row in rows if row[LABEL] not in words.numbers]
    if unknown:
        text = f"{path}: {len(unknown)} of {len(rows)} labels are no class ({first_of(map(repr, unknown))})"
        raise UserError(f"{text}: give each image one, or leave it out")
    y = torch.tensor([words.numbers[row[LABEL]] for row in rows])
    remedy = "write each class in one way"
    return y, tuple(words.names), tuple(finding._replace(remedy=remedy) for finding in findings)


def _classes(path: Path, y: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of a user's arrays, with classes numbered from 0, and their names. Rows of 0 and 1 are classes
    if nine tenths of them have a single 1; UserError for the others then."""
    if y.dim() == 1:
        values, numbers = y.unique(return_inverse=True)
        if len(y) and int(values[0]) < 0 and values.tolist() != [-1, 1]:
            why = "leave examples without a label out, or number classes from 0"
            raise UserError(f"{path}: labels out of range: {int(values[0])} is below 0: {why}")
        return numbers, tuple(map(str, values.tolist()))
    names, ones = tuple(map(str, range(y.shape[1]))), y.sum(1)
    if not len(y) or y.shape[1] < 2 or float((ones == 1).float().mean()) < MOST:
        return y, names
    if other := int((ones != 1).sum()):
        text = f"{path}: {other} of {len(y)} images have no label or several, and all others have one"
        raise UserError(f"{text}: give each one label, or leave them out")
    return y.argmax(1), names


class Stream(NamedTuple):
    """The images of an array in a npz. Reading one before the last one starts again from the beginning."""

    n: int
    shape: Shape  # channels, height, width
    image: Callable[[int], Tensor]  # image i, uint8 of this shape; UserError if the file is damaged


def shape_in(path: Path, array: str) -> tuple[int, ...]:
    """Return the shape of an array of a npz, by its head alone."""
    return _head(path, array)[0]


def _head(path: Path, array: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and type of an array of a npz."""
    with reading(path, BROKEN, CORRUPT), zipfile.ZipFile(path) as archive, archive.open(f"{array}.npy") as member:
        shape, _, dtype = _header(member)
        return shape, dtype


def image_arrays(path: Path) -> list[str]:
    """Return the names of a npz's arrays of images, sorted: those that end in images, or else have another usual name.
    UserError if it has none."""
    names = [name for name in names_in(path) if name.endswith("images")]
    names = names or sorted(name for kind, name in _usual_names(path).items() if kind.endswith("images"))
    if not names:
        raise UserError(f"{path}: no array of images in it: its name must end in images, such as test_images")
    return names


def array_stream(path: Path, array: str) -> Stream:
    """Return the images of an array, which are taken from their compressed member of the npz one after another.
    UserError if it is absent, damaged or in Fortran order."""
    try:
        archive = zipfile.ZipFile(plain(path))
        _claimed(path, archive, array)
        member = archive.open(f"{array}.npy")  # open as long as images are read
        shape, fortran, dtype = _header(member)
        first = member.tell()
    except KeyError:
        raise UserError(f"{path}: no array {array} in it: it needs {', '.join(ARRAYS)}") from None
    except CORRUPT as error:
        raise unreadable(path, error, BROKEN) from None

    size, last = _layout(path, array, shape, dtype)
    if fortran:
        raise UserError(f"{path}: {array} is in Fortran order: store it in C order")
    count = math.prod(size)

    def image(i: int) -> Tensor:
        with reading(path, BROKEN, CORRUPT):
            member.seek(first + i * count)
            data = member.read(count)
        if len(data) < count:
            raise UserError(f"{path}: {BROKEN}")
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return x.reshape(*size[1:], size[0]).permute(2, 0, 1).contiguous() if last else x.reshape(size)

    return Stream(shape[0], size, image)


def _check_both(
    path: Path,
    shapes: tuple[Sequence[int], Sequence[int]],
    labels: tuple[Tensor, Tensor],
    classes: int,
    shape: Shape,
) -> None:
    """Raise UserError if train and test do not fit each other, or are not as conf/dataset says."""
    if tuple(shapes[0]) != tuple(shapes[1]) or labels[0].shape[1:] != labels[1].shape[1:]:
        raise UserError(f"{path}: train and test differ in the shape of their images or labels: make both alike")

    # the shape in conf/dataset decides models and kept features
    have: Shape = tuple(shapes[0])  # type: ignore[assignment]
    if have != shape:
        raise UserError(f"{path}: images are {describe(have)}, not {describe(shape)}: prepare it again at that size")

    for part, y in zip(("train", "test"), labels, strict=True):
        count = y.shape[1] if y.dim() == 2 else int(y.max()) + 1 if len(y) else 0
        if count > classes or (y.dim() == 2 and count != classes):
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
    """Return how many bytes the header of an array claims. UserError if the archive does not have them, or for an array
    of Python objects, which only a pickle can have. Nothing of the array is read."""
    with archive.open(f"{name}.npy") as member:
        shape, _, dtype = _header(member)
        has = archive.getinfo(f"{name}.npy").file_size - member.tell()

    if dtype.hasobject:
        raise UserError(
            f"{path}: {name} is an array of objects, which is not read: save a plain one, such as by "
            f"numpy.savez({path.name!r}, {name}=numpy.array({name}.tolist()), ...)"
        )
    takes = math.prod(shape) * dtype.itemsize
    if takes != has:
        raise UserError(f"{path}: {name} claims {takes:.3g} bytes and has {has:.3g}: {BROKEN}")
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
    _, last = _layout(path, f"{part}_images", images.shape, images.dtype)
    images = images if last or images.ndim == 3 else np.ascontiguousarray(np.moveaxis(images, 1, -1))
    return from_arrays(images, _checked_labels(path, f"{part}_labels", len(images), labels))


def _layout(path: Path, array: str, shape: Sequence[int], dtype: np.dtype) -> tuple[Shape, bool]:
    """Return channels, height and width of an array of images, and whether its channels come last. UserError if it does
    not contain images."""
    if dtype != np.uint8:
        scale = "multiply them by 255 if they are 0 to 1, and " if dtype.kind == "f" else ""
        raise UserError(f"{path}: {array} is {dtype}, not uint8: {scale}store values 0 to 255 as uint8")
    if len(shape) == 3 and 0 not in shape[1:]:
        return (1, shape[1], shape[2]), False
    if len(shape) != 4 or 0 in shape[1:] or not {1, 3} & {shape[1], shape[3]}:
        raise UserError(
            f"{path}: {array} has shape {list(shape)}, not [n, h, w], or [n, h, w, c] or [n, c, h, w] with c 1 or 3"
        )
    last = shape[3] in (1, 3)
    return ((shape[3], shape[1], shape[2]) if last else (shape[1], shape[2], shape[3])), last


def _checked_labels(path: Path, array: str, n: int, labels: np.ndarray, of_user: bool = False) -> np.ndarray:
    """Return the labels, [n] or [n, labels], of n examples; whole numbers, such as 1.0, as integers. of_user: whether
    they may be texts, or below 0. UserError if they are malformed."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST stores classes
    if labels.dtype.kind == "f" and labels.ndim == 1 and (labels == np.round(labels)).all():
        labels = labels.astype(np.int64)
    kinds = "iubf" if labels.ndim == 2 else "iub" + "US" * of_user
    if labels.ndim not in (1, 2) or labels.dtype.kind not in kinds:
        whole_or_text = "integers or texts" if of_user else "integers"
        what = f"{array} is {labels.dtype} {list(labels.shape)}"
        raise UserError(f"{path}: {what}: labels are {whole_or_text} [n], or 0/1 [n, labels]")
    if len(labels) != n:
        raise UserError(f"{path}: {array} has {len(labels)} labels for {n} examples: give one for each")

    if labels.ndim == 2 and not (np.isin(labels, (0, 1)) | np.isnan(labels)).all():
        raise UserError(f"{path}: {array} out of range: a multi-label array holds only 0, 1 and nan, for not known")
    if labels.ndim == 1 and not of_user and len(labels) and labels.min() < 0:
        raise UserError(f"{path}: {array} out of range: {labels.min()} is below 0")
    return labels
