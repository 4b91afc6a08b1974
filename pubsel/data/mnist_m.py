"""MNIST-M: MNIST digits blended with photographs (Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR
2016, Section 5.2.4): |photograph - digit| over random patches of BSDS500.

Generated here with a fixed seed, so it is not the authors' own file pixel by pixel. As in their distribution images are
32x32 RGB: the 28x28 digit has a border of 2 zero pixels, where the photograph shows through. Order and labels are
MNIST's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from pubsel.data import prepared, torchvision_sets
from pubsel.data.bsds import read_photographs
from pubsel.data.embedded import SIDE, patch_of
from pubsel.data.splits import SEED, Parts, Split, from_arrays
from pubsel.settings.datasets import Dataset, dataset_info


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return MNIST-M from the MNIST and the BSDS500 photographs in `root`; Missing if one of them is not there."""
    photographs = read_photographs(name, root)
    npz = root / "mnist.npz"
    if npz.exists():
        digits = prepared.read(npz, 10, (1, 28, 28))
    else:
        info = dataset_info("mnist")
        with torchvision_sets.fetching_files("mnist", info, root, download):
            digits = torchvision_sets.arrays(info, root, download)

    random = np.random.RandomState(SEED)
    train, test = (Split(blend(part.x[:, 0].numpy(), photographs, random), part.y) for part in digits[:2])
    return Parts(train, test, (f"{name}: generated from MNIST and {len(photographs)} photographs, seed {SEED}",))


def blend(digits: np.ndarray, photographs: Sequence[np.ndarray], random: np.random.RandomState) -> Tensor:
    """Return the digits [n, 28, 28] over random patches of random photographs (each [h, w, 3]): uint8
    [n, 3, 32, 32]."""
    border = (SIDE - digits.shape[1]) // 2
    padded = np.pad(digits, ((0, 0), (border, border), (border, border)))  # [n, 32, 32]

    blended = np.empty((len(digits), SIDE, SIDE, 3), dtype=np.uint8)
    for i, digit in enumerate(padded):
        photograph = photographs[random.randint(len(photographs))]
        patch = patch_of(photograph, random).astype(np.int16)
        blended[i] = np.abs(patch - digit[..., None].astype(np.int16))

    return from_arrays(blended, np.zeros(len(blended))).x
