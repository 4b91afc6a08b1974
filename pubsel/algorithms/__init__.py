"""The seam between algorithms and the loop.

An algorithm sees public data only. The loop in training.py sees private data only through a `Mechanism`, whose
sensitivity is declared by the algorithm and attacked in tests/test_algorithms.py. A new algorithm is one module with a
subclass of `Algorithm`, a dataclass whose fields are its settings, and one file in conf/algorithm that names it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.files import sent
from pubsel.gradients.matrix import Engine, GradientMatrix, random_labels
from pubsel.messages import UsageError
from pubsel.privacy.accountant import Plan
from pubsel.privacy.randomness import Source
from pubsel.settings.keys import Labels
from pubsel.settings.methods import instance
from pubsel.settings.schema import setting

Random = Callable[[str, int], np.random.Generator]  # a reproducible stream for each purpose and step


class ClippedSum(Protocol):
    """The sum of a mechanism."""

    def __call__(self, gradients: GradientMatrix, total: Tensor | None = None, /) -> Tensor: ...


def added(part: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum of some rows [size], added to that of others, if there is one."""
    return part if total is None else total.add_(part)


class Mechanism(NamedTuple):
    """One step's release: clipped_sum of a Poisson sample, plus Gaussian noise, decoded to a descent direction.

    clipped_sum: G [n, p], and total [size] -> total, to which a sum over the rows was added; None: a new tensor. A
        batch may be cut into blocks; one row, of whatever content, moves the sum by at most `sensitivity` in L2,
        against a row that counts as nothing.
    decode: [size] -> [p]: from the noisy mean to the descent direction; it may add results of public data.
    rows: clipped_sum is fast on blocks of at least that number of rows.
    contributions: G [n, p] -> [n, size], what each row adds to the sum, as far as `decode` keeps it. For attacks and
        audits alone: training never asks for it.
    shared: the tensors that clipped_sum reads and that public data made: where several processes sum, all have those of
        the first, in place of their own.
    """

    clipped_sum: ClippedSum
    decode: Callable[[Tensor], Tensor]
    sensitivity: float
    size: int
    rows: int = 1
    contributions: Callable[[GradientMatrix], Tensor] | None = None
    shared: tuple[Tensor, ...] = ()


class View(NamedTuple):
    """All that an algorithm may look at in a step: the current weights and the public data.

    The labels of `public` may be of another task: `labels` and `labelled` say which of them count.
    """

    model: nn.Module
    gradients: Engine
    public: Split | None
    classes: int
    multi_label: bool  # labels of the private task are 0/1 rows
    random: Random
    batch_size: int = 1  # expected, public
    start: Tensor | None = None  # [p], the weights before the first private step
    steps: int = 1  # in all
    same_task: bool = False  # labels of the public data are those of the private task: both are of one data set
    same_classes: bool = True  # no public set is known to have other classes
    rate: float | None = None  # the learning rate, if it follows from the noise (`RatedByNoise`)
    preconditioner: Tensor | None = None  # `Frozen.preconditioner`

    def labels(self, choice: Labels, redraw: int, name: str) -> Tensor:
        """Return the labels of the public images for a method that takes random ones too: drawn anew for each `redraw`,
        the given ones, or, with auto, the given ones if they are of the private task."""
        if choice == Labels.given or (choice == Labels.auto and self.same_task):
            return self.labelled(name).y
        x = needed(self.public, name).x
        return sent(random_labels(self.random("labels", redraw), len(x), self.classes, self.multi_label), x.device)

    def labelled(self, name: str) -> Split:
        """Return the public data, for an algorithm `name` that needs its labels; UsageError if they are not of the
        task."""
        public = needed(self.public, name)
        check_labels(public.y, self.classes, self.multi_label, self.same_classes, f"algorithm={name}")
        return public


LABELS_REMEDY = "set pair.take=train with the private data as pair.public, or take another algorithm"


def check_labels(y: Tensor, classes: int, multi_label: bool, same_classes: bool, what: str) -> None:
    """Raise UsageError, which names `what`, if public labels y, [m] or [m, labels], are not of the private task."""
    # the labels say how many classes they have at least
    columns = y.shape[1] if y.dim() == 2 else int(y.max()) + 1

    # A sample may lack a class; a table of 0/1 labels lacks none.
    other = not same_classes or (y.dim() == 2) != multi_label
    if other or columns > classes or (multi_label and columns < classes):
        raise UsageError(
            f"{what} needs public labels of the private task; those of pair.public are of another: {LABELS_REMEDY}"
        )


def needed(public: Split | None, name: str) -> Split:
    """Return the public data, for the algorithm `name`, which cannot do without them; UsageError if there are none."""
    if public is None:
        raise UsageError(f"algorithm={name} needs public data: give pair.public=NAME")
    return public


def roots(x: Tensor) -> Tensor:
    """Return the square root of each number, with its sign."""
    return x.abs().sqrt_().mul_(x.sign())  # features can be wide: as few copies of them as can be


Scaling = tuple[Tensor, Tensor, Tensor]  # centre and scale of columns, float32 [d], and limit, float32


class Frozen(nn.Module):
    """Untrained layers before a linear classifier: x [n, d] -> (x - shift) projection [n, k], of `roots` of x if
    `root`; minus `level` times the mean of each row; then, if `unit`, each row is scaled to norm `length`. None: left
    out.

    rest: the share of the squared norm that goes to x - shift itself, as d more columns.
    classifier: weights [C, d] and biases [C] of a classifier of x - shift, in rows of the same norm. Its C logits are
    then the last columns, and an `OffsetLinear` corrects them.
    preconditioner: [k, k], by which an algorithm may multiply the gradients of each class; class_weights: [C], by which
    it multiplies the loss of an example. Both are no part of the map."""

    preconditioner: Tensor | None
    class_weights: Tensor | None
    shift: Tensor | None
    projection: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    middle: Tensor | None
    centre: Tensor | None
    scale: Tensor | None
    limit: Tensor | None

    def __init__(
        self,
        shift: Tensor | None = None,
        projection: Tensor | None = None,
        unit: bool = False,
        root: bool = False,
        level: float = False,
        length: float = 1.0,
        rest: float = 0.0,
        classifier: tuple[Tensor, Tensor] | None = None,
    ):
        super().__init__()
        weight, bias = classifier or (None, None)
        for name, tensor in {"shift": shift, "projection": projection, "weight": weight, "bias": bias}.items():
            self.register_buffer(name, tensor)
        self.scaled(None).less(None)
        for name in ("preconditioner", "class_weights"):  # not of the model
            self.register_buffer(name, None, persistent=False)
        self.unit, self.root, self.level, self.length, self.rest = unit, root, level, length, rest

    def scaled(self, scaling: Scaling | None) -> Self:
        """Return it with (x - centre) / scale in place of x before all else, at most `limit` in absolute value; what is
        missing (NaN) is zero then. None: x as it is."""
        for name, tensor in zip(("centre", "scale", "limit"), scaling or (None, None, None), strict=True):
            self.register_buffer(name, tensor)
        return self

    def less(self, middle: Tensor | None) -> Self:
        """Return it with `middle` [k] subtracted from rows of norm 1 before they are scaled to their norm. None: it is
        not."""
        self.register_buffer("middle", middle)
        return self

    def parts(self) -> dict[str, Any]:
        """Return all that it is made of, but for a classifier, as `of_parts` takes it."""
        names = ("shift", "projection", "unit", "root", "level", "length", "rest")
        later = ("middle", "preconditioner", "class_weights")
        scaling = None if self.centre is None else (self.centre, self.scale, self.limit)
        return {name: getattr(self, name) for name in names + later} | {"scaling": scaling}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Any]) -> Self:
        """Return the map with these `parts`."""
        kept = dict(parts)
        later = {name: kept.pop(name) for name in ("scaling", "middle", "preconditioner", "class_weights")}
        frozen = cls(**kept).scaled(later["scaling"]).less(later["middle"])
        frozen.preconditioner, frozen.class_weights = later["preconditioner"], later["class_weights"]
        return frozen

    def with_unit(self, unit: bool) -> Self:
        """Return it with rows of norm `length` if `unit`; otherwise as it is."""
        self.unit = self.unit or unit
        return self

    @property
    def offsets(self) -> int:
        """Return the number of logits among the output columns."""
        return 0 if self.weight is None else len(self.weight)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        # columns of a table first; then in the order of the docstring: roots, shift, projection, mean, norm
        if self.centre is not None and self.scale is not None and self.limit is not None:
            x = ((x - self.centre) / self.scale).clamp(-self.limit, self.limit).nan_to_num_(0.0)
        if self.root:
            x = roots(x)
        if self.shift is not None:
            x = x - self.shift
        z = x if self.projection is None else x @ self.projection
        if self.level:
            z = z - self.level * z.mean(1, keepdim=True)
        if self.middle is not None:
            z = nn.functional.normalize(z, dim=1) - self.middle
        parts = [self._scaled(z)]

        if self.rest > 0:
            parts = [math.sqrt(1 - self.rest) * parts[0], math.sqrt(self.rest) * self._scaled(x)]
        if self.weight is not None:
            parts.append(nn.functional.linear(self._scaled(x), self.weight, self.bias))
        return torch.cat(parts, dim=1)

    def _scaled(self, x: Tensor) -> Tensor:
        return self.length * nn.functional.normalize(x, dim=1) if self.unit else x


class FirstRelease(NamedTuple):
    """A noisy sum over the features x [n, d] of the private examples, before training.

    clipped_sum: x -> [size], as in `Mechanism`. decode: from the noisy sum to what is frozen. classes: how many columns
    of x, after the features, are 0 or 1 and say of which class an example is.
    """

    clipped_sum: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Frozen]
    sensitivity: float
    size: int
    classes: int = 0


class Facts(NamedTuple):
    """Public facts of a private task before training, as used by methods without settings."""

    n: int = 1  # private examples, or people if the unit is a person
    d: int = 1  # features
    m: int = 0  # public examples; 0: there are no public data
    classes: int = 2  # or labels
    multi_label: bool = False
    mu: float = 1.0  # sensitivity over deviation of the Gaussian mechanism that spends epsilon and delta; inf: no noise
    same_task: bool = False  # labels of the public data are those of the private task: both are of one data set
    raw: int | None = None  # of a table: how many columns, the first ones, have no known scale; None: features
    images: bool = True  # features are of images
    public: Tensor | None = None  # the public features, [m, d]
    stages: int = 0  # of the features, how many come last and are of stages before the last layer of a network
    balanced: bool = False  # the model is measured by its balanced accuracy: rare classes count as much as others
    names: tuple[str, ...] = ()  # of the classes in order; empty: they have none
    signed: bool = False  # features are of images and take both signs: of wavelet scattering, not activations


@dataclass
class Algorithm:
    """Common settings of all methods, and the interface for the loop. A method is a subclass, a dataclass whose fields
    are its settings, that overrides the differences."""

    name: str = setting("name of the algorithm in records and tables")
    _: KW_ONLY
    unit: bool = setting(
        "features: bring each row to norm 1, after the method's own map of them, before a classifier trains on them",
        default=False,
    )

    private = True  # False: no noise, no guarantee
    needs_public = True  # False: of a method that reads public data if there are any
    takes_stages = False  # True: of a method that features of several layers help if there are public data

    @property
    def reads_names(self) -> bool:
        """Return whether public examples get labels by the names of the classes, by features of CLIP."""
        return False

    @property
    def directions(self) -> int | None:
        """Return the number k of directions of gradients or features that are kept; None: what the task allows."""
        return None

    @property
    def first_share(self) -> float:
        """Return the share of the budget that a `FirstRelease` before training spends."""
        return 0.0

    @property
    def first_steps(self) -> int:
        """Return the number of full-batch steps that a `FirstRelease` counts as. Its noise is that of their mean, and
        one plan covers them and the steps of training."""
        return 0

    @property
    def offsets(self) -> int:
        """Return the number of columns after `frozen` that are logits of a public classifier."""
        return 0

    @property
    def uses_public(self) -> bool:
        """Return whether public data is read. With `uses_public = False` in a subclass pair.public is ignored, and
        recorded as none."""
        return True

    def sensitivity(self) -> float:
        """Return by how much, in L2, one private example more or less moves the sum of a step, whatever the example is.
        0: no private example is read. NotImplementedError: none is declared."""
        raise NotImplementedError(f"{type(self).__name__} declares no sensitivity")

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return what is summed over private rows in a step, and how the noisy mean is decoded. NotImplementedError
        if no step reads private data."""
        raise NotImplementedError(f"{type(self).__name__} takes no private step")

    def check(self, view: View) -> None:
        """Raise UsageError for what would stop the training once it has begun. Called before anything is drawn."""

    def numbers(self, view: View) -> int:
        """Return how many numbers a step holds in addition to the rows of one pass, to estimate memory: by default, a
        gradient of public data and what is made of it."""
        return 2 * view.gradients.size if self.uses_public else 0

    def width(self, d: int) -> int:
        """Return how many of d features are left after what is frozen."""
        return self.directions or d

    def row_weighted(
        self,
        view: View,
        weights: Callable[[GradientMatrix], Tensor],
        decode: Callable[[Tensor], Tensor],
        columns: Tensor | None = None,
        shared: tuple[Tensor, ...] = (),
    ) -> Mechanism:
        """Return the mechanism that sums the rows of G [n, p], each times its weight.

        weights: G -> [n], float64; the weight of a row may depend on that row and on public data alone, and
            `sensitivity` bounds the norm of a weighted row.
        columns: [p], of public data: each row is multiplied by it too, column by column.
        decode, shared: as in `Mechanism`; what public data put into `weights` and `columns` is shared.
        """
        return Mechanism(
            clipped_sum=lambda gradients, total=None: sum_of_rows(gradients, weights(gradients), columns, total),
            decode=decode,
            sensitivity=self.sensitivity(),
            size=view.gradients.size,
            contributions=lambda gradients: weighted_rows(gradients, weights(gradients), columns),
            shared=shared,
        )


def sum_of_rows(
    gradients: GradientMatrix, weights: Tensor, columns: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Return weights [n] times G [n, p], and each column times that of `columns` [p] -> float64 [p]; added to `total`,
    if given. Summed so that with rows whose weighted norm is at most 1, one of them moves it by at most 1 +
    `privacy.ROUNDING`: in float64, or by slots if the gradients have these."""
    if columns is None:
        return gradients.combine(weights, gradients.slots, total)
    return added(gradients.combine(weights) * columns, total)


def weighted_rows(gradients: GradientMatrix, weights: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return the rows that `sum_of_rows` adds up, [n, p]."""
    # an audit looks at single rows, which training never writes out
    rows = gradients.written_out(torch.ones_like(weights, dtype=torch.bool))
    if columns is not None:
        rows = rows * columns
    return rows * weights.to(gradients.dtype)[:, None]


@runtime_checkable
class Freezes(Protocol):
    """An algorithm that trains a linear classifier on features, after a map that it fixes first. One that returns a
    `FirstRelease` has a `first_share` or `first_steps` above 0."""

    @property
    def offsets(self) -> int: ...

    def width(self, d: int) -> int: ...

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen | FirstRelease:
        """Return the map, or the release that it is decoded from. public: features [m, d] with labels."""
        ...


def map_of(algorithm: Algorithm, public: Split | None, d: int, random: Random) -> Frozen | FirstRelease | None:
    """Return what comes before the linear classifier of `algorithm` on d features, with rows of norm 1 if its `unit`
    asks for them; None if nothing does."""
    if not isinstance(algorithm, Freezes):
        return Frozen(unit=True) if algorithm.unit else None
    frozen = algorithm.frozen(public, d, random)
    if isinstance(frozen, Frozen):
        return frozen.with_unit(algorithm.unit)
    return frozen._replace(decode=lambda noisy: frozen.decode(noisy).with_unit(algorithm.unit))


@runtime_checkable
class Informed(Protocol):
    """An algorithm on features that derives some of its settings from the public `Facts` of the task."""

    def derived(self, facts: Facts) -> Self:
        """Return the algorithm for one task."""
        ...

    def values(self, steps: int) -> dict[str, Any]:
        """Return the settings of a derived algorithm, for the record; steps: of the training."""
        ...


@runtime_checkable
class Derives(Informed, Protocol):
    """An algorithm that derives its training from the public `Facts` of the task too."""

    @property
    def training(self) -> Mapping[str, Any]:
        """Return the settings of training that replace all others."""
        ...

    @property
    def steps(self) -> int:
        """Return the number of steps of a derived algorithm."""
        ...


@runtime_checkable
class RatedByNoise(Protocol):
    """An algorithm whose learning rate may follow from the noise."""

    def learning_rate(self, noise_multiplier: float, steps: int, batch_size: int, momentum: float) -> float: ...


@runtime_checkable
class Pretrains(Protocol):
    """An algorithm that trains `view.model` in place on public data before the first private step."""

    def pretrain(self, view: View) -> None: ...


@runtime_checkable
class Finishes(Protocol):
    """An algorithm that changes `view.model` in place after the last private step, by public data and public facts."""

    def finish(self, view: View) -> None: ...


@runtime_checkable
class Solves(Protocol):
    """An algorithm with a separate loop, in place of mechanism and training.fit."""

    def account(self, n: int, epsilon: float, delta: float) -> Plan:
        """Return what its loop costs on n private examples."""
        ...

    def solve(
        self, private: Split, public: Split | None, classes: int, epsilon: float, delta: float, source: Source
    ) -> tuple[Tensor, Plan]:
        """Return the weights [C, d] of a linear classifier on features, and what they cost. epsilon is finite; labels
        are classes, not 0/1 rows."""
        ...


def build(settings: dict[str, Any]) -> Algorithm:
    """Return the algorithm that `_target_` names, with its settings checked; UsageError names the key at fault."""
    return instance("algorithm", Algorithm, settings)
