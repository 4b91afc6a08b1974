"""Examples chosen privately from a pool, against whole sets and none: results/pools.csv and the table of docs/pool.md.

    PUBSEL_DATA=... python scripts/pools.py ham10000,flowers5 --seeds 10
    python scripts/pools.py --table

Each private set has a pool of seven other sets, with 200 or 20 images of its own kind, or none: about 1 %, 0.1 % and 0
%. `whitened_head` without public labels trains on MobileNetV2 features, at most 6,000 private images, and is measured
on other private images, not on the test set. What is chosen costs 5 % of epsilon, and training has the rest. The method
`weights` takes all examples of the clusters that `examples` draws from, with weights in the moments of the whitening.
Rows that are in the file are not run again. Nothing of it is private.
"""

import argparse
import copy
import csv
import itertools
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pubsel.algorithms import Frozen, Random
from pubsel.algorithms.whitened_head import WhitenedHead, whitened
from pubsel.cell import Cell
from pubsel.data import Split, Task, open_dataset
from pubsel.data.features import of_source
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import stream
from pubsel.rules import canonical
from pubsel.selection import coverage, permute_and_flip, pool
from pubsel.settings.compose import composed
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check
from pubsel.training.evaluation import logits, utility
from pubsel.training.loop import Job, fit
from pubsel.training.once import prepare, training_secret

FILE = Path("results/pools.csv")
COLUMNS = ("private", "right", "method", "epsilon", "seed", "utility", "public", "of_right", "seconds")
MEMBERS = {
    "cifar10": 6000,
    "tiny_imagenet": 4000,
    "mnist": 4000,
    "fashion_mnist": 4000,
    "ham10000": 1500,
    "kagchest": 500,
    "chestxray_pneumonia.npz": 500,
}
ORACLES = 2  # seeds for which each of the other sets is tried
RIGHT, EPSILONS, SHARE = (200, 20, 0), (0.1, 0.3, 1.0), 0.05
PRIVATE, HELD, DRAWN = 6000, 1500, 1000
SPENT = {"examples": None, "examples, 0.05": 0.05, "weights": None}  # on the choice; None: SHARE of epsilon
WORDS = (
    "model=mobilenetv2_coral algorithm=whitened_head algorithm.public_labels=none distance=none pair.private=x "
    "pair.m=10 device=cpu threads=1 privacy.delta=1e-5 download=false"
).split()


def spent(method: str, epsilon: float) -> float:
    """Return what a method spends on its choice."""
    if method == "a set":
        return SHARE * epsilon
    return (SPENT[method] or SHARE * epsilon) if method in SPENT else 0.0


def settings(*words: str) -> RunConfig:
    """Return the settings of a run."""
    with composed("run", [*WORDS, *words]) as values:
        return canonical(check(RunConfig, values))


@cache
def features(name: str, root: str) -> tuple[Split, Split, int, str, int]:
    """Return the features of the training and test images of a set, its classes and its metric, and how many of the
    features are of stages before the last layer."""
    path = f"{root}/{name}" if name.endswith(".npz") else name
    source, backbone = open_dataset(path, root, False), settings("pair.public=y").model.backbone
    assert backbone is not None
    used = of_source(name, source, backbone, root, torch.device("cpu"), print)
    return Split(*used.train), Split(*used.test), used.classes, used.metric, used.stages


class Weighted(WhitenedHead):
    """The whitened head, whose public examples have weights [m] with sum 1."""

    weights: Tensor

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen:
        """Return the whitening by weighted moments."""
        assert public is not None
        assert self.k is not None
        scaling = self.scaling(public.x)
        frozen = whitened(Frozen().scaled(scaling)(public.x), self.k, self.weights)
        frozen.rest = self.rest
        return frozen.scaled(scaling)


def head(task: Task, epsilon: float, seed: int, weights: Tensor | None = None) -> float:
    """Return the utility in percent of `whitened_head` on the held-out images of a task. weights: of the public
    examples, [m]; None: all weigh the same."""
    public = "null" if task.public is None else "y"
    cell = Cell.of(settings(f"pair.public={public}", f"epsilon={epsilon}", f"seed={seed}"), "studies")
    if weights is not None:
        algorithm = copy.copy(cell.algorithm)
        algorithm.__class__ = Weighted
        vars(algorithm)["weights"] = weights
        cell = cell._replace(algorithm=algorithm)
    with tempfile.TemporaryDirectory() as folder:
        cell = cell._replace(folder=Path(folder))
        cell = cell.derived(task)
        plan, spend, first = cell.guarantee(task.units)
        prepared = prepare(cell, task, first, in_ledger=False)
        secret = training_secret(cell, prepared.task, prepared.whole, plan, spend)
        assert spend is not None
        job = Job(cell.algorithm, plan, spend.noise_multiplier, cell.training, cell.name, cell.folder / "c.pt")
        fit(prepared.trains, prepared.task, job, secret)
    return 100 * utility(logits(prepared.trains, prepared.task.test.x), task.test.y, task.metric)


class Study:
    """One private set, its pool with `right` examples of the same kind, and one seed of split, draw and noise."""

    def __init__(self, private: str, right: int, seed: int, root: str):
        train, _, classes, metric, stages = features(private, root)
        random = stream(f"{private} {seed}", "split")
        order = torch.from_numpy(random.permutation(len(train.y)))
        held, own = min(HELD, len(order) // 5), min(200, len(order) // 5)
        used = order[held + own :][:PRIVATE]
        private_split, out = (Split(train.x[rows], train.y[rows]) for rows in (used, order[:held]))
        self.task = Task(private_split, None, out, classes, metric, (), (), (), stages=stages)

        # The others' test images, so that none of them is private elsewhere.
        self.sets: dict[str, Tensor] = {}
        for name, many in MEMBERS.items():
            if name != private:
                splits = features(name, root)[:2]
                x = torch.cat([split.x for split in reversed(splits)])
                self.sets[name] = x[torch.from_numpy(random.permutation(len(x))[:many])]
        if right:
            self.sets["right"] = train.x[order[held : held + own]][:right]
        self.seed, self.right = seed, right
        self.scores: list[int] | None = None
        self.counted: tuple[np.ndarray, list[int]] | None = None
        self.pool = torch.cat(list(self.sets.values()))

    def public(self, method: str, epsilon: float) -> tuple[Tensor | None, Tensor | None]:
        """Return the public examples of a method, None if none, and their weights, None if all weigh the same."""
        if method == "none":
            return None, None
        if method == "equal shares":
            each = DRAWN // len(self.sets)
            return torch.cat([x[:each] for x in self.sets.values()]), None
        if method == "a set":
            return self._set(spent(method, epsilon)), None
        if method in SPENT:
            return self._examples(spent(method, epsilon), method == "weights")
        return self.sets[method][:DRAWN], None  # an oracle's

    def _secret(self, purpose: str, step: int) -> np.random.Generator:
        return stream(f"{self.seed} {self.right}", purpose, step)

    def _set(self, epsilon: float) -> Tensor | None:
        """Return what `coverage.select` chooses; its scores are computed once."""
        x, sets = self.task.private.x, {name: x[:DRAWN] for name, x in self.sets.items()}
        if self.scores is None:
            self.scores = [*coverage.scores(coverage.Private.of(x, None), sets, True).values()]
        plan = accountant.pure(epsilon, 1.0, 1, "permute-and-flip")
        chosen = permute_and_flip(self.scores, Fraction(1 / plan.noise_multiplier), self._secret("selection", 0))
        return [*sets.values(), None][chosen]

    def _examples(self, epsilon: float, weighted: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the examples that are drawn and used. If weighted, all of the clusters that are drawn from, and
        weights by which a cluster has the share of the private examples. Clusters and counts are computed once."""
        x = self.task.private.x
        if self.counted is None:
            clusters = pool.clusters_of(pool.sample_of([pool.Features(self.pool)], stream("pool", "sample")))
            self.counted = clusters.nearest(self.pool), coverage.counts(clusters, x, [UNIT] * len(x))
        nearest, sums = self.counted
        plan = pool.plan_of(epsilon, True)
        wanted = pool.shares(pool.noisy_counts(sums, plan, self._secret("selection", 0)), len(x), plan, True)
        if wanted is None:
            return None, None
        drawn = self.pool[
            torch.from_numpy(pool.draw_by_cluster(wanted, nearest, DRAWN, stream(str(self.seed), "draw")))
        ]
        if not pool.covered(epsilon, drawn, coverage.Private.of(x, None), self._secret):
            return None, None
        if not weighted:
            return drawn, None
        each = (wanted / np.bincount(nearest, minlength=len(wanted)).clip(1))[nearest]  # [pool]
        used = torch.from_numpy(np.flatnonzero(each))
        return self.pool[used], torch.from_numpy(each)[used] / each.sum()

    def row(self, method: str, epsilon: float) -> dict[str, object]:
        """Return one row of the file."""
        began = time.monotonic()
        x, weights = self.public(method, epsilon)
        public = None if x is None else Split(x.clone(), torch.zeros(len(x), dtype=torch.int64))
        task = self.task.last_layer() if public is None else self.task._replace(public=public)
        reached = head(task, epsilon - spent(method, epsilon), self.seed, weights)
        rights = 0
        if x is not None and self.right:
            rights = int((torch.cdist(x, self.sets["right"]).min(1).values < 1e-6).sum())
        seconds, used = round(time.monotonic() - began, 1), 0 if x is None else len(x)
        return {"utility": round(reached, 2), "public": used, "of_right": rights, "seconds": seconds}


def run(privates: list[str], seeds: range, root: str) -> None:
    """Add the rows that are missing."""
    rows = list(csv.DictReader(FILE.open())) if FILE.exists() else []
    done = {(row["private"], int(row["right"]), row["method"], float(row["epsilon"]), int(row["seed"])) for row in rows}
    with FILE.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        for seed in seeds:
            for private in privates:
                for right in RIGHT:
                    others = [name for name in MEMBERS if name != private] if seed < ORACLES else []
                    oracles = ["right"] if right else others
                    methods = ["equal shares", "a set", *SPENT, *oracles, *(["none"] if not right else [])]
                    cells = itertools.product(methods, EPSILONS)
                    missing = [cell for cell in cells if (private, right, *cell, seed) not in done]
                    if not missing:
                        continue
                    study = Study(private, right, seed, root)
                    for method, epsilon in missing:
                        key = {"private": private, "right": right, "method": method, "epsilon": epsilon, "seed": seed}
                        writer.writerow(key | study.row(method, epsilon))
                        file.flush()


def table() -> None:
    """Print the table in Markdown: means over the seeds that all methods have, at the three budgets."""
    reached: dict[tuple[str, int, str, float], dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader(FILE.open()):
        key = row["private"], int(row["right"]), row["method"], float(row["epsilon"])
        reached[key][int(row["seed"])] = float(row["utility"])
    names = ("examples", "examples, 0.05", "a set", "equal shares", "none")
    methods = {name: name for name in names} | {"a set": "a set, privately"}

    print("| private | of its kind |", " | ".join(methods.values()), "| best set (oracle) | seeds |")
    print("|---" * (len(methods) + 4) + "|")
    for private in dict.fromkeys(key[0] for key in reached):
        for right in RIGHT:
            of = {method: 0 if method == "none" else right for method in methods}
            rows = [reached[private, of[method], method, epsilon] for method in methods for epsilon in EPSILONS]
            seeds = set.intersection(*map(set, rows))
            sets = [(name, 0) for name in MEMBERS if name != private] + [("right", right)] * bool(right)

            def mean(method: str, kind: int, epsilon: float, of: str = private, used: set[int] = seeds) -> float:
                values = reached[of, kind, method, epsilon]
                return statistics.mean(values[seed] for seed in sorted(used & values.keys()))

            cells = [[mean(method, of[method], epsilon) for epsilon in EPSILONS] for method in methods]
            cells.append([max(mean(name, kind, epsilon) for name, kind in sets) for epsilon in EPSILONS])
            shown = " | ".join(" / ".join(f"{value:.1f}" for value in cell) for cell in cells)
            print(f"| {private} | {right} | {shown} | {len(seeds)} |")


def main() -> None:
    """Run the study, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("privates", nargs="?", default="")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--root", default="data")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if given.table:
        return table()
    run(given.privates.split(","), range(given.seeds), given.root)


if __name__ == "__main__":
    main()
