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
import statistics
from typing import Any

import measuring
import torch
from rare_classes import calibration_error, outputs

from pubsel.cell import Cell, load_task
from pubsel.rules import Inputs, canonical
from pubsel.settings.compose import composed
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check

PUBLIC_EXAMPLES = {  # as in conf/tables/recipes.yaml
    "flowers5": 350,
    "kagchest": 456,
    "ham10000": 796,
    "cifar10": 5000,
    "tiny_imagenet": 1200,
    "fashion_mnist": 2000,
    "mnist": 2000,
    "digits": 130,
}
PUBLIC = {"no labels": "algorithm.public_labels=none label=unlabelled", "none": "pair.public=null"}
EPSILONS, SEEDS = (0.1, 0.3, 1, 2), 5
WORDS = "+experiment=recipes device=cpu threads=1 download=false"


def settings(private: str, *words: str) -> RunConfig:
    """Return the settings of a cell of `recipes`."""
    model = "pixels" if private == "digits" else "mobilenetv2_coral"
    own = f"pair.private={private} pair.m={PUBLIC_EXAMPLES[private]} model={model}"
    with composed("run", [*WORDS.split(), *own.split(), *words]) as values:
        return canonical(check(RunConfig, values))


def measured(private: str, public: str, seed: int) -> list[dict[str, float]]:
    """Return the columns of one seed at each epsilon, as fractions."""
    words = [settings(private, *PUBLIC[public].split(), f"epsilon={epsilon}", f"seed={seed}") for epsilon in EPSILONS]
    task = load_task(Inputs.of(words[0]), torch.device("cpu"))
    y, weights = task.test.y, torch.full((len(task.test.y),), 1 / len(task.test.y))
    values = []
    for each in words:
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
    for private, public in itertools.product(PUBLIC_EXAMPLES, PUBLIC):
        reached = [measured(private, public, seed) for seed in range(SEEDS)]
        for epsilon, *columns in zip(EPSILONS, *reached, strict=True):
            row: dict[str, Any] = {"private": private, "public": public, "epsilon": epsilon, "seeds": SEEDS}
            for name in columns[0]:
                values = [100 * each[name] for each in columns]
                row |= {name: f"{statistics.mean(values):.2f}", f"{name}_std": f"{statistics.stdev(values):.2f}"}
            rows.append(row)
            print(*row.values(), flush=True)
    measuring.write(to, rows, measuring.origin("cpu", 1))


if __name__ == "__main__":
    main()
