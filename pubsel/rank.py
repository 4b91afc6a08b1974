"""Which public data is nearest: from settings to a record of the order of candidates by distance."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pubsel import config, data, results
from pubsel.config import Labels, RankConfig, UsageError
from pubsel.data import Split, Task
from pubsel.distances import gsd
from pubsel.run import NOT_PRIVATE, choose_device, has_paths, locked, network, raw, summary
from pubsel.terminal import say


def rank(settings: RankConfig) -> dict[str, Any]:
    """Order public candidates by their distance to the private data, and say how sure each step of the order is."""
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    sets = [name for candidate in settings.public for name in config.public_sets(candidate)]
    labels = ["+".join(config.public_sets(candidate)) for candidate in settings.public]
    if len(set(labels)) != len(labels) or not labels:
        raise UsageError("public=[...]: give each candidate once, and at least one")
    if settings.distance.labels == Labels.auto:
        raise UsageError("distance.labels=auto: use random or given, which hold for all candidates alike")
    if settings.distance.name != "gsd":
        raise UsageError(f"distance.name={settings.distance.name}: pubsel rank needs distance=gsd")
    what = config.settings(settings)
    name = f"{config.short(settings.private)}-{settings.model.name}-{config.digest(what)}"
    folder = Path(settings.results) / "ranks" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists() and not has_paths([settings.private, *sets]):  # a folder's content may have changed
            say(f"{name}: measured before")
            return results.read_record(path, ("order", "values"))
        record = {"identity": name, "settings": what, **results.provenance(), **_rank(settings, device)}
        results.write_record(path, record)
    return record


def _rank(settings: RankConfig, device: torch.device) -> dict[str, Any]:
    began = time.monotonic()
    source = data.open_dataset(settings.private, settings.data_root, settings.download)
    candidates: dict[str, Split] = {}
    notes = [*source.notes]
    for public in settings.public:
        candidates["+".join(config.public_sets(public))], said = data.public_examples(
            public, settings.distance.m, source.train, settings.data_root, settings.download, settings.convert,
            private=settings.private,
        )  # fmt: skip
        notes += said
    task = Task(
        source.train,
        None,
        source.test,
        source.classes,
        source.metric,
        source.mean,
        source.std,
        tuple(dict.fromkeys(notes)),
    )
    for note in task.notes:
        say(f"  {note}")
    values = gsd.measure(
        settings.distance,
        lambda i: network(settings.model, task, settings.seed + i, settings.data_root).to(device),
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
