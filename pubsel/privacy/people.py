"""Weights of examples in a sum in which nobody counts for more than one: `1 / k` for a person with k examples.

Weights are whole numbers of steps of 1 / UNIT, rounded down, so that sums of them are exact in any order, and those of
a person add up to at most UNIT.
"""

from torch import Tensor

UNIT = 2**30  # steps in one


def weights_of(people: Tensor | None, examples: int) -> list[int]:
    """Return the weight of each of n examples, in steps of 1 / UNIT; those of a person add up to at most one.

    people: the number of examples of each person, which are consecutive; None: each example is a unit."""
    if people is None:
        return [UNIT] * examples
    return [UNIT // many for many in people.tolist() for _ in range(many)]
