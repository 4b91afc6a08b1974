"""Images that are on two sides: public and private, test and training, or in two public sets.

Two images are the same if all their pixels are, either as they were decoded (a file at its own size, an array as it
is) or in the shape of the private images. One that another program resized, cut or compressed again is not found: if
that is to be expected of named sets, conf/dataset says `shares_images_with`."""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pubsel.data.convert import CHUNK, Shape, to_shape
from pubsel.files import in_parts, whole

Digest = NDArray[np.int64]  # [n]: 64 bits of blake2b for each image; chance makes two of a million equal once in 10^7


class Digests(NamedTuple):
    """The digests by which n images are recognised."""

    own: Digest  # as they were decoded
    shaped: Digest  # in the shape of the private images


def of_pixels(image: NDArray[np.uint8]) -> int:
    """Return 64 bits, signed, of one image [channels, height, width] and its shape."""
    shape = repr(image.shape).encode()[:16]
    value = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=8, person=shape)
    return int.from_bytes(value.digest(), signed=True)


def digests(x: Tensor, shape: Shape | None = None, kept: Path | None = None) -> Digest:
    """Return the digests of images [n, ...], or of these in another `shape`. A process computes them once for a tensor.
    kept: a file that they are kept in for the next process, and read from as long as the images' own file, next to it,
    is the same."""

    def computed() -> Digest:
        parts = (part if shape is None else to_shape(part, shape) for part in in_parts(x, CHUNK))
        return np.array([of_pixels(image) for part in parts for image in part.numpy()], dtype=np.int64)

    # Only digests at the images' own shape are kept: another shape depends on the private set.
    return _once(x, shape, computed, kept if shape is None else None)


def without_colour(x: Tensor, values: Digest, kept: Path | None = None) -> Digest:
    """Return the digests of images [n, channels, height, width] with those of one channel for the images whose channels
    are all equal, as a file has them. values: their digests as they are; kept: as of `digests`."""

    def computed() -> Digest:
        equal = torch.cat([(part == part[:, :1]).flatten(1).all(1) for part in in_parts(x, CHUNK)])
        result = values.copy()
        for i in equal.nonzero().flatten().tolist():
            result[i] = of_pixels(x[i, :1].numpy())
        return result

    return values if x.shape[1] == 1 else _once(x, "without colour", computed, kept)


def _once(x: Tensor, key: Shape | str | None, computed: Callable[[], Digest], kept: Path | None) -> Digest:
    """Return digests of images that a process computes once for a tensor and a key, and keeps for the next one."""
    known: dict[Shape | str | None, Digest] = _KNOWN.setdefault(x, {})
    if key not in known and kept is not None:
        with contextlib.suppress(Exception), np.load(kept, allow_pickle=False) as file:  # if it is damaged, hash again
            before: Digest = file["digests"]
            if file["stamp"].tolist() == _mark(kept, before):
                known[key] = before
    if key not in known:
        known[key] = computed()
        if kept is not None:
            keep_digests(kept, known[key])
    return known[key]


def remember(x: Tensor, values: Digest) -> None:
    """Store the digests of images [n, ...] as they are, which `digests` then does not compute."""
    _KNOWN.setdefault(x, {})[None] = values


_KNOWN = WeakTensorKeyDictionary()  # for the next cell of a sweep


def among(these: Digests, *those: Digests) -> NDArray[np.bool_]:
    """Return which of n images are also in one of `those`: bool [n]."""
    shared = np.zeros(len(these.own), dtype=bool)
    for other in those:
        shared |= np.isin(these.own, other.own) | np.isin(these.shaped, other.shaped)
    return shared


def by_content(these: Digests, share: float, seed: int) -> NDArray[np.bool_]:
    """Return about a share of n images, bool [n]: each is in or out by its own pixels and a seed, so equal ones are
    together."""
    salt = b"held out" + (seed.to_bytes(8, "big") if seed else b"")
    values = (hashlib.blake2b(int(value).to_bytes(8, signed=True), digest_size=8, salt=salt) for value in these.shaped)
    return np.array([int.from_bytes(value.digest()) < share * 2**64 for value in values], dtype=bool)


def rows(these: Digests, which: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Digests:
    """Return the digests of some of the images."""
    return Digests(these.own[which], these.shaped[which])


def joined(parts: Sequence[Digests]) -> Digests:
    """Return the digests of several sets as those of one."""
    return Digests(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def file_state(images: Path) -> tuple[int, ...]:
    """Return time, size and inode of a file: they differ for another file, or another state of it."""
    stat = images.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _mark(kept: Path, values: Digest) -> list[int]:
    """Return a fingerprint of digests and of the file of their images."""
    images = kept.with_name(f"{kept.name.partition('_')[0]}_images.npy")
    of_values = hashlib.blake2b(values.tobytes(), digest_size=8)
    return [*file_state(images), int.from_bytes(of_values.digest(), signed=True)]


def keep_digests(kept: Path, values: Digest) -> None:
    """Keep digests next to the images' own file, for `digests`, if that is possible."""
    # A folder that cannot be written to, or a full disk: hashed again next time.
    with contextlib.suppress(OSError), whole(kept) as partial, partial.open("wb") as file:
        np.savez(file, stamp=np.array(_mark(kept, values)), digests=values)
