"""The calibration of `whitened_head` on the sets of `recipes`: with and without its division by the noise.

    PUBSEL_DATA=... python scripts/calibration.py --to results/calibration.csv

The untuned cells of `recipes` on features of MobileNetV2 and on the pixels of the digits, without public labels: with
public examples that have none, or without public examples. A model with public labels divides by nothing. Means over
seeds, in percent, and standard deviations: of `accuracy`; of the expected calibration error, `ece`, and that of logits
that `WhitenedHead.finish` does not divide, `ece_undivided`; and of what the division lowers it by, `lowered`. Nothing
of it is private.
"""

import argparse
import itertools
from typing import Any

import measuring
import torch
import yaml
from rare_classes import calibration_error, outputs, settings, summary

from pubsel.cell import Cell, load_task
from pubsel.rules import Inputs
from pubsel.settings import CONF
from pubsel.settings.keys import RunConfig

SETS = "flowers5", "kagchest", "ham10000", "cifar10", "tiny_imagenet", "fashion_mnist", "mnist", "digits"
PUBLIC = {"no labels": "algorithm.public_labels=none label=unlabelled", "none": "pair.public=null"}
EPSILONS, SEEDS = (0.1, 0.3, 1, 2), 5
WORDS = "+experiment=recipes device=cpu threads=1 download=false"


def settings_of(private: str, public: str, epsilon: float, seed: int) -> RunConfig:
    """Return the settings of a cell of `recipes`."""
    part = yaml.safe_load((CONF / "tables" / "recipes.yaml").read_text())["parts"][private]
    words = f"{WORDS} pair.private={part['data']} pair.m={part['m']} model={part['model']} {PUBLIC[public]}"
    return settings(f"{words} epsilon={epsilon} seed={seed}")


def measured(private: str, public: str, seed: int) -> list[dict[str, float]]:
    """Return the columns of one seed at each epsilon, as fractions."""
    cells = [settings_of(private, public, epsilon, seed) for epsilon in EPSILONS]
    task = load_task(Inputs.of(cells[0]), torch.device("cpu"))
    y, weights = task.test.y, torch.full((len(task.test.y),), 1 / len(task.test.y))
    values = []
    for each in cells:
        divided, undivided = outputs(Cell.of(each, "studies"), task)
        columns = {"accuracy": float((divided.argmax(1) == y).double().mean())}
        columns["ece"] = calibration_error(divided.softmax(1), y, weights)
        columns["ece_undivided"] = calibration_error(undivided.softmax(1), y, weights)
        values.append(columns | {"lowered": columns["ece_undivided"] - columns["ece"]})
    return values


def main() -> None:
    """Train all cells, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", "--csv", type=measuring.target, required=True, help="file to write")
    to = parser.parse_args().to
    torch.set_num_threads(1)

    rows: list[dict[str, Any]] = []
    for private, public in itertools.product(SETS, PUBLIC):
        reached = [measured(private, public, seed) for seed in range(SEEDS)]
        for epsilon, *columns in zip(EPSILONS, *reached, strict=True):
            row: dict[str, Any] = {"private": private, "public": public, "epsilon": epsilon, "seeds": SEEDS}
            rows.append(row | summary(columns))
            print(*rows[-1].values(), flush=True)
    measuring.write(to, rows, measuring.origin("cpu", 1))


if __name__ == "__main__":
    main()
