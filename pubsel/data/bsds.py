"""Photographs of BSDS500 (Arbelaez, Maire, Fowlkes, Malik: Contour Detection and Hierarchical Image Segmentation, PAMI
2011), and patches of them as a public set."""

from pathlib import Path

import numpy as np

from pubsel.data import prepared
from pubsel.data.embedded import SIDE, patches_of
from pubsel.data.folders import images_in
from pubsel.data.images import photograph
from pubsel.data.splits import SEED, Parts, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

ARCHIVE = Path("BSR") / "BSDS500" / "data" / "images" / "train"  # in BSR_bsds500.tgz; its 200 training photographs


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return 2,000 + 2,000 patches of 32x32 pixels at random places of random photographs; the label is the photograph.
    Patches may overlap, also across train and test: public data, not a benchmark. Missing without photographs."""
    photographs = read_photographs(name, root)[: info.classes]
    note = f"{name}: patches of {len(photographs)} photographs, seed {SEED}"
    return patches_of(photographs)._replace(notes=(note,))


def read_photographs(name: str, root: Path) -> list[np.ndarray]:
    """Return photographs [h, w, 3] from <root>/bsds500.npz (array train_images), the official archive's training folder
    <root>/BSR/BSDS500/data/images/train, or any image files in <root>/bsds500. Missing if none
    of them is there; UserError for photographs that are too small, or not in colour."""
    npz = root / "bsds500.npz"
    if npz.exists():
        photographs = list(prepared.arrays_of(npz, ["train_images"])["train_images"])
        source: Path = npz
    else:
        source = next((folder for folder in (root / ARCHIVE, root / "bsds500") if folder.is_dir()), root / "bsds500")
        if not source.is_dir():
            raise missing(name, root, f"no photographs: bsds500.npz, {ARCHIVE}/*.jpg or bsds500/*.jpg")
        folders = [source, *sorted(path for path in source.rglob("*") if path.is_dir())]
        photographs = [photograph(path) for folder in folders for path in images_in(folder)]

    # A patch has to fit into each of them.
    if not photographs:
        raise UserError(f"{source}: no photographs in it: unpack BSR_bsds500.tgz")
    if any(p.ndim != 3 or p.shape[2] != 3 or min(p.shape[:2]) < SIDE or p.dtype != np.uint8 for p in photographs):
        raise UserError(f"{source}: photographs must be uint8 RGB of at least {SIDE}x{SIDE} pixels")
    return photographs
