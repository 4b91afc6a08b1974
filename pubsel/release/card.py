"""The card and the privacy page of a model that is given away, from what was released and from public inputs alone.

`statement_of` takes both from a record, key by key: what is not named there (utility, loss, distance, notes, seed,
time, machine, paths) cannot get into the folder. All else here are pure functions of what `statement_of` returns.
"""

import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pubsel import __version__
from pubsel.data.memory import FOLDER
from pubsel.data.texts import LENGTH
from pubsel.messages import above
from pubsel.privacy.accountant import GAUSSIAN, ROUNDED, neighbours
from pubsel.privacy.repeated import HIDDEN
from pubsel.records import at, guarantee_kind
from pubsel.release import adversary
from pubsel.release.measurement import LARGEST, in_a_sentence
from pubsel.release.quality import Answered
from pubsel.settings.identity import is_path, same_path, short_name
from pubsel.settings.keys import PublicLabels, public_sets

HERE = Path(__file__).resolve().parent
OS_NOISE = "operating system"
SHOWN = 20  # names of classes on the card; config.json has all
WIDEST = 0.5  # interval of a figure of one class on the card
GROUPS = (2, 5, 10)  # images of a person, for whom the page states what remains
ALARMS = 0.01  # of false alarms, for which the page states how many members are recognised
BY_NAMES = (
    ". It starts from the names of the classes, by which the text encoder of CLIP labelled the public data: both are "
    "public, and this costs no privacy"
)
DRAWN = ", by a draw that one {} more or fewer on the list of all would change for others"
WORDS = {
    "measurement": "measurement on held-out examples",
    "selection of the public set": "choice of the public data",
    "selection of the public examples": "choice of the public examples, by a noisy histogram",
    "before training": "first release before training",
}
FIRST = {  # what some of the steps of `training` are for, by its name in a record
    "histogram": "a noisy histogram of each column",
    "mean": "a noisy mean of the features",
    "moments": "noisy second moments of the features",
    "counts": "noisy numbers of examples of the classes",
}


@dataclass(frozen=True)
class Statement:
    """Contents of a card and a privacy page of a model.

    facts: config.json (`release.classifier.facts_of`, without paths, and what `release.bundle` adds); parts: the
    releases, each with what, epsilon, delta, rate, steps, noise_multiplier and accountant; epsilon, delta: of all of
    them, None without a guarantee; examples, units: how many private ones, and how many are protected, each by itself,
    both treated as public; unit: what distinguishes people if these are the units; adjacency: which data sets are
    neighbours; against: why the model should not be given away, empty if nothing is against it; quality: what was
    measured with noise on held-out examples (`quality_of`), None if nothing was; onnx: what model.onnx takes
    (`release.onnx.as_onnx`), None if there is none.
    """

    facts: dict[str, Any]
    text: str
    epsilon: float | None
    delta: float
    weak: bool
    parts: tuple[dict[str, Any], ...]
    examples: int
    units: int
    unit: str | None
    adjacency: str
    private: str
    public: str | None
    candidates: tuple[str, ...]
    method: str
    network: str
    not_covered: tuple[str, ...]
    against: tuple[str, ...]
    version: str
    commit: str | None
    quality: dict[str, Any] | None = None
    onnx: dict[str, Any] | None = None


def statement_of(record: dict[str, Any], facts: dict[str, Any]) -> Statement:
    """Return what may be published of a run, from its record and the facts about its model."""
    # names of private files and folders stay out: only data sets that everybody knows are named
    privacy, settings = record["privacy"], record["settings"]
    chosen_from = {"auto": "pair.candidates", "pool": "pair.pool"}.get(str(at(settings, "pair.public")))
    candidates = at(settings, chosen_from) if chosen_from else []
    kind = "texts" if facts.get("text") else "images" if len(facts["shape"]) == 3 else "rows"
    return Statement(
        facts=facts,
        text=str(privacy["statement"]),
        epsilon=privacy["epsilon"],
        delta=float(privacy.get("delta") or 0.0),
        weak=guarantee_kind(record) == "weak" or bool(at(record, "quality.privacy.weak")),
        parts=tuple(part | {"first": _first(record, part["what"])} for part in releases_of(privacy)),
        examples=int(record["private_examples"]),
        units=int(record.get("private_units") or record["private_examples"]),
        unit=privacy.get("unit"),
        adjacency=neighbours(privacy.get("unit"), distinct=is_path(record["private"]) and kind == "images"),
        private=f"private {kind}, which their owner does not name" if is_path(record["private"]) else record["private"],
        public=None if record["public"] is None else _named(_public(record), record["private"], kind),
        candidates=(
            *(_named(candidate, record["private"], kind) for candidate in candidates),
            *(["none"] if candidates and record.get("none_too") else []),
        ),
        method=str(record["algorithm"]) + (BY_NAMES if _by_names(record) else ""),
        network=network_of(facts["model"], bool(facts.get("text"))),
        not_covered=not_covered(record, shape_of(facts)),
        against=against(record),
        version=str(at(record, "versions.pubsel")),
        commit=record.get("commit"),
        quality=quality_of(record),
    )


def quality_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return what was released of the quality on held-out examples: the noisy table and its figures, and its share of
    the guarantee."""
    # only keys with released values are copied: the exact counts are never stored
    quality = record.get("quality")
    if quality is None:
        return None
    keys = ("table", "counts", "right", "sizes", "deviation", "examples", "figures", *Answered._fields)
    units = quality.get("units", quality["examples"])
    return {key: quality[key] for key in keys if key in quality} | {
        "units": units,
        "part": releases_of(quality["privacy"])[0] | {"what": "measurement"},
    }


def against(record: dict[str, Any]) -> tuple[str, ...]:
    """Return why no guarantee allows to give the model of a run away; empty if nothing is against it."""
    # a guarantee must hold against people who know all but the noise
    privacy = record["privacy"]
    if privacy.get("epsilon") is None:
        return ("its weights were trained without noise, so no guarantee covers them",)
    reasons = []
    if privacy.get("valid") is not True:
        reasons.append("its guarantee is not valid: the published accounting is unsound")
    if privacy["epsilon"] > 0 and privacy.get("noise_source") != OS_NOISE:
        reasons.append("its noise follows from a seed, so that anyone who knows the seed can subtract it")
    return tuple(reasons)


def releases_of(privacy: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the releases that the statement of a record is about, alike whether there was one or several."""
    keys = ("what", "epsilon", "delta", "rate", "steps", "noise_multiplier", "accountant")
    if privacy.get("epsilon") is None:
        return ()
    whole = privacy | {"what": "training", "rate": privacy.get("sampling_rate", privacy.get("rate"))}
    return tuple({key: part[key] for key in keys} for part in privacy.get("parts") or [whole])


def _first(record: dict[str, Any], what: str) -> str:
    """Return what some steps of a release are for, in words: of the training, what is released before all else."""
    derived = record.get("derived") or {}
    first = next((name for name in FIRST if what == "training" and f"steps_of_{name}" in derived), None)
    if first is None:
        return ""
    counts = derived.get("balanced") and not derived.get("public_labels") and first != "counts"
    names = f"{FIRST[first]}{' and ' + FIRST['counts'] if counts else ''}"
    return f" ({derived[f'steps_of_{first}']} of them for {names})"


def shape_of(facts: dict[str, Any]) -> str:
    """Return what is public of the shape of examples, in words."""
    if len(facts["shape"]) == 3:
        return "their shape" + ", and the name of their column in a table" * bool(facts.get("image_column"))
    if facts.get("text"):
        return "that they are texts, and the name of their column in a table"
    if not facts.get("columns"):
        return "how many numbers a row has"
    left = "which of them are left out as ids or words, or have no number in a tenth of the rows"
    return f"the names of columns, {left}, and their bounds and words"


def not_covered(record: dict[str, Any], shape: str = "their shape") -> tuple[str, ...]:
    """Return what the guarantee of a run does not cover, in sentences, of which some depend on its settings. shape:
    what is public of the shape of examples."""
    # sentences that hold for every run come first, then those that its settings call for
    settings, unit = record["settings"], record["privacy"].get("unit")
    number = "the number of people, the number of their examples" if unit else "the number of private examples"
    sentences = [
        "Settings, data sets and methods, if somebody chose them by looking at the private examples or at results on "
        "them.",
        f"What is treated as public, and not hidden: {number}, {shape}, the number and the names of the classes "
        "(of private folders too), whether an example may have several of them, and "
        f"which {'people' if unit else 'examples'} were used for training"
        f"{', held out of it' if record.get('quality') else ''} or kept for testing"
        f"{DRAWN.format('person' if unit else 'example') if _drawn(record, unit) else ''}.",
        "Other releases of the same examples: their epsilons add up. Their owner has a list of them (pubsel runs "
        "budget), which is not in this folder: whether two releases are of the same examples is private.",
        "What the model says about people in general, whether or not their data were used.",
        f"Examples for testing{'' if record.get('quality') else ' and validation'}: they are not protected, but no "
        "figure that was measured on them is in this folder.",
        "What a computer shows while it trains, such as time and memory.",
    ]
    before = any(part["what"] in WORDS for part in record["privacy"].get("parts") or [])  # releases before training
    if record.get("quality") or before or at(settings, "model.backbone"):
        sentences.append(f"{ROUNDED[0].upper()}{ROUNDED[1:]}.")
    if record.get("tuning"):
        sentences.append(HIDDEN)
    if unit:
        sentences.append(f"A person whose examples have several values of {unit}, and so count as several people.")
    if record["public"] is not None:
        sentences.append("The public data: nobody in them is protected.")
    if record["public"] is not None and "public_too" in (at(settings, "pair.read.accept") or []):
        sentences.append("Private examples that equal public ones, as far as there are any: they were trained on too.")
    if record["public"] is not None and _takes_from_private(record):
        part = "Training" if at(settings, "pair.take") == "train" else "Test"
        sentences.append(f"{part} examples of the private set that were declared public, and used as public data.")
    if _published(settings["model"]) or _by_names(record):
        sentences.append("What the initial weights were trained on: pubsel treats weights that it is given as public.")
    if record["privacy"].get("noise_source") == "seeded" and record["privacy"].get("epsilon"):
        sentences.append("Adversaries who know or guess the seed of the noise, which is a small number.")
    return tuple(sentences)


def _by_names(record: dict[str, Any]) -> bool:
    """Return whether CLIP's text encoder labelled the public data by the names of the classes."""
    by_names = at(record["settings"], "algorithm.public_labels") == PublicLabels.names.name
    return by_names and record["public"] is not None


def _public(record: dict[str, Any]) -> Any:
    """Return the public data of a run, given or chosen."""
    public = at(record["settings"], "pair.public")
    if public == "pool":  # the sets that it has examples of
        return [name for name, count in record["pool"]["examples"].items() if count]
    if public != "auto":
        return public
    names = {"+".join(map(str, public_sets(c))): c for c in at(record["settings"], "pair.candidates") or []}
    return names.get(record["public"], record["public"])


def _takes_from_private(record: dict[str, Any]) -> bool:
    """Return whether public data are of the private set: all of them, or one of several that were combined."""
    sets = public_sets(_public(record))
    return record["public_labels"] == "of the private set" or any(_same(str(name), record["private"]) for name in sets)


def _same(name: str, private: str) -> bool:
    """Return whether two data sets have one name, or are one file or folder."""
    return same_path(name, private) if is_path(name) and is_path(private) else name == private


def _drawn(record: dict[str, Any], unit: str | None) -> bool:
    """Return whether the sides of examples are drawn from a list of them all, not decided for each by itself."""
    # a draw from a list of all examples lets each of them move the side of others; a user's own are drawn one by one
    pair = record["settings"].get("pair") or {}
    if is_path(record["private"]):
        return False
    if pair.get("private_share", 1) < 1:
        return True
    if pair.get("take") == "train" and record["public"] is not None and _takes_from_private(record):
        return True
    return bool(pair.get("validation")) and (bool(unit) or pair.get("overlap") != "leave")


def _published(model: dict[str, Any]) -> bool:
    """Return whether weights that were given are in a model, or before it. Random weights are nobody's."""
    # weights that were trained on other data bring what these data were
    backbone = model.get("backbone")
    if not backbone:
        return bool(model.get("pretrained") or model.get("checkpoint"))

    # The record leaves out what has its default.
    has_weights = backbone["architecture"] not in ("scattering", "pixels", "rows")
    return has_weights and bool(backbone.get("pretrained", True) or backbone.get("checkpoint"))


def _named(public: Any, private: str, kind: str = "images") -> str:
    """Return the name of public data, joined by + if there are several; of a path, only its last part. The name of
    private data that are given by a path never appears, nor that of data in memory, which is a digest. kind: of the
    examples, images or rows."""
    names = []
    for name in map(str, public_sets(public)):
        same = (
            "a part of the private data" if _same(name, private) else f"public {kind}, which their owner does not name"
        )
        unnamed = Path(name).parent == FOLDER or (is_path(private) and short_name(name) == short_name(private))
        names.append(same if unnamed else short_name(name))
    return " + ".join(names)


def code_of(statement: Statement) -> str:
    """Return what a model was trained with: the version and the commit, and whether the code differed from it."""
    if not statement.commit:
        return f"pubsel {statement.version}"
    changed = " with changes" if statement.commit.endswith("-dirty") else ""
    return f"pubsel {statement.version}, commit {statement.commit.removesuffix('-dirty')}{changed}"


def network_of(model: dict[str, Any], of_texts: bool = False) -> str:
    """Return a network in words, by its settings."""
    if backbone := model.get("backbone"):
        kinds = {
            "pixels": "pixels",
            "scattering": "wavelet scattering",
            "rows": "hashed triples of characters" if of_texts else "rows of numbers",
        }
        kind = kinds.get(backbone["architecture"])
        return f"a linear classifier on {kind or 'features of ' + backbone['architecture']}"
    name = model.get("architecture") or model["name"]
    trained = model.get("trained") or [key for key in ("lora", "adapters") if model.get(key)]
    return f"the network {name}" + (f", of which {', '.join(trained)} is trained" if trained else "")


def figures(statement: Statement) -> tuple[list[tuple[str, list[str]]], int]:
    """Return the figures of the measurement by name, each with estimate and ends of its interval in percent: those of
    the whole, all of them, since an accuracy without its balanced accuracy would hide a rare class; then those of each
    class or label, at most SHOWN. And how many are left out, wider than WIDEST: they say next to nothing."""
    whole, of_each = [], []
    for name, (estimate, low, high) in (statement.quality or {"figures": {}})["figures"].items():
        if not isinstance(estimate, list):
            whole.append((name.replace("_", " "), [estimate, low, high]))
        elif len(estimate) > 1:  # two classes have one AUC, which is above
            each = zip(statement.facts["classes"], estimate, low, high, strict=True)
            of_each += [(f"{name.partition(' of each ')[0]} of {label}", values) for label, *values in each][:SHOWN]
    narrow = [(name, values) for name, values in of_each if values[2] - values[1] <= WIDEST]
    rows = [(name, [f"{100 * value:.1f}" for value in values]) for name, values in [*whole, *narrow]]
    return rows, len(of_each) - len(narrow)


def config(statement: Statement) -> dict[str, Any]:
    """Return config.json: the facts, and the guarantee for programs."""
    privacy = {
        "statement": statement.text,
        "epsilon": statement.epsilon,
        "delta": statement.delta,
        "unit": "one person with all their training examples" if statement.unit else "one training example",
        "adjacency": statement.adjacency,
        "against": list(statement.against),
    }
    measured = {"quality": statement.quality} if statement.quality else {}
    onnx = {"onnx": statement.onnx} if statement.onnx else {}
    return statement.facts | {"made_by": f"pubsel {__version__}", "privacy": privacy} | measured | onnx


def readme(statement: Statement) -> str:
    """Return README.md, a model card in the layout of Hugging Face."""
    return _rendered("card.md", statement, escape=False)


def privacy_page(statement: Statement, digest: str) -> str:
    """Return privacy.html. digest: the SHA-256 of model.safetensors, by which both belong together."""
    return _rendered("privacy.html", statement, escape=True, digest=digest, meaning=meaning(statement))


def meaning(statement: Statement) -> dict[str, Any]:
    """Return what the guarantee means for the best adversary, in percent, rounded up: how often it is right, how many
    members it recognises at ALARMS, and how often it is right about a person with several images, and about one unit
    that may be another."""
    if statement.epsilon is None:
        return {}
    # bounds for the best adversary there can be, who knows all other examples
    epsilon, delta = statement.epsilon, statement.delta
    variation = adversary.variation_of(statement.parts, epsilon, delta)
    swapped = adversary.exchanged(statement.parts)
    if statement.quality is not None:  # an example is in training or held out: the larger of two bounds holds for each
        variation = max(variation, adversary.variation_of([statement.quality["part"]], epsilon, delta))
        swapped = adversary.Bounds(*map(max, swapped, adversary.exchanged([statement.quality["part"]])))
    groups = [(size, *adversary.of_group(epsilon, delta, size)) for size in GROUPS]
    return {
        "right": percent(adversary.success(epsilon, delta, variation)),
        "recognised": percent(adversary.recognised(epsilon, delta, variation, ALARMS)),
        "factor": above(math.exp(min(epsilon, 700.0))),
        "swapped": (swapped.epsilon, swapped.delta, percent(adversary.success(*swapped))),
        "groups": [(k, e, d, percent(adversary.success(e, d, k * variation))) for k, e, d in groups],
    }


def percent(share: float) -> str:
    """Return a share in percent, rounded up to a tenth: a bound may not be rounded down."""
    return f"{min(100.0, math.ceil(1000 * share - 1e-6) / 10):g} %"


def _rendered(name: str, statement: Statement, *, escape: bool, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    # Markdown shows a text as it is
    plain = partial(re.sub, r"([\\`*_{}\[\]<>()#+!|~&-])", r"\\\1")
    environment.filters["plain"] = lambda text: plain(" ".join(text.split()))
    environment.filters |= {"above": above, "short": lambda value: f"{value:.4g}"}
    environment.globals |= {
        "SHOWN": SHOWN,
        "LARGEST": LARGEST,
        "WORDS": WORDS,
        "GAUSSIAN": GAUSSIAN,
        "VERSION": __version__,
        "LENGTH": LENGTH,
        "figures": figures,
        "in_a_sentence": in_a_sentence,
    }
    return environment.get_template(name).render(statement=statement, code=code_of(statement), **values).strip() + "\n"
