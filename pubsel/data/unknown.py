"""The message about a user's file of a type that is not read: what is read, and how to convert this file."""

import shlex
from pathlib import Path

from pubsel.data import folders

ARRAYS = "train_images=..., train_labels=..., test_images=..., test_labels=..."
FOLDERS = "write its images into a folder for each class"
UNPACKED = {  # how the name of an archive ends, longer endings first, and the command that unpacks it
    **dict.fromkeys((".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar", ".tgz", ".tbz2", ".txz"), "tar -xf {file}"),
    **{".zip": "unzip {file} -d {stem}", ".rar": "unrar x {file}", ".7z": "7z x {file}"},
}
TABLES = {  # how pandas reads a table of this suffix
    **dict.fromkeys((".pq", ".parq"), "read_parquet({file!r})"),
    **dict.fromkeys((".feather", ".arrow"), "read_feather({file!r})"),
    ".sav": "read_spss({file!r})",
    ".dta": "read_stata({file!r})",
    ".sas7bdat": "read_sas({file!r})",
    ".jsonl": "read_json({file!r}, lines=True)",
    ".ndjson": "read_json({file!r}, lines=True)",
    ".json": "read_json({file!r})",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "read_excel({file!r})"),
}
LOADED = {  # what reads arrays from a file of this suffix
    ".npy": "numpy.load({file!r})",
    ".h5": "h5py.File({file!r})",
    ".hdf5": "h5py.File({file!r})",
    ".mat": "scipy.io.loadmat({file!r})",
    ".pt": "torch.load({file!r})",
    ".pth": "torch.load({file!r})",
    ".pkl": "pickle.load",
    ".pickle": "pickle.load",
}
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".dcm", ".dicom", ".ima")
SCANS = (".nii", ".nii.gz", ".nrrd", ".svs", ".heic", ".svg", ".psd", ".exr")


def refusal(path: Path) -> str:
    """Return the message, in one line, about a file whose type is not read."""
    small = path.name.lower()
    double = [ending for ending in (*UNPACKED, *SCANS) if small.endswith(ending) and ending.count(".") > 1]
    kind = double[0] if double else Path(small).suffix  # of x.tar.gz both suffixes

    what = f"a file of type {kind}" if kind else "a file without a suffix"
    *first, last = folders.TABLES
    takes = (
        f"a folder with a folder of images for each class, a table ({', '.join(first)} or {last}) with the columns "
        "path and label, or an npz with train_images, train_labels, test_images and test_labels"
    )
    return f"{path}: {what} is not read: {_remedy(path.name, kind)}; what is read: {takes}"


def _remedy(name: str, kind: str) -> str:
    """Return how to make of a file what is read."""
    file = shlex.quote(name)
    stem = name[: len(name) - len(kind)] if kind else name
    if kind in UNPACKED:
        return f"unpack it ({UNPACKED[kind].format(file=file, stem=shlex.quote(stem))}), and give the folder"
    if kind in (".gz", ".bz2", ".xz", ".zst"):
        return f"unpack it, and give {stem}"

    if kind in TABLES:
        reads = TABLES[kind].format(file=name)
        paths = f"pandas.{reads}.to_csv({stem + '.csv'!r}, index=False), if it has the columns path and label"
        return f"convert it by {paths}" if kind in (".xlsx", ".xls") else f"convert it by {paths}; or {FOLDERS}"
    if kind in LOADED:
        reads = LOADED[kind].format(file=name)
        return f"read it by {reads}, and write its arrays by numpy.savez({stem + '.npz'!r}, {ARRAYS})"

    if kind in IMAGES:
        return "give the folder that has the folder of its class"
    if kind in SCANS:
        return "convert the images to png, and give their folder"
    if kind in (".txt", ".data", ".tab"):
        return f"if it is a table, name it {stem}.csv"
    return f"{FOLDERS}, or write its arrays by numpy.savez({stem + '.npz'!r}, {ARRAYS})"
