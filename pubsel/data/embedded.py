"""Sets that come with the installation: scikit-learn's digits, patches of its two photographs, noise, and the images of
random processes."""

from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import numpy as np

from pubsel.data.processes import drawn
from pubsel.data.splits import SEED, Parts, from_arrays
from pubsel.settings.datasets import Dataset

DIGITS_TRAIN = 1297  # of 1,797; the other 500 are the test set
COUNT = 2000  # images in each part of patches and noise
SIDE = 32


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return the set that `options.kind` names; nothing is read from `root`."""
    match info.options["kind"]:
        case "digits":
            return digits()
        case "photo_patches":
            return photo_patches()
        case "noise":
            return noise()
        case kind:
            return drawn(kind)


def digits() -> Parts:
    """Return scikit-learn's digits, 8x8 grey: values 0 to 16 scaled to 0 to 255, in a fixed random order, the first
    1,297 for training. The file's own order is not random."""
    # scikit-learn's load_digits reads this file too, and takes a second to import
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows, labels = np.split(np.loadtxt(str(path), delimiter=","), [-1], axis=1)
    order = np.random.RandomState(SEED).permutation(len(labels))
    images = np.floor(rows.reshape(-1, 8, 8) * 255 / 16 + 0.5).astype(np.uint8)[order]  # [1797, 8, 8]
    labels = labels[order, 0].astype(np.int64)

    n = DIGITS_TRAIN
    return Parts(from_arrays(images[:n], labels[:n]), from_arrays(images[n:], labels[n:]))


def photo_patches() -> Parts:
    """Return 2,000 + 2,000 patches of 32x32 pixels at random places of scikit-learn's two photographs (a temple, a
    flower); the label is the photograph. Patches may overlap, also across train and test: public data, not a benchmark.
    """
    from sklearn.datasets import load_sample_images

    return patches_of(load_sample_images().images)  # 2 x [427, 640, 3]


def patches_of(photographs: Sequence[np.ndarray]) -> Parts:
    """Return 2,000 + 2,000 patches at random places of random photographs, each [h, w, 3]; the label is the
    photograph."""
    random = np.random.RandomState(SEED)
    labels = random.randint(0, len(photographs), 2 * COUNT)

    patches = np.stack([patch_of(photographs[label], random) for label in labels])
    return Parts(from_arrays(patches[:COUNT], labels[:COUNT]), from_arrays(patches[COUNT:], labels[COUNT:]))


def patch_of(photograph: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Return a patch [SIDE, SIDE, 3] at a random place of a photograph [h, w, 3]."""
    top, left = (random.randint(length - SIDE + 1) for length in photograph.shape[:2])
    return photograph[top : top + SIDE, left : left + SIDE]


def noise() -> Parts:
    """Return 2,000 + 2,000 images of 32x32 RGB whose values are independent and uniform on 0 to 255, with random
    labels."""
    random = np.random.RandomState(SEED)
    images = random.randint(0, 256, (2, COUNT, SIDE, SIDE, 3), dtype=np.uint8)
    labels = random.randint(0, 10, (2, COUNT))
    return Parts(from_arrays(images[0], labels[0]), from_arrays(images[1], labels[1]))
