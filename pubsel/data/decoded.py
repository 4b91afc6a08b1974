"""A user's own data: decoded once, by all cores, and then mapped from where that is kept.

<data folder>/decoded/<digest of the path>/ contains what pubsel.data.stored describes, and in train_decoded.npy and
test_decoded.npy int64 [n], the digest of each image as it was decoded. Only its owner may read it, and no name in it is
one of the user's. listed.txt is a fingerprint of the files, so that one that changes is noticed. Images that take less
than SMALL, of fewer than MANY files, are read anew each time: that takes about a second, and leaves no second copy.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data import memory, overlap, stored
from pubsel.data.examples import drawn, in_hash_order
from pubsel.data.findings import ERROR, WARNING, Finding, first_of
from pubsel.data.folders import TEST_FRACTION
from pubsel.data.overlap import Digest, of_pixels
from pubsel.data.splits import Files, Images, Listed, Parts, Split, Unreadable, sorted_by_class
from pubsel.files import (
    ProgressLine,
    digest,
    file_map,
    locked,
    mapped,
    private_folder,
    reading,
    remove_left,
    write_whole,
)
from pubsel.messages import UserError, gib, say
from pubsel.settings.datasets import UNREADABLE
from pubsel.settings.keys import Read

PARTS = ("train", "test")
SMALL = 2**26  # bytes
MANY = 10_000  # files, which take longer to open than their pixels to read
MOST = 2  # sets that a process holds for its next cell
CHUNK = 16  # images that a thread reads at a time
COPIED = 1024  # images that are copied at a time
RULES = "4"  # changes with the rules by which images are read, so that those of other rules are read again
T = TypeVar("T")
R = TypeVar("R")
NAMED = 2  # files that a message names


class Decoded(NamedTuple):
    """A user's data in the order that is used."""

    parts: Parts
    findings: tuple[Finding, ...]
    kept: Path | None  # the folder that the images are mapped from


class Rows(NamedTuple):
    """The examples of a listing as they were read, in its order."""

    decoded: Digest  # [n], of each image as it was decoded
    shaped: Digest  # [n], as it is kept
    readable: NDArray[np.bool_]  # [n]
    findings: tuple[Finding, ...]


class Order(NamedTuple):
    """The places of the examples of a listing in both parts: as listed, by their places."""

    rows: tuple[Tensor, Tensor]  # int64 [n], which example is at each place of train and test
    y: tuple[Tensor, Tensor]
    notes: tuple[str, ...]


class Reading(NamedTuple):
    """A listing, and whether files of it that cannot be read are left out."""

    name: str
    listed: Listed
    skip: bool


def open_decoded(name: str, listed: Listed, folder: Path, keep: bool, read: Read) -> Decoded:
    """Return a user's data, from `folder` if they are kept there and their files are the same. They are kept if
    `keep` is set and their images take SMALL or more; without `keep`, such images are mapped from a file without a
    name, which the system deletes when the process ends.

    UserError names the images that cannot be read, unless read.skip leaves them out; nothing is kept then, nor if the
    disk is full.
    """
    # a fingerprint of all that decides what is kept: the files, their labels, sides and people, and how they are read
    arrays = [listed.y.contiguous().numpy(), listed.test, listed.people]
    parts_of = (b"" if part is None else f"{part.shape}".encode() + part.tobytes() for part in arrays)
    rules = f"{RULES} {read.skip} {read.size} {read.channels} {read.bits} {listed.shuffle}"
    files = digest(("\0".join((rules, *listed.files, *listed.class_names)), *parts_of))

    # the same files in the same order are read once in a process, and kept on disk if they are many
    last = _LAST.pop((folder, keep), None)
    if last is None or last[0] != files:
        last = files, _opened(Reading(name, listed, read.skip), folder, files if keep else None)
    _LAST[folder, keep] = last
    while len(_LAST) > MOST:
        del _LAST[next(iter(_LAST))]

    # other files of the folder may have changed: notes and findings of the listing are those of now
    parts, findings, _ = last[1]
    parts = parts._replace(notes=listed.notes + parts.notes)
    return last[1]._replace(parts=parts, findings=listed.findings + findings)


_LAST: dict[tuple[Path, bool], tuple[str, Decoded]] = {}  # for the next cell of a sweep, with its fingerprint


def _opened(this: Reading, folder: Path, files: str | None) -> Decoded:
    """Return the data as `open_decoded` does. files: their fingerprint; None: they are not to be kept."""
    if files is not None and is_kept(folder):
        why = (
            "its files are not those that were kept" if stored.kept_listing(folder) != files else stored.damaged(folder)
        )
        if not why:
            return _read(this, folder)
        say(f"{this.name}: {why}: reading all images again")
        with contextlib.suppress(OSError):  # a folder that may only be read
            forget_decoded(folder, files)

    # most images have the shape of the first few; otherwise all are read once more
    images = this.listed.images()
    while True:
        try:
            return _opened_as(this, images, folder, files)
        except OtherShape as other:
            images = other.images
            say(f"{this.name}: most images are of another shape than the first few: reading all again")


class OtherShape(Exception):
    """The shape of most images is another one than expected. images: in that shape."""

    def __init__(self, images: Images) -> None:
        self.images = images


def _opened_as(this: Reading, images: Images, folder: Path, files: str | None) -> Decoded:
    """Return the data as `open_decoded` does, from the user's files. OtherShape if they are to be read once more."""
    # what is small is read anew each time, and leaves no copy
    n, size = len(this.listed.y), len(this.listed.y) * math.prod(images.shape)
    if size < SMALL and len(this.listed.names) < MANY:
        return _in_memory(this, images, folder)

    try:
        private_folder(folder.parent)
        # An archive may be made to fill the disk.
        if 2 * size > (left := shutil.disk_usage(folder.parent).free):
            raise UserError(
                f"{this.name}: its images take {gib(2 * size)} while they are read, and {gib(left)} are free in "
                f"{folder.parent}: make room, or set data_root=FOLDER"
            )
        if files is None:
            return _unnamed(this, images, folder)
        say(f"{this.name}: keeps {n:,} decoded images ({gib(size)}); `pubsel data forget {this.name}` deletes them")
        stored.keep_as(folder, this.name, lambda partial: _write(partial, this, images, folder), files, private=True)
    except OSError as error:
        say(f"{this.name}: {folder.parent}: {error.strerror or error}, so all images are read into memory")
        return _in_memory(this, images, folder)
    return _read(this, folder)


def is_kept(folder: Path) -> bool:
    """Return whether the folder exists and this user may read it."""
    try:
        return folder.exists()
    except PermissionError:  # of another user, who has the same data folder
        return False


def forget_decoded(folder: Path, but: str | None = None) -> None:
    """Delete a folder of decoded images and their features, unless its files have the fingerprint `but`."""
    with locked(folder.with_suffix(".lock"), str(folder)):
        remove_left(folder)
        folder.with_suffix(UNREADABLE).unlink(missing_ok=True)
        if not folder.exists() or stored.kept_listing(folder) == but:
            return

        # The names of files of features end in a digest of the images (pubsel.data.features).
        for known in folder.glob("*_features.json"):
            with contextlib.suppress(ValueError, KeyError):  # damaged
                for content in json.loads(known.read_text(encoding="utf-8"))["digests"].values():
                    for file in (folder.parents[1] / "features").glob(f"*-{content}.*"):
                        file.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _order(this: Reading, rows: Rows) -> Order:
    """Return the order that is used: the test part that was given, or a fifth of the units by their own hash; shuffled
    if the listing asks for it, or if a part is sorted by class."""
    listed, notes = this.listed, tuple[str, ...]()
    test = listed.test
    if test is None:
        unit = rows.decoded if listed.people is None else listed.people
        test, by = drawn(unit, TEST_FRACTION, "test"), "content" if listed.people is None else "person"
        many = int((test & rows.readable).sum())
        notes = (f"{Path(this.name).name}: {many} of {len(test)} images held out as the test set, by {by}",)

    # a part in the order of a class is brought into that of hashes, in which no example depends on another
    orders = list[Tensor]()
    for part, which in zip(PARTS, (~test, test), strict=True):
        at = np.flatnonzero(which & rows.readable)
        by_class = sorted_by_class(listed.y[torch.from_numpy(at)])
        if by_class or listed.shuffle:
            at = at[in_hash_order(rows.decoded[at], "order")]
            was = " was sorted by class," * by_class
            notes += (f"{this.name}: {part}{was} shuffled by content",)
        orders.append(torch.from_numpy(at))
    train, held = orders
    return Order((train, held), (listed.y[train], listed.y[held]), notes)


# Reading


def _decode(this: Reading, images: Images, put: Callable[[int, Tensor], object], folder: Path) -> Rows:
    """Put every image at its place in the listing. UserError names the files that cannot be read, unless they are to be
    left out; OtherShape if most have another one. The images are taken in the order of the listing, since an archive
    reads in no other one."""
    n = len(this.listed.y)
    rows = Rows(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool), ())
    errors = dict[int, Unreadable]()

    def read(chunk: range) -> int:
        for i in chunk:
            try:
                x, before = images.image(i)
            except Unreadable as error:
                errors[i] = error
                continue
            rows.shaped[i] = of_pixels(x.numpy())
            rows.decoded[i] = rows.shaped[i] if before is None else before
            put(i, x)
        return len(chunk)

    progress = ProgressLine(this.name, n)
    chunks = (range(first, min(n, first + CHUNK)) for first in range(0, n, CHUNK))
    for count in map_threads(read, chunks) if images.any_order else map(read, chunks):
        progress.add(count)
    rows.readable[list(errors)] = False
    unreadable = _unreadable(this, rows.readable, errors, folder)
    if other := images.again():
        raise OtherShape(other)
    return rows._replace(findings=images.findings() + unreadable)


def _unreadable(
    this: Reading, readable: NDArray[np.bool_], errors: dict[int, Unreadable], folder: Path
) -> tuple[Finding, ...]:
    """Return the finding on files that are left out. UserError with all of them if they are not to be; more than
    NAMED are listed in a file that only its owner may read."""
    if not errors:
        return ()
    first = [errors[i] for i in sorted(errors)]
    if not this.skip:
        if len(first) == 1:
            raise UserError(f"{first[0]}; skip=true leaves it out")
        names = this.listed.names or tuple(map(str, range(len(readable))))
        which = first_of((names[i] for i in sorted(errors)), NAMED)
        text = f"{this.name}: {len(first)} of {len(readable)} images cannot be read: {which}"
        file = folder.with_suffix(UNREADABLE)
        if memory.of_memory(this.name) is not None:  # of which nothing is kept
            raise UserError(f"{text}; skip=true leaves them out")
        with contextlib.suppress(UserError):
            write_whole(file, "".join(f"{error}\n" for error in first), private=True)
            text += f"; all of them: {file}"
        raise UserError(f"{text}; skip=true leaves them out")

    # a class that is left out whole would be missing without a word
    text = f"{Path(this.name).name}: {len(first)} of {len(readable)} images cannot be read and are left out"
    findings = [Finding("unreadable", WARNING, f"{text}: {first_of((error.name for error in first), NAMED)}")]
    y, names = this.listed.y, this.listed.class_names
    lost = [] if y.dim() == 2 else sorted(set(y.tolist()) - set(y[torch.from_numpy(readable)].tolist()))
    if lost:
        of = first_of(names[label] if names else label for label in lost)
        findings.append(Finding("class_lost", ERROR, f"{this.name}: no image of a class can be read: {of}"))
    return tuple(findings)


def map_threads(work: Callable[[T], R], parts: Iterable[T]) -> Iterator[R]:
    """Yield work(part) of each, in order, by as many threads as torch may use, each of which computes alone. A few
    parts ahead at most, or all results would wait in memory for a slow disk."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, parts)
        return

    # results in the order of the parts, whichever thread ends first
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for part in parts:
            waiting.append(pool.submit(work, part))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads to come take what was set last


def _in_memory(this: Reading, images: Images, folder: Path) -> Decoded:
    x = torch.empty((len(this.listed.y), *images.shape), dtype=torch.uint8)
    rows = _decode(this, images, x.__setitem__, folder)
    order = _order(this, rows)
    train, test = (Split(x[at], y) for at, y in zip(order.rows, order.y, strict=True))
    return _parts(this, Parts(train, test, order.notes), rows, order, None)


def _unnamed(this: Reading, images: Images, folder: Path) -> Decoded:
    """Return images mapped from files next to `folder` that have no name: the system frees their room when the process
    ends, however it ends."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder.parent)) for _ in PARTS]
        try:
            starts, rows, order = _write_images(files, this, images, folder)
            x = [
                mapped(file_map(file, start, (len(at), *images.shape), np.uint8))
                for file, start, at in zip(files, starts, order.rows, strict=True)
            ]
        except OSError as error:
            raise stored.full(this.name, folder.parent, error) from None

    train, test = (Split(*split) for split in zip(x, order.y, strict=True))
    return _parts(this, Parts(train, test, order.notes), rows, order, None)


def _write(partial: Path, this: Reading, images: Images, folder: Path) -> None:
    """Write what `_read` reads: what stored.read reads, the digests of each image as it was decoded and as it is kept,
    its row in the listing, and the findings."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((partial / f"{part}_images.npy").open("wb")) for part in PARTS]
        _, rows, order = _write_images(files, this, images, folder)

    for part, y, at in zip(PARTS, order.y, order.rows, strict=True):
        np.save(partial / f"{part}_labels.npy", y.numpy())
        np.save(partial / f"{part}_rows.npy", at.numpy())
        np.save(partial / f"{part}_decoded.npy", rows.decoded[at.numpy()])
        overlap.keep_digests(partial / f"{part}_digests.npz", rows.shaped[at.numpy()])
    (partial / "notes.json").write_text(json.dumps(order.notes), encoding="utf-8")
    (partial / "findings.json").write_text(json.dumps(rows.findings), encoding="utf-8")


def _write_images(
    files: Sequence[IO[bytes]], this: Reading, images: Images, folder: Path
) -> tuple[list[int], Rows, Order]:
    """Write the images of train and test to a npy file each; return where they begin, their rows and their order. Which
    side an image is on may depend on its content, so all are decoded into a file without a name first."""
    n, size = len(this.listed.y), math.prod(images.shape)
    with tempfile.TemporaryFile(dir=folder.parent) as all_images:
        all_images.truncate(n * size)

        def put(i: int, image: Tensor) -> None:
            left, offset = memoryview(image.contiguous().numpy().data).cast("B"), i * size
            while left:
                count = os.pwrite(all_images.fileno(), left, offset)
                left, offset = left[count:], offset + count

        rows = _decode(this, images, put, folder)
        order = _order(this, rows)
        x = file_map(all_images, 0, (n, *images.shape), np.uint8)
        starts = []
        for file, at in zip(files, order.rows, strict=True):
            stored.header(file, len(at), images.shape)
            starts.append(file.tell())
            for part in at.split(COPIED):
                file.write(x[part.numpy()].tobytes())
            file.flush()
    return starts, rows, order


def _read(this: Reading, folder: Path) -> Decoded:
    # the digests were kept with the images: to compute them is to read all images
    parts = stored.read(folder)
    shaped = [
        overlap.digests(split.x, kept=folder / f"{part}_digests.npz")
        for part, split in zip(PARTS, parts[:2], strict=True)
    ]
    with reading(folder, "delete it to have it prepared again"):
        at = [np.load(folder / f"{part}_rows.npy") for part in PARTS]
        decoded = [np.load(folder / f"{part}_decoded.npy") for part in PARTS]
        findings = json.loads((folder / "findings.json").read_text(encoding="utf-8"))

    # as they were when they were read, for all that the listing tells
    n = len(this.listed.y)
    rows = Rows(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool), ())
    for places, before, after in zip(at, decoded, shaped, strict=True):
        rows.decoded[places], rows.shaped[places], rows.readable[places] = before, after, True
    rows = rows._replace(findings=tuple(Finding(*values) for values in findings))
    train, test = (torch.from_numpy(places) for places in at)
    return _parts(this, parts, rows, Order((train, test), (parts.train.y, parts.test.y), ()), folder)


def _parts(this: Reading, parts: Parts, rows: Rows, order: Order, kept: Path | None) -> Decoded:
    """Return the parts with all that the listing tells, and what overlap.digests would otherwise compute."""
    # the images were hashed as they were read: a comparison need not read them again
    listed = this.listed
    for split, at in zip((parts.train, parts.test), order.rows, strict=True):
        overlap.remember(split.x, rows.shaped[at.numpy()])

    files = groups = None
    if listed.names:
        files = tuple(
            Files(tuple(listed.names[i] for i in at.tolist()), torch.from_numpy(rows.decoded[at.numpy()]))
            for at in order.rows
        )
    if listed.people is not None:
        groups = tuple(torch.from_numpy(listed.people[at.numpy()]) for at in order.rows)
    parts = Parts(parts.train, parts.test, parts.notes, files, listed.class_names, groups)  # type: ignore[arg-type]
    return Decoded(parts, rows.findings, kept)
