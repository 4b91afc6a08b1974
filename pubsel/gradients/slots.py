"""Sums in float32 that an example moves by little more than its own row.

In float32, a row more may change how the sum of all others is rounded: by 27 times its norm in the attacks of
tests/test_rounding.py. Here each example is in a slot that a hash of its content chooses, whatever the other examples
are; features are its content, and may differ in the last digits next to others (`accountant.ROUNDED`). At
most SLOT rows of a slot are added up in float32, in a product of their own on memory of their own; the sums of slots
are added in float64. An example then changes the sum of ONE slot. One that has more rows, such as many copies of one
example, is added in float64.

The bound: a sum of b products in float32, in any order, with or without fused operations, is off by at most
b 2^-24 sum_i |a_i| to first order, number by number and so in L2 (Higham: Accuracy and Stability of Numerical
Algorithms, 2002, Section 4.2): for rows of norm at most 1 by b^2 2^-24. With one row more or less in it, a slot moves
by at most 1 + 2 SLOT^2 2^-24 = 1 + 4.9e-4; if it then has more than SLOT rows, by less. This holds for any hash; a good
one fills slots evenly. With what float64 adds for n examples, n^2 2^-52, and the lattice of the noise
(`lattice.FINEST`), it is less than 1 + `privacy.ROUNDING` for up to MOST examples.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pubsel.files import sent
from pubsel.gradients.factored import BLOCK, FactoredGradients, LinearGradients
from pubsel.gradients.matrix import SLOT, Engine, GradientMatrix, PerExampleGradients, Slots, on_lines

LOAD = 48  # rows that a slot is expected to have: then one in a hundred has more than SLOT
MOST = 2**20  # examples
HASHED = 1024  # numbers of an example that choose its slot, at most
ROWS = 2**12  # examples at a time
COPIED = 2**29  # bytes of examples that are copied: to gather each slot at each step takes a fourth more time
CACHED = 2**21  # numbers of features in a block
FEWEST = 2 * SLOT  # examples per pass: with fewer, whole slots would leave many passes half empty


def slots_of(x: Tensor, y: Tensor, slots: int) -> Tensor:
    """Return the slot of each example of x [n, ...], y [n, ...], int64 [n] from 0 to slots - 1. It follows from the
    example alone."""
    factors = np.random.SFC64(0).random_raw(2 * HASHED) | np.uint64(1)
    chosen = np.empty(len(x), dtype=np.int64)
    for first in range(0, len(x), ROWS):
        part = slice(first, first + ROWS)
        numbers = np.concatenate([_bits(x[part]), _bits(y[part])], 1)
        mixed = (numbers * factors[: numbers.shape[1]]).sum(1)  # modulo 2^64; the upper half is a hash
        mixed = (mixed ^ mixed >> np.uint64(32)) * factors[0]
        chosen[part] = (mixed >> np.uint64(32)) % np.uint64(slots)
    return torch.from_numpy(chosen)


def _bits(values: Tensor) -> NDArray[np.uint64]:
    """Return at most HASHED numbers of each example, evenly spaced, by their bits as whole numbers [n, h]."""
    flat = values.flatten(1) if values.dim() > 1 else values[:, None]
    spaced = flat[:, :: max(1, -(-flat.shape[1] // HASHED))].cpu().contiguous()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[spaced.element_size()]
    return spaced.view(whole).numpy().astype(np.uint64)


def by_slot(slots: Tensor, number: int) -> tuple[Tensor, list[int]]:
    """Return the order [n] that brings rows with these slots [n] together, and how many rows each of `number` slots
    has; the rest, after them, are rows of slots that have more than SLOT."""
    counts = slots.bincount(minlength=number)
    crowded = counts > SLOT
    order = (slots + number * crowded[slots]).argsort(stable=True)
    return order, counts.masked_fill(crowded, 0).tolist()


class SlottedGradients:
    """Source of the rows of `inner` in blocks of whole slots. sizes: how many rows each slot has, those of the first
    slot first; order: that of the examples of a linear classifier, if they are not brought together by slots."""

    def __init__(
        self, inner: Engine, sizes: list[int], squares: Tensor | None = None, order: Tensor | None = None
    ):  # squares: float64 [n], the squared norms of features, if inner is of a linear classifier
        self.inner, self.squares, self.slots = inner, squares, Slots(sizes, order)
        self.offsets, self.size = inner.offsets, inner.size

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def chunk(self, x: Tensor) -> int:
        """Return how many examples of x [n, ...] a pass takes."""
        return self.inner.chunk(x)

    def blocks(self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None) -> Iterator[GradientMatrix]:
        """Yield G for x [n, ...], y [n, ...], as `inner` does."""
        if isinstance(self.inner, LinearGradients):
            yield from self._linear(self.inner, x, y, dtype)
            return

        # of a network whole slots, as many as a block takes, and then the rows of slots that have too many
        most = self.inner.most(x) if isinstance(self.inner, PerExampleGradients) else self.chunk(x)
        start = 0
        for sizes in _blocks(self.slots.sizes, most):
            part = slice(start, start + sum(sizes))
            for slotted in self.inner.blocks(x[part], y[part], sum(sizes), dtype):
                slotted.slots = Slots(sizes)
                yield slotted
            start = part.stop
        yield from self.inner.blocks(x[start:], y[start:], rows, dtype)

    def _linear(
        self, inner: LinearGradients, x: Tensor, y: Tensor, dtype: torch.dtype | None
    ) -> Iterator[FactoredGradients]:
        """Yield G of a linear classifier for x [n, d], y [n, ...]; the last block has the rows of crowded slots too."""
        # A block stays in the cache from its logits to its sum. It has a fixed number of SLOTS: an example changes the
        # shape of the block that contains it, and of the last one if its slot is crowded. There is a single block on a
        # GPU, if rows are not in the order of their slots, and if a second block would be at most half full.
        sizes, start, most = self.slots.sizes, 0, CACHED // (LOAD * x.shape[1])
        at_once = x.is_cuda or self.slots.order is not None or 2 * len(sizes) <= 3 * most
        most = len(sizes) if at_once else max(1, most)
        for first in range(0, max(1, len(sizes)), max(1, most)):
            some = sizes[first : first + most]
            part = slice(start, start + sum(some) if first + most < len(sizes) else len(x))
            squares = None if self.squares is None else self.squares[part]
            block = inner.matrix(x[part], y[part], dtype, squares)
            block.slots = self.slots if at_once else Slots(some)
            yield block
            start = part.stop


def _blocks(sizes: list[int], most: int) -> Iterator[list[int]]:
    """Yield the sizes of slots so that each list has at most `most` rows, or one slot."""
    some: list[int] = []
    for size in sizes:
        if sum(some) + size > most:
            yield some
            some = []
        some.append(size)
    if some:
        yield some


class PrivateSlots:
    """The slots of the private examples x [n, ...], y [n, ...] of a training, and the squared norms of features that
    never change. expected: examples of a sample, which is public, as all that decides whether there are slots."""

    def __init__(self, gradients: Engine, x: Tensor, y: Tensor, expected: int):
        self.gradients, self.number = gradients, -(-expected // LOAD)
        self.slots = slots_of(x, y, self.number)
        self.squares = gradients.squares(x) if isinstance(gradients, LinearGradients) else None
        self._all: tuple[Tensor | None, Engine] | None = None

    def arrange(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples slot by slot, if all are taken at each step and they are not too large to copy."""
        if x.nbytes > COPIED:
            return x, y
        order = by_slot(self.slots, self.number)[0]
        self.slots = self.slots[order]
        self.squares = None if self.squares is None else self.squares[order]
        x, y = x[order], y[order]
        return (on_lines(x) if isinstance(self.gradients, LinearGradients) else x), y

    def batch(self, chosen: Tensor | None) -> tuple[Tensor | None, Engine]:
        """Return the places of the examples that are `chosen` (None: all), slot by slot, and the engine for them."""
        if chosen is not None:
            order, sizes = by_slot(self.slots[chosen], self.number)
            chosen = sent(chosen[order], next(self.gradients.model.parameters()).device)
            squares = None if self.squares is None else self.squares[chosen]
            return chosen, SlottedGradients(self.gradients, sizes, squares)

        if self._all is None:
            order, sizes = by_slot(self.slots, self.number)
            linear = isinstance(self.gradients, LinearGradients)
            device = next(self.gradients.model.parameters()).device
            places = None if bool((order.diff() == 1).all()) else sent(order, device)
            engine = SlottedGradients(self.gradients, sizes, self.squares, places if linear else None)
            self._all = (None if linear else places), engine
        return self._all


def private_slots(gradients: Engine, x: Tensor, y: Tensor, expected: int) -> PrivateSlots | None:
    """Return the slots of the private examples x [n, ...], y [n, ...] of a training; None if its sums are in float64:
    of too many examples, or of few in a pass."""
    parameter = next(gradients.model.parameters())
    if parameter.dtype != torch.float32 or len(x) > MOST:
        return None
    if isinstance(gradients, LinearGradients):
        return PrivateSlots(gradients, x, y, expected) if expected <= BLOCK else None
    for _ in gradients.blocks(x[:1].to(parameter.device), y[:1].to(parameter.device)):
        pass  # the first call decides how many examples a pass takes
    return PrivateSlots(gradients, x, y, expected) if gradients.chunk(x[:1]) >= FEWEST else None
