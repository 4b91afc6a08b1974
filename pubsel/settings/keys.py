"""The keys of every sub-command: type, range and meaning. Their values live in conf/*.yaml."""

import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pubsel.messages import UsageError
from pubsel.settings.schema import setting

MOST_EPOCHS = 10**6  # and iterations of a loop


MOST_STEPS = 10**7  # beyond, the accountant takes minutes to say that it cannot


SHARED_GPU = "PUBSEL_SHARED_GPU"  # in the environment of cells that have one GPU among them


Device = Enum("Device", ["auto", "cpu", "cuda"])


Convert = Enum("Convert", ["resize", "exact"])


Labels = Enum("Labels", ["random", "given", "auto"])  # not "true", which YAML reads as a truth value


Accounting = Enum("Accounting", ["prv", "paper"])


Norm = Enum("Norm", ["replace", "freeze"])


Metric = Enum("Metric", ["accuracy", "auc"])


Take = Enum("Take", ["test", "train"])


Overlap = Enum("Overlap", ["refuse", "drop"])


Optimizer = Enum("Optimizer", ["sgd", "adam"])


Tracking = Enum("Tracking", ["none", "tensorboard"])


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
    """Private selection of the public data, with epsilon_select. It compares subspaces as distance=gsd does."""

    cap: float = setting(
        "how much the candidates' shares of an example's gradient may differ and count in full", over=0, at_most=1,
        default=0.2,
    )  # fmt: skip
    margin: float | None = setting(
        "refuse where a candidate that is so much better, on average, is not chosen with 95 %", over=0, at_most=1,
        default=None,
    )  # fmt: skip
    private_m: float | None = setting(
        "expected examples in the private sample; inf: all; null: distance.m", at_least=1, infinite=True, default=None
    )
    sketch: int = setting("dimensions that gradients are mapped to; they cost no privacy", at_least=1, default=1024)


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
    distance: dict[str, Any] | None = setting("what the distance of the two sets is, and its settings; null: none")
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
    distance: dict[str, Any] | None = setting("what the distance of the two sets is, and its settings; null: none")
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
    distance: dict[str, Any] | None = setting("what the distance of the two sets is, and its settings; null: none")

    def __post_init__(self) -> None:
        self.public = candidates_of("public", self.public)


@dataclass
class TableConfig:
    """`pubsel table`."""

    table: str = setting("name of a table in conf/tables")
    results: str = setting("folder with the records (runs/, distances/) and for tables/", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class MakeConfig:
    """`pubsel make`."""

    name: str = setting("a table of conf/tables, a work of conf/work, or a part of either: gsd_table2_fmnist")
    dry: bool = setting("only list the cells, which of them are there, and the hours to expect", neutral=True)
    public: str | None = setting("other public sets, A,B, in place of those that its steps go through")
    words: list[str] = setting("further settings of every step that runs something")
    results: str = setting("folder with the records", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class FigureConfig(RunConfig):
    """`pubsel figure`."""

    figure: str = setting("its name: a curve, a table, clustermap, gsd_figure1, ...; all: each that records allow")
    sets: list[Any] | None = setting("the data sets that are compared: names or paths; null: those of pair.public")
    k: list[int] | None = setting("during training: dimensions of the public subspace; null: the figure's", at_least=1)
    points: int | None = setting("during training: how many steps are looked at; null: the figure's", at_least=1)


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


def neutral(schema: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a dataclass of settings that cannot change a result."""
    found = []
    for f in dataclasses.fields(schema):
        found += [f"{prefix}{f.name}"] if f.metadata.get("neutral") else []
        found += neutral(f.type, f"{prefix}{f.name}.") if dataclasses.is_dataclass(f.type) else []
    return found


def of_run(settings: RunConfig) -> RunConfig:
    """The settings of `pubsel run` among those of a command that has more."""
    return RunConfig(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(RunConfig)})


def is_weak(delta: float, n: int) -> bool:
    """Whether a guarantee for n examples says little: above delta = 1/n it holds even for publishing an example that
    was chosen at random. Rounding in a sum of parts of delta does not count."""
    return delta > (1 + 1e-9) / n


SCHEMAS: dict[str, type] = {
    "run": RunConfig, "rank": RankConfig, "attack": AttackConfig, "audit": AuditConfig, "table": TableConfig,
    "make": MakeConfig, "figure": FigureConfig, "report": ReportConfig, "runs": RunsConfig, "data": DataConfig,
}  # fmt: skip
