"""One line for each work of a benchmark, the worst first: `scripts/benchmark.py --summary results/benchmark.csv`.

The time of the fastest peer that computes the same, divided by ours; and the same of plain training, which clips
nothing and adds no noise.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# they do less than the work, are less exact, or are ours in another setting
NO_PEERS = ("plain", "two matrix products", "to 1e-3", "to 1e-2", "secure noise")


class Verdict(NamedTuple):
    """work; the fastest peer, its time and its memory over ours; plain's time over ours, if it was measured."""

    work: str
    peer: str
    time: float
    memory: float
    plain: float | None


def verdicts(rows: Iterable[dict[str, str]]) -> list[Verdict]:
    """Return the verdict on each work of a benchmark's rows, the worst first."""
    works: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        works.setdefault(row["work"], []).append(row)

    lines = []
    for work, candidates in works.items():
        peers = [row for row in candidates if not row["peer"].startswith(NO_PEERS)]
        if not peers:
            continue
        best = min(peers, key=lambda row: float(row["ratio"]))
        plain = [float(row["ratio"]) for row in candidates if row["peer"].startswith("plain")]
        memory = float(best["memory_ratio"])
        lines.append(Verdict(work, best["peer"], float(best["ratio"]), memory, min(plain, default=None)))
    return sorted(lines, key=lambda line: line.time)


def table(lines: list[Verdict]) -> str:
    """Return them as a table in Markdown."""
    rows = [
        "| work | fastest peer | its time / ours | its memory / ours | plain training / ours |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        plain = "" if line.plain is None else f"{line.plain:.2f}"
        rows.append(f"| {line.work} | {line.peer} | {line.time:.2f} | {line.memory:.2f} | {plain} |")
    return "\n".join(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a benchmark."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
