"""Which distance orders public sets as training does? A CSV of each distance's rank correlation with the utility of
GEP, and of what it costs; on the screen the orders themselves.

    python scripts/compare_distances.py --results results

Utilities: the records of the table distances_ours. Distances: the records of `pubsel rank` under RESULTS/ranks, and
those kept under RESULTS/records/ranks. Intervals: 95 % of resamples of the seeds of the utility and of the
initialisations of the distance, not of the public sets, of which there are few.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import pandas

from pubsel import records
from pubsel.messages import UserError
from pubsel.papers import join, measured, typeset

TABLE = "distances_ours"


def utilities(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return {private set: {public set: utility of each seed, in percent}}; UserError where settings are not the
    same."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in join.table_cells(TABLE, records.read_records(folder)):
        if cell["public"] is None:  # DP-SGD, next to which GEP stands
            continue
        sets = found.setdefault(cell["private"], {})
        if cell["public"] in sets:
            raise UserError(f"{TABLE}: several settings of {cell['private']} with {cell['public']}: keep one")
        sets[cell["public"]] = [100 * record["utility"] for record in cell.records]
    return found


def title(record: dict[str, Any]) -> str:
    """Return what tells a distance from the others: its name, and what was asked of it."""
    given = record["settings"]["distance"]
    asked = [
        "exact" if given.get("exact") else None,
        f"epsilon {given['epsilon']:g}" if given.get("epsilon") else None,
    ]
    return " ".join([record["distance"], *(text for text in asked if text)])


def compare(folder: Path) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Return a row for each private set and distance; and one for each public set, with utility and mean distances."""
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    models = join.spec(TABLE).records["model"]
    ranks = [rank for rank in measured.read_measured(folder) if rank["model"] in models]
    for private, sets in sorted(utilities(folder).items()):
        best = sorted(sets, key=lambda name: -statistics.fmean(sets[name]))
        means: dict[str, dict[str, Any]] = {}
        for name in best:
            spread = statistics.stdev(sets[name]) if len(sets[name]) > 1 else None
            means[name] = {"private": private, "public": name, "utility": statistics.fmean(sets[name])}
            means[name] |= {"utility_std": spread, "seeds": len(sets[name])}
        for record in sorted((r for r in ranks if r["private"] == private), key=lambda r: (title(r), r["model"])):
            values = record["values"]
            shared = [name for name in best if name in values]
            pairs = [(statistics.fmean(values[name]), means[name]["utility"]) for name in shared]
            number, spearman, kendall = join.rank_correlation(pairs)
            low, high = join.rank_interval([values[name] for name in shared], [sets[name] for name in shared])
            nearest = min(shared, key=lambda name: statistics.fmean(values[name]), default=None)
            lost = means[best[0]]["utility"] - means[nearest]["utility"] if nearest else None
            row = {"private": private, "distance": title(record), "model": record["model"], "m": record["m"]}
            row |= {"initialisations": len(next(iter(values.values()))), "pairs": number, "spearman": spearman}
            row |= {"spearman_low": low, "spearman_high": high, "kendall": kendall}
            row |= {"nearest": nearest, "best": best[0], "lost": lost}
            rows.append(row | {key: record[key] for key in ("seconds_private", "seconds_candidate")})
            for name in shared:
                means[name][f"{title(record)} ({record['model']})"] = statistics.fmean(values[name])
        points += means.values()
    return pandas.DataFrame(rows), pandas.DataFrame(points)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with the records")
    folder = parser.parse_args().results
    try:
        rows, points = compare(folder)
        for frame, name in ((rows, f"{TABLE}_compared.csv"), (points, f"{TABLE}_values.csv")):
            records.write_table(frame, folder / "tables" / name)
    except UserError as error:
        raise SystemExit(f"compare_distances: {error}") from None
    for private, part in points.groupby("private", sort=False):
        print(typeset.text(part.dropna(axis=1, how="all"), f"{private}, best utility first"), end="\n\n")
    print(typeset.text(rows, "Rank correlation with the utility (-1: the nearer, the better)"))


if __name__ == "__main__":
    main()
