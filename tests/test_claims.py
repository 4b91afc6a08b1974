"""Sentences against tables: a comment after a sentence names the row of a CSV file and the numbers that it says.

    <!-- claim: tables/NAME.csv key=value key=value: column number, column number -->

The row has to be one, each number has to be the column's, rounded to its digits, and has to be in the text before the
comment. Before a column, `-` stands for the first of two rows, named as key=one|other, minus the second.
Write the blanks and line ends of a value as commas.
"""

import csv
import re

import pytest

from pubsel.settings import CONF

ROOT = CONF.parent
PAGES = [ROOT / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLAIM = re.compile(r"<!-- claim: (\S+\.csv) ([^:]*): ([^>]*?) -->")
NEAR = 1500  # characters of text before a comment that it may be about


def claims() -> list[tuple[str, str, str, str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in CLAIM.finditer(text):
            near = CLAIM.sub("", text[: match.start()])[-NEAR:]  # a number in another claim is no sentence
            found.append((page.name, *match.groups(), re.sub(r"\s+", " ", near).replace("−", "-")))
    return found


def rows_of(file: str, where: str) -> list[dict[str, str]]:
    """Return the rows of a CSV that have one of the values key=value|value; NONE: none."""
    wanted = {key: values.split("|") for key, values in (word.split("=", 1) for word in where.split())}
    with (ROOT / "results" / file).open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    chosen = [row for row in rows if all(_word(row[key]) in values for key, values in wanted.items())]
    first = next(iter(key for key, values in wanted.items() if len(values) > 1), None)
    return sorted(chosen, key=lambda row: wanted[first].index(_word(row[first]))) if first else chosen


def _word(value: str) -> str:
    return re.sub(r"\s+", ",", value) or "NONE"


@pytest.mark.parametrize(("page", "file", "where", "says", "text"), claims())
def test_a_sentence_says_what_its_table_says(page: str, file: str, where: str, says: str, text: str) -> None:
    rows = rows_of(file, where)
    for part in says.split(", "):
        column, number = part.split()
        if column.startswith("-"):
            first, second = (float(row[column[1:]]) for row in rows)
            value = first - second
        else:
            (row,) = rows
            value = float(row[column])
        digits = len(number.partition(".")[2])
        assert f"{value:.{digits}f}" == number, (page, file, where, column)
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", text), (page, number)


def test_the_pages_that_are_to_have_claims_have_some() -> None:
    assert {page for page, *_ in claims()} >= {"README.md"}
    assert len(claims()) >= 12
