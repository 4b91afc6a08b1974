"""`pubsel audit`: what a guarantee claims beside what attacks on a training measure, and what each example loses.

The audit trains anew, with canaries among the private examples; how it does that is `pubsel run`'s own code. It spends
privacy of its own, so what it trains is thrown away.
"""

import dataclasses
import math
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import nn

from pubsel import algorithms, config, results, tables
from pubsel.algorithms import Algorithm, Solves
from pubsel.attacks.canaries import SURE, WithCanaries, Witness, draw, mislabelled
from pubsel.attacks.one_run import Guesses, epsilon_of_any, epsilon_of_plan, guess_all, guess_extremes
from pubsel.attacks.per_instance import Losses
from pubsel.config import Audit, AuditConfig, AuditKind, RunConfig, UsageError
from pubsel.data import Task
from pubsel.evaluation import logits
from pubsel.per_example import losses_of
from pubsel.privacy import Plan
from pubsel.randomness import stream
from pubsel.run import (
    AUTO,
    canonical,
    choose_device,
    guarantee,
    load_task,
    locked,
    noise_key,
    prepare,
    solve,
    weights_digest,
)
from pubsel.terminal import say
from pubsel.training import Progress, engine, fit, on_device

NOT_FOR_RELEASE = (
    "The audited training itself must not be released: it was watched, its examples were changed, and it spent privacy "
    "of its own. A measured epsilon is a lower bound of the true one with the stated confidence; that it lies below "
    "the claimed one proves no guarantee."
)
SECRET = (
    "Each value is computed from private data without noise, and says something of the example that it belongs to: "
    "do not publish them, nor a figure of them."
)


def audit(settings: AuditConfig) -> dict[str, Any]:
    """Audit one cell and return its record; a finished one is read. UsageError where there is no guarantee to audit."""
    settings = canonical(settings)  # type: ignore[assignment]
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    name = config.identity(settings)
    folder = Path(settings.results) / "audits" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists():
            say(f"{name}: audited before; delete {folder} to audit again")
            return results.read_record(path, ("identity", "kind", "claimed"))
        began, origin = time.monotonic(), results.provenance()
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
        with tempfile.TemporaryDirectory() as scratch:  # for a training that nobody may release or go on with
            found = kind(Cell(settings, algorithm, task, name, folder, Path(scratch), device))
        record = {
            "identity": name,
            "algorithm": algorithm.name,
            "private": settings.pair.private,
            "kind": settings.audit.kind.name,
            **found,
            "settings": config.settings(settings),
            "seconds": round(time.monotonic() - began, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            **origin,
        }
        results.write_record(path, record)
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


def _white_box(cell: Cell) -> dict[str, Any]:
    """Canaries among the gradients of the loop itself (attacks/canaries.py)."""
    settings, algorithm, task, name, _, scratch, device = cell
    if isinstance(algorithm, Solves):
        raise UsageError(f"algorithm={algorithm.name} has a loop of its own: take audit.kind=black_box")
    m = settings.audit.canaries
    key = noise_key(name, task.private, device)
    schedule, plan, first = guarantee(settings, algorithm, len(task.private.x))  # of the run itself
    assert plan is not None
    _, _, trains, task = prepare(settings, algorithm, task, name, key, scratch, first, device)
    inner = engine(trains, settings.training.chunk)
    if m > inner.size:
        m = inner.size
        say(f"  {m} canaries, one for each trained parameter")
    canaries = draw(m, inner.size, stream(key, "canaries"), device)
    coins = bytes(canaries.included.tolist()).hex()  # of another training than those with other coins: other noise
    task = task._replace(private=canaries.join(task.private))
    schedule = schedule._replace(n=len(task.private.x))
    made = WithCanaries(inner, canaries)
    witness = Witness(made, schedule, plan.noise_multiplier)
    fit(
        trains, task, witness.watching(algorithm), schedule, plan.noise_multiplier, settings.training, name,
        f"{key}\0{coins}", settings.privacy.secure_noise, scratch / "checkpoint.pt", _report, made,
    )  # fmt: skip
    ratios, included = witness.ratios.cpu().numpy(), canaries.included.cpu().numpy()
    bounds = measured(ratios, included, plan, first, settings.audit, guess_all(ratios, included))
    checks = witness.checks(algorithm.sensitivity())
    failed = [name for name, p in checks.items() if p < SURE]
    return bounds | {"checks": checks, "failed": failed, "statement": NOT_FOR_RELEASE}


def _black_box(cell: Cell) -> dict[str, Any]:
    """Mislabelled examples among the private ones; the score of each is minus the final model's loss on it."""
    settings, algorithm, task, name, _, scratch, device = cell
    m = settings.audit.canaries
    random = stream(noise_key(name, task.private, device), "canaries")
    schedule, plan, first = guarantee(settings, algorithm, len(task.private.x))
    canaries, included, task = mislabelled(task, m, random)
    schedule = schedule._replace(n=len(task.private.x))
    key = noise_key(name, task.private, device)
    model, frozen, trains, task = prepare(settings, algorithm, task, name, key, scratch, first, device)
    if isinstance(algorithm, Solves):
        weight, plan = solve(settings, algorithm, task, key, scratch)
        model.load_state_dict({"weight": weight}, strict=False)
    else:
        assert plan is not None
        fit(
            trains, task, algorithm, schedule, plan.noise_multiplier, settings.training, name, key,
            settings.privacy.secure_noise, scratch / "checkpoint.pt", _report,
        )  # fmt: skip
    outputs = logits(model if frozen is None else nn.Sequential(frozen, model), canaries.x).cpu()
    scores = -losses_of(outputs, canaries.y).double().numpy()
    return measured(scores, included, plan, first, settings.audit) | {"failed": [], "statement": NOT_FOR_RELEASE}


def measured(
    scores: NDArray[np.float64], included: NDArray[np.bool_], plan: Plan, first: Plan | None, audit: Audit,
    independent: Guesses | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the guesses say, beside what is claimed: of any program by the extreme `scores` [m]; with guesses of
    independent canaries, also of a program of the planned kind, and how much noise it has at most."""
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
    refuted = False
    if independent is not None:
        epsilon, noise = epsilon_of_plan(independent, plan, audit.confidence)
        most = noise if math.isfinite(noise) else None
        found["planned_kind"] = {**independent._asdict(), "epsilon": epsilon, "noise_multiplier_at_most": most}
        refuted = noise <= plan.noise_multiplier or epsilon > plan.claimed_epsilon
    bounds = [found[key]["epsilon"] for key in ("any_program", "planned_kind") if key in found]
    return found | {"measured": max(bounds), "refuted": refuted or found["any_program"]["epsilon"] > claimed}


def _per_instance(cell: Cell) -> dict[str, Any]:
    """The loss of each private example in the training that `pubsel run` would do: same noise, same weights."""
    settings, algorithm, task, _, folder, scratch, device = cell
    if isinstance(algorithm, Solves):
        raise UsageError(f"algorithm={algorithm.name} has a loop of its own: its examples are not followed")
    plain = RunConfig(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(RunConfig)})
    name = config.identity(plain)
    key = noise_key(name, task.private, device)
    schedule, plan, first = guarantee(settings, algorithm, len(task.private.x))
    assert plan is not None
    labels = task.private.y
    model, frozen, trains, task = prepare(settings, algorithm, task, name, key, scratch, first, device)
    losses = Losses(on_device(task, device).private, plan, settings.audit.every)
    fit(
        trains, task, losses.watching(algorithm), schedule, plan.noise_multiplier, settings.training, name, key,
        settings.privacy.secure_noise, scratch / "checkpoint.pt", _report,
    )  # fmt: skip
    epsilons = losses.epsilons()
    classes = labels if labels.dim() == 1 else [" ".join(map(str, row.nonzero().flatten().tolist())) for row in labels]
    frame = pandas.DataFrame({"example": range(len(labels)), "class": classes, "epsilon": epsilons})
    tables.write_table(frame, folder / "per_instance.csv")
    shares = np.quantile(epsilons, [0, 0.25, 0.5, 0.75, 1])
    return {
        "run": name,
        "weights": weights_digest(model if frozen is None else nn.Sequential(frozen, model)),  # those of the run
        "claimed": plan.claimed_epsilon,
        "delta": plan.delta,
        "plan": plan._asdict(),
        "exact": settings.audit.every == 1,
        "losses": dict(zip(("least", "quarter", "median", "three_quarters", "most"), shares.tolist(), strict=True)),
        "statement": SECRET,
    }


def _report(now: Progress) -> None:
    say(f"  step {now.step} of {now.steps}, {now.seconds:.0f} s")


def show_audit(record: dict[str, Any]) -> str:
    """The record in a few lines."""
    head = f"{record['algorithm']} on {record['private']}, {record['kind']}: claimed epsilon {record['claimed']:.2f}"
    if record["kind"] == "per_instance":
        spread = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in record["losses"].items())
        return f"{head}; losses of single examples: {spread}\n{record['statement']}"
    lines = [f"{head}, measured at least {record['measured']:.2f} ({record['confidence']:.0%} confidence)"]
    for key, what in (("planned_kind", "of Poisson samples and Gaussian noise"), ("any_program", "of any program")):
        if key in record:
            found = record[key]
            right = f"{found['right']} of {found['made']} guesses right, {found['canaries']} canaries"
            lines.append(f"  {what}: at least {found['epsilon']:.2f} ({right})")
    if "checks" in record:
        lines.append("  checks: " + ", ".join(f"{name} p = {p:.2g}" for name, p in sorted(record["checks"].items())))
    if record["refuted"]:
        lines.append("  THE CLAIM IS REFUTED: the training is less private than claimed")
    if record["failed"]:
        lines.append(f"  THE TRAINING IS NOT WHAT IS ACCOUNTED FOR: {', '.join(record['failed'])}")
    return "\n".join([*lines, record["statement"]])
