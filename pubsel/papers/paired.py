"""Rows of a table next to its reference row (`reference` in conf/tables): differences paired by seed, in how many
cells the reference is first, and the time of training. Rows are compared within a group: the same private data, model
(features) and epsilon. This file imports no torch."""

import math
import statistics
from collections import Counter
from typing import NamedTuple

import pandas
from scipy import stats

from pubsel.papers.join import Spec, Table, TableCell, as_frame, differing, groups_by, settings_text, value_of

OWN = "own"  # in `reference`: public data that are a part of the private set
SHORTEST = 0.05  # seconds; records are rounded to 0.1
LEVEL = 0.95
COLUMNS = (
    "private model epsilon algorithm public label setting difference difference_low difference_high common_seeds"
).split()


class Row(NamedTuple):
    """A row of a table that has records."""

    cell: TableCell
    setting: str | None  # what tells it apart from rows of the same algorithm and label
    method: str  # what it is called next to others


class Group(NamedTuple):
    """Rows of one private set, model and epsilon."""

    private: str
    model: str
    epsilon: float
    references: list[Row]  # more than one if `reference` says too little
    others: list[Row]


class Standing(NamedTuple):
    """Place of the reference among rows."""

    group: Group
    best: Row  # of the others
    behind: float  # points that the reference is below it, on average over the seeds of each; negative: above
    near: bool  # whether it is first, or no more than its standard deviation over seeds below


def groups_of(table: Table) -> list[Group]:
    """Return the rows that have a utility, by private set, model and epsilon; none if the table has no reference."""

    rows = _rows(table) if table.spec.reference else []
    rows.sort(key=lambda row: row.cell.place())
    groups = []
    for together in groups_by(rows, lambda row: row.cell.place()):
        fitting = [row for row in together if is_reference(row.cell, table.spec)]
        others = [row for row in together if not is_reference(row.cell, table.spec)]
        groups.append(Group(*together[0].cell.place(), fitting, others))
    return groups


def is_reference(cell: TableCell, spec: Spec) -> bool:
    """Return whether a cell has the values of `reference`; public data `own` are those of the private set."""
    wanted = dict(spec.reference)
    if wanted.get("public") == OWN:
        wanted["public"] = cell["private"]
    return all(value_of(cell.records[0], key) == value for key, value in wanted.items())


def paired_difference(row: TableCell, reference: TableCell) -> tuple[int, float | None, float | None, float | None]:
    """Return the number of seeds that both have, the mean over them of the difference of utility (row minus reference,
    points), and its 95 % t interval: None without a common seed, and no interval with a single one. Of a row of which
    nothing is drawn, `pair.seed` is 0 in all records, so that only the seeds of runs are compared, each by its mean
    over draws of the data."""
    frames = [pandas.DataFrame([(r["seed"], 100 * r["utility"]) for r in cell.records]) for cell in (row, reference)]
    ours, theirs = (frame.groupby(0)[1].mean().to_dict() for frame in frames)
    points = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not points:
        return 0, None, None, None

    mean = statistics.fmean(points)
    if len(points) == 1:
        return 1, mean, None, None
    margin = float(stats.t.ppf((1 + LEVEL) / 2, len(points) - 1) * stats.sem(points))
    return len(points), mean, mean - margin, mean + margin


def paired_differences(table: Table) -> pandas.DataFrame:
    """Return a row for each row of the table whose group has a reference: `paired_difference`, in points."""
    rows = []
    for group in groups_of(table):
        if len(group.references) != 1:
            continue

        for other in group.others:
            same = [other.cell[key] for key in ("algorithm", "public", "label")]
            about = [group.private, group.model, group.epsilon, *same, other.setting]
            common, *points = paired_difference(other.cell, group.references[0].cell)
            rows.append([*about, *points, common])
    return as_frame(pandas.DataFrame(rows, columns=COLUMNS), COLUMNS)


def standings(table: Table, without_choice: bool) -> list[Standing]:
    """Return the place of the reference in each group that has one and other rows. without_choice: only among
    rows whose settings nobody chose: their label is not among `chosen`."""
    places = []
    for group in groups_of(table):
        others = [row for row in group.others if not (without_choice and row.cell["label"] in table.spec.chosen)]
        if len(group.references) == 1 and others:
            best = max(others, key=lambda row: row.cell.utility()[0])
            mean, std = group.references[0].cell.utility()
            behind = best.cell.utility()[0] - mean
            places.append(Standing(group, best, behind, behind <= max(0.0, std or 0.0)))
    return places


def paired_summary(table: Table) -> list[str]:
    """Return in how many groups the reference is first or nearly so, for readers; nothing without a reference,
    and only if there are rows to compare with it."""
    every = groups_of(table)
    if not every:
        return []

    lines = []
    for without_choice, among in ((True, "rows whose settings nobody chose"), (False, "all rows")):
        places = standings(table, without_choice)
        if not places:
            continue
        first, near = sum(standing.behind <= 0 for standing in places), sum(standing.near for standing in places)
        lines.append(
            f"The reference ({reference_name(table.spec)}) among {among}: first in {first} of {len(places)} cells of "
            f"private data, model and epsilon; first or within one standard deviation, its over seeds, in {near}."
        )

    without = [group for group in every if len(group.references) != 1]
    if without:
        lines.append(f"Not counted, since none or several rows fit the reference: {'; '.join(map(_place, without))}.")
    return lines


def exceptions(table: Table) -> list[str]:
    """Return a line for each group in which the reference is more than its standard deviation below the first."""
    lines = []
    for standing in [standing for standing in standings(table, without_choice=False) if not standing.near]:
        name, _, apart = standing.best.method.partition("\n")
        shown = f"{name} ({apart})" if apart else name
        lines.append(f"{_place(standing.group)}: {shown} is {standing.behind:.2f} points above.")
    return lines


def _place(group: Group) -> str:
    return f"{group.private}, {group.model}, ε {'∞' if group.epsilon == math.inf else f'{group.epsilon:g}'}"


def reference_name(spec: Spec) -> str:
    """Return what the reference is, for readers: "algorithm gep, public own"."""
    return ", ".join(f"{key} {'none' if value is None else value}" for key, value in spec.reference.items())


# What rows are called


def _rows(table: Table) -> list[Row]:
    """Return the rows that have a utility, with names that differ within each group."""
    settings = [None if pandas.isna(setting) else str(setting) for setting in table.frame["setting"]]
    pairs = [(cell, text) for cell, text in zip(table.cells, settings, strict=True) if cell and cell.trained()]

    # the algorithm; its public data, if it has rows with other ones; its label, if the reference has another
    kinds = Counter(algorithm for algorithm, _ in {(cell["algorithm"], _kind(cell)) for cell, _ in pairs})
    names = []
    for cell, _ in pairs:
        kind = _kind(cell) if kinds[cell["algorithm"]] > 1 else OWN
        label = "" if cell["label"] == table.spec.reference.get("label") else cell["label"]
        names.append(", ".join(filter(None, [cell["algorithm"], "" if kind == OWN else kind, label])))

    # rows with one name in one group need their settings to be told apart
    telling: dict[str, set[str]] = {name: set() for name in names}
    for together in groups_by(zip(pairs, names, strict=True), lambda entry: (*entry[0][0].place(), entry[1])):
        telling[together[0][1]].update(differing([cell for (cell, _), _ in together], ("pair.public",)))

    # in the other groups too, so that a method has one name in all of them
    rows = []
    for (cell, text), name in zip(pairs, names, strict=True):
        apart = settings_text(cell, sorted(telling[name]))
        rows.append(Row(cell, text, f"{name}\n{apart}" if apart else name))
    return rows


def _kind(cell: TableCell) -> str:
    public = cell["public"]
    return "no public data" if public is None else OWN if public == cell["private"] else str(public)


# Time


def timed(table: Table, epsilon: float) -> pandas.DataFrame:
    """Return a row for each row of the table at this epsilon: its utility in percent, and its seconds of training, the
    median over seeds. Records with no or 0 seconds count as SHORTEST."""
    rows = []
    for group in groups_of(table):
        for row in [*group.references, *group.others] if group.epsilon == epsilon else []:
            mean, std = row.cell.utility()
            seconds = [record.get("seconds") or SHORTEST for record in row.cell.records]
            about = {"private": group.private, "model": group.model, "epsilon": epsilon, "method": row.method}
            about |= {"algorithm": row.cell["algorithm"]}
            about |= {"seconds": statistics.median(seconds), "utility": mean, "std": std, "seeds": len(seconds)}
            about["chosen"] = row.cell["label"] in table.spec.chosen
            rows.append(about | {"metric": row.cell.records[0].get("metric")})
    return pandas.DataFrame(rows)


def machines(table: Table) -> str:
    """Return on what the table's records took their time."""
    records = table.records()
    on = {f"{record.get('hardware')}; {record.get('device')}, threads: {record.get('threads')}" for record in records}
    return " | ".join(sorted(on))
