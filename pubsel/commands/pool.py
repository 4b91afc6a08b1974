"""`pubsel pool`: clusters of a pool of public embeddings, and the cluster of each, by shards."""

import time

from pubsel.cell import use_threads
from pubsel.data.embeddings import open_embeddings
from pubsel.files import ProgressLine
from pubsel.messages import UsageError, duration, say
from pubsel.selection import assigned
from pubsel.settings.keys import PoolConfig


def run(settings: PoolConfig) -> str:
    """Compute the clusters of a pool, and the cluster of each embedding of one shard or of all, unless that was done
    before; return a line about it. UsageError without a pool, or for a shard that it lacks."""
    use_threads(settings.threads)
    if not settings.pool:
        raise UsageError("pubsel pool pool=[FOLDER,...], of embeddings")

    parts = [open_embeddings(name) for name in settings.pool]
    shards = assigned.shards_of(parts)
    if settings.shard is not None and settings.shard >= len(shards):
        raise UsageError(f"shard={settings.shard}: the pool has {len(shards)} shards, 0 to {len(shards) - 1}")

    began = time.monotonic()
    kept = assigned.assignment_folder(parts, settings.data_root)
    clusters = assigned.clusters_kept(parts, kept)
    requested = shards if settings.shard is None else [shards[settings.shard]]
    progress = ProgressLine("pool", sum(shard.n for shard in requested), say, "examples")
    new = sum(assigned.nearest_in(shard, clusters, kept, progress)[1] for shard in requested)

    n, which = progress.n, "all" if settings.shard is None else f"shard {settings.shard} of"
    return (
        f"pool: {len(clusters.centres)} clusters; {n:,} embeddings of {which} {len(shards)} shards assigned, "
        f"{len(requested) - new} of {len(requested)} before, in {duration(time.monotonic() - began)}; kept in {kept}"
    )
