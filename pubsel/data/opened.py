"""A dataset as it was opened: its images, and what is used of them."""

import html
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pubsel.data import overlap
from pubsel.data.convert import Shape, describe
from pubsel.data.findings import Finding
from pubsel.data.overlap import Digest, Digests
from pubsel.data.splits import Files, Groups, Split, cat
from pubsel.data.texts import TextInput, Texts
from pubsel.data.vectors import Field
from pubsel.files import taken


class Source(NamedTuple):
    """A dataset as it is on disk."""

    train: Split
    test: Split
    classes: int
    metric: str  # accuracy, balanced_accuracy or auc
    mean: tuple[float, ...]  # per channel in [0, 1]
    std: tuple[float, ...]
    notes: tuple[str, ...]
    files: tuple[Files, Files] | None = None  # of train and test, if each image is a file of the user's
    kept: Path | None = None  # the folder that the images are mapped from
    names: tuple[str, ...] = ()  # of its classes in order, if its files tell
    weights: str | None = None  # digest of the weights of the backbone whose features it has
    groups: Groups | None = None  # of the people, if they were asked for
    findings: tuple[Finding, ...] = ()
    columns: tuple[Field, ...] = ()  # of the rows of a table; empty: features
    raw: int | None = None  # how many of the columns, the first ones, have no known scale; None: features
    stages: int = 0  # of its features, how many come last and are of stages before the last layer of a network
    texts: Texts | None = None  # that x are the hashed words of
    untested: bool = False  # the test part is made up
    as_read: Digest | None = None  # `Vectors.as_read`, in any order
    image_column: str | None = None  # of a table, that has or names its images

    @property
    def kind(self) -> str:
        """Return what its examples are, in a word."""
        if self.texts is not None:
            return "texts"
        return "images" if self.train.x.dim() == 4 else "rows"

    @property
    def image_shape(self) -> Shape | None:
        """Return the shape of its images; None for rows of a table."""
        x = self.train.x
        return (x.shape[1], x.shape[2], x.shape[3]) if x.dim() == 4 else None

    def lines(self) -> list[str]:
        """Return its description, line by line."""
        size = self.train.x.shape[1:]
        counts = f"{len(self.train.x):,} training and {len(self.test.x):,} test {self.kind}"
        shape = describe(size) if len(size) == 3 else f"{size[0]:,} numbers"
        how = "of" if self.texts is None else "hashed into"
        lines = [f"{counts} {how} {shape}, {self.classes} classes, measured by {self.metric}"]

        if self.train.y.dim() == 1:
            per_class = self.train.y.bincount(minlength=self.classes).tolist()
            lines.append(f"training {self.kind} of a class: {min(per_class):,} to {max(per_class):,}")
        return [*lines, *self.notes]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Opened(NamedTuple):
    """A dataset: its images, and the representation that is trained on (images or features)."""

    name: str
    images: Source
    used: Source

    @property
    def text(self) -> TextInput | None:
        """Return the texts that a model of the set takes; None if its examples are no texts."""
        texts, d = self.images.texts, self.used.train.x.shape[1]
        return None if texts is None else TextInput(texts.column, d if self.used is self.images else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an image."""
        return tuple(self.images.train.x.shape[1:])

    def digests(self, shape: tuple[int, ...]) -> tuple[Digests, Digests]:
        """Return the digests of training and test images, which are compared in `shape`."""
        return tuple(_digests(self.images, part, shape) for part in (0, 1))  # type: ignore[return-value]

    def decoded(self) -> Digest:
        """Return the digests of training and then test images, in whatever form they are stored: of one channel if all
        channels of an image are equal."""
        source, parts = self.images, list[Digest]()
        for part, x in enumerate((source.train.x, source.test.x)):
            values = _digests(source, part, ()).own
            kept = source.kept / f"{('train', 'test')[part]}_grey_digests.npz" if source.kept else None
            parts.append(values if source.files else overlap.without_colour(x, values, kept))
        return np.concatenate(parts)

    def without(self, train: np.ndarray, test: np.ndarray) -> "Opened":
        """Return the data set without some examples. train, test: bool [n], those that leave each part."""
        if not (train.any() or test.any()):
            return self
        return self._at(np.flatnonzero(~train), np.flatnonzero(~test))

    def in_order(self, test: np.ndarray) -> "Opened":
        """Return the data set with its test part in another order. test: int64 [n], places."""
        return self._at(np.arange(len(self.used.train.y)), test)

    def _at(self, train: np.ndarray, test: np.ndarray) -> "Opened":
        """Return the data set with the examples at some places of each part."""
        images = _rest(self.images, train, test)
        used = images if self.used is self.images else _rest(self.used, train, test)
        return Opened(self.name, images, used)

    def first(self, m: int) -> "Opened":
        """Return its first m examples, of the test split before the training split, as a test split."""
        images = _first(self.images, m)
        used = images if self.used is self.images else _first(self.used, m)
        return Opened(self.name, images, used)

    def example(self, which: np.ndarray, part: int = 1) -> str:
        """Return the first of the images `which`, bool [n], of a part, as people find it: a file, or its number."""
        place = int(which.argmax())
        return self.images.files[part].names[place] if self.images.files else f"number {place}"


def _digests(source: Source, part: int, shape: tuple[int, ...]) -> Digests:
    """Return the digests of the images of the training (0) or test split (1), which are compared in `shape`."""
    x = (source.train, source.test)[part].x
    kept = source.kept / f"{('train', 'test')[part]}_digests.npz" if source.kept else None

    # A file was hashed at its own size; x has the size of all.
    decoded = source.files[part].digests.numpy() if source.files else overlap.digests(x, kept=kept)
    if len(shape) == 3 and x.dim() == 4 and tuple(x.shape[1:]) != shape:
        return Digests(decoded, overlap.digests(x, (shape[0], shape[1], shape[2])))
    return Digests(decoded, overlap.digests(x, kept=kept) if source.files else decoded)


def _rest(source: Source, train: np.ndarray, test: np.ndarray) -> Source:
    """Return the source with some of its examples. train, test: int64 [n], their places in each part."""
    places = [torch.from_numpy(train), torch.from_numpy(test)]
    splits = [Split(taken(s.x, at), s.y[at]) for s, at in zip((source.train, source.test), places, strict=True)]

    files = None
    if source.files:
        files = files_at(source.files[0], places[0]), files_at(source.files[1], places[1])
    groups = source.groups and (source.groups[0][places[0]], source.groups[1][places[1]])
    texts = source.texts and source.texts.at(train.tolist(), test.tolist())
    return source._replace(train=splits[0], test=splits[1], files=files, kept=None, groups=groups, texts=texts)


def _first(source: Source, m: int) -> Source:
    """Return the first m examples of `source`, those of its test split before those of its training split, as a test
    split."""
    rest = max(0, m - len(source.test.x))
    first = Split(source.test.x[:m], source.test.y[:m])
    if rest:
        first = cat(first, Split(source.train.x[:rest], source.train.y[:rest]))

    # The kept folder has the digests of all examples, not of these, so it is not passed on.
    whose = source.groups and (source.groups[0][:0], torch.cat([source.groups[1][:m], source.groups[0][:rest]]))
    source = source._replace(groups=whose, texts=None)
    empty = Split(source.train.x[:0], source.train.y[:0])
    if source.files is None:
        return source._replace(train=empty, test=first, kept=None)

    train, test = source.files
    digests = torch.cat([test.digests[:m], train.digests[:rest]])
    files = Files(test.names[:m] + train.names[:rest], digests)
    return source._replace(train=empty, test=first, files=(files_at(train, torch.arange(0)), files), kept=None)


def files_at(files: Files, places: torch.Tensor) -> Files:
    """Return the files at some places, in their order."""
    return Files(tuple(files.names[i] for i in places.tolist()), files.digests[places])
