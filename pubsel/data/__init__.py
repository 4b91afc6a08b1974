"""Datasets, and the private learning problem made of two of them.

A dataset is named by a file of conf/dataset or by a path of the user's. Images stay uint8; the model normalises them
with `mean` and `std`, which are published constants (conf/dataset), or 0.5 for a user's own data: they are never
computed from private data. `notes` lists every rule that was applied to the data.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data import decoded, folders, overlap, prepared, stored
from pubsel.data.convert import Shape, converted
from pubsel.data.embeddings import is_embeddings
from pubsel.data.opened import Opened, Source
from pubsel.data.overlap import Digests, among, by_content, file_state, rows
from pubsel.data.splits import (
    NO_CLASS,
    SEED,
    SEEDS,
    Listing,
    Missing,
    Parts,
    Split,
    draw_indices,
    in_a_row,
    in_order,
    in_turn,
    listing_in_order,
)
from pubsel.messages import UsageError, UserError, say
from pubsel.settings.datasets import Dataset, dataset_info, dataset_names, decoded_folder, kept_folder
from pubsel.settings.identity import is_path, same_path
from pubsel.settings.keys import POOL, Convert, Metric, Overlap, Pair, Take, public_sets

__all__ = [
    "Missing",
    "Reader",
    "Source",
    "Split",
    "Task",
    "Through",
    "load",
    "open_dataset",
    "public_examples",
    "same_examples",
]


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
    same_names: bool = False  # public and private files name their classes alike, in words
    shape: tuple[int, ...] = ()  # of a private image: channels, height, width; of a row of a table: its length
    names: tuple[str, ...] = ()  # of the classes in order; empty: they have none
    weights: str | None = None  # digest of the weights of the backbone whose features x has
    offsets: int = 0  # of the columns of features, how many come last and are logits (`OffsetLinear`)
    pool: tuple[int, ...] = ()  # how many public examples are of each set; of a pool they are in a row
    people: Tensor | None = None  # how many private examples each person has, [people], in a row; None: unit is one
    held_out_people: Tensor | None = None  # as people, of validation

    @property
    def units(self) -> int:
        """Return how many private units there are: people, or examples."""
        return len(self.private.x) if self.people is None else len(self.people)

    @property
    def held_out_units(self) -> int:
        """Return how many units of `validation` there are: people, or examples."""
        if self.validation is None:
            return 0
        return len(self.validation.x) if self.held_out_people is None else len(self.held_out_people)

    def each(self, change: Callable[[Split], Split]) -> "Task":
        """Return the task with change(split) for each of its splits."""
        return self._replace(
            private=change(self.private),
            public=None if self.public is None else change(self.public),
            test=change(self.test),
            validation=None if self.validation is None else change(self.validation),
        )


Through = Callable[[str, Source, Shape | None], Source]


def unchanged(name: str, source: Source, like: Shape | None) -> Source:
    """Return the source: what is used of a set is its images."""
    return source


class Reader(NamedTuple):
    """The place of datasets, whether missing ones are downloaded, and how they are used: through(name, source, like),
    such as the source's features. like: the shape of the private images, for other sets. opened: a set that need not be
    read again. unit: by which the people are told apart whose examples they are."""

    data_root: str
    download: bool = False
    through: Through = unchanged
    like: Shape | None = None
    opened: Opened | None = None
    unit: str | None = None
    keep: bool = True  # a user's own images

    def __call__(self, name: str) -> Opened:
        if self.opened is not None and self.opened.name == name:
            return self.opened
        source = open_dataset(name, self.data_root, self.download, self.unit, keep=self.keep)
        return Opened(name, source, self.through(name, source, self.like))


class Beside(NamedTuple):
    """The private data that public images are matched against. like: examples of the shape that they get by `convert`;
    private: the name of the private set; against: the opened private set, with which they may share no image unless
    `how` allows it."""

    like: Split
    convert: Convert
    private: str | None
    against: Opened | None
    how: Overlap


def load(pair: Pair, data_root: str, download: bool, through: Through = unchanged, keep: bool = True) -> Task:
    """Return everything for one run: the private training split, the first `pair.m` public images, and the private test
    split.

    If public and private are the same dataset, the m public images leave the test set; if several are combined
    (`public_examples`), the private set's share of m does. pair.take=train: the public images are a fixed random part
    of the training split instead, and leave the private data if it is the same set. `pair.public` None: no public data.
    With `pair.unit`, nobody has examples on two sides: people with a public example leave the private data.
    UserError if the private data has fewer than two classes or no training or test images; UsageError if an image is on
    two sides (`pair.overlap`), but for those of a published set's own parts: these are noted. through(name, source,
    like): the source as it is used, such as its features; like: the shape of the private images, None for these.
    keep: as in `open_dataset`.
    """
    read = Reader(data_root, download, through, keep=keep)
    opened = read._replace(unit=pair.unit)(pair.private)
    read = read._replace(like=_image_shape(opened.images))
    _check_private(pair, opened.used)
    opened, people_apart = _people_apart(opened, pair)
    opened, apart = _test_apart(opened, pair.overlap, data_root)
    source = opened.used._replace(metric=_metric(pair, opened.used))
    notes = source.notes + people_apart + apart

    # Public examples come first, since they may leave the private training or test split.
    sets = _sets(pair)
    public, test, same_names, pool = None, source.test, False, tuple[int, ...]()
    left = np.ones(len(source.train.y), dtype=bool)  # training examples that stay private
    if pair.public is not None and pair.take == Take.train:
        public, left, public_notes = _from_training(pair, opened, data_root, read)
        notes += public_notes
    elif sets:
        beside = Beside(source.train, pair.convert, pair.private, opened, pair.overlap)
        m, key = (pair.pool_m, POOL_M) if pair.public == POOL else (pair.m, "pair.m")
        taken = _combined(sets, m, key, beside, read._replace(opened=opened))
        public, same_names, pool = taken.examples, _same_names(taken.names, source.names), taken.each
        notes = tuple(dict.fromkeys(notes + taken.notes))
        left &= ~taken.train
        if taken.of_private:
            test, test_notes = _rest_of_test(pair, opened, taken.of_private, data_root)
            notes += test_notes
        else:
            test = _of(test, ~taken.test)

    private = _of(source.train, left)
    train, out, part_notes = _part(pair, opened, left, data_root)
    # The examples of a person follow each other, so that a sample of people takes them together.
    people = held_out_people = None
    if source.groups is not None:
        whose = source.groups[0][torch.from_numpy(left)]
        train, people = in_a_row(whose, train)
        out, held_out_people = (None, None) if out is None else in_a_row(whose, out)
    validation = None if out is None else Split(private.x[out], private.y[out])
    if train is not None:
        private = Split(private.x[train], private.y[train])

    same_task = len(sets) > 0 and all(same_examples(pair.private, name, data_root) for name in sets)
    same_classes = all(_same_classes(name, pair.private, data_root) for name in sets)
    task = Task(private, public, test, *source[2:6], notes + part_notes, validation, same_task, same_classes)
    task = task._replace(people=people, held_out_people=held_out_people, weights=source.weights, pool=pool)
    names = source.names or class_names(pair.private, data_root)
    return task._replace(shape=_shape(opened), names=names, same_names=same_names)


def _sets(pair: Pair) -> list[str]:
    """Return the public sets of a pair that are read as such: of a pool, those that are not embeddings on disk."""
    if pair.public == POOL:
        return [name for name in pair.pool or [] if not is_embeddings(name)]
    return public_sets(pair.public)


def _of(split: Split, stays: np.ndarray) -> Split:
    """Return some examples of a split, or itself if that is all. stays: bool [n]."""
    return split if stays.all() else Split(*(part[torch.from_numpy(stays)] for part in split))


def _check_private(pair: Pair, source: Source) -> None:
    """Raise UserError or UsageError if the private data cannot be trained and tested on."""
    if source.classes < 2:
        raise UserError(f"pair.private={pair.private}: one class only: give a folder of class folders, or labels")
    for part, split in (("training", source.train), ("test", source.test)):
        if not len(split.x):
            raise UserError(f"pair.private={pair.private}: no {part} images: it can serve as public data only")
    if (pair.shots is not None or pair.public_share is not None) and pair.take != Take.train:
        raise UsageError("pair.shots and pair.public_share are drawn from a training split: set pair.take=train")


def _metric(pair: Pair, source: Source) -> str:
    """Return how a model of the private set is measured. UsageError if it cannot be measured so."""
    if pair.metric is None:
        return source.metric
    if source.train.y.dim() == 2 and pair.metric != Metric.auc:
        raise UsageError(
            f"pair.metric={pair.metric.name}: an image of {pair.private} has several labels: set pair.metric=auc"
        )
    return pair.metric.name


def _people_apart(opened: Opened, pair: Pair) -> tuple[Opened, tuple[str, ...]]:
    """Return the private set with nobody in both its training and its test set, and a note."""
    if opened.used.groups is None:
        return opened, ()
    train, test = (groups.numpy() for groups in opened.used.groups)
    both = np.isin(test, train)
    if not both.any():
        return opened, ()

    count = f"{int(both.sum())} of {len(test)} test images of {opened.name} are of people with training images"
    if pair.overlap == Overlap.drop and not both.all():
        return opened.without(np.zeros(len(train), dtype=bool), both), (f"{count} and were dropped",)
    again = np.isin(train, test)
    if pair.overlap == Overlap.leave and not again.all():
        note = f"{opened.name}: {int(again.sum())} training images of people with test images left the private data"
        return opened.without(again, np.zeros(len(test), dtype=bool)), (note,)
    raise UsageError(
        f"pair.unit={pair.unit}: {count}, the first {opened.example(both)}: give another split, or set "
        "pair.overlap=drop"
    )


def _test_apart(opened: Opened, how: Overlap, data_root: str) -> tuple[Opened, tuple[str, ...]]:
    """Return the private set with no training image in its test set, and a note; a published split stays as it is
    unless `how` is drop."""
    # an image on both sides would measure memory, not what was learned
    train, test = opened.digests(_shape(opened))
    twice = among(test, train)
    count, n = int(twice.sum()), len(twice)
    if not count:
        return opened, ()

    if how == Overlap.drop:
        if count == n:
            raise UsageError(f"pair.overlap=drop: all {n} test images of {opened.name} are training images too")
        note = f"{opened.name}: {count} of {n} test images are training images too and were dropped"
        return opened.without(np.zeros(len(train.own), dtype=bool), twice), (note,)

    if how == Overlap.leave:
        again = among(train, test)
        note = f"{opened.name}: {int(again.sum())} training images that are test images too left the private data"
        return opened.without(again, np.zeros(n, dtype=bool)), (note,)

    # A published set stays what others report on.
    if _named(opened.name, data_root) is not None:
        return opened, (f"{opened.name}: {count} of {n} test images are training images too, as it was published",)
    raise UsageError(
        f"pair.private={opened.name}: {count} of its {n} test images are training images too, the first "
        f"{opened.example(twice)}: remove them, or set pair.overlap=drop"
    )


def _rest_of_test(pair: Pair, opened: Opened, taken: int, data_root: str) -> tuple[Split, tuple[str, ...]]:
    """Return the test set without its first `taken` images, which are public, and notes."""
    notes: tuple[str, ...] = (f"the first {taken} test images of {pair.private} are public and left the test set",)
    stay = np.ones(len(opened.used.test.y) - taken, dtype=bool)
    if opened.used.groups is not None:
        people = opened.used.groups[1].numpy()
        stay = ~np.isin(people[taken:], people[:taken])
        notes += (f"{int((~stay).sum())} other test images are of the same people, and were dropped",)
    if not stay.any():
        raise UsageError(f"pair.m={pair.m}: no test images of {pair.private} would remain: use a smaller pair.m")
    x, y = (part[taken:][torch.from_numpy(stay)] if not stay.all() else part[taken:] for part in opened.used.test)

    # A test image that is equal to a public one may have been trained on.
    _, test = opened.digests(_shape(opened))
    twice = among(rows(rows(test, slice(taken, None)), stay), rows(test, slice(taken)))
    if not twice.any():
        return Split(x, y), notes

    equal = f"{int(twice.sum())} of the other test images of {pair.private} are equal to public ones"
    if pair.overlap in (Overlap.drop, Overlap.leave) and not twice.all():
        stays = torch.from_numpy(~twice)
        return Split(x[stays], y[stays]), (f"{equal} and were dropped", *notes)
    if _named(pair.private, data_root) is not None and pair.overlap == Overlap.refuse:
        return Split(x, y), (equal, *notes)
    raise UsageError(f"pair.m={pair.m}: {equal}: remove them, or set pair.overlap=drop")


def _from_training(
    pair: Pair, opened: Opened, data_root: str, read: Reader
) -> tuple[Split, np.ndarray, tuple[str, ...]]:
    """Return the public examples, which training examples stay private, bool [n], and notes: the public ones are drawn
    from the training split of pair.public."""
    if len(public_sets(pair.public)) > 1:
        raise UsageError("pair.take=train: the public examples come from one set: give one as pair.public")
    name, source, shape = str(pair.public), opened.used, _shape(opened)
    _check_apart(pair.private, name, data_root)

    same = same_examples(pair.private, name, data_root)
    if same and name != pair.private and not (is_path(name) or is_path(pair.private)):
        raise UsageError(f"pair.take=train: {name} and {pair.private} share examples: take one of them as both")
    other = opened if same else read(name)
    train, test = opened.digests(shape)

    # Images are dropped before the draw, so that as many examples are drawn as the settings say.
    notes: tuple[str, ...] = () if same else other.used.notes + _may_share(name, pair.private, data_root)
    y = other.used.train.y
    pool = np.arange(len(y))
    if pair.overlap == Overlap.drop:
        twice = overlap.repeated(train) if same else among(other.digests(shape)[0], train, test)
        pool, notes = pool[~twice], notes + _dropped(name, int(twice.sum()), "the private data")
    m = _as_many(pair, len(y))
    drawn = np.zeros(len(y), dtype=bool)
    drawn[pool[draw_indices(name, y[torch.from_numpy(pool)], m, pair.shots, pair.seed).numpy()]] = True

    # What is drawn from the same set is no longer private. The unit does not change which examples are drawn, but all
    # examples of the people who have one of them leave the private data.
    chosen = other.without(~drawn, np.ones(len(other.used.test.y), dtype=bool))
    left = ~drawn if same else np.ones(len(source.train.y), dtype=bool)
    if same and other.used.groups is not None:
        people = other.used.groups[0].numpy()
        left = ~np.isin(people, people[drawn])
        notes += (f"{int((~left & ~drawn).sum())} other examples of people with public ones left the private data",)
    if not left.any():
        raise UsageError(f"pair.m={pair.m}: no private examples of {name} would remain: use a smaller pair.m")

    if pair.overlap == Overlap.leave:
        public = chosen.digests(shape)[0]
        again = among(train, public) & left
        notes += (f"{int(again.sum())} training images that are public too left the private data",) * bool(again.any())
        left &= ~again
    private = [rows(train, left), *(() if same else (test,))]
    published = same and _named(name, data_root) is not None
    twice = among(chosen.digests(shape)[0], *private)
    notes += _noted("pair.", chosen, 0, twice, f"the private data {pair.private}", published)

    leave = ", and left the private data" if same else ""
    note = f"{int(drawn.sum())} public examples were drawn from the training split of {name}{leave}"
    x, changed = _like(name, chosen.used.train.x, source.train, pair.convert)
    return Split(x, chosen.used.train.y), left, (*notes, note, *changed)


def _as_many(pair: Pair, n: int) -> int:
    """Return how many of n training examples become public. UsageError if no setting says so."""
    if pair.public_share is not None:
        return round(pair.public_share * n)
    if pair.m is None and pair.shots is None:
        raise UsageError("pair.m=null: of a training split: give a number, or pair.public_share or pair.shots")
    return pair.m or 0


def _part(
    pair: Pair, opened: Opened, left: np.ndarray, data_root: str
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Return which of the private examples are trained on (None: all) and which are held out for validation, and a
    note.

    left: bool [n], the training examples that are private.
    """
    # Examples are drawn, or people with all that they have.
    several = int(left.sum())
    members = np.arange(several)
    if opened.used.groups is not None:
        # Numbered with those who left: who leaves for one public set may not change the side of another for all.
        people, whole = opened.used.groups[0].numpy(), pair.overlap == Overlap.leave
        everyone, members = np.unique(people if whole else people[left], return_inverse=True)
        members, several = members[left] if whole else members, len(everyone)
    what = "examples" if opened.used.groups is None else "people"

    # Another seed than any of `shuffled` and `draw`, so that the share is independent of both.
    order = np.random.RandomState((SEED + 2 * pair.seed + 1) % SEEDS).permutation(several)
    used = order[: max(1, round(pair.private_share * len(order)))]
    held = round(pair.validation * len(used))
    digests = rows(opened.digests(_shape(opened))[0], left)
    if pair.overlap == Overlap.leave and opened.used.groups is None:
        first = by_content(digests, pair.validation, pair.seed)[used]
        used, held = np.concatenate([used[first], used[~first]]), int(first.sum())
    if pair.validation and not 0 < held < len(used):
        raise UsageError(f"pair.validation={pair.validation}: {held} of {len(used)} {what}: take another share")
    train, out = (torch.from_numpy(np.flatnonzero(np.isin(members, part))) for part in (used[held:], used[:held]))
    if not len(train) or (held and not len(out)):
        raise UsageError(f"pair.validation={pair.validation}: on one side are no {what}: take another share")
    if not held:
        return (None if len(used) == len(order) else train), None, ()

    twice = among(rows(digests, out.numpy()), rows(digests, train.numpy()))
    if not twice.any():
        return train, out, ()

    equal = f"{int(twice.sum())} of {len(out)} examples held out for validation are trained on too"
    if pair.overlap == Overlap.drop and not twice.all():
        return train, out[torch.from_numpy(~twice)], (f"{pair.private}: {equal} and were dropped",)
    if pair.overlap == Overlap.leave:  # of other people: what one has may not decide what is measured of another
        return train, out, (f"{pair.private}: {equal}, as images of other people",)
    if _named(pair.private, data_root) is not None and pair.overlap == Overlap.refuse:
        return train, out, (f"{pair.private}: {equal}, as it was published",)
    raise UsageError(f"pair.validation={pair.validation}: {equal}: remove them, or set pair.overlap=drop")


def public_examples(
    public: str | list[str],
    m: int | None,
    like: Split,
    read: Reader,
    convert: Convert,
    private: str | None = None,
    apart: Source | None = None,
    how: Overlap = Overlap.refuse,
) -> tuple[Split, tuple[str, ...]]:
    """Return the first m public images of dataset `public` in the shape of `like`, and notes. m: None: all, at most
    MOST_PUBLIC.

    They are the first m of its TEST split, as in the papers; if that is shorter, its training split follows, unless the
    set is the `private` one (name it whenever there is one, or private examples may be taken). UsageError names
    distance.m if there are fewer (`load`: pair.m). Labels stay those of the public dataset: they mean nothing in the
    private label space, so the algorithms draw random labels there.

    Several sets (GSD, Table 16) are dealt out in turn: image i comes from set i mod their number, so that the first m'
    hold equal shares for any m'; a share may be one larger than another. Labels stay if every set is of the private
    task, as conf/dataset says of named sets and as a user's own are taken to be if they have as many classes as each
    other; else each is NO_CLASS, which what needs labels refuses.

    An image that two of the sets have, or that `apart`, the private set as it was opened, has too, is a UsageError, or
    with how=drop is passed over; a published set's own training images in its test set are noted.
    """
    if how == Overlap.leave:
        raise UsageError("overlap=leave: no private data are trained on here: take refuse or drop")
    against = None if apart is None else Opened(str(private), apart, apart)
    beside = Beside(like, convert, private, against, how)
    if apart is not None:
        read = read._replace(like=_image_shape(apart))
    taken = _combined(public_sets(public), m, "distance.m", beside, read)
    return taken.examples, taken.notes


def open_dataset(name: str, data_root: str, download: bool, unit: str | None = None, keep: bool = True) -> Source:
    """Return a dataset by name (conf/dataset) or path (image folder, CSV, npz).

    A named set is read from <data_root>/<name>.npz; else from the original files under data_root; else, if `download`,
    it is fetched with its checksum. Sets that are slow to read or large (`options.store`) are kept at their size under
    <data_root>/prepared and mapped from there; the original files are not opened again, only listed: if they are not
    those that were kept, they are kept anew. Missing (a UserError) names the dataset and the remedies. A split sorted
    by class, and every user's folder, is brought into a fixed random order, because its first m images would be one
    class. keep: whether a user's own images are kept once they are decoded (`decoded.open_decoded`). unit: what tells
    whose examples they are, as `pair.unit` says; UsageError if the set does not tell.
    """
    path = is_path(name)
    source = _open_path(name, data_root, keep, unit) if path else _open_named(name, data_root, download, unit)
    if unit and source.groups is None:
        raise UsageError(f"pair.unit={unit}: {name} does not tell whose images they are: leave it out")
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
            return _source(name, parts, *_known(info))

        # Decoding takes minutes, so the images are kept; a data folder may be read-only.
        files = stored.fingerprint(parts)
        listing = listing_in_order(name, parts)
        skip = info.options.get("corrupt") == "skip"
        try:
            stored.keep_images(folder, name, listing, info.image_shape, skip, files)
        except OSError as error:
            note = f"{name}: cannot be kept in {folder.parent} ({error.strerror or error}), so all of it is in memory"
            parts = stored.in_memory(name, listing._replace(notes=(*listing.notes, note)), info.image_shape, skip)
            groups = parts.groups if unit == listing.unit else None
            return Source(parts.train, parts.test, *_known(info), parts.notes, groups=groups)

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


def _known(info: Dataset) -> tuple[int, str, tuple[float, ...], tuple[float, ...]]:
    """Return what conf/dataset says: classes, metric, mean, std."""
    return info.classes, info.metric.name, tuple(info.mean), tuple(info.std)


@lru_cache(maxsize=2)
def _open_npz(npz: Path, stamp: tuple[int, ...], name: str, shape: Shape, unit: str | None) -> Source:
    """Open a npz, which is kept for the next cell of a sweep as long as the file is the same."""
    info = dataset_info(name)
    return _source(name, prepared.read(npz, info.classes, shape, unit), *_known(info))


@lru_cache(maxsize=2)
def _open_stored(folder: Path, stamp: tuple[int, ...], name: str, unit: str | None) -> Source:
    """Open a set that was kept, as `_open_npz` does; its order was decided when it was kept."""
    parts = stored.read(folder, unit)
    known = _known(dataset_info(name))
    return Source(parts.train, parts.test, *known, parts.notes, kept=folder, groups=parts.groups)


def same_examples(first: str, second: str, data_root: str) -> bool:
    """Return whether two datasets have the same test examples: the same name or file, or sets that share them (svhn and
    svhn_extra; mnist and mnist_m, whose digits are the same)."""
    a, b = _named(first, data_root), _named(second, data_root)
    if a is None or b is None:
        return a is b and same_path(first, second)
    return dataset_info(a).options.get("same_test_as", a) == dataset_info(b).options.get("same_test_as", b)


def _check_apart(private: str, public: str, data_root: str) -> None:
    """Raise UsageError if the public set has images of the private one in another split: private ones would be
    public."""
    named = [_named(name, data_root) for name in (private, public)]
    if None in named or same_examples(private, public, data_root):
        return
    if _images_of(str(named[0])) == _images_of(str(named[1])):
        raise UsageError(
            f"pair.public={public} has images of {private} in another split, private ones among them: take {private} "
            "itself, or another set"
        )


def _may_share(public: str, private: str, data_root: str) -> tuple[str, ...]:
    """Return the note that two named sets have images in common that no comparison of pixels finds."""
    known = [_named(name, data_root) for name in (public, private)]
    if None in known:
        return ()
    a, b = (_images_of(str(name)) for name in known)
    if b not in dataset_info(a).shares_images_with and a not in dataset_info(b).shares_images_with:
        return ()
    return (f"{public} and {private} share images, at other sizes: some public examples may be private ones",)


def _images_of(known: str) -> str:
    """Return the named set that the images of a named set come from."""
    info = dataset_info(known)
    return info.images_of or str(info.options.get("same_test_as", known))


def _same_classes(name: str, private: str, data_root: str) -> bool:
    """Return whether labels of dataset `name` are of the private task. Of two named sets conf/dataset knows: the same
    examples, or `classes_of`; a user's own labels are what the user says they are."""
    public_set, private_set = _named(name, data_root), _named(private, data_root)
    if public_set is None:
        return True
    return private_set is not None and _classes_of(public_set) == _classes_of(private_set)


def _classes_of(known: str) -> str:
    first = dataset_info(known).options.get("same_test_as", known)
    return dataset_info(first).classes_of or str(first)


def class_names(name: str, data_root: str) -> tuple[str, ...]:
    """Return the names of the classes of a named set, in order, as conf/dataset has them; () if it has none."""
    known = _named(name, data_root)
    return () if known is None else tuple(dataset_info(_classes_of(known)).names or ())


def _named(name: str, data_root: str) -> str | None:
    """Return the file of conf/dataset that `name` means, also by the path of its npz in the data folder; None: a
    user's."""
    if not is_path(name):
        return name
    path = Path(name).expanduser().resolve()
    in_root = path.parent == Path(data_root).expanduser().resolve() and path.suffix == ".npz"
    return path.stem if in_root and path.stem in dataset_names() else None


def _open_path(name: str, data_root: str, keep: bool, unit: str | None) -> Source:
    """Return a user's data: metric accuracy, or auc for several labels at once; normalised with 0.5."""
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{name}: no such file or folder")

    # An archive that fits in memory many times is read there.
    if path.is_dir():
        listed = folders.list_folder(path, unit)
    elif path.suffix == ".csv":
        listed = folders.list_csv(path, unit)
    elif prepared.size(path) >= decoded.SMALL:
        listed = prepared.listed_arrays(path, unit)
    else:
        parts = prepared.read(path, unit=unit)
        classes = prepared.classes_from(torch.cat([parts.train.y, parts.test.y]))
        return _source(name, parts, classes, *_of_own(parts))

    parts, kept = decoded.open_decoded(name, listed, decoded_folder(path, Path(data_root)), keep)
    known = listed.classes, *_of_own(parts)
    return Source(parts.train, parts.test, *known, parts.notes, parts.files, kept, parts.names, groups=parts.groups)


def _of_own(parts: Parts) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """Return metric, mean and std of a user's data: constants, since mean and deviation of private images would be a
    release of them."""
    half = (0.5,) * parts.train.x.shape[1]
    return "auc" if parts.train.y.ndim == 2 else "accuracy", half, half


def _source(
    name: str,
    parts: Parts,
    classes: int,
    metric: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Source:
    """Return the source with both splits in the order that is used: shuffled if sorted by class."""
    train, train_notes = in_order(f"{name}: train", parts.train, False)
    test, test_notes = in_order(f"{name}: test", parts.test, False)
    notes = parts.notes + train_notes + test_notes

    # The people take the same order as their images.
    groups = None
    if parts.groups is not None:
        orders = [in_order("", Split(torch.arange(len(y)), y), False)[0].x for _, y in (parts.train, parts.test)]
        groups = parts.groups[0][orders[0]], parts.groups[1][orders[1]]
    return Source(train, test, classes, metric, mean, std, notes, names=parts.names, groups=groups)


def _same_names(public: tuple[str, ...], private: tuple[str, ...]) -> bool:
    """Return whether two sets name the same classes. Numbers are no names: 3 may mean anything."""
    return public == private and any(not name.strip().isdecimal() for name in private)


class _Public(NamedTuple):
    """Public examples, as `load` needs them."""

    examples: Split
    of_private: int  # of them are test images of the private set
    notes: tuple[str, ...]
    names: tuple[str, ...]  # of their classes, if all are of one set whose files have them
    each: tuple[int, ...]  # how many are of each set
    train: np.ndarray  # bool [n], training images of the private set that leave it, since they are public too
    test: np.ndarray  # the same of its test images


def _combined(names: list[str], m: int | None, key: str, beside: Beside, read: Reader) -> _Public:
    """Return m public images as `public_examples` says. m: None: all of the only set, at most MOST_PUBLIC. key: the
    setting that m is the value of; POOL_M: of each set m, or all, one set after another."""
    like, convert, private, against, how = beside
    data_root, pool = read.data_root, key == POOL_M
    _check_public_sets(names, m, key, data_root)
    parts, classes, taken, notes = {}, set(), 0, tuple[str, ...]()
    leave = [np.zeros(len(part.y), dtype=bool) for part in (against.used[:2] if against else ())]
    group, seen = "pair." if key in ("pair.m", POOL_M) else "", list[tuple[str, tuple[Digests, ...]]]()

    # The private set's own come first, since its other test images are the test set.
    from_private = [private is not None and same_examples(name, private, data_root) for name in names]
    for place in sorted(range(len(names)), key=lambda place: not from_private[place]):
        name, same = names[place], from_private[place]
        if private is not None:
            _check_apart(private, name, data_root)
            notes += () if same else _may_share(name, private, data_root)

        opened = read(name)
        share = MOST_PUBLIC if m is None else m if pool else len(range(place, m, len(names)))
        shape = _shape(against or opened)
        sides = [*_private_side(against, same), *seen]
        opened, last, dropped = _pool(opened, share, sides, shape, same, how)
        available = len(opened.used.test.x) + (0 if same else len(opened.used.train.x))
        share = share if m is not None else _all_of(name, same, key, available, None if pool else MOST_PUBLIC)
        share = min(share, available) if pool else share
        if share > available:
            several = f", {share} from each set" if len(names) > 1 else ""
            where = "in its test split, and it is the private set" if same else "in all"
            where += ", those of others dropped" if dropped else ""
            raise UsageError(f"{key}={m}{several}: {name} has only {available} images {where}: use a smaller {key}")

        # No image may be on two sides, unless the set was published so.
        chosen = opened.first(share)
        chosen_digests = chosen.digests(shape)[1]
        if how == Overlap.leave and against is not None:
            sides = seen
            for gone, of_part in zip(leave, against.digests(shape), strict=True):
                gone |= among(of_part, chosen_digests)
        for what, digests in sides:
            published = what == OWN and _named(name, data_root) is not None
            notes += _noted(group, chosen, 1, among(chosen_digests, *digests), what, published)
        if not pool:  # an image that two sets of a pool have is in it twice
            seen.append((f"the public set {name}", (chosen_digests,)))

        x, changed = _like(name, chosen.used.test.x, like, convert)
        parts[place] = Split(x, chosen.used.test.y)
        classes.add(opened.used.classes)
        notes += opened.used.notes + dropped + _both_parts(name, opened.used, share) + changed
        taken += last if same else 0

    if leave and (many := int(leave[0].sum())):
        notes += (f"{many} training images of {private} that are public too left the private data",)
    leave, dealt = leave or [np.zeros(0, dtype=bool)] * 2, [parts[place] for place in range(len(names))]
    each = tuple(len(part.y) for part in dealt)
    if len(dealt) == 1:
        return _Public(dealt[0], taken, notes, opened.used.names, each, *leave)
    alike = len(classes) == 1 and all(part.y.shape[1:] == like.y.shape[1:] for part in dealt)
    of_task = alike and private is not None and all(_same_classes(name, private, data_root) for name in names)
    return _Public(_together(dealt, of_task, pool), taken, notes, (), each, *leave)


def _together(parts: list[Split], of_task: bool, pool: bool) -> Split:
    """Return several sets as one: those of a pool one after another, others in turn. of_task: their labels mean the
    same."""
    join = torch.cat if pool else in_turn
    x = join([part.x for part in parts])
    return Split(x, join([part.y for part in parts]) if of_task else torch.full((len(x),), NO_CLASS))


def _all_of(name: str, same: bool, key: str, available: int, most: int | None) -> int:
    """Return how many images all of a public set are, or `most`. UsageError if they are of the private set."""
    if same:
        raise UsageError(f"{key}=null: {name} is the private set, whose test images those would be: give a number")
    return available if most is None else min(most, available)


def _check_public_sets(names: list[str], m: int | None, key: str, data_root: str) -> None:
    """Raise UsageError if two public sets share examples, or there are more sets than examples, or no number of these
    (m None)."""
    if m is None and len(names) > 1 and key != POOL_M:
        raise UsageError(f"{key}=null: of several combined sets: give a number")
    for first, second in combinations(names, 2):
        if same_examples(first, second, data_root):
            raise UsageError(f"the public sets {first} and {second} share examples: take one of them")
    if m is not None and m < len(names) and key != POOL_M:
        raise UsageError(f"{key}={m}: too few for {len(names)} public sets: use a larger {key}")


OWN = "its own training images"
POOL_M = "pair.pool_m"
MOST_PUBLIC = 2000  # public images that are taken if nobody says how many


def _private_side(against: Opened | None, same: bool) -> list[tuple[str, tuple[Digests, ...]]]:
    """Return the private images that public ones must not duplicate, with their name for messages. same: the public
    ones come from the private test set."""
    if against is None:
        return []
    train, test = against.digests(_shape(against))
    return [(OWN, (train,))] if same else [(f"the private data {against.name}", (train, test))]


def _pool(
    opened: Opened,
    share: int,
    sides: list[tuple[str, tuple[Digests, ...]]],
    shape: tuple[int, ...],
    same: bool,
    how: Overlap,
) -> tuple[Opened, int, tuple[str, ...]]:
    """Return what public examples are taken from, how many of its first images the first `share` of these span, and
    notes. With drop it lacks what one of the sides has, so that as many are taken as the settings say."""
    if how != Overlap.drop or not sides:
        return opened, share, ()

    train, test = opened.digests(shape)
    of_sides = [each for _, digests in sides for each in digests]
    twice = among(test, *of_sides)
    also = among(train, *of_sides) & (not same)

    # the first `share` images that stay may lie further behind than the first `share` of all
    stays = np.flatnonzero(~twice)
    last = int(stays[share - 1]) + 1 if share <= len(stays) else len(twice)
    others = " or ".join(what for what, _ in sides)
    return opened.without(also, twice), last, _dropped(opened.name, int(twice.sum() + also.sum()), others)


def _dropped(name: str, count: int, others: str) -> tuple[str, ...]:
    """Return the note on public images that were dropped."""
    if not count:
        return ()
    return (f"{name}: {count} images that are among {others} too were dropped; epsilon does not cover which they are",)


def _noted(group: str, chosen: Opened, part: int, twice: np.ndarray, others: str, published: bool) -> tuple[str, ...]:
    """Return the note that public examples, bool [m], are among others too, if the set was published so; UsageError
    otherwise. group: of the keys."""
    if not twice.any():
        return ()

    shared = f"{int(twice.sum())} of {len(twice)} public examples are among {others} too"
    if published:
        return (f"{chosen.name}: {shared}, as it was published",)
    raise UsageError(
        f"{group}public={chosen.name}: {shared}, the first {chosen.example(twice, part)}: take other data, or set "
        f"{group}overlap=drop to leave them out"
    )


def _shape(opened: Opened) -> tuple[int, ...]:
    """Return the shape of an image."""
    return tuple(opened.images.train.x.shape[1:])


def _image_shape(source: Source) -> Shape | None:
    """Return the shape of images; None for rows of a table."""
    x = source.train.x
    return (x.shape[1], x.shape[2], x.shape[3]) if x.dim() == 4 else None


def _both_parts(name: str, source: Source, m: int) -> tuple[str, ...]:
    """Return the note that m public images are more than the test split has."""
    n = len(source.test.x)
    if m <= n:
        return ()
    return (f"{name}: {n} public images from its test split, {m - n} from its training split",)


def _like(name: str, x: Tensor, like: Split, convert: Convert) -> tuple[Tensor, tuple[str, ...]]:
    """Return images in the shape of those of `like`, and notes; features as they are: UsageError if they do not fit."""
    if x.dim() == 2 or like.x.dim() == 2:
        if x.shape[1:] != like.x.shape[1:]:
            what = [f"{tuple(shape)}" for shape in (x.shape[1:], like.x.shape[1:])]
            raise UsageError(
                f"pair.public={name}: its examples are {what[0]}, the private ones {what[1]}: take another"
            )
        return x, ()

    shape: Shape = tuple(like.x.shape[1:])  # type: ignore[assignment]
    return converted(name, x, shape, convert)
