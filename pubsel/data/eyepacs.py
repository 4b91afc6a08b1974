"""Photographs of the retina with five grades of diabetic retinopathy (EyePACS; Kaggle, Diabetic Retinopathy Detection,
2015).

<root>/eyepacs has trainLabels.csv (image,level) and train/10_left.jpeg, train/10_right.jpeg ..., the two eyes of
patient 10. `options.test` is the share of these images that is held out for testing, whole patients at a time; or the
table with the grades of the publisher's own test part, whose images are in test/."""

from pathlib import Path

import torch

from pubsel.data.delimited import rows_of
from pubsel.data.folders import drawn_parts, same_images
from pubsel.data.images import unread
from pubsel.data.splits import Listing, check_lists
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts, classes 0 to 4. Missing if a table is not there; UserError if table and images disagree."""
    folder, held = root / info.options["folder"], info.options["test"]
    tables = {"train": "trainLabels.csv"} | ({"test": held} if isinstance(held, str) else {})
    check_lists(name, root, [folder / table for table in tables.values()])
    paths, levels, patients = read_table(folder / tables["train"], folder / "train")
    if "test" in tables:
        of_test = read_table(folder / held, folder / "test")
        parts = [unread(at, y, info.image_shape, whose) for at, y, whose in ((paths, levels, patients), of_test)]
        return Listing(parts[0], parts[1], (), "patient")
    return drawn_parts(name, paths, levels, patients, held, info.image_shape, "patient")


def read_table(table: Path, images: Path) -> tuple[list[Path], torch.Tensor, list[str]]:
    """Return the image files of a table in its order, their levels [n] and patients. UserError for a level
    that is none."""
    rows = rows_of(table, ("image", "level"))
    files = {path.stem: path for path in images.glob("*.jpeg")}
    same_images(table, [row["image"] for row in rows], images, files)
    try:
        levels = [("0", "1", "2", "3", "4").index(row["level"]) for row in rows]
    except ValueError:
        raise UserError(f"{table}: a level must be 0, 1, 2, 3 or 4: download it again") from None
    patients = [row["image"].partition("_")[0] for row in rows]
    return [files[row["image"]] for row in rows], torch.tensor(levels), patients
