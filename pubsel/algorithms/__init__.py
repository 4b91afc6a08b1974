"""The seam between algorithms and the loop.

An algorithm sees public data only. The loop in training.py sees private data only through a `Mechanism`, whose
sensitivity is declared here and attacked in tests/test_algorithms.py. A new algorithm is one module with one dataclass
(its fields are its settings) and one file in conf/algorithm that names it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from hydra.utils import get_class
from torch import Tensor, nn

from pubsel.config import UsageError, check
from pubsel.data import Split
from pubsel.gradients import GradientMatrix, PerExampleGradients


class Mechanism(NamedTuple):
    """One step's release: clipped_sum of a Poisson sample, plus Gaussian noise, decoded to a descent direction.

    clipped_sum: G [n, p] -> [size]. A sum over rows, so a batch may be cut into blocks; adding or removing one row, of
        whatever content, moves it by at most `sensitivity` in L2.
    decode: [size] -> [p], linear: from the noisy mean to the descent direction.
    rows: clipped_sum is fast on blocks of so many rows or more.
    """

    clipped_sum: Callable[[GradientMatrix], Tensor]
    decode: Callable[[Tensor], Tensor]
    sensitivity: float
    size: int
    rows: int = 1


class View(NamedTuple):
    """All that an algorithm may look at in a step: the current weights and the public data.

    random(purpose, step) is a reproducible stream.
    """

    model: nn.Module
    gradients: PerExampleGradients
    public: Split | None
    classes: int
    multi_label: bool  # labels of the private task are 0/1 rows
    random: Callable[[str, int], np.random.Generator]


class Algorithm(Protocol):
    """Settings of one method, and the mechanism that they make of the public data at each step."""

    name: str
    uses_public: ClassVar[bool]  # False: pair.public is ignored and recorded as none
    private: ClassVar[bool]  # False: no noise, no guarantee

    def mechanism(self, view: View, step: int) -> Mechanism: ...

    def sensitivity(self) -> float: ...

    def numbers(self, view: View) -> int:  # held beside the rows of one pass, to estimate memory
        ...


def build(settings: dict[str, Any]) -> Algorithm:
    """The algorithm that `_target_` names, with its settings checked; UsageError names the key at fault."""
    values = dict(settings)
    target = values.pop("_target_", None)
    try:
        cls = get_class(target)  # type: ignore[arg-type]
    except Exception as error:
        raise UsageError(f"algorithm._target_={target}: {str(error).splitlines()[0]}") from None
    return check(cls, values, "algorithm")
