"""The clusters of a pool and the cluster of each of its examples, computed once, shard by shard, and kept.

DATA_ROOT/pools/KEY/ contains clusters.npz; and for each shard nearest_NAME.npy, int16 [n], the cluster of each example
(-1: its features are not finite, so it is in none), with nearest_NAME.json, which is written last: a shard that has it
is not read again. KEY depends on the path, size and time of every shard, and on the rules of clustering, so that other
files never meet what was computed before. All of it is of public data alone, and by fixed random numbers: it does not
depend on which run, process or machine computes it first.
"""

import io
import json
import re
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pubsel.data.embeddings import Embeddings, Part, Shard
from pubsel.files import DAMAGE, ProgressLine, digest, file_digest, locked, reading, write_whole
from pubsel.messages import UserError, cannot_write, say
from pubsel.privacy.randomness import stream
from pubsel.selection import pool
from pubsel.selection.pool import Clusters
from pubsel.settings.identity import digest_of

RULES = "1"  # changes with the rules of clustering
NONE = -1  # the cluster of an example whose features are not finite

Say = Callable[[str], None]
Nearest = NDArray[np.int16]


def shards_of(parts: Sequence[Part]) -> list[Part]:
    """Return the shards of all parts, one after the other; a part that has none is one."""
    return [shard for part in parts for shard in (part.shards if isinstance(part, Embeddings) else (part,))]


def assignment_folder(parts: Sequence[Part], data_root: str | Path) -> Path | None:
    """Return where the clusters and assignments of a pool are kept; None without embeddings on disk: what is in memory
    is assigned at once."""
    if not any(isinstance(part, Embeddings) for part in parts):
        return None
    # the key covers all that decides an assignment, so that none is stale
    rules = [RULES, pool.SAMPLE, pool.MOST_CLUSTERS, pool.EACH, pool.DIRECTIONS, pool.TYPICAL]
    return Path(data_root).expanduser() / "pools" / digest_of({"shards": stamps_of(parts), "rules": rules})


def stamps_of(parts: Sequence[Part]) -> list[str]:
    """Return what tells a pool from another one, for each shard."""
    return [_stamp(shard) for shard in shards_of(parts)]


def _stamp(shard: Part) -> str:
    """Return what tells a shard from another one; of features in memory a digest of them."""
    if isinstance(shard, Shard):
        return shard.stamp
    return digest(f"{tuple(block.shape)}".encode() + block.contiguous().numpy().tobytes() for block in shard.blocks())


def clusters_kept(parts: Sequence[Part], kept: Path | None) -> Clusters:
    """Return the clusters of a pool: those in the folder `kept`, or computed of a sample and then kept there. None:
    they are not kept. UserError if two parts are not equally wide, or the file is damaged."""
    widths = {next(part.blocks()).shape[1] for part in parts if part.n}
    if len(widths) > 1:
        raise UserError(
            f"pair.pool: its sets have {' and '.join(map(str, sorted(widths)))} features: take those of one network"
        )
    if kept is None:
        return _clusters(parts)

    # What is there is read without the lock: the folder may be read-only.
    file = kept / "clusters.npz"
    if not file.exists():
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(f"to {kept.parent}", error) from None
        with locked(kept / "clusters.lock", "pool", private=False):
            if not file.exists():
                content = io.BytesIO()
                clusters = _clusters(parts)
                np.savez(content, **clusters._asdict(), digest=f"{kept.name} {_digest(clusters)}")
                write_whole(file, content.getvalue())

    damage = (*DAMAGE, KeyError, zipfile.BadZipFile)
    with reading(file, "delete it to have it computed again", damage), np.load(file) as values:
        clusters = Clusters(*(values[name] for name in Clusters._fields))
        if "digest" in values and str(values["digest"]) != f"{kept.name} {_digest(clusters)}":
            raise ValueError("it is not what was written")
    return clusters._replace(shares=[int(share) for share in clusters.shares])


def _clusters(parts: Sequence[Part]) -> Clusters:
    sample = pool.sample_of(parts, stream("pool", "sample"))
    finite = sample.isfinite().all(1)
    return pool.clusters_of(sample if finite.all() else sample[finite])


def nearest_of(parts: Sequence[Part], clusters: Clusters, kept: Path | None, say: Say) -> Nearest:
    """Return the cluster of each example of a pool, [n], part after part: read from `kept` where it is there, otherwise
    computed, and kept unless `kept` is None. NONE: of none.

    The order of examples is that of the parts and their shards. It takes 2 bytes an example, and memory for a block."""
    progress = ProgressLine("pool", sum(part.n for part in parts), say, "examples")
    return np.concatenate([nearest_in(shard, clusters, kept, progress)[0] for shard in shards_of(parts)])


def nearest_in(shard: Part, clusters: Clusters, kept: Path | None, progress: ProgressLine) -> tuple[Nearest, bool]:
    """Return the cluster of each example of one shard, as `nearest_of` does, and whether it was computed now."""
    if kept is None:
        return _nearest(shard, clusters, progress), True

    # its name has a digest, since shards of two folders may have the same name
    name = re.sub(r"\W+", "_", shard.path.stem) + "_" if isinstance(shard, Shard) else ""
    file, key = kept / f"nearest_{name}{digest_of({'shard': _stamp(shard)})}.npy", _digest(clusters)
    if (before := _read(file, shard, key)) is not None:
        progress.add(shard.n, at_once=True)
        return before, False

    with locked(file.with_suffix(".lock"), "pool", private=False):
        if (before := _read(file, shard, key)) is not None:  # another process computed it meanwhile
            progress.add(shard.n, at_once=True)
            return before, False

        # The array first, then the record, which says that it is whole and of which clusters.
        began = time.monotonic()
        nearest = _nearest(shard, clusters, progress)
        content = io.BytesIO()
        np.save(content, nearest)
        write_whole(file, content.getvalue())
        seconds = round(time.monotonic() - began, 1)
        record = {"n": shard.n, "none": int((nearest == NONE).sum()), "clusters": key, "seconds": seconds}
        record |= {"digest": file_digest(file, file.name)}
        write_whole(file.with_suffix(".json"), json.dumps(record, indent=1, sort_keys=True) + "\n")
    return nearest, True


def _nearest(shard: Part, clusters: Clusters, progress: ProgressLine) -> Nearest:
    nearest, at = np.full(shard.n, NONE, dtype=np.int16), 0
    for block in shard.blocks():
        finite = block.isfinite().all(1)
        if finite.any():
            rows = np.flatnonzero(finite.numpy()) + at
            nearest[rows] = clusters.nearest(block if finite.all() else block[finite])
        at += len(block)
        progress.add(len(block))
    return nearest


def _read(file: Path, shard: Part, key: str) -> Nearest | None:
    """Return what was kept of a shard; None if it is not there, or of other clusters."""
    try:
        record = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        if (record["clusters"], record["n"]) != (key, shard.n):
            return None
        if record["digest"] != file_digest(file, file.name):
            say(f"{file} is not what was written: it is computed again")
            return None
        nearest: Nearest = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError, KeyError, TypeError):  # whatever is wrong, compute it again
        return None
    return nearest if nearest.shape == (shard.n,) and nearest.dtype == np.int16 else None


def _digest(clusters: Clusters) -> str:
    return digest(np.ascontiguousarray(value, dtype=np.float64).tobytes() for value in clusters)
