"""Datasets, and the private learning problem made of two of them.

A dataset is named by a file of conf/dataset or by a path of the user's. Images stay uint8; the model normalises them
with `mean` and `std`, which are published constants (conf/dataset), or 0.5 for a user's own data: they are never
computed from private data. `notes` lists every rule that was applied to the data.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data import folders, memory, prepared, tables
from pubsel.data.convert import Shape, converted, describe
from pubsel.data.embeddings import is_embeddings
from pubsel.data.examples import (
    Examples,
    Role,
    apart,
    as_classes,
    drawn,
    each_row,
    examples_of,
    folded,
    hold_out,
    in_hash_order,
    one_side,
    side,
    take_public,
    without_copies,
)
from pubsel.data.findings import ERROR, Finding, first_of, settle
from pubsel.data.images import is_dicom
from pubsel.data.opened import Opened
from pubsel.data.opened import Source as Source
from pubsel.data.opening import open_dataset as open_dataset
from pubsel.data.overlap import Digests, among, joined, rows, without_colour
from pubsel.data.related import check_apart, may_share, same_classes
from pubsel.data.related import class_names as class_names
from pubsel.data.related import same_examples as same_examples
from pubsel.data.related import same_names as same_names
from pubsel.data.splits import NO_CLASS, draw_indices, in_turn
from pubsel.data.splits import Missing as Missing
from pubsel.data.splits import Split as Split
from pubsel.data.texts import TextInput, is_texts
from pubsel.data.vectors import Field, is_rows
from pubsel.files import digest
from pubsel.messages import UsageError, UserError
from pubsel.settings.identity import is_path, overlap_of
from pubsel.settings.keys import POOL, Convert, Metric, Overlap, Pair, Read, Take, public_sets


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
    shape: tuple[int, ...] = ()  # of a private image: channels, height, width; of a row of a table: its length
    names: tuple[str, ...] = ()  # of the classes in order; empty: they have none
    weights: str | None = None  # digest of the weights of the backbone whose features x has
    offsets: int = 0  # of the columns of features, how many come last and are logits (`OffsetLinear`)
    pool: tuple[int, ...] = ()  # how many public examples are of each set; of a pool they are consecutive
    people: Tensor | None = None  # how many consecutive private examples each person has, [people]; None: unit is one
    held_out_people: Tensor | None = None  # as people, of validation
    findings: tuple[Finding, ...] = ()
    bits: int | None = None  # of a value in 16-bit images; None: 16
    content: str | None = None  # digest of all private examples, before any is left out; None: of a published set
    original: str | None = None  # the same without labels and people, in any order and of any set
    columns: tuple[Field, ...] = ()  # of a table, if x are its rows, or of features if they are images' or anyone's
    raw: int | None = None  # of a table: how many of the d columns, the first ones, have no known scale
    stages: int = 0  # of the features of a network, how many come last and are of stages before its last layer
    text: TextInput | None = None  # if the examples are texts
    untested: bool = False  # the test part is made up
    preconditioner: Tensor | None = None  # for a linear classifier, by a release before it (`Frozen.preconditioner`)
    class_weights: Tensor | None = None  # the same (`Frozen.class_weights`)

    @property
    def form(self) -> str:
        """Return the shape of an example, in words."""
        if len(self.shape) == 3:
            return describe(self.shape)
        if self.text is not None:
            return f"{'hashed into' if self.text.hashed else 'features,'} {self.shape[0]:,} numbers"
        numbers = f"{self.shape[0]} {'columns' if self.columns else 'numbers'}"
        return numbers + (f", {self.raw} of them without bounds" if self.raw else "")

    def last_layer(self) -> "Task":
        """Return it without features of stages before the last layer of a network."""
        kept = self.private.x.shape[1] - self.stages
        return self.each(lambda split: split._replace(x=split.x[:, :kept].contiguous()))._replace(stages=0)

    @property
    def units(self) -> int:
        """Return how many private units there are: people, or examples."""
        return len(self.private.x) if self.people is None else len(self.people)

    @property
    def tested(self) -> int:
        """Return how many test examples there are, without made-up ones."""
        return 0 if self.untested else len(self.test.y)

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
        # nobody in public data is protected
        about = [f for f in source.findings if not (self.public and f.name in ("ids", "nobody", "spellings", "large"))]
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


class Target(NamedTuple):
    """The private data that public images are matched against. like: examples of the shape that they get by `convert`;
    private: the name of the private set; against: the opened private set, with which they may share no image unless
    `how` allows it."""

    like: Split
    convert: Convert
    private: str | None
    against: Opened | None
    how: Overlap


def load(
    pair: Pair,
    data_root: str,
    download: bool,
    through: Through = unchanged,
    keep: bool = True,
    pixels: bool = False,
) -> Task:
    """Return everything for one run: the private training split, the first `pair.m` public images, and the private test
    split.

    If public and private are the same dataset, the m public images leave the test set; if several are combined
    (`public_examples`), the private set's share of m does. pair.take=same_test: the first m private test images leave
    it whatever is public. pair.take=train: the public images are a random part of the training split instead, and leave
    the private data if it is the same set. `pair.public` None: no public data. Who is on which side is decided by the
    rules of `examples`. UserError if the private data has fewer than two classes, no training or no test images, or
    findings that pair.read.accept does not name; UsageError if an image is on two sides (`pair.overlap`), but for those
    of a published set's own parts: these are noted. through(name, source, like): the source as it is used, such as its
    features; like: the shape of the private images, None for these. keep: as in `open_dataset`; pixels: as in `Reader`.
    """
    with keys_of_pair():
        check_read(pair.private, pair.read)
        return _loaded(pair, Reader(data_root, download, through, keep=keep), pixels)


def _with_public(
    pair: Pair, opened: Opened, table: Examples, how: Overlap, read: Reader
) -> tuple[Examples, "_Public | None", list[Finding], tuple[str, ...]]:
    """Return the table without the private examples that are public too, the public examples, findings and notes."""
    sets = _sets(pair)
    if pair.public is not None and pair.take == Take.train:
        return _from_training(pair, opened, table, how, read)
    if pair.shots is not None or pair.public_share is not None:
        raise UsageError("pair.shots and pair.public_share are drawn from a training split: set pair.take=train")
    same_test = pair.take == Take.same_test
    if same_test and pair.m is None:
        raise UsageError("pair.take=same_test: give pair.m, the number of test examples that are left out")
    if not sets and not same_test:
        return table, None, [], ()

    public = None
    if sets:
        m, key = (pair.pool_m, POOL_M) if pair.public == POOL else (pair.m, "pair.m")
        target = Target(opened.used.train, pair.convert, pair.private, opened, how)
        public = _combined(sets, m, key, target, read)

    # same_test: the test images that other public data would take leave too
    findings: tuple[Finding, ...] = ()
    notes = () if public is None else public.notes
    of_private = 0 if public is None else public.of_private
    if leave := (pair.m or 0) if same_test else of_private:
        what = "are public and left" if leave == of_private else "left"
        notes += (f"the first {leave} test {table.kind} of {pair.private} {what} the test set",)
        place = np.cumsum(table.test) * table.test
        table, findings = take_public(table, (place > 0) & (place <= leave), how)
        table = table.move((place > of_private) & table.has(Role.public), Role.left_out)
    if public is None:
        return table, None, [*findings], notes

    table, shared = apart(table, public.digests, how, " + ".join(sets), public.people)
    return table, public, [*findings, *shared], notes


@contextmanager
def keys_of_pair() -> Iterator[None]:
    """Name keys in errors as `pubsel run` has them: here they are those of the other commands. A key begins a word, so
    no folder called split=test is renamed."""
    try:
        yield
    except UserError as error:
        keys = {field.name: "pair.read." for field in dataclasses.fields(Read)}
        keys |= dict.fromkeys(("private", "public", "unit", "overlap"), "pair.")
        named = rf"(?<!\S)({'|'.join(keys)})="
        error.args = (re.sub(named, lambda key: keys[key[1]] + key[0], str(error)), *error.args[1:])
        raise


def _loaded(pair: Pair, read: Reader, pixels: bool) -> Task:
    """Return the task as `load` does."""
    opened = read._replace(unit=pair.unit, rules=pair.read, pixels=pixels)(pair.private)
    if lacking := next(_lacking(pair.private, opened.images), None):
        raise UserError(f"private={lacking.line()}")

    # a published set stays as it is; each unit of a user's own has one side, which no other unit changes
    published, sets = not is_path(pair.private), _sets(pair)
    leave = pair.take == Take.same_test or any(same_examples(pair.private, name, read.data_root) for name in sets)
    if not published and leave:
        opened = opened.in_order(in_hash_order(_table(opened, published).unit[len(opened.used.train.y) :], "public"))
    shape, columns = _image_shape(opened.images), opened.images.columns
    unit = None if published else pair.unit  # a published set numbers its people
    read = read._replace(like=shape, opened=opened, unit=unit, rules=pair.read, public=True, columns=columns, few=True)
    how = overlap_of(pair.private, pair.overlap)
    source = opened.used._replace(metric=_metric(pair, opened.used))
    table, copies = without_copies(_table(opened, published), opened.images[:2])
    table, apart_findings = one_side(table, how)
    findings = [*opened.images.findings, *copies, *apart_findings]

    # public examples come first, since they may leave the private training or test part
    table, public, public_findings, notes = _with_public(pair, opened, table, how, read)
    if not table.has(Role.private).any():
        where = f"public ({', '.join(sets)})" if sets else "public"
        raise UsageError(f"private={pair.private}: no private {table.kind} remain: all are {where} or in the test part")
    table, out_findings = hold_out(table, pair.private_share, pair.validation, pair.seed, how, pair.reserved)
    of_classes = () if published else as_classes(table, source.classes, source.names)
    findings += [*public_findings, *out_findings, *of_classes]
    settle(findings, pair.read.accept or [])
    whose = source.groups and source.groups[0]
    private, people = side(source.train, table.has(Role.private)[~table.test], whose)
    validation = held_out_people = None
    if pair.validation:
        validation, held_out_people = side(source.train, table.has(Role.held_out)[~table.test], whose)

    return Task(
        private,
        None if public is None else public.examples,
        side(source.test, table.has(Role.test)[table.test])[0],
        *source[2:6],
        tuple(dict.fromkeys((*source.notes, *notes, *(finding.text for finding in findings)))),
        validation,
        len(sets) > 0 and all(same_examples(pair.private, name, read.data_root) for name in sets),
        same_classes=all(same_classes(name, pair.private, read.data_root) for name in sets),
        shape=_shape(opened) if opened.images.texts is None else tuple(opened.used.train.x.shape[1:]),
        names=source.names or class_names(pair.private, read.data_root),
        weights=source.weights,
        pool=() if public is None else public.each,
        people=people,
        held_out_people=held_out_people,
        findings=tuple(findings),
        bits=pair.read.bits,
        content=None if published else digest([table.content.own, table.y.contiguous().numpy(), table.unit]),
        original=_original(opened, table),
        columns=source.columns,
        raw=source.raw,
        stages=source.stages,
        text=opened.text,
        untested=source.untested,
    )


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


def distinct_examples(opened: Opened, accept: Sequence[str]) -> tuple[Split, tuple[Finding, ...], str]:
    """Return the training examples of a private set, each different one of a user's once, findings, and
    `Task.original`."""
    whole = _table(opened, not is_path(opened.name))
    table, findings = without_copies(whole, opened.images[:2])
    settle(findings, accept)
    private = side(opened.used.train, table.has(Role.private)[~table.test])[0]
    return private, findings, _original(opened, whole)


def _original(opened: Opened, table: Examples) -> str:
    """Return a digest of all examples of the private set as they were read, whatever their bounds, words and scale, in
    any order, but for a test part that is made up."""
    source, own = opened.images, table.content.own
    if source.as_read is not None:
        return digest([np.unique(source.as_read)])
    if source.kind == "images" and source.files is None:
        of_train, of_test = own[~table.test], own[table.test]
        own = np.concatenate([without_colour(source.train.x, of_train), without_colour(source.test.x, of_test)])
    return digest([np.unique(own[~(table.test & table.untested)])])


def checked(
    name: str, data_root: str, keep: bool, unit: str | None, read: Read
) -> tuple[Source, Examples, tuple[Finding, ...]]:
    """Return a dataset, its table without copies and with no unit on two sides, and all findings on it as private
    data."""
    check_read(name, read)
    source = open_dataset(name, data_root, False, unit, keep, read)
    table, copies = without_copies(_table(Opened(name, source, source), not is_path(name)), source[:2])
    table, sides = one_side(table, Overlap.leave)
    about = [finding for finding in source.findings if finding.name != "one"]
    findings = (*about, *copies, *sides, *as_classes(table, source.classes, source.names), *_lacking(name, source))
    return source, table, findings


def _table(opened: Opened, published: bool) -> Examples:
    """Return the table of the private set."""
    files, used = opened.images.files, opened.used
    names = None if files is None else (files[0].names, files[1].names)
    content = opened.digests(_shape(opened))
    table = examples_of(opened.name, (used.train.y, used.test.y), content, used.groups, published, names)
    table = table._replace(untested=used.untested)
    if opened.images.kind == "images" or published:
        return table
    unit = table.unit if table.people else each_row(table.content.own, table.y)
    return table._replace(unit=unit, kind=opened.images.kind)


def _sets(pair: Pair) -> list[str]:
    """Return the public sets of a pair that are read as such: of a pool, those that are not embeddings on disk."""
    if pair.public == POOL:
        return [name for name in pair.pool or [] if not is_embeddings(name)]
    return public_sets(pair.public)


def _lacking(name: str, source: Source) -> Iterator[Finding]:
    """Yield findings on what a set lacks to be private data: labels, or images of a part."""
    unlabelled = [finding for finding in source.findings if finding.name == "one"]
    if source.classes < 2:
        text = f"{name}: one class only: it can serve as public data, not as private"
        other = Finding("one", ERROR, text, "give a folder of class folders, or labels")
        yield unlabelled[0]._replace(severity=ERROR) if unlabelled else other
    sizes = {"training": len(source.train.y), "test": len(source.test.y)}
    for part in (part for part, size in sizes.items() if not size and sum(sizes.values()) > 1):
        text, remedy = f"{name}: no {part} {source.kind}: it can serve as public data only", ""
        if is_path(name):
            people = source.groups and len(torch.cat(source.groups).unique())
            text = f"{name}: no {part} {source.kind} of its {f'{people} people' if people else sum(sizes.values())}"
            text += f": each is drawn for testing with probability {folders.TEST_FRACTION:g} if no parts are given"
            remedy = "give both, by split=COLUMN of a table, or by folders train and test"
        yield Finding("one", ERROR, text, remedy)


def _metric(pair: Pair, source: Source) -> str:
    """Return how a model of the private set is measured. UsageError if it cannot be measured so."""
    if pair.metric is None:
        return source.metric
    if source.train.y.dim() == 2 and pair.metric != Metric.auc:
        raise UsageError(
            f"pair.metric={pair.metric.name}: an example of {pair.private} has several labels: set pair.metric=auc"
        )
    return pair.metric.name


def _from_training(
    pair: Pair, opened: Opened, table: Examples, how: Overlap, read: Reader
) -> tuple[Examples, "_Public", list[Finding], tuple[str, ...]]:
    """Return the table, the public examples, drawn from the training split of pair.public, findings and notes."""
    if len(public_sets(pair.public)) > 1:
        raise UsageError("pair.take=train: the public examples come from one set: give one as pair.public")
    name, source, data_root = str(pair.public), opened.used, read.data_root
    check_apart(pair.private, name, data_root)

    same = same_examples(pair.private, name, data_root)
    if same and name != pair.private and not (is_path(name) or is_path(pair.private)):
        raise UsageError(f"pair.take=train: {name} and {pair.private} share examples: take one of them as both")
    other = opened if same else read(name)
    drawn_rows = np.zeros(len(other.used.train.y), dtype=bool)
    here = table.has(Role.private)[~table.test] if same else ~drawn_rows
    y, places = other.used.train.y[torch.from_numpy(here)], np.flatnonzero(here)
    order = None
    if same and not table.published:
        # in an order that no private unit changes
        order = in_hash_order(table.unit[~table.test][here], "public", pair.seed)
    m = pair.m or 0
    if pair.public_share is not None:
        m = round(pair.public_share * len(y))
    elif pair.m is None and pair.shots is None:
        raise UsageError("pair.m=null: of a training split: give a number, or pair.public_share or pair.shots")
    drawn_rows[places[draw_indices(name, y, m, pair.shots, pair.seed, order).numpy()]] = True
    if order is not None and pair.public_share is not None:  # about this share
        drawn_rows = here & drawn(table.unit[~table.test], pair.public_share, "public", pair.seed)
    if not drawn_rows.any():
        raise UsageError(f"pair.public_share={pair.public_share}: no example of {name} would be public: raise it")

    # what is drawn from the same set is no longer private
    chosen = read.as_used(other.without(~drawn_rows, np.ones(len(other.used.test.y), dtype=bool)))
    notes: tuple[str, ...] = () if same else chosen.used.notes + may_share(name, pair.private, data_root)
    findings: tuple[Finding, ...] = ()
    digests, whose = chosen.digests(_shape(opened))[0], chosen.images.groups
    people = NOBODY if same or whose is None else whose[0].numpy()
    if same:
        table, findings = take_public(table, np.concatenate([drawn_rows, table.has(Role.public)[table.test]]), how)
    else:
        table, findings = apart(table, digests, how, name, people)
        if how == Overlap.refuse:
            kept = rows(table.content, table.has(Role.private) | table.test)
            notes += _noted(chosen, 0, among(digests, kept), f"the private data {pair.private}", how)

    leave = ", and left the private data" if same else ""
    notes += (f"{int(drawn_rows.sum())} public examples were drawn from the training split of {name}{leave}",)
    if pair.shots is not None:
        labels, counts = chosen.used.train.y.unique(return_counts=True)
        if fewer := labels[counts < pair.shots].tolist():
            notes += (f"pair.shots={pair.shots}: all examples of smaller classes are public: {first_of(fewer)}",)
    x, changed = _like(name, chosen.used.train.x, source.train, pair.convert)
    public = _Public(Split(x, chosen.used.train.y), 0, (), (), digests, people)
    return table, public, [*findings], (*notes, *changed)


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
    with how=leave is noted; so are a published set's own training images in its test set.
    """
    against = None if apart is None else Opened(str(private), apart, apart)
    target = Target(like, convert, private, against, how)
    if apart is not None:
        read = read._replace(like=_image_shape(apart))
    taken = _combined(public_sets(public), m, "distance.m", target, read)
    return taken.examples, taken.notes


class _Public(NamedTuple):
    """Public examples, as `load` needs them."""

    examples: Split
    of_private: int  # of them are test images of the private set
    notes: tuple[str, ...]
    each: tuple[int, ...]  # how many are of each set
    digests: Digests
    people: np.ndarray  # int64, of these examples, if their sets tell


def _combined(names: list[str], m: int | None, key: str, target: Target, read: Reader) -> _Public:
    """Return m public images as `public_examples` says. m: None: all of the only set, at most MOST_PUBLIC. key: the
    setting that m is the value of; POOL_M: of each set m, or all, one set after another."""
    like, convert, private, against, how = target
    data_root, pool = read.data_root, key == POOL_M
    _check_public_sets(names, m, key, data_root)
    parts, classes, taken, notes = {}, set(), 0, tuple[str, ...]()
    seen, of_all, people = list[tuple[str, tuple[Digests, ...]]](), list[Digests](), [NOBODY]

    # The private set's own come first, since its other test images are the test set.
    from_private = [private is not None and same_examples(name, private, data_root) for name in names]
    for place in sorted(range(len(names)), key=lambda place: not from_private[place]):
        name, same = names[place], from_private[place]
        if private is not None:
            check_apart(private, name, data_root)
            notes += () if same else may_share(name, private, data_root)

        opened = read(name)
        if m is None and same:
            raise UsageError(f"{key}=null: {name} is the private set, whose test part those would be: give a number")
        of_test, kind = len(opened.used.test.x), opened.images.kind
        available = of_test + (0 if same else len(opened.used.train.x))
        if m is None or pool:
            share = min(available, m or (available if pool else MOST_PUBLIC))
        else:
            share = len(range(place, m, len(names)))
        if share > available:
            several = f", {share} from each set" if len(names) > 1 else ""
            where = "in its test split, and it is the private set" if same else "in all"
            raise UsageError(f"{key}={m}{several}: {name} has only {available} {kind} {where}: use a smaller {key}")

        # No image may be on two sides, unless the set was published so.
        chosen = read.as_used(opened.first(share))
        digests = chosen.digests(_shape(against or opened))[1]
        for what, others in [*_private_side(against, same), *seen]:
            published = what == OWN and not is_path(name)
            notes += _noted(chosen, 1, among(digests, *others), what, how, published)
        # equal rows of one set are of different people, as its private ones are
        of_all.append(rows(digests, slice(0)) if same and kind != "images" else digests)
        people += [] if same or chosen.images.groups is None else [chosen.images.groups[1].numpy()]
        if not pool:  # an image that two sets of a pool have is in it twice
            seen.append((f"the public set {name}", (digests,)))

        x, changed = _like(name, chosen.used.test.x, like, convert)
        parts[place] = Split(x, _as_numbered(chosen, against))
        classes.add(opened.used.classes)
        both = f"{name}: {of_test} public {kind} from its test split, {share - of_test} from its training split"
        notes += chosen.used.notes + ((both,) if share > of_test else ()) + changed
        taken += share if same else 0

    dealt = [parts[place] for place in range(len(names))]
    result = _Public(dealt[0], taken, notes, tuple(len(y) for _, y in dealt), joined(of_all), np.concatenate(people))
    if len(dealt) == 1:
        return result
    alike = len(classes) == 1 and all(part.y.shape[1:] == like.y.shape[1:] for part in dealt)
    of_task = alike and private is not None and all(same_classes(name, private, data_root) for name in names)
    join = torch.cat if pool else in_turn
    x = join([part.x for part in dealt])
    y = join([part.y for part in dealt]) if of_task else torch.full((len(x),), NO_CLASS)
    return result._replace(examples=Split(x, y))


def _as_numbered(chosen: Opened, against: Opened | None) -> Tensor:
    """Return the labels of a user's public examples by the numbers that the classes of their names have in the private
    set; if none has one there, numbers as they are, and words in sorted order. Classes that the private set lacks, and
    examples without labels, have numbers beyond its own, which methods that use public labels refuse. Several labels of
    an example have the private order; if they are other words, there is a column too many, which is refused too."""
    y, of = chosen.used.test.y, chosen.used
    if against is None or y.dim() != against.used.train.y.dim() or not is_path(chosen.name):
        return y
    ours = against.used.names or tuple(map(str, range(against.used.classes)))
    theirs = of.names or tuple(map(str, range(of.classes)))
    if y.dim() != 1:
        places = {folded(name): place for place, name in enumerate(theirs)}
        if places.keys() == {*map(folded, ours)}:
            return y[:, [places[folded(name)] for name in ours]]
        of_words = not any(name.isdecimal() for name in (*ours, *theirs))
        return torch.cat([y, y[:, :1]], dim=1) if of_words and len(ours) == len(theirs) else y
    numbers = {folded(name): number for number, name in enumerate(ours)}
    if theirs == ("0",) != ours:
        return torch.full_like(y, len(ours))
    are_numbers = [all(name.isdecimal() and int(name) < MOST_LABEL for name in names) for names in (ours, theirs)]
    if not {folded(name) for name in theirs} & numbers.keys() and not all(are_numbers):
        if not are_numbers[1]:
            return y
        # numbers without a word stay what they are, so that 6 of 10 is no class 1 of 2
        numbers = {folded(name): int(name) for name in theirs}
    beyond = {name for name in theirs if name.isdecimal() and len(ours) <= int(name) < MOST_LABEL}
    free = (number for number in count(len(ours)) if str(number) not in beyond)
    for name in theirs:
        if folded(name) not in numbers:
            numbers[folded(name)] = int(name) if name in beyond else next(free)
    return torch.tensor([numbers[folded(name)] for name in theirs], dtype=y.dtype)[y]


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
NOBODY = np.empty(0, dtype=np.int64)
MOST_LABEL = 2**16  # a number that is a label of a public set as it is
MOST_PUBLIC = 2000  # public images that are taken if nobody says how many


def _private_side(against: Opened | None, same: bool) -> list[tuple[str, tuple[Digests, ...]]]:
    """Return the private images that public ones must not duplicate, with their name for messages. same: the public
    ones come from the private test set."""
    if against is None:
        return []
    train, test = against.digests(_shape(against))
    return [(OWN, (train,))] if same else [(f"the private data {against.name}", (train, test))]


def _noted(
    chosen: Opened, part: int, twice: np.ndarray, others: str, how: Overlap, published: bool = False
) -> tuple[str, ...]:
    """Return the note that public examples, bool [m], are among others too; UsageError if they may not be (how=refuse,
    but for a set that was published so)."""
    if not twice.any():
        return ()

    shared = f"{int(twice.sum())} of {len(twice)} public examples are among {others} too"
    if published or how == Overlap.leave:
        return (f"{chosen.name}: {shared}" + ", as it was published" * published,)
    raise UsageError(
        f"public={chosen.name}: {shared}, the first {chosen.example(twice, part)}: take other data, or set "
        f"overlap=leave, and the private ones leave the private data"
    )


def _shape(opened: Opened) -> tuple[int, ...]:
    """Return the shape of an image."""
    return tuple(opened.images.train.x.shape[1:])


def _image_shape(source: Source) -> Shape | None:
    """Return the shape of images; None for rows of a table."""
    x = source.train.x
    return (x.shape[1], x.shape[2], x.shape[3]) if x.dim() == 4 else None


def _like(name: str, x: Tensor, like: Split, convert: Convert) -> tuple[Tensor, tuple[str, ...]]:
    """Return images in the shape of those of `like`, and notes; features as they are: UsageError if they do not fit."""
    if x.dim() == 2 or like.x.dim() == 2:
        if x.shape[1:] != like.x.shape[1:]:
            what = [f"{tuple(shape)}" for shape in (x.shape[1:], like.x.shape[1:])]
            raise UsageError(f"public={name}: its examples are {what[0]}, the private ones {what[1]}: take another")
        return x, ()

    shape: Shape = tuple(like.x.shape[1:])  # type: ignore[assignment]
    return converted(name, x, shape, convert)
