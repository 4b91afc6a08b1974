"""The one loop that touches private data: sample, clip and sum, add noise, update.

Every private number leaves this file through `noisy_mean`, whose noise is what privacy.py accounts for, or as the loss
on the screen, which the privacy statement excepts. parallel.py has the loop's work done by several processes.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from pubsel import records
from pubsel.algorithms import Algorithm, Finishes, Frozen, Mechanism, Pretrains, Release, View
from pubsel.data import Split, Task
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import Engine, PerExampleGradients, gpu_precision
from pubsel.messages import UsageError, UserError
from pubsel.privacy import ledger
from pubsel.privacy.accountant import deviation, spent
from pubsel.privacy.randomness import Secret, Source, normal, stream
from pubsel.settings.keys import MOST_STEPS, Optimizer, Training


class Schedule(NamedTuple):
    """When and how often private data is sampled: n examples, each in each of `steps` batches with probability rate."""

    n: int
    rate: float
    steps: int
    batch_size: int  # expected, public, and the fixed denominator of the mean


class Progress(NamedTuple):
    """Where a run is."""

    step: int
    steps: int
    epoch: float
    loss: float  # mean over the private examples since the last report: not covered by the guarantee
    seconds: float
    norm: float  # of the last descent direction, noise included: covered
    learning_rate: float


def schedule(n: int, training: Training) -> Schedule:
    """Steps and sampling rate for n private examples; a batch of n or more is the full batch, taken every time."""
    batch = min(training.batch_size, n)
    steps = training.steps or max(1, round(min(training.epochs * n / batch, 2 * MOST_STEPS)))
    if steps > MOST_STEPS:
        raise UsageError(f"training.epochs={training.epochs:g}: more than {MOST_STEPS:,} steps: lower it")
    return Schedule(n, batch / n, steps, batch)


def engine(model: nn.Module, chunk: int | None) -> Engine:
    """What makes per-example gradients of `model`: factored for a linear classifier, else written out."""
    return LinearGradients(model) if type(model) is nn.Linear else PerExampleGradients(model, chunk)


def poisson_sample(source: Source, n: int, rate: float) -> Tensor:
    """Indices of a sample that holds each of n examples independently with probability `rate` (all at rate 1)."""
    return torch.from_numpy(np.flatnonzero(np.asarray(source.random(n)) < rate))


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


class Alone:
    """How one process does what several may share (parallel.Leader): it has every private example."""

    def own(self, private: Split) -> Split:
        """The private examples of this process."""
        return private

    def hire(self, view: View, algorithm: Algorithm, name: str, chunk: int | None, private: Split) -> None:
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


ALONE = Alone()


def noisy_mean(
    mechanism: Mechanism,
    gradients: Engine,
    batch: Split,
    noise_multiplier: float,
    source: Source,
    batch_size: int,
    crew: Alone = ALONE,
) -> tuple[Tensor, Tensor]:
    """(clipped sum over the batch + N(0, s^2)) / batch_size -> [size], s of `privacy.deviation`; and the sum and the
    number of the losses, float64 [2].

    batch_size is fixed and public. The noise is drawn once, on the sum over all processes.
    """
    total, losses = crew.sum(mechanism, gradients, batch)
    if noise_multiplier > 0:
        scale = deviation(noise_multiplier, mechanism.sensitivity)
        total.add_(normal(source, mechanism.size, total.device), alpha=scale)
    return total.div_(batch_size).to(next(gradients.model.parameters()).dtype), losses


def noisy_sum(release: Release, x: Tensor, noise_multiplier: float, source: Source, rows: int = 2**14) -> Frozen:
    """What `release` decodes from its sum over all private features x [n, d], plus noise of the declared scale."""
    total = torch.zeros(release.size, dtype=torch.float64)
    for part in x.split(rows):
        total += release.clipped_sum(part)
    total += deviation(noise_multiplier, release.sensitivity) * normal(source, release.size, total.device)
    return release.decode(total)


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


def fit(
    model: nn.Module,
    task: Task,
    algorithm: Algorithm,
    plan: Schedule,
    noise_multiplier: float,
    training: Training,
    name: str,
    secret: Secret,
    checkpoint: Path,
    report: Callable[[Progress], None],
    gradients: Engine | None = None,
    crew: Alone = ALONE,
    keep: Callable[[list[Progress]], None] = lambda points: None,
) -> float:
    """Train `model` in place on task.private; returns the seconds spent, those before a resume included.

    name: the run; it determines what the algorithm draws, and depends on no private example, since the algorithm must
    not either. secret: where sample and noise come from. A run that is killed at any moment resumes from `checkpoint`,
    and ends, bit for bit on a CPU, like an uninterrupted one; with noise of the operating system, steps after the last
    checkpoint, whose result nobody saw, are drawn anew. gradients: by default engine(model, training.chunk); an audit
    brings its own. crew: the processes that share the work. keep: takes the reports of steps that a checkpoint on disk
    holds, which are never drawn anew: only these may be written to a file. A run that was killed after a checkpoint
    gives its reports once more.

    Raises UserError if the weights stop being finite, or the checkpoint is of another release.
    """
    device = next(model.parameters()).device
    everyone, task = task.private, on_device(task._replace(private=crew.own(task.private)), device)
    gradients = gradients or engine(model, training.chunk)
    parameters = [dict(model.named_parameters())[name] for name in gradients.offsets]
    rate, decayed = training.learning_rate, training.weight_decay
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, rate, training.momentum, weight_decay=decayed)
    if training.optimizer == Optimizer.adam:
        optimizer = torch.optim.Adam(parameters, rate, weight_decay=decayed)
    milestones = [round(f * plan.steps) for f in training.milestones]
    decay: torch.optim.lr_scheduler.LRScheduler
    if training.inverse_decay is None:
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, training.decay)
    else:
        scale = 2 / (training.inverse_decay * training.learning_rate)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: scale / (t + 2))  # the t-th step, from 1: t + 1
    view = view_of(model, gradients, task, name, plan)
    average, begin = _Average(parameters, training.average), _Begin(parameters)
    points = _Points()
    parts = (model, optimizer, decay, average, begin, points)

    saved = _read(checkpoint)
    start, earlier = 0, 0.0
    if saved is not None:
        secret = secret.resumed(saved["release"], saved["step"], checkpoint, partial(_spent, done=saved["step"]))
        start, earlier = _resume(checkpoint, saved, parts)
    points.given_to(keep)
    if isinstance(algorithm, Pretrains) and saved is None:
        began = time.monotonic()
        algorithm.pretrain(view)
        begin.weights = flat(parameters)
        if time.monotonic() - began >= training.checkpoint_seconds:
            save(checkpoint, _state(0, 0.0, secret, parts))
    view = view._replace(start=begin.weights)
    _check_finite(parameters, start, training)
    crew.hire(view, algorithm, name, training.chunk, everyone)
    began = kept = time.monotonic()
    epoch_steps = max(1, round(1 / plan.rate))
    losses = torch.zeros(2, dtype=torch.float64, device=device)  # sum and number since the last report
    for step in range(start, plan.steps):
        chosen = None
        if plan.rate < 1:
            chosen = poisson_sample(secret("sample", step), plan.n, plan.rate)
        make = partial(algorithm.mechanism, view, step)
        mechanism, batch = crew.begin(step, task.private, chosen, make)
        mean, batch_losses = noisy_mean(
            mechanism,
            gradients,
            batch,
            noise_multiplier,
            secret("noise", step),
            plan.batch_size,
            crew,
        )
        average.add(parameters, step + 1)
        direction = mechanism.decode(mean)
        for parameter, columns in zip(parameters, gradients.offsets.values(), strict=True):
            parameter.grad = direction[columns].view_as(parameter)
        optimizer.step()
        decay.step()
        losses += batch_losses

        last = step + 1 == plan.steps
        epoch_ends = last or (step + 1) % epoch_steps == 0
        due = last or time.monotonic() - kept >= training.checkpoint_seconds
        if epoch_ends:
            loss = float(losses[0] / losses[1])  # nan of none
            now = earlier + time.monotonic() - began
            norm, learning_rate = float(direction.norm()), float(decay.get_last_lr()[0])
            latest = Progress(step + 1, plan.steps, (step + 1) * plan.rate, loss, now, norm, learning_rate)
            points.waiting.append(latest)
            losses.zero_()
        if epoch_ends or due:
            if due or not _finite(parameters):
                kept = time.monotonic()
                save(checkpoint, _state(step + 1, earlier + kept - began, secret, parts))
            _check_finite(parameters, step + 1, training)
        if epoch_ends:
            report(latest)
        if due:
            points.given_to(keep)
    average.into(parameters, plan.steps)
    if isinstance(algorithm, Finishes):
        algorithm.finish(view)
    return earlier + time.monotonic() - began


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


def _finite(parameters: list[nn.Parameter]) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in parameters)


def _check_finite(parameters: list[nn.Parameter], step: int, training: Training) -> None:
    """UserError where training diverged. Its checkpoint stays, so that the same command fails again at once instead of
    drawing new noise for steps whose failure was seen."""
    if not _finite(parameters):
        raise UserError(
            f"training diverged: weights are not finite at step {step}; "
            f"lower training.learning_rate={training.learning_rate:g}"
        )


def save(path: Path, content: Any) -> None:
    """torch.save, whole or not at all, lasting through a power cut, for its owner alone; UserError names the file where
    it cannot be written."""
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        partial.unlink(missing_ok=True)
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, records.PRIVATE_FILE)
        try:
            torch.save(content, partial)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(partial, path)
        records.sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error}; free space or set results=FOLDER") from None


def _state(step: int, seconds: float, secret: Secret, parts: tuple[Any, ...]) -> dict[str, Any]:
    """What a checkpoint holds."""
    states = [part.state_dict() for part in parts]
    return {"step": step, "seconds": seconds, "release": secret.state_dict(), "parts": states}


def _read(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`, its tensors on the CPU; None if there is none. UserError if it cannot be read."""
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return {key: saved[key] for key in ("step", "seconds", "release", "parts")}
    except Exception as error:
        raise _unreadable(path, error) from None


def _resume(path: Path, saved: dict[str, Any], parts: tuple[Any, ...]) -> tuple[int, float]:
    """Load a checkpoint into `parts`, on whatever device they are; the step to resume at, and the seconds before it."""
    try:
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
    except Exception as error:
        raise _unreadable(path, error) from None
    return saved["step"], saved["seconds"]


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return UserError(f"{path} cannot be read ({reason}): delete it to start this run again{ledger.again(path.parent)}")


def _spent(plan: Mapping[str, Any], done: int) -> str:
    """What a release had spent after `done` steps of its plan, for people."""
    if not plan["noise_multiplier"]:
        return f"{done} of {plan['steps']} steps without noise"
    epsilon = spent(plan["noise_multiplier"], plan["rate"], plan["steps"], plan["delta"], done, about=plan["epsilon"])
    return f"epsilon {epsilon:.3g} in {done} of {plan['steps']} steps"
