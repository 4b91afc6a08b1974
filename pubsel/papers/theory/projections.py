"""Part of a gradient or a separator that a subspace keeps, as figures that look at private data without noise:

    pubsel figure separability model=mobilenetv2 sets=[cifar10,flowers5]             PILLAR, Figure 3
    pubsel figure reconstruction +experiment=adamix_ours pair.private=flowers5 algorithm.rank=1250   AdaMix, Figure 6

separability: xi_k of features and of pixels (separability.py). reconstruction: what the projection of AdaMix loses of
the private gradient, at each step of the training that the settings describe.
"""

import itertools
import tempfile
from functools import partial
from pathlib import Path

import pandas
import torch

from pubsel import data
from pubsel.algorithms import Mechanism, View, added
from pubsel.algorithms.adamix import AdaMix, project, public_gradient, subspace_around
from pubsel.attacks.noise import watched
from pubsel.cell import Cell, choose_device
from pubsel.data import Split, features
from pubsel.gradients.matrix import GradientMatrix
from pubsel.messages import UsageError, say
from pubsel.papers import figures
from pubsel.papers.theory.separability import separability
from pubsel.rules import canonical, refuse_unit
from pubsel.settings.identity import short_name
from pubsel.settings.keys import Backbone, FigureConfig, of_run
from pubsel.training.loop import Job, fit
from pubsel.training.once import training_secret

PIXELS = Backbone(architecture="pixels")
KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MOST = 500  # examples


def drawn(settings: FigureConfig) -> figures.Drawn:
    """Return the figure that the settings name, with its numbers."""
    if settings.figure == "separability":
        frame = of_sets(settings)
        kinds = frame.groupby(["private", "features"], sort=False)
        lines = {", ".join(key): (rows["k"], rows["xi"]) for key, rows in kinds}
        drawing, _ = figures.line_plot(lines, xscale="log", xlabel="k", ylabel="xi_k", ylim=(0, 1))
        return figures.Drawn("separability", frame, drawing)
    frame = reconstruction_curve(settings)
    names = {"public gradient's subspace": "public", "random subspace": "random"}
    of_steps = {name: (frame["step"], frame[column]) for name, column in names.items()}
    label = "relative error of the private gradient"
    drawing, axis = figures.line_plot(of_steps, xlabel="step", ylabel=label, ylim=(0, None))
    about = f"{frame['private'][0]}, {frame['model'][0]}, {frame['rank'][0]} dimensions (not private)"
    axis.set_title(about, fontsize=9)
    return figures.Drawn("reconstruction", frame, drawing)


# Separability


def of_sets(settings: FigureConfig) -> pandas.DataFrame:
    """Return xi_k for the first two classes of each data set, on the features of the model and on pixels; UsageError
    for a model that has no features."""
    if settings.model.backbone is None:
        raise UsageError(f"model={settings.model.name} has no features: take one that does, such as scattering")
    device = choose_device(settings.device)
    backbones = {settings.model.name: settings.model.backbone, "pixels": PIXELS}

    rows = []
    names = settings.sets or [settings.pair.private]
    for name, (model, backbone) in itertools.product(names, backbones.items()):
        source = data.open_dataset(name, settings.data_root, False, keep=settings.keep)
        sets = features.of_source(short_name(name), source, backbone, settings.data_root, device, say)
        pair = sets.train.y < 2
        x, y = sets.train.x[pair][:MOST].double().numpy(), sets.train.y[pair][:MOST].numpy()

        # more components than examples or dimensions do not exist
        ks = [k for k in KS if k <= min(x.shape)]
        shown = {"private": short_name(name), "features": model}

        rows += [{**shown, "k": k, "xi": xi} for k, xi in zip(ks, separability(x, y, ks), strict=True)]

    return pandas.DataFrame(rows)


# Reconstruction


Errors = list[dict[str, float]]  # of a step


def losing(rank: int, errors: Errors, inner: Mechanism, view: View, step: int) -> Mechanism:
    """Return a mechanism of AdaMix that appends to `errors` how much of the private gradient each projection loses,
    before the noise: NOT private."""
    weight = next(view.model.parameters())
    gradient = public_gradient(view.gradients, view.labelled("adamix"))
    gradient = gradient[: weight.numel()].view_as(weight)  # without the bias

    noise = torch.from_numpy(view.random("any", step).standard_normal((weight.shape[1], rank)))
    bases = {"public": subspace_around(gradient, rank, view.random("directions", step))}
    bases["random"] = (torch.linalg.qr(noise.to(weight)).Q, True)

    def sums(gradients: GradientMatrix, total: torch.Tensor | None = None) -> torch.Tensor:
        part = inner.clipped_sum(gradients)
        rows = part[: weight.numel()].view_as(weight).to(weight)  # sums of private rows are in float64
        lost = {name: rows - project(rows, *basis) for name, basis in bases.items()}
        errors.append({"step": step, **{name: float(left.norm() / rows.norm()) for name, left in lost.items()}})
        return added(part, total)

    return inner._replace(clipped_sum=sums)


def reconstruction_curve(given: FigureConfig) -> pandas.DataFrame:
    """Return the relative error of the private gradient on the public subspace, and on a random one, at each step of a
    run; UsageError for settings of another algorithm."""
    settings = canonical(of_run(given))
    refuse_unit(settings.pair, "this figure is")
    cell = Cell.of(settings)._replace(device=torch.device("cpu"))
    algorithm = cell.algorithm
    if not isinstance(algorithm, AdaMix) or algorithm.rank is None:
        raise UsageError(
            "figure=reconstruction is of AdaMix with a projection: +experiment=adamix_ours algorithm.rank=1250"
        )

    task = cell.load_task()
    task = task.each(lambda split: Split(torch.nn.functional.normalize(split.x, dim=1), split.y))
    plan, spend, _ = cell.guarantee(len(task.private.x))
    model = cell.network(task)
    secret = training_secret(cell, task, model, plan, spend)

    # the secret of the run itself, so that the steps are those that `pubsel run` takes
    errors = Errors()
    with tempfile.TemporaryDirectory() as folder:
        noise_multiplier = spend.noise_multiplier if spend else 0.0
        checkpoint = Path(folder) / "checkpoint.pt"
        followed = watched(algorithm, partial(losing, algorithm.rank, errors))
        fit(model, task, Job(followed, plan, noise_multiplier, settings.training, "figure", checkpoint), secret)

    frame = pandas.DataFrame(errors).groupby("step", as_index=False).mean()
    return frame.assign(private=settings.pair.private, model=settings.model.name, rank=algorithm.rank)
