"""The matrix of per-example gradients: G [n, p], one row an example, one column a trained parameter.

Rows come from torch.func's vmap of grad, some examples at a time. Every row is made finite on construction, because
NaN times a clip factor of zero is still NaN.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

LARGEST = 1e18  # norm of a row that counts; products with a larger one could overflow float32
NORM_BLOCK = 512  # float32 sums over more entries than this read low; blocks are added in float64


class Basis(NamedTuple):
    """An orthonormal, block-diagonal basis B [p, k]: group i owns rows `slices[i]` and the columns of `blocks[i]`."""

    slices: list[slice]
    blocks: list[Tensor]  # each [p_i, k_i], orthonormal columns

    @property
    def size(self) -> int:
        return sum(block.shape[1] for block in self.blocks)

    def expand(self, w: Tensor) -> Tensor:
        """B w: [k] -> [p]."""
        parts = torch.split(w, [block.shape[1] for block in self.blocks])
        return torch.cat([block @ part for block, part in zip(self.blocks, parts, strict=True)])


class GradientMatrix(Protocol):
    """What algorithms and distances need of G [n, p], whether or not it is ever held."""

    @property
    def dtype(self) -> torch.dtype: ...
    def __len__(self) -> int: ...
    def row_norms(self) -> Tensor: ...  # [n]
    def project(self, basis: Basis) -> Tensor: ...  # [p, k] -> G B, [n, k]
    def combine(self, weights: Tensor) -> Tensor: ...  # [n] or [n, k] -> G^T weights, [p] or [p, k]
    def gram(self) -> Tensor: ...  # G G^T, [n, n]


class DenseGradients:
    """G held as an array. Rows that are not finite, or have a norm of LARGEST or more, count as zero rows."""

    def __init__(self, rows: Tensor, losses: Tensor | None = None):  # [n, p], [n]
        self.rows = rows
        self.losses = losses
        norms = row_norms(rows)
        broken = ~(norms < LARGEST)
        if broken.any():
            rows[broken] = 0
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
        return torch.cat([self.rows[:, s] @ b for s, b in zip(basis.slices, basis.blocks, strict=True)], dim=1)

    def combine(self, weights: Tensor) -> Tensor:  # [p] or [p, k]
        return self.rows.T @ weights

    def gram(self) -> Tensor:  # [n, n]
        return self.rows @ self.rows.T


def row_norms(rows: Tensor) -> Tensor:
    """Euclidean norm of each row [n, p] -> float64 [n], accurate to 1e-6 relative in float32.

    torch.linalg.vector_norm reads rows of 268,000 float32 entries about 5e-6 low, which would clip too little.
    """
    whole = rows.shape[1] // NORM_BLOCK * NORM_BLOCK
    blocks = rows[:, :whole].unflatten(1, (-1, NORM_BLOCK)) if whole else rows[:, :0, None]  # [n, p / 512, 512]
    body = torch.linalg.vector_norm(blocks, dim=2).double().square().sum(1)
    return (body + rows[:, whole:].double().square().sum(1)).sqrt()


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """Factor [n], float64, that brings a row of each norm to at most `bound`: min(1, bound / norm).

    The bound is met with a relative margin of 1e-5, wider than the rounding of norms, factors and products in
    float32, so that rounding clips more, never less.
    """
    return (bound / norms.double().clamp(min=1e-300)).clamp(max=1) * (1 - 1e-5)


def random_labels(source: np.random.Generator, n: int, classes: int, multi_label: bool) -> Tensor:
    """Random classes [n]; for a multi-label task the one-hot rows, float32 [n, classes], of random classes."""
    drawn = torch.from_numpy(source.integers(classes, size=n))
    return nn.functional.one_hot(drawn, classes).float() if multi_label else drawn


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Summed loss: cross-entropy for classes y [n]; binary cross-entropy, mean over labels, for 0/1 y [n, labels]."""
    if y.dim() == logits.dim():
        return nn.functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum") / y.shape[-1]
    return nn.functional.cross_entropy(logits, y, reduction="sum")


class PerExampleGradients:
    """Per-example gradients of one model.

    model: in eval mode, so that an example's gradient is its own. chunk: examples per pass. names: parameters to
    differentiate, in the order of the columns of G; all trainable ones by default. `offsets`: the columns of each.
    """

    def __init__(self, model: nn.Module, chunk: int, names: list[str] | None = None):
        self.model = model
        self.chunk = chunk
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.offsets: dict[str, slice] = {}
        start = 0
        for name in names if names is not None else trained:
            self.offsets[name] = slice(start, start + trained[name].numel())
            start += trained[name].numel()
        self.size = start  # p

    def blocks(self, x: Tensor, y: Tensor) -> Iterator[DenseGradients]:
        """G for x [n, ...], y [n, ...] in blocks of 8 passes, so that memory does not grow with n."""
        rows = 8 * self.chunk
        for xs, ys in zip(x.split(rows), y.split(rows), strict=True):
            if len(xs):
                yield self.matrix(xs, ys)

    def matrix(self, x: Tensor, y: Tensor) -> DenseGradients:
        """G [n, p] for x [n, ...], y [n, ...], held whole."""
        parameter = next(self.model.parameters())
        rows = torch.empty(len(x), self.size, dtype=parameter.dtype, device=parameter.device)
        losses = torch.empty(len(x), dtype=parameter.dtype, device=parameter.device)
        for start in range(0, len(x), self.chunk):
            part = slice(start, start + self.chunk)
            losses[part] = write_gradients(self.model, x[part], y[part], self.offsets, rows[part])
        return DenseGradients(rows, losses)


def write_gradients(model: nn.Module, x: Tensor, y: Tensor, offsets: dict[str, slice], out: Tensor) -> Tensor:
    """Write per-example gradients of the parameters `offsets` at x [n, ...], y [n, ...] into out [n, p]; losses [n]."""
    state = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    trained = {name: state.pop(name) for name in offsets}

    def loss(trained: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        logits = functional_call(model, (trained, state), (xi[None],))
        return loss_of(logits, yi[None])

    grads, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(trained, x, y)
    for name, columns in offsets.items():
        out[:, columns] = grads[name].flatten(1)
    return losses
