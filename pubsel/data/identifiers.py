"""Columns of tables, and arrays of an npz, that name people or number rows: nothing can be learned from them.

Some are known by their name alone (`PERSON`). Others by their values, and by their name or zeros before numbers: an id
that repeats names what several rows are of, and one that never does numbers the rows. Whatever a column is called, its
values may be those of ids (`are_ids`), which is a warning, or an error where it would be a feature; or count rows in
their order (`counts_rows`), a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pubsel.data.examples import BLANK_WORDS, LARGE, MANY, folded
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of, on_columns
from pubsel.data.images import MOST

WHO = (
    "(patient|subject|sujeto?|person|participante?|respondent|proband|user|customer|client|member|mrn|ssn"
    "|patiente?n|pa[cz]iente|probanden|kunden?|cliente|versicherten?)s?"
)
NUMBER = "(id|uid|key|no|nr|num|number|nummer|code|name)"
PERSON = re.compile(
    rf"{WHO}|(.+_)?({WHO}|(household|family|employee|student)s?)_?{NUMBER}|ids?_?(of_)?(the_)?{WHO}|hh_?id"
    r"|(fall|konto)_?(id|nr|nummer)|u?subj(_?id)?|(p|pa?t|r|e)_?id|(pat|pt|subj|vp)_?(no|nr|num)|nhs_number"
)
# names that end in id without a mark before it are listed: a grid or an acid is none; a number of patients may be a
# count, an animal a class, and a student a word for yes or no, which few different values show; workers are counted
RECORD = (
    "(row|record|case|study|visit|encounter|admission|hadm|stay|icustay|sample|lesion|exam|image|chart|account"
    "|recording)"
)
OF_IDS = re.compile(
    rf"(.+_)?ids?|groups?|{RECORD}ids?|{RECORD}_?(no|nr|num|number)"
    rf"|(no|nr|num|number|num[eé]ro|n[uú]mero|code|c[oó]digo)_?(of_|d[eu]_)?{WHO}|case|donor|speaker|author|reviewer"
    r"|volunteer|animal|student|pupil|employee|worker|household|resident|individual|child|driver|player|vp"
)
SURE = re.compile(rf"ids?|(?!study|visit|exam){RECORD}_?ids?|donor|speaker|volunteer")  # if there are more than two
RARE = 0.01  # share of the values of a column that is too small to say what the column has
FEW_IDS = 9  # or fewer, of names that are not sure, are categories
COUNTERS = {"index", "row", "row_number"}
USUAL_GAP = 0.25  # share of one gap between neighbouring numbers, from which they are measured and no ids
OF_PANDAS = re.compile(r"(unnamed_\d.*|index_level_\d+)?")  # names that it gives to an index in files


def plain_id(name: str) -> str:
    """Return a name as these are compared: recordId, record.id, "Record ID" and record-id# are record_id."""
    return re.sub(r"[\W_]+", "_", folded(re.sub("([a-z])(I[dD]s?)$", r"\1_\2", name))).strip("_")


def may_be_ids(name: str) -> bool:
    """Return whether the name of a column says that it may name people or number rows."""
    plain = plain_id(name)
    return plain in COUNTERS or any(pattern.fullmatch(plain) for pattern in (PERSON, OF_IDS, OF_PANDAS))


def has_zeros(values: Iterable[Any] | None) -> bool:
    """Return whether a twentieth of the values or more are texts of digits that begin with zero, as ids are."""
    if values is None or getattr(values, "dtype", np.dtype(object)).kind not in "OU":
        return False
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    zeros = sum(value[0] == "0" and len(value) > 1 and value.isdecimal() for value in map(str.strip, texts))
    return bool(zeros) and 20 * zeros >= len(texts)


def names_people(name: str, values: Iterable[Any] | None) -> bool:
    """Return whether a column names people: by its name, or as an id that repeats and is none of a few categories.
    values: None: they cannot be read."""
    plain = plain_id(name)
    if PERSON.fullmatch(plain) or not (OF_IDS.fullmatch(plain) or has_zeros(values)):
        return PERSON.fullmatch(plain) is not None
    few = 2 if SURE.fullmatch(plain) else MANY
    return values is None or _repeats(_ids(values), few)


def _repeats(ids: list[str], few: int) -> bool:
    """Return whether more than a hundredth of some ids repeat others, and more than a few are different."""
    different = len(set(ids))
    return few < different < len(ids) - max(1, RARE * len(ids))


def numbers_rows(name: str, values: Iterable[Any]) -> bool:
    """Return whether a column numbers the rows: an id, a counter, or one that pandas gave its name, whose values are
    different in nine tenths of the rows, so that no single one decides."""
    ids = _ids(values) if may_be_ids(name) or has_zeros(values) else []
    return bool(ids) and len(set(ids)) >= MOST * len(ids)


def _ids(values: Iterable[Any]) -> list[str]:
    """Return the values that are not missing, as they are compared; none of measurements, a tenth of which or more
    have decimals."""
    words = [word for word in (folded(str(value)) for value in values) if word not in BLANK_WORDS]
    decimals = sum(re.fullmatch(r"-?\d*\.\d+(e.*)?", word) is not None for word in words)
    return words if decimals <= (1 - MOST) * len(words) else []


def are_ids(values: Iterable[Any]) -> bool:
    """Return whether the values of a column are those of ids, whatever it is called: more than MANY words or whole
    numbers, of which nine tenths of the rows share theirs with a few others, and no gap between neighbouring numbers is
    usual, as between rounded ones."""
    import pandas as pd

    column = pd.Series(values).replace("", None).dropna()
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    finite, n = np.isfinite(numbers), len(column)
    words = finite.sum() < MOST * n
    if not words and np.count_nonzero(numbers[finite] % 1) > (1 - MOST) * n:
        return False
    counts = column.value_counts().to_numpy()
    shared = counts[counts > 1].sum() >= MOST * n and counts.max(initial=0) <= LARGE * n and MANY * len(counts) >= n
    gaps = np.unique(np.diff(np.unique(numbers[finite])), return_counts=True)[1]
    return bool(len(counts) > MANY and shared and (words or gaps.max() <= USUAL_GAP * gaps.sum()))


def counts_rows(numbers: np.ndarray) -> bool:
    """Return whether the numbers of a column [n] count the rows, or groups of them, in their order."""
    known = numbers[np.isfinite(numbers)]
    steps = np.diff(known)[np.diff(known) != 0]
    counts = len(steps) >= 2 * MANY and known.min() in (0, 1) and len(np.unique(known)) >= MOST * len(steps)
    return bool(counts and np.mean(steps == np.median(steps)) >= MOST)


def about_values(name: str, columns: Mapping[str, Sequence[Any]], unit: str | None, what: str) -> list[Finding]:
    """Return the finding on columns that are not read, whose values are ids that several examples share. name: of their
    file; what: an example is called."""
    of_ids = [column for column, values in columns.items() if unit is None and are_ids(values)]
    text = f"{name}: {first_of(map(repr, of_ids), 4)} may say whose each {what} is, by its values"
    remedy = f"if it does, set unit={of_ids[0]}, or {what}s are protected, not people" if of_ids else ""
    return [Finding("ids", WARNING, text, remedy)] if of_ids else []


def left_out(
    name: str, columns: Mapping[str, Sequence[Any] | None], unit: str | None, what: str = "column"
) -> tuple[set[str], list[Finding]]:
    """Return the columns that number rows or name people, and findings. name: of their file; unit: the column
    that names the people who are protected, so that others may; what: a column is called."""
    columns = {column: columns[column] for column in columns if may_be_ids(str(column)) or has_zeros(columns[column])}
    people = [column for column, values in columns.items() if names_people(column, values)]
    others = {column: values for column, values in columns.items() if values is not None and column not in people}
    numbered = [column for column, values in others.items() if numbers_rows(column, values)]
    findings = list[Finding]()
    if nameless := [column for column in others if OF_PANDAS.fullmatch(plain_id(column)) and column not in numbered]:
        text = f"{name}: {what} {nameless[0]!r} has no name, and does not number the rows"
        findings.append(Finding("columns", ERROR, text, "name it, so that what it is can be checked, or leave it out"))
    for why, some in (("number the rows", numbered), ("may name people", people if unit else [])):
        findings += on_columns("columns", NOTE, f"{name}: {what}s that {why} are left out", [*map(repr, some)])
    if people and not unit:
        by_name = PERSON.fullmatch(plain_id(people[0]))
        text = f"{name}: {what} {people[0]} {'names' if by_name else 'may name'} people, and is left out"
        findings.append(Finding("ids", ERROR, text, f"set unit={people[0]}, or a row is protected, not a person"))
    kept = {column: values for column, values in others.items() if unit is None and column not in numbered}
    if few := [c for c, values in kept.items() if OF_IDS.fullmatch(plain_id(c)) and _repeats(_ids(values), FEW_IDS)]:
        text = f"{name}: {what}s may say whose each row is, by their names: {first_of(few, 4)}"
        remedy = f"if they do, set unit={few[0]}, or a row is protected, not a person"
        findings.append(Finding("ids", WARNING, text, remedy))
    return {*numbered, *people}, findings
