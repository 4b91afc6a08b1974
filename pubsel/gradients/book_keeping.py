"""Per-example gradients that are never written out: wide layers are kept as inputs and errors (book-keeping; Bu, Wang,
Zha, Karypis: Differentially Private Optimization on Large Model at Small Cost, 2023, arXiv:2210.00038)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pubsel.gradients.matrix import (
    LARGEST,
    Basis,
    DenseGradients,
    GradientMatrix,
    PerExampleGradients,
    examples_at_once,
    row_norms,
    weighted_sum,
)
from pubsel.gradients.per_example import Factors, by_layers, wide_layers

SLACK = 2**-40  # far above the rounding of float64 sums, far below what changes a result
FACTOR_ENTRIES = 2**18  # of a layer's inputs that are converted to float64 at once, 2 MiB


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
        t = self.a.shape[1]
        a, e = self.a.double(), self.e.double()
        terms = (a.square().sum(2) + bias) * e.square().sum(2)  # [n, t]
        if t == 1:
            return terms.squeeze(1)
        # the squared norm of a sum of outer products needs only products of inputs and of errors
        whole = ((a @ a.mT + bias) * (e @ e.mT)).sum((1, 2)).clamp(min=0)
        return whole + SLACK * terms.sqrt().sum(1).square()

    def add_sum(self, total: Tensor, weights: Tensor) -> None:
        """Add the layer's columns of G^T weights, weights float64 [n], to total, float64 [p], in float64."""
        b, a = self.e.shape[2], self.a.shape[2]
        sums = total[self.weight].view(b, a)
        at_once = max(1, FACTOR_ENTRIES // max(1, self.a[:1].numel())) if not self.a.is_cuda else len(self.a)
        for inputs, errors, factors in zip(*(part.split(at_once) for part in (self.a, self.e, weights)), strict=True):
            weighted = (errors.double() * factors[:, None, None]).flatten(0, 1)  # [n' t, b]
            sums.addmm_(weighted.T, inputs.double().flatten(0, 1))
            if self.bias is not None:
                total[self.bias] += weighted.sum(0)

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


class LayeredGradients:
    """G by layers: wide ones are kept as factors, and written out only for what needs all columns at once.

    rows [n, p']: what is written out, and `columns`, where in G. A step of DP-SGD asks for norms and for one weighted
    sum: of a layer [b, a] it then writes n (a + b) numbers in place of n a b (Bu et al. 2023, arXiv:2210.00038).
    Rows that are not finite, or have a norm of LARGEST or more, count as zero rows.
    """

    def __init__(
        self, rows: Tensor, columns: list[slice], kept: list[KeptInputs], size: int, losses: Tensor | None = None
    ):
        # one norm for a whole row, over what is written out and what is kept as factors
        squares = row_norms(rows).square()
        for layer in kept:
            squares = squares + layer.squared_norms()
        norms = squares.sqrt()
        broken = ~(norms < LARGEST)
        if rows.is_cuda or broken.any():  # a GPU would have to be waited for
            rows, kept = rows.masked_fill(broken[:, None], 0), [layer.without(broken) for layer in kept]
            norms = torch.where(broken, 0, norms)
        self.rows, self.columns, self.kept, self.size, self.losses = rows, columns, kept, size, losses
        self._norms = norms
        self._dense: DenseGradients | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def row_norms(self) -> Tensor:  # [n]
        return self._norms

    def combine(self, weights: Tensor) -> Tensor:  # [p] or [p, k]
        # several sums at once are rare, and faster with all columns at hand
        if weights.dim() == 2:
            return self.dense().combine(weights)
        total = torch.zeros(self.size, dtype=torch.float64, device=self.rows.device)
        parts = weighted_sum(self.rows, weights).split([part.stop - part.start for part in self.columns])
        for columns, part in zip(self.columns, parts, strict=True):
            total[columns] = part
        for layer in self.kept:
            layer.add_sum(total, weights.double())
        return total

    def dense(self) -> DenseGradients:
        """Return the same with all columns written out."""
        # written out once, since a block is asked for several such things
        if self._dense is None:
            rows = self.rows.new_empty(len(self.rows), self.size)
            parts = self.rows.split([part.stop - part.start for part in self.columns], 1)
            for columns, part in zip(self.columns, parts, strict=True):
                rows[:, columns] = part
            for layer in self.kept:
                layer.write(rows)
            self._dense = DenseGradients(rows, self.losses)
        return self._dense

    def project(self, basis: Basis) -> Tensor:  # [n, k]
        return self.dense().project(basis)

    def written_out(self, chosen: Tensor | None = None) -> Tensor:  # [n', p]
        return self.dense().written_out(chosen)

    def scaled_norms(self, scale: Tensor) -> Tensor:  # [n]
        return self.dense().scaled_norms(scale)

    def squared_sum(self) -> Tensor:  # [p]
        return self.dense().squared_sum()

    def add_power(self, total: Tensor, columns: slice, b: Tensor) -> None:
        self.dense().add_power(total, columns, b)

    def gram(self) -> Tensor:  # [n, n]
        return self.dense().gram()


class BookKeeping(PerExampleGradients):
    """Per-example gradients whose wide layers are kept as factors, if there are any and by_layers knows the
    network; for trainings, whose steps ask for little more than norms and one weighted sum."""

    def __init__(self, model: nn.Module, chunk: int | None = None, names: list[str] | None = None):
        super().__init__(model, chunk, names)
        self._wide: dict[str, int] | None = None  # numbers of an example by layer; decided at the first call

    def wide(self, x: Tensor, y: Tensor) -> dict[str, int]:
        """Return the layers that are kept as factors, with the numbers that they keep of an example."""
        if self._wide is None:
            known = self.from_layers(x, y)
            self._wide = wide_layers(self.model, x, list(self.offsets)) if known else {}
        return self._wide

    def chunk(self, x: Tensor) -> int:
        """Return how many examples of x [n, ...] a pass takes."""
        if self._given or not self._wide:
            return super().chunk(x)
        # factors take far less memory than gradients, so a pass can take more examples
        columns = [part for name, part in self.offsets.items() if name.rpartition(".")[0] not in self._wide]
        size = sum(part.stop - part.start for part in columns) + sum(self._wide.values())
        return examples_at_once(size, x, next(self.model.parameters()).device)

    def blocks(  # type: ignore[override] # of another kind than those of PerExampleGradients
        self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None
    ) -> Iterator[GradientMatrix]:
        """Yield G as PerExampleGradients does. A block is gone when the next one is asked for."""
        if not len(x) or not self.wide(x, y):
            yield from super().blocks(x, y, rows, dtype)
            return
        chunk = self.chunk(x)
        rows = -(-rows // chunk) * chunk
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
        return LayeredGradients(rows, columns, [self._kept(owner, passes) for owner in wide], self.size, losses)

    def _kept(self, owner: str, passes: list[dict[str, Factors]]) -> KeptInputs:
        """Join a layer's factors of all passes."""
        a, e = (torch.cat([factors[owner][i] for factors in passes]) for i in (0, 1))
        a, e = (part.reshape(len(part), -1, part.shape[-1]) for part in (a, e))
        return KeptInputs(self.offsets[f"{owner}.weight"], self.offsets.get(f"{owner}.bias"), a, e)


NOTHING: Factors = (torch.empty(0), torch.empty(0))
