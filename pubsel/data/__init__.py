"""Datasets, and the private learning problem made of two of them.

A dataset is named by a file of conf/dataset or by a path of the user's. Images stay uint8; the model normalises them
with `mean` and `std`, which are published constants (conf/dataset), or 0.5 for a user's own data: they are never
computed from private data. Every rule that was applied to the data stands in `notes`.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.config import (
    Convert,
    Dataset,
    Pair,
    Take,
    UsageError,
    UserError,
    dataset,
    datasets,
    is_path,
    kept_folder,
    public_sets,
)
from pubsel.data import folders, prepared, stored
from pubsel.data.convert import Shape, converted
from pubsel.data.splits import NO_CLASS, SEED, Missing, Parts, Split, cat, draw, in_order, in_turn, listing_in_order
from pubsel.terminal import say

__all__ = ["Missing", "Source", "Split", "Task", "load", "open_dataset", "public_examples", "same_examples"]


class Source(NamedTuple):
    """A dataset as it lies on disk."""

    train: Split
    test: Split
    classes: int
    metric: str  # accuracy, or auc
    mean: tuple[float, ...]  # per channel in [0, 1]
    std: tuple[float, ...]
    notes: tuple[str, ...]


class Task(NamedTuple):
    """A private learning problem with its public data. x: images, or the features of a backbone, float32 [n, d]."""

    private: Split
    public: Split | None  # in the shape of the private images; labels as in its own dataset
    test: Split
    classes: int
    metric: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]
    validation: Split | None = None  # private examples that are not trained on
    same_task: bool = False  # public and private examples are of one data set: their labels mean the same
    same_classes: bool = True  # no known public set has classes of its own; of a user's nothing is known

    def each(self, change: Callable[[Split], Split]) -> "Task":
        """The task with change(split) for each of its splits."""
        return self._replace(
            private=change(self.private),
            public=None if self.public is None else change(self.public),
            test=change(self.test),
            validation=None if self.validation is None else change(self.validation),
        )


def load(
    pair: Pair, data_root: str, download: bool, through: Callable[[str, Source], Source] = lambda _, source: source
) -> Task:
    """Everything for one run: the private training split, the first `pair.m` public images, and the private test split.

    Where public and private are the same dataset, the m public images leave the test set; where several are combined
    (`public_examples`), the private set's share of m. pair.take=train: the public images are a fixed random part of the
    training split instead, and leave the private data where it is the same set. `pair.public` None: no public data.
    UserError where the private data has fewer than two classes or no training or test images. through(name, source):
    the source as it is used, such as its features.
    """

    def read(name: str) -> Source:
        return through(name, open_dataset(name, data_root, download))

    source = read(pair.private)
    if source.classes < 2:
        raise UserError(f"pair.private={pair.private}: one class only: give a folder of class folders, or labels")
    for part, split in (("training", source.train), ("test", source.test)):
        if not len(split.x):
            raise UserError(f"pair.private={pair.private}: no {part} images: it can serve as public data only")
    private, public, test, notes = source.train, None, source.test, source.notes
    if (pair.shots is not None or pair.public_share is not None) and pair.take != Take.train:
        raise UsageError("pair.shots and pair.public_share are drawn from a training split: set pair.take=train")
    if pair.public is not None and pair.take == Take.train:
        public, private, public_notes = _from_training(pair, source, data_root, read)
        notes += public_notes
    elif pair.public is not None:
        public, taken, public_notes = _combined(
            public_sets(pair.public), pair.m, "pair.m", source.train, pair.private, pair.convert, data_root,
            lambda name: source if name == pair.private else read(name),
        )  # fmt: skip
        notes = tuple(dict.fromkeys(notes + public_notes))
        if taken:
            test = Split(test.x[taken:], test.y[taken:])
            if not len(test.x):
                raise UsageError(
                    f"pair.m={pair.m}: no test images of {pair.private} would remain: use a smaller pair.m"
                )
            notes += (f"the first {taken} test images of {pair.private} are public and left the test set",)
    private, validation = _part(private, pair)
    sets = public_sets(pair.public)
    same_task = len(sets) > 0 and all(same_examples(pair.private, name, data_root) for name in sets)
    same_classes = all(_same_classes(name, pair.private, data_root) for name in sets)
    return Task(private, public, test, *source[2:6], notes, validation, same_task, same_classes)


def _from_training(
    pair: Pair, source: Source, data_root: str, read: Callable[[str], Source]
) -> tuple[Split, Split, tuple[str, ...]]:
    """Public and private examples, and a note: the public ones are drawn from the training split of pair.public."""
    if len(public_sets(pair.public)) > 1:
        raise UsageError("pair.take=train: the public examples come from one set: give one as pair.public")
    name = str(pair.public)
    _check_apart(pair.private, name, data_root)
    same = same_examples(pair.private, name, data_root)
    if same and name != pair.private and not (is_path(name) or is_path(pair.private)):
        raise UsageError(f"pair.take=train: {name} and {pair.private} share examples: take one of them as both")
    other = source if same else read(name)
    m = pair.m if pair.public_share is None else round(pair.public_share * len(other.train.y))
    chosen = draw(name, other.train.y, m, pair.shots)
    public, private = Split(other.train.x[chosen], other.train.y[chosen]), source.train
    if same:
        rest = torch.ones(len(private.x), dtype=torch.bool)
        rest[chosen] = False
        private = Split(private.x[rest], private.y[rest])
        if not len(private.x):
            raise UsageError(f"pair.m={pair.m}: no private examples of {name} would remain: use a smaller pair.m")
    x, changed = _like(name, public.x, source.train, pair.convert)
    leave = ", and left the private data" if same else ""
    note = f"{len(chosen)} public examples were drawn from the training split of {name}{leave}"
    return Split(x, public.y), private, (*(() if same else other.notes), note, *changed)


def _part(private: Split, pair: Pair) -> tuple[Split, Split | None]:
    """The share of the private examples that is used, less those held out for validation; and these."""
    order = torch.from_numpy(np.random.RandomState(SEED + 1).permutation(len(private.x)))
    used = order[: max(1, round(pair.private_share * len(order)))]
    held = round(pair.validation * len(used))
    if pair.validation and not 0 < held < len(used):
        raise UsageError(f"pair.validation={pair.validation}: {held} of {len(used)} examples: take another share")
    if len(used) == len(order) and not held:
        return private, None
    train, out = used[held:].sort().values, used[:held].sort().values
    return Split(private.x[train], private.y[train]), Split(private.x[out], private.y[out]) if held else None


def public_examples(
    public: str | list[str],
    m: int,
    like: Split,
    data_root: str,
    download: bool,
    convert: Convert,
    private: str | None = None,
    through: Callable[[str, Source], Source] = lambda _, source: source,
) -> tuple[Split, tuple[str, ...]]:
    """The first m public images of dataset `public` in the shape of `like`, and notes.

    They are the first m of its TEST split, as in the papers; where that is shorter, its training split follows, unless
    the set is the `private` one (name it whenever there is one, or private examples may be taken). UsageError names
    distance.m where there are fewer (`load`: pair.m). Labels stay those of the public dataset: they mean nothing in the
    private label space, so the algorithms draw random labels there.

    Several sets (GSD, Table 16) are dealt out in turn: image i comes from set i mod their number, so that the first m'
    hold equal shares for any m'; a share may be one larger than another. Labels stay where every set is of the private
    task, as conf/dataset says of named sets and as a user's own are taken to be if they have as many classes as each
    other; else each is NO_CLASS, which what needs labels refuses. through: as of `load`.
    """
    found, _, notes = _combined(
        public_sets(public), m, "distance.m", like, private, convert, data_root,
        lambda name: through(name, open_dataset(name, data_root, download)),
    )  # fmt: skip
    return found, notes


def open_dataset(name: str, data_root: str, download: bool) -> Source:
    """A dataset by name (conf/dataset) or path (image folder, CSV, npz).

    A named set is read from <data_root>/<name>.npz; else from the original files under data_root; else, if `download`,
    it is fetched with its checksum. Sets that are slow to read or large (`options.store`) are kept at their size under
    <data_root>/prepared and mapped from there; the original files are not opened again, only listed: where they are
    others than were kept, they are kept anew. Missing (a UserError) names the dataset and the remedies. A split sorted
    by class, and every user's folder, is brought into a fixed random order, because its first m images would be one
    class.
    """
    if is_path(name):
        return _open_path(name)
    info = dataset(name)
    root = Path(data_root).expanduser()
    npz = root / f"{name}.npz"
    shape: Shape = tuple(info.shape)  # type: ignore[assignment]
    if npz.exists() and npz.name not in info.options.get("files", ()):  # prepared, and not the publisher's own npz
        return _open_npz(npz, _stamp(npz), name, shape)
    folder = kept_folder(name, info, root)
    if not folder.exists() or not _as_listed(name, root, folder, _stamp(folder)):
        parts = import_module(f"pubsel.data.{info.source}").read(name, info, root, download)
        if not info.options.get("store"):
            return _source(name, parts, *_known(info))
        files = stored.fingerprint(parts)
        listing, skip = listing_in_order(name, parts), info.options.get("corrupt") == "skip"
        try:
            stored.keep(folder, name, listing, shape, skip, files)
        except OSError as error:
            note = f"{name}: cannot be kept in {folder.parent} ({error.strerror or error}), so all of it is in memory"
            parts = stored.in_memory(name, listing._replace(notes=(*listing.notes, note)), shape, skip)
            return Source(parts.train, parts.test, *_known(info), parts.notes)
    return _open_stored(folder, _stamp(folder), name)


@lru_cache(maxsize=64)
def _as_listed(name: str, root: Path, folder: Path, stamp: tuple[int, ...]) -> bool:
    """Whether the image files of a set are those that were kept in `folder`, or are not there whole any more. A process
    lists them once."""
    info = dataset(name)
    if "folder" not in info.options:
        return True  # comes in one piece
    try:
        files = stored.fingerprint(import_module(f"pubsel.data.{info.source}").read(name, info, root, False))
    except UserError:
        return True
    if files != stored.listed(folder):
        say(f"{name}: its files are not those that were prepared: preparing them again")
    return files == stored.listed(folder)


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _known(info: Dataset) -> tuple[int, str, tuple[float, ...], tuple[float, ...]]:
    """What conf/dataset says: classes, metric, mean, std."""
    return info.classes, info.metric.name, tuple(info.mean), tuple(info.std)


@lru_cache(maxsize=2)
def _open_npz(npz: Path, stamp: tuple[int, ...], name: str, shape: Shape) -> Source:
    """Kept for the next cell of a sweep, as long as the file is the same."""
    info = dataset(name)
    return _source(name, prepared.read(npz, info.classes, shape), *_known(info))


@lru_cache(maxsize=2)
def _open_stored(folder: Path, stamp: tuple[int, ...], name: str) -> Source:
    """As `_open_npz`; its order was decided when it was kept."""
    parts = stored.read(folder)
    return Source(parts.train, parts.test, *_known(dataset(name)), parts.notes)


def same_examples(first: str, second: str, data_root: str) -> bool:
    """Whether two datasets have the same test examples: the same name or file, or sets that share them (svhn and
    svhn_extra; mnist and mnist_m, whose digits are the same)."""
    one, two = _named(first, data_root), _named(second, data_root)
    if one is None or two is None:
        return one is two and Path(first).expanduser().resolve() == Path(second).expanduser().resolve()
    return dataset(one).options.get("same_test_as", one) == dataset(two).options.get("same_test_as", two)


def _check_apart(private: str, public: str, data_root: str) -> None:
    """UsageError where the public set has images of the private one in another split: private ones would be public."""
    named = [_named(name, data_root) for name in (private, public)]
    if None in named or same_examples(private, public, data_root):
        return
    one, two = (dataset(str(name)).images_of or dataset(str(name)).options.get("same_test_as", name) for name in named)
    if one == two:
        raise UsageError(
            f"pair.public={public} has images of {private} in another split, private ones among them: take {private} "
            "itself, or another set"
        )


def _same_classes(name: str, private: str, data_root: str) -> bool:
    """Whether labels of dataset `name` are of the private task. Of two named sets conf/dataset knows: the same
    examples, or `classes_of`; a user's own labels are what the user says they are."""
    one, two = _named(name, data_root), _named(private, data_root)
    if one is None:
        return True
    return two is not None and _classes_of(one) == _classes_of(two)


def _classes_of(known: str) -> str:
    first = dataset(known).options.get("same_test_as", known)
    return dataset(first).classes_of or str(first)


def _named(name: str, data_root: str) -> str | None:
    """The file of conf/dataset that `name` means, also by the path of its npz in the data folder; None: a user's."""
    if not is_path(name):
        return name
    path = Path(name).expanduser().resolve()
    in_root = path.parent == Path(data_root).expanduser().resolve() and path.suffix == ".npz"
    return path.stem if in_root and path.stem in datasets() else None


def _open_path(name: str) -> Source:
    """A user's data: metric accuracy, or auc for several labels at once; normalised with 0.5."""
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{name}: no such file or folder")
    if path.suffix == ".csv":
        parts, classes = folders.read_csv(path)
    elif path.is_dir():
        parts, classes = folders.read_folder(path)
    else:
        parts = prepared.read(path)
        labels = torch.cat([parts.train.y, parts.test.y])
        classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1 if len(labels) else 0
    metric = "auc" if parts.train.y.ndim == 2 else "accuracy"
    half = (0.5,) * parts.train.x.shape[1]
    return _source(name, parts, classes, metric, half, half, shuffle=path.is_dir())


def _source(
    name: str,
    parts: Parts,
    classes: int,
    metric: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    shuffle: bool = False,
) -> Source:
    """The source with both splits in the order that is used: shuffled if `shuffle` says so, or if sorted by class."""
    train, train_notes = in_order(f"{name}: train", parts.train, shuffle)
    test, test_notes = in_order(f"{name}: test", parts.test, shuffle)
    return Source(train, test, classes, metric, mean, std, parts.notes + train_notes + test_notes)


def _combined(
    names: list[str], m: int, key: str, like: Split, private: str | None, convert: Convert, data_root: str,
    read: Callable[[str], Source],
) -> tuple[Split, int, tuple[str, ...]]:  # fmt: skip
    """m public images as `public_examples` says; how many of them are test images of the private set; and notes."""
    for one, two in combinations(names, 2):
        if same_examples(one, two, data_root):
            raise UsageError(f"the public sets {one} and {two} share examples: take one of them")
    if m < len(names):
        raise UsageError(f"{key}={m}: too few for {len(names)} public sets: use a larger {key}")
    parts, classes, taken, notes = [], set(), 0, tuple[str, ...]()
    for place, name in enumerate(names):
        if private is not None:
            _check_apart(private, name, data_root)
        share, source = len(range(place, m, len(names))), read(name)
        same = private is not None and same_examples(name, private, data_root)
        available = len(source.test.x) + (0 if same else len(source.train.x))
        if share > available:
            each = f", {share} from each set" if len(names) > 1 else ""
            where = "in its test split, and it is the private set" if same else "in all"
            raise UsageError(f"{key}={m}{each}: {name} has only {available} images {where}: use a smaller {key}")
        part, said = _first(name, source, share, like, convert)
        parts.append(part)
        classes.add(source.classes)
        notes += source.notes + said
        taken += share if same else 0
    if len(parts) == 1:
        return parts[0], taken, notes
    alike = len(classes) == 1 and all(part.y.shape[1:] == like.y.shape[1:] for part in parts)
    of_task = alike and private is not None and all(_same_classes(name, private, data_root) for name in names)
    y = in_turn([part.y for part in parts]) if of_task else torch.full((m,), NO_CLASS)
    return Split(in_turn([part.x for part in parts]), y), taken, notes


def _first(name: str, source: Source, m: int, like: Split, convert: Convert) -> tuple[Split, tuple[str, ...]]:
    """The first m images of `source`, those of its test split before those of its training split, and notes."""
    first, notes = Split(source.test.x[:m], source.test.y[:m]), tuple[str, ...]()
    if m > len(source.test.x):
        rest = m - len(source.test.x)
        first = cat(first, Split(source.train.x[:rest], source.train.y[:rest]))
        notes = (f"{name}: {len(source.test.x)} public images from its test split, {rest} from its training split",)
    x, changed = _like(name, first.x, like, convert)
    return Split(x, first.y), notes + changed


def _like(name: str, x: Tensor, like: Split, convert: Convert) -> tuple[Tensor, tuple[str, ...]]:
    """Images in the shape of those of `like`, and notes; features as they are: UsageError where they do not fit."""
    if x.dim() == 2 or like.x.dim() == 2:
        if x.shape[1:] != like.x.shape[1:]:
            what = [f"{tuple(shape)}" for shape in (x.shape[1:], like.x.shape[1:])]
            raise UsageError(
                f"pair.public={name}: its examples are {what[0]}, the private ones {what[1]}: take another"
            )
        return x, ()
    shape: Shape = tuple(like.x.shape[1:])  # type: ignore[assignment]
    return converted(name, x, shape, convert)
