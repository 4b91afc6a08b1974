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
from pubsel.data.folders import head, images_in, read_images
from pubsel.data.splits import SEED, Parts, Split, from_arrays, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset, dataset_info

SIDE = 32
ARCHIVE = Path("BSR") / "BSDS500" / "data" / "images" / "train"  # in BSR_bsds500.tgz; its 200 training photographs


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return MNIST-M from the MNIST and the BSDS500 photographs in `root`; Missing if one of them is not there."""
    photographs = read_photographs(name, root)
    npz = root / "mnist.npz"
    if npz.exists():
        digits = prepared.read(npz, 10, (1, 28, 28))
    else:
        info = dataset_info("mnist")
        with torchvision_sets.reading("mnist", info, root, download):
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
        top = random.randint(photograph.shape[0] - SIDE + 1)
        left = random.randint(photograph.shape[1] - SIDE + 1)
        patch = photograph[top : top + SIDE, left : left + SIDE].astype(np.int16)
        blended[i] = np.abs(patch - digit[..., None].astype(np.int16))

    return from_arrays(blended, np.zeros(len(blended))).x


def read_photographs(name: str, root: Path) -> list[np.ndarray]:
    """Return photographs [h, w, 3] from <root>/bsds500.npz (array train_images), the official archive's training folder
    <root>/BSR/BSDS500/data/images/train, or any image files in <root>/bsds500."""
    npz = root / "bsds500.npz"
    if npz.exists():
        photographs = list(prepared.arrays_of(npz, ["train_images"])["train_images"])
        source: Path = npz
    else:
        source = next((folder for folder in (root / ARCHIVE, root / "bsds500") if folder.is_dir()), root / "bsds500")
        if not source.is_dir():
            raise missing(name, root, f"no photographs: bsds500.npz, {ARCHIVE}/*.jpg or bsds500/*.jpg")
        folders = [source, *sorted(path for path in source.rglob("*") if path.is_dir())]
        photographs = [_photograph(path) for folder in folders for path in images_in(folder)]

    # A patch has to fit into each of them.
    if not photographs:
        raise UserError(f"{source}: no photographs in it: unpack BSR_bsds500.tgz")
    if any(p.ndim != 3 or p.shape[2] != 3 or min(p.shape[:2]) < SIDE or p.dtype != np.uint8 for p in photographs):
        raise UserError(f"{source}: photographs must be uint8 RGB of at least {SIDE}x{SIDE} pixels")
    return photographs


def _photograph(path: Path) -> np.ndarray:
    _, (height, width) = head(path)
    return read_images([path], (3, height, width))[0].permute(1, 2, 0).numpy()
