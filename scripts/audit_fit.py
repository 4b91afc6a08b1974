"""`pubsel fit` audited as one program: what it claims, and what an adversary measures who made all other examples.

    python scripts/audit_fit.py --epsilon 1 4 --choice 0.05 0.5 --runs 4000 --to audit_fit.csv

A run is a choice, a training and a measurement on 60 examples with 24 features, 40 ms of one core
(`scripts/attacked_fit.py`). A row is one part at one setting: the lower bounds come from the second half of the runs.
"""

import argparse
import csv
import itertools
import tempfile
from pathlib import Path

import attacked_fit as whole
import measuring
import numpy as np
from attacked_fit import fitted

CLASSES, UNITS = 10, 60
PARTS = {
    "choice": "the choice alone",
    "weights": "the weights alone, for one choice",
    "table": "the table, held-out example",
    "all": "all that is released",
}


def audited(epsilon: float, delta: float, choice: float, images: int, runs: int, confidence: float) -> list[list[str]]:
    """Return a row for each part."""
    data, random = whole.worst_case(UNITS, CLASSES, images), np.random.default_rng()
    with tempfile.TemporaryDirectory() as folder:
        program = fitted(Path(folder), UNITS, epsilon, delta, choice)
        outcomes = list(whole.runs(program, data, runs, random))

    rows = []
    scores = whole.scored(outcomes)
    for part, claim in program.claims().items():
        bounds = whole.lower_bounds(scores[part], claim, confidence)
        numbers = (bounds.claimed, bounds.measured, bounds.any_program, bounds.planned_curve)
        counts = (bounds.runs, bounds.positives, bounds.negatives)
        values = [*(f"{value:.3f}" for value in numbers), *map(str, counts)]
        rows.append([f"{epsilon:g}", f"{choice:g}", str(images), part, *values])
        verdict = "  MORE THAN IS CLAIMED" if bounds.measured > bounds.claimed else ""
        result = f"claimed {bounds.claimed:.2f}, measured at least {bounds.measured:.2f}{verdict}"
        print(f"epsilon {epsilon:g}, share of the choice {choice:g}, {PARTS[part]}: {result}", flush=True)
    return rows


def main() -> None:
    """Audit every combination of settings, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--delta", type=float, default=1e-3)
    parser.add_argument("--choice", type=float, nargs="+", default=[0.05, 0.5], help="its share of epsilon")
    parser.add_argument("--images", type=int, default=1, help="of the target; if several, a person is protected")
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--confidence", type=float, default=0.95, help="of each bound")
    parser.add_argument(
        "--to", "--csv", type=measuring.target, help="file to write; without it, only what is on the screen"
    )
    given = parser.parse_args()

    head = (
        "epsilon choice images part claimed measured any_program planned_curve runs false_positives false_negatives"
    ).split()
    rows = [head]
    for epsilon, choice in itertools.product(given.epsilon, given.choice):
        rows += audited(epsilon, given.delta, choice, given.images, given.runs, given.confidence)
    if given.to is not None:
        with given.to.open() as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
