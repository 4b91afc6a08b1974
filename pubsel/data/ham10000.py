"""HAM10000 skin lesions (Tschandl et al., Scientific Data 2018) in the layout of the Harvard Dataverse.

<root>/HAM10000/HAM10000_metadata (.csv, .tab, or no suffix; columns lesion_id, image_id, dx) and the photographs as
<root>/HAM10000/**/<image_id>.jpg. There is no official test part with patients apart: a fixed fifth of the images is
held out, disjoint by lesion."""

from pathlib import Path

import torch

from pubsel.data.delimited import rows_of
from pubsel.data.folders import TEST_FRACTION, drawn_parts
from pubsel.data.splits import Listing, missing
from pubsel.messages import UserError
from pubsel.settings.datasets import Dataset

DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return both parts at the size of conf/dataset. Missing if there is no metadata, UserError if a photograph is
    absent."""
    folder = root / info.options["folder"]
    tables = [folder / f"HAM10000_metadata{suffix}" for suffix in (".csv", ".tab", "")]
    table = next((path for path in tables if path.is_file()), None)
    if table is None:
        raise missing(name, root)

    lesions, images, labels = read_metadata(table)
    files = {path.stem: path for path in sorted(folder.rglob("*.jpg"))}
    absent = [image for image in images if image not in files]
    if absent:
        raise UserError(f"{folder}: {absent[0]}.jpg and {len(absent) - 1} more are absent: unpack both image archives")

    # Several photographs show one lesion, so whole lesions are held out.
    paths = [files[image] for image in images]
    return drawn_parts(name, paths, torch.tensor(labels), lesions, TEST_FRACTION, info.image_shape, "lesion")


def read_metadata(table: Path) -> tuple[list[str], list[str], list[int]]:
    """Return the lesion ids, image ids and labels 0 to 6 of a metadata table, in order of image id. UserError for a
    diagnosis that is none."""
    rows = sorted(rows_of(table, ("lesion_id", "image_id", "dx"), "\t,"), key=lambda row: row["image_id"])
    try:
        labels = [DIAGNOSES.index(row["dx"]) for row in rows]
    except ValueError:
        raise UserError(f"{table}: needs a column dx of {', '.join(DIAGNOSES)}") from None
    return [row["lesion_id"] for row in rows], [row["image_id"] for row in rows], labels
