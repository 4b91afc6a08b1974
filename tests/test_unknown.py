"""Words about a good file of a type that is not read."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pubsel.data.unknown import ARRAYS, IMAGES, LOADED, SCANS, TABLES, UNPACKED, refusal

READ = "what is read: a folder with a folder of images for each class, a table (.csv, .tsv or .parquet) with"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my.zip", "a file of type .zip is not read: unpack it (unzip my.zip -d my), and give the folder"),
        ("my scans.ZIP", "type .zip is not read: unpack it (unzip 'my scans.ZIP' -d 'my scans'), and give the folder"),
        ("x.tar.gz", "a file of type .tar.gz is not read: unpack it (tar -xf x.tar.gz), and give the folder"),
        ("x.csv.gz", "a file of type .gz is not read: unpack it, and give x.csv;"),
        ("x.pq", "pandas.read_parquet('x.pq').to_csv('x.csv', index=False), if it has the columns path and"),
        ("x.pq", "or write its images into a folder for each class"),
        ("x.jsonl", "pandas.read_json('x.jsonl', lines=True).to_csv('x.csv', index=False)"),
        ("x.npy", f"numpy.load('x.npy'), and write its arrays by numpy.savez('x.npz', {ARRAYS})"),
        ("x.h5", "read it by h5py.File('x.h5'), and write its arrays by numpy.savez('x.npz', train_images=..., "),
        ("it's.mat", """scipy.io.loadmat("it's.mat"), and write its arrays by numpy.savez("it's.npz", """),
        ("x.pkl", "read it by pickle.load, and write its arrays by numpy.savez('x.npz'"),
        ("cat.jpg", "a file of type .jpg is not read: give the folder that has the folder of its class"),
        ("brain.nii.gz", "a file of type .nii.gz is not read: convert the images to png, and give their folder"),
        ("scan.dcm", "a file of type .dcm is not read: give the folder that has the folder of its class"),
        ("x.txt", "if it is a table, name it x.csv"),
        ("x.tfrecord", "a file of type .tfrecord is not read: write its images into a folder for each class, or"),
        ("images", "a file without a suffix is not read: write its images into a folder for each class, or"),
        (".hidden", "a file without a suffix is not read"),
        ("Röntgen.v2.zip", "unpack it (unzip 'Röntgen.v2.zip' -d 'Röntgen.v2'), and give the folder"),
    ],
)
def test_a_type_that_is_not_read_is_named_with_what_to_do(name: str, says: str) -> None:
    text = refusal(Path("some", name))
    assert says in text
    assert text.startswith(f"some/{name}: ")
    assert READ in text


@pytest.mark.parametrize("kind", [*UNPACKED, *TABLES, *LOADED, *IMAGES, *SCANS, ".gz", ".txt", ".lmdb", ""])
def test_no_good_file_is_called_corrupt_or_to_be_deleted(kind: str) -> None:
    text = refusal(Path(f"x{kind}"))
    assert "\n" not in text
    assert not any(word in text.lower() for word in ("corrupt", "delete", "remove", "broken", "{"))


def test_the_conversions_work(folder: Path) -> None:
    """Those of the libraries that are here."""
    rows = pd.DataFrame({"path": ["a.png"], "label": ["a"]})
    rows.to_json("x.jsonl", lines=True, orient="records")
    code = refusal(Path("x.jsonl")).partition("convert it by ")[2].partition(", if it has")[0]
    eval(code.replace("pandas.", "pd."))
    assert Path("x.csv").read_text() == "path,label\na.png,a\n"

    np.save("x.npy", np.zeros(3))
    code = refusal(Path("x.npy")).partition("write its arrays by ")[2].partition("; what is read")[0]
    eval(code.replace("numpy.", "np.").replace("...", "np.load('x.npy')"))
    with np.load("x.npz") as arrays:
        assert {*arrays} == {"train_images", "train_labels", "test_images", "test_labels"}
