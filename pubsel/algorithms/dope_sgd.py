"""DOPE-SGD. Nasr, Mahloujifar, Tang, Mittal, Houmansadr: Effectively Using Public Data in Privacy Preserving Machine
Learning, ICML 2023, PMLR 202: private gradients are clipped around the mean public gradient. The paper's synthetic
public images, and its average over models, are not part of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pubsel.algorithms import Mechanism, View, sum_of_rows, weighted_rows
from pubsel.algorithms.dp_md import mean_public_gradient
from pubsel.algorithms.dp_sgd import Clipping, clip_weights
from pubsel.gradients.matrix import DenseGradients, GradientMatrix
from pubsel.settings.schema import setting

BLOCK = 256  # rows that are written out at once


def differences(gradients: GradientMatrix, origin: Tensor) -> Iterator[DenseGradients]:
    """Yield the rows g_i - origin of G [n, p], some at a time; a row of zeros, as of an example that counts as nothing,
    stays one.

    |g_i - origin|^2 as a sum of three products would lose its digits where g_i is near a long origin, and clip too
    little. So each difference is held as it is summed, rounded to its precision, and its norm is that of what is held.
    """
    empty = gradients.row_norms() == 0
    for some in torch.arange(len(gradients), device=empty.device).split(BLOCK):
        rows = gradients.written_out(some).sub_(origin)  # an index copies rows
        yield DenseGradients(rows.masked_fill_(empty[some, None], 0))


@dataclass
class DOPESGD(Clipping):
    """Settings of DOPE-SGD."""

    clip_norm: float = setting(
        "bound C on the L2 norm of the difference between a private example's gradient and the public one",
        at_least=1e-12,
    )
    public_batch: int = setting("public examples a step, drawn anew", at_least=1)

    def sensitivity(self) -> float:
        """Return 1. An example adds (g_i - g) / C, clipped to norm 1, or nothing: its place in the sum then is empty,
        as that of an example that the sample has left out. The public gradient g depends on public data and on weights
        that were released before; it is added after the noise, once, whatever the sample is."""
        return 1.0

    def check(self, view: View) -> None:
        view.labelled(self.name)

    def numbers(self, view: View) -> int:
        return (BLOCK + 2) * view.gradients.size

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the sum of clipped differences, decoded to their mean plus the public gradient.

        With B expected examples, b sampled ones of mean gradient m, and nothing clipped, the direction is
        g + (b / B) (m - g) = (b / B) m + (1 - b / B) g: examples that a small sample lacks count as public ones, and
        what a large one has too many is taken off g. On average b is B, and the direction the private gradient."""
        origin = mean_public_gradient(view, view.labelled(self.name), self.public_batch, step)  # [p]

        def sums(gradients: GradientMatrix, total: Tensor | None = None) -> Tensor:  # [p]
            total = torch.zeros_like(origin, dtype=torch.float64) if total is None else total
            for rows in differences(gradients, origin):
                total = sum_of_rows(rows, clip_weights(rows, self.clip_norm), total=total)
            return total

        def contributions(gradients: GradientMatrix) -> Tensor:  # [n, p]
            parts = differences(gradients, origin)
            return torch.cat([weighted_rows(rows, clip_weights(rows, self.clip_norm)) for rows in parts])

        return Mechanism(
            sums,
            lambda mean: mean * self.clip_norm + origin,
            self.sensitivity(),
            view.gradients.size,
            rows=BLOCK,
            contributions=contributions,
            shared=(origin,),
        )
