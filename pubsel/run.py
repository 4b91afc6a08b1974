"""One request, from settings to a record: `run` trains a cell, `rank` orders candidates by distance."""

import contextlib
import dataclasses
import hashlib
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

import pubsel
from pubsel import algorithms, config, data, estimate, models, privacy, results
from pubsel.config import Convert, Device, Distance, Labels, Parameters, RankConfig, RunConfig, UsageError, UserError
from pubsel.data import Split, Task
from pubsel.distances import gsd
from pubsel.evaluation import evaluate
from pubsel.gradients import PerExampleGradients
from pubsel.training import Progress, Schedule, fit, on_device, save, schedule, view_of

NOT_PRIVATE = "GSD is computed on private data without noise: this record is not differentially private."


def say(text: str) -> None:
    """A line for the person at the terminal; results go to stdout, this to stderr."""
    print(text, file=sys.stderr, flush=True)


def choose_device(device: Device) -> torch.device:
    """UsageError where CUDA is asked for and there is none."""
    if device == Device.cuda and not torch.cuda.is_available():
        raise UsageError("device=cuda: no CUDA device is available here; use device=cpu or device=auto")
    use = "cuda" if device != Device.cpu and torch.cuda.is_available() else "cpu"
    return torch.device(use)


def canonical(settings: RunConfig) -> RunConfig:
    """The same settings with those that this algorithm ignores set to one value, so that equal runs are one run."""
    if "_target_" not in settings.algorithm:
        raise UsageError("algorithm has no value: give algorithm=NAME, such as gep or dp_sgd")
    algorithm = algorithms.build(settings.algorithm)
    pair, distance, epsilon = settings.pair, settings.distance, settings.epsilon
    if not algorithm.uses_public:
        pair = dataclasses.replace(pair, public=None, m=1, convert=Convert.resize)
        distance = Distance("none", 1, 2, 1, True, Labels.random, Parameters.weights)
    elif pair.public is None:
        raise UsageError(f"algorithm={algorithm.name} needs public data: give pair.public=NAME")
    elif getattr(algorithm, "k", 0) > pair.m:
        k = settings.algorithm["k"]
        raise UsageError(f"algorithm.k={k} is more than the pair.m={pair.m} public examples: lower algorithm.k")
    if distance.name not in ("gsd", "none"):
        raise UsageError(f"distance.name={distance.name}: unknown, use gsd or none")
    if not algorithm.private:
        epsilon = float("inf")
    typed = {"_target_": settings.algorithm["_target_"]} | config.settings(algorithm)  # 1 and 1.0 are one setting
    return dataclasses.replace(settings, pair=pair, distance=distance, epsilon=epsilon, algorithm=typed)


def run(settings: RunConfig) -> dict[str, Any]:
    """Train one cell and return its record; a finished one is read, a half-finished one goes on.

    Raises UsageError for settings that do not fit together, UserError for a run that fails.
    """
    settings = canonical(settings)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    name = config.identity(settings)
    folder = Path(settings.results) / "runs" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists():
            say(f"{name}: finished before")
            if has_paths([settings.pair.private, settings.pair.public]):
                say(f"  if its files have changed since, delete {folder} to train again")
            return results.read_record(path)
        record = _train(settings, name, folder, device)
        results.write_record(path, record)
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    return record


class locked:
    """Holds a folder for one process: a second one says so and waits until the first has finished or died."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = FileLock(folder / "lock")

    def __enter__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                say(f"{self.folder.name}: another process works on it; waiting")
                self.lock.acquire()
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}; set results=FOLDER") from None

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def _train(settings: RunConfig, name: str, folder: Path, device: torch.device) -> dict[str, Any]:
    origin = results.provenance()  # of the code that trains, before anyone edits it
    algorithm = algorithms.build(settings.algorithm)
    task = data.load(settings.pair, settings.data_root, settings.download)
    say(f"{name}: on {device}")
    for note in task.notes:
        say(f"  {note}")
    model = network(settings.model, task, settings.seed).to(device)
    plan = schedule(len(task.private.x), settings.training)
    spend = None
    if algorithm.private:
        delta = settings.privacy.delta
        if delta * len(task.private.x) > 1:
            say(f"  privacy.delta={delta:g} is more than 1/{len(task.private.x)}: weak; use a smaller one")
        spend = privacy.plan(
            settings.epsilon, delta, plan.rate, plan.steps, algorithm.sensitivity(), settings.privacy.accounting
        )
        say(
            f"  {plan.steps} steps, sampling rate {plan.rate:.4g}, noise multiplier {spend.noise_multiplier:.4g}, "
            f"sensitivity {algorithm.sensitivity():.4g}: epsilon {spend.epsilon:.4g} at delta {delta:g}"
        )
    if settings.estimate:
        _estimate(settings, model, task, algorithm, plan, folder, device)
    distance = pair_distance(settings, task, device)

    def report(now: Progress) -> None:
        left = now.seconds / now.step * (now.steps - now.step)
        used = ""
        if spend is not None:
            with contextlib.suppress(UsageError):  # a display must not end a run
                so_far = privacy.spent(
                    spend.noise_multiplier, plan.rate, plan.steps, spend.delta, now.step, about=spend.epsilon
                )
                used = f"  epsilon {min(so_far, spend.epsilon):.3f}"
        say(f"  epoch {now.epoch:6.1f}  loss {now.loss:.4f}{used}  {now.seconds:.0f} s, about {left:.0f} s left")

    seconds = fit(
        model, task, algorithm, plan, spend.noise_multiplier if spend else 0.0, settings.training,
        name, noise_key(name, task.private, device), settings.privacy.secure_noise, folder / "checkpoint.pt", report,
    )  # fmt: skip
    save(folder / "model.pt", model.state_dict())
    utility = evaluate(model, task.test, task.metric)
    public = settings.pair.public
    return {
        "identity": name,
        "label": settings.label,
        "seed": settings.seed,
        "private": settings.pair.private,
        "public": public,
        "model": settings.model.name,
        "algorithm": algorithm.name,
        "epsilon": settings.epsilon if spend else None,
        "metric": task.metric,
        "utility": utility,
        "test_examples": len(task.test.x),
        "private_examples": len(task.private.x),
        "weights": weights_digest(model),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "distance": distance,
        "privacy": privacy.statement(spend, algorithm.sensitivity(), settings.privacy.secure_noise, bool(distance)),
        "settings": config.settings(settings),
        "seconds": round(seconds, 1),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": list(task.notes),
        **origin,
    }


def _estimate(
    settings: RunConfig, model: nn.Module, task: Task, algorithm: algorithms.Algorithm, plan: Schedule, folder: Path,
    device: torch.device,
) -> None:  # fmt: skip
    """Say what the run will take; UserError where it does not fit. A run that goes on knows already."""
    gradients = PerExampleGradients(model, settings.training.chunk)
    view = view_of(model, gradients, on_device(task, device), "estimate")
    needs = estimate.memory(gradients, algorithm, view, task, settings.distance)
    estimate.refuse(needs, device)
    said = f"  about {estimate.gib(needs.peak)} of memory beside the data"
    if settings.profile or not (folder / "checkpoint.pt").exists():
        trace = folder / "trace.json" if settings.profile else None
        seconds = estimate.step_seconds(gradients, algorithm, view, task.private, plan, trace)
        said += f", {seconds:.2g} s a step: {duration(seconds * plan.steps)} of training"
        if trace is not None:
            say((folder / "costliest.txt").read_text())
    say(said)


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def noise_key(name: str, private: Split, device: torch.device) -> str:
    """What the noise of a run depends on: settings and seed (`name`), private examples, pubsel's version, device kind.

    Two runs that differ in any of these never share noise, which would cancel between their weights: a user's folder
    whose content changed keeps its name. The key is written nowhere, since it is computed from private examples.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in private:
        digest.update(tensor.contiguous().numpy().tobytes())
    return f"{name}\0{pubsel.__version__}\0{device.type}\0{digest.hexdigest()}"


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of all weights, bit for bit: two runs that print the same one ended alike."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def network(model: config.Model, task: Task, seed: int) -> nn.Module:
    """The model for a task's images and classes."""
    _, channels, height, width = task.private.x.shape
    return models.build(model, (channels, height, width), task.classes, task.mean, task.std, seed)


def pair_distance(settings: RunConfig, task: Task, device: torch.device) -> dict[str, Any] | None:
    """The distance of a run's pair, measured once and kept under results/distances for all its seeds and algorithms."""
    if settings.distance.name == "none" or task.public is None:
        return None
    what = (
        config.settings(settings.distance) | config.settings(settings.pair) | {"model": config.settings(settings.model)}
    )
    public = config.short(str(settings.pair.public))
    name = f"{config.short(settings.pair.private)}-{public}-{settings.model.name}-{config.digest(what)}"
    folder = Path(settings.results) / "distances" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists() and not has_paths([settings.pair.private, settings.pair.public]):
            return results.read_record(path, ("values", "mean"))
        values = gsd.measure(
            settings.distance,
            lambda i: network(settings.model, task, i).to(device),
            task.private,
            {public: task.public},
            task.classes,
            key="distance",
            report=lambda i, _, value: say(f"  GSD, initialisation {i}: {value:.3f}"),
        )[public]
        record = {
            "identity": name,
            "name": "gsd",
            "values": values,
            "raw": raw(values, settings.distance.k),
            **summary(values),
            "k": settings.distance.k,
            "m": settings.distance.m,
            "settings": what,
            "privacy": NOT_PRIVATE,
        }
        results.write_record(path, record)
    return record


def raw(values: list[float], k: int) -> list[float]:
    """The projection metric of Algorithm 1 itself: GSD as reported is it divided by sqrt(k)."""
    return [value * math.sqrt(k) for value in values]


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation (none for a single value)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def rank(settings: RankConfig) -> dict[str, Any]:
    """Order public candidates by their distance to the private data, and say how sure each step of the order is."""
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    if len(set(settings.public)) != len(settings.public) or not settings.public:
        raise UsageError("public=[...]: give each candidate once, and at least one")
    if settings.distance.name != "gsd":
        raise UsageError(f"distance.name={settings.distance.name}: pubsel rank needs distance=gsd")
    what = config.settings(settings)
    name = f"{config.short(settings.private)}-{settings.model.name}-{config.digest(what)}"
    folder = Path(settings.results) / "ranks" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists() and not has_paths([settings.private, *settings.public]):  # a folder's content may have changed
            say(f"{name}: measured before")
            return results.read_record(path, ("order", "values"))
        record = {"identity": name, "settings": what, **results.provenance(), **_rank(settings, device)}
        results.write_record(path, record)
    return record


def has_paths(names: list[str | None]) -> bool:
    """Whether a dataset is the user's own files, whose content may change under the same name."""
    return any(name is not None and config.is_path(name) for name in names)


def _rank(settings: RankConfig, device: torch.device) -> dict[str, Any]:
    began = time.monotonic()
    source = data.open_dataset(settings.private, settings.data_root, settings.download)
    candidates: dict[str, Split] = {}
    notes = [*source.notes]
    for public in settings.public:
        candidates[public], said = data.public_examples(
            public, settings.distance.m, source.train, settings.data_root, settings.download, settings.convert,
            private=settings.private,
        )  # fmt: skip
        notes += said
    task = Task(source.train, None, source.test, source.classes, source.metric, source.mean, source.std, tuple(notes))
    for note in task.notes:
        say(f"  {note}")
    values = gsd.measure(
        settings.distance,
        lambda i: network(settings.model, task, settings.seed + i).to(device),
        task.private,
        candidates,
        max(2, task.classes),
        key=f"rank {settings.seed}",
        report=lambda i, public, value: say(f"  initialisation {i}: {public} {value:.3f}"),
    )
    return {
        "private": settings.private,
        "order": ordered(values),
        "values": values,
        "raw": {name: raw(found, settings.distance.k) for name, found in values.items()},
        "k": settings.distance.k,
        "m": settings.distance.m,
        "model": settings.model.name,
        "notes": list(task.notes),
        "seconds": round(time.monotonic() - began, 1),
        "privacy": NOT_PRIVATE,
    }


def ordered(values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Candidates by mean distance; `holds`: the share of paired initialisations in which the candidate is nearer than
    the next one in the order (none for the last)."""
    names = sorted(values, key=lambda name: float(np.mean(values[name])))
    rows: list[dict[str, Any]] = []
    for name, following in zip(names, [*names[1:], None], strict=True):
        holds = None
        if following is not None:
            holds = float(np.mean(np.array(values[name]) < np.array(values[following])))
        rows.append({"public": name, **summary(values[name]), "holds": holds})
    return rows


def show_rank(record: dict[str, Any]) -> str:
    """The order as text."""
    width = max(len(row["public"]) for row in record["order"])
    lines = [f"GSD to {record['private']} ({record['model']}, k = {record['k']}, m = {record['m']}), nearest first", ""]
    lines.append(f"{'public':{width}}  {'mean':>6}  {'std':>6}  nearer than the next")
    for row in record["order"]:
        std = f"{row['std']:6.3f}" if row["std"] is not None else "     -"
        total = len(record["values"][row["public"]])
        holds = f"in {round(row['holds'] * total)} of {total}" if row["holds"] is not None else ""
        lines.append(f"{row['public']:{width}}  {row['mean']:6.3f}  {std}  {holds}".rstrip())
    return "\n".join([*lines, "", record["privacy"]])
