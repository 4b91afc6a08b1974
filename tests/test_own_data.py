"""A user's own data: how a model of them is measured, how their images are kept and read."""

import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score

import pubsel
from pubsel import data, files
from pubsel.cli import main
from pubsel.data import Source, decoded, features, given, images, overlap, stored
from pubsel.data.opened import Opened
from pubsel.data.splits import Listing, Unread, Unreadable
from pubsel.messages import UserError
from pubsel.papers import join
from pubsel.settings.datasets import decoded_folder
from pubsel.settings.keys import Backbone, Convert, Metric, Pair, Read
from tests.forked import heard
from tests.made import grey_values, not_loaded, not_opened, picture

RUN = """
model=linear algorithm=non_private pair.public=null distance=none training.epochs=20
training.batch_size=20 threads=1
""".split()
SMALL = decoded.SMALL
METRICS = ("null", "balanced_accuracy", "auc")


def npz(path: Path, **changes: np.ndarray) -> Path:
    """Three classes, of which the last has few examples; each tends to a grey of its decoded."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, counts in (("train", (60, 40, 8)), ("test", (30, 20, 3))):
        y = draw.permutation(np.repeat([0, 1, 2], counts))
        x = (draw.normal(60 + 40 * y, 40)[:, None, None] + draw.normal(0, 20, (len(y), 6, 6))).clip(0, 255)
        arrays |= {f"{part}_images": x.astype(np.uint8), f"{part}_labels": y}
    np.savez(path, **arrays | changes)
    return path


def pair(private: Path, metric: Metric | None = None) -> Pair:
    return Pair(private=str(private), public=None, m=5, convert=Convert.resize, metric=metric)


def test_what_is_read_in_memory_is_what_would_be_kept(tmp_path: Path) -> None:
    """Where the data folder is read-only: also of images of which some are corrupt."""

    def image(i: int) -> torch.Tensor:
        if i in (0, 3):
            raise Unreadable(f"{i}.png", f"{i}.png")
        return torch.full((1, 2, 2), i, dtype=torch.uint8)

    part = Unread(image, torch.arange(6), tuple("abcdef"), ("p", "q", "q", "p", "r", "p"))
    listing = Listing(part, part._replace(y=torch.arange(6).flip(0)), ("a note",), "patient")
    stored.keep_images(tmp_path / "set", "set", listing, (1, 2, 2), True, stored.fingerprint(listing))
    kept, read = stored.read(tmp_path / "set", "patient"), stored.in_memory("set", listing, (1, 2, 2), True)
    assert read.train.x[:, 0, 0, 0].tolist() == read.train.y.tolist() == [1, 2, 4, 5]
    assert read.notes == kept.notes
    for a, b in zip((*read.train, *read.test, *read.groups), (*kept.train, *kept.test, *kept.groups), strict=True):
        assert torch.equal(a, b)

    test = listing.test
    others = [test, test._replace(names=(*"abcde", "g")), test._replace(y=test.y + 1)]
    prints = {stored.fingerprint(listing._replace(test=other)) for other in others}
    assert len(prints) == 3
    np.save(tmp_path / "set" / "test_labels.npy", np.arange(3))
    with pytest.raises(UserError, match="not as many labels as images: delete it"):
        stored.read(tmp_path / "set")


# How a model is measured


def test_a_run_is_measured_as_its_owner_says(tmp_path: Path) -> None:
    npz(tmp_path / "mine.npz")
    plain = pubsel.train("pair.private=mine.npz", *RUN)
    balanced = pubsel.train("pair.private=mine.npz", "pair.metric=balanced_accuracy", "pair.validation=0", *RUN)
    told = balanced.predict("mine.npz")
    test = [i for i, file in enumerate(told.files) if "/test_images/" in file]
    expected = balanced_accuracy_score(np.load("mine.npz")["test_labels"], told.probabilities[test].argmax(1))
    assert plain["metric"] == "accuracy"
    assert balanced["metric"] == "balanced_accuracy"
    assert balanced["utility"] == pytest.approx(expected, rel=1e-12)
    assert balanced["utility"] != plain["utility"]
    assert balanced["utility_interval"][0] <= balanced["utility"] <= balanced["utility_interval"][1]
    assert plain["identity"] != balanced["identity"]
    assert "metric" not in plain["settings"]["pair"]
    assert balanced["settings"]["pair"]["metric"] == "balanced_accuracy"
    assert pubsel.train("pair.private=mine.npz", "pair.metric=auc", *RUN)["metric"] == "auc"


def test_a_table_has_a_row_for_each_metric(tmp_path: Path) -> None:
    npz(tmp_path / "mine.npz")
    records = [pubsel.train("pair.private=mine.npz", f"pair.metric={metric}", *RUN) for metric in METRICS]
    frame = join.others([dict(record) for record in records]).frame
    assert dict(zip(frame["setting"].fillna(""), frame["utility"], strict=True)) == {
        setting: round(100 * record["utility"], 2)
        for setting, record in zip(("", "pair.metric=balanced_accuracy", "pair.metric=auc"), records, strict=True)
    }


@pytest.mark.parametrize("metric", [Metric.accuracy, Metric.balanced_accuracy])
def test_several_labels_an_image_are_measured_by_auc_alone(tmp_path: Path, metric: Metric) -> None:
    told = np.array([(1, 0), (0, 1), (1, 1)])
    several = {part: told[np.arange(n) % 3] for part, n in (("train_labels", 108), ("test_labels", 53))}
    path = npz(tmp_path / "several.npz", **several)
    assert data.load(pair(path), "", False).metric == "auc"
    assert data.load(pair(path, Metric.auc), "", False).metric == "auc"
    not_loaded(pair(path, metric), "", rf"^pair.metric={metric.name}: an example of .* has several labels")


# How images are kept


@pytest.fixture(autouse=True)
def any_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images of any size are kept, and no set is remembered from an earlier test."""
    monkeypatch.setattr(decoded, "SMALL", 1)
    decoded._LAST.clear()
    yield
    decoded._LAST.clear()


def again() -> None:
    """What follows is as in another process."""
    decoded._LAST.clear()
    overlap._KNOWN.clear()
    features._LAST.clear()


def photographs(path: Path, n: int = 12) -> Path:
    """Two classes of photographs, of which some are grey and some of another size."""
    draw = np.random.default_rng(7)
    for name in ("cat", "dog"):
        (path / name).mkdir(parents=True)
        for i in range(n):
            side = 14 if i % 5 == 0 else 10
            image = Image.fromarray(draw.integers(0, 256, (10, side, 3), dtype=np.uint8))
            image.convert("L" if i % 4 == 1 else "RGB").save(path / name / f"secret{i:02d}.png")
    return path


def table(path: Path) -> Path:
    photographs(path)
    rows = [
        f"{name}/secret{i:02d}.png,{name},{'train' if i % 3 else 'test'}" for i in range(12) for name in ("cat", "dog")
    ]
    (path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    return path / "table.csv"


def archive(path: Path) -> Path:
    """Sorted by class, in colour, compressed, with people."""
    draw = np.random.default_rng(3)
    people = {"train_groups": np.arange(40) % 7, "test_groups": 10 + np.arange(11) % 3}
    x = {
        f"{part}_images": draw.integers(0, 256, (n, 9, 8, 3), dtype=np.uint8)
        for part, n in (("train", 40), ("test", 11))
    }
    np.savez_compressed(path, train_labels=np.arange(40) // 14, test_labels=np.arange(11) // 4, **people, **x)
    return path


MAKES = {
    "folder": lambda at: photographs(at / "mine"),
    "table": lambda at: table(at / "mine"),
    "archive": lambda at: archive(at / "mine.npz"),
}


def digests(source: Source) -> list[list[int]]:
    both = Opened("mine", source, source).digests(tuple(source.train.x.shape[1:]))
    return [values.tolist() for part in both for values in part]


def same(a: Source, b: Source, known: list[list[int]] | None = None) -> None:
    """known: the digests of b."""
    for first, second in zip(
        (*a.train, *a.test, *(a.groups or ())), (*b.train, *b.test, *(b.groups or ())), strict=True
    ):
        assert torch.equal(first, second)
    assert (a.classes, a.metric, a.mean, a.notes, a.names) == (b.classes, b.metric, b.mean, b.notes, b.names)
    assert [f.names for f in a.files or ()] == [f.names for f in b.files or ()]
    assert digests(a) == (known or digests(b))


def undecodable(*_: object, **__: object) -> None:
    raise AssertionError("an image was decoded")


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_kept_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, threads: int) -> None:
    path, root, unit = str(MAKES[kind](tmp_path)), str(tmp_path / "root"), "groups" if kind == "archive" else None
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "SMALL", 2**40)
        expected = data.open_dataset(path, root, False, unit)
        assert expected.kept is None
        assert (expected.groups is None) == (unit is None)
        assert not Path(root).exists()
        known = digests(expected)

    again()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    same(data.open_dataset(path, root, False, unit), expected)

    again()
    monkeypatch.setattr(images, "_image", undecodable)
    monkeypatch.setattr(overlap, "of_pixels", undecodable)
    kept = data.open_dataset(path, root, False, unit)
    same(kept, expected, known)
    assert kept.kept is not None
    assert kept.kept.parent == tmp_path / "root" / "decoded"
    assert not list(Path(root).rglob("*.part"))


def zeroed(path: Path) -> None:
    """Zeros where the last of a page was, at the same size and time."""
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-20] + bytes(20))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rolled(path: Path) -> None:
    np.save(path, np.roll(np.load(path), 1, axis=0))


DAMAGE = {
    "zeroed": ("train_images.npy", zeroed),
    "test images": ("test_images.npy", rolled),
    "rolled": ("train_labels.npy", rolled),
    "test labels": ("test_labels.npy", lambda path: np.save(path, np.load(path) ^ 1)),
    "decoded": ("train_decoded.npy", rolled),
    "cut": ("test_images.npy", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "gone": ("train_labels.npy", Path.unlink),
    "notes": ("notes.json", lambda path: path.write_text('["others"]')),
    "digests": ("written.json", lambda path: path.write_text("{}")),
    "broken": ("written.json", lambda path: path.write_text("[")),
    "earlier": ("written.json", Path.unlink),
}


@pytest.mark.attack
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_what_is_kept_is_noticed_and_it_is_decoded_anew(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, root = str(photographs(tmp_path / "mine")), str(tmp_path / "root")
    before = data.open_dataset(path, root, False)
    known = digests(before)
    assert before.kept is not None
    name, change = DAMAGE[damage]
    change(before.kept / name)
    again()
    files._KNOWN.clear()
    capsys.readouterr()
    same(data.open_dataset(path, root, False), data.open_dataset(path, root, False, keep=False), known)
    err = capsys.readouterr().err
    assert f"{before.kept / name} is not" in err or damage == "broken"
    assert "reading all images again" in err
    again()
    data.open_dataset(path, root, False)
    assert capsys.readouterr().err == ""


@pytest.mark.attack
def test_files_of_two_sets_do_not_take_each_others_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of equal shape, and whole folders too."""
    paths, root = [str(archive(tmp_path / f"{name}.npz")) for name in ("one", "two")], str(tmp_path / "root")
    np.savez(paths[1], **{key: value[::-1] for key, value in np.load(paths[1]).items()})
    kept = [data.open_dataset(path, root, False).kept for path in paths]
    assert kept[0] is not None
    assert kept[1] is not None
    for name in ("train_images.npy", "train_labels.npy"):
        (kept[0] / name).write_bytes((kept[1] / name).read_bytes())
    again()
    first = data.open_dataset(paths[0], root, False)
    assert f"{kept[0] / 'train_images.npy'} is not what was written" in capsys.readouterr().err
    same(first, data.open_dataset(paths[0], root, False, keep=False))
    shutil.rmtree(kept[0])
    shutil.copytree(kept[1], kept[0])
    assert "is not what was written" in stored.damaged(kept[0])


@pytest.mark.attack
def test_digests_that_are_others_are_computed_again(tmp_path: Path) -> None:
    source = data.open_dataset(str(photographs(tmp_path / "mine")), str(tmp_path / "root"), False)
    expected, kept = digests(source), source.kept
    assert kept is not None
    with np.load(kept / "train_digests.npz") as file:
        values = dict(file)
    np.savez(kept / "train_digests.npz", **values | {"digests": np.roll(values["digests"], 1)})
    again()
    assert digests(data.open_dataset(str(tmp_path / "mine"), str(tmp_path / "root"), False)) == expected


@pytest.mark.parametrize("kind", MAKES)
def test_nothing_stays_if_it_is_not_to_be_kept(tmp_path: Path, kind: str) -> None:
    path, root = str(MAKES[kind](tmp_path)), tmp_path / "root"
    unkept = data.open_dataset(path, str(root), False, keep=False)
    assert not [file for file in root.rglob("*") if file.is_file()]
    assert unkept.kept is None
    assert unkept.train.x in files._maps()  # and it is not in memory
    again()
    same(unkept, data.open_dataset(path, str(root), False))


def test_only_the_owner_may_read_what_is_kept_and_no_name_tells_of_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        data.open_dataset(str(photographs(tmp_path / "mine")), str(tmp_path / "root"), False)
    finally:
        os.umask(before)
    kept = [tmp_path / "root" / "decoded", *(tmp_path / "root" / "decoded").rglob("*")]
    assert len(kept) > 8
    assert {oct(path.stat().st_mode & 0o777) for path in kept} == {"0o700", "0o600"}
    names = " ".join(str(path.relative_to(tmp_path)) for path in kept)
    assert not any(word in names for word in ("mine", "cat", "secret", "tmp"))


def change(path: Path, how: str) -> None:
    file = path / "cat" / "secret03.png"
    if how == "another":
        shutil.copy(file, path / "cat" / "secret99.png")
    elif how == "absent":
        file.unlink()
    elif how == "renamed":
        file.rename(path / "cat" / "secret98.png")
    else:
        stat = file.stat()
        Image.fromarray(np.zeros((10, 10, 3), dtype=np.uint8)).save(file)
        with file.open("ab") as content:
            content.truncate(stat.st_size)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))  # of the same size, a microsecond later


@pytest.mark.parametrize("how", ["another", "absent", "renamed", "edited"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    path, root = photographs(tmp_path / "mine"), str(tmp_path / "root")
    first = data.open_dataset(str(path), root, False)
    change(path, how)
    for process in ("this", "another"):
        capsys.readouterr()
        if process == "another":
            again()
        now = data.open_dataset(str(path), root, False)
        assert ("reading all images again" in capsys.readouterr().err) == (process == "this")
    again()
    same(now, data.open_dataset(str(path), str(tmp_path / "other"), False))
    assert digests(now) != digests(first) or how == "renamed"
    assert len(list((tmp_path / "root" / "decoded").glob("*/"))) == 1  # nothing is left of the earlier ones


def test_labels_and_splits_that_change_are_noticed(tmp_path: Path) -> None:
    path, root = table(tmp_path / "mine"), str(tmp_path / "root")
    first = data.open_dataset(str(path), root, False)
    path.write_text(path.read_text().replace("secret01.png,cat,train", "secret01.png,dog,train"))
    second = data.open_dataset(str(path), root, False)
    assert int(second.train.y.sum()) == int(first.train.y.sum()) + 1
    path.write_text(path.read_text().replace("secret02.png,cat,train", "secret02.png,cat,test"))
    assert len(data.open_dataset(str(path), root, False).test.x) == len(first.test.x) + 1


@pytest.mark.parametrize("keep", [True, False])
def test_another_column_or_other_rows_of_one_table_are_read_anew(tmp_path: Path, keep: bool) -> None:
    """Though the file, the labels and the sides are the same."""
    pytest.importorskip("pyarrow")
    columns: dict[str, list[Any]] = {"A": ["", *"01" * 6], "B": ["0", "", *"10" * 5, "1"], "mask": [], "image": []}
    for i in range(13):
        for name, grey in (("mask", 10 * i), ("image", 10 * i + 130)):
            picture(tmp_path / "one.png", grey, (8, 8), "L")
            columns[name].append((tmp_path / "one.png").read_bytes())
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    for path, label, greys in (("mask", "A", {10, 120}), ("image", "A", {140, 250}), ("image", "B", {130, 150})):
        read = Read(path=path, label=label)
        source = data.open_dataset(str(tmp_path / "a.parquet"), str(tmp_path / "root"), False, keep=keep, read=read)
        assert greys <= {*grey_values(source.train), *grey_values(source.test)}


def test_a_damaged_image_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    path, root = photographs(tmp_path / "mine"), tmp_path / "root"
    file = path / "dog" / "secret06.png"
    file.write_bytes(file.read_bytes()[:150])
    for keep in (True, False):
        not_opened(str(path), root, r"mine/dog/secret06.png: not a readable image: remove it", keep=keep)
        assert not [file for file in root.rglob("*") if file.is_file() and file.suffix != ".lock"]


@pytest.mark.parametrize("keep", [True, False])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    path, root = photographs(tmp_path / "mine"), tmp_path / "root"
    written, whole = list[object](), os.pwrite

    def full(*given: Any) -> int:
        written.append(given)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        return whole(*given)

    monkeypatch.setattr(os, "pwrite", full)
    not_opened(
        str(path), root, r"cannot write the images of .*mine to .*decoded: No space left .*: make room", keep=keep
    )
    assert not [file for file in root.rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_a_data_folder_that_cannot_be_written_to_is_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, root = photographs(tmp_path / "mine"), tmp_path / "root"
    root.write_text("no folder")
    read = data.open_dataset(str(path), str(root), False)
    assert "so all images are read into memory" in capsys.readouterr().err
    again()
    same(read, data.open_dataset(str(path), str(tmp_path / "other"), False))


def test_few_images_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "SMALL", SMALL)
    assert data.open_dataset(str(photographs(tmp_path / "mine")), str(tmp_path / "root"), False).kept is None
    assert not (tmp_path / "root").exists()
    monkeypatch.setattr(decoded, "MANY", 10)  # small ones that take long to open are
    decoded._LAST.clear()
    assert data.open_dataset(str(tmp_path / "mine"), str(tmp_path / "root"), False).kept is not None


def opens(path: Path, root: Path, queue: "multiprocessing.Queue[str]") -> None:
    """One process: it says which images it decodes, and takes its time."""
    whole = images.pixels_of

    def slow(image: Any, bits: int | None = None) -> tuple[np.ndarray, tuple[int, int] | None]:
        queue.put(Path(image.fp.name).name)
        time.sleep(0.02)
        return whole(image, bits)

    images.pixels_of = slow
    queue.put(str(int(data.open_dataset(str(path), str(root), False).train.x.sum())))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("odd", [0, 7])
def test_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, odd: int) -> None:
    for i in range(30):
        side = 12 if i == odd else 8
        picture(tmp_path / "mine" / f"c{i % 2}" / f"{i:02}.png", i, (side, side))
    opened, whole = Counter[str](), images._image

    def counted(path: Path, bits: int | None = None) -> Any:
        opened[path.name] += 1
        return whole(path, bits)

    monkeypatch.setattr(images, "_image", counted)
    monkeypatch.setattr(images, "EXPECTED", 3)  # the first of each ten, in the order of the classes
    monkeypatch.setattr(decoded, "SMALL", 0 if kept else 2**26)
    source = data.open_dataset(str(tmp_path / "mine"), str(tmp_path / "root"), False)
    assert tuple(source.train.x.shape[1:]) == (3, 8, 8)
    assert len(source.train.x) + len(source.test.x) == 30

    # those whose heads are read first are opened twice; all are once more if these were of another shape than most
    again = 30 if odd == 0 else 0
    assert opened.total() == 30 + 3 + again
    assert {name for name, count in opened.items() if count > 1 + again // 30} == {"00.png", "20.png", "11.png"}


def test_two_processes_decode_once_and_a_killed_one_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    path, root = photographs(tmp_path / "mine"), tmp_path / "root"
    heard(opens, path, root, words=1, killed=True)
    assert sorted(file.suffix for file in (root / "decoded").iterdir()) == [".lock", ".part"]

    words = heard(opens, path, root, words=24 + 2, processes=2)
    sums = [word for word in words if word.isdecimal()]
    assert len(sums) == 2
    assert len(set(sums)) == 1
    assert len(set(words)) == 12 + 1
    assert [file.suffix for file in sorted((root / "decoded").iterdir())] == ["", ".lock"]


# What is made of them


BACKBONE = Backbone(architecture="scattering", scattering=None)


@pytest.fixture
def pixels_as_features(monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = features.Extractor(lambda x: x.flatten(1).float(), None, torch.device("cpu"), "key", "weights")
    monkeypatch.setattr(features, "load_backbone", lambda *_: extractor)


def with_features(path: Path | str, root: str, keep: bool = True) -> Source:
    source = data.open_dataset(str(path), root, False, keep=keep)
    return features.of_source(str(path), source, BACKBONE, root, torch.device("cpu"), lambda line: None)


@pytest.mark.usefixtures("pixels_as_features")
def test_features_are_read_without_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, root = photographs(tmp_path / "mine"), str(tmp_path / "root")
    first, names = with_features(path, root), sorted((tmp_path / "root" / "features").glob("*.npy"))
    assert len(names) == 2
    again()
    with monkeypatch.context() as patch:
        patch.setattr(features, "in_parts", undecodable)
        assert torch.equal(with_features(path, root).train.x, first.train.x)

    # images that are not kept have the same features, in the same files
    again()
    with_features(path, root, keep=False)
    assert sorted((tmp_path / "root" / "features").glob("*.npy")) == names

    # what is damaged is computed again
    again()
    (kept,) = (tmp_path / "root" / "decoded").glob("*/train_features.json")
    for damage in ("no json", '{"stamp": [], "digests": {"key": "0"}}', "[]"):
        kept.write_text(damage)
        again()
        assert torch.equal(with_features(path, root).train.x, first.train.x)
        assert json.loads(kept.read_text())["digests"]["key"] in names[0].name + names[1].name


@pytest.mark.usefixtures("pixels_as_features")
def test_forget_deletes_images_and_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs(tmp_path / "mine")
    photographs(tmp_path / "theirs", n=9)
    for name in ("./mine", "./theirs"):
        with_features(name, "root")
    rest = set(Path("root").rglob("*.npy"))

    assert main(["data", "forget", "./mine", "data_root=root"]) == 0
    assert "deleted what was kept of ./mine in root/decoded" in capsys.readouterr().out
    left = set(Path("root").rglob("*.npy"))
    assert len(left) == len(rest) / 2
    assert len(list(Path("root/features").glob("*.npy"))) == 2
    assert len(list(Path("mine").rglob("*.png"))) == 24  # of the user's files none

    shutil.rmtree("theirs")  # a path that is no longer there is forgotten all the same, however it is written
    assert main(["data", "forget", str(tmp_path / "theirs") + "/", "data_root=root"]) == 0
    assert not list(Path("root").rglob("*.npy"))
    assert main(["data", "forget", "./mine", "data_root=root"]) == 0
    assert "no image is kept of ./mine in root/decoded" in capsys.readouterr().out
    assert main(["data", "forget", "cifar10", "data_root=root"]) == 2
    assert "name=cifar10: is no path" in capsys.readouterr().err


@pytest.mark.usefixtures("pixels_as_features")
def test_features_of_files_that_changed_are_deleted(tmp_path: Path) -> None:
    """A person who is taken out of the data must not stay in what is made of them."""
    path, root = photographs(tmp_path / "mine"), str(tmp_path / "root")
    for _ in range(2):
        with_features(path, root)
        (path / "cat" / "secret02.png").unlink(missing_ok=True)
    assert len(list((tmp_path / "root" / "features").glob("*.npy"))) == 2


def resident(what: str) -> int:
    """Return how many bytes of memory this process has of RssFile or RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def test_a_pass_over_all_images_holds_few_of_them_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "AT_ONCE", 2**21)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (2**8, 2**18), dtype=np.uint8))  # 64 MiB
    x = files.mapped(files.npy_map(tmp_path / "x.npy"))
    before, most, total = resident("RssFile"), 0, 0
    for part in files.in_parts(x, 2):
        total += int(part.sum())
        most = max(most, resident("RssFile"))
    assert most - before < 2**24
    assert total == int(np.load(tmp_path / "x.npy").sum(dtype=np.int64))
    in_memory = torch.arange(1000, dtype=torch.uint8)
    assert torch.equal(torch.cat([part.clone() for part in files.in_parts(in_memory, 7)]), in_memory)
    assert torch.equal(in_memory, torch.arange(1000, dtype=torch.uint8))


def test_images_may_take_more_than_the_machine_has_memory(tmp_path: Path) -> None:
    """A private map of them would otherwise be refused: all of it might be written to."""
    path, rows = tmp_path / "x.npy", 2**20
    columns = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // rows
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (rows, columns)})
        file.truncate(file.tell() + rows * columns)  # nothing is written, so it takes no room
    x = files.mapped(files.npy_map(path))
    assert x.shape == (rows, columns)
    x[-1] += 1
    assert int(x[-1].sum()) == columns
    files.give_back(x)
    assert int(x[-1].sum()) == int(x[0].sum()) == 0


def test_an_array_that_is_cut_short_or_empty_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(5000))
    os.truncate(tmp_path / "x.npy", 30_000)
    with pytest.raises(ValueError, match=r"length|size"):
        files.npy_map(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.zeros((0, 3), np.uint8))
    assert files.npy_map(tmp_path / "x.npy").shape == (0, 3)


@pytest.mark.parametrize("command", ["run", "rank", "data check"])
def test_every_command_keeps_images_unless_told_otherwise(tmp_path: Path, command: str) -> None:
    archive(tmp_path / "mine.npz")
    photographs(tmp_path / "theirs")
    words = {
        "run": ["run", "pair.private=mine.npz", *RUN],
        "rank": ["rank", "private=mine.npz", "public=[./theirs]", "distance.m=10", "model=probe", "distance.k=2"],
        "data check": ["data", "check", "mine.npz"],
    }
    for keep, count in (("false", 0), ("true", 2 if command == "rank" else 1)):
        again()
        assert main([*words[command], "data_root=root", f"keep={keep}"]) == 0
        assert len(list(Path("root/decoded").glob("*/train_images.npy"))) == count
        shutil.rmtree("results", ignore_errors=True)


def test_people_are_told_apart_in_what_is_kept(tmp_path: Path) -> None:
    """By a column, by another one with the same split, and not at all."""
    path, root = table(tmp_path / "mine"), str(tmp_path / "root")
    head, *rows = path.read_text().splitlines()
    more = [f"{row},p{i // 3},q{i // 2}" for i, row in enumerate(rows)]
    path.write_text("\n".join([f"{head},patient,lesion", *more]))
    expected = {}
    for unit in ("patient", "lesion"):
        again()
        expected[unit] = data.open_dataset(str(path), str(tmp_path / unit), False, unit, keep=False).groups
    again()
    for unit in ("patient", "lesion", "patient"):
        groups = data.open_dataset(str(path), root, False, unit).groups
        for part, other in zip(groups or (), expected[unit] or (), strict=True):
            assert torch.equal(part, other)
    assert data.open_dataset(str(path), root, False).groups is None
    names = data.open_dataset(str(path), root, False, "patient").files
    assert names is not None
    number = {row.split(",")[0]: i // 3 for i, row in enumerate(rows)}
    both = expected["patient"] or ()
    people = {
        (int(group), number[name])
        for part, files in zip(both, names, strict=True)
        for group, name in zip(part, files.names, strict=True)
    }
    assert len(people) == len({person for _, person in people}) == len({group for group, _ in people})


# 16 bits


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_the_range_of_16_bits_becomes_that_of_8(tmp_path: Path, suffix: str, order: str) -> None:
    """By hand: 65535 / 255 = 257."""
    values = np.array([[0, 128, 129, 257], [385, 386, 32768, 65535]])
    expected = torch.tensor([[0, 0, 1, 1], [1, 2, 128, 255]], dtype=torch.uint8)
    for name in "ab":
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(values.astype(np.uint16).astype(order)).save(tmp_path / "mine" / name / f"{i}.{suffix}")
    source = data.open_dataset("./mine", "root", False)
    assert source.train.x.shape[1:] == (1, 2, 4)
    assert all(torch.equal(image[0], expected) for image in source.train.x)

    file = tmp_path / "mine" / "a" / f"0.{suffix}"
    assert torch.equal(given.as_input(file, (1, 2, 4))[0], expected)  # as `pubsel predict` reads it
    with Image.open(file) as image:
        assert torch.equal(given.as_input(image, (1, 2, 4))[0], expected)
    assert torch.equal(given.as_input(file, (3, 2, 4)), expected.expand(3, 2, 4))


def test_an_image_of_16_bits_is_the_same_one_at_another_size(tmp_path: Path) -> None:
    """Its digest is that of what it becomes, at its own size."""
    values = np.random.default_rng(0).integers(0, 2**16, (10, 6, 6)).astype(np.uint16)
    for name, part in (("mine", values), ("theirs", values[:1])):
        for i, image in enumerate(part):
            (tmp_path / name / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            eight = Image.fromarray(np.round(image / 257).astype(np.uint8))
            (Image.fromarray(image) if name == "mine" else eight).save(tmp_path / name / "ab"[i % 2] / f"{i}.png")
    for i in range(3):
        Image.fromarray(np.full((9, 9), i, np.uint8)).save(tmp_path / "theirs" / "a" / f"other{i}.png")  # another size
    mine, theirs = (data.open_dataset(f"./{name}", "root", False) for name in ("mine", "theirs"))
    every = [set(torch.cat([f.digests for f in source.files or ()]).tolist()) for source in (mine, theirs)]
    assert len(every[0] & every[1]) == 1


def test_what_a_killed_process_left_is_forgotten_too(capsys):
    folder = decoded_folder(Path("mine"), Path("data"))
    left = folder.with_name(f".{folder.name}.0.part")
    left.mkdir(parents=True)
    (left / "train_images.npy").write_bytes(b"pixels")
    assert main(["data", "forget", "./mine", "data_root=data"]) == 0, capsys.readouterr().err
    assert not left.exists()
