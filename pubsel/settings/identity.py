"""The name of a run: settings that decide its result, and a digest of them."""

import dataclasses
import json
import math
import os
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from pubsel.files import digest
from pubsel.settings.keys import Overlap, RunConfig

LONGEST = 255  # bytes of a folder's name, on most file systems


def is_path(name: str) -> bool:
    """Return whether a dataset is given by a path (it has a separator or a suffix) and not by a name."""
    return name in (".", "..") or os.sep in name or name.lower().endswith((".npz", ".csv", ".tsv", ".parquet"))


def overlap_of(private: str, overlap: Overlap | None = None) -> Overlap:
    """Return what `overlap` means for a private set: null is leave for a user's own data, refuse for a named set."""
    return overlap or (Overlap.leave if is_path(private) else Overlap.refuse)


def same_path(first: str, second: str) -> bool:
    """Return whether two paths are of one file or folder, however they are spelled or linked."""
    a, b = (Path(name).expanduser().resolve() for name in (first, second))
    return a == b or (a.exists() and b.exists() and a.samefile(b))


def as_json(config: Any) -> dict[str, Any]:
    """Return the keys of `config` that can change a result, as plain JSON values."""
    kept: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)

        # A default is left out, so that a new setting changes no identity of an old run.
        if f.metadata.get("neutral") or (f.default is not MISSING and value == f.default):
            continue

        if dataclasses.is_dataclass(value):
            value = as_json(value)
            if not value:  # all of it has its default
                continue
        if value == math.inf:
            value = "inf"  # JSON knows no infinity
        if isinstance(value, list):
            value = [part.name if isinstance(part, Enum) else part for part in value]
        kept[f.name] = value.name if isinstance(value, Enum) else value
    return kept


@cache
def default_of(key: str) -> Any:
    """Return the value of a dotted key of `pubsel run` that the settings of a record lack, as `as_json` leaves out a
    default; None if it has none, or if it is a key of an algorithm."""
    schema: Any = RunConfig
    *groups, last = key.split(".")
    for name in groups:
        schema = next((f.type for f in dataclasses.fields(schema) if f.name == name), None)
        if not dataclasses.is_dataclass(schema):
            return None

    default = next((f.default for f in dataclasses.fields(schema) if f.name == last), MISSING)
    if default is MISSING:
        return None
    return default.name if isinstance(default, Enum) else default


def digest_of(values: dict[str, Any]) -> str:
    """Return ten hexadecimal digits that depend on every value and on no order of keys."""
    text = json.dumps(values, sort_keys=True, default=str)
    return digest([text], size=5)


def identity_of(config: RunConfig) -> str:
    """Return the name of a run's folder: readable, and different whenever a setting that can change the result is."""
    return run_name(as_json(config))


def run_name(settings: dict[str, Any]) -> str:
    """Return the identity of a run with these settings, which are those of a record."""
    pair, algorithm = settings["pair"], settings["algorithm"].get("name", "algorithm")
    public = short_name(pair["public"]) if pair["public"] else "none"

    # the digest alone would do: the words are for whoever lists the folder
    data = f"{short_name(pair['private'])}-{public}"
    epsilon = float(settings["epsilon"])  # may be "inf"
    readable = f"{data}-{settings['model']['name']}-{algorithm}-eps{epsilon:g}-seed{settings['seed']}"
    return folder_name(readable, settings)


def folder_name(readable: str, values: dict[str, Any]) -> str:
    """Return a readable name, cut to the length that a file system takes, with a digest of all settings."""
    end = f"-{digest_of(values)}"
    return readable.encode()[: LONGEST - len(end)].decode(errors="ignore") + end


def short_name(name: str | list[str]) -> str:
    """Return a dataset name or path as part of a folder name; a+b for a list of them."""
    if isinstance(name, list):
        return "+".join(short_name(part) for part in name)
    return re.sub(r"[^\w.]+", "_", Path(name).name if is_path(name) else name)
