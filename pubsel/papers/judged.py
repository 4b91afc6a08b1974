"""Distances as predictors of utility (`judged` in conf/tables): the order in which a distance of `pubsel rank` puts
public sets, next to what training reaches with them. This file imports no torch."""

import statistics
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas

from pubsel.papers import join

NONE = "none"  # no public data: what a distance, or a row of the table, may have besides sets
ALWAYS_NONE = "(no public data)"  # the row of who never takes any
COLUMNS = (
    "private epsilon measure pairs spearman spearman_low spearman_high kendall kendall_low kendall_high "
    "nearest best regret regret_low regret_high nearest_other best_other regret_other regret_other_low "
    "regret_other_high nearest_sets best_sets regret_sets regret_sets_low regret_sets_high seconds"
).split()
MEANS = ("spearman", "kendall", "regret", "regret_other", "regret_sets")

Values = dict[str, list[float]]  # of each set: utilities in percent of its seeds, or distances of its initialisations


def judged_groups(table: join.Table) -> Iterator[tuple[str, str, float, int, Values]]:
    """Yield private set, model and epsilon of the rows of a table; m, the number of public examples that most have; and
    the utilities of those with as many, and of that without any."""
    protected = [cell for cell in table.cells if cell and cell.trained() and cell["epsilon"] is not None]
    for cells in join.groups_by(sorted(protected, key=join.TableCell.place), join.TableCell.place):
        m = statistics.mode([int(cell.settings["pair.m"]) for cell in cells if cell["public"] is not None] or [0])
        of_size = [cell for cell in cells if cell["public"] is None or int(cell.settings["pair.m"]) == m]
        utilities = {cell["public"] or NONE: [100 * record["utility"] for record in cell.records] for cell in of_size}
        yield *cells[0].place(), m, utilities


def judged(table: join.Table, ranks: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each group and each distance of `pubsel rank` that measured its candidates with as many
    examples. A distance that has an epsilon belongs to the group with the same one.

    spearman, kendall: of distance and utility over the sets. regret: points that the nearest set loses against the
    best, no public data included; regret_other: if the private set's own images are no candidate; regret_sets: if
    no public data is none either. Intervals: 95 % of resamples of the seeds and of the initialisations, not of the
    sets. seconds: of one initialisation, all candidates.
    """
    rows: list[dict[str, Any]] = []
    for private, model, epsilon, m, utilities in judged_groups(table) if table.spec.judged else []:
        about, compared = {"private": private, "epsilon": epsilon}, partial(_compared, private, utilities)
        for name in table.spec.judged:
            for record in ranks:
                planned = record["settings"]["distance"].get("epsilon", epsilon)
                measured = (record["distance"], record["private"], record["model"], record["m"])
                if measured == (name, private, model, m) and planned == epsilon:
                    seconds = record["seconds_private"] + record["seconds_candidate"] * len(record["values"])
                    rows.append({**about, "measure": name, **compared(record["values"]), "seconds": seconds})
        if NONE in utilities and any(row["private"] == private for row in rows):
            rows.append({**about, "measure": ALWAYS_NONE, **compared({NONE: [0.0]})})
    return join.as_frame(pandas.DataFrame(rows), COLUMNS)


def _compared(private: str, utilities: Values, distances: Values) -> dict[str, Any]:
    row = dict[str, Any]()
    shared = [name for name in distances if name in utilities and name != NONE]
    points = [(statistics.fmean(distances[name]), statistics.fmean(utilities[name])) for name in shared]
    row["pairs"], row["spearman"], row["kendall"] = join.rank_correlation(points)

    if row["spearman"] is not None:
        draws = _drawn(distances, shared, 0), _drawn(utilities, shared, 1)
        for what in ("spearman", "kendall"):
            row[f"{what}_low"], row[f"{what}_high"] = join.middle(join.correlation_of_rows(what, *draws))

    # what is lost by taking the nearest; if there are no images of the private set itself; if one of the others must be
    for suffix, left_out in (("", ()), ("_other", (private,)), ("_sets", (private, NONE))):
        candidates = [name for name in utilities if name not in left_out]
        choices = [name for name in distances if name in candidates]
        if not choices:
            continue
        means = {name: statistics.fmean(utilities[name]) for name in candidates}
        nearest = min(choices, key=lambda name: statistics.fmean(distances[name]))
        best = max(candidates, key=means.__getitem__)
        row |= {f"nearest{suffix}": nearest, f"best{suffix}": best, f"regret{suffix}": means[best] - means[nearest]}

        of_distance, of_utility = _drawn(distances, choices, 0), _drawn(utilities, candidates, 1)
        places = np.array([candidates.index(name) for name in choices])[of_distance.argmin(1)]
        lost = of_utility.max(1) - of_utility[np.arange(join.RESAMPLES), places]
        row[f"regret{suffix}_low"], row[f"regret{suffix}_high"] = join.middle(lost)
    return row


def _drawn(values: Values, names: list[str], seed: int) -> join.Array:
    return _resampled(tuple(tuple(values[name]) for name in names), seed)


@lru_cache(maxsize=32)  # all distances are compared with the same utilities
def _resampled(values: tuple[tuple[float, ...], ...], seed: int) -> join.Array:
    return join.resampled(values, np.random.RandomState(seed))


def summary_by_distance(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each distance and epsilon: means over the private sets, how many these are, and the largest
    regret_other."""
    grouped = frame.groupby(["measure", "epsilon"], sort=False)
    means = grouped[[*MEANS, "seconds"]].agg(lambda part: part.mean())  # not the mean of groupby, which sums otherwise
    means = means.assign(sets=grouped.size(), regret_most=grouped["regret_other"].max()).reset_index()
    places = {measure: place for place, measure in enumerate(dict.fromkeys(frame["measure"]))}
    means = means.sort_values(["epsilon", "measure"], key=lambda column: column.replace(places))
    return join.as_frame(means, ["measure", "epsilon", "sets", *MEANS, "regret_most", "seconds"])
