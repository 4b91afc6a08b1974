"""The public examples of a run whose public data is a pool: clusters, a private histogram, a draw."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from pubsel import algorithms
from pubsel.cell import Cell, Noted, without_public
from pubsel.data import Split, Task
from pubsel.data.embeddings import is_embeddings, open_embeddings
from pubsel.data.splits import NO_CLASS
from pubsel.messages import UsageError, say
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.selection import pool
from pubsel.selection.pool import Clusters
from pubsel.settings.keys import RunConfig
from pubsel.training.once import released_once, units_of

MOST = 1000  # public examples that are drawn if nobody says how many


class Chosen(NamedTuple):
    """What a run has of a pool. settings: those of the training that follows; told: for the record, of released values
    alone."""

    settings: RunConfig
    task: Task
    told: dict[str, Any]


def from_pool(cell: Cell, task: Task) -> tuple[Chosen, accountant.Plan]:
    """Return a cell's task with public examples that are chosen privately from pair.pool, or without, and what the
    choice spends.

    The noisy histogram is drawn once, of the examples that will be trained on, and kept in the run's folder."""
    sets = parts_of(cell.settings, task)
    clusters = clusters_of(sets)
    epsilon = cell.settings.epsilon_select or 0.0

    # What decides the release: the private examples and the clusters.
    public = [Split(torch.from_numpy(each), torch.zeros(0)) for each in clusters if isinstance(each, np.ndarray)]
    noted = Noted(task.private, epsilon, 0.0)
    secret = cell.streams.secret("choice", units_of(task), public, {}, {"epsilon": epsilon}, noted)

    def release() -> dict[str, Any]:
        noisy, spend = pool.select(epsilon, task.private.x, task.people, clusters, secret)
        return {"noisy": noisy, "spend": spend._asdict()}

    drawn = released_once(cell.folder / "selection.pt", secret, release)
    spend = accountant.Plan(**drawn["spend"])
    chosen = with_examples(cell.settings, task, sets, clusters, (drawn["noisy"], spend), cell.name)
    many = [f"{count} of {name}" for name, count in chosen.told["examples"].items() if count]
    none = f"none: the pool has too few examples like those of {cell.settings.pair.private}"
    say(f"  public data: {', '.join(many) or none}")
    return chosen, spend


def with_examples(
    settings: RunConfig,
    task: Task,
    sets: dict[str, pool.Part],
    clusters: Clusters,
    released: tuple[list[float], accountant.Plan],
    name: str,
) -> Chosen:
    """Return what a run has of a pool, from the noisy histogram and its plan, public data, and public random numbers.
    name: of the run."""
    noisy, spend = released
    pair, needs_public = settings.pair, algorithms.build(settings.algorithm).needs_public
    told: dict[str, Any] = {"histogram": noisy, "clusters": 0, "examples": dict.fromkeys(sets, 0)}
    settings = dataclasses.replace(settings, distance=None, epsilon_select=None)
    wanted = pool.shares(noisy, task.units, spend, not needs_public)
    if wanted is None:
        settings = dataclasses.replace(settings, pair=without_public(pair))
        return Chosen(settings, task._replace(public=None, pool=()), told)

    nearest = np.concatenate([clusters.nearest(block) for part in sets.values() for block in part.blocks()])
    places = pool.draw(wanted, nearest, pair.m or MOST, stream(name, "draw from the pool"))
    ends = np.cumsum([part.n for part in sets.values()])
    many = np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(sets)).tolist()
    told |= {"clusters": int(np.count_nonzero(wanted)), "examples": dict(zip(sets, many, strict=True))}

    # Their labels mean nothing: the sets are of many kinds.
    rows = pool.rows_of(list(sets.values()), places)
    public = Split(rows, torch.full((len(rows),), NO_CLASS))
    task = task._replace(public=public, pool=(), same_task=False, same_classes=False, same_names=False)
    return Chosen(settings, task, told)


def as_recorded(settings: RunConfig, task: Task, record: dict[str, Any]) -> Task:
    """Return the task of a finished run with the public examples that it drew from its pool."""
    sets = parts_of(settings, task)
    plan = accountant.pure(settings.epsilon_select or 0.0, 1.0, 1, "discrete Laplace")
    released = record["pool"]["histogram"], plan
    return with_examples(settings, task, sets, clusters_of(sets), released, record["identity"]).task


def clusters_of(sets: dict[str, pool.Part]) -> Clusters:
    """Return the clusters of a pool, the same for all runs."""
    return pool.clusters_of(pool.sample_of(list(sets.values()), stream("pool", "sample")))


def parts_of(settings: RunConfig, task: Task) -> dict[str, pool.Part]:
    """Return the sets of a pool by name: those that were read with the task, and embeddings on disk. UsageError if
    these have another width than the private features."""
    names = settings.pair.pool or []
    read = [name for name in names if not is_embeddings(name)]
    held = () if task.public is None else task.public.x.split(list(task.pool))
    sets: dict[str, pool.Part] = {name: pool.Held(x) for name, x in zip(read, held, strict=True)}

    d = task.private.x.shape[1]
    for name in names:
        if is_embeddings(name):
            embeddings = open_embeddings(name)
            if embeddings.d != d:
                raise UsageError(
                    f"pair.pool=[{name}]: its embeddings have {embeddings.d} numbers, the private features {d}: take "
                    "embeddings of model.backbone"
                )
            sets[name] = embeddings
    return sets
