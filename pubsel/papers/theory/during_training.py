"""Quantities of the papers' theory, measured while a network trains:

    pubsel figure gsd_figure1 pair.private=cifar10 model=resnet20 algorithm=non_private sets=[cifar10,cifar100,svhn]

What trains is what `pubsel run` would train with these settings, bit for bit. Before some of its steps, on the private
batch of the step and the first pair.m images of each of the public `sets`, this is measured:

gsd_figure1   GSD of the batch to each public set, in [0, 1] (GSD, Figure 1; the workshop paper's panels)
gsd_figure3   the 500 largest singular values of private and public gradients (GSD, Figure 3)
gsd_lemma41   reconstruction error of the batch's gradients, next to what bounds it (GSD, Lemma 4.1)
gep_figure2   stable rank of the batch's gradients, by parameter group (GEP, Figure 2)
gep_figure4   projection error of the batch's mean gradient on GEP's basis from each public set (GEP, Figure 4)
gep_figure5   stable rank of the residual gradients, next to the gradients' (GEP, Figure 5; there of the full batch)
gep_figure7   projection error on a random basis (GEP, Figure 7)

Public images have random labels; in gep_figure4 those of the private set appear with their true labels, too. All of it
looks at private gradients without noise. The same command resumes what was stopped, and draws again what was measured.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np
import pandas
import torch
from matplotlib.ticker import LogFormatter
from torch import Tensor

from pubsel import algorithms, data, models, records
from pubsel.algorithms import Algorithm, Freezes, Mechanism, Solves, View
from pubsel.algorithms.gep import GEP, Groups
from pubsel.cell import Cell
from pubsel.data import Split
from pubsel.distances import build
from pubsel.distances.gsd import GSD
from pubsel.gradients import subspace
from pubsel.gradients.matrix import Basis, DenseGradients, GradientMatrix, gpu_precision
from pubsel.messages import UsageError, say
from pubsel.papers import figures
from pubsel.papers.theory import spectra
from pubsel.privacy.sampling import Schedule, poisson_sample
from pubsel.rules import canonical, has_paths, refuse_unit
from pubsel.settings.identity import as_json, digest_of, short_name
from pubsel.settings.keys import FigureConfig, Labels, RunConfig, of_run, public_sets
from pubsel.settings.methods import option
from pubsel.training.loop import Job, fit
from pubsel.training.once import training_secret

NOT_PRIVATE = "Not differentially private: measured on private gradients without noise."
LARGEST = 500  # singular values
TEXT = {
    "error": "reconstruction error ‖R‖",
    "sharp": "a sharper bound",
    "trivial": "s₁, of any basis",
    "reported": "the lemma's bound, GSD as reported",
    "stated": "the lemma's bound",
    "index": "index of the singular value",
}
Row = dict[str, Any]


class Snapshot(NamedTuple):
    """A step before it is taken, and what is needed to measure it."""

    step: int
    view: View  # current weights, and what an algorithm may draw
    batch: Split  # the private examples of this step
    public: dict[str, Split]
    private: str  # name of the private set
    ks: list[int]
    distance: GSD
    gep: GEP

    def on(self, public: str) -> View:
        """Return what GEP would see with this public set."""
        return self.view._replace(public=self.public[public], same_classes=public == self.private)

    def gradients(self, split: Split) -> GradientMatrix:
        """Return G [n, p] at the current weights, whole; the next call overwrites it."""
        (block,) = self.view.gradients.blocks(split.x, split.y, rows=len(split.x))
        return block

    def exact(self, split: Split) -> Tensor:
        """Return the same as float64 rows [n, p], to keep."""
        block = self.gradients(split)
        every = torch.ones(len(block), dtype=torch.bool, device=split.x.device)
        return block.written_out(every).double()

    def with_random_labels(self, public: str) -> Split:
        """Return a public set with labels that are new at each step, and the same for all sets."""
        labels = self.on(public).labels(Labels.random, self.step, "during_training")
        return Split(self.public[public].x, labels)

    def groups(self) -> dict[str, slice]:
        """Return the columns of GEP's parameter groups."""
        slices = models.parameter_groups(self.view.model, self.view.gradients.offsets)
        return {name.removeprefix("net."): columns for name, columns in slices.items()}

    def basis(self, public: str, k: int, labels: Labels = Labels.random) -> Basis:
        """Return GEP's anchor subspace."""
        gep = dataclasses.replace(self.gep, k=k, labels=labels, groups=Groups.layers)
        return gep.basis(self.on(public), self.step)


def gsd_figure1(moment: Snapshot) -> Iterator[Row]:
    """Yield GSD (Algorithm 1) between the batch and each public set."""
    for k in moment.ks:
        for public, value in distances_at(moment, k).items():
            yield {"public": public, "k": k, "gsd": value}


def distances_at(moment: Snapshot, k: int) -> dict[str, float]:
    """Return GSD at the current weights, of as many examples on each side as both have."""
    m = min(len(split.x) for split in (moment.batch, *moment.public.values()))
    once = dataclasses.replace(moment.distance, k=k, m=m, initialisations=1)
    key = f"during_training {moment.step}"
    classes = max(2, moment.view.classes)
    values = once.measure(lambda _: moment.view.model, moment.batch, moment.public, classes, key)
    return {public: of_set[0] for public, of_set in values.items()}


def gsd_figure3(moment: Snapshot) -> Iterator[Row]:
    """Yield singular values. energy: share of ||G||_F^2 in those up to this one. The batch has its true labels."""
    splits = {f"{moment.private} (private batch)": moment.batch}
    splits |= {public: moment.with_random_labels(public) for public in moment.public}
    for name, split in splits.items():
        values = spectra.singular_values(DenseGradients(moment.exact(split)).gram())
        energy = values.square().cumsum(0) / values.square().sum()
        for i in range(min(LARGEST, len(values))):
            row = {"examples": name, "index": i + 1}
            yield row | {"singular_value": float(values[i]), "energy": float(energy[i])}


def gsd_lemma41(moment: Snapshot) -> Iterator[Row]:
    """Yield error and bounds in units of s_1. reported: the stated bound with the distance as the paper's tables have
    it, GSD / sqrt(k); algorithm1: with the GSD that the authors' code measures on these weights, of random labels and
    rows of unit length (Algorithm 1 leaves the rows as they are)."""
    private = DenseGradients(moment.exact(moment.batch))
    gram, labelled = private.gram(), {public: moment.with_random_labels(public) for public in moment.public}
    widest = max(moment.ks)
    largest = {public: subspace.top_k(moment.gradients(split), widest) for public, split in labelled.items()}

    for k in moment.ks:
        measured = distances_at(moment, k)
        for public, v in largest.items():
            w = private.project(Basis([slice(0, len(v))], [v[:, :k]]))
            bound = spectra.reconstruction(gram, w)
            left = bound.s_next / bound.s_1

            row = {"public": public, "k": k, "s_1": bound.s_1, "s_next": left, "gsd": bound.gsd, "sine": bound.sine}
            row |= {key: getattr(bound, key) / bound.s_1 for key in ("largest_row", "error", "sharp", "stated")}
            row["reported"] = math.sqrt(2 / k) * bound.gsd + left
            yield row | {"algorithm1": math.sqrt(2 * k) * measured[public] + left, "trivial": 1.0}


def gep_figure2(moment: Snapshot) -> Iterator[Row]:
    """Yield the stable rank of each group's columns of G, and of all."""
    rows = moment.exact(moment.batch)
    for group, columns in {**moment.groups(), "all": slice(0, rows.shape[1])}.items():
        part = DenseGradients(rows[:, columns].clone())
        yield {"group": group, "p": part.rows.shape[1], "stable_rank": spectra.stable_rank(part.gram())}


def gep_figure4(moment: Snapshot) -> Iterator[Row]:
    """Yield ||r / n|| / ||g||: g the mean gradient of the batch, r the sum of the residuals, without clipping."""
    for public, k in itertools.product(moment.public, moment.ks):
        row = {"public": public, "labels": "random labels", "k": k}
        yield from errors(moment, row, moment.basis(public, k))

        # on the private set itself the true labels show what random ones cost
        if public == moment.private:
            labelled = moment.basis(public, k, Labels.given)
            yield from errors(moment, row | {"labels": "own labels"}, labelled)


def errors(moment: Snapshot, row: Row, basis: Basis) -> Iterator[Row]:
    """Yield the projection error on all parameters, and on each group."""
    n = len(moment.batch.x)
    g = moment.gradients(moment.batch).combine(torch.full((n,), 1 / n, device=moment.batch.x.device))
    yield {**row, "group": "all", "projection_error": spectra.projection_error(g, basis)}
    for group, columns, b in zip(moment.groups(), basis.slices, basis.blocks, strict=True):
        of_group = Basis([slice(0, len(b))], [b])
        yield {**row, "group": group, "projection_error": spectra.projection_error(g[columns], of_group)}


def gep_figure5(moment: Snapshot) -> Iterator[Row]:
    """Yield for each group the gradients' stable rank, and that of what GEP's basis from each public set leaves."""
    rows = moment.exact(moment.batch)
    for k in moment.ks:
        bases = {public: moment.basis(public, k) for public in moment.public}
        for i, (group, columns) in enumerate(moment.groups().items()):
            part = DenseGradients(rows[:, columns].clone())
            gram = part.gram()
            row = {"group": group, "p": part.rows.shape[1], "k": k}
            yield {**row, "matrix": "gradients", "vectors": 0, "stable_rank": spectra.stable_rank(gram)}

            for public, basis in bases.items():
                b = basis.blocks[i].double()
                left = spectra.stable_rank(spectra.residual_gram(gram, part.rows @ b))
                yield {**row, "matrix": f"residuals, {public}", "vectors": b.shape[1], "stable_rank": left}


def gep_figure7(moment: Snapshot) -> Iterator[Row]:
    """Yield the errors on as many Gaussian vectors in each group as GEP's basis would have, made orthonormal."""
    slices = list(moment.groups().values())
    sizes = [s.stop - s.start for s in slices]
    for k in moment.ks:
        source = moment.view.random(f"gaussian {k}", moment.step)
        blocks = []
        for size, rank in zip(sizes, subspace.allocate(k, sizes, limit=k), strict=True):
            blocks.append(torch.linalg.qr(torch.from_numpy(source.standard_normal((size, rank)))).Q)
        basis = Basis(slices, [b.to(moment.batch.x.device, torch.float32) for b in blocks])
        yield from errors(moment, {"k": k}, basis)


class Drawing(NamedTuple):
    """A figure and its measurement: a panel for each value of the columns `panel`, in it a line for each value
    of the column `line` and each column of `y`."""

    measure: Callable[[Snapshot], Iterator[Row]]
    label: str
    panel: list[str]
    line: str | None
    y: list[str]
    ks: tuple[int, ...] = ()  # unless k is given
    points: int = 20  # unless given
    x: str = "epoch"
    logarithmic: bool = False
    first_epoch: bool = False  # as many points in the first epoch, and a panel of it
    public: bool = True  # whether it looks at public sets


BOUNDS = ["error", "sharp", "trivial", "reported", "stated"]
LOST = "relative projection error"
FIGURES = {
    "gsd_figure1": Drawing(gsd_figure1, "GSD, from 0 to 1", [], "public", ["gsd"], (16,), first_epoch=True),
    "gsd_figure3": Drawing(
        gsd_figure3, "singular value", ["step"], "examples", ["singular_value"], (), 3, "index", logarithmic=True
    ),
    "gsd_lemma41": Drawing(gsd_lemma41, "in units of s₁", ["k", "public"], None, BOUNDS, (1, 16), logarithmic=True),
    "gep_figure2": Drawing(gep_figure2, "stable rank", [], "group", ["stable_rank"], logarithmic=True, public=False),
    "gep_figure4": Drawing(gep_figure4, LOST, ["public", "labels"], "k", ["projection_error"], (50, 200, 500)),
    "gep_figure5": Drawing(
        gep_figure5, "stable rank", ["group", "p"], "matrix", ["stable_rank"], (500,), logarithmic=True
    ),
    "gep_figure7": Drawing(gep_figure7, LOST, [], "k", ["projection_error"], (50, 200, 500), public=False),
}


def moments(plan: Schedule, points: int, first_epoch: bool) -> set[int]:
    """Return `points` steps, evenly from the first to the last; and as many of the first epoch if it is shown."""
    ends = [plan.steps, min(plan.steps, round(1 / plan.rate))] if first_epoch else [plan.steps]
    return {round(step) for end in ends for step in np.linspace(0, end - 1, points)}


def follow(name: str, settings: RunConfig, sets: list[str], ks: list[int], points: int) -> tuple[pandas.DataFrame, str]:
    """Train as `pubsel run` with these settings would, and measure on the way. Return a frame of `step`, `epoch` and
    what the figure's function yields; and a line on the program that measured it. Rows are kept next to the
    checkpoint, so that the same call resumes what was stopped. UsageError if gradients have fewer than k
    directions."""
    origin = records.provenance()
    program = f"commit {origin['commit']}, torch {origin['versions']['torch']}, {origin['hardware']}"
    cell = Cell.of(canonical(settings))
    algorithm = cell.algorithm
    distance, gep = methods_of(settings, algorithm, sets, ks, FIGURES[name])

    task, device = cell.load_task(), cell.device
    public = {key: public_set(key, settings, task.private, device) for key in sets}
    plan, spend, _ = cell.guarantee(len(task.private.x))
    identity, model = cell.name, cell.network(task)
    secret = training_secret(cell, task, model, plan, spend)

    def look(view: View, step: int) -> list[Row]:
        # the sample that the step itself will draw
        chosen = poisson_sample(secret("sample", step), plan.n, plan.rate)
        batch = Split(task.private.x[chosen].to(device), task.private.y[chosen].to(device))
        moment = Snapshot(step, view, batch, public, settings.pair.private, ks, distance, gep)
        try:
            with gpu_precision("ieee"):
                return [{"step": step, "epoch": step * plan.rate, **row} for row in FIGURES[name].measure(moment)]
        except ValueError as error:
            raise UsageError(f"step {step}: {error}; lower k, or raise training.batch_size or pair.m") from None

    what: dict[str, Any] = {"name": name, "run": identity, "public": sets, "ks": ks, "points": points}
    what |= {"pair": as_json(settings.pair), "distance": as_json(distance), "gep": as_json(gep)}
    folder = Path(settings.results) / "during_training" / f"{name}-{digest_of(what)}"
    kept, checkpoint, take = folder / "measured.csv", folder / "checkpoint.pt", algorithm.mechanism
    with records.lock_folder(folder):
        stays = checkpoint.exists() or not has_paths([settings.pair.private, *sets])  # a folder may have changed
        rows = pandas.read_csv(kept, comment="#").to_dict("records") if kept.exists() and stays else []
        missing = moments(plan, points, FIGURES[name].first_epoch) - {row["step"] for row in rows}

        def watched(view: View, step: int) -> Mechanism:
            if step in missing:
                rows.extend(look(view, step))
                records.write_table(pandas.DataFrame(rows), kept, program)
                say(f"  {name}: measured before step {step} of {plan.steps}")
            return take(view, step)

        if missing:
            algorithm.mechanism = watched  # type: ignore[method-assign]
            noise = spend.noise_multiplier if spend else 0.0
            job = Job(algorithm, plan, noise, settings.training, identity, checkpoint)
            fit(model, task, job, secret)
            checkpoint.unlink(missing_ok=True)
        return pandas.read_csv(kept, comment="#"), kept.read_text().splitlines()[0].removeprefix("# ")


def methods_of(
    settings: RunConfig, algorithm: Algorithm, sets: list[str], ks: list[int], figure: Drawing
) -> tuple[GSD, GEP]:
    """Return the distance, and GEP's basis (of the run if it is GEP, else of conf/algorithm/gep.yaml);
    UsageError if it cannot be followed."""
    gep = copy.copy(algorithm) if isinstance(algorithm, GEP) else algorithms.build(option("algorithm", "gep"))
    distance = build(settings.distance)
    assert isinstance(gep, GEP)
    if not isinstance(distance, GSD):
        raise UsageError("what is measured is GSD: give distance=gsd")

    refuse_unit(settings.pair, "this figure is")
    if isinstance(algorithm, Freezes | Solves) or settings.model.backbone is not None:
        raise UsageError("this follows a network: leave out model.backbone, and take algorithm=non_private or another")
    if settings.privacy.secure_noise:
        raise UsageError("privacy.secure_noise=true: the batch of a step cannot be known then; set it to false")
    if figure.public and not sets:
        raise UsageError("sets=[NAME,NAME]: give at least one public set")
    if settings.pair.m is not None and figure.public and max(ks, default=0) > settings.pair.m:
        raise UsageError(f"k={max(ks)} is more than the pair.m={settings.pair.m} public images: lower k")
    return distance, gep


def public_set(name: str, settings: RunConfig, private: Split, device: torch.device) -> Split:
    """Return its first pair.m images, in the shape of the private ones."""
    pair = settings.pair
    read = data.Reader(settings.data_root, settings.download, keep=settings.keep)
    split, notes = data.public_examples(name, pair.m, private, read, pair.convert, pair.private)
    for note in notes:
        say(f"  {note}")
    return Split(split.x.to(device), split.y.to(device))


def order_kept(frame: pandas.DataFrame) -> tuple[int, int, int]:
    """Return in how many of the moments the public sets have the order by GSD of the first one, in how many the nearest
    is the same, and how many moments there are."""
    orders = [tuple(rows.sort_values("gsd")["public"]) for _, rows in frame.groupby(["step", "k"])]
    same, nearest = (sum(order[:n] == orders[0][:n] for order in orders) for n in (len(orders[0]), 1))
    return same, nearest, len(orders)


def panels(frame: pandas.DataFrame, figure: Drawing) -> list[tuple[str, str, pandas.DataFrame]]:
    """Return title, x axis and rows of each panel."""
    if figure.first_epoch:
        return [("first epoch", "step", frame[frame["epoch"] < 1]), ("whole run", "epoch", frame)]
    if not figure.panel:
        return [("", figure.x, frame)]
    result = []
    for values, rows in frame.groupby(figure.panel, sort=False):
        named = zip(figure.panel, values, strict=True)
        title = ", ".join(v if isinstance(v, str) else f"{column} = {v:,}" for column, v in named)
        result.append((title, figure.x, rows))
    return result


class Plain(LogFormatter):
    """Ticks that LogFormatter labels, as 0.4 and 4: not 4e-01, not 4 x 10^0."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw(frame: pandas.DataFrame, figure: Drawing, title: str) -> matplotlib.figure.Figure:
    """Draw a panel for each of `panels`, all with one scale of y; frame: the rows that are drawn."""
    parts = panels(frame, figure)
    across = frame[figure.panel[-1]].nunique() if figure.panel else len(parts)
    down = -(-len(parts) // across)

    with figures.style():
        page = matplotlib.figure.Figure(figsize=(4 * across + 0.6, 3.4 * down + 0.5), layout="constrained")
        axes = page.subplots(down, across, squeeze=False, sharey=True)
        for axis in axes.flat[len(parts) :]:
            axis.set_axis_off()

        for axis, (heading, x, rows) in zip(axes.flat, parts, strict=False):
            # a line for each column of y and each value of the column `line`
            lines = [(None, rows)] if figure.line is None else list(rows.groupby(figure.line, sort=False))
            each = list(itertools.product(figure.y, lines))
            for (y, (value, part)), how in zip(each, figures.line_styles(range(len(each))).values(), strict=True):
                label = value if isinstance(value, str) else f"{figure.line} = {value}"
                label = TEXT[y] if value is None else label
                label += f" (p = {part['p'].iloc[0]:,})" if figure.line == "group" else ""
                part = part.sort_values(x)
                axis.plot(part[x], part[y], markevery=max(1, len(part) // 12), label=label, **how)
            axis.set(xlabel=TEXT.get(x, x), title=heading)
            axis.set(yscale="log" if figure.logarithmic else "linear")
            axis.set(xscale="log" if x == "index" else "linear")
            for scaled, logarithmic in ((axis.yaxis, figure.logarithmic), (axis.xaxis, x == "index")):
                if logarithmic:
                    scaled.set_major_formatter(Plain())
                    scaled.set_minor_formatter(Plain())

        # all panels have the same lines, so the first one's legend serves for all
        for axis in axes[:, 0]:
            axis.set_ylabel(figure.label)
        handles = axes[0][0].get_legend_handles_labels()
        page.legend(*handles, loc="outside lower center", ncols=min(len(handles[0]), 2 * across))
        page.suptitle(f"{title}\n{NOT_PRIVATE}", fontsize=9)

    return page


def drawn(settings: FigureConfig) -> figures.Drawn:
    """Measure while the settings of `pubsel run` among these train, and draw the figure; UsageError for combined
    sets."""
    name, trained = settings.figure, of_run(settings)
    figure = FIGURES[name]
    sets = settings.sets or public_sets(trained.pair.public)
    if not all(isinstance(public, str) for public in sets):
        raise UsageError(f"figure={name}: sets=[A,B] takes single sets, no combined ones")

    sets = sets if figure.public else []
    ks, count = settings.k or list(figure.ks), settings.points or figure.points
    frame, origin = follow(name, trained, sets, ks, count)

    # the title states what a reader needs to compare it with the paper's figure
    private, label = short_name(settings.pair.private), settings.label
    title = f"{name}: {private}, {settings.model.name}, {settings.algorithm['name']}"
    title += f", batches of {settings.training.batch_size}"
    title += f", {settings.pair.m} images of each public set" if sets else ""

    # all parameters, if groups have no panels or lines of their own; of each line least, median and largest value
    by = [column for column in (*figure.panel, figure.line) if column]
    all_alone = "group" in frame and "group" not in by
    shown = frame[frame["group"] == "all"] if all_alone else frame
    values = shown.groupby(by, sort=False)[figure.y].agg(["min", "median", "max"])
    text = values.to_string(float_format="%.4g")
    if name == "gsd_figure1":
        order = "of the first step, the order holds in {}, the nearest set in {} of {} steps"
        text += "\n" + order.format(*order_kept(frame))

    return figures.Drawn(
        "-".join([name, private, settings.model.name, *([] if label == "paper" else [label])]),
        frame,
        draw(shown, figure, title),
        f"{NOT_PRIVATE}\n{title}, seed {settings.seed}\n{origin}",
        f"{text}\n{NOT_PRIVATE}",
    )
