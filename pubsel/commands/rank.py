"""Which public data is nearest: from settings to a record of the candidates in the order of their distance."""

import dataclasses
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pubsel import data, distances, records, selection
from pubsel.algorithms import columns
from pubsel.cell import (
    Spending,
    Streams,
    choose_device,
    given_weights,
    map_split,
    networks,
    tensors,
    through_backbone,
    use_threads,
)
from pubsel.data import Split, Task
from pubsel.distances import Distance, Releases
from pubsel.distances.gsd import Subspaces
from pubsel.messages import UsageError, say
from pubsel.privacy import accountant, ledger
from pubsel.rules import check_model, has_paths
from pubsel.selection import coverage
from pubsel.selection.choose import Choice, by_features, check_choice, compared
from pubsel.settings.identity import as_json, folder_name, overlap_of, short_name
from pubsel.settings.keys import RankConfig, Select, public_sets, read_of
from pubsel.settings.methods import typed


def rank(settings: RankConfig) -> dict[str, Any]:
    """Order public candidates by their distance to the private data, with how often each is nearer than the next; if
    epsilon_select is given, choose one of them privately instead. A private release is drawn once: the same command
    returns its record. UsageError for a candidate that is given twice."""
    use_threads(settings.threads)
    device = choose_device(settings.device)

    # a candidate given twice would win or lose against itself
    sets = [name for candidate in settings.public for name in public_sets(candidate)]
    labels = ["+".join(public_sets(candidate)) for candidate in settings.public]
    if len(set(labels)) != len(labels) or not labels:
        raise UsageError("public=[...]: give each candidate once, and at least one")

    check_model(settings.model)
    settings = canonical_rank(settings)
    what, name = as_json(settings), identity(settings)
    folder = Path(settings.results) / "ranks" / name

    def make() -> dict[str, Any]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=records.SCRATCH, dir=folder) as kept:
            task, candidates = open_candidates(settings, device, Path(kept))
            for note in task.notes:
                say(f"  {note}")
            measure = _rank if settings.epsilon_select is None else _select
            measured = measure(settings, task, candidates, device, Streams.of(settings, name, device))
            start = given_weights(settings.model, task, settings.seed, settings.data_root)

        described: dict[str, Any] = {"settings": what, "private": settings.private, "model": settings.model.name}
        described |= {"m": distance_of(settings).m, "notes": list(task.notes)}
        described |= {"backbone": start} if start else {}
        return described | measured | {"seconds": round(time.monotonic() - began, 1)}

    # a folder's content may have changed, but a release is drawn once
    releases = settings.epsilon_select is not None or isinstance(distance_of(settings), Releases)
    by_path = has_paths([settings.private, *sets])
    record, is_new = records.recorded(folder, make, records.Rank, lambda record: releases or not by_path)
    if not is_new:
        say(f"{name}: measured before{ledger.UNCHANGED if settings.budget is not None else ''}")
        if by_path:
            say(f"  if its files have changed since, delete {folder} to draw it again{ledger.again(folder)}")
    return record


def canonical_rank(settings: RankConfig) -> RankConfig:
    """Return the same settings with those that have no use here set to one value."""
    selects = settings.epsilon_select is not None
    distance, public, select = distance_of(settings), settings.public, settings.select
    # reset unused settings, so that equal rankings share one record
    if selects:  # the order of the candidates must not matter
        select = compared(select, settings.model)
        check_choice(select, settings.model, distance)
        public = sorted(public, key=lambda candidate: "+".join(public_sets(candidate)))
    else:
        select = Select()
    secure = settings.secure_noise and (selects or isinstance(distance, Releases))
    values = typed("distance", distance, settings.distance or {})
    overlap = None if settings.overlap == overlap_of(settings.private) else settings.overlap  # the same as null
    settings = dataclasses.replace(settings, overlap=overlap)
    return dataclasses.replace(settings, distance=values, public=public, select=select, secure_noise=secure)


def distance_of(settings: RankConfig) -> Distance:
    """Return the distance that is measured; UsageError if there is none."""
    distance = distances.build(settings.distance)
    if distance is None:
        raise UsageError("distance=none: pubsel rank needs a distance, such as distance=gsd")
    return distance


def identity(settings: RankConfig) -> str:
    """Return the name of the folder of a rank whose settings are `canonical_rank`."""
    return folder_name(f"{short_name(settings.private)}-{settings.model.name}", as_json(settings))


def open_candidates(settings: RankConfig, device: torch.device, kept: Path) -> tuple[Task, dict[str, Split]]:
    """Return the private data, and the candidates by name. kept: a folder for the candidates' examples, so that memory
    does not grow with their number."""
    data.check_read(settings.private, read_of(settings))
    through = through_backbone(settings.model.backbone, settings.convert, settings.data_root, device)
    read = data.Reader(settings.data_root, settings.download, through, keep=settings.keep, rules=read_of(settings))
    opened = read._replace(pixels=settings.model.backbone is None)(settings.private)
    images, source = opened.images, opened.used
    private, findings, original = data.distinct_examples(opened, settings.accept or [])

    candidates: dict[str, Split] = {}
    notes = [*source.notes, *(finding.text for finding in findings)]
    for place, public in enumerate(settings.public):
        split, remarks = data.public_examples(
            public,
            distance_of(settings).m,
            private,
            read._replace(public=True, few=True, columns=images.columns),
            settings.convert,
            settings.private,
            images,
            overlap_of(settings.private, settings.overlap),
        )
        candidates["+".join(public_sets(public))] = map_split(split, kept / f"{place}.npy")
        notes += remarks

    # the task has no public data: candidates are measured one by one
    # a flat folder has one class; networks and random labels need two
    kinds = (max(2, source.classes), source.metric, source.mean, source.std)
    task = Task(private, None, source.test, *kinds, tuple(dict.fromkeys(notes)), weights=source.weights)
    task = task._replace(original=original, columns=source.columns, raw=source.raw)
    return task, candidates


def _select(
    settings: RankConfig, task: Task, candidates: dict[str, Split], device: torch.device, streams: Streams
) -> dict[str, Any]:
    """Return the choice alone: no score and no distance, which would not be private."""
    epsilon, n, features = settings.epsilon_select, len(task.private.x), by_features(settings.select)
    assert epsilon is not None
    build = networks(settings.model, task, settings.seed, settings.data_root, device)
    key, distance = f"selection {settings.seed}", distance_of(settings)
    choice = Choice(settings.select, distance, epsilon, task, candidates, features, build, key)
    chosen, spend = choice.draw(streams.choice(choice))

    shown: dict[str, Any] = {
        "chosen": chosen,
        "candidates": sorted(candidates),
        "private_examples": n,
        "margin": None,
        "privacy": accountant.measurement_statement("The name of the chosen set is", spend, settings.secure_noise, n),
    }
    if features:
        shown["privacy"]["not_covered"].append(accountant.ROUNDED)
        return shown | {"candidates": [*shown["candidates"], coverage.NONE], "reads": "images, as features"}

    # how much better a set must be to be chosen almost surely
    gsd, cap = selection.gsd_of(distance), settings.select.cap
    if spend.epsilon:
        shown["margin"] = selection.margin(len(candidates), cap, spend.rate * n, 1 / spend.noise_multiplier)
    return shown | {"k": gsd.k, "reads": gsd.statement()["reads"] if spend.epsilon else "nothing"}


def _rank(
    settings: RankConfig, task: Task, candidates: dict[str, Split], device: torch.device, streams: Streams
) -> dict[str, Any]:
    """Return the distances of all candidates, and their order."""
    taken: list[float] = []
    build = networks(settings.model, task, settings.seed, settings.data_root, device)

    def report(i: int, public: str, value: float, seconds: float) -> None:
        taken.append(seconds)
        released = isinstance(distance, Releases)  # if this is killed, a second draw shows other values
        shown = "" if released else f" {value:.4g}"
        say(f"  initialisation {i}: {public}{shown}  ({seconds:.2g} s)")

    distance = distance_of(settings)
    measure = distance.measure
    statement: dict[str, Any] = {**distance.statement()}
    if isinstance(distance, Releases):
        n = len(task.private.x)
        plan = distance.plan(n)
        accountant.check_delta(plan.delta, n, settings.weak, "distance.delta", "weak")
        spending = Spending(task.private, plan.epsilon, plan.delta, task.original, plan)
        weights = tensors(build(0))
        secret = streams.secret("DP-GSD", task.private, candidates.values(), weights, plan._asdict(), spending)
        measure = partial(distance.release, source=secret)
        privacy = accountant.measurement_statement("All its distances together are", plan, settings.secure_noise, n)
        statement |= {"privacy": privacy}

    # the rest of the time is that of the private side
    measuring = time.perf_counter()
    key = f"rank {settings.seed}"
    rows = columns.in_one_scale(task.private, candidates, task.raw)
    values = measure(build, *rows, task.classes, key=key, report=report)
    seconds = time.perf_counter() - measuring
    seconds_private = (seconds - sum(taken)) / distance.initialisations

    record = {
        "distance": distance.name,
        "order": ordered(values),
        "values": values,
        "seconds_candidate": float(f"{np.mean(taken):.3g}"),  # for each initialisation
        "seconds_private": float(f"{seconds_private:.3g}"),
        **statement,
    }
    if isinstance(distance, Subspaces):
        raw = {public: distances.raw(measured, distance.k) for public, measured in values.items()}
        record |= {"k": distance.k, "raw": raw}
    return record


def ordered(values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the candidates by mean distance. `holds`: the share of paired initialisations in which the candidate is
    nearer than the next one in the order, `ties`: in which both are equally near (none for the last)."""
    names = sorted(values, key=lambda name: float(np.mean(values[name])))
    rows: list[dict[str, Any]] = []
    for name, following in zip(names, [*names[1:], None], strict=True):
        holds = ties = None
        if following is not None:
            here, there = np.array(values[name]), np.array(values[following])
            holds, ties = float(np.mean(here < there)), float(np.mean(here == there))
        rows.append({"public": name, **distances.summary(values[name]), "holds": holds, "ties": ties})
    return rows


def show_rank(record: dict[str, Any]) -> str:
    """Return the order, or the choice, as text."""
    if "chosen" in record:
        lines = [f"{record['chosen']} is chosen for {record['private']}, of {', '.join(record['candidates'])}.", ""]
        if record["margin"] is not None:
            lines += [
                f"A candidate whose subspace holds {record['margin']:.2g} more of the gradients' energy than each "
                f"other's, on average, is chosen with probability {selection.SURE:.0%} or more. Whether such a "
                "candidate exists is not revealed.",
                "",
            ]
        return "\n".join([*lines, record["privacy"]["statement"]])

    width = max(len(row["public"]) for row in record["order"])
    distance = distances.build(record["settings"]["distance"])
    title = record["distance"] if distance is None else distance.title
    k = f"k = {record['k']}, " if "k" in record else ""
    lines = [f"{title} to {record['private']} ({record['model']}, {k}m = {record['m']}), nearest first", ""]

    # as many digits as tell the distances apart
    largest = max(abs(row["mean"]) for row in record["order"])
    digits = 1 if largest >= 1000 else 3 if largest >= 0.1 else 5

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    wide = max(6, *(len(number(row[what])) for row in record["order"] for what in ("mean", "std")))
    lines.append(f"{'public':{width}}  {'mean':>{wide}}  {'std':>{wide}}  nearer than the next")
    for row in record["order"]:
        total = len(record["values"][row["public"]])
        holds = f"in {round(row['holds'] * total)} of {total}" if row["holds"] is not None else ""
        holds += f", equal in {round(row['ties'] * total)}" if row.get("ties") else ""
        mean, std = number(row["mean"]), number(row["std"])
        lines.append(f"{row['public']:{width}}  {mean:>{wide}}  {std:>{wide}}  {holds}".rstrip())

    if len(record["order"]) == 1:
        lines += ["", "Only one candidate: nothing to rank."]
    if "reads" in record:
        lines += [
            "",
            f"Of the private data, it read {record['reads']}. Per network: {record['seconds_private']:.2g} s for the "
            f"private set, {record['seconds_candidate']:.2g} s per candidate; networks: {total}.",
        ]
    privacy = record["privacy"]
    return "\n".join([*lines, "", privacy["statement"] if isinstance(privacy, dict) else privacy])
