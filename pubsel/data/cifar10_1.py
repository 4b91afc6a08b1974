"""CIFAR-10.1 (Recht et al. 2018): new test images for CIFAR-10, in the two npy files of its repository."""

from pathlib import Path

import numpy as np

from pubsel.data.splits import Parts, Split, from_arrays, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return all images as the test split; there is no training split, so the set is public data only. Missing if a
    file is not there, UserError for one that is damaged."""
    files = [root / file for file in info.options["files"]]
    if not all(file.is_file() for file in files):
        raise missing(name, root)

    try:
        images, labels = (np.load(file, allow_pickle=False) for file in files)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise UserError(f"{files[0]} or {files[1].name}: not a readable npy ({error}): download both again") from None

    if images.dtype != np.uint8 or images.shape != (len(labels), 32, 32, 3):
        raise UserError(f"{files[0]}: {images.dtype} {images.shape} for {len(labels)} labels: download both again")

    test = from_arrays(images, labels)
    return Parts(Split(test.x[:0], test.y[:0]), test)
