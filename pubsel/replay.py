"""From a record back to the command that makes it: `pubsel run ...`, with the options of conf/ that come nearest to its
settings, and an override for each setting in which they differ. This file imports no torch."""

import json
import re
import shlex
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from pubsel.config import CONF, Distance, Model, Pair, Privacy, Training, check, settings

GROUPS: dict[str, type | None] = {
    "pair": Pair, "model": Model, "algorithm": None, "distance": Distance, "privacy": Privacy, "training": Training,
}  # fmt: skip
USED_WITHOUT_PUBLIC = ("private", "private_share", "validation")  # `canonical` in run.py sets the rest of a pair
PLAIN = re.compile(r"[A-Za-z_./][\w./+@-]*")  # a text that Hydra's grammar reads as itself
NOT_TEXT = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off")


def command(record: dict[str, Any]) -> str:
    """The command, quoted for a shell, whose run has the identity of `record`, on the same kind of device."""
    device = str(record.get("device", "auto")).partition(":")[0]  # noise depends on it
    words = [*overrides(record["settings"]), *([] if device == "auto" else [f"device={device}"])]
    return shlex.join(["pubsel", "run", *words])


def overrides(made: dict[str, Any]) -> list[str]:
    """Words of Hydra's grammar that compose to `made`, the `settings` of a record, with conf/ as it is today."""
    wanted = dict(made)
    if "pair" in made and made["pair"].get("public") is None:  # an algorithm without public data ignores these
        used = {key: made["pair"][key] for key in USED_WITHOUT_PUBLIC if key in made["pair"]}
        wanted["pair"] = _option("pair", _defaults()["pair"]) | {"public": None} | used
        wanted.pop("distance", None)
    words = []
    for group in GROUPS:
        if group in wanted:
            name = _nearest(group, json.dumps(wanted[group]))
            words += [] if name == _defaults()[group] else [f"{group}={name}"]
            words += _changes(group, name, wanted[group])
    for key, value in wanted.items():
        unread = key == "epsilon" and value == 0  # no private example is read, whatever epsilon is given
        if key not in GROUPS and not unread and (key in ("epsilon", "seed") or value != _ungrouped().get(key)):
            words.append(f"{key}={written(value)}")
    return words


def written(value: Any) -> str:
    """A JSON value in Hydra's grammar of overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if value == "inf" or (PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT):
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value) + "'"


@cache
def _nearest(group: str, wanted: str) -> str:
    """The option of conf/GROUP that needs the fewest overrides; among equals the default, then the first name. A pair
    is either the default or of the same two sets: pair=a_b pair.private=c would mislead."""
    values, default = json.loads(wanted), _defaults()[group]
    names = [default, *sorted(path.stem for path in (CONF / group).glob("*.yaml"))]
    if group == "pair":
        sets = (values.get("private"), values.get("public"))
        names = [
            n for n in names if n == default or sets == (_option(group, n)["private"], _option(group, n)["public"])
        ]
    return min(names, key=lambda name: len(_changes(group, name, values)))


def _changes(group: str, name: str, wanted: dict[str, Any]) -> list[str]:
    """What turns an option into `wanted`. A key that `wanted` lacks has the default of its dataclass: it is deleted."""
    (have, known), want = _leaves_of(group, name), _leaves(wanted)
    gone = [key for key in have if key not in want and not any(other.startswith(f"{key}.") for other in want)]
    set_to = {key: value for key, value in want.items() if key not in have or have[key] != value}
    return [f"~{group}.{key}" for key in gone] + [
        f"{'' if key in known else '++'}{group}.{key}={written(set_to[key])}"
        for key in sorted(set_to, key=lambda key: key not in ("private", "public"))
    ]


@cache
def _leaves_of(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an option: as a record has it, and as Hydra composes it."""
    return _leaves(_option(group, name)), _leaves(_raw(group, name))


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"backbone": {"crop": 1}} -> {"backbone.crop": 1}; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        inner = _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
        leaves |= inner or {f"{prefix}{key}": value}
    return leaves


@cache
def _option(group: str, name: str) -> dict[str, Any]:
    """An option's settings as a record has them: without neutral keys and those that have the dataclass's default."""
    schema = GROUPS[group]
    return _raw(group, name) if schema is None else settings(check(schema, _raw(group, name)))


@cache
def _raw(group: str, name: str) -> dict[str, Any]:
    """An option as Hydra composes it: on top of the options that it names as its defaults, and of conf/rare.yaml."""
    rare = _file("rare").get(group) or {}
    made = OmegaConf.to_container(OmegaConf.merge(rare, _with_defaults(group, name)))
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def _with_defaults(group: str, name: str) -> Any:
    option = _file(f"{group}/{name}").copy()
    return OmegaConf.merge(*(_with_defaults(group, base) for base in option.pop("defaults", [])), option)


@cache
def _defaults() -> dict[str, str]:
    """Group: the option that `pubsel run` takes unasked."""
    entries = [entry for entry in _file("run").defaults if not isinstance(entry, str)]
    return {str(group): str(name) for entry in entries for group, name in entry.items()}


@cache
def _ungrouped() -> dict[str, Any]:
    """The keys that stand in no group, with the values that they have unasked."""
    return {str(key): value for file in ("common", "run") for key, value in _file(file).items()}


@cache
def _file(name: str) -> Any:
    return OmegaConf.load(CONF / f"{name}.yaml")
