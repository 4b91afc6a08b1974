"""How good a private choice of public data is, by accuracy: `scripts/private_choice.py DATA FOLDER`.

DATA: the folder with the data sets and the weights of MobileNetV2. FOLDER/private_choice_utilities.csv gets a row for
each private set, candidate and seed that it does not contain yet: what the whitened head reaches on the test set,
without public labels, at epsilon 0.3, on at most 5,000 private examples (AUC for HAM10000, otherwise accuracy).
FOLDER/private_choice.csv gets the rows of each private set that it does not contain: for each list of candidates,
number n of private examples, epsilon and way to choose (`by`), the probability of choosing the best candidate, and the
regret: by how many points, on average, the chosen one is worse than the best.

Lists of ten candidates, 500 public images each, one of them "none":
  apart    images of the private set itself, six other sets, patches of photographs, noise
  near     images of the private set itself, in part replaced by others; animals and things of Tiny-ImageNet
  parts    nine times 100 images of the private set itself
  foreign  as apart, with the animals in place of images of the private set itself

Ways: `gsd` and `coverage` as select.by, with exact probabilities; `signal`, the head's own criterion; `dp_gsd`,
the candidate of the least distance of DP-GSD (one initialisation, delta 1e-5), by simulation. gsd and dp_gsd cannot
choose none. n examples are drawn with replacement from at most 5,000 of the private set; for dp_gsd, the second moments
of these are scaled to n.

`signal`: small steps of the head from zero weights lower the loss by tau |G|^2, with G the mean of r_i z_i^T: z_i is
the row that the candidate's whitening makes of example i, of one norm, and r_i the residual of its label
(`pubsel.distances.whitening`). The score is n |G| over the norm of one r_i z_i^T, the same for all: one example more or
less moves it by at most 1. It may rise or fall, so permute-and-flip has half of epsilon.
"""

import csv
import itertools
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pubsel import distances, selection
from pubsel.algorithms import Facts, FirstRelease
from pubsel.algorithms.dp_sgd import residual_at_zero
from pubsel.algorithms.whitened_head import LENGTH, WhitenedHead
from pubsel.cell import Cell, through_backbone
from pubsel.data import Source, Split, Task, open_dataset
from pubsel.distances import dp_gsd
from pubsel.distances.whitening import residuals_of
from pubsel.gradients.subspace import projection_metric
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import stream
from pubsel.rules import canonical
from pubsel.selection import coverage
from pubsel.settings.compose import composed
from pubsel.settings.keys import PublicLabels, RunConfig, Select
from pubsel.settings.methods import option
from pubsel.settings.schema import check
from pubsel.training.evaluation import logits, utility
from pubsel.training.loop import Job, fit
from pubsel.training.once import prepare, training_secret

PRIVATE = ("flowers5", "ham10000", "mnist", "cifar10", "kagchest", "fashion_mnist")
SETS = ("flowers5", "ham10000", "kagchest", "cifar10", "mnist", "fashion_mnist", "tiny_imagenet")
SECOND = {
    "flowers5": "cifar10",
    "ham10000": "cifar10",
    "mnist": "fashion_mnist",
    "cifar10": "flowers5",
    "kagchest": "mnist",
    "fashion_mnist": "mnist",
}
PARTS, PART = 9, 100  # parts of the private set itself, and public images of each
ANIMALS = 59  # the first classes of Tiny-ImageNet
M = 500  # public images of a candidate
POOL = 5_000  # private examples that n are drawn from
SIZES, EPSILONS, DELTA = (500, 5_000, 50_000), (0.005, 0.01, 0.05, 0.1), 1e-5
TRIALS, DRAWS = 30, 30  # draws of the private examples; of the noise of DP-GSD
NONE = coverage.NONE
SEEDS, EPSILON, MOST = range(10), 0.3, 5000  # of the trainings; MOST private examples
WORDS = (
    "model=mobilenetv2_coral",
    "algorithm=whitened_head",
    "algorithm.public_labels=none",
    "distance=none",
    "device=cpu",
    f"epsilon={EPSILON}",
    "pair.private=x",
    "pair.m=10",
    "privacy.delta=1e-5",
    "threads=1",
)
Array = NDArray[np.float64]


class Setting(NamedTuple):
    """A private set, without the images that are public: features [n, d]; and the public features [m, d] of each
    candidate."""

    private: Split
    test: Split
    classes: int
    metric: str
    candidates: dict[str, Tensor]
    stages: int  # of the features, how many come last and are of stages before the last layer


@cache
def features(name: str, data_root: str) -> Source:
    """Return a data set with features in place of images."""
    with composed("run", [*WORDS, f"data_root={data_root}"]) as values:
        settings = check(RunConfig, values)
    through = through_backbone(settings.model.backbone, settings.pair.convert, data_root, torch.device("cpu"))
    return through(name, open_dataset(name, data_root, False), None)


def setting_of(private: str, data_root: str) -> Setting:
    """Return a private set and all its candidates."""
    source = features(private, data_root)
    order = torch.from_numpy(stream("private choice", private).permutation(len(source.train.x)))
    every, rest = source.train.x[order[: PARTS * PART]].clone(), order[PARTS * PART :]
    own = every[:M]

    def some(name: str, animals: bool | None = None) -> Tensor:
        test = features(name, data_root).test
        kept = np.arange(len(test.x)) if animals is None else np.flatnonzero((test.y.numpy() < ANIMALS) == animals)
        return test.x[torch.from_numpy(stream("private choice", name).permutation(kept)[:M])].clone()

    candidates = {"own": own} | {name: some(name) for name in SETS if name != private}
    candidates |= {name: some(name) for name in ("photo_patches", "noise")}
    candidates |= {"animals": some("tiny_imagenet", True), "things": some("tiny_imagenet", False)}
    for name, share in itertools.product(("tiny_imagenet", SECOND[private]), (10, 30, 50)):
        many = M * share // 100
        mixed = torch.cat([own[many:], candidates[name][:many]])
        shuffled = torch.from_numpy(stream("private choice", "mixed").permutation(M))
        candidates[f"{share} % {name}"] = mixed[shuffled]
    candidates |= {f"part {i + 1}": every[i * PART : (i + 1) * PART] for i in range(PARTS)}
    split = Split(source.train.x[rest], source.train.y[rest])
    return Setting(split, source.test, source.classes, source.metric, candidates, source.stages)


def lists(private: str) -> dict[str, list[str]]:
    """Return the lists of candidates, by name."""
    others = [*(name for name in SETS if name != private), "photo_patches", "noise"]
    parts = [f"{share} % {name}" for name in ("tiny_imagenet", SECOND[private]) for share in (10, 30, 50)]
    return {
        "apart": ["own", *others, NONE],
        "near": ["own", *parts, "animals", "things", NONE],
        "parts": [*(f"part {i + 1}" for i in range(PARTS)), NONE],
        "foreign": [*others, "animals", NONE],
    }


# Utilities


def reached(setting: Setting, public: Tensor | None, seed: int) -> float:
    """Return what the whitened head reaches with this public data, in percent."""
    private = Split(setting.private.x[:MOST], setting.private.y[:MOST])
    split = None if public is None else Split(public, torch.zeros(len(public), dtype=torch.int64))
    task = Task(private, split, setting.test, setting.classes, setting.metric, (), (), (), stages=setting.stages)
    task = task.last_layer() if public is None else task
    words = [*WORDS, f"seed={seed}", f"pair.public={'null' if public is None else 'y'}"]
    with composed("run", words) as values, tempfile.TemporaryDirectory() as folder:
        cell = Cell.of(canonical(check(RunConfig, values)), "studies")._replace(folder=Path(folder))
        cell = cell.derived(task)
        schedule, plan, first = cell.guarantee(task.units)
        assert plan is not None
        prepared = prepare(cell, task, first, in_ledger=False)
        secret = training_secret(cell, prepared.task, prepared.whole, schedule, plan)
        checkpoint = cell.folder / "checkpoint.pt"
        job = Job(cell.algorithm, schedule, plan.noise_multiplier, cell.training, cell.name, checkpoint)
        fit(prepared.trains, prepared.task, job, secret)
    return 100 * utility(logits(prepared.trains, prepared.task.test.x), task.test.y, task.metric)


def utilities(private: str, setting: Setting, path: Path) -> dict[str, float]:
    """Return the mean utility of each candidate; what the file does not contain is measured, and added to it."""
    columns = ("private", "candidate", "seed", "metric", "utility")
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    known = {(row["private"], row["candidate"], int(row["seed"])): float(row["utility"]) for row in rows}
    values = defaultdict(list)
    for name, seed in itertools.product([*setting.candidates, NONE], SEEDS):
        key = (private, name, seed)
        if key not in known:
            known[key] = reached(setting, setting.candidates.get(name), seed)
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([] if file.tell() else [columns])
                writer.writerow((*key, setting.metric, f"{known[key]:.3f}"))
            print(*key, f"{known[key]:.2f}", flush=True)
        values[name].append(known[key])
    return {name: statistics.mean(each) for name, each in values.items()}


# Choices


class Measured(NamedTuple):
    """What a choice among J candidates, without none, follows from, for N private examples. inside: regions [N, J], -1
    for none; sizes: of the public examples in each region; energies: [N, J]; second: mean second moments [s, s] of
    sketched gradients; subspaces: of the candidates, each [s, k]. rows: [N, k] for each candidate, as its
    whitening makes them, and for none, last; residuals: [N, C], of the labels; both over their norm."""

    inside: NDArray[np.int64]
    sizes: list[list[int]]
    energies: Tensor
    second: Tensor
    subspaces: list[Tensor]
    rows: list[Tensor]
    residuals: Tensor

    def of(self, places: list[int]) -> "Measured":
        """Return the same for some of the candidates."""
        sizes, subspaces = [self.sizes[j] for j in places], [self.subspaces[j] for j in places]
        rows = [*(self.rows[j] for j in places), self.rows[-1]]
        inside, energies = self.inside[:, places], self.energies[:, places]
        return self._replace(inside=inside, sizes=sizes, energies=energies, subspaces=subspaces, rows=rows)


def whitened_rows(x: Tensor, classes: int, candidates: dict[str, Tensor], stages: int) -> list[Tensor]:
    """Return the rows [N, k] of norm 1, float64, that each candidate's whitening makes of private features x [N, d],
    and none's, last; k for a training on at most MOST examples."""
    mu = accountant.gaussian_mu(EPSILON, DELTA)
    every = []
    for public in [*candidates.values(), None]:
        if public is None:  # which has the last layer alone
            x, public, stages = x[:, : x.shape[1] - stages], x[:0], 0
        n, m = min(len(x), MOST), len(public)
        facts = Facts(n, x.shape[1], m, classes, False, mu, public=public, stages=stages)
        head = WhitenedHead("whitened_head", k=None, public_labels=PublicLabels.none).derived(facts)
        labelled = Split(public, torch.zeros(len(public), dtype=torch.int64))
        frozen = head.frozen(
            labelled if len(public) else None, x.shape[1], lambda purpose, step: stream(purpose, str(step))
        )
        if isinstance(frozen, FirstRelease):  # the mean of private rows, here without noise
            frozen = frozen.decode(frozen.clipped_sum(x.float()))
        every.append(frozen(x.float()).double() / LENGTH)
    return every


def measured(private: Split, classes: int, candidates: dict[str, Tensor], stages: int) -> Measured:
    """Measure private features [N, d] against the candidates, by the functions that a choice uses."""
    x = private.x
    places = [coverage.regions(public, name) for name, public in candidates.items()]
    regions = [[place.of(row) for place in places] for row in coverage.one_by_one(x)]
    inside = np.array([[-1 if region is None else region for region in row] for row in regions])

    # gradients of a linear classifier on the features, as distance=gsd has them
    def labelled(rows: Tensor) -> Split:
        return Split(rows, torch.zeros(len(rows), dtype=torch.int64))

    def linear(i: int) -> nn.Module:
        network = nn.Linear(x.shape[1], classes)
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        return network

    def source(purpose: str, i: int) -> np.random.Generator:
        return stream("private choice", purpose, i)

    values = option("distance", "gsd") | {"m": min(map(len, candidates.values()))}
    gsd, every = selection.gsd_of(distances.build(values)), torch.arange(len(x))
    splits = {name: labelled(public) for name, public in candidates.items()}
    sets = selection.Comparison(linear, labelled(x), splits, classes, "private choice", source)
    energies = selection.energies(gsd, Select().sketch, sets, every)

    side = dp_gsd.Side(gsd, linear(0), classes, False, option("distance", "dp_gsd")["sketch"], "private choice", 0)
    rows = torch.cat([*side.private(labelled(x), every, source("labels", 0))])
    subspaces = [side.public(name, split) for name, split in splits.items()]
    residuals = residuals_of(private.y, classes) / residual_at_zero(classes, False)
    shares, second = [p.shares for p in places], rows.T @ rows / len(x)
    return Measured(
        inside, shares, energies, second, subspaces, whitened_rows(x, classes, candidates, stages), residuals
    )


def scores(what: Measured, many: Array) -> dict[str, Array]:
    """Return the scores by each way, none last. many: [N], how often each private example is in the data."""
    n = many.sum()
    covered = []
    for region, sizes in zip(what.inside.T, what.sizes, strict=True):
        sums = np.bincount(region + 1, weights=many, minlength=len(sizes) + 1)[1:]
        covered.append(np.minimum(sums, n * np.array(sizes) / sum(sizes)).sum())

    weighted = torch.from_numpy(many)[:, None] * what.residuals
    return {
        "signal": np.array([float((weighted.T @ rows).norm()) / 2 for rows in what.rows]),  # half: scores rise and fall
        "coverage": np.array([*covered, float(coverage.LEAST) * n]),
        "gsd": many @ selection.contributions(what.energies, Select().cap).double().numpy() / UNIT,
    }


def chosen_by_dp_gsd(what: Measured, n: int, epsilon: float) -> Array:
    """Return how often each candidate is the nearest by DP-GSD."""
    sigma = accountant.plan(epsilon, DELTA, 1.0, 1, 1.0).noise_multiplier
    nearest = np.zeros(len(what.subspaces))
    for draw in range(DRAWS):
        released = dp_gsd.noisy(n * what.second, sigma, stream("private choice", f"{n} {epsilon}", draw))
        subspace = torch.linalg.eigh(released).eigenvectors[:, -what.subspaces[0].shape[1] :]
        nearest[np.argmin([projection_metric(subspace, public) for public in what.subspaces])] += 1
    return nearest / DRAWS


def simulated(what: Measured, utility_of: Array) -> Iterator[dict[str, Any]]:
    """Yield rows of the table, for utilities [J + 1], none last."""
    lost = utility_of.max() - utility_of
    for n in SIZES:
        draw = stream("private choice", f"examples {n}")
        samples = [
            np.bincount(draw.integers(len(what.inside), size=n), minlength=len(what.inside)) for _ in range(TRIALS)
        ]
        scored = [scores(what, sample.astype(float)) for sample in samples]
        for epsilon in EPSILONS:
            chances = {
                by: np.mean([selection.probabilities([int(q * UNIT) for q in each[by]], epsilon) for each in scored], 0)
                for by in scored[0]
            }
            chances["dp_gsd"] = chosen_by_dp_gsd(what, n, epsilon)
            for by, chance in chances.items():
                chance = np.append(chance, np.zeros(len(lost) - len(chance)))  # none
                right, regret = chance[lost.argmin()], chance @ lost
                yield {"n": n, "epsilon": epsilon, "by": by, "probability": f"{right:.3f}", "regret": f"{regret:.3f}"}


def choices(private: str, setting: Setting, utility_of: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a private set."""
    pool = Split(setting.private.x[:POOL], setting.private.y[:POOL])
    every = [*setting.candidates]
    by_size = [
        (names, measured(pool, setting.classes, {name: setting.candidates[name] for name in names}, setting.stages))
        for names in (every[:-PARTS], every[-PARTS:])
    ]
    for title, names in lists(private).items():
        known, what = by_size[title == "parts"]
        what = what.of([known.index(name) for name in names if name != NONE])
        values = np.array([utility_of[name] for name in names])
        for row in simulated(what, values):
            yield {"private": private, "candidates": title, "best": names[values.argmax()]} | row


def main(data_root: str, folder: Path) -> None:
    """Measure what is missing."""
    torch.set_num_threads(1)
    path = folder / "private_choice.csv"
    present = {row["private"] for row in csv.DictReader(path.open())} if path.exists() else set()
    for private in PRIVATE:
        setting = setting_of(private, data_root)
        utility_of = utilities(private, setting, folder / "private_choice_utilities.csv")
        if private not in present:
            rows = [*choices(private, setting, utility_of)]
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, [*rows[0]])
                if not file.tell():
                    writer.writeheader()
                writer.writerows(rows)
            print(private, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
