"""Computations done once, before the loop: releases that are drawn once and kept, and layers that do not train."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pubsel import models
from pubsel.algorithms import FirstRelease, Frozen, Solves, map_of
from pubsel.cell import Cell, Spending, tensors, units_of
from pubsel.data import Split, Task
from pubsel.files import gathered, in_parts, plain, unreadable, write_whole
from pubsel.messages import UsageError, UserError, gib, say
from pubsel.models.layers import Above, split
from pubsel.models.memory import free
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import Secret
from pubsel.privacy.sampling import Schedule
from pubsel.training.loop import noisy_sum, public_stream, save

IMAGES = 64  # at a time through layers that are run once
FEATURES = 2**14  # at a time through a frozen map
BEGUN = "training.begun"  # the mark of `cover`


class Prepared(NamedTuple):
    """A cell that is ready to train. model: the network, or the linear classifier that follows `frozen`; trains: the
    part of it that the loop changes; task: as that part sees it."""

    model: nn.Module
    frozen: Frozen | None
    trains: nn.Module
    task: Task

    @property
    def whole(self) -> nn.Module:
        """Return the model that is released: what is frozen before the linear classifier, and this; or the network."""
        if self.frozen is None:
            return self.model
        frozen = copy.deepcopy(self.frozen).to(next(self.model.parameters()).device)
        return nn.Sequential(OrderedDict(frozen=frozen, linear=self.model))


def prepare(cell: Cell, task: Task, first: accountant.Plan | None, in_ledger: bool = True) -> Prepared:
    """Return the network of a cell, and all that is computed before it trains. first: the plan of a release from
    private features; in_ledger: whether the ledger gets an entry of it. UserError if there is not enough memory."""
    # the map before the linear classifier, then the layers below what trains: each is computed once
    frozen = freeze(cell, task, first, in_ledger)
    if frozen is None and task.columns:  # what is missing says nothing
        task = task.each(lambda split: Split(split.x.nan_to_num(0.0), split.y))
    if frozen is not None:
        task = task.each(lambda split: Split(gathered(map(frozen, in_parts(split.x, FEATURES)), len(split.x)), split.y))
        beside_map = {name: getattr(frozen, name) for name in ("offsets", "preconditioner", "class_weights")}
        task = task._replace(**beside_map)
    model = cell.network(task)
    if not (cell.model.once and isinstance(model, models.Network)):
        return Prepared(model, frozen, model, task)
    # outputs of frozen layers are kept in memory in place of the images
    available = min(free(cell.device), free(torch.device("cpu")))
    trains, task = below_once(model, task, available)
    return Prepared(model, frozen, trains, task)


def training_secret(
    cell: Cell,
    task: Task,
    model: nn.Module,
    plan: Schedule,
    spend: accountant.Plan | None,
    unprocessed: Split | None = None,
    what: str = "training",
) -> Secret:
    """Return the secret streams of the training of `model`, all that is released of it, at its start; `task` as it
    trains.

    unprocessed: the private examples by which the ledger identifies them; None if nothing is released. what: another
    word for a training that is not the run's own."""
    # the ledger gets an entry only for what is released
    costs = {"noise_multiplier": 0.0, "epsilon": math.inf, "delta": 0.0}
    spending = None
    if spend is not None:
        costs = {key: getattr(spend, key) for key in costs}
    if unprocessed is not None and spend is not None:
        spending = Spending(unprocessed, spend.epsilon, spend.delta, task.original, spend)
    elif unprocessed is not None and isinstance(cell.algorithm, Solves):
        epsilon, delta = cell.budget.epsilon, cell.budget.delta
        cost = cell.algorithm.account(len(unprocessed.x), epsilon, delta)
        spending = Spending(unprocessed, epsilon, cost.delta, task.original)
    public = [] if task.public is None else [task.public]
    private = units_of(task)
    return cell.streams.secret(what, private, public, tensors(model), plan._asdict() | costs, spending)


def below_once(network: models.Network, task: Task, available: int) -> tuple[Above, Task]:
    """Return what trains of a network, and the task with the outputs of the frozen layers below it, [n, d], in place of
    its images. UserError where they would take more than `available` bytes."""
    below, above = split(network, task.private.x)
    splits = [part for part in (task.private, task.public, task.test, task.validation) if part is not None]
    n, d = sum(len(part.x) for part in splits), sum(shape.numel() for shape in above.shapes)
    if 4 * n * d > available:
        raise UserError(f"model.once=true: outputs of the frozen layers take {gib(4 * n * d)}: set it to false")
    say(f"  frozen layers: {d} outputs for each of {n} images, computed once")
    device = network.mean.device
    return above, task.each(
        lambda part: Split(torch.cat([below(x.to(device)).cpu() for x in part.x.split(IMAGES)]), part.y)
    )


def planned_map(cell: Cell, task: Task, first: accountant.Plan | None) -> Frozen | FirstRelease | None:
    """Return the map before the linear classifier, or its release, of which nothing is drawn yet. UsageError if there
    can be none."""
    if task.private.x.dim() != 2:
        return None
    n, d = task.private.x.shape
    release = map_of(cell.algorithm, task.public, d, public_stream(cell.public_key))
    if isinstance(release, FirstRelease):
        if first is None and cell.budget.epsilon != math.inf:
            name = cell.algorithm.name
            raise UsageError(f"algorithm.share: {name} releases from private data: give it a share over 0")
        if n > accountant.MOST_EXAMPLES:
            most = accountant.MOST_EXAMPLES
            raise UsageError(f"pair.private: {n} examples: the rounding of sums is bounded for {most}")
    return release


def freeze(cell: Cell, task: Task, first: accountant.Plan | None, in_ledger: bool = True) -> Frozen | None:
    """Return the map before the linear classifier. If it is released from private features, it is released once, with
    noise, and kept in the run's folder until the run has finished."""
    algorithm, release = cell.algorithm, planned_map(cell, task, first)
    if not isinstance(release, FirstRelease):
        return release

    # the map is of private data: its noise is drawn once, and its cost is in the plan
    plan = first._asdict() if first else {"noise_multiplier": 0.0, "epsilon": math.inf}
    public = [] if task.public is None else [task.public]
    costs = None
    if first is not None and in_ledger:
        noise = first.noise_multiplier * math.sqrt(algorithm.first_steps or 1)  # of a step, if it counts as several
        costs = Spending(
            task.private, first.epsilon, first.delta, task.original, first._replace(noise_multiplier=noise)
        )
    what = "training" if algorithm.first_steps else "first release"  # whose cost this is
    secret = cell.streams.secret(what, units_of(task), public, {}, plan, costs)

    def draw() -> dict[str, Any]:
        (cell.folder / BEGUN).unlink(missing_ok=True)
        noise_multiplier, source = plan["noise_multiplier"], secret("release")
        x, y = task.private
        return noisy_sum(release, x, noise_multiplier, source, people=task.people, y=y).parts()

    return Frozen.of_parts(released_once(cell.folder / "release.pt", secret, draw))


def solve(cell: Cell, task: Task, secret: Secret) -> tuple[torch.Tensor, accountant.Plan]:
    """Return the weights [C, d] of an algorithm that runs its own loop, drawn once, and their cost."""
    algorithm, budget = cell.algorithm, cell.budget
    assert isinstance(algorithm, Solves)
    assert task.people is None  # see rules.check_unit

    def release() -> dict[str, Any]:
        weight, spend = algorithm.solve(
            task.private, task.public, task.classes, budget.epsilon, budget.delta, secret("solve")
        )
        return {"weight": weight, "spend": spend._asdict()}

    kept = released_once(cell.folder / "solution.pt", secret, release)
    return kept["weight"], accountant.Plan(**kept["spend"])


def cover(secret: Secret, begin: Callable[[str], None] | None, mark: Path) -> None:
    """Have a release leave a mark before it draws, in place of a line in the ledger, which an earlier release has
    written for both; that one removes it when it draws. Where there is a mark, what was drawn has been deleted since:
    new noise then gets its own line."""

    def begins(key: str) -> None:
        if mark.exists() and begin is not None and secret.secure:
            begin(key)
        write_whole(mark, "", private=True)

    secret.begin = begins


def released_once(path: Path, secret: Secret, release: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `release` once and store its result at `path`, so that a resumed run never draws twice, even if the noise is
    the operating system's. UserError if what is kept was drawn for another release than that of `secret`."""
    # a draw is on disk before anything follows from it
    if not path.exists():
        save(path, {"release": secret.state_dict(), "drawn": release()})
    try:
        kept = torch.load(plain(path), weights_only=True)
        belongs, drawn = kept["release"], dict(kept["drawn"])
    except Exception as error:
        again = ledger.again(path.parent)
        raise unreadable(path, error, f"delete {path.parent} to start this run again{again}") from None
    secret.resumed(belongs, 0, path, lambda plan: f"epsilon {plan['epsilon']:.3g}")
    return drawn
