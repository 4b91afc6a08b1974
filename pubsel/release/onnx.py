"""A trained model as ONNX, for programs without torch. Needs the extra `onnx`."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pubsel.messages import UserError
from pubsel.release.classifier import example_input, logits_of

NEAR = 1e-3  # of the largest logit: how far those of ONNX may be off, with sums in another order
REMEDY = "pip install pubsel[onnx], or leave format=onnx out"


def check_installed() -> None:
    """Raise UserError if a package is absent without which nothing can be written as ONNX."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401  torch writes ONNX with it
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: {REMEDY}") from None


def as_onnx(whole: nn.Module, facts: dict[str, Any]) -> bytes:
    """Return a whole model as ONNX: "images", uint8 [n, c, h, w], or "features", float32 [n, d] -> "logits",
    [n, classes], for any n. It has no text about the machine that made it.

    UserError if a package is absent, if the network cannot be written or run as ONNX, or if it gives other logits
    there.
    """
    check_installed()
    import onnxruntime

    x = example_input(whole.eval(), facts)
    name = "images" if x.dtype == torch.uint8 else "features"
    try:
        with _exporting():
            program = torch.onnx.export(
                whole,
                (torch.cat([x, x]),),
                input_names=[name],
                output_names=["logits"],
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("n")},),
                verbose=False,
            )
            assert program is not None
            model = program.model_proto
    except Exception as error:
        raise UserError(
            f"format=onnx: torch cannot write this network as ONNX ({_reason(error)}): leave it out"
        ) from None

    # torch notes for each operation in which file of this machine it was called.
    graph, functions = model.graph, model.functions
    nodes = [*graph.node, *(node for function in functions for node in function.node)]
    for part in (model, graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *functions, *nodes):
        part.doc_string = ""
        del part.metadata_props[:]
    written: bytes = model.SerializeToString(deterministic=True)

    # Three different inputs: a graph that computes with the first one alone, or a constant, is not kept.
    several = torch.cat([x, x.flip(-1), x // 2 if x.dtype == torch.uint8 else -x])
    expected = np.array([logits_of(whole, example[None]) for example in several])
    try:
        session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
        answers = session.run(None, {name: several.numpy()})[0]
    except Exception as error:
        raise UserError(f"format=onnx: onnxruntime cannot run this network ({_reason(error)}): leave it out") from None
    if not _near(answers, expected):
        raise UserError("format=onnx: the network gives other answers as ONNX: leave it out")
    return written


def _near(answers: NDArray[np.floating], expected: NDArray[np.floating]) -> bool:
    """Return whether logits are those that are expected, [n, classes]; what is not a number is not."""
    if answers.shape != expected.shape:
        return False
    return bool(np.abs(answers - expected).max() <= NEAR * (1 + np.abs(expected).max()))


def _reason(error: Exception) -> str:
    """Return the beginning of what an error says, on one line."""
    return " ".join(str(error).split())[:100] or type(error).__name__


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Keep torch's messages on its steps off the screen, and give all layers of cuDNN one precision, without which it
    follows no network: a training in this process may have set that of convolutions alone. Nothing is computed on a GPU
    meanwhile."""
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    torch.backends.cudnn.allow_tf32 = True
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        convolutions.fp32_precision = before
