"""Which public data is nearest: from settings to a record of the order of candidates by distance."""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pubsel import config, data, distances, results
from pubsel.config import RankConfig, UsageError
from pubsel.data import Split, Task
from pubsel.distances.pairing import Report, silent
from pubsel.run import (
    check_backbone,
    choose_device,
    has_paths,
    locked,
    network,
    raw,
    summary,
    through_backbone,
)  # fmt: skip
from pubsel.terminal import say


def canonical(settings: RankConfig) -> RankConfig:
    """The same settings with those that this distance ignores at one value. UsageError for what cannot be ranked."""
    labels = ["+".join(config.public_sets(candidate)) for candidate in settings.public]
    if len(set(labels)) != len(labels) or not labels:
        raise UsageError("public=[...]: give each candidate once, and at least one")
    check_backbone(settings.model)
    if settings.distance.name == "none":
        raise UsageError("distance.name=none: pubsel rank needs a distance, such as distance=gsd")
    return dataclasses.replace(settings, distance=distances.canonical(settings.distance))


def rank(settings: RankConfig) -> dict[str, Any]:
    """Order public candidates by their distance to the private data, and say how sure each step of the order is."""
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    settings = canonical(settings)
    sets = [name for candidate in settings.public for name in config.public_sets(candidate)]
    what = config.settings(settings)
    name = f"{config.short(settings.private)}-{settings.model.name}-{config.digest(what)}"
    folder = Path(settings.results) / "ranks" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists() and not has_paths([settings.private, *sets]):  # a folder's content may have changed
            say(f"{name}: measured before")
            return results.read_record(path, ("order", "values"))
        with tempfile.TemporaryDirectory(prefix="candidates-", dir=folder) as kept:
            record = {"identity": name, "settings": what, **results.provenance(), **_rank(settings, device, Path(kept))}
        results.write_record(path, record)
    return record


def _rank(settings: RankConfig, device: torch.device, kept: Path) -> dict[str, Any]:
    began = time.monotonic()
    task, candidates = load(settings, device, kept)
    for note in task.notes:
        say(f"  {note}")
    taken: list[float] = []

    def report(i: int, public: str, value: float, seconds: float) -> None:
        taken.append(seconds)
        say(f"  initialisation {i}: {public} {value:.4g}  ({seconds:.2g} s)")

    measuring = time.perf_counter()
    values = measured(settings, task, device, task.private, candidates, report)
    own = (time.perf_counter() - measuring - sum(taken)) / settings.distance.initialisations
    record = {
        "distance": settings.distance.name,
        "private": settings.private,
        "order": ordered(values),
        "values": values,
        "m": settings.distance.m,
        "model": settings.model.name,
        "notes": list(task.notes),
        "seconds": round(time.monotonic() - began, 1),
        "seconds_candidate": float(f"{np.mean(taken):.3g}"),  # for each initialisation
        "seconds_private": float(f"{own:.3g}"),
        **distances.statement(settings.distance),
    }
    if settings.distance.name == "gsd":
        record |= {"k": settings.distance.k, "raw": {name: raw(v, settings.distance.k) for name, v in values.items()}}
    return record


def load(settings: RankConfig, device: torch.device, kept: Path) -> tuple[Task, dict[str, Split]]:
    """The private task, and the first m examples of each candidate by its name; with a backbone, features. The
    candidates' examples lie in files of the folder `kept`, so that memory does not grow with their number."""
    through = through_backbone(settings, device)
    source = through(settings.private, data.open_dataset(settings.private, settings.data_root, settings.download))
    candidates: dict[str, Split] = {}
    notes = [*source.notes]
    for place, public in enumerate(settings.public):
        split, said = data.public_examples(
            public, settings.distance.m, source.train, settings.data_root, settings.download, settings.convert,
            settings.private, through,
        )  # fmt: skip
        candidates["+".join(config.public_sets(public))] = _mapped(split, kept / f"{place}.npy")
        notes += said
    said_once = tuple(dict.fromkeys(notes))
    return Task(source.train, None, *source[1:6], said_once), candidates


def measured(
    settings: RankConfig, task: Task, device: torch.device, private: Split, candidates: dict[str, Split],
    report: Report = silent,
) -> dict[str, list[float]]:  # fmt: skip
    """The distance of each candidate to `private`, by networks for the images of `task`."""
    return distances.METHODS[settings.distance.name].measure(
        settings.distance,
        lambda i: network(settings.model, task, settings.seed + i, settings.data_root).to(device),
        private,
        candidates,
        max(2, task.classes),
        key=f"rank {settings.seed}",
        report=report,
    )


def _mapped(split: Split, path: Path) -> Split:
    """The split with its examples in a file, from which what is used is read."""
    np.save(path, split.x.numpy())
    return Split(torch.from_numpy(np.load(path, mmap_mode="c")), split.y)


def ordered(values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Candidates by mean distance; `holds`: the share of paired initialisations in which the candidate is nearer than
    the next one in the order, `ties`: in which both are equally near (none for the last)."""
    names = sorted(values, key=lambda name: float(np.mean(values[name])))
    rows: list[dict[str, Any]] = []
    for name, following in zip(names, [*names[1:], None], strict=True):
        holds = ties = None
        if following is not None:
            one, two = np.array(values[name]), np.array(values[following])
            holds, ties = float(np.mean(one < two)), float(np.mean(one == two))
        rows.append({"public": name, **summary(values[name]), "holds": holds, "ties": ties})
    return rows


def show_rank(record: dict[str, Any]) -> str:
    """The order as text."""
    width = max(len(row["public"]) for row in record["order"])
    method = distances.METHODS[record.get("distance", "gsd")]  # older records know GSD alone
    k = f"k = {record['k']}, " if "k" in record else ""
    lines = [f"{method.title} to {record['private']} ({record['model']}, {k}m = {record['m']}), nearest first", ""]
    numbers = [text for row in record["order"] for text in (_number(row["mean"]), _number(row["std"]))]
    wide = max(6, *map(len, numbers))
    lines.append(f"{'public':{width}}  {'mean':>{wide}}  {'std':>{wide}}  nearer than the next")
    for row in record["order"]:
        total = len(record["values"][row["public"]])
        holds = f"in {round(row['holds'] * total)} of {total}" if row["holds"] is not None else ""
        holds += f", equal in {round(row['ties'] * total)}" if row.get("ties") else ""
        mean, std = _number(row["mean"]), _number(row["std"])
        lines.append(f"{row['public']:{width}}  {mean:>{wide}}  {std:>{wide}}  {holds}".rstrip())
    if len(record["order"]) == 1:
        lines += ["", "One candidate alone: there is nothing to put it in order with."]
    if "reads" in record:
        lines += [
            "",
            f"Of the private data it read {record['reads']}. The private side took {record['seconds_private']:.2g} s, "
            f"a candidate {record['seconds_candidate']:.2g} s, each {total} times.",
        ]
    return "\n".join([*lines, "", record["privacy"]])


def _number(value: float | None) -> str:
    """Three decimals, of small numbers two digits, of large ones one decimal."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.1f}" if size >= 1000 else f"{value:.3f}" if size >= 0.01 or not size else f"{value:.2g}"
