"""`pubsel pool`: clusters of a pool of public embeddings, and features of public images as such a pool; by shards."""

import time
from pathlib import Path

from pubsel.cell import choose_device, use_threads
from pubsel.data import extracted
from pubsel.data.embeddings import open_embeddings
from pubsel.data.features import load_backbone
from pubsel.files import Progress
from pubsel.messages import UsageError, duration, say
from pubsel.selection import assigned
from pubsel.settings import outputs
from pubsel.settings.keys import PoolConfig


def run(settings: PoolConfig) -> str:
    """Do what `settings` ask for, unless it was done before, and return a line about it. UsageError if they ask for
    both kinds of work, or neither."""
    use_threads(settings.threads)
    if settings.pool and settings.images is None:
        return assign(settings)
    if settings.images is None or settings.pool:
        raise UsageError(
            "pubsel pool pool=[FOLDER,...], of embeddings; or images=FOLDER to=FOLDER, which computes some"
        )
    return extract(settings)


def assign(settings: PoolConfig) -> str:
    """Compute the clusters of a pool, and the cluster of each embedding of one shard or of all."""
    parts = [open_embeddings(name) for name in settings.pool or []]
    shards = assigned.shards_of(parts)
    if settings.shard is not None and settings.shard >= len(shards):
        raise UsageError(f"shard={settings.shard}: the pool has {len(shards)} shards, 0 to {len(shards) - 1}")

    began = time.monotonic()
    kept = assigned.kept_folder(parts, settings.data_root)
    clusters = assigned.clusters_kept(parts, kept)
    asked = shards if settings.shard is None else [shards[settings.shard]]
    progress = Progress("pool", sum(shard.n for shard in asked), say, "examples")
    new = sum(assigned.nearest_in(shard, clusters, kept, progress)[1] for shard in asked)

    n, which = progress.n, "all" if settings.shard is None else f"shard {settings.shard} of"
    return (
        f"pool: {len(clusters.centres)} clusters; {n:,} embeddings of {which} {len(shards)} shards assigned, "
        f"{len(asked) - new} of {len(asked)} before, in {duration(time.monotonic() - began)}; kept in {kept}"
    )


def extract(settings: PoolConfig) -> str:
    """Compute the features of one shard of public images, or of all."""
    name, backbone = str(settings.images), settings.model.backbone
    if settings.to is None:
        raise UsageError(f"images={name}: set to=FOLDER, the folder of embeddings to make")
    outputs.check_folder(settings.to, settings.results, [name])
    if backbone is None or backbone.architecture in ("scattering", "pixels"):
        raise UsageError(f"images={name}: needs a network: set model, such as model=mobilenetv2")
    if settings.shard is not None and settings.shard >= settings.shards:
        raise UsageError(f"shard={settings.shard}: shards={settings.shards} are 0 to {settings.shards - 1}")

    extractor = load_backbone(backbone, settings.data_root, choose_device(settings.device))
    images = extracted.listed(name, settings.data_root, settings.download)
    began, new = time.monotonic(), 0
    numbers = range(settings.shards) if settings.shard is None else [settings.shard]
    parts = [extracted.Part(name, Path(settings.to).expanduser(), number, settings.shards) for number in numbers]
    for part in parts:
        new += extracted.extract(part, images, extractor, say)

    what = f"{parts[0].file}" if settings.shard is not None else f"{settings.to}: all {settings.shards} shards"
    n = sum(len(part.places(images.n)) for part in parts)
    seconds = duration(time.monotonic() - began)
    return f"{what}: features of {n:,} images, {len(parts) - new} of {len(parts)} shards before, in {seconds}"
