"""Photographs in the publisher's training and test lists, at the size of conf/dataset."""

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from pubsel.data.convert import Shape
from pubsel.data.images import unread
from pubsel.data.splits import Listing, Unread, check_lists
from pubsel.files import reading
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

Listed = list[tuple[str, str]]  # path of an image below the image folder, class


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts from files of <root>/<options.folder>. Missing if one of the lists is not there.

    `options.train` and `options.test` list the images of each part, in text or as file_list of a .mat file; or
    `options.list` lists all, and each line of `options.marks` ends in 1 for a training image or 0 for a test image.
    `options.line` is the pattern of a line (the whole line is the path if it is not given): its group path is below
    `options.images`, its group label the number of the class. Without a label the classes are the folders of the
    images, sorted. UserError for lists that name absent images, or other classes than the set has.
    """
    options, folder = info.options, root / info.options["folder"]
    lists = [folder / options[key] for key in ("train", "test", "list", "marks") if key in options]
    check_lists(name, root, lists)
    line = re.compile(options.get("line", "(?P<path>.+)"))
    if "marks" in options:
        train, test = marked(lists[0], lists[1], line)
    else:
        train, test = (listed(file, line) for file in lists)

    # Classes are the numbers that the lists give, or the places of their words in sorted order.
    words = sorted({word for _, word in train + test})
    numbers = {word: int(word) if "label" in line.groupindex else i for i, word in enumerate(words)}
    classes = max(numbers.values(), default=-1) + 1
    if classes != info.classes:
        raise UserError(f"{lists[0]}: {classes} classes, {info.classes} expected: unpack the archive again")

    images = folder / options.get("images", "")
    absent = [path for path, _ in train + test if not (images / path).is_file()]
    if absent:
        raise UserError(
            f"{images / absent[0]} and {len(absent) - 1} more of the lists are absent: unpack the archive again"
        )

    files = [[(images / path, word) for path, word in part] for part in (train, test)]
    parts = [unread_part(part, numbers, info.image_shape) for part in files]
    return Listing(parts[0], parts[1])


def marked(file: Path, marks: Path, line: re.Pattern[str]) -> tuple[Listed, Listed]:
    """Return training and test images of one list, told apart by the lines of `marks`. UserError if these are more, or
    fewer."""
    images = listed(file, line)
    ends = [text[-1] for text in list_lines(marks)]
    if len(images) != len(ends):
        raise UserError(f"{marks}: {len(ends)} lines for {len(images)} of {file.name}: unpack the archive again")

    train = [image for image, end in zip(images, ends, strict=True) if end == "1"]
    test = [image for image, end in zip(images, ends, strict=True) if end == "0"]
    return train, test


def listed(file: Path, line: re.Pattern[str]) -> Listed:
    """Return the path and class of each line of a list. UserError for a line that does not have them."""
    images = []
    for text in list_lines(file):
        match = line.fullmatch(text)
        if match is None:
            raise UserError(f"{file}: cannot read its line {text[:60]!r}: download it again")
        groups = match.groupdict()
        label = groups.get("label") or PurePosixPath(groups["path"]).parent.name
        images.append((groups["path"], label))
    return images


DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError, MatReadError, zlib.error)


def list_lines(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty, or the entries of file_list in a .mat file."""
    with reading(file, "no list: download it again", DAMAGED):
        if file.suffix == ".mat":
            return [str(entry.item()) for entry in loadmat(file)["file_list"].ravel()]
        return [text.strip() for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]


def unread_part(part: Sequence[tuple[Path | zipfile.Path, str]], numbers: Mapping[str, int], shape: Shape) -> Unread:
    """Return a part of image files with the words of their classes. numbers: of the classes."""
    labels = torch.tensor([numbers[word] for _, word in part], dtype=torch.int64)
    return unread([path for path, _ in part], labels, shape)
