"""Frozen encoders: an option of conf/model, a network of timm, weights in a folder or a file here; or of texts."""

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pubsel.files import DAMAGE, file_digest, reading
from pubsel.messages import UsageError
from pubsel.models.text_encoder import PREFIX, name_of
from pubsel.models.weights import check_timm, kept, like_names, of_timm, published, weight_file
from pubsel.settings import CONF
from pubsel.settings.compose import words_of
from pubsel.settings.keys import WEIGHTLESS, Backbone
from pubsel.settings.methods import option, with_backbone
from pubsel.settings.schema import check

FILE, CONFIG = "model.safetensors", "config.json"  # of a folder, as timm writes it for the hub
# encoders of texts on Hugging Face: dimension, parameters, licence
OF_TEXTS = {
    "sentence-transformers/all-MiniLM-L6-v2": (384, 22_713_216, "apache-2.0"),
    "sentence-transformers/all-mpnet-base-v2": (768, 109_486_464, "apache-2.0"),
    "BAAI/bge-small-en-v1.5": (384, 33_360_000, "mit"),
    "BAAI/bge-base-en-v1.5": (768, 109_482_240, "mit"),
    "intfloat/multilingual-e5-small": (384, 117_653_760, "mit"),
}
REMEDY = "name its network of timm: features=NAME checkpoint=FILE"
MISFITS = (*DAMAGE, LookupError, TypeError, AttributeError, SafetensorError)  # errors of files of another kind


class Encoder(NamedTuple):
    """A row of the list of encoders. dimension, side: None if the images decide them, or if it takes texts."""

    name: str
    dimension: int | None
    side: int | None
    parameters: int
    licence: str
    weights: str


def encoder_words(features: str, checkpoint: str | None, data_root: str) -> list[str]:
    """Return the words of `pubsel run` for a linear classifier on the features of an encoder: a name of conf/model or
    of timm, or a folder or a file with weights. checkpoint: a file of its weights. Other weights get another name.
    UsageError if there is no such encoder; UserError if a file is absent or does not read."""
    of_conf = features in with_backbone()
    if features.startswith(PREFIX) and checkpoint is None:
        return [
            "model=text_encoder",
            *words_of({"name": name_of(features), "backbone": {"architecture": features}}, "model."),
        ]
    if of_conf and checkpoint is None:
        return [f"model={features}"]
    backbone: dict[str, Any] = {} if of_conf else {"architecture": features}
    if not of_conf and (os.sep in features or features.endswith(".safetensors")):
        if checkpoint is not None:
            raise UsageError(f"checkpoint={checkpoint}: features={features} has its weights: remove it, or give a name")
        backbone = _of_file(features)
    elif not of_conf:
        _check_known(features)
    backbone |= {"checkpoint": checkpoint} if checkpoint is not None else {}

    # a file may keep its path while its content changes
    name = features if of_conf else str(backbone["architecture"])
    if file := backbone.get("checkpoint"):
        name += f"-{file_digest(weight_file('checkpoint', file, data_root))[:8]}"
    return [f"model={features if of_conf else 'linear'}", *words_of({"name": name, "backbone": backbone}, "++model.")]


def _of_file(features: str) -> dict[str, Any]:
    """Return the settings of the backbone whose weights are in a folder with a config.json, or in a safetensors file
    with the name of its network, `architecture`, in its metadata."""
    path = Path(features).expanduser()
    if not path.exists():
        raise UsageError(f"features={features}: no such file or folder here; {like_names(features)}")
    if not path.is_dir():
        with reading(path, REMEDY, MISFITS), safe_open(path, "pt") as file:
            architecture = (file.metadata() or {}).get("architecture")
        if architecture is None:
            raise UsageError(f"features={features}: it does not say of which network: {REMEDY}")
        return {"architecture": architecture, "checkpoint": features}

    # what prepares an image is written out, so that a release says it too
    with reading(path / CONFIG, REMEDY, MISFITS):
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if "architecture" not in config:
            raise UsageError(f"features={features}: its {CONFIG} names no network of timm: {REMEDY}")
        how = config.get("pretrained_cfg", config)
        options = {key: value for key, value in config.get("model_args", {}).items() if key != "num_classes"}
        if options.get("in_chans") == 3:
            del options["in_chans"]
        size = options.get("img_size") or how["input_size"][1:]
        backbone = {"architecture": config["architecture"], "checkpoint": str(Path(features, FILE)), "options": options}
        backbone |= {"input_size": size if isinstance(size, int) else size[-1], "crop": how["crop_pct"]}
        return backbone | {key: how[key] for key in ("mean", "std", "interpolation")}


def _check_known(features: str) -> None:
    """Raise UsageError if timm has no network of this name."""
    import timm

    if timm.is_model(features):
        return check_timm("model.backbone", features, {})
    if Path(features).is_dir():
        raise UsageError(f"features={features}: a folder here: write ./{features}")
    why = "it has no backbone: " if (CONF / "model" / f"{features}.yaml").exists() else ""
    raise UsageError(
        f"features={features}: {why}take one of {', '.join(with_backbone())}, a network of timm "
        f"({like_names(features)}), or a folder with {FILE} and {CONFIG}"
    )


def encoder(name: str, data_root: str) -> Encoder:
    """Return the row of a name of conf/model or of timm. Its network is made without numbers; no weights are read."""
    of_conf = name in with_backbone()
    backbone = check(Backbone, option("model", name)["backbone"] if of_conf else {"architecture": name})
    if backbone.architecture in WEIGHTLESS:
        return Encoder(name, None, backbone.input_size, 0, "", "needs none")
    with torch.device("meta"):
        net: Any = of_timm(backbone.architecture, False, {"num_classes": 0}, **backbone.options)

    # weights of a file are whose they are
    if backbone.checkpoint is not None:
        paths = (Path(place, backbone.checkpoint).expanduser() for place in (".", data_root))
        weights = "here" if any(path.is_file() for path in paths) else "none"
    else:
        fetched = "download=true" if published(backbone.architecture) else "none"
        weights = "here" if kept(backbone.architecture) else fetched
    licence = net.pretrained_cfg.get("license") if weights != "none" and backbone.checkpoint is None else None
    return Encoder(
        name,
        net.num_classes or getattr(net, "head_hidden_size", None) or net.num_features,
        backbone.input_size or net.pretrained_cfg["input_size"][-1],
        sum(parameter.numel() for parameter in net.parameters()),
        licence or "?",
        weights,
    )


def encoders_of_texts(pattern: str) -> list[Encoder]:
    """Return the rows of those encoders of texts in OF_TEXTS whose names fit a pattern. Nothing is fetched, and no
    network is made."""
    from huggingface_hub import try_to_load_from_cache

    rows = list[Encoder]()
    for name, (dimension, parameters, licence) in OF_TEXTS.items():
        if fnmatch(f"{PREFIX}{name}".lower(), pattern.lower()):
            weights = "here" if isinstance(try_to_load_from_cache(name, FILE), str) else "download=true"
            rows.append(Encoder(f"{PREFIX}{name}", dimension, None, parameters, licence, weights))
    return rows
