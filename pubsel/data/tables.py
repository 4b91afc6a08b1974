"""A user's table of image files: a CSV or TSV, or parquet, with a row for each example.

Its columns are known by usual names in any case, or by `read.path`, `read.label` and `read.split`. Labels and people
are compared as people mean them (`examples.folded`); several labels of one image are written as A|B.
"""

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from pubsel.data.examples import folded, people_of
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of
from pubsel.data.folders import TEST, TRAIN, VALIDATION, rows_of
from pubsel.data.images import MOST, alike
from pubsel.data.splits import Listed, stamp
from pubsel.files import plain, unreadable
from pubsel.messages import UsageError, UserError
from pubsel.settings.keys import Fold, Read

PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "img_path")
LABELS = ("label", "labels", "class", "target", "diagnosis", "category")
SPLITS = ("split", "set", "subset", "partition")
SIDES = dict.fromkeys(TRAIN, "train") | dict.fromkeys(TEST, "test") | dict.fromkeys((*VALIDATION, "dev"), "validation")
NO_LABEL = ("", "nan", "null", "none", "<na>")  # folded
NOT_TOLD = {*NO_LABEL, "-1"}  # in a column for each label
BETWEEN = "|"  # of several labels

Rows = list[dict[str, str]]


def list_table(table: Path, unit: str | None, read: Read) -> Listed:
    """Return what is in a user's table. Paths are relative to it; labels are numbers or words, numbered in sorted
    order. unit: the column that names the person of each image. UserError for a table without the
    columns."""
    rows = rows_in(table)
    columns = list(rows[0])
    path = column_of(table, columns, "path", PATHS, read.path)
    several = _label_columns(table, rows, {path, unit, read.split}) if read.label is None else []
    rows, about_several = _in_one_column(table, rows, several)
    label = LABELS[0] if several else column_of(table, columns, "label", LABELS, read.label)
    if unit in (path, label) or (unit is not None and unit not in columns):
        named = f"name the column of {table.name} that says who an image is of" if unit in (path, label) else ""
        raise UsageError(f"pair.unit={unit}: {named or f'{table.name} has no column {unit}: {first_of(columns, 20)}'}")
    side, about_split = _side(table, rows, read.split, {path, label, unit})
    used = {path, label, unit, side, *several}
    findings = [*about_several, *about_split]
    if unused := [column for column in columns if column not in used]:
        findings.append(Finding("columns", NOTE, f"{table.name}: columns that are not used: {first_of(unused, 10)}"))

    # an example is a row; one that repeats another adds nothing
    empty = next((i for i, row in enumerate(rows, start=1) if not row[path].strip()), None)
    if empty:
        raise UserError(f"{table}: row {empty} has no path")
    keys = [tuple(row[column] for column in (path, label, unit, side) if column) for row in rows]
    first = dict[tuple[str, ...], dict[str, str]]()
    for key, row in zip(keys, rows, strict=True):
        first.setdefault(key, row)
    repeated, rows = len(rows) - len(first), list(first.values())
    if repeated:
        findings.append(Finding("copies", NOTE, f"{table.name}: {repeated} rows repeat another one"))
    words, about_words = _words(table, rows, label, read.labels)
    rows, about_labels = _labelled(table, rows, label, words)
    rows, test, about_side = _sides(table, rows, side)
    findings += about_words + about_labels + about_side

    # words are numbered in sorted order, so that the order of the rows decides no class
    names, notes = words.names, tuple[str, ...]()
    if names != [str(i) for i in range(len(names))]:
        notes = (f"{table.name}: labels {', '.join(names[:10])} numbered from 0 in this order",)
    people = None
    if unit:
        people, about_people = people_of(table.name, [row[unit] for row in rows])
        findings += about_people

    paths = [located(table.parent, row[path]) for row in rows]
    return Listed(
        y=_classes(rows, label, words),
        test=test,
        classes=len(names),
        files=tuple(map(stamp, paths)),
        images=lambda: alike(table, paths, read),
        names=tuple(row[path] for row in rows),
        notes=notes,
        class_names=tuple(names),
        people=people,
        findings=tuple(findings),
    )


def rows_in(table: Path) -> Rows:
    """Return the rows of a table, all values as text. UserError if it cannot be read."""
    if table.suffix.lower() != ".parquet":
        return rows_of(table, (), ",;\t")
    try:
        frame = pd.read_parquet(plain(table))
    except ImportError:
        raise UserError(f"{table}: needs pyarrow: pip install pyarrow, or convert it to CSV") from None
    except (OSError, ValueError) as error:
        raise unreadable(table, error, "not a readable parquet file") from None
    if not len(frame):
        raise UserError(f"{table}: no rows in it")
    return frame.astype(object).where(frame.notna(), "").astype(str).to_dict("records")


def located(folder: Path, name: str) -> Path:
    """Return the file that a table names: as it is written, or in another Unicode form, or with the separators of
    Windows."""
    ways: tuple[Callable[[str], str], ...] = (
        str,
        str.strip,
        lambda text: unicodedata.normalize("NFC", text),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: PureWindowsPath(text).as_posix(),
    )
    return next((path for way in ways if (path := folder / way(name)).exists()), folder / name)


def column_of(table: Path, columns: Sequence[str], key: str, usual: Sequence[str], name: str | None) -> str:
    """Return the column that a key names, or the one with a usual name. UserError if there is none."""
    if name is not None:
        if name not in columns:
            raise UsageError(f"{key}={name}: {table.name} has no such column: {first_of(columns, 20)}")
        return name
    by_name = {_plain(column): column for column in reversed(columns)}
    for word in usual:
        if word in by_name:
            return by_name[word]
    raise UserError(
        f"{table}: no column {key}: it has {first_of(columns, 20)}: give {key}=COLUMN, or path,label in its head"
    )


def _plain(column: str) -> str:
    return folded(column).replace(" ", "_").replace("-", "_")


def _side(table: Path, rows: Rows, name: str | None, taken: set[str | None]) -> tuple[str | None, tuple[Finding, ...]]:
    """Return the column that says train or test, if there is one, and findings."""
    if name == "none":
        return None, ()
    if name is not None:
        return column_of(table, list(rows[0]), "split", (), name), ()

    others = [column for column in rows[0] if column not in taken and column]
    named = [column for column in others if _plain(column) in SPLITS]
    words = {column: {folded(row[column]) for row in rows} for column in others}
    of_sides = [column for column in others if len(words[column]) > 1 and words[column] <= set(SIDES)]
    if len(of_sides) > 1:
        text = f"{table.name}: the columns {' and '.join(of_sides[:2])} both say train or test"
        return of_sides[0], (Finding("split", ERROR, text, f"give split={of_sides[0]}, or split=none"),)
    if named and not of_sides and words[named[0]] <= set(SIDES):
        return named[0], ()
    if named and not of_sides:
        text = f"{table.name}: column {named[0]} has {first_of(sorted(words[named[0]]), 4)}, not train and test"
        return None, (Finding("split", ERROR, text, "give split=COLUMN, or split=none"),)

    # parts of a cross-validation are no split yet, and no label either
    folds = [column for column in others if _plain(column) in ("fold", "folds", "kfold")]
    if folds and not of_sides:
        text = f"{table.name}: column {folds[0]} numbers parts, and none is named as the test part"
        return None, (Finding("split", ERROR, text, "add a column split with train and test, or give split=none"),)
    return (of_sides[0] if of_sides else None), ()


def _label_columns(table: Path, rows: Rows, taken: set[str | None]) -> list[str]:
    """Return the columns of a table that are a label each, with 1 where an example has it: all that are nothing else,
    if no column has a usual name and there are two or more."""
    others = [column for column in rows[0] if column and column not in taken]
    if any(_plain(column) in LABELS for column in others):
        return []
    columns = [column for column in others if {folded(row[column]) for row in rows} <= {"0", "1", *NOT_TOLD}]
    return columns if len(columns) > 1 and any(folded(row[c]) == "1" for c in columns for row in rows) else []


def _in_one_column(table: Path, rows: Rows, columns: Sequence[str]) -> tuple[Rows, tuple[Finding, ...]]:
    """Return the rows with the labels of several columns in one, as A|B, and findings. If nine tenths of the rows have
    one label each, these are classes, and a row with several is left out."""
    if not columns:
        return rows, ()
    values = pd.DataFrame(rows)[list(columns)].map(folded)
    many = (values == "1").sum(axis=1).to_numpy()
    classes = (many == 1).mean() >= MOST
    text = f"{table.name}: {'classes' if classes else 'labels'} by the columns {first_of(columns, 10)}"
    findings = [Finding("columns", NOTE, text)]
    unknown = int(values.isin(NOT_TOLD).to_numpy().sum())
    if unknown and not classes:
        text = f"{table.name}: {unknown} of {values.size} labels are not known (nothing, nan, -1)"
        findings.append(
            Finding("not_known", ERROR, text, "write 0 or 1, or leave these rows out; accepted, they are 0")
        )

    # an example without any label is one of none of them, but of no class
    none = "" if classes else BETWEEN
    texts = [BETWEEN.join(c for c in columns if value[c] == "1") or none for value in values.to_dict("records")]
    rows = [row | {LABELS[0]: label} for row, label in zip(rows, texts, strict=True)]
    if classes and (many > 1).any():
        text = f"{table.name}: {int((many > 1).sum())} of {len(rows)} rows have several classes, and are left out"
        findings.append(Finding("conflict", ERROR, text, "give each one class"))
        rows = [row for row, count in zip(rows, many, strict=True) if count < 2]
    return rows, tuple(findings)


class Words(NamedTuple):
    """The labels of a table: the names of classes in order, and the class of each way in which one is written."""

    names: list[str]
    numbers: dict[str, int]


def _words(table: Path, rows: Rows, label: str, fold: Fold) -> tuple[Words, list[Finding]]:
    """Return the labels of a table, in the order in which they are numbered, and findings."""
    spelt = dict[str, list[str]]()
    for word in sorted({part for row in rows for part in row[label].split(BETWEEN)}):
        spelt.setdefault(folded(word), []).append(word)
    for word in NO_LABEL:
        spelt.pop(word, None)

    # -1 says that no label is known where the others count from 0, but not in a pair of -1 and 1
    findings = list[Finding]()
    if "-1" in spelt and len(spelt) > 2 and all(word.isdecimal() for word in spelt if word != "-1"):
        if spelt.keys() == {"-1", "0", "1"}:
            text = f"{table.name}: labels -1, 0 and 1: -1 may be a class, or say that no label is known"
            findings.append(Finding("labels", ERROR, text, "write them in words, or leave rows with -1 out"))
        else:
            del spelt["-1"]

    # one class that is written in several ways
    several = [ways for ways in spelt.values() if len(ways) > 1]
    if several and fold == Fold.apart:
        text = f"{table.name}: labels {first_of(map(repr, several[0]), 3)} differ in how they are written alone"
        findings.append(Finding("labels", ERROR, text, "set labels=fold, and they are one class"))
        spelt = {word: [word] for ways in spelt.values() for word in ways}

    ordered = sorted(spelt, key=lambda word: (int(word) if word.isdecimal() else -1, word))
    names = [word if word.isdecimal() else spelt[word][0].strip() for word in ordered]
    return Words(names, {way: i for i, word in enumerate(ordered) for way in spelt[word]}), findings


def _labelled(table: Path, rows: Rows, label: str, words: Words) -> tuple[Rows, list[Finding]]:
    """Return the rows whose label is known, and findings."""

    def is_known(row: dict[str, str]) -> bool:
        return row[label] == BETWEEN or any(part in words.numbers for part in row[label].split(BETWEEN))

    known = [row for row in rows if is_known(row)]
    if not known:
        raise UserError(f"{table}: no row has a label in column {label}")
    if len(known) == len(rows):
        return rows, []
    others = first_of(row[label] or "nothing" for row in rows if not is_known(row))
    text = f"{table.name}: {len(rows) - len(known)} of {len(rows)} rows have no label ({others}) and are left out"
    return known, [Finding("unlabelled", WARNING, text)]


def _classes(rows: Rows, label: str, words: Words) -> torch.Tensor:
    """Return the labels, int64 [n], or float32 [n, labels] of 0/1 if an image has several."""
    if not any(BETWEEN in row[label] for row in rows):
        return torch.tensor([words.numbers[row[label]] for row in rows], dtype=torch.int64)
    y = torch.zeros(len(rows), len(words.names))
    for i, row in enumerate(rows):
        y[i, [words.numbers[part] for part in row[label].split(BETWEEN) if part in words.numbers]] = 1
    return y


def _sides(table: Path, rows: Rows, side: str | None) -> tuple[Rows, np.ndarray | None, list[Finding]]:
    """Return the rows of both parts, which are of the test part (None: the table does not say), and findings."""
    if side is None:
        return rows, None, []
    sides = [SIDES.get(folded(row[side]), "") for row in rows]
    if "" in sides:
        place = sides.index("")
        raise UserError(
            f"{table}: row {place + 1} has {side} {rows[place][side]!r}: use train or test, or give split=none"
        )

    # as of a folder: the validation part is the test part if there is no other
    test = "test" if "test" in sides else "validation"
    findings = list[Finding]()
    if test == "test" and (other := sides.count("validation")):
        text = f"{table.name}: {other} rows of its validation part are not read"
        findings.append(Finding("not_read", WARNING, text))
    kept = [i for i, of in enumerate(sides) if of in ("train", test)]
    of_test = np.asarray([sides[i] == test for i in kept])
    if of_test.all() or not of_test.any():
        raise UserError(f"{table}: every row is {rows[0][side]}: give both parts, or split=none")
    return [rows[i] for i in kept], of_test, findings
