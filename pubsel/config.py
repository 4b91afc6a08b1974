"""Every key of every sub-command: its type, range and meaning; and the identity of a run.

The values live in conf/*.yaml, this file holds what they may be. It imports no torch, so that `--help`,
tab completion and a wrong key cost no seconds.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

T = TypeVar("T")
NAME = re.compile(r"[\w.+-]+")  # what may be part of the name of a folder
MOST_EPOCHS = 10**6  # and iterations of a loop
MOST_STEPS = 10**7  # beyond, the accountant takes minutes to say that it cannot
LONGEST = 255  # bytes of a folder's name, on most file systems
SHARED_GPU = "PUBSEL_SHARED_GPU"  # in the environment of cells that have one GPU among them

_HERE = Path(__file__).resolve().parent
CONF = next(
    path for path in (_HERE.parent / "conf", _HERE / "conf") if (path / "run.yaml").exists()
)  # checkout, or wheel


class UserError(Exception):
    """Something the user can mend: one line that names the key or file, and the remedy. Exit code 1."""

    exit_code = 1


class UsageError(UserError):
    """The command line or the configuration is wrong; nothing was started. Exit code 2."""

    exit_code = 2


class CellsFailed(UserError):
    """Cells of a sweep that failed, each with why; the others are done."""

    def __init__(self, cells: list[str]):
        super().__init__(f"{len(cells)} cells failed")
        self.cells = cells


def setting(
    about: str,
    *,
    over: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    neutral: bool = False,
    named: bool = False,
    default: Any = MISSING,
) -> Any:
    """A dataclass field with its meaning and its open or closed range. Its value stands in conf/; a rarely used one may
    have a `default`, and is left out of the identity while it has it.

    `neutral` keys cannot change a result (where files lie, how fast a run is); the identity leaves them out. `named`
    keys become part of a folder's name.
    """
    metadata = {"about": about, "over": over, "at_least": at_least, "at_most": at_most, "below": below}
    return field(default=default, metadata={**metadata, "infinite": infinite, "neutral": neutral, "named": named})


Device = Enum("Device", ["auto", "cpu", "cuda"])
Convert = Enum("Convert", ["resize", "exact"])
Labels = Enum("Labels", ["random", "given", "auto"])  # not "true", which YAML reads as a truth value
Parameters = Enum("Parameters", ["weights", "all"])
Accounting = Enum("Accounting", ["prv", "paper"])
Norm = Enum("Norm", ["replace", "freeze"])
Metric = Enum("Metric", ["accuracy", "auc"])
Take = Enum("Take", ["test", "train"])
Overlap = Enum("Overlap", ["refuse", "drop"])
Optimizer = Enum("Optimizer", ["sgd", "adam"])
Tracking = Enum("Tracking", ["none", "tensorboard"])
DPPCA = Enum("DPPCA", ["gauss", "bingham"])
Attack = Enum("Attack", ["gsd_white_box", "gsd_black_box", "loss"])
AuditKind = Enum("AuditKind", ["white_box", "black_box", "per_instance"])


@dataclass
class Pair:
    """Which data is private, which is public, and how the one comes to look like the other."""

    private: str = setting("name of a dataset in conf/dataset, or a path: image folder, CSV of paths and labels, npz")
    public: Any = setting(
        "the same for the public data; [A,B]: equal shares of m from each; auto: chosen privately from candidates; "
        "null where an algorithm uses none"
    )
    m: int = setting("number of public examples", at_least=1)
    take: Take = setting(
        "where the public examples come from: test, the first of the test split (GSD, GEP); train, a fixed random part "
        "of the training split, which is then not private (PILLAR, AdaMix)", default=Take.test,
    )  # fmt: skip
    shots: int | None = setting(
        "take=train: so many public examples of each class, instead of m", at_least=1, default=None,
    )  # fmt: skip
    public_share: float | None = setting(
        "take=train: this share of the training split, instead of m", over=0, below=1, default=None,
    )  # fmt: skip
    private_share: float = setting("share of the private examples that is used", over=0, at_most=1, default=1.0)
    validation: float = setting(
        "share of the private examples that is held out to select settings by; the guarantee does not cover the "
        "selection", at_least=0, below=1, default=0.0,
    )  # fmt: skip
    convert: Convert = setting("how public images reach the private shape: resize (and grey/colour), or exact: refuse")
    candidates: list[Any] | None = setting("public=auto: what it may be: [A,B,[C,D]]", default=None)
    overlap: Overlap = setting(
        "images that are private and public, or training and test images: refuse, or drop them from the public or test "
        "side (epsilon does not cover which were dropped)", default=Overlap.refuse,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.public = one_or_combined("pair.public", self.public)
        if self.candidates is not None:
            self.candidates = candidates_of("pair.candidates", self.candidates)


@dataclass
class Backbone:
    """A frozen timm network, whose features a linear classifier is trained on. What is null is the checkpoint's own."""

    architecture: str = setting("name of a timm model, such as resnet50.tv_in1k")
    pretrained: bool = setting("load the published weights", default=True)
    checkpoint: str | None = setting(
        "a weight file instead of them; a relative path is looked for in data_root too", default=None
    )
    prefix: str | None = setting(
        "checkpoint: what stands before the names of the weights, such as backbone.", default=None
    )
    options: dict[str, Any] = field(default_factory=dict, metadata={"about": "further arguments of timm.create_model"})
    input_size: int | None = setting(
        "side in pixels that images are brought to", at_least=1, at_most=16384, default=None
    )
    crop: float | None = setting(
        "share of the resized image's side that is kept, the centre", over=0, at_most=1, default=None
    )
    mean: list[float] | None = setting("per channel in [0, 1]", default=None)
    std: list[float] | None = setting("per channel in [0, 1]", default=None)


@dataclass
class Lora:
    """New low-rank layers beside frozen linear ones (Hu et al. 2022)."""

    layers: list[str] = setting("the linear layers, by the last part of their names, such as qkv")
    r: int = setting("rank", at_least=1)
    alpha: float = setting("scale times r", over=0)


@dataclass
class Adapters:
    """New bottlenecks behind frozen layers (Houlsby et al. 2019)."""

    layers: list[str] = setting("the layers, by the last part of their names, such as attn, mlp")
    size: int = setting("width of a bottleneck", at_least=1)


@dataclass
class Model:
    """The network."""

    name: str = setting(
        "fmnist_cnn, resnet20, probe, mnist_cnn, linear or torchvision; free for timm and with a backbone", named=True
    )
    architecture: str | None = setting("name of the timm or torchvision model; null for the small networks")
    pretrained: bool = setting("timm and torchvision: load the published weights")
    checkpoint: str | None = setting(
        "timm: a weight file instead of the published one; a relative path: in data_root too"
    )
    norm: Norm = setting("BatchNorm mixes examples: replace it by GroupNorm (opacus ModuleValidator), or freeze it")
    input_size: int | None = setting(
        "images are resized to this side in pixels; null: as they are", at_least=1, at_most=16384
    )
    backbone: Backbone | None = setting("train a linear classifier on the features of this network", default=None)
    bias: bool = setting("backbone: whether the linear classifier has a bias", default=True)
    trained: list[str] | None = setting(
        "what is trained: names of layers or parameters, such as [fc, layer3.32.conv1]; all, head, bias, first_last; "
        "null: all, or with lora and adapters these and the head", default=None,
    )  # fmt: skip
    lora: Lora | None = setting("timm: low-rank layers", default=None)
    adapters: Adapters | None = setting("timm: adapters", default=None)
    options: dict[str, Any] | None = setting("timm: further arguments of timm.create_model", default=None)
    mean: list[float] | None = setting(
        "timm, with weights: per channel in [0, 1]; null: what the weights were trained with", default=None
    )
    std: list[float] | None = setting("likewise", default=None)
    once: bool = setting(
        "outputs of the layers below the first trained one are computed once and kept in memory, not in each pass",
        default=False,
    )


@dataclass
class Distance:
    """How the distance between the two is measured."""

    name: str = setting("gsd, dp_gsd, task2vec, otdd, frechet, mmd, or none", named=True)
    k: int = setting("gsd: dimension of the two subspaces", at_least=1)
    m: int = setting("examples on each side", at_least=2)
    initialisations: int = setting(
        "random networks and draws of m private examples to average over", at_least=1, at_most=10**5
    )
    normalise_rows: bool = setting("gsd: scale every per-example gradient to unit length before the decomposition")
    labels: Labels = setting("gsd: random, or given: then both sides need labels of the private task")
    parameters: Parameters = setting("gsd: gradients of the weights alone, or of all parameters")
    exact: bool = setting(
        "otdd: optimal transport between the examples of two classes, not between their Gaussians", default=False
    )
    epsilon: float | None = setting("dp_gsd: epsilon of all its values together", over=0, default=None)
    delta: float | None = setting("dp_gsd, gauss: delta of all its values together", over=0, below=1, default=None)
    mechanism: DPPCA = setting(
        "dp_gsd: gauss, noise on second moments; bingham, the exponential mechanism, delta 0", default=DPPCA.gauss
    )
    private_m: float | None = setting(
        "dp_gsd and epsilon_select: expected examples in the private sample; inf: all; null: m", at_least=1,
        infinite=True, default=None,
    )  # fmt: skip
    sketch: int | None = setting(
        "dp_gsd and epsilon_select: dimensions that gradients are mapped to; null: 256, epsilon_select: 1024",
        at_least=1, default=None,
    )  # fmt: skip


@dataclass
class Privacy:
    """How the guarantee is accounted for."""

    delta: float = setting("delta of the guarantee", over=0, below=1)
    accounting: Accounting = setting("prv: sound; paper: GEP's published noise scale, NOT a valid guarantee")
    secure_noise: bool = setting("sample and noise from the operating system's entropy: not reproducible, for releases")
    noise_multiplier: float | None = setting(
        "full batches: this noise, for as many steps as epsilon allows (AdaMix); null: noise for the steps of training",
        over=0, default=None,
    )  # fmt: skip
    weak: bool = setting("permit a delta above 1/n; the guarantee is then called weak", default=False)


@dataclass
class Training:
    """The optimiser, its batches and its schedule."""

    epochs: float = setting("expected passes over the private data", over=0)
    steps: int | None = setting("so many steps, whatever epochs says", at_least=1, at_most=MOST_STEPS, default=None)
    batch_size: int = setting(
        "expected size of a Poisson batch, and the fixed denominator; at least n: full batch", at_least=1
    )
    learning_rate: float = setting("of SGD, on the mean gradient", over=0)
    momentum: float = setting("of SGD", at_least=0, below=1)
    weight_decay: float = setting("L2 penalty of SGD, added after the noise", at_least=0)
    milestones: list[float] = setting(
        "fractions of the steps after which the learning rate is multiplied by decay", at_least=0, at_most=1
    )
    decay: float = setting("factor of the learning rate at a milestone", over=0, at_most=1)
    chunk: int | None = setting(
        "examples per pass through the network; null: up to 256 on a CPU, 500 on a GPU", at_least=1, neutral=True
    )
    checkpoint_seconds: float = setting("time between checkpoints, s", at_least=0, neutral=True)
    optimizer: Optimizer = setting("sgd, or adam with its default moments (momentum unused)", default=Optimizer.sgd)
    average: bool = setting("end with 2 / (T (T + 1)) sum_t t w_t (AdaMix, Theorem 3), not w_T", default=False)
    inverse_decay: float | None = setting(
        "learning rate 2 / (this (t + 1)) at step t (AdaMix, Theorem 3)", over=0, default=None
    )


@dataclass
class Common:
    """Keys that every sub-command with data has."""

    seed: int = setting("decides weights, labels, sample and noise", at_least=0, at_most=2**63 - 1)
    device: Device = setting("auto: cuda where there is one", neutral=True)
    threads: int | None = setting("CPU threads; null: all", at_least=1, neutral=True)
    data_root: str = setting("folder with the data", neutral=True)
    results: str = setting("folder for records", neutral=True)
    download: bool = setting("fetch a missing dataset", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class Select:
    """Private selection of the public data, with epsilon_select."""

    cap: float = setting(
        "how much the candidates' shares of an example's gradient may differ and count in full", over=0, at_most=1,
        default=0.2,
    )  # fmt: skip
    margin: float | None = setting(
        "refuse where a candidate that is so much better, on average, is not chosen with 95 %", over=0, at_most=1,
        default=None,
    )  # fmt: skip


@dataclass
class RunConfig(Common):
    """`pubsel run`."""

    label: str = setting("names a setting in tables, such as paper or tuned")
    estimate: bool = setting("say first what the run will take, and refuse what does not fit", neutral=True)
    replay: str | None = setting("a record's file or name: repeat it, say whether it comes out the same", neutral=True)
    tracking: Tracking = setting("tensorboard: curves of loss, norms and epsilon in the run's folder", neutral=True)
    profile: bool = setting("profile one step on random images: trace.json and costliest.txt", neutral=True)
    epsilon: float = setting("epsilon of the guarantee; inf: no noise, no guarantee", over=0, infinite=True)
    pair: Pair = field(default_factory=Pair)
    model: Model = field(default_factory=Model)
    algorithm: dict[str, Any] = field(default_factory=dict)
    distance: Distance = field(default_factory=Distance)
    privacy: Privacy = field(default_factory=Privacy)
    training: Training = field(default_factory=Training)
    epsilon_select: float | None = setting("pair.public=auto: epsilon of the selection", over=0, default=None)
    select: Select = field(default_factory=Select)


@dataclass
class Audit:
    """How `pubsel audit` attacks a training."""

    kind: AuditKind = setting(
        "white_box: canaries in the gradients, every noisy sum is seen; black_box: examples of noise, the trained "
        "model is seen; per_instance: no attack, the privacy loss of each private example"
    )
    canaries: int = setting("how many, each in the data with probability 1/2", at_least=10)
    guesses: float = setting("share of the canaries, the most extreme ones, guessed for any program", over=0, at_most=1)
    confidence: float = setting("of each lower bound", over=0, below=1)
    every: int = setting("per_instance: steps between two passes over all private examples; 1 is exact", at_least=1)


@dataclass
class AuditConfig(RunConfig):
    """`pubsel audit`."""

    audit: Audit = field(default_factory=Audit)


@dataclass
class RankConfig(Common):
    """`pubsel rank`."""

    private: str = setting("the private data: a name in conf/dataset, or a path")
    public: list[Any] = setting("the candidates: names or paths, or lists of them that are combined: [A,[B,C]]")
    convert: Convert = setting("how public images reach the private shape: resize (and grey/colour), or exact: refuse")
    model: Model = field(default_factory=Model)
    distance: Distance = field(default_factory=Distance)
    epsilon_select: float | None = setting(
        "choose one candidate with this differential privacy, and show nothing else; null: measure, not private",
        over=0, default=None,
    )  # fmt: skip
    select: Select = field(default_factory=Select)
    secure_noise: bool = setting(
        "private releases: sample and noise from the operating system's entropy, not reproducible", default=False
    )
    weak: bool = setting("permit a distance.delta above 1/n; the guarantee is then called weak", default=False)
    overlap: Overlap = setting(
        "images that are private and public, or in two combined sets: refuse, or drop them from the public side",
        default=Overlap.refuse,
    )

    def __post_init__(self) -> None:
        self.public = candidates_of("public", self.public)


@dataclass
class AttackConfig(Common):
    """`pubsel attack`."""

    attack: Attack = setting("gsd_white_box, gsd_black_box (GSD, Tables 8 and 9), or loss: of trained models")
    run: str | None = setting("loss: name of a finished run, a pattern such as *-adamix-*, or all")
    private: str = setting("gsd: the private data: a name in conf/dataset, or a path")
    public: list[Any] = setting("gsd: the public sets whose distances are released: names, paths, or lists of them")
    convert: Convert = setting("how public images reach the private shape: resize (and grey/colour), or exact: refuse")
    known: list[int] = setting("gsd: how many of the distance.m private examples the attacker knows", at_least=2)
    trials: int = setting("gsd: so many times, each with other private examples and networks", at_least=1)
    targets: int = setting("gsd_white_box: examples of each trial of which all others are known", at_least=1)
    model: Model = field(default_factory=Model)
    distance: Distance = field(default_factory=Distance)

    def __post_init__(self) -> None:
        self.public = candidates_of("public", self.public)


@dataclass
class TableConfig:
    """`pubsel table`."""

    table: str = setting("name of a table in conf/tables")
    results: str = setting("folder with the records (runs/, distances/) and for tables/", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class ReportConfig:
    """`pubsel report`."""

    results: str = setting("folder with the records", neutral=True)
    output: str | None = setting("the file; null: report.html in results", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class RunsConfig:
    """`pubsel runs`."""

    action: str = setting("list, show or delete")
    name: str | None = setting("a run's name, or a part of it")
    where: list[str] = setting("which runs: key=value,value of a record or its settings; state=finished, stale, ...")
    results: str = setting("folder with the runs", neutral=True)
    yes: bool = setting("delete without asking", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class DataConfig:
    """`pubsel data`."""

    action: str = setting("list, prepare or check")
    name: str | None = setting("prepare: the dataset; check: the dataset, or a path")
    data_root: str = setting("folder with the data", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class Dataset:
    """One file of conf/dataset: what is known of a named dataset before it is there."""

    source: str = setting("module of pubsel.data that reads it")
    options: dict[str, Any] = field(default_factory=dict)
    title: str = setting("what it is, in one line")
    classes: int = setting("number of classes", at_least=1)
    classes_of: str | None = setting("the set whose classes these are, in the same order", default=None)
    images_of: str | None = setting("the set whose images these are too, in another split", default=None)
    shares_images_with: list[str] = field(
        default_factory=list, metadata={"about": "sets that have some of its images, at other sizes"}
    )
    metric: Metric = setting("accuracy, or auc where classes are unbalanced or many at once")
    shape: list[int] = setting("channels, height, width; of the prepared images")
    mean: list[float] = setting("per channel in [0, 1], a published constant, never computed from private data")
    std: list[float] = setting("per channel in [0, 1], likewise")
    licence: str = setting("licence or terms")
    size_mb: float = setting("download in MB", at_least=0)
    url: str = setting("where it comes from")
    instructions: str | None = setting("steps for data that cannot be fetched without a person; null: fetched for you")


def one_or_combined(key: str, public: Any) -> str | list[str] | None:
    """Public data as a key may give it (OmegaConf knows no type `str | list[str] | None`): one name or path, several
    that are combined, or None. A list of one is that one. UsageError for a list that is empty, nested or repeats."""
    if public is None or isinstance(public, str):
        return public
    names = public if isinstance(public, list) else [public]
    if not names or not all(isinstance(name, str | int | float) for name in names):
        raise UsageError(f"{key}={_typed(public)}: give a name or path, or a list of them such as [cifar10,mnist]")
    names = [str(name) for name in names]
    if len(set(names)) < len(names):
        raise UsageError(f"{key}={_typed(names)}: give each set once")
    return names if len(names) > 1 else names[0]


def candidates_of(key: str, candidates: Any) -> list[Any]:
    """Candidates for public data as `key` gives them, each as `one_or_combined` has it; UsageError where one is
    none."""
    candidates = candidates if isinstance(candidates, list) else [candidates]
    if None in candidates:
        raise UsageError(f"{key}=[null]: a candidate is a name or path, or a list of them")
    return [one_or_combined(key, candidate) for candidate in candidates]


def public_sets(public: str | list[str] | None) -> list[str]:
    """The datasets that `one_or_combined` public data is made of."""
    return [] if public is None else [public] if isinstance(public, str) else public


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return json.dumps(value, default=str).replace('"', "").replace(", ", ",")


LEAST, MOST = 1e-30, 1e38  # sizes of a number that float32 holds, with room for a square root and a quotient
MANY = 10**9  # of examples, directions, pixels, ...: more than memory holds
LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "over": (operator.gt, "greater than"),
    "at_least": (operator.ge, "at least"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}


def check(schema: type[T], values: DictConfig | dict[str, Any], where: str = "") -> T:
    """An instance of the dataclass `schema` with `values`; UsageError names the first key that is unknown, missing,
    of the wrong type or out of range. `where` is the key of `values` itself, for the message."""
    prefix = f"{where}." if where else ""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), values)
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        inner = str(error.full_key or "")
        key, siblings = f"{prefix}{inner}".strip("."), _siblings(schema, inner)
        if isinstance(error, MissingMandatoryValue):
            text = f"{key} has no value: give {key}=..."
        elif isinstance(error, ConfigKeyError):
            near = nearest(inner.split(".")[-1], siblings)
            text = f"unknown key {key}{near}" + (f"; here: {', '.join(sorted(siblings))}" if siblings else "")
        else:
            about = siblings.get(inner.split(".")[-1].split("[")[0])
            text = f"{key}: {str(error.msg or error).splitlines()[0]}" + (f" ({about})" if about else "")
        raise UsageError(text) from None
    _check_ranges(result, prefix)
    return result  # type: ignore[return-value]


def instance(group: str, base: type[T], values: dict[str, Any]) -> T:
    """What the class that `_target_` names makes of the other values, checked; UsageError names the key at fault, below
    `group`. base: the class must be a subclass of it."""
    from hydra.utils import get_class

    target = values.get("_target_")
    try:
        cls = get_class(target)  # type: ignore[arg-type]
    except Exception as error:
        raise UsageError(f"{group}._target_={target}: {str(error).splitlines()[0]}") from None
    if not issubclass(cls, base):
        raise UsageError(f"{group}._target_={target}: give a subclass of {base.__module__}.{base.__name__}")
    return check(cls, {key: value for key, value in values.items() if key != "_target_"}, group)


def nearest(typed: str, known: Iterable[str]) -> str:
    """What names the known dotted key that is most like what was typed, for a message; "" where none is."""
    by_last: dict[str, str] = {}
    for key in sorted(known):
        by_last.setdefault(key.split(".")[-1], key)
    found = difflib.get_close_matches(typed, sorted(known), 1, 0.7)
    if "." not in typed and (not found or typed in by_last):
        found = [by_last[last] for last in difflib.get_close_matches(typed, list(by_last), 1, 0.7)] or found
    return f" (did you mean {found[0]}?)" if found else ""


def keys(schema: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a dataclass of settings, of groups too."""
    found = []
    for f in dataclasses.fields(schema):
        found.append(f"{prefix}{f.name}")
        inner = next((t for t in (f.type, *get_args(f.type)) if dataclasses.is_dataclass(t)), None)
        found += keys(inner, f"{prefix}{f.name}.") if inner else []
    return found


@cache
def algorithm_keys() -> frozenset[str]:
    """The dotted keys of all algorithms of conf/."""
    files = [yaml.safe_load(path.read_text()) or {} for path in sorted((CONF / "algorithm").glob("*.yaml"))]
    return frozenset(f"algorithm.{key}" for made in files for key in made if key != "defaults")


def _siblings(schema: Any, key: str) -> dict[str, str]:
    """Names and meanings of the keys beside the dotted `key`; none where a free mapping holds it."""
    fields = dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ()
    first, _, rest = key.partition(".")
    if rest:
        return _siblings(next((f.type for f in fields if f.name == first), None), rest)
    return {f.name: f.metadata.get("about", "") for f in fields}


def _check_ranges(node: Any, prefix: str) -> None:
    for f in dataclasses.fields(node):
        value, key = getattr(node, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            _check_ranges(value, f"{key}.")
        if f.metadata.get("named"):
            check_name(key, value)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, float) and not (
                (number == math.inf and f.metadata.get("infinite")) or math.isfinite(number)
            ):
                raise UsageError(f"{key}={number}: must be a finite number ({f.metadata['about']})")
            counts = isinstance(number, int) and f.metadata.get("at_most") is None  # else its own limit says more
            least, most = (1, MANY) if counts else (LEAST, MOST)
            if number != 0 and math.isfinite(number) and not least <= abs(number) <= most:
                size = "small" if abs(number) < least else "large"
                raise UsageError(f"{key}={number}: too {size} to compute with ({f.metadata['about']})")
            for name, (holds, words) in LIMITS.items():
                limit = f.metadata.get(name)
                if limit is not None and not holds(number, limit):
                    raise UsageError(f"{key}={number}: must be {words} {limit} ({f.metadata['about']})")


def check_name(key: str, name: Any) -> None:
    """UsageError where a name that is part of a folder's could leave it, or not be read."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"{key}={name}: a name has letters, digits, _ . + and - alone")


def check_method(algorithm: dict[str, Any], own: list[Path]) -> None:
    """UsageError where algorithm.name is no name, or one that its class has not: a record would lie.

    A class has the names that conf/algorithm gives it, and those that a file of the folders `own` (--config-dir) gives.
    A class that conf/ does not know, a user's own, may have any that no other class has.
    """
    name, target = algorithm.get("name"), algorithm["_target_"]
    check_name("algorithm.name", name)
    known = methods(CONF)
    mine = [one for one, targets in known.items() if target in targets]
    given = not mine or any(target in methods(folder).get(str(name), ()) for folder in own)
    if name in mine or (given and name not in known):
        return
    may = f"it may be {', '.join(sorted(mine))}" if mine else f"{name} is another method"
    raise UsageError(f"algorithm.name={name}: {target} has not this name, {may}; to name a setting, give label={name}")


def option(group: str, name: str, conf: Path | None = None) -> dict[str, Any]:
    """The values of conf/GROUP/NAME.yaml on top of those of its defaults, as Hydra composes them. conf: a folder whose
    files come before those of the package."""
    files = [folder / group / f"{name}.yaml" for folder in (conf or CONF, CONF)]
    values: dict[str, Any] = (
        yaml.safe_load(next((file for file in files if file.exists()), files[-1]).read_text()) or {}
    )
    for base in reversed([base for base in values.pop("defaults", []) if base != "_self_"]):
        values = option(group, base, conf) | values
    return values


@cache
def methods(conf: Path, group: str = "algorithm") -> dict[str, set[str]]:
    """What conf/GROUP/*.yaml names: the name of each method, and the classes of the files that give it."""
    found: dict[str, set[str]] = {}
    for path in sorted((conf / group).glob("*.yaml")):
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError, TypeError):  # Hydra says what is wrong
            made = option(group, path.stem, conf)
            found.setdefault(str(made.get("name")), set()).add(str(made.get("_target_")))
    return found


def datasets() -> list[str]:
    """Names of the datasets in conf/dataset."""
    return sorted(path.stem for path in (CONF / "dataset").glob("*.yaml"))


def dataset(name: str) -> Dataset:
    """What conf/dataset says of `name`; UsageError lists the known names."""
    path = CONF / "dataset" / f"{name}.yaml"
    if not re.fullmatch(r"\w+", name) or not path.exists():
        raise UsageError(f"unknown dataset {name!r}: use a path, or one of {', '.join(datasets())}")
    return check(Dataset, yaml.safe_load(path.read_text()), f"dataset {name}: ")


def kept_folder(name: str, info: Dataset, root: Path) -> Path:
    """Where the images of a named set are kept once they are read. Its name depends on the set's reader, rules and
    shape, so that another rule never meets the images of an earlier one."""
    rules = {"reader": info.source, "options": info.options, "shape": info.shape}
    return root / "prepared" / f"{name}-{digest(rules)}"


def is_path(name: str) -> bool:
    """Whether a dataset is given by a path (it has a separator or a suffix) and not by a name."""
    return os.sep in name or name.endswith((".npz", ".csv"))


def is_there(path: Path) -> bool:
    """Whether a file is there, or a folder with something in it (a failed download may leave an empty one)."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def settings(config: Any) -> dict[str, Any]:
    """The keys of `config` that can change a result, as plain JSON values."""
    kept: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.metadata.get("neutral") or (f.default is not MISSING and value == f.default):
            continue
        if dataclasses.is_dataclass(value):
            value = settings(value)
            if not value:  # all of it has its default
                continue
        if value == math.inf:
            value = "inf"  # JSON knows no infinity
        kept[f.name] = value.name if isinstance(value, Enum) else value
    return kept


def default(key: str) -> Any:
    """What a dotted key of `pubsel run` is where the settings of a record lack it, as `settings` leaves out a default;
    None where there is none, or where it is a key of an algorithm."""
    schema: Any = RunConfig
    *groups, last = key.split(".")
    for name in groups:
        schema = next((f.type for f in dataclasses.fields(schema) if f.name == name), None)
        if not dataclasses.is_dataclass(schema):
            return None
    found = next((f.default for f in dataclasses.fields(schema) if f.name == last), MISSING)
    return None if found is MISSING else found.name if isinstance(found, Enum) else found


def is_weak(delta: float, n: int) -> bool:
    """Whether a guarantee for n examples says little: above delta = 1/n it holds even for publishing an example that
    was chosen at random. Rounding in a sum of parts of delta does not count."""
    return delta > (1 + 1e-9) / n


def digest(values: dict[str, Any]) -> str:
    """Ten hexadecimal digits that depend on every value and on no order of keys."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def identity(config: RunConfig) -> str:
    """The name of a run's folder: readable, and different whenever a setting that can change the result is."""
    public = short(config.pair.public) if config.pair.public else "none"
    algorithm = config.algorithm.get("name", "algorithm")
    readable = (
        f"{short(config.pair.private)}-{public}-{config.model.name}-{algorithm}-eps{config.epsilon:g}-seed{config.seed}"
    )
    return folder_name(readable, settings(config))


def folder_name(readable: str, values: dict[str, Any]) -> str:
    """A name that tells something to people, cut to what a file system takes, with a digest of all settings."""
    end = f"-{digest(values)}"
    return readable.encode()[: LONGEST - len(end)].decode(errors="ignore") + end


def short(name: str | list[str]) -> str:
    """A dataset name or path as part of a folder name; a+b for a list of them."""
    if isinstance(name, list):
        return "+".join(short(part) for part in name)
    return re.sub(r"[^\w.]+", "_", Path(name).name if is_path(name) else name)
