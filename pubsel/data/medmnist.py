"""MedMNIST (Yang et al., Scientific Data 2023) in its npz files, one for each size: chestmnist_64.npz and the like.

They hold the images of larger sets, resized and split by MedMNIST: ChestMNIST those of ChestX-ray14, DermaMNIST those
of HAM10000, PneumoniaMNIST those of Kermany et al. Their validation part is left out: so ChestMNIST has 78,468 training
and 22,433 test images."""

from pathlib import Path

from pubsel.data import prepared
from pubsel.data.splits import Listing
from pubsel.data.torchvision_sets import fetch
from pubsel.settings.datasets import Dataset


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts from <root>/<name>.npz, which is fetched if `download` allows it. Missing if it is not there;
    UserError if it does not read or does not have the shape and classes of conf/dataset."""
    npz = root / f"{name}.npz"
    if not npz.exists():
        fetch(name, info, root, npz.name, download)
    note = f"{name}: the validation part of MedMNIST is left out"
    return prepared.listing(npz, info.classes, info.image_shape)._replace(notes=(note,))
