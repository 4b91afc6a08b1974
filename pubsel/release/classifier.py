"""A trained model on disk: model.pt, its weights, and model.json, what else it takes to use them.

Both together are enough to classify images, without the private data, the public data or the record. All of model.json
is public (settings, shape, names of the classes) or follows from the weights. `pubsel export` writes the same two as
model.safetensors and config.json.
"""

import inspect
import json
import math
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from pubsel import models, records
from pubsel.algorithms import Frozen
from pubsel.cell import weights_digest
from pubsel.data import Task
from pubsel.data.given import IMAGES, Takes
from pubsel.data.texts import TextInput
from pubsel.data.vectors import Field
from pubsel.files import DAMAGE, plain, reading, unreadable
from pubsel.gradients.factored import OffsetLinear
from pubsel.messages import UserError, limit
from pubsel.settings.identity import as_json
from pubsel.settings.keys import Model
from pubsel.settings.schema import check, literal
from pubsel.training.evaluation import logits
from pubsel.training.loop import save

WEIGHTS, FACTS = "model.pt", "model.json"
EXPORTED = "model.safetensors", "config.json"  # the same in a folder that `pubsel export` made
KEYS = ("model", "classes", "multi_label", "shape", "mean", "std", "backbone", "frozen", "weights", "example")
MOST_BYTES, MOST_PIXELS = 2**26, 2**26  # of the file of facts, and of an image
UNFIT = (*DAMAGE, RuntimeError, LookupError, TypeError, AttributeError)  # errors from files that do not belong together
OTHER_FILE = "pubsel predict takes the file of its weights as checkpoint=FILE"
CLOSE = 1e-2  # of the largest logit: how far those of another processor may be off


class Classifier(NamedTuple):
    """A trained model, with what becomes of an image before it.

    model: images, uint8 [n, c, h, w], or features [n, d] -> logits [n, classes]. features: of images or texts; None:
    `model` takes them as they are. shape: of an image (channels, height, width), or of a row of a table (its length).
    """

    model: nn.Module
    features: Callable[[Any], Tensor] | None
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    multi_label: bool
    bits: int | None = None  # of a value in 16-bit images; None: 16
    takes: Takes = IMAGES

    @classmethod
    def of(
        cls, model: nn.Module, facts: Mapping[str, Any], data_root: str, device: torch.device, remedy: str = OTHER_FILE
    ) -> Self:
        """Return the classifier of a whole model and the facts about it (`facts_of`). UserError, with a remedy, if the
        weights of its backbone are not at hand, or not those that it was trained with."""
        settings, shape = check(Model, literal(facts["model"], FACTS)), tuple(facts["shape"])
        features: Callable[[Any], Tensor] | None = None
        takes = takes_of(facts)
        if settings.backbone is not None and (len(shape) == 3 or (takes.text and takes.text.hashed is None)):
            from pubsel.data.features import CORAL, NO_WEIGHTS, PUBLISHED, of_images  # and with it timm: a second

            try:
                features, weights = of_images(settings.backbone, shape, data_root, device)
            except UserError as error:
                reason = str(error).removesuffix(NO_WEIGHTS).removesuffix(PUBLISHED).removesuffix(CORAL)
                raise UserError(f"{reason}; {remedy}") from None
            if facts["backbone"] not in (None, weights):
                raise UserError(
                    f"model.backbone.architecture={settings.backbone.architecture}: its weights here are not those "
                    f"that the model was trained with ({weights}, not {facts['backbone']}): {remedy}"
                )
        # what is missing has no scale to be in the centre of: it is zero, as in training
        if takes.columns and getattr(getattr(model, "frozen", None), "centre", None) is None:
            features = partial(torch.nan_to_num, nan=0.0)
        several = bool(facts["multi_label"])
        model = model.to(device).eval()
        return cls(model, features, shape, tuple(facts["classes"]), several, facts.get("bits"), takes)

    def probabilities(self, x: Tensor | list[str]) -> NDArray[np.float64]:
        """Return the probability of each class, or of each label, [n, classes], for images x, uint8 [n, c, h, w], rows
        of a table or hashed texts, float32 [n, d], or texts."""
        rows = x if self.features is None else self.features(x)
        assert isinstance(rows, Tensor)
        outputs = logits(self.model, rows).double().cpu()
        return (outputs.sigmoid() if self.multi_label else outputs.softmax(1)).numpy()


def takes_of(facts: Mapping[str, Any]) -> Takes:
    """Return the kind of input that a model takes, by the facts about it."""
    text = TextInput(**facts["text"]) if facts.get("text") else None
    columns = tuple(Field(**column) for column in facts.get("columns", ()))
    return Takes(len(facts["shape"]) == 1, columns, text, facts.get("image_column"))


def facts_of(settings: Model, whole: nn.Module, task: Task) -> dict[str, Any]:
    """Return what model.json has of a whole model (`Prepared.whole`) that was trained on `task`, by key:

    model: its settings; classes: their names, or numbers if they have none; multi_label; shape: of an image; mean, std:
    what a network on images subtracts, and divides by; backbone: the digest of the weights whose features it takes;
    frozen: what is set of the map before a linear classifier; weights: a digest; example: the logits of `_example`;
    bits: of a value in 16-bit images, if their owner gave them; columns: of a table (`vectors.Field.facts`);
    text: of texts (`texts.TextInput`); image_column: of a table that has or names the images.
    """
    frozen = getattr(whole, "frozen", None)
    mean, std = ([float(v) for v in getattr(whole, name, torch.empty(0)).flatten()] for name in ("mean", "std"))

    columns, text = [column.facts() for column in task.columns], task.text and task.text._asdict()
    of_data = {"bits": task.bits, "columns": columns, "text": text, "image_column": task.image_column}

    # the arguments of the map that are no tensors; these are in its state
    of_map = {name: getattr(frozen, name, None) for name in inspect.signature(Frozen).parameters}
    of_map = {name: value for name, value in of_map.items() if isinstance(value, bool | int | float)}
    return {
        "model": as_json(settings),
        "classes": labels_of(task),
        "multi_label": task.private.y.dim() == 2,
        "shape": list(task.shape),
        "mean": mean,
        "std": std,
        "backbone": task.weights,
        "frozen": None if frozen is None else of_map,
        "weights": weights_digest(whole),
        "example": logits_of(whole, example_input(whole, {"shape": task.shape})),
    } | {key: value for key, value in of_data.items() if value}


def labels_of(task: Task) -> list[str]:
    """Return the names of the classes in order, or their numbers if they have no names."""
    return list(task.names) or [str(label) for label in range(task.classes)]


def keep_model(folder: Path, settings: Model, whole: nn.Module, task: Task) -> None:
    """Write both files of a trained model; UserError names the one that cannot be written."""
    save(folder / WEIGHTS, whole.state_dict())
    records.write_record(folder / FACTS, facts_of(settings, whole, task))


def read(folder: Path, data_root: str, device: torch.device, checkpoint: str | None = None) -> Classifier:
    """Return the classifier whose two files are in a folder. checkpoint: a file of its backbone's weights, in place of
    the one that its settings name. UserError as in `rebuilt` and `Classifier.of`."""
    whole, facts = rebuilt(folder)
    if checkpoint is not None:
        model = facts["model"]
        if not model.get("backbone"):
            raise UserError(f"checkpoint={checkpoint}: this model has no backbone, all its weights are in {WEIGHTS}")
        facts = facts | {"model": model | {"backbone": model["backbone"] | {"checkpoint": checkpoint}}}
    return Classifier.of(whole, facts, data_root, device)


def files_of(folder: Path) -> tuple[Path, Path] | None:
    """Return the two files of a trained model in a folder, weights and facts, of which the first may be absent; None
    if the folder lacks the second."""
    pairs = [(folder / weights, folder / facts) for weights, facts in ((WEIGHTS, FACTS), EXPORTED)]
    return next((pair for pair in pairs if pair[1].exists()), None)


def rebuilt(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the whole model whose two files are in a folder, on the CPU, and the facts about it (`facts_of`).
    UserError if a file does not read, or if they do not belong together."""
    file, facts_file = files_of(folder) or (folder / WEIGHTS, folder / FACTS)
    facts = read_facts(facts_file)
    settings = check(Model, literal(facts["model"], facts_file))
    try:
        state = _state(plain(file))

        # Without its numbers first: sizes that are not those of the weights take no memory.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is copied
            _rebuilt(settings, facts, {name: value.to("meta") for name, value in state.items()}).load_state_dict(state)
        whole = _rebuilt(settings, facts, state)
        whole.load_state_dict(state)
    except (*UNFIT, pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, OSError) or limit(error):
            raise unreadable(file, error, "bring it back") from None
        raise UserError(
            f"{file} does not fit the {facts_file.name} next to it ({reason}): restore both files from the same run"
        ) from None

    # The same weights in another network, such as that of another version of timm, would give other answers.
    if weights_digest(whole) != facts["weights"]:
        raise UserError(
            f"{file} does not have the weights that the {facts_file.name} next to it names: restore both files from "
            "the same run"
        )
    expected, example = np.array(facts["example"]), np.array(logits_of(whole, example_input(whole.eval(), facts)))
    same = example.shape == expected.shape
    if not (same and np.allclose(example, expected, rtol=0, atol=CLOSE * (1 + np.abs(expected).max()))):
        raise UserError(
            f"{file}: its network is another one here than where it was trained: install the versions of torch, timm "
            "and torchvision that were used there"
        )
    return whole, facts


def _state(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name. ValueError if they would take more memory than the file is large: a zip may
    be compressed, and a tensor repeat one number."""
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        return load_file(file)
    with zipfile.ZipFile(file) as packed:
        if sum(part.file_size for part in packed.infolist()) > size:
            raise ValueError("it is compressed")
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    if sum(value.nbytes for value in state.values()) > 2 * size:  # layers may share weights
        raise ValueError("its tensors repeat a part of it")
    return state


def read_facts(file: Path) -> dict[str, Any]:
    """Return what model.json or config.json says of a model; UserError if it does not read."""
    with reading(file, "bring it back", (*DAMAGE, RecursionError)):
        if file.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        facts = json.loads(file.read_text(encoding="utf-8"))
    absent = [key for key in KEYS if not isinstance(facts, dict) or key not in facts]
    if absent:
        raise UserError(f"{file}: it lacks {absent[0]}: bring it back")

    # Each is of the kind, and of a size, that `facts_of` writes.
    text = facts.get("text")
    mean, std, shape, frozen = (facts[key] for key in ("mean", "std", "shape", "frozen"))
    fits = {
        "model": isinstance(facts["model"], dict),
        "classes": bool(facts["classes"]) and _are(facts["classes"], str),
        "multi_label": isinstance(facts["multi_label"], bool),
        "shape": _are(shape, int) and len(shape) in (1, 3) and min(shape) > 0 and math.prod(shape) <= MOST_PIXELS,
        "mean": _are(mean, float | int) and len(mean) in (0, 1, 3),
        "std": _are(std, float | int) and len(std) == len(mean),
        "frozen": frozen is None or (isinstance(frozen, dict) and _are([*frozen.values()], bool | int | float)),
        "backbone": isinstance(facts["backbone"], str | None),
        "weights": isinstance(facts["weights"], str),
        "example": _are(facts["example"], float | int),
        "columns": _are_columns(facts.get("columns", []), shape),
        "text": text is None
        or (isinstance(text, dict) and text.keys() == {*TextInput._fields} and text["hashed"] in (None, *shape)),
        "image_column": isinstance(facts.get("image_column"), str | None),
        "bits": facts.get("bits") is None or (_are([facts["bits"]], int) and 8 <= facts["bits"] <= 16),
    }
    if wrong := next((key for key, fit in fits.items() if not fit), None):
        raise UserError(f"{file}: {wrong} has a value that no model has: bring it back")
    return dict(facts)


def _are_columns(columns: Any, shape: list[int]) -> bool:
    """Return whether these are the columns of a table, as many as a row has numbers, or none."""
    if not columns:
        return columns == []
    known = set(Field._fields)
    fit = _are(columns, dict) and all(isinstance(c.get("name"), str) and c.keys() <= known for c in columns)
    numbers = (value for c in columns for key in ("least", "most") if (value := c.get(key)) is not None)
    return fit and len(columns) == shape[0] and all(isinstance(value, int | float) for value in numbers)


def _are(values: Any, kind: Any) -> bool:
    """Return whether this is a list with values of one kind."""
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _rebuilt(model: Model, facts: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """Return the whole model that a state belongs to, with other weights."""
    classes, mean, std = len(facts["classes"]), tuple(facts["mean"]), tuple(facts["std"])

    # A network on images has all its weights in the state, so none are read. One that was given weights takes three
    # channels, whatever the images have.
    if mean:
        _, height, width = facts["shape"]
        return models.build(model, (len(mean), height, width), classes, mean, std, 0, None)

    prefix = "" if facts["frozen"] is None else "linear."
    classifier = (state["frozen.weight"], state["frozen.bias"]) if "frozen.weight" in state else None
    scaling = None
    if "frozen.centre" in state:
        scaling = state["frozen.centre"], state["frozen.scale"], state["frozen.limit"]
    kind = nn.Linear if classifier is None else OffsetLinear
    linear = kind(state[f"{prefix}weight"].shape[1], classes, bias=f"{prefix}bias" in state)
    if facts["frozen"] is None:
        return linear
    tensors = state.get("frozen.shift"), state.get("frozen.projection")
    frozen = Frozen(*tensors, **facts["frozen"], classifier=classifier).scaled(scaling)
    frozen.less(state.get("frozen.middle"))
    return nn.Sequential(OrderedDict(frozen=frozen, linear=linear))


def example_input(whole: nn.Module, facts: Mapping[str, Any]) -> Tensor:
    """Return one made-up input, the same on every machine: an image of noise, uint8 [1, c, h, w], or features,
    float32 [1, d]."""
    draw = np.random.RandomState(0)
    if isinstance(whole, models.Network):
        return torch.from_numpy(draw.randint(0, 256, (1, *facts["shape"]), dtype=np.uint8))

    frozen = getattr(whole, "frozen", None)
    tensors = [getattr(frozen, name, None) for name in ("projection", "shift", "middle", "centre")]
    widths = [len(tensor) for tensor in tensors if tensor is not None]
    last = next(module for module in whole.modules() if isinstance(module, nn.Linear))
    width = widths[0] if widths else last.in_features
    return torch.from_numpy(draw.random_sample((1, width)).astype(np.float32))


@torch.no_grad()
def logits_of(whole: nn.Module, x: Tensor) -> list[float]:
    """Return the logits of a whole model for one input, [classes]."""
    return [float(value) for value in whole(x.to(next(whole.parameters()).device))[0].cpu()]
