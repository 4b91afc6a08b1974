"""PatchCamelyon (Veeling et al., MICCAI 2018) in its six HDF5 files, which torchvision downloads.

The validation part joins the training part."""

from pathlib import Path

import numpy as np
import torch
import torchvision.datasets as sets
from torch import Tensor

from pubsel import files
from pubsel.data.splits import Listing, Unread
from pubsel.data.torchvision_sets import fetching_files
from pubsel.messages import UserError, needs_extra
from pubsel.settings.datasets import Dataset

PARTS = {"train": "train", "val": "valid", "test": "test"}  # torchvision's names of the parts, and the files'


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts. Missing if the files are not there; UserError if one does not read or h5py is not
    installed."""
    with fetching_files(name, info, root, download):
        try:
            import h5py  # noqa: F401
        except ImportError:
            raise UserError(f"the files of PatchCamelyon are HDF5: {needs_extra('pcam')}") from None
        for part in PARTS:
            sets.PCAM(str(root), split=part, download=download)

    train, val, test = (_part(root / "pcam", file, info.shape) for file in PARTS.values())
    n = len(train.y)
    both = Unread(lambda i: train.image(i) if i < n else val.image(i - n), torch.cat([train.y, val.y]))
    return Listing(both, test)


AGAIN = "delete it and run `pubsel data prepare pcam`"


def _part(folder: Path, part: str, shape: list[int]) -> Unread:
    """Return a part from its images [n, 96, 96, 3] and labels [n, 1, 1, 1]; the file of the images stays open."""
    import h5py

    paths = [folder / f"camelyonpatch_level_2_split_{part}_{key}.h5" for key in ("x", "y")]
    arrays = []
    for path, key in zip(paths, ("x", "y"), strict=True):
        with files.reading(path, AGAIN, (OSError, KeyError)):
            arrays.append(h5py.File(path, "r")[key])

    images, labels = arrays
    channels, height, width = shape
    if images.shape != (len(labels), height, width, channels):
        raise UserError(f"{paths[0]}: images {images.shape} for {len(labels)} labels: delete both and prepare again")

    def image(i: int) -> Tensor:
        with files.reading(paths[0], AGAIN):
            return torch.from_numpy(images[i]).permute(2, 0, 1)

    return Unread(image, torch.from_numpy(np.asarray(labels).reshape(-1).astype(np.int64)))
