"""The gradient of a person: the mean over the gradients of their examples, as ONE row of G.

The private unit is then a person with all their examples (`pair.unit`). Algorithms clip rows and add them up; what
they declare and derive for a row, and what is tested of it, then holds for a person. McMahan, Ramage, Talwar, Zhang:
Learning Differentially Private Recurrent Language Models, ICLR 2018, arXiv:1710.06963, clip a user's update likewise.

The mean, and not the sum: its norm is that of an example, however many there are, so that clip norms and learning rates
stay what they are, and everybody weighs the same. A sum of k like gradients has k times the norm: with the same clip
norm, nearly everyone with several examples would be clipped to it, and contribute no more than by the mean.

The gradient of an example may be the mean over several views of it, as `data.augment.Views` makes them: the row of a
unit, an example or a person, is then the mean over all views of all its examples.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from pubsel.files import sent
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import DenseGradients, Engine, GradientMatrix, examples_at_once

MOST_FACTORS = 1024  # examples of a person whose outer products are summed up at once


def members(people: Tensor, chosen: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return the places of all examples of the chosen people, person by person, and how many each of these has.

    people: int64 [n], how many examples each person has, which are consecutive; chosen: indices of people. None: all.
    """
    if chosen is None:
        return None, people
    # people lie one after another, so each has its examples up to where the next one begins
    starts, sizes = people.cumsum(0)[chosen] - people[chosen], people[chosen]
    before = sizes.cumsum(0) - sizes  # in the result, before each person
    return torch.arange(int(sizes.sum())) + (starts - before).repeat_interleave(sizes), sizes


class Expanding(Protocol):
    """Views of examples, made as they are needed: view j of example i of a unit has the number j + `number` i."""

    @property
    def number(self) -> int: ...  # of each example
    def of(self, x: Tensor, owners: Tensor, numbers: Tensor, /) -> Tensor: ...


class PeopleGradients:
    """Source of G with one row a person from an engine whose rows are examples. sizes: int64 [n], at least 1: x [sum of
    sizes, ...] has the examples of the first person, then those of the second, ... views: of images, if gradients are
    to be those of views; a pass then takes as many views as examples otherwise.

    A row is a function of its person's examples alone, and in one block whole. An example whose gradient is not finite,
    or has a norm of LARGEST or more, counts as zero in the mean. The row is held as it is summed up, with the rounding
    of its own precision, and its norm is computed from what is held, so that cancellation cannot make a clipped row too
    long. Memory does not grow with the number of examples of a person, nor with that of views.
    """

    def __init__(self, inner: Engine, sizes: Tensor, views: Expanding | None = None):
        self.inner, self.sizes, self.views = inner, sizes, views
        self.offsets, self.size = inner.offsets, inner.size

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    @cached_property
    def starts(self) -> Tensor:
        """Return the place of each person's first example, [n]."""
        return self.sizes.cumsum(0) - self.sizes

    def chunk(self, x: Tensor) -> int:
        """Return how many examples of x [n, ...] a pass takes: their rows are written out."""
        written = examples_at_once(self.size, x, next(self.model.parameters()).device)
        return max(1, min(written, self.inner.chunk(x))) if not isinstance(self.inner, LinearGradients) else written

    def blocks(self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None) -> Iterator[GradientMatrix]:
        """Yield G in blocks of at least `rows` people, as far as there are so many; ValueError if x is not theirs. A
        block is gone when the next one is requested."""
        if int(self.sizes.sum()) != len(x) or bool((self.sizes < 1).any()):
            raise ValueError(f"{len(x)} examples are not those of people who have {int(self.sizes.sum())}")

        if isinstance(self.inner, LinearGradients):
            assert self.views is None  # of features there are none
            yield from self._outer_products(self.inner, x, y, rows, dtype)
            return
        at_once = max(rows, self.chunk(x))
        for first in range(0, len(self.sizes), at_once):
            yield self._means(x, y, slice(first, min(first + at_once, len(self.sizes))), dtype)

    def _means(self, x: Tensor, y: Tensor, people: slice, dtype: torch.dtype | None) -> DenseGradients:
        """Return the rows of some people; the passes take examples as they come, whoever they are of."""
        parameter, number = next(self.model.parameters()), 1 if self.views is None else self.views.number
        dtype, device = dtype or parameter.dtype, parameter.device
        sizes, first = number * self.sizes[people], number * int(self.starts[people.start])
        owners = sent(torch.arange(len(sizes)).repeat_interleave(sizes), device)  # of each example, or view

        total = torch.zeros(len(sizes), self.size, dtype=dtype, device=device)
        losses = torch.zeros(len(sizes), dtype=dtype, device=device)
        for start in range(0, len(owners), self.chunk(x)):
            end = min(start + self.chunk(x), len(owners))
            for block in self.inner.blocks(*self._part(x, y, first + start, first + end), dtype=dtype):
                whose = owners[start : start + len(block)]
                total.index_add_(0, whose, block.written_out())
                if block.losses is not None:
                    losses.index_add_(0, whose, block.losses)
                start += len(block)

        # a person weighs as much as any other, however many examples they have
        counts = sent(sizes, device)
        return DenseGradients(total.div_(counts[:, None]), losses / counts)

    def _part(self, x: Tensor, y: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the examples of a pass; with views, view `start` of all up to view `end`."""
        if self.views is None:
            return x[start:end], y[start:end]
        number, places = self.views.number, torch.arange(start, end)
        owners = torch.searchsorted(self.starts, places // number, right=True) - 1
        examples = sent(places // number, x.device)
        return self.views.of(x[examples], owners, places - number * self.starts[owners]), y[examples]

    def _outer_products(
        self, inner: LinearGradients, x: Tensor, y: Tensor, rows: int, dtype: torch.dtype | None
    ) -> Iterator[GradientMatrix]:
        """Yield the rows of a linear classifier: those of people with one example as factors; of k examples, the matrix
        product of k factors, for all with the same k at once."""
        # people with as many examples are one batch of matrix products
        for k in self.sizes.unique().tolist():
            starts = self.starts[self.sizes == k]
            if k == 1:
                alone = sent(starts, x.device)
                yield from inner.blocks(x[alone], y[alone], dtype=dtype)
                continue

            # As many people as their written rows, or their factors, allow.
            width = max(self.size, min(k, MOST_FACTORS) * (x.shape[1] + inner.model.out_features))
            at_once = max(rows, examples_at_once(width, x[:1], inner.model.weight.device))
            for some in starts.split(at_once):
                yield _mean_of_products(inner, x, y, some[:, None] + torch.arange(k), dtype)


def _mean_of_products(
    inner: LinearGradients, x: Tensor, y: Tensor, places: Tensor, dtype: torch.dtype | None
) -> DenseGradients:
    """Return the rows [n, p] of people whose k examples lie at `places` [n, k]: sum_i outer(r_i, x_i) / k, and of the
    bias sum_i r_i / k."""
    n, k = places.shape
    dtype = dtype or inner.model.weight.dtype
    total = torch.zeros(n, inner.size, dtype=dtype, device=x.device)
    losses = torch.zeros(n, dtype=dtype, device=x.device)
    for part in sent(places, x.device).split(MOST_FACTORS, 1):
        factors = inner.matrix(x[part.flatten()], y[part.flatten()], dtype)
        r, a = (values.unflatten(0, part.shape) for values in (factors.r, factors.x))  # [n, k', C], [n, k', d]
        width = r.shape[2] * a.shape[2]
        total[:, :width] += torch.bmm(r.mT, a).flatten(1)
        if factors.bias:
            total[:, width:] += r.sum(1)
        if factors.losses is not None:
            losses += factors.losses.unflatten(0, part.shape).sum(1)
    return DenseGradients(total.div_(k), losses / k)
