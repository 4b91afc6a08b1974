"""Opening of datasets: named ones from images that are kept or from their original files, users' data from their files
or from memory."""

import dataclasses
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from pubsel.data import decoded, folders, memory, prepared, stored, tables
from pubsel.data.convert import Shape
from pubsel.data.images import DIM, nearly_black
from pubsel.data.opened import Source
from pubsel.data.overlap import file_state
from pubsel.data.splits import Listed, Listing, Parts, Split, in_order, listing_in_order
from pubsel.data.texts import LabelledTexts, Texts, is_texts, read_texts
from pubsel.data.unknown import refusal
from pubsel.data.vectors import Field, Vectors, is_rows, parts_of, read_rows
from pubsel.messages import UsageError, UserError, say
from pubsel.settings.datasets import Dataset, dataset_info, decoded_folder, kept_folder
from pubsel.settings.identity import is_path
from pubsel.settings.keys import Read


def open_dataset(
    name: str,
    data_root: str,
    download: bool,
    unit: str | None = None,
    keep: bool = True,
    read: Read | None = None,
    columns: tuple[Field, ...] = (),
    labelled: bool = True,
) -> Source:
    """Return a dataset by name (conf/dataset) or path (image folder, CSV, npz).

    A named set is read from <data_root>/<name>.npz; else from the original files under data_root; else, if `download`,
    it is fetched with its checksum. Sets that are slow to read or large (`options.store`) are kept at their size under
    <data_root>/prepared and mapped from there; the original files are not opened again, only listed: if they are not
    those that were kept, they are kept anew. Missing (a UserError) names the dataset and the remedies. A split sorted
    by class, and every user's folder, is brought into a fixed random order, because its first m images would be one
    class. unit: what tells whose examples they are, as `pair.unit` says; UsageError if the set does not tell. Of a
    user's own data, keep: whether images are kept once they are decoded (`decoded.open_decoded`); read: how files are
    read; columns: of a table, that are read; empty: all; labelled: whether rows must have labels.
    """
    path, read = Path(name).expanduser(), read or Read()
    if memory.of_memory(name) is not None:
        source = _open_held(name, unit, read, columns, labelled)
    elif not is_path(name):
        source = _open_named(name, data_root, download, unit)
    elif not path.exists():
        raise UserError(f"{name}: no such file or folder")
    elif is_texts(path, read):
        source = _of_texts(name, read_texts(path, unit, read, labelled))
    elif is_rows(path, read):
        source = _of_rows(name, read_rows(path, unit, read, columns, labelled))
    else:
        source = _of_listed(name, _listed(path, unit, read), decoded_folder(path, Path(data_root)), keep, read)
    if unit and source.groups is None:
        raise UsageError(f"unit={unit}: {name} does not tell whose {source.kind} they are: leave it out")
    return source


def _open_named(name: str, data_root: str, download: bool, unit: str | None) -> Source:
    """Return a dataset of conf/dataset, as `open_dataset` says."""
    # a prepared npz of the user comes before the original files
    info = dataset_info(name)
    root = Path(data_root).expanduser()
    npz = root / f"{name}.npz"
    if npz.exists() and npz.name not in info.options.get("files", ()):  # prepared, and not the publisher's own npz
        return _open_npz(npz, file_state(npz), name, info.image_shape, unit)

    folder = kept_folder(name, info, root)
    parts = None
    if not folder.exists():
        parts = _reader(name, info).read(name, info, root, download)
    elif why := stored.damaged(folder):
        parts = _again(name, info, root, why)
    elif not _as_listed(name, root, folder, file_state(folder)):
        parts = _reader(name, info).read(name, info, root, download)

    if parts is not None:
        if not info.options.get("store"):
            return _source(name, parts, info)

        # Decoding takes minutes, so the images are kept; a data folder may be read-only.
        files = stored.fingerprint(parts)
        listing = listing_in_order(name, parts)
        skip = info.options.get("corrupt") == "skip"
        try:
            stored.keep_images(folder, name, listing, info.image_shape, skip, files)
        except OSError as error:
            note = f"{name}: cannot be kept in {folder.parent} ({error.strerror or error}), so all of it is in memory"
            parts = stored.in_memory(name, listing._replace(notes=(*listing.notes, note)), info.image_shape, skip)
            return _of_known(parts if unit == listing.unit else parts._replace(groups=None), info)

    return _open_stored(folder, file_state(folder), name, unit)


def _again(name: str, info: Dataset, root: Path, why: str) -> Parts | Listing | None:
    """Return the original files of a set whose kept images are damaged, as `why` says; None if those are used as they
    are, since they are of an earlier version, which kept no digests. UserError if the files are gone."""
    folder = kept_folder(name, info, root)
    try:
        parts: Parts | Listing = _reader(name, info).read(name, info, root, False)
    except UserError as error:
        if (folder / stored.WRITTEN).exists():
            raise UserError(f"{why}: delete {folder} and prepare {name} again: {error}") from None
        say(f"{name}: {why}: its original files are gone, so it is used as it is")
        return None
    say(f"{name}: {why}: preparing it again")
    return parts


@lru_cache(maxsize=64)
def _as_listed(name: str, root: Path, folder: Path, stamp: tuple[int, ...]) -> bool:
    """Return whether the image files of a set are those that were kept in `folder`, or are no longer all there. A
    process lists them once."""
    info = dataset_info(name)
    if "folder" not in info.options:
        return True  # comes in one piece
    try:
        files = stored.fingerprint(_reader(name, info).read(name, info, root, False))
    except UserError:
        return True
    if files != stored.kept_listing(folder):
        say(f"{name}: its files are not those that were prepared: preparing them again")
    return files == stored.kept_listing(folder)


def _reader(name: str, info: Dataset) -> ModuleType:
    """Return the module whose `read` reads a set: one of pubsel.data, or else one of the user."""
    inside = f"pubsel.data.{info.source}"
    try:
        return import_module(inside if find_spec(inside) else info.source)
    except ImportError as error:
        raise UsageError(f"dataset {name}: source={info.source}: {error}; put its folder on PYTHONPATH") from None


def _of_known(parts: Parts, info: Dataset) -> Source:
    """Return the source of a set of conf/dataset, which says its classes, metric, mean and deviation."""
    known = info.classes, info.metric.name, tuple(info.mean), tuple(info.std)
    return Source(parts.train, parts.test, *known, parts.notes, names=parts.names, groups=parts.groups)


@lru_cache(maxsize=2)
def _open_npz(npz: Path, stamp: tuple[int, ...], name: str, shape: Shape, unit: str | None) -> Source:
    """Open a npz, which is kept for the next cell of a sweep as long as the file is the same."""
    info = dataset_info(name)
    return _source(name, prepared.read(npz, info.classes, shape, unit), info)


@lru_cache(maxsize=2)
def _open_stored(folder: Path, stamp: tuple[int, ...], name: str, unit: str | None) -> Source:
    """Open a set that was kept, as `_open_npz` does; its order was decided when it was kept."""
    return _of_known(stored.read(folder, unit), dataset_info(name))._replace(kept=folder)


def _listed(path: Path, unit: str | None, read: Read) -> Listed:
    """Return a user's images, none of which is read yet. UserError for a file of another type."""
    if tables.is_table(path):
        return tables.list_table(path, unit, read)
    if path.is_dir():
        return folders.list_folder(path, unit, read)
    if path.suffix.lower() == ".npz":
        return prepared.listed_arrays(path, unit)
    raise UserError(refusal(path))


def _of_listed(name: str, listed: Listed, folder: Path, keep: bool, read: Read) -> Source:
    """Return the source of images that are decoded, or were kept in `folder`."""
    parts, findings, kept = decoded.open_decoded(name, listed, folder, keep, read)
    source = _of_user(parts, listed.classes)
    return source._replace(kept=kept, findings=findings, image_column=listed.image_column)


def _of_user(parts: Parts, classes: int) -> Source:
    """Return the source of a user's data: metric accuracy, or auc for several labels at once; normalised with 0.5."""
    # constants, since mean and deviation of private images would be a release of them
    half = (0.5,) * (parts.train.x.shape[1] if parts.train.x.dim() == 4 else 0)
    metric = "auc" if parts.train.y.dim() == 2 else "accuracy"
    source = Source(parts.train, parts.test, classes, metric, half, half, parts.notes, parts.files)
    return source._replace(names=parts.names, groups=parts.groups)


def _open_held(name: str, unit: str | None, read: Read, columns: tuple[Field, ...], labelled: bool) -> Source:
    """Return what is in memory. Unless a column says train or test, private examples are all trained on: in place of a
    test part is a made-up example of each class (`_untested`)."""
    held, path = memory.of_memory(name), Path(name)
    assert held is not None
    read = dataclasses.replace(read, label=memory.label_columns(held.frame))
    if held.x is None and memory.PATH in held.frame:
        listed = tables.list_table(path, unit, dataclasses.replace(read, path=memory.PATH))
        source = _of_listed(name, _in_parts(listed), path, False, read)
    elif held.x is None and is_texts(path, read):
        texts = read_texts(path, unit, read, labelled)
        source = _of_texts(name, texts._replace(rows=_in_parts(texts.rows)))
    else:
        if held.x is None:
            rows = read_rows(path, unit, read, columns, labelled)
        else:
            frame, answers = tables.features_in(path, unit, read, labelled)
            # rows without a label are left out
            x = held.x if len(frame) == len(held.x) else held.x[torch.tensor(frame.index.to_numpy())]
            dark = nearly_black(path.name, int((x <= DIM).flatten(1).all(1).sum()), len(x))
            findings = (*answers.findings, *dark)
            rows = Vectors(x, answers.y, None, answers.names, answers.people, findings=findings)
        source = _of_rows(name, _in_parts(rows))
    source = source._replace(names=tuple(map(memory.label_name, source.names)))
    return source if len(source.test.y) or not labelled else _untested(source)


Held = TypeVar("Held", Listed, Vectors)


def _in_parts(examples: Held) -> Held:
    """Return examples in memory, all of which are of the training part if no column says otherwise."""
    return examples._replace(test=np.zeros(len(examples.y), dtype=bool)) if examples.test is None else examples


def _untested(source: Source) -> Source:
    """Return a source with a made-up test example of each class, or one with all labels and one with none."""
    several = source.train.y.dim() == 2
    y = torch.tensor([0.0, 1.0])[:, None].expand(2, source.classes) if several else torch.arange(source.classes)
    draw = np.random.RandomState(0)
    x = torch.from_numpy(draw.randint(0, 256, (len(y), *source.train.x.shape[1:]))).to(source.train.x.dtype)
    groups = source.groups and (source.groups[0], torch.arange(len(y)))  # of nobody
    texts = source.texts and source.texts._replace(test=("",) * len(y))
    return source._replace(test=Split(x, y), files=None, groups=groups, texts=texts, untested=True)


def _of_rows(name: str, rows: Vectors) -> Source:
    """Return the source of rows."""
    source = _of_user(parts_of(name, rows)[0], max(1, len(rows.names)))
    return source._replace(findings=rows.findings, columns=rows.columns, raw=rows.raw, as_read=rows.as_read)


def _of_texts(name: str, labelled: LabelledTexts) -> Source:
    """Return the source of texts, as hashed words."""
    rows, texts, column = labelled
    parts, places = parts_of(name, rows, "texts")
    in_parts = Texts(column, texts, texts).at(*(at.tolist() for at in places))
    return _of_user(parts, max(1, len(rows.names)))._replace(findings=rows.findings, texts=in_parts)


def _source(name: str, parts: Parts, info: Dataset) -> Source:
    """Return the source with both splits in the order that is used: shuffled if sorted by class."""
    train, train_notes = in_order(f"{name}: train", parts.train)
    test, test_notes = in_order(f"{name}: test", parts.test)
    notes = parts.notes + train_notes + test_notes

    # The people take the same order as their images.
    groups = None
    if parts.groups is not None:
        first, second = parts.groups
        groups = in_order("", Split(first, parts.train.y))[0].x, in_order("", Split(second, parts.test.y))[0].x
    return _of_known(parts._replace(train=train, test=test, notes=notes, groups=groups), info)
