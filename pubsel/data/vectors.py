"""Rows of numbers as data: arrays in npz and npy files, folders of embeddings with their labels, and tables.

Arrays are features, of an encoder perhaps, and stay as they are. Columns of a table differ by orders: those without
bounds come first (`Vectors.raw`), and the algorithm brings them to one scale; those with bounds (`bounds`, which their
owner gives) are brought to -1..1, words to a column of 0 and 1 for each. A `Field` says how one number of a row is
read, so that a model's folder can read other tables in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data import memory, tables
from pubsel.data.embeddings import BLOCK, open_embeddings
from pubsel.data.examples import MANY, drawn, each_row, folded, in_hash_order, people_of, unit_of
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of, on_columns
from pubsel.data.folders import TEST_FRACTION
from pubsel.data.identifiers import COUNTERS, left_out, may_be_ids, plain_id
from pubsel.data.images import MOST
from pubsel.data.misread import LARGEST, OFTEN, about_codes, codes_of_missing, suspicious
from pubsel.data.overlap import Digest, digests, remember
from pubsel.data.prepared import (
    arrays_called,
    arrays_of,
    names_in,
    people_in,
    shape_in,
    unread_arrays,
    user_labels,
)
from pubsel.data.splits import Parts, Split
from pubsel.files import gathered, in_parts, mapped, npy_map, plain, reading, taken
from pubsel.messages import UsageError, UserError, say
from pubsel.settings.keys import Read, Scale

if TYPE_CHECKING:
    import pandas as pd

FEATURES = ("x", "features", "embeddings", "data", "vectors")
LABELS = ("y", "labels", "label", "target", "targets")
LABEL_FILES = ("labels.npy", "label.npy", "y.npy", "targets.npy")
NO_WORDS = {folded(word) for word in tables.MISSING}
KINDS = (str, int, float, Decimal, np.bool_, np.integer, np.floating)  # of values that may be numbers
DECIMAL = r"[+-]?\d*,\d+\s*"  # a number as many languages write it
THOUSANDS = r"[+-]?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d*)?\s*"  # with a comma between thousands, or none at all
MARKED = (
    r"\s*[<>\u2264\u2265~=$\u20ac\u00a3+-]*\s*\d[\d.,]*\s*[^\d\s]*\s*"  # a number with a unit, or with a sign before it
)
POINTS = "write points, as pandas.read_csv(FILE, sep=';', decimal=',').to_csv(FILE, index=False) does"
OUTSIDE = "correct bounds=; otherwise, other words are none, and other numbers the nearest bound"
HALF = 0.5  # of the numbers of a column: if more are outside of its bounds, these are of another column or scale


class Field(NamedTuple):
    """One number of a row, by the name of the column that it is read from. word: it is 1 where the column has this
    word; missing: it is 1 where the column has nothing; least, most: bounds, which become -1 and 1."""

    name: str
    word: str | None = None
    missing: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def raw(self) -> bool:
        """Return whether nobody knows its scale."""
        return self.word is None and not self.missing and self.least is None

    def read(self, values: pd.Series[Any]) -> np.ndarray:
        """Return the number of each row, float32 [n], from the values of the column; NaN: it has none."""
        if self.word is not None:
            return values.map(_as_word).eq(folded(self.word)).to_numpy(np.float32)
        numbers = numbers_of(values)
        numbers = np.where(np.isfinite(numbers), numbers, np.nan)
        if self.missing:
            return np.isnan(numbers).astype(np.float32)
        if self.least is None or self.most is None:
            return np.where(np.abs(numbers) <= LARGEST, numbers, np.nan).astype(np.float32)
        half = (self.most - self.least) / 2
        numbers = np.clip((numbers - self.least) / half - 1, -1, 1)
        return np.nan_to_num(numbers).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        """Return it as config.json has it."""
        return {key: value for key, value in self._asdict().items() if value is not None and value is not False}


def numbers_of(values: pd.Series[Any]) -> np.ndarray:
    """Return the values of a column as numbers, float64 [n], each by itself, so that no row decides how others are
    read; NaN: it is none. True is 1, and a date, a duration or a complex number is none."""
    import pandas as pd

    def number(value: Any) -> Any:
        # pandas would take the nanoseconds of a date, or the real part of a complex number
        known = isinstance(value, KINDS) and not isinstance(value, np.timedelta64)
        return tables.TRUTH.get(folded(str(value)), value) if known else None

    if values.dtype.kind in "mM":
        return np.full(len(values), np.nan)
    if values.dtype.kind not in "fiub":
        values = values.map(number)
    return pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)


def not_numbers(frame: pd.DataFrame, columns: Sequence[Field]) -> str:
    """Return a sentence on the values in columns of numbers that are neither numbers nor missing, or of columns without
    bounds too large for float32; "" if there are none."""
    wrong, unbounded = list[str](), {column.name for column in columns if column.raw}
    for name in dict.fromkeys(column.name for column in columns if column.word is None):
        values = frame[name].dropna()
        numbers = numbers_of(values)
        bad = np.isnan(numbers) | (values.dtype.kind not in "fiub" and tables.has_points(values))
        if name in unbounded:
            bad |= np.isfinite(numbers) & (np.abs(numbers) > LARGEST)
        wrong += [str(value) for value in values[bad] if str(value).strip() not in tables.MISSING]
    text = f"{len(wrong)} values in columns of numbers are none, or too large, such as {first_of(map(repr, wrong))}"
    return text if wrong else ""


class Outside(NamedTuple):
    """The values of a column that are none of its words, or outside of its bounds. known: how many are not missing;
    of_words: whether it has words; text: a sentence on these values."""

    column: str
    known: int
    other: int
    of_words: bool
    text: str


def outside_of(frame: pd.DataFrame, columns: Sequence[Field]) -> list[Outside]:
    """Return how many values of each column are outside of what its fields take."""
    fields, counts = dict[str, list[Field]](), list[Outside]()
    for field in columns:
        fields.setdefault(field.name, []).append(field)
    for name, several in fields.items():
        words = [field.word for field in several if field.word is not None]
        bounds = next(((field.least, field.most) for field in several if field.least is not None), None)
        if words:
            texts = frame[name].map(_as_word)
            inside = texts.isin({folded(word) for word in words}).to_numpy()
            known, takes = inside | ~texts.isin(NO_WORDS).to_numpy(), first_of(words, 4)
        else:
            numbers = numbers_of(frame[name])
            known, takes = np.isfinite(numbers), "" if bounds is None else f"{bounds[0]:g} to {bounds[1]:g}"
            inside = known if bounds is None else (numbers >= bounds[0]) & (numbers <= bounds[1])
        other = known & ~inside
        such = first_of(map(repr, frame[name][other]))
        text = f"{int(other.sum())} of {int(known.sum())} values in column {name} are not in {takes}, such as {such}"
        counts.append(Outside(name, int(known.sum()), int(other.sum()), bool(words), text))
    return counts


def _as_word(value: Any) -> str:
    """Return a value of a column of words, as words are compared."""
    return folded(as_text(value))


def as_text(value: Any) -> str:
    """Return a value of a table or of a program as a text."""
    import pandas as pd

    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value)


class Vectors(NamedTuple):
    """Rows of numbers and their labels, of all parts."""

    x: Tensor  # float32 [n, d]
    y: Tensor
    test: np.ndarray | None  # bool [n]; None: a fifth is drawn
    names: tuple[str, ...] = ()  # of the classes; empty: one class
    people: np.ndarray | None = None
    columns: tuple[Field, ...] = ()
    raw: int | None = None  # how many columns, the first ones, have no known scale; None: x are features
    findings: tuple[Finding, ...] = ()
    as_read: Digest | None = None  # of each row before bounds, words and scale decide what x is; None: of x


def is_rows(path: Path, read: Read) -> bool:
    """Return whether a path of a user's has rows of numbers, by the names in it alone."""
    if tables.is_table(path):
        named = any(tables.plain_name(name) in tables.PATHS for name in tables.names_of(path))
        return not (read.path or named or tables.images_inside(path))
    if path.is_dir():
        return any((path / name).is_file() for name in LABEL_FILES)
    suffix = path.suffix.lower()
    if suffix != ".npz":
        return suffix == ".npy"
    names = [x for x, _ in _parts_in(path).values()]
    if not names and all(len(shape_in(path, name)) < 3 for name in names_in(path)):
        names = list(row_arrays(path))
    return bool(names) and all(len(shape_in(path, x)) == 2 for x in names)


def read_rows(path: Path, unit: str | None, read: Read, like: Sequence[Field] = (), labelled: bool = True) -> Vectors:
    """Return the rows of a path for which `is_rows` holds. like: the columns that are read of a table, in their order,
    as of the private one. labelled: whether they must have labels. UserError names what is wrong,
    UsageError a unit that the path cannot have."""
    if tables.is_table(path):
        return _of_table(path, unit, read, like, labelled)
    if path.suffix.lower() == ".npz":
        rows = _of_npz(path, unit)
    else:
        rows = _of_npy(path)
        if unit is not None:
            raise UsageError(f"unit={unit}: {path.name} has no names of people: give a npz, or a table")
    return _with_scale(path, rows, read)


def parts_of(name: str, rows: Vectors, kind: str = "rows") -> tuple[Parts, list[Tensor]]:
    """Return both parts of some rows, and the places of these, int64 [n], among all: as their owner gave them, or a
    fifth drawn for the test part, each row by its own content, or each person. A part that is sorted by class is
    brought into an order in which no row depends on another. kind: of the rows in words."""
    content = digests(rows.x)
    unit = each_row(content, rows.y) if rows.x.dim() == 2 else content
    test, notes = rows.test, list[str]()
    if test is None:
        test = drawn(unit if rows.people is None else rows.people, TEST_FRACTION, "test")
        by = kind[:-1] if rows.people is None else "person"
        notes.append(f"{Path(name).name}: {int(test.sum())} of {len(test)} {kind} held out as the test set, by {by}")
    splits, places = list[Split](), list[Tensor]()
    for which in (~test, test):
        at = np.flatnonzero(which)
        at = at[in_hash_order(unit[at], "order")]
        places.append(torch.from_numpy(at))
        splits.append(Split(taken(rows.x, places[-1]), rows.y[places[-1]]))
        remember(splits[-1].x, content[at])
    groups = None
    if rows.people is not None:
        people = torch.from_numpy(rows.people)
        groups = people[places[0]], people[places[1]]
    return Parts(splits[0], splits[1], tuple(notes), names=rows.names, groups=groups), places


# Arrays


def _parts_in(path: Path) -> dict[str, tuple[str, str]]:
    """Return the names of features and labels of each part in a npz: of train, val and test, or of "" alone."""
    x, y = (arrays_called(names_in(path), usual) for usual in (FEATURES, LABELS))
    parts = {part: (x[part][0], y[part][0]) for part in x if x[part] and y[part]}
    if "train" in parts:
        parts.pop("", None)
    return parts if parts.keys() & {"", "train"} else {}


def _check_one_each(path: Path, parts: Mapping[str, tuple[str, str]]) -> None:
    """Raise UserError if other arrays may be the rows or labels of a part as well. parts: the names of both."""
    for usual, sides, what in ((FEATURES, 2, "the rows of numbers"), (LABELS, 1, "the labels")):
        arrays = arrays_called(names_in(path), usual)
        for part, (x, _) in parts.items():
            name, *others = arrays[part]
            for other in others:
                shape = shape_in(path, other)
                if shape[:1] == shape_in(path, x)[:1] and len(shape) >= sides:
                    raise UserError(f"{path}: {name} and {other} may be {what}: call one otherwise, or leave it out")


def _of_npz(path: Path, unit: str | None) -> Vectors:
    """Return the rows of a npz: x (or features, embeddings, data) and y (or labels, target), or x_train, y_train,
    x_test, y_test. The validation part is one with the test part, as of a folder."""
    parts = _parts_in(path)
    _check_one_each(path, parts)
    if not parts:
        part_of = row_arrays(path)
        x = [_numbers(path, *array) for array in arrays_of(path, part_of).items()]
        rows = _unlabelled(path.name, torch.cat(x), "y")
        if unit is None:
            return rows
        keys = people_in(path, unit, list(part_of.values()), [len(part) for part in x])
        return rows._replace(people=people_of(path.name, keys)[0])
    x_names, y_names = zip(*parts.values(), strict=True)
    arrays = arrays_of(path, [*x_names, *y_names])
    x = [_numbers(path, name, arrays[name]) for name in x_names]
    if len({part.shape[1] for part in x}) > 1:
        raise UserError(f"{path}: {' and '.join(x_names)} differ in how many numbers a row has: make them alike")
    y, names, findings = user_labels(path, {name: arrays[name] for name in y_names}, [len(part) for part in x])
    of_part = np.repeat([part not in ("", "train") for part in parts], [len(part) for part in x])
    test = of_part if of_part.any() else None

    findings = (*findings, *unread_arrays(path, {*x_names, *y_names}, unit))
    people = None
    if unit is not None:
        people, more = people_of(path.name, people_in(path, unit, list(parts), [len(part) for part in x]))
        findings = (*findings, *more)
    return Vectors(torch.cat(x), y, test, names, people, findings=findings)


def _of_npy(path: Path) -> Vectors:
    """Return the rows of a npy file with labels.npy, or NAME_labels.npy, next to it; or of a folder of npy files, as
    clip-retrieval writes it, with labels.npy in it."""
    folder = path if path.is_dir() else path.parent
    ways = (*LABEL_FILES, f"{path.stem}_labels.npy", f"{path.stem}_y.npy")
    file = next((folder / name for name in ways if (folder / name).is_file() and folder / name != path), None)
    if path.is_dir():
        shards = open_embeddings(str(path))
        x = gathered((block.float() for block in shards.blocks()), shards.n)
    else:
        with reading(path, "save it again by numpy.save"):
            x = _numbers(path, path.name, npy_map(path))
    if file is None:
        return _unlabelled(path.name, x, "labels.npy, with one for each row, next to it")
    with reading(file, "save it again by numpy.save"):
        labels = np.load(plain(file), allow_pickle=False)
    y, names, findings = user_labels(file, {file.name: labels}, [len(x)])
    return Vectors(x, y, None, names, findings=findings)


def _unlabelled(name: str, x: Tensor, remedy: str) -> Vectors:
    """Return rows without labels as those of one class, which public data may be."""
    lacking = Finding("one", NOTE, f"{name}: no labels in it", f"add {remedy}")
    return Vectors(x, torch.zeros(len(x), dtype=torch.int64), None, ("0",), findings=(lacking,))


def _numbers(path: Path, name: str, array: np.ndarray) -> Tensor:
    """Return an array [n, d], in a type of torch. UserError if it is none of rows."""
    if array.ndim != 2 or array.dtype.kind not in "fiub" or 0 in array.shape:
        images = "write images by numpy.savez as train_images, train_labels, test_images and test_labels, uint8"
        raise UserError(f"{path}: {name} is {array.dtype} {list(array.shape)}, not rows of numbers [n, d]: {images}")
    of_torch = array.dtype.kind in "fi" and array.dtype.isnative and array.dtype.itemsize <= 8
    return mapped(array if of_torch else array.astype(np.float64))


def _with_scale(path: Path, rows: Vectors, read: Read) -> Vectors:
    """Return rows of an array with what their owner says about their scale. Numbers that are missing are zero in
    features; UserError if a row has none at all."""
    n, d = rows.x.shape

    # an infinite number is a missing one, as in a table; bounds are applied before anything is rounded
    def parts() -> Iterator[Tensor]:
        exact = (part.double() for part in in_parts(rows.x, BLOCK))
        return (part.where(part.abs() <= LARGEST, torch.nan) for part in exact)

    def as_read() -> Digest:
        return np.concatenate([digests(part.float()) for part in parts()])

    if read.bounds is not None:
        if isinstance(read.bounds, str):
            raise UsageError(f"bounds={read.bounds}: of an array: give [least,most] of all its numbers")
        least, most = read.bounds
        outside = sum(((part < least) | (part > most)).sum(0) for part in in_parts(rows.x, BLOCK))
        assert isinstance(outside, Tensor)
        sample = dict(zip(map(str, range(d)), rows.x[:: max(1, n // BLOCK)].double().numpy().T, strict=True))
        findings = about_codes(path.name, sample, dict.fromkeys(sample, (least, most)))
        share, what, severity = HALF, "most", ERROR
        if not (outside > share * n).any():
            share, what, severity = OFTEN, "a tenth or more", WARNING
        if wrong := int((outside > share * n).sum()):
            text = f"{path.name}: {wrong} of {d} columns have {what} of their numbers outside of {least:g} to {most:g}"
            findings.append(Finding("outside", severity, text, OUTSIDE))
        rows = rows._replace(findings=(*rows.findings, *findings))
        columns = tuple(Field(str(i), least=least, most=most) for i in range(d))
        scaled = (((x - least) / ((most - least) / 2) - 1).clamp(-1, 1).nan_to_num(0.0).float() for x in parts())
        return rows._replace(x=gathered(scaled, n), columns=columns, raw=0, as_read=as_read())
    some, y = (part[:: max(1, n // BLOCK)] for part in (rows.x, rows.y))
    about = suspicious(path.name, zip(map(str, range(d)), some.double().numpy().T, strict=True), y)
    rows = rows._replace(findings=(*rows.findings, *about))
    if read.scale == Scale.private:
        x = gathered((part.float() for part in parts()), n)
        return rows._replace(x=x, columns=tuple(Field(str(i)) for i in range(d)), raw=d)
    if rows.x.dtype != torch.float32:
        rows = rows._replace(x=gathered((part.float() for part in in_parts(rows.x, BLOCK)), n))
    bad = sum(int((~x.isfinite()).any(1).sum()) for x in in_parts(rows.x, BLOCK))
    if not bad:
        return rows
    text = f"{path.name}: {bad} of {len(rows.x)} rows have numbers that are missing or infinite"
    finding = Finding("missing", ERROR, text, "correct them; accepted, they are 0")
    known = gathered((x.nan_to_num(0.0, 0.0, 0.0) for x in in_parts(rows.x, BLOCK)), len(rows.x))
    return rows._replace(x=known, findings=(*rows.findings, finding), as_read=as_read())


# Tables


def _of_table(table: Path, unit: str | None, read: Read, like: Sequence[Field], labelled: bool) -> Vectors:
    """Return the rows of a table of numbers."""
    bounds = _bounds(read.bounds) if isinstance(read.bounds, str) else {}
    of_words = {name for name, values in bounds.items() if isinstance(values[0], str)}
    of_words |= {column.name for column in like if column.word is not None}
    names = {column.name for column in like}
    frame, answers = tables.features_in(table, unit, read, labelled, None, of_words, names)
    findings = list(answers.findings)
    if not len(frame):
        raise UserError(f"{table}: no row has a label")

    if like:
        columns = tuple(like)
        absent = [column.name for column in columns if column.name not in frame]
        if absent:
            raise UserError(f"{table}: no column {absent[0]}, which the private table has: add it")
    else:
        columns, more = _columns_of(table, frame, unit, read, bounds)
        unbounded = ((column.name, numbers_of(frame[column.name])) for column in columns if column.raw)
        bounded = {column.name: frame[column.name].map(_as_word).factorize()[0] for column in columns if not column.raw}
        findings += [*more, *suspicious(table.name, unbounded, answers.y, bounded)]
        limits = {c.name: (c.least, c.most) for c in columns if c.least is not None and c.most is not None}
        findings += about_codes(table.name, {name: numbers_of(frame[name]) for name in limits}, limits)
    if text := not_numbers(frame, columns):
        findings.append(Finding("missing", ERROR, f"{table.name}: {text}", "correct them; accepted, they are missing"))
    for name in frame:
        strings = memory.strings_in(frame[name][:BLOCK]) if frame[name].dtype.kind == "O" else None
        if strings and np.mean([*map(memory.path_ends, strings)]) >= MOST:
            text = f"{table.name}: column {name} has names of images, and the other columns are read"
            findings.append(Finding("columns", ERROR, text, f"set path={name}"))
    findings += [
        Finding("outside", severity, f"{table.name}: {column.text}", OUTSIDE)
        for column in outside_of(frame, columns)
        if column.other > OFTEN * column.known
        for severity in [ERROR if column.of_words or column.other > HALF * column.known else WARNING]
    ]
    x = as_rows(frame, columns)

    # rows are compared by what was read, whatever bounds, words and scale make of it
    features = frame.drop(columns=[*left_out(table.name, frame, unit)[0]])
    as_it_is = like or (columns == tuple(map(Field, features)) and read.scale != Scale.none)
    as_read = None if as_it_is else _as_read(features if len(features.columns) else frame)
    raw: int | None = sum(column.raw for column in columns)
    if read.scale == Scale.none and not like:
        x, raw = gathered((part.nan_to_num(0.0) for part in in_parts(x, BLOCK)), len(x)), None
    known = answers.y, answers.test, answers.names, answers.people
    return Vectors(x, *known, columns, raw, tuple(findings), as_read)


def _as_read(features: pd.DataFrame) -> Digest:
    """Return the digests of the rows of a table before bounds, words and scale decide how they are read, [n]: numbers
    are those that `as_rows` returns without bounds, and a word is a number by its hash."""

    def column(values: pd.Series[Any]) -> np.ndarray:
        numbers = Field(str(values.name)).read(values)
        if values.dtype.kind in "fiub":
            return numbers
        is_word = np.isnan(numbers) & values.map(lambda value: _as_word(value).strip() not in NO_WORDS).to_numpy(bool)
        numbers[is_word] = values[is_word].map(lambda value: unit_of(_as_word(value)) % 2**24).to_numpy(np.float32)
        return numbers

    blocks = (features.iloc[first : first + BLOCK] for first in range(0, max(1, len(features)), BLOCK))
    rows = (np.stack([column(block[name]) for name in features], axis=1) for block in blocks)
    return np.concatenate([digests(torch.from_numpy(block)) for block in rows])


def as_rows(frame: pd.DataFrame, columns: Sequence[Field]) -> Tensor:
    """Return the rows of a table as a model takes them, float32 [n, d]."""
    blocks = (frame.iloc[first : first + BLOCK] for first in range(0, max(1, len(frame)), BLOCK))
    rows = (np.stack([column.read(block[column.name]) for column in columns], axis=1) for block in blocks)
    return gathered(map(torch.from_numpy, rows), len(frame))


def row_arrays(path: Path) -> dict[str, str]:
    """Return the part of each array of features in a npz, by its name, those of the training part first; none: it has
    none with a usual name."""
    for word in FEATURES:
        arrays = arrays_called(names_in(path), (word,))
        if part_of := {name: part for part, names in arrays.items() for name in names}:
            return part_of
    return {}


def names_of_rows(name: str, path: Path, n: int) -> Iterator[str]:
    """Yield the name of each of n rows of a path, which is called `name`: its number, in an npz that in its array."""
    if path.suffix.lower() != ".npz":
        yield from (f"{name}/{i}" for i in range(n))
        return
    for array in row_arrays(path):
        yield from (f"{name}/{array}/{i}" for i in range(shape_in(path, array)[0]))


def new_rows(name: str, given: Any, columns: Sequence[Field]) -> Tensor:
    """Return rows for a model, float32 [n, d]: of a path, a pandas table, an array or a tensor [n, d] or [d]. columns:
    that it was trained on; empty: features. UserError if they are of another kind, or lack a column."""
    import pandas as pd

    if isinstance(given, Path):
        given = _new_at(given, {column.name for column in columns if column.word is not None})
    names = list(dict.fromkeys(column.name for column in columns))
    if not isinstance(given, pd.DataFrame):
        try:
            x = np.asarray(given, dtype=np.float64 if columns else np.float32)
        except (ValueError, TypeError):
            raise UserError(f"{name}: no rows of numbers, which this model was trained on") from None
        x = x[None] if x.ndim == 1 else x
        if x.ndim != 2:
            raise UserError(f"{name}: {list(x.shape)}: this model was trained on rows of numbers: give them as [n, d]")
        if not columns:
            return _known(name, torch.from_numpy(x))
        numbers = [str(i) for i in range(x.shape[1])]
        if set(names) != set(numbers):
            raise UserError(f"{name}: this model takes a table with the columns {first_of(names, 10)}: give one")
        given = pd.DataFrame(x, columns=numbers)
    given = memory.named_columns(name, given if columns else given.reset_index(drop=True))
    if not columns:
        return _known(name, _features_in(name, given))
    if absent := [column for column in names if column not in given]:
        raise UserError(f"{name}: no column {absent[0]}, which this model was trained on: it has {first_of(given, 10)}")
    # an answer of a row that was misread would look like any other
    if text := not_numbers(given, columns):
        raise UserError(f"{name}: {text}: correct them, or leave them empty if they are not known")
    _check_new(name, given, columns)
    return as_rows(given, columns)


def _check_new(name: str, given: pd.DataFrame, columns: Sequence[Field]) -> None:
    """Warn about columns of new rows that are empty, or have codes of no value, or what a model was not trained on.
    UserError for a column of words that has none of its words."""
    for raw in [column.name for column in columns if column.raw]:
        if codes := codes_of_missing(numbers_of(given[raw])):
            say(f"warning: {name}: column {raw} has {codes[0]:g}, far from its others: leave a missing number empty")
    for column in outside_of(given, columns):
        if column.of_words and 0 < column.known == column.other:
            raise UserError(f"{name}: {column.text}: write these words, or leave those empty that are none of them")
        if column.other > (0 if column.of_words else OFTEN * column.known):
            say(f"warning: {name}: {column.text}")
        if not column.known and len(given) > 1:
            say(f"warning: {name}: column {column.column} is empty in all {len(given)} rows")


def _features_in(name: str, frame: pd.DataFrame) -> Tensor:
    """Return the features that a table has a column for each of, float32 [n, d], in the order of the numbers that the
    columns are called by. UserError for a column of anything else, or columns in disorder."""
    numerals = [str(i) for i in range(frame.shape[1])]
    if {*frame} == {*numerals}:
        frame = frame[numerals]
    others = (*tables.OUTCOMES, *tables.SPLITS)
    if other := [c for c in frame if may_be_ids(c) or tables.plain_name(c) in others]:
        raise UserError(f"{name}: column {other[0]} is no feature, which this model takes alone: leave it out")
    last = dict[tuple[str, str], int]()  # number of a column, by what is around it in its name
    for column in frame:
        if match := re.fullmatch(r"(.*?)(\d+)(\D*)", column):
            around, number = (match[1], match[3]), int(match[2])
            if number <= last.get(around, -1):
                raise UserError(f"{name}: column {column} comes too late: bring the columns into the order of training")
            last[around] = number
    numbers = {column: numbers_of(frame[column]) for column in frame}
    for column, values in numbers.items():
        texts = {int(i): str(frame[column].iloc[i]).strip() for i in np.flatnonzero(np.isnan(values))}
        if wrong := [i for i, text in texts.items() if text not in tables.MISSING]:
            raise UserError(f"{name}: column {column}, row {wrong[0] + 1}: {texts[wrong[0]]!r} is no number")
    return torch.from_numpy(np.stack([*numbers.values()], axis=1).astype(np.float32))


def _known(name: str, x: Tensor) -> Tensor:
    """Return features. UserError if some are missing or infinite."""
    if bad := int((~x.isfinite()).any(1).sum()):
        raise UserError(f"{name}: {bad} of {len(x)} rows have numbers that are missing or infinite: correct them")
    return x


def _new_at(path: Path, of_words: Collection[str]) -> pd.DataFrame | np.ndarray | Tensor:
    """Return the rows of a path, whose labels are not read. of_words: columns of a table that are text."""
    suffix = path.suffix.lower()
    if tables.is_table(path):
        return tables.numbers_in(path, of_words)
    if not path.is_dir() and suffix not in (".npy", ".npz"):
        raise UserError(f"{path}: has no rows of numbers, which this model takes: give a table, npz or npy file")
    if path.is_dir():
        shards = open_embeddings(str(path))
        return gathered((block.float() for block in shards.blocks()), shards.n)
    with reading(path, "save it again by numpy.save or numpy.savez"):
        if suffix == ".npy":
            array = npy_map(plain(path))
            return _numbers(path, path.name, array) if array.ndim == 2 else array
        names = row_arrays(path)
        if not names:
            raise UserError(f"{path}: has no rows of numbers, which this model takes: call the array x")
        return np.concatenate([*arrays_of(path, names).values()])


def _columns_of(
    table: Path, features: pd.DataFrame, unit: str | None, read: Read, bounds: dict[str, list[Any]]
) -> tuple[tuple[Field, ...], list[Finding]]:
    """Return the columns of a private table: those without bounds, those with bounds, words, and those that say that a
    number is missing; and findings. bounds: by column."""
    of_all = None if isinstance(read.bounds, str) else read.bounds
    if unknown := [name for name in bounds if name not in features]:
        raise UsageError(f"bounds={read.bounds}: {table.name} has no column {unknown[0]}: {first_of(features, 20)}")
    left, findings = left_out(table.name, features.drop(columns=[*bounds]), unit)
    features = features[[name for name in features if name not in left]]
    if counters := [name for name in features if plain_id(name) in COUNTERS and name not in bounds]:
        text = f"{table.name}: column {counters[0]} is read as numbers, since it does not number the rows"
        findings.append(Finding("columns", WARNING, text, "leave it out of the table if it means nothing"))

    # words need a public list: one that is made of private values would be a release of them
    as_text = [name for name in features if name not in bounds and features[name].dtype.kind not in "fiub"]
    texts = {name: features[name].dropna() for name in as_text}
    # dates, numbers with points, or more than a tenth that are none: no single value decides what a column is
    words = [
        name
        for name, values in texts.items()
        if values.dtype.kind in "mM"
        or tables.has_points(values)
        or np.isnan(numbers_of(values)).sum() > OFTEN * len(values)
    ]
    if of_all is not None:
        bounds = {name: list(of_all) for name in features if name not in words}
    findings += about_words(table.name, features[words])

    raw, bounded, of_words, absent = list[Field](), list[Field](), list[Field](), list[Field]()
    for name in features:
        if name in words:
            continue
        given = bounds.get(name)
        if given is not None and all(isinstance(value, str) for value in given):
            of_words += [Field(name, word=word) for word in given]
            continue
        numbers = numbers_of(features[name])
        if given is not None:
            bounded.append(Field(name, least=float(given[0]), most=float(given[1])))
        else:
            raw.append(Field(name))
        if np.isfinite(numbers).mean() <= 1 - OFTEN:
            absent.append(Field(name, missing=True))
    columns = (*raw, *bounded, *of_words, *absent)
    if not columns:
        commas = any("decimal commas" in finding.text for finding in findings)
        remedy = (
            f"with decimal commas: {POINTS}"
            if commas
            else "give text=COLUMN or path=COLUMN, if one is of texts or images"
        )
        raise UserError(f"{table}: no column of numbers: it has {first_of([*features, *left], 20)}: {remedy}")
    if absent:
        text = f"{table.name}: a tenth of the rows or more have no number in {first_of([c.name for c in absent], 10)}"
        findings.append(Finding("missing", NOTE, f"{text}: that is a column of 0 and 1 for each"))
    return columns, findings


def about_words(name: str, features: pd.DataFrame) -> list[Finding]:
    """Return the findings on the columns of words of a table that is called `name`: those with few different values,
    and those with many, which may name people: a list of these would publish them."""
    import pandas as pd

    texts = {column: features[column].dropna().astype(str).str for column in features}
    kinds = {column: pd.api.types.infer_dtype(features[column]) for column in features}
    of_texts = [column for column in features if not re.match("date|time|period|complex", kinds[column])]
    thousands = [
        column
        for column in of_texts
        if texts[column].fullmatch(THOUSANDS).mean() > MOST or tables.has_points(features[column])
    ]
    commas = [c for c in of_texts if c not in thousands and texts[c].fullmatch(DECIMAL).mean() > MOST]
    others = [column for column in of_texts if column not in (*thousands, *commas)]
    different = {column: features[column].dropna().map(_as_word).nunique() for column in others}
    many = [column for column, count in different.items() if count > max(MANY, OFTEN * features[column].count())]
    few = [column for column in features if column not in (*many, *commas, *thousands)]
    marked = [column for column in many if texts[column].fullmatch(MARKED).mean() >= MOST]
    many = [column for column in many if column not in marked]
    text = f"{name}: columns have numbers with commas or points between thousands"
    remedy = "write 1,234 and 1.234 as 1234, and a decimal comma as a point; accepted, they are left out"
    findings = on_columns("words", ERROR, text, thousands, remedy)
    text, remedy = f"{name}: columns have numbers with decimal commas", f"{POINTS}; accepted, they are left out"
    findings += on_columns("words", ERROR, text, commas, remedy)
    if marked:
        values = features[marked[0]].dropna()
        text = f"{name}: columns have numbers with units or signs, or ids: {first_of(marked, 4)} ({first_of(values)})"
        remedy = f"write the numbers alone, or set unit={marked[0]} if they are people; accepted, they are left out"
        findings.append(Finding("words", ERROR, text, remedy))
    if few:
        values = features[few[0]].dropna()
        text = f"{name}: {len(few)} columns have words: {first_of(few, 4)} (such as {first_of(values)!r})"
        listed = f'if their values are public, list them in bounds=FILE ({{"{few[0]}": ["a", "b"]}})'
        remedy = f"{listed}; accepted, they are left out; text=COLUMN reads one as texts"
        findings.append(Finding("words", ERROR, text, remedy))
    if many:
        text = f"{name}: columns have more than {MANY} different words, as names have: {first_of(many, 4)}"
        remedy = f"set unit={many[0]} if they are people; text={many[0]} reads texts; accepted, they are left out"
        findings.append(Finding("ids", ERROR, text, remedy))
    return findings


def _bounds(bounds: str) -> dict[str, list[Any]]:
    """Return the bounds of each column that a file names: [least, most], or its words. UserError for others."""
    file = Path(bounds).expanduser()
    with reading(file, 'a JSON file such as {"age": [0, 120], "sex": ["f", "m"]}'):
        values = json.loads(plain(file).read_text(encoding="utf-8"))
    for name, given in values.items() if isinstance(values, dict) else [("", values)]:
        values_of = given if isinstance(given, list) else []
        words = bool(values_of) and all(isinstance(value, str) for value in values_of)
        numbers = len(values_of) == 2 and all(isinstance(value, int | float) for value in values_of)
        if not words and not (name and numbers and -np.inf < values_of[0] < values_of[1] < np.inf):
            raise UserError(f"{file}: {name or 'it'} has {given}: give [least, most], or a list of words, by column")
    return dict(values)
