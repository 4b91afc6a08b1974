"""A user's table of image files: a CSV or TSV, or parquet, with a row for each example.

Its columns are known by usual names in any case, or by `read.path`, `read.label` and `read.split`. Labels and people
are compared as people mean them (`examples.folded`); several labels of one image are written as A|B.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pubsel.data import arrow, memory
from pubsel.data.delimited import TableRow, check_quotes, open_text, rows_of
from pubsel.data.examples import BLANK_WORDS, MANY, folded, people_of
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of
from pubsel.data.folders import (
    LIKE_TEST,
    TABLES,
    TEST,
    TRAIN,
    VALIDATION,
    about_patients,
    words_in,
)
from pubsel.data.identifiers import about_values, has_zeros, left_out
from pubsel.data.images import MOST, alike
from pubsel.data.splits import Listed, stamp
from pubsel.files import reading
from pubsel.messages import UsageError, UserError
from pubsel.settings.keys import Fold, Read

if TYPE_CHECKING:
    import pandas as pd

PATHS = "path file filename file_name filepath file_path image image_path image_name img img_path img_name".split()
DELIMITERS = ",;\t"
LABELS = ("label", "labels", "class", "target", "diagnosis", "category")
OUTCOMES = (*LABELS, "y", "outcome")  # of a table of numbers
SPLITS = ("split", "set", "subset", "partition")
FOLDS = "fold folds kfold k_fold cv_fold fold_id".split()
SIDES = dict.fromkeys(TRAIN, "train") | dict.fromkeys((*TEST, *VALIDATION), "test")
SPLIT_WORDS = {*TRAIN, *LIKE_TEST}  # words in columns that may be the split
MOST_SIDES = 6  # different values of such a column
NO_LABEL = {*BLANK_WORDS, "?", "-", "--", ".", r"\n", "unlabeled", "unlabelled", "unknown"}  # folded
CODES = {"-9", "-99", "-999", "-9999"}  # of no label, next to labels that are not below -1
UNLABELLED = {*NO_LABEL, *CODES, "-1"}  # in a column for each label
BETWEEN = "|"  # of several labels
BINARY = {"0", "1"}  # folded, in a column for each label
TRUTH = {"true": "1", "false": "0"}  # folded
SAME = (
    "1 true t yes y ja oui si pos positive".split(),
    "0 false f no n nein non neg negative".split(),
)  # of two labels
MISSING = ["", "?", "-", "NA", "N/A", "na", "n/a", "nan", "NaN", "null", "NULL", "None", "none", "<NA>", "#N/A"]
TEXTS = 2**23  # values that are read as texts at a time
DIGITS = 20  # of a number, from which on it is a word
NO_FILE = (
    "<bytes |<dict>|data:image/|iVBORw0KGgo|/9j/[A-Za-z0-9+/]{200}|[A-Za-z0-9]+://"  # PNG and JPEG in base64, URLs
)
JOINED = "label of several columns"

Rows = list[TableRow]


def list_table(table: Path, unit: str | None, read: Read) -> Listed:
    """Return what is in a user's table. Paths are relative to it; labels are numbers or words, numbered in sorted
    order. unit: the column that names the person of each image. UserError for a table without the
    columns or the files, UsageError if `unit` is one of these columns."""
    rows = rows_in(table)
    columns = list(rows[0])
    inside = images_inside(table)
    path = image_column(table, columns, read.path)
    rows, label, several, about_several = _label_of(table, rows, read.label, {path, unit, read.split})
    if unit in (path, label):
        raise UsageError(f"unit={unit}: name the column of {table.name} that says who an image is of")
    _check_unit(table, columns, unit)
    side, about_split = _side(table, rows, read.split, {path, label, unit})
    used = {path, label, unit, side, *several}
    findings = [*about_several, *about_split]
    left, about_ids = left_out(table.name, {c: [row[c] for row in rows] for c in columns if c not in used}, unit)
    findings += about_ids
    if unused := [column for column in columns if column not in used | left]:
        findings += about_values(table.name, {c: [row[c] for row in rows] for c in unused}, unit, "image")
        findings.append(Finding("columns", NOTE, f"{table.name}: columns that are not used: {first_of(unused, 10)}"))

    _check_names(table, rows, path)
    findings += [] if side or read.split else _in_parts(table.name, [row[path] for row in rows])

    # an example is a row; one that repeats another adds nothing
    keys = [tuple(row[column] for column in (path, label, unit, side, *several) if column) for row in rows]
    first = dict[tuple[str, ...], TableRow]()
    for key, row in zip(keys, rows, strict=True):
        first.setdefault(key, row)
    repeated, rows = len(rows) - len(first), list(first.values())
    if repeated:
        findings.append(Finding("copies", NOTE, f"{table.name}: {repeated} rows repeat another one"))
    rows, answers = _answers(table, rows, label, side, unit, several, read)

    # words are numbered in sorted order, so that the order of the rows decides no class
    notes = tuple[str, ...]()
    classes = len(answers.names)
    if answers.names != tuple(map(str, range(classes))):
        notes = (f"{table.name}: labels {', '.join(answers.names[:10])} numbered from 0 in this order",)

    paths, of_images = images_at(table, rows, path), tuple(row[path] for row in rows)
    remedy = "add a column of them, and set unit=COLUMN"
    findings += [] if unit else about_patients(table.name, paths, of_images, classes, remedy)
    files = [file for file in paths if isinstance(file, Path)]
    if files and not any(map(os.path.exists, files)):
        remedy = f"write whole names, such as a/1.png for {table.parent / 'a' / '1.png'}, or give another path=COLUMN"
        raise UserError(f"{table}: none of the files in column {path} is there, the first {files[0]}: {remedy}")
    return Listed(
        y=answers.y,
        test=answers.test,
        classes=classes,
        files=(*map(stamp, arrow.arrow_files(table)), path, *of_images) if path in inside else tuple(map(stamp, files)),
        images=lambda: alike(table, paths, read),
        names=of_images,
        notes=notes,
        class_names=answers.names,
        people=answers.people,
        findings=(*findings, *answers.findings),
        image_column=None if path == memory.PATH else path,
    )


class Answers(NamedTuple):
    """The labels of a table's rows that have one, their sides and whose they are."""

    y: torch.Tensor
    test: np.ndarray | None  # bool [n]; None: the table does not say
    names: tuple[str, ...]
    people: np.ndarray | None
    findings: tuple[Finding, ...]


def _answers(
    table: Path, rows: Rows, label: str, side: str | None, unit: str | None, several: list[str], read: Read
) -> tuple[Rows, Answers]:
    """Return the rows that have a label, and the answers in them. several: columns of which each is a label."""
    rows, about_both = _one_or_several(table, rows, label, bool(several))
    explicit = isinstance(read.label, list)
    words, about_words = label_words(table, rows, label, read.labels, several if explicit else ())
    rows, about_labels = _labelled(table, rows, label, words)
    test = _sides(table, rows, side)
    people, about_people = None, tuple[Finding, ...]()
    if unit:
        people, about_people = people_of(table.name, [row[unit] for row in rows])
    which = Finding("label_column", NOTE, f"{table.name}: labels by the column {label}")
    known = () if label in (JOINED, memory.LABEL) else (which,)
    findings = (*known, *about_both, *about_words, *about_labels, *about_people)
    y = _classes(rows, label, words, several, explicit)
    return rows, Answers(y, test, tuple(words.names), people, findings)


# Tables of numbers


def features_in(
    table: Path,
    unit: str | None,
    read: Read,
    labelled: bool,
    texts: str | None = None,
    of_words: Collection[str] = (),
    like: Collection[str] = (),
) -> tuple[pd.DataFrame, Answers]:
    """Return a table of numbers, without the columns that say something else of a row, and these: its label, side and
    person. labelled: whether it must have a label for each row, otherwise all are of class 0; texts: a column of texts;
    of_words: columns that are text whatever is in them; like: columns of numbers, so that none is the label. UserError
    if it cannot be read or lacks a column."""
    # what is compared as text keeps its zeros, and pandas finds out which columns are numbers
    columns = names_of(table)
    _check_unit(table, columns, unit)
    given = read.label if isinstance(read.label, list) else [read.label]
    text = {*given, unit, read.split, texts, *(c for c in columns if plain_name(c) in (*OUTCOMES, *SPLITS))} & {
        *columns
    }
    frame = numbers_in(table, {*text, *of_words})
    text |= {c for c in frame if frame[c].dtype.kind not in "fiub" or _may_be_split(c, set())}
    rows = _as_texts(frame[[c for c in frame if c in text - {texts}]])

    several, findings = list[str](), tuple[Finding, ...]()
    if isinstance(read.label, list):
        rows, label, several, findings = _label_of(table, rows, read.label, {unit, read.split})
    elif labelled or read.label is not None or any(plain_name(c) in OUTCOMES for c in columns if c not in like):
        label = column_of(table, [c for c in columns if c not in like], "label", OUTCOMES, read.label)
    else:
        label, rows = JOINED, [TableRow(row | {JOINED: "0"}, row.last, row.unit) for row in rows]
    side, about_split = _side(table, rows, read.split, {label, unit, JOINED, *several})
    rows, answers = _answers(table, rows, label, side, unit, several, read)
    frame = frame.iloc[[row.last - 1 for row in rows]]
    used = {label, unit, side, *several}
    answers = answers._replace(findings=(*findings, *about_split, *answers.findings))
    features = frame[[c for c in frame if c not in used]]
    as_text = [c for c in features if c in text and c not in (texts, *of_words)]
    return features.assign(**{c: features[c].mask(features[c].astype(object).isin(MISSING)) for c in as_text}), answers


def is_table(path: Path) -> bool:
    """Return whether a path is a table: by its suffix, or a folder that `datasets` of Hugging Face saved."""
    return arrow.is_folder(path) if path.is_dir() else path.suffix.lower() in TABLES


def of_arrow(table: Path) -> bool:
    """Return whether pyarrow reads a table, which is then on disk."""
    return memory.of_memory(table) is None and (table.suffix.lower() == ".parquet" or table.is_dir())


def names_of(table: Path) -> list[str]:
    """Return the names of a table's columns. UserError if it cannot be read."""
    if (held := memory.of_memory(table)) is not None:
        return list(held.frame.columns)
    if of_arrow(table):
        return arrow.names(table)
    return list(rows_of(table, (), DELIMITERS, most=1)[0])


def numbers_in(table: Path, text: Collection[str]) -> pd.DataFrame:
    """Return a table with numbers as numbers, or NaN for MISSING, and lists of them as a column each. text: columns
    that are text."""
    import pandas as pd

    if (held := memory.of_memory(table)) is not None:
        return held.frame
    if of_arrow(table):
        return arrow.frame(table, text)
    with reading(table, "not a readable table", (OSError, ValueError)), open_text(table, DELIMITERS) as (file, between):
        check_quotes(table, file, between)
        how: dict[str, Any] = {"sep": between, "skipinitialspace": True, "low_memory": False}
        # a word such as none may be a class, or a word with bounds
        columns = names_of(table)
        numbers = {name: MISSING for name in columns if name not in text}
        how |= {"dtype": dict.fromkeys(text, str), "na_values": numbers, "keep_default_na": False}
        frame = pd.read_csv(file, **how)
        # pandas takes the first column for names of rows if rows have more values than the head: they must be empty
        if not isinstance(frame.index, pd.RangeIndex):
            rows_of(table, (), DELIMITERS)
            file.seek(0)
            how["index_col"] = False
            frame = pd.read_csv(file, **how, usecols=range(len(columns)))
        # what would lose its zeros or points as a number stays text, in whichever rows these are
        doubtful, step = [i for i, name in enumerate(frame) if _may_be_text(frame[name])], max(1, TEXTS // len(frame))
        for some in [doubtful[first : first + step] for first in range(0, len(doubtful), step)]:
            file.seek(0)
            texts = pd.read_csv(file, **(how | {"dtype": object, "usecols": some, "na_values": None}))
            for name in texts:
                if has_zeros(texts[name]) or (frame[name].dtype.kind == "f" and has_points(texts[name])):
                    frame[name] = texts[name]
        return frame


def _may_be_text(values: pd.Series[Any]) -> bool:
    """Return whether numbers may have been written with zeros before them, as ids, or with points between thousands:
    most are whole, and more than MANY differ, or most are below a thousand with three decimals at most."""
    if values.dtype.kind not in "fiu":
        return False
    numbers = values[np.isfinite(values)].abs().to_numpy()
    whole, thousands = numbers % 1 == 0, np.abs(1000 * numbers - np.round(1000 * numbers)) < 1e-6
    small = (numbers < 1000) & (whole | ((numbers >= 1) & thousands))
    if values.dtype.kind == "f" and small.sum() >= MOST * len(small) and whole.sum() > 1:
        return True
    return bool(whole.sum() >= MOST * len(whole) and values.nunique() > MANY)


def has_points(values: Iterable[object]) -> bool:
    """Return whether texts of digits are whole numbers, but for a twentieth, of which several have a point between
    thousands, as 1.234, and others are below a thousand."""
    texts = Counter(value.strip() for value in values if isinstance(value, str))
    counts = {text: count for text, count in texts.items() if re.match(r"[+-]?\d[\d.]*$", text)}
    whole = re.compile(r"[+-]?([1-9]\d{0,2}(\.\d{3})+|\d{1,3})")
    total, pointed = sum(counts.values()), sum(count for text, count in counts.items() if "." in text)
    # of decimals of three places, a tenth end in zero, and are written as 24.12
    matching = sum(count for text, count in counts.items() if whole.fullmatch(text))
    return min(pointed, total - pointed) > 1 and 20 * matching >= 19 * total


def _check_unit(table: Path, columns: Sequence[str], unit: str | None) -> None:
    """Raise UsageError if the column that names people is absent, or has images."""
    if unit is not None and unit not in columns:
        raise UsageError(f"unit={unit}: {table.name} has no column {unit}: {first_of(columns, 20)}")
    if unit in images_inside(table):
        raise UsageError(f"unit={unit}: this column of {table.name} has images: name one that says whose each row is")


def _check_names(table: Path, rows: Rows, path: str) -> None:
    """Raise UserError if a row has no name of a file, or has an image or an address in its place."""
    if others := [row[path] for row in rows if re.match(NO_FILE, row[path])]:
        raise UserError(
            f"{table}: column {path} has images or addresses ({others[0][:20]}), not the names of files: write each "
            "image to a file, such as 0.png, and these names into a column path"
        )
    if empty := [row for row in rows if not row[path].strip()]:
        raise UserError(f"{table}: {empty[0].place} has no path")


def rows_in(table: Path, blank: bool = False) -> Rows:
    """Return the rows of a table, all values as text. blank: whether those of a CSV without a character count.
    UserError if it cannot be read."""
    if (held := memory.of_memory(table)) is not None:
        return _as_texts(held.frame)
    if of_arrow(table):
        return _as_texts(arrow.frame(table, names_of(table)))
    return rows_of(table, (), DELIMITERS, blank=blank)


def _as_texts(frame: pd.DataFrame) -> Rows:
    """Return the rows of a frame, all values as text, numbered from 1."""
    texts = [{column: _text(value) for column, value in row.items()} for row in frame.to_dict("records")]
    return [TableRow(text, i, "row") for i, text in enumerate(texts, start=1)]


def _text(value: object) -> str:
    """Return a value of a parquet file as a table of text has it; several as A|B."""
    import pandas as pd

    if isinstance(value, list | tuple | np.ndarray):
        return BETWEEN.join(map(_text, value)) if len(value) else BETWEEN  # none of the labels, which is known
    if isinstance(value, bytes):
        return arrow.as_word(value)
    if isinstance(value, dict):
        return "<dict>"  # an image, perhaps, and no name of a file
    return "" if pd.isna(value) else str(value)


def images_inside(table: Path) -> list[str]:
    """Return the columns of a table that have images inside of it."""
    return arrow.image_columns(table) if of_arrow(table) else []


def image_column(table: Path, columns: Sequence[str], name: str | None, remedy: str | None = None) -> str:
    """Return the column of images: the one that is called `name`, or the only one of images inside of the table, or the
    one with a usual name. remedy: as in `column_of`, which this raises the errors of."""
    inside = images_inside(table)
    if name is None and len(inside) > 1:
        return column_of(table, inside, "path", PATHS, None, remedy or "several have images: give path=COLUMN")
    return column_of(table, columns, "path", PATHS, name or next(iter(inside), None), remedy)


def trained_column(name: str, columns: Collection[str], trained: str | None, usual: Sequence[str]) -> str | None:
    """Return the column of new data that a model was trained on; None: a table lacks it, or nobody knows which it was.
    usual: columns that may be read in its place. UserError if these are several. name: of the table."""
    if trained is None or trained in columns or len(usual) < 2:
        return trained if trained in columns else None
    text = f"{name}: no column {trained}, which this model was trained on, and {first_of(usual, 4)} may be read"
    raise UserError(f"{text}: call the right one {trained}")


def images_at(table: Path, rows: Rows, column: str) -> list[Path | arrow.Inside]:
    """Return the images of some rows: files next to the table, or inside of it."""
    if column in images_inside(table):
        images = arrow.images(table, column)
        return [images[row.last - 1] for row in rows]
    return [located(table.parent, row[column]) for row in rows]


def located(folder: Path, name: str) -> Path:
    """Return the file that a table names: as it is written, or in another Unicode form, or with the separators of
    Windows."""
    ways: tuple[Callable[[str], str], ...] = (
        str.strip,
        lambda text: unicodedata.normalize("NFC", text),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: PureWindowsPath(text).as_posix(),
    )
    names = [name.replace("\0", "")]  # which no path has
    for way in ways:  # each on top of those before
        names += [text for text in dict.fromkeys(map(way, names)) if text not in names]
    return next((path for text in names if (path := folder / text).exists()), folder / names[0])


def column_of(
    table: Path, columns: Sequence[str], key: str, usual: Sequence[str], name: str | None, remedy: str | None = None
) -> str:
    """Return the column that a key names, or the one with a usual name. remedy: in place of the key. UserError if there
    is none, or if several may be the label; UsageError for a name that is no column."""
    if name is not None:
        if name not in columns:
            raise UsageError(f"{key}={name}: {table.name} has no such column: {first_of(columns, 20)}")
        return name
    by_name = dict[str, list[str]]()
    for column in columns:
        by_name.setdefault(plain_name(column), []).append(column)
    for word in usual:
        if len(by_name.get(word, ())) > 1:
            either = " and ".join(by_name[word])
            raise UserError(f"{table}: columns {either} may be the {key}: {remedy or f'give {key}=COLUMN'}")
        if word in by_name and key != "label":
            return by_name[word][0]
    known = [by_name[word][0] for word in usual if word in by_name]
    if len(known) > 1 and "x" in by_name:
        known = [column for column in known if plain_name(column) != "y"]  # a place in an image, as x is
    if len(known) > 1:
        either = " and ".join(known)
        raise UserError(f"{table}: columns {either} may be the label: give label=COLUMN, or rename the others")
    if known:
        return known[0]
    remedy = remedy or f"give {key}=COLUMN, or path,label in its head"
    raise UserError(f"{table}: no column {key}: it has {first_of(columns, 20)}: {remedy}")


def plain_name(column: str) -> str:
    """Return the name of a column as usual names are compared with it."""
    return folded(column).replace(" ", "_").replace("-", "_")


def _side(table: Path, rows: Rows, name: str | None, taken: set[str | None]) -> tuple[str | None, tuple[Finding, ...]]:
    """Return the column that says train or test, if there is one, and findings."""
    if name == "none":
        return None, ()
    if name is not None:
        return column_of(table, list(rows[0]), "split", (), name), ()

    others = [column for column in rows[0] if column not in taken and column]
    named = [column for column in others if plain_name(column) in SPLITS]
    words = {column: {folded(row[column]) for row in rows} for column in others}
    of_sides = [column for column in others if len(words[column]) > 1 and words[column] <= set(SIDES)]
    if len(of_sides) > 1:
        text = f"{table.name}: the columns {' and '.join(of_sides[:2])} both say train or test"
        return of_sides[0], (Finding("split", ERROR, text, f"give split={of_sides[0]}, or split=none"),)
    if of_sides or (named and words[named[0]] <= set(SIDES)):
        return (of_sides or named)[0], ()
    if named:
        text = f"{table.name}: column {named[0]} has {first_of(sorted(words[named[0]]), 4)}, not train and test"
        return None, (Finding("split", ERROR, text, "give split=COLUMN, or split=none"),)

    # parts of a cross-validation are no split yet, and no label either
    folds = [column for column in others if plain_name(column) in FOLDS and len(words[column]) <= MANY]
    if folds:
        text = f"{table.name}: column {folds[0]} numbers parts, and none is named as the test part"
        return None, (Finding("split", ERROR, text, "add a column split with train and test, or give split=none"),)
    if doubtful := [column for column in others if _may_be_split(column, words[column])]:
        text = f"{table.name}: column {doubtful[0]} may be the split, with {first_of(sorted(words[doubtful[0]]), 4)}"
        return None, (Finding("split", ERROR, text, "write train and test in it, or give split=none"),)
    return None, ()


def may_be_sides(name: str) -> bool:
    """Return whether the name of a column or array says train or test, as is_train or test_idx, or numbers parts."""
    words = words_in(name) - {"is", "in", "mask", "idx", "index", "indices"}
    return plain_name(name) in (*SPLITS, *FOLDS) or (bool(words) and words <= SPLIT_WORDS)


def _may_be_split(column: str, values: set[str]) -> bool:
    """Return whether a column says train or test in other words: by its name, as is_train, by one of its values, or by
    a part of each, as PublicTest. values: folded."""
    parts = [any(word in value for word in ("train", "test", "valid")) for value in values]
    named = may_be_sides(column)
    return len(values) <= MOST_SIDES and (named or bool(values & set(SIDES)) or (len(parts) > 1 and all(parts)))


def _in_parts(name: str, paths: Sequence[str]) -> list[Finding]:
    """Return the finding on files nine tenths of which are in folders called train and test, or are called so. name: of
    their table."""
    counts = Counter[bool]()  # of the last such name of each: whether it is of the training part
    for path in paths:
        words = [words_in(part) for part in reversed(re.split(r"[\\/]", os.path.splitext(path)[0]))]
        counts.update([each <= {*TRAIN} for each in words if each and each <= SPLIT_WORDS][:1])
    if min(counts[True], counts[False]) < 2 or counts.total() < MOST * len(paths):
        return []
    text = f"{name}: paths are those of training and test images ({counts[True]} and {counts[False]}), which are mixed"
    return [Finding("split", ERROR, text, "add a column split with train and test, or give split=none")]


def _label_of(
    table: Path, rows: Rows, given: str | list[str] | None, taken: set[str | None]
) -> tuple[Rows, str, list[str], tuple[Finding, ...]]:
    """Return the rows, their column of labels, the columns that it was made of, if each is one label, and findings.

    Columns of 0 and 1 are classes if nobody names the label, and nine tenths of the rows have 1 in exactly one; if
    several columns are given, they are labels, of which an example may have several."""
    import pandas as pd

    if isinstance(given, list):
        columns = [column_of(table, list(rows[0]), "label", (), name) for name in given]
    else:
        others = [column for column in rows[0] if column and column not in taken]
        if given is not None or any(plain_name(column) in LABELS for column in rows[0]):
            label = column_of(table, list(rows[0]), "label", LABELS, given)
            if any(folded(row[label]) not in NO_LABEL for row in rows):
                return rows, label, [], ()
            return _of_one_class(rows, f"{table.name}: no row has a label in column {label}")
        words = {column: [folded(row[column]) for row in rows] for column in others}
        values = {column: [TRUTH.get(word, word) for word in words[column]] for column in others}
        # No single value decides: a column with a few other ones is a class too if its rows are of no other class.
        share = {column: np.mean([value in BINARY | UNLABELLED for value in values[column]]) for column in others}
        binary = [c for c in others if share[c] >= MOST and not _may_be_split(c, set(values[c]))]
        columns = [column for column in binary if share[column] == 1]
        columns = [c for c in binary if c in columns or _in_one(values, [*columns, c]) > _in_one(values, columns)]
        if len(columns) < 2 or _in_one(values, columns) < MOST:
            return _of_one_class(rows, f"{table.name}: no column label: it has {first_of(rows[0], 20)}")

    for row in rows:
        row.update({column: TRUTH.get(folded(row[column]), row[column]) for column in columns})
    values = pd.DataFrame(rows)[columns].map(folded)
    many = (values == "1").sum(axis=1).to_numpy()
    findings = [Finding("columns", NOTE, f"{table.name}: labels by the columns {first_of(columns, 10)}")]
    known = values.isin(BINARY)
    wrong = int((~known & ~values.isin(NO_LABEL)).to_numpy().sum())
    if wrong:
        text, remedy = (
            f"{table.name}: {wrong} of {values.size} labels are not 0 or 1",
            "leave the cell of an unknown empty",
        )
        findings.append(Finding("not_known", ERROR, text, f"{remedy}; accepted, they are unknown"))
    if not given and (many > 1).any():
        text = f"{table.name}: {int((many > 1).sum())} of {len(rows)} rows have several classes, and are left out"
        findings.append(Finding("conflict", ERROR, text, "give each one class, or set label=[A,B,...]"))

    # an example with no label, or with some that are not known, has labels of which there may be several, but no class
    texts = [BETWEEN.join(c for c in columns if value[c] == "1") for value in values.to_dict("records")]
    for row, text, some, every in zip(rows, texts, known.any(axis=1), known.all(axis=1), strict=True):
        row[JOINED] = text + BETWEEN if given and some and not (text and every) else text
    rows = [row for row, count in zip(rows, many, strict=True) if given or count < 2]
    return rows, JOINED, columns, tuple(findings)


def _in_one(values: Mapping[str, list[str]], columns: Sequence[str]) -> float:
    """Return the share of rows that have 1 in exactly one of some columns."""
    ones = [[value == "1" for value in values[column]] for column in columns]
    return float((np.sum(ones, axis=0) == 1).mean()) if columns else 0.0


def _of_one_class(rows: Rows, why: str) -> tuple[Rows, str, list[str], tuple[Finding, ...]]:
    """Return rows without labels as those of one class, which public data may be."""
    for row in rows:
        row[JOINED] = "0"
    return rows, JOINED, [], (Finding("one", NOTE, why, "give label=COLUMN, or path,label in its head"),)


class Words(NamedTuple):
    """The labels of a table: the names of classes in order, and the class of each way in which one is written."""

    names: list[str]
    numbers: dict[str, int]


def _one_or_several(table: Path, rows: Rows, label: str, explicit: bool) -> tuple[Rows, tuple[Finding, ...]]:
    """Return the rows without those of several labels if they are less than a tenth, so that no single one decides what
    a model answers, and findings. explicit: their owner says that an example has several."""
    several = [BETWEEN in row[label] for row in rows]
    if explicit or not any(several) or np.mean(several) >= 1 - MOST:
        return rows, ()
    text = (
        f"{table.name}: {sum(several)} of {len(rows)} rows have several labels (A|B) or an empty list, and are left out"
    )
    remedy = "give each one, or a column of 0 and 1 for each label and label=[A,B,...]"
    kept = [row for row, two in zip(rows, several, strict=True) if not two]
    return kept, (Finding("conflict", ERROR, text, remedy),)


def label_words(
    table: Path, rows: Sequence[Mapping[str, str]], label: str, fold: Fold, columns: Sequence[str] = ()
) -> tuple[Words, list[Finding]]:
    """Return the labels of a table, in the order in which they are numbered, and findings. columns: the names of all,
    so that no row decides which there are; empty: those that occur."""
    spelt = dict[str, list[str]]()
    for word in sorted(columns or {part for row in rows for part in row[label].split(BETWEEN)}):
        spelt.setdefault(folded(word), []).append(word)
    for word in () if columns else NO_LABEL:
        spelt.pop(word, None)

    rest = spelt.keys() - CODES
    if len(rest) > 1 and not any(re.fullmatch(r"-\d+", word) for word in rest - {"-1"}):
        spelt = {word: spelt[word] for word in spelt if word in rest}

    # -1 says that no label is known where the others count from 0, but not in a pair of -1 and 1
    findings = list[Finding]()
    others = [word for word in spelt if word != "-1"]
    if "-1" in spelt and (len(others) > 1 or not all(map(str.isdecimal, others))):
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

    meant = [[word for word in spelt if word in same] for same in SAME]
    if len(spelt) > 2 and sum(map(len, meant)) == len(spelt):
        two = next(words for words in meant if len(words) > 1)
        text = f"{table.name}: labels {first_of(map(repr, two))} mean the same, and would be two classes"
        findings.append(Finding("labels", ERROR, text, "write each class in one way"))

    # several labels of one image with another sign between them
    marks = " []{}'\""
    parts = {word: [folded(part.strip(marks)) for part in re.split("[;,/+&]", word)] for word in spelt}
    single = {of[0] for of in parts.values() if len(of) == 1}
    lists = {word for word in spelt if word[:1] + word[-1:] in ("[]", "{}")}
    if joined := [word for word, of in parts.items() if len(of) > 1 and (single.issuperset(of) or word in lists)]:
        text = f"{table.name}: label {joined[0]!r} may be several, since each part is a label"
        findings.append(Finding("labels", ERROR, text, "write A|B"))

    ordered = sorted(spelt, key=lambda word: (int(word) if word.isdecimal() and len(word) < DIGITS else -1, word))
    names = [word if word.isdecimal() else spelt[word][0].strip() for word in ordered]
    return Words(names, {way: i for i, word in enumerate(ordered) for way in spelt[word]}), findings


def _labelled(table: Path, rows: Rows, label: str, words: Words) -> tuple[Rows, list[Finding]]:
    """Return the rows whose label is known, and findings."""

    def is_known(row: TableRow) -> bool:
        return row[label] == BETWEEN or any(part in words.numbers for part in row[label].split(BETWEEN))

    known = [row for row in rows if is_known(row)]
    if len(known) == len(rows):
        return rows, []
    others = Counter(row[label] for row in rows if not is_known(row))
    named = first_of(word or "nothing" for word in others)
    text = f"{table.name}: {len(rows) - len(known)} of {len(rows)} rows have no label ({named}) and are left out"
    rarest = min(Counter(row[label] for row in known).values(), default=0)
    if max((count for word, count in others.items() if word.strip()), default=0) < max(rarest, 2):
        return known, [Finding("unlabelled", WARNING, text)]
    return known, [Finding("unlabelled", ERROR, text, "if that is a class, call it by another word")]


def _classes(rows: Rows, label: str, words: Words, several: list[str], explicit: bool) -> torch.Tensor:
    """Return the labels, int64 [n], or float32 [n, labels] of 0/1 if an image has several; NaN where the column of a
    label is neither. explicit: their owner says that an example may have several."""
    if not explicit and not any(BETWEEN in row[label] for row in rows):
        return torch.tensor([words.numbers[row[label]] for row in rows], dtype=torch.int64)
    y = torch.zeros(len(rows), len(words.names))
    for i, row in enumerate(rows):
        y[i, [words.numbers[part] for part in row[label].split(BETWEEN) if part in words.numbers]] = 1
    for column in words.numbers.keys() & set(several):
        y[[folded(row[column]) not in BINARY for row in rows], words.numbers[column]] = math.nan
    return y


def _sides(table: Path, rows: Rows, side: str | None) -> np.ndarray | None:
    """Return which rows are of the test part, bool [n]; None: the table does not say."""
    if side is None:
        return None
    sides = [SIDES.get(folded(row[side]), "") for row in rows]
    if "" in sides:
        place = sides.index("")
        raise UserError(
            f"{table}: {rows[place].place} has {side} {rows[place][side]!r}: use train or test, or give split=none"
        )
    of_test = np.asarray([of == "test" for of in sides])  # as of a folder: validation is one with the test part
    if of_test.all() or not of_test.any():
        raise UserError(f"{table}: every row is {rows[0][side]}: give both parts, or split=none")
    return of_test
