"""Medical sets in the layouts their publishers use, made here at a small size; and how images are kept and mapped."""

import dataclasses
import re
import shutil
import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image

from pubsel import files
from pubsel.commands import data as catalogue
from pubsel.data import Missing, images, load, open_dataset, opening, related, same_examples, stored
from pubsel.data.chestxray14 import FINDINGS
from pubsel.data.chexpert import OBSERVATIONS
from pubsel.data.splits import Listing, Unread
from pubsel.messages import UserError
from pubsel.settings import CONF
from pubsel.settings.datasets import dataset_info
from pubsel.settings.keys import Convert, Pair, Take
from tests.made import grey_values, not_loaded, not_opened, picture, random_sets, write_csv


@pytest.fixture
def changed(monkeypatch):
    """changed(key=value, ...): every named set as conf/dataset says, but for this; `options` are added to its own."""

    def change(options=None, **values):
        def of(name):
            info = dataset_info(name)
            return dataclasses.replace(info, options={**info.options, **(options or {})}, **values)

        for module in (opening, related):
            monkeypatch.setattr(module, "dataset_info", of)

    return change


@pytest.fixture
def small(changed):
    changed(shape=[1, 16, 16])


def xray(path, value=0, size=(30, 40), mode="L"):
    picture(path, value, size, mode)


def kept(root):
    """What lies under prepared/ but for the locks."""
    return sorted(path.name for path in (root / "prepared").iterdir() if path.suffix != ".lock")


# --- ChestX-ray14

LABELS = "Cardiomegaly|Emphysema,No Finding,Hernia,No Finding,Pleural_Thickening|Atelectasis|Mass,Edema".split(",")
UNUSED = (
    "Follow-up #,Patient Age,Patient Gender,View Position,OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],"
)


def chestxray14(root, name="Data_Entry_2017_v2020.csv"):
    """Six images of three patients in two of the archives; image i has the value 10 i."""
    folder = root / "ChestX-ray14"
    names = [f"{1 + i // 2:08d}_{i % 2:03d}.png" for i in range(6)]
    for i, file in enumerate(names):
        xray(folder / f"images_{1 + i // 3:03d}/images/{file}", 10 * i, size=(64, 64), mode="RGBA" if i == 3 else "L")
    rows = [
        {"Image Index": file, "Finding Labels": label, "Patient ID": 1 + i // 2} | dict.fromkeys(UNUSED.split(","), 1)
        for i, (file, label) in enumerate(zip(names, LABELS, strict=True))
    ]
    write_csv(folder / name, rows)
    (folder / "train_val_list.txt").write_text("".join(f"{names[i]}\n" for i in (4, 0, 5, 1)))
    (folder / "test_list.txt").write_text("\n".join(names[2:4]))
    return folder, names


def test_chestxray14_has_the_official_lists_and_fourteen_labels(tmp_path, capsys):
    chestxray14(tmp_path)
    assert catalogue.present("chestxray14", tmp_path) == "files"
    source = open_dataset("chestxray14", str(tmp_path), False)
    assert source.train.x.shape == (4, 1, 224, 224)
    assert source.metric == "auc"
    assert source.classes == 14
    assert grey_values(source.train) == [40, 0, 50, 10]
    assert grey_values(source.test) == [20, 30]
    found = [{FINDINGS[i] for i in np.flatnonzero(row)} for row in source.train.y.numpy()]
    assert found == [{"Atelectasis", "Mass", "Pleural_Thickening"}, {"Cardiomegaly", "Emphysema"}, {"Edema"}, set()]
    assert source.train.y.dtype == torch.float32
    assert source.test.y.sum().item() == 1
    assert source.notes == ()
    assert capsys.readouterr().err == ""
    assert catalogue.present("chestxray14", tmp_path) == "prepared"


def test_chestxray14_tells_the_patient_of_each_image_also_if_some_are_corrupt(tmp_path):
    folder, names = chestxray14(tmp_path)
    (folder / "images_001/images" / names[0]).write_bytes(b"no image")
    source = open_dataset("chestxray14", str(tmp_path), False, "patient")
    train, test = source.groups
    assert grey_values(source.train) == [40, 50, 10]  # of the third patient, the third, the first
    assert (train[:, None] == train).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert (len(test), len(test.unique())) == (2, 1)
    assert not set(train.tolist()) & set(test.tolist())
    not_opened("chestxray14", tmp_path, r"^unit=lesion: .* does not tell the lesion", UserError, "lesion")


def test_chestxray14_in_one_folder_with_the_first_table_and_other_lists(tmp_path, small, changed):
    folder, names = chestxray14(tmp_path, "Data_Entry_2017.csv")
    for path in folder.rglob("*.png"):
        shutil.move(path, folder / path.name)
    (folder / "train_list.txt").write_text(f"{names[0]}\n")
    changed({"train": "train_list.txt"}, shape=[1, 16, 16])
    source = open_dataset("chestxray14", str(tmp_path), False)
    assert grey_values(source.train) == [0]
    assert source.notes == ("chestxray14: 3 images are in neither train_list.txt nor test_list.txt and left out",)


def replaced(file, before, after):
    """Return a function that changes the text of a file of the set."""
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(before, after))


def removed(file):
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            removed("images_001/images/00000001_001.png"),
            r"ChestX-ray14: 00000001_001.png and 0 more of Data_Entry_2017_v2020.csv are absent: unpack",
        ),
        (
            lambda folder: xray(folder / "images_002/images/00000009_000.png"),
            r"v2020.csv: no row for 00000009_000.png and 0 more of .*ChestX-ray14: take both from one release",
        ),
        (
            replaced("test_list.txt", "00000002_000", "00000009_000"),
            r"test_list.txt: 00000009_000.png and 0 more are not in Data_Entry_2017_v2020.csv: download",
        ),
        (
            replaced("test_list.txt", "00000002_000", "00000003_000"),
            r"test_list.txt: 00000003_000.png and 0 more are in train_val_list.txt too: use other lists",
        ),
        (
            replaced("Data_Entry_2017_v2020.csv", "Hernia", "Hernias"),
            r"v2020.csv: 00000002_000.png has the finding 'Hernias': download it again",
        ),
        (
            replaced("Data_Entry_2017_v2020.csv", "Finding Labels", "Labels"),
            r"v2020.csv: no column Finding Labels: it needs Image Index,Finding Labels",
        ),
        *[
            (removed(file), rf"dataset chestxray14 is not in .*no ChestX-ray14/{file}")
            for file in ("Data_Entry_2017_v2020.csv", "train_val_list.txt", "test_list.txt")
        ],
    ],
)
def test_chestxray14_disagreements_are_named(tmp_path, small, damage, message):
    folder, _ = chestxray14(tmp_path)
    damage(folder)
    not_opened("chestxray14", tmp_path, message)
    assert not (tmp_path / "prepared").exists()


def test_a_corrupt_image_is_skipped_named_and_counted(tmp_path, small, capsys):
    folder, names = chestxray14(tmp_path)
    first = folder / "images_001/images" / names[0]
    first.write_bytes(b"no image")
    rng = np.random.RandomState(0)
    cut = folder / "images_002/images" / names[5]
    Image.fromarray(rng.randint(0, 256, (64, 64), dtype=np.uint8)).save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    note = "chestxray14 train: 2 of 4 images are corrupt and were skipped: 00000001_000.png, 00000003_001.png"
    for _ in range(2):  # read, then from what was kept
        source = open_dataset("chestxray14", str(tmp_path), False)
        assert source.notes == (note,)
        assert grey_values(source.train) == [40, 10]
        assert source.train.y.shape == (2, 14)
        assert [int(row.sum()) for row in source.train.y] == [3, 0]  # labels stay with their images
        assert grey_values(source.test) == [20, 30]
    assert capsys.readouterr().err == note + "\n"
    shutil.rmtree(tmp_path / "prepared")
    for file in names[2:4]:
        next(folder.rglob(file)).write_bytes(b"")
    not_opened("chestxray14", tmp_path, r"chestxray14 test: none of 2 images is readable, the first 00000002_000.png")
    assert kept(tmp_path) == []


def test_an_image_that_the_system_cannot_read_is_not_skipped(tmp_path, small, monkeypatch):
    chestxray14(tmp_path)
    monkeypatch.setattr(images, "fitted", Mock(side_effect=OSError(5, "Input/output error")))
    not_opened("chestxray14", tmp_path, r"00000003_000.png: cannot be read: Input/output error")


# --- what is kept


def test_kept_images_are_used_without_the_original_files(tmp_path, small, changed):
    folder, names = chestxray14(tmp_path)
    first = open_dataset("chestxray14", str(tmp_path), False)
    (folder / "images_001/images" / names[0]).unlink()
    (folder / "train_val_list.txt").unlink()
    assert open_dataset("chestxray14", str(tmp_path), False) is first
    opening._open_stored.cache_clear()
    again = open_dataset("chestxray14", str(tmp_path), False)
    assert again is not first
    assert (again.train.x == first.train.x).all()
    assert (again.train.y == first.train.y).all()
    changed(shape=[1, 8, 8])  # another shape is never met by what was kept
    not_opened("chestxray14", tmp_path, r"no ChestX-ray14/train_val_list.txt")


@pytest.mark.attack
def test_damage_to_kept_images_is_noticed(tmp_path, small, capsys):
    """They are prepared again from their files; without these the damage is named, but for what an earlier version
    kept without digests."""
    chestxray14(tmp_path)
    before = open_dataset("chestxray14", str(tmp_path), False)
    folder = tmp_path / "prepared" / kept(tmp_path)[0]

    def roll(name="train_labels.npy"):
        np.save(folder / name, np.roll(np.load(folder / name), 1, axis=0))
        new_process()
        capsys.readouterr()

    for name in ("train_labels.npy", "test_images.npy", "train_patient.npy"):
        roll(name)
        again = open_dataset("chestxray14", str(tmp_path), False)
        assert (again.train.y == before.train.y).all()
        assert (again.test.x == before.test.x).all()
        assert f"{folder / name} is not what was written: preparing it again" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "ChestX-ray14")
    roll()
    not_opened("chestxray14", tmp_path, r"train_labels.npy is not what was written: delete .* and prepare chestxray14")
    roll()
    (folder / stored.WRITTEN).unlink()
    open_dataset("chestxray14", str(tmp_path), False)
    assert "its original files are gone, so it is used as it is" in capsys.readouterr().err


def new_process():
    opening._open_stored.cache_clear()
    opening._as_listed.cache_clear()


def test_a_folder_that_was_half_unpacked_is_prepared_again_when_more_is_there(tmp_path, changed, capsys):
    changed(shape=[3, 16, 16])
    kagskin(tmp_path)
    assert len(open_dataset("kagskin", str(tmp_path), download=False).train.x) == 6
    xray(tmp_path / "kagskin/data/train/benign/later.jpg", 90, mode="RGB")
    capsys.readouterr()
    new_process()
    source = open_dataset("kagskin", str(tmp_path), download=False)
    assert (len(source.train.x), len(source.test.x)) == (7, 6)
    assert "kagskin: its files are not those that were prepared" in capsys.readouterr().err
    assert len(kept(tmp_path)) == 1
    new_process()
    assert len(open_dataset("kagskin", str(tmp_path), download=False).train.x) == 7
    assert capsys.readouterr().err == ""  # from what was kept


def test_a_corrected_table_is_noticed_and_an_unchanged_one_reads_no_image(tmp_path, small, monkeypatch):
    folder, _ = chestxray14(tmp_path)
    first = open_dataset("chestxray14", str(tmp_path), False)
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(images, "fitted", lambda *_: pytest.fail("an image is read again"))
        assert (open_dataset("chestxray14", str(tmp_path), False).train.y == first.train.y).all()
    table = folder / "Data_Entry_2017_v2020.csv"
    table.write_text(table.read_text().replace("Hernia", "Fibrosis"))
    new_process()
    again = open_dataset("chestxray14", str(tmp_path), False)
    assert again.test.y[0].argmax() == FINDINGS.index("Fibrosis")
    assert first.test.y[0].argmax() == FINDINGS.index("Hernia")
    assert grey_values(again.test) == grey_values(first.test)  # the earlier images stay mapped


def test_another_shape_or_rule_is_kept_apart(tmp_path, changed):
    chexpert(tmp_path)
    for i, (options, shape) in enumerate([({}, [1, 16, 16]), ({}, [1, 8, 8]), ({"uncertain": "one"}, [1, 8, 8])]):
        changed(options, shape=shape)
        source = open_dataset("chexpert", str(tmp_path), download=False)
        assert source.train.x.shape[1:] == tuple(shape)
        assert source.train.y[1].sum().item() == (2 if options else 1)
        assert len(kept(tmp_path)) == i + 1


def test_half_of_what_was_kept_is_named(tmp_path, small):
    chestxray14(tmp_path)
    open_dataset("chestxray14", str(tmp_path), False)
    folder = opening.kept_folder("chestxray14", opening.dataset_info("chestxray14"), tmp_path)
    assert kept(tmp_path) == [folder.name]
    (folder / "test_images.npy").write_bytes(b"half")
    with pytest.raises(UserError, match=r"chestxray14-\w+ cannot be read \(.*\): delete it to have it prepared again"):
        stored.read(folder)


def test_images_are_in_memory_one_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), [0]

    def image(i):
        x = torch.full((3, 4, 5), i, dtype=torch.uint8)
        alive.add(x)
        most[0] = max(most[0], len(alive))
        return x

    part = Unread(image, torch.arange(100))
    stored.keep_images(tmp_path / "a-1", "a", Listing(part, Unread(image, torch.zeros(0))), (3, 4, 5), skip=False)
    assert most[0] <= 2
    parts = stored.read(tmp_path / "a-1")
    assert parts.train.x[:, 1, 2, 3].tolist() == list(range(100))
    assert parts.test.x.shape == (0, 3, 4, 5)


def test_progress_is_said_now_and_then(tmp_path, small, monkeypatch, capsys):
    chestxray14(tmp_path)
    monkeypatch.setattr(files, "PAUSE", 0)
    open_dataset("chestxray14", str(tmp_path), False)
    lines = capsys.readouterr().err.splitlines()
    told = ["train: 1 of 4", "train: 2 of 4", "train: 3 of 4", "test: 1 of 2"]
    assert [line.split(",")[0] for line in lines] == [f"chestxray14 {text} images" for text in told]


def test_a_data_folder_that_takes_nothing(tmp_path, small, monkeypatch):
    folder, names = chestxray14(tmp_path)
    (folder / "images_001/images" / names[0]).write_bytes(b"no image")
    monkeypatch.setattr(stored, "locked", Mock(side_effect=PermissionError(13, "Permission denied")))
    source = open_dataset("chestxray14", str(tmp_path), False)
    assert grey_values(source.train) == [40, 50, 10]
    assert re.fullmatch(
        r"chestxray14: cannot be kept in .*prepared \(Permission denied\), so all of it is in memory", source.notes[0]
    )
    assert "1 of 4 images are corrupt" in source.notes[1]


def test_prepare_says_what_it_kept(tmp_path):
    chestxray14(tmp_path)
    said = catalogue.prepare_data("chestxray14", str(tmp_path))
    assert said == f"chestxray14 is ready in {tmp_path} (prepared): 4 training and 2 test images"
    assert "images_012.tar.gz" in catalogue.prepare_data("chestxray14", str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


# --- CheXpert


def chexpert(root):
    """Five training images, one of them lateral, and two validation images. The values of the observations: Edema,
    Fracture, Pneumonia."""
    folder = root / "CheXpert-v1.0-small"
    parts = {
        "train": [
            ("patient00001/study1/view1_frontal.jpg", "1.0,,"),
            ("patient00002/study1/view1_frontal.jpg", "1.0,-1.0,"),
            ("patient00002/study1/view2_lateral.jpg", "1.0,-1.0,"),
            ("patient00003/study1/view1_frontal.jpg", "0.0,,1.0"),
            ("patient00004/study2/view1_frontal.jpg", ",,"),
        ],
        "valid": [
            ("patient64541/study1/view1_frontal.jpg", "0.0,0.0,1.0"),
            ("patient64542/study1/view1_frontal.jpg", "1.0,0.0,0.0"),
        ],
    }
    value = 0
    for part, rows in parts.items():
        written = []
        for path, cells in rows:
            xray(folder / part / path, value := value + 10)
            given = dict(zip(("Edema", "Fracture", "Pneumonia"), cells.split(","), strict=True))
            view = "Frontal" if "frontal" in path else "Lateral"
            row = {"Path": f"CheXpert-v1.0-small/{part}/{path}", "Sex": "Female", "Age": 68, "Frontal/Lateral": view}
            rest = "0.0" if part == "valid" else ""
            written.append({**row, "AP/PA": "AP", **{key: given.get(key, rest) for key in OBSERVATIONS}})
        write_csv(folder / f"{part}.csv", written)
    return folder


def observed(split):
    return [{OBSERVATIONS[i] for i in np.flatnonzero(row)} for row in split.y.numpy()]


def test_chexpert(tmp_path, changed):
    chexpert(tmp_path)
    source = open_dataset("chexpert", str(tmp_path), download=False)
    assert source.train.x.shape == (4, 1, 224, 224)
    assert grey_values(source.train) == [10, 20, 40, 50]  # the lateral view is left out
    assert grey_values(source.test) == [60, 70]
    assert source.train.y.shape == (4, 14)
    assert observed(source.train) == [{"Edema"}, {"Edema"}, {"Pneumonia"}, set()]
    assert observed(source.test) == [{"Pneumonia"}, {"Edema"}]
    assert source.notes == (
        "chexpert train: 1 uncertain, 51 missing, 0 dropped, 1 other views (uncertain=zero, missing=zero)",
        "chexpert valid: 0 uncertain, 0 missing, 0 dropped, 0 other views (uncertain=zero, missing=zero)",
    )
    changed({"views": "all"})
    source = open_dataset("chexpert", str(tmp_path), False, "patient")
    first, second, lateral, *others = source.groups[0].tolist()
    assert grey_values(source.train) == [10, 20, 30, 40, 50]
    assert second == lateral
    assert len({first, second, *others, *source.groups[1].tolist()}) == 6


@pytest.mark.parametrize(
    ("rules", "train"),
    [
        ({"uncertain": "one"}, [{"Edema"}, {"Edema", "Fracture"}, {"Pneumonia"}, set()]),
        ({"uncertain": "drop"}, [{"Edema"}, {"Pneumonia"}, set()]),
        ({"views": "all"}, [{"Edema"}, {"Edema"}, {"Edema"}, {"Pneumonia"}, set()]),
    ],
)
def test_chexpert_rules(tmp_path, changed, rules, train):
    chexpert(tmp_path)
    changed(rules, shape=[1, 16, 16])
    source = open_dataset("chexpert", str(tmp_path), download=False)
    assert observed(source.train) == train
    assert observed(source.test) == [{"Pneumonia"}, {"Edema"}]


def test_chexpert_without_a_guess_at_what_is_not_known(tmp_path, changed):
    chexpert(tmp_path)
    changed({"uncertain": "unknown", "missing": "unknown"})
    y = open_dataset("chexpert", str(tmp_path), download=False).train.y
    assert y.isnan().sum() == 52
    edema, fracture = (OBSERVATIONS.index(name) for name in ("Edema", "Fracture"))
    assert y[:3, edema].tolist() == [1, 1, 0]
    assert y[:, fracture].isnan().all()


def test_chexpert_errors(tmp_path, changed):
    folder = chexpert(tmp_path)
    changed({"missing": "drop"})
    not_opened("chexpert", tmp_path, r"train.csv: no image is left by the rules .*: choose others")
    changed({"uncertain": "maybe"})
    not_opened("chexpert", tmp_path, r"chexpert.yaml: options.uncertain=maybe: use one of zero, one, unknown, drop")
    changed()
    train = folder / "train.csv"
    whole = train.read_text()
    train.write_text(whole.replace("-1.0", "2.0"))
    not_opened("chexpert", tmp_path, r"train.csv: .*patient00002.* has the value '2': it is 1, 0, -1 or empty")
    train.write_text("\n".join(whole.splitlines()[:-1]))
    not_opened("chexpert", tmp_path, r"train.csv: no row for train/patient00004/study2/view1_frontal.jpg and 0")
    train.write_text(whole)
    (folder / "valid/patient64541/study1/view1_frontal.jpg").unlink()
    not_opened("chexpert", tmp_path, r"valid/patient64541/study1/view1_frontal.jpg and 0 more of valid.csv are")
    (folder / "valid.csv").unlink()
    not_opened("chexpert", tmp_path, r"no CheXpert-v1.0-small/valid.csv", Missing)


# --- SPR


@pytest.mark.parametrize("edition", ["train_gender.csv", "train.csv"])
def test_sprxray(tmp_path, edition):
    folder = tmp_path / "sprxray"
    for i in range(10):
        xray(folder / f"kaggle/kaggle/train/{i:06d}.png", 10 * i, mode="RGBA")
    xray(folder / "kaggle/kaggle/test/000000.png", 200)  # without a label
    rows = [{"imageId": i, "age": 40.0 + i, "gender": i % 2} for i in (9, *range(9))]
    if edition == "train_gender.csv":
        rows = [{key: row[key] for key in ("imageId", "gender")} for row in rows]
    write_csv(folder / edition, rows)
    source = open_dataset("sprxray", str(tmp_path), download=False)
    assert source.train.x.shape == (8, 1, 224, 224)
    assert source.test.x.shape == (2, 1, 224, 224)
    assert sorted(grey_values(source.train) + grey_values(source.test)) == [10 * i for i in range(10)]
    for split in (source.train, source.test):
        assert split.y.tolist() == [value // 10 % 2 for value in grey_values(split)]
    assert "sprxray: 2 of 10 images held out as the test set, seed 0" in source.notes
    shutil.rmtree(tmp_path / "prepared")
    (folder / "kaggle/kaggle/train/000007.png").unlink()
    not_opened("sprxray", tmp_path, rf"sprxray: 000007.png and 0 more of {edition} are absent")
    write_csv(folder / edition, [{"imageId": 0, "gender": "F"}])
    not_opened("sprxray", tmp_path, r"imageId must be a number and gender 0 or 1")
    (folder / edition).unlink()
    not_opened("sprxray", tmp_path, r"no sprxray/train_gender.csv", Missing)


# --- EyePACS


def eyepacs(root):
    """Both eyes of ten patients, of whom the last three are the test part; the value of an image is its level, and 10
    for the right eye."""
    folder = root / "eyepacs"
    for part, table, patients in (
        ("train", "trainLabels.csv", range(7)),
        ("test", "retinopathy_solution.csv", (7, 8, 9)),
    ):
        rows = []
        for patient in patients:
            for side, eye in enumerate(("left", "right")):
                level = (patient + side) % 5
                picture(folder / part / f"{patient}_{eye}.jpeg", level + 10 * side, (48, 32), "RGB")
                rows.append({"image": f"{patient}_{eye}", "level": level})
        write_csv(folder / table, [row | ({"Usage": "Private"} if part == "test" else {}) for row in rows])
    return folder


def test_eyepacs_holds_out_patients_with_both_eyes(tmp_path):
    folder = eyepacs(tmp_path)
    assert catalogue.present("eyepacs", tmp_path) == "files"
    source = open_dataset("eyepacs", str(tmp_path), False, "patient")
    assert source.train.x.shape == (10, 3, 224, 224)
    assert source.test.x.shape == (4, 3, 224, 224)
    assert (source.classes, source.metric) == (5, "auc")
    for split, people in zip((source.train, source.test), source.groups, strict=True):
        levels, sides = split.x[:, 0, 0, 0] % 10, split.x[:, 0, 0, 0] // 10
        assert levels.tolist() == split.y.tolist()
        assert all(sorted(sides[people == person].tolist()) == [0, 1] for person in people.unique())
    assert not set(source.groups[0].tolist()) & set(source.groups[1].tolist())
    note = "eyepacs: 4 of 14 images held out as the test set, disjoint by patient, seed 0"
    assert note in source.notes
    (folder / "train/0_left.jpeg").unlink()
    shutil.rmtree(tmp_path / "prepared")
    not_opened("eyepacs", tmp_path, r"train: 0_left and 0 more of trainLabels.csv are absent")
    picture(folder / "train/0_left.jpeg", 0, (48, 32), "RGB")
    write_csv(folder / "trainLabels.csv", [{"image": path.stem, "level": 5} for path in folder.glob("train/*")])
    not_opened("eyepacs", tmp_path, r"trainLabels.csv: a level must be 0, 1, 2, 3 or 4")
    (folder / "trainLabels.csv").unlink()
    not_opened("eyepacs", tmp_path, r"no eyepacs/trainLabels.csv", Missing)


def test_eyepacs_with_the_test_part_of_the_competition(tmp_path):
    folder = eyepacs(tmp_path)
    source = open_dataset("eyepacs_complete", str(tmp_path), False, "patient")
    assert (
        (source.train.x[:, 0, 0, 0] % 10).tolist()
        == source.train.y.tolist()
        == [0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0, 1, 1, 2]
    )
    assert (source.test.x[:, 0, 0, 0] % 10).tolist() == source.test.y.tolist() == [2, 3, 3, 4, 4, 0]
    train, test = source.groups
    assert (len(train.unique()), len(test.unique())) == (7, 3)
    (folder / "retinopathy_solution.csv").unlink()
    shutil.rmtree(tmp_path / "prepared")
    not_opened("eyepacs_complete", tmp_path, r"no eyepacs/retinopathy_solution.csv", Missing)


# --- class folders


def test_kneeos(tmp_path):
    for i, part in enumerate(("train", "val", "test", "auto_test")):
        for grade in range(5):
            xray(tmp_path / f"kneeos/{part}/{grade}/9{grade}00{i}L.png", 50 * i + 10 * grade, size=(224, 224))
    (tmp_path / "kneeos/val/3/93001L.png").write_bytes(b"no image")
    source = open_dataset("kneeos", str(tmp_path), download=False)
    assert source.train.x.shape == (9, 1, 224, 224)  # val joins, auto_test does not
    assert source.metric == "auc"
    assert [value % 50 // 10 for value in grey_values(source.train)] == source.train.y.tolist()
    assert sorted(grey_values(source.test)) == [100, 110, 120, 130, 140]
    assert source.notes == (
        "kneeos: test was sorted by class, shuffled with seed 0",
        "kneeos train: 1 of 10 images are corrupt and were skipped: 93001L.png",
    )
    shutil.rmtree(tmp_path / "prepared")
    shutil.rmtree(tmp_path / "kneeos/test/4")
    not_opened("kneeos", tmp_path, r"kneeos/test: not the class folders of train")


def kagskin(root):
    for i, part in enumerate(("train", "test")):
        for j, kind in enumerate(("benign", "malignant")):
            for k in range(3):
                picture(root / f"kagskin/data/{part}/{kind}/{k}.jpg", 100 * i + 30 * j + 10 * k)


def test_kagskin(tmp_path):
    kagskin(tmp_path)
    source = open_dataset("kagskin", str(tmp_path), download=False)
    assert source.train.x.shape == source.test.x.shape == (6, 3, 224, 224)
    assert [value // 30 for value in grey_values(source.train)] == source.train.y.tolist()
    assert sorted(grey_values(source.test)) == [100, 110, 120, 130, 140, 150]


# --- MedMNIST


def medmnist(path, shape, labels, seed=0, n=(6, 2, 4), save=np.savez_compressed):
    """A file as MedMNIST has it: three parts, compressed."""
    random = np.random.RandomState(seed)
    arrays = {}
    for part, count in zip(("train", "val", "test"), n, strict=True):
        arrays[f"{part}_images"] = random.randint(0, 256, (count, *shape), dtype=np.uint8)
        if labels == 14:
            arrays[f"{part}_labels"] = random.randint(0, 2, (count, 14)).astype(np.uint8)
        else:
            arrays[f"{part}_labels"] = (np.arange(count)[::-1] % labels).astype(np.uint8)[:, None]
    save(path, **arrays)
    return arrays


@pytest.mark.parametrize("size", [28, 64, 224])
@pytest.mark.parametrize(
    ("name", "channels", "labels"), [("chestmnist", [], 14), ("dermamnist", [3], 7), ("pneumoniamnist", [], 2)]
)
def test_medmnist(tmp_path, name, size, channels, labels):
    name = name if size == 28 else f"{name}_{size}"
    arrays = medmnist(tmp_path / f"{name}.npz", (size, size, *channels), labels)
    assert catalogue.present(name, tmp_path) == "files"
    source = open_dataset(name, str(tmp_path), download=False)
    for part, split in (("train", source.train), ("test", source.test)):
        x = arrays[f"{part}_images"]
        assert (split.x.permute(0, 2, 3, 1).numpy() == x.reshape(*x.shape[:3], -1)).all()
        assert (split.y.numpy() == arrays[f"{part}_labels"].squeeze(1 if labels < 14 else ())).all()
    assert source.classes == labels
    assert source.notes == (f"{name}: the validation part of MedMNIST is left out",)
    assert catalogue.present(name, tmp_path) == "prepared"
    assert same_examples(name, name.split("_")[0], str(tmp_path))


def test_medmnist_errors(tmp_path):
    path = tmp_path / "chestmnist.npz"
    medmnist(path, (64, 64), 14)
    not_opened("chestmnist", tmp_path, r"chestmnist.npz: images are 64x64x1, not 28x28x1")
    medmnist(path, (28, 28), 7)
    with pytest.raises(UserError, match=r"train_labels out of range: 6 classes or labels, 2 expected"):
        open_dataset("pneumoniamnist", str(path.rename(tmp_path / "pneumoniamnist.npz").parent), download=False)
    medmnist(path, (28, 28), 14, n=(60, 2, 4))
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], whole[:20000] + bytes(9) + whole[20009:]):
        path.write_bytes(damage)
        not_opened("chestmnist", tmp_path, r"chestmnist.npz cannot be read .*: corrupt, truncated or not a plain npz")
    np.savez(path, train_labels=np.zeros((2, 14)), test_labels=np.zeros((2, 14)))
    not_opened("chestmnist", tmp_path, r"chestmnist.npz: no array train_images in it")


def test_medmnist_is_fetched_with_its_checksum(tmp_path, monkeypatch):
    asked = []

    def fetch(url, root, file, md5):
        asked.append((url, md5))
        medmnist(Path(root) / file, (64, 64), 2)

    monkeypatch.setattr("pubsel.data.torchvision_sets.download_url", fetch)
    assert len(open_dataset("pneumoniamnist_64", str(tmp_path), download=True).test.x) == 4
    assert asked == [(dataset_info("pneumoniamnist_64").url, "8f4eceb4ccffa70c672198ea285246c6")]
    monkeypatch.setattr("pubsel.data.torchvision_sets.download_url", Mock(side_effect=OSError("no route to host")))
    with pytest.raises(Missing, match=r"\(download failed: no route to host\)"):
        open_dataset("chestmnist", str(tmp_path), download=True)


# One set under two names


@pytest.mark.parametrize(
    ("private", "public"),
    [
        ("ham10000", "dermamnist_64"),
        ("dermamnist", "ham10000"),
        ("chestxray14", "chestmnist_224"),
        ("chestmnist_64", "chestxray14"),
        ("kagchest", "pneumoniamnist"),
        ("pneumonia", "kagchest"),
        ("pneumoniamnist_224", "pneumonia"),
        ("imagenet", "tiny_imagenet"),
        ("ham10000_224", "dermamnist"),
        ("dermamnist_224", "ham10000_224"),
    ],
)
@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_private_images_are_never_public_under_another_name(private, public, take, monkeypatch):
    """Their splits differ: test images of the one are training images of the other."""

    random_sets(monkeypatch)
    pair = Pair(private, public, 5, take=take, convert=Convert.resize)
    not_loaded(pair, "nowhere", f"pair.public={public} has images of {private} in another split")
    if take == Take.test:
        not_loaded(dataclasses.replace(pair, public=["noise", public]), "nowhere", "another split")
    assert load(dataclasses.replace(pair, public="noise"), "nowhere", False).public is not None


def test_ham10000_is_one_set_at_both_sizes():
    """Its public images leave the test set, and its labels are of the task, whatever the size."""
    for one, two in (("ham10000", "ham10000_224"), ("ham10000_224", "ham10000")):
        assert same_examples(one, two, "nowhere")
        assert related.same_classes(one, two, "nowhere")
        related.check_apart(one, two, "nowhere")


@pytest.mark.parametrize("name", ["gsd_table3", "gsd_table13a", "gsd_table13b"])
def test_the_tables_on_ham10000_take_images_of_224_pixels(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = compose("run", [f"+experiment={name}"], return_hydra_config=True)
    assert (values.pair.private, dataset_info(values.pair.private).shape) == ("ham10000_224", [3, 224, 224])
    assert values.model.input_size in (None, 224)
    table = yaml.safe_load((CONF / "tables" / f"{name}.yaml").read_text())
    assert table["records"]["pair.private"] == [values.pair.private]
    assert values.hydra.sweeper.params["pair.public"].split(",")[0] == values.pair.private


def test_no_pair_of_the_papers_is_refused():
    for file in (CONF / "pair").glob("*.yaml"):
        pair = OmegaConf.load(file)
        if pair.get("take") != "train":  # then it is a part of the same images
            related.check_apart(pair.private, pair.public, "nowhere")
