"""The table of examples: who is who, on which side each is, and why.

Each rule is a function from a table to a table, and returns what it has to say as findings. They run in one order:

    copies -> one side -> public -> apart -> held out

**Stable under one unit.** A user's own data are no fixed list of known length: a person more or less may not move
anybody else to another side, or a release would tell of more people than the one that the accountant knows of. So the
side of a unit is drawn from a fixed hash of the unit itself (`drawn`), and each rule decides about an example by its
own unit, by public data and by nothing else. Published sets (conf/dataset) keep their published order, and parts that
are drawn from a permutation of it: their number is fixed and known.

The unit is a person (`pair.unit`), or the content of an image: all copies of it are one unit, whatever their files are
called.
"""

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of
from pubsel.data.overlap import Digests, among, by_content, joined, rows
from pubsel.data.splits import SEED, SEEDS, Split
from pubsel.files import taken
from pubsel.messages import UsageError
from pubsel.settings.keys import Overlap

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

BLANK_WORDS = {"", "not available", *"nan nat none null na n/a n.a. <na> #n/a missing undefined".split()}
NOT_KNOWN = BLANK_WORDS | {"not known", *r"unknown nil anonymous anonymized anonymised anon \n (blank)".split()}
PLACEHOLDERS = {"-1", "-9", "-99", "-999", "0", "9", "99", "999", "9999"}  # if one person has many examples
INVISIBLE = {"Cc", "Cf"}  # Unicode's categories of characters that are not printed
INVISIBLE_MARKS = {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), 0x034F}  # that change how the last one is printed
STRIPPED = "\"'`=^ \u2018\u2019\u201a\u201c\u201d\u201e\u2039\u203a\u00ab\u00bb"  # quotes, ="P7" of a table, ^ of DICOM
FEW = 50  # training images of a class, below which it may be lost in the noise
NAMED = 5  # classes that a finding names
MANY = 20  # classes that are never too many
LARGE = 0.1  # share of all examples above which one person is doubtful
REPEATED = 0.1  # share of public rows that equal another one, above which rows may be equal by chance
COLUMNS = 64  # of rows, by which chance is estimated
CHANCE = 0.01  # rows that equal another one by chance
COPIED = 0.05  # share of rows or texts with copies, up to which nothing is said of them
WORDY = 50  # different triples of characters in a text, as of ten words
LONG = 7  # characters of a name
USUAL = 3  # times the mean number of examples of a person, below which nobody is


class Role(IntEnum):
    """The side of an example."""

    private = 0
    held_out = 1
    test = 2
    public = 3
    left_out = 4


class Examples(NamedTuple):
    """The examples of the private set, those of its training part first; all [n]."""

    name: str
    test: Bools  # in the test part
    y: Tensor
    content: Digests
    unit: Ints  # the person, or the content
    role: NDArray[np.int8]
    people: bool  # the unit is a person
    published: bool  # the set is one of conf/dataset
    examples: tuple[Sequence[str], Sequence[str]] | None = None  # file names of both parts
    kind: str = "images"  # or rows, or texts: equal ones may be of different people, so that they are no copies
    untested: bool = False  # the test part is made up

    def has(self, role: Role) -> Bools:
        """Return which examples have a role, bool [n]."""
        return self.role == role

    def move(self, which: Bools, role: Role) -> "Examples":
        """Return the table with another role for some examples, bool [n]."""
        return self._replace(role=np.where(which, role, self.role).astype(np.int8))

    def first(self, which: Bools) -> str:
        """Return the first of some examples as people find it: its file, or its number in its part."""
        place = int(which.argmax())
        part = int(self.test[place])
        place -= part * int((~self.test).sum())
        return self.examples[part][place] if self.examples else f"number {place}"


def examples_of(
    name: str,
    y: Sequence[Tensor],
    content: Sequence[Digests],
    people: Sequence[Tensor] | None,
    published: bool,
    examples: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Examples:
    """Return the table of a set. y, content, people: of its training and its test part; people None: the unit is an
    example with its copies."""
    both = joined(content)
    test = np.arange(len(both.own)) >= len(y[0])
    # the image as it was decoded: its digest depends on no other image, as the shape of all does
    unit = both.own if people is None else torch.cat(list(people)).numpy()
    role = np.where(test, Role.test, Role.private).astype(np.int8)
    return Examples(name, test, torch.cat(list(y)), both, unit, role, people is not None, published, examples)


# Units


def folded(key: str) -> str:
    """Return a name as people compare it: without quotes, invisible characters and blanks around it, in one Unicode
    form, one case and with one kind of dash; numbers without leading zeros and `.0`."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", " ".join(key.split())).casefold())
    kinds = map(unicodedata.category, text)
    text = "".join(
        "-" if kind == "Pd" else char
        for char, kind in zip(text, kinds, strict=True)
        if kind not in INVISIBLE and ord(char) not in INVISIBLE_MARKS
    )
    text = " ".join(text.split()).strip(STRIPPED)
    number = re.fullmatch(r"\+?(-?)0*(\d+)(\.0*)?", text, re.ASCII)
    return number[1] + number[2] if number else text


def unit_of(key: str) -> int:
    """Return 64 bits, signed, of a folded name, which do not depend on any other name."""
    value = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8, person=b"unit")
    return int.from_bytes(value.digest(), signed=True)


def people_of(what: str, keys: Sequence[str]) -> tuple[Ints, tuple[Finding, ...]]:
    """Return the person of each of n examples, int64 [n], and what is doubtful about their names. what: the set."""
    names = {key: folded(key) for key in set(keys)}
    findings = []
    unknown = [key for key in keys if names[key] in NOT_KNOWN or not any(map(str.isalnum, names[key]))]
    if unknown:
        text = f"{what}: {len(unknown)} of {len(keys)} examples name nobody ({first_of(map(repr, unknown))})"
        findings.append(Finding("nobody", ERROR, text, "say who they are of, or leave them out"))

    spelt = dict[str, list[str]]()
    for key in sorted(names):
        spelt.setdefault(names[key], []).append(key)
    several = [f"{ways[0]!r} and {ways[1]!r}" for ways in spelt.values() if len(ways) > 1]
    if several:
        text = (
            f"{what}: {len(several)} people are written in several ways and are one each, such as {first_of(several)}"
        )
        findings.append(Finding("spellings", WARNING, text))
    near, long = dict[str, list[str]](), {name for name in spelt if len(name) >= LONG}
    for name in sorted(spelt):
        # long names are compared without marks too, but with one that has none: 1-12 and 11-2 are different people
        whole = re.sub(r"[^\w.]+|_", "", name)
        words = re.sub(r"[^\w.]+|_|(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", whole if whole in long else name)
        near.setdefault(re.sub(r"(?<![\d.])0+(?=\d)", "", re.sub(r"(?<=\d)\.0+$", "", words)), []).append(name)
    if alike := [ways for ways in near.values() if len(ways) > 1]:
        text = f"{what}: {len(alike)} people may be written in several ways, such as {first_of(map(repr, alike[0]))}"
        findings.append(Finding("spellings", ERROR, text, "write each in one way; accepted, they are different people"))

    sizes, n = Counter(names[key] for key in keys), len(keys)
    large = [f"{name} has {size}" for name, size in sizes.items() if size > max(LARGE * n, USUAL * n / len(sizes))]
    if large:
        severity = ERROR if PLACEHOLDERS & {text.rpartition(" has ")[0] for text in large} else WARNING
        text = f"{what}: more than a tenth of its {n} examples are of one person: {first_of(large)}"
        findings.append(Finding("large", severity, text, "if that is no person, leave these out"))
    return np.array([unit_of(names[key]) for key in keys], dtype=np.int64), tuple(findings)


def each_row(content: Ints, y: Tensor) -> Ints:
    """Return the unit of each of n rows of numbers, int64 [n]. Equal rows of a table may be of different people: of k
    rows with equal content and label, each has a unit by its number among them. Which of them has which number makes no
    difference, so that without one of them the others are still on their sides."""
    import pandas as pd

    label = _label_numbers(y)
    number = pd.DataFrame({"content": content, "label": label}).groupby(["content", "label"]).cumcount().to_numpy()
    rows = zip(content.tolist(), y.tolist(), number.tolist(), strict=True)
    return np.array([unit_of(f"{row}") for row in rows], dtype=np.int64)


def _label_numbers(y: Tensor) -> Ints:
    """Return a number for each different label of y [n], or row of [n, labels], int64 [n]. Labels that are not known
    are equal, which NaN is not."""
    return np.unique(y.nan_to_num(-1).numpy(), axis=0, return_inverse=True)[1].reshape(-1)


def hashes(unit: Ints, purpose: str, seed: int = 0) -> NDArray[np.uint64]:
    """Return a number of 64 bits for each of n units, uint64 [n], as if drawn at random for a purpose: the unit's own
    number, the purpose and the seed decide it, and no other unit. Two purposes are independent."""
    salt = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()
    each, places = np.unique(unit, return_inverse=True)
    values = (hashlib.blake2b(int(value).to_bytes(8, signed=True), digest_size=8, salt=salt) for value in each)
    return np.array([int.from_bytes(value.digest()) for value in values], dtype=np.uint64)[places]


def drawn(unit: Ints, share: float, purpose: str, seed: int = 0) -> Bools:
    """Return which of n units are drawn for a purpose, about a share of them: bool [n], each by its own number."""
    if share >= 1:
        return np.ones(len(unit), dtype=bool)
    return hashes(unit, purpose, seed) < np.uint64(share * 2**64)


def in_hash_order(unit: Ints, purpose: str, seed: int = 0) -> Ints:
    """Return the places of n units in the order of their hashes, int64 [n]: one more or one fewer changes no order
    among the others, and the first m are the same unless it is one of them."""
    return np.argsort(hashes(unit, purpose, seed), kind="stable")


# Rules


def without_copies(table: Examples, parts: Sequence[Split] = ()) -> tuple[Examples, tuple[Finding, ...]]:
    """Return the table of a user's own set with each different image once for each unit, and findings. parts: the
    rows of both, if they are no images, for a finding alone.

    Images with equal content and equal label are one example of their unit, whichever copy stays. An image that a unit
    has with several labels is left out: nobody can say which one is right, and the decision is by its own unit alone.
    """
    if table.published or table.kind != "images":
        return table, () if table.published or table.people or not parts else tuple(_repeated(table, parts))

    import pandas as pd

    # rows of one unit with equal content and label, in one part, are copies of each other
    frame = pd.DataFrame({"unit": table.unit, "content": table.content.own, "test": table.test})
    frame["label"] = _label_numbers(table.y)
    copies = frame.duplicated().to_numpy()
    findings = []
    if copies.any():
        real = ~(table.test & table.untested)
        n, different = int(real.sum()), frame["content"][real].nunique()
        text = f"{table.name}: {n} images are {different} different ones: copies are not counted again"
        findings.append(Finding("copies", WARNING, f"{text}, the first {table.first(copies)}"))
    table = table.move(copies, Role.left_out)

    several = frame.groupby(["unit", "content"])["label"].transform("nunique").to_numpy() > 1
    if several.any():
        text = f"{table.name}: {int(several.sum())} images have copies with other labels"
        text += f", the first {table.first(several)}"
        findings.append(Finding("conflict", ERROR, text, "give each one label, or leave them out"))
    return table.move(several, Role.left_out), tuple(findings)


def _repeated(table: Examples, parts: Sequence[Split]) -> Iterator[Finding]:
    """Yield the finding on rows or texts of which a twentieth or more equal another of their part with their label, or
    of whose test part a twentieth equal training ones, but for the most frequent one, which may be without any value.
    It may be by chance if these texts are short, or if rows with these values in each column would often be equal were
    the columns independent; if it is less than half, only those of many values, half of which follow from the others.
    """
    import pandas as pd

    real = ~(table.test & table.untested)
    frame = pd.DataFrame({"content": table.content.own, "label": _label_numbers(table.y)})[real]
    n, different, test = len(frame), len(frame.drop_duplicates()), table.test[real]
    if different <= MANY:
        return
    each, copied = pd.MultiIndex.from_frame(frame), frame.assign(test=test).duplicated(keep=False).to_numpy()
    again = test & each.isin(each[~test])
    counted = (frame["content"] != frame["content"].mode()[0]).to_numpy()
    share, of_test = (copied & counted).mean(), (again & counted).sum() / max(1, test.sum())
    most = 2 * max(share, of_test) > 1
    if max(share, of_test) <= COPIED:
        return
    rows_of = [part.x.count_nonzero(1)[:, None] if table.kind == "texts" else part.x for part in parts]
    some = torch.cat([x[:, :: max(1, x.shape[1] // COLUMNS)] for x in rows_of])[torch.from_numpy(real)]
    if table.kind == "texts":
        by_chance = float(some[torch.from_numpy((copied | again) & counted)].median()) < WORDY
    else:
        some = some if most else some[torch.from_numpy(~frame["content"].duplicated().to_numpy())]
        counts = [column.unique(return_counts=True)[1] for column in some.nan_to_num().T]
        shares = (float(((count / len(some)) ** 2).sum()) for count in counts if most or len(count) > MANY)
        by_chance = len(some) * math.prod(shares) ** (1 if most else 0.5) > CHANCE
    often, trained = share > (0.5 if most else COPIED), int(again.sum())
    if by_chance:
        return
    if not often:
        text = f"{table.name}: {trained} of {test.sum()} test {table.kind} are training {table.kind} too"
        yield Finding("both_sides", WARNING, text, "remove them from one of the parts")
    else:
        text = f"{table.name}: {n} {table.kind} are {different} different ones: each copy counts as another example"
        text += ", so that an original with its copies is protected less than stated"
        yield Finding("copies", WARNING, text, "remove the copies, or set unit=COLUMN")


def one_side(table: Examples, how: Overlap) -> tuple[Examples, tuple[Finding, ...]]:
    """Return the table with no unit in both its training and its test part, and findings: how=leave: its training
    examples leave. UsageError otherwise, but for the images of a published set, whose parts stay as they are.

    With people, an image that two people have stays with both: what one has may not decide about another.
    """
    train, test = table.has(Role.private), table.has(Role.test)
    whose, what = (f"people with training {table.kind}", "pair.unit: ") if table.people else ("training images too", "")
    if table.people or not table.published:
        on_both = np.isin(table.unit, table.unit[train]) & test
        again = np.isin(table.unit, table.unit[test]) & train
    else:
        on_both = test & among(table.content, rows(table.content, train))
        again = train & among(table.content, rows(table.content, test))

    count, n = int(on_both.sum()), int(test.sum())
    if not count:
        return table, ()
    of_people = "of " * table.people
    if how == Overlap.leave:
        why = f"of people with test {table.kind}" if table.people else "that are test images too"
        text = f"{table.name}: {int(again.sum())} training {table.kind} {why} left the private data"
        return table.move(again, Role.left_out), (Finding("both_sides", WARNING, text),)
    if table.published and not table.people:  # a published set stays what others report on
        text = f"{table.name}: {count} of {n} test images are training images too, as it was published"
        return table, (Finding("both_sides", NOTE, text),)
    raise UsageError(
        f"{what}pair.private={table.name}: {count} of its {n} test {table.kind} are {of_people}{whose}, the first "
        f"{table.first(on_both)}: give another split, or set pair.overlap=leave"
    )


def apart(
    table: Examples, public: Digests, how: Overlap, name: str, people: Ints
) -> tuple[Examples, tuple[Finding, ...]]:
    """Return the table with no example that is public too, or is of a person with public examples, and findings:
    how=leave: such examples leave the private data and the test set. Public data decide this example by example, so
    nobody moves anybody else. name: of these; people: of these.

    Equal images are one image. Rows and texts may be equal by chance, and public data alone tell where that is common:
    if more than a share REPEATED of the public ones equal another public one, none leaves, and it is an error if more
    than that share equal private ones. Otherwise two rows that are drawn alike are equal with probability REPEATED / m
    or so, for m public ones, so that by chance about that share of the private ones leaves at most. UsageError for such
    examples unless how=leave."""
    stays = table.has(Role.private) | table.has(Role.test)
    theirs = stays & np.isin(table.unit, people)
    findings = list[Finding]()
    if theirs.any():
        text = f"{int(theirs.sum())} {table.kind} of {table.name} are of people with public ones in {name}"
        if how != Overlap.leave:
            raise UsageError(f"{text}: set overlap=leave, and they leave the private data")
        findings.append(
            Finding(
                "public_too",
                WARNING,
                f"{text}, and are left out",
                "if others have equal names there, rename that column",
            )
        )
        table, stays = table.move(theirs, Role.left_out), stays & ~theirs
    twice = stays & among(table.content, public)
    if how != Overlap.leave or not twice.any():
        return table, tuple(findings)
    n = len(public.own)
    if table.kind != "images" and len(np.unique(public.own)) < (1 - REPEATED) * n:
        equal = int(among(public, rows(table.content, stays)).sum())
        text = f"{name}: {equal} of {n} public {table.kind} equal private ones of {table.name}"
        severity = ERROR if equal > REPEATED * n else WARNING
        remedy = "give other public data, unless they are of other people"
        return table, (*findings, Finding("public_too", severity, text, remedy))
    of_test = int((twice & table.test).sum())
    counts = f"{int(twice.sum()) - of_test} training and {of_test} test {table.kind}"
    text = f"{table.name}: {counts} that are public too are left out"
    return table.move(twice, Role.left_out), (*findings, Finding("public_too", WARNING, text))


def as_classes(table: Examples, classes: int, names: Sequence[str]) -> tuple[Finding, ...]:
    """Return findings on the private data as something to learn: one example alone, rare classes or labels, and those
    that are in one part alone."""
    train, test = (torch.from_numpy(table.has(role)) for role in (Role.private, Role.test))
    findings, n = [], int((~table.test).sum()) if table.untested else len(table.role)
    if n < 2:
        findings.append(Finding("one", ERROR, f"{table.name}: one {table.kind[:-1]} only"))
    several = table.y.dim() == 2
    counts, tested = (
        table.y[part].nansum(0).int() if several else table.y[part].bincount(minlength=classes)
        for part in (train, test)
    )
    if unknown := int(table.y.isnan().sum()):
        text = f"{table.name}: {unknown} of {table.y.numel()} labels are not known, and count neither as 0 nor as 1"
        findings.append(Finding("not_known", WARNING, text, "write 0 if an empty cell is an example without the label"))
    known = [names[i] if names else str(i) for i in range(len(counts))]
    few = [f"{name} has {count}" for name, count in zip(known, counts.tolist(), strict=True) if count < FEW]
    lost = [name for name, count in zip(known, counts.tolist(), strict=True) if not count and not several]
    if classes > max(MANY, n / 10):
        text = f"{table.name}: {classes} classes of {n} examples"
        findings.append(Finding("many", ERROR, text, "if these are measurements, give classes as labels"))
    elif lost and classes > 1:
        text = f"{table.name}: no training {table.kind[:-1]} of a class is left: {first_of(lost, NAMED)}"
        findings.append(Finding("class_lost", ERROR, text, "give some, or leave the class out"))
    elif few and classes > 1:
        what = f"{table.name}: {'labels' if several else 'classes'} with fewer than {FEW} training {table.kind}"
        findings.append(Finding("few", WARNING, f"{what} may be lost in the noise: {first_of(few, NAMED)}"))
    unseen = [name for name, trained, n in zip(known, counts, tested, strict=True) if trained and not n]
    if test.any() and 1 < classes <= max(MANY, n / 10) and unseen:
        what = f"{table.name}: {'labels' if several else 'classes'} without a test {table.kind[:-1]}"
        findings.append(Finding("few", WARNING, f"{what}, which are not measured: {first_of(unseen, NAMED)}"))
    return tuple(findings)


def take_public(table: Examples, public: Bools, how: Overlap) -> tuple[Examples, tuple[Finding, ...]]:
    """Return the table with some of its examples public, bool [n], and findings: nobody who has one of them, and no
    copy of one, stays in its part. UsageError if that leaves none there."""
    part = table.test if table.test[public].any() else ~table.test
    word, key = ("test", "pair.m") if table.test[public].any() else ("training", "pair.public_share")
    rest = part & (table.role != Role.left_out) & ~public
    findings = []

    if table.people:
        theirs = rest & np.isin(table.unit, table.unit[public])
        text = f"{table.name}: {int(theirs.sum())} other {word} {table.kind} of people with public ones are left out"
        findings.append(Finding("public_too", NOTE, text))
        table, rest = table.move(theirs, Role.left_out), rest & ~theirs
    table = table.move(public, Role.public)
    if not rest.any():
        raise UsageError(f"{key}: no {word} {table.kind} of {table.name} would remain: take fewer public ones")

    # a copy of a public example may have been trained on
    if table.kind != "images":
        return table, tuple(findings)
    twice = rest & among(table.content, rows(table.content, public))
    if twice.any():
        text = f"{table.name}: {int(twice.sum())} other {word} images are equal to public ones"
        if table.people and not table.published:  # what one has may not decide about another
            text += ", as images of other people"
        elif how == Overlap.leave and twice.sum() < rest.sum():
            table, text = table.move(twice, Role.left_out), f"{text} and are left out"
        elif not table.published:
            raise UsageError(f"{key}: {text}: set pair.overlap=leave")
        findings.append(Finding("public_too", NOTE, text))
    return table, tuple(findings)


def hold_out(
    table: Examples, private_share: float, validation: float, seed: int, how: Overlap, reserved: float = 0.0
) -> tuple[Examples, tuple[Finding, ...]]:
    """Return the table with a share of the private units in use, and of these a share held out for validation, but for
    those units that a smaller share, `reserved`, would hold out: these are not used.

    A user's units are drawn one by one (`drawn`); those of a published set from a permutation of all, in which equal
    images are held out together with how=leave. UsageError if either side would be empty.
    """
    here = np.flatnonzero(table.has(Role.private))
    used, held = _shares(table, here, private_share, validation, seed, how)
    if reserved:
        kept = held & _shares(table, here, private_share, reserved, seed, how)[1]
        used, held = used & ~kept, held & ~kept

    what = "people" if table.people else "examples"
    if not (used & ~held).any() or (validation and not held.any()):
        raise UsageError(
            f"pair.validation={validation}: {int(held.sum())} of {int(used.sum())} private examples would be held out; "
            f"on one side are no {what}: take another share"
        )
    role = table.role.copy()
    role[here[~used]], role[here[held]] = Role.left_out, Role.held_out
    table = table._replace(role=role)

    # an image of two people, or of a published set, may be on both sides
    if table.kind != "images":
        return table, ()
    out = rows(table.content, table.has(Role.held_out))
    twice = int(among(out, rows(table.content, table.has(Role.private))).sum())
    if not twice:
        return table, ()
    text = f"{table.name}: {twice} of {len(out.own)} examples held out for validation are trained on too"
    if how == Overlap.refuse and not table.published:
        raise UsageError(f"pair.validation={validation}: {text}: set pair.overlap=leave")
    text += ", as images of other people" if table.people else ", as it was published"
    return table, (Finding("shared", NOTE, text),)


def side(split: Split, which: Bools, people: Tensor | None = None) -> tuple[Split, Tensor | None]:
    """Return the chosen examples of a split, bool [n], and how many each person has, [people], if people [n] are given:
    the examples of a person then follow each other. If all are chosen, this is the split itself."""
    if people is None and which.all():
        return split, None
    places, sizes = torch.from_numpy(np.flatnonzero(which)), None
    if people is not None:
        sizes = people[places].unique(return_counts=True)[1]
        places = places[people[places].argsort(stable=True)]
    return Split(taken(split.x, places), split.y[places]), sizes


def _shares(
    table: Examples, here: Ints, private_share: float, validation: float, seed: int, how: Overlap
) -> tuple[Bools, Bools]:
    """Return which private examples, at the places `here`, are used, and which of these are held out: of a larger
    share also those of a smaller one."""
    if not table.published:
        mine = drawn(table.unit[here], private_share, "private", seed)
        return mine, mine & drawn(table.unit[here], validation, "held out", seed)

    members, several = np.arange(len(here)), len(here)
    if table.people:
        # numbered with those who left: whom one public set takes away may not move the others
        everyone = table.unit[~table.test] if how == Overlap.leave else table.unit[here]
        names = np.unique(everyone)
        members, several = np.searchsorted(names, table.unit[here]), len(names)

    # another seed than any of `splits.shuffled` and `draw_indices`, so that the share is independent of both
    order = np.random.RandomState((SEED + 2 * seed + 1) % SEEDS).permutation(several)
    used = order[: max(1, round(private_share * several))]
    held = used[: round(validation * len(used))]
    if how == Overlap.leave and not table.people:
        held = used[by_content(rows(table.content, here), validation, seed)[used]]
    return np.isin(members, used), np.isin(members, held)
