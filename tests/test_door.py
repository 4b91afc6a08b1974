"""What comes through the door: files and tables as people have them, read as they mean them, or refused in words."""

import ast
import base64
import json
import os
import shutil
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid
from sklearn.datasets import load_digits

from pubsel import fit, rank, train
from pubsel.cli import main
from pubsel.commands.predict import batches
from pubsel.data import examples, findings, load, open_dataset, tables
from pubsel.data.given import Takes, as_input, at_path, given
from pubsel.data.texts import TextInput
from pubsel.data.vectors import Field
from pubsel.messages import UsageError, UserError
from pubsel.release.classifier import Classifier, read_facts, takes_of
from pubsel.settings.keys import Convert, Fold, Overlap, Pair, Read
from tests.made import write_csv, write_npz

X, Y = load_digits(return_X_y=True)


def picture(i):
    """Digit i, 8x8 grey."""
    return Image.fromarray((X[i].reshape(8, 8) * 15).astype(np.uint8))


def task_of(path, root="", unit=None, validation=0.0, **read):
    pair = Pair(private=str(path), public=None, m=1, convert=Convert.resize, unit=unit, validation=validation)
    pair.read = Read(**read)
    return load(pair, str(root), False)


def refused(why, path, root="", kind=UserError, **read):
    """Require that a set is refused as private data, in one line."""
    with pytest.raises(kind, match=why) as error:
        task_of(path, root, **read)
    assert "\n" not in str(error.value)


def folder(path, n=100, classes=2, save=None):
    """Class folders of n digits; save(i, file) writes one."""
    for i in range(n):
        file = path / f"c{Y[i] % classes}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        (save or (lambda i, file: picture(i).save(file)))(i, file)
    return path


def table(path, row, head="path,label", n=100, name="a.csv"):
    """A table with a row for each of n digits. row(i): behind its path."""
    path.mkdir(exist_ok=True)
    for i in range(n):
        picture(i).save(path / f"{i}.png")
    lines = [head, *(f"{i}.png,{row(i)}" for i in range(n))]
    (path / name).write_text("\n".join(lines), encoding="utf-8")
    return path / name


def named(task_or_source):
    return {finding.name: finding for finding in task_or_source.findings}


# Tables


def test_a_person_who_is_written_in_two_ways_is_one(tmp_path):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},P{i // 4}{' ' * (i % 2)}", "path,label,patient", n=200)
    task = task_of(path, unit="patient", validation=0.2)
    people = task.units + task.held_out_units
    assert people + len(task.test.y) / 4 == 50
    assert task.people.tolist() == [4] * task.units
    assert "50 people are written in several ways" in named(task)["spellings"].text


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ("P{}", "P{:03}", True),
        ("P {}", "p_{:02}", True),
        ("A-{}", "a {}", True),
        ("MRN-{:04}", "MRN{:04}", True),
        ("P{}", "P-{}", True),
        ("Patient {}", "Patient{:02}", True),
        ("123-45-67{:02}", "1234567{:02}", True),
        ("P{}", "P{}.0", True),
        ("{}.5", "{}.05", False),
        ("1-1{}", "11-{}", False),
        ("123-11{:02}", "12-311{:02}", False),
        ("1-{}", "1{}", False),
        ("{}a", "a{}", False),
        ("-{}", "{}", False),
    ],
)
def test_people_who_may_be_one_stop_a_command(tmp_path, one, other, near):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{(one, other)[i % 2].format(i // 4 + 1)}", "path,label,patient")
    findings = open_dataset(str(path), "", False, "patient").findings
    assert [finding.severity for finding in findings if finding.name == "spellings"] == ["error"] * near
    if near:
        refused(
            r"25 people may be written in several ways, such as '.*1', '.*1(.0)?': write each in one way; accepted",
            path,
            unit="patient",
        )


def test_people_without_a_name_stop_everything(tmp_path):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{'nan' if i % 3 else i}", "path,label,patient")
    refused(r"66 of 100 examples name nobody \('nan'\): say who they are of", path, unit="patient", accept=["nobody"])


@pytest.mark.parametrize("head", ["path,label,split", "Path,Class,Split", "FILE, Diagnosis,SET", "image,target,subset"])
@pytest.mark.parametrize("words", [("train", "test"), ("Train ", "TEST"), ("training", "val"), ("train", "dev")])
def test_the_split_of_the_owner_counts_however_it_is_written(tmp_path, head, words):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{words[i % 4 == 0]}", head)
    task = task_of(path)
    assert (len(task.private.y), len(task.test.y)) == (75, 25)


def test_a_column_that_says_train_or_test_is_the_split_whatever_its_name(tmp_path):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{('test', 'train')[i % 4 > 0]},x", "path,label,usage,site")
    task = task_of(path)
    assert len(task.test.y) == 25
    assert named(task)["columns"].text == "a.csv: columns that are not used: site"
    assert 5 < len(task_of(path, split="none").test.y) < 40


@pytest.mark.parametrize(
    ("head", "values", "why"),
    [
        ("path,label,split", ("train", "tset"), "column split has test, tset|column split has train, tset"),
        ("path,label,fold", ("0", "1"), "column fold numbers parts, and none is named as the test part"),
    ],
)
def test_a_split_that_is_not_clear_is_refused(tmp_path, head, values, why):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{values[i % 2]}", head)
    refused(rf"({why}).*pair.read.split=none", path)
    task_of(path, split="none")


@pytest.mark.parametrize(
    "ways", [("cat", "cat "), ("cat", "Cat"), ("1", "1.0"), ("1", "01"), ("caf\u00e9", "cafe\u0301")]
)
def test_a_label_that_is_written_in_two_ways_is_one_or_an_error(tmp_path, ways):
    path = table(tmp_path / "t", lambda i: ways[i % 2] if i % 3 else "dog")
    refused(r"differ in how they are written alone: set pair.read.labels=fold.*accept=\[labels\]", path)
    task = task_of(path, labels=Fold.fold)
    assert (task.classes, len(task.names)) == (2, 2)
    assert task_of(path, accept=["labels"]).classes == 3


@pytest.mark.parametrize("none", ["nan", "", "NaN", "-1", "None", "-9", "-99.0", "-999", ".", "--", r"\N", "Unlabeled"])
def test_examples_without_a_label_are_left_out(tmp_path, none):
    path = table(tmp_path / "t", lambda i: none if i % 10 == 0 else Y[i] % 3)
    task = task_of(path)
    assert task.classes == 3
    assert len(task.private.y) + len(task.test.y) == 90
    assert "10 of 100 rows have no label" in named(task)["unlabelled"].text


def test_minus_one_may_be_a_class(tmp_path):
    assert task_of(table(tmp_path / "t", lambda i: (-1, 1)[i % 2])).names == ("-1", "1")
    refused(r"labels -1, 0 and 1: -1 may be a class", table(tmp_path / "u", lambda i: i % 3 - 1))


def test_codes_of_no_label_may_be_classes(tmp_path):
    refused(
        r"34 of 100 rows have no label \(-9\).*if that is a class", table(tmp_path / "t", lambda i: (-9, 0, 1)[i % 3])
    )
    assert task_of(table(tmp_path / "u", lambda i: (-9, -2, 1)[i % 3])).names == ("-2", "-9", "1")
    path = table(tmp_path / "v", lambda i: ("unknown", "mild", "severe")[i % 3])
    refused(r"34 of 100 rows have no label \(unknown\).*if that is a class", path)


def test_several_labels_of_an_image_are_several_labels(tmp_path):
    task = task_of(table(tmp_path / "t", lambda i: ("A|B", "A", "B", "C|A")[i % 4], n=200))
    assert (task.names, task.metric) == (("A", "B", "C"), "auc")
    assert set(map(tuple, task.private.y.tolist())) == {(1, 1, 0), (1, 0, 0), (0, 1, 0), (1, 0, 1)}


@pytest.mark.parametrize("value", ["1", "1.0"])
def test_a_column_for_each_class_gives_the_classes(tmp_path, value):
    path = table(tmp_path / "t", lambda i: ",".join(value if Y[i] % 3 == c else "0" for c in range(3)), "path,A,B,C")
    task = task_of(path)
    assert (task.names, task.metric, task.private.y.dim()) == (("A", "B", "C"), "accuracy", 1)
    assert "labels by the columns A, B, C" in named(task)["columns"].text

    # a row with several classes changes nothing about the others
    of = [",".join(value if Y[i] % 3 == c or i == 5 else "0" for c in range(3)) for i in range(100)]
    path = table(tmp_path / "u", of.__getitem__, "path,A,B,C")
    refused(r"1 of 100 rows have several classes, and are left out.*accept=\[conflict\]", path)
    assert task_of(path, accept=["conflict"]).metric == "accuracy"
    assert task_of(path, label=["A", "B", "C"]).metric == "auc"  # as their owner says

    # nor does a single value take a class from those who have it
    of = [",".join("2" if (i, c) == (5, 1) else value if Y[i] % 3 == c else "0" for c in range(3)) for i in range(100)]
    path = table(tmp_path / "v", of.__getitem__, "path,A,B,C")
    refused(r"1 of 300 labels are not 0 or 1.*leave the cell of an unknown empty.*accept=\[not_known\]", path)
    assert task_of(path, accept=["not_known"]).names == ("A", "B", "C")

    # a column with other values that overlaps with classes is none of them
    of = [
        ",".join(value if Y[i] % 3 == c else "0" for c in range(3)) + f",{int(i % 12 == 0) + 2 * (i == 7)}"
        for i in range(100)
    ]
    task = task_of(table(tmp_path / "w", of.__getitem__, "path,A,B,C,visits"))
    assert task.names == ("A", "B", "C")


def test_a_column_for_each_label_gives_several_labels_if_its_owner_says_so(tmp_path):
    told = ("1,0,0", "0,1,1", "0,0,0", "0,1,0")
    path = table(tmp_path / "t", lambda i: told[i % 4], "path,A,B,C")
    refused(r"no column label: it has path, A, B, C: give pair.read.label=COLUMN", path)
    task = task_of(path, label=["A", "B", "C"])
    assert (task.names, task.metric) == (("A", "B", "C"), "auc")
    assert set(map(tuple, task.private.y.tolist())) == {(1, 0, 0), (0, 1, 1), (0, 0, 0), (0, 1, 0)}
    assert len(task.private.y) + len(task.test.y) == 100  # an example without a label is one of none of them

    path = table(tmp_path / "u", lambda i: ("1,0,-1", "0,1,1", ",0,0", "0,1,0")[i % 4], "path,A,B,C")
    refused(r"25 of 300 labels are not 0 or 1: leave .* empty.*accept=\[not_known\]", path, label=["A", "B", "C"])
    y = task_of(path, label=["A", "B", "C"], accept=["not_known"]).private.y.nan_to_num(-1)
    assert set(map(tuple, y.tolist())) == {(1, 0, -1), (0, 1, 1), (-1, 0, 0), (0, 1, 0)}


def test_an_empty_cell_of_a_label_is_not_known(tmp_path):
    path = table(tmp_path / "t", lambda i: ("1,,0", "0,1,", "na,0,?", ",,")[i % 4], "path,A,B,C", n=200)
    task = task_of(path, label=["A", "B", "C"])
    assert "200 of 450 labels are not known, and count neither as 0 nor as 1" in named(task)["not_known"].text
    assert set(map(tuple, task.private.y.nan_to_num(-1).tolist())) == {(1, -1, 0), (0, 1, -1), (-1, 0, -1)}
    assert "50 of 200 rows have no label (nothing) and are left out" in named(task)["unlabelled"].text

    # of rows with one label each, which would otherwise be classes
    path = table(tmp_path / "u", lambda i: ("1,0", "0,1", "1,")[i % 3], "path,A,B")
    assert set(map(tuple, task_of(path, label=["A", "B"]).private.y.nan_to_num(-1).tolist())) == {
        (1, 0),
        (0, 1),
        (1, -1),
    }


def test_copies_with_equal_labels_may_be_unknown(tmp_path):
    path = table(tmp_path / "t", lambda i: ("1,", "0,1")[i % 2], "path,A,B")
    for i in (0, 2, 4):
        picture(0).save(path.parent / f"{i}.png")
    found = named(task_of(path, label=["A", "B"]))
    assert "100 images are 98 different ones" in found["copies"].text
    assert "conflict" not in found


def test_a_row_that_repeats_another_is_one_example(tmp_path):
    path = table(tmp_path / "t", lambda i: Y[i] % 2)
    path.write_text(path.read_text() + "\n" + "\n".join(path.read_text().splitlines()[1:]))
    task = task_of(path)
    assert len(task.private.y) + len(task.test.y) == 100
    path.write_text(path.read_text() + f"\n3.png,{1 - Y[3] % 2}")
    refused(r"2 images have copies with other labels", path)


def test_other_kinds_of_tables_and_names_of_files(tmp_path):
    path = table(tmp_path / "t", lambda i: Y[i] % 2)
    rows = path.read_text().splitlines()
    (tmp_path / "t" / "sub").mkdir()
    shutil.move(tmp_path / "t" / "0.png", tmp_path / "t" / "sub" / unicodedata.normalize("NFD", "\u00e4.png"))
    rows[1] = f" .\\sub\\\u00e4.png ,{Y[0] % 2}"  # blanks, separators of Windows and another form of Unicode at once
    (tmp_path / "t" / "a.tsv").write_text("\n".join(row.replace(",", "\t") for row in rows))
    task = task_of(tmp_path / "t" / "a.tsv")
    assert len(task.private.y) + len(task.test.y) == 100


# Folders


@pytest.mark.parametrize("lost", ["other suffix", "deeper", "empty"])
def test_a_class_that_would_be_lost_is_an_error(tmp_path, lost, capsys):
    path = folder(tmp_path / "f", classes=3)
    files = sorted((path / "c2").iterdir())
    (path / "c2" / "left").mkdir()
    for file in files:
        if lost == "empty":
            file.unlink()
        else:
            file.rename(path / "c2" / "left" / file.name if lost == "deeper" else file.with_suffix(".heic"))
    refused(r"1 class folders without images that are read: c2 \(.*accept=\[class_lost\]", path)
    assert main(["data", "check", str(path)]) == 1
    assert main(["fit", str(path), f"to={tmp_path / 'r'}", f"results={tmp_path / 'results'}"]) == 1
    assert capsys.readouterr().err.count("1 class folders without images that are read: c2") == 2
    assert not (tmp_path / "results").exists()
    assert task_of(path, accept=["class_lost"]).classes == 2


def test_hidden_folders_are_no_classes(tmp_path):
    path = folder(tmp_path / "f")
    for name in (".ipynb_checkpoints", "__MACOSX", ".Trash"):
        shutil.copytree(path / "c0", path / name)
    task = task_of(path)
    assert task.names == ("c0", "c1")
    assert len(task.private.y) + len(task.test.y) == 100
    assert ".ipynb_checkpoints" in named(task)["hidden"].text


def test_a_test_part_without_classes_is_not_tested_on(tmp_path):
    folder(tmp_path / "f" / "train")
    (tmp_path / "f" / "test").mkdir()
    for i in range(100, 120):
        picture(i).save(tmp_path / "f" / "test" / f"{i}.png")
    task = task_of(tmp_path / "f")
    assert len(task.private.y) + len(task.test.y) == 100
    assert any("test has 20 images without classes" in finding.text for finding in task.findings)


@pytest.mark.parametrize(
    "names",
    [
        *("trainset testset", "train_set test-set", "Training test-images", "train validation_data", "train testset"),
        *("TrainData ValImages", "digits_train digits_test", "train1 test1", "train eval", "Train holdout"),
    ],
)
def test_folders_with_names_like_parts_are_no_classes(tmp_path, names):
    for name in names.split():
        folder(tmp_path / "f" / name, n=40)
        picture(60).save(tmp_path / "f" / name / "c0" / f"{name}.png")
    path, flat = tmp_path / "f", tmp_path / "flat"
    for name in names.split():
        shutil.copytree(path / name / "c0", flat / name)
    for each in (path, flat):
        refused(rf"{' and '.join(names.split())} have names like parts.*rename them train", each)


def test_classes_with_words_of_parts_are_classes(tmp_path):
    for name in ("train_station", "test_tube", "valley"):
        folder(
            tmp_path / "f" / name, n=20, classes=1, save=lambda i, file: picture(i).save(file.parents[1] / file.name)
        )
        (tmp_path / "f" / name / "c0").rmdir()
    assert open_dataset(str(tmp_path / "f"), "", False).names == ("test_tube", "train_station", "valley")
    assert "split" not in named(open_dataset(str(tmp_path / "f"), "", False))


def test_class_folders_that_differ_in_case_alone_are_an_error(tmp_path):
    path = folder(tmp_path / "f", classes=3)
    (path / "c2").rename(path / "C1")
    refused(r"class folders 'C1', 'c1' differ in how they are written alone", path)


def test_damaged_files_are_named_at_once_and_may_be_left_out(tmp_path):
    path = folder(tmp_path / "f")
    damaged = sorted(path.rglob("*.png"))[::9]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(
        UserError, match=rf"{len(damaged)} of 100 images cannot be read: .*pair.read.skip=true"
    ) as error:
        task_of(path, tmp_path / "root")
    (listed,) = (tmp_path / "root").rglob("*.unreadable.txt")
    assert str(listed) in str(error.value)
    assert listed.stat().st_mode & 0o77 == 0
    assert all(str(file) in listed.read_text() for file in damaged)
    task = task_of(path, tmp_path / "root", skip=True)
    assert len(task.private.y) + len(task.test.y) == 100 - len(damaged)
    assert main(["data", "forget", str(path), f"data_root={tmp_path / 'root'}"]) == 0
    assert not listed.exists()
    for file in (path / "c1").iterdir():
        file.write_bytes(b"")
    refused(r"no image of a class can be read: c1", path, tmp_path / "root", skip=True)


def test_what_is_said_of_images(tmp_path):
    """Of one value, with several frames, and a table next to images without classes."""
    path = folder(tmp_path / "f", n=60)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(path / "c0" / "black.png")
    frames = [picture(i) for i in (70, 71)]
    frames[0].save(path / "c1" / "frames.tif", save_all=True, append_images=frames[1:])
    of_images = named(task_of(path))
    assert of_images["black"].text == "f: 1 images have a single value, such as all black: black.png"
    assert "1 files have several pages or frames" in of_images["frames"].text
    flat = table(tmp_path / "t", lambda i: Y[i] % 2, name="metadata.csv").parent
    assert f"give {flat / 'metadata.csv'}" in named(open_dataset(str(flat), "", False))["table"].remedy


def test_each_finding_is_in_the_reference():
    root = Path(findings.__file__).parent
    used = {
        node.args[0].value
        for file in root.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("Finding", "on_columns")
        and isinstance(node.args[0], ast.Constant)
    }
    assert used == set(findings.NAMES)
    assert used > findings.FINAL


@pytest.mark.parametrize("name", ["my.zip", "x.h5", "notes.docx", "x.dta"])
def test_a_file_of_another_type_is_no_damaged_one(tmp_path, name, capsys):
    (tmp_path / name).write_bytes(b"anything")
    assert main(["data", "check", str(tmp_path / name)]) == 1
    err = capsys.readouterr().err
    assert "is not read" in err
    assert "corrupt" not in err
    assert "delete" not in err
    assert ("pandas.read_stata('x.dta').to_csv('x.csv', index=False)" in err) == (name == "x.dta")


def test_a_path_that_begins_with_a_tilde_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("~x.csv").write_text("a,label\n1,0\n")
    assert main(["data", "check", "./~x.csv"]) == 1
    assert "begins with ~ and the name of no user" in capsys.readouterr().err
    with pytest.raises(UserError, match="begins with ~ and the name of no user"):
        fit("./~x.csv")
    assert at_path("./~x.csv", Takes(True, (Field("a"),))).n == 1


def test_a_path_without_its_dot_is_told_from_a_named_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "split")
    assert main(["data", "check", "split"]) == 2
    assert "write ./split" in capsys.readouterr().err


# Images


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_read_upright(tmp_path, orientation):
    """In training and in prediction: what was stored turned is turned back."""
    stored_as = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's Transpose, by orientation

    def save(i, file):
        exif = Image.Exif()
        exif[0x112] = orientation
        image = picture(i).resize((8, 6))
        if orientation > 1:
            image = image.transpose(Image.Transpose(stored_as[orientation]))
        image.save(file, exif=exif)

    path = folder(tmp_path / "f", n=30, save=save)
    source = open_dataset(str(path), "", False)
    names = [name for part in source.files for name in part.names]
    images = [image for split in (source.train, source.test) for image in split.x]
    for name, x in zip(names, images, strict=True):
        upright = np.asarray(picture(int(name.split("/")[1].removesuffix(".png"))).resize((8, 6)))
        assert (x[0].numpy() == upright).all()
        assert (as_input(path / name, (1, 6, 8))[0].numpy() == upright).all()


def test_one_image_decides_neither_size_nor_colour(tmp_path):
    path = folder(tmp_path / "f", n=60)
    Image.fromarray(np.full((16, 120), 7, np.uint8)).save(path / "c0" / "0.png")
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 8, 3), np.uint8)).save(path / "c1" / "00.png")
    assert open_dataset(str(path), "", False).train.x.shape[1:] == (1, 8, 8)
    assert open_dataset(str(path), "", False, read=Read(channels=3, size=10)).train.x.shape[1:] == (3, 10, 10)


def test_a_network_on_pixels_asks_for_a_size(tmp_path):
    path = folder(tmp_path / "f", save=lambda i, file: picture(i).resize((8 + i % 3, 9)).save(file))
    pair = Pair(private=str(path), public=None, m=1, convert=Convert.resize)
    with pytest.raises(UsageError, match=r"its images have 3 sizes, and 34 of 100 are 9x8: set pair.read.size=SIDE"):
        load(pair, "", False, pixels=True)
    assert load(pair, "", False).shape == (1, 32, 32)
    pair.read.size = 8
    assert load(pair, "", False, pixels=True).shape == (1, 8, 8)


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "PA"])
def test_grey_images_with_a_palette_or_transparency_are_grey(tmp_path, mode):
    def save(i, file):
        image = picture(i).convert("LA" if mode == "LA" else "RGBA" if mode == "RGBA" else "P")
        image.convert(mode).save(file, format="TIFF" if mode == "PA" else "PNG")

    source = open_dataset(str(folder(tmp_path / "f", n=40, save=save)), "", False)
    assert source.train.x.shape[1:] == (1, 8, 8)
    names = source.files[0].names
    expected = np.asarray(picture(int(names[0].split("/")[1].removesuffix(".png"))))
    assert (source.train.x[0, 0].numpy() == expected).all()


def test_what_shows_through_is_white(tmp_path):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2, :, 3] = 255
    Image.fromarray(pixels, "RGBA").save(tmp_path / "a.png")
    assert as_input(tmp_path / "a.png", (1, 4, 4))[0].tolist() == [[0] * 4] * 2 + [[255] * 4] * 2


def test_twelve_bits_in_sixteen_ask_how_many_they_are(tmp_path):
    path = folder(
        tmp_path / "f",
        save=lambda i, file: Image.fromarray((900 + X[i].reshape(8, 8) * 32).astype(np.uint16)).save(file),
    )
    refused(r"100 of 100 16-bit images use less than a sixteenth .* set pair.read.bits=12", path)
    assert len(task_of(path, accept=["bits"]).private.x.unique()) <= 3
    task = task_of(path, bits=12)
    assert len(task.private.x.unique()) == 17
    file = next(path.rglob("*.png"))
    values = np.asarray(Image.open(file)).astype(float)
    assert (as_input(file, (1, 8, 8), 12)[0].numpy() == np.floor(values * 255 / 4095 + 0.5)).all()


def tiff(file, pixels, photometric):
    """A TIFF of 16 bits, [h, w] or [h, w, 3], which Pillow does not write in colour, or with white as the lowest."""
    (height, width), channels = pixels.shape[:2], 1 if pixels.ndim == 2 else 3
    tags = {256: width, 257: height, 258: 16, 259: 1, 262: photometric, 273: 8 + 2 + 9 * 12 + 4, 277: channels}
    tags |= {278: height, 279: pixels.nbytes}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    file.write_bytes(b"II*\0" + struct.pack("<IH", 8, 9) + entries + bytes(4) + pixels.tobytes())


def dicom(file, values, patient="P1", interpretation="MONOCHROME2", **tags):
    """A DICOM file of 12 bits in 16."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    image.PatientID, image.PhotometricInterpretation = patient, interpretation
    image.SOPClassUID, image.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    image.Rows, image.Columns = values.shape
    image.SamplesPerPixel, image.PixelRepresentation = 1, 0
    image.BitsAllocated, image.BitsStored, image.HighBit = 16, 12, 11
    for tag, value in tags.items():
        setattr(image, tag, value)
    image.PixelData = values.astype(np.uint16).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save_as(file, enforce_file_format=True)


def test_dicom_is_read_as_it_is_shown(tmp_path):
    values = np.arange(64).reshape(8, 8) * 65
    dicom(tmp_path / "a.dcm", values)
    plain = as_input(tmp_path / "a.dcm", (1, 8, 8))[0].numpy()
    assert (plain == np.round(values / 4095 * 255)).all()
    dicom(tmp_path / "b.dcm", values, interpretation="MONOCHROME1")
    assert (as_input(tmp_path / "b.dcm", (1, 8, 8))[0].numpy() == np.round(255 - values / 4095 * 255)).all()
    dicom(tmp_path / "c.dcm", values, WindowCenter=1000.5, WindowWidth=1001)
    shown = as_input(tmp_path / "c.dcm", (1, 8, 8))[0].numpy()
    assert (shown[values <= 500] == 0).all()
    assert (shown[values > 1500] == 255).all()
    assert abs(int(shown[values == 1040][0]) - round(255 * 540 / 1000)) <= 1
    dicom(tmp_path / "d.dcm", values, RescaleSlope=2, RescaleIntercept=-1000, WindowCenter=1000.5, WindowWidth=1001)
    scaled = as_input(tmp_path / "d.dcm", (1, 8, 8))[0].numpy()
    assert (scaled[values * 2 - 1000 <= 500] == 0).all()
    assert (scaled[values * 2 - 1000 > 1500] == 255).all()
    (tmp_path / "e.dcm").write_bytes(b"no DICOM at all")
    with pytest.raises(UserError, match=r"e.dcm: not a readable image"):
        as_input(tmp_path / "e.dcm", (1, 8, 8))


@pytest.mark.parametrize(
    "tags",
    [
        {"WindowCenter": None, "WindowWidth": ""},
        {"WindowCenter": 2048},
        {"WindowCenter": 100, "WindowWidth": 0},
        {"RescaleSlope": None, "RescaleIntercept": None},
        {"RescaleSlope": 2, "RescaleIntercept": ""},
        {"NumberOfFrames": None, "VOILUTFunction": "", "VOILUTSequence": [], "ModalityLUTSequence": []},
        {"RescaleSlope": -1, "RescaleIntercept": 4095},
        {"RescaleSlope": -1, "RescaleIntercept": 4095, "WindowCenter": 2048, "WindowWidth": 4096},
    ],
)
def test_an_element_of_dicom_without_a_value_is_none(tmp_path, tags):
    values = np.arange(64).reshape(8, 8) * 65
    dicom(tmp_path / "a.dcm", values, **tags)
    shown = 4095 - values if tags.get("RescaleSlope") == -1 else values
    assert (as_input(tmp_path / "a.dcm", (1, 8, 8))[0].numpy() == np.round(shown / 4095 * 255)).all()


@pytest.mark.parametrize(("stored", "most"), [(9, 17), (12, 200), (15, 1500), (14, 4095)])
def test_values_that_use_little_of_their_bits_are_an_error_however_many_these_are(tmp_path, stored, most):
    def save(i, file):
        values = X[i].reshape(8, 8) * most // 16
        dicom(file.with_suffix(".dcm"), values, BitsStored=stored, HighBit=stored - 1)

    path = folder(tmp_path / "f", save=save)
    if most < 2**stored / 16:
        refused(rf"100 of 100 {stored}-bit images use less than a sixteenth .* set pair.read.bits=\d+", path)
    else:
        assert "bits" not in named(task_of(path))


@pytest.mark.parametrize("window", [{}, {"WindowCenter": None, "WindowWidth": None}])
@pytest.mark.parametrize(("signed", "least"), [(0, 0), (1, 0), (1, -1024)])
def test_the_bits_that_are_advised_for_dicom_cut_nothing_off(tmp_path, window, signed, least):
    def save(i, file):
        values, tags = least + X[i].reshape(8, 8) * 255, {"BitsStored": 16, "HighBit": 15, **window}
        dicom(file.with_suffix(".dcm"), values, PixelRepresentation=signed, **tags)

    path = folder(tmp_path / "f", save=save)
    refused(r"use less than a sixteenth .* set pair.read.bits=12", path)
    task = task_of(path, bits=12)
    assert len(task.private.x.unique()) == 17
    assert "bits" not in named(task)
    assert "have values of more than 10 bits, which are cut off" in named(task_of(path, bits=10))["bits"].text


def test_people_of_dicom_files_are_their_patients(tmp_path):
    for i in range(80):
        dicom(tmp_path / "f" / f"c{Y[i] % 2}" / f"{i}.dcm", X[i].reshape(8, 8) * 255, f"P{i // 4}{' ' * (i % 2)}")
    task = task_of(tmp_path / "f", unit="PatientID", validation=0.3)
    assert task.units + task.held_out_units + len(task.test.y) / 4 == 20
    assert task.shape == (1, 8, 8)
    refused(r"DICOM has no such tag", tmp_path / "f", unit="Patient", kind=UsageError)
    refused("80 DICOM images are of 20 patients: set pair.unit=PatientID, or an image is", tmp_path / "f")
    rows = [f"f/c{Y[i] % 2}/{i}.dcm,{Y[i] % 2}" for i in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    refused("of 20 patients: add a column of them, and set pair.unit=COLUMN", tmp_path / "t.csv")


@pytest.mark.parametrize("name", ["IM{:04d}", "1.2.840.{}", "{}.IMA", "scan.{:03d}"])
def test_dicom_files_are_known_without_a_usual_suffix(tmp_path, name):
    for i in range(60):
        dicom(tmp_path / "f" / f"c{Y[i] % 2}" / name.format(i), X[i].reshape(8, 8) * 255, f"P{i // 3}")
    (tmp_path / "f" / "README").write_text("no image")
    (tmp_path / "f" / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    os.mkfifo(tmp_path / "f" / "c0" / "pipe")
    task = task_of(tmp_path / "f", unit="PatientID")
    assert task.units + len(task.test.y) / 3 == 20
    assert "1 files are not read: 1 without extension" in named(task)["not_read"].text
    assert at_path(tmp_path / "f").n == 60
    file = tmp_path / "f" / f"c{Y[7] % 2}" / name.format(7)
    assert (as_input(file, (1, 8, 8))[0].numpy() == np.round(X[7].reshape(8, 8) * 255 / 4095 * 255)).all()


def test_a_compressed_dicom_file_names_the_package_that_decodes_it(tmp_path):
    for i in range(4):
        file = tmp_path / f"c{i % 2}" / f"{i}.dcm"
        dicom(file, X[i].reshape(8, 8) * 255)
        image = pydicom.dcmread(file)
        image.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
        image.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xf7"])
        image.save_as(file)
    refused(r"0.dcm: compressed as JPEG-LS .*no decoder is installed: pip install pylibjpeg", tmp_path, skip=True)


# A fit of it


def test_a_plan_has_the_numbers_of_the_release(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "mine", n=300)
    for i in range(12):
        shutil.copy(path / "c0" / "0.png", path / "c0" / f"again{i}.png")
    words = ["fit", str(path), "epsilon=4", "delta=1e-3", "threads=1"]
    assert main([*words, "dry=true"]) == 0
    plan = "".join(capsys.readouterr())
    assert "312 images are 300 different ones" in plan
    assert main(words) == 0
    (file,) = (tmp_path / "results" / "runs").glob("*/result.json")
    record = json.loads(file.read_text())
    n, held = record["private_examples"], record["quality"]["examples"]
    assert f"{n:,} for training, {held:,} to measure, {record['test_examples']:,} for testing" in plan
    assert n + held + record["test_examples"] == 300
    assert any("312 images are 300 different ones" in note for note in record["notes"])


def test_a_network_on_pixels_needs_a_size_even_if_squares_are_kept(tmp_path):
    """A check, or a model with a backbone, takes squares; a network on pixels may not find and use them."""
    path = folder(tmp_path / "f", save=lambda i, file: picture(i).resize((8 + i % 3, 9)).save(file))
    pair = Pair(private=str(path), public=None, m=1, convert=Convert.resize)
    assert main(["data", "check", str(path), f"data_root={tmp_path / 'root'}"]) == 0
    for _ in ("in this process", "again"):
        with pytest.raises(UsageError, match=r"set pair.read.size=SIDE"):
            load(pair, str(tmp_path / "root"), False, pixels=True)


def test_a_folder_with_a_name_like_a_key_keeps_its_name(tmp_path):
    path = folder(tmp_path / "split=test" / "label=3", n=20)
    for file in (path / "c0").iterdir():
        file.write_bytes(b"")
    refused(r"/split=test/label=3.* pair.read.skip=true", path, tmp_path / "root")


def test_a_modality_table_is_applied(tmp_path):
    values = np.arange(64).reshape(8, 8)
    lut = pydicom.Dataset()
    lut.LUTDescriptor, lut.LUTData = [64, 0, 8], (255 - 4 * np.arange(64)).astype(np.uint16).tobytes()
    lut.ModalityLUTType = "US"
    dicom(tmp_path / "a.dcm", values, ModalityLUTSequence=pydicom.Sequence([lut]))
    assert (as_input(tmp_path / "a.dcm", (1, 8, 8))[0].numpy() == 255 - 4 * values).all()


# One unit decides about no other


def sides_of(path, unit=None, **read):
    """The files of the training and of the test part."""
    source = open_dataset(str(path), "", False, unit, read=Read(**read))
    return [set(files.names) for files in source.files]


@pytest.mark.attack
def test_the_only_test_row_moves_nobody_out_of_training(tmp_path):
    def row(i):  # people of four images, some with images in both parts
        return f"{Y[i] % 2},P{i // 4},{('train', 'train', 'train', 'val')[i % 4]}"

    path = table(tmp_path / "t", row, "path,label,patient,split")
    before = sides_of(path, "patient")
    path.write_text(path.read_text().replace("99.png,1,P24,val", "99.png,1,P24,test"))
    assert sides_of(path, "patient") == before
    assert len(before[1]) == 25


@pytest.mark.attack
@pytest.mark.parametrize("where", ["border of sizes", "border of colours"])
def test_the_image_that_decides_the_shape_of_all_moves_no_other(tmp_path, where):
    def save(i, file):
        size, mode = ((12, 12), "RGB") if i < 10 else ((8, 8), "L")
        image = picture(i).resize(size if where == "border of sizes" else (8, 8))
        (image.convert(mode) if where == "border of colours" else image).save(file)

    path = folder(tmp_path / "f", n=100, save=save)
    before, shape = sides_of(path), open_dataset(str(path), "", False).train.x.shape[1:]
    more = path / "c0" / "more.png"
    image = picture(200).resize((12, 12)) if where == "border of sizes" else picture(200).convert("RGB")
    image.save(more)
    after = [{name for name in names if name != "c0/more.png"} for names in sides_of(path)]
    assert open_dataset(str(path), "", False).train.x.shape[1:] != shape
    assert after == before


@pytest.mark.attack
@pytest.mark.parametrize(
    ("head", "value"), [("path,label,phase", "TBD"), ("path,label,is_train", "1"), ("path,label,Usage", "PublicTest")]
)
def test_a_column_that_may_be_the_split_is_no_note(tmp_path, head, value):
    words = {"TBD": ("train", "test"), "1": ("0", "1"), "PublicTest": ("Training", "PrivateTest")}[value]
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{value if i == 7 else words[i % 2]}", head)
    refused(r"may be the split.*pair.read.split=none", path)
    task_of(path, split="none")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("train", "test", "mixed"),
    [
        ("train/{}", "test/{}", True),
        ("/home/test/Training\\{}", "/home/test/val2017\\{}", True),
        ("all/train_{}", "all/test_{}", True),
        ("train/{}", "train/{}", False),
        ("cat/{}", "test/{}", False),  # classes
        ("train_station/{}", "test_track/{}", False),
    ],
)
def test_paths_in_folders_of_parts_are_not_mixed_without_a_word(tmp_path, train, test, mixed):
    names = [(test if i < 2 else train).format(f"{i}.png") for i in range(9)] + ["9.png"]
    (tmp_path / names[-1]).touch()
    frame = pd.DataFrame({"path": names, "label": [*"ab"] * 5, "of": ["test"] * 2 + ["train"] * 8})

    def of_split(columns, **read):
        frame[columns].to_csv(tmp_path / "a.csv", index=False)
        return [f for f in tables.list_table(tmp_path / "a.csv", None, Read(**read)).findings if f.name == "split"]

    assert not of_split(["path", "label", "of"])  # a column says it
    assert not of_split(["path", "label"], split="none")
    findings = of_split(["path", "label"])
    assert [f.severity for f in findings] == ["error"] * mixed
    assert all("are those of training and test images (7 and 2), which are mixed" in f.text for f in findings)


def test_one_row_with_two_labels_changes_no_model(tmp_path):
    path = table(tmp_path / "t", lambda i: "cat|dog" if i == 5 else ("cat", "dog")[Y[i] % 2])
    refused(r"1 of 100 rows have several labels .*accept=\[conflict\]", path)
    task = task_of(path, accept=["conflict"])
    assert (task.names, task.metric, len(task.private.y) + len(task.test.y)) == (("cat", "dog"), "accuracy", 99)


def test_an_image_that_a_person_has_with_two_labels_is_a_conflict(tmp_path):
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},P{i // 4}", "path,label,patient")
    path.write_text(path.read_text() + f"\n3.png,{1 - Y[3] % 2},P0")
    refused(r"2 images have copies with other labels", path, unit="patient")


# What is there is read as it is


def test_classes_that_are_renamed_are_read_anew(tmp_path):
    path = table(tmp_path / "t", lambda i: ("cat", "dog")[Y[i] % 2])
    assert task_of(path).names == ("cat", "dog")
    path.write_text(path.read_text().replace("cat", "cow").replace("dog", "pig"))
    assert task_of(path).names == ("cow", "pig")


def test_files_of_one_time_and_size_are_read_anew(tmp_path):
    path = folder(tmp_path / "f")
    file = next((path / "c0").iterdir())
    Image.new("L", (8, 8), 10).save(file, "BMP")
    os.utime(file, (0, 0))
    before = open_dataset(str(path), "", False)
    Image.new("L", (8, 8), 200).save(file, "BMP")
    os.utime(file, (0, 0))
    after = open_dataset(str(path), "", False)
    sums = [int(s.train.x.sum()) + int(s.test.x.sum()) for s in (before, after)]
    assert sums[1] - sums[0] == 190 * 64


def test_linked_class_folders_are_the_test_part(tmp_path):
    real = folder(tmp_path / "real", n=40)
    path = folder(tmp_path / "f" / "train", n=100).parent
    (path / "test").mkdir()
    for name in ("c0", "c1"):
        (path / "test" / name).symlink_to(real / name)
    assert len(task_of(path).test.y) == 40
    (real / "c0" / "loop").symlink_to(real)  # is followed once
    assert len(open_dataset(str(path), "", False).test.y) == 40


def test_arrays_are_read_as_their_owner_means_them(tmp_path):
    x, y = (X[:150].reshape(-1, 8, 8) * 15).astype(np.uint8), np.where(Y[:150] % 2, 8, 3)
    parts = {"train": slice(0, 100), "val": slice(100, 130), "test": slice(130, 150)}
    arrays = {f"{part}_images": x[at] for part, at in parts.items()}
    np.savez(tmp_path / "a.npz", **arrays, **{f"{part}_labels": y[at] for part, at in parts.items()})
    task = task_of(tmp_path / "a.npz")
    assert (task.classes, task.names, len(task.test.y)) == (2, ("3", "8"), 50)
    refused(
        r"pair.read.bits=...: .*a.npz is an array of images, on which it has no effect: remove it",
        tmp_path / "a.npz",
        bits=12,
        kind=UsageError,
    )

    hot = {f"{part}_labels": np.eye(2, dtype=np.uint8)[y[at] // 8] for part, at in parts.items()}
    np.savez(tmp_path / "b.npz", **arrays, **hot)
    assert task_of(tmp_path / "b.npz").metric == "accuracy"


@pytest.mark.parametrize(
    ("name", "kind", "without_effect"),
    [
        ("images", "a folder of images", {"bounds": [0, 1], "scale": "none", "label": "x"}),
        ("texts", "a folder of texts", {"bounds": [0, 1], "size": 32}),
        ("images.csv", "a table of images", {"bounds": [0, 1], "scale": "none"}),
        ("rows.csv", "a table of rows", {"channels": 1, "skip": True}),
        ("images.npz", "an array of images", {"bits": 12, "scale": "private", "skip": True}),
        ("rows.npz", "an array of rows", {"size": 32, "split": "x"}),
    ],
)
def test_a_rule_of_reading_without_effect_is_refused(name, kind, without_effect, tmp_path):
    images = folder(tmp_path / "images", n=40)
    write_csv(
        tmp_path / "images.csv", [{"image": str(file), "label": file.parent.name} for file in images.rglob("*.png")]
    )
    write_csv(tmp_path / "rows.csv", [{"x": float(i), "label": i % 2} for i in range(40)])
    write_npz(tmp_path / "images.npz", *((X[:40].reshape(-1, 8, 8).astype(np.uint8), Y[:40]),) * 2)
    np.savez(tmp_path / "rows.npz", train_x=np.eye(40), train_y=np.arange(40) % 2)
    for i in range(12):
        file = tmp_path / "texts" / "ab"[i % 2] / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(i))
    for key, value in without_effect.items():
        why = rf"pair.read.{key}=...: .* is {kind}, on which it has no effect: remove it"
        refused(why, tmp_path / name, kind=UsageError, **{key: value})


def test_labels_of_public_arrays_are_numbered_as_the_private_ones(tmp_path):
    images = (X.reshape(-1, 8, 8) * 15).astype(np.uint8)
    for name, classes, first in (("a", (3, 5, 8), 0), ("b", (5, 8), 900)):
        at = first + np.flatnonzero(np.isin(Y[first : first + 900], classes))
        write_npz(tmp_path / f"{name}.npz", *((images[half], Y[half]) for half in np.array_split(at, 2)))
    pair = Pair(private=str(tmp_path / "a.npz"), public=str(tmp_path / "b.npz"), m=50, convert=Convert.resize)
    assert sorted(set(load(pair, "", False).public.y.tolist())) == [1, 2]


def test_public_classes_that_the_private_set_lacks_keep_their_numbers(tmp_path):
    private, public = folder(tmp_path / "own"), tmp_path / "public"
    for i in range(100, 200):
        file = public / ("07", "12")[Y[i] % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(file)
    pair = Pair(private=str(private), public=str(public), m=50, convert=Convert.resize)
    assert set(load(pair, "", False).public.y.tolist()) == {7, 12}
    (public / "07").rename(public / "other")
    assert set(load(pair, "", False).public.y.tolist()) == {0, 1}  # of words, their order


@pytest.mark.parametrize("suffix", ["tif", "png"])
def test_the_size_of_a_turned_image_is_that_of_its_pixels(tmp_path, suffix):
    def save(i, file):
        image = Image.fromarray(np.tile(np.asarray(picture(i)), (2, 6)))  # 16 x 48
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(file.with_suffix(f".{suffix}"), exif=exif)

    task = task_of(folder(tmp_path / "f", save=save))
    assert task.shape == (1, 48, 16)
    assert "sizes" not in named(task)


@pytest.mark.parametrize("suffix", ["png", "tif", "ppm"])
def test_colours_of_16_bits_are_refused(tmp_path, suffix):
    def save(i, file):  # two by two pixels, 12 bits in 16
        pixels = np.arange(i, i + 12).astype("<u2").reshape(2, 2, 3)
        if suffix == "tif":
            return tiff(file.with_suffix(".tif"), pixels, 2)
        if suffix == "ppm":
            return file.with_suffix(".ppm").write_bytes(b"P6 2 2 65535\n" + pixels.astype(">u2").tobytes())

        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
        lines = b"".join(b"\0" + struct.pack(">6H", *range(i, i + 6)) for _ in range(2))
        body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
        return file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)

    refused(r"100 colour images have 16 bits a channel.*accept=\[bits\]", folder(tmp_path / "f", save=save))


@pytest.mark.parametrize("bits", [None, 12])
def test_a_tiff_whose_lowest_value_is_white_is_turned(tmp_path, bits):
    values = np.arange(64).astype("<u2").reshape(8, 8) * 64
    for photometric in (0, 1):
        tiff(tmp_path / f"{photometric}.tif", values, photometric)
    white, black = (as_input(tmp_path / f"{i}.tif", (1, 8, 8), bits).numpy() for i in (0, 1))
    assert (white == 255 - black).all()


def test_a_class_without_a_training_image_is_an_error(tmp_path):
    path = table(
        tmp_path / "t",
        lambda i: f"{Y[i] % 3},{'test' if Y[i] % 3 == 2 else ('train', 'test')[i % 2]}",
        "path,label,split",
    )
    refused(r"no training image of a class is left: 2.*accept=\[class_lost\]", path)


def test_measurements_are_no_classes(tmp_path):
    refused(r"100 classes of 100 examples.*accept=\[many\]", table(tmp_path / "t", lambda i: f"0.{i:03d}7"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n0.png,1,2\n", "line 2 has more values than the head has names: quote values with ','"),
        ("path,label,label\n0.png,1,2\n", "two columns are called label: rename one"),
        ("path,label\n0.png,caf\xe9\n", "not in UTF-8: convert it, such as by iconv"),
        ("0.png,1\n1.png,0\n", "its first line has values, and no names: write a first line with a name by column$"),
        ("0,0,5.1,M\n0,1,4.9,B\n", "has values, and no names"),
        ("17;1,5;M\n16;1,4;B\n", "has values, and no names"),
        ("-1.5\t2e-3\n1.5\t0\n", "has values, and no names"),
        ("sep=;\na;label\n1;x\n", "its first line, sep=, is for Excel: remove it"),
        ("a\0,\0b\0\n\0", "not in UTF-8: convert it, .* or from UTF-16"),
        ("\0a\0,\0b\0\n", "not in UTF-8: convert it, .* or from UTF-16"),
        (2 * "\xef\xbb\xbf" + "label,a\n0,1\n1,0\n", "it begins with two marks of UTF-8: remove one"),
    ],
)
def test_a_table_that_is_not_well_formed_is_one_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    refused(message, tmp_path / "a.csv")


@pytest.mark.parametrize("head", ["0,1,2,3,4", "1,2,3,4,5", "1e3,900.5,800,700,1", ",0,1,2,3", "age,sex,3,1"])
def test_numbers_in_order_may_be_names_of_columns(tmp_path, head):
    (tmp_path / "a.csv").write_text(f"{head},label\n" + "1," * head.count(",") + "1,x\n")
    assert tables.names_of(tmp_path / "a.csv") == [*head.split(","), "label"]


ROWS_IN = "a quoted value has a line break followed by as many '{}' as a row has: remove the stray quote"
MORE, OPEN = "text follows a closing quote: remove it", "an open quote is never closed: remove it"


@pytest.mark.parametrize(
    ("suffix", "rows", "line", "why"),
    [
        ("tsv", ["1\t2\tgood", '2\t3\t"good', "3\t4\tbad", '4\t4\t6 inch"', "5\t6\tx"], 3, ROWS_IN.format(r"\\t")),
        ("csv", ['1,2,"good', '3,4,bad, 6"', "5,6,x"], 2, ROWS_IN.format(",")),
        ("csv", ["1,2,x", "", '1,"2,good', "", "3,4,x", '3,4",x'], 4, ROWS_IN.format(",")),
        ("csv", ["5, 6, x", '1, 2, "good', '3, 4, bad 6"', "5, 6, x"], 3, ROWS_IN.format(",")),
        ("csv", ['1,2,"good', '3,4,"bad', "5,6,x"], 2, MORE),
        ("csv", ["1,2,x", '3,4,"bad', "5,6,x"], 3, OPEN),
        ("csv", ["1,2,x", r'3,4,"a \"bad\" film"', "5,6,x"], 3, MORE),
    ],
)
@pytest.mark.parametrize("names", [("path", "label", "note"), ("age", "label", "note"), ("id", "label", "text")])
def test_no_stray_quote_makes_one_example_of_several_rows(tmp_path, suffix, rows, line, why, names):
    """Texts of several people would be one example, or rows would be absent."""
    path = tmp_path / f"a.{suffix}"
    path.write_text("\n".join([("\t" if suffix == "tsv" else ",").join(names), *rows]) + "\n")
    refused(f"a.{suffix}: line {line}: {why}", path, accept=["words", "ids"])
    columns = (Field("age"), Field("label"))
    takes = {"path": Takes(), "age": Takes(rows=True, columns=columns), "id": Takes(text=TextInput("text", 8))}
    with pytest.raises(UserError, match=f"line {line}: {why}"):
        at_path(path, takes[names[0]])


def test_texts_of_several_lines_are_one_text_each(tmp_path):
    texts = ["Dear all,\nit is, as they say, good.\n\nBye, a", "one, two\r\nthree", 'a "b"\nc', "\n", '6" x']
    rows = [{"text": text, "label": label, "more": "1"} for text in texts for label in "ab"]
    for columns in (["text", "label"], ["label", "text"], ["more", "text", "label"]):
        pd.DataFrame(rows * 2)[columns].to_csv(tmp_path / "a.csv", index=False)
        kept = open_dataset(str(tmp_path / "a.csv"), "", False).texts
        assert sorted((*kept.train, *kept.test)) == sorted(4 * texts)


def test_a_name_that_is_not_text_is_one_line(tmp_path):
    path = folder(tmp_path / "f")
    picture(3).save(os.fsdecode(os.fsencode(path / "c0") + b"/caf\xe9.png"))
    refused(r"the name of 'c0/caf.*' is not UTF-8: rename it", path)


def test_a_finding_that_nobody_has_cannot_be_accepted(tmp_path):
    refused(
        r"accept=\[conflicts\]: no such finding \(did you mean conflict\?\)",
        folder(tmp_path / "f"),
        accept=["conflicts"],
        kind=UsageError,
    )


def test_a_table_next_to_a_folder_of_images_is_offered(tmp_path):
    path = folder(tmp_path / "f", classes=1)
    (path / "labels.csv").write_text("file,label")
    text = [finding.line() for finding in open_dataset(str(path), "", False).findings if finding.name == "table"]
    assert text == [f"f: labels.csv is next to images without classes: if it has their labels, give {path}/labels.csv"]
    (path / "labels.csv").write_text("img_nr\n0.png")
    with pytest.raises(UserError, match=r"no column path: it has img_nr: name the column of files path$"):
        at_path(path / "labels.csv")


@pytest.mark.parametrize("words", [("fit",), ("data", "check"), ("rank", "public=[noise]")])
def test_a_name_that_is_a_folder_here_is_told_how_to_be_one(tmp_path, monkeypatch, capsys, words):
    folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    key = "private=" if words[0] == "rank" else ""
    assert main([*words[: 2 if words[0] == "data" else 1], f"{key}mine", *(words[1:] if key else ())]) == 2
    assert "mine: is no named dataset: if you mean the path, write ./mine\n" in capsys.readouterr().err


# Few people, public sets, and words of each command


def test_few_people_of_whom_none_is_drawn_for_testing_get_a_remedy(tmp_path, capsys):
    names = next(
        [f"p{j}{i}" for i in range(3)] for j in range(99) if not drawn_of([f"p{j}{i}" for i in range(3)]).any()
    )
    path = table(tmp_path / "t", lambda i: f"{Y[i] % 2},{names[i % 3]}", "path,label,patient")
    said = (
        r"no test images of its 3 people: each is drawn for testing with probability 0.2 if no parts are given: give "
    )
    refused(rf"pair.private=.*{said}both, by pair.read.split=COLUMN of a table", path, unit="patient")
    assert main(["data", "check", str(path), "unit=patient"]) == 1
    assert f"{said}both, by split=COLUMN" in capsys.readouterr().err


def drawn_of(names):
    """Which people are in the fifth for testing."""
    return examples.drawn(examples.people_of("", names)[0], 0.2, "test")


@pytest.mark.parametrize("words", [("data", "check"), ("fit",)])
def test_each_command_names_its_own_keys(tmp_path, capsys, words):
    path = table(tmp_path / "t", lambda i: Y[i] % 2)
    assert main([*words, str(path), "unit=patient"]) == 2
    assert "pubsel: unit=patient: a.csv has no column patient: path, label\n" in capsys.readouterr().err
    refused(r"^pair.unit=patient: a.csv has no column patient", path, unit="patient", kind=UsageError)


def test_a_ranking_refuses_keys_without_effect_and_names_its_own(tmp_path, capsys):
    write_npz(
        tmp_path / "a.npz", *((X[at].reshape(-1, 8, 8).astype(np.uint8), Y[at]) for at in (slice(90), slice(90, 99)))
    )
    words = ["rank", "public=[noise]", f"results={tmp_path / 'results'}"]
    assert main([*words, f"private={tmp_path / 'a.npz'}", "bits=12"]) == 2
    assert "pubsel: bits=...: " in capsys.readouterr().err
    assert main([*words, f"private={tmp_path / 'a.npz'}", f"public=[{tmp_path / 'a.npz'}]", "distance.m=200"]) == 2
    assert "pair." not in capsys.readouterr().err


def with_public(private, public, m=20, **read):
    pair = Pair(private=str(private), public=str(public), m=m, convert=Convert.resize, overlap=Overlap.leave)
    pair.read = Read(**read)
    return load(pair, "", False)


def test_a_public_table_is_read_by_the_columns_that_it_has(tmp_path):
    def row(i):
        return f"x,{Y[i] % 2},{i % 3},{('train', 'test')[i % 2]}"

    private = table(tmp_path / "a", row, "scan,note,finding,label,usage")
    for name, head in (("b", "scan,note,finding,label,usage"), ("c", "path,a,b,label,d")):
        table(tmp_path / name, row, head)
        for i in range(100):
            picture(200 + i).save(tmp_path / name / f"{i}.png")
    keys = {"path": "scan", "label": "finding", "split": "usage"}
    same = with_public(private, tmp_path / "b" / "a.csv", 50, **keys, accept=["split"])
    assert same.private.y.max() == 1
    assert set(same.public.y.tolist()) == {0, 1}
    other = with_public(private, tmp_path / "c" / "a.csv", 99, **keys, accept=["split"])
    assert set(other.public.y.tolist()) == {0, 1, 2}

    # which of its images are for testing makes no difference
    folds = tmp_path / "c" / "a.csv"
    frame = pd.read_csv(folds)
    frame.assign(fold=np.arange(len(frame)) % 5).drop(columns="d").to_csv(folds, index=False)
    assert with_public(private, folds, 99, **keys).public is not None
    refused("column fold numbers parts", folds)


@pytest.mark.parametrize("kind", ["flat", "path", "blank", "other"])
def test_public_sets_need_no_labels(tmp_path, kind):
    private = folder(tmp_path / "private", n=60)
    head, value = {"path": ("path", None), "blank": ("path,label", ""), "other": ("path,site", "3")}.get(
        kind, ("path", 0)
    )
    (tmp_path / "b").mkdir()
    for i in range(100, 160):
        picture(i).save(tmp_path / "b" / f"{i}.png")
    rows = [f"{i}.png" if value is None else f"{i}.png,{value}" for i in range(100, 160)]
    if kind != "flat":
        (tmp_path / "b" / "b.csv").write_text("\n".join([head, *rows]))
    public = tmp_path / "b" / ("" if kind == "flat" else "b.csv")
    task = with_public(private, public, 60)
    assert (len(task.public.y), set(task.public.y.tolist())) == (60, {task.classes})  # no class of the private set
    if kind != "flat":  # as private data they are refused
        refused(r"b.csv: no (row has a label in )?column label.*give pair.read.label=COLUMN", public)
        assert main(["data", "check", str(public)]) == 1


def test_a_ranking_takes_public_tables_without_labels(tmp_path, capsys):
    private = table(tmp_path / "a", lambda i: f"{Y[i] % 2},x", "scan,finding,label")
    (tmp_path / "b").mkdir()
    for i in range(100, 160):
        picture(i).save(tmp_path / "b" / f"{i}.png")
    (tmp_path / "b" / "b.csv").write_text("\n".join(["scan", *(f"{i}.png" for i in range(100, 160))]))
    words = [f"private={private}", f"public=[{tmp_path / 'b' / 'b.csv'}]", "path=scan", "label=finding", "model=linear"]
    words += ["distance.m=50", "distance.initialisations=1", f"results={tmp_path / 'results'}", "threads=1"]
    assert main(["rank", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("rank",), ("rank", "epsilon_select=1"), ("attack", "gsd_white_box", "trials=2", "known=[5]")]
)
def test_a_flat_folder_can_be_compared(tmp_path, capsys, words):
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / name).mkdir()
        for i in range(first, first + 100):
            picture(i).save(tmp_path / name / f"{i}.png")
    words = [*words, f"private={tmp_path / 'a'}", f"public=[{tmp_path / 'b'}]", "distance=gsd", "distance.m=20"]
    words += ["model=linear", "distance.initialisations=1", f"results={tmp_path / 'results'}", "threads=1"]
    assert main(words) == 0, capsys.readouterr().err


def test_a_ranking_matches_columns_by_name(tmp_path):
    frame = pd.DataFrame(X[:200, 20:28] * np.logspace(0, 3, 8), columns=list("abcdefgh"))
    frame.assign(label=Y[:200] % 2).to_csv(tmp_path / "a.csv", index=False)
    public = (X[200:400, 20:28] * np.logspace(0, 3, 8)).round(3)
    frame = pd.DataFrame(public, columns=list("abcdefgh"))
    frame.to_csv(tmp_path / "b.csv", index=False)
    frame.assign(more=frame["a"] + 1)[[*"hgfe", "more", *"abcd"]].to_csv(tmp_path / "c.csv", index=False)
    words = ["model=rows", "distance=frechet", "distance.m=100", "threads=1"]
    public = [str(tmp_path / name) for name in ("b.csv", "c.csv")]
    first, second = rank(str(tmp_path / "a.csv"), public, *words, results=tmp_path / "results")["values"].values()
    assert first == second


def test_public_sets_that_take_all_private_images_are_named(tmp_path):
    private = folder(tmp_path / "private", n=40)
    shutil.copytree(private, tmp_path / "public")
    with pytest.raises(UsageError, match=rf"no private images remain: all are public \({tmp_path / 'public'}\) or"):
        with_public(private, tmp_path / "public", 40)


def test_a_check_says_how_many_images_remain(tmp_path, capsys):
    path = folder(tmp_path / "f", n=60)
    for name in ("again", "more"):
        shutil.copy(path / "c0" / "0.png", path / "c0" / f"{name}.png")
    source, held = open_dataset(str(path), "", False), "c0/0.png"
    test = sum(name.endswith("png") for name in source.files[1].names)
    test -= 2 * (held in source.files[1].names)
    assert main(["data", "check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"of these, {60 - test} training and {test} test images remain: see below"


def test_a_class_without_a_test_image_is_a_warning(tmp_path):
    path = table(
        tmp_path / "t", lambda i: f"{Y[i] % 3},{'train' if Y[i] % 3 == 2 or i % 2 else 'test'}", "path,label,split"
    )
    texts = [finding.text for finding in task_of(path).findings if finding.name == "few"]
    assert texts[-1] == f"{path}: classes without a test image, which are not measured: 2"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_tables_are_read_in_the_encodings_of_excel(tmp_path, encoding, newline):
    path = table(tmp_path / "t", lambda i: ("k\u00e4fer", "stra\u00dfe")[Y[i] % 2])
    text = path.read_text(encoding="utf-8").replace(",", "\t").replace("\n", newline)
    path.write_bytes(text.encode(encoding))
    assert task_of(path).names == ("k\u00e4fer", "stra\u00dfe")


def test_messages_number_lines_as_an_editor_does(tmp_path):
    path = table(
        tmp_path / "t",
        lambda i: f'{Y[i] % 2},"a\r\nb\nc",{"tset" if i == 5 else ("train", "test")[i % 2]}',
        "path,label,note,s",
    )
    path.write_text(path.read_text(encoding="utf-8").replace("3.png", "\n3.png", 1), encoding="utf-8")
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("5.png"))
    refused(rf"a.csv: line {line} has s 'tset': use train or test", path, split="s")
    path.write_text(path.read_text().replace("7.png", "path,label,note,s\n7.png", 1))
    refused(r"a.csv: line \d+ repeats the head: remove it", path)


# Arrays


def arrays_under(path, names, layout=lambda x: x, label=lambda y: y):
    """A npz of 60 training and 20 test images under other names."""
    x, y = (X[:80].reshape(-1, 8, 8) * 15).astype(np.uint8), Y[:80] % 3
    parts = [layout(x[:60]), label(y[:60]), layout(x[60:]), label(y[60:])]
    np.savez(path, **dict(zip(names.split(), parts, strict=False)))
    return path


@pytest.mark.parametrize(
    "names",
    [
        *("x_train y_train x_test y_test", "X_train Y_train X_val Y_val", "train_x train_y test_x test_y", "X y"),
        *("images labels", "data target", "trainImages trainLabels testImages testLabels", "image class"),
    ],
)
def test_arrays_have_the_usual_names(tmp_path, names):
    count = len(names.split())
    usual = " ".join(["train_images", "train_labels", "test_images", "test_labels"][:count])
    task, expected = (task_of(arrays_under(tmp_path / f"{each}.npz", each)) for each in (names, usual))
    assert len(task.private.y) + len(task.test.y) == {2: 60, 4: 80}[count]
    assert (task.private.x == expected.private.x).all()
    assert (task.private.y == expected.private.y).all()
    assert at_path(tmp_path / f"{names}.npz").n == {2: 60, 4: 80}[count]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("place", [-1, 1])
def test_arrays_of_channels_first_or_last_are_the_same_images(tmp_path, colour, place):
    def stacked(x):
        return np.stack([x, 255 - x, x // 2] if colour else [x], axis=place)

    names = "train_images train_labels test_images test_labels"
    task = task_of(arrays_under(tmp_path / "a.npz", names, stacked))
    plain = task_of(arrays_under(tmp_path / "b.npz", names))
    assert task.shape == (3 if colour else 1, 8, 8)
    by_image = {x.numpy().tobytes(): int(y) for x, y in zip(plain.private.x[:, 0], plain.private.y, strict=True)}
    assert {x.numpy().tobytes(): int(y) for x, y in zip(task.private.x[:, 0], task.private.y, strict=True)} == by_image
    if colour:
        assert (task.private.x[:, 1] == 255 - task.private.x[:, 0]).all()
        assert (task.private.x[:, 2] == task.private.x[:, 0] // 2).all()


def test_labels_of_arrays_in_words_are_class_names(tmp_path):
    words = np.array(["dog", "cat", "ant"])
    for kind in (words, words.astype("S")):
        task = task_of(arrays_under(tmp_path / "a.npz", "X y x_test y_test", label=lambda y, kind=kind: kind[y]))
        assert task.names == ("ant", "cat", "dog")
        plain = task_of(arrays_under(tmp_path / "b.npz", "X y x_test y_test"))
        assert (2 - task.private.y == plain.private.y).all()
    floats = task_of(arrays_under(tmp_path / "c.npz", "X y x_test y_test", label=lambda y: y + 1.0))
    assert (floats.names, floats.private.y.tolist()) == (("1", "2", "3"), plain.private.y.tolist())
    refused(
        r"a.npz: labels 'Cat', 'cat' differ .*: write each class in one way",
        arrays_under(tmp_path / "a.npz", "X y", label=lambda y: np.array(["Cat", "cat", "ant"])[y]),
    )
    refused(
        r"a.npz: \d+ of 60 labels are no class \(''\): give each image one",
        arrays_under(tmp_path / "a.npz", "X y", label=lambda y: np.array(["", "cat", "ant"])[y]),
    )


@pytest.mark.parametrize(
    ("names", "layout", "label", "message"),
    [
        ("X y", lambda x: x / 255, None, "X is float64, not uint8: multiply them by 255 if they are 0 to 1, and store"),
        ("X y", lambda x: x.astype(int), None, "X is int64, not uint8: store values 0 to 255 as uint8"),
        (
            "X y",
            None,
            lambda y: y.astype(object),
            r"y is an array of objects, .* numpy.savez\('a.npz', y=numpy.array\(y.t",
        ),
        ("X y x_train", None, None, "X or x_train may be train_images: call one of them train_images"),
        ("X y", lambda x: np.stack([x, x], -1), None, r"X has shape \[60, 8, 8, 2\], not \[n, h, w\]"),
        ("X_train X_test", None, None, "no array of labels in it: add train_labels"),
        ("x_test y_test", None, None, "no array train_images in it"),
        ("X_train y_train X_test", None, None, "no array test_labels in it"),
    ],
)
def test_arrays_that_are_not_clear_are_refused(tmp_path, names, layout, label, message):
    same = lambda values: values  # noqa: E731
    path = arrays_under(tmp_path / "a.npz", names, layout or same, label or same)
    if names == "X_train X_test":
        np.savez(path, X_train=np.load(path)["X_train"], X_test=np.load(path)["X_train"][:9])
    refused(message, path)


def test_public_arrays_need_no_labels(tmp_path):
    private = folder(tmp_path / "private", n=60)
    np.savez(tmp_path / "a.npz", images=(X[100:160].reshape(-1, 8, 8) * 15).astype(np.uint8))
    assert with_public(private, tmp_path / "a.npz", 60).public.y.tolist() == [2] * 60


def test_people_of_arrays_without_parts(tmp_path):
    x, y = (X[:80].reshape(-1, 8, 8) * 15).astype(np.uint8), Y[:80] % 2
    np.savez(tmp_path / "a.npz", X=x, y=y, patient=np.arange(80) // 4)
    assert task_of(tmp_path / "a.npz", unit="patient").people.tolist()[0] == 4


@pytest.mark.parametrize("kind", ["base64", "data", "https"])
def test_images_as_texts_of_a_table_have_a_remedy(tmp_path, kind):
    picture(3).save(tmp_path / "3.png")
    texts = {"base64": base64.b64encode((tmp_path / "3.png").read_bytes()).decode()}
    value = (texts | {"data": "data:image/png;base64,AA", "https": "https://a.b/3.png"})[kind]
    path = tmp_path / "a.csv"
    pd.DataFrame({"image": [value] * 4, "label": [0, 1, 0, 1]}).to_csv(path, index=False)
    refused(r"column image has images or addresses \(.*\), not the names of files: write", path)


@pytest.mark.parametrize("column", ["image", "scan"])
@pytest.mark.parametrize("kind", ["struct", "bytes"])
def test_images_inside_of_a_table_are_read_as_files_are(tmp_path, kind, column):
    pytest.importorskip("pyarrow")
    files = folder(tmp_path / "files", n=60)
    images = sorted(files.rglob("*.png"))
    cells = [path.read_bytes() for path in images]
    labels = [path.parent.name for path in images]
    values = [{"bytes": cell, "path": None} for cell in cells] if kind == "struct" else cells
    frame = pd.DataFrame({column: values, "label": labels})
    frame.to_parquet(tmp_path / "a.parquet")
    old, new = task_of(files), task_of(tmp_path / "a.parquet")
    assert sorted(old.private.x.flatten(1).tolist()) == sorted(new.private.x.flatten(1).tolist())
    assert old.private.y.bincount().tolist() == new.private.y.bincount().tolist()
    (part,) = given(str(tmp_path / "a.parquet"))
    names, raw = zip(*part.each(), strict=True)
    assert names[2] == "row 3"
    assert as_input(raw[2], (1, 8, 8)).equal(as_input(images[2], (1, 8, 8)))

    # damage is named by the row, and another content is not taken for what was kept
    frame.at[4, column] = {"bytes": b"no image", "path": None} if kind == "struct" else b"no image"
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: row 5: not a readable image"):
        task_of(tmp_path / "a.parquet")


@pytest.mark.parametrize(("bits", "scale", "warned"), [(None, 10, True), (None, 4000, False), (12, 10, False)])
def test_predictions_of_narrow_images_without_bits_are_warned_of(tmp_path, capsys, bits, scale, warned):
    for i in range(20):
        Image.fromarray((X[i].reshape(8, 8) * scale).astype(np.uint16)).save(tmp_path / f"{i}.png")
    model = Classifier(None, None, (1, 8, 8), ("a", "b"), False, bits)
    assert sum(n for _, _, n in batches(given(str(tmp_path)), model, False)) == 20
    text = "warning: 20 of 20 16-bit images use less than a sixteenth of the range, and this model was trained without"
    assert capsys.readouterr().err.count(text) == warned
    assert len(capsys.readouterr().err.splitlines()) <= warned


@pytest.mark.parametrize(
    ("columns", "read"),
    [
        (["mask", "depth", "image"], "image"),
        (["thumbnail", "Image", "crop"], "Image"),
        (["scan"], "scan"),
        (["mask", "scan"], None),
    ],
)
def test_of_several_columns_of_images_the_usual_one_is_read(tmp_path, columns, read):
    pytest.importorskip("pyarrow")
    cells = [path.read_bytes() for path in sorted(folder(tmp_path / "files", n=60).rglob("*.png"))]
    path = tmp_path / "a.parquet"
    pd.DataFrame({**dict.fromkeys(columns, cells), "label": [*"ab"] * 30}).to_parquet(path)
    if read is None:
        refused(r"no column path: it has mask, scan: several have images: give pair.read.path=COLUMN", path)
    key = {} if read else {"path": "mask"}
    assert open_dataset(str(path), "", False, read=Read(**key)).image_column == (read or "mask")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_new_images_are_of_the_column_that_the_model_was_trained_on(tmp_path, kind, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    names = ["image", "crop", "path", "img"]
    for i in range(64):
        picture(i).save(tmp_path / f"{i}.png")

    def written(*columns):
        files = {column: [tmp_path / f"{names.index(column) + i}.png" for i in range(60)] for column in columns}
        cells = {column: [f.name if kind == "csv" else f.read_bytes() for f in files[column]] for column in columns}
        frame, path = pd.DataFrame({**cells, "label": [*"ab"] * 30}), tmp_path / f"{'_'.join(columns)}.{kind}"
        (frame.to_csv if kind == "csv" else frame.to_parquet)(path, index=False)
        return str(path)

    def read(path, **changes):
        _, raw = next(at_path(path, takes_of(facts | changes)).each())
        digits = [as_input(picture(i), (1, 8, 8)) for i in range(4)]
        return next(name for name, digit in zip(names, digits, strict=True) if as_input(raw, (1, 8, 8)).equal(digit))

    path = written("image", "crop")
    words = "model=linear algorithm=non_private pair.public=null distance=none training.epochs=1 training.batch_size=9"
    model = train(f"pair.private={path}", "pair.read.path=crop", "pair.read.size=8", *words.split())
    facts = read_facts(model.folder / "model.json")
    assert facts["image_column"] == read(path) == "crop"
    assert read(path, image_column=None) == "image"  # of an earlier version
    assert read(written("img")) == "img"
    with pytest.raises(UserError, match="no column crop, which this model was trained on, and img, path may"):
        read(written("img", "path"))


def test_two_columns_of_one_name_are_no_choice(tmp_path):
    path = table(tmp_path / "t", lambda i: f"{i % 3},{Y[i] % 2}", "path,Label,label")
    refused(r"columns Label and label may be the label: give pair.read.label=COLUMN", path)
    assert task_of(path, label="label").classes == 2
    with pytest.raises(UserError, match=r"columns path and Path may be the path: name the column of files path"):
        at_path(table(tmp_path / "u", str, "path,Path"))


@pytest.mark.parametrize("ways", ["a;b", "b, a", "[a, b]", "['b', 'a']", "{a, c}", "b/a", "a+b", "b & a"])
def test_several_labels_with_another_sign_between_them_are_no_class(tmp_path, ways):
    only = ("[a]", "[b]") if "[" in ways else ("a", "b")
    path = table(tmp_path / "t", lambda i: f'"{(*only, ways)[i % 3]}"')
    refused(r"may be several, since each part is a label: write A\|B", path)
    assert task_of(path, accept=["labels"]).classes == 3
    for names in (("x, y", "z"), ("[0, 18)", "[18, 99)"), ("x/y", "y")):
        assert task_of(table(tmp_path / "u", lambda i, names=names: f'"{names[i % 2]}"')).names == names


@pytest.mark.parametrize("test", ["x_test y_test", "valid_images valid_labels"])
def test_arrays_of_a_part_count_next_to_those_of_the_usual_names(tmp_path, test):
    task = task_of(arrays_under(tmp_path / "a.npz", f"train_images train_labels {test}"))
    assert (len(task.private.y), len(task.test.y)) == (60, 20)


@pytest.mark.parametrize("change", [lambda x: x > 99, lambda x: x // 15.9])
def test_arrays_of_few_values_are_nearly_black(change, tmp_path):
    path = arrays_under(tmp_path / "a.npz", "X y x_test y_test", lambda x: change(x).astype(np.uint8))
    line = "no value over 16, of 0 to 255: multiply them, so that the largest is 255"
    assert named(task_of(path))["black"].line().endswith(line)
    assert "black" not in named(task_of(arrays_under(tmp_path / "b.npz", "X y x_test y_test")))

    # files, such as masks, as arrays
    dark = folder(
        tmp_path / "f", save=lambda i, file: Image.fromarray((X[i] > 9).reshape(8, 8).astype(np.uint8)).save(file)
    )
    assert named(task_of(dark))["black"].text == "f: 100 images have no value over 16, of 0 to 255"
