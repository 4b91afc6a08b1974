"""Image files: folders of classes and CSV tables, of the user or of a named set in its original layout."""

import csv
import hashlib
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pubsel.config import Dataset, UserError
from pubsel.data.convert import Shape, describe, to_shape
from pubsel.data.splits import SEED, Listing, Parts, Split, Unread, Unreadable, group_of, held_out, missing

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
GREY = {"1", "L", "LA"}
TEST_FRACTION = 0.2  # held out where the user gives no test part
CORRUPT = (
    UnidentifiedImageError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError,
    struct.error, zlib.error, zipfile.BadZipFile,
)  # fmt: skip


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """A named set from its class folders <root>/<options.folder>/<class>/*, brought to the shape in conf/dataset.

    `options.test` is the share held out for testing, whole groups at a time: `options.group` is a pattern whose match
    in a file name names the group (a patient). Or `options.parts` names the publisher's own parts, such as
    {train: [train, val], test: [test]}: sub-folders with class folders, all with the same classes. Missing where the
    folder, or all of a part, is not there.
    """
    folder = root / info.options["folder"]
    if not folder.is_dir():
        raise missing(name, root)
    if "parts" in info.options:
        return Listing(_published(name, info, root, "train"), _published(name, info, root, "test"))
    paths, labels = labelled(folder, expected_classes(folder, info))
    fraction, pattern = info.options["test"], info.options.get("group")
    test = held_out([group_of(f"{path.parent.name}/{path.name}", pattern) for path in paths], fraction)
    shape: Shape = tuple(info.shape)  # type: ignore[assignment]
    note = f"{name}: {fraction:.3g} of the images held out as the test set, seed {SEED}"
    return Listing(*listed_parts(paths, torch.from_numpy(labels), test, shape), (note,))


def _published(name: str, info: Dataset, root: Path, part: str) -> Unread:
    """The images of the sub-folders that `options.parts` gives for a part; all but the first may be absent."""
    top, parts = root / info.options["folder"], info.options["parts"]
    first, *others = (top / folder for folder in parts[part])
    if not first.is_dir():
        raise missing(name, root, f"no folder {first.relative_to(root)}")
    folders = [first, *(folder for folder in others if folder.is_dir())]
    classes = expected_classes(top / parts["train"][0], info)
    for folder in folders:
        if class_folders(folder) != classes:
            raise UserError(f"{folder}: not the class folders of {parts['train'][0]}: unpack the archive again")
    found = [labelled(folder, classes) for folder in folders]
    shape: Shape = tuple(info.shape)  # type: ignore[assignment]
    labels = torch.from_numpy(np.concatenate([labels for _, labels in found]))
    return unread([path for paths, _ in found for path in paths], labels, shape)


def read_folder(folder: Path) -> tuple[Parts, int]:
    """A user's image folder and its number of classes: folder/train/<class>/* and folder/test/<class>/*, or
    folder/<class>/*, or a flat folder of images (one class: public data, or ranking, only).

    Without a test part a fixed fifth is held out. All images get the most common size, and colour if one has colour.
    UserError for a folder that is absent or empty, or an image that does not read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    top = folder / "train" if (folder / "train").is_dir() else folder
    classes = class_folders(top)
    paths, labels = labelled(top, classes)
    test_paths: list[Path] = []
    if top != folder and (folder / "test").is_dir():
        unknown = sorted(set(class_folders(folder / "test")) - set(classes))
        if unknown:
            raise UserError(f"{folder / 'test'}: class {unknown[0]} is not in {top}: give both the same classes")
        test_paths, test_labels = labelled(folder / "test", classes)
        labels = np.concatenate([labels, test_labels])
        test, notes = np.arange(len(labels)) >= len(paths), tuple[str, ...]()
    else:
        test, notes = _fifth(folder, [path.relative_to(folder).as_posix() for path in paths])
    x, size_notes = read_alike(folder, paths + test_paths)
    return Parts(*_parts(x, labels, test), notes + size_notes), max(1, len(classes))


def read_csv(table: Path) -> tuple[Parts, int]:
    """A user's CSV with columns path, label and perhaps split (train or test), and its number of classes. Paths are
    relative to the CSV; labels are numbers or words, numbered in sorted order. Sizes, colour and a missing split as in
    `read_folder`."""
    rows = _rows(table)
    words = sorted({row["label"] for row in rows}, key=lambda word: (int(word) if word.isdecimal() else -1, word))
    labels = np.asarray([words.index(row["label"]) for row in rows])
    paths = [table.parent / row["path"] for row in rows]
    if "split" in rows[0]:
        test, notes = np.asarray([row["split"] == "test" for row in rows]), tuple[str, ...]()
        if test.all() or not test.any():
            raise UserError(f"{table}: every row is {rows[0]['split']}: give both parts, or leave the column split out")
    else:
        test, notes = _fifth(table, [row["path"] for row in rows])
    if words != [str(i) for i in range(len(words))]:
        notes += (f"{table.name}: labels {', '.join(words[:10])} numbered from 0 in this order",)
    x, size_notes = read_alike(table, paths)
    return Parts(*_parts(x, labels, test), notes + size_notes), len(words)


def class_folders(folder: Path) -> list[str]:
    """Names of the sub-folders with images, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and images_in(path))


def expected_classes(folder: Path, info: Dataset) -> list[str]:
    """Names of the class folders of a named set. UserError where they are not as many as conf/dataset says."""
    classes = class_folders(folder)
    if len(classes) != info.classes:
        raise UserError(f"{folder}: {len(classes)} class folders with images, {info.classes} expected: {info.title}")
    return classes


def images_in(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name; hidden files are no images."""
    files = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(files)


def labelled(folder: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """Image files of the class folders in order of class and name, with labels [n]; of a flat folder without classes
    all its images, with label 0. UserError where there are none, or images lie beside class folders."""
    loose = images_in(folder)
    if classes and loose:
        raise UserError(f"{folder}: {loose[0].name} lies beside class folders: move it into its class")
    groups = [images_in(folder / name) if (folder / name).is_dir() else [] for name in classes] or [loose]
    paths = [path for group in groups for path in group]
    if not paths:
        raise UserError(f"{folder}: no images in it: expected <class>/*.png (or jpg, ...), or images")
    return paths, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def read_alike(source: Path, paths: Sequence[Path]) -> tuple[Tensor, tuple[str, ...]]:
    """Images [n, c, h, w] at the most common size among them (of several, the first met), in colour if any of them
    has colour; and a note where some were changed."""
    heads = [head(path) for path in paths]
    (height, width), same = Counter(size for _, size in heads).most_common(1)[0]
    shape = (1 if all(mode in GREY for mode, _ in heads) else 3, height, width)
    note = f"{source.name}: {len(paths) - same} of {len(paths)} images brought to {describe(shape)}"
    return read_images(paths, shape), (note,) if same < len(paths) else ()


def read_images(paths: Iterable[Path | zipfile.Path], shape: Shape) -> Tensor:
    """Image files as uint8 [n, *shape], each scaled to cover and cut at the centre. UserError names a file that is
    absent or no image."""
    files = list(paths)
    images = torch.empty((len(files), *shape), dtype=torch.uint8)
    for i, path in enumerate(files):
        images[i] = _read_image(path, shape)
    return images


def unread(paths: Sequence[Path | zipfile.Path], y: Tensor, shape: Shape) -> Unread:
    """Image files with their labels, as in `read_images`, each read when it is asked for."""
    return Unread(
        lambda i: _read_image(paths[i], shape), y, tuple("/".join(str(path).split("/")[-2:]) for path in paths)
    )


def listed_parts(paths: Sequence[Path], y: Tensor, test: np.ndarray, shape: Shape) -> tuple[Unread, Unread]:
    """Train and test from image files, labels [n] or [n, labels] and a mask [n] of the test examples."""

    def part(mask: np.ndarray) -> Unread:
        return unread([paths[i] for i in np.flatnonzero(mask).tolist()], y[torch.from_numpy(mask)], shape)

    return part(~test), part(test)


def same_images(table: Path, rows: Collection[str], folder: Path, files: Collection[str]) -> None:
    """UserError where a table names an image that its folder lacks, or the folder has one without a row."""
    there, named = set(files), set(rows)
    if absent := [row for row in rows if row not in there]:
        raise UserError(f"{folder}: {absent[0]} and {len(absent) - 1} more of {table.name} are absent: unpack it again")
    if extra := sorted(there - named):
        raise UserError(
            f"{table}: no row for {extra[0]} and {len(extra) - 1} more of {folder}: take both from one release"
        )


def fitted(image: Image.Image, shape: Shape) -> Tensor:
    """One image as uint8 `shape`: Pillow's conversion to grey is the ITU-R 601 luma."""
    pixels = np.array(image.convert("L" if shape[0] == 1 else "RGB"))  # [h, w] or [h, w, 3]
    x = torch.from_numpy(pixels).reshape(*pixels.shape[:2], shape[0]).permute(2, 0, 1)
    return to_shape(x[None], shape)[0]


def head(path: Path) -> tuple[str, tuple[int, int]]:
    """Pillow's mode and (height, width) of an image file, without decoding it. UserError as in `read_images`, and for
    more than 8 bits per channel."""
    try:
        with Image.open(path) as image:
            mode, size = image.mode, image.size
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except (*CORRUPT, OSError) as error:
        raise _unreadable(path, error) from None
    if mode.startswith(("I", "F")):
        raise UserError(f"{path}: more than 8 bits per channel: convert it to 8 bits first")
    return mode, (size[1], size[0])


def _read_image(path: Path | zipfile.Path, shape: Shape) -> Tensor:
    try:
        with path.open("rb") as file, Image.open(file) as image:
            return fitted(image, shape)
    except (FileNotFoundError, KeyError):
        raise UserError(f"{path}: no such image") from None
    except (*CORRUPT, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path | zipfile.Path, error: Exception) -> UserError:
    """Unreadable; but where the system failed (Pillow's own errors have no number), the image may well be whole."""
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(f"{path}: cannot be read: {error.strerror}")
    return Unreadable(path, path.name)


def rows_of(table: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV. UserError where it is absent, empty or no CSV, or lacks one of the columns."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", skipinitialspace=True)
            rows, have = list(reader), reader.fieldnames or []
    except FileNotFoundError:
        raise UserError(f"{table}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table}: not a readable CSV ({error})") from None
    if absent := [column for column in columns if column not in have]:
        raise UserError(f"{table}: no column {absent[0]}: it needs {','.join(columns)}")
    if not rows:
        raise UserError(f"{table}: no rows in it")
    return rows


def _rows(table: Path) -> list[dict[str, str]]:
    """The rows of a user's CSV, checked."""
    rows = rows_of(table, ("path", "label"))
    for i, row in enumerate(rows, start=1):
        if not row["path"] or not row["label"]:
            raise UserError(f"{table}: row {i} has no path or no label")
        if "split" in row and row["split"] not in ("train", "test"):
            raise UserError(f"{table}: row {i} has split {row['split']!r}: use train or test")
    return rows


def _fifth(source: Path, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which of the named images are held out as the test set, bool [n]; and the note.

    An example's own file name decides, so that one image more or less moves no other to the other side.
    """
    places = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64 for name in names]
    test = np.asarray(places) < TEST_FRACTION
    if test.all() or not test.any():  # a handful of images: the lowest one is the test set
        test = np.asarray(places) == min(places)
    return test, (f"{source.name}: {int(test.sum())} of {len(names)} images held out as the test set, by file name",)


def _parts(x: Tensor, labels: np.ndarray, test: np.ndarray) -> tuple[Split, Split]:
    """Train and test from images [n, c, h, w], labels [n] and a mask [n] of the test examples."""
    y, mask = torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(test)
    return Split(x[~mask], y[~mask]), Split(x[mask], y[mask])
