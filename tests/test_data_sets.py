"""The sets of PILLAR and AdaMix in the layouts their publishers use, made here at a small size."""

import dataclasses
import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from scipy.io import savemat

from pubsel.commands import data as catalogue
from pubsel.data import Missing, open_dataset, opening, openml
from pubsel.messages import UserError
from pubsel.settings import CONF, datasets
from pubsel.settings.datasets import dataset_info
from pubsel.settings.keys import Convert, Pair
from tests.made import grey_values, not_loaded, not_opened, picture, write_csv


@pytest.fixture
def classes(monkeypatch):
    """classes(n): every named set has n classes, so that a small tree is a whole one."""

    def fewer(n):
        monkeypatch.setattr(opening, "dataset_info", lambda name: dataclasses.replace(dataset_info(name), classes=n))

    return fewer


# --- sets of torchvision


def gtsrb(root, classes=3):
    for i in range(classes):
        picture(root / f"gtsrb/GTSRB/Training/{i:05d}/00000_00000.ppm", 10 * i, size=(15, 20))
    rows = [{"Filename": f"{i:05d}.ppm", "ClassId": i % 2, "Width": 20} for i in range(4)]
    for i in range(4):
        picture(root / f"gtsrb/GTSRB/Final_Test/Images/{i:05d}.ppm", 100 + 10 * i, size=(222, 193))
    write_csv(root / "gtsrb/GT-final_test.csv", rows, ";")


def test_gtsrb(tmp_path, classes):
    classes(3)
    gtsrb(tmp_path)
    assert catalogue.present("gtsrb", tmp_path) == "files"
    source = open_dataset("gtsrb", str(tmp_path), download=False)
    assert source.train.x.shape == (3, 3, 64, 64)
    assert sorted(zip(source.train.y.tolist(), grey_values(source.train), strict=True)) == [(0, 0), (1, 10), (2, 20)]
    assert source.test.y.tolist() == [0, 1, 0, 1]
    assert grey_values(source.test) == [100, 110, 120, 130]
    shutil.rmtree(tmp_path / "prepared")
    classes(4)
    not_opened("gtsrb", tmp_path, r"Training: 3 class folders with images, 4 expected")
    classes(3)
    (tmp_path / "gtsrb/GTSRB/Final_Test/Images/00002.ppm").unlink()
    not_opened("gtsrb", tmp_path, r"dataset gtsrb: corrupt or incomplete files .*00002.ppm.*: delete")


def test_oxford_pets(tmp_path):
    folder = tmp_path / "oxford-iiit-pet"
    names = ["Abyssinian_100", "beagle_7", "Abyssinian_101", "yorkshire_terrier_9"]
    for i, name in enumerate(names):
        picture(folder / f"images/{name}.jpg", 10 * i)
    (folder / "annotations").mkdir()
    (folder / "annotations/trainval.txt").write_text("Abyssinian_100 1 1 1\nyorkshire_terrier_9 37 2 25\n")
    (folder / "annotations/test.txt").write_text("beagle_7 5 2 2\nAbyssinian_101 1 1 1\n")
    source = open_dataset("oxford_pets", str(tmp_path), download=False)
    assert source.train.x.shape == (2, 3, 224, 224)
    assert sorted(zip(source.train.y.tolist(), grey_values(source.train), strict=True)) == [(0, 0), (36, 30)]
    assert source.test.y.tolist() == [4, 0]
    assert grey_values(source.test) == [10, 20]


def test_caltech256(tmp_path, classes):
    classes(3)
    for i, name in enumerate(("001.ak47", "002.american-flag", "257.clutter")):
        for j in range(5):
            picture(tmp_path / f"caltech256/256_ObjectCategories/{name}/{i + 1:03d}_{j + 1:04d}.jpg", 10 * i)
    (tmp_path / "caltech256/256_ObjectCategories/002.american-flag/RENAME2").write_text("no image")
    source = open_dataset("caltech256", str(tmp_path), download=False)
    assert source.train.x.shape == (12, 3, 224, 224)
    assert source.test.x.shape == (3, 3, 224, 224)
    assert grey_values(source.train) == [10 * y for y in source.train.y]
    assert "caltech256: 0.2 of the images held out as the test set, seed 0" in source.notes


def pcam(root, n=4):
    """The six files, as npz under the names of the HDF5 files: h5py is not among the dependencies."""
    (root / "pcam").mkdir()
    for i, part in enumerate(("train", "valid", "test")):
        x = np.full((n, 96, 96, 3), 10 * i, np.uint8)
        for key, array in (("x", x), ("y", np.arange(n, dtype=np.uint8).reshape(n, 1, 1, 1) % 2)):
            with (root / f"pcam/camelyonpatch_level_2_split_{part}_{key}.h5").open("wb") as file:
                np.savez(file, **{key: array})


def test_pcam(tmp_path, monkeypatch):
    pcam(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", types.SimpleNamespace(File=lambda path, mode="r": np.load(path)))
    source = open_dataset("pcam", str(tmp_path), download=False)
    assert source.train.x.shape == (8, 3, 96, 96)
    assert grey_values(source.train) == [0] * 4 + [10] * 4  # the validation part joins
    assert source.train.y.tolist() == [0, 1] * 4
    assert grey_values(source.test) == [20] * 4
    shutil.rmtree(tmp_path / "prepared")
    file = tmp_path / "pcam/camelyonpatch_level_2_split_valid_y.h5"
    with file.open("wb") as other:
        np.savez(other, a=np.zeros(1))
    not_opened("pcam", tmp_path, r"split_valid_y.h5 cannot be read .*: delete it")
    file.unlink()
    not_opened("pcam", tmp_path, r"dataset pcam is not in", Missing)


def test_pcam_needs_h5py(tmp_path, monkeypatch):
    pcam(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    not_opened("pcam", tmp_path, r"HDF5: python -m pip install .*pcam")


# --- lists


def cub200(root):
    """Five photographs of three classes; the third and the fifth are test images."""
    folder = root / "CUB_200_2011"
    names = ["001.Albatross/A_1_796111.jpg", "001.Albatross/A_2_5.jpg", "002.Auklet/B_1_3.jpg", "003.Wren/C_1_9.jpg"]
    names.append("003.Wren/C_2_8.jpg")
    for i, name in enumerate(names):
        picture(folder / "images" / name, 10 * i)
    (folder / "images.txt").write_text("".join(f"{i + 1} {name}\n" for i, name in enumerate(names)))
    (folder / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n4 3\n5 3\n")
    (folder / "train_test_split.txt").write_text("1 1\n2 1\n3 0\n4 1\n5 0\n")
    return folder


def test_cub200(tmp_path, classes):
    classes(3)
    cub200(tmp_path)
    source = open_dataset("cub200", str(tmp_path), download=False)
    assert source.train.x.shape == (3, 3, 224, 224)
    assert sorted(zip(grey_values(source.train), source.train.y.tolist(), strict=True)) == [(0, 0), (10, 0), (30, 2)]
    assert sorted(zip(grey_values(source.test), source.test.y.tolist(), strict=True)) == [(20, 1), (40, 2)]
    assert catalogue.present("cub200", tmp_path) == "prepared"


def test_stanford_dogs(tmp_path, classes):
    classes(2)
    names = ["n02085620-Chihuahua/n02085620_5927.jpg", "n02116738-African_dog/n02116738_1.jpg"]
    names += [name.replace(".jpg", "0.jpg") for name in names]
    for i, name in enumerate(names):
        picture(tmp_path / "stanford_dogs/Images" / name, 10 * i)
    for part, first in (("train", 2), ("test", 0)):
        cells = np.empty((2, 1), dtype=object)
        cells[:, 0] = names[first : first + 2]
        labels = np.array([[1.0], [2.0]])
        savemat(tmp_path / f"stanford_dogs/{part}_list.mat", {"file_list": cells, "labels": labels})
    source = open_dataset("stanford_dogs", str(tmp_path), download=False)
    assert source.train.x.shape == (2, 3, 224, 224)
    assert sorted(zip(grey_values(source.train), source.train.y.tolist(), strict=True)) == [(20, 0), (30, 1)]
    assert sorted(zip(grey_values(source.test), source.test.y.tolist(), strict=True)) == [(0, 0), (10, 1)]
    shutil.rmtree(tmp_path / "prepared")
    (tmp_path / "stanford_dogs/test_list.mat").write_bytes(b"no mat file")
    not_opened("stanford_dogs", tmp_path, r"test_list.mat cannot be read .*: no list")


def mit67(root):
    folder = root / "mit67"
    names = ["kitchen/int474.jpg", "airport_inside/airport inside 1.jpg", "kitchen/k2.jpg"]  # one with spaces
    for i, name in enumerate(names):
        picture(folder / "Images" / name, 10 * i)
    (folder / "TrainImages.txt").write_text(f"{names[0]}\r\n{names[1]}")
    (folder / "TestImages.txt").write_text(f"{names[2]}\r\n")
    return folder


def test_mit67(tmp_path, classes):
    classes(2)
    mit67(tmp_path)
    source = open_dataset("mit67", str(tmp_path), download=False)
    assert source.train.x.shape == (2, 3, 224, 224)
    assert source.train.y.tolist() == [1, 0]
    assert grey_values(source.train) == [0, 10]
    assert source.test.y.tolist() == [1]


def domainnet(root):
    """Painting has no training image of class 1, as the published list lacks t-shirt."""
    rows = {"train": ["airplane", "zigzag"], "test": ["t-shirt", "airplane", "zigzag"]}
    for part, names in rows.items():
        numbers = [["airplane", "t-shirt", "zigzag"].index(name) for name in names]
        files = [f"painting/{name}/painting_{part}_1.jpg" for name in names]
        for i, file in enumerate(files):
            picture(root / "domainnet" / file, 10 * i + (part == "test"))
        lines = [f"{file} {number}\n" for file, number in zip(files, numbers, strict=True)]
        (root / "domainnet" / f"painting_{part}.txt").write_text("".join(lines))


def test_domainnet(tmp_path, classes):
    classes(3)
    domainnet(tmp_path)
    assert catalogue.present("domainnet_painting", tmp_path) == "files"
    assert catalogue.present("domainnet_real", tmp_path) == "absent"
    source = open_dataset("domainnet_painting", str(tmp_path), download=False)
    assert sorted(source.train.y.tolist()) == [0, 2]  # the numbers of the list, which are those of the other domain
    assert source.test.y.tolist() == [1, 0, 2]
    assert source.test.x.shape == (3, 3, 224, 224)
    not_opened("domainnet_real", tmp_path, r"dataset domainnet_real is not in .*no domainnet/real_train.txt", Missing)


def test_list_errors(tmp_path, classes):
    classes(3)
    folder = cub200(tmp_path)
    (folder / "images/002.Auklet/B_1_3.jpg").unlink()
    not_opened("cub200", tmp_path, r"002.Auklet/B_1_3.jpg and 0 more of the lists are absent: unpack")
    (folder / "train_test_split.txt").write_text("1 1\n2 0\n")
    not_opened("cub200", tmp_path, r"train_test_split.txt: 2 lines for 5 of images.txt: unpack")
    (folder / "images.txt").write_text("1 001.Albatross/A_1_796111.jpg\nno number\n")
    not_opened("cub200", tmp_path, r"images.txt: cannot read its line 'no number': download it again")
    mit67(tmp_path)
    not_opened("mit67", tmp_path, r"TrainImages.txt: 2 classes, 3 expected: unpack")
    (tmp_path / "mit67/TestImages.txt").write_bytes(b"\xff\xfe")
    not_opened("mit67", tmp_path, r"TestImages.txt cannot be read .*: no list: download it again")
    classes(2)
    mit67(tmp_path)
    (tmp_path / "mit67/Images/kitchen/k2.jpg").write_bytes(b"no image")
    not_opened("mit67", tmp_path, r"k2.jpg: not a readable image: remove it or replace it")


# --- class folders


def test_dermnet(tmp_path, classes):
    classes(2)
    for i, (part, name) in enumerate((part, name) for part in ("train", "test") for name in ("Acne Photos", "Warts")):
        picture(tmp_path / "dermnet" / part / name / "a-1.jpg", 10 * i, size=(40, 60))
    source = open_dataset("dermnet", str(tmp_path), download=False)
    assert source.train.x.shape == source.test.x.shape == (2, 3, 224, 224)
    assert sorted(zip(grey_values(source.test), source.test.y.tolist(), strict=True)) == [(20, 0), (30, 1)]
    shutil.rmtree(tmp_path / "prepared")
    picture(tmp_path / "dermnet/test/Eczema/a-1.jpg")
    not_opened("dermnet", tmp_path, r"dermnet/test: not the class folders of train: unpack the archive again")
    classes(23)
    not_opened("dermnet", tmp_path, r"dermnet/train: 2 class folders with images, 23 expected")


@pytest.mark.parametrize("edition", ["Kaggle", "Mendeley"])
def test_pneumonia(tmp_path, edition):
    parts = {"train": 10, "test": 30} | ({"val": 20} if edition == "Kaggle" else {})
    for part, value in parts.items():
        picture(tmp_path / f"chest_xray/{part}/NORMAL/IM-0115-0001.jpeg", value, mode="L")
        picture(tmp_path / f"chest_xray/{part}/PNEUMONIA/person1_bacteria_1.jpeg", value)
    source = open_dataset("pneumonia", str(tmp_path), download=False)
    assert source.train.x.shape[1:] == (1, 224, 224)
    assert sorted(grey_values(source.train)) == ([10, 10, 20, 20] if edition == "Kaggle" else [10, 10])
    assert grey_values(source.test) == [30, 30]
    assert sorted(source.test.y.tolist()) == [0, 1]
    assert source.metric == "accuracy"
    shutil.rmtree(tmp_path / "prepared")
    shutil.rmtree(tmp_path / "chest_xray/test")
    not_opened("pneumonia", tmp_path, r"no folder chest_xray/test", Missing)


def test_flower16(tmp_path, classes):
    classes(2)
    for i in range(10):
        picture(tmp_path / f"flower16/{'astilbe' if i < 5 else 'bellflower'}/{i}.jpg", 10 * i)
    source = open_dataset("flower16", str(tmp_path), download=False)
    assert source.train.x.shape == (8, 3, 224, 224)
    assert [value // 50 for value in grey_values(source.train)] == source.train.y.tolist()
    assert len(source.test.x) == 2


# --- CIFAR-10.1


def test_cifar10_1_is_public_only(tmp_path):
    x = np.random.RandomState(0).randint(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "cifar10.1_v6_data.npy", x)
    not_opened("cifar10_1", tmp_path, "dataset cifar10_1 is not in", Missing)
    np.save(tmp_path / "cifar10.1_v6_labels.npy", np.array([3, 1, 9, 0, 2, 2], dtype=np.int32))
    source = open_dataset("cifar10_1", str(tmp_path), download=False)
    assert source.train.x.shape == (0, 3, 32, 32)
    assert (source.test.x.permute(0, 2, 3, 1).numpy() == x).all()
    assert source.test.y.tolist() == [3, 1, 9, 0, 2, 2]
    not_loaded(
        Pair(private="cifar10_1", public=None, m=1, convert=Convert.resize),
        tmp_path,
        r"no training images: it can serve as public data only",
        UserError,
    )
    np.save(tmp_path / "cifar10.1_v6_labels.npy", np.zeros(5, np.int32))
    not_opened("cifar10_1", tmp_path, r"v6_data.npy: uint8 \(6, 32, 32, 3\) for 5 labels: download both again")
    (tmp_path / "cifar10.1_v6_labels.npy").write_bytes(b"<html>")
    not_opened("cifar10_1", tmp_path, r"cifar10.1_v6_labels.npy: not a readable npy")


# --- OpenML


def table(path, rows, features):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = ["% a comment", "@RELATION guillermo", "", "@ATTRIBUTE class {0,1}"]
    head += [f"@ATTRIBUTE V{i + 1} NUMERIC" for i in range(features)] + ["@DATA"]
    path.write_text("\n".join([*head, *rows]) + "\n")


@pytest.mark.parametrize("name", ["guillermo", "riccardo"])
def test_openml_tables_are_features(tmp_path, name):
    d = 4296
    rows = [f"{i % 2}," + ",".join(str(i + 0.5) if j == 0 else "0" for j in range(d)) for i in range(10)]
    table(tmp_path / f"openml/{name}.arff", rows, d)
    source = open_dataset(f"openml_{name}", str(tmp_path), download=False)
    assert source.train.x.shape == (8, d)
    assert source.test.x.shape == (2, d)
    assert source.train.x.dtype == torch.float32
    assert source.train.y.dtype == torch.int64
    assert (source.train.x[:, 0] - 0.5).remainder(2).tolist() == source.train.y.tolist()
    assert f"openml_{name}: 2 of 10 rows held out as the test set, seed 0" in source.notes
    table(tmp_path / f"openml/{name}.arff", ["0,1", "1,2"], 1)
    not_opened(f"openml_{name}", tmp_path, r"2 classes and 1 features, 2 and 4296 expected: download it again")


@pytest.mark.parametrize(
    "rows",
    [
        ["0,1,2", "1,?,3"],
        ["0,1,2", "1,4"],
        ["{0 1, 1 2.5}"],
        ["0,1,2", "1,2,\0"],
        "@attribute a numeric\n@data\n1\n",
        "<html>",
    ],
    ids=["?", "cut", "sparse", "zero", "no class", "a page"],
)
def test_a_wrong_arff_is_named(tmp_path, rows):
    if isinstance(rows, list):
        table(tmp_path / "a.arff", rows, 2)
    else:
        (tmp_path / "a.arff").write_text(rows)
    with pytest.raises(UserError, match="it is no dense ARFF with a column class: download it again") as error:
        openml.read_arff(tmp_path / "a.arff")
    assert "\n" not in str(error.value)


def test_what_a_file_says_of_a_dataset_is_read_again_once_it_changes(tmp_path, monkeypatch):
    file = tmp_path / "digits.yaml"
    monkeypatch.setattr(datasets, "named", lambda group: {"digits": file})
    for title in ("first", "another"):
        file.write_text(re.sub("title: .*", f"title: {title}", (CONF / "dataset" / "digits.yaml").read_text()))
        assert datasets.dataset_info("digits").title == title
