"""A frozen network as a traced graph, whose layers oneDNN fuses: on a CPU, MobileNetV2 takes half the time."""

import contextlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pubsel.messages import say

CLOSE = 1e-3  # largest difference from the network itself, as a share of the largest output

Network = Callable[[Tensor], Tensor]


@torch.no_grad()
def as_graph(net: nn.Module, shape: tuple[int, int, int], batch: int) -> Network:
    """Return `net` as a graph for up to `batch` images [n, *shape], channels last, that one thread computes; threads
    may share it.

    Raises whatever torch raises for a network that it cannot trace; ValueError if its outputs are not those of `net`.
    """
    # no private image decides how features are computed
    draw = torch.Generator().manual_seed(0)
    x, other = (torch.randn(n, *shape, generator=draw) for n in (batch, 1 + batch // 2))
    x, other = (part.contiguous(memory_format=torch.channels_last) for part in (x, other))

    def infer(x: Tensor) -> Tensor:
        filled = nn.functional.pad(x, (0, 0) * 3 + (0, batch - len(x)))  # its kernels are for one size
        result: Tensor = graph(filled)
        return result[: len(x)]

    # The second pass compiles what the first has measured, for as many threads as there are then.
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that the shape of an image decides; of newer ways to compile
        try:
            torch.set_num_threads(1)
            with contextlib.suppress(AttributeError, RuntimeError):  # of a torch that lacks oneDNN's graphs
                torch.jit.enable_onednn_fusion(True)
            graph = torch.jit.freeze(torch.jit.trace(net, x, check_trace=False))
            for _ in range(2):
                infer(x)
        finally:
            with contextlib.suppress(AttributeError, RuntimeError):
                torch.jit.enable_onednn_fusion(False)
            torch.set_num_threads(threads)

    want, computed = net(other).flatten(1), infer(other).flatten(1)
    difference = (
        float((computed - want).abs().max() / want.abs().max()) if computed.shape == want.shape else float("inf")
    )
    if not difference <= CLOSE:  # also if it is not a number
        raise ValueError(f"its features differ by {difference:.1g} of the largest")
    return infer


def faster(net: nn.Module, shape: tuple[int, int, int], batch: int) -> Network:
    """Return `as_graph`; the network itself, after a line that says why, if it cannot be had."""
    try:
        return as_graph(net, shape, batch)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        say(f"this network is computed layer by layer, not as a traced graph: {reason}")
        return net
