"""How long a pool of embeddings takes to cluster and to assign, and how much memory: results/pool_scale.csv.

    python scripts/pool_scale.py --folder /tmp --to results/pool_scale.csv

Makes embeddings of 500 kinds, float16, in shards of 100,000, and works on them as `pubsel pool` does, in a process of
its own for each number of embeddings. The files are not in the system's memory before. Memory is beyond that of
importing torch and pubsel. The last row is the power law through the others, at 10 million. What was made is deleted.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
import numpy as np

from pubsel.data.embeddings import open_embeddings
from pubsel.selection.assigned import assignment_folder, clusters_kept, nearest_of

KINDS, NOISE, SHARD = 500, 0.5, 100_000
LARGE = 10**7
SECONDS = ("clusters_seconds", "clusters_cpu", "assigned_seconds", "assigned_cpu")


def make(folder: Path, n: int, d: int) -> None:
    """Write n embeddings that are not negative, like those of most networks."""
    kinds = np.abs(np.random.default_rng(0).standard_normal((KINDS, d), dtype=np.float32))
    folder.mkdir(parents=True)
    for i, first in enumerate(range(0, n, SHARD)):
        draw = np.random.default_rng([1, i])
        x = np.empty((min(SHARD, n - first), d), dtype=np.float16)
        for rows in np.array_split(x, 20):  # a view
            noisy = kinds[draw.integers(0, KINDS, len(rows))] + NOISE * draw.standard_normal(rows.shape, np.float32)
            rows[:] = np.maximum(noisy, 0)
        path = folder / f"img_emb_{i}.npy"
        np.save(path, x)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return the wall time of something in seconds, that of processors, and its memory in MiB."""
    began, before = time.perf_counter(), time.process_time()
    mib = measuring.peak_mib(run)
    return time.perf_counter() - began, time.process_time() - before, mib


def worked(folder: Path, data_root: Path) -> dict[str, Any]:
    """Return what the clusters and the assignment of a folder took."""
    parts = [open_embeddings(str(folder))]
    kept = assignment_folder(parts, data_root)
    clusters = measured(lambda: clusters_kept(parts, kept))
    centres = clusters_kept(parts, kept)
    assigned = measured(lambda: nearest_of(parts, centres, kept, print))
    names = ("seconds", "cpu", "mib")
    row: dict[str, Any] = {"n": parts[0].n, "d": parts[0].d, "clusters": len(centres.centres)}
    row |= {f"clusters_{name}": f"{value:.4g}" for name, value in zip(names, clusters, strict=True)}
    return row | {f"assigned_{name}": f"{value:.4g}" for name, value in zip(names, assigned, strict=True)}


def extrapolated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for LARGE embeddings, with the exponents."""
    n = np.log([row["n"] for row in rows])
    last: dict[str, Any] = rows[-1] | {"what": "extrapolated", "n": LARGE}
    for key in SECONDS:
        slope, level = np.polyfit(n, np.log([float(row[key]) for row in rows]), 1)
        last[key] = f"{np.exp(level + slope * np.log(LARGE)):.4g}"
        last[f"{key}_exponent"] = f"{slope:.2f}"
    return last


def main() -> None:
    """Measure each size, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where there is room; without it, the system's temporary folder")
    parser.add_argument(
        "--to", "--csv", type=measuring.target, help="file to write; without it, only what is on the screen"
    )
    given = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for n in given.sizes:
        here = Path(tempfile.mkdtemp(dir=given.folder))
        try:
            make(here / "embeddings", n, given.width)
            row = measuring.fresh(given.threads, worked, here / "embeddings", here / "data")
        finally:
            shutil.rmtree(here)
        rows.append({"what": "measured", **row, **{f"{key}_exponent": "" for key in SECONDS}})
        print(rows[-1], flush=True)

    if len(rows) > 1:
        rows.append(extrapolated(rows))
        print(rows[-1])
    if given.to is not None:
        measuring.write(given.to, rows, measuring.origin("cpu", given.threads))


if __name__ == "__main__":
    main()
