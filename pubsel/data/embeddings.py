"""Folders of embeddings: features of public images that were computed before, in shards, of which memory holds little.

A shard is an array [n, d], float16 or float32, in a npy file, or a column of lists of d numbers in a parquet file. The
folder contains the shards themselves; or a folder img_emb with them, as clip-retrieval writes it next to metadata and
text_emb, which are not read. Numbers in names are counted: img_emb_2.npy comes before img_emb_10.npy.

Shards that `pubsel pool images=...` wrote have a record each, NAME.json (pubsel.data.extracted), which is checked.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data import folders, intact
from pubsel.files import plain, reading, unreadable
from pubsel.gradients.mapped import give_back, in_parts, mapped, npy_map
from pubsel.messages import UserError
from pubsel.settings.identity import is_path

NPY, PARQUET = ".npy", ".parquet"
IMAGES, IGNORED = "img_emb", ("text_emb", "metadata")  # folders of clip-retrieval
COLUMNS = ("embedding", "image_embedding")
AGAIN = "download or compute it again"
BLOCK = 2**14  # rows of a block
AT_RANDOM = 2**8  # rows at random places before memory is given back: of each the system maps many pages

Places = NDArray[np.int64]


class Shard(NamedTuple):
    """One file, as a part of a pool (pubsel.selection.pool.Part). column: of a parquet file; None: it is a npy file."""

    path: Path
    n: int
    d: int
    column: str | None = None

    @property
    def stamp(self) -> str:
        """Return what tells it from another file, or from another state of it: path, size and time."""
        stat = self.path.stat()
        return f"{self.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, at most BLOCK at a time, [b, d]. UserError if the file cannot be read."""
        return in_parts(_mapped(self.path), BLOCK) if self.column is None else _blocks(self)

    def rows(self, places: Places) -> Tensor:
        """Return some rows, float32 [len(places), d]. Of a parquet file all row groups are read that have some."""
        x = torch.empty(len(places), self.d)
        if self.column is not None:
            return _picked(self, places, x)
        array = _mapped(self.path)
        for first in range(0, len(places), AT_RANDOM):
            some = slice(first, first + AT_RANDOM)
            x[some] = array[torch.from_numpy(places[some])].float()
            give_back(array)
        return x


class Embeddings(NamedTuple):
    """A folder of embeddings. weights: a digest of the weights of the network that made them, if their records tell."""

    name: str
    shards: tuple[Shard, ...]
    d: int
    weights: str | None = None

    @property
    def n(self) -> int:
        """Return how many embeddings there are."""
        return sum(shard.n for shard in self.shards)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in order, at most BLOCK at a time, [b, d]."""
        return itertools.chain.from_iterable(shard.blocks() for shard in self.shards)

    def rows(self, places: Places) -> Tensor:
        """Return some rows, float32 [len(places), d]."""
        ends = np.cumsum([shard.n for shard in self.shards])
        of = np.searchsorted(ends, places, side="right")
        x = torch.empty(len(places), self.d)
        for i in np.unique(of).tolist():
            shard = self.shards[i]
            x[torch.from_numpy(of == i)] = shard.rows(places[of == i] - (ends[i] - shard.n))
        return x


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
                if suffix in folders.SUFFIXES or (entry.is_dir() and entry.name not in (IMAGES, *IGNORED)):
                    return False
                has = has or suffix in (NPY, PARQUET)
    except OSError:  # absent, or of another user
        return False
    return has


def open_embeddings(name: str) -> Embeddings:
    """Open a folder of embeddings; of the shards only what tells their shape is read. UserError names a file that is
    none, is cut short or is of another width, or a shard that is not there yet."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{name}: no such folder")
    paths = _shards_in(folder / IMAGES) or _shards_in(folder)
    if not paths:
        raise UserError(f"{name}: no embeddings in it: it needs files *.npy or *.parquet, or a folder {IMAGES} of them")

    shards = tuple(_npy(path) if path.suffix.lower() == NPY else _parquet(path) for path in paths)
    first = shards[0]
    for shard in shards:
        if shard.d != first.d:
            raise UserError(
                f"{shard.path}: {shard.d} numbers a row, and {first.path.name} has {first.d}: give folders of one "
                "network each"
            )
    return Embeddings(name, shards, first.d, _weights(folder, shards))


def check_backbone(embeddings: Embeddings, d: int, weights: str | None) -> None:
    """Raise UserError if embeddings are not features of a network: d, how many it gives; weights: their digest, which
    is compared if the records of the shards have one (`Task.weights`)."""
    if embeddings.d != d:
        raise UserError(
            f"{embeddings.name}: {embeddings.d} numbers a row, and model.backbone gives {d}: take the model that they "
            "were made with, or make them with this one"
        )
    if weights is not None and embeddings.weights not in (None, weights):
        raise UserError(
            f"{embeddings.name}: made with other weights than those of model.backbone: take the model that they were "
            "made with, or make them with this one"
        )


def _shards_in(folder: Path) -> list[Path]:
    """Return the npy files of a folder, or if it has none, its parquet files (next to npy files these are metadata)."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    of_kind = ([path for path in paths if path.suffix.lower() == kind] for kind in (NPY, PARQUET))
    return sorted(next((some for some in of_kind if some), []), key=_counted)


def _counted(path: Path) -> list[tuple[int, str]]:
    """Return a name as what sorts it, with its numbers as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _weights(folder: Path, shards: tuple[Shard, ...]) -> str | None:
    """Return the digest of the weights in the records of shards; None without records. UserError if not all are of one
    network, or shards are absent that a record counts."""
    # Embeddings of other programs have no records.
    records: dict[str, dict[str, Any]] = {}
    for shard in shards:
        path = shard.path.with_suffix(".json")
        if path.exists():
            try:
                records[shard.path.name] = read = json.loads(plain(path).read_text(encoding="utf-8"))
                complete = read["n"] == shard.n and bool(read["weights"] and read["shards"])
                if "digest" in read:  # those of an earlier version have none
                    complete &= intact.digest(shard.path).hex() == read["digest"]
            except OSError as error:
                raise unreadable(path, error, "fix its permissions") from None
            except (ValueError, KeyError, TypeError):
                complete = False
            if not complete:
                raise UserError(f"{path} is not the record of {shard.path.name}: delete both, and compute them again")
    if not records:
        return None

    # The records must fit together, and all be there.
    name, first = next(iter(records.items()))
    for other, record in records.items():
        if (record["weights"], record["shards"]) != (first["weights"], first["shards"]):
            raise UserError(f"{folder}: {name} and {other} are not of one extraction: move one of them elsewhere")
    if len(records) < first["shards"]:
        raise UserError(
            f"{folder}: {len(records)} of {first['shards']} shards are there: `pubsel pool images=... to={folder} "
            f"shards={first['shards']}` computes the others"
        )
    return str(first["weights"])


# npy


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


# parquet


def _file(path: Path) -> Any:
    """Return a parquet file of which nothing but the footer is read."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow: pip install pubsel[parquet]") from None
    with reading(path, AGAIN, (OSError, ArrowException)):
        return parquet.ParquetFile(path, memory_map=True)


def _parquet(path: Path) -> Shard:
    """Return a parquet file as a shard. UserError if it has no column of lists of numbers, or several."""
    file = _file(path)
    from pyarrow import types

    columns = [field for field in file.schema_arrow if types.is_list(field.type) or types.is_fixed_size_list(field.type)
               or types.is_large_list(field.type)]  # fmt: skip
    # One name, or one choice: captions and tags may be lists too.
    columns = [field for field in columns if types.is_floating(field.type.value_type)]
    chosen = [field for field in columns if field.name in COLUMNS] or columns
    if len(chosen) != 1:
        names = ", ".join(field.name for field in (chosen or file.schema_arrow))
        which = "several columns" if chosen else "no column"
        raise UserError(f"{path}: {which} of lists of floating-point numbers ({names}): name one of them {COLUMNS[0]}")

    # How wide its rows are: the type says it, or else the first row that is not null.
    (field,) = chosen
    if types.is_fixed_size_list(field.type):
        return Shard(path, file.metadata.num_rows, field.type.list_size, field.name)
    for batch in file.iter_batches(64, columns=[field.name]):
        if len(rows := batch.column(0).drop_null()):
            return Shard(path, file.metadata.num_rows, len(rows[0]), field.name)
    raise UserError(f"{path}: column {field.name} is empty: move this file elsewhere")


def _blocks(shard: Shard, groups: list[int] | None = None) -> Iterator[Tensor]:
    """Yield rows of a parquet file, of some of its row groups; a row that is absent is not a number."""
    file = _file(shard.path)
    from pyarrow import compute

    for batch in file.iter_batches(BLOCK, row_groups=groups, columns=[shard.column]):
        column = batch.column(0)
        there = column.is_valid().to_numpy(zero_copy_only=False)
        lengths = compute.list_value_length(column.drop_null()).to_numpy(zero_copy_only=False)
        if (other := lengths[lengths != shard.d]).size:
            raise UserError(
                f"{shard.path}: a row of {other[0]} numbers, and the first one has {shard.d}: give rows of one length"
            )
        x = np.full((len(column), shard.d), np.nan, dtype=np.float32)
        x[there] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, shard.d)
        yield torch.from_numpy(x)


def _picked(shard: Shard, places: Places, x: Tensor) -> Tensor:
    """Fill x with the rows of a parquet file at some places."""
    metadata = _file(shard.path).metadata
    end = 0
    for group in range(metadata.num_row_groups):
        end, at = end + metadata.row_group(group).num_rows, end
        if not ((places >= at) & (places < end)).any():
            continue

        for block in _blocks(shard, [group]):
            here = (places >= at) & (places < at + len(block))
            x[torch.from_numpy(here)] = block[torch.from_numpy(places[here] - at)]
            at += len(block)
    return x
