"""The public examples of a run: how many of which sets, in which shape, and on no other side."""

from itertools import combinations, count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data.convert import Shape, converted
from pubsel.data.embeddings import is_embeddings
from pubsel.data.examples import Examples, Role, apart, drawn, folded, in_hash_order, take_public
from pubsel.data.findings import Finding, first_of
from pubsel.data.opened import Opened, Source
from pubsel.data.overlap import Digests, among, joined, rows
from pubsel.data.reader import Reader
from pubsel.data.related import check_apart, may_share, same_classes, same_examples
from pubsel.data.splits import NO_CLASS, Split, draw_indices, in_turn
from pubsel.messages import UsageError
from pubsel.settings.identity import is_path
from pubsel.settings.keys import POOL, Convert, Overlap, Pair, Take, public_sets

TRAINING_PART = "its own training images"
POOL_M = "pair.pool_m"
NOBODY = np.empty(0, dtype=np.int64)
MOST_LABEL = 2**16  # a number that is a label of a public set as it is
MOST_PUBLIC = 2000  # public images that are taken if nobody says how many


class Target(NamedTuple):
    """The private data that public images are matched against. like: examples of the shape that they get by `convert`;
    private: the name of the private set; against: the opened private set, with which they may share no image unless
    `how` allows it."""

    like: Split
    convert: Convert
    private: str | None
    against: Opened | None
    how: Overlap


class Taken(NamedTuple):
    """Public examples of all sets, as `load` needs them."""

    examples: Split
    of_private: int  # of them are test images of the private set
    notes: tuple[str, ...]
    each: tuple[int, ...]  # how many are of each set
    digests: Digests
    people: np.ndarray  # int64, of these examples, if their sets tell


def with_public(
    pair: Pair, opened: Opened, table: Examples, how: Overlap, read: Reader
) -> tuple[Examples, Taken | None, list[Finding], tuple[str, ...]]:
    """Return the table without the private examples that are public too, the public examples, findings and notes."""
    sets = sets_to_read(pair)
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


def _from_training(
    pair: Pair, opened: Opened, table: Examples, how: Overlap, read: Reader
) -> tuple[Examples, Taken, list[Finding], tuple[str, ...]]:
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
    digests, whose = chosen.digests(opened.shape)[0], chosen.images.groups
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
    public = Taken(Split(x, chosen.used.train.y), 0, (), (), digests, people)
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
        read = read._replace(like=apart.image_shape)
    taken = _combined(public_sets(public), m, "distance.m", target, read)
    return taken.examples, taken.notes


def _combined(names: list[str], m: int | None, key: str, target: Target, read: Reader) -> Taken:
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
        digests = chosen.digests((against or opened).shape)[1]
        for what, others in [*_private_side(against, same), *seen]:
            published = what == TRAINING_PART and not is_path(name)
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
    result = Taken(dealt[0], taken, notes, tuple(len(y) for _, y in dealt), joined(of_all), np.concatenate(people))
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


def _private_side(against: Opened | None, same: bool) -> list[tuple[str, tuple[Digests, ...]]]:
    """Return the private images that public ones must not duplicate, with their name for messages. same: the public
    ones come from the private test set."""
    if against is None:
        return []
    train, test = against.digests(against.shape)
    return [(TRAINING_PART, (train,))] if same else [(f"the private data {against.name}", (train, test))]


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


def _like(name: str, x: Tensor, like: Split, convert: Convert) -> tuple[Tensor, tuple[str, ...]]:
    """Return images in the shape of those of `like`, and notes; features as they are: UsageError if they do not fit."""
    if x.dim() == 2 or like.x.dim() == 2:
        if x.shape[1:] != like.x.shape[1:]:
            what = [f"{tuple(shape)}" for shape in (x.shape[1:], like.x.shape[1:])]
            raise UsageError(f"public={name}: its examples are {what[0]}, the private ones {what[1]}: take another")
        return x, ()

    shape: Shape = tuple(like.x.shape[1:])  # type: ignore[assignment]
    return converted(name, x, shape, convert)


def sets_to_read(pair: Pair) -> list[str]:
    """Return the public sets of a pair that are read as such: of a pool, those that are not embeddings on disk."""
    if pair.public == POOL:
        return [name for name in pair.pool or [] if not is_embeddings(name)]
    return public_sets(pair.public)
