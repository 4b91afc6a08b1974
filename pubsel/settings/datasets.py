"""The description of a named set in conf/dataset, before its images are there."""

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pubsel.files import digest
from pubsel.messages import UsageError, UserError
from pubsel.settings import named
from pubsel.settings.identity import digest_of
from pubsel.settings.keys import Metric
from pubsel.settings.schema import check, nearest, setting

UNREADABLE = ".unreadable.txt"  # suffix of the list of a user's files that could not be read, next to their folder


@dataclass
class Dataset:
    """One file of conf/dataset: what is known about a named dataset before it is there."""

    source: str = setting("module of pubsel.data that reads it, or a module of your own")
    options: dict[str, Any] = field(default_factory=dict)
    title: str = setting("what it is, in one line")
    classes: int = setting("number of classes", at_least=1)
    names: list[str] | None = setting("names of the classes, in order; null: their numbers", default=None)
    classes_of: str | None = setting("the set whose classes these are, in the same order", default=None)
    images_of: str | None = setting("the set whose images these are too, in another split", default=None)
    shares_images_with: list[str] = field(
        default_factory=list, metadata={"about": "sets that have some of its images, at other sizes"}
    )
    metric: Metric = setting("accuracy; balanced_accuracy or auc for unbalanced classes; auc for several labels")
    shape: list[int] = setting("channels, height, width; of the prepared images")
    mean: list[float] = setting("per channel in [0, 1], a published constant, never computed from private data")
    std: list[float] = setting("per channel in [0, 1], likewise")
    licence: str = setting("licence or terms")
    size_mb: float = setting("download in MB", at_least=0)
    url: str = setting("where it comes from")
    instructions: str | None = setting("steps for data that cannot be fetched without a person; null: fetched for you")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return `shape` as a tuple: channels, height and width."""
        channels, height, width = self.shape
        return channels, height, width


def dataset_names() -> list[str]:
    """Return the names of the datasets in conf/dataset, and in the user's own --config-dir."""
    return sorted(named("dataset"))


def dataset_info(name: str) -> Dataset:
    """Return what the file of a dataset says; UsageError lists the known names."""
    path = named("dataset").get(name)
    if path is None and os.path.exists(name):
        raise UsageError(f"{name}: is no named dataset: if you mean the path, write .{os.sep}{name}")
    if path is None:
        names = dataset_names()
        raise UsageError(f"unknown dataset {name!r}{nearest(name, names)}: use a path, or one of {', '.join(names)}")
    state = path.stat()
    return _read_info(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@cache
def _read_info(path: Path, state: tuple[int, ...]) -> Dataset:
    """Return what a file says, which a command asks for many times. state: another one for another content."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None

    # a name too many would shift the others, and tables would show wrong classes
    info = check(Dataset, values, f"dataset {path.stem}: ")
    if info.names is not None and len(info.names) != info.classes:
        raise UserError(f"{path}: {len(info.names)} names of {info.classes} classes: name each one, or set names=null")
    return info


def kept_folder(name: str, info: Dataset, root: Path) -> Path:
    """Return where the images of a named set are kept once they are read. Its name depends on the set's reader, rules
    and shape, so that another rule never meets the images of an earlier one."""
    rules = {"reader": info.source, "options": info.options, "shape": info.shape}
    return root / "prepared" / f"{name}-{digest_of(rules)}"


def decoded_folder(path: Path, root: Path) -> Path:
    """Return where a user's own images are kept once they are decoded. Its name does not tell the path."""
    whole = str(path.expanduser().resolve())
    return root.expanduser() / "decoded" / digest([whole], size=10)


def is_there(path: Path) -> bool:
    """Return whether a file is there, or a folder with something in it (a failed download may leave an empty one)."""
    return any(path.iterdir()) if path.is_dir() else path.exists()
