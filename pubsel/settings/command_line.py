"""From a record back to the command that makes it: `pubsel run ...` or `pubsel rank ...`, with those options of conf/
that come nearest to its settings, and an override for each setting in which they differ. This file imports no torch."""

import dataclasses
import json
import math
import re
import shlex
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import MISSING, OmegaConf

from pubsel.settings import CONF
from pubsel.settings.explain import method_settings
from pubsel.settings.identity import as_json
from pubsel.settings.keys import SCHEMAS, Model, Pair, Privacy, Training
from pubsel.settings.schema import check, defaults

GROUPS: dict[str, type | None] = {
    "pair": Pair, "model": Model, "algorithm": None, "distance": None, "privacy": Privacy, "training": Training,
}  # fmt: skip
USED_WITHOUT_PUBLIC = (
    "private",
    "private_share",
    "validation",
    "seed",
)  # `canonical` in run.py sets the rest of a pair
PLAIN = re.compile(r"[A-Za-z_./][\w./+@-]*")  # a text that Hydra's grammar reads as itself
NOT_TEXT = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off")


def command(record: dict[str, Any]) -> str:
    """Return the command, quoted for a shell, whose result has the identity of `record`, on the same kind of device:
    `pubsel run`, or `pubsel rank` for a measured distance."""
    words = overrides(record["settings"])
    device = str(record.get("device", "auto")).partition(":")[0]  # noise depends on it
    if device != "auto":
        words.append(f"device={device}")
    return shlex.join(["pubsel", _of(record["settings"]), *words])


def overrides(settings: dict[str, Any]) -> list[str]:
    """Return the words of Hydra's grammar that compose to `made`, the `settings` of a record, with conf/ as it is
    today."""
    of, wanted = _of(settings), dict(settings)
    pair = settings.get("pair")
    if pair is not None and pair.get("public") is None:  # an algorithm without public data ignores these
        used = {key: pair[key] for key in USED_WITHOUT_PUBLIC if key in pair}
        wanted["pair"] = _option(of, "pair", _defaults(of)["pair"]) | {"public": None} | used
        wanted.pop("distance", None)

    words = []
    for group in GROUPS:
        if group in wanted:
            values = wanted[group] or {"_target_": None}  # distance=none
            name = _nearest(of, group, json.dumps(values))
            words += [] if name == _defaults(of)[group] else [f"{group}={name}"]
            words += _changes(of, group, name, values)

    # Epsilon and seed are always given: a reader looks for them.
    ungrouped = {key: value for key, value in wanted.items() if key not in GROUPS}
    for key, value in _leaves(ungrouped).items():
        unread = key == "epsilon" and value == 0  # no private example is read, whatever epsilon is given
        if not unread and (key in ("epsilon", "seed") or value != _ungrouped(of).get(key)):
            words.append(f"{key}={written(value)}")
    return words


def _of(settings: dict[str, Any]) -> str:
    """Return the command that has such settings: run or rank."""
    return "run" if "pair" in settings else "rank"


def written(value: Any) -> str:
    """Return a JSON value in Hydra's grammar of overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if value == "inf" or (PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT):
        return value

    # Hydra reads two backslashes before a quote as one; elsewhere a backslash is itself.
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


@cache
def _nearest(of: str, group: str, wanted: str) -> str:
    """Return the option of conf/GROUP that needs the fewest overrides; among equals the default, then the first name. A
    pair is either the default or of the same two sets: pair=a_b pair.private=c would mislead."""
    values, default = json.loads(wanted), _defaults(of)[group]
    names = [default, *sorted(path.stem for path in (CONF / group).glob("*.yaml"))]

    if group == "pair":
        same = {"private": values.get("private"), "public": values.get("public")}.items()
        names = [name for name in names if name == default or same <= _option(of, group, name).items()]

    return min(names, key=lambda name: len(_changes(of, group, name, values)))


def _changes(of: str, group: str, name: str, wanted: dict[str, Any]) -> list[str]:
    """Return the overrides that turn an option into `wanted`. A key that `wanted` lacks has the default of its
    dataclass: a method's is given, another is deleted."""
    have, known = _leaves_of(of, group, name)
    want = _leaves(wanted)

    gone = [key for key in have if key not in want and not any(other.startswith(f"{key}.") for other in want)]
    usual = _method_defaults(str(wanted.get("_target_")))
    words = [f"{group}.{key}={written(usual[key])}" if key in usual else f"~{group}.{key}" for key in gone]

    # The two sets come first, since they say most.
    changed = [key for key, value in want.items() if key not in have or have[key] != value]
    for key in sorted(changed, key=lambda key: key not in ("private", "public")):
        prefix = "" if key in known else "++"
        words.append(f"{prefix}{group}.{key}={written(want[key])}")
    return words


@cache
def _leaves_of(of: str, group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of an option: as a record has it, and as Hydra composes it."""
    return _leaves(_option(of, group, name)), _leaves(_raw(of, group, name))


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping by dotted keys: {"backbone": {"crop": 1}} -> {"backbone.crop": 1}. An empty mapping is a
    leaf."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        inner = _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
        leaves |= inner or {f"{prefix}{key}": value}
    return leaves


@cache
def _option(of: str, group: str, name: str) -> dict[str, Any]:
    """Return an option's settings as a record has them: without neutral keys and those that have the dataclass's
    default."""
    schema = GROUPS[group]
    raw = _raw(of, group, name)
    if schema is None:
        usual = _method_defaults(str(raw.get("_target_")))
        kept = {key: value for key, value in raw.items() if key not in usual or value != usual[key]}
        return {key: "inf" if value == math.inf else value for key, value in kept.items()}
    return as_json(check(schema, raw))


@cache
def _method_defaults(target: str) -> dict[str, Any]:
    """Return the settings of an algorithm or distance that have a default in its class, with it."""
    fields = method_settings(target)
    known = dataclasses.fields(fields) if fields else ()
    values = {f.name: f.default for f in known if f.default not in (MISSING, dataclasses.MISSING)}
    return {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}


@cache
def _raw(of: str, group: str, name: str) -> dict[str, Any]:
    """Return an option as Hydra composes it: between the keys of a command's first files and those of its own file."""
    first = [_file(file).get(group) or {} for file in _first(of)]
    last = _file(of).get(group) or {}
    values = OmegaConf.to_container(OmegaConf.merge(*first, _with_defaults(group, name), last))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def with_backbone() -> list[str]:
    """Return the options of conf/model that train a linear classifier on features."""
    names = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    return [name for name in names if _with_defaults("model", name).get("backbone")]


def _with_defaults(group: str, name: str) -> Any:
    option = _file(f"{group}/{name}").copy()
    bases = [_with_defaults(group, base) for base in option.pop("defaults", [])]
    return OmegaConf.merge(*bases, option)


def _first(of: str) -> list[str]:
    """Return what comes first among a command's defaults: common, run_defaults."""
    return [entry for entry in _file(of).defaults if isinstance(entry, str) and entry not in ("hydra", "_self_")]


@cache
def _defaults(of: str) -> dict[str, str]:
    """Return, by group, the option that a command takes by default."""
    entries = [entry for entry in _file(of).defaults if not isinstance(entry, str)]
    return {str(group): str(name) for entry in entries for group, name in entry.items()}


@cache
def _ungrouped(of: str) -> dict[str, Any]:
    """Return the keys that belong to no group, with their default values."""
    files = [_file(file) for file in (*_first(of), of)]
    merged = OmegaConf.to_container(OmegaConf.merge(*files))
    assert isinstance(merged, dict)
    return _leaves({str(key): value for key, value in merged.items()})


@cache
def _file(name: str) -> Any:
    command, _, rest = name.partition("_")
    if rest == "defaults":
        return OmegaConf.create(defaults(SCHEMAS[command]))
    return OmegaConf.load(CONF / f"{name}.yaml")
