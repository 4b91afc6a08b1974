"""Tables of text, such as CSV: their rows as texts, and what is wrong with them, by its line."""

import codecs
import contextlib
import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TextIO

import numpy as np

from pubsel.files import plain, unreadable
from pubsel.messages import UserError

HEAD_LINES = 1000  # lines of a table, or images of a folder, that show how it is written and whose they are
LINE_BREAK = re.compile("\r\n?|\n")
NOT_UTF8 = "{}: not in UTF-8: convert it, such as by iconv -f LATIN1 -t UTF-8, or from UTF-16"
EXTRA = "\0"  # the key of values without a column
NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)  # as the name of a column
ORDERED = 5  # numbers that are in order by no chance, as wavelengths in the head of a table are


@contextlib.contextmanager
def open_text(table: Path, between: str) -> Iterator[tuple[TextIO, str]]:
    """Open a table of text, in UTF-8 or in UTF-16 with its mark, and tell which of the characters `between` separates
    its columns, by its first line. UserError if it is in UTF-16 without its mark."""
    with plain(table).open("rb") as raw:
        start = raw.read(2)
    if b"\0" in start:
        raise UserError(NOT_UTF8.format(table))
    wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    with table.open(newline="", encoding="utf-16" if wide else "utf-8-sig") as file:
        delimiter = max(between, key=file.readline().count)
        file.seek(0)
        yield file, delimiter


class TableRow(dict[str, str]):
    """A row of a table: its values by their columns. last: its last line in the file, or its number; unit: which."""

    __slots__ = ("last", "unit")

    def __init__(self, values: Mapping[str, str], last: int, unit: str = "line"):
        super().__init__(values)
        self.last, self.unit = last, unit

    @property
    def place(self) -> str:
        """Return where the row begins, as an editor numbers lines: a quoted value may have several."""
        more = sum(len(LINE_BREAK.findall(value)) for value in self.values()) if self.unit == "line" else 0
        return f"{self.unit} {self.last - more}"


def check_quotes(table: Path, file: TextIO, delimiter: str) -> None:
    """Raise UserError if quotes of a CSV may make one value of several rows, whose people would be one: an open quote
    that is never closed, text after a closing one, or a value most of whose lines have the separators of a row.
    file: the open table, which is read and set back to its beginning."""
    csv.field_size_limit(2**31 - 1)  # of a text
    quoted = any('"' in line for line in file)
    file.seek(0)
    if not quoted:
        return
    separator = _separator(file, delimiter)
    reader, columns, first = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True), 0, 1
    try:
        for values in reader:
            columns = columns or len(values)
            if reader.line_num > first and _has_rows_in(values, columns, separator):
                raise UserError(
                    f"{table}: line {first}: a quoted value has a line break followed by as many {delimiter!r} as a "
                    "row has: remove the stray quote; if it is one text, replace its line breaks by blanks"
                )
            first = reader.line_num + 1
    except csv.Error as error:
        what = "an open quote is never closed" if "end of data" in str(error) else "text follows a closing quote"
        remedy = 'remove it, or quote the whole value and write each quote in it as "" (not \\")'
        raise UserError(f"{table}: line {first}: {what}: {remedy}") from None
    file.seek(0)


def _separator(file: TextIO, delimiter: str) -> re.Pattern[str]:
    """Return a pattern of what separates the values of a table, and not the parts of a sentence, whose commas have a
    blank after them, unless most rows have that too; or are the last character of a line, as in a letter's head. file:
    the open table, which is set back to its beginning."""
    count = file.readline().count(delimiter)
    lines = [*islice(file, HEAD_LINES)]
    file.seek(0)
    open_quotes = accumulate((line.count('"') for line in lines), initial=0)
    whole = [line for line, quotes in zip(lines, open_quotes, strict=False) if quotes % 2 == 0 and '"' not in line]
    blanks = [line.count(f"{delimiter} ") for line in whole if line.count(delimiter) == count]
    if delimiter == "\t" or 2 * blanks.count(count) > len(blanks):
        return re.compile(delimiter)
    return re.compile(delimiter + ("(?! )" if count > 1 else "(?! |$)"))


def _has_rows_in(values: Sequence[str], columns: int, separator: re.Pattern[str]) -> bool:
    """Return whether a value has several lines, most of which would be rows of `columns` values if the quotes around
    it were none: the first one with the values before it, and the last one with those after it."""
    for place, value in enumerate(values):
        first, *lines = LINE_BREAK.split(value)
        if not lines or columns == 1:
            continue
        counts = [len(separator.findall(line)) for line in lines[:-1] if line.strip()]
        counts += [place + len(separator.findall(first)), len(separator.findall(lines[-1])) + len(values) - 1 - place]
        if 2 * counts.count(columns - 1) > len(counts):
            return True
    return False


def rows_of(
    table: Path, columns: Sequence[str], between: str = ",", most: int | None = None, blank: bool = False
) -> list[TableRow]:
    """Return the rows of a CSV. between: characters that may separate its columns, of which its first line decides;
    most: the number of rows to read; blank: whether rows without a character count. UserError if it is absent, empty or
    no CSV, or lacks one of the columns."""
    try:
        with open_text(table, between) as (file, delimiter):
            if most is None:
                check_quotes(table, file, delimiter)
            reader = csv.DictReader(file, restkey=EXTRA, restval="", skipinitialspace=True, delimiter=delimiter)
            filled = (values for values in reader if blank or "".join(map(str, values.values())).strip())
            rows = [TableRow(values, reader.line_num) for values in islice(filled, most)]
            have = list(reader.fieldnames or [])
    except UnicodeError:
        raise UserError(NOT_UTF8.format(table)) from None
    except FileNotFoundError:
        raise UserError(f"{table}: no such file") from None
    except (OSError, csv.Error) as error:
        raise unreadable(table, error, "not a readable CSV") from None
    if have and have[0].startswith("\ufeff"):
        raise UserError(f"{table}: it begins with two marks of UTF-8: remove one")
    if have and have[0].lower().startswith("sep="):
        raise UserError(f"{table}: its first line, {have[0]}, is for Excel: remove it")
    numbers = [float(name.replace(",", ".")) for name in have if NUMBER.fullmatch(name.strip())]
    counted = len(numbers) != 1 and sorted(numbers) in ([*range(len(numbers))], [*range(1, len(numbers) + 1)])
    in_order = len(numbers) >= ORDERED and bool((np.diff(numbers) > 0).all() or (np.diff(numbers) < 0).all())
    if 2 * len(numbers) >= len(have) and not counted and not in_order:
        raise UserError(f"{table}: its first line has values, and no names: write a first line with a name by column")
    if twice := [column for column, count in Counter(have).items() if column and count > 1]:
        raise UserError(f"{table}: two columns are called {twice[0]}: rename one")
    more = next((row for row in rows if "".join(row.pop(EXTRA, ())).strip()), None)
    if more is not None:
        raise UserError(
            f"{table}: {more.place} has more values than the head has names: quote values with {delimiter!r}"
        )
    if again := [row for row in rows if len(have) > 1 and list(row.values()) == have]:
        raise UserError(f"{table}: {again[0].place} repeats the head: remove it")

    if absent := [column for column in columns if column not in have]:
        raise UserError(f"{table}: no column {absent[0]}: it needs {','.join(columns)}")
    if not rows:
        raise UserError(f"{table}: no rows in it")
    return rows
