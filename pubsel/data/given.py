"""Images, rows of numbers or texts for a trained model to classify: folders, files, tables and arrays, and what a
program has in memory. They are listed first, and read one after another."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pubsel.data import folders, images, memory, prepared, tables
from pubsel.data.arrow import Inside
from pubsel.data.convert import Shape, to_shape
from pubsel.data.texts import TextInput, hashed, new_texts, text_of
from pubsel.data.vectors import Field, names_of_rows, new_rows
from pubsel.files import plain
from pubsel.messages import UserError

# a file, an image, or a tensor: uint8 [c, h, w], or float32 [d], a row of a table; or a text
Raw = Path | Inside | Image.Image | Tensor | str
KINDS = "give paths, PIL images, or uint8 arrays or tensors"


class Given(NamedTuple):
    """Some of the images: how many, and each with its name (empty: it has none) in turn. files: that they are in."""

    n: int
    each: Callable[[], Iterator[tuple[str, Raw]]]
    files: Callable[[], Iterable[Path]] = tuple


class Takes(NamedTuple):
    """The kind of input that a model takes. columns: of a table, in order; empty: features, or images. text:
    of a model of texts; image_column: of a table, that the images were of."""

    rows: bool = False
    columns: tuple[Field, ...] = ()
    text: TextInput | None = None
    image_column: str | None = None


IMAGES = Takes()


def given(images: Any, takes: Takes = IMAGES) -> list[Given]:
    """Return what a program gives: a path, a PIL image, an array or a tensor, or a sequence of these; rows also as a
    pandas table; texts as a list, or a column of a table.

    An array is one image [h, w] or [h, w, 3], or several, [n, h, w] or [n, h, w, 3]; a tensor [c, h, w] or
    [n, c, h, w], all uint8; or of a table's rows, [d] or [n, d], floating point. UserError for anything else, or a path
    that is not there.
    """
    # a path first: a text is a sequence too
    if isinstance(images, str | Path):
        return [at_path(images, takes)]
    if isinstance(images, np.ndarray) or hasattr(images, "to_list"):  # paths in an array or a column of pandas
        images = memory.strings_in(images) or images
    if takes.text is not None:
        # texts, unless all of them are paths
        listed = [images[i] for i in range(len(images))] if isinstance(images, Sequence) else []
        if listed and all(
            isinstance(text, Path) or (isinstance(text, str) and os.path.exists(text)) for text in listed
        ):
            return [at_path(path, takes) for path in listed]
        texts = new_texts("texts", images, takes.text)
        return [Given(len(texts), lambda: iter(texts))]
    of_paths = isinstance(images, Sequence) and all(isinstance(image, str | Path) for image in images)
    if takes.rows and not of_paths:
        x = new_rows("images", images, takes.columns)
        return [Given(len(x), lambda: (("", row) for row in x))]
    if isinstance(images, Image.Image):
        return [Given(1, lambda: iter([("", images)]))]
    if isinstance(images, np.ndarray | Tensor):
        x = _rows(images)
        return [Given(len(x), lambda: (("", row) for row in x))]
    if not isinstance(images, Sequence):
        raise UserError(f"images: {type(images).__name__}: {KINDS}, or a list of them")
    return [part for image in images for part in given(image, takes)]


def _rows(x: np.ndarray | Tensor) -> Tensor:
    """Return images of an array or a tensor as [n, c, h, w], rows of a table as float32 [n, d]."""
    # an array has its channels last and a tensor first, so each says what its dimensions mean
    shape = tuple(x.shape)
    if isinstance(x, np.ndarray):
        colour = x.ndim in (3, 4) and x.shape[-1] in (1, 3)
        x = torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, -3) if colour else x))
        single = x.dim() == (3 if colour else 2)
        x = x if colour or x.is_floating_point() else x.unsqueeze(-3)  # [c, h, w] or [n, c, h, w]
    else:
        single = x.dim() == 3
    if x.is_floating_point() and x.dim() in (1, 2):
        return x.float().reshape(-1, x.shape[-1])

    x = x[None] if single else x
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3) or 0 in x.shape[2:]:
        raise UserError(
            f"images: an array of {str(x.dtype).removeprefix('torch.')} {list(shape)}: store values 0 to 255 as uint8, "
            "[n, h, w] or [n, h, w, 3] in an array, [n, c, h, w] in a tensor"
        )
    return x


def at_path(name: str | Path, takes: Takes = IMAGES) -> Given:
    """Return the images of a path: of a folder all that lie in it, at any depth; of a CSV those of its column path; of
    an npz its arrays whose names end in images; or one image; or its rows of numbers. UserError if there are none."""
    path = Path(os.path.expanduser(name))  # as ./~a.csv, too
    if not path.exists():
        raise UserError(f"{name}: no such file or folder")
    plain(path)
    if takes.text is not None:
        texts = new_texts(str(name), path, takes.text)
        return Given(
            len(texts), lambda: iter(texts), lambda: (path, *(raw for _, raw in texts if isinstance(raw, Path)))
        )
    if takes.rows:
        x = new_rows(str(name), path, takes.columns)
        return Given(len(x), lambda: zip(names_of_rows(str(name), path, len(x)), x, strict=False), lambda: (path,))
    # images are listed only: they may be more than memory holds
    if path.is_dir() and not tables.is_table(path):
        files = folders.all_images(path)
        if not files:
            raise UserError(f"{name}: no images in this folder: expected png, jpg, ... files")
        return Given(len(files), lambda: ((str(file), file) for file in files), lambda: files)
    if tables.is_table(path):
        rows = tables.rows_in(path)
        columns, inside = list(rows[0]), tables.images_inside(path)
        usual = inside or [column for column in columns if tables.plain_name(column) in tables.PATHS]
        column = tables.trained_column(str(name), columns, takes.image_column, usual)
        column = tables.image_column(path, columns, column, "name the column of files path")
        listed = [*zip((row[column] for row in rows), tables.images_at(path, rows, column), strict=True)]
        files = [file for _, file in listed if isinstance(file, Path)]
        return Given(len(rows), lambda: iter(listed), lambda: (path, *files))
    if path.suffix.lower() == ".npy":
        raise UserError(f"{name}: one array, which is no image file: save it by numpy.savez(FILE, images=...)")
    if path.suffix.lower() != ".npz":
        return Given(1, lambda: iter([(str(name), path)]), lambda: (path,))

    arrays = prepared.image_arrays(path)
    n = sum(prepared.array_stream(path, array).n for array in arrays)

    def each() -> Iterator[tuple[str, Raw]]:
        for array in arrays:
            images = prepared.array_stream(path, array)
            yield from ((f"{name}/{array}/{i}", images.image(i)) for i in range(images.n))

    return Given(n, each, lambda: (path,))


def as_input(
    raw: Raw,
    shape: tuple[int, ...],
    bits: int | None = None,
    spans: list[images.Span] | None = None,
    text: TextInput | None = None,
) -> Tensor | str:
    """Return an input in the shape that a model takes: an image as training reads it, scaled to cover and cut at
    the centre, grey or in colour; a row of a table as it is; or a text as `text` says. bits: of a value in 16-bit
    images, whose lowest and highest are added to `spans`. UserError names a file that cannot be read."""
    if text is not None and isinstance(raw, str | Path):
        read = text_of(raw) if isinstance(raw, Path) else raw
        return read if text.hashed is None else hashed([read], text.hashed)[0]
    assert not isinstance(raw, str)
    # rows of a table have no size to be fitted to
    if len(shape) != 3:
        if isinstance(raw, Tensor) and tuple(raw.shape) == shape:
            return raw
        raise UserError(f"images: this model was trained on rows of {shape[0]} numbers: give them as an array [n, d]")
    size: Shape = (shape[0], shape[1], shape[2])

    # an image is read as training reads it, or its answer would be of another image
    if isinstance(raw, Image.Image):
        images.check_bits(raw.mode, "images")
    if isinstance(raw, Path | Inside | Image.Image):
        pixels, span = images.upright(raw, bits) if isinstance(raw, Path | Inside) else images.pixels_of(raw, bits)
        if span is not None and spans is not None:
            spans.append(span)
        return to_shape(torch.from_numpy(pixels).permute(2, 0, 1)[None], size)[0]
    if raw.dim() != 3:
        raise UserError(f"images: rows of numbers, but this model was trained on images: {KINDS}")
    return to_shape(raw[None], size)[0]
