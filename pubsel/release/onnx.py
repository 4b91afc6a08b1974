"""A trained model as ONNX, for programs without torch: the whole way from what they have to logits, through the frozen
encoder or the scale of a table's columns. Needs the extra `onnx`."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pubsel.data import Task
from pubsel.data.vectors import Field, as_rows
from pubsel.messages import UserError, needs_extra
from pubsel.models.text_encoder import TextEncoder
from pubsel.release.classifier import Classifier, facts_of
from pubsel.settings.keys import Model
from pubsel.training.evaluation import logits

FILE = "model.onnx"
NEAR = 1e-3  # of the largest logit: how far those of ONNX may be off, with sums in another order
REMEDY = f"{needs_extra('onnx')}, or leave format=onnx out"
WEIGHTS = "format=onnx needs these weights: bring them back, or leave it out"
TOKENS = ("input_ids", "attention_mask")
TEXTS = ("a text", "a longer text, with some more words in it", "")  # with which a graph is checked


def check_installed() -> None:
    """Raise UserError if a package is absent without which nothing can be written as ONNX."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401  torch writes ONNX with it
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: {REMEDY}") from None


class OfRows(nn.Module):
    """Rows of a table, NaN where a number is missing and 0 or 1 for a word -> rows as a model takes them, as
    `Field.read` reads them. A column that says that a number is missing follows from the number.

    given: the columns of its input, in order. zero: every number that is missing is 0, not only one with bounds."""

    least: Tensor
    width: Tensor
    bounded: Tensor
    zero: Tensor

    def __init__(self, columns: Sequence[Field], zero: bool):
        super().__init__()
        self.given = [column for column in columns if not column.missing]
        absent = [column for column in columns if column.missing]
        self.missing = [[column.name for column in self.given].index(column.name) for column in absent]
        self.order = [[*self.given, *absent].index(column) for column in columns]
        known = [(column.least, column.most) for column in self.given]
        bounds = torch.tensor([(-1.0, 1.0) if a is None or b is None else (a, b) for a, b in known])
        self.register_buffer("least", bounds[:, 0])
        self.register_buffer("width", (bounds[:, 1] - bounds[:, 0]) / 2)
        self.register_buffer("bounded", torch.tensor([column.least is not None for column in self.given]))
        self.register_buffer("zero", torch.tensor([zero or not column.raw for column in self.given]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x.isfinite(), x, torch.nan)
        scaled = ((x - self.least) / self.width - 1).clamp(-1, 1)
        values = torch.where(self.bounded, scaled, x)
        values = torch.where(values.isnan() & self.zero, 0.0, values)
        if not self.missing:
            return values[:, self.order]
        return torch.cat([values, x[:, self.missing].isnan().float()], 1)[:, self.order]


class Chain(nn.Module):
    """A model behind what prepares its input. weights: the network that `before` computes with, if it has any."""

    def __init__(self, before: Callable[..., Tensor] | None, model: nn.Module, weights: nn.Module | None = None):
        super().__init__()
        self.before, self.model, self.weights = before, model, weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.before is not None:
            x = self.before(x) if mask is None else self.before(x, mask)
        logits: Tensor = self.model(x)
        return logits


class Traced(NamedTuple):
    """The network that is written. inputs: three different examples by name, of which the first is as short as any;
    features: of the same, as `pubsel predict` computes them; how: what config.json says of the input."""

    net: nn.Module
    inputs: dict[str, Tensor]
    features: Tensor
    how: dict[str, Any]


def as_network(classifier: Classifier) -> Traced:
    """Return a classifier as one network from what any program has: images, uint8 [n, c, h, w]; rows of a table (the
    columns of `how`); features [n, d]; or the tokens of texts."""
    draw, model, features = np.random.RandomState(0), classifier.model, classifier.features
    if isinstance(features, TextEncoder):
        how: dict[str, Any] = {"tokens": features.longest}
        options = {"padding": True, "padding_side": "right", "truncation": True, "max_length": features.longest}
        tokens = features.tokenizer([*TEXTS], return_tensors="pt", **options)
        inputs = {name: tokens[name] for name in TOKENS}
        return Traced(Chain(features.pooled, model, features.net), inputs, features([*TEXTS]), how)
    if len(classifier.shape) == 3:
        from pubsel.data.features import Extractor, embed  # and with it timm: a second

        x = torch.from_numpy(draw.randint(0, 256, (3, *classifier.shape), dtype=np.uint8))
        before, weights = features, None
        if isinstance(features, Extractor):
            before = partial(embed, extractor=features)
            weights = features.net if isinstance(features.net, nn.Module) else None
        net, inputs, how = Chain(before, model, weights), {"images": x}, {}
    elif classifier.takes.columns:
        of_rows = OfRows(classifier.takes.columns, zero=features is not None)
        given = [field if field.word is not None else Field(field.name) for field in of_rows.given]
        frame = _table(classifier, draw)
        net, inputs = Chain(of_rows, model), {"rows": as_rows(frame, given)}
        how = {"columns": [field.facts() for field in of_rows.given]}
        x = as_rows(frame, classifier.takes.columns)
    else:
        x = torch.from_numpy(draw.uniform(-1, 1, (3, *classifier.shape)).astype(np.float32))
        net, inputs, how = Chain(None, model), {"features": x}, {}
    return Traced(net, inputs, x if features is None else features(x), how)


def _table(classifier: Classifier, draw: np.random.RandomState) -> pd.DataFrame:
    """Return a table of three rows in which every column has one number that is missing."""
    frozen = getattr(classifier.model, "frozen", None)
    values = dict[str, Any]()
    for i, field in enumerate(classifier.takes.columns):
        if field.word is not None:
            values.setdefault(field.name, [""] * 3)[i % 3] = field.word
        elif not field.missing:
            centre, scale = (
                (0.0, 1.0) if frozen is None or frozen.centre is None else (frozen.centre[i], frozen.scale[i])
            )
            if field.least is not None and field.most is not None:
                centre, scale = (field.most + field.least) / 2, (field.most - field.least) / 2
            values[field.name] = float(centre) + float(scale) * draw.uniform(-1.5, 1.5, 3)
            values[field.name][i % 3] = np.nan
    return pd.DataFrame(values)


def as_onnx(whole: nn.Module, facts: dict[str, Any], data_root: str) -> tuple[bytes, dict[str, Any]]:
    """Return a whole model and what is before it as ONNX, for any n, and what config.json says of its input. It has no
    text about the machine that made it.

    UserError if a package is absent, or the weights of the backbone; if the network cannot be written or run as ONNX,
    or if it gives other logits there than `pubsel predict`.
    """
    check_installed()
    classifier = Classifier.of(whole, facts, data_root, torch.device("cpu"), WEIGHTS)
    with torch.no_grad():
        of = as_network(classifier)
        expected = logits(classifier.model, of.features).numpy()
    written = _written(of)
    if not all(_near(answers, expected[: len(answers)]) for answers in _answers(written, of.inputs)):
        raise UserError("format=onnx: the network gives other answers as ONNX: leave it out")
    sizes = {name: ["n", *(["t"] if name in TOKENS else x.shape[1:])] for name, x in of.inputs.items()}
    kinds = {name: f"{x.dtype}".removeprefix("torch.") for name, x in of.inputs.items()}
    inputs = {name: f"{kinds[name]} [{', '.join(map(str, sizes[name]))}]" for name in kinds}
    return written, {"inputs": inputs, **of.how}


def check_exports(settings: Model, task: Task, data_root: str) -> None:
    """Raise UserError if no model on the frozen encoder of `settings` can be written as ONNX, before one is trained.
    task: with images or texts as they are."""
    if task.text is not None:
        task = task._replace(text=task.text._replace(hashed=None))
    as_onnx(nn.LazyLinear(task.classes), facts_of(settings, nn.Linear(1, 1), task), data_root)


def _written(of: Traced) -> bytes:
    """Return a network as ONNX, for any n."""
    n, t = torch.export.Dim("n"), torch.export.Dim("t")
    shapes = tuple({0: n, 1: t} if name in TOKENS else {0: n} for name in of.inputs)
    try:
        with _exporting():
            program = torch.onnx.export(
                of.net.eval(),
                tuple(x[:2] for x in of.inputs.values()),  # another n than that of the check
                input_names=[*of.inputs],
                output_names=["logits"],
                dynamo=True,
                dynamic_shapes=shapes,
                verbose=False,
            )
            assert program is not None
            model = program.model_proto

        # torch notes for each operation in which file of this machine it was called
        graph, functions = model.graph, model.functions
        nodes = [*graph.node, *(node for function in functions for node in function.node)]
        values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
        for part in (model, graph, *values, *functions, *nodes):
            part.doc_string = ""
            del part.metadata_props[:]
        written: bytes = model.SerializeToString(deterministic=True)
    except Exception as error:
        raise UserError(
            f"format=onnx: torch cannot write this network as ONNX ({_reason(error)}): leave it out"
        ) from None
    return written


def _answers(written: bytes, inputs: dict[str, Tensor]) -> Iterator[NDArray[np.floating]]:
    """Yield the logits of three examples together, by which a graph that computes with one alone, or a constant, is
    not kept; and those of the first one alone."""
    import onnxruntime

    length = int(inputs[TOKENS[1]][0].sum()) if TOKENS[1] in inputs else None
    first = {name: x[:1, :length] if name in TOKENS else x[:1] for name, x in inputs.items()}
    try:
        session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
        for part in (inputs, first):
            yield session.run(None, {name: x.numpy() for name, x in part.items()})[0]
    except Exception as error:
        raise UserError(f"format=onnx: onnxruntime cannot run this network ({_reason(error)}): leave it out") from None


def _near(answers: NDArray[np.floating], expected: NDArray[np.floating]) -> bool:
    """Return whether logits are those that are expected, [n, classes]; what is not a number is not."""
    if answers.shape != expected.shape:
        return False
    return bool(np.abs(answers - expected).max() <= NEAR * (1 + np.abs(expected).max()))


def _reason(error: BaseException) -> str:
    """Return the beginning of what the first cause of an error says, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
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
