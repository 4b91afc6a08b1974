"""Folders, tables and archives of a user's as they come: what is read of them, and what is said of that."""

import io
import re
import shlex
import shutil
import struct
import warnings
import zipfile
import zlib

import numpy as np
import psutil
import pytest
from PIL import Image

from pubsel.cli import main
from pubsel.data import load, open_dataset, prepared
from pubsel.data.folders import layout
from pubsel.messages import UserError
from pubsel.settings.keys import Pair
from tests import test_data
from tests.made import not_opened


def images(folder, n, **how):
    """n images, in each folder other ones."""
    return test_data.images(folder, n, seed=sum("/".join(folder.parts[-2:]).encode()), **how)


def classes(folder, n=6, names="ab", **how):
    for name in names:
        images(folder / name, n, **how)
    return folder


def counts(folder):
    source = open_dataset(str(folder), "", False)
    return len(source.train.x), len(source.test.x), source.classes, source.notes


# Parts


@pytest.mark.attack
@pytest.mark.parametrize("train", ["train", "Train", "TRAINING"])
@pytest.mark.parametrize("test", ["test", "Test", "val", "Valid", "validation", "VALIDATION"])
def test_parts_are_found_by_their_names_in_any_case(tmp_path, train, test):
    classes(tmp_path / train, 7)
    classes(tmp_path / test, 3)
    n_train, n_test, n_classes, notes = counts(tmp_path)
    assert (n_train, n_test, n_classes) == (14, 6, 2)
    said = f"{tmp_path.name}: {test} is used as the test set"
    assert (said in notes) == (test.lower() != "test")
    assert not any("held out" in note or "not read" in note for note in notes)


@pytest.mark.attack
def test_what_is_ignored_is_named_with_its_count(tmp_path):
    for part, n in (("train", 5), ("val", 4), ("Test", 3), ("old", 2)):
        classes(tmp_path / part, n)
    images(tmp_path, 1)
    images(tmp_path / "train" / "a" / "deep", 2)
    n_train, n_test, _, _ = counts(tmp_path)
    assert (n_train, n_test) == (10, 14)  # val is one with the test part
    (finding,) = open_dataset(str(tmp_path), "", False).findings
    assert finding.name == "not_read"
    assert finding.text == f"{tmp_path.name}: 7 images are not read: 4 in old, 2 in train/a/deep, 1 in ."


def test_a_class_may_be_called_train_or_test(tmp_path):
    classes(tmp_path, 10, ["plane", "train", "car", "test"])
    n_train, n_test, n_classes, notes = counts(tmp_path)
    assert (n_train + n_test, n_classes) == (40, 4)
    assert not any("not read" in note for note in notes)
    assert layout(tmp_path).classes == ["car", "plane", "test", "train"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("patient{:03}_{}", "patient000, patient001"),
        ("person{:02}_bacteria_{}", "person00, person01"),
        ("{:04}-{}", "0000, 0001"),
        ("{:04}_{}_{}", "0000, 0001"),
        ("20190{:03}_{}_{}", None),
        *((name, None) for name in ("IMG_{:03}{}", "class{1}_{0:03}", "train2014_{:05}{}", "{}{}", "patient{:03}{}")),
        ("3f{:04}-a{}", None),
    ],
)
@pytest.mark.parametrize("kind", ["images", "table", "texts"])
def test_names_of_files_that_may_be_of_people_are_warned_of(tmp_path, name, first, kind):
    lines = ["path,label"]
    for i, file in enumerate(sorted(classes(tmp_path, 30, ["a/x", "b/x"]).rglob("*.png"))):
        number = i if name.startswith("3f") else i // 3
        new = file.parents[1] / f"{name.format(number, i % 3, i)}.{'txt' if kind == 'texts' else 'png'}"
        lines.append(f"{file.rename(new).relative_to(tmp_path)},{new.parent.name}")
        if kind == "texts":
            new.write_text("a text")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = open_dataset(str(tmp_path / "t.csv" if kind == "table" else tmp_path), "", False)
    of_people = [finding for finding in source.findings if finding.name == "ids"]
    assert [finding.severity for finding in of_people] == ["warning"] * (first is not None)
    assert all(f"whose they are: 20, such as {first}" in finding.text for finding in of_people)


@pytest.mark.parametrize(
    ("name", "people", "first"),
    [
        ("patient{0:05}/study{1}/view{2}", 20, "patient00000, patient00001"),
        ("patient_{0:03}/{2}", 3, "patient_000, patient_001"),
        ("P{0:04}/{2}", 20, "p0000, p0001"),
        ("images_{0:03}/{2}", 2, None),
        ("P{0:04}/{2}", 9, None),
        ("201901{0:02}/{2}", 20, None),
        ("cat{0}/{2}", 1, None),
    ],
)
def test_folders_that_may_be_of_people_are_warned_of_in_tables(tmp_path, name, people, first):
    lines = ["path,label"]
    for i in range(60):
        file = tmp_path / f"{name.format(i % people, i // people, i)}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((8, 8), 50 + i).save(file)
        lines.append(f"{file.relative_to(tmp_path)},{i % 2}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    of_people = [f for f in open_dataset(str(tmp_path / "t.csv"), "", False).findings if f.name == "ids"]
    assert [f.severity for f in of_people] == ["warning"] * (first is not None)
    assert all(f"whose they are: {people}, such as {first}" in f.text for f in of_people)


@pytest.mark.parametrize(
    ("head", "label", "error"),
    [("patient,label", "{1}", True), ("class,number", "{0}", False), ("class,label", "{0}", False)],
)
def test_a_table_that_names_class_folders_may_say_that_they_are_of_people(tmp_path, head, label, error):
    names = [f"P{i:03}" for i in range(8)]
    classes(tmp_path, 2, names)
    (tmp_path / "t.csv").write_text(
        "\n".join([head, *(f"{name},{label.format(i, i % 2)}" for i, name in enumerate(names))])
    )
    errors = [f.text for f in open_dataset(str(tmp_path), "", False).findings if f.severity == "error"]
    assert errors == [f"{tmp_path.name}: t.csv has a label for each class folder (P000, P001, ...)"] * error


@pytest.mark.parametrize(
    ("name", "people", "classes", "severity"),
    [("subject{:02}.c{}", 15, 11, "warning"), ("patient{}_{}", 8, 2, "warning"), ("patient{}_{}", 2, 5, None)],
)
def test_few_people_in_names_of_files_are_warned_of(tmp_path, name, people, classes, severity):
    for i in range(people * classes):
        file = tmp_path / f"c{i % classes}" / f"{name.format(i // classes, i % classes)}.png"
        file.parent.mkdir(exist_ok=True)
        Image.effect_noise((8, 8), 50 + i).save(file)
    of_people = [f.severity for f in open_dataset(str(tmp_path), "", False).findings if f.name == "ids"]
    assert of_people == [severity] * (severity is not None)


@pytest.mark.parametrize("suffix", ["png", "txt"])
@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["train/pos", "train/neg", "train/unsup", "test/pos", "test/neg"], "unsup is read as a class"),
        (["cat", "dog", "Unlabeled"], "Unlabeled is read as a class"),
        (["test", "val"], "test and val are read as classes, and have the names of parts"),
        (["fold1", "fold2", "fold3"], "fold1 and fold2 and fold3 are read as classes, and have the names of parts"),
        (["image", "mask"], "mask is read as a class, and has the name of no class"),
        (["patient_000", "patient_001", "patient_002"], "3 class folders have names of people: patient_000, patient"),
    ],
)
def test_folders_that_are_no_classes_are_an_error(tmp_path, names, why, suffix):
    for name in names:
        images(tmp_path / name, 4)
        for file in (tmp_path / name).iterdir() if suffix == "txt" else ():
            file.with_suffix(".txt").write_text(f"{name} {file.name}")
            file.unlink()
    (finding,) = [finding for finding in open_dataset(str(tmp_path), "", False).findings if finding.name == "labels"]
    assert finding.severity == "error"
    assert why in finding.text


def test_parts_without_classes_are_public_data(tmp_path):
    images(tmp_path / "train", 5)
    images(tmp_path / "val", 3)
    assert counts(tmp_path)[:3] == (5, 3, 1)


@pytest.mark.attack
def test_class_folders_that_lie_deeper_say_where(tmp_path):
    classes(tmp_path / "photos" / "dogs", 4)
    line = rf"its 8 images lie deeper than <class>/\*, such as photos/dogs/a/00.png: give {tmp_path}/photos/dogs, "
    not_opened(str(tmp_path), "", f"^{tmp_path}: {line}")
    assert counts(tmp_path / "photos" / "dogs")[2] == 2


@pytest.mark.attack
@pytest.mark.parametrize(
    ("outer", "inner", "remedy"),
    [
        (["cat", "dog"], ["p1", "p2", "p3"], "if each inner folder, such as p1, is of a person, set unit=folder"),
        (["p1", "p2", "p3"], ["cat", "dog"], r"if cat, dog are classes, make them <class>/<person>/\* and set"),
        (["cat", "dog", "owl"], ["Train", "test"], r"make them train/<class>/\* and test/<class>/\*$"),
        (["cat", "dog"], ["p1/day1", "p2/day1"], r"move them up, to <class>/\*, or those of people to"),
    ],
)
def test_people_are_not_taken_for_classes(tmp_path, outer, inner, remedy):
    for name in outer:
        classes(tmp_path / name, 2, inner)
    not_opened(str(tmp_path), "", rf"lie deeper than <class>/\*, such as {outer[0]}/{inner[0]}/00.png: {remedy}")


@pytest.mark.parametrize("suffix", ["png", "txt"])
def test_classes_are_not_taken_for_people(tmp_path, suffix):
    """Each class would be one person, and a person several classes."""
    for person in ("p1", "p2", "p3"):
        classes(tmp_path / person, 1, ("cat", "dog"))
    for file in tmp_path.rglob("*.png") if suffix == "txt" else ():
        file.rename(file.with_suffix(".txt")).write_text(file.parent.name)
    (finding,) = (f for f in open_dataset(str(tmp_path), "", False, "folder").findings if f.name == "labels")
    assert finding.text.endswith(": 3 folders of classes (p1, p2, ...) have fewer of people in them")
    assert finding.remedy == "if the classes are cat, dog, make them <class>/<person>/*"


def test_a_folder_with_the_name_of_an_image_is_none(tmp_path):
    images(classes(tmp_path) / "a" / "x.png", 1)
    (tmp_path / "y.png").mkdir()
    n_train, n_test, n_classes, _ = counts(tmp_path)
    assert (n_train + n_test, n_classes) == (12, 2)


# pubsel data check


@pytest.mark.attack
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda at: images(at, 6), "one class only"),
        (lambda at: classes(at, 6, "a"), "one class only"),
        (lambda at: images(at, 1), r"one image only; .*one class only"),
        (
            lambda at: [classes(at), (at / "c").mkdir(), (at / "d").mkdir()],
            r"2 class folders without images that are read: c \(empty\), d \(empty\)",
        ),
        (
            lambda at: [classes(at / "train"), (at / "train" / "c").mkdir()],
            r"1 class folders without images that are read: c \(empty\)",
        ),
    ],
    ids=["flat", "one class", "one image", "empty", "empty in train"],
)
def test_a_check_fails_on_what_no_run_can_train_on(tmp_path, capsys, made, says):
    made(tmp_path / "own")
    assert main(["data", "check", str(tmp_path / "own")]) == 1
    out, err = capsys.readouterr()
    assert "training and" in out
    assert err.count("\n") == 1
    assert err.startswith("pubsel: own: ") or "own/" in err or err.startswith(f"pubsel: {tmp_path / 'own'}")
    assert re.search(says, err)


@pytest.mark.attack
def test_a_check_warns(tmp_path, capsys):
    classes(tmp_path, 8)
    images(tmp_path / "c", 2, size=(12, 10), mode="L")
    for name in ("x.heic", "a/y.HEIC", "labels.txt", "a/README"):
        (tmp_path / name).write_text("?")
    assert main(["data", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    name = tmp_path.name
    (other,) = [line for line in out if "files are not read" in line]
    assert other.startswith(f"warning: {name}: 4 files are not read: 2 .heic, ")
    assert f"warning: {name}: 2 images are grey and 16 in colour: read in colour" in out
    (few,) = [line for line in out if "fewer than" in line]
    assert few.startswith(f"warning: {tmp_path}: classes with fewer than 50 training images may be lost in the noise: ")
    assert "c has " in few


def test_a_check_of_a_sound_folder_warns_of_nothing(tmp_path, capsys):
    classes(tmp_path / "train", 8)
    classes(tmp_path / "val", 3)
    (tmp_path / ".DS_Store").write_text("?")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    assert main(["data", "check", str(tmp_path)]) == 0
    (few,) = [line for line in "".join(capsys.readouterr()).splitlines() if "warning" in line]
    assert "fewer than 50 training images" in few


@pytest.mark.parametrize("between", [";", ",", "\t"])
def test_a_table_with_semicolons(tmp_path, between, capsys):
    classes(tmp_path, 5)
    rows = [("path", "label"), *((f"{name}/{i:02d}.png", name * 2) for name in "ab" for i in range(5))]
    (tmp_path / "table.csv").write_text("".join(between.join(row) + "\n" for row in rows), encoding="utf-8-sig")
    source = open_dataset(str(tmp_path / "table.csv"), "", False)
    assert (source.classes, len(source.train.x) + len(source.test.x)) == (2, 10)
    assert main(["data", "check", str(tmp_path / "table.csv")]) == 0
    assert "table.csv: labels aa, bb numbered from 0 in this order" in capsys.readouterr().out


@pytest.mark.attack
@pytest.mark.parametrize("name", ["a=b", "c[1]", "d e", "e,f", "g=h[2],{3} 4", 'q"uote'])
def test_a_path_with_odd_characters_works_as_the_message_says(tmp_path, name, capsys, folder):
    at = str(classes(tmp_path / name))
    assert main(["data", "check", at]) == 0
    plain = f"name={at}"
    if main(["data", "check", plain]):
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        typed = err.partition("both kinds of quotes, ")[2].partition("; for several")[0].strip()
        (word,) = shlex.split(typed)  # what the shell makes of it
        assert word != plain
        assert main(["data", "check", word]) == 0
    assert at in capsys.readouterr().out


# Archives and images that would fill memory


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def vast(path, side):
    """A PNG whose header claims so many pixels on each side."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))


@pytest.mark.attack
def test_a_decompression_bomb_is_one_line(tmp_path, capsys):
    vast(classes(tmp_path) / "a" / "bomb.png", 50_000)
    assert main(["data", "check", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bomb.png: more than 179 million pixels" in err


@pytest.mark.attack
def test_a_large_image_brings_no_warning(tmp_path):
    vast(classes(tmp_path) / "a" / "large.png", 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        not_opened(str(tmp_path), "", r"large.png: not a readable image")


def claims(path, shape, content=b"", compress=False):
    """An npz whose arrays of images claim a shape, and have `content`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for part in ("train", "test"):
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            archive.writestr(f"{part}_images.npy", file.getvalue() + content)
            file = io.BytesIO()
            np.save(file, np.arange(shape[0] if shape[0] < 100 else 10) % 2)
            archive.writestr(f"{part}_labels.npy", file.getvalue())


@pytest.mark.attack
@pytest.mark.parametrize("shape", [(10**12, 8, 8), (10, 10**6, 10**5), (10, 10**9, 10**9), (3, 8, 8)])
def test_an_archive_that_claims_more_than_it_has_is_one_line(tmp_path, shape):
    claims(tmp_path / "own.npz", shape, bytes(100))
    not_opened(str(tmp_path / "own.npz"), "", r"own.npz: train_images claims .* bytes and has 100: corrupt")


@pytest.mark.attack
def test_images_that_are_read_one_by_one_are_those_that_are_there(tmp_path):
    claims(tmp_path / "own.npz", (10, 8, 8), bytes(100))
    with pytest.raises(UserError, match=r"own.npz: train_images claims 640 bytes and has 100: corrupt, truncated"):
        prepared.array_stream(tmp_path / "own.npz", "train_images")
    np.savez(tmp_path / "own.npz", images=np.zeros((2, 8, 8), np.uint8).T)
    with pytest.raises(UserError, match=r"own.npz: images is in Fortran order: store it in C order"):
        prepared.array_stream(tmp_path / "own.npz", "images")


@pytest.mark.attack
def test_an_archive_that_takes_more_than_memory_is_not_unpacked(tmp_path, monkeypatch):
    """28 MiB of zeros in 64 KiB, and a machine with 16 MiB left."""
    claims(tmp_path / "own.npz", (7, 2048, 2048), bytes(7 * 2**22), compress=True)
    assert (tmp_path / "own.npz").stat().st_size < 2**17
    left = psutil.virtual_memory()._replace(available=2**24)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    with pytest.raises(UserError, match=r"own.npz: train_images takes 28 MiB, and 16 MiB of memory are free"):
        prepared.read(tmp_path / "own.npz", 10, (1, 2048, 2048))


@pytest.mark.attack
def test_an_archive_that_takes_more_than_the_disk_is_not_unpacked(tmp_path, monkeypatch):
    """64 MiB of zeros, and a disk with 16 MiB left."""
    claims(tmp_path / "own.npz", (8, 2048, 2048), bytes(2**25), compress=True)
    left = shutil.disk_usage(tmp_path)._replace(free=2**24)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: left)
    with pytest.raises(
        UserError, match=r"own.npz: its images take 128 MiB while they are read, and 16 MiB are free in .*: make room"
    ):
        open_dataset(str(tmp_path / "own.npz"), str(tmp_path / "root"), False)
    assert not list((tmp_path / "root").rglob("*.npy"))


@pytest.mark.attack
@pytest.mark.parametrize("key", ["model.input_size", "+model.backbone.input_size"])
def test_a_side_of_no_image_is_refused(key, capsys, folder):
    words = ["run", "+experiment=quickstart", f"{key}=99999999999999999999"]
    assert main([*words, *(["+model.backbone.architecture=pixels"] if "backbone" in key else [])]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{key.lstrip('+')}=99999999999999999999: must be at most 16384" in err


@pytest.mark.parametrize("names", [("{}", "{}_mask"), ("{}", "{} - Copy"), ("benign ({})", "benign ({})_mask")])
def test_masks_and_copies_next_to_images_are_no_examples(tmp_path, names):
    def found():
        return [(f.name, f.severity) for f in open_dataset(str(tmp_path), "", False).findings if f.name == "copies"]

    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(12):
            image = Image.effect_noise((28, 28), 50 + i)
            image.save(tmp_path / name / f"{names[0].format(i)}.png")
    assert not found()
    for i in range(0, 12, 3):
        Image.effect_noise((28, 28), 90).save(tmp_path / "a" / f"{names[1].format(i)}.png")
    assert found() == [("copies", "error")]


def test_numbers_after_one_name_are_no_copies(tmp_path):
    """As of files that were saved under one name: img.png, img (1).png, img (2).png."""
    for i in range(24):
        name = "img.png" if i == 0 else f"img ({i}).png"
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.effect_noise((28, 28), 50 + i).save(tmp_path / "ab"[i % 2] / name)
    findings = open_dataset(str(tmp_path), "", False).findings
    assert not [f for f in findings if f.severity == "error"]


def test_folders_of_masks_and_thumbnails_are_no_classes(tmp_path):
    with pytest.raises(UserError, match="Masks is read as a class, and has the name of no class: move it elsewhere"):
        load(Pair(str(classes(tmp_path, names=["a", "b", "Masks"])), None, 1), "", False)
