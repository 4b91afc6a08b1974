"""ChestX-ray14 (Wang et al., CVPR 2017) in the layout of the NIH: 112,120 frontal x-rays with 14 findings.

<root>/ChestX-ray14 has the table Data_Entry_2017_v2020.csv (or Data_Entry_2017.csv), train_val_list.txt and
test_list.txt, and the images as **/00000001_000.png ...: the archives images_001 to images_012 in folders of their own,
or all in one. The parts are those of the two lists, 86,524 and 25,596 images with patients apart.

Gu, Kamath and Wu have 78,466 training and 20,433 test images and name no rule. The usual random 70 / 10 / 20 % split
has 78,468 / 11,219 / 22,433 images, of which they take 2,000 test images as public: 20,433 remain. ChestMNIST has just
these counts (see medmnist.py). Only the 2 training images are unexplained. Other lists, named by `options.train` and
`options.test`, give other splits: an image that is in no list is left out."""

from pathlib import Path

import torch

from pubsel.data.delimited import rows_of
from pubsel.data.folders import same_images
from pubsel.data.images import unread
from pubsel.data.lists import list_lines
from pubsel.data.splits import Listing, Unread, check_lists, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

FINDINGS = (
    "Atelectasis Cardiomegaly Effusion Infiltration Mass Nodule Pneumonia Pneumothorax Consolidation Edema Emphysema "
    "Fibrosis Pleural_Thickening Hernia"
).split()


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts, labels 0/1 [n, 14] in the order of FINDINGS. Missing if the table or a list is not there;
    UserError if table, lists and images disagree."""
    folder = root / info.options["folder"]
    tables = sorted(folder.glob("Data_Entry_2017*.csv"))
    if not tables:
        raise missing(name, root, f"no {info.options['folder']}/Data_Entry_2017_v2020.csv")
    lists = [folder / info.options[part] for part in ("train", "test")]
    check_lists(name, root, lists)
    findings = read_table(tables[-1])
    files = {path.name: path for path in folder.rglob("*.png")}
    same_images(tables[-1], findings, folder, files)

    def part(file: Path, images: list[str]) -> Unread:
        if unknown := [image for image in images if image not in findings]:
            raise UserError(
                f"{file}: {unknown[0]} and {len(unknown) - 1} more are not in {tables[-1].name}: download both again"
            )
        labels = torch.tensor([findings[image] for image in images]).reshape(-1, len(FINDINGS))
        patients = [image.partition("_")[0] for image in images]  # 00000001_000.png is of patient 00000001
        return unread([files[image] for image in images], labels, info.image_shape, patients)

    # Patients are apart in the published lists; of other lists at least the images have to be.
    train, test = list_lines(lists[0]), list_lines(lists[1])
    if both := set(train) & set(test):
        raise UserError(f"{lists[1]}: {min(both)} and {len(both) - 1} more are in {lists[0].name} too: use other lists")

    left = len(findings) - len(train) - len(test)
    notes = (f"{name}: {left} images are in neither {lists[0].name} nor {lists[1].name} and left out",) if left else ()
    return Listing(part(lists[0], train), part(lists[1], test), notes, "patient")


def read_table(table: Path) -> dict[str, list[float]]:
    """Return the findings of each image, [14] of 0/1. UserError for a word that is no finding."""
    findings = {}
    for row in rows_of(table, ("Image Index", "Finding Labels")):
        words = [word for word in row["Finding Labels"].split("|") if word != "No Finding"]
        if unknown := set(words) - set(FINDINGS):
            raise UserError(f"{table}: {row['Image Index']} has the finding {min(unknown)!r}: download it again")
        findings[row["Image Index"]] = [float(finding in words) for finding in FINDINGS]
    return findings
