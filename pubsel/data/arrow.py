"""Tables that pyarrow reads: parquet files, and folders that `datasets` of Hugging Face saved (save_to_disk).

They are read in blocks. Lists of numbers, such as embeddings, become a column for each of their numbers. Images inside
of a table are opened as files are (`Inside`).
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.files import digest, gathered, plain, reading
from pubsel.messages import UserError, needs_extra

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

PARTS_FILE, STATE_FILE, ABOUT_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
PART = "split"  # column of the parts of a folder
BLOCK = 2**13  # rows at once
# types of columns of lists, as pyarrow writes them, such as list<element: float>
OF_NUMBERS = r"(large_|fixed_size_)?list<\w+: (halffloat|float|double|u?int\d+)( not null)?>(\[\d+\])?"
OF_BYTES = r"(large_)?binary(_view)?|fixed_size_binary\[\d+\]"
OF_IMAGES = r"struct<(.*, )?bytes: (large_)?binary.*>"  # as `datasets` stores them
IMAGE = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF.{4}WEBP|P[1-7]\s|.{128}DICM", re.DOTALL)
FIRST = 64  # values of a column, by most of which it has images or words


class Inside(NamedTuple):
    """An image inside of a table, which is opened as a path is."""

    table: Path
    values: pyarrow.ChunkedArray
    row: int

    @property
    def name(self) -> str:
        return f"row {self.row + 1}"

    def __str__(self) -> str:
        return f"{self.table}: {self.name}"

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the image. FileNotFoundError if there is none."""
        value = self.values[self.row].as_py()
        content = value["bytes"] if isinstance(value, dict) else value
        if content is None:
            raise FileNotFoundError
        return io.BytesIO(content)


def image_columns(table: Path) -> list[str]:
    """Return the columns of a table that have images. UserError if it cannot be read."""
    with _readable(table):
        types = {field.name: str(field.type) for field in _schema(next(iter(_parts(table).values())))}
        columns = [name for name, kind in types.items() if re.fullmatch(OF_IMAGES, kind)]
        # bytes are words too, as many programs write texts, unless most of the first values begin as images do
        for name in [name for name, kind in types.items() if re.fullmatch(OF_BYTES, kind)]:
            values = (value for batch in _batches(arrow_files(table), [name], FIRST) for value in batch.column(name))
            known = (value.as_py() for value in values if value.is_valid)
            first = [bool(IMAGE.match(value)) for value in itertools.islice(known, FIRST)]
            columns += [name] if 2 * sum(first) > len(first) else []
        return columns


def as_word(value: bytes) -> str:
    """Return bytes of a table as the text that they are in UTF-8; others differ from each other."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return f"<bytes {digest([value])}>"


def images(table: Path, column: str) -> list[Inside]:
    """Return the images of a column, none of which is read yet, but for those of a parquet file."""
    import pyarrow

    with _readable(table):
        files = arrow_files(table)
        batches = [batch.select([column]) for batch in _batches(files, [column])]
        values = pyarrow.Table.from_batches(batches, _schema(files, [column])).column(column)
    return [Inside(table, values, i) for i in range(len(values))]


def arrow_files(table: Path) -> list[Path]:
    """Return the files that a table consists of."""
    return [file for part in _parts(table).values() for file in part]


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder that `datasets` saved."""
    return (path / PARTS_FILE).is_file() or ((path / STATE_FILE).is_file() and (path / ABOUT_FILE).is_file())


def names(table: Path) -> list[str]:
    """Return the names of a table's columns. UserError if it cannot be read."""
    with _readable(table):
        parts = _parts(table)
        columns = [*_schema(next(iter(parts.values()))).names, *([PART] if "" not in parts else [])]
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise UserError(f"{table}: two columns are called {twice[0]}: rename one")
    return columns


def frame(table: Path, as_they_are: Collection[str] = ()) -> pd.DataFrame:
    """Return a table, with its lists of numbers as a column each, called NAME[0], NAME[1], ..., and the names of its
    images. The numbers of classes that `datasets` names become these names, and a folder of parts has a column `split`.
    as_they_are: columns whose lists stay lists. UserError if it cannot be read."""
    import pandas as pd
    import pyarrow

    with _readable(table):
        parts, files = _parts(table), arrow_files(table)
        schema, counts = _schema(files), [sum(len(batch) for batch in _batches(part)) for part in parts.values()]
        if not sum(counts):
            raise UserError(f"{table}: no rows in it")
        types = {field.name: str(field.type) for field in schema}
        lists = [name for name, kind in types.items() if name not in as_they_are and re.fullmatch(OF_NUMBERS, kind)]
        pictures = image_columns(table)
        others = [name for name in schema.names if name not in (*lists, *pictures)]
        batches = [batch.select(others) for batch in _batches(files, others)]
        whole = pyarrow.Table.from_batches(batches, _schema(files, others)).to_pandas()
        for name in others:
            if re.fullmatch(OF_BYTES, types.get(name, "")):
                whole[name] = whole[name].map(as_word, na_action="ignore")
        for name in pictures:
            whole[name] = [f"row {i + 1}" for i in range(sum(counts))]
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        if is_folder(table):
            about = json.loads((table / next(iter(parts)) / ABOUT_FILE).read_text(encoding="utf-8"))
        for name, feature in (about.get("features") or {}).items():
            if name in whole and isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                whole[name] = whole[name].map(dict(enumerate(feature["names"])))
        if "" not in parts:
            whole[PART] = np.repeat([*parts], counts)

        # a table of numbers is as large as memory may be, and is mapped
        wide = list[pd.DataFrame]()
        for name in lists:
            wide.append(as_columns(name, gathered(_lists(table, files, name), sum(counts)).numpy()))
    return pd.concat([whole, *wide], axis=1)


def as_columns(name: str, lists: np.ndarray) -> pd.DataFrame:
    """Return lists of numbers [n, d] as d columns, by the names that a model of these takes them by."""
    import pandas as pd

    return pd.DataFrame(lists, columns=[f"{name}[{i}]" for i in range(lists.shape[1])])


def _lists(table: Path, files: Sequence[Path], name: str) -> Iterator[Tensor]:
    """Yield lists of numbers in blocks, float32 [b, d]. UserError if they differ in length, or lack a number."""
    width = None
    for batch in _batches(files, [name]):
        if not len(batch):
            continue
        lists = batch.column(name)
        values = lists.flatten()
        width = len(values) // len(lists) if width is None else width
        each = lists.value_lengths() if hasattr(lists, "value_lengths") else None  # of lists of a fixed size: equal
        unequal = each is not None and not (each.to_numpy(zero_copy_only=False) == width).all()
        if lists.null_count or values.null_count or unequal or not width:
            raise UserError(f"{table}: lists in column {name} are not of equal length, or lack numbers")
        yield torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(lists), width))


def _parts(table: Path) -> dict[str, list[Path]]:
    """Return the files of each part of a folder, by its name; of a file, or a folder without parts, by ""."""
    if not is_folder(table):
        return {"": [plain(table)]}
    if (table / PARTS_FILE).is_file():
        parts = json.loads((table / PARTS_FILE).read_text(encoding="utf-8"))["splits"]
        return {part: _parts(table / part)[""] for part in parts}
    state = json.loads((table / STATE_FILE).read_text(encoding="utf-8"))
    if state.get("_indices_data_files"):  # its files have more rows than it
        raise UserError(
            f"{table}: a selection of rows that an old version of datasets saved: save it again by a new one"
        )
    return {"": [plain(table / file["filename"]) for file in state["_data_files"]]}


def _schema(files: Sequence[Path], columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """Return the schema of files, or that of some columns."""
    import pyarrow
    import pyarrow.parquet

    if files[0].suffix.lower() == ".arrow":
        with pyarrow.memory_map(str(files[0])) as content:
            schema = pyarrow.ipc.open_stream(content).schema
    else:
        schema = pyarrow.parquet.read_schema(files[0])
    return schema if columns is None else pyarrow.schema([schema.field(name) for name in columns])


def _batches(files: Sequence[Path], columns: Sequence[str] = (), rows: int = BLOCK) -> Iterator[pyarrow.RecordBatch]:
    """Yield files in blocks, of a parquet file some columns alone, `rows` at once."""
    import pyarrow
    import pyarrow.parquet

    for file in files:
        if file.suffix.lower() == ".arrow":
            with pyarrow.memory_map(str(file)) as content:
                yield from pyarrow.ipc.open_stream(content)
        else:
            with pyarrow.parquet.ParquetFile(file) as content:
                yield from content.iter_batches(rows, columns=list(columns))


@contextmanager
def _readable(table: Path) -> Iterator[None]:
    """Read a table inside. UserError if that is not possible."""
    try:
        with reading(table, "not a readable table: save it again", (OSError, ValueError, KeyError)):
            yield
    except ImportError:
        raise UserError(f"{table}: needs pyarrow: {needs_extra('parquet')}, or convert it to CSV") from None
