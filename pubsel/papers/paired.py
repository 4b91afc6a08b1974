"""Rows of a table next to its reference row (`reference` in conf/tables): differences paired by seed, in how many
cells the reference is first, and the time of training. Rows are compared within a group: the same private data, model
(features) and epsilon. This file imports no torch."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas
from scipy import stats

from pubsel.papers.join import Table, TableCell, as_frame, differing, groups_by, settings_text, value_of

OWN = "own"  # in `reference`: public data that are a part of the private set
SHORTEST = 0.05  # seconds; records are rounded to 0.1
ERROR = 0.05  # of an interval, and of all comparisons together
COLUMNS = (
    "private model epsilon algorithm public label setting difference difference_low difference_high common_seeds p "
    "reference_is"
).split()
GAINS = "comparison epsilon cells gain gain_least gain_most first near ahead behind".split()


class Row(NamedTuple):
    """A row of a table that has records."""

    cell: TableCell
    setting: str | None  # what tells it apart from rows of the same algorithm and label
    method: str  # what it is called next to others


class Group(NamedTuple):
    """Rows of one private set, model and epsilon."""

    gain: str  # the key of `gains` that the rows are compared for; "": with `reference`
    private: str
    model: str
    epsilon: float
    references: list[Row]  # more than one if `reference` says too little
    others: list[Row]


class Difference(NamedTuple):
    """A paired difference of utility, in points."""

    seeds: int  # that both have
    mean: float | None
    low: float | None
    high: float | None
    p: float | None


class ComparedRow(NamedTuple):
    """A row next to the reference of its group."""

    group: Group
    row: Row
    difference: Difference
    reference_is: str  # "ahead" of the row, or "behind" it, beyond Holm's correction; or ""


class Standing(NamedTuple):
    """Place of the reference among rows."""

    group: Group
    best: ComparedRow  # with the best of the others
    behind: float  # points that the reference is below it, on average over the seeds of each; negative: above
    near: bool  # whether it is first, or no more than its standard deviation over seeds below
    ahead: bool  # whether it is ahead of every row, beyond Holm's correction
    beaten: bool  # whether it is behind one or more, beyond Holm's correction


def groups_of(table: Table, gain: str = "") -> list[Group]:
    """Return the rows that have a utility, by private set, model and epsilon; none if the table has no reference. A row
    with epsilon 0, which reads no private example, is in the groups of all epsilons. gain: a key of `gains`, whose `of`
    is the reference, and whose `over` names the algorithms of the others."""
    reference, over = table.spec.reference, None
    if gain:
        reference, over = (table.spec.gains[gain][key] for key in ("of", "over"))

    groups = []
    rows = sorted(_rows(table) if reference else [], key=lambda row: row.cell.place()[:2])
    for together in groups_by(rows, lambda row: row.cell.place()[:2]):
        epsilons = {row.cell.epsilon() for row in together}
        for epsilon in sorted(epsilons - {0}) or epsilons:
            here = [(row, is_reference(row.cell, reference)) for row in together if row.cell.epsilon() in (0, epsilon)]
            fitting = [row for row, fits in here if fits]
            others = [row for row, fits in here if not fits and (over is None or row.cell["algorithm"] in over)]
            groups.append(Group(gain, *together[0].cell.place()[:2], epsilon, fitting, others))
    return groups


def is_reference(cell: TableCell, reference: dict[str, Any]) -> bool:
    """Return whether a cell has the values of a reference; public data `own` are those of the private set."""
    wanted = dict(reference)
    if wanted.get("public") == OWN:
        wanted["public"] = cell["private"]
    return all(value_of(cell.records[0], key) == value for key, value in wanted.items())


def paired_difference(row: TableCell, reference: TableCell) -> Difference:
    """Return the mean over the seeds that both have of the difference of utility (row minus reference, points), its
    95 % t interval, and p of the two-sided paired t-test: None without a common seed, and no interval and p with a
    single one. Of a row of which nothing is drawn, `pair.seed` is 0 in all records, so that only the seeds of runs are
    compared, each by its mean over draws of the data."""
    ours, theirs = (
        {
            of_seed[0]["seed"]: 100 * statistics.fmean(record["utility"] for record in of_seed)
            for of_seed in groups_by(cell.records, lambda record: record["seed"])
        }
        for cell in (row, reference)
    )
    # rounded: what floats add to equal differences is no spread
    points = [round(ours[seed] - theirs[seed], 9) for seed in sorted(ours.keys() & theirs.keys())]
    if len(points) < 2:
        return Difference(len(points), points[0] if points else None, None, None, None)

    mean, error = statistics.fmean(points), statistics.stdev(points) / math.sqrt(len(points))
    margin = float(stats.t.ppf(1 - ERROR / 2, len(points) - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, len(points) - 1)) if error else float(mean == 0)
    return Difference(len(points), mean, mean - margin, mean + margin, p)


def comparisons(groups: list[Group]) -> list[ComparedRow]:
    """Return every other row of each group that has one reference next to it; Holm's correction is over all that have a
    p."""
    pairs = [(group, row) for group in groups if len(group.references) == 1 for row in group.others]
    differences = [paired_difference(row.cell, group.references[0].cell) for group, row in pairs]
    compared = []
    beyond = holm([difference.p for difference in differences])
    for (group, row), difference, is_beyond in zip(pairs, differences, beyond, strict=True):
        lead = "ahead" if (difference.mean or 0) < 0 else "behind"
        compared.append(ComparedRow(group, row, difference, lead if is_beyond else ""))
    return compared


def holm(values: list[float | None]) -> list[bool]:
    """Return which of these p are significant by Holm's step-down correction over those that are not None."""
    beyond = [False] * len(values)
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    for rank, (p, place) in enumerate(known):
        if p > ERROR / (len(known) - rank):
            break
        beyond[place] = True
    return beyond


def paired_differences(table: Table) -> pandas.DataFrame:
    """Return a row for each row of the table whose group has a reference: `paired_difference`, in points, and
    "ahead" or "behind" if the reference leads or trails beyond Holm's correction over all rows returned."""
    rows = []
    for group, row, difference, reference_is in comparisons(groups_of(table)):
        same = [row.cell[key] for key in ("algorithm", "public", "label")]
        common, mean, low, high, p = difference
        about = [group.private, group.model, group.epsilon, *same, row.setting, mean, low, high, common]
        rows.append([*about, None if p is None else float(f"{p:.3g}"), reference_is or None])
    return as_frame(pandas.DataFrame(rows, columns=COLUMNS), COLUMNS)


def standings(compared: list[ComparedRow], without: Sequence[str] = ()) -> list[Standing]:
    """Return the place of the reference in each group, among the rows that have none of the labels `without`."""
    places = []
    among = [comparison for comparison in compared if comparison.row.cell["label"] not in without]
    for rivals in groups_by(among, lambda comparison: comparison.group[:4]):
        best = max(rivals, key=lambda rival: rival.row.cell.utility()[0])
        mean, std = best.group.references[0].cell.utility()
        behind = best.row.cell.utility()[0] - mean
        verdicts = [rival.reference_is for rival in rivals]
        every = all(verdict == "ahead" for verdict in verdicts)
        places.append(Standing(best.group, best, behind, behind <= max(0.0, std or 0.0), every, "behind" in verdicts))
    return places


def paired_summary(table: Table) -> list[str]:
    """Return in how many groups the reference is first or nearly so, and beyond Holm's correction, for readers; nothing
    without a reference, and only if there are rows to compare with it."""
    groups = groups_of(table)
    compared = comparisons(groups)
    lines = []
    for without, among in ((table.spec.chosen, "rows whose settings nobody chose"), ((), "all rows")):
        places = standings(compared, without)
        if not places:
            continue
        first, near = sum(standing.behind <= 0 for standing in places), sum(standing.near for standing in places)
        ahead, beaten = sum(standing.ahead for standing in places), sum(standing.beaten for standing in places)
        lines.append(
            f"The reference ({reference_name(table.spec.reference)}) among {among}: first in {first} of {len(places)} "
            "cells of private data, model and epsilon; first or within one standard deviation, its over seeds, in "
            f"{near}; beyond Holm's correction ahead of every other row in {ahead}, behind one or more in {beaten}."
        )
    return [*lines, *corrected(compared), *not_counted(groups)]


def corrected(compared: list[ComparedRow]) -> list[str]:
    """Return a line on all comparisons that have a p, if there are any."""
    count = sum(comparison.difference.p is not None for comparison in compared)
    verdicts = Counter(comparison.reference_is for comparison in compared)
    about = (
        f"Holm's correction, {100 * ERROR:g} % over {count} comparison{'s'[: count != 1]} of two or more common seeds"
    )
    return [f"{about}: ahead in {verdicts['ahead']}, behind in {verdicts['behind']}."] if count else []


def not_counted(groups: list[Group]) -> list[str]:
    """Return a line on the groups without a reference, or with several, if there are any."""
    without = [group for group in groups if len(group.references) != 1 and group.others]
    places = "; ".join(map(_place, without))
    return [f"Not counted, since none or several rows fit the reference: {places}."] if without else []


def exceptions(table: Table) -> list[str]:
    """Return a line for each group in which the reference is more than its standard deviation below the first."""
    lines = []
    for standing in [standing for standing in standings(comparisons(groups_of(table))) if not standing.near]:
        name, _, apart = standing.best.row.method.partition("\n")
        shown = f"{name} ({apart})" if apart else name
        beyond = ", beyond Holm's correction" if standing.best.reference_is == "behind" else ""
        lines.append(f"{_place(standing.group)}: {shown} is {standing.behind:.2f} points above{beyond}.")
    return lines


def _place(group: Group) -> str:
    return f"{group.private}, {group.model}, ε {'∞' if group.epsilon == math.inf else f'{group.epsilon:g}'}"


def reference_name(reference: dict[str, Any]) -> str:
    """Return what a reference is, for readers: "algorithm gep, public own"."""
    return ", ".join(f"{key} {'none' if value is None else value}" for key, value in reference.items())


# Gains


def gains(table: Table) -> tuple[pandas.DataFrame, list[str]]:
    """Return a row for each entry of `gains` and epsilon, and notes on what they are.

    cells: how many of private data and model are compared. gain: the mean utility of `of` minus that of the best row
    of `over`, in points, the median over the cells; gain_least and gain_most, of one cell. first and near: in how many
    cells `of` is first, and first or no more than its standard deviation over seeds below. ahead and behind: of that
    best row, beyond Holm's correction over the comparisons of all entries with every row of `over`: which one is the
    best is seen in the results.
    """
    groups = [group for gain in table.spec.gains for group in groups_of(table, gain)]
    compared = comparisons(groups)
    rows, notes = [], []
    for of_gain in groups_by(standings(compared), lambda standing: standing.group.gain):
        name = of_gain[0].group.gain
        for epsilon in sorted({standing.group.epsilon for standing in of_gain}):
            places = [standing for standing in of_gain if standing.group.epsilon == epsilon]
            points = [-standing.behind for standing in places]
            spread = [statistics.median(points), min(points), max(points)]
            first, near = sum(point >= 0 for point in points), sum(standing.near for standing in places)
            verdicts = [standing.best.reference_is for standing in places]
            counts = [first, near, verdicts.count("ahead"), verdicts.count("behind")]
            rows.append([name, epsilon, len(points), *spread, *counts])

        of, over = (table.spec.gains[name][key] for key in ("of", "over"))
        without = not_counted([group for group in groups if group.gain == name])
        notes.append(" ".join([f"{name}: of {reference_name(of)}; over {', '.join(over)}.", *without]))
    return as_frame(pandas.DataFrame(rows, columns=GAINS), GAINS), [*notes, *corrected(compared)]


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
        if label and table.spec.chooses(label) and table.spec.select["by"] == "test":
            label += " (oracle)"
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
