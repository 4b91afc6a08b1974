"""Per-example gradients of a linear classifier without an [n, p] array.

The gradient of example i is outer(r_i, x_i): r_i, the gradient at its logits, and x_i, its features; and r_i itself for
the bias. Norms, projections and weighted sums of such rows are matrix products of R [n, C] and X [n, d].
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pubsel.gradients.matrix import LARGEST, Basis, Slots, add_products, squared_norms

BLOCK = 2**16  # examples at once; memory is BLOCK x C, and for conditioned norms BLOCK x d in float64


class FactoredGradients:
    """G [n, p] with rows (outer(r_i, x_i), r_i), p = C d, and C more for a bias. Rows that are not finite, or have a
    norm of LARGEST or more, or such a factor r_i or x_i, count as zero rows."""

    slots: Slots | None = None

    def __init__(
        self, r: Tensor, x: Tensor, bias: bool, losses: Tensor | None = None, features: Tensor | None = None
    ):  # [n, C], [n, d], [n]; features: float64 [n], squared_norms(x), if they are known, and none is too large
        # the norm of an outer product is the product of two norms, so no row is written out
        squares = [r.double().square().sum(1), squared_norms(x) if features is None else features]
        norms = (squares[0] * (squares[1] + bias)).sqrt()
        broken = ~(torch.stack([norms, *(s.sqrt() for s in squares)]).amax(0) < LARGEST)
        if r.is_cuda or broken.any():  # a GPU would have to be waited for
            r = r.masked_fill(broken[:, None], 0)
            x = x.masked_fill(broken[:, None], 0) if features is None else x
            norms = torch.where(broken, 0, norms)
        self.r, self.x, self.bias, self.losses = r, x, bias, losses
        self._norms = norms

    @property
    def dtype(self) -> torch.dtype:
        return self.r.dtype

    def __len__(self) -> int:
        return len(self.r)

    def row_norms(self) -> Tensor:  # [n]
        return self._norms

    def combine(self, weights: Tensor, slots: Slots | None = None, total: Tensor | None = None) -> Tensor:
        c, d = self.r.shape[1], self.x.shape[1]
        if weights.dim() == 2:
            return torch.cat([self._columns(part).T @ weights for part in self._pieces(slice(0, c * (d + self.bias)))])
        # R^T diag(weights) X, and R^T weights for the bias
        if total is None:
            total = torch.zeros(c * (d + self.bias), dtype=torch.float64, device=self.x.device)
        add_products(total[: c * d].view(c, d), self.r, weights.double(), self.x, slots)
        if self.bias:
            total[c * d :].addmv_(self.r.T.double(), weights.double())
        return total

    def project(self, basis: Basis) -> Tensor:  # [n, k]
        return torch.cat([self._product(s, b) for s, b in zip(basis.slices, basis.blocks, strict=True)], dim=1)

    def gram(self) -> Tensor:  # [n, n]
        return (self.r @ self.r.T) * (self.x @ self.x.T + self.bias)

    def written_out(self, chosen: Tensor | None = None) -> Tensor:  # [n', p]
        # outer products, one row of p numbers for each example
        r, x = (self.r, self.x) if chosen is None else (self.r[chosen], self.x[chosen])
        rows = (r[:, :, None] * x[:, None, :]).flatten(1)
        return torch.cat([rows, r], dim=1) if self.bias else rows

    def scaled_norms(self, scale: Tensor) -> Tensor:  # [n]
        """Return norms by |outer(r, x) * S|^2 = (r * r)^T (S * S) (x * x), in float64 for its differing magnitudes."""
        # a sum over classes and features of products of squares: no row is written out
        c, d = self.r.shape[1], self.x.shape[1]
        r, x, s = self.r.double().square(), self.x.double().square(), scale.double().square()
        squares = ((r @ s[: c * d].view(c, d)) * x).sum(1)
        return (squares + (r @ s[c * d :] if self.bias else 0)).sqrt()

    def squared_sum(self) -> Tensor:  # [p]
        r, x = self.r.square(), self.x.square()
        weights = (r.T @ x).flatten()
        return torch.cat([weights, r.sum(0)]) if self.bias else weights

    def add_power(self, total: Tensor, columns: slice, b: Tensor) -> None:  # [p_c, k]
        projected = self._product(columns, b)  # [n, k]
        for piece in self._pieces(columns):
            rows = slice(piece.start - columns.start, piece.stop - columns.start)
            total[rows] += self._columns(piece).T @ projected

    def _product(self, columns: slice, b: Tensor) -> Tensor:
        """Return G[:, columns] b for b [p_c, k] -> [n, k]."""
        pieces = ((c, b[c.start - columns.start : c.stop - columns.start]) for c in self._pieces(columns))
        return sum((self._columns(c) @ part for c, part in pieces), start=b.new_zeros(len(self.r), b.shape[1]))

    def _pieces(self, columns: slice) -> Iterator[slice]:
        """Yield `columns` of G cut so that each piece belongs to one class, or is of the bias."""
        # the columns of one class are that class's r times the features
        d, weights = self.x.shape[1], self.r.shape[1] * self.x.shape[1]
        start = columns.start
        while start < columns.stop:
            end = (start // d + 1) * d if start < weights else columns.stop
            yield slice(start, min(end, columns.stop))
            start = min(end, columns.stop)

    def _columns(self, piece: slice) -> Tensor:
        """Return G[:, piece], [n, <= d], for one of `_pieces`."""
        d, weights = self.x.shape[1], self.r.shape[1] * self.x.shape[1]
        # the columns of the bias are r itself, those of a class its r times the features
        if piece.start >= weights:
            return self.r[:, piece.start - weights : piece.stop - weights]
        c = piece.start // d
        return self.r[:, c : c + 1] * self.x[:, piece.start - c * d : piece.stop - c * d]


class OffsetLinear(nn.Linear):
    """A linear classifier of the first d columns of x [n, d + C], whose other C columns are added to its logits: those
    of a classifier that does not train."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : self.in_features]) + x[:, self.in_features :]


class LinearGradients:
    """Source of G for nn.Linear on features x [n, d], or OffsetLinear on [n, d + C]: classes y [n] by cross-entropy, or
    0/1 rows y [n, labels] by binary cross-entropy, mean over the labels; one label is a binary task. If the model has
    `class_weights` [C], the loss of an example is multiplied by that of its class.

    An unknown label, NaN, counts as zero in the mean over all L labels. Its part of r_i is 0 in place of (p - y) / L,
    so the norm of a row is at most what it is with any value of that label: clip bounds stay as they are."""

    def __init__(self, model: nn.Linear):
        self.model = model
        weight = model.weight.numel()
        self.offsets = {"weight": slice(0, weight)}
        if model.bias is not None:
            self.offsets["bias"] = slice(weight, weight + model.out_features)
        self.size = sum(p.numel() for p in model.parameters())

    def chunk(self, x: Tensor) -> int:
        """Return 1: no rows of G are held."""
        return 1

    def blocks(
        self, x: Tensor, y: Tensor, rows: int = 1, dtype: torch.dtype | None = None
    ) -> Iterator[FactoredGradients]:
        """Yield G for x [n, d], y [n] or [n, labels], in blocks of any number of rows."""
        for xs, ys in zip(x.split(BLOCK), y.split(BLOCK), strict=True):
            if len(xs):
                yield self.matrix(xs, ys, dtype)

    def squares(self, x: Tensor) -> Tensor | None:
        """Return the squared norms of features x [n, d], as `matrix` takes them, float64 [n]; None if one is not
        finite, or too large."""
        parts = x.split(BLOCK)
        squares = torch.cat(
            [squared_norms(part[:, : self.model.in_features].to(self.model.weight.dtype)) for part in parts]
        )
        return squares if bool((squares.sqrt() < LARGEST).all()) else None

    @torch.no_grad()
    def matrix(
        self, x: Tensor, y: Tensor, dtype: torch.dtype | None = None, squares: Tensor | None = None
    ) -> FactoredGradients:
        """Return G for x [n, d], y [n] or [n, labels], in the precision of the model, or `dtype`. squares: those of
        x, if they are known."""
        dtype = dtype or self.model.weight.dtype
        d, bias = self.model.in_features, self.model.bias
        x, offset = x.to(dtype).split([d, x.shape[1] - d], dim=1)
        weight = self.model.weight.to(dtype)
        # [C, n], whose products with x take half the time of those of [n, C] where classes are few
        logits = weight @ x.T if bias is None else torch.addmm(bias.to(dtype)[:, None], weight, x.T)
        if offset.shape[1]:
            logits += offset.T
        # r is the gradient at the logits: of the mean over labels, or of the cross-entropy
        if y.dim() == 2:
            y = y.to(dtype).T
            unknown = y.isnan()
            losses = nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
            losses = losses.masked_fill_(unknown, 0).mean(0)
            r = ((logits.sigmoid() - y) / len(y)).masked_fill_(unknown, 0)
        else:
            log_p = logits.log_softmax(0)
            true = log_p.gather(0, y[None])  # [1, n]
            losses = -true.squeeze(0)
            r = log_p.exp_().scatter_(0, y[None], true.expm1())
            if (weights := getattr(self.model, "class_weights", None)) is not None:
                losses, r = losses * weights[y], r * weights[y]
        return FactoredGradients(r.T, x, bias is not None, losses, squares)
