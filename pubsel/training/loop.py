"""The one loop that touches private data: sample, clip and sum, add noise, update.

Every private number leaves this file through `noisy_mean`, whose noise is what pubsel/privacy accounts for, or as the
loss on the screen, which the privacy statement excepts. parallel.py shares the loop's work among processes.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.algorithms import Algorithm, Finishes, FirstRelease, Frozen, Mechanism, Pretrains, RatedByNoise, View
from pubsel.data import Split, Task
from pubsel.data.augment import Views
from pubsel.files import give_back, plain, sent, unreadable, whole
from pubsel.gradients.book_keeping import BookKeeping
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import Engine, gpu_precision
from pubsel.gradients.people import PeopleGradients, members
from pubsel.gradients.slots import PrivateSlots, private_slots
from pubsel.messages import UserError, bars, cannot_write, raised_by_torch
from pubsel.privacy import ledger
from pubsel.privacy.accountant import deviation, spent
from pubsel.privacy.lattice import noised
from pubsel.privacy.randomness import KEY, Ahead, Normals, Secret, Source, stream
from pubsel.privacy.sampling import Schedule, poisson_sample
from pubsel.settings.keys import EMA, Optimizer, Training

FIRST_REPORT = 1.0  # seconds of training
MOST_KEPT = 0.9999  # of a moving average, in a step


class Progress(NamedTuple):
    """The progress of a run."""

    step: int
    steps: int
    epoch: float
    loss: float  # mean over the private examples of this epoch so far: not covered by the guarantee
    seconds: float


def engine(model: nn.Module, chunk: int | None) -> Engine:
    """Return what makes per-example gradients of `model`: factored for a linear classifier, else written out, but for
    wide layers."""
    return LinearGradients(model) if isinstance(model, nn.Linear) else BookKeeping(model, chunk)


def clipped_sum(mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
    """Return the mechanism's sum over the batch -> [size], and the sum and the number of its losses -> [2]; float64.

    The batch may be empty or larger than memory holds gradients for.
    """
    device = next(gradients.model.parameters()).device
    total: Tensor | None = None
    losses = torch.zeros(2, dtype=torch.float64, device=device)
    with gpu_precision("ieee"):
        for block in gradients.blocks(batch.x, batch.y, mechanism.rows):
            total = mechanism.clipped_sum(block, total).double()
            if block.losses is not None:
                losses[0] += block.losses.double().sum()
                losses[1] += len(block.losses)
    return torch.zeros(mechanism.size, dtype=torch.float64, device=device) if total is None else total, losses


class OneProcess:
    """The work of a single process, which several may share (parallel.Leader): it has every private example."""

    def own(self, private: Split) -> Split:
        """Return the private examples of this process."""
        return private

    def prepare(self, view: View, algorithm: Algorithm, name: str, chunk: int | None, private: Split) -> None:
        """Send to other processes, before the first step of the run `name`, what they need. private: all examples."""

    def begin(
        self, step: int, private: Split, chosen: Tensor | None, make: Callable[[], Mechanism]
    ) -> tuple[Mechanism, Split]:
        """Return the mechanism of a step, which `make` makes, and the batch of this process: those of `private`, its
        own examples, that are `chosen` (indices among all private examples; None: all)."""
        return make(), part_of(private, chosen)

    def sum(self, mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
        """Return `clipped_sum` over the batches of all processes."""
        return clipped_sum(mechanism, gradients, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the training, or handle its failure."""


ONE_PROCESS = OneProcess()


def noisy_mean(
    mechanism: Mechanism,
    gradients: Engine,
    batch: Split,
    noise_multiplier: float,
    source: Normals,
    batch_size: int,
    processes: OneProcess = ONE_PROCESS,
) -> tuple[Tensor, Tensor]:
    """Return (clipped sum over the batch + N(0, s^2)) / batch_size -> [size], s of `accountant.deviation`; and the sum
    and the number of the losses, float64 [2].

    batch_size is fixed and public, a number of rows that are clipped, which are people if `gradients` makes one for
    each. The noise is drawn once, on the sum over all processes.
    """
    total, losses = processes.sum(mechanism, gradients, batch)
    if noise_multiplier > 0:
        scale = deviation(noise_multiplier, mechanism.sensitivity)
        total = noised(total, scale, mechanism.sensitivity, source)
    return total.div_(batch_size).to(next(gradients.model.parameters()).dtype), losses


def noisy_sum(
    release: FirstRelease,
    x: Tensor,
    noise_multiplier: float,
    source: Source,
    rows: int = 2**14,
    people: Tensor | None = None,
    y: Tensor | None = None,
) -> Frozen:
    """Return what `release` decodes from its sum over all private features x [n, d], plus noise of the declared scale.
    y: classes [n], for a release of these.

    people: the number of examples of each person, which follow each other. A person then adds
    the mean of what their examples would add, whose norm is at most the largest of theirs, and so at most the declared
    sensitivity. The sum over examples is one over people with k examples, for each k, over k."""
    total = torch.zeros(release.size, dtype=torch.float64)
    sizes = None if people is None else people.repeat_interleave(people)  # of each example
    for k in [1] if sizes is None else sizes.unique().tolist():
        some = torch.arange(len(x)) if sizes is None else torch.nonzero(sizes == k).squeeze(1)
        for places in some.split(rows):
            part = x[places]
            if release.classes:
                assert y is not None
                part = torch.cat([part, nn.functional.one_hot(y[places].long(), release.classes).to(part)], 1)
            total += release.clipped_sum(part) / k
    scale = deviation(noise_multiplier, release.sensitivity)
    return release.decode(noised(total, scale, release.sensitivity, source))


def public_stream(name: str) -> Callable[[str, int], np.random.Generator]:
    """Return the random streams that the algorithm of the run `name` may draw from."""
    return lambda purpose, step: stream(name, f"public {purpose}", step)


def view_of(
    model: nn.Module, gradients: Engine, task: Task, name: str, plan: Schedule, rate: float | None = None
) -> View:
    """Return what the algorithm of the run `name` may see of a task. rate: the learning rate, if it follows from the
    noise."""
    return View(
        model,
        gradients,
        task.public,
        task.classes,
        task.private.y.dim() == 2,
        public_stream(name),
        plan.batch_size,
        steps=plan.steps,
        same_task=task.same_task,
        same_classes=task.same_classes,
        rate=rate,
        preconditioner=task.preconditioner,
    )


class Job(NamedTuple):
    """One training, as planned. name: determines what the algorithm draws, and depends on no private example, since the
    algorithm must not either (`Cell.public_key`). checkpoint: the file that a killed run resumes from. rate: in place
    of the learning rate that follows from this noise."""

    algorithm: Algorithm
    schedule: Schedule
    noise_multiplier: float
    training: Training
    name: str
    checkpoint: Path
    rate: float | None = None

    @property
    def learning_rate(self) -> float:
        """Return training.learning_rate; if it is null, what the noise allows."""
        return self.rate or rate_of(self.training, self.algorithm, self.schedule, self.noise_multiplier)

    @property
    def rate_by_noise(self) -> float | None:
        """Return what the noise allows if training.learning_rate is null, otherwise None."""
        return self.learning_rate if self.training.learning_rate is None else None


def rate_of(training: Training, algorithm: Algorithm, schedule: Schedule, noise_multiplier: float) -> float:
    """Return training.learning_rate; if it is null, what the noise of this schedule allows."""
    if training.learning_rate is not None:
        return training.learning_rate
    assert isinstance(algorithm, RatedByNoise)  # see rules.canonical
    return algorithm.learning_rate(noise_multiplier, schedule.steps, schedule.batch_size, training.momentum)


def fit(
    model: nn.Module,
    task: Task,
    job: Job,
    secret: Secret,
    report: Callable[[Progress], None] = lambda now: None,
    gradients: Engine | None = None,
    processes: OneProcess = ONE_PROCESS,
) -> float:
    """Train `model` in place on task.private; return the seconds spent, those before a resume included.

    secret: where sample and noise come from. A run that is killed at any moment resumes from its checkpoint, and ends,
    bit for bit on a CPU, like an uninterrupted one; with noise of the operating system, steps after the last
    checkpoint, whose result nobody saw, are drawn anew. gradients: by default engine(model, training.chunk); an audit
    brings its own. processes: those that share the work. report: is called at the end of each epoch, and within one
    that takes long; a resumed run reports again what followed its checkpoint. If the task has people, these are
    sampled, each with all their examples, and each is one row of G (`PeopleGradients`).
    UserError: weights are not finite, or the checkpoint is of another release; ValueError: a plan for other people.
    """
    algorithm, plan = job.algorithm, job.schedule
    if task.people is not None and plan.n != len(task.people):
        raise ValueError(f"a schedule for {plan.n} of {len(task.people)} people: what is sampled is not accounted for")
    everyone, share = task.private, processes.own(task.private)
    device = next(model.parameters()).device
    task = on_device(task._replace(private=share), device)
    gradients = gradients or engine(model, job.training.chunk)
    task, slots = in_slots(task, gradients, job, processes)
    view = view_of(model, gradients, task, job.name, plan, job.rate_by_noise)
    state = _State(model, gradients, job)

    # a killed run goes on with the streams that it began with, or not at all
    checkpoint = _Checkpoint(job, state, secret)
    start, secret = checkpoint.resume()

    view = _pretrained(view, algorithm, state, checkpoint)
    state.check_finite(start)
    processes.prepare(view, algorithm, job.name, job.training.chunk, everyone)

    # noise comes from the host: a GPU is not to wait for it
    noise = Ahead(secret, plan.steps) if device.type == "cuda" else secret
    checkpoint.restart_clock()
    for step in range(start, plan.steps):
        # the one place that private data is read: sample, clip and sum, add noise
        chosen = poisson_sample(secret("sample", step), plan.n, plan.rate) if plan.rate < 1 else None
        chosen, summed = by_unit(chosen, task.people, gradients, slots, views_of(job, secret, step, chosen))
        mechanism, batch = processes.begin(step, task.private, chosen, partial(algorithm.mechanism, view, step))
        mean, losses = noisy_mean(
            mechanism, summed, batch, job.noise_multiplier, noise("noise", step), plan.batch_size, processes
        )

        # what follows computes from released numbers only; but for the losses, which are shown, and not released
        state.descend(step, mechanism.decode(mean), losses)
        give_back(task.private.x)
        _report(step, state, checkpoint, report)

    state.average(plan.steps)
    if isinstance(algorithm, Finishes):
        with gpu_precision("tf32"):
            algorithm.finish(view)
    return checkpoint.seconds()


def in_slots(task: Task, gradients: Engine, job: Job, processes: OneProcess) -> tuple[Task, PrivateSlots | None]:
    """Return the slots of the private examples (gradients/slots.py), None if means are summed, of people or views, or
    several processes sum; and the task with its examples slot by slot, if each step takes all of them."""
    plan, alone = job.schedule, processes is ONE_PROCESS and task.people is None and job.training.augment is None
    slots = private_slots(gradients, *task.private, plan.batch_size) if alone else None
    if slots is not None and plan.rate == 1:
        task = task._replace(private=Split(*slots.arrange(*task.private)))
    return task, slots


def views_of(job: Job, secret: Secret, step: int, chosen: Tensor | None) -> Views | None:
    """Return the views of a step that is of these private units (None: all), if training is on views of images."""
    training = job.training
    if training.augment is None:
        return None
    units = torch.arange(job.schedule.n) if chosen is None else chosen
    return Views(training.views, training.augment, secret("views", step).bytes(KEY), units)


def by_unit(
    chosen: Tensor | None,
    people: Tensor | None,
    gradients: Engine,
    slots: PrivateSlots | None = None,
    views: Views | None = None,
) -> tuple[Tensor | None, Engine]:
    """Return the examples of the private units that are `chosen` (None: all), and what makes G with a row for each
    unit. people: how many examples each has; None: a unit is one example. slots: of the examples, which come slot by
    slot. views: of the examples, if these are trained on."""
    if slots is not None:
        return slots.batch(chosen)
    if people is not None:
        examples, sizes = members(people, chosen)
    elif views is not None:
        examples, sizes = chosen, torch.ones_like(views.units)
    else:
        return chosen, gradients
    return examples, PeopleGradients(gradients, sizes, views)


def _report(step: int, state: "_State", checkpoint: "_Checkpoint", report: Callable[[Progress], None]) -> None:
    """Write the checkpoint after a step, if one is due, and report the progress: at the end of an epoch, and within
    one that takes long. Raise UserError if training diverged."""
    # a checkpoint is written before training may fail, so that the next start fails at once
    plan = state.job.schedule
    bars.show("training", step + 1, plan.steps)
    epoch_ends = step + 1 == plan.steps or (step + 1) % max(1, round(1 / plan.rate)) == 0
    due = step + 1 == plan.steps or checkpoint.due()
    if due or (epoch_ends and not state.finite()):
        checkpoint.save(step + 1)
    if due or epoch_ends:
        state.check_finite(step + 1)

    seconds = checkpoint.seconds()
    here = seconds - checkpoint.earlier
    if epoch_ends or here >= state.next_report:
        state.next_report = max(FIRST_REPORT, 2 * here)
        loss = float(state.losses[0] / state.losses[1])  # of no examples: nan
        report(Progress(step + 1, plan.steps, (step + 1) * plan.rate, loss, seconds))
    if epoch_ends:
        state.losses.zero_()


def _pretrained(view: View, algorithm: Algorithm, state: "_State", checkpoint: "_Checkpoint") -> View:
    """Return the view after public pre-training, if the algorithm pre-trains; view.start holds the resulting
    weights."""
    if isinstance(algorithm, Pretrains) and not checkpoint.resumed:
        with gpu_precision("tf32"):
            algorithm.pretrain(view)
        state.start = flat(state.parameters)
        if checkpoint.due():
            checkpoint.save(0)
    return view._replace(start=state.start)


class _State:
    """All that the steps of a training change, which is what a checkpoint contains."""

    def __init__(self, model: nn.Module, gradients: Engine, job: Job):
        self.model, self.columns, self.job = model, list(gradients.offsets.values()), job
        self.parameters = [dict(model.named_parameters())[name] for name in gradients.offsets]
        self.optimizer, self.decay = optimizer_of(self.parameters, job)
        self.next_report = FIRST_REPORT  # seconds of this process
        # sum and number of the losses of this epoch
        self.losses = torch.zeros(2, dtype=torch.float64, device=self.parameters[0].device)

        # [p], the weights before the first private step; and what is averaged: the sum of those before step t, times t,
        # or the moving average
        self.start = flat(self.parameters)
        self.total = torch.zeros_like(self.start, dtype=torch.float64) if job.training.average else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint contains."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "decay": self.decay.state_dict(),
            "start": self.start,
            "total": self.total,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.decay.load_state_dict(saved["decay"])
        self.start = saved["start"].to(self.start)
        if self.total is not None:
            self.total = saved["total"].to(self.total)

    def descend(self, step: int, direction: Tensor, losses: Tensor) -> None:
        """Take one step of the optimiser with `direction` [p] as the gradient."""
        moving = self.job.training.average == EMA
        if self.total is not None and not moving:
            self.total += (step + 1) * flat(self.parameters)
        for parameter, columns in zip(self.parameters, self.columns, strict=True):
            parameter.grad = direction[columns].view_as(parameter)
        self.optimizer.step()
        self.decay.step()
        self.losses += losses
        if self.total is not None and moving:
            before = self.total if step else self.start.double()
            self.total = before.lerp(flat(self.parameters).double(), 1 - min(MOST_KEPT, (1 + step) / (10 + step)))

    def average(self, steps: int) -> None:
        """Set the weights to 2 / (T (T + 1)) sum_t t w_t, of those before step t = 1, ..., T, or to the moving average,
        if one of these is wanted."""
        if self.total is not None and steps:
            mean = self.total if self.job.training.average == EMA else self.total * (2 / (steps * (steps + 1)))
            nn.utils.vector_to_parameters(mean.to(self.start.dtype), self.parameters)

    def finite(self) -> bool:
        """Return whether all weights are finite."""
        return bool(torch.stack([torch.isfinite(p).all() for p in self.parameters]).all())

    def check_finite(self, step: int) -> None:
        """Raise UserError if training diverged. Its checkpoint stays, so that the same command fails again at once
        instead of drawing new noise for steps whose failure was seen."""
        if not self.finite():
            raise UserError(
                f"training diverged: weights are not finite at step {step}; "
                f"lower training.learning_rate={self.job.learning_rate:g}"
            )


class SGD(torch.optim.SGD):
    """torch's SGD without the wrappers for torch.compile, which import torch._dynamo: that takes seconds."""

    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    state_dict = inspect.unwrap(torch.optim.SGD.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.SGD.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def optimizer_of(
    parameters: list[nn.Parameter], job: Job
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimiser of a training, and the schedule by which its learning rate falls."""
    training, steps, rate = job.training, job.schedule.steps, job.learning_rate
    decayed = training.weight_decay
    optimizer: torch.optim.Optimizer = SGD(parameters, rate, training.momentum, weight_decay=decayed)
    if training.optimizer == Optimizer.adam:
        optimizer = torch.optim.Adam(parameters, rate, weight_decay=decayed)
    if training.inverse_decay is None:
        milestones = [round(f * steps) for f in training.milestones]
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, training.decay)
    scale = 2 / (training.inverse_decay * rate)
    # the t-th step, from 1, has 2 / (inverse_decay (t + 1))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: scale / (t + 2))


class _Checkpoint:
    """The file that a killed run resumes from, and the clock by which the next one is due."""

    def __init__(self, job: Job, state: _State, secret: Secret):
        self.path, self.state, self.secret = job.checkpoint, state, secret
        self.every = job.training.checkpoint_seconds  # between two checkpoints
        self.resumed, self.earlier = False, 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.began = self.kept = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds spent on the run's steps, in this process and before."""
        return self.earlier + time.monotonic() - self.began

    def due(self) -> bool:
        return time.monotonic() - self.kept >= self.every

    def resume(self) -> tuple[int, Secret]:
        """Load the checkpoint into the state, if there is one; return the step to resume at, and the streams to draw
        from. UserError if it cannot be read, or is of another release."""
        if not self.path.exists():
            return 0, self.secret
        try:
            saved = torch.load(plain(self.path), map_location="cpu", weights_only=True)
            release, step, seconds, state = (saved[key] for key in ("release", "step", "seconds", "state"))
        except Exception as error:
            raise self._unreadable(error) from None
        self.secret = self.secret.resumed(release, step, self.path, partial(_spent, done=step))
        try:
            self.state.load_state_dict(state)
        except Exception as error:
            raise self._unreadable(error) from None
        self.resumed, self.earlier = True, seconds
        return step, self.secret

    def save(self, step: int) -> None:
        """Write the state after `step` steps."""
        self.kept = time.monotonic()
        seconds = self.seconds() if step else 0.0
        content = {"step": step, "seconds": seconds, "release": self.secret.state_dict()}
        save(self.path, content | {"state": self.state.state_dict()})

    def _unreadable(self, error: Exception) -> UserError:
        return unreadable(self.path, error, f"delete it to start this run again{ledger.again(self.path.parent)}")


def flat(parameters: list[nn.Parameter]) -> Tensor:
    """Return all weights, [p]."""
    return torch.cat([p.detach().flatten() for p in parameters])


def part_of(split: Split, chosen: Tensor | None) -> Split:
    """Return the examples with these indices; None: all."""
    if chosen is None:
        return split
    places = sent(chosen, split.x.device)
    return Split(split.x[places], split.y[places])


def on_device(task: Task, device: torch.device) -> Task:
    """Return the task with private and public data on the device of the model."""

    def move(split: Split) -> Split:
        return Split(split.x.to(device), split.y.to(device))

    return task._replace(private=move(task.private), public=move(task.public) if task.public is not None else None)


def save(path: Path, content: Any) -> None:
    """Write `content` by torch.save, whole or not at all, synced, readable by its owner alone; UserError names a file
    that cannot be written."""
    try:
        with whole(path, private=True) as partial:
            torch.save(content, partial)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not raised_by_torch(error):
            raise
        raise cannot_write(path, error) from None


def _spent(plan: Mapping[str, Any], done: int) -> str:
    """Return in words what a release had spent after `done` steps of its plan."""
    if not plan["noise_multiplier"]:
        return f"{done} of {plan['steps']} steps without noise"
    epsilon = spent(plan["noise_multiplier"], plan["rate"], plan["steps"], plan["delta"], done, about=plan["epsilon"])
    return f"epsilon {epsilon:.3g} in {done} of {plan['steps']} steps"
