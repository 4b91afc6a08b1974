"""Findings: what is wrong with data, or may be, as it is counted once and printed by every command.

An error stops a command before it spends anything; `accept=[NAME,...]` overrides it. A warning is printed, a
note is in the record alone.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pubsel.messages import UsageError, UserError, say
from pubsel.settings.schema import nearest

NOTE, WARNING, ERROR = "note", "warning", "error"
EXAMPLES = 2  # that a finding shows
COLUMNS = 4  # that it names

# The names by which findings are accepted, in the order of the reference.
NAMES = {
    "unreadable": "files that are no images, or damaged ones; skip=true leaves them out",
    "class_lost": "a class without an image that can be read, or is left for training",
    "many": "more classes than a tenth of the examples: measurements are no labels",
    "not_read": "files and folders next to the images that are not read",
    "hidden": "hidden folders, such as .ipynb_checkpoints, which are no classes",
    "nobody": "examples whose person is not named: nan, unknown, - or nothing",
    "spellings": "people written in several ways, `P7` and `p7 `, who are one; an error if they may be: `P7` and `P07`",
    "large": "one person with more than a tenth of all examples",
    "labels": "labels that differ in case, blanks or zeros only (labels=fold makes them one); `A;B` for `A|B`; "
    "class folders called unsup or unlabeled, or as parts, or that may be people",
    "unlabelled": "examples whose label is not known (nothing, nan, -1), which are left out",
    "not_known": "labels, of several of an example, that are not known (nothing, nan), or neither 0 nor 1 (-1)",
    "conflict": "one image with several labels, or classes, which is left out",
    "copies": "copies of an image, which are one example; or of rows or texts, each of which counts; an error if names "
    "of files say so, or that they are masks: a_mask.png of a.png",
    "both_sides": "images, or people, in the training and in the test part, which leave the training part",
    "public_too": "private examples, or people, that are public too, which leave; an error if rows are often equal",
    "shared": "images that several people have",
    "sizes": "images of other sizes than most",
    "no_size": "images without a size that nine tenths have, which a network on pixels needs",
    "colour": "grey images among colour ones, or the reverse",
    "frames": "files with several pages or frames, of which the first is read",
    "bits": "images of 16 bits, or more than 8, that use a sixteenth of the range or less; bits=12 uses all of it",
    "black": "images of one single value, or of 0 and 1 alone",
    "one": "one image or one class only, or no image in a part, of which nothing can be learned",
    "few": "classes, or labels, with few training images, or without a test image",
    "split": "a column that may be the split",
    "label_column": "the column of a table that has the labels",
    "columns": "columns of a table, or arrays, that are not used",
    "words": "columns of words in a table of numbers, which are left out; bounds=FILE lists their values",
    "empty": "texts without a character, whose features are all zero",
    "ids": "a column, an array, or names of files, of people, perhaps; unit=COLUMN protects each person, not each row",
    "missing": "numbers that are missing",
    "rounded": "columns of numbers so close to each other, for their size, that most are equal in float32",
    "outside": "a column with most numbers outside of its bounds, or a tenth other words than those in bounds=FILE; "
    "a warning if a tenth of its numbers are",
    "table": "a table next to images without classes, which may have their labels",
}

FINAL = {"nobody", "one"}  # without an owner, or with one class, nothing can be protected or learned


class Finding(NamedTuple):
    """One rule's finding. name: in NAMES; text: with a count and examples; remedy: what helps, if anything does."""

    name: str
    severity: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """Return it as it is printed."""
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def first_of(items: Iterable[object], count: int = EXAMPLES) -> str:
    """Return the first few different items, as a message shows them."""
    different = list(dict.fromkeys(map(str, items)))
    return ", ".join(different[:count]) + (", ..." if len(different) > count else "")


def on_columns(name: str, severity: str, what: str, columns: Sequence[str], remedy: str = "") -> list[Finding]:
    """Return the finding on some columns, which names the first of them; none if there are no columns."""
    return [Finding(name, severity, f"{what}: {first_of(columns, COLUMNS)}", remedy)] if columns else []


def not_accepted(findings: Sequence[Finding], accept: Sequence[str]) -> list[Finding]:
    """Return the errors that are not accepted."""
    accepted = set(accept) - FINAL
    return [finding for finding in findings if finding.severity == ERROR and finding.name not in accepted]


def settle(findings: Sequence[Finding], accept: Sequence[str]) -> None:
    """Print the warnings, each once in a process, and the errors that are accepted. UserError with all others.
    UsageError for an accepted name that no finding has."""
    if unknown := [name for name in accept if name not in NAMES]:
        raise UsageError(f"accept=[{unknown[0]}]: no such finding{nearest(unknown[0], NAMES)}")
    for finding in findings:
        if finding.severity != NOTE and (finding.severity == WARNING or finding.name in accept):
            if finding not in _PRINTED:
                say(f"warning: {finding.line()}")
            _PRINTED.add(finding)

    if wrong := not_accepted(findings, accept):
        raise UserError(reason(wrong))


def reason(wrong: Sequence[Finding]) -> str:
    """Return the line that says why a command stops, and how to continue."""
    lines = "; ".join(finding.line() for finding in wrong)
    names = ",".join(dict.fromkeys(finding.name for finding in wrong))
    return lines if FINAL & {finding.name for finding in wrong} else f"{lines}; or continue with accept=[{names}]"


_PRINTED: set[Finding] = set()  # the cells of a sweep read the same data
