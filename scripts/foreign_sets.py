"""What a foreign public set covers of private images, and what it gains or costs: the source of the threshold of 60 %.

It reads the records of this sweep, and loads the same data again:

    pubsel run -m +experiment=recipes label=choice algorithm=whitened_head algorithm.public_labels=none pair.m=500 \
        epsilon=0.1 seed=0,1 pair.private=SETS pair.public=SETS,null
    python scripts/foreign_sets.py SETS

with SETS such as flowers5,kagchest,ham10000. Prints a table in Markdown: of each private set in a row and each public
one in a column the share that is covered, and what whitening by it gains over no public data, in points, on held-out
private images. Nothing of it is private.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch

from pubsel.cell import load_task
from pubsel.privacy.people import UNIT
from pubsel.records import read_records
from pubsel.rules import Inputs, canonical
from pubsel.selection import coverage
from pubsel.settings.compose import composed
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check

MOST = 4000  # private examples of which the share is counted
EPSILON = 0.1
WORDS = ("+experiment=recipes", "algorithm=whitened_head", "pair.m=500", "download=false", "threads=1")


def covered(private: str, public: str) -> float:
    """Return the share of the private examples that a public set covers."""
    with composed("run", [*WORDS, f"pair.private={private}", f"pair.public={public}"]) as values:
        task = load_task(Inputs.of(canonical(check(RunConfig, values))), torch.device("cpu"))
    assert task.public is not None
    x = task.private.x[:MOST]
    places = coverage.regions(task.public.x, public)
    return coverage.score(places, coverage.counts(places, x, [UNIT] * len(x)), len(x)) / UNIT / len(x)


def main(sets: list[str], results: str = "results") -> None:
    """Print the table."""
    reached = defaultdict(list)
    for record in read_records(Path(results)):
        if record["label"] == "choice":
            reached[record["private"], record["public"], record["epsilon"]].append(record["selection"]["validation"])
    mean = {key: 100 * statistics.mean(values) for key, values in reached.items()}

    print("| private \\ public |", " | ".join(sets), "|")
    print("|---" * (len(sets) + 1) + "|")
    for private in sets:
        cells = []
        for public in sets:
            gain = mean[private, public, EPSILON] - mean[private, None, EPSILON]
            cells.append(f"{100 * covered(private, public):.0f} %: {gain:+.1f}")
        print(f"| {private} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","))
