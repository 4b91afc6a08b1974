"""Tables of attacks on GSD (`pubsel attack gsd_white_box`, `gsd_black_box`) next to the paper's figures, from records.
What `pubsel make` runs for them is in conf/work. This file imports no torch."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from pubsel.papers.join import Work, paper_rows, read_work
from pubsel.papers.measured import read_kind
from pubsel.records import GsdAttack
from pubsel.settings import named
from pubsel.settings.keys import Attack

TABLES = {"gsd_table8": Attack.gsd_white_box, "gsd_table9": Attack.gsd_black_box}
KEYS = ("attack", "gsd_values", "features", "known_members")  # of a row of the paper's tables
SUCCESS = (
    "Success: percent of the examples asked that the attacker gets right, as many members as others, so 50 is "
    "guessing; [low, high]: its 95 % interval (Clopper and Pearson)."
)
KNOWN_BUT_ONE = (
    "known_but_one: the attacker knows all members but one, and picks the last of two examples by the distance, "
    "rounded to so many digits."
)


class Attacked(NamedTuple):
    """A table of attacks: a row for each kind of features and number of known members."""

    name: str
    title: str
    frame: pandas.DataFrame  # the paper's figures alone if there is no record
    notes: list[str]  # what a reader has to know of the numbers
    records: list[dict[str, Any]]


def from_records(name: str, results: Path) -> Attacked:
    """Return the table `name` (of TABLES) from the records of its attack in `results`."""
    records = read_kind(results, "attacks", GsdAttack, f"{TABLES[name].name}-*")
    title = read_work(Work, named("work")[name], "gsd.yaml").title
    file = f"{name}.csv"
    rows = [row for record in records for row in record["rows"]]
    if rows:
        frame = beside_paper(rows, file)
    else:
        alone = pandas.DataFrame(paper_rows(file)).rename(columns={"success_rate": "paper_success_rate"})
        frame = alone.astype(dict.fromkeys(("private_examples", "known_members"), int)).dropna(axis=1, how="all")

    notes = [SUCCESS] if rows else []
    notes += [KNOWN_BUT_ONE] if (frame["attack"] == "known_but_one").any() else []
    of_paper = {" with ".join(row[key] for key in ("private", "model") if key in row) for row in paper_rows(file)}
    notes.append(f"Paper: {', '.join(sorted(of_paper))}.")
    return Attacked(name, title, frame, notes + sorted({record["privacy"] for record in records}), records)


def beside_paper(rows: list[dict[str, Any]], file: str) -> pandas.DataFrame:
    """Return rows in percent, next to the paper's figure for the same attack, which is for CIFAR-10 and ResNet20."""
    paper = {tuple(row.get(key) for key in KEYS): row["success_rate"] for row in paper_rows(file)}
    lines = []
    for row in rows:
        low, high = row.get("success_interval") or (math.nan, math.nan)
        line = {key: row[key] for key in ("private", "model", *KEYS[:3], "private_examples", "known_members", "trials")}
        line |= {"asked": row["members"] + row.get("others", 0), "success_rate": 100 * row["success"]}
        line |= {"success_rate_low": 100 * low, "success_rate_high": 100 * high}
        line |= {"auc": row.get("auc"), "paper_success_rate": paper.get(tuple(row[key] for key in KEYS))}
        lines.append(line)
    return pandas.DataFrame(lines).dropna(axis=1, how="all")
