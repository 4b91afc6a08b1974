"""A frozen network computed by OpenVINO instead of torch, if it is installed (`pip install pubsel[fast]`)."""

import logging
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

CLOSE = 1e-3  # largest difference from torch, as a share of the largest output


def available() -> str | None:
    """Return the engine with its version, as part of a file's name; None if it is not installed."""
    try:
        return f"openvino_{version('openvino').split('-')[0]}"
    except PackageNotFoundError:
        return None


Network = Callable[[Tensor], Tensor]


def compiled(net: nn.Module, x: Tensor, threads: int) -> Network:
    """Return `net` compiled for images [n, c, h, w] like x, for any n. `threads` threads may call it at once.

    Raises whatever OpenVINO raises for a network that it cannot convert; ValueError if its outputs for x are not those
    of torch.
    """
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trace, about Python values that the shape of an image decides
        model = openvino.convert_model(net, example_input=x[:2])
    model.reshape({model.inputs[0]: openvino.PartialShape([-1, *x.shape[1:]])})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": threads}
    network = openvino.Core().compile_model(model, "CPU", settings)
    local = threading.local()  # a request serves one thread at a time

    def infer(x: Tensor) -> Tensor:  # [n, c, h, w] -> [n, d]
        if not hasattr(local, "request"):
            local.request = network.create_infer_request()
        return torch.from_numpy(local.request.infer([x.contiguous().numpy()])[0].copy())

    want, computed = net(x).flatten(1), infer(x).flatten(1)
    difference = (
        float((computed - want).abs().max() / want.abs().max()) if computed.shape == want.shape else float("inf")
    )
    if not difference <= CLOSE:  # also if it is not a number
        raise ValueError(f"its features differ from torch's by {difference:.1g} of the largest")
    return infer


def faster(net: nn.Module, x: Tensor, threads: int, report: Callable[[str], None]) -> Network | None:
    """Return `compiled`; None, and a line that says why, if it cannot be had."""
    try:
        logging.disable(logging.WARNING)
        with torch.no_grad():
            return compiled(net, x, threads)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        report(f"OpenVINO is not used for this network: {reason}")
        return None
    finally:
        logging.disable(logging.NOTSET)
