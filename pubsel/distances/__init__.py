"""Distances between a private and a public dataset; one file per paper."""

import dataclasses
from collections.abc import Callable

from pubsel.distances import dp_gsd, frechet, gsd, mmd, otdd, task2vec
from pubsel.messages import UsageError
from pubsel.settings.keys import DPPCA, Distance, Labels, Parameters


@dataclasses.dataclass(frozen=True)
class Method:
    """A distance: how it is measured, what it is called, and what it reads of the private data."""

    measure: Callable[..., dict[str, list[float]]]
    title: str
    reads: str


METHODS = {
    "gsd": Method(gsd.measure, "GSD", "images, through per-example gradients with random labels"),
    "dp_gsd": Method(dp_gsd.measure, "DP-GSD", "images, through per-example gradients with random labels"),
    "task2vec": Method(task2vec.measure, "Task2Vec", "images and labels, through gradients"),
    "otdd": Method(otdd.measure, "OTDD", "images, as pixels or features, and labels"),
    "frechet": Method(frechet.measure, "Fréchet distance", "images, as features"),
    "mmd": Method(mmd.measure, "MMD^2", "images, as features"),
}


def canonical(distance: Distance, selects: bool = False) -> Distance:
    """The same settings, with those that this distance ignores set to one value, so that equal measurements are one.

    UsageError for an unknown distance (none is one: nothing is measured), labels=auto, or a setting of private
    measurements where there is none; selects: a private selection takes two of them.
    """
    if distance.labels == Labels.auto:
        raise UsageError("distance.labels=auto: use random or given, which hold for all candidates alike")
    if distance.exact and distance.name != "otdd":
        raise UsageError(f"distance.exact=true: distance={distance.name} has no use for it: leave it out")
    if distance.name == "dp_gsd":
        return distance
    unused = ["epsilon", "delta"] + ([] if selects else ["private_m", "sketch"])
    for key in unused:
        if getattr(distance, key) is not None:
            raise UsageError(
                f"distance.{key}: distance={distance.name} is not private and has no use for it: take dp_gsd"
            )
    distance = dataclasses.replace(distance, mechanism=DPPCA.gauss)
    if distance.name in ("gsd", "none"):
        return distance
    if distance.name not in METHODS:
        raise UsageError(f"distance.name={distance.name}: unknown, use {', '.join(METHODS)} or none")
    return dataclasses.replace(distance, k=1, normalise_rows=True, labels=Labels.random, parameters=Parameters.weights)


def statement(distance: Distance) -> dict[str, str]:
    """For records: what the distance reads of the private data, and what that means for privacy."""
    method = METHODS[distance.name]
    reads = method.reads
    if distance.name in ("gsd", "dp_gsd") and distance.labels == Labels.given:
        reads = "images and labels, through per-example gradients"
    return {
        "reads": reads,
        "privacy": f"{method.title} is computed on private data without noise: this record is not differentially "
        "private.",
    }
