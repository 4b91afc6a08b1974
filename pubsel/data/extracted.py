"""Features of public images, computed as shards of a folder of embeddings (pubsel.data.embeddings).

Shard i of s has the features of every image whose place is between i n / s and (i + 1) n / s, in the order of the
files: OUT/img_emb_0003.npy, float16 [n, d]. Next to it is its record, img_emb_0003.json, which is written last: a shard
that has one is not computed again. So shards can be computed by any number of processes and machines, in any order, and
the same command resumes what was interrupted.
"""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data import folders, intact, open_dataset
from pubsel.data.decoded import side_by_side
from pubsel.data.features import CPU_BATCH, Extractor, prepared
from pubsel.data.given import Raw, given
from pubsel.data.splits import Unreadable
from pubsel.files import Progress, locked, plain, unreadable, whole, write_whole
from pubsel.messages import UsageError, UserError, cannot_write
from pubsel.settings.identity import is_path

GPU_BATCH = 64  # images at a time; two batches for each thread wait in memory

Say = Callable[[str], None]
Rows = NDArray[np.float16]


class Part(NamedTuple):
    """Part number `shard` of `shards` of the images of `name`, which go to the folder `to`."""

    name: str
    to: Path
    shard: int
    shards: int

    @property
    def file(self) -> Path:
        """Return the file of the features."""
        return self.to / f"img_emb_{self.shard:0{max(4, len(str(self.shards - 1)))}}.npy"

    def places(self, n: int) -> range:
        """Return which of n images they are."""
        return range(self.shard * n // self.shards, (self.shard + 1) * n // self.shards)


class Listed(NamedTuple):
    """Public images, each read when it is asked for: n of them, and those at some places in turn."""

    n: int
    at: Callable[[range], Iterator[Raw]]


def listed(name: str, data_root: str, download: bool) -> Listed:
    """Return the images of a path: a folder at any depth, a CSV, an npz; or the training and then the test images of a
    named set."""
    if is_path(name):
        parts = given(name)

        def at(places: range) -> Iterator[Raw]:
            return islice((raw for part in parts for _, raw in part.each()), places.start, places.stop)

        return Listed(sum(part.n for part in parts), at)
    source = open_dataset(name, data_root, download)
    train, test = source.train.x, source.test.x
    return Listed(
        len(train) + len(test), lambda places: (train[i] if i < len(train) else test[i - len(train)] for i in places)
    )


def extract(part: Part, images: Listed, extractor: Extractor, say: Say) -> bool:
    """Compute a shard, and return whether it was: a shard that has its record is left as it is.

    UserError if another shard is of other images, of another network or another number of shards; if no image is
    readable; or if features are not finite in float16.
    An image that is not readable has a row that is not a number, so that the others keep their places.
    """
    if extractor.prepare is None:
        raise UsageError("model: shards are features of a network: take one such as model=mobilenetv2")
    if part.shards > images.n:
        raise UsageError(f"shards={part.shards}: {part.name} has {images.n} images: set a smaller number of shards")

    # Otherwise shards of two networks, or of two ways to divide the images, would be one pool.
    about = {"images": part.name, "of": images.n, "shards": part.shards}
    about |= {"network": extractor.key, "weights": extractor.weights}
    part.to.mkdir(parents=True, exist_ok=True)
    _check_others(part, about)
    if _is_there(part):
        return False

    with locked(part.file.with_suffix(".lock"), part.file.name, private=False):
        if _is_there(part):
            return False

        began = time.monotonic()
        n, unreadable = _written(part, images, extractor, say)
        seconds = round(time.monotonic() - began, 1)
        record = about | {"shard": part.shard, "n": n, "unreadable": unreadable, "seconds": seconds}
        record |= {"digest": intact.digest(part.file).hex()}
        write_whole(part.file.with_suffix(".json"), json.dumps(record, indent=1, sort_keys=True) + "\n")
    return True


def _is_there(part: Part) -> bool:
    return part.file.exists() and part.file.with_suffix(".json").exists()


def _check_others(part: Part, about: dict[str, Any]) -> None:
    """Raise UserError if the folder has a shard of something else."""
    for path in sorted(part.to.glob("img_emb_*.json")):
        try:
            record = json.loads(plain(path).read_text(encoding="utf-8"))
            differs = [key for key, value in about.items() if record[key] != value]
        except OSError as error:
            raise unreadable(path, error, "fix its permissions") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is no record of a shard: delete it and {path.stem}.npy") from None
        if differs:
            raise UserError(f"{path} is of another extraction ({', '.join(differs)}): set to= to another folder")


def _written(part: Part, images: Listed, extractor: Extractor, say: Say) -> tuple[int, int]:
    """Write the features of a shard, whole or not at all; return how many images it has, and how many of them are not
    readable."""
    places = part.places(images.n)
    try:
        with whole(part.file) as partial, partial.open("wb") as file:
            absent = _stream(file, part, _batches(images.at(places), extractor), len(places), say)
    except OSError as error:
        raise cannot_write(part.file, error) from None
    return len(places), absent


def _stream(file: IO[bytes], part: Part, batches: Iterator[Rows], n: int, say: Say) -> int:
    """Write n rows as a npy file, a batch at a time, with lines about the progress; return how many are of images that
    are not readable."""
    progress, unreadable = Progress(part.file.name, n, say), 0

    for rows in batches:
        # The width of the features is known with the first batch.
        if not progress.done:
            header = {"descr": "<f2", "fortran_order": False, "shape": (n, rows.shape[1])}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(rows.tobytes())

        unreadable += int(np.isnan(rows[:, 0]).sum())
        progress.add(len(rows))

    if unreadable == n:
        raise UserError(
            f"{part.name}: none of the {n} images of {part.file.name} is readable: unpack the archive again"
        )
    if unreadable:
        say(f"{part.file.name}: {unreadable:,} of {n:,} images are not readable: their rows are not numbers")
    return unreadable


def _batches(each: Iterator[Raw], extractor: Extractor) -> Iterator[Rows]:
    """Yield features of images, float16 [b, d], in their order. On a CPU each thread takes a batch; for a GPU all of
    them read."""
    on_cpu = extractor.device.type == "cpu"
    size = CPU_BATCH if on_cpu else GPU_BATCH
    chunks = iter(lambda: list(islice(each, size)), list[Raw]())
    if on_cpu:
        return side_by_side(lambda chunk: _features(_read(chunk, extractor), extractor), chunks)
    return (_features(batch, extractor) for batch in side_by_side(lambda chunk: _read(chunk, extractor), chunks))


def _read(chunk: list[Raw], extractor: Extractor) -> tuple[Tensor, list[int]]:
    """Return images as a network takes them, [b, c, h, w], each brought to its size by itself, since they are of many
    sizes; and the places of those that are not readable, which are black."""
    how = extractor.prepare
    assert how is not None
    images = [_image(raw) for raw in chunk]
    black = torch.zeros(len(how.mean), how.size, how.size, dtype=torch.uint8)
    inputs = [prepared((black if x is None else x)[None], how) for x in images]
    x = torch.cat(inputs).contiguous(memory_format=torch.channels_last)
    return x, [i for i, image in enumerate(images) if image is None]


@torch.no_grad()
def _features(batch: tuple[Tensor, list[int]], extractor: Extractor) -> Rows:
    """Return features of a batch of `_read`, float16 [b, d]; not numbers for an image that is not readable."""
    x, unreadable = batch
    rows = extractor.net(x.to(extractor.device)).flatten(1).float().cpu().numpy()
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float16)
    if not np.isfinite(rows).all():
        raise UserError("features are not finite in float16: check model.backbone and its checkpoint")
    rows[unreadable] = np.nan
    return rows


def _image(raw: Raw) -> Tensor | None:
    """Return an image at its own size, uint8 [c, h, w]; None if its file is damaged."""
    if isinstance(raw, Tensor):
        return raw
    assert isinstance(raw, Path)
    try:
        mode, (height, width) = folders.head(raw)
        return folders.read_images([raw], (1 if mode in folders.GREY else 3, height, width))[0]
    except Unreadable:
        return None
