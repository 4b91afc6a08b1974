"""GEP, Figure 1: the noise of DP-SGD next to the gradient that it hides, at initialisation, for wider and wider
ResNet20:

    pubsel figure gep_figure1 pair.private=cifar10 model=resnet20 algorithm=dp_sgd epsilon=5 training.epochs=90

Noise and clip norm are those of `pubsel run` with these settings. The gradient is that of the first batch_size private
images, the sum of what clipping leaves of each, and the noise is what is added to it: both are divided by batch_size.
"""

import math

import pandas
import torch
from matplotlib.figure import Figure

from pubsel.algorithms.dp_sgd import DPSGD, clipped_sum
from pubsel.cell import Cell
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError, say
from pubsel.models.small import ResNet20
from pubsel.papers import figures
from pubsel.papers.theory.during_training import NOT_PRIVATE
from pubsel.rules import canonical, refuse_unit
from pubsel.settings.identity import short_name
from pubsel.settings.keys import FigureConfig, of_run

FILTERS = (4, 8, 16, 32, 64)  # of the first stage; ResNet20 has 16


def norms(given: FigureConfig) -> pandas.DataFrame:
    """Return a row for each width: parameters p, norm of the mean of the clipped gradients, norm of their noise;
    UsageError for other models and algorithms, or without a guarantee."""
    settings = canonical(of_run(given))
    refuse_unit(settings.pair, "this figure is")
    cell = Cell.of(settings)
    algorithm = cell.algorithm
    if not isinstance(algorithm, DPSGD) or settings.model.name != "resnet20" or settings.epsilon == math.inf:
        raise UsageError(
            "figure=gep_figure1 is of DP-SGD: model=resnet20 algorithm=dp_sgd epsilon=5 training.epochs=90"
        )

    task, device = cell.load_task(), cell.device
    _, spend, _ = cell.guarantee(len(task.private.x))
    assert spend is not None
    size = min(settings.training.batch_size, len(task.private.x))
    x, y = task.private.x[:size].to(device), task.private.y[:size].to(device)

    rows = []
    for filters in FILTERS:
        model = cell.network(task)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            channels, height, width = task.private.x.shape[1:]
            model.net = ResNet20(channels, height, width, task.classes, filters)
        engine = PerExampleGradients(model.eval().to(device), settings.training.chunk)
        total = torch.zeros(engine.size, dtype=torch.float64, device=device)
        for block, labels in zip(x.split(engine.chunk(x)), y.split(engine.chunk(x)), strict=True):
            (gradients,) = engine.blocks(block, labels)
            total += clipped_sum(gradients, algorithm.clip_norm)

        # in units of the clip norm until here
        scale = algorithm.clip_norm / size
        noise = spend.noise_multiplier * math.sqrt(engine.size)
        rows.append(
            {"filters": filters, "p": engine.size, "gradient": scale * float(total.norm()), "noise": scale * noise}
        )
        say(f"  {engine.size:,} parameters: gradient {rows[-1]['gradient']:.4g}, noise {rows[-1]['noise']:.4g}")
    return pandas.DataFrame(rows).assign(ratio=lambda frame: frame["noise"] / frame["gradient"])


def draw(frame: pandas.DataFrame, title: str) -> Figure:
    """Draw both norms against the number of parameters."""
    norms = {"gradient": (frame["p"], frame["gradient"]), "noise of a step": (frame["p"], frame["noise"])}
    figure, axis = figures.line_plot(norms, xscale="log", yscale="log", xlabel="parameters", ylabel="norm")
    with figures.style():
        axis.set_xticks(frame["p"], [f"{p:,}" for p in frame["p"]], rotation=30)
        low, high = axis.get_ylim()
        steps = [step * 10.0**power for power in range(-9, 10) for step in (1, 2, 5)]
        ticks = [tick for tick in steps if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_title(f"{title}\n{NOT_PRIVATE}", fontsize=7)
    return figure


def drawn(settings: FigureConfig) -> figures.Drawn:
    """Return the figure, with its numbers."""
    frame = norms(settings)
    private = short_name(settings.pair.private)
    title = f"{private}, epsilon {settings.epsilon:g}, {settings.training.epochs:g} epochs"
    about = f"{NOT_PRIVATE}\n{title}, batches of {settings.training.batch_size}, seed {settings.seed}"
    return figures.Drawn(f"gep_figure1-{private}", frame, draw(frame, title), about)
