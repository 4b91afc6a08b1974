"""Distances between a private and a public dataset; one file per paper.

A new distance is one module with a subclass of `Distance`, a dataclass whose fields are its settings, and one file in
conf/distance that names it. `Distance.measure` takes care of what has to be equal for all candidates: the same
networks, the same private examples. Candidates are taken one at a time, and the private side is computed once for each
initialisation, so that neither memory nor the private side's time grows with the number of candidates.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from pubsel.data import Split
from pubsel.messages import UsageError
from pubsel.privacy.accountant import Plan
from pubsel.privacy.randomness import Sources, stream
from pubsel.settings.methods import instance
from pubsel.settings.schema import setting

Report = Callable[[int, str, float, float], None]  # initialisation, candidate, value, seconds that it took
Build = Callable[[int], nn.Module]  # the network of an initialisation, in eval mode, on its device
Between = Callable[[str, Split], float]  # the distance of a named candidate to the private side

NONE = "none"  # the candidate that is no public data: it has no examples


def silent(i: int, name: str, value: float, seconds: float) -> None:
    """Return a Report that says nothing."""


class Draw(NamedTuple):
    """One initialisation: what is the same for all candidates."""

    i: int
    build: Build
    private: Split  # m private examples
    n: int  # of which they were drawn
    classes: int  # of the private task
    key: str  # names the random streams
    random: np.random.Generator  # continues after the draw of the examples

    def model(self) -> nn.Module:
        """Return the network, made anew at each call."""
        return self.build(self.i)


@dataclass
class Distance:
    """The settings that every distance has, and how it is measured. A distance is a subclass, a dataclass whose fields
    are its settings, with `title`, `reads` and `to_private`."""

    name: str = setting("name of the distance in records and tables", named=True)
    m: int = setting("examples on each side", at_least=2)
    initialisations: int = setting(
        "random networks and draws of m private examples to average over", at_least=1, at_most=10**5
    )

    title: ClassVar[str]  # for tables and figures
    reads: ClassVar[str]  # what it reads of the private data
    without: ClassVar[bool] = False  # whether no public data at all, under the name NONE, has a distance too

    def private_examples(self, n: int) -> int:
        """Return how many of n private examples are drawn."""
        return self.m

    def to_private(self, draw: Draw) -> Between:
        """Return what gives the distance of a candidate, by its name and its first m examples, to `draw.private`. The
        private side is computed here, once. NotImplementedError: it has none."""
        raise NotImplementedError(f"{type(self).__name__} has no to_private")

    def measure(
        self,
        build: Build,
        private: Split,
        candidates: Mapping[str, Split],
        classes: int,
        key: str,
        report: Report = silent,
    ) -> dict[str, list[float]]:
        """Return the distance of each candidate to `private`, one value for each initialisation. NOT private.

        Values of one initialisation are paired: the same network, the same private examples (whatever the distance, if
        it draws as many: the stream keeps the name of the first one), whatever the other candidates are. Of a candidate
        its first m examples. key: names the random streams. UsageError if a side has fewer than m examples.
        """
        # a side with fewer examples would be measured at another m
        for name, split in {"the private data": private, **candidates}.items():
            if len(split.x) < self.m:
                raise UsageError(f"distance.m={self.m}: {name} has {len(split.x)} examples; lower distance.m")

        if self.without:
            candidates = {**candidates, NONE: Split(private.x[:0], private.y[:0])}
        values: dict[str, list[float]] = {name: [] for name in candidates}
        for i in range(self.initialisations):
            random = stream(key, "gsd", i)
            n = len(private.x)
            chosen = torch.from_numpy(np.sort(random.choice(n, self.private_examples(n), replace=False)))
            sample = Split(private.x[chosen], private.y[chosen])
            between = self.to_private(Draw(i, build, sample, n, classes, key, random))

            # One candidate at a time, so that memory does not grow with their number.
            for name, split in candidates.items():
                began = time.perf_counter()
                value = between(name, Split(split.x[: self.m], split.y[: self.m]))
                values[name].append(value)
                report(i, name, value, time.perf_counter() - began)
        return values

    def statement(self) -> dict[str, str]:
        """Return, for records, what it reads of the private data and what that means for privacy."""
        privacy = f"{self.title} is computed on private data without noise: this record is not differentially private."
        return {"reads": self.reads, "privacy": privacy}


@runtime_checkable
class Releases(Protocol):
    """A distance whose values are released with differential privacy, once, by `pubsel rank` alone."""

    def plan(self, n: int) -> Plan:
        """Return what all its values together cost, of n private examples."""
        ...

    def release(
        self,
        build: Build,
        private: Split,
        candidates: Mapping[str, Split],
        classes: int,
        key: str,
        source: Sources,
        report: Report = silent,
    ) -> dict[str, list[float]]:
        """Return distances as `Distance.measure` does; source: where sample, labels and noise come from, which nobody
        may know."""
        ...


def build(values: dict[str, Any] | None) -> Distance | None:
    """Return the distance that `_target_` names, with its settings checked; None for none (distance=none, or null).
    UsageError names the key at fault."""
    if values is not None and "_target_" not in values:
        raise UsageError("distance has no value: give distance=NAME, such as gsd, or none")
    if values is None or values["_target_"] is None:
        return None
    return instance("distance", Distance, values)


def raw(values: list[float], k: int) -> list[float]:
    """Return the projection metric of Algorithm 1 itself: GSD as reported is it divided by sqrt(k)."""
    return [value * math.sqrt(k) for value in values]


def summary(values: list[float]) -> dict[str, float | None]:
    """Return the mean and sample standard deviation (none for a single value)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}
