"""ImageNet in class folders, and Tiny-ImageNet in its official layout (folder or zip), at the size of conf/dataset.

Both have train/<wnid>/ and a validation part, which is the test set here: val/<wnid>/*.JPEG, or Tiny-ImageNet's
val/images/*.JPEG with val/val_annotations.txt. Classes are the sorted WordNet ids."""

import zipfile
from pathlib import Path

from pubsel.data.lists import unread_part
from pubsel.data.splits import Listing
from pubsel.data.torchvision_sets import fetch
from pubsel.files import plain, reading
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

Folder = Path | zipfile.Path
Labelled = list[tuple[Folder, str]]  # image file, WordNet id


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts from <root>/<options.folder>, or from the zip of that name, which is fetched if `options.md5`
    is given and `download` allows it. Missing if nothing is there. With `options.train` false the training part stays
    empty and the set serves as public data only. `options.first` and `options.before` are WordNet ids: classes from the
    one on, and those before the other, are the set."""
    folder: Path = root / info.options["folder"]
    archive = root / f"{info.options['folder']}.zip"
    if folder.is_dir():
        return _parts(name, info, folder)

    if not archive.exists():
        fetch(name, info, root, archive.name, download)
    with reading(archive, f"delete it and run `pubsel data prepare {name}`", (OSError, zipfile.BadZipFile)):
        return _parts(name, info, zipfile.Path(archive) / info.options["folder"])  # stays open for its images


def _parts(name: str, info: Dataset, folder: Folder) -> Listing:
    train = in_class_folders(folder / "train") if info.options["train"] else []
    val = folder / "val"
    test = annotated(val) if (val / "val_annotations.txt").is_file() else in_class_folders(val)
    first, before = info.options.get("first", ""), info.options.get("before", "o")  # ids begin with n
    train, test = ([image for image in part if first <= image[1] < before] for part in (train, test))
    if not test or (info.options["train"] and not train):
        part = "val" if not test else "train"
        raise UserError(f"{folder}: no images in {part}/<wnid>: see `pubsel data prepare {name}` for the layout")

    # More classes than expected are those of another set; fewer may be a part of this one.
    wnids = sorted({wnid for _, wnid in train + test})
    if len(wnids) > info.classes:
        raise UserError(f"{folder}: {len(wnids)} classes, {info.classes} expected: see `pubsel data prepare {name}`")
    note = f"{name}: the validation part is the test set"
    numbers = {wnid: i for i, wnid in enumerate(wnids)}
    parts = [unread_part(part, numbers, info.image_shape) for part in (train, test)]
    return Listing(parts[0], parts[1], (note,))


def in_class_folders(folder: Folder) -> Labelled:
    """Return image files of <folder>/<wnid>/ or <folder>/<wnid>/images/, in order of class and name."""
    images: Labelled = []
    for class_folder in sorted(_list(folder), key=lambda path: path.name):
        inner = class_folder / "images"
        files = _list(inner if inner.is_dir() else class_folder)
        photographs = [path for path in files if path.name.lower().endswith(".jpeg")]
        images += [(path, class_folder.name) for path in sorted(photographs, key=lambda path: path.name)]
    return images


def annotated(folder: Folder) -> Labelled:
    """Return the images of images/ in the order of val_annotations.txt (file name, WordNet id, box; tab separated).
    UserError for a line without these."""
    table = folder / "val_annotations.txt"
    if isinstance(table, Path):
        plain(table)
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    if any(len(row) < 2 for row in rows):
        raise UserError(f"{table}: a line without file name and WordNet id: unpack the archive again")
    return [(folder / "images" / row[0], row[1]) for row in rows]


def _list(folder: Folder) -> list[Folder]:
    return list(folder.iterdir()) if folder.is_dir() else []
