"""How long a folder of photographs takes to open, and how much memory: the first time, and once they are kept.

    python scripts/photographs.py --images 200000 --side 224 --folder /tmp/photographs --to results/photographs.csv

Makes JPEG files, blurred noise, in folders of ten classes, a tenth of them for testing, and opens them in new processes
as every command does. Seconds and memory are beyond those of importing torch and pubsel. Needs free space for the files
(6 KB each) and for their pixels. What was made is deleted in the end.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measuring
import numpy as np
from PIL import Image

CLASSES, COARSE = 10, 14  # pixels of the noise, which is enlarged
OPENED = """
import json, resource, sys, time
import torch
from pubsel.data import open_dataset

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before, began = peak(), time.perf_counter()
source = open_dataset(sys.argv[1], sys.argv[2], False)
seconds, opened = time.perf_counter() - began, peak()
for i in range(0, len(source.train.x), len(source.train.x) // 1000 or 1):  # some of each part of the file
    source.train.x[i].float().mean()
n = len(source.train.x) + len(source.test.x)
print(json.dumps({"images": n, "seconds": seconds, "memory": opened - before, "used": peak() - before}))
"""


def make(folder: Path, images: int, side: int) -> None:
    """Write `images` JPEG files into folders of classes."""

    def write(numbers: Iterable[int]) -> None:
        for i in numbers:
            noise = np.random.default_rng(i).integers(0, 256, (COARSE, COARSE, 3), dtype=np.uint8)
            path = folder / ("test" if i % 10 == 0 else "train") / f"class {i // 10 % CLASSES}" / f"{i:07}.jpg"
            Image.fromarray(noise).resize((side, side), Image.Resampling.BILINEAR).save(path, quality=75)

    for part in ("train", "test"):
        for label in range(CLASSES):
            (folder / part / f"class {label}").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (range(first, min(images, first + 1000)) for first in range(0, images, 1000))))


def opened(folder: Path, data_root: Path) -> dict[str, float]:
    """Return what opening the folder took in a fresh process."""
    done = subprocess.run([sys.executable, "-c", OPENED, folder, data_root], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Make the files, open them twice, and write both rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--folder", type=Path, help="where there is room; without it, the system's temporary folder")
    parser.add_argument(
        "--to", "--csv", type=measuring.target, help="file to write; without it, only what is on the screen"
    )
    given = parser.parse_args()

    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    here = Path(tempfile.mkdtemp(dir=given.folder))
    rows = [["what", "images", "side", "seconds", "peak_memory_mib", "with_1000_images_read_mib"]]
    try:
        make(here / "photographs", given.images, given.side)
        for what in ("first", "second", "third"):
            found = opened(here / "photographs", here / "data")
            memory = (f"{found[key] / 2**20:.0f}" for key in ("memory", "used"))
            rows.append([what, str(found["images"]), str(given.side), f"{found['seconds']:.2f}", *memory])
            print(*rows[-1], flush=True)
    finally:
        shutil.rmtree(here)

    if given.to is not None:
        with given.to.open() as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
