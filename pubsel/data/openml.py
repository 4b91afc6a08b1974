"""Tables of OpenML in their ARFF files: dense, one nominal column named class, every other column a number.

Rows are features, float32 [n, d], not images."""

from pathlib import Path

import numpy as np
import pandas
import torch

from pubsel.data.folders import TEST_FRACTION
from pubsel.data.splits import SEED, Parts, Split, held_out, missing
from pubsel.files import reading
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset


def read(name: str, info: Dataset, root: Path, download: bool) -> Parts:
    """Return both parts of the table <root>/<options.files[0]>; a fixed fifth of the rows is the test part. Classes are
    numbered in sorted order. Missing if the file is not there, UserError if it has other classes or columns."""
    arff = root / info.options["files"][0]
    if not arff.is_file():
        raise missing(name, root)

    rows, labels = read_arff(arff)
    classes, y = np.unique(labels, return_inverse=True)
    if len(classes) != info.classes or rows.shape[1] != info.shape[-1]:
        raise UserError(
            f"{arff}: {len(classes)} classes and {rows.shape[1]} features, {info.classes} and {info.shape[-1]} "
            "expected: download it again"
        )

    test = held_out([str(i) for i in range(len(y))], TEST_FRACTION)
    train, held = (Split(torch.from_numpy(rows[part]), torch.from_numpy(y[part])) for part in (~test, test))
    note = f"{name}: {int(test.sum())} of {len(test)} rows held out as the test set, seed {SEED}"
    return Parts(train, held, (note,))


def read_arff(arff: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, float32 [n, d], and the words of the column class [n]. UserError for a file that has
    no such columns."""
    columns: list[str] = []
    remedy = "it is no dense ARFF with a column class: download it again"
    with reading(arff, remedy, (OSError, ValueError, KeyError, IndexError)), arff.open(encoding="utf-8") as file:
        for text in file:
            words = text.lower().split()
            if words[:1] == ["@attribute"]:
                columns.append(words[1].strip("'\""))
            elif words[:1] == ["@data"]:
                break

        # pandas reads what follows the header
        kinds = {column: str if column == "class" else np.float32 for column in columns}
        table = pandas.read_csv(file, names=columns, index_col=False, dtype=kinds, na_filter=False)
        labels = table.pop("class").to_numpy(dtype=str)
    return table.to_numpy(dtype=np.float32), labels
