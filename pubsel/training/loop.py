"""The one loop that touches private data: sample, clip and sum, add noise, update.

Every private number leaves this file through `noisy_mean`, whose noise is what pubsel/privacy accounts for, or as the
loss on the screen, which the privacy statement excepts. parallel.py shares the loop's work among processes.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.algorithms import Algorithm, Finishes, Frozen, Mechanism, Pretrains, Release, View
from pubsel.algorithms.dp_sgd import FixedClipping
from pubsel.data import Split, Task
from pubsel.files import give_back, plain, unreadable, whole
from pubsel.gradients.book_keeping import BookKeeping
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import Engine, gpu_precision
from pubsel.gradients.people import PeopleGradients, members
from pubsel.messages import UserError, cannot_write, raised_by_torch
from pubsel.privacy import ledger
from pubsel.privacy.accountant import deviation, spent
from pubsel.privacy.lattice import noised
from pubsel.privacy.randomness import Ahead, Normals, Secret, Source, stream
from pubsel.privacy.sampling import Schedule, poisson_sample
from pubsel.settings.keys import Optimizer, Training


class Progress(NamedTuple):
    """Where a run is."""

    step: int
    steps: int
    epoch: float
    loss: float  # mean over the private examples since the last report: not covered by the guarantee
    seconds: float
    norm: float  # of the last descent direction, noise included: covered
    learning_rate: float


def engine(model: nn.Module, chunk: int | None) -> Engine:
    """What makes per-example gradients of `model`: factored for a linear classifier, else written out, but for wide
    layers."""
    return LinearGradients(model) if isinstance(model, nn.Linear) else BookKeeping(model, chunk)


def clipped_sum(mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
    """The mechanism's sum over the batch -> [size], and the sum and the number of its losses -> [2]; float64.

    The batch may be empty or larger than memory holds gradients for.
    """
    device = next(gradients.model.parameters()).device
    total = torch.zeros(mechanism.size, dtype=torch.float64, device=device)
    losses = torch.zeros(2, dtype=torch.float64, device=device)
    with gpu_precision("ieee"):
        for block in gradients.blocks(batch.x, batch.y, mechanism.rows):
            total += mechanism.clipped_sum(block)
            if block.losses is not None:
                losses[0] += block.losses.double().sum()
                losses[1] += len(block.losses)
    return total, losses


class OneProcess:
    """How one process does what several may share (parallel.Leader): it has every private example."""

    def own(self, private: Split) -> Split:
        """The private examples of this process."""
        return private

    def prepare(self, view: View, algorithm: Algorithm, name: str, chunk: int | None, private: Split) -> None:
        """Before the first step of the run `name`: what other processes need for theirs. private: all examples."""

    def begin(
        self, step: int, private: Split, chosen: Tensor | None, make: Callable[[], Mechanism]
    ) -> tuple[Mechanism, Split]:
        """The mechanism of a step, which `make` makes, and the batch of this process: what lies in `private`, its own
        examples, of those that are `chosen` (indices among all private examples; None: all)."""
        return make(), part_of(private, chosen)

    def sum(self, mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
        """`clipped_sum` over the batches of all processes."""
        return clipped_sum(mechanism, gradients, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The training has ended, or failed."""


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
    """(clipped sum over the batch + N(0, s^2)) / batch_size -> [size], s of `accountant.deviation`; and the sum and the
    number of the losses, float64 [2].

    batch_size is fixed and public, a number of rows that are clipped, which are people if `gradients` makes one for
    each. The noise is drawn once, on the sum over all processes.
    """
    total, losses = processes.sum(mechanism, gradients, batch)
    if noise_multiplier > 0:
        scale = deviation(noise_multiplier, mechanism.sensitivity)
        total = noised(total, scale, mechanism.sensitivity, source)
    return total.div_(batch_size).to(next(gradients.model.parameters()).dtype), losses


def noisy_sum(
    release: Release,
    x: Tensor,
    noise_multiplier: float,
    source: Source,
    rows: int = 2**14,
    people: Tensor | None = None,
) -> Frozen:
    """What `release` decodes from its sum over all private features x [n, d], plus noise of the declared scale.

    people: how many of them each person has, in a row. A person then adds the mean of what their examples would add,
    whose norm is at most the largest of theirs, and so at most the declared sensitivity. The sum over examples is one
    over people with k examples, for each k, over k."""
    total = torch.zeros(release.size, dtype=torch.float64)
    sizes = None if people is None else people.repeat_interleave(people)  # of each example
    for k in [1] if sizes is None else sizes.unique().tolist():
        for part in (x if sizes is None else x[sizes == k]).split(rows):
            total += release.clipped_sum(part) / k
    scale = deviation(noise_multiplier, release.sensitivity)
    return release.decode(noised(total, scale, release.sensitivity, source))


def public_stream(name: str) -> Callable[[str, int], np.random.Generator]:
    """What the algorithm of the run `name` may draw from."""
    return lambda purpose, step: stream(name, f"public {purpose}", step)


def view_of(model: nn.Module, gradients: Engine, task: Task, name: str, plan: Schedule) -> View:
    """What the algorithm of the run `name` may see of a task."""
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
    )


class Job(NamedTuple):
    """One training, as planned. name: of the run; it determines what the algorithm draws, and depends on no private
    example, since the algorithm must not either. checkpoint: the file that a killed run resumes from."""

    algorithm: Algorithm
    schedule: Schedule
    noise_multiplier: float
    training: Training
    name: str
    checkpoint: Path

    @property
    def learning_rate(self) -> float:
        """Return training.learning_rate; if it is null, what the noise allows."""
        return rate_of(self.training, self.algorithm, self.schedule, self.noise_multiplier)


def rate_of(training: Training, algorithm: Algorithm, schedule: Schedule, noise_multiplier: float) -> float:
    """Return training.learning_rate; if it is null, what the noise of this schedule allows."""
    if training.learning_rate is not None:
        return training.learning_rate
    assert isinstance(algorithm, FixedClipping)  # see cell.canonical
    return algorithm.learning_rate(noise_multiplier, schedule.steps, schedule.batch_size, training.momentum)


class Watch(NamedTuple):
    """Who is told of the progress. report: at the end of each epoch. keep: the reports of steps that a checkpoint on
    disk holds, which are never drawn anew: only these may be written to a file. A run that was killed after a
    checkpoint gives its reports once more."""

    report: Callable[[Progress], None] = lambda progress: None
    keep: Callable[[list[Progress]], None] = lambda points: None


def fit(
    model: nn.Module,
    task: Task,
    job: Job,
    secret: Secret,
    watch: Watch = Watch(),  # noqa: B008 (immutable)
    gradients: Engine | None = None,
    processes: OneProcess = ONE_PROCESS,
) -> float:
    """Train `model` in place on task.private; returns the seconds spent, those before a resume included.

    secret: where sample and noise come from. A run that is killed at any moment resumes from its checkpoint, and ends,
    bit for bit on a CPU, like an uninterrupted one; with noise of the operating system, steps after the last
    checkpoint, whose result nobody saw, are drawn anew. gradients: by default engine(model, training.chunk); an audit
    brings its own. processes: those that share the work. If the task has people, these are sampled, each with all
    their examples, and each is one row of G (`PeopleGradients`).

    Raises UserError if the weights stop being finite, or the checkpoint is of another release.
    """
    algorithm, plan = job.algorithm, job.schedule
    if task.people is not None and plan.n != len(task.people):
        raise ValueError(f"a schedule for {plan.n} of {len(task.people)} people: what is sampled is not accounted for")
    everyone, share = task.private, processes.own(task.private)
    device = next(model.parameters()).device
    task = on_device(task._replace(private=share), device)
    gradients = gradients or engine(model, job.training.chunk)
    view = view_of(model, gradients, task, job.name, plan)
    state = _State(model, gradients, job)

    # a killed run goes on with the streams that it began with, or not at all
    checkpoint = _Checkpoint(job, state.parts(), secret)
    start, secret = checkpoint.resume()
    state.points.given_to(watch.keep)

    view = _pretrained(view, algorithm, state, checkpoint)
    state.check_finite(start)
    processes.prepare(view, algorithm, job.name, job.training.chunk, everyone)

    # noise comes from the host: a GPU is not to wait for it
    noise = Ahead(secret, plan.steps) if device.type == "cuda" else secret
    checkpoint.restart_clock()
    for step in range(start, plan.steps):
        # the one place that private data is read: sample, clip and sum, add noise
        chosen = poisson_sample(secret("sample", step), plan.n, plan.rate) if plan.rate < 1 else None
        chosen, summed = by_unit(chosen, task.people, gradients)
        mechanism, batch = processes.begin(step, task.private, chosen, partial(algorithm.mechanism, view, step))
        mean, losses = noisy_mean(
            mechanism, summed, batch, job.noise_multiplier, noise("noise", step), plan.batch_size, processes
        )

        # what follows computes from released numbers only; but for the losses, which are shown, and not released
        state.descend(step, mechanism.decode(mean), losses)
        give_back(task.private.x)
        _report(step, state, checkpoint, watch)

    state.average.into(state.parameters, plan.steps)
    if isinstance(algorithm, Finishes):
        with gpu_precision("tf32"):
            algorithm.finish(view)
    return checkpoint.seconds()


def by_unit(chosen: Tensor | None, people: Tensor | None, gradients: Engine) -> tuple[Tensor | None, Engine]:
    """The examples of the private units that are `chosen` (None: all), and what makes G with a row for each unit.
    people: how many examples each has; None: a unit is one example."""
    if people is None:
        return chosen, gradients
    examples, sizes = members(people, chosen)
    return examples, PeopleGradients(gradients, sizes)


def _report(step: int, state: "_State", checkpoint: "_Checkpoint", watch: Watch) -> None:
    """After a step: write the checkpoint if it is due, and tell who watches.

    A step is reported to files once its checkpoint is on disk: it is then never drawn again. UserError if training
    diverged."""
    last, epoch_ends = step + 1 == state.job.schedule.steps, state.epoch_ends(step)
    if epoch_ends:
        state.note_progress(step, checkpoint.seconds())

    due = last or checkpoint.due()
    if due or (epoch_ends and not state.finite()):
        checkpoint.save(step + 1)
    if due or epoch_ends:
        state.check_finite(step + 1)

    if epoch_ends:
        watch.report(state.points.waiting[-1])
    if due:
        state.points.given_to(watch.keep)


def _pretrained(view: View, algorithm: Algorithm, state: "_State", checkpoint: "_Checkpoint") -> View:
    """What the algorithm sees of a task whose public data has trained first, if that is its way: every private step
    knows the weights that this led to."""
    if isinstance(algorithm, Pretrains) and not checkpoint.resumed:
        with gpu_precision("tf32"):
            algorithm.pretrain(view)
        state.begin.weights = flat(state.parameters)
        if checkpoint.due():
            checkpoint.save(0)
    return view._replace(start=state.begin.weights)


class _State:
    """What the steps of a training change: the weights, the optimiser, and what is kept of earlier steps."""

    def __init__(self, model: nn.Module, gradients: Engine, job: Job):
        self.model, self.columns, self.job = model, list(gradients.offsets.values()), job
        self.parameters = [dict(model.named_parameters())[name] for name in gradients.offsets]
        self.optimizer, self.decay = optimizer_of(self.parameters, job)
        self.average, self.begin = _Average(self.parameters, job.training.average), _Begin(self.parameters)
        self.points = _Points()
        self.epoch_steps = max(1, round(1 / job.schedule.rate))
        # sum and number of the losses since the last report
        self.losses = torch.zeros(2, dtype=torch.float64, device=self.parameters[0].device)

    def parts(self) -> tuple[Any, ...]:
        """What a checkpoint holds of it."""
        return self.model, self.optimizer, self.decay, self.average, self.begin, self.points

    def descend(self, step: int, direction: Tensor, losses: Tensor) -> None:
        """One step of the optimiser with `direction` [p] as the gradient."""
        self.average.add(self.parameters, step + 1)
        for parameter, columns in zip(self.parameters, self.columns, strict=True):
            parameter.grad = direction[columns].view_as(parameter)
        self.optimizer.step()
        self.decay.step()
        self.losses += losses
        self.direction = direction

    def epoch_ends(self, step: int) -> bool:
        """Whether `step` is the last of an epoch, or of all."""
        return step + 1 == self.job.schedule.steps or (step + 1) % self.epoch_steps == 0

    def note_progress(self, step: int, seconds: float) -> None:
        """Keep where the training is after `step`, for the next report."""
        plan, rate = self.job.schedule, float(self.decay.get_last_lr()[0])
        loss, norm = float(self.losses[0] / self.losses[1]), float(self.direction.norm())  # of no examples: nan
        now = Progress(step + 1, plan.steps, (step + 1) * plan.rate, loss, seconds, norm, rate)
        self.points.waiting.append(now)
        self.losses.zero_()

    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(torch.isfinite(p).all()) for p in self.parameters)

    def check_finite(self, step: int) -> None:
        """UserError if training diverged. Its checkpoint stays, so that the same command fails again at once instead
        of drawing new noise for steps whose failure was seen."""
        if not self.finite():
            raise UserError(
                f"training diverged: weights are not finite at step {step}; "
                f"lower training.learning_rate={self.job.learning_rate:g}"
            )


def optimizer_of(
    parameters: list[nn.Parameter], job: Job
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimiser of a training, and how its learning rate falls over its steps."""
    training, steps, rate = job.training, job.schedule.steps, job.learning_rate
    decayed = training.weight_decay
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, rate, training.momentum, weight_decay=decayed)
    if training.optimizer == Optimizer.adam:
        optimizer = torch.optim.Adam(parameters, rate, weight_decay=decayed)
    if training.inverse_decay is None:
        milestones = [round(f * steps) for f in training.milestones]
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, training.decay)
    scale = 2 / (training.inverse_decay * rate)
    # the t-th step, from 1, has 2 / (inverse_decay (t + 1))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: scale / (t + 2))


class _Checkpoint:
    """The file that a killed run resumes from, and the clock that says when it is due. parts: what has a state."""

    def __init__(self, job: Job, parts: tuple[Any, ...], secret: Secret):
        self.path, self.parts, self.secret = job.checkpoint, parts, secret
        self.every = job.training.checkpoint_seconds  # between two checkpoints
        self.resumed, self.earlier = False, 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.began = self.kept = time.monotonic()

    def seconds(self) -> float:
        """Spent on the run's steps, in this process and before."""
        return self.earlier + time.monotonic() - self.began

    def due(self) -> bool:
        return time.monotonic() - self.kept >= self.every

    def resume(self) -> tuple[int, Secret]:
        """Load the checkpoint into the parts, if there is one: the step to go on at, and the streams to draw from.
        UserError if it cannot be read, or is of another release."""
        if not self.path.exists():
            return 0, self.secret
        try:
            saved = torch.load(plain(self.path), map_location="cpu", weights_only=True)
            release, step, seconds, states = (saved[key] for key in ("release", "step", "seconds", "parts"))
        except Exception as error:
            raise self._unreadable(error) from None
        self.secret = self.secret.resumed(release, step, self.path, partial(_spent, done=step))
        try:
            for part, state in zip(self.parts, states, strict=True):
                part.load_state_dict(state)
        except Exception as error:
            raise self._unreadable(error) from None
        self.resumed, self.earlier = True, seconds
        return step, self.secret

    def save(self, step: int) -> None:
        """Write the state after `step` steps."""
        self.kept = time.monotonic()
        seconds = self.seconds() if step else 0.0
        states = [part.state_dict() for part in self.parts]
        save(self.path, {"step": step, "seconds": seconds, "release": self.secret.state_dict(), "parts": states})

    def _unreadable(self, error: Exception) -> UserError:
        return unreadable(self.path, error, f"delete it to start this run again{ledger.again(self.path.parent)}")


def flat(parameters: list[nn.Parameter]) -> Tensor:
    """All weights, [p]."""
    return torch.cat([p.detach().flatten() for p in parameters])


class _Begin:
    """The weights [p] before the first private step, which a run that goes on takes from its checkpoint: what trains on
    public data before is not done again."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.weights = flat(parameters)

    def state_dict(self) -> dict[str, Tensor]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = state["weights"].to(self.weights)


class _Points:
    """The reports since the last checkpoint. They are part of the next one, so that none is lost behind it."""

    def __init__(self) -> None:
        self.waiting: list[Progress] = []

    def given_to(self, keep: Callable[[list[Progress]], None]) -> None:
        """For who has a checkpoint with all of them on disk."""
        if self.waiting:
            keep(self.waiting)
        self.waiting = []

    def state_dict(self) -> dict[str, list[list[float]]]:
        return {"waiting": [list(point) for point in self.waiting]}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        self.waiting = [Progress(*values) for values in state["waiting"]]


class _Average:
    """2 / (T (T + 1)) sum_t t w_t, of the weights w_t before step t = 1, ..., T; or nothing."""

    def __init__(self, parameters: list[nn.Parameter], wanted: bool):
        self.total = torch.zeros_like(flat(parameters), dtype=torch.float64) if wanted else None

    def add(self, parameters: list[nn.Parameter], t: int) -> None:
        if self.total is not None:
            self.total += t * flat(parameters)

    def into(self, parameters: list[nn.Parameter], steps: int) -> None:
        if self.total is not None and steps:
            mean = self.total * (2 / (steps * (steps + 1)))
            nn.utils.vector_to_parameters(mean.to(parameters[0].dtype), parameters)

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        if self.total is not None and state["total"] is not None:
            self.total = state["total"].to(self.total)


def part_of(split: Split, chosen: Tensor | None) -> Split:
    """The examples of these indices; all for None."""
    return split if chosen is None else Split(*(values[chosen.to(values.device)] for values in split))


def on_device(task: Task, device: torch.device) -> Task:
    """Private and public data where the model is."""

    def move(split: Split) -> Split:
        return Split(split.x.to(device), split.y.to(device))

    return task._replace(private=move(task.private), public=move(task.public) if task.public is not None else None)


def save(path: Path, content: Any) -> None:
    """torch.save, whole or not at all, lasting through a power cut, for its owner alone; UserError names the file where
    it cannot be written."""
    try:
        with whole(path, private=True) as partial:
            torch.save(content, partial)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not raised_by_torch(error):
            raise
        raise cannot_write(path, error) from None


def _spent(plan: Mapping[str, Any], done: int) -> str:
    """What a release had spent after `done` steps of its plan, for people."""
    if not plan["noise_multiplier"]:
        return f"{done} of {plan['steps']} steps without noise"
    epsilon = spent(plan["noise_multiplier"], plan["rate"], plan["steps"], plan["delta"], done, about=plan["epsilon"])
    return f"epsilon {epsilon:.3g} in {done} of {plan['steps']} steps"
