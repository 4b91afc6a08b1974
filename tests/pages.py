"""docs/hooks.py, which makes the pages of the site; docs/ is no package."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parent.parent


@cache
def load(name: str) -> ModuleType:
    """A program in docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, CHECKOUT / "docs" / name)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def hooks() -> ModuleType:
    return load("hooks.py")
