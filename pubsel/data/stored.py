"""Images of a named set at the size of conf/dataset: read once from its original files, kept on disk, then mapped.

A folder (settings.datasets.kept_folder) contains train_images.npy and test_images.npy, uint8 [n, channels, height,
width], train_labels.npy and test_labels.npy, notes.json, and listed.txt, what the files were (`fingerprint`); of a set
that tells who its images are of, also train_patient.npy and test_patient.npy, or whatever it calls them. It is
written image by image under another name, then renamed: it is there whole or not at all, and neither writing nor
reading takes the memory of all images. written.json has a digest of each file (`damaged`)."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from pubsel.data.convert import Shape
from pubsel.data.findings import first_of
from pubsel.data.splits import Listing, Parts, Split, Unread, Unreadable, numbered
from pubsel.files import ProgressLine, digest, file_digest, locked, mapped, npy_map, unreadable, whole
from pubsel.messages import UserError, cannot_write, limit, say

NAMED = 3  # corrupt images that a note names
WRITTEN = "written.json"  # the digest of each other file of a folder, by its name
OWN = "_digests.npz"  # how names of files end that may be written again (pubsel.data.overlap), with their own digest


def fingerprint(parts: Parts | Listing) -> str:
    """Return a fingerprint of the names and labels of all image files, in their order; empty if images are no files of
    their own, which come all at once."""
    train, test = parts.train, parts.test
    if not (isinstance(train, Unread) and isinstance(test, Unread) and (train.names or test.names)):
        return ""

    content = (("\0".join((str(len(part.y)), *part.names)), part.y.contiguous().numpy()) for part in (train, test))
    return digest(itertools.chain.from_iterable(content))


def kept_listing(folder: Path) -> str:
    """Return the fingerprint of what was kept in a folder; empty if there is none."""
    file = folder / "listed.txt"
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def damaged(folder: Path) -> str:
    """Return why a folder is not what was written, for a message; empty if it is. A process reads it once for that."""
    try:
        digests = json.loads((folder / WRITTEN).read_text(encoding="utf-8"))
        other = [name for name, value in digests.items() if file_digest(folder / name, folder.name) != value]
        if not other and {"train_images.npy", "train_labels.npy", "listed.txt"} <= digests.keys():
            return ""
        return f"{folder / (other or [WRITTEN])[0]} is not what was written"
    except FileNotFoundError as error:
        return f"{error.filename} is not there"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{folder} cannot be read ({error})"


def keep_images(folder: Path, name: str, listing: Listing, shape: Shape, skip: bool, files: str = "") -> None:
    """Read all images into `folder`, unless another process has done so meanwhile: a second one waits. files: their
    fingerprint; images that were kept of others are replaced.

    skip: leave out corrupt images, with a note and a line on stderr; Unreadable names the first one otherwise.
    PermissionError, or another OSError, if the folder cannot be made; UserError if the disk is full.
    """

    def write(partial: Path) -> None:
        # notes are written last, since only reading the images shows which are corrupt
        train = _write_part(partial, name, "train", listing, shape, skip)
        test = _write_part(partial, name, "test", listing, shape, skip)
        (partial / "notes.json").write_text(json.dumps(listing.notes + train + test), encoding="utf-8")

    keep_as(folder, name, write, files)


def keep_as(folder: Path, name: str, write: Callable[[Path], object], files: str, private: bool = False) -> None:
    """Make `folder` by write(a folder to write to), as `keep_images` does. private: only its owner may read it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), name, private):
        if folder.exists() and kept_listing(folder) == files and not damaged(folder):
            return
        try:
            with whole(folder, private, folder=True) as partial:
                write(partial)
                (partial / "listed.txt").write_text(files, encoding="utf-8")
                written = [file for file in partial.iterdir() if not file.name.endswith(OWN)]
                digests = {file.name: file_digest(file, folder.name) for file in written}
                (partial / WRITTEN).write_text(json.dumps(digests), encoding="utf-8")

                # A folder of other files goes; processes that have mapped its images keep them.
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise full(name, folder.parent, error) from None


def full(name: str, folder: Path, error: OSError) -> UserError:
    """Return the error of images that cannot be written to a folder."""
    return cannot_write(f"the images of {name} to {folder}", error)


def _write_part(folder: Path, name: str, part: str, listing: Listing, shape: Shape, skip: bool) -> tuple[str, ...]:
    """Write the files of a part; return the notes on it."""
    unread: Unread = getattr(listing, part)
    with (folder / f"{part}_images.npy").open("wb") as file:
        header(file, len(unread.y), shape)
        kept, notes = _each(f"{name} {part}", unread, skip, lambda _, image: file.write(image.numpy().tobytes()))
        file.seek(0)  # numpy pads a header so that it is as long for fewer images
        header(file, len(kept), shape)
    np.save(folder / f"{part}_labels.npy", unread.y[kept].numpy())
    if unread.groups:
        np.save(folder / f"{part}_{listing.unit}.npy", np.asarray(unread.groups, dtype=str)[kept])
    return notes


def header(file: IO[bytes], n: int, shape: Shape) -> None:
    """Write the start of a npy file of uint8 [n, *shape]."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (n, *shape)}
    np.lib.format.write_array_header_1_0(file, header)


def read(folder: Path, unit: str | None = None) -> Parts:
    """Return the parts that `keep_images` wrote. The images are memory-mapped, copy-on-write. unit: the set's name for
    people. UserError if a file is damaged, or does not name the people."""
    people: list[list[str]] = []
    try:
        if unit:
            people = [np.load(folder / f"{part}_{unit}.npy").tolist() for part in ("train", "test")]
        train, test = (
            Split(
                mapped(npy_map(folder / f"{part}_images.npy")),
                torch.from_numpy(np.load(folder / f"{part}_labels.npy")),
            )
            for part in ("train", "test")
        )
        notes = tuple(json.loads((folder / "notes.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, EOFError) as error:
        if unit and str(getattr(error, "filename", "")).endswith(f"_{unit}.npy") and not limit(error):
            raise UserError(
                f"unit={unit}: {folder} does not tell the {unit} of an image: delete it to have it prepared again"
            ) from None
        raise unreadable(folder, error, "delete it to have it prepared again") from None

    # a map is as long as its header says, so the two files may disagree
    if len(train.x) != len(train.y) or len(test.x) != len(test.y):
        raise UserError(f"{folder}: not as many labels as images: delete it to have it prepared again")
    return Parts(train, test, notes, groups=numbered(*people) if people else None)


def in_memory(name: str, listing: Listing, shape: Shape, skip: bool) -> Parts:
    """Read all images in memory, for a data folder that cannot be written to."""
    people: list[list[str]] = []

    def loaded(part: str, unread: Unread) -> tuple[Split, tuple[str, ...]]:
        x = torch.empty((len(unread.y), *shape), dtype=torch.uint8)
        kept, notes = _each(f"{name} {part}", unread, skip, x.__setitem__)
        people.append([unread.groups[i] for i in kept] if unread.groups else [])
        return Split(x[: len(kept)], unread.y[kept]), notes

    train, train_notes = loaded("train", listing.train)
    test, test_notes = loaded("test", listing.test)
    groups = numbered(*people) if listing.unit else None
    return Parts(train, test, listing.notes + train_notes + test_notes, groups=groups)


def _each(
    what: str, unread: Unread, skip: bool, put: Callable[[int, Tensor], object]
) -> tuple[list[int], tuple[str, ...]]:
    """Put every image at its row, one after another; return the places of those that were put, and a note on the
    others."""
    kept: list[int] = []
    corrupt: list[str] = []
    n = len(unread.y)
    progress = ProgressLine(what, n)

    for i in range(n):
        try:
            put(len(kept), unread.image(i))
            kept.append(i)
        except Unreadable as error:
            if not skip:
                raise
            corrupt.append(error.name)
        progress.add(1)

    # The note goes into the record, since another copy of the set may have these images.
    if not corrupt:
        return kept, ()
    if not kept:
        raise UserError(f"{what}: none of {n} images is readable, the first {corrupt[0]}: unpack the archive again")

    note = f"{what}: {len(corrupt)} of {n:,} images are corrupt and were skipped: {first_of(corrupt, NAMED)}"
    say(note)
    return kept, (note,)
