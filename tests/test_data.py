"""Datasets in the layouts their publishers use, made here at a small size; the rules of pubsel.data; its errors."""

import gzip
import os
import pickle
import re
import shutil
import struct
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision.datasets as sets
from PIL import Image
from scipy.io import savemat

from pubsel.algorithms import View
from pubsel.commands import data as catalogue
from pubsel.data import Missing, Reader, Split, load, open_dataset, prepared, processes, public_examples, same_examples
from pubsel.data.convert import to_shape
from pubsel.data.splits import NO_CLASS, held_out, shuffled, sorted_by_class
from pubsel.messages import UsageError, UserError
from pubsel.rules import without_public
from pubsel.settings.datasets import dataset_info, dataset_names
from pubsel.settings.keys import Convert, Pair, Take
from tests.made import grey_values, not_loaded, not_opened, picture, random_sets, write_csv

resize, exact = Convert.resize, Convert.exact


def pixels(n, *shape, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (n, *shape), dtype=np.uint8)


def npz(path, train=20, test=10, shape=(8, 8), classes=2, **changes):
    """A prepared npz with cycling labels (not sorted); `changes` replaces arrays, or removes those that are None."""
    seed = sum(path.stem.encode())  # other images under another name
    arrays = {
        "train_images": pixels(train, *shape, seed=seed),
        "train_labels": np.arange(train)[::-1] % classes,
        "test_images": pixels(test, *shape, seed=seed + 1000),
        "test_labels": np.arange(test)[::-1] % classes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
    np.savez(path, **arrays)
    return arrays


def images(folder, n, size=(10, 10), mode="RGB", suffix=".png", seed=0):
    """n image files 00.png, ... of (height, width) in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(pixels(n, *size, 3, seed=seed)):
        Image.fromarray(image).convert(mode).save(folder / f"{i:02d}{suffix}")
    return folder


def pair(private, public, m=4, convert=resize):
    return Pair(private=str(private), public=None if public is None else str(public), m=m, convert=convert)


# --- conf/dataset and the catalogue


def test_listing_says_what_is_there(tmp_path):
    npz(tmp_path / "cifar10.npz")
    (tmp_path / "tiny-imagenet-200" / "train").mkdir(parents=True)
    (tmp_path / "imagenet").mkdir()  # empty: nothing is there
    rows = {line.split()[0]: line for line in catalogue.listing(str(tmp_path)).splitlines() if line.split()}
    assert rows["cifar10"].endswith("npz")
    assert rows["digits"].endswith("built in")
    assert rows["tiny_imagenet"].endswith("files")
    assert re.search(r"absent +pubsel data prepare imagenet \(shows the steps\)$", rows["imagenet"])


def test_prepare(tmp_path):
    assert "built in" in catalogue.prepare_data("digits", str(tmp_path))
    steps = catalogue.prepare_data("imagenet", str(tmp_path))
    assert "imagenet/val/<wnid>/*.JPEG" in steps
    assert str(tmp_path) in steps
    for i, flower in enumerate(("daisy", "dandelion", "rose", "sunflower", "tulip")):
        images(tmp_path / "flowers5" / flower, 4, size=(70, 90), suffix=".jpg", seed=i)
    assert "16 training and 4 test images" in catalogue.prepare_data("flowers5", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flowers5", "prepared"]


@pytest.mark.parametrize(("take", "shots"), [(Take.test, None), (Take.train, None), (Take.train, 2)])
def test_only_the_public_examples_that_are_taken_go_through_a_backbone(tmp_path, take, shots):
    npz(tmp_path / "own.npz")
    npz(tmp_path / "other.npz", train=50, test=40)
    sizes = {}

    def through(name, source, like):
        sizes[Path(name).stem] = len(source.train.x) + len(source.test.x)
        return source

    settings = pair(tmp_path / "own.npz", tmp_path / "other.npz", m=4 if shots is None else None)
    settings.take, settings.shots = take, shots
    assert len(load(settings, "", False, through).public.x) == 4
    assert sizes == {"own": 30, "other": 4}


# --- rule 1: prepared npz, then files, then download


def test_npz_comes_first_and_is_read_as_it_is(tmp_path):
    arrays = npz(tmp_path / "mnist.npz", shape=(28, 28), classes=10, extra=np.zeros(3))
    source = open_dataset("mnist", str(tmp_path), download=True)
    assert source.train.x.shape == (20, 1, 28, 28)
    assert source.train.x.dtype == torch.uint8
    assert source.train.y.dtype == torch.int64
    assert source.classes == 10
    assert source.metric == "accuracy"
    assert (source.test.x[:, 0].numpy() == arrays["test_images"]).all()
    assert (source.test.y.numpy() == arrays["test_labels"]).all()
    assert source.mean == (0.1307,)
    assert source.notes == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": None}, "no array train_labels"),
        ({"train_images": pixels(20, 28, 28).astype(np.float32)}, "train_images is float32, not uint8"),
        ({"test_images": pixels(10, 28, 28, 4)}, "test_images has shape"),
        ({"test_images": pixels(9, 28, 28)}, "test_labels has 10 labels for 9 examples"),
        ({"test_images": pixels(10, 20, 20)}, "train and test differ in the shape"),
        ({"train_labels": np.full(20, 10)}, "train_labels out of range: 11 classes"),
        ({"train_labels": np.full(20, -1)}, "train_labels out of range: -1"),
        ({"train_labels": np.full(20, 0.5)}, "train_labels is float64"),
        (
            {"train_labels": np.array([{}] * 20)},
            "train_labels is an array of objects, which is not read: save a plain one",
        ),
        ({"train_images": pixels(20, 8, 8), "test_images": pixels(10, 8, 8)}, "images are 8x8x1, not 28x28x1"),
    ],
)
def test_a_wrong_npz_is_named(tmp_path, changes, message):
    npz(tmp_path / "mnist.npz", **{"shape": (28, 28), "classes": 10, **changes})
    assert "mnist.npz" in not_opened("mnist", tmp_path, re.escape(message))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text", "empty"])
def test_a_damaged_npz_is_named(tmp_path, damage):
    path = tmp_path / "mnist.npz"
    npz(path, shape=(28, 28))
    whole = path.read_bytes()
    flipped = whole[:500] + bytes(255 - byte for byte in whole[500:900]) + whole[900:]
    path.write_bytes(
        {"truncated": whole[: len(whole) // 2], "flipped": flipped, "text": b"hello", "empty": b""}[damage]
    )
    not_opened("mnist", tmp_path, r"mnist.npz cannot be read .*: corrupt, truncated or not a plain npz")


def test_multi_label_npz(tmp_path):
    labels = np.random.RandomState(0).randint(0, 2, (30, 5))
    npz(tmp_path / "a.npz", train_labels=labels[:20], test_labels=labels[20:])
    source = open_dataset(str(tmp_path / "a.npz"), ".", False)
    assert source.metric == "auc"
    assert source.classes == 5
    assert source.train.y.dtype == torch.float32

    unknown = np.where(labels == labels[0], labels, np.nan)
    npz(tmp_path / "a.npz", train_labels=unknown[:20], test_labels=unknown[20:])
    assert open_dataset(str(tmp_path / "a.npz"), ".", False).train.y.isnan().sum() == np.isnan(unknown[:20]).sum()
    npz(tmp_path / "a.npz", train_labels=labels[:20] * 2, test_labels=labels[20:])
    not_opened(str(tmp_path / "a.npz"), ".", r"holds only 0, 1 and nan, for not known")


def test_missing_dataset_names_the_remedies(tmp_path, monkeypatch):
    for name in dataset_names():
        if dataset_info(name).source != "embedded":
            line = not_opened(name, tmp_path, f"^dataset {name} is not in", Missing)
            assert f"pubsel data prepare {name}" in line
            assert "data_root=" in line
            assert "PUBSEL_DATA" in line

    offline = Mock(side_effect=OSError("no route\nto host"))
    for place in ("cifar.download_and_extract_archive", "mnist.download_and_extract_archive", "svhn.download_url"):
        monkeypatch.setattr(f"torchvision.datasets.{place}", offline)
    monkeypatch.setattr("pubsel.data.torchvision_sets.download_url", offline)
    for name in ("cifar10", "svhn", "tiny_imagenet"):
        with pytest.raises(Missing, match=r"\(download failed: no route to host\)"):
            open_dataset(name, str(tmp_path), download=True)
    not_opened("nonesuch", tmp_path, r"unknown dataset 'nonesuch'", UsageError)


# --- sets of torchvision, in their own files


def idx(path, array):
    """MNIST's idx format: two zero bytes, type 8 (uint8), number of dimensions, sizes big-endian, data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def mnist_files(root, name="MNIST", train=30, test=20):
    arrays = {}
    for part, n in (("train", train), ("t10k", test)):
        arrays[part] = pixels(n, 28, 28, seed=n), (np.arange(n)[::-1] % 10).astype(np.uint8)
        idx(root / name / "raw" / f"{part}-images-idx3-ubyte", arrays[part][0])
        idx(root / name / "raw" / f"{part}-labels-idx1-ubyte", arrays[part][1])
    return arrays


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files(tmp_path, name, folder):
    arrays = mnist_files(tmp_path, folder)
    assert catalogue.present(name, tmp_path) == "files"
    source = open_dataset(name, str(tmp_path), download=False)
    assert (source.train.x[:, 0].numpy() == arrays["train"][0]).all()
    assert source.train.x.shape[1:] == (1, 28, 28)
    assert (source.test.y.numpy() == arrays["t10k"][1]).all()
    path = tmp_path / folder / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes()))
    not_opened(name, tmp_path, f"dataset {name}: corrupt or incomplete files")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_pickles(tmp_path, monkeypatch, name):
    kind = {"cifar10": sets.CIFAR10, "cifar100": sets.CIFAR100}[name]
    key = "labels" if name == "cifar10" else "fine_labels"
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    n, data = 6, pixels(6, 3072)
    for file, _ in kind.train_list + kind.test_list:
        (folder / file).write_bytes(pickle.dumps({"data": data, key: [3, 1, 2, 9, 0, 5]}))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: ["a"] * 10}))
    with pytest.raises(UserError, match=f"dataset {name}: corrupt or incomplete files"):  # checksums are not the real
        open_dataset(name, str(tmp_path), download=False)
    monkeypatch.setattr(kind, "train_list", [[file, None] for file, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[file, None] for file, _ in kind.test_list])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    source = open_dataset(name, str(tmp_path), download=False)
    assert source.train.x.shape == (n * len(kind.train_list), 3, 32, 32)
    assert source.classes == int(name[5:])
    assert (source.test.x.numpy() == data.reshape(-1, 3, 32, 32)).all()  # rows are red, green, blue planes
    assert source.test.y.tolist() == [3, 1, 2, 9, 0, 5]


def test_svhn_mat_files(tmp_path, monkeypatch):
    for i, part in enumerate(("train", "test", "extra")):
        x = pixels(32, 32, 3, 12, seed=i)  # [h, w, c, n]
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": np.array([[10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]]).T})
    no_md5 = {part: [*entry[:2], None] for part, entry in sets.SVHN.split_list.items()}
    monkeypatch.setattr(sets.SVHN, "split_list", no_md5)
    svhn = open_dataset("svhn", str(tmp_path), download=False)
    extra = open_dataset("svhn_extra", str(tmp_path), download=False)
    assert svhn.train.x.shape == (12, 3, 32, 32)
    assert extra.train.x.shape == (24, 3, 32, 32)
    assert (extra.train.x[:12] == svhn.train.x).all()
    assert (extra.test.x == svhn.test.x).all()
    assert svhn.test.y[:2].tolist() == [0, 1]
    assert (svhn.test.x[3].permute(1, 2, 0).numpy() == pixels(32, 32, 3, 12, seed=1)[..., 3]).all()
    task = load(pair("svhn_extra", "svhn"), str(tmp_path), False)  # they share their test images
    assert len(task.test.x) == 8
    assert (task.public.x == svhn.test.x[:4]).all()


def test_flowers102(tmp_path, monkeypatch):
    folder = tmp_path / "flowers-102"
    for i in range(1, 9):
        picture(folder / "jpg" / f"image_{i:05d}.jpg", 20 * i, (80, 100))
    savemat(folder / "imagelabels.mat", {"labels": np.array([[5, 1, 2, 3, 102, 4, 7, 6]])})
    savemat(folder / "setid.mat", {"trnid": [[1, 2]], "valid": [[3, 4]], "tstid": [[8, 5, 6, 7]]})
    monkeypatch.setattr(
        sets.Flowers102, "_file_dict", {k: (f, None) for k, (f, _) in sets.Flowers102._file_dict.items()}
    )
    source = open_dataset("flowers102", str(tmp_path), download=False)
    assert source.train.x.shape == (4, 3, 64, 64)
    assert source.train.y.tolist() == [4, 0, 1, 2]
    assert source.test.y.tolist() == [5, 101, 3, 6]
    assert abs(int(source.test.x[0, 0, 9, 9]) - 160) < 3
    assert source.notes == ()
    assert catalogue.present("flowers102", tmp_path) == "prepared"
    again = open_dataset("flowers102", str(tmp_path), download=False)
    assert (again.test.x == source.test.x).all()
    assert (again.train.y == source.train.y).all()
    large = open_dataset("oxford_flowers", str(tmp_path), download=False)  # the same set at another size
    assert large.train.x.shape == (4, 3, 224, 224)
    assert (large.train.y.tolist(), large.test.y.tolist()) == (source.train.y.tolist(), source.test.y.tolist())
    assert grey_values(large.test) == [160, 100, 120, 140]
    assert same_examples("oxford_flowers", "flowers102", str(tmp_path))


# --- ImageNet, MNIST-M, HAM10000, chest x-rays


def tiny_imagenet(root):
    folder = root / "tiny-imagenet-200"
    for i, wnid in enumerate(("n02", "n01")):
        images(folder / "train" / wnid / "images", 3, size=(64, 64), suffix=".JPEG", seed=i)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("x\t0\t0\t1\t1\n")
    images(folder / "val" / "images", 3, size=(64, 64), mode="L", suffix=".JPEG", seed=3)
    rows = [("02.JPEG", "n01"), ("00.JPEG", "n02"), ("01.JPEG", "n01")]
    lines = [f"{file}\t{wnid}\t0\t0\t9\t9\n" for file, wnid in rows]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tiny_imagenet_comes_in_two_parts(tmp_path):
    """Animals have the smaller WordNet ids; labels count the classes of each part from 0."""
    folder = tiny_imagenet(tmp_path)
    images(folder / "train" / "n03" / "images", 2, size=(64, 64), suffix=".JPEG", seed=5)
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write("03.JPEG\tn03\t0\t0\t9\t9\n")
    images(folder / "val" / "images", 4, size=(64, 64), mode="L", suffix=".JPEG", seed=3)

    whole, animals, things = (
        open_dataset(f"tiny_imagenet{part}", str(tmp_path), False) for part in ("", "_animals", "_things")
    )
    assert [len(part.train.x) for part in (whole, animals, things)] == [8, 6, 2]
    assert animals.test.y.tolist() == [0, 1, 0]
    assert things.test.y.tolist() == [0]
    assert torch.equal(things.test.x, whole.test.x[3:])
    assert (animals.classes, things.classes) == (59, 141)


def test_tiny_imagenet_folder_and_zip(tmp_path):
    folder = tiny_imagenet(tmp_path / "a")
    source = open_dataset("tiny_imagenet", str(tmp_path / "a"), download=False)
    assert source.train.x.shape == (6, 3, 32, 32)
    assert source.test.y.tolist() == [0, 1, 0]
    assert "tiny_imagenet: train was sorted by class, shuffled with seed 0" in source.notes
    (tmp_path / "b").mkdir()
    with zipfile.ZipFile(tmp_path / "b" / "tiny-imagenet-200.zip", "w") as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(tmp_path / "a"))
    zipped = open_dataset("tiny_imagenet", str(tmp_path / "b"), download=False)
    assert (zipped.train.x == source.train.x).all()
    assert (zipped.test.x == source.test.x).all()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "tiny-imagenet-200.zip").write_bytes(b"PK nonsense")
    not_opened("tiny_imagenet", tmp_path / "c", r"tiny-imagenet-200.zip cannot be read .*: delete it")
    (tmp_path / "d" / "tiny-imagenet-200").mkdir(parents=True)
    not_opened("tiny_imagenet", tmp_path / "d", r"no images in val/<wnid>")


def test_imagenet_is_public_only(tmp_path):
    for i in range(3):
        images(tmp_path / "imagenet" / "val" / f"n0{i}", 3, size=(50, 40 + i), suffix=".JPEG", seed=i)
    like = Split(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), torch.zeros(1))
    for _ in range(2):  # from the folders, then prepared
        public, notes = public_examples("imagenet", 5, like, Reader(str(tmp_path)), resize)
        assert public.x.shape == (5, 1, 28, 28)
        assert len(public.y.unique()) > 1
        assert "imagenet: test was sorted by class, shuffled with seed 0" in notes
    not_loaded(pair("imagenet", None), tmp_path, r"pair.private=imagenet: no training images", UserError)


def test_mnist_m(tmp_path):
    arrays = mnist_files(tmp_path, train=6, test=40)
    not_opened("mnist_m", tmp_path, r"no photographs: bsds500.npz", Missing)
    images(tmp_path / "BSR/BSDS500/data/images/train", 2, size=(40, 32), suffix=".jpg")
    images(tmp_path / "BSR/BSDS500/data/images/train", 1, size=(48, 33), suffix=".jpg", seed=1)
    first = open_dataset("mnist_m", str(tmp_path), False)
    assert first.train.x.shape == (6, 3, 32, 32)
    assert first.test.y.tolist() == arrays["t10k"][1].tolist()
    assert "mnist_m: generated from MNIST and 2 photographs, seed 0" in first.notes
    shutil.rmtree(tmp_path / "prepared")
    assert (open_dataset("mnist_m", str(tmp_path), False).test.x == first.test.x).all()
    task = load(pair("mnist", "mnist_m"), str(tmp_path), False)  # the same digits: the first m leave the test set
    assert len(task.test.x) == 36
    assert (task.test.x[0, 0].numpy() == arrays["t10k"][0][4]).all()
    not_loaded(pair("mnist", "mnist_m", m=41), tmp_path, r"pair.m=41: mnist_m has only 40 images in its test split")


def test_mnist_m_is_photograph_minus_digit(tmp_path):
    mnist_files(tmp_path, train=2, test=2)
    grey = np.full((1, 32, 32, 3), 100, np.uint8)  # one place for the patch
    np.savez(tmp_path / "bsds500.npz", train_images=grey)
    x = open_dataset("mnist_m", str(tmp_path), False).train.x
    digit = pixels(2, 28, 28, seed=2)[1].astype(int)
    assert (x[1, 2, 2:30, 2:30].numpy() == abs(100 - digit)).all()
    assert (x[:, :, :2] == 100).all()
    np.savez(tmp_path / "bsds500.npz", train_images=grey[:, :20])
    shutil.rmtree(tmp_path / "prepared")
    not_opened("mnist_m", tmp_path, r"bsds500.npz: photographs must be uint8 RGB of at least 32x32")


def test_bsds_patches_are_parts_of_their_photographs(tmp_path):
    not_opened("bsds_patches", tmp_path, r"dataset bsds_patches is not in .*no photographs", Missing)
    photographs = np.stack([np.full((40, 36, 3), 10 * i, np.uint8) for i in range(3)])
    photographs[2, :, :, 1] = np.arange(40)[:, None]
    np.savez(tmp_path / "bsds500.npz", train_images=photographs)

    first, second = (open_dataset("bsds_patches", str(tmp_path), False) for _ in range(2))
    assert first.train.x.shape == first.test.x.shape == (2000, 3, 32, 32)
    assert (first.test.x == second.test.x).all()
    assert set(first.train.y.tolist()) == {0, 1, 2}
    assert (first.train.x[:, 0, 0, 0] == 10 * first.train.y).all()

    rows = first.train.x[first.train.y == 2][:, 1, :, 0].int()  # a patch is connected, and begins at any of 9 rows
    assert (rows.diff(dim=1) == 1).all()
    assert set(rows[:, 0].tolist()) == set(range(9))


DRAWN = {"take": Take.train, "m": 40, "validation": 0.2, "private_share": 0.5}


def drawn(tmp_path, **changes):
    """The first pixels of public, private and held-out images of a published set, each of one image alone."""
    if not (tmp_path / "mnist.npz").exists():
        images = np.arange(200, dtype=np.uint8).reshape(200, 1, 1).repeat(28, 1).repeat(28, 2)
        labels = np.arange(200) % 4
        test = images[:9] + 1 - np.eye(28, dtype=np.uint8)
        arrays = {"train_images": images, "train_labels": labels, "test_images": test, "test_labels": labels[:9]}
        np.savez(tmp_path / "mnist.npz", **arrays)
    pair = Pair(private="mnist", public="mnist", convert=Convert.resize, **DRAWN | changes)
    task = load(pair, str(tmp_path), False)
    return [set(split.x[:, 0, 0, 0].tolist()) for split in (task.public, task.private, task.validation)]


def test_what_is_drawn_follows_from_the_seed_of_the_pair(tmp_path):
    first, same, other = drawn(tmp_path), drawn(tmp_path, seed=0), drawn(tmp_path, seed=1)
    assert first == same
    for a, b, size in zip(first, other, (40, 64, 16), strict=True):
        assert len(a) == len(b) == size
        assert a != b
    for public, private, held in (first, other):
        assert not public & private
        assert not public & held
        assert not private & held


def test_fewer_shots_of_one_seed_are_a_part_of_more(tmp_path):
    one, three = (drawn(tmp_path, m=None, shots=shots, seed=5)[0] for shots in (1, 3))
    assert one < three
    assert drawn(tmp_path, m=None, shots=3, seed=6)[0] != three


def ham10000(root, n):
    """n images of two classes; four show one lesion, each in its own grey."""
    rows = []
    for i in range(n):
        rows.append({"lesion_id": f"HAM_{i // 4}", "image_id": f"ISIC_{i}", "dx": ("nv", "mel")[i % 2], "age": 50})
        picture(root / "HAM10000" / "HAM10000_images_part_1" / f"ISIC_{i}.jpg", 5 * (i // 4), (60, 80))
    write_csv(root / "HAM10000" / "HAM10000_metadata.csv", rows)
    return root / "HAM10000"


def test_ham10000_is_split_by_lesion(tmp_path):
    folder = ham10000(tmp_path, 20)
    source = open_dataset("ham10000", str(tmp_path), False)
    assert source.metric == "auc"
    assert source.classes == 7
    assert source.test.x.shape == (4, 3, 64, 64)
    assert len(source.test.x[:, 0, 0, 0].unique()) == 1
    assert set(source.train.y.tolist()) == {4, 5}
    large = open_dataset("ham10000_224", str(tmp_path), False)
    assert large.test.x.shape == (4, 3, 224, 224)
    for ours, theirs in ((large.train, source.train), (large.test, source.test)):  # the same images in the same places
        assert torch.equal(ours.y, theirs.y)
        assert torch.equal(ours.x[:, 0, 0, 0], theirs.x[:, 0, 0, 0])
    shutil.rmtree(tmp_path / "prepared")
    (folder / "HAM10000_images_part_1" / "ISIC_7.jpg").unlink()
    not_opened("ham10000", tmp_path, r"ISIC_7.jpg")
    (folder / "HAM10000_metadata.csv").write_text("a,b\n1,2")
    not_opened("ham10000", tmp_path, r"no column lesion_id: it needs lesion_id,image_id,dx")


def test_kagchest_keeps_patients_together(tmp_path):
    for kind in ("NORMAL", "PNEUMONIA"):
        (tmp_path / "chest_xray" / "train" / kind).mkdir(parents=True)
    for i in range(16):
        image = Image.fromarray(np.full((70, 90), 10 * (i // 2), np.uint8))
        kind, file = ("NORMAL", f"IM-{i // 2:04d}-{i:04d}") if i < 8 else ("PNEUMONIA", f"person{i // 2}_virus_{i}")
        image.save(tmp_path / "chest_xray" / "train" / kind / f"{file}.jpeg")
    source = open_dataset("kagchest", str(tmp_path), False)
    assert source.test.x.shape == (2, 1, 64, 64)
    assert len(source.train.x) == 14
    assert source.test.x[0, 0, 0, 0] == source.test.x[1, 0, 0, 0]
    groups = open_dataset("kagchest", str(tmp_path), False, "patient").groups[0]
    shows = source.train.x[:, 0, 0, 0]
    assert torch.equal(groups[:, None] == groups, shows[:, None] == shows)


# --- built-in sets


def test_digits():
    source = open_dataset("digits", ".", False)
    assert source.train.x.shape == (1297, 1, 8, 8)
    assert source.test.x.shape == (500, 1, 8, 8)
    assert source.train.x.min() == 0
    assert source.train.x.max() == 255
    assert source.notes == ()
    assert len(source.test.y.unique()) == 10
    assert source.test.y[:5].tolist() == [0, 9, 6, 9, 8]


@pytest.mark.parametrize("name", ["photo_patches", "noise"])
def test_generated_sets_are_the_same_each_time(name):
    first, second = open_dataset(name, ".", False), open_dataset(name, ".", False)
    assert first.test.x.shape == first.train.x.shape == (2000, 3, 32, 32)
    assert (first.test.x == second.test.x).all()
    assert (first.test.y == second.test.y).all()
    assert not (first.train.x == first.test.x).all()
    assert first.notes == ()


@pytest.mark.parametrize("name", ["dead_leaves", "spectrum"])
def test_images_of_a_random_process_are_drawn_once_and_kept(tmp_path, monkeypatch, name):
    monkeypatch.setattr("pubsel.data.processes.TRAIN", 6)
    monkeypatch.setattr("pubsel.data.processes.TEST", 4)
    assert catalogue.present(name, tmp_path) == "built in"
    first = open_dataset(name, str(tmp_path), False)
    assert (first.train.x.shape, first.test.x.shape) == ((6, 3, 32, 32), (4, 3, 32, 32))
    assert not first.train.y.any()
    assert first.classes == 1
    assert catalogue.present(name, tmp_path) == "prepared"

    # an image follows from its number, whatever others there are
    monkeypatch.setattr("pubsel.data.processes.TRAIN", 1)
    alone = processes.drawn(name)
    assert torch.equal(alone.train.x, first.train.x[:1])
    assert torch.equal(alone.test.x, first.train.x[1:5])
    monkeypatch.setattr("pubsel.data.embedded.drawn", lambda _: pytest.fail("they are drawn again"))
    assert torch.equal(open_dataset(name, str(tmp_path), False).test.x, first.test.x)


def test_dead_leaves_of_one_radius_are_leaves_of_that_radius(monkeypatch):
    """The leaf on top is whole. Radii fall as r^-3: of those of 2 to 16 pixels, 16 in 21 are below 4."""
    assert processes.radii_at(np.array([0, 16 / 21, 1])) == pytest.approx([2, 4, 16])
    monkeypatch.setattr(processes, "SIDES", (1000,))
    monkeypatch.setattr(processes, "SMALLEST", 5.0)
    monkeypatch.setattr(processes, "LARGEST", 5.0 + 1e-9)
    images = [processes.dead_leaves(np.random.RandomState(i)) for i in range(20)]
    sizes = [np.unique(image.reshape(-1, 3), axis=0, return_counts=True)[1].max() for image in images]
    assert 70 <= max(sizes) <= 88  # 25 pi is 78.5
    assert all(len(np.unique(image.reshape(-1, 3), axis=0)) > 20 for image in images)


def test_a_spectrum_falls_with_frequency(monkeypatch):
    """Log-log regression over the axis of rows gives the exponent, on average over images."""
    monkeypatch.setattr(processes, "EXPONENTS", (2.0, 2.0))
    monkeypatch.setattr(processes, "CONTRAST", 20.0)  # clips nothing
    images = np.stack([processes.spectrum(np.random.RandomState(i)) for i in range(100)]).astype(float)
    power = np.log(np.abs(np.fft.fft2(images, axes=(1, 2))[:, 1:5, 0])).mean((0, 2))
    assert np.polyfit(np.log(np.arange(1, 5)), power, 1)[0] == pytest.approx(-2, abs=0.1)


# --- rules 2 to 4 and 7: which images are public, conversion, labels, notes


def test_first_m_of_the_test_split(tmp_path):
    npz(tmp_path / "a.npz")
    arrays = npz(tmp_path / "b.npz", test=5, test_labels=np.array([6, 0, 5, 1, 1]))
    task = load(pair(tmp_path / "a.npz", tmp_path / "b.npz", m=3), ".", False)
    assert (task.public.x[:, 0].numpy() == arrays["test_images"][:3]).all()
    assert task.public.y.tolist() == [6, 0, 5]  # its own labels, though the private data has two classes
    assert len(task.test.x) == 10
    assert task.classes == 2
    assert [finding.name for finding in task.findings] == ["few"]
    task = load(pair(tmp_path / "a.npz", tmp_path / "b.npz", m=8), ".", False)  # test split, then training split
    assert (task.public.x[5:, 0].numpy() == arrays["train_images"][:3]).all()
    assert any("5 public images from its test split, 3 from its training split" in note for note in task.notes)
    not_loaded(pair(tmp_path / "a.npz", tmp_path / "b.npz", m=26), ".", r"pair.m=26: .*b.npz has only 25 images in all")


def test_combined_public_sets_are_dealt_out_in_turn(tmp_path):
    npz(tmp_path / "a.npz")
    b = npz(tmp_path / "b.npz", test=4, test_images=pixels(4, 8, 8, seed=3))
    c = npz(tmp_path / "c.npz", test=9, test_images=pixels(9, 8, 8, seed=4))
    names = [str(tmp_path / "b.npz"), str(tmp_path / "c.npz"), "noise"]
    task = load(Pair(private=str(tmp_path / "a.npz"), public=names, m=16, convert=resize), ".", False)
    x = task.public.x
    assert (x[:12:3, 0].numpy() == b["test_images"]).all()  # then its training split follows
    assert (x[12::3, 0].numpy() == b["train_images"][:2]).all()
    assert (x[1::3, 0].numpy() == c["test_images"][:5]).all()
    assert (x[2::3] == to_shape(open_dataset("noise", ".", False).test.x[:5], (1, 8, 8))).all()
    assert any("b.npz: 4 public images from its test split, 2 from its training split" in note for note in task.notes)
    assert any(note.startswith("noise 32x32x3 -> 8x8x1") for note in task.notes)
    assert len(task.test.x) == 10
    first = load(Pair(private=str(tmp_path / "a.npz"), public=names, m=7, convert=resize), ".", False).public
    assert (first.x == x[:7]).all()  # the first of many are the few, in equal shares
    ranked, notes = public_examples(names, 16, task.private, Reader("."), resize, private=str(tmp_path / "a.npz"))
    assert (ranked.x == x).all()
    assert notes == task.notes[:-1]  # the last is about the private data


def test_the_private_share_of_a_combination_leaves_the_test_set(tmp_path):
    arrays = npz(tmp_path / "mnist.npz", shape=(28, 28))
    npz(tmp_path / "b.npz", shape=(28, 28))
    both = [str(tmp_path / "b.npz"), "mnist"]
    task = load(Pair(private="mnist", public=both, m=6, convert=resize), str(tmp_path), False)
    assert (task.public.x[1::2, 0].numpy() == arrays["test_images"][:3]).all()
    assert (task.test.x[:, 0].numpy() == arrays["test_images"][3:]).all()
    assert task.notes == ("the first 3 test images of mnist are public and left the test set",)
    not_loaded(
        Pair(private="mnist", public=both, m=20, convert=resize),
        tmp_path,
        r"pair.m: no test images of mnist would remain",
    )


@pytest.mark.parametrize("named", [True, False])
def test_runs_with_other_public_data_have_one_test_set(tmp_path, named):
    """A published set, the first of whose test images would be public, and a user's own, where hashes decide."""
    path = tmp_path / "mnist.npz"
    npz(path, shape=(28, 28))
    own = "mnist" if named else str(path.rename(tmp_path / "mine.npz"))
    npz(tmp_path / "b.npz", shape=(28, 28))
    other = str(tmp_path / "b.npz")

    def loaded(public):
        settings = Pair(private=own, public=public, m=4, convert=resize, take=Take.same_test)
        return load(settings, str(tmp_path), False)

    first = loaded(own)
    for public in (other, [other, own], None):
        task = loaded(public)
        assert torch.equal(task.test.x, first.test.x)
        assert torch.equal(task.private.x, first.private.x)
        assert any("the first 4 test images of" in note for note in task.notes)
    assert len(first.test.x) == 6
    assert len(load(pair(own, other, m=4), str(tmp_path), False).test.x) == 10
    assert torch.equal(load(pair(own, own, m=4), str(tmp_path), False).test.x, first.test.x)


def test_of_one_test_set_nothing_is_public_that_no_method_takes(tmp_path):
    """Also without public data m counts: it is part of what the run is."""
    npz(tmp_path / "mnist.npz", shape=(28, 28))
    of_all = Pair(private="mnist", public=None, m=None, convert=resize, take=Take.same_test)
    not_loaded(of_all, tmp_path, "pair.take=same_test: give pair.m")
    too_many = Pair(private="mnist", public=None, m=10, convert=resize, take=Take.same_test)
    not_loaded(too_many, tmp_path, "pair.m: no test images of mnist would remain")
    assert without_public(too_many).m == 10
    assert without_public(pair("mnist", "mnist", m=10)).m == 1


@pytest.mark.parametrize(
    ("private", "public", "changes", "kept"),
    [
        ("a.npz", ["b.npz", "c.npz"], {}, True),  # the user's own, with as many classes
        ("a.npz", ["b.npz", "c.npz"], {"classes": 3}, False),
        ("a.npz", ["b.npz", "c.npz"], {"train_labels": np.eye(20), "test_labels": np.eye(20)[:10]}, False),
        ("a.npz", ["b.npz", "noise"], {}, False),
        ("digits", ["digits", "noise"], {}, False),  # ten classes both, but not the same
        ("digits", ["digits", "mnist"], {}, True),  # conf/dataset says so
        ("digits", ["mnist", "photo_patches"], {}, False),
    ],
)
def test_labels_of_a_combination_stay_where_they_are_of_the_private_task(tmp_path, private, public, changes, kept):
    npz(tmp_path / "a.npz")
    npz(tmp_path / "b.npz")
    npz(tmp_path / "c.npz", **changes)
    npz(tmp_path / "mnist.npz", shape=(28, 28), classes=10)
    at = [str(tmp_path / name) if name.endswith("npz") else name for name in (private, *public)]
    task = load(Pair(private=at[0], public=at[1:], m=8, convert=resize), str(tmp_path), False)
    first, second = (open_dataset(name, str(tmp_path), False).test for name in at[1:])
    assert task.public.y.shape == (8,)
    if kept:
        assert (task.public.y[0::2] == first.y[:4]).all()
        assert (task.public.y[1::2] == second.y[:4]).all()
    else:
        assert (task.public.y == NO_CLASS).all()


def test_labels_of_a_combination_are_refused_by_what_needs_them():
    task = load(Pair(private="digits", public=["digits", "noise"], m=8, convert=resize), ".", False)
    view = View(torch.nn.Linear(1, 1), None, task.public, task.classes, False, None)
    with pytest.raises(UsageError, match=r"algorithm=adadps needs public labels of the private task"):
        view.labelled("adadps")
    with pytest.raises(UsageError, match=r"needs public labels of the private task"):
        view._replace(multi_label=True).labelled("adadps")


@pytest.mark.parametrize(
    ("public", "changes", "message"),
    [
        (["b.npz", "noise"], {"m": 18}, r"pair.m=18, 9 from each set: .*b.npz has only 8 images in all: use a smaller"),
        (["noise", "b.npz", "digits"], {"m": 2}, r"pair.m=2: too few for 3 public sets: use a larger pair.m"),
        (["b.npz", "./b.npz"], {}, r"the public sets .*b.npz and .*/\./b.npz share examples: take one of them"),
        (["svhn", "svhn_extra"], {}, r"the public sets svhn and svhn_extra share examples"),
        (["b.npz", "noise"], {"take": Take.train}, r"pair.take=train: the public examples come from one set"),
        (["b.npz", "noise"], {"convert": exact}, r"convert=exact: noise has images 32x32x3, the private data 8x8x1"),
    ],
)
def test_what_is_wrong_with_a_combination_is_one_line(tmp_path, public, changes, message):
    npz(tmp_path / "a.npz")
    npz(tmp_path / "b.npz", train=5, test=3)
    at = [f"{tmp_path}/{name}" if name.endswith("npz") else name for name in public]
    settings = {"private": str(tmp_path / "a.npz"), "public": at, "m": 4, "convert": resize, **changes}
    not_loaded(Pair(**settings), tmp_path, message)


def test_public_and_private_the_same(tmp_path):
    arrays = npz(tmp_path / "mnist.npz", shape=(28, 28))
    root = str(tmp_path)
    for public in ("mnist", tmp_path / "." / ".." / tmp_path.name / "mnist.npz"):
        task = load(pair("mnist", public), root, False)
        assert (task.public.x[:, 0].numpy() == arrays["test_images"][:4]).all()
        assert (task.test.x[:, 0].numpy() == arrays["test_images"][4:]).all()
        assert len(task.private.x) == 20
        assert "first 4 test images" in task.notes[-1]
        assert "left the test set" in task.notes[-1]
    not_loaded(pair("mnist", "mnist", m=10), root, r"pair.m: no test images of .* would remain")
    not_loaded(
        pair("mnist", "mnist", m=11), root, r"pair.m=11: .* has only 10 images in its test split, and it is the private"
    )
    npz(tmp_path / "a.npz")
    like = Split(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1))
    a = str(tmp_path / "a.npz")
    with pytest.raises(UsageError, match=r"distance.m=11"):
        public_examples(a, 11, like, Reader("."), resize, private=a)


def test_sorted_labels_are_shuffled(tmp_path):
    arrays = npz(tmp_path / "a.npz", test=40, test_labels=np.repeat([0, 1], 20))
    source = open_dataset(str(tmp_path / "a.npz"), ".", False)
    assert source.notes == (f"{tmp_path / 'a.npz'}: test was sorted by class, shuffled by content",)
    read = {image.numpy().tobytes() for image in source.test.x[:, 0]}
    assert read == {image.tobytes() for image in arrays["test_images"]}
    assert set(source.test.y[:8].tolist()) == {0, 1}
    assert (source.train.y.numpy() == arrays["train_labels"]).all()
    assert not sorted_by_class(torch.zeros(5))
    assert not sorted_by_class(torch.zeros(0))
    assert not sorted_by_class(torch.tensor([0, 1, 0]))
    assert sorted_by_class(torch.tensor([0, 0, 3]))


def test_private_data_needs_two_classes_and_test_images(tmp_path):
    images(tmp_path / "flat", 10)
    not_loaded(pair(tmp_path / "flat", None), ".", r"pair.private=.*flat: one class only", UserError)
    npz(tmp_path / "a.npz", test=0)
    not_loaded(pair(tmp_path / "a.npz", None), ".", r"no test images", UserError)


def test_colour_to_grey_and_back_by_hand():
    colour = torch.tensor([[[[10]], [[200]], [[70]]]], dtype=torch.uint8)  # .299 * 10 + .587 * 200 + .114 * 70 = 128.37
    assert to_shape(colour, (1, 1, 1)).tolist() == [[[[128]]]]
    grey = torch.tensor([[[[7, 9]]]], dtype=torch.uint8)
    assert to_shape(grey, (3, 1, 2)).tolist() == [[[[7, 9]]] * 3]
    with pytest.raises(UsageError, match=r"cannot turn 4 channels into 3"):
        to_shape(torch.zeros(1, 4, 2, 2, dtype=torch.uint8), (3, 2, 2))


def test_scaling_by_hand():
    # factor 2 with antialias: a triangle of weights 1/8 3/8 3/8 1/8 along each side, cut and renormalised at the edge
    row = torch.tensor([0, 80, 160, 240], dtype=torch.uint8).expand(1, 1, 4, 4)
    left = (3 * 0 + 3 * 80 + 1 * 160) / 7  # 57.1
    assert to_shape(row, (1, 2, 2))[0, 0].tolist() == [[round(left), round(240 - left)]] * 2
    wide = torch.arange(8, dtype=torch.uint8).expand(1, 1, 4, 8)  # covers already: the middle is cut out
    assert to_shape(wide, (1, 4, 4))[0, 0, 0].tolist() == [2, 3, 4, 5]
    constant = torch.full((300, 3, 7, 13), 93, dtype=torch.uint8)  # more than one chunk
    assert (to_shape(constant, (1, 28, 28)) == 93).all()
    assert len(to_shape(constant, (1, 28, 28))) == 300
    assert to_shape(torch.zeros(0, 3, 5, 5, dtype=torch.uint8), (1, 2, 2)).shape == (0, 1, 2, 2)


def test_conversion_keeps_order_and_is_noted(tmp_path):
    arrays = npz(tmp_path / "b.npz", shape=(16, 16, 3))
    task = load(pair("digits", tmp_path / "b.npz", m=6), ".", False)
    x = torch.from_numpy(arrays["test_images"]).permute(0, 3, 1, 2)
    assert task.public.x.shape == (6, 1, 8, 8)
    assert (task.public.x[5:] == to_shape(x[5:6], (1, 8, 8))).all()
    assert task.notes[-1].endswith("b.npz 16x16x3 -> 8x8x1, scaled to cover, bilinear")
    not_loaded(
        pair("digits", tmp_path / "b.npz", convert=exact),
        ".",
        r"convert=exact: .*b.npz has images 16x16x3, the private data 8x8x1",
    )
    npz(tmp_path / "c.npz")
    assert load(pair("digits", tmp_path / "c.npz", convert=exact), ".", False).public.x.shape == (4, 1, 8, 8)


# --- rule 6: data of the user


def test_folder_with_train_and_test(tmp_path):
    for part, n in (("train", 6), ("test", 3)):
        images(tmp_path / part / "cat", n, mode="L")
        images(tmp_path / part / "dog", n, mode="L", suffix=".jpg")
    source = open_dataset(str(tmp_path), ".", False)
    assert source.train.x.shape == (12, 1, 10, 10)
    assert source.test.x.shape == (6, 1, 10, 10)
    assert source.classes == 2
    assert source.mean == (0.5,)
    assert source.train.y.sum() == 6
    assert source.train.y.tolist() != sorted(source.train.y.tolist())
    assert len(source.notes) == 2
    images(tmp_path / "test" / "cow", 1)
    not_opened(str(tmp_path), ".", r"class cow is not in")


def test_folder_of_classes_holds_out_a_fifth(tmp_path):
    images(tmp_path / "cat", 10, mode="L")
    images(tmp_path / "dog", 9, size=(20, 30), mode="L", seed=1)
    images(tmp_path / "dog" / "deep", 1)
    Image.fromarray(np.full((20, 10, 3), 250, np.uint8)).save(tmp_path / "dog" / "colour.png")
    source = open_dataset(str(tmp_path), ".", False)
    held = len(source.test.x)
    assert 1 <= held <= 8
    assert source.train.x.shape == (20 - held, 1, 32, 32)  # as most of them are grey, and no side is longer
    assert source.test.x.shape == (held, 1, 32, 32)
    texts = {finding.name: finding.text for finding in source.findings}
    assert "20 of 20 images of 3 sizes brought to 32x32x1" in texts["sizes"]
    assert "19 images are grey and 1 in colour: read in grey" in texts["colour"]
    assert f"{tmp_path.name}: {held} of 20 images held out as the test set, by content" in source.notes
    again = open_dataset(str(tmp_path), ".", False)
    assert (again.test.x == source.test.x).all()
    assert (again.train.y == source.train.y).all()
    images(tmp_path / "cat", 90, mode="L", seed=2)
    assert open_dataset(str(tmp_path), ".", False).train.x.shape[1:] == (1, 10, 10)
    images(tmp_path, 1)
    not_opened(str(tmp_path), ".", r"00.png lies beside class folders")


def test_one_image_more_moves_no_other_to_the_other_side(tmp_path):
    def marked(i):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / str(i % 2) / f"{i}.png")

    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    for i in range(100):
        marked(i)
    before = open_dataset(str(tmp_path), ".", False)
    marked(200)
    after = open_dataset(str(tmp_path), ".", False)
    sides = [{int(x[0, 0, 0]) for x in source.test.x} for source in (before, after)]
    assert 10 <= len(sides[0]) <= 30
    assert sides[0] == sides[1] - {200}


def test_flat_folder_is_public_data(tmp_path):
    images(tmp_path / "photographs", 10)
    task = load(pair("digits", tmp_path / "photographs", m=9), ".", False)
    assert task.public.x.shape == (9, 1, 8, 8)
    assert (task.public.y == task.classes).all()
    assert any("shuffled by content" in note for note in task.notes)


def test_folder_errors(tmp_path):
    not_opened(str(tmp_path / "nowhere"), ".", r"nowhere: no such file or folder")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    not_opened(str(tmp_path / "empty"), ".", r"empty: no images in it")
    images(tmp_path / "bad", 3)
    (tmp_path / "bad" / "01.png").write_bytes(b"no image")
    not_opened(str(tmp_path / "bad"), ".", r"01.png: not a readable image")
    images(tmp_path / "deep", 1)
    Image.fromarray(np.zeros((4, 4), np.int32)).save(tmp_path / "deep" / "32.tif")
    not_opened(str(tmp_path / "deep"), ".", r"32.tif: more than 16 bits")


def table(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_csv(tmp_path):
    images(tmp_path / "pictures", 6)
    rows = [f"pictures/{i:02d}.png,{'yes' if i % 2 else 'no'},{'test' if i > 3 else 'train'}" for i in range(6)]
    source = open_dataset(table(tmp_path / "a.csv", "path,label,split", *rows), ".", False)
    assert source.train.y.tolist() == [0, 1, 0, 1]
    assert source.test.x.shape == (2, 3, 10, 10)
    assert source.classes == 2
    assert (source.train.x[3].permute(1, 2, 0).numpy() == pixels(6, 10, 10, 3)[3]).all()
    assert "a.csv: labels no, yes numbered from 0 in this order" in source.notes
    rows = [f"pictures/{i:02d}.png,{[2, 10, 3][i % 3]}" for i in range(6)]
    source = open_dataset(table(tmp_path / "b.csv", "path,label", *rows), ".", False)
    assert len(source.train.x) + len(source.test.x) == 6
    assert source.classes == 3
    assert "b.csv: labels 2, 3, 10 numbered from 0 in this order" in source.notes


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,label", ",1"], "line 2 has no path"),
        (["path,label"], "no rows in it"),
        (["path,label,split", "00.png,1,train"], "every row is train"),
        (["path,label", "00.png,1", "09.png,0"], "09.png: no such image"),
        (["image,label", "00,1", "01,0"], "none of the files in column image is there, the first .*/00: write whole"),
        (["id,Image_Name,age", "1,x/00.png,1"], "none of the files in column Image_Name is there"),
    ],
)
def test_csv_errors(tmp_path, lines, message):
    images(tmp_path, 1)
    not_opened(table(tmp_path / "a.csv", *lines), ".", message)


# --- order, splits, files


def test_held_out_takes_whole_groups():
    groups = [f"patient {i // 3}" for i in range(30)]
    test = held_out(groups, 0.25)
    assert 8 <= test.sum() <= 10
    assert not set(np.array(groups)[test]) & set(np.array(groups)[~test])
    assert not held_out(["a"], 0.2).any()
    assert held_out(["a", "b"], 0.2).sum() == 1
    x = torch.arange(10).to(torch.uint8).reshape(10, 1, 1, 1)
    assert sorted(shuffled(Split(x, x[:, 0, 0, 0])).y.tolist()) == list(range(10))


def test_npz_is_read_as_it_was_written(tmp_path):
    npz(tmp_path / "a.npz", shape=(8, 8, 3))
    parts = prepared.read(tmp_path / "a.npz", 10, (3, 8, 8))
    prepared.write(tmp_path / "b.npz", parts.train, parts.test)
    again = prepared.read(tmp_path / "b.npz", 10, (3, 8, 8))
    assert (again.train.x == parts.train.x).all()
    assert (again.test.y == parts.test.y).all()


# --- real data


@pytest.fixture
def real():
    root = os.environ.get("PUBSEL_DATA")
    if not root or not all((Path(root) / f"{name}.npz").exists() for name in ("fashion_mnist", "flowers5", "mnist")):
        pytest.skip("needs PUBSEL_DATA with fashion_mnist.npz, flowers5.npz and mnist.npz")
    return root


@pytest.mark.data
def test_real_fashion_mnist_with_itself_and_with_flowers(real):
    task = load(pair("fashion_mnist", "fashion_mnist", m=2000), real, False)
    assert task.private.x.shape == (60000, 1, 28, 28)
    assert len(task.test.x) == 8000
    assert task.public.y.bincount(minlength=10).min() > 150
    assert abs(task.private.x.float().mean() / 255 - task.mean[0]) < 0.001
    task = load(pair("fashion_mnist", "flowers5", m=2000), real, False)
    assert task.public.x.shape == (2000, 1, 28, 28)
    assert task.public.x.float().std() > 30


@pytest.mark.data
def test_real_mnist(real):
    source = open_dataset("mnist", real, False)
    assert source.train.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert source.notes == ()


def test_whose_classes_public_labels_are(monkeypatch, tmp_path):
    """Known of named sets; a user's own labels are what the user says."""
    random_sets(monkeypatch)
    found = {}
    for private, public in (("cifar100", "cifar10"), ("cifar10", "cifar10_1"), ("mnist", "svhn"), ("cifar10", "./own")):
        task = load(Pair(private, public, 5, convert=Convert.resize), str(tmp_path), False)
        found[public] = (task.same_classes, task.same_task)
    assert found.pop("cifar10") == (False, False)
    assert set(found.values()) == {(True, False)}
