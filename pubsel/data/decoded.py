"""A user's own data: decoded once, by all cores, and then mapped from where that is kept.

<data folder>/decoded/<digest of the path>/ contains what pubsel.data.stored describes, and in train_decoded.npy and
test_decoded.npy int64 [n], the digest of each image as it was decoded. Only its owner may read it, and no name in it is
one of the user's. listed.txt is a fingerprint of the files, so that one that changes is noticed. Images that take less
than SMALL are read anew each time: that takes about a second, and leaves no second copy of them.
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
from torch import Tensor

from pubsel.data import overlap, stored
from pubsel.data.overlap import Digest, of_pixels
from pubsel.data.splits import Files, Images, Listed, Parts, Split, in_order, numbered
from pubsel.files import ProgressLine, digest, file_map, locked, mapped, private_folder, reading, remove_left
from pubsel.messages import UserError, gib, say

PARTS = ("train", "test")
SMALL = 2**26  # bytes
MOST = 2  # sets that a process holds for its next cell
CHUNK = 16  # images that a thread reads at a time
RULES = "1"  # changes with the rules by which images are read, so that those of other rules are read again
T = TypeVar("T")
R = TypeVar("R")
Put = Callable[[int, int, Tensor], object]  # part (0: train, 1: test), place in it, and image


class Decoded(NamedTuple):
    """A user's data in the order that is used."""

    parts: Parts
    kept: Path | None  # the folder that the images are mapped from


class Order(NamedTuple):
    """The places of the examples of a listing in both parts: as listed, by their places."""

    rows: tuple[Tensor, Tensor]  # int64 [n], which example is at each place of train and test
    y: tuple[Tensor, Tensor]
    notes: tuple[str, ...]


class Reading(NamedTuple):
    """A listing and the places that its images are read to."""

    name: str
    listed: Listed
    order: Order


def open_decoded(name: str, listed: Listed, folder: Path, keep: bool) -> Decoded:
    """Return a user's data, from `folder` if they are kept there and their files are the same. They are kept if
    `keep` is set and their images take SMALL or more; without `keep`, such images are mapped from a file without a
    name, which the system deletes when the process ends.

    UserError names an image that does not read; nothing is kept then, nor if the disk is full.
    """
    # the same files in the same order are read once in a process, and kept on disk if they are many
    order = _order(name, listed)
    files = _fingerprint(listed, order)
    last = _LAST.pop((folder, keep), None)
    if last is None or last[0] != files:
        last = files, _opened(Reading(name, listed, order), folder, files if keep else None)
    _LAST[folder, keep] = last
    while len(_LAST) > MOST:
        del _LAST[next(iter(_LAST))]

    # Only the listing says whose images they are: another pair.unit groups the same images in another way.
    parts, kept = last[1]
    if listed.people:
        train, test = ([listed.people[i] for i in rows.tolist()] for rows in order.rows)
        parts = parts._replace(groups=numbered(train, test))
    return Decoded(parts, kept)


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

    # what is small is read anew each time, and leaves no copy
    images = this.listed.images()
    n, size = len(this.listed.y), len(this.listed.y) * math.prod(images.shape)
    if size < SMALL:
        return _in_memory(this, images)

    try:
        private_folder(folder.parent)
        # An archive may be made to fill the disk.
        if size > (left := shutil.disk_usage(folder.parent).free):
            raise UserError(
                f"{this.name}: its images take {gib(size)} and {gib(left)} are free in {folder.parent}: make room, or "
                "set data_root=FOLDER"
            )
        if files is None:
            return _unnamed(this, images, folder.parent)
        say(f"{this.name}: keeps {n:,} decoded images ({gib(size)}); `pubsel data forget {this.name}` deletes them")
        stored.keep_as(folder, this.name, lambda partial: _write(partial, this, images), files, private=True)
    except OSError as error:
        say(f"{this.name}: {folder.parent}: {error.strerror or error}, so all images are read into memory")
        return _in_memory(this, images)
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
        if not folder.exists() or stored.kept_listing(folder) == but:
            return

        # The names of files of features end in a digest of the images (pubsel.data.features).
        for known in folder.glob("*_features.json"):
            with contextlib.suppress(ValueError, KeyError):  # damaged
                for content in json.loads(known.read_text(encoding="utf-8"))["digests"].values():
                    for file in (folder.parents[1] / "features").glob(f"*-{content}.*"):
                        file.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _order(name: str, listed: Listed) -> Order:
    """Return the order that is used: shuffled if the listing asks for it, or if a part is sorted by class."""
    # the rows are put in order in place of the images, which are not read yet
    test = torch.from_numpy(listed.test)
    parts = [(part, torch.arange(len(test))[mask]) for part, mask in (("train", ~test), ("test", test))]
    (train, train_notes), (held, held_notes) = (
        in_order(f"{name}: {part}", Split(rows, listed.y[rows]), listed.shuffle) for part, rows in parts
    )
    return Order((train.x, held.x), (train.y, held.y), train_notes + held_notes)


def _fingerprint(listed: Listed, order: Order) -> str:
    """Return a fingerprint of all that decides what is kept: the files, the labels and the order."""
    parts = (f"{tuple(part.shape)}".encode() + part.contiguous().numpy().tobytes() for part in (*order.rows, *order.y))
    return digest(("\0".join((RULES, *listed.files)), *parts))


# Reading


def _decode(this: Reading, images: Images, put: Put) -> tuple[tuple[Digest, Digest], ...]:
    """Put every image at its place; return for train and test the digests of each as it was decoded, and as it was put.
    The images are taken in the order of the listing, since an archive reads in no other one."""
    # where each example goes: which part, and which place in it
    order, n = this.order, len(this.listed.y)
    part, at = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for number, rows in enumerate(order.rows):
        part[rows.numpy()], at[rows.numpy()] = number, np.arange(len(rows))
    decoded, shaped = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)

    def read(chunk: range) -> int:
        for i in chunk:
            x, before = images.image(i)
            shaped[i] = of_pixels(x.numpy())
            decoded[i] = shaped[i] if before is None else before
            put(int(part[i]), int(at[i]), x)
        return len(chunk)

    progress = ProgressLine(this.name, n)
    chunks = (range(first, min(n, first + CHUNK)) for first in range(0, n, CHUNK))
    for count in map_threads(read, chunks) if images.any_order else map(read, chunks):
        progress.add(count)

    return tuple((decoded[rows.numpy()], shaped[rows.numpy()]) for rows in order.rows)


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


def _in_memory(this: Reading, images: Images) -> Decoded:
    x = [torch.empty((len(rows), *images.shape), dtype=torch.uint8) for rows in this.order.rows]
    digests = _decode(this, images, lambda part, at, image: x[part].__setitem__(at, image))
    train, test = (Split(*split) for split in zip(x, this.order.y, strict=True))
    return Decoded(_parts(this, Parts(train, test, images.notes), digests), None)


def _unnamed(this: Reading, images: Images, folder: Path) -> Decoded:
    """Return images mapped from files in `folder` that have no name: the system frees their room when the process ends,
    however it ends."""
    # a file without a name is gone with the process, however it ends
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in this.order.rows]
        try:
            starts, digests = _write_images(files, this, images)
            x = [
                mapped(file_map(file, start, (len(rows), *images.shape), np.uint8))
                for file, start, rows in zip(files, starts, this.order.rows, strict=True)
            ]
        except OSError as error:
            raise stored.full(this.name, folder, error) from None

    train, test = (Split(*split) for split in zip(x, this.order.y, strict=True))
    return Decoded(_parts(this, Parts(train, test, images.notes), digests), None)


def _write(partial: Path, this: Reading, images: Images) -> None:
    """Write what stored.read reads, and the digests of each image as it was decoded and as it is kept."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((partial / f"{part}_images.npy").open("wb")) for part in PARTS]
        _, digests = _write_images(files, this, images)

    for part, y, (decoded, shaped) in zip(PARTS, this.order.y, digests, strict=True):
        np.save(partial / f"{part}_labels.npy", y.numpy())
        np.save(partial / f"{part}_decoded.npy", decoded)
        overlap.keep_digests(partial / f"{part}_digests.npz", shaped)
    (partial / "notes.json").write_text(json.dumps(images.notes), encoding="utf-8")


def _write_images(
    files: Sequence[IO[bytes]], this: Reading, images: Images
) -> tuple[list[int], tuple[tuple[Digest, Digest], ...]]:
    """Write the images of train and test to a npy file each; return where the images begin, and what `_decode` does."""
    # the headers come first: images are then written in any order, at their places
    for file, rows in zip(files, this.order.rows, strict=True):
        stored.header(file, len(rows), images.shape)
        file.flush()
    starts, size = [file.tell() for file in files], math.prod(images.shape)

    def put(part: int, at: int, image: Tensor) -> None:
        left, offset = memoryview(image.contiguous().numpy().data).cast("B"), starts[part] + at * size
        while left:
            count = os.pwrite(files[part].fileno(), left, offset)
            left, offset = left[count:], offset + count

    return starts, _decode(this, images, put)


def _read(this: Reading, folder: Path) -> Decoded:
    # the digests were kept with the images: to compute them is to read all images
    parts = stored.read(folder)
    shaped = [
        overlap.digests(split.x, kept=folder / f"{part}_digests.npz")
        for part, split in zip(PARTS, parts[:2], strict=True)
    ]
    with reading(folder, "delete it to have it prepared again"):
        decoded = [np.load(folder / f"{part}_decoded.npy") for part in PARTS]
    return Decoded(_parts(this, parts, tuple(zip(decoded, shaped, strict=True))), folder)


def _parts(this: Reading, parts: Parts, digests: tuple[tuple[Digest, Digest], ...]) -> Parts:
    """Return the parts with all that the listing tells, and what overlap.digests would otherwise compute."""
    # the images were hashed as they were read: a comparison need not read them again
    for split, (_, shaped) in zip((parts.train, parts.test), digests, strict=True):
        overlap.remember(split.x, shaped)

    files = None
    if this.listed.names:
        files = tuple(
            Files(tuple(this.listed.names[i] for i in rows.tolist()), torch.from_numpy(decoded))
            for rows, (decoded, _) in zip(this.order.rows, digests, strict=True)
        )
    notes = this.listed.notes + parts.notes + this.order.notes
    return Parts(parts.train, parts.test, notes, files, this.listed.class_names)  # type: ignore[arg-type]
