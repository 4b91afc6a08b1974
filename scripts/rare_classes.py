"""Rare classes and calibration: what the balanced accuracy changes in `whitened_head`, and its division by the noise.

    PUBSEL_DATA=... python scripts/rare_classes.py --to results/rare_classes.csv

Chest x-rays (kagchest, MobileNetV2): training images of one class are left out at random until it is 3 or 5 % of them.
A tenth of the rest, drawn anew for each seed, is public, with or without labels; or nothing is. Accuracy counts test
images as if classes were as frequent as in training. So does the calibration error of a plain model; that of a balanced
one counts both classes alike, which its probabilities are for, and its `ece_at_shares` does not. `ece_undivided` is
of logits that `WhitenedHead.finish` does not divide by the noise. In percent. Nothing of it is private.
"""

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from torch import Tensor

from pubsel.algorithms import View
from pubsel.algorithms.whitened_head import WhitenedHead
from pubsel.cell import Cell, load_task
from pubsel.data import Split, Task
from pubsel.privacy.randomness import stream
from pubsel.rules import Inputs, canonical
from pubsel.settings.compose import composed
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check
from pubsel.training.evaluation import balanced_accuracy, logits
from pubsel.training.loop import Job, fit
from pubsel.training.once import prepare, training_secret

CLASSES, METRICS = {"normal": 0, "pneumonia": 1}, ("accuracy", "balanced_accuracy")
SHARES, EPSILONS, SEEDS, TENTH, BINS = (0.03, 0.05), (1, 3), 3, 0.1, 15
A_TENTH = "pair.public=kagchest pair.take=train pair.public_share=0.1"
PUBLIC = {"labels": A_TENTH, "no labels": f"{A_TENTH} algorithm.public_labels=none", "none": "pair.public=null"}
WORDS = (
    "model=mobilenetv2_coral algorithm=whitened_head distance=none pair.private=kagchest device=cpu threads=1 "
    "privacy.delta=1e-5 download=false"
)


def with_share(y: Tensor, rare: int, share: float, random: np.random.Generator) -> Tensor:
    """Return the places in y [n], in order, of all examples of other classes, and of as many of the class `rare`, drawn
    at random, as make it this share of all."""
    others, those = (y != rare).nonzero()[:, 0], (y == rare).nonzero()[:, 0]
    drawn = torch.from_numpy(random.permutation(len(those)))[: round(share / (1 - share) * len(others))]
    return torch.cat([others, those[drawn]]).sort().values


def calibration_error(probabilities: Tensor, y: Tensor, weights: Tensor) -> float:
    """Return the expected calibration error of probabilities [n, classes] for y [n]: the mean, over BINS equal bins of
    the largest probability, of how far it is from the accuracy. weights: of the examples, [n], with sum 1."""
    confidence, answers = probabilities.double().max(1)
    gaps = weights.double() * ((answers == y).double() - confidence)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    return float(gaps.new_zeros(BINS).index_add(0, bins, gaps).abs().sum())


class Undivided(WhitenedHead):
    """The whitened head, which keeps what `finish` divides logits by."""

    def finish(self, view: View) -> None:
        """Divide as `WhitenedHead` does, and keep the number."""
        before = next(view.model.parameters()).norm().item()
        super().finish(view)
        self.factor = before / next(view.model.parameters()).norm().item()


def settings(words: str) -> RunConfig:
    """Return the settings of a run by the words of its command."""
    with composed("run", words.split()) as values:
        return canonical(check(RunConfig, values))


def outputs(cell: Cell, task: Task) -> tuple[Tensor, Tensor]:
    """Train as `pubsel run` does; return the logits of the test images, [n, classes], and those without division."""
    head = copy.copy(cell.algorithm)
    head.__class__ = Undivided
    with tempfile.TemporaryDirectory() as folder:
        cell = cell._replace(algorithm=head, folder=Path(folder)).derived(task)
        plan, spend, first = cell.guarantee(task.units, report=lambda _: None)
        assert spend is not None
        prepared = prepare(cell, task, first, in_ledger=False)
        secret = training_secret(cell, prepared.task, prepared.whole, plan, spend)
        job = Job(cell.algorithm, plan, spend.noise_multiplier, cell.training, cell.name, cell.folder / "c.pt")
        fit(prepared.trains, prepared.task, job, secret)
        divided = logits(prepared.trains, prepared.task.test.x)
    assert isinstance(cell.algorithm, Undivided)
    return divided, cell.algorithm.factor * divided


def measured(both: tuple[Tensor, Tensor], y: Tensor, rare: int, share: float, metric: str) -> dict[str, float]:
    """Return the columns, as fractions, by logits of the test images, divided and not, of classes y [n]."""
    shares = torch.where(torch.arange(2) == rare, share, 1 - share)
    trained, alike = ((part / y.bincount())[y].double() for part in (shares, torch.full((2,), 0.5)))
    meant = alike if metric == "balanced_accuracy" else trained
    divided, undivided = both
    values = {"recall": float((divided.argmax(1) == rare)[y == rare].double().mean())}
    values["balanced_accuracy"] = balanced_accuracy(divided, y)
    values["accuracy"] = float((trained * (divided.argmax(1) == y)).sum())
    values["ece"] = calibration_error(divided.softmax(1), y, meant)
    values["ece_undivided"] = calibration_error(undivided.softmax(1), y, meant)
    return values | {"ece_at_shares": calibration_error(divided.softmax(1), y, trained)}


def summary(seeds: Sequence[dict[str, float]]) -> dict[str, str]:
    """Return the mean and the deviation over the seeds of each column, in percent."""
    row: dict[str, str] = {}
    for name in seeds[0]:
        values = [100 * each[name] for each in seeds]
        row |= {name: f"{statistics.mean(values):.2f}", f"{name}_std": f"{statistics.stdev(values):.2f}"}
    return row


def sample(task: Task, rare: str, share: float, public: str, seed: int) -> Task:
    """Return the task on the images that are left, of which a tenth may be public; without public data, on features of
    the last layer alone, as `pubsel run` has it."""
    rows = with_share(task.private.y, CLASSES[rare], share, stream(f"{rare} {share}", "subset"))
    if public == "none":
        width = task.private.x.shape[1] - task.stages
        task = task._replace(stages=0).each(lambda split: Split(split.x[:, :width].clone(), split.y))
        return task._replace(private=Split(*(part[rows] for part in task.private)))
    rows = rows[torch.from_numpy(stream(f"{rare} {share} {seed}", "public").permutation(len(rows)))]
    m = round(TENTH * len(rows))
    public_part, private_part = (Split(*(part[some] for part in task.private)) for some in (rows[:m], rows[m:]))
    return task._replace(private=private_part, public=public_part, same_task=True)


def main() -> None:
    """Train all cells, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", "--csv", type=measuring.target, required=True, help="file to write")
    to = parser.parse_args().to
    torch.set_num_threads(1)
    complete = load_task(
        Inputs.of(settings(f"{WORDS} pair.public=null model.backbone.stages=true")), torch.device("cpu")
    )

    rows: list[dict[str, Any]] = []
    for rare, share, epsilon, public, metric in itertools.product(CLASSES, SHARES, EPSILONS, PUBLIC, METRICS):
        reached, began = [], time.process_time()
        for seed in range(SEEDS):
            task = sample(complete, rare, share, public, seed)._replace(metric=metric)
            words = f"{WORDS} {PUBLIC[public]} pair.metric={metric} epsilon={epsilon} seed={seed}"
            both = outputs(Cell.of(settings(words), "studies"), task)
            reached.append(measured(both, task.test.y, CLASSES[rare], share, metric))
        row: dict[str, Any] = {"rare": rare, "share": round(100 * share), "epsilon": epsilon, "public": public}
        row |= {"metric": metric, "n": task.units, "m": 0 if task.public is None else len(task.public.y)}
        row |= {"rare_images": int((task.private.y == CLASSES[rare]).sum()), "seeds": SEEDS}
        rows.append(row | summary(reached) | {"seconds": f"{(time.process_time() - began) / SEEDS:.1f}"})
        print(*rows[-1].values(), flush=True)
    measuring.write(to, rows, measuring.origin("cpu", 1))


if __name__ == "__main__":
    main()
