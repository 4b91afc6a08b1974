"""Rules of which settings of a training fit together, and the parts into which a request is cut.

`canonical` decides once what a request means. What follows gets the part that it reads, and not the settings again:
`Inputs` of the data, `Budget` of the guarantee, `settings.keys.Model` and `Training`.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Self

from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING

from pubsel import algorithms, distances
from pubsel.algorithms import Algorithm, Derives, RatedByNoise, Solves
from pubsel.distances import Releases
from pubsel.messages import UsageError
from pubsel.selection.choose import by_features, check_choice, compared
from pubsel.selection.coverage import FEWEST
from pubsel.settings.identity import is_path, overlap_of
from pubsel.settings.keys import (
    POOL,
    WEIGHTLESS,
    Accounting,
    Backbone,
    Convert,
    Model,
    Optimizer,
    Pair,
    RunConfig,
    Select,
    Take,
    Training,
    public_sets,
)
from pubsel.settings.methods import typed
from pubsel.settings.networks import DROPPED

AUTO = "auto"  # pair.public: chosen from pair.candidates


# The parts of a request


class Inputs(NamedTuple):
    """Data of a training: the pair, and how its files are read. backbone: the network whose features are trained on;
    None: images are."""

    pair: Pair
    backbone: Backbone | None
    data_root: str
    download: bool
    keep: bool

    @classmethod
    def of(cls, settings: RunConfig) -> Self:
        """Return the part of canonical settings that names data."""
        root, download, keep = settings.data_root, settings.download, settings.keep
        return cls(settings.pair, settings.model.backbone, root, download, keep)


class Budget(NamedTuple):
    """Guarantee that a training is to have: epsilon (inf: none), and the keys of `privacy`."""

    epsilon: float
    delta: float
    accounting: Accounting = Accounting.prv
    secure_noise: bool = False
    noise_multiplier: float | None = None
    weak: bool = False
    measure: bool = False

    @classmethod
    def of(cls, settings: RunConfig) -> Self:
        """Return the part of canonical settings that names the guarantee."""
        return cls(settings.epsilon, **vars(settings.privacy))


# The rules


def check_pair(settings: RunConfig) -> None:
    """Raise UsageError if private data were given alone: the public ones would be those of another pair."""
    if not HydraConfig.initialized():
        return
    passed = {word.lstrip("+~").partition("=")[0]: word for word in HydraConfig.get().overrides.task}
    if "pair.private" not in passed or passed.keys() & {"pair", "pair.public", "experiment", "like", "replay"}:
        return
    if settings.algorithm.get("_target_") and algorithms.build(settings.algorithm).uses_public:
        raise UsageError(
            f"{passed['pair.private']}: give its public data too, pair.public=NAME or a path (`pubsel rank` finds the "
            "nearest), or an algorithm without, such as algorithm=dp_sgd; and model=NAME, unless fmnist_cnn fits"
        )


def canonical(settings: RunConfig) -> RunConfig:
    """Return the settings with those that this algorithm ignores set to one value, so that equal runs are one run.
    UsageError for settings that do not fit together."""
    if "_target_" not in settings.algorithm:
        raise UsageError("algorithm has no value: give algorithm=NAME, such as gep or dp_sgd")
    algorithm = algorithms.build(settings.algorithm)
    pair, distance, epsilon = settings.pair, distances.build(settings.distance), settings.epsilon
    if pair.overlap == overlap_of(pair.private):  # the same as null
        pair = dataclasses.replace(pair, overlap=None)
    typed_algorithm = typed("algorithm", algorithm, settings.algorithm)

    check_views(settings.training, settings.model)
    # what the method sets itself is one value, whatever was given
    if isinstance(algorithm, Derives):
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Training) if f.default != MISSING}
        training = dataclasses.replace(settings.training, **(defaults | dict(algorithm.training)))
        settings = dataclasses.replace(settings, training=training)

    # without public data, nothing that describes it changes the run; nor does a seed of which nothing is drawn
    if not algorithm.uses_public or (pair.public is None and not algorithm.needs_public):
        pair = without_public(pair)
        distance = None
        settings = dataclasses.replace(settings, epsilon_select=None)
    elif pair.public is None:
        raise UsageError(f"algorithm={algorithm.name} needs public data: give pair.public=NAME")
    elif pair.take != Take.train and pair.m is not None and (k := algorithm.directions or 0) > pair.m:
        raise UsageError(f"algorithm.k={k} is more than the pair.m={pair.m} public examples: lower algorithm.k")
    if not (pair.take == Take.train or pair.validation or pair.private_share < 1):
        pair = dataclasses.replace(pair, seed=0)
    check_model(settings.model)
    check_names(algorithm, pair, settings.model)
    settings = dataclasses.replace(settings, model=with_stages(settings.model, algorithm, pair))

    check_rate(settings.training, algorithm, settings.model)
    select = compared(settings.select, settings.model)
    check_unit(pair, algorithm, select)

    # the record of a run has one guarantee: what a distance would spend is not in it
    if isinstance(distance, Releases):
        raise UsageError(
            f"distance={distance.name}: its epsilon would add to that of training: measure it by pubsel rank"
        )
    pair = canonical_pool(pair, settings.epsilon_select, settings.model)
    if settings.epsilon_select is not None and pair.public != POOL:
        check_choice(select, settings.model, distance)
    pair = canonical_candidates(pair, settings.epsilon_select)
    select = select if pair.candidates else Select()

    # an epsilon that nothing spends is one value
    if not algorithm.private:
        epsilon = float("inf")
    elif algorithm.sensitivity() == 0:  # private examples are never read
        epsilon = 0.0

    typed_distance = None if distance is None else typed("distance", distance, settings.distance or {})
    return dataclasses.replace(
        settings, pair=pair, distance=typed_distance, epsilon=epsilon, algorithm=typed_algorithm, select=select
    )


def without_public(pair: Pair) -> Pair:
    """Return the pair with no public data, and one value for all that describes them."""
    nothing: dict[str, Any] = dict.fromkeys(("public", "shots", "public_share", "candidates", "pool", "pool_m"))
    if pair.take != Take.same_test:  # which says who is tested
        nothing |= {"m": 1, "take": Take.test}
    return dataclasses.replace(pair, convert=Convert.resize, **nothing)


def check_names(algorithm: Algorithm, pair: Pair, model: Model) -> None:
    """Raise UsageError if public examples are to be labelled by the names of classes, and there are none, or none of
    CLIP; rows of numbers may be its embeddings."""
    if not algorithm.reads_names:
        return
    key, architecture = "algorithm.public_labels=names", model.backbone.architecture if model.backbone else ""
    if pair.public is None:
        raise UsageError(f"{key}: it is public examples that get labels: give pair.public=NAME")
    if architecture != "rows" and "clip" not in architecture:
        raise UsageError(f"{key}: compares features of CLIP with names: take model=clip_rn50")


def check_unit(pair: Pair, algorithm: Algorithm, select: Select) -> None:
    """Raise UsageError if the private unit is a person, and something reads private examples one by one."""
    if pair.unit is None:
        return
    if isinstance(algorithm, Solves):
        raise UsageError(
            f"pair.unit={pair.unit}: algorithm={algorithm.name} protects single examples only: take another algorithm, "
            "such as whitened_head"
        )
    if pair.public == AUTO and not by_features(select):
        raise UsageError(
            f"pair.unit={pair.unit}: pair.public=auto chooses under a guarantee for one example: give the public set, "
            "or select.by=coverage, with model.backbone"
        )


def refuse_unit(pair: Pair, what: str) -> None:
    """Raise UsageError if the private unit is a person, for `what` is of single examples."""
    if pair.unit is not None:
        raise UsageError(f"pair.unit={pair.unit}: {what} of single examples, and not of people: leave pair.unit out")


def check_views(training: Training, model: Model) -> None:
    """Raise UsageError if training is on several views that are the image itself, or on views where something is
    computed of each image once."""
    if training.augment is None and training.views > 1:
        raise UsageError(
            f"training.views={training.views}: without training.augment all views are the image itself: give "
            "training.augment=[flip,crop] too"
        )
    if training.augment is not None and (model.backbone is not None or model.once):
        key = "model.once=true" if model.once else "model.backbone"
        raise UsageError(
            f"training.augment: {key} computes features of each example once, before training: take a network that "
            "trains on images, such as model=fmnist_cnn, or leave training.augment and training.views out"
        )


def check_rate(training: Training, algorithm: Algorithm, model: Model) -> None:
    """Raise UsageError if the learning rate is to follow from the noise where nothing is known of it."""
    if training.learning_rate is not None:
        return
    # the rate follows from a bound on the gradient: rows of norm 1, and plain SGD
    linear = model.backbone is not None or model.name == "logistic"
    plain = training.optimizer == Optimizer.sgd and training.inverse_decay is None
    if not (linear and plain and isinstance(algorithm, RatedByNoise) and algorithm.unit):
        raise UsageError(
            "training.learning_rate=null is for a linear classifier on rows of norm 1, by plain SGD: take "
            "algorithm=dp_sgd_clip1, pillar, jl, dp_pca or adamix on features, or give a number"
        )


def canonical_candidates(pair: Pair, epsilon: float | None) -> Pair:
    """Return the same pair with its candidates in one order. UsageError where pair.public=auto, pair.candidates and
    epsilon_select are not given all together or not at all."""
    auto = pair.public == AUTO
    chooses = epsilon is not None and pair.public != POOL
    if (auto, bool(pair.candidates), chooses) not in ((True,) * 3, (False,) * 3):
        raise UsageError(
            "pair.public=auto, pair.candidates=[A,B,...] and epsilon_select=... belong together: give all or none"
        )
    if not auto or pair.candidates is None:
        return pair
    # candidates in one order, so that a permutation of the list is the same run
    if pair.take != Take.test:
        raise UsageError("pair.public=auto: candidates are other sets or test images: set pair.take=test")
    pairs = by_label(pair)
    if len(pairs) < len(pair.candidates):
        raise UsageError("pair.candidates=[...]: give each candidate once")
    return dataclasses.replace(pair, candidates=[pairs[name].public for name in sorted(pairs)])


def canonical_pool(pair: Pair, epsilon: float | None, model: Model) -> Pair:
    """Return the same pair with what describes a pool. UsageError if one of pair.public=pool, pair.pool and
    epsilon_select is given without the others, or if a pool cannot be chosen from with these settings."""
    from_pool = pair.public == POOL
    if from_pool != bool(pair.pool) or (from_pool and epsilon is None):
        raise UsageError("pair.public=pool, pair.pool=[A,B,...] and epsilon_select=... belong together: give all")
    if not from_pool:
        return dataclasses.replace(pair, pool_m=None)
    if pair.take != Take.test:
        raise UsageError("pair.public=pool: its examples are of other sets or test images: set pair.take=test")
    if pair.m is not None and pair.m < FEWEST:
        raise UsageError(f"pair.m={pair.m}: too few to see whether they are of the private kind: give {FEWEST} or more")
    if model.backbone is None:
        raise UsageError("pair.public=pool: compares features: set model.backbone, such as model=scattering")
    return pair


def by_label(pair: Pair) -> dict[str, Pair]:
    """Return the candidates of pair.public=auto by the name that a record has of the chosen one, each as a pair with
    it."""
    return {
        "+".join(public_sets(public)): dataclasses.replace(pair, public=public, candidates=None)
        for public in pair.candidates or []
    }


def as_chosen(pair: Pair, public: str | None) -> Pair:
    """Return the pair of a finished run with the public set that was chosen; public: what its record says of it."""
    if public is None:
        return without_public(pair)
    return by_label(pair)[public] if pair.public == AUTO else pair


def with_stages(model: Model, algorithm: Algorithm, pair: Pair) -> Model:
    """Return the model with whether features are of several layers: by default of a network whose features public data
    bring to one scale."""
    backbone = model.backbone
    if backbone is None or backbone.architecture in WEIGHTLESS:
        return model
    takes = algorithm.takes_stages and pair.public is not None and not backbone.architecture.startswith("hf:")
    stages = takes if backbone.stages is None else backbone.stages
    return dataclasses.replace(
        model, backbone=dataclasses.replace(backbone, stages=stages if stages or takes else None)
    )


def check_model(model: Model) -> None:
    """Raise UsageError for a setting of the network that changes no result: two runs that differ in it would differ in
    their noise alone."""
    backbone = model.backbone
    keys = ("trained", "lora", "adapters", "once", "architecture", "pretrained", "checkpoint", "options", "mean", "std")
    unused = [key for key in keys if getattr(model, key)]
    if backbone is not None and unused:
        raise UsageError(f"model.{unused[0]}: with model.backbone a linear classifier on features trains")
    if backbone is None and not model.bias:
        raise UsageError("model.bias=false: is for a linear classifier on features: remove it, or give model.backbone")

    # pixels are read as they are, and published weights have the names that timm knows
    of_texts = backbone is not None and backbone.architecture.startswith("hf:")
    if backbone is not None and (of_texts or backbone.architecture in ("pixels", "rows")):
        of_images = ("input_size", "crop", "mean", "std", "interpolation", "scattering", "stages")
        for key in ("checkpoint", "prefix", "options", *of_images):
            if getattr(backbone, key) and not (of_texts and key == "checkpoint"):
                raise UsageError(f"model.backbone.{key}: architecture={backbone.architecture} ignores it: remove it")
    if backbone is not None and backbone.prefix and not backbone.checkpoint:
        raise UsageError(f"model.backbone.prefix={backbone.prefix}: is for model.backbone.checkpoint=FILE: remove it")

    network, at, options = (
        (backbone, "model.backbone", backbone.options) if backbone else (model, "model", model.options)
    )
    for name in options or {}:
        if name in DROPPED:
            raise UsageError(f"{at}.options: {name} has no effect, since nothing is dropped here: remove it")
        if name == "weight_init" and (network.pretrained or network.checkpoint):
            raise UsageError(f"{at}.options: {name} has no effect on weights that are read: remove it")


def sets_of(pair: Pair) -> list[str]:
    """Return the public datasets that a pair names."""
    if pair.public == POOL:
        return pair.pool or []
    publics = [pair.public] if pair.public != AUTO else pair.candidates or []
    return [name for public in publics for name in public_sets(public)]


def has_paths(names: list[str]) -> bool:
    """Return whether any dataset is a path, so that its content may change."""
    return any(is_path(name) for name in names)


def check_measured(settings: RunConfig) -> None:
    """Raise UsageError if privacy.measure is requested where there is nothing to measure on, or no budget for it;
    settings are canonical."""
    if not settings.privacy.measure:
        return
    if settings.pair.validation == 0:
        raise UsageError("privacy.measure=true: measures on held-out private examples: give pair.validation=0.1")
    if not 0 < settings.epsilon < math.inf:
        raise UsageError("privacy.measure=true: needs a private algorithm and epsilon=NUMBER, for the noise")
