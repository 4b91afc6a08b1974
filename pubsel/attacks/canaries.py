"""White-box canaries: gradients of an adversary among those of the private examples, in the training loop itself.

A canary is a row of private data whose gradient the adversary chooses at each step: one entry, or a dense vector, of a
magnitude from a thousandth of the clip norm to ten thousand times it. `WithCanaries` wraps the engine of per-example
gradients and writes the canaries into its blocks, each at its place among the real rows. From then on a canary is an
example like any other: training.fit samples it, the algorithm clips and sums it, the loop adds noise.
attacks/witness.py observes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pubsel.data import Split, Task
from pubsel.gradients.book_keeping import LayeredGradients
from pubsel.gradients.factored import FactoredGradients, LinearGradients
from pubsel.gradients.matrix import DenseGradients, Engine, GradientMatrix, entries_at_once

# Norms of gradients in units of the norm at which clipping begins. Most are huge: those are easiest to recognise.
MAGNITUDES = (1e4, 1e4, 1e2, 1e3, 1e4, 1e0, 1e2, 1e4, 1e1, 1e3, 1e4, 1e-3)
COPIES = 10  # of one example, for a canary that is a person
SHARE = 8.0  # norm of a canary's features: a bias, which canaries of a class share, then adds 1/64 to its square
HUGE = 1e2  # a canary of at least this magnitude is certainly clipped, so that it adds as much as any example can


class Canaries(NamedTuple):
    """m canaries; the even ones are dense, the odd ones have one entry.

    columns: [m], the column of G with the entry. magnitudes: [m]. included: [m], the coins. places: [included ones],
    rows of the joined data.
    """

    columns: Tensor
    magnitudes: Tensor
    included: Tensor
    places: Tensor
    seed: int  # of the dense ones

    def join(self, private: Split) -> Split:
        """Return private examples with blank ones at `places`, and labels for the engine alone: -1 - i for row i."""
        # a blank row holds the place of a canary, so that sampling treats it like any other
        n = len(private.x) + len(self.places)
        x = private.x.new_zeros(n, *private.x.shape[1:])
        x[self.others(n)] = private.x
        y = (-1 - torch.arange(n)).to(private.y.dtype if private.y.is_floating_point() else torch.int64)
        return Split(x, y.view(-1, *[1] * (private.y.dim() - 1)).expand(-1, *private.y.shape[1:]))

    def others(self, n: int) -> Tensor:
        """Return the rows of the n that are no canaries, [n - included ones]."""
        real = torch.ones(n, dtype=torch.bool)
        real[self.places] = False
        return real.nonzero().flatten()


def draw_canaries(m: int, size: int, n: int, random: np.random.Generator) -> Canaries:
    """Draw m canaries among `size` parameters, each included with probability 1/2, mixed among n real examples."""
    included = random.random(m) < 0.5
    places = np.sort(random.permutation(n + included.sum())[: included.sum()])
    columns = np.resize(random.permutation(size), m)
    # the magnitudes in turn, for dense canaries and for those with one entry alike
    magnitudes = np.array(MAGNITUDES)[np.arange(m) // 2 % len(MAGNITUDES)]
    arrays = [torch.from_numpy(a) for a in (columns, magnitudes, included, random.permutation(places))]
    return Canaries(arrays[0], arrays[1], arrays[2], arrays[3], int(random.integers(2**31)))


class WithCanaries:
    """An engine that computes the gradients of canaries itself, and those of all other examples by `inner`.

    private: the real examples, whose labels it finds by their rows. scales: factors on the magnitudes of dense canaries
    and of those with one entry; the witness sets them at each step. whose: [n], the canary of each row, or -1.
    """

    def __init__(self, inner: Engine, canaries: Canaries, private: Split):
        self.inner, self.canaries = inner, canaries
        self.offsets, self.size = inner.offsets, inner.size
        self._latest = torch.zeros(0, dtype=torch.int64)  # rows of the latest block that nobody has requested yet
        self.scales = torch.ones(2, dtype=torch.float64)
        self.n = len(private.x) + len(canaries.places)
        self.whose = torch.full((self.n,), -1)
        self.whose[canaries.places] = canaries.included.nonzero().flatten()
        self._labels = private.y.new_zeros(self.n, *private.y.shape[1:])
        self._labels[canaries.others(self.n)] = private.y
        self._dense: list[Tensor] | None = None

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def chunk(self, x: Tensor) -> int:
        return self.inner.chunk(x)

    def next_rows(self, n: int) -> Tensor:
        """Return the rows of the joined data that the next n rows of the latest block are, [n]."""
        rows, self._latest = self._latest[:n], self._latest[n:]
        return rows

    def blocks(self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None) -> Iterator[GradientMatrix]:
        """Yield the blocks of `inner` for x [n, ...], y [n, ...], with the canaries written into their rows."""
        # labels of rows are negative: public examples, which have labels of their own, pass as they are
        labels = y if y.dim() == 1 else y[:, 0]
        public = not bool((labels < 0).any())
        indices = (-1 - labels).long().cpu()
        start = 0
        for block in self.inner.blocks(x, y if public else self._labels[indices].to(x.device), rows, dtype):
            block = DenseGradients(block.rows, block.losses) if isinstance(block, LayeredGradients) else block
            if not public:
                self._latest = indices[start : start + len(block)]
                start += len(block)
                block = self._written(block, self.whose[self._latest])
            yield block

    def _written(self, block: GradientMatrix, chosen: Tensor) -> GradientMatrix:
        """Return the block [n, p] with the canary `chosen` [n] in each row that is one, not -1."""
        here = (chosen >= 0).nonzero().flatten()
        if not len(here):
            return block

        # the rows of canaries are written over, those of other examples stay
        arrays = []
        for old, new in zip(arrays_in(block), self._arrays(chosen[here], block.dtype), strict=True):
            array = old if isinstance(block, DenseGradients) else old.clone()  # factors may be the data themselves
            array[here.to(array.device)] = new
            arrays.append(array)
        return with_arrays(block, arrays, block.losses)

    def rows(self, chosen: Tensor, dtype: torch.dtype | None = None) -> Iterator[tuple[Tensor, GradientMatrix]]:
        """Yield the canaries `chosen` [n], some at a time: their indices and their gradients."""
        dtype = dtype or next(self.model.parameters()).dtype
        for some in chosen.split(max(8, entries_at_once(next(self.model.parameters()).device) // self.size)):
            arrays = self._arrays(some, dtype)
            if isinstance(self.inner, LinearGradients):
                yield some, FactoredGradients(arrays[0], arrays[1], self.inner.model.bias is not None)
            else:
                yield some, DenseGradients(arrays[0])

    def _arrays(self, chosen: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the arrays of the gradients of the canaries `chosen` [n]: [n, p], or [n, C] and [n, d]. Their norm is
        the magnitude times the scale; a bias adds to it."""
        device = next(self.model.parameters()).device
        scales = self.scales[torch.arange(len(self.canaries.columns)) % 2]
        norms = (self.canaries.magnitudes * scales)[chosen].to(device, dtype)[:, None]
        single = chosen % 2 == 1
        columns = self.canaries.columns[chosen]

        if not isinstance(self.inner, LinearGradients):
            (whole,) = self._directions(device, dtype, self.size)
            rows = torch.zeros(len(chosen), self.size, dtype=dtype, device=device)
            for row, i in zip(rows, chosen.tolist(), strict=True):
                if i % 2 == 0:
                    row.copy_(whole.roll(i))
            rows[single.to(device), columns[single].to(device)] = 1
            return (rows * norms,)

        # a linear classifier: the gradient is the outer product of r and x
        c, d = self.inner.model.weight.shape
        whole_r, whole_x = self._directions(device, dtype, c, d)
        r, x = torch.zeros(len(chosen), c).to(norms), torch.zeros(len(chosen), d).to(norms)
        for k, i in enumerate(chosen.tolist()):
            if i % 2 == 0:
                r[k], x[k] = whole_r.roll(i // 2), whole_x.roll(i // 2 // c)
        columns = (columns[single] % (c * d)).to(device)
        r[single.to(device), columns // d] = 1
        x[single.to(device), columns % d] = 1
        return r * norms / SHARE, x * SHARE

    def apart(self, chosen: Tensor) -> Tensor:
        """Return the first canary of each direction among `chosen` [n], in order. A small model has fewer directions
        than there are canaries, and those of one direction are not independent trials: the same noise hides them."""
        wide = self.inner.model.weight.numel() if isinstance(self.inner, LinearGradients) else self.size
        numbers = chosen // 2 if isinstance(self.inner, LinearGradients) else chosen  # how far a dense one is turned
        single = chosen % 2 == 1
        kinds = torch.where(single, wide + self.canaries.columns[chosen] % wide, numbers % wide)
        _, first = np.unique(kinds.numpy(), return_index=True)
        return chosen[torch.from_numpy(np.sort(first))]

    def _directions(self, device: torch.device, dtype: torch.dtype, *sizes: int) -> list[Tensor]:
        """Return random unit vectors of these sizes. Dense canaries are rotations of them, nearly orthogonal."""
        if self._dense is None:
            random = np.random.default_rng(self.canaries.seed)
            drawn = [torch.from_numpy(random.standard_normal(size)) for size in sizes]
            self._dense = [nn.functional.normalize(values, dim=0) for values in drawn]
        return [values.to(device, dtype) for values in self._dense]


def arrays_in(block: GradientMatrix) -> tuple[Tensor, ...]:
    """Return the arrays of a block of rows: [n, p], or factors [n, C] and [n, d]."""
    if isinstance(block, FactoredGradients):
        return block.r, block.x
    assert isinstance(block, DenseGradients)
    return (block.rows,)


def with_arrays(like: GradientMatrix, arrays: Sequence[Tensor], losses: Tensor | None = None) -> GradientMatrix:
    """Return a block of the same kind as `like`, of other rows."""
    if isinstance(like, FactoredGradients):
        return FactoredGradients(arrays[0], arrays[1], like.bias, losses)
    return DenseGradients(arrays[0], losses)


def distinct(task: Task, m: int, random: np.random.Generator) -> tuple[Split, NDArray[np.bool_], Task]:
    """Return black-box canaries, m examples of noise with random labels; their coins; and the task with the included
    ones after its private examples. If it has people, a canary is a person with COPIES of the example: a program that
    protects single examples would let it count COPIES times.

    A network remembers noise far better than wrong labels of real images, which other examples contradict. The values
    of images are 0 or the largest one; those of features are normal, with their deviation.
    """
    # examples that no network expects: their labels can only be remembered
    x, y = task.private
    shape = (m, *x.shape[1:])
    if x.is_floating_point():
        noise = torch.from_numpy(random.standard_normal(shape)).to(x.dtype) * x.std()
    else:
        noise = (torch.from_numpy(random.integers(0, 2, shape)) * torch.iinfo(x.dtype).max).to(x.dtype)
    classes = task.classes if y.dim() == 1 else 2
    labels = torch.from_numpy(random.integers(0, classes, (m, *y.shape[1:]))).to(y.dtype)
    included = random.random(m) < 0.5
    coins, people = torch.from_numpy(included), task.people
    rows = coins.nonzero().flatten()
    # a program that protects single examples would let a person count once per copy
    if people is not None:
        people = torch.cat([people, torch.full_like(rows, COPIES)])
        rows = rows.repeat_interleave(COPIES)
    private = Split(torch.cat([x, noise[rows]]), torch.cat([y, labels[rows]]))
    return Split(noise, labels), included, task._replace(private=private, people=people)
