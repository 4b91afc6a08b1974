"""Folders of embeddings: features of public images that were computed before, in shards, of which memory holds little.

A shard is an array [n, d], float16 or float32, in a npy file. The folder contains the shards themselves; or a folder
img_emb with them, as clip-retrieval writes it next to metadata and text_emb, which are not read. Numbers in names are
counted: img_emb_2.npy comes before img_emb_10.npy.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data.images import SUFFIXES
from pubsel.files import give_back, in_parts, mapped, npy_map, reading
from pubsel.messages import UserError
from pubsel.settings.identity import is_path

NPY = ".npy"
IMAGES, IGNORED = "img_emb", ("text_emb", "metadata")  # folders of clip-retrieval
AGAIN = "download or compute it again"
BLOCK = 2**14  # rows of a block
AT_RANDOM = 2**8  # rows at random places before memory is given back: of each the system maps many pages

Places = NDArray[np.int64]


class Part(Protocol):
    """One set of a pool: its public features, which need not fit in memory."""

    @property
    def n(self) -> int:
        """Return how many examples there are."""
        ...

    def blocks(self) -> Iterator[Tensor]:
        """Return all features in order, at most BLOCK rows at a time, [b, d]."""
        ...

    def rows(self, places: Places) -> Tensor:
        """Return the features of some examples, float32 [len(places), d]."""
        ...


def feature_rows(parts: Sequence[Part], places: Places) -> Tensor:
    """Return features of examples of several sets, whose rows are numbered through, float32 [len(places), d]."""
    ends = np.cumsum([part.n for part in parts])
    of = np.searchsorted(ends, places, side="right")
    # each file is opened once, whatever the order of the places
    starts = [end - part.n for part, end in zip(parts, ends, strict=True)]
    by_part = torch.cat([part.rows(places[of == i] - starts[i]).float() for i, part in enumerate(parts)])
    features = torch.empty_like(by_part)
    features[torch.from_numpy(np.argsort(of, kind="stable"))] = by_part
    return features


class Shard(NamedTuple):
    """One file, as a part of a pool."""

    path: Path
    n: int
    d: int

    @property
    def stamp(self) -> str:
        """Return what tells it from another file, or from another state of it: path, size and time."""
        stat = self.path.stat()
        return f"{self.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, at most BLOCK at a time, [b, d]. UserError if the file cannot be read."""
        return in_parts(_mapped(self.path), BLOCK)

    def rows(self, places: Places) -> Tensor:
        """Return some rows, float32 [len(places), d]."""
        x = torch.empty(len(places), self.d)
        array = _mapped(self.path)
        for first in range(0, len(places), AT_RANDOM):
            some = slice(first, first + AT_RANDOM)
            x[some] = array[torch.from_numpy(places[some])].float()
            give_back(array)
        return x


class Embeddings(NamedTuple):
    """A folder of embeddings."""

    name: str
    shards: tuple[Shard, ...]
    d: int

    @property
    def n(self) -> int:
        """Return how many embeddings there are."""
        return sum(shard.n for shard in self.shards)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, at most BLOCK at a time, [b, d]."""
        return itertools.chain.from_iterable(shard.blocks() for shard in self.shards)

    def rows(self, places: Places) -> Tensor:
        """Return some rows, float32 [len(places), d]."""
        return feature_rows(self.shards, places)


def is_embeddings(name: str) -> bool:
    """Return whether a data set is a folder of embeddings. It is none if images, or folders that may have some, lie in
    it: the first of these ends the search."""
    if not is_path(name):
        return False
    folder = Path(name).expanduser()
    return folder.is_dir() and (_has_shards(folder / IMAGES) or _has_shards(folder))


def _has_shards(folder: Path) -> bool:
    has = False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith("."):
                    continue
                if suffix in SUFFIXES or (entry.is_dir() and entry.name not in (IMAGES, *IGNORED)):
                    return False
                has = has or suffix == NPY
    except OSError:  # absent, or of another user
        return False
    return has


def open_embeddings(name: str) -> Embeddings:
    """Open a folder of embeddings; of the shards only what tells their shape is read. UserError names a file that is
    none, is cut short or is of another width."""
    # clip-retrieval puts other arrays next to those of images
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{name}: no such folder")
    paths = _shards_in(folder / IMAGES) or _shards_in(folder)
    if not paths:
        raise UserError(f"{name}: no embeddings in it: it needs files *.npy, or a folder {IMAGES} of them")

    # only headers are read, but a file that is cut short is refused by its map
    shards = tuple(_npy(path) for path in paths)
    first = shards[0]
    for shard in shards:
        if shard.d != first.d:
            raise UserError(
                f"{shard.path}: {shard.d} numbers a row, and {first.path.name} has {first.d}: give folders of one "
                "network each"
            )
    return Embeddings(name, shards, first.d)


def check_widths(embeddings: Embeddings, d: int) -> None:
    """Raise UserError if embeddings are not as wide as the d features of a network."""
    if embeddings.d != d:
        raise UserError(
            f"{embeddings.name}: {embeddings.d} numbers a row, and model.backbone gives {d}: take the model that they "
            "were made with, or make them with this one"
        )


def _shards_in(folder: Path) -> list[Path]:
    """Return the npy files of a folder."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]

    # The numbers in a name are compared as numbers.
    def counted(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]

    return sorted((path for path in paths if path.suffix.lower() == NPY), key=counted)


def _mapped(path: Path) -> Tensor:
    """Return the rows of a npy file, mapped."""
    with reading(path, AGAIN):
        return mapped(npy_map(path))


def _npy(path: Path) -> Shard:
    with reading(path, AGAIN):
        array = npy_map(path)
    if array.ndim != 2 or array.dtype not in (np.float16, np.float32):
        raise UserError(
            f"{path}: {array.dtype} {list(array.shape)}: embeddings are float16 or float32 [n, d]: save them so, or "
            "move this file elsewhere"
        )
    return Shard(path, *array.shape)
