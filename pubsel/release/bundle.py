"""A finished run as a folder that may be given away, whole or not at all.

All that is written is a function of the weights, the facts about the model and what `release.card.statement_of` takes
from the record: what was released, and what is public. Nothing here reads the private data, or the ledger, which knows
whether earlier releases are of the same examples.
"""

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from pubsel import models, records
from pubsel.cell import use_threads
from pubsel.data.texts import HASHING
from pubsel.files import whole
from pubsel.gradients.factored import OffsetLinear
from pubsel.messages import UsageError, UserError, cannot_write
from pubsel.models.text_encoder import PREFIX, as_published
from pubsel.privacy import ledger
from pubsel.release import card
from pubsel.release.classifier import EXPORTED
from pubsel.release.onnx import FILE as ONNX
from pubsel.release.onnx import as_onnx, check_installed
from pubsel.release.reopen import folder_of, whole_of
from pubsel.settings.keys import ExportConfig, Format, Model
from pubsel.settings.schema import check, literal

WEIGHTS, CONFIG = EXPORTED


def made(settings: ExportConfig) -> tuple[dict[str, bytes], card.Statement]:
    """Return the files of the folder by name, and the statement in them. UserError says why a run may not or cannot be
    given away."""
    if settings.format == Format.onnx:
        check_installed()

    # The guarantee comes first: what may not be given away need not be read.
    use_threads(settings.threads)
    folder = folder_of(settings.run, Path(settings.results))
    if not (folder / "result.json").exists():
        raise UserError(f"{folder}: it lacks result.json, which states the guarantee: export the run itself")
    record = records.read_record(folder / "result.json")
    if (reasons := card.against(record)) and not settings.anyway:
        raise UserError(f"{folder.name}: {'; and '.join(reasons)}: {_remedy(record, folder)}")

    model, facts = whole_of(folder, record)
    statement = card.statement_of(record, public_facts(facts, model))

    files = dict[str, bytes]()
    if settings.format == Format.onnx:
        files[ONNX], how = as_onnx(model, facts, settings.data_root)
        statement = replace(statement, onnx=how)
    return contents(statement, model) | files, statement


def _remedy(record: dict[str, Any], folder: Path) -> str:
    """Return what to do about a run that may not be given away."""
    again = f"train again with privacy.secure_noise=true{ledger.again(folder)}"
    if record["privacy"].get("epsilon") is None:
        again = "train with epsilon=NUMBER and privacy.secure_noise=true, by a private algorithm"
    elif record["privacy"].get("valid") is not True:
        again = f"train again with privacy.accounting=prv and privacy.secure_noise=true{ledger.again(folder)}"
    return f"{again}; or set anyway=true, which the folder then says on top"


def public_facts(facts: dict[str, Any], whole: nn.Module) -> dict[str, Any]:
    """Return the facts about a model without paths of this machine, with its preprocessing, the source of its backbone
    (None: there is none) and its head."""
    # what anyone needs to prepare an image as training did
    settings = check(Model, literal(facts["model"], CONFIG))
    preprocessing: dict[str, Any] = {"scale": "pixels / 255", "mean": facts["mean"], "std": facts["std"]}
    preprocessing |= {"input_size": settings.input_size, "interpolation": "bilinear"} if settings.input_size else {}
    source = None
    if settings.backbone is not None:
        from pubsel.data.features import described  # and with it timm: a second

        preprocessing, source = described(settings.backbone)
    if facts.get("text") and facts["text"]["hashed"]:
        preprocessing = {"features": HASHING.format(facts["text"]["hashed"])}

    # what gives the logits: a layer of the network, or the linear classifier after what is frozen
    head: dict[str, Any] = {"kind": "part of the network", "outputs": len(facts["classes"])}
    if not isinstance(whole, models.Network):
        linear = next(module for module in whole.modules() if isinstance(module, nn.Linear))
        added = ", added to the logits of a classifier of public examples" * isinstance(linear, OffsetLinear)
        head = {"kind": f"linear{added}", "inputs": linear.in_features, "outputs": linear.out_features}
        head |= {"bias": linear.bias is not None, "after": facts["frozen"]}

    return facts | {
        "model": without_paths(facts["model"]),
        "preprocessing": preprocessing,
        "backbone_source": source,
        "head": head,
    }


def without_paths(values: Any) -> Any:
    """Return settings in which every path is only the name of its file."""
    if isinstance(values, dict):
        return {key: without_paths(value) for key, value in values.items()}
    if isinstance(values, list):
        return [without_paths(value) for value in values]
    if isinstance(values, str) and values.startswith(PREFIX):
        return as_published(values)
    return Path(values).name if isinstance(values, str) and os.sep in values else values


def contents(statement: card.Statement, whole: nn.Module) -> dict[str, bytes]:
    """Return the files of the folder by name, a function of their arguments alone."""
    # Layers that share a weight, or keep it in another order of channels, have a copy each.
    state = {name: tensor.detach().cpu() for name, tensor in whole.state_dict().items()}
    weights = save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()})
    return {
        WEIGHTS: weights,
        CONFIG: (json.dumps(card.config(statement), indent=1, sort_keys=True) + "\n").encode(),
        "README.md": card.readme(statement).encode(),
        "privacy.html": card.privacy_page(statement, hashlib.sha256(weights).hexdigest()).encode(),
    }


def write(target: Path, files: dict[str, bytes], to: str, private: bool) -> None:
    """Make a folder of these files, whole or not at all; one that has just these is left as it is, also if another
    process makes it meanwhile. private: only its owner may read it. UsageError if it has others; UserError if it cannot
    be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or not any(target.iterdir()):
            with whole(target, private, folder=True) as partial:
                for name, content in files.items():
                    (partial / name).write_bytes(content)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
            raise cannot_write(f"to={target}", error) from None

    there = {path.name: path.read_bytes() if path.is_file() else b"" for path in target.iterdir()}
    if there != files:
        raise UsageError(f"to={to}: it is there already, with other files: give a new folder, or delete it")
