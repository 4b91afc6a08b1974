"""What a run needs, by rehearsing it: the real loop (`training.fit`) for a few steps on random examples, the public
phase and the evaluation on a part of their data. No private example is read, only how many there are and what shape
they have."""

import contextlib
import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from pubsel.algorithms import Algorithm, Finishes, Freezes, Frozen, Mechanism, Pretrains, Release, Solves, View
from pubsel.data import Split, Task
from pubsel.gradients.factored import BLOCK, LinearGradients
from pubsel.messages import UserError
from pubsel.models.memory import Held
from pubsel.privacy.randomness import SystemEntropy, secret, stream
from pubsel.privacy.sampling import Schedule
from pubsel.settings.keys import Training
from pubsel.training.evaluation import at_once, interval, logits, utility
from pubsel.training.loop import Job, engine, fit, flat, noisy_sum, on_device, public_stream, view_of

STAND_IN = 2**26  # bytes of random examples, at most
STEP_SECONDS = 1.0  # that a rehearsed step takes, at most about, if a part of its batch is enough to extrapolate
ENOUGH_SECONDS, LONG_SECONDS, MOST_STEPS = 0.4, 1.0, 50  # after 5 steps; after 1 step
PUBLIC_ROWS = 256
FEATURES = 128  # of the smallest scale at which a map before training is computed
AUC_ROWS = 300
EPOCHS = ("public_epochs", "pretrain_epochs", "finish_epochs")  # of algorithms that train on public data


class Needs(NamedTuple):
    """Bytes that a run holds at once apart from its data and weights, and seconds."""

    held: int
    step: float
    public: float  # of training on public data, before and after the private steps
    evaluation: float


def rehearse(
    model: nn.Module, task: Task, algorithm: Algorithm, plan: Schedule, training: Training, noise: bool, secure: bool
) -> Needs:
    """Return what a run of `algorithm` needs, whose batches have plan.batch_size examples here. model: its weights are
    restored. task: private, test and validation examples are read for their number and shape alone."""
    kept = {name: values.clone() for name, values in model.state_dict().items()}
    measured = []
    try:
        for part in (_step, _public_phase, _evaluation):
            measured.append(part(Rehearsal(model, task, algorithm, plan, training, noise, secure)))
            model.load_state_dict(kept)
    finally:
        model.load_state_dict(kept)
    held, seconds = zip(*measured, strict=True)
    return Needs(max(held), *seconds)


class Rehearsal(NamedTuple):
    """What is rehearsed."""

    model: nn.Module
    task: Task
    algorithm: Algorithm
    plan: Schedule
    training: Training
    noise: bool
    secure: bool


# Small pieces


def foreseen(piece: Callable[[int], Callable[[], object]], whole: int, power: float = 1.0, least: int = 1) -> float:
    """Return the seconds of piece(whole)(), if they grow with this power of the size. piece(size) prepares what it
    returns, and only that is timed.

    Sizes least, 2 least, 4 least, ... are timed until the next would take twice ENOUGH_SECONDS, or is the whole; the
    smallest twice, since a first call also loads, and the largest, since other work on the machine may have held it up.
    """
    size = min(least, whole)
    work = piece(size)
    _timed(work)
    seconds = _timed(work)
    while size < whole:
        if seconds * 2**power >= 2 * ENOUGH_SECONDS:
            seconds = min(seconds, _timed(work))
        if seconds * 2**power >= 2 * ENOUGH_SECONDS:
            break
        size = min(2 * size, whole)
        work = piece(size)
        seconds = _timed(work)
    return seconds * (whole / size) ** power


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


# Stand-ins


def random_like(split: Split, n: int, classes: int) -> Split:
    """Return n random examples of the shape and type of others: pixels, or normal features."""
    source, shape = stream("estimate", "examples"), (n, *split.x.shape[1:])
    if split.x.is_floating_point():
        x = torch.from_numpy(source.standard_normal(shape, dtype="float32")).to(split.x.dtype)
    else:
        x = torch.from_numpy(source.integers(256, size=shape, dtype="uint8")).to(split.x.dtype)
    several = split.y.dim() == 2
    y = source.integers(2, size=(n, split.y.shape[1])) if several else source.integers(classes, size=n)
    return Split(x, torch.from_numpy(y).to(split.y.dtype))


def people_like(n: int, each: float) -> torch.Tensor:
    """Return how many examples n made-up people have, `each` on average, as alike as can be: int64 [n]."""
    return (torch.arange(n + 1) * each + 1e-9).floor().long().diff()


def shaped(split: Split, shape: tuple[int, ...]) -> Split:
    """Return as many examples of another shape, zeros that take no memory."""
    return Split(torch.zeros(1).view([1] * (1 + len(shape))).expand(len(split.x), *shape), split.y)


def behind_frozen(algorithm: Algorithm, task: Task) -> Task:
    """Return the task as it will be after what the algorithm freezes before it trains: the shapes, and public
    features."""
    if not isinstance(algorithm, Freezes) or task.private.x.dim() != 2:
        return task
    d: int = task.private.x.shape[1]
    offsets: int = getattr(algorithm, "offsets", 0)
    width: int = algorithm.width(d)
    shapes, public = task._replace(offsets=offsets).each(lambda split: shaped(split, (width,))), task.public
    if public is None or shapes.public is None:
        return shapes

    # a map that keeps the width only scales to norm 1, which public features get here; another is random here
    x = Frozen(unit=getattr(algorithm, "unit", False))(public.x) if width == d else None
    x = random_like(shapes.public, len(public.x), 1).x if x is None else x
    return shapes._replace(public=Split(x, public.y))


# The private steps


class _Enough(Exception):
    """Enough steps were seen."""


class _Steps:
    """The private steps of an algorithm, without what it does before and after them; training ends if `enough` holds.
    starts: of each step, s. rows: of its mechanisms."""

    def __init__(self, inner: Algorithm, device: torch.device, enough: Callable[[list[float]], bool]):
        self.name, self.rows, self.starts = inner.name, 1, list[float]()
        self._inner, self._device, self._enough = inner, device, enough

    def mechanism(self, view: View, step: int) -> Mechanism:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.starts.append(time.perf_counter())
        if self._enough(self.starts):
            raise _Enough
        mechanism = self._inner.mechanism(view, step)
        self.rows = mechanism.rows
        return mechanism


def _step(run: Rehearsal) -> tuple[int, float]:
    """Return bytes and seconds of a step. Of a batch that takes long or much memory only a part is taken, and a larger
    part shows what the rest adds."""
    if isinstance(run.algorithm, Solves):
        held = run.algorithm.held(len(run.task.private.x))
        return held, solving(run.algorithm, run.task.private, run.secure)
    if run.plan.steps == 0:
        return 0, 0.0

    gradients, batch = engine(run.model, run.training.chunk), run.plan.batch_size
    device, linear = next(run.model.parameters()).device, isinstance(gradients, LinearGradients)
    each = len(run.task.private.x) / run.task.units  # examples of a private unit
    size = max(1, round(each * run.task.private.x[:1].numel() * run.task.private.x.element_size()))
    most = max(2, STAND_IN // size)
    examples = random_like(run.task.private, math.ceil(each * min(run.plan.n, most)), run.task.classes)
    rows = min(batch, most, batch if linear else gradients.chunk(run.task.private.x))

    # memory is counted in the first step, which loads libraries and decides what later steps reuse
    with Held(device) as counted:
        steps = _taken(run, examples, rows, lambda starts: len(starts) > 1)

    block = rows if linear else -(-max(1, steps.rows) // rows) * rows  # all blocks share the memory of the first
    number = next(run.model.parameters()).element_size()
    held = counted.peak + max(0, min(batch, block) - rows) * gradients.size * number
    if linear:
        held = held * min(batch, max(rows, BLOCK)) // rows
    elif run.plan.rate < 1:
        held += max(0, batch - rows) * size  # the batch, taken out of the data
    held += (168 if run.secure else 8) * gradients.size  # noise, which numpy draws

    # time from two sizes: what a step costs at all, and what each example adds
    seconds = _seconds(run, examples, rows)
    if rows == batch:
        return held, seconds

    in_time = int(rows * STEP_SECONDS / seconds)
    more = min(batch, most, max(2 * rows, in_time))
    if more > rows:
        longer = _seconds(run, examples, more)
    else:
        more, longer, rows = rows, seconds, -(-rows // 2)
        seconds = _seconds(run, examples, rows)

    return held, longer + max(0.0, longer - seconds) / max(1, more - rows) * (batch - more)


def _seconds(run: Rehearsal, examples: Split, rows: int) -> float:
    """Return the seconds of a step whose batch has `rows` examples: the median of several, without the first of more
    than two."""

    def enough(starts: list[float]) -> bool:
        done, seconds = len(starts) - 1, starts[-1] - starts[0]
        slow = done > 0 and seconds > LONG_SECONDS
        return slow or done > MOST_STEPS or (done > 4 and seconds > ENOUGH_SECONDS)

    starts = _taken(run, examples, rows, enough).starts
    seconds = [after - before for before, after in pairwise(starts)]
    return max(1e-9, median(seconds[len(seconds) > 2 :]))


def _taken(run: Rehearsal, examples: Split, rows: int, enough: Callable[[list[float]], bool]) -> _Steps:
    """Return the steps of the loop on random examples, with batches of `rows`, until there are enough."""
    each = len(run.task.private.x) / run.task.units
    n = rows if run.plan.rate == 1 else int(len(examples.x) / each)
    people = None if run.task.people is None else people_like(n, each)
    used = n if people is None else int(people.sum())
    task = run.task._replace(private=Split(examples.x[:used], examples.y[:used]), people=people)
    plan = Schedule(n, rows / n, 10**9, rows)
    steps = _Steps(run.algorithm, next(run.model.parameters()).device, enough)
    # any learning rate takes as long
    training = dataclasses.replace(run.training, checkpoint_seconds=math.inf, learning_rate=1.0)
    # nothing private is released, so the same streams serve each time
    streams = secret(
        "estimate",
        settings={},
        private=[],
        public=[],
        weights={},
        plan={},
        streams={"code": "", "place": ""},
        secure=run.secure,
    )

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Enough):
        nowhere = Path(folder) / "checkpoint.pt"
        job = Job(cast(Algorithm, steps), plan, float(run.noise), training, "estimate", nowhere)
        fit(run.model, task, job, streams)

    return steps


def solving(algorithm: Solves, private: Split, secure: bool) -> float:
    """Return the seconds of a step of an algorithm that has a loop itself. private: read for its number alone."""
    source = SystemEntropy() if secure else stream("estimate", "solve")

    def steps(number: int) -> Callable[[], None]:
        return partial(algorithm.rehearse, len(private.x), number, source)

    return foreseen(steps, algorithm.all_steps, least=100) / algorithm.all_steps


# Before and after them


def freezing(algorithm: Algorithm, task: Task) -> float:
    """Return the seconds of computing the map that `algorithm` freezes before it trains, and of passing the private
    features through it. task: private features [n, d], read for their shape alone, and public ones [m, d].

    Random features replace both. Their numbers, d and k are made smaller by the same factor: products and
    eigenvectors alike then take less time by its cube. Features that are `wide` stay so.
    """
    if task.private.x.dim() != 2 or not isinstance(algorithm, Freezes) or not getattr(algorithm, "k", None):
        return 0.0

    k: int = algorithm.k  # type: ignore[attr-defined]
    d, public = task.private.x.shape[1], task.public
    random = public_stream("estimate")

    def piece(width: int) -> Callable[[], None]:
        smaller: Any = copy.copy(algorithm)
        smaller.k = max(1, k * width // d)
        smaller.corrects = False  # a classifier of random examples takes far longer than one of real ones: not timed

        def features(split: Split) -> Split:
            n = max(smaller.k + 2, len(split.x) * width // d)
            return random_like(shaped(split, (width,)), n, task.classes)

        x, public_x = features(task.private).x, None if public is None else features(public)

        def work() -> None:
            frozen = smaller.frozen(public_x, width, random)
            if isinstance(frozen, Release):
                frozen = noisy_sum(frozen, x, 1.0, stream("estimate", "release"))
            frozen(x)

        return work

    wide: int | None = getattr(algorithm, "wide", None)
    try:
        return foreseen(piece, d, power=3, least=FEATURES if wide is None or d < wide else wide)
    except UserError:  # the run itself will report it
        return 0.0


def _public_phase(run: Rehearsal) -> tuple[int, float]:
    """Return bytes and seconds of training on public data: one epoch, on a part of the data if that is slow, times
    epochs."""
    public = run.task.public
    if public is None or not isinstance(run.algorithm, Pretrains | Finishes):
        return 0, 0.0

    # a copy with a single epoch
    short: Any = copy.copy(run.algorithm)
    epochs = [key for key in EPOCHS if getattr(short, key, 0)]
    times = sum(getattr(short, key) for key in epochs) or 1
    for key in epochs:
        setattr(short, key, 1)
    if getattr(short, "class_names", None):
        short.class_names = None

    gradients, device = engine(run.model, run.training.chunk), next(run.model.parameters()).device
    view = view_of(run.model, gradients, on_device(run.task, device), "estimate", run.plan)
    trained = [run.model.get_parameter(name) for name in gradients.offsets]
    order = torch.from_numpy(stream("estimate", "public").permutation(len(public.x)))

    def phase(rows: int) -> Callable[[], None]:
        part = Split(public.x[order[:rows]].to(device), public.y[order[:rows]].to(device))
        here = view._replace(public=part, start=flat(trained))

        def work() -> None:
            with contextlib.suppress(UserError):  # training itself will report it
                if isinstance(short, Pretrains):
                    short.pretrain(here)
                if isinstance(short, Finishes):
                    short.finish(here)

        return work

    rows = min(len(public.x), max(PUBLIC_ROWS, 2 * getattr(short, "public_batch", 0)))
    with Held(device) as counted:
        phase(rows)()
    linear = isinstance(gradients, LinearGradients)
    held = counted.peak * (len(public.x) // rows if linear else 1)
    return held, times * foreseen(phase, len(public.x), least=rows)


def _evaluation(run: Rehearsal) -> tuple[int, float]:
    """Return bytes and seconds of the outputs for test, validation and public examples, and of the bootstrap of an
    AUC."""
    task, device = run.task, next(run.model.parameters()).device
    splits = [split for split in (task.test, task.validation, task.public) if split is not None]
    rows = min(len(task.test.x), at_once(task.test.x, device))
    x = random_like(task.test, rows, task.classes).x

    with Held(device) as counted:
        outputs = logits(run.model, x)

    began = time.perf_counter()
    logits(run.model, x)
    seconds = (time.perf_counter() - began) * sum(len(split.x) for split in splits) / rows
    held = counted.peak

    if task.metric == "auc":
        few = random_like(shaped(task.test, (1,)), min(AUC_ROWS, len(task.test.x)), task.classes)
        outputs = torch.randn(len(few.y), outputs.shape[1])
        began = time.perf_counter()
        with contextlib.suppress(UserError):  # of one class
            utility(outputs, few.y, task.metric)
            interval(outputs, few.y, task.metric, stream("estimate", "bootstrap"))
        seconds += (time.perf_counter() - began) * len(task.test.x) / len(few.y)

    return held, seconds
