"""`pubsel audit`: what a guarantee claims beside what attacks on a training measure, and what each example loses.

The audit trains anew, with canaries among the private examples; how it does that is `pubsel run`'s own code. It spends
privacy of its own, so what it trains is thrown away.
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import nn

from pubsel import algorithms, records
from pubsel.algorithms import Algorithm, Solves
from pubsel.attacks.canaries import WithCanaries, distinct, draw
from pubsel.attacks.one_run import (
    Guesses,
    epsilon_of_any,
    epsilon_of_curve,
    epsilon_of_plan,
    guess_all,
    guess_extremes,
    may_be_right,
    p_value,
    stands,
    trade_off,
)
from pubsel.attacks.per_instance import Losses
from pubsel.attacks.witness import SURE, Witness
from pubsel.commands.run import (
    AUTO,
    SCRATCH,
    canonical,
    choose_device,
    guarantee,
    load_task,
    locked,
    prepare,
    solve,
    training_secret,
    weights_digest,
    whole,
)
from pubsel.data import Split, Task
from pubsel.gradients.matrix import Engine
from pubsel.gradients.per_example import losses_of
from pubsel.messages import UsageError, say
from pubsel.privacy import ledger
from pubsel.privacy.accountant import Plan
from pubsel.privacy.randomness import Secret, content, stream
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import Audit, AuditConfig, AuditKind, RunConfig
from pubsel.tables import join
from pubsel.training.evaluation import logits
from pubsel.training.loop import Progress, Schedule, engine, fit, on_device

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
    "(audit.canaries), more steps (training.steps), a larger epsilon, or audit.kind=white_box"
)
GUESSED = {
    "planned_kind": "of Poisson samples and Gaussian noise",
    "planned_curve": "of any program with the plan's trade-off curve",
    "any_program": "of any program",
}
CONTROL = 1 / 3  # of the noise: the positive control
SURELY = 1e-3  # white box: chance of the extreme guesses, at most, at which a claim counts as refuted by them


def audit(settings: AuditConfig) -> dict[str, Any]:
    """Audit one cell and return its record; a finished one is read. UsageError where there is no guarantee to audit."""
    settings = canonical(settings)  # type: ignore[assignment]
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    name = identity_of(settings)
    folder = Path(settings.results) / "audits" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists():
            say(f"{name}: audited before; delete {folder} to audit again{ledger.again(folder)}")
            return records.read_record(path, ("identity", "kind", "claimed"))
        began, origin = time.monotonic(), records.provenance()
        algorithm = algorithms.build(settings.algorithm)
        if not algorithm.private or settings.epsilon in (0.0, math.inf):
            raise UsageError(f"algorithm={algorithm.name}, epsilon={settings.epsilon:g}: no guarantee to audit")
        if settings.pair.public == AUTO:
            raise UsageError("pair.public=auto: the choice is not audited, only training: give the set that it chose")
        task = load_task(settings, device)
        say(f"{name}: on {device}")
        kind = {
            AuditKind.white_box: _white_box, AuditKind.black_box: _black_box, AuditKind.per_instance: _per_instance,
        }[settings.audit.kind]  # fmt: skip
        # for trainings that nobody may release or resume
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
            found = kind(Cell(settings, algorithm, task, name, folder, Path(scratch), device))
        record = {
            "identity": name,
            "algorithm": algorithm.name,
            "private": settings.pair.private,
            "kind": settings.audit.kind.name,
            **found,
            "settings": as_json(settings),
            "seconds": round(time.monotonic() - began, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            **origin,
        }
        records.write_record(path, record)
    return record


class Cell(NamedTuple):
    """What is audited. name: of the audit; folder: of its record; scratch: gone when it ends."""

    settings: AuditConfig
    algorithm: Algorithm
    task: Task
    name: str
    folder: Path
    scratch: Path
    device: torch.device

    def at(self, part: str) -> "Cell":
        """The same, with scratch of its own: two trainings share nothing that is drawn once."""
        scratch = self.scratch / part
        scratch.mkdir()
        return self._replace(scratch=scratch)

    def random(self) -> np.random.Generator:
        """Where canaries and their coins come from."""
        return stream(f"{self.name}\0{content(*self.task.private)}", "canaries")


class Planned(NamedTuple):
    """What one training of an audit is. settings: of the run that it trains as; name: of what the algorithm draws;
    what: a word that no other training has, so that none shares its noise."""

    settings: RunConfig
    name: str
    what: str
    schedule: Schedule
    plan: Plan | None
    first: Plan | None

    def weaker(self) -> "Planned":
        """The positive control: the same with a third of the noise, and noise of its own."""

        def less(plan: Plan | None) -> Plan | None:
            return plan and plan._replace(noise_multiplier=plan.noise_multiplier * CONTROL)

        return self._replace(what=f"{self.what} control", plan=less(self.plan), first=less(self.first))


def _planned(cell: Cell, what: str, private: Split) -> Planned:
    """The plan of the run itself, for training on `private`."""
    schedule, plan, first = guarantee(cell.settings, cell.algorithm, len(cell.task.private.x))
    return Planned(cell.settings, cell.name, what, schedule._replace(n=len(private.x)), plan, first)


def _made(cell: Cell, planned: Planned, algorithm: Algorithm, task: Task) -> tuple[nn.Module, nn.Module, Task]:
    """(whole model, what trains of it, the task as that sees it), ready to be trained."""
    model, frozen, trains, task = prepare(
        planned.settings, algorithm, task, planned.name, cell.scratch, planned.first, cell.device
    )
    return whole(frozen, model), trains, task


def _secret(cell: Cell, planned: Planned, task: Task, model: nn.Module) -> Secret:
    """Streams of this training alone; of a run's own training the run's, bit for bit."""
    return training_secret(
        planned.settings, task, model, planned.schedule, planned.plan, cell.device, what=planned.what
    )


def _trained(
    cell: Cell, planned: Planned, algorithm: Algorithm, task: Task, model: nn.Module, trains: nn.Module,
    gradients: Engine | None = None,
) -> None:  # fmt: skip
    """Trains by the loop of `pubsel run`."""
    assert planned.plan is not None
    fit(
        trains, task, algorithm, planned.schedule, planned.plan.noise_multiplier, cell.settings.training, planned.name,
        _secret(cell, planned, task, model), cell.scratch / "checkpoint.pt", _report, gradients,
    )  # fmt: skip


def _white_box(cell: Cell) -> dict[str, Any]:
    """Canaries among the gradients of the loop itself (attacks/canaries.py, attacks/witness.py)."""
    if isinstance(cell.algorithm, Solves):
        raise UsageError(f"algorithm={cell.algorithm.name} has a loop of its own: take audit.kind=black_box")
    random = cell.random()
    return with_control(lambda weaker: _witnessed(cell.at(f"{weaker}"), random, weaker)) | {
        "statement": NOT_FOR_RELEASE
    }


def _witnessed(cell: Cell, random: np.random.Generator, weaker: bool) -> dict[str, Any]:
    """One training with canaries, and what its witness says of the plan."""
    witness, claimed, first = watch(cell, random, weaker)
    included = witness.engine.canaries.included[witness.weighed].numpy()
    ratios = witness.ratios[witness.weighed].numpy()
    bounds = measured(ratios, included, claimed, first, cell.settings.audit, guess_all(ratios, included))
    checks = witness.checks()
    return bounds | {"checks": checks, "failed": [name for name, p in checks.items() if p < SURE]}


def watch(cell: Cell, random: np.random.Generator, weaker: bool = False) -> tuple[Witness, Plan, Plan | None]:
    """The witness of one training with canaries from `random`, and the plans of it and of what is released before.
    weaker: with a third of the noise, for all that the witness knows as planned."""
    settings, algorithm, task = cell.settings, cell.algorithm, cell.task
    planned = _planned(cell, "audit", task.private)
    claimed, first = planned.plan, planned.first
    assert claimed is not None
    if weaker:
        planned = planned.weaker()
    model, trains, task = _made(cell, planned, algorithm, task)
    inner = engine(trains, settings.training.chunk)
    canaries = draw(settings.audit.canaries, inner.size, len(task.private.x), random)
    coins = bytes(canaries.included.tolist()).hex()  # of another training than those with other coins: other noise
    made = WithCanaries(inner, canaries, task.private)
    task = task._replace(private=canaries.join(task.private))
    schedule = planned.schedule._replace(n=made.n)
    planned = planned._replace(what=f"{planned.what} {coins}", schedule=schedule)
    witness = Witness(made, schedule, claimed.noise_multiplier)
    _trained(cell, planned, witness.watching(algorithm), task, model, trains, made)
    return witness, claimed, first


def _black_box(cell: Cell) -> dict[str, Any]:
    """Examples of noise among the private ones; the score of each is minus the final model's loss on it."""
    random = cell.random()
    return with_control(lambda weaker: _scored(cell.at(f"{weaker}"), random, weaker)) | {"statement": NOT_FOR_RELEASE}


def _scored(cell: Cell, random: np.random.Generator, weaker: bool) -> dict[str, Any]:
    """One training with canaries behind its examples, and what the losses of the final model say of the plan."""
    settings, algorithm = cell.settings, cell.algorithm
    canaries, included, task = distinct(cell.task, settings.audit.canaries, random)
    planned = _planned(cell, "audit", task.private)  # its coins are in the data
    claimed, first = planned.plan, planned.first
    if weaker:
        planned = planned.weaker()
    model, trains, task = _made(cell, planned, algorithm, task)
    if isinstance(algorithm, Solves):
        if weaker:  # it plans its own noise, which is in proportion to 1 / epsilon
            settings = dataclasses.replace(settings, epsilon=settings.epsilon / CONTROL)
        weight, claimed = solve(settings, algorithm, task, _secret(cell, planned, task, model), cell.scratch)
        trains.load_state_dict({"weight": weight}, strict=False)
        claimed = claimed._replace(claimed_epsilon=cell.settings.epsilon)
    else:
        _trained(cell, planned, algorithm, task, model, trains)
    assert claimed is not None
    scores = -losses_of(logits(model, canaries.x).cpu(), canaries.y).double().numpy()
    return measured(scores, included, claimed, first, settings.audit) | {"failed": []}


def with_control(audited: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    """What is found in the program (False), with what is found in the same one with a third of the noise (True):
    if nothing is found there, nothing is said of less noise here."""
    found = audited(False)
    say("  positive control: the same with a third of the noise")
    control = audited(True)
    seen = control["refuted"] or bool(control["failed"])
    return found | {
        "control": {
            "noise": CONTROL,
            "found": seen,
            **{key: control[key] for key in ("refuted", "failed", "measured")},
        },
        "too_weak": not seen and not (found["refuted"] or found["failed"]),
    }


def measured(
    scores: NDArray[np.float64], included: NDArray[np.bool_], plan: Plan, first: Plan | None, audit: Audit,
    independent: Guesses | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the guesses say, beside what is claimed: of any program by the extreme `scores` [m], also of one with the
    plan's trade-off curve; with guesses of independent canaries, of a program of the planned kind, and how much noise
    it has at most."""
    parts = [part for part in (first, plan) if part is not None]
    claimed, delta = sum(part.claimed_epsilon for part in parts), sum(part.delta for part in parts)
    extremes = guess_extremes(scores, included, audit.guesses)
    found: dict[str, Any] = {
        "claimed": claimed,
        "delta": delta,
        "plan": plan._asdict(),
        "canaries": len(scores),
        "confidence": audit.confidence,
        "any_program": {**extremes._asdict(), "epsilon": epsilon_of_any(extremes, delta, audit.confidence)},
    }
    # beside guesses that are near the best there are, the extreme ones must not raise an alarm that those would not
    level = 1 - audit.confidence if independent is None else SURELY
    refuted = p_value(extremes, claimed, delta) < level
    if first is None and plan.delta > 0 and plan.valid:  # else no curve of one kind of noise is claimed
        epsilon = epsilon_of_curve(extremes, plan, audit.confidence)
        found["planned_curve"] = {**extremes._asdict(), "epsilon": epsilon}
        refuted |= not may_be_right(extremes, level, trade_off(plan, plan.noise_multiplier))
    if independent is not None:
        epsilon, noise = epsilon_of_plan(independent, plan, audit.confidence)
        most = noise if math.isfinite(noise) else None
        found["planned_kind"] = {**independent._asdict(), "epsilon": epsilon, "noise_multiplier_at_most": most}
        refuted |= not stands(independent, plan, 1 - SURE)
        if not plan.valid:  # more is claimed than this noise gives
            refuted |= epsilon_of_plan(independent, plan, 1 - SURE)[0] > plan.claimed_epsilon
    bounds = [found[key]["epsilon"] for key in ("any_program", "planned_curve", "planned_kind") if key in found]
    return found | {"measured": max(bounds), "refuted": bool(refuted)}


def _per_instance(cell: Cell) -> dict[str, Any]:
    """The loss of each private example in the training that `pubsel run` would do: same noise, same weights."""
    if isinstance(cell.algorithm, Solves):
        raise UsageError(f"algorithm={cell.algorithm.name} has a loop of its own: its examples are not followed")
    plain = RunConfig(**{f.name: getattr(cell.settings, f.name) for f in dataclasses.fields(RunConfig)})
    name = identity_of(plain)
    return {"run": name} | with_control(lambda weaker: _lost(cell.at(f"{weaker}"), plain, name, weaker)) | {
        "statement": SECRET
    }  # fmt: skip


def _lost(cell: Cell, settings: RunConfig, name: str, weaker: bool) -> dict[str, Any]:
    """What the training of the run `name` loses of each example; of the one with less noise, nothing is kept."""
    labels, every = cell.task.private.y, cell.settings.audit.every
    planned = _planned(cell, "training", cell.task.private)._replace(settings=settings, name=name)
    plan, first = planned.plan, planned.first
    assert plan is not None
    if weaker:
        planned = planned.weaker()
    losses = Losses(labels, plan, every, first)
    followed = losses.watching(cell.algorithm)
    model, trains, task = _made(cell, planned, followed, cell.task)
    losses.private = on_device(task, cell.device).private
    _trained(cell, planned, followed, task, model, trains)
    epsilons = losses.epsilons()
    if not weaker:
        names = (
            labels if labels.dim() == 1 else [" ".join(map(str, row.nonzero().flatten().tolist())) for row in labels]
        )
        frame = pandas.DataFrame({"example": range(len(labels)), "class": names, "epsilon": epsilons})
        join.write_table(frame, cell.folder / "per_instance.csv")
    shares = np.quantile(epsilons, [0, 0.25, 0.5, 0.75, 1], method="higher")
    found = [share if math.isfinite(share) else None for share in shares.tolist()]
    squares, numbers = np.array(losses.noise).sum(0)
    parts = [part for part in (first, plan) if part is not None]
    p = losses.least_noise()
    return {
        "weights": weights_digest(model),  # those of the run
        "claimed": sum(part.claimed_epsilon for part in parts),
        "delta": sum(part.delta for part in parts),
        "plan": plan._asdict(),
        "exact": every == 1,
        "losses": dict(zip(("least", "quarter", "median", "three_quarters", "most"), found, strict=True)),
        "noise": math.sqrt(squares / numbers),  # over the planned one
        "checks": {"noise scale": p},
        "failed": ["noise scale"] if p < SURE else [],
        "refuted": False,
        "measured": found[2],
    }


def _report(now: Progress) -> None:
    say(f"  step {now.step} of {now.steps}, {now.seconds:.0f} s")


def show_audit(record: dict[str, Any]) -> str:
    """The record in a few lines."""
    head = f"{record['algorithm']} on {record['private']}, {record['kind']}: claimed epsilon {record['claimed']:.2f}"
    if record["kind"] == "per_instance":
        spread = ", ".join(f"{name.replace('_', ' ')} {_loss(value)}" for name, value in record["losses"].items())
        lines = [f"{head}; losses of single examples: {spread}"]
        if "noise" in record:
            lines.append(f"  noise: {record['noise']:.4g} of the planned one")
    else:
        lines = [f"{head}, measured at least {record['measured']:.2f} ({record['confidence']:.0%} confidence)"]
    for key, what in GUESSED.items():
        if key in record:
            found = record[key]
            right = f"{found['right']} of {found['made']} guesses right, {found['canaries']} canaries"
            lines.append(f"  {what}: at least {found['epsilon']:.2f} ({right})")
    if "checks" in record:
        lines.append("  checks: " + ", ".join(f"{name} p = {p:.2g}" for name, p in sorted(record["checks"].items())))
    lines += _verdict(record)
    return "\n".join([*lines, record["statement"]])


def _verdict(record: dict[str, Any]) -> list[str]:
    """What is found, here and in the positive control."""
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
        lines.append(TOO_WEAK)
    elif not refuted and record["kind"] != "per_instance" and record["measured"] > record["claimed"]:
        lines.append(
            f"  the bound is above the claim, as in {1 - record['confidence']:.0%} of audits of right programs: "
            "audit again with another seed"
        )
    return lines


def _loss(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3f}"
