"""Algorithms and distances: classes with settings of their own, which an option of conf/algorithm or conf/distance
names by `_target_`; and the names that options give to methods."""

import contextlib
import copy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pubsel.messages import UsageError
from pubsel.settings import CONF, own_folders
from pubsel.settings.identity import as_json
from pubsel.settings.schema import check, check_name

T = TypeVar("T")

GROUPS = ("algorithm", "distance")
_CHECKED: dict[tuple[type, str], Any] = {}  # instances, by class and values


def instance(group: str, base: type[T], values: dict[str, Any]) -> T:
    """Return an instance of the class that `_target_` names, made from the other values, checked; UsageError names the
    key at fault, below `group`. base: the class must be a subclass of it.

    Values may be those of somebody else's record, so a class that no file of conf/ or --config-dir names is not
    imported."""
    from hydra.utils import get_class

    target = values.get("_target_")
    if target not in targets((CONF, *own_folders())):
        raise UsageError(
            f"{group}._target_={target}: no file of conf/ has it, so it is not imported: give --config-dir=FOLDER with "
            "a file that names it, if it is a class of yours"
        )
    try:
        cls = get_class(target)
    except Exception as error:
        raise UsageError(f"{group}._target_={target}: {str(error).splitlines()[0]}") from None

    if not issubclass(cls, base):
        raise UsageError(f"{group}._target_={target}: give a subclass of {base.__module__}.{base.__name__}")

    # cells of a sweep differ in other settings
    key = cls, repr(values)
    if key not in _CHECKED:
        _CHECKED[key] = check(cls, {key: value for key, value in values.items() if key != "_target_"}, group)
    checked: T = copy.deepcopy(_CHECKED[key])
    return checked


def typed(group: str, method: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` from which `instance` made `method`, each with its type: 1 and 1.0 are the same setting.
    UsageError for a name that its class does not have."""
    check_method(group, values, own_folders())
    return {"_target_": values["_target_"]} | as_json(method)


def option(group: str, name: str, conf: Path = CONF) -> dict[str, Any]:
    """Return the values of conf/GROUP/NAME.yaml on top of those of its defaults, as Hydra composes them. conf: a folder
    whose files come before those of the package."""
    path = conf / group / f"{name}.yaml"
    if not path.exists():
        path = CONF / group / path.name
    # the later of two defaults counts, and the file itself after all of them
    values: dict[str, Any] = yaml.safe_load(path.read_text()) or {}

    bases = [base for base in values.pop("defaults", []) if base != "_self_"]
    for base in reversed(bases):
        values = option(group, base, conf) | values
    return values


@cache
def with_backbone() -> list[str]:
    """Return the options of conf/model that train a linear classifier on features."""
    names = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    return [name for name in names if option("model", name).get("backbone")]


@cache
def method_keys() -> frozenset[str]:
    """Return the dotted keys of all algorithms and distances of conf/."""
    names = [(group, path.stem) for group in GROUPS for path in (CONF / group).glob("*.yaml")]
    return frozenset(f"{group}.{key}" for group, name in names for key in option(group, name))


def check_method(group: str, values: dict[str, Any], folders: list[Path]) -> None:
    """Raise UsageError for a malformed GROUP.name, or one that its class does not have: a record would be wrong.

    A class has the names that conf/GROUP gives it, and those that a file of the `folders` (--config-dir) gives. A class
    that conf/ does not know, a user's own, may have any that no other class has.
    """
    name, target = values.get("name"), values["_target_"]
    check_name(f"{group}.name", name)

    # Tables know methods by their names, so a class may not take that of another one.
    known = methods(CONF, group)
    names = [other for other, targets in known.items() if target in targets]
    permitted = not names or any(target in methods(folder, group).get(str(name), ()) for folder in folders)
    if name in names or (permitted and name not in known):
        return

    may = f"it may be {', '.join(sorted(names))}" if names else f"{name} is another method"
    hint = f"; to name a setting, give label={name}" if group == "algorithm" else ""
    raise UsageError(f"{group}.name={name}: {target} does not have this name, {may}{hint}")


def targets(folders: Iterable[Path]) -> set[str]:
    """Return the classes that files of the `folders` name as algorithms and distances."""
    every = [methods(folder, group) for folder in folders for group in GROUPS]
    return {target for classes in every for several in classes.values() for target in several}


@cache
def methods(conf: Path, group: str) -> dict[str, set[str]]:
    """Return what conf/GROUP/*.yaml names: the name of each method, and the classes of the files that give it."""
    classes: dict[str, set[str]] = {}
    for path in sorted((conf / group).glob("*.yaml")):
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError, TypeError):  # Hydra says what is wrong
            values = option(group, path.stem, conf)
            classes.setdefault(str(values.get("name")), set()).add(str(values.get("_target_")))
    return classes
