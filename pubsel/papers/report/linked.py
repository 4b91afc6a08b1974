"""Tables as the page's template takes them, whose numbers lead to the runs that they come from."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pandas

from pubsel.papers import typeset
from pubsel.papers.join import TableCell, json_text
from pubsel.settings.command_line import command

# numbers that come from runs
LINKED = "utility difference seeds distance spearman kendall pairs test_utility measured_utility".split()

NAME = "NAME"  # in a command, of the run itself
GROUPS = ("settings", "privacy", "selection", "command", "identity")


@dataclass
class Shown:
    """A table as the template takes it: texts, and for each row the key of the runs that it comes from."""

    columns: list[typeset.Column]
    values: dict[str, list[Any]]  # key of a column: what it is sorted by
    widths: dict[str, int]  # of the spread after a value, so that the values of a column are aligned
    constant: list[str]
    behind: list[str | None]
    stops: list[str | None]  # for each row the column whose link the Tab key stops at: all links lead to one place


@dataclass
class Runs:
    """Runs that the numbers come from, as the page's script takes them.

    `pool` has each value once. Settings, the privacy statement and what settings are selected by have a key for each of
    their values, a command one for each of its words and an identity one for each part between hyphens, since many runs
    share most of them: GROUP.KEY, or GROUP.NUMBER of a list.
    """

    keys: dict[str, None] = field(default_factory=dict)  # in order
    pool: list[Any] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)  # for each run the places of its values in `pool`
    behind: dict[str, list[int]] = field(default_factory=dict)  # key of a number: its runs
    _places: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, cells: list[TableCell]) -> str:
        """Record that the number `key` comes from the runs of `cells`."""
        self.behind[key] = [self._run(record) for cell in cells for record in cell.records]
        return key

    def _run(self, record: dict[str, Any]) -> int:
        if record["identity"] not in self._numbers:
            self._numbers[record["identity"]] = len(self.runs)
            # the page writes the identity into the command: it is the only word of it that no other run has
            words = command(record).replace(record["identity"], NAME).split(" ")
            parts = {"command": words, "identity": record["identity"].split("-")}
            values = {**record, **{group: dict(enumerate(words)) for group, words in parts.items()}}
            for group in GROUPS:
                inner = values.pop(group, None) or {}
                values |= {f"{group}.{key}": value for key, value in inner.items()}
            self.keys |= dict.fromkeys(values)
            places = []
            for value in map(values.get, self.keys):
                text = json_text(value)
                if text not in self._places:
                    self._places[text] = len(self.pool)
                    self.pool.append(value)
                places.append(self._places[text])
            self.runs.append(places)
        return self._numbers[record["identity"]]

    def json(self) -> str:
        """Return JSON for a <script>: no text in it can end the script or begin a comment. Of each run it has only the
        places that differ from those of the run before it."""
        changes = [
            {i: place for i, place in enumerate(run) if i >= len(before) or place != before[i]}
            for before, run in pairwise([[], *self.runs])
        ]
        values = {"keys": list(self.keys), "pool": self.pool, "runs": changes, "behind": self.behind}
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def shown_of(frame: pandas.DataFrame, behind: list[str | None]) -> Shown:
    """Return a frame for the template. behind: for each row the key of its runs."""
    columns, constant = typeset.columns(frame)
    fields = [column.key for column in columns]
    values = {key: list(frame[key].astype(object).where(frame[key].notna(), None)) for key in fields}
    return shown(columns, values, behind, constant)


def shown(
    columns: list[typeset.Column], values: dict[str, list[Any]], behind: list[str | None], constant: list[str]
) -> Shown:
    """Return columns for the template. values: for each the values that it is sorted by; constant: what is the same in
    each row."""
    lengths = {column.key: [len(spread) for _, spread in column.entries] for column in columns}
    widths = {key: max(of_spreads, default=0) for key, of_spreads in lengths.items()}

    # the first number of a row that is there
    stops = [
        next((c.key for c in columns if c.key in LINKED and c.entries[row][0] != typeset.MISSING), None)
        for row in range(len(behind))
    ]
    return Shown(columns, values, widths, constant, behind, stops)
