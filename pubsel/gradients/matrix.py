"""The matrix of per-example gradients: G [n, p], one row an example, one column a trained parameter.

Rows come from per_example.py, some examples at a time. Every row is made finite on construction, because NaN times a
clip factor of zero is still NaN.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.files import sent
from pubsel.gradients.per_example import GPU_PATCHES, by_layers, by_vmap, why_vmap
from pubsel.messages import say

LARGEST = 1e18  # norm of a row that counts; products with a larger one could overflow float32
CPU_CHUNK, GPU_CHUNK = 256, 500  # examples per pass, at most
GPU_SHARE = 8  # G of a pass takes at most this part of a GPU's memory
CPU_ENTRIES, CPU_PIXELS = 2**23, 2**19  # of G and of x per pass, 32 and 2 MiB: 42 images of 64 pixels
CPU_LARGE = (
    (32, 2**25),
    (16, 2**27),
)  # of a large network: examples per pass, and the most numbers that their G may have
NORM_ROWS = 512  # whose last numbers are converted to float64 at once, 2 MiB
NORM_BLOCK = 512  # float32 sums over more entries than this read low; blocks are added in float64
PRODUCT_BLOCK = 2**14
SUM_ENTRIES = 2**18  # numbers in float64 at once, 2 MiB
GPU_ENTRIES = 2**26  # the same on a GPU, 512 MiB
SUM_BLOCK = 8, 2**15  # rows and columns that are converted to float64 at once, 2 MiB
SLOT = 64  # rows that float32 adds up, at most
TINY = 2e-38  # smaller squares of float32 vanish, and a huge other factor would make them count
LINE = 64  # bytes of a cache line
TOTAL_ENTRIES = 2**19  # of a sum that slots are added to at once
GRAM_BLOCK = 100  # rows; fewer are slower products, more leave more of the lower triangle computed


class Slots(NamedTuple):
    """The rows of a block of G by their slots (slots.py). order: brings the rows of each slot together, None if they
    are; sizes: how many rows each slot then has, at most SLOT, which are added up in float32; all others follow."""

    sizes: list[int]
    order: Tensor | None = None

    def in_order(self, rows: Tensor) -> Tensor:  # [n, ...] -> [n, ...]
        return rows if self.order is None else rows.index_select(0, self.order)


class Basis(NamedTuple):
    """An orthonormal, block-diagonal basis B [p, k]: group i owns rows `slices[i]` and the columns of `blocks[i]`."""

    slices: list[slice]
    blocks: list[Tensor]  # each [p_i, k_i], orthonormal columns

    @property
    def size(self) -> int:
        return sum(block.shape[1] for block in self.blocks)

    def expand(self, w: Tensor) -> Tensor:
        """Return B w: [k] -> [p], in float64 for such w; or each row of [n, k] -> [n, p]."""
        parts = torch.split(w, [block.shape[1] for block in self.blocks], dim=-1)
        if w.dim() == 1 and w.dtype == torch.float64:
            return torch.cat([weighted_sum(b.T, part) for b, part in zip(self.blocks, parts, strict=True)])
        return torch.cat([part @ block.T for block, part in zip(self.blocks, parts, strict=True)], dim=-1)


class GradientMatrix(Protocol):
    """G [n, p] as algorithms and distances need it, whether or not it is ever held. slots: of its rows, if sums over
    private rows may use them."""

    slots: Slots | None

    @property
    def losses(self) -> Tensor | None: ...  # [n]
    @property
    def dtype(self) -> torch.dtype: ...
    def __len__(self) -> int: ...
    def row_norms(self) -> Tensor: ...  # [n]
    def project(self, basis: Basis) -> Tensor: ...  # [p, k] -> G B, [n, k]
    # G^T weights: [n] -> float64 [p], with slots in float32 within each, added to `total` if given; [n, k] -> [p, k],
    # as G is
    def combine(self, weights: Tensor, slots: Slots | None = None, total: Tensor | None = None) -> Tensor: ...
    def gram(self) -> Tensor: ...  # G G^T, [n, n]
    def written_out(self, chosen: Tensor | None = None) -> Tensor: ...  # bool [n] or places [n'] -> [n', p]; None: all
    def scaled_norms(self, scale: Tensor) -> Tensor: ...  # [p] -> norms of the rows of G diag(scale), [n]
    def squared_sum(self) -> Tensor: ...  # sum of the rows of G * G, [p]
    def add_power(self, total: Tensor, columns: slice, b: Tensor) -> None: ...  # total += G_c^T G_c b


class DenseGradients:
    """G held as an array. Rows that are not finite, or have a norm of LARGEST or more, count as zero rows."""

    slots: Slots | None = None

    def __init__(self, rows: Tensor, losses: Tensor | None = None):  # [n, p], [n]
        self.rows = rows
        self.losses = losses
        # NaN times a clip factor of zero is NaN, so a broken row is emptied here, before any sum
        norms = row_norms(rows)
        broken = ~(norms < LARGEST)
        if rows.is_cuda or broken.any():  # a GPU would have to be waited for
            rows.masked_fill_(broken[:, None], 0)
            norms = torch.where(broken, 0, norms)
        self._norms = norms

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def row_norms(self) -> Tensor:  # [n]
        return self._norms

    def project(self, basis: Basis) -> Tensor:  # [n, k]
        return torch.cat([product(self.rows[:, s], b) for s, b in zip(basis.slices, basis.blocks, strict=True)], dim=1)

    def combine(self, weights: Tensor, slots: Slots | None = None, total: Tensor | None = None) -> Tensor:
        return weighted_sum(self.rows, weights, slots, total) if weights.dim() == 1 else self.rows.T @ weights

    def written_out(self, chosen: Tensor | None = None) -> Tensor:  # [n', p]
        return self.rows if chosen is None else self.rows[chosen]

    def scaled_norms(self, scale: Tensor) -> Tensor:  # [n]
        return row_norms(self.rows * scale)

    def squared_sum(self) -> Tensor:  # [p]
        return self.rows.square().sum(0)

    def add_power(self, total: Tensor, columns: slice, b: Tensor) -> None:  # [p_c, k]
        """Add in the precision of the rows; into a total of more precision by way of a copy. Fastest, by half, into a
        total whose columns lie each in one piece."""
        rows = self.rows[:, columns]
        if total.dtype == b.dtype:
            total.T.addmm_((rows @ b).T, rows)
        else:
            total.T.add_((rows @ b).T @ rows)

    def gram(self) -> Tensor:  # [n, n]
        return gram(self.rows)


def weighted_sum(rows: Tensor, weights: Tensor, slots: Slots | None = None, total: Tensor | None = None) -> Tensor:
    """Return rows^T weights for rows [n, p] and float64 weights [n] -> float64 [p], added to `total` if given: every
    product and sum in float64, but for the rows of each slot, which float32 adds up on a CPU if each row begins a cache
    line.

    A sum of n rows of norm at most 1 is off by at most n^2 2^-53, in whatever order they are added (Higham: Accuracy
    and Stability of Numerical Algorithms, 2002, Section 4.2). In float32 it would be n^2 2^-24: one row more could then
    move a sum by far more than its norm, since it changes how the others are rounded.
    """
    if total is None:
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    at_once, width = SUM_BLOCK if not rows.is_cuda else (1, GPU_ENTRIES)
    at_once = max(at_once, (GPU_ENTRIES if rows.is_cuda else SUM_ENTRIES) // max(1, rows.shape[1]))
    in_slots = slots is not None and rows.dtype == torch.float32 and not rows.is_cuda and is_on_lines(rows)
    sizes = slots.sizes if slots is not None and in_slots else at_once
    factors = [each.to(torch.float32 if in_slots else torch.float64, copy=True) for each in weights.split(sizes)]
    # what is converted stays in the cache until it is added
    for columns, part in zip(total.split(width), rows.split(width, 1), strict=True):
        for some, each in zip(part.split(sizes), factors, strict=True):
            if in_slots:
                columns += some.T @ each
            else:
                columns.addmv_(some.double().T, each)
    return total


def add_products(total: Tensor, left: Tensor, weights: Tensor, right: Tensor, slots: Slots | None = None) -> None:
    """Add sum_i weights_i outer(left_i, right_i) to total, float64 [C, d], for left [n, C], float64 weights [n] and
    right [n, d]: in float64, but for the rows of each slot, which float32 adds up."""
    if slots is not None and right.dtype == torch.float32:
        add_slots = _add_slots_at_once if right.is_cuda else _add_slots
        add_slots(total, left, weights, right, slots)
        end = sum(slots.sizes)
        others = slice(end, None) if slots.order is None else slots.order[end:]
        left, weights, right = left[others], weights[others], right[others]

    # what is converted stays in the cache until it is added
    rows = GPU_ENTRIES // max(1, *left.shape[1:], *right.shape[1:])
    rows = rows if right.is_cuda else SUM_ENTRIES // max(1, right.shape[1])
    for some, factors, part in zip(*(each.split(max(1, rows)) for each in (left, weights, right)), strict=True):
        total.addmm_((some * factors[:, None]).T, part.double())


def _add_slots(total: Tensor, left: Tensor, weights: Tensor, right: Tensor, slots: Slots) -> None:
    """Add to total, float64 [C, d], the float32 sum of weights_i outer(left_i, right_i) of each slot."""
    # The sum of a slot must not be rounded by where its rows are: products of the same shape, on memory that begins at
    # the same place of a cache line.
    end, order = sum(slots.sizes), slots.order
    narrow = on_lines(slots.in_order((left.double() * weights[:, None]).float())[:end])
    parts = right[:end].split(slots.sizes) if order is None else [right] * len(slots.sizes)
    places = [None] * len(slots.sizes) if order is None else order[:end].split(slots.sizes)
    is_aligned = is_on_lines(right)

    # rows are copied into the same memory, which stays in the cache, whatever slot they are of
    buffer = right[:0] if order is None and is_aligned else on_lines(right[: max(slots.sizes, default=0)])
    at_once = max(1, TOTAL_ENTRIES // max(1, right.shape[1]))
    for rows, columns in zip(total.split(at_once), narrow.split(at_once, 1), strict=True):
        summed, exact = right.new_empty(rows.shape), torch.empty_like(rows)
        for some, part, chosen in zip(columns.split(slots.sizes), parts, places, strict=True):
            if chosen is not None:
                part = torch.index_select(part, 0, chosen, out=buffer[: len(chosen)])
            elif not is_aligned:
                part = buffer[: len(part)].copy_(part)
            rows += exact.copy_(torch.mm(some.T, part, out=summed))


def _add_slots_at_once(total: Tensor, left: Tensor, weights: Tensor, right: Tensor, slots: Slots) -> None:
    """Add the same on a GPU, many slots at once, each filled up to SLOT rows with zeros: all products have the same
    shape."""
    if not (end := sum(slots.sizes)):
        return
    weighted = torch.mul(left, weights[:, None], out=torch.empty_like(left))  # in float64, of which none is kept
    narrow = torch.cat([slots.in_order(weighted)[:end], left.new_zeros(1, left.shape[1])])
    sizes, within = torch.tensor(slots.sizes, dtype=torch.int64)[:, None], torch.arange(SLOT)
    padded = torch.where(within < sizes, sizes.cumsum(0) - sizes + within, end)  # [slots, SLOT]
    for places in sent(padded, right.device).split(max(1, GPU_PATCHES // (SLOT * right.shape[1] + total.numel()))):
        chosen = places.clamp(max=end - 1)  # what fills a slot up counts as zero
        chosen = chosen if slots.order is None else slots.order[chosen]
        total += torch.bmm(narrow[places].mT, right[chosen]).sum(0, dtype=torch.float64)


def is_on_lines(rows: Tensor) -> bool:
    """Return whether each of rows [n, d] begins a cache line."""
    return (rows.data_ptr() | rows.stride(0) * rows.element_size()) % LINE == 0


def on_lines(rows: Tensor) -> Tensor:
    """Return a copy of rows [n, d] each of which begins a cache line."""
    width = rows.shape[1]
    whole = LINE // rows.element_size()
    return rows.new_empty(len(rows), -(-width // whole) * whole)[:, :width].copy_(rows)


def product(rows: Tensor, b: Tensor) -> Tensor:
    """Return rows b [n, k] of rows [n, p] and b [p, k], in their precision, but for sums over more than PRODUCT_BLOCK
    entries: float32 rounds those of 8 million by up to 2 % of |row| |b|."""
    if len(b) <= PRODUCT_BLOCK:
        return rows @ b
    pieces = zip(rows.split(PRODUCT_BLOCK, 1), b.split(PRODUCT_BLOCK), strict=True)
    total = torch.zeros(len(rows), b.shape[1], dtype=torch.float64, device=rows.device)
    for part, piece in pieces:
        total += part @ piece
    return total.to(rows.dtype)


def gram(rows: Tensor) -> Tensor:
    """Return rows rows^T [n, n], by blocks on and above the diagonal: 2/3 of the time of the whole product for n >=
    500."""
    n = len(rows)
    products = rows.new_empty(n, n)
    for i in range(0, n, GRAM_BLOCK):
        block = rows[i : i + GRAM_BLOCK] @ rows[i:].T  # [<= GRAM_BLOCK, n - i]
        products[i : i + GRAM_BLOCK, i:] = block
        products[i:, i : i + GRAM_BLOCK] = block.T
    return products


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row [n, p] -> float64 [n], accurate to 1e-6 relative in float32.

    torch.linalg.vector_norm reads rows of 268,000 float32 entries about 5e-6 low, which would clip too little.
    """
    # float32 within a block, float64 over the blocks: a float64 copy of all rows would be as large again
    whole = rows.shape[1] // NORM_BLOCK * NORM_BLOCK
    # the rest of a few rows at a time: what is converted stays in the cache
    at_once = GPU_ENTRIES // NORM_BLOCK if rows.is_cuda else NORM_ROWS
    rest = [part.double().square().sum(1) for part in rows[:, whole:].split(at_once)]
    blocks = rows[:, :whole].unflatten(1, (-1, NORM_BLOCK)) if whole else rows[:, :0, None]  # [n, p / 512, 512]
    body = torch.linalg.vector_norm(blocks, dim=2).double().square().sum(1)
    return (body + torch.cat(rest)).sqrt()


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared norms of rows [n, d], float64 [n], read high by what vanishes of them in float32."""
    return row_norms(rows).square() + TINY * rows.shape[1]


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """Return the factor [n], float64, that brings a row of each norm to at most `bound`: min(1, bound / norm).

    The bound is met with a relative margin of 1e-5, wider than the rounding of norms and factors of ONE row, so that
    each row that is summed has norm at most 1. What the rounding of sums adds is `privacy.ROUNDING`.
    """
    return (bound / norms.double().clamp(min=1e-300)).clamp(max=1) * (1 - 1e-5)


def clipped_rows(rows: Tensor, bound: float) -> Tensor:
    """Return rows [n, d], each clipped to L2 norm `bound` and divided by it, float64. A row that is not finite, or has
    a norm of LARGEST or more, counts as zero, so that each has norm at most 1 whatever it contains."""
    finite = DenseGradients(rows.clone())
    factors = clip_factors(finite.row_norms(), bound) / bound
    return finite.rows.double() * factors[:, None]


def random_labels(source: np.random.Generator, n: int, classes: int, multi_label: bool) -> Tensor:
    """Return random classes [n]; for a multi-label task the one-hot rows, float32 [n, classes], of random classes."""
    drawn = torch.from_numpy(source.integers(classes, size=n))
    return nn.functional.one_hot(drawn, classes).float() if multi_label else drawn


@contextmanager
def gpu_precision(precision: str) -> Iterator[None]:
    """Compute with float32 numbers on a GPU as "ieee" or "tf32" (`set_precision`); then as before.

    A command sets ieee when it chooses its device; the loop asks for it again before it touches private data, for
    passes too (`accountant.deviation`). What public data alone decides, a basis or what is trained first, is computed
    in tf32.
    """
    before = [backend.fp32_precision for backend in _backends()]
    set_precision(precision)
    try:
        yield
    finally:
        for backend, kept in zip(_backends(), before, strict=True):
            backend.fp32_precision = kept


def set_precision(precision: str) -> None:
    """Set the precision of matrix products, convolutions and recurrent layers of float32 numbers on a GPU: "ieee" or
    "tf32"."""
    for backend in _backends():
        backend.fp32_precision = precision


def _backends() -> tuple[Any, ...]:
    """Return the parts of torch that have a precision on a GPU."""
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def entries_at_once(device: torch.device) -> int:
    """Return the numbers of G per pass: what a cache holds, or a part of a GPU's memory, whatever is free of it:
    rounding depends on it."""
    if device.type == "cpu":
        return CPU_ENTRIES
    return int(torch.cuda.mem_get_info(device)[1]) // (4 * GPU_SHARE)


def examples_at_once(size: int, x: Tensor, device: torch.device) -> int:
    """Return the examples of x [n, ...] per pass if each leaves `size` numbers."""
    fits, most = entries_at_once(device) // max(1, size), GPU_CHUNK
    if device.type == "cpu":
        # gradients of a large network fit in no cache anyway, and its layers are slow on a few examples
        fits = max(fits, *(min(few, entries // max(1, size)) for few, entries in CPU_LARGE))
        fits, most = min(fits, CPU_PIXELS // max(1, x[:1].numel())), CPU_CHUNK
    return min(most, max(8, fits))


class Engine(Protocol):
    """Source of G at the current weights of `model`. offsets: the columns of each trained parameter, `size` in all."""

    offsets: dict[str, slice]
    size: int

    @property
    def model(self) -> nn.Module: ...
    def chunk(self, x: Tensor) -> int: ...
    def blocks(
        self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None
    ) -> Iterator[GradientMatrix]: ...


@cache
def say_once(text: str) -> None:
    """Print a message the first time."""
    say(text)


class PerExampleGradients:
    """Per-example gradients of one model.

    model: in eval mode, so that an example's gradient is its own. One that pools on a CPU is brought to channels last:
    max-pooling takes as long as the convolutions otherwise. chunk: examples per pass; by default what a cache holds, or
    keeps a GPU busy. names: parameters to differentiate, in the order of the columns of G; all trainable ones by
    default. `offsets`: the columns of each.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None, names: list[str] | None = None):
        self.model = model
        if not next(model.parameters()).is_cuda and any(isinstance(m, nn.MaxPool2d) for m in model.modules()):
            model.to(memory_format=torch.channels_last)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.offsets: dict[str, slice] = {}
        start = 0
        for name in names if names is not None else trained:
            self.offsets[name] = slice(start, start + trained[name].numel())
            start += trained[name].numel()
        self.size = start  # p
        self._given = chunk
        self._by_layers: bool | None = None  # decided at the first call, which shows the shape of the data
        self._scratch: Tensor | None = None

    def chunk(self, x: Tensor) -> int:
        """Return the examples of x [n, ...] per pass."""
        if self._given:
            return self._given
        return examples_at_once(self.size, x, next(self.model.parameters()).device)

    def most(self, x: Tensor) -> int:
        """Return the examples of x [n, ...] per block, unless more are requested."""
        return self.chunk(x)

    def blocks(self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None) -> Iterator[DenseGradients]:
        """Yield G for x [n, ...], y [n, ...] in blocks of at least `rows` examples, a whole number of passes.

        All blocks lie in the same memory, which does not grow with n and is kept for the next call: a block is gone
        when the next one is requested. dtype: of passes and G; that of the model by default.
        """
        dtype = dtype or next(self.model.parameters()).dtype
        chunk = self.chunk(x)
        # a block is a whole number of passes, so that no pass is cut in two
        rows = -(-rows // chunk) * chunk
        for xs, ys in zip(x.split(rows), y.split(rows), strict=True):
            if len(xs):
                yield self._fill(self._memory(len(xs), dtype), xs, ys)

    def matrix(self, x: Tensor, y: Tensor) -> DenseGradients:
        """Return G [n, p] for x [n, ...], y [n, ...], held whole, in memory of its own."""
        parameter = next(self.model.parameters())
        return self._fill(torch.empty(len(x), self.size, dtype=parameter.dtype, device=parameter.device), x, y)

    def _fill(self, rows: Tensor, x: Tensor, y: Tensor) -> DenseGradients:
        gradients = by_layers if self.from_layers(x, y) else by_vmap
        model, x = self.in_precision(rows.dtype, x)
        losses = torch.empty(len(x), dtype=rows.dtype, device=rows.device)
        shapes = {name: model.get_parameter(name).shape for name in self.offsets}
        chunk = self.chunk(x)
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            out = {name: rows[part, self.offsets[name]].view(-1, *shape) for name, shape in shapes.items()}
            losses[part] = gradients(model, x[part], y[part], out)
        return DenseGradients(rows, losses)

    def from_layers(self, x: Tensor, y: Tensor) -> bool:
        """Return whether the gradients come from the outputs of layers: decided once, by data like x [n, ...], y [n,
        ...]."""
        if self._by_layers is None:
            reason = why_vmap(self.model, x, y, list(self.offsets))
            if reason is not None:
                say_once(f"gradients of examples come from torch.func.vmap, which is slower: {reason}")
            self._by_layers = reason is None
        return self._by_layers

    def in_precision(self, dtype: torch.dtype, x: Tensor) -> tuple[nn.Module, Tensor]:
        """Return the model, and x, for passes in `dtype`."""
        if dtype == next(self.model.parameters()).dtype:
            return self.model, x
        return copy.deepcopy(self.model).to(dtype), x.to(dtype) if x.is_floating_point() else x

    def _memory(self, n: int, dtype: torch.dtype, width: int | None = None) -> Tensor:
        """Return [n, width] of the scratch memory, p wide by default, each row at the beginning of a cache line; pages
        that are touched for the first time cost as much as a backward pass."""
        device, width = next(self.model.parameters()).device, self.size if width is None else width
        kept = self._scratch
        if kept is None or len(kept) < n or kept.shape[1] != width or kept.dtype != dtype:
            self._scratch = kept = None
            whole = LINE // dtype.itemsize
            lines = torch.empty(n, -(-width // whole) * whole, dtype=dtype, device=device)
            # products in bfloat16 read what follows a row too, times zero: it must be finite
            lines[:, width:] = 0
            self._scratch = kept = lines[:, :width]
        return kept[:n]
