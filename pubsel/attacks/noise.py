"""Observation of a training: the exact sums of a mechanism, the noisy ones that it decodes, and the noise."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from pubsel.algorithms import Algorithm, Mechanism, View, added
from pubsel.gradients.matrix import GradientMatrix


def watched(algorithm: Algorithm, watch: Callable[[Mechanism, View, int], Mechanism]) -> Algorithm:
    """Return the same algorithm with each of its mechanisms passed through `watch`."""
    other = copy.copy(algorithm)
    inner = algorithm.mechanism
    other.mechanism = lambda view, step: watch(inner(view, step), view, step)  # type: ignore[method-assign]
    return other


def followed(
    inner: Mechanism,
    batch_size: int,
    device: torch.device,
    judge: Callable[[Tensor, Tensor], None],
    look: Callable[[GradientMatrix], None] = lambda gradients: None,
) -> Mechanism:
    """Return the same mechanism, observed. `look` receives each block before it is summed. Before the noisy mean is
    decoded, `judge` receives the noise (the noisy sum minus the exact one) and the exact sum: float64 [size] each.
    batch_size: the declared denominator of the mean."""
    exact = torch.zeros(inner.size, dtype=torch.float64, device=device)

    def clipped_sum(gradients: GradientMatrix, total: Tensor | None = None) -> Tensor:
        look(gradients)
        part = inner.clipped_sum(gradients)
        exact.add_(part)
        return added(part, total)

    def decode(mean: Tensor) -> Tensor:
        judge(mean.double() * batch_size - exact, exact)
        return inner.decode(mean)

    return inner._replace(clipped_sum=clipped_sum, decode=decode)
