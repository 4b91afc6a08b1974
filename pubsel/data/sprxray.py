"""Chest x-rays of the SPR X-Ray Age and Gender challenges (de Aguiar Kuriki et al., Kaggle 2023), by gender.

<root>/sprxray has train_gender.csv (imageId,gender), or a train.csv with these columns and age, which is not used; and
the images as **/train/000000.png ...: an imageId is the number in the name of a file. The challenge's own test images
have no labels and are not read: a fixed fifth of the training images is held out. Patients are not named, so one may be
on both sides."""

from pathlib import Path

import torch

from pubsel.data.delimited import rows_of
from pubsel.data.folders import TEST_FRACTION, drawn_parts, same_images
from pubsel.data.splits import Listing, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts, classes 0 (female) and 1 (male). Missing if there is no table; UserError if table and images
    disagree."""
    folder = root / info.options["folder"]
    table = next((path for path in (folder / "train_gender.csv", folder / "train.csv") if path.is_file()), None)
    if table is None:
        raise missing(name, root, f"no {info.options['folder']}/train_gender.csv")

    genders = read_table(table)
    files = {path.name: path for path in folder.rglob("*.png") if path.parent.name == "train"}
    same_images(table, genders, folder, files)

    paths = [files[image] for image in genders]
    labels = torch.tensor(list(genders.values()))
    return drawn_parts(name, paths, labels, list(genders), TEST_FRACTION, info.image_shape)


def read_table(table: Path) -> dict[str, int]:
    """Return the gender, 0 or 1, of each image file, in order of its name. UserError for a row without numbers."""
    rows = rows_of(table, ("imageId", "gender"))
    try:
        genders = {int(row["imageId"]): ("0", "1").index(row["gender"].removesuffix(".0")) for row in rows}
    except ValueError:
        raise UserError(f"{table}: imageId must be a number and gender 0 or 1: download it again") from None
    return {f"{image:06d}.png": genders[image] for image in sorted(genders)}
