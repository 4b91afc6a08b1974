"""Attack on `pubsel fit` as one program: many runs, with one private example or person that is there, or counts as
nothing.

The adversary made all other data for the attack (`worst_case`), and sees the releases of the command: the name of the
chosen public set, the weights, and the noisy table. `Program.release` makes the same calls as the command, in the same
order, with features in place of images. Each run tosses two coins: whether the target is in the training data, and
whether another one is in the held-out data. A target that is out is present as non-finite numbers, which every sum
counts as zero. So n stays the same, as between the neighbours of the guarantee, and the adversary knows n, all classes,
and the side of each example.

Each run yields one number per part (`scored`), the adversary's log likelihood ratio of in against out. It learns the
parameters, and chooses its threshold, from the first half of the runs. Its false positives and negatives in the second
half give, by Clopper and Pearson's limits, two lower bounds of epsilon:

- of any (epsilon, delta)-private program (Kairouz, Oh, Viswanath: The Composition Theorem for Differential Privacy,
  ICML 2015, arXiv:1311.0776, Theorem 2.1);
- of a program with the claimed trade-off curve, at any scale of noise (Nasr et al. 2023, arXiv:2302.07956): that of
  randomised response for the choice, the lowest of all pure mechanisms, and of Gaussian noise (Dong, Roth, Su 2019,
  arXiv:1905.02383, Theorem 3.2).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import Tensor, nn

from pubsel.algorithms import roots
from pubsel.attacks.one_run import last_refuted
from pubsel.cell import Cell, units_of
from pubsel.commands.fit import divided
from pubsel.commands.fit import words as words_of_run
from pubsel.data import Split, Task
from pubsel.privacy import accountant
from pubsel.release import measurement, quality
from pubsel.rules import canonical
from pubsel.selection import coverage
from pubsel.settings.compose import composed
from pubsel.settings.keys import FitConfig, RunConfig
from pubsel.settings.schema import check
from pubsel.training.evaluation import logits
from pubsel.training.loop import Job, fit
from pubsel.training.once import prepare, training_secret

Array = NDArray[np.float64]

NEAR, FAR = "near", "far"  # the candidates
WIDTH = 8  # features in which one kind of examples differs
FEATURES, PUBLIC, HELD_OUT = 3 * WIDTH, 60, 10
LARGEST = 10.0  # times less noise than claimed is not distinguished from even less
THRESHOLDS = 60  # candidates of the adversary
FEWEST = 5  # runs with and without the target, to learn a mean from


class Data(NamedTuple):
    """The adversary's data. private: training examples, with the target's last; held: held-out ones, with the other
    target's last; candidates: the public sets; all are features, [n, FEATURES]. images: examples per target; people,
    held_people: examples of each person, or None."""

    private: Split
    held: Split
    candidates: Mapping[str, Split]
    classes: int
    images: int
    people: Tensor | None
    held_people: Tensor | None


class Claim(NamedTuple):
    """The claim about a release: a pure mechanism at epsilon `pure` followed by a Gaussian one with sensitivity over
    deviation mu; either may be 0."""

    pure: float
    mu: float
    delta: float

    def at(self, scale: float) -> float:
        """Return epsilon at delta with `scale` times less noise, by basic composition."""
        return scale * self.pure + (accountant.gaussian_epsilon(scale * self.mu, self.delta) if self.mu else 0.0)

    def least(self, false_positives: float, scale: float) -> float:
        """Return the least rate of false negatives at this one of false positives, with `scale` times less noise."""
        return least_negatives(scale * self.pure, scale * self.mu, false_positives)


class Outcome(NamedTuple):
    """One run for the adversary. trained, held: the coins, which it does not see. margin: the preference of the weights
    for the target's class; counted: the noisy count of the held-out target's table cell, minus all other examples."""

    trained: bool
    held: bool
    chosen: str
    margin: float
    counted: float


class Scored(NamedTuple):
    """The adversary's score of each of n runs, and whether the target was in: [n] each. learned: the number of first
    runs from which it learned."""

    scores: Array
    included: NDArray[np.bool_]
    learned: int

    def parts(self) -> tuple["Scored", "Scored"]:
        """Return the runs for learning, and those for judging."""
        scores, included, k = self
        return Scored(scores[:k], included[:k], k), Scored(scores[k:], included[k:], 0)

    def errors(self, threshold: float) -> tuple[int, int, int, int]:
        """Return false positives, runs without the target, false negatives, and runs with it, if scores from the
        threshold on count as in."""
        positive, outside = self.scores >= threshold, int((~self.included).sum())
        wrong = int((positive & ~self.included).sum()), int((~positive & self.included).sum())
        return wrong[0], outside, wrong[1], len(self.scores) - outside


class LowerBounds(NamedTuple):
    """The claimed epsilon of one part, and lower bounds from `runs` runs of the second half, with the numbers of false
    positives and false negatives."""

    claimed: float
    any_program: float
    planned_curve: float
    runs: int
    positives: int
    negatives: int

    @property
    def measured(self) -> float:
        """Return the larger of the bounds."""
        return max(self.any_program, self.planned_curve)


# Data


def worst_case(n: int, classes: int, images: int = 1, seed: int = 0) -> Data:
    """Return data in which one training unit counts as much as possible: n units, a multiple of 5; the target has
    `images` examples.

    Without the target the nearer public set has exactly the score of no public data, and the target is in a region that
    is not full, so that it moves the one score by 1 and not the other. It is the only unit of the last class, so that
    no other gradient has its direction, and is clipped at its largest. All units outside the regions are far from all
    sets. The held-out target is also the only one of its class.
    """
    random = np.random.default_rng(seed)

    def kind(i: int, m: int) -> Tensor:
        x = 0.02 * random.standard_normal((m, FEATURES))
        x[:, i * WIDTH : (i + 1) * WIDTH] += 3 * random.standard_normal((m, WIDTH))
        return torch.from_numpy(x).float()

    def labelled(x: Tensor) -> Split:
        return Split(x, torch.from_numpy(random.integers(0, classes - 1, len(x))))

    candidates = {NEAR: labelled(kind(0, PUBLIC)), FAR: labelled(kind(1, PUBLIC))}

    # As many of the near kind as make a tie with no public data, with at most its share in each region.
    places = coverage.regions(candidates[NEAR].x, NEAR)
    m, near = sum(places.shares), int(coverage.LEAST * n)
    left = [n * share // m for share in places.shares]
    inside: list[tuple[int, Tensor]] = []
    while len(inside) < near + 1:
        row = kind(0, 1)[0]
        region = places.of(roots(row.double()).numpy())
        if region is not None and left[region] > 0:
            left[region] -= 1
            inside.append((region, row))

    # The target is in the region with most room, to reveal a program that counts it several times.
    *rest, (_, row) = sorted(inside, key=lambda place: left[place[0]])
    others = torch.cat([torch.stack([x for _, x in rest]), kind(2, n - 1 - near)])
    target = row.expand(images, -1)
    rare = torch.full((images,), classes - 1)
    private = labelled(others)
    private = Split(torch.cat([private.x, target]), torch.cat([private.y, rare]))

    # The held-out target's examples are all alike, and counted in one place.
    held = labelled(kind(0, HELD_OUT))
    held = Split(torch.cat([held.x[:-1], held.x[-1:].expand(images, -1)]), torch.cat([held.y[:-1], rare]))

    def people(units: int) -> Tensor | None:
        return torch.cat([torch.ones(units - 1), torch.tensor([images])]).long() if images > 1 else None

    return Data(private, held, candidates, classes, images, people(n), people(HELD_OUT))


def with_nothing(split: Split, last: int, label: int) -> Split:
    """Return the examples with the `last` ones as nothing: non-finite, with this label."""
    x, y = split.x.clone(), split.y.clone()
    x[-last:], y[-last:] = math.nan, label
    return Split(x, y)


# The program


class Program(NamedTuple):
    """`pubsel fit` on features. cell: of the `pubsel run` that it starts, whose folder contains the checkpoint; choice:
    epsilon of the choice of public data, None without them; plan: of the training."""

    cell: Cell
    choice: float | None
    plan: accountant.Plan

    @classmethod
    def of(cls, cell: Cell, choice: float | None, units: int) -> Self:
        """Return the program for that number of training units, which alone determines the plan."""
        plan = cell.guarantee(units)[1]
        assert plan is not None
        return cls(cell, choice, plan)

    def release(self, data: Data) -> tuple[str, nn.Module, Array]:
        """Return the releases of one run: the name of the chosen set, the model, and the noisy table."""
        # As release.run.with_chosen.
        task = Task(data.private, None, data.held, data.classes, "accuracy", (), (), (), data.held)
        task = task._replace(people=data.people, held_out_people=data.held_people)
        chosen, spent = coverage.NONE, accountant.NOTHING
        if self.choice is not None:
            sets = {name: split.x for name, split in data.candidates.items()}
            secret = self.cell.streams.secret("choice", units_of(task), data.candidates.values(), {}, {})
            chosen, spent = coverage.select(self.choice, task.private.x, task.people, sets, True, secret)

        # As release.run.train.
        task = task._replace(public=data.candidates.get(chosen))
        cell = self.cell.derived(task)
        schedule, plan, first = cell.guarantee(task.units, lambda line: None)
        assert plan is not None
        prepared = prepare(cell, task, first, in_ledger=False)
        (cell.folder / "release.pt").unlink(missing_ok=True)  # of this run alone
        secret = training_secret(cell, prepared.task, prepared.whole, schedule, plan)
        checkpoint = cell.folder / "checkpoint.pt"
        job = Job(cell.algorithm, schedule, plan.noise_multiplier, cell.training, cell.name, checkpoint)
        fit(prepared.trains, prepared.task, job, secret)
        checkpoint.unlink()

        # As training.measurement.measured.
        held = prepared.task.validation
        assert held is not None
        people = task.held_out_people
        counts = measurement.table_of(logits(prepared.trains, held.x), held.y, task.metric, people)
        epsilon = spent.epsilon + self.plan.epsilon
        plan = accountant.plan(epsilon, self.plan.delta, 1.0, 1, quality.sensitivity(counts))
        secret = cell.streams.secret("measurement", held, [], {}, plan._asdict())
        return chosen, prepared.whole, quality.release(counts, task.held_out_units, plan, secret).counts

    def claims(self) -> dict[str, Claim]:
        """Return the claim of each part, and of all releases of a training example."""
        choice, delta = self.choice or 0.0, self.plan.delta
        weights = math.sqrt(self.plan.steps) / self.plan.noise_multiplier
        table = accountant.gaussian_mu(choice + self.plan.epsilon, delta)
        return {
            "choice": Claim(choice, 0.0, 0.0),
            "weights": Claim(0.0, weights, delta),
            "table": Claim(0.0, table, delta),
            "all": Claim(choice, weights, delta),
        }


def runs(program: Program, data: Data, count: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Yield the outcomes of `count` runs. random: for the coins."""
    target = data.private.x[-data.images :]
    for trained, held in (random.random((count, 2)) < 0.5).tolist():
        private = data.private if trained else with_nothing(data.private, data.images, 0)
        measured = data.held if held else with_nothing(data.held, data.images, -1)
        chosen, model, table = program.release(data._replace(private=private, held=measured))

        # The mean margin of the target's examples, which all have the last class.
        outputs = logits(model, target).double()
        margin = float((outputs[:, -1] - outputs[:, :-1].mean(1)).mean())

        # The held-out target's cell of the table follows from the weights, as do all other counts in it.
        predictions = logits(model, data.held.x).argmax(1).tolist()
        places = list(zip(data.held.y.tolist(), predictions, strict=True))
        target_place, others = places[-1], places[: -data.images]
        yield Outcome(trained, held, chosen, margin, float(table[target_place]) - others.count(target_place))


# The adversary's evaluation


def scored(outcomes: list[Outcome]) -> dict[str, Scored]:
    """Return the adversary's scores for each part; those for "weights" only of runs with the most frequent choice, as
    a training is private for each choice."""
    half = len(outcomes) // 2
    trained, held, chosen, margins, counted = map(np.array, zip(*outcomes, strict=True))

    by_choice, by_margin = np.zeros(len(outcomes)), np.zeros(len(outcomes))
    for name in sorted(set(chosen)):
        here = chosen == name
        learned = here[:half]
        times = [int((learned & (trained[:half] == coin)).sum()) + 0.5 for coin in (True, False)]
        by_choice[here] = math.log(times[0] / times[1])
        if min(times) > FEWEST:
            by_margin[here] = gaussian_ratio(margins[here], trained[here], int(learned.sum()))

    most = chosen == max(sorted(set(chosen)), key=lambda name: int((chosen[:half] == name).sum()))
    return {
        "choice": Scored(by_choice, trained, half),
        "weights": Scored(by_margin[most], trained[most], int(most[:half].sum())),
        "table": Scored(counted, held, half),
        "all": Scored(by_choice + by_margin, trained, half),
    }


def gaussian_ratio(values: Array, included: NDArray[np.bool_], learned: int) -> Array:
    """Return the log likelihood ratio [n] of values [n], normal with two means and one deviation, as estimated from the
    first `learned` ones."""
    known, coins = values[:learned], included[:learned]
    within, outside = known[coins], known[~coins]
    variance = (within.var() + outside.var()) / 2
    difference = within.mean() - outside.mean()
    ratio: Array = difference / max(variance, 1e-30) * (values - (within.mean() + outside.mean()) / 2)
    return ratio


def lower_bounds(of: Scored, claim: Claim, confidence: float) -> LowerBounds:
    """Return the lower bounds, each with this confidence; the runs for learning decide the thresholds."""
    learned, judged = of.parts()
    level = (1 - confidence) / 2  # each of two rates is below its limit
    thresholds = np.unique(np.quantile(learned.scores, np.linspace(0, 1, THRESHOLDS), method="nearest")).tolist()
    limits = [upper_limits(*learned.errors(t), level) for t in thresholds]

    def bounded(bound: Callable[[float, float, Claim], float]) -> tuple[float, tuple[int, int, int, int]]:
        best = max(range(len(limits)), key=lambda i: bound(*limits[i], claim))
        wrong = judged.errors(thresholds[best])
        return bound(*upper_limits(*wrong, level), claim), wrong

    any_program, _ = bounded(epsilon_of_rates)
    planned_curve, wrong = bounded(epsilon_of_claim)
    return LowerBounds(claim.at(1.0), any_program, planned_curve, len(judged.scores), wrong[0], wrong[2])


def upper_limits(positives: int, outside: int, negatives: int, inside: int, level: float) -> tuple[float, float]:
    """Return Clopper and Pearson's upper limits of both rates, each at this level."""

    def limit(wrong: int, of: int) -> float:
        return 1.0 if wrong >= of else float(stats.beta.isf(level, wrong + 1, of - wrong))

    return limit(positives, outside), limit(negatives, inside)


def epsilon_of_rates(positives: float, negatives: float, claim: Claim) -> float:
    """Return the least epsilon at which a test of an (epsilon, claim.delta)-private program may have these error
    rates."""

    def ratio(first: float, second: float) -> float:
        right = 1 - claim.delta - second
        return math.log(right / first) if right > 0 else 0.0

    return max(0.0, ratio(positives, negatives), ratio(negatives, positives))


def epsilon_of_claim(positives: float, negatives: float, claim: Claim) -> float:
    """Return epsilon at the least scale at which the claimed curve allows these error rates."""

    def refuted(scale: float) -> bool:
        return negatives < claim.least(positives, scale)

    return claim.at(LARGEST if refuted(LARGEST) else last_refuted(refuted, LARGEST, 1e-4))


def least_negatives(pure: float, mu: float, positives: float) -> float:
    """Return the least rate of false negatives at this one of false positives, of randomised response at epsilon `pure`
    and a normal number that is shifted by mu deviations, together.

    A test accepts from some log likelihood ratio t on. That of the response is +- pure, with chances 1 / (1 + e^-pure)
    and the rest; that of the normal number has the mean +- mu^2 / 2 and the deviation mu.
    """
    if positives >= 1:
        return 0.0
    if mu == 0:
        return max(0.0, 1 - math.exp(pure) * positives, math.exp(-pure) * (1 - positives))
    right = 1 / (1 + math.exp(-pure))

    def above(t: float, mean: float, chance: float) -> float:
        up, down = (ndtr((mean + step - t) / mu) for step in (pure, -pure))
        return float(chance * up + (1 - chance) * down)

    def gap(t: float) -> float:
        return above(t, -(mu**2) / 2, 1 - right) - positives

    far = pure + mu**2 + 40 * mu  # every test accepts, or none
    return 1 - above(brentq(gap, -far, far), mu**2 / 2, right)


def fitted(folder: Path, units: int, epsilon: float, delta: float, choice: float | None) -> Program:
    """Return `pubsel fit` as it is attacked as a whole, for `units` training units. choice: the share of epsilon for
    choosing the public data; None: there are none. folder: for what a run keeps to resume."""
    words = ["private=attacked", f"epsilon={epsilon}", f"delta={delta}", "device=cpu", "threads=1"]
    words += [f"public=[{NEAR},{FAR}]", f"choice={choice}"] if choice else []
    with composed("fit", words) as values:
        settings = check(FitConfig, values)

    budget = divided(settings)
    with composed("run", words_of_run(settings, "pixels", budget)) as values:
        cell = Cell.of(canonical(check(RunConfig, values)), "audits")
    return Program.of(cell._replace(folder=folder), budget.choice, units)
