"""The memory that a run needs, counted before it starts from what is large. Of the examples only number and shape are
read."""

from typing import NamedTuple

import torch
from torch import nn

from pubsel import models
from pubsel.algorithms import Freezes
from pubsel.cell import Cell
from pubsel.data import Split, Task
from pubsel.distances import Distance, frechet, otdd
from pubsel.distances.gsd import GSD, engine_of
from pubsel.distances.inputs import penultimate
from pubsel.distances.task2vec import Task2Vec
from pubsel.distances.whitening import Whitening
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.people import PeopleGradients
from pubsel.gradients.slots import COPIED
from pubsel.messages import UserError, gib, say
from pubsel.models.layers import split
from pubsel.models.memory import free
from pubsel.privacy.sampling import Schedule
from pubsel.training.loop import engine, view_of

REMEDIES = {
    "training": "lower algorithm.k, if it has one, or training.chunk, or take a smaller model",
    "distance": "lower distance.m, or set distance=none",
    "passes": "lower training.chunk",
    "prepared": "set model.once=false, if it is true, or take fewer examples",
    "preparing": "take fewer public examples, or a network with fewer features",
}


class Memory(NamedTuple):
    """Bytes that a run holds at once in addition to what is loaded already, by what holds them."""

    training: int  # gradients and bases
    distance: int  # its passes included
    passes: int  # of one chunk through the network
    prepared: int = 0  # features or outputs that training reads in place of the data
    preparing: int = 0  # while these are computed

    @property
    def peak(self) -> int:
        """Return the most bytes held at once: distance, preparation and training follow each other."""
        return max(self.prepared + max(self.training + self.passes, self.preparing), self.distance)


def check_memory(cell: Cell, task: Task, plan: Schedule, distance: Distance | None) -> None:
    """Print the memory that a cell needs; raise UserError, with the setting to change, if it is more than its device
    has free. distance: what is measured before training."""
    # the distance is measured before training, and at other networks
    needs = of_training(cell, task, plan)
    if distance is not None and task.public is not None:
        needs = needs._replace(distance=held_by(distance, cell.network(task, 0), task.private, task.public))
    refuse_memory(needs, cell.device)
    say(f"  about {gib(needs.peak)} of memory in addition to the data")


def refuse_memory(needs: Memory, device: torch.device) -> None:
    """Raise UserError, with the setting to change, if `needs` is more than the device has free."""
    available, held = free(device), needs._asdict()
    if needs.peak > available:
        remedy = REMEDIES[max(held, key=lambda part: held[part])]
        raise UserError(
            f"this run needs about {gib(needs.peak)} of memory and {gib(available)} are free on {device}: {remedy}"
        )


def of_training(cell: Cell, task: Task, plan: Schedule) -> Memory:
    """Return what training on `task` needs, by the sizes of what is held. UsageError if it cannot begin."""
    # nothing is computed from examples: zeros of their shape stand in
    model, seen = stand_in(cell, task)
    gradients = engine(model, cell.training.chunk)
    view = view_of(model, gradients, seen, cell.name, plan)
    cell.algorithm.check(view)
    means = task.people is not None or cell.training.augment is not None
    chunk = (PeopleGradients(gradients, torch.empty(0)) if means else gradients).chunk(seen.private.x)

    # float64 sum and noise, direction, momentum, and the rows of a pass: of examples, and of means over these
    vectors = 6 + (2 * chunk if means else chunk)
    numbers = cell.algorithm.numbers(view) + vectors * gradients.size
    training = numbers * next(model.parameters()).element_size()
    if plan.rate == 1 and not means and (copied := seen.private.x.nbytes) <= COPIED:
        training += copied  # slot by slot
    needs = Memory(training, distance=0, passes=passes(model, seen.private, chunk))
    return needs if seen is task else with_prepared(needs, task, seen, cell.algorithm.first_share > 0)


def stand_in(cell: Cell, task: Task) -> tuple[nn.Module, Task]:
    """Return a network like the one that will train, and the task as that will see it, with shapes in place of examples
    that are computed later."""
    if isinstance(cell.algorithm, Freezes):
        task = task._replace(offsets=cell.algorithm.offsets)
        task = shaped(task, cell.algorithm.width(task.private.x.shape[1]))
        return cell.network(task), task
    model = cell.network(task)
    if not (cell.model.once and isinstance(model, models.Network)):
        return model, task
    _, above = split(model, task.private.x)
    return above, shaped(task, sum(shape.numel() for shape in above.shapes))


def shaped(task: Task, width: int) -> Task:
    """Return the task with as many examples of another width, zeros that take no memory."""
    return task.each(lambda part: Split(torch.zeros(1, 1).expand(len(part.x), width), part.y))


def with_prepared(needs: Memory, task: Task, seen: Task, releases: bool) -> Memory:
    """Return `needs` with float32 rows in place of each example, those of `seen`; the largest split is there twice, in
    parts and put together. For features also what their principal components are computed by, as it was measured: the
    public ones twice in float64 and five matrices [d, d]; or, if a private matrix `releases` them, eight, and 2^14
    private ones."""
    width = seen.private.x.shape[1]
    splits = (seen.private, seen.public, seen.test, seen.validation)
    sizes = [4 * width * len(part.x) for part in splits if part is not None]

    preparing = max(sizes)
    if task.private.x.dim() == 2 and task.public is not None and width < task.public.x.shape[1]:
        (m, d), n = task.public.x.shape, min(len(task.private.x), 2**14)
        components = max(16 * m, 64 * d + 20 * n) if releases else 16 * m + 40 * d
        preparing = max(preparing, d * components)
    return needs._replace(prepared=sum(sizes), preparing=preparing)


def held_by(distance: Distance, model: nn.Module, private: Split, public: Split) -> int:
    """Return the bytes that a distance holds at once: those of a pass, of examples or features, and of matrices [m, m]
    and [p, k]. What POT, LAPACK and scikit-learn hold apart from tensors was measured. A distance that is not in this
    package counts as one of features."""
    m = distance.m
    gradients = engine_of(model, distance) if isinstance(distance, GSD) else PerExampleGradients(model)
    chunk = gradients.chunk(private.x)
    around = passes(model, private, chunk)

    if isinstance(distance, GSD):  # G and two bases, float32 and float64; the Gram matrix
        return 4 * (m + 4 * distance.k) * gradients.size + 24 * m**2 + around
    if isinstance(distance, otdd.OTDD):
        return 8 * m * private.x[0].numel() + 52 * m**2 + around

    # distances of features [m, d]
    d = penultimate(model, public.x[:1]).shape[1]
    if isinstance(distance, Whitening):  # private rows with their map and parts, float64; their moments
        rows = distance.private_examples(len(private.x))
        return 32 * rows * (d + 1) + 16 * min(rows, d + 1) ** 2 + 16 * m * d + around
    if isinstance(distance, frechet.Frechet):
        return 40 * m * d + 16 * min(m, d) ** 2 + around
    if isinstance(distance, Task2Vec):
        return 32 * m * d + 4 * chunk * gradients.size + around
    return 16 * m * d + 40 * m**2 + around


def passes(model: nn.Module, private: Split, chunk: int) -> int:
    """Return the bytes of the outputs of all layers for a chunk of examples, and of the gradients at them."""
    return 2 * bytes_of_outputs(model, private) * chunk


def bytes_of_outputs(model: nn.Module, private: Split) -> int:
    """Return the bytes for one example of all layers' outputs from the first trained layer on, and of the largest two
    below it, from a pass of two examples. private: read for its shape alone."""
    held: list[int] = []
    below: list[int] = [0, 0]
    layers = [module for module in model.modules() if not list(module.children())]

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            trains = held or any(p.requires_grad for p in module.parameters())
            (held if trains else below).append(output.numel() * output.element_size())

    # one pass tells the size of each layer's output
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            model(torch.zeros(2, *private.x.shape[1:], dtype=private.x.dtype, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return (sum(held) + sum(sorted(below)[-2:])) // 2
