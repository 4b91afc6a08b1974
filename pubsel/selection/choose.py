"""The private choice of one public set, or of none: by features (`coverage`), or by gradients (`pubsel.selection`)."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from pubsel import selection
from pubsel.algorithms import columns
from pubsel.data import Split, Task
from pubsel.distances import Build, Distance
from pubsel.messages import UsageError, say
from pubsel.privacy.accountant import Plan
from pubsel.privacy.randomness import Sources
from pubsel.selection import Comparison, coverage
from pubsel.settings.keys import By, Model, Select


class Choice(NamedTuple):
    """A choice among public sets. task: the private data; candidates: by name; with_none: none may be chosen, by
    features; build(i): the network of initialisation i, by gradients; key: names the public streams."""

    select: Select
    distance: Distance | None
    epsilon: float
    task: Task
    candidates: Mapping[str, Split]
    with_none: bool
    build: Build
    key: str

    def draw(self, secret: Sources) -> tuple[str, Plan]:
        """Return the name of one candidate, or coverage.NONE, and the cost. Nothing else that is computed here may be
        shown. UsageError if the candidates cannot be compared."""
        private, candidates = columns.in_one_scale(self.task.private, self.candidates, self.task.raw)
        if by_features(self.select):
            features = {name: split.x for name, split in candidates.items()}
            return coverage.select(self.epsilon, private.x, self.task.people, features, self.with_none, secret)
        sets = Comparison(self.build, private, candidates, self.task.classes, self.key, secret)
        return selection.select(selection.gsd_of(self.distance), self.select, self.epsilon, sets, say)


def compared(select: Select, model: Model) -> Select:
    """Return the settings of a private choice with what it compares by. If nothing is given, that is coverage where
    there are features; otherwise it is gsd, which is then the same as null."""
    if model.backbone is None:
        return dataclasses.replace(select, by=None) if select.by == By.gsd else select
    return select if select.by is not None else dataclasses.replace(select, by=By.coverage)


def by_features(select: Select) -> bool:
    """Return whether a private choice, as `compared` returns its settings, is by features, and not by gradients."""
    return select.by == By.coverage


def check_choice(select: Select, model: Model, distance: Distance | None) -> None:
    """Raise UsageError if what chooses the public set lacks what it compares by."""
    if not by_features(select):
        selection.gsd_of(distance)
    elif model.backbone is None:
        raise UsageError("select.by=coverage: compares features: set model.backbone, such as model=scattering")
