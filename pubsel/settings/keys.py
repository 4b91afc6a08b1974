"""The keys of every sub-command: type, range and meaning. Their values live in conf/*.yaml."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pubsel.messages import UsageError
from pubsel.settings.schema import setting

MOST_EPOCHS = 10**6  # and iterations of a loop
MOST_STEPS = 10**7  # with more, the accountant takes minutes before it fails

Device = Enum("Device", ["auto", "cpu", "cuda"])
Convert = Enum("Convert", ["resize", "exact"])
ABOUT_CONVERT = (
    "resize: scale public images (and convert grey/colour) to the private shape; exact: fail if shapes differ"
)
Labels = Enum("Labels", ["random", "given", "auto"])  # not "true", which YAML reads as a truth value
Accounting = Enum("Accounting", ["prv", "paper"])
Norm = Enum("Norm", ["replace", "freeze"])
Metric = Enum("Metric", ["accuracy", "balanced_accuracy", "auc"])
Interpolation = Enum("Interpolation", ["bilinear", "bicubic"])
Take = Enum("Take", ["test", "same_test", "train"])
Overlap = Enum("Overlap", ["refuse", "leave"])
Fold = Enum("Fold", ["apart", "fold"])
Optimizer = Enum("Optimizer", ["sgd", "adam"])
Augment = Enum("Augment", ["flip", "crop"])
PublicLabels = Enum("PublicLabels", ["auto", "given", "none", "names"])
ABOUT_PUBLIC_LABELS = (
    "public labels that are used: auto, if both are of one data set; given, of another set with the same classes in "
    "the same order, which somebody has looked at: equal names may mean other things; none; names, with "
    "features of CLIP: each public example gets the class whose name its text encoder finds nearest"
)
Format = Enum("Format", ["safetensors", "onnx"])
Attack = Enum("Attack", ["gsd_white_box", "gsd_black_box", "loss"])
EMA = "ema"  # training.average
POOL = "pool"  # pair.public: examples of pair.pool
WEIGHTLESS = ("pixels", "scattering", "rows")  # backbones that are no network
By = Enum("By", ["gsd", "coverage"])
AuditKind = Enum("AuditKind", ["white_box", "black_box", "per_instance"])
Scale = Enum("Scale", ["auto", "private", "none"])

ABOUT_LABELS = (
    "labels of the public images: random; given: their own, which must be of the private task; auto: given if they "
    "are, else random"
)
ABOUT_DISTANCE = "the distance to measure between private and public data, and its settings; null: none"
ABOUT_BUDGET = (
    "the most epsilon that all releases of these private data may spend, or [EPSILON,DELTA]; what would exceed it is "
    "refused before anything is drawn. The ledger keeps it for later commands. null: what the ledger has, if anything"
)
ABOUT_LIKE = "file or name of a record: start from its settings; what else the command line gives replaces them"


@dataclass
class Read:
    """Rules by which the files of a user's own data are read."""

    accept: list[str] | None = setting(
        "findings that are no reason to stop, such as [conflict]; see the list of findings in the docs", default=None
    )
    skip: bool = setting("leave out files that cannot be read, instead of naming them all and stopping", default=False)
    labels: Fold = setting(
        "apart: labels that differ in case, blanks or zeros alone are an error; fold: they are one class",
        default=Fold.apart,
    )
    size: int | None = setting(
        "side of the square that images of several sizes are brought to, in pixels; null: the size that nine tenths "
        "have, or that a backbone takes",
        at_least=1,
        at_most=16384,
        default=None,
    )
    channels: int | None = setting(
        "1: grey; 3: colour; null: grey if nine tenths of the images are", at_least=1, at_most=3, default=None
    )
    bits: int | None = setting(
        "bits of a value in 16-bit images, such as 12; null: 16", at_least=8, at_most=16, default=None
    )
    path: str | None = setting("column of a table with the image files; null: by its name", default=None)
    label: Any = setting(
        "column of a table with the labels, or [A,B,...]: columns of 0 and 1, which an example may have several of; "
        "null: by its name",
        default=None,
    )
    split: str | None = setting(
        "column of a table with train or test; null: by its name; none: no column", default=None
    )
    text: str | None = setting(
        "column of a table with texts; null: by its name; none: it has none, only numbers", default=None
    )

    bounds: Any = setting(
        "rows of numbers: JSON file with [least, most] or a list of words for columns of a table, by their names; or "
        "[least,most] of all numbers of an array. They must be public. null: none",
        default=None,
    )
    scale: Scale = setting(
        "numbers without bounds: private: brought to one scale by public rows, or by a part of epsilon; none: as they "
        "are; auto: private for tables, none for arrays",
        default=Scale.auto,
    )

    def __post_init__(self) -> None:
        if self.channels == 2:
            raise UsageError("channels=2: take 1 (grey) or 3 (colour)")
        self.label = one_or_combined("label", self.label)
        if self.bounds is not None and not isinstance(self.bounds, str):
            try:
                least, most = map(float, self.bounds)
            except (TypeError, ValueError):
                raise UsageError(f"bounds={self.bounds}: give [least,most], or a JSON file") from None
            if not -math.inf < least < most < math.inf:
                raise UsageError(f"bounds=[{least:g},{most:g}]: give [least,most], the first of which is lower")
            self.bounds = [least, most]


def read_of(settings: Read) -> Read:
    """Return the keys of `Read` of a command that has them among its own."""
    return Read(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Read)})


@dataclass
class Pair:
    """The private data, the public data, and how public images are converted to the private shape."""

    private: str = setting(
        "private data: name of a dataset in conf/dataset, or a path: image folder, CSV of paths and labels, npz"
    )
    public: Any = setting(
        "public data: a name or a path; [A,B]: equal shares of m from each; auto: a set chosen privately from "
        "candidates; pool: examples chosen privately from pool; null if the algorithm uses no public data"
    )
    m: int | None = setting("number of public examples; null: all of the set, at most 2,000", at_least=1)
    take: Take = setting(
        "which public examples are used: test, the first m of the test split (GSD, GEP); same_test: as test, and the "
        "first m private test images are left out of every test, so that runs with other public sets, or none, have "
        "one test set; train, a fixed random part of the training split, which is then not private (PILLAR, AdaMix)",
        default=Take.test,
    )
    shots: int | None = setting(
        "take=train: number of public examples per class, or all that it has, instead of m", at_least=1, default=None
    )
    public_share: float | None = setting(
        "take=train: share of the training split that becomes public, instead of m", over=0, below=1, default=None
    )
    private_share: float = setting("share of the private examples that is used", over=0, at_most=1, default=1.0)
    validation: float = setting(
        "share of the private examples that is held out for selecting settings; the guarantee does not cover the "
        "selection",
        at_least=0,
        below=1,
        default=0.0,
    )
    reserved: float = setting(
        "share of the private examples, a part of pair.validation, that is neither trained on nor validated on: pubsel "
        "tune measures its model on it",
        at_least=0,
        below=1,
        default=0.0,
    )
    seed: int = setting(
        "seed of what is drawn here: public examples of the training split, private_share and validation; "
        "${seed}: that of the run",
        at_least=0,
        default=0,
    )
    convert: Convert = setting(ABOUT_CONVERT)
    candidates: list[Any] | None = setting(
        "public=auto: the public sets to choose from, such as [A,B,[C,D]]", default=None
    )
    pool: list[str] | None = setting(
        "public=pool: the sets whose examples are chosen from: names or paths, folders of embeddings among them",
        default=None,
    )
    pool_m: int | None = setting(
        "public=pool: examples of each set, its test images first, or all if it has fewer; null: all",
        at_least=1,
        default=None,
    )
    unit: str | None = setting(
        "who is protected: null, one example; or a person with all their examples, who is named by this column of a "
        "CSV, by the arrays train_UNIT and test_UNIT of an npz, by folders within the class folders (folder), or by a "
        "named set (lesion of ham10000, patient of chestxray14 and chexpert)",
        default=None,
    )
    overlap: Overlap | None = setting(
        "refuse: fail if an image is both private and public, or both a training and a test image; leave: such images "
        "leave the private training data, and equal images are held out together; null: refuse for a set of "
        "conf/dataset, leave for your own data",
        default=None,
    )
    metric: Metric | None = setting(
        "how the model is measured: accuracy; balanced_accuracy, the mean over classes of the share of their test "
        "images that is classified correctly; auc, the mean over classes or labels of the area under the ROC curve. "
        "The last two leave out classes without test images. Several labels an image: auc only. null: what "
        "conf/dataset says; of your own data accuracy, or auc if an image has several labels",
        default=None,
    )

    read: Read = field(default_factory=Read)

    def __post_init__(self) -> None:
        self.public = one_or_combined("pair.public", self.public)
        if self.unit is not None and not str(self.unit).strip():
            raise UsageError("pair.unit is empty: give the column that names people, or null for one example")
        if self.candidates is not None:
            self.candidates = candidates_of("pair.candidates", self.candidates)
        if self.pool is not None:
            self.pool = sorted(public_sets(one_or_combined("pair.pool", self.pool)))


@dataclass
class Scattering:
    """Wavelet scattering (Bruna and Mallat 2013), normalised as by Tramer and Boneh (ICLR 2021); it has no weights."""

    J: int = setting("scales: features are averaged over 2^J pixels", at_least=1, at_most=8)
    L: int = setting("angles of the wavelets", at_least=1, at_most=64)
    order: int = setting("1: wavelets of the image; 2: also wavelets of their moduli", at_least=1, at_most=2)
    colour: bool = setting("take the three channels of a colour image, each alone; false: its grey values")
    groups: int | None = setting(
        "groups of channels that get mean 0 and variance 1 in each image; null: none do", at_least=1
    )


ABOUT_SCALE = "for pixels in [0, 1]: divide values for pixels in [0, 255] by 255"
ABOUT_OPTIONS = "shape and sizes that differ from those of the architecture, such as img_size, as timm names them"


@dataclass
class Backbone:
    """A frozen timm network or scattering; a linear classifier is trained on its features. null: the value of the
    checkpoint."""

    architecture: str = setting(
        "name of a timm model, such as resnet50.tv_in1k; scattering; pixels; rows; or, for texts, an encoder of "
        "transformers, hf:NAME or hf:./FOLDER"
    )
    pretrained: bool = setting("load the published weights", default=True)
    checkpoint: str | None = setting(
        "a weight file instead of the published weights; a relative path is searched for in data_root too",
        default=None,
    )
    prefix: str | None = setting("checkpoint: prefix of the names of the weights, such as backbone.", default=None)
    options: dict[str, Any] = field(default_factory=dict, metadata={"about": ABOUT_OPTIONS})
    input_size: int | None = setting(
        "images are resized to this side, in pixels; null with scattering: to 32 if they are larger",
        at_least=1,
        at_most=16384,
        default=None,
    )
    crop: float | None = setting(
        "side of the central crop, as a share of the side of the resized image", at_least=0.1, at_most=1, default=None
    )
    mean: list[float] | None = setting(f"mean of each channel, {ABOUT_SCALE}", at_least=0, at_most=1, default=None)
    std: list[float] | None = setting(
        f"standard deviation of each channel, {ABOUT_SCALE}", over=0, at_most=1, default=None
    )
    interpolation: Interpolation | None = setting("how images are resized", default=None)
    scattering: Scattering | None = setting("architecture=scattering: its settings", default=None)
    stages: bool | None = setting(
        "a network: features of stages before the last layer too, mean and deviation over positions; null: with "
        "whitened_head, if there are public data",
        default=None,
    )


@dataclass
class Lora:
    """New low-rank layers next to frozen linear ones (Hu et al. 2022)."""

    layers: list[str] = setting("the linear layers, by the last part of their names, such as qkv")
    r: int = setting("rank of the new layers", at_least=1)
    alpha: float = setting("alpha / r scales the output of the new layers", over=0)


@dataclass
class Adapters:
    """New bottleneck layers after frozen layers (Houlsby et al. 2019)."""

    layers: list[str] = setting("the frozen layers, by the last part of their names, such as attn, mlp")
    size: int = setting("width of each bottleneck", at_least=1)


@dataclass
class Model:
    """The network."""

    name: str = setting(
        "fmnist_cnn, mnist_cnn, probe, linear, resnet20, wrn_10_1, wrn_16_4, wrn_40_4 or torchvision; any name for "
        "timm and with a backbone",
        named=True,
    )
    architecture: str | None = setting("name of the timm or torchvision model; null for the small networks")
    pretrained: bool = setting("timm and torchvision: load the published weights")
    checkpoint: str | None = setting(
        "timm: a weight file instead of the published weights; a relative path is searched for in data_root too"
    )
    norm: Norm = setting(
        "what to do with BatchNorm, which mixes examples: replace it by GroupNorm (opacus ModuleValidator), or freeze "
        "it"
    )
    input_size: int | None = setting(
        "images are resized to this side, in pixels; null: not resized", at_least=1, at_most=16384
    )
    backbone: Backbone | None = setting("train a linear classifier on the features of this network", default=None)
    bias: bool = setting("backbone: whether the linear classifier has a bias", default=True)
    trained: list[str] | None = setting(
        "what is trained: names of layers or parameters, such as [fc, layer3.32.conv1], or all, head, bias, "
        "first_last; null: all, or if lora or adapters are set, only those and the head",
        default=None,
    )
    lora: Lora | None = setting("timm: low-rank layers", default=None)
    adapters: Adapters | None = setting("timm: adapters", default=None)
    options: dict[str, Any] | None = setting(f"timm: {ABOUT_OPTIONS}", default=None)
    mean: list[float] | None = setting(
        f"timm, with weights: mean of each channel, {ABOUT_SCALE}; null: the mean that the weights were trained with",
        at_least=0,
        at_most=1,
        default=None,
    )
    std: list[float] | None = setting(
        f"timm, with weights: standard deviation of each channel, {ABOUT_SCALE}; null: as for mean",
        over=0,
        at_most=1,
        default=None,
    )
    once: bool = setting(
        "compute the outputs of the layers below the first trained one only once and keep them in memory, instead of "
        "in each pass",
        default=False,
    )


@dataclass
class Privacy:
    """Settings of the guarantee and its accountant."""

    delta: float = setting("delta of the guarantee", over=0, below=1)
    accounting: Accounting = setting("prv: valid; paper: GEP's published noise scale, NOT a valid guarantee")
    secure_noise: bool = setting(
        "take sample and noise from the operating system's entropy: for releases; not reproducible"
    )
    noise_multiplier: float | None = setting(
        "full batches: this noise, for as many steps as epsilon allows (AdaMix); null: the noise that the steps of "
        "training need",
        over=0,
        default=None,
    )
    weak: bool = setting("allow a delta above 1/n; the guarantee is then called weak", default=False)
    measure: bool = setting(
        "release the quality on held-out private examples (pair.validation) with noise, at the same epsilon and delta",
        default=False,
    )


@dataclass
class Training:
    """The optimiser, its batches and its schedule."""

    epochs: float = setting("expected passes over the private data", over=0)
    steps: int | None = setting("number of steps, overrides epochs", at_least=1, at_most=MOST_STEPS, default=None)
    batch_size: int = setting(
        "expected size of a Poisson batch, and the fixed denominator; n or more: full batches", at_least=1
    )
    learning_rate: float | None = setting(
        "learning rate, for the mean gradient; null: what the noise allows, for a linear classifier on rows of norm 1",
        over=0,
    )
    momentum: float = setting("momentum of SGD", at_least=0, below=1)
    weight_decay: float = setting("L2 penalty, added after the noise", at_least=0)
    milestones: list[float] = setting(
        "fractions of the steps after which the learning rate is multiplied by decay", at_least=0, at_most=1
    )
    decay: float = setting("factor of the learning rate at each milestone", over=0, at_most=1)
    chunk: int | None = setting(
        "examples per pass through the network; null: up to 256 on a CPU, 500 on a GPU", at_least=1, neutral=True
    )
    checkpoint_seconds: float = setting("seconds between checkpoints", at_least=0, neutral=True)
    optimizer: Optimizer = setting("sgd, or adam with its default moments (ignores momentum)", default=Optimizer.sgd)
    average: Any = setting(
        "release an average in place of the last weights w_T: true: 2 / (T (T + 1)) sum_t t w_t (AdaMix, Theorem 3); "
        "ema: a moving one, which after step t keeps min(0.9999, (1 + t) / (10 + t)) of itself (De et al. 2022)",
        default=False,
    )
    augment: list[Augment] | None = setting(
        "images: train on random views: flip, mirrored left to right or not; crop, shifted by up to an eighth of the "
        "side, reflected at the edge; [flip,crop]: both",
        default=None,
    )
    views: int = setting(
        "augment: views of each example in a step, whose mean gradient is clipped (De et al. 2022); time grows with "
        "them, and memory does not",
        at_least=1,
        default=1,
    )
    inverse_decay: float | None = setting(
        "lambda of the learning rate 2 / (lambda (t + 1)) at step t (AdaMix, Theorem 3)", over=0, default=None
    )

    def __post_init__(self) -> None:
        if not isinstance(self.average, bool) and self.average != EMA:
            raise UsageError(f"training.average={self.average}: give true, false or {EMA}")
        # one spelling of each set, so that equal runs are one run
        self.augment = [kind for kind in Augment if kind in (self.augment or [])] or None


@dataclass
class Common:
    """Keys of every sub-command that reads data."""

    seed: int = setting("seed of weights, labels, sample and noise", at_least=0, at_most=2**63 - 1)
    device: Device = setting("auto: cuda if available, else cpu", neutral=True)
    threads: int | None = setting("number of CPU threads; null: all cores", at_least=1, neutral=True)
    data_root: str = setting("folder with the data", neutral=True)
    keep: bool = setting(
        "keep your own images decoded in DATA_ROOT/decoded, if they have 64 MiB of pixels or more, so that the next "
        "command reads them at once; `pubsel data forget PATH` deletes them. false: this command leaves none on disk",
        neutral=True,
        default=True,
    )
    results: str = setting("folder for the records", neutral=True)
    download: bool = setting("download a missing dataset, and published weights", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class Select:
    """Private selection of the public data, with epsilon_select."""

    by: By | None = setting(
        "gsd: compare subspaces of gradients as distance=gsd does; coverage: count the private examples that are like "
        "those of a candidate, in features of model.backbone; no public data is a candidate too, if the algorithm can "
        "do without; null: coverage with model.backbone, otherwise gsd. The other keys are of gsd",
        default=None,
    )
    cap: float = setting(
        "the shares of an example's gradient in the candidates' subspaces are clipped to a range of this width around "
        "their median",
        over=0,
        at_most=1,
        default=0.2,
    )
    margin: float | None = setting(
        "fail if a candidate that is better than the others by this much, on average, is chosen with probability below "
        "95 %; null: no such check",
        over=0,
        at_most=1,
        default=None,
    )
    private_m: float | None = setting(
        "expected size of the private sample; inf: all examples; null: distance.m",
        at_least=1,
        infinite=True,
        default=None,
    )
    sketch: int = setting("gradients are projected to this many dimensions; costs no privacy", at_least=1, default=1024)


@dataclass
class RunConfig(Common):
    """`pubsel run`."""

    label: str = setting("name of the setting in tables, such as paper or tuned")
    like: str | None = setting(ABOUT_LIKE, neutral=True, default=None)
    replay: str | None = setting(
        "file or name of a record: repeat its run and report whether the result is the same", neutral=True
    )
    epsilon: float = setting("epsilon of the guarantee; inf: no noise, no guarantee", over=0, infinite=True)
    budget: Any = setting(ABOUT_BUDGET, neutral=True, default=None)
    pair: Pair = field(default_factory=Pair)
    model: Model = field(default_factory=Model)
    algorithm: dict[str, Any] = field(default_factory=dict)
    distance: dict[str, Any] | None = setting(ABOUT_DISTANCE)
    privacy: Privacy = field(default_factory=Privacy)
    training: Training = field(default_factory=Training)
    epsilon_select: float | None = setting(
        "pair.public=auto or pool: epsilon of the private choice of the public set, or of its examples",
        over=0,
        default=None,
    )
    select: Select = field(default_factory=Select)


@dataclass
class Audit:
    """Settings of the attack by `pubsel audit` on a training."""

    kind: AuditKind = setting(
        "white_box: canaries are gradients, and the attacker sees every noisy sum; black_box: canaries are examples of "
        "noise, and the attacker sees the trained model; per_instance: no attack, the privacy loss of each private "
        "example"
    )
    canaries: int = setting("number of canaries, each in the data with probability 1/2", at_least=10)
    guesses: float = setting(
        "share of the canaries, those with the most extreme scores, that is guessed for the bound of any program",
        over=0,
        at_most=1,
    )
    confidence: float = setting("confidence of each lower bound", over=0, below=1)
    every: int = setting("per_instance: steps between two passes over all private examples; 1 is exact", at_least=1)


@dataclass
class AuditConfig(RunConfig):
    """`pubsel audit`."""

    audit: Audit = field(default_factory=Audit)


@dataclass
class RankConfig(Common, Read):
    """`pubsel rank`. The keys of `Read` are for the private data."""

    like: str | None = setting(ABOUT_LIKE, neutral=True, default=None)
    private: str = setting("the private data: a name in conf/dataset, or a path")
    public: list[Any] = setting(
        "the public candidates: names or paths; a list in the list is one candidate of several sets: [A,[B,C]]"
    )
    convert: Convert = setting(ABOUT_CONVERT)
    model: Model = field(default_factory=Model)
    distance: dict[str, Any] | None = setting(ABOUT_DISTANCE)
    epsilon_select: float | None = setting(
        "choose one candidate with this epsilon, and show only its name; null: show the distances, which are not "
        "private",
        over=0,
        default=None,
    )
    select: Select = field(default_factory=Select)
    secure_noise: bool = setting(
        "for private releases: take sample and noise from the operating system's entropy; not reproducible",
        default=False,
    )
    budget: Any = setting(ABOUT_BUDGET, neutral=True, default=None)
    weak: bool = setting("allow a distance.delta above 1/n; the guarantee is then called weak", default=False)
    overlap: Overlap | None = setting(
        "refuse: fail if an image is both private and public, or in two combined sets; leave: say so; null: refuse "
        "for a set of conf/dataset, leave for your own data",
        default=None,
    )

    def __post_init__(self) -> None:
        Read.__post_init__(self)
        self.public = candidates_of("public", self.public)


@dataclass
class AttackConfig(Common):
    """`pubsel attack`."""

    attack: Attack = setting("gsd_white_box, gsd_black_box (GSD, Tables 8 and 9), or loss, for trained models")
    run: str | None = setting("loss: name of a finished run, a pattern such as *-adamix-*, or all")
    private: str = setting("gsd: the private data: a name in conf/dataset, or a path")
    public: list[Any] = setting("gsd: the public sets whose distances are released: names, paths, or lists of them")
    convert: Convert = setting(ABOUT_CONVERT)
    known: list[int] = setting("gsd: how many of the distance.m private examples the attacker knows", at_least=2)
    trials: int = setting("gsd: number of trials, each with other private examples and networks", at_least=1)
    targets: int = setting(
        "gsd_white_box: in each trial, number of examples attacked by someone who knows all others", at_least=1
    )
    model: Model = field(default_factory=Model)
    distance: dict[str, Any] | None = setting(ABOUT_DISTANCE)

    def __post_init__(self) -> None:
        self.public = candidates_of("public", self.public)


@dataclass
class FitConfig(Common, Read):
    """`pubsel fit`."""

    private: str = setting(
        "your images: a folder, a table of paths and labels, an npz, or a name in conf/dataset; or rows of numbers: a "
        "table, an npz or npy file"
    )
    public: list[Any] | None = setting(
        "public data that may help: names or paths; one of them is chosen privately, or none; null: there are none"
    )
    pool: list[Any] | None = setting(
        "public data of many kinds: names or paths, folders of embeddings among them; examples of them are chosen "
        "privately, or none"
    )
    epsilon: float = setting("epsilon of the whole: choice, model and measurement", over=0)
    delta: float = setting("delta of the whole", over=0, below=1)
    budget: Any = setting(ABOUT_BUDGET, neutral=True, default=None)
    to: str = setting("the folder to make, which may be given away", neutral=True)
    features: str | None = setting(
        "features that the model is trained on: a name that pubsel models lists, or a folder or a file of weights; or, "
        "for texts, hf:NAME or hf:./FOLDER; null: scattering for grey images, otherwise resnet50_sl, or scattering if "
        "its published weights are not at hand"
    )
    checkpoint: str | None = setting("features=NAME: a file of its weights instead of the published ones")
    public_labels: PublicLabels = setting(ABOUT_PUBLIC_LABELS)
    choice: float = setting("share of epsilon for choosing the public data", over=0, below=1)
    held_out: float = setting(
        "share of the images, or people, that is not trained on, to measure the model on; 0: it is not measured",
        at_least=0,
        below=1,
    )
    metric: Metric | None = setting("how the model is measured: pair.metric of pubsel run")
    unit: str | None = setting("who is protected: pair.unit of pubsel run")
    format: Format = setting("safetensors; onnx: the network as model.onnx too, for programs without torch")
    dry: bool = setting("print the plan only", neutral=True)

    def __post_init__(self) -> None:
        Read.__post_init__(self)
        if self.public is not None:
            self.public = candidates_of("public", self.public)
        if self.pool is not None:
            self.pool = public_sets(one_or_combined("pool", self.pool))
        if self.public and self.pool:
            raise UsageError("public=[...] and pool=[...]: give one: a whole set is chosen, or examples")


@dataclass
class TuneConfig:
    """`pubsel tune`."""

    private: str | None = setting("the private data, by a path: pair.private of pubsel run; null: as words say")
    over: str = setting("the settings to choose from: keys of pubsel run with their values, key=A,B key=C,D")
    epsilon: float = setting("epsilon of the whole: all runs, their scores, the choice, and the measurement", over=0)
    runs: float | None = setting(
        "mean of the number of runs, which is drawn and stays secret; null: as many as there are settings",
        at_least=1,
        at_most=1000,
    )
    held_out: float = setting(
        "share of the private examples, or people, that is not trained on: one half chooses, the other measures",
        over=0,
        below=1,
    )
    jobs: int = setting("runs at a time, each in a process; GPUs are taken in turn", at_least=1, neutral=True)
    words: list[str] = setting("further settings, of pubsel run")
    dry: bool = setting("print the plan only", neutral=True)


@dataclass
class PredictConfig:
    """`pubsel predict`."""

    run: str = setting("name of a finished run or a pattern of it, or a folder with its model")
    images: list[str] = setting("folders, image files, CSV files with a column path, npz files with arrays of images")
    to: str = setting("the CSV file to write; -: standard output", neutral=True)
    all: bool = setting("write the probability of each class, not only of the most probable one", neutral=True)
    skip: bool = setting("leave out images that cannot be read, with a line for each", neutral=True)
    checkpoint: str | None = setting(
        "a file of the backbone's weights, instead of the one that the model was trained with", neutral=True
    )
    results: str = setting("folder with the runs", neutral=True)
    data_root: str = setting("folder with the data, and with files of weights", neutral=True)
    download: bool = setting("fetch published weights", neutral=True)
    device: Device = setting("auto: cuda if available, else cpu", neutral=True)
    threads: int | None = setting("number of CPU threads; null: all cores", at_least=1, neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class ExportConfig:
    """`pubsel export`."""

    run: str = setting("name of a finished run or a pattern of it, or its folder")
    to: str = setting("the folder to make; it may not exist yet, or must be empty", neutral=True)
    format: Format = setting("safetensors; onnx: the network as model.onnx too, for programs without torch")
    anyway: bool = setting("export a model that no guarantee covers; the card and the privacy page say so on top")
    hub: str | None = setting(
        "OWNER/NAME: upload the folder to this repository of Hugging Face too; a new one is private", default=None
    )
    results: str = setting("folder with the runs", neutral=True)
    data_root: str = setting("folder with the data, and with files of weights", neutral=True)
    download: bool = setting("fetch published weights", neutral=True)
    threads: int | None = setting("number of CPU threads; null: all cores", at_least=1, neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class TableConfig:
    """`pubsel table`."""

    table: str = setting("name of a table in conf/tables")
    results: str = setting("folder with the records (runs/, distances/); the table goes to its tables/", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class MakeConfig:
    """`pubsel make`."""

    name: str = setting("a file in conf/tables or conf/work, or a part of one, such as gsd_table2_fmnist")
    dry: bool = setting("only list the cells, which of them have a record, and the hours to expect", neutral=True)
    public: str | None = setting("public sets A,B to use instead of those in the file")
    words: list[str] = setting("further settings for every step that runs cells")
    results: str = setting("folder with the records", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class FigureConfig(RunConfig):
    """`pubsel figure`."""

    figure: str = setting(
        "name of the figure: a curve, a table, clustermap, gsd_figure1, ...; all: every figure that has its records"
    )
    sets: list[Any] | None = setting("the data sets to compare: names or paths; null: those of pair.public")
    k: list[int] | None = setting(
        "during training: dimensions of the public subspace; null: those of the figure", at_least=1
    )
    at_epsilon: float = setting(
        "a table's utility against time: epsilon of the runs that are drawn", over=0, infinite=True
    )
    points: int | None = setting(
        "during training: number of steps that are measured; null: that of the figure", at_least=1
    )


@dataclass
class ReportConfig:
    """`pubsel report`."""

    results: str = setting("folder with the records", neutral=True)
    to: str | None = setting("the file to write; -: standard output; null: report.html in results", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class RunsConfig:
    """`pubsel runs`."""

    action: str = setting("list, show, delete or budget")
    name: str | None = setting("name of a run; list and show: or a part of it; budget: name of private data, or a part")
    where: list[str] = setting(
        "only runs with these values: key=value,value of a record or its settings; state=finished,stale,..."
    )
    results: str = setting("folder with the runs", neutral=True)
    all: bool = setting("delete: every run", neutral=True)
    yes: bool = setting("delete without asking", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class DataConfig(Read):
    """`pubsel data`. The keys of `Read` are for check."""

    action: str = setting("list, prepare, check or forget")
    name: str | None = setting("prepare: the dataset; check: the dataset, or a path; forget: a path")
    data_root: str = setting("folder with the data", neutral=True)
    keep: bool = setting("check: keep your own images decoded, as a run does", neutral=True)
    unit: str | None = setting("check: who is protected: pair.unit of pubsel run", default=None)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class ModelsConfig:
    """`pubsel models`."""

    pattern: str | None = setting("a part of a name, or a pattern with * and ?; null: the names in conf/model")
    data_root: str = setting("folder with the data, and with files of weights", neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)


@dataclass
class PoolConfig:
    """`pubsel pool`."""

    pool: list[str] | None = setting(
        "folders of embeddings, as in pair.pool of pubsel run: computes the clusters, and the cluster of each embedding"
    )
    shard: int | None = setting("only the shard of this number, from 0; null: all", at_least=0)
    data_root: str = setting(
        "folder with the data; what is computed of a pool is kept in its folder pools", neutral=True
    )
    results: str = setting("folder for the logs of a sweep over shards", neutral=True)
    threads: int | None = setting("number of CPU threads; null: all cores", at_least=1, neutral=True)
    debug: bool = setting("show the traceback of an error", neutral=True)

    def __post_init__(self) -> None:
        if self.pool is not None:
            self.pool = sorted(public_sets(one_or_combined("pool", self.pool)))


def one_or_combined(key: str, public: Any) -> str | list[str] | None:
    """Check public data given by `key`: one name or path, several that are combined, or None. A list of length one
    becomes its element. (OmegaConf has no type `str | list[str] | None`.) UsageError if a list is empty, nested or
    repeats a name."""
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
    """Check the candidates for public data given by `key`, each as `one_or_combined` does; UsageError for a null."""
    candidates = candidates if isinstance(candidates, list) else [candidates]
    if None in candidates:
        raise UsageError(f"{key}=[null]: a candidate is a name or path, or a list of them")
    return [one_or_combined(key, candidate) for candidate in candidates]


def public_sets(public: str | list[str] | None) -> list[str]:
    """List the datasets in the result of `one_or_combined`."""
    return [] if public is None else [public] if isinstance(public, str) else public


def _typed(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    return json.dumps(value, default=str).replace('"', "").replace(", ", ",")


def of_run(settings: RunConfig) -> RunConfig:
    """Keep only the settings of `pubsel run` from those of a command that has more."""
    return RunConfig(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(RunConfig)})


def is_weak(delta: float, n: int) -> bool:
    """Tell whether delta is above 1/n, up to rounding in a sum of parts of delta. Such a guarantee for n examples says
    little: publishing one example, chosen at random, satisfies it too."""
    return delta > (1 + 1e-9) / n


SCHEMAS: dict[str, type] = {
    "run": RunConfig,
    "fit": FitConfig,
    "tune": TuneConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
    "rank": RankConfig,
    "attack": AttackConfig,
    "audit": AuditConfig,
    "table": TableConfig,
    "make": MakeConfig,
    "figure": FigureConfig,
    "report": ReportConfig,
    "runs": RunsConfig,
    "data": DataConfig,
    "models": ModelsConfig,
    "pool": PoolConfig,
}
