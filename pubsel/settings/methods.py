"""The names that conf/algorithm gives to methods."""

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pubsel.messages import UsageError
from pubsel.settings import CONF
from pubsel.settings.keys import option
from pubsel.settings.schema import check_name


@cache
def algorithm_keys() -> frozenset[str]:
    """The dotted keys of all algorithms of conf/."""
    files = [yaml.safe_load(path.read_text()) or {} for path in sorted((CONF / "algorithm").glob("*.yaml"))]
    return frozenset(f"algorithm.{key}" for made in files for key in made if key != "defaults")


def check_method(algorithm: dict[str, Any], own: list[Path]) -> None:
    """UsageError where algorithm.name is no name, or one that its class has not: a record would lie.

    A class has the names that conf/algorithm gives it, and those that a file of the folders `own` (--config-dir) gives.
    A class that conf/ does not know, a user's own, may have any that no other class has.
    """
    name, target = algorithm.get("name"), algorithm["_target_"]
    check_name("algorithm.name", name)
    known = methods(CONF)
    mine = [one for one, targets in known.items() if target in targets]
    given = not mine or any(target in methods(folder).get(str(name), ()) for folder in own)
    if name in mine or (given and name not in known):
        return
    may = f"it may be {', '.join(sorted(mine))}" if mine else f"{name} is another method"
    raise UsageError(f"algorithm.name={name}: {target} has not this name, {may}; to name a setting, give label={name}")


@cache
def methods(conf: Path, group: str = "algorithm") -> dict[str, set[str]]:
    """What conf/GROUP/*.yaml names: the name of each method, and the classes of the files that give it."""
    found: dict[str, set[str]] = {}
    for path in sorted((conf / group).glob("*.yaml")):
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError, TypeError):  # Hydra says what is wrong
            made = option(group, path.stem, conf)
            found.setdefault(str(made.get("name")), set()).add(str(made.get("_target_")))
    return found
