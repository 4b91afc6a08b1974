"""Per-example gradients that are never written out: wide layers are kept as inputs and errors (book-keeping; Bu, Wang,
Zha, Karypis: Differentially Private Optimization on Large Model at Small Cost, 2023, arXiv:2210.00038)."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pubsel.gradients.matrix import (
    GPU_ENTRIES,
    LARGEST,
    DenseGradients,
    GradientMatrix,
    PerExampleGradients,
    Slots,
    add_products,
    entries_at_once,
    examples_at_once,
    row_norms,
    squared_norms,
    weighted_sum,
)
from pubsel.gradients.per_example import Factors, by_layers, wide_layers

NORM_ENTRIES = 2**20  # of factors that are converted to float64 at once, 8 MiB
SLACK = 2**-40  # far above the rounding of float64 sums, far below what changes a result


class KeptInputs(NamedTuple):
    """A layer whose gradients are not written out: that of example i is sum_t outer(e_it, a_it) [b, a], and sum_t e_it
    for its bias; t goes over tokens, or over the positions of a convolution. weight, bias: their columns of G."""

    weight: slice
    bias: slice | None
    a: Tensor  # [n, t, a], its inputs, of a convolution their patches
    e: Tensor  # [n, t, b], the gradients of its outputs

    def squared_norms(self) -> Tensor:
        """Return those of the layer's part of each row, float64 [n]: sum_st (a_s . a_t + 1) (e_s . e_t), 1 for a bias.
        In float64: squares of small float32 numbers vanish, and a huge other factor would make them count.

        The terms of several positions may cancel, and leave of the sum what rounding made of them: SLACK of the square
        of sum_t |a_t| |e_t| is added, so that no norm is read too small, and so that a row, whose float64 sum over
        positions is off by 2^-53 t sum_t |a_t| |e_t|, is off by less than 1e-8 once it is clipped to norm 1.
        """
        bias = 0.0 if self.bias is None else 1.0
        squares = []
        entries = GPU_ENTRIES if self.a.is_cuda else NORM_ENTRIES
        at_once = max(1, entries // (self.a.shape[1] * max(self.a.shape[2], self.e.shape[2])))
        for a, e in zip(self.a.split(at_once), self.e.split(at_once), strict=True):
            e = e.double()
            if a.shape[1] == 1:
                squares.append((squared_norms(a.squeeze(1)) + bias) * e.squeeze(1).square().sum(1))
                continue
            a = a.double()
            terms = (a.square().sum(2) + bias) * e.square().sum(2)  # [n, t]
            # the squared norm of a sum of outer products needs only products of inputs and of errors
            whole = ((a @ a.mT + bias) * (e @ e.mT)).sum((1, 2)).clamp(min=0)
            squares.append(whole + SLACK * terms.sqrt().sum(1).square())
        return torch.cat(squares)

    def add_sum(self, total: Tensor, weights: Tensor, slots: Slots | None) -> None:
        """Add the layer's columns of G^T weights, weights float64 [n], to total, float64 [p]: of one position as
        `add_products` does, of several in float64."""
        t, b, a = self.a.shape[1], self.e.shape[2], self.a.shape[2]
        e, every = self.e.flatten(0, 1), weights.repeat_interleave(t)  # [n t, b], [n t]
        add_products(total[self.weight].view(b, a), e, every, self.a.flatten(0, 1), slots if t == 1 else None)
        if self.bias is not None:
            total[self.bias] += weighted_sum(e, every)

    def write(self, rows: Tensor) -> None:
        """Write the layer's columns of G into rows [n, p]."""
        b, a = self.e.shape[2], self.a.shape[2]
        torch.bmm(self.e.mT, self.a, out=rows[:, self.weight].unflatten(1, (b, a)))
        if self.bias is not None:
            torch.sum(self.e, 1, out=rows[:, self.bias])

    def without(self, broken: Tensor) -> "KeptInputs":
        """Return it with zero rows for the examples that are broken, bool [n]."""
        a, e = (part.masked_fill(broken[:, None, None], 0) for part in (self.a, self.e))
        return self._replace(a=a, e=e)


class LayeredGradients(DenseGradients):
    """G by layers: wide ones are kept as factors, and written out only for what needs all columns at once (`rows`).

    narrow [n, p']: what is written out, and `columns`, where in G. A step of DP-SGD asks for norms and for one weighted
    sum: of a layer [b, a] it then writes n (a + b) numbers in place of n a b (Bu et al. 2023, arXiv:2210.00038).
    Rows that are not finite, or have a norm of LARGEST or more, count as zero rows.
    """

    def __init__(
        self, narrow: Tensor, columns: list[slice], kept: list[KeptInputs], size: int, losses: Tensor | None = None
    ):
        # one norm for a whole row, over what is written out and what is kept as factors
        squares = row_norms(narrow).square()
        for layer in kept:
            squares = squares + layer.squared_norms()
        norms = squares.sqrt()
        broken = ~(norms < LARGEST)
        if narrow.is_cuda or broken.any():  # a GPU would have to be waited for
            narrow, kept = narrow.masked_fill_(broken[:, None], 0), [layer.without(broken) for layer in kept]
            norms = torch.where(broken, 0, norms)
        self.narrow, self.columns, self.kept, self.size, self.losses = narrow, columns, kept, size, losses
        self._norms = norms

    @cached_property
    def rows(self) -> Tensor:  # type: ignore[override]
        """Return all columns [n, p], written out once, since several things need them of one block."""
        rows = self.narrow.new_empty(len(self), self.size)
        parts = self.narrow.split([part.stop - part.start for part in self.columns], 1)
        for columns, part in zip(self.columns, parts, strict=True):
            rows[:, columns] = part
        for layer in self.kept:
            layer.write(rows)
        return rows

    @property
    def dtype(self) -> torch.dtype:
        return self.narrow.dtype

    def __len__(self) -> int:
        return len(self.narrow)

    def combine(self, weights: Tensor, slots: Slots | None = None, total: Tensor | None = None) -> Tensor:
        # several sums at once are rare, and faster with all columns at hand
        if weights.dim() == 2:
            return super().combine(weights)
        if total is None:
            total = torch.zeros(self.size, dtype=torch.float64, device=self.narrow.device)
        parts = weighted_sum(self.narrow, weights, slots).split([part.stop - part.start for part in self.columns])
        for columns, part in zip(self.columns, parts, strict=True):
            total[columns] += part
        for layer in self.kept:
            layer.add_sum(total, weights.double(), slots)
        return total


class BookKeeping(PerExampleGradients):
    """Per-example gradients whose wide layers are kept as factors, if there are any and by_layers knows the
    network; for trainings, whose steps ask for little more than norms and one weighted sum."""

    _wide: dict[str, int] | None = None  # numbers of an example by layer; decided at the first call

    def wide(self, x: Tensor, y: Tensor) -> dict[str, int]:
        """Return the layers that are kept as factors, with the numbers that they keep of an example."""
        if self._wide is None:
            known = self.from_layers(x, y)
            self._wide = wide_layers(self.model, x, list(self.offsets)) if known else {}
        return self._wide

    def numbers(self) -> int:
        """Return how many numbers an example leaves."""
        assert self._wide is not None
        columns = [part for name, part in self.offsets.items() if name.rpartition(".")[0] not in self._wide]
        return sum(part.stop - part.start for part in columns) + sum(self._wide.values())

    def chunk(self, x: Tensor) -> int:
        """Return how many examples of x [n, ...] a pass takes."""
        if self._given or not self._wide:
            return super().chunk(x)
        # factors take far less memory than gradients, so a pass can take more examples
        return examples_at_once(self.numbers(), x, next(self.model.parameters()).device)

    def most(self, x: Tensor) -> int:
        """Return the examples of x [n, ...] per block: what several passes keep is summed at once."""
        if self._given or not self._wide:
            return self.chunk(x)
        return max(self.chunk(x), entries_at_once(next(self.model.parameters()).device) // self.numbers())

    def blocks(  # type: ignore[override] # of another kind than those of PerExampleGradients
        self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None
    ) -> Iterator[GradientMatrix]:
        """Yield G as PerExampleGradients does. A block is gone when the next one is requested."""
        if not len(x) or not self.wide(x, y):
            yield from super().blocks(x, y, rows, dtype)
            return
        chunk = self.chunk(x)
        rows = max(-(-rows // chunk), self.most(x) // chunk) * chunk
        for xs, ys in zip(x.split(rows), y.split(rows), strict=True):
            yield self._layered(xs, ys, dtype or next(self.model.parameters()).dtype)

    def _layered(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> LayeredGradients:
        """Return G for x [n, ...], y [n, ...], in passes of chunk(x)."""
        # narrow layers and single parameters are written out into the columns of one matrix
        wide = self.wide(x, y)
        names = [name for name in self.offsets if name.rpartition(".")[0] not in wide]
        columns = [self.offsets[name] for name in names]
        widths = [part.stop - part.start for part in columns]
        rows = self._memory(len(x), dtype, sum(widths))
        model, x = self.in_precision(dtype, x)
        shapes = [model.get_parameter(name).shape for name in names]

        losses = torch.empty(len(x), dtype=dtype, device=rows.device)
        passes: list[dict[str, Factors]] = []
        chunk = self.chunk(x)
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            pieces = zip(names, rows[part].split(widths, 1), shapes, strict=True)
            out = {name: piece.view(-1, *shape) for name, piece, shape in pieces}
            # by_layers puts the factors of this pass in the place of NOTHING
            keep = dict.fromkeys(wide, NOTHING)
            losses[part] = by_layers(model, x[part], y[part], out, keep)
            passes.append(keep)
        # the factors of a layer, of all passes together; those of one pass as they are
        kept = []
        for owner in wide:
            factors = [keep.pop(owner) for keep in passes]
            a, e = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*factors, strict=True))
            a, e = (part.reshape(len(part), -1, part.shape[-1]) for part in (a, e))
            kept.append(KeptInputs(self.offsets[f"{owner}.weight"], self.offsets.get(f"{owner}.bias"), a, e))
        return LayeredGradients(rows, columns, kept, self.size, losses)


NOTHING: Factors = (torch.empty(0), torch.empty(0))
