"""The public examples of a run whose public data is a pool: clusters, a private choice, a draw."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pubsel.cell import Cell, Spending, units_of
from pubsel.data import Split, Task
from pubsel.data.embeddings import Part, check_widths, feature_rows, is_embeddings, open_embeddings
from pubsel.data.splits import NO_CLASS
from pubsel.messages import UsageError, say
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.rules import Inputs, without_public
from pubsel.selection import assigned, pool
from pubsel.selection.coverage import Private
from pubsel.selection.pool import Clusters
from pubsel.training.once import cover, released_once

MOST = 1000  # public examples that are drawn if nobody says how many
CHOSEN = "selection.begun"  # the mark of `once.cover`


def check_features(task: Task) -> None:
    """Raise UsageError if the private examples are columns of a table, which no pool is compared with."""
    if task.raw is not None:
        raise UsageError("pair.pool: compares features, not columns of a table: give one table as pair.public")


class Pool(NamedTuple):
    """A pool for one run. sets: by name; needs_public: the algorithm cannot do without public data; m: how many
    examples are drawn at most; key: of the random stream of the draw, which is public (`Cell.public_key`)."""

    sets: dict[str, Part]
    clusters: Clusters
    nearest: NDArray[np.integer]  # the cluster of each example
    needs_public: bool
    units: int  # of the private data: examples, or people
    epsilon: float
    m: int
    key: str

    @classmethod
    def of(cls, inputs: Inputs, task: Task, needs_public: bool, epsilon: float | None, key: str) -> "Pool":
        """Return the pool of a run. task: with all examples of the sets that were read; epsilon: of the choice.
        UsageError if embeddings are not of the network of the private features."""
        check_features(task)
        # images were read with the task; embeddings stay on disk
        on_disk = {name: is_embeddings(name) for name in inputs.pair.pool or []}
        held = iter(() if task.public is None else task.public.x.split(list(task.pool)))
        sets: dict[str, Part] = {}
        for name in sorted(on_disk, key=on_disk.__getitem__):
            if not on_disk[name]:
                sets[name] = pool.Features(next(held))
                continue
            sets[name] = embeddings = open_embeddings(name)
            check_widths(embeddings, task.private.x.shape[1])
        parts = list(sets.values())
        kept = assigned.assignment_folder(parts, inputs.data_root)
        clusters = assigned.clusters_kept(parts, kept)
        nearest = assigned.nearest_of(parts, clusters, kept, say)
        return cls(sets, clusters, nearest, needs_public, task.units, epsilon or 0.0, inputs.pair.m or MOST, key)

    def places(self, noisy: list[float]) -> NDArray[np.int64] | None:
        """Return which examples are drawn by a noisy histogram; None if it shows too few private ones."""
        with_none = not self.needs_public
        wanted = pool.shares(noisy, self.units, pool.plan_of(self.epsilon, with_none), with_none)
        return None if wanted is None else pool.draw_by_cluster(wanted, self.nearest, self.m, stream(self.key, "draw"))

    def features(self, noisy: list[float]) -> torch.Tensor | None:
        """Return the features of the examples that are drawn by a noisy histogram, [m, d]; None as for `places`."""
        places = self.places(noisy)
        return None if places is None else feature_rows(list(self.sets.values()), places)

    def many(self, noisy: list[float]) -> dict[str, int]:
        """Return how many examples of each set are drawn by a noisy histogram."""
        places = self.places(noisy)
        ends = np.cumsum([part.n for part in self.sets.values()])
        of = np.zeros(0, dtype=np.int64) if places is None else np.searchsorted(ends, places, side="right")
        return dict(zip(self.sets, np.bincount(of, minlength=len(ends)).tolist(), strict=True))


def from_pool(cell: Cell, task: Task) -> tuple[Cell, Task, dict[str, Any], accountant.Plan]:
    """Return a cell and its task with public examples that are chosen privately from pair.pool, or without; the
    part of the choice that may be published, from released values and public data; and its cost.

    The release is drawn once, from the examples that will be trained on, and kept in the run's folder until the run
    has finished."""
    inputs = cell.inputs
    of = Pool.of(inputs, task, cell.algorithm.needs_public, cell.epsilon_select, cell.public_key)

    # What decides the release: the private examples, the clusters, the assignments to them, and the examples.
    public = [Split(torch.from_numpy(each), torch.zeros(0)) for each in of.clusters if isinstance(each, np.ndarray)]
    stamps = torch.tensor([*"".join(assigned.stamps_of([*of.sets.values()])).encode()])
    public += [Split(torch.from_numpy(of.nearest), stamps)]
    spending = Spending(task.private, of.epsilon, 0.0, task.original)
    secret = cell.streams.secret("choice", units_of(task), public, {}, {"epsilon": of.epsilon}, spending)

    private, with_none = Private.of(task.private.x, task.people), not of.needs_public

    def of_histogram() -> dict[str, Any]:
        (cell.folder / CHOSEN).unlink(missing_ok=True)
        return {"noisy": pool.histogram(of.epsilon, private, of.clusters, with_none, secret)}

    def of_choice() -> dict[str, Any]:
        return {"used": pool.covered(of.epsilon, of.features(noisy), private, secret)}

    # Each is kept before anything follows from it, so that no error in between draws the histogram again.
    begin = secret.begin
    noisy = released_once(cell.folder / "histogram.pt", secret, of_histogram)["noisy"]
    cover(secret, begin, cell.folder / CHOSEN)
    used = not with_none or released_once(cell.folder / "selection.pt", secret, of_choice)["used"]
    many = of.many(noisy) if used else dict.fromkeys(of.sets, 0)
    shown = {"histogram": noisy, "examples": many}
    named = ", ".join(f"{count} of {name}" for name, count in many.items() if count)
    say(f"  public data: {named or f'none: the pool has too few examples like those of {inputs.pair.private}'}")

    # without examples of the private kind the run trains without public data
    x = of.features(noisy) if used else None
    if x is not None:
        task = with_examples(task, x)
    else:
        inputs = inputs._replace(pair=without_public(inputs.pair))
        task = task._replace(public=None, pool=())
    return cell._replace(inputs=inputs, distance=None), task, shown, pool.pool_cost(of.epsilon, with_none)


def as_recorded(cell: Cell, task: Task, record: dict[str, Any]) -> Task:
    """Return the task of a finished run with the public examples that it drew from its pool."""
    of = Pool.of(cell.inputs, task, cell.algorithm.needs_public, cell.epsilon_select, cell.public_key)
    x = of.features(record["pool"]["histogram"])
    return task if x is None else with_examples(task, x)


def with_examples(task: Task, x: torch.Tensor) -> Task:
    """Return a task with public examples of a pool, whose labels mean nothing: the sets are of many kinds."""
    public = Split(x, torch.full((len(x),), NO_CLASS))
    return task._replace(public=public, pool=(), same_task=False, same_classes=False)
