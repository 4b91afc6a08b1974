"""Image files: folders of classes and CSV tables, of the user or of a named set in its original layout."""

import csv
import os
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from PIL.Image import DecompressionBombError
from torch import Tensor

from pubsel.data.convert import Shape, describe, to_shape
from pubsel.data.overlap import of_pixels
from pubsel.data.splits import (
    SEED,
    Images,
    Listed,
    Listing,
    Unread,
    Unreadable,
    group_of,
    held_out,
    missing,
    stamp,
)
from pubsel.files import digest, plain, unreadable
from pubsel.messages import UsageError, UserError, limit
from pubsel.settings.datasets import Dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 0  # Pillow refuses twice as many
SIXTEEN = {"I;16", "I;16L", "I;16B", "I;16N"}  # grey, 16 bits
GREY = {"1", "L", "LA", *SIXTEEN}
TRAIN, TEST, VALIDATION = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")
NAMED = 3  # folders that a message names
TEST_FRACTION = 0.2  # held out where the user gives no test part
CORRUPT = (OSError, SyntaxError, ValueError, EOFError, DecompressionBombError, struct.error, zlib.error, BadZipFile)


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return a named set from its class folders <root>/<options.folder>/<class>/*, brought to the shape in
    conf/dataset.

    `options.test` is the share held out for testing, whole groups at a time: `options.group` is a pattern whose match
    in a file name names the group (a patient). Or `options.parts` names the publisher's own parts, such as {train:
    [train, val], test: [test]}: sub-folders with class folders, all with the same classes. Missing if the folder, or
    all of a part, is not there.
    """
    folder = root / info.options["folder"]
    if not folder.is_dir():
        raise missing(name, root)
    if "parts" in info.options:
        return Listing(_published(name, info, root, "train"), _published(name, info, root, "test"))

    # Images of one patient belong together, so whole groups are held out.
    paths, labels = labelled(folder, expected_classes(folder, info))
    fraction, pattern = info.options["test"], info.options.get("group")
    groups = [group_of(f"{path.parent.name}/{path.name}", pattern) for path in paths]
    test = held_out(groups, fraction)

    note = f"{name}: {fraction:.3g} of the images held out as the test set, seed {SEED}"
    people = groups if pattern else ()
    parts = listed_parts(paths, torch.from_numpy(labels), test, info.image_shape, people)
    return Listing(*parts, (note,), "patient" if pattern else "")


def _published(name: str, info: Dataset, root: Path, part: str) -> Unread:
    """Return the images of the sub-folders that `options.parts` gives for a part; all but the first may be absent."""
    top, parts = root / info.options["folder"], info.options["parts"]
    first, *others = (top / folder for folder in parts[part])
    if not first.is_dir():
        raise missing(name, root, f"no folder {first.relative_to(root)}")

    # The same classes in each folder, or their numbers would differ.
    folders = [first, *(folder for folder in others if folder.is_dir())]
    classes = expected_classes(top / parts["train"][0], info)
    for folder in folders:
        if class_folders(folder) != classes:
            raise UserError(f"{folder}: not the class folders of {parts['train'][0]}: unpack the archive again")

    examples = [labelled(folder, classes) for folder in folders]
    files = [path for paths, _ in examples for path in paths]
    labels = torch.from_numpy(np.concatenate([labels for _, labels in examples]))
    return unread(files, labels, info.image_shape)


class Layout(NamedTuple):
    """The places of the images of a user's folder."""

    train: Path  # contains class folders, or images
    test: Path | None
    classes: list[str]
    empty: list[str]  # sub-folders of train without any image
    notes: tuple[str, ...]


def layout(folder: Path, people: bool = False) -> Layout:
    """Return the parts of a user's folder by their names, in any case. people: class folders contain a folder for each
    person. UserError if it is absent."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    within = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}

    def named(names: Sequence[str]) -> Path | None:
        return next((within[name] for name in names if name in within and any(_images_below(within[name]))), None)

    # A class may be called train: then it has images, and so have folders next to it.
    train, test, validation = (named(names) for names in (TRAIN, TEST, VALIDATION))
    others = [path for name, path in within.items() if name not in TRAIN + TEST + VALIDATION]
    if train is None or (not class_folders(train, people) and any(_has_images_of(path, people) for path in others)):
        train, test, validation = folder, None, None

    notes: tuple[str, ...] = ()
    if train != folder and test is None and validation is not None:
        test, notes = validation, (f"{folder.name}: {validation.name} is used as the test set",)

    without_images = sorted(path.name for path in train.iterdir() if path.is_dir() and not any(_images_below(path)))
    empty = [name for name in without_images if not name.startswith(".")]
    return Layout(train, test, class_folders(train, people), empty, notes)


def list_folder(folder: Path, unit: str | None = None) -> Listed:
    """Return what is in a user's image folder: folder/train/<class>/* and folder/test/<class>/*, or
    folder/<class>/*, or a flat folder of images (one class: public data, or ranking, only).

    Without a test part, the validation part (val, valid, validation) is the test set; without either, a fixed fifth is
    held out. A note counts the images that are not read. All images get the most common size, and colour if one has
    colour. unit: "folder" for folder/<class>/<person>/*; a person may be in several classes. UserError for a folder
    that is absent or empty.
    """
    people = unit is not None
    if unit not in (None, "folder"):
        raise UsageError(f"pair.unit={unit}: {folder} is a folder: set pair.unit=folder, for <class>/<person>/*")
    places = layout(folder, people)
    top, classes = places.train, places.classes
    if people and not classes:
        raise UserError(f"{folder}: pair.unit=folder needs <class>/<person>/*, and has no such images: move them")
    if not classes and not images_in(top) and (deeper := all_images(top)):
        first = deeper[0].relative_to(folder).as_posix()
        raise UserError(
            f"{folder}: its {len(deeper)} images lie deeper than <class>/*, such as {first}: give "
            f"{deeper[0].parent.parent}, or move them up; if each folder is of a person, set pair.unit=folder"
        )

    # The user's own test part, with the same classes, or a fifth.
    paths, labels = labelled(top, classes, people)
    test_paths: list[Path] = []
    if places.test is not None:
        unknown = sorted(set(class_folders(places.test, people)) - set(classes))
        if unknown:
            raise UserError(f"{places.test}: class {unknown[0]} is not in {top}: give both the same classes")
        test_paths, test_labels = labelled(places.test, classes, people)
        labels = np.concatenate([labels, test_labels])
        test, notes = np.arange(len(labels)) >= len(paths), places.notes
    else:
        # A person, the same in all classes, is on one side; without people each image is drawn by its name.
        owners = [path.parent.name if people else path.relative_to(folder).as_posix() for path in paths]
        test, notes = _fifth(folder, owners, people)

    paths += test_paths
    notes += _unread(folder, paths, [part for part in (places.train, places.test) if part])
    names = [path.relative_to(folder).as_posix() for path in paths]
    listed = _listed(folder, paths, names, labels, test)
    if people:
        listed = listed._replace(people=tuple(path.parent.name for path in paths))
    return listed._replace(classes=max(1, len(classes)), class_names=tuple(classes), notes=notes, shuffle=True)


def _unread(folder: Path, paths: Sequence[Path], parts: Sequence[Path]) -> tuple[str, ...]:
    """Return the note on images of a folder that are not among `paths`: they lie next to its parts, or deeper than its
    classes."""
    read = set(paths)
    left = sorted(path for path in _images_below(folder) if path not in read)
    if not left:
        return ()

    def place(path: Path) -> str:
        within = any(path.is_relative_to(part) for part in parts)
        relative = path.parent.relative_to(folder)
        return relative.as_posix() if within or not relative.parts else relative.parts[0]

    places = Counter(place(path) for path in left)
    counts = [f"{count} in {where}" for where, count in places.most_common(NAMED)]
    more = ", ..." if len(places) > NAMED else ""
    return (f"{folder.name}: {len(left)} images are not read: {', '.join(counts)}{more}",)


def all_images(folder: Path) -> list[Path]:
    """Return the image files of a folder and of all folders in it, sorted; hidden ones are left out."""
    return sorted(_images_below(folder))


def _images_below(folder: Path) -> Iterator[Path]:
    """Yield what `all_images` returns, in any order."""
    for top, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        here = Path(top)
        yield from (path for name in files if _is_image(name) and (path := here / name).is_file())


def _is_image(name: str) -> bool:
    """Return whether a file has the name of an image; hidden files have not."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def _has_images_of(folder: Path, people: bool) -> bool:
    """Return whether `images_of` returns any, and raise what it raises."""
    if people:
        return bool(images_of(folder, True))
    with os.scandir(folder) as entries:
        return any(_is_image(entry.name) for entry in entries)


def findings(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Return what is wrong with a user's folder or CSV, what may be, and the names of its classes. No image is
    decoded."""
    wrong, doubtful = list[str](), list[str]()
    if path.is_dir():
        places = layout(path)
        parts = [part for part in (places.train, places.test) if part is not None]
        paths = [image for part in parts for image in labelled(part, places.classes)[0]]
        names = places.classes

        if places.empty:
            first = ", ".join(places.empty[:NAMED]) + (", ..." if len(places.empty) > NAMED else "")
            wrong.append(f"{len(places.empty)} class folders without images ({first}): fill or remove them")

        files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        suffixes = [file.suffix.lower() for file in files]
        other = Counter(suffix or "without extension" for suffix in suffixes if suffix not in SUFFIXES)
        if other:
            counts = ", ".join(f"{count} {suffix}" for suffix, count in other.most_common())
            doubtful.append(f"{sum(other.values())} files are not read: {counts}")
    else:
        rows = _rows(path)
        paths, names = [path.parent / row["path"] for row in rows], _words(rows)

    # Sizes and colour are in the first bytes of a file.
    heads = [mode_and_size(image) for image in paths]
    sizes = Counter(size for _, size in heads)
    grey = sum(mode in GREY for mode, _ in heads)
    if len(sizes) > 1:
        (height, width), count = sizes.most_common(1)[0]
        doubtful.append(
            f"{len(sizes)} sizes: {count:,} images are {height}x{width}, {len(heads) - count:,} are brought to that"
        )
    if 0 < grey < len(heads):
        doubtful.append(f"{grey:,} images are grey and {len(heads) - grey:,} in colour: all are read in colour")
    return wrong, doubtful, names


def list_csv(table: Path, unit: str | None = None) -> Listed:
    """Return what is in a user's CSV, with commas, semicolons or tabs between its columns path, label and perhaps split
    (train or test). Paths are relative to the CSV; labels are numbers or words, numbered in sorted order. unit: the
    column that names the person of each image. Sizes, colour and a missing split as in `list_folder`."""
    # words are numbered in sorted order, so that the order of the rows decides no class
    rows = _rows(table, unit)
    words = _words(rows)
    labels = np.asarray([words.index(row["label"]) for row in rows])
    paths = [table.parent / row["path"] for row in rows]

    notes: tuple[str, ...] = ()
    if "split" in rows[0]:
        test = np.asarray([row["split"] == "test" for row in rows])
        if test.all() or not test.any():
            raise UserError(f"{table}: every row is {rows[0]['split']}: give both parts, or leave the column split out")
    else:
        test, notes = _fifth(table, [row[unit or "path"] for row in rows], unit is not None)

    # Whoever reads predictions has to know which number is which label.
    if words != [str(i) for i in range(len(words))]:
        notes += (f"{table.name}: labels {', '.join(words[:10])} numbered from 0 in this order",)

    listed = _listed(table, paths, [row["path"] for row in rows], labels, test)
    if unit:
        listed = listed._replace(people=tuple(row[unit] for row in rows))
    return listed._replace(classes=len(words), class_names=tuple(words), notes=notes)


def _words(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the labels of a CSV in the order in which they are numbered."""
    return sorted({row["label"] for row in rows}, key=lambda word: (int(word) if word.isdecimal() else -1, word))


def class_folders(folder: Path, people: bool = False) -> list[str]:
    """Return the names of the sub-folders with images, sorted; people: with folders of people that have images."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and _has_images_of(path, people))


def expected_classes(folder: Path, info: Dataset) -> list[str]:
    """Return the names of the class folders of a named set. UserError if they are not as many as conf/dataset says."""
    classes = class_folders(folder)
    if len(classes) != info.classes:
        raise UserError(f"{folder}: {len(classes)} class folders with images, {info.classes} expected: {info.title}")
    return classes


def images_in(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name; hidden files are no images."""
    return [folder / name for name in sorted(filter(_is_image, os.listdir(folder)))]


def images_of(folder: Path, people: bool) -> list[Path]:
    """Return the image files of a class folder; people: of its folders, one for each person. UserError if
    images are next to these folders."""
    if not people:
        return images_in(folder)
    persons = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    images = [image for person in persons for image in images_in(person)]
    if images and (loose := images_in(folder)):
        raise UserError(f"{folder}: {loose[0].name} is next to the folders of people: move it into its person's folder")
    return images


def labelled(folder: Path, classes: Sequence[str], people: bool = False) -> tuple[list[Path], np.ndarray]:
    """Return the image files of the class folders in order of class and name, with labels [n]; or, of a flat folder
    without classes, all its images with label 0. UserError if there are none, or if images lie next to class folders.
    """
    # an image next to class folders has no label
    loose = images_in(folder)
    if classes and loose:
        raise UserError(f"{folder}: {loose[0].name} lies beside class folders: move it into its class")

    folders = [folder / name for name in classes]
    groups = [images_of(path, people) if path.is_dir() else [] for path in folders] or [loose]
    paths = [path for group in groups for path in group]
    if not paths:
        raise UserError(f"{folder}: no images in it: expected <class>/*.png (or jpg, ...), or images")
    return paths, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def alike(source: Path, paths: Sequence[Path]) -> Images:
    """Return images at the most common size among them (of several, the first met), in colour if any of them has
    colour; with a note if some are changed for that."""
    # a header tells size and colour, so no image is decoded twice
    heads = [mode_and_size(path) for path in paths]
    (height, width), same = Counter(size for _, size in heads).most_common(1)[0]
    grey = all(mode in GREY for mode, _ in heads)
    shape = (1 if grey else 3, height, width)

    # Each image is hashed as it was decoded: the same image may be there at another size.
    def image(i: int) -> tuple[Tensor, int | None]:
        before: list[int] = []
        x = _read_image(paths[i], shape, seen=lambda decoded: before.append(of_pixels(decoded)))
        return x, before[0] if before else None

    notes: tuple[str, ...] = ()
    if same < len(paths):
        notes = (f"{source.name}: {len(paths) - same} of {len(paths)} images brought to {describe(shape)}",)
    return Images(shape, image, notes)


def read_images(paths: Iterable[Path | zipfile.Path], shape: Shape) -> Tensor:
    """Return image files as uint8 [n, *shape], each scaled to cover and cut at the centre. UserError names a file that
    is absent or no image."""
    files = list(paths)
    images = torch.empty((len(files), *shape), dtype=torch.uint8)
    for i, path in enumerate(files):
        images[i] = _read_image(path, shape)
    return images


def unread(paths: Sequence[Path | zipfile.Path], y: Tensor, shape: Shape, groups: Sequence[str] = ()) -> Unread:
    """Return image files with their labels and people, as in `read_images`, each read only when it is asked for."""
    names = tuple("/".join(str(path).split("/")[-2:]) for path in paths)
    return Unread(lambda i: _read_image(paths[i], shape), y, names, tuple(groups))


def listed_parts(
    paths: Sequence[Path], y: Tensor, test: np.ndarray, shape: Shape, groups: Sequence[str] = ()
) -> tuple[Unread, Unread]:
    """Return train and test from image files, labels [n] or [n, labels], a mask [n] of the test examples, and the
    people [n] that they are of, if these are known."""

    def part(mask: np.ndarray) -> Unread:
        places = np.flatnonzero(mask).tolist()
        people = [groups[i] for i in places] if groups else ()
        return unread([paths[i] for i in places], y[torch.from_numpy(mask)], shape, people)

    return part(~test), part(test)


def same_images(table: Path, rows: Collection[str], folder: Path, files: Collection[str]) -> None:
    """Raise UserError if a table names an image that its folder lacks, or the folder has one without a row."""
    there, named = set(files), set(rows)
    if absent := [row for row in rows if row not in there]:
        raise UserError(f"{folder}: {absent[0]} and {len(absent) - 1} more of {table.name} are absent: unpack it again")
    if extra := sorted(there - named):
        raise UserError(
            f"{table}: no row for {extra[0]} and {len(extra) - 1} more of {folder}: take both from one release"
        )


def eight_bits(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel: of 16, the full range 0 to 65535 becomes 0 to 255, rounded."""
    if image.mode not in SIXTEEN:
        return image
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 257 is odd: no value lies between two


def fitted(image: Image.Image, shape: Shape) -> Tensor:
    """Return one image as uint8 `shape`: Pillow's conversion to grey is the ITU-R 601 luma."""
    image = eight_bits(image)
    pixels = np.array(image.convert("L" if shape[0] == 1 else "RGB"))  # [h, w] or [h, w, 3]
    x = torch.from_numpy(pixels).reshape(*pixels.shape[:2], shape[0]).permute(2, 0, 1)
    return to_shape(x[None], shape)[0]


def mode_and_size(path: Path) -> tuple[str, tuple[int, int]]:
    """Return Pillow's mode and (height, width) of an image file, without decoding it. UserError as in `read_images`,
    and for more than 16 bits per channel."""
    try:
        with _open(plain(path)) as image:
            mode, size = image.mode, image.size
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except CORRUPT as error:
        raise _unreadable(path, error) from None

    check_bits(mode, path)
    return mode, (size[1], size[0])


def check_bits(mode: str, what: object) -> None:
    """Raise UserError, naming `what`, for Pillow's modes of more than 16 bits per channel."""
    if mode.startswith(("I", "F")) and mode not in SIXTEEN:
        raise UserError(f"{what}: more than 16 bits per channel: convert it to 8 or 16 bits first")


def _read_image(path: Path | zipfile.Path, shape: Shape, seen: Callable[[np.ndarray], object] | None = None) -> Tensor:
    """Return an image file as uint8 `shape`. seen: called with the image as it was decoded, [1 or 3, height, width], if
    it was another one."""
    if isinstance(path, Path):
        plain(path)
    try:
        with path.open("rb") as file, _open(file) as image:
            channels = 1 if image.mode in GREY else 3
            if seen is not None and (channels, image.height, image.width) != shape:
                pixels = np.array(eight_bits(image).convert("L" if channels == 1 else "RGB"))  # [h, w] or [h, w, 3]
                seen(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1))
            return fitted(image, shape)
    except (FileNotFoundError, KeyError):
        raise UserError(f"{path}: no such image") from None
    except CORRUPT as error:
        raise _unreadable(path, error) from None


def _open(file: Path | IO[bytes]) -> Image.Image:
    """Return an image that is not decoded yet, without Pillow's two lines of warning about a large one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(file)


def _unreadable(path: Path | zipfile.Path, error: Exception) -> UserError:
    """Return Unreadable; but if the system failed (Pillow's own errors have no number), the image may well be whole."""
    if isinstance(error, DecompressionBombError):
        return Unreadable(
            path, path.name, f"more than {2 * MOST_PIXELS / 1e6:.0f} million pixels, maybe made to fill memory"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(f"{path}: cannot be read: {limit(error) or error.strerror}")
    return Unreadable(path, path.name)


def rows_of(table: Path, columns: Sequence[str], between: str = ",") -> list[dict[str, str]]:
    """Return the rows of a CSV. between: the characters of which its first line shows which one separates its columns.
    UserError if it is absent, empty or no CSV, or lacks one of the columns."""
    try:
        with plain(table).open(newline="", encoding="utf-8-sig") as file:
            delimiter = max(between, key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, restval="", skipinitialspace=True, delimiter=delimiter)
            rows, have = list(reader), reader.fieldnames or []
    except FileNotFoundError:
        raise UserError(f"{table}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(table, error, "not a readable CSV") from None

    if absent := [column for column in columns if column not in have]:
        raise UserError(f"{table}: no column {absent[0]}: it needs {','.join(columns)}")
    if not rows:
        raise UserError(f"{table}: no rows in it")
    return rows


def _rows(table: Path, unit: str | None = None) -> list[dict[str, str]]:
    """Return the rows of a user's CSV, checked; unit: the column of people."""
    if unit in ("path", "label", "split"):
        raise UsageError(f"pair.unit={unit}: name the column of {table.name} that says who an image is of")
    rows = rows_of(table, ("path", "label", *([unit] if unit else [])), ",;\t")
    # the first faulty row is named, since a table may have a million
    for i, row in enumerate(rows, start=1):
        if not row["path"] or not row["label"]:
            raise UserError(f"{table}: row {i} has no path or no label")
        if unit and not row[unit]:
            raise UserError(f"{table}: row {i} has no {unit}: say who it is of, or leave pair.unit out")
        if "split" in row and row["split"] not in ("train", "test"):
            raise UserError(f"{table}: row {i} has split {row['split']!r}: use train or test")
    return rows


def _fifth(source: Path, names: Sequence[str], people: bool = False) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return which of the named images are held out as the test set, bool [n]; and the note.

    An example's own file name decides, so that one image more or less moves no other to the other side; or the name of
    its person, if there are `people`, so that nobody is on both.
    """
    # a digest of the name is as good as a random number, and does not depend on the other images
    places = np.asarray([int(digest([name], size=8), 16) / 2**64 for name in names])  # in [0, 1)
    test = places < TEST_FRACTION
    if test.all() or not test.any():  # a handful of images: the lowest one is the test set
        test = places == places.min()
    by = "person" if people else "file name"
    return test, (f"{source.name}: {int(test.sum())} of {len(names)} images held out as the test set, by {by}",)


def _listed(source: Path, paths: Sequence[Path], names: Sequence[str], labels: np.ndarray, test: np.ndarray) -> Listed:
    """Return image files, with their names, labels [n] and a mask [n] of the test examples."""
    y, files = torch.from_numpy(labels.astype(np.int64)), tuple(map(stamp, paths))
    return Listed(y, test, 1, files, lambda: alike(source, paths), tuple(names))
