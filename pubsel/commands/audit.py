"""`pubsel audit`: what a guarantee claims beside what attacks on a training measure, and what each example loses.

The audit trains anew, with canaries among the private examples; how it does that is `pubsel run`'s own code. It spends
privacy of its own, so what it trains is thrown away.
"""

import math
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from numpy.typing import NDArray

from pubsel import records
from pubsel.algorithms import Algorithm, Solves
from pubsel.attacks import one_run
from pubsel.attacks.canaries import WithCanaries, distinct, draw_canaries
from pubsel.attacks.per_instance import Losses
from pubsel.attacks.witness import SURE, Witness
from pubsel.cell import Cell, weights_digest
from pubsel.data import Task
from pubsel.gradients.matrix import Engine
from pubsel.gradients.per_example import losses_of
from pubsel.messages import UsageError, bars, say
from pubsel.privacy import ledger
from pubsel.privacy.accountant import GAUSSIAN, Plan
from pubsel.privacy.randomness import Secret, content, stream
from pubsel.privacy.sampling import Schedule
from pubsel.rules import AUTO, canonical, check_pair
from pubsel.settings.keys import POOL, Audit, AuditConfig, AuditKind, of_run
from pubsel.training.evaluation import logits
from pubsel.training.loop import Job, Progress, engine, fit, on_device, rate_of
from pubsel.training.once import Prepared, prepare, solve, training_secret

NOT_FOR_RELEASE = (
    "The audited training itself must not be released: it was watched, its examples were changed, and it spent privacy "
    "of its own. A measured epsilon is a lower bound of the true one with the stated confidence; that it lies below "
    "the claimed one proves no guarantee."
)
SECRET = (
    "Each value is computed from private data without noise, and says something of the example that it belongs to: "
    "do not publish them, nor a figure of them."
)

TOO_WEAK = (
    "  THIS AUDIT IS TOO WEAK TO SAY ANYTHING: it would not have found a third of the noise; take more canaries "
    "(audit.canaries), more steps (training.steps) or a larger epsilon"
)
STRONGER = ", or audit.kind=white_box"  # which is of examples alone
GUESSED = {
    "planned_kind": "of Poisson samples and Gaussian noise",
    "planned_curve": "of any program with the plan's trade-off curve",
    "any_program": "of any program",
}
CONTROL = 1 / 3  # of the noise: the positive control
SURELY = 1e-3  # white box: chance of the extreme guesses, at most, at which a claim counts as refuted by them


def audit(settings: AuditConfig) -> dict[str, Any]:
    """Audit one cell and return its record; a finished one is read. UsageError if there is no guarantee to audit."""
    check_pair(settings)
    requested = canonical(settings)
    cell = Cell.of(requested, "audits")

    def make() -> dict[str, Any]:
        began = time.monotonic()
        check_audited(cell, settings.audit.kind)
        task = cell.load_task()
        say(f"{cell.name}: on {cell.device}")
        # without canaries, what is followed is the run itself: its name, and so its noise
        itself = settings.audit.kind == AuditKind.per_instance
        kind = _per_instance if itself else _with_canaries
        audited = (Cell.of(of_run(requested)) if itself else cell).derived(task)
        # what these trainings leave is not kept: nobody may release or resume them
        with tempfile.TemporaryDirectory(prefix=records.SCRATCH, dir=cell.folder) as scratch:
            measures = kind(Audited(audited._replace(folder=Path(scratch)), settings.audit, task, cell.folder))
        return {
            "algorithm": cell.algorithm.name,
            "private": settings.pair.private,
            "kind": settings.audit.kind.name,
            "unit": settings.pair.unit,
            **measures,
            "settings": cell.streams.settings,
            "seconds": round(time.monotonic() - began, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    record, is_new = records.recorded(cell.folder, make, records.AuditRecord)
    if not is_new:
        say(f"{cell.name}: audited before; delete {cell.folder} to audit again{ledger.again(cell.folder)}")
    return record


def check_audited(cell: Cell, kind: AuditKind) -> None:
    """Raise UsageError if a cell has no guarantee, or none that an audit can follow."""
    epsilon = cell.budget.epsilon
    if not cell.algorithm.private or epsilon in (0.0, math.inf):
        raise UsageError(f"algorithm={cell.algorithm.name}, epsilon={epsilon:g}: no guarantee to audit")
    public, unit = cell.inputs.pair.public, cell.inputs.pair.unit
    if public in (AUTO, POOL):
        raise UsageError(f"pair.public={public}: the choice is not audited, only training: give the set that it chose")
    if unit is not None and kind != AuditKind.black_box:
        raise UsageError(
            f"pair.unit={unit}: audit.kind={kind.name} is of single examples, and not of people: take "
            "audit.kind=black_box, or leave pair.unit out"
        )
    if cell.training.augment is not None and kind != AuditKind.black_box:
        raise UsageError(
            f"training.augment: audit.kind={kind.name} follows the gradients of images, and not of views: take "
            "audit.kind=black_box, or leave training.augment and training.views out"
        )


class Audited(NamedTuple):
    """A cell to audit. The folder of `cell` is gone when the audit ends; `folder` is that of its record."""

    cell: Cell
    audit: Audit
    task: Task
    folder: Path

    def at(self, part: str) -> "Audited":
        """Return the same with a separate folder, so that two trainings share no release that is drawn once."""
        folder = self.cell.folder / part
        folder.mkdir()
        return self._replace(cell=self.cell._replace(folder=folder))

    def random(self) -> np.random.Generator:
        """Return the random numbers of canaries and their coins."""
        return stream(f"{self.cell.name}\0{content(*self.task.private)}", "canaries")


class Planned(NamedTuple):
    """One training of an audit. cell: what it trains as; what: a word that no other training has, so that none
    shares its noise."""

    cell: Cell
    what: str
    rate: float  # the learning rate of the run, which the positive control has too
    schedule: Schedule
    plan: Plan | None
    first: Plan | None

    def prepared(self, algorithm: Algorithm, task: Task) -> Prepared:
        """Return the training ready to run by `algorithm`, which may be one that is watched. Nothing of it is
        released."""
        return prepare(self.cell._replace(algorithm=algorithm), task, self.first, in_ledger=False)

    def secret(self, prepared: Prepared) -> Secret:
        """Return the streams of this training alone; of a run's own training the run's, bit for bit."""
        return training_secret(self.cell, prepared.task, prepared.whole, self.schedule, self.plan, what=self.what)

    def train(self, algorithm: Algorithm, prepared: Prepared, gradients: Engine | None = None) -> None:
        """Train by the loop of `pubsel run`."""
        assert self.plan is not None
        cell, checkpoint = self.cell, self.cell.folder / "checkpoint.pt"
        noise_multiplier = self.plan.noise_multiplier
        job = Job(algorithm, self.schedule, noise_multiplier, cell.training, cell.public_key, checkpoint, self.rate)
        fit(prepared.trains, prepared.task, job, self.secret(prepared), _report, gradients)


def _planned(audited: Audited, what: str, task: Task, weaker: bool) -> tuple[Planned, Plan | None, Plan | None]:
    """Return the plan of the run itself, for training on the private units of `task`; and what it claims to spend, in
    training and before. weaker: the positive control, with a third of the noise, drawn from other streams."""
    cell = audited.cell
    schedule, plan, first = cell.guarantee(audited.task.units)
    rate = rate_of(cell.training, cell.algorithm, schedule, plan.noise_multiplier if plan else 0.0)
    planned = Planned(cell, what, rate, schedule._replace(n=task.units), plan, first)
    if weaker:
        less = [part and part._replace(noise_multiplier=part.noise_multiplier * CONTROL) for part in (plan, first)]
        planned = planned._replace(what=f"{what} control", plan=less[0], first=less[1])
    # a release that counts as steps is in the plan of training, whose epsilon is that of both
    return planned, plan, None if cell.algorithm.first_steps else first


def _with_canaries(audited: Audited) -> dict[str, Any]:
    """Audit by canaries: among the gradients of the loop itself (attacks/canaries.py, attacks/witness.py), or examples
    of noise among the private ones; the score of these is minus the final model's loss."""
    white, random = audited.audit.kind == AuditKind.white_box, audited.random()
    if white and isinstance(audited.cell.algorithm, Solves):
        raise UsageError(f"algorithm={audited.cell.algorithm.name} runs its own loop: take audit.kind=black_box")
    look = _witnessed if white else _scored
    return with_control(lambda weaker: look(audited.at(f"{weaker}"), random, weaker)) | {"statement": NOT_FOR_RELEASE}


def _witnessed(audited: Audited, random: np.random.Generator, weaker: bool) -> dict[str, Any]:
    """Train once with canaries, and return what its witness says of the plan."""
    witness, claimed, first = watch(audited, random, weaker)
    # each ratio is computed by one who knows all other coins: of canaries that overlap, the coins of others say more
    # than the released sum does
    apart = witness.engine.apart(witness.weighed.nonzero().flatten())
    ratios, included = witness.ratios[apart].numpy(), witness.engine.canaries.included[apart].numpy()
    bounds = lower_bounds_of(ratios, included, claimed, first, audited.audit, one_run.guess_all(ratios, included))
    checks = witness.checks()
    return bounds | {"checks": checks, "failed": [name for name, p in checks.items() if p < SURE]}


def watch(audited: Audited, random: np.random.Generator, weaker: bool = False) -> tuple[Witness, Plan, Plan | None]:
    """Return the witness of one training with canaries from `random`, and the plans of it and of what is released
    before. weaker: with a third of the noise, for all that the witness knows as planned."""
    task, algorithm, chunk = audited.task, audited.cell.algorithm, audited.cell.training.chunk
    planned, claimed, first = _planned(audited, "audit", task, weaker)
    assert claimed is not None
    prepared = planned.prepared(algorithm, task)

    # canaries join the examples that the network sees
    inner, private = engine(prepared.trains, chunk), prepared.task.private
    canaries = draw_canaries(audited.audit.canaries, inner.size, len(private.x), random)
    coins = bytes(canaries.included.tolist()).hex()  # of another training than those with other coins: other noise
    gradients = WithCanaries(inner, canaries, private)
    prepared = prepared._replace(task=prepared.task._replace(private=canaries.join(private)))

    schedule = planned.schedule._replace(n=gradients.n)
    planned = planned._replace(what=f"{planned.what} {coins}", schedule=schedule)
    witness = Witness(gradients, schedule, claimed.noise_multiplier)
    planned.train(witness.watching(algorithm), prepared, gradients)
    return witness, claimed, first


def _scored(audited: Audited, random: np.random.Generator, weaker: bool) -> dict[str, Any]:
    """Train once with canaries behind the examples, and return what the losses of the final model say of the plan."""
    cell = audited.cell
    canaries, included, task = distinct(audited.task, audited.audit.canaries, random)
    planned, claimed, first = _planned(audited, "audit", task, weaker)  # its coins are in the data
    prepared = planned.prepared(cell.algorithm, task)

    # the training of the run, or the same with a third of its noise
    if isinstance(cell.algorithm, Solves):
        secret = planned.secret(prepared)
        if weaker:  # it plans its own noise, which is in proportion to 1 / epsilon
            cell = cell._replace(budget=cell.budget._replace(epsilon=cell.budget.epsilon / CONTROL))
        weight, claimed = solve(cell, prepared.task, secret)
        prepared.trains.load_state_dict({"weight": weight}, strict=False)
        claimed = claimed._replace(claimed_epsilon=audited.cell.budget.epsilon)
    else:
        planned.train(cell.algorithm, prepared)

    # a canary that was in has a smaller loss than others of its class
    assert claimed is not None
    scores = -losses_of(logits(prepared.whole, canaries.x).cpu(), canaries.y).double().numpy()
    if canaries.y.dim() == 1:
        labels = canaries.y.numpy()
        scores -= (np.bincount(labels, scores) / np.maximum(np.bincount(labels), 1))[labels]
    return lower_bounds_of(scores, included, claimed, first, audited.audit) | {"failed": []}


def with_control(audited: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    """Audit the program (False), and the same one with a third of the noise (True): if nothing is found there, the
    audit says nothing of less noise here."""
    plain = audited(False)
    say("  positive control: the same with a third of the noise")
    control = audited(True)
    seen = control["refuted"] or bool(control["failed"])
    return plain | {
        "control": {
            "noise": CONTROL,
            "found": seen,
            **{key: control[key] for key in ("refuted", "failed", "measured")},
        },
        "too_weak": not seen and not (plain["refuted"] or plain["failed"]),
    }


def lower_bounds_of(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    plan: Plan,
    first: Plan | None,
    audit: Audit,
    independent: one_run.Guesses | None = None,
) -> dict[str, Any]:
    """Return what the guesses say, next to what is claimed: of any program by the extreme `scores` [m], also of one
    with the plan's trade-off curve; with guesses of independent canaries, of a program of the planned kind, and how
    much noise it has at most."""
    parts = [part for part in (first, plan) if part is not None]
    claimed, delta = sum(part.claimed_epsilon for part in parts), sum(part.delta for part in parts)
    extremes = one_run.guess_extremes(scores, included, audit.guesses)
    figures: dict[str, Any] = {
        "claimed": claimed,
        "delta": delta,
        "plan": plan._asdict(),
        "canaries": len(scores),
        "confidence": audit.confidence,
        "any_program": {**extremes._asdict(), "epsilon": one_run.epsilon_of_any(extremes, delta, audit.confidence)},
    }

    # beside guesses that are near the best there are, the extreme ones must not raise an alarm that those would not
    level = 1 - audit.confidence if independent is None else SURELY
    refuted = one_run.p_value(extremes, claimed, delta) < level
    if first is None and plan.accountant in GAUSSIAN and plan.valid:  # else no curve of one kind of noise is claimed
        epsilon = one_run.epsilon_of_curve(extremes, plan, audit.confidence)
        figures["planned_curve"] = {**extremes._asdict(), "epsilon": epsilon}
        refuted |= not one_run.may_be_right(extremes, level, one_run.trade_off(plan, plan.noise_multiplier))

    if independent is not None:
        epsilon, noise = one_run.epsilon_of_plan(independent, plan, audit.confidence)
        most = noise if math.isfinite(noise) else None
        figures["planned_kind"] = {**independent._asdict(), "epsilon": epsilon, "noise_multiplier_at_most": most}
        refuted |= not one_run.is_consistent(independent, plan, 1 - SURE)
        if not plan.valid:  # more is claimed than this noise gives
            refuted |= one_run.epsilon_of_plan(independent, plan, 1 - SURE)[0] > plan.claimed_epsilon

    bounds = [figures[key]["epsilon"] for key in ("any_program", "planned_curve", "planned_kind") if key in figures]
    return figures | {"measured": max(bounds), "refuted": bool(refuted)}


def _per_instance(audited: Audited) -> dict[str, Any]:
    """Return the loss of each private example in the training that `pubsel run` would do: same noise, same weights."""
    cell = audited.cell
    if isinstance(cell.algorithm, Solves):
        raise UsageError(f"algorithm={cell.algorithm.name} runs its own loop: its examples are not followed")
    lost = with_control(lambda weaker: _lost(audited.at(f"{weaker}"), weaker))
    return {"run": cell.name} | lost | {"statement": SECRET}


def _lost(audited: Audited, weaker: bool) -> dict[str, Any]:
    """Return what the training of the run loses of each example; of the one with less noise, nothing is kept."""
    # the trained weights must be those of the run: the loss is of that training
    labels, every = audited.task.private.y, audited.audit.every
    planned, plan, first = _planned(audited, "training", audited.task, weaker)
    assert plan is not None
    if audited.cell.algorithm.first_steps:
        raise UsageError(
            "audit.kind=per_instance: a release before training is within the plan of training, and its part of a loss "
            "is not followed: take another kind (of columns of a table that get their scale so: set pair.read.bounds)"
        )
    losses = Losses(labels, plan, every, first)
    followed = losses.watching(audited.cell.algorithm)
    prepared = planned.prepared(followed, audited.task)
    losses.private = on_device(prepared.task, audited.cell.device).private
    planned.train(followed, prepared)

    epsilons = losses.epsilons()
    if not weaker:
        # of several labels, the numbers of those that an example has
        classes = [" ".join(map(str, np.flatnonzero(row == 1))) if labels.dim() == 2 else row for row in labels.numpy()]
        frame = pandas.DataFrame({"example": range(len(labels)), "class": classes, "epsilon": epsilons})
        records.write_table(frame, audited.folder / "per_instance.csv")
    shares = np.quantile(epsilons, [0, 0.25, 0.5, 0.75, 1], method="higher")
    spread = [share if math.isfinite(share) else None for share in shares.tolist()]
    squares, numbers = np.array(losses.noise).sum(0)
    parts = [part for part in (first, plan) if part is not None]
    p = losses.least_noise()
    return {
        "weights": weights_digest(prepared.whole),  # those of the run
        "claimed": sum(part.claimed_epsilon for part in parts),
        "delta": sum(part.delta for part in parts),
        "plan": plan._asdict(),
        "exact": every == 1,
        "losses": dict(zip(("least", "quarter", "median", "three_quarters", "most"), spread, strict=True)),
        "noise": math.sqrt(squares / numbers),  # over the planned one
        "checks": {"noise scale": p},
        "failed": ["noise scale"] if p < SURE else [],
        "refuted": False,
        "measured": spread[2],
    }


def _report(now: Progress) -> None:
    bars.line("training", f"  step {now.step} of {now.steps}, {now.seconds:.0f} s")


def show_audit(record: dict[str, Any]) -> str:
    """Return the record in a few lines."""
    people = ", people" if record.get("unit") else ""
    what = f"{record['algorithm']} on {record['private']}, {record['kind']}{people}"
    # what is claimed, next to what was measured
    head = f"{what}: claimed epsilon {record['claimed']:.2f}"
    if record["kind"] == "per_instance":
        losses = {name: "unbounded" if value is None else f"{value:.3f}" for name, value in record["losses"].items()}
        spread = ", ".join(f"{name.replace('_', ' ')} {loss}" for name, loss in losses.items())
        lines = [f"{head}; losses of single examples: {spread}"]
        if "noise" in record:
            lines.append(f"  noise: {record['noise']:.4g} of the planned one")
    else:
        lines = [f"{head}, measured at least {record['measured']:.2f} ({record['confidence']:.0%} confidence)"]
    for key, what in GUESSED.items():
        if key in record:
            guesses = record[key]
            right = f"{guesses['right']} of {guesses['made']} guesses right, {guesses['canaries']} canaries"
            lines.append(f"  {what}: at least {guesses['epsilon']:.2f} ({right})")
    if "checks" in record:
        lines.append("  checks: " + ", ".join(f"{name} p = {p:.2g}" for name, p in sorted(record["checks"].items())))
    lines += _verdict(record)
    return "\n".join([*lines, record["statement"]])


def _verdict(record: dict[str, Any]) -> list[str]:
    """Return what is found, here and in the positive control."""
    refuted, failed = record.get("refuted", False), record.get("failed", [])
    lines = []
    if "control" in record:
        control = record["control"]
        by = (["the claim is refuted"] if control["refuted"] else []) + control["failed"]
        lines.append(f"  with a third of the noise: {'found (' + ', '.join(by) + ')' if by else 'NOT found'}")
    if refuted:
        lines.append("  THE CLAIM IS REFUTED: the training is less private than claimed")
    if failed:
        lines.append(f"  THE TRAINING IS NOT WHAT IS ACCOUNTED FOR: {', '.join(failed)}")
    if record.get("too_weak"):
        lines.append(TOO_WEAK + (STRONGER if record.get("unit") is None else ""))
    elif not refuted and record["kind"] != "per_instance" and record["measured"] > record["claimed"]:
        lines.append(
            f"  the bound is above the claim, as in {1 - record['confidence']:.0%} of audits of right programs: "
            "audit again with another seed"
        )
    return lines
