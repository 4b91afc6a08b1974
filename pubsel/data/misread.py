"""Numbers that may be misread: codes of missing values, ids, counters, the label by another name, and what float32
makes equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from pubsel.data.embeddings import BLOCK
from pubsel.data.examples import MANY
from pubsel.data.findings import ERROR, WARNING, Finding, on_columns
from pubsel.data.identifiers import RARE, are_ids, counts_rows
from pubsel.data.images import MOST

LARGEST, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)  # of the numbers that are read
OFTEN = 1 - MOST  # share of the rows in which a number is missing, from which that is a column too
# often written for a missing number: 9, 99, 77, 777, -999
CODES = [sign * int(digit * n) for digit in "789" for n in range(1 + (digit < "9"), 10) for sign in (1, -1)]
NEAR = [sign * (10**n - i) for n in range(1, 10) for i in (2, 3, 4) for sign in (1, -1)]  # 98, 97 and 96 of 99


def suspicious(
    name: str, columns: Iterable[tuple[str, np.ndarray]], y: Tensor, bounded: Mapping[str, np.ndarray] | None = None
) -> list[Finding]:
    """Return the findings on columns of numbers without bounds, each float64 [n], in which some are codes of missing
    values, most are equal in float32, or which are ids, count rows, or say the label. name: of their file; y: labels
    [n] or [n, labels]; bounded: other columns, which may say the label too."""
    import pandas as pd

    of_columns = dict(columns)
    findings = about_codes(name, of_columns)

    equal = [column for column, each in of_columns.items() if is_rounded(each)]
    text = f"{name}: numbers in some columns are so close for their size that most are equal in float32"
    remedy = "subtract a public number, or give bounds=; accepted, they stay so"
    findings += on_columns("rounded", ERROR, text, equal, remedy)

    ids = [column for column, each in of_columns.items() if are_ids(each)]
    if ids:  # numbers of rows that are repeated as a whole say nothing
        fresh = ~pd.DataFrame(of_columns).duplicated().to_numpy()
        ids = [column for column in ids if are_ids(of_columns[column][fresh])]
    remedy = "if they are, leave them out, or set unit=COLUMN of people; accepted, they are features"
    findings += on_columns("ids", ERROR, f"{name}: columns have whole numbers as ids of people have", ids, remedy)

    # in the order of the labels, or shared by rows, a number may count people
    by_label = y.dim() == 1 and (y.diff() != 0).double().mean() <= 1 - MOST
    counting = [column for column, each in of_columns.items() if counts_rows(each)]
    counts = [column for column in counting if by_label or len(np.unique(of_columns[column])) < len(y)]
    text = f"{name}: columns count the rows, or people, in their order"
    findings += on_columns("columns", WARNING, text, counts, "leave them out, or set unit=COLUMN of people")

    if y.dim() != 1:
        return findings
    same = [column for column, each in {**of_columns, **(bounded or {})}.items() if says_label(each, y.numpy())]
    text, remedy = f"{name}: columns have one number for each label", "leave out what is the label by another name"
    return findings + on_columns("columns", WARNING, text, same, remedy)


def about_codes(
    name: str, columns: Mapping[str, np.ndarray], bounds: Mapping[str, tuple[float, float]] | None = None
) -> list[Finding]:
    """Return the finding on columns of numbers, each float64 [n], in which some are codes of missing values. bounds: of
    some columns, within which there are no codes."""
    within = bounds or {}
    coded = [
        f"{column} ({code:g})"
        for column, each in columns.items()
        for code in codes_of_missing(each)
        if column not in within or not within[column][0] <= code <= within[column][1]
    ]
    text = f"{name}: columns have a number far from their others"
    remedy = "leave a field empty where a number is missing; accepted, these are numbers"
    return on_columns("missing", ERROR, text, coded, remedy)


def codes_of_missing(numbers: np.ndarray) -> list[float]:
    """Return the numbers of nines alone, such as -999, or near them, or of two or more sevens or eights, which a
    hundredth of a column's numbers [n] or more are, and which are further from the others than these, but for a
    hundredth at each end, are from each other, or which alone are negative."""
    known = numbers[np.isfinite(numbers)]
    if not {known.min(initial=0), known.max(initial=0)} & {*CODES}:  # neither end is one
        return []
    coded, near = np.isin(known, CODES), np.isin(known, [*CODES, *NEAR])
    near |= (known == -1) & bool((known[coded] < 0).any())
    coded = near if 2 * near.sum() <= len(known) else coded  # most may be of another scale, as of 94 to 99
    codes, counts = np.unique(known[coded], return_counts=True)
    others = known[~coded]
    if not len(others):
        return []
    low, high = np.quantile(others, [RARE, 1 - RARE])
    far = np.maximum(low - codes, codes - high) > high - low
    far |= (codes < 0) & (low >= 0)
    return [float(code) for code in codes[far & (low < high) & (counts >= RARE * len(known))]]


def is_rounded(numbers: np.ndarray) -> bool:
    """Return whether nine tenths or more of the different numbers [n], in some of the rows, are equal in float32."""
    some = numbers[:: max(1, len(numbers) // BLOCK)]
    some = some[np.abs(some) <= LARGEST]
    # what differs by less than a trillionth is one number that was computed in several ways
    different = len(np.unique((some / max(np.abs(some).max(initial=0), TINY)).round(12))) - 1
    return different > 0 and len(np.unique(some.astype(np.float32))) - 1 <= OFTEN * different


def says_label(numbers: np.ndarray, y: np.ndarray) -> bool:
    """Return whether each label of y [n] has one of the numbers [n], and no other has it, but for a hundredth of the
    rows."""
    values, which = np.unique(numbers, return_inverse=True)
    if len(values) > MANY + RARE * len(y):
        return False
    pairs, counts = np.unique(np.stack([which, y]), axis=1, return_counts=True)
    usual = counts >= (1 - RARE) * len(y) / MANY
    one_each = 1 < usual.sum() == len(np.unique(pairs[0][usual])) == len(np.unique(pairs[1][usual]))
    return bool(one_each and counts[usual].sum() >= (1 - RARE) * len(y))
