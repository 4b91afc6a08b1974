"""Texts as data: a column of a table, or a folder of .txt files. Which data are texts is decided by names alone.

Each text becomes a row of numbers by itself (`hashed`), with a fixed hash and no weights. A text encoder
(`pubsel.models.text_encoder`) takes the texts in place of these rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pubsel.data import memory, tables
from pubsel.data.examples import people_of
from pubsel.data.findings import ERROR, WARNING, Finding, first_of
from pubsel.data.folders import (
    PARTS,
    SURROGATES,
    TRAIN,
    about_copies,
    about_names,
    all_images,
    files_below,
    lost_classes,
    other_files,
    same_words,
)
from pubsel.data.identifiers import about_values, left_out, may_be_ids
from pubsel.data.images import MOST
from pubsel.data.vectors import Vectors, as_text, is_rows, numbers_of
from pubsel.files import plain, reading
from pubsel.messages import UsageError, UserError
from pubsel.settings.keys import Read

SUFFIX = ".txt"
NAMES = ("text", "texts", "sentence", "review", "abstract")  # of columns that are texts
# of columns that are texts if no other columns are left: a title may be one of many columns of a table of numbers
PERHAPS = ("content", "comment", "message", "body", "document", "title")
KINDS = "this model was trained on texts: give a table with a column text, a folder of .txt files, or a list of texts"
FEATURES = 2**12  # numbers that a text is hashed into
LENGTH = 3  # characters that are hashed together: docs/data.md says what it was chosen by
HASHING = (
    "triples of characters, in lower case, within words and at their ends, hashed into {:,} numbers by "
    "HashingVectorizer of scikit-learn, all signs positive; log(1 + count), in rows of norm 1"
)


class Texts(NamedTuple):
    """The texts of both parts, in the order of their rows, and the column of a table that they are from."""

    column: str | None
    train: tuple[str, ...]
    test: tuple[str, ...]

    def at(self, train: Sequence[int], test: Sequence[int]) -> Self:
        """Return the texts at some places of each part."""
        return self._replace(train=tuple(self.train[i] for i in train), test=tuple(self.test[i] for i in test))


class TextInput(NamedTuple):
    """The texts that a model takes. column: of a table; None: one with a usual name. hashed: into how many numbers;
    None: an encoder takes them."""

    column: str | None
    hashed: int | None


class LabelledTexts(NamedTuple):
    """Texts as they were read, and the rows with their labels."""

    rows: Vectors
    texts: tuple[str, ...]
    column: str | None


def hashed(texts: Sequence[str], features: int = FEATURES) -> Tensor:
    """Return the features of texts, float32 [n, features], each by itself (HASHING).

    No weights of words, such as their inverse document frequency, come in: of private texts they would be a release,
    and with public texts the `whitened_head` divides by public deviations, which has the same effect."""
    from sklearn.feature_extraction.text import HashingVectorizer  # a second, for texts alone

    how: dict[str, Any] = {"analyzer": "char_wb", "ngram_range": (LENGTH, LENGTH), "dtype": np.float32}
    hashing = HashingVectorizer(n_features=features, alternate_sign=False, norm=None, **how)
    counts = hashing.transform(texts)
    counts.data = np.log1p(counts.data)
    rows = torch.from_numpy(counts.toarray())
    return torch.nn.functional.normalize(rows, dim=1)


def is_texts(path: Path, read: Read) -> bool:
    """Return whether a path of a user's has texts, by the names in it alone."""
    if path.is_dir() and not tables.is_table(path):
        return not is_rows(path, read) and bool(files_in(path)) and not all_images(path)
    if not tables.is_table(path) or read.path is not None:
        return False
    return read.text not in (None, "none") or column_of_texts(tables.names_of(path), read) is not None


def column_of_texts(names: Sequence[str], read: Read) -> str | None:
    """Return the column of a table that is texts: `read.text` if it is there, or one with a usual name; None if there
    is none, or if the table has paths of files."""
    if read.text == "none" or read.text in names:
        return None if read.text == "none" else read.text
    return next(iter(usual_columns(names, read)), None)


def usual_columns(names: Sequence[str], read: Read) -> list[str]:
    """Return the columns of a table with usual names of texts, the first of these first; none if it has paths."""
    labels = read.label if isinstance(read.label, list) else [read.label]
    known = {tables.plain_name(name): name for name in reversed(names) if name not in (*labels, read.split)}
    if any(name in known for name in tables.PATHS):
        return []
    others = {*known} - {*NAMES, *PERHAPS, *tables.OUTCOMES, *tables.SPLITS}
    usual = NAMES if any(not may_be_ids(name) for name in others) else (*NAMES, *PERHAPS)
    return [known[name] for name in usual if name in known]


def read_texts(path: Path, unit: str | None, read: Read, labelled: bool = True) -> LabelledTexts:
    """Return the texts of a path for which `is_texts` holds. labelled: whether they must have labels. UserError names
    what is wrong."""
    of_table = tables.is_table(path)
    texts = _of_table(path, unit, read, labelled) if of_table else _of_folder(path, unit, read)
    x = hashed(texts.texts)
    findings = texts.rows.findings
    if empty := int((~x.any(1)).sum()):
        text = f"{path.name}: {empty} of {len(x)} texts are empty"
        findings += (Finding("empty", WARNING, text),)
    return texts._replace(rows=texts.rows._replace(x=x, findings=findings))


def _of_table(table: Path, unit: str | None, read: Read, labelled: bool) -> LabelledTexts:
    """Return the texts of a table."""
    names = tables.names_of(table)
    column = column_of_texts(names, read)
    if column is None or read.text not in (None, column):
        raise UsageError(f"text={read.text}: {table.name} has no such column: {first_of(names, 20)}")
    frame, answers = tables.features_in(table, unit, read, labelled, column)
    left, findings = left_out(table.name, frame.drop(columns=column), unit)
    if others := [name for name in frame if name not in {*left, column}]:
        text = f"{table.name}: {column} is read as texts, and other columns are not used: {first_of(others, 10)}"
        findings.append(Finding("columns", WARNING, f"{text}; text=none reads a table of numbers"))
        findings += about_values(table.name, {name: frame[name].map(as_text) for name in others}, unit, "text")
    numbers = np.isfinite(numbers_of(frame[column]))
    if read.text is None and numbers.mean() >= MOST:
        text = f"{table.name}: {column} is read as texts, and has numbers"
        findings.append(Finding("columns", ERROR, text, "text=none reads a table of numbers"))
    texts = tuple(frame[column].map(as_text))
    known = answers.y, answers.test, answers.names, answers.people
    return LabelledTexts(Vectors(torch.empty(0), *known, findings=(*answers.findings, *findings)), texts, column)


def files_in(folder: Path) -> list[Path]:
    """Return the .txt files of a folder, at any depth, sorted; hidden ones are left out."""
    return sorted(filter(is_text, files_below(folder)))


def is_text(path: Path) -> bool:
    """Return whether a file is read as a text."""
    return path.suffix.lower() == SUFFIX


class Place(NamedTuple):
    """A file of a folder, and what the folders above it say."""

    file: Path
    test: bool
    label: str
    person: str


def _of_folder(folder: Path, unit: str | None, read: Read) -> LabelledTexts:
    """Return the texts of folder/<class>/*.txt, or of folder/train/<class>/* and folder/test/<class>/*, or of a flat
    folder, which is one class. unit: "folder" for <class>/<person>/*. The validation part is one with the test part.
    """
    if unit not in (None, "folder"):
        raise UsageError(f"unit={unit}: {folder} is a folder: set unit=folder, for <class>/<person>/*")
    places, findings = _places(folder, unit is not None)
    classes = sorted({place.label for place in places if not place.test})
    if unknown := sorted({place.label for place in places} - {*classes}):
        raise UserError(f"{folder}: class {unknown[0]} is in its test part alone: give both parts the same classes")
    findings += same_words(folder, classes, [place.person for place in places] if unit else ())
    findings += about_copies(folder.name, [place.file for place in places])
    findings += [] if unit else about_names(folder.name, [place.file.name for place in places], len(classes))

    texts, damaged = list[str](), list[Path]()
    for file in [place.file for place in places]:
        try:
            texts.append(text_of(file))
        except UserError:
            damaged.append(file)
    if damaged:
        text = f"{folder.name}: {len(damaged)} of {len(places)} texts are not in UTF-8, the first {damaged[0].name}"
        if not read.skip:
            raise UserError(f"{text}: convert them, such as by iconv -f LATIN1 -t UTF-8, or set skip=true")
        findings.append(Finding("unreadable", WARNING, f"{text}: they are left out"))
        places = [place for place in places if place.file not in {*damaged}]

    people = None
    if unit is not None:
        people, about_people = people_of(folder.name, [place.person for place in places])
        findings += about_people
    y = torch.tensor([classes.index(place.label) for place in places])
    test = np.array([place.test for place in places])
    rows = Vectors(torch.empty(0), y, test if test.any() else None, tuple(filter(None, classes)), people)
    return LabelledTexts(rows._replace(findings=tuple(findings)), tuple(texts), None)


def _places(folder: Path, people: bool) -> tuple[list[Place], list[Finding]]:
    """Return the files of a folder that are read, and findings. people: class folders have a folder for each person."""
    files, findings = files_in(folder), list[Finding]()
    if unnamed := [file for file in files if not SURROGATES.isdisjoint(str(file))]:
        raise UserError(f"{folder}: the name of {str(unnamed[0].relative_to(folder))!a} is not UTF-8: rename it")
    above = [file.relative_to(folder).parts[:-1] for file in files]
    tops = {parts[0].lower() for parts in above if parts}
    split = bool(tops & {*TRAIN}) and tops <= {*PARTS}
    if not split and len(tops) > 1 and (parts := sorted(tops & {*PARTS})):
        text = f"{folder.name}: {parts[0]} is next to class folders, and would be a class"
        findings.append(Finding("split", ERROR, text, "put the other classes into train, or move this folder"))

    # a text at another depth has no class, or no person
    depth = (1 + split + people) if tops else 0
    kept = [
        Place(file, split and parts[0].lower() not in TRAIN, parts[split] if parts else "", parts[-1] if parts else "")
        for file, parts in zip(files, above, strict=True)
        if len(parts) == depth
    ]
    if not kept:
        layout = "<class>/<person>/*.txt" if people else "<class>/*.txt"
        raise UserError(f"{folder}: no text is at {layout}, the first is {files[0].relative_to(folder)}: move them")
    if len(kept) < len(files):
        where = next(file for file, parts in zip(files, above, strict=True) if len(parts) != depth)
        text = f"{folder.name}: {len(files) - len(kept)} texts are not in a class folder, and are not read"
        findings.append(Finding("not_read", WARNING, f"{text}, the first {where.relative_to(folder).as_posix()}"))
    train = folder / next(top for top, *_ in filter(None, above) if top.lower() in TRAIN) if split else folder
    findings += lost_classes(folder, train, [place.label for place in kept if not place.test], "texts")
    return kept, [*findings, *other_files(folder, is_text)]


def text_of(file: Path) -> str:
    """Return the text of a file. UserError if it cannot be read."""
    with reading(file, "not in UTF-8: convert it, such as by iconv -f LATIN1 -t UTF-8", (OSError, UnicodeError)):
        return plain(file).read_text(encoding="utf-8-sig")


# New texts


def new_texts(name: str, given: Any, takes: TextInput) -> list[tuple[str, str | Path]]:
    """Return new texts for a model, each with its name: of a path, a pandas table or column, or a list. UserError if
    there are none, or for what is no text."""
    import pandas as pd

    if isinstance(given, Path) and given.is_dir() and not tables.is_table(given):
        files = files_in(given)
        if not files:
            raise UserError(f"{name}: no texts in this folder: expected .txt files")
        return [(str(file), file) for file in files]
    if isinstance(given, Path) and given.suffix.lower() == SUFFIX:
        return [(name, given)]
    if isinstance(given, Path):
        if not tables.is_table(given):
            raise UserError(f"{name}: {KINDS}")
        given, name = pd.DataFrame(tables.rows_in(given, blank=True)), f"{name}/"
    else:
        name = ""
    if isinstance(given, pd.DataFrame):
        given = memory.named_columns("texts", given)
        usual = usual_columns(list(given), Read())
        column = tables.trained_column(name or "texts", given.columns, takes.column, usual) or next(iter(usual), None)
        if column is None:
            raise UserError(f"{name or 'texts'}: no column {takes.column or NAMES[0]}: it has {first_of(given, 10)}")
        given = given[column]
    try:
        texts = list(given)
    except TypeError:
        raise UserError(f"texts: {type(given).__name__}: {KINDS}") from None
    if wrong := [text for text in texts if not isinstance(text, str) and as_text(text)]:
        raise UserError(f"texts: {type(wrong[0]).__name__}: {KINDS}")
    return [(f"{name}{i}" if name else "", as_text(text)) for i, text in enumerate(texts)]
