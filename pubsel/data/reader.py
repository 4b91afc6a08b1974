"""Datasets as a run reads them: private ones by the rules of their owner, public ones by those that fit them too."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pubsel.data import folders, memory, prepared, tables
from pubsel.data.convert import Shape
from pubsel.data.findings import settle
from pubsel.data.images import is_dicom
from pubsel.data.opened import Opened, Source
from pubsel.data.opening import open_dataset
from pubsel.data.texts import is_texts
from pubsel.data.vectors import Field, is_rows
from pubsel.messages import UsageError
from pubsel.settings.identity import is_path
from pubsel.settings.keys import Read

Through = Callable[[str, Source, Shape | None], Source]


def unchanged(name: str, source: Source, like: Shape | None) -> Source:
    """Return the source: what is used of a set is its images."""
    return source


class Reader(NamedTuple):
    """The place of datasets, whether missing ones are downloaded, and how they are used: through(name, source, like),
    such as the source's features. like: the shape of the private images, for other sets. opened: a set that need not be
    read again. unit, keep: as in `open_dataset`. rules: by which a user's private files are read; pixels: a network is
    trained on the images themselves; public: the sets are public ones (`of_public_data`); columns: of the private
    table, which are read of others; few: only chosen examples go through (`as_used`)."""

    data_root: str
    download: bool = False
    through: Through = unchanged
    like: Shape | None = None
    opened: Opened | None = None
    unit: str | None = None
    keep: bool = True
    rules: Read = Read()
    pixels: bool = False
    public: bool = False
    columns: tuple[Field, ...] = ()
    few: bool = False

    def __call__(self, name: str) -> Opened:
        if self.opened is not None and self.opened.name == name:
            return self.opened
        rules = of_public_data(self.rules, name) if self.public else self.rules
        unit = _unit_of_public(name, self.unit) if self.public else self.unit
        source = open_dataset(
            name, self.data_root, self.download, unit, self.keep, rules, self.columns, not self.public
        )
        # nobody in public data is protected, and none of a public table is kept for testing
        of_private = ("ids", "nobody", "spellings", "large", *(["split"] * tables.is_table(Path(name).expanduser())))
        about = [f for f in source.findings if not (self.public and f.name in of_private)]
        settle(about, self.rules.accept or [])
        # no backbone would scale the images again, so their size is a decision
        sizes = next((finding for finding in source.findings if finding.name == "no_size"), None)
        if self.pixels and sizes is not None:
            raise UsageError(f"{sizes.text}: set size=SIDE, such as 32, or take a model with a backbone")
        wait = self.few and source.texts is None  # texts are of whole sets
        return Opened(name, source, source if wait else self.through(name, source, self.like))

    def as_used(self, chosen: Opened) -> Opened:
        """Return chosen examples of a set as they are used, such as by their features, which with `few` are computed
        here."""
        if self.few and chosen.used is chosen.images:
            return chosen._replace(used=self.through(chosen.name, chosen.images, self.like))
        return chosen


def of_public_data(read: Read, name: str) -> Read:
    """Return the rules by which a public set is read: those of the private one that do not name a part of it, and the
    columns of a table that it has too."""
    kept = ("accept", "skip", "labels", "bits", "bounds", "scale")
    rules = Read(**{key: getattr(read, key) for key in kept})
    path = Path(name).expanduser()
    if not is_path(name) or not tables.is_table(path):
        return rules
    columns = {*tables.names_of(path), "none"}
    labels = read.label if isinstance(read.label, list) else [read.label]
    rules.path = read.path if read.path in columns else None
    rules.label = read.label if columns >= set(labels) else None
    rules.split = read.split if read.split in columns else None
    rules.text = read.text if read.text in columns else None
    return rules


def _unit_of_public(name: str, unit: str | None) -> str | None:
    """Return the unit by which a public set of a user's names its people: the private one, if the set has that column,
    array or tag."""
    path = Path(name).expanduser()
    if unit is None or not is_path(name):
        return None
    if tables.is_table(path):
        return unit if unit in tables.names_of(path) else None
    if path.suffix.lower() == ".npz":
        arrays = {unit, *(array for part in prepared.PARTS for array in (f"{part}_{unit}", f"{unit}_{part}"))}
        return unit if arrays & {*prepared.names_in(path)} else None
    images = folders.all_images(path) if path.is_dir() and unit != "folder" else []
    return unit if images and all(map(is_dicom, images)) else None


def check_read(name: str, read: Read) -> None:
    """Raise UsageError for a rule of reading that has no effect on a private set: two requests that differ in it alone
    would differ in their noise."""
    of_tables, of_images, of_rows = (
        ("path", "label", "split", "labels", "text"),
        ("size", "channels", "bits"),
        ("bounds", "scale"),
    )
    path = Path(name).expanduser()
    unused: tuple[str, ...] = (*of_tables, *of_images, *of_rows, "skip")
    is_table, held = tables.is_table(path), memory.of_memory(name) is not None

    if not is_path(name):
        what = "a set of conf/dataset"
    elif held and not is_texts(path, read):
        return
    elif held or path.exists():
        kind = "texts" if is_texts(path, read) else "rows" if is_rows(path, read) else "images"
        what = f"{'a table' if is_table else 'a folder' if path.is_dir() else 'an array'} of {kind}"
        effective: tuple[str, ...] = of_tables if is_table else ()
        effective += {"images": of_images if is_table or path.is_dir() else (), "rows": of_rows, "texts": ()}[kind]
        effective += ("skip",) if path.is_dir() or (is_table and kind == "images") else ()
        unused = tuple(key for key in unused if key not in effective)
    else:
        return  # it will be looked for, and named
    if key := next((key for key in unused if getattr(read, key) != getattr(Read(), key)), None):
        raise UsageError(f"{key}=...: {name} is {what}, on which it has no effect: remove it")
