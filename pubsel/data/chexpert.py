"""CheXpert (Irvin et al., AAAI 2019) in its own layout: 14 observations, each present, absent, uncertain or not given.

<root>/CheXpert-v1.0-small (or another folder of `options.folder`) has train.csv, valid.csv and the images that their
column Path names: train/patient00001/study1/view1_frontal.jpg ... The validation part, which radiologists labelled, is
the test set; the publisher's own test set has come later and is not read.

The rules are in conf/dataset. `options.uncertain` says what -1 counts as: zero or one (U-Zeroes and U-Ones of the
paper), unknown (U-Ignore), or drop, which leaves the image out. `options.missing` says so of an empty cell, which the
radiologist's report does not mention: zero, unknown or drop. The validation part has neither. `options.views`: frontal,
or all."""

import math
from collections import Counter
from pathlib import Path

import torch

from pubsel.data.delimited import rows_of
from pubsel.data.folders import same_images
from pubsel.data.images import unread
from pubsel.data.splits import Listing, check_lists
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

OBSERVATIONS = (
    "No Finding, Enlarged Cardiomediastinum, Cardiomegaly, Lung Opacity, Lung Lesion, Edema, Consolidation, Pneumonia, "
    "Atelectasis, Pneumothorax, Pleural Effusion, Pleural Other, Fracture, Support Devices"
).split(", ")
RULES = {
    "uncertain": ("zero", "one", "unknown", "drop"),
    "missing": ("zero", "unknown", "drop"),
    "views": ("frontal", "all"),
}
NUMBERS = {"zero": 0.0, "one": 1.0, "unknown": math.nan}
VALUES: dict[str, float | str] = {"1": 1.0, "0": 0.0, "-1": "uncertain", "": "missing"}


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts, labels 0/1 [n, 14] in the order of OBSERVATIONS. Missing if a table is not there; UserError
    if tables and images disagree, or a rule is unknown."""
    rules = {key: str(info.options[key]) for key in RULES}
    for key, allowed in RULES.items():
        if rules[key] not in allowed:
            raise UserError(f"conf/dataset/{name}.yaml: options.{key}={rules[key]}: use one of {', '.join(allowed)}")

    folder = root / info.options["folder"]
    tables = {part: folder / f"{part}.csv" for part in ("train", "valid")}
    check_lists(name, root, tables.values())
    parts, notes = {}, tuple[str, ...]()
    for part, table in tables.items():
        paths, labels, counts = read_table(folder, table, rules)
        patients = [path.relative_to(folder).parts[1] for path in paths]  # train/patient00001/study1/view1_frontal.jpg
        parts[part] = unread(paths, torch.tensor(labels).reshape(-1, len(OBSERVATIONS)), info.image_shape, patients)
        cases = ", ".join(f"{counts[key]:,} {key}" for key in ("uncertain", "missing", "dropped", "other views"))
        notes += (f"{name} {part}: {cases} (uncertain={rules['uncertain']}, missing={rules['missing']})",)
    return Listing(parts["train"], parts["valid"], notes, "patient")


def read_table(folder: Path, table: Path, rules: dict[str, str]) -> tuple[list[Path], list[list[float]], Counter[str]]:
    """Return images and their labels [n][14] by the rules, and how often each rule was needed. UserError for a
    label that is none, or if no image is left."""
    rows = rows_of(table, ("Path", "Frontal/Lateral", *OBSERVATIONS))
    files = {path.relative_to(folder).as_posix(): path for path in (folder / table.stem).rglob("*.jpg")}
    names = [row["Path"].partition("/")[2] for row in rows]  # below the folder, which may have another name
    same_images(table, names, folder, files)

    counts: Counter[str] = Counter()
    paths, labels = list[Path](), list[list[float]]()
    for file, row in zip(names, rows, strict=True):
        if rules["views"] == "frontal" and row["Frontal/Lateral"] != "Frontal":
            counts["other views"] += 1
            continue

        try:
            values = [VALUES[row[observation].removesuffix(".0")] for observation in OBSERVATIONS]
        except KeyError as error:
            raise UserError(f"{table}: {row['Path']} has the value {error}: it is 1, 0, -1 or empty") from None

        # An image is dropped for one such value, whatever its other labels are.
        gaps = [value for value in values if isinstance(value, str)]
        counts.update(gaps)
        if any(rules[gap] == "drop" for gap in gaps):
            counts["dropped"] += 1
            continue

        paths.append(files[file])
        labels.append([NUMBERS[rules[value]] if isinstance(value, str) else value for value in values])

    if not paths:
        raise UserError(f"{table}: no image is left by the rules {rules}: choose others in conf/dataset")
    return paths, labels, counts
