"""Datasets, and the private learning problem made of two of them.

A dataset is named by a file of conf/dataset or by a path of the user's. Images stay uint8; the model normalises them
with `mean` and `std`, which are published constants (conf/dataset), or 0.5 for a user's own data: they are never
computed from private data. `notes` lists every rule that was applied to the data.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data import folders
from pubsel.data.convert import describe
from pubsel.data.examples import (
    Examples,
    Role,
    as_classes,
    each_row,
    examples_of,
    hold_out,
    in_hash_order,
    one_side,
    side,
    without_copies,
)
from pubsel.data.findings import ERROR, Finding, settle
from pubsel.data.opened import Opened
from pubsel.data.opened import Source as Source
from pubsel.data.opening import open_dataset as open_dataset
from pubsel.data.public import MOST_PUBLIC as MOST_PUBLIC
from pubsel.data.public import public_examples as public_examples
from pubsel.data.public import sets_to_read, with_public
from pubsel.data.reader import Reader as Reader
from pubsel.data.reader import Through as Through
from pubsel.data.reader import check_read as check_read
from pubsel.data.reader import of_public_data as of_public_data
from pubsel.data.reader import unchanged as unchanged
from pubsel.data.related import class_names as class_names
from pubsel.data.related import same_classes
from pubsel.data.related import same_examples as same_examples
from pubsel.data.related import same_names as same_names
from pubsel.data.splits import Missing as Missing
from pubsel.data.splits import Split as Split
from pubsel.data.texts import TextInput
from pubsel.data.vectors import Field
from pubsel.files import digest
from pubsel.messages import UsageError, UserError
from pubsel.settings.identity import is_path, overlap_of
from pubsel.settings.keys import Metric, Overlap, Pair, Read, Take


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
    image_column: str | None = None  # of a table, that has or names the images

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
    published, sets = not is_path(pair.private), sets_to_read(pair)
    leave = pair.take == Take.same_test or any(same_examples(pair.private, name, read.data_root) for name in sets)
    if not published and leave:
        opened = opened.in_order(in_hash_order(_table(opened, published).unit[len(opened.used.train.y) :], "public"))
    shape, columns = opened.images.image_shape, opened.images.columns
    unit = None if published else pair.unit  # a published set numbers its people
    read = read._replace(like=shape, opened=opened, unit=unit, rules=pair.read, public=True, columns=columns, few=True)
    how = overlap_of(pair.private, pair.overlap)
    source = opened.used._replace(metric=_metric(pair, opened.used))
    table, copies = without_copies(_table(opened, published), opened.images[:2])
    table, apart_findings = one_side(table, how)
    findings = [*opened.images.findings, *copies, *apart_findings]

    # public examples come first, since they may leave the private training or test part
    table, public, public_findings, notes = with_public(pair, opened, table, how, read)
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
        shape=opened.shape if opened.images.texts is None else tuple(opened.used.train.x.shape[1:]),
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
        image_column=source.image_column,
    )


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
    if opened.images.as_read is not None:
        return digest([np.unique(opened.images.as_read)])
    decoded = opened.decoded() if opened.images.kind == "images" else table.content.own
    return digest([np.unique(decoded[~(table.test & table.untested)])])


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
    content = opened.digests(opened.shape)
    table = examples_of(opened.name, (used.train.y, used.test.y), content, used.groups, published, names)
    table = table._replace(untested=used.untested)
    if opened.images.kind == "images" or published:
        return table
    unit = table.unit if table.people else each_row(table.content.own, table.y)
    return table._replace(unit=unit, kind=opened.images.kind)


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
