"""Images that are private and public, training and test images, or in two public sets."""

import itertools
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from pubsel.data import Reader, Source, Split, load, memory, open_dataset, opened, overlap, public_examples, stored
from pubsel.data.memory import examples_in
from pubsel.messages import UsageError, UserError
from pubsel.settings.keys import Convert, Overlap, Pair, Read, Take
from tests.made import not_loaded, random_sets
from tests.test_data import pixels


def folder(path, n=30, sizes=((20, 30),), seed=0):
    """n photographs of each of `sizes` (height, width), the first size once more, of two classes."""
    for j, size in enumerate((*sizes, sizes[0])):
        for i, image in enumerate(pixels(n, *size, 3, seed=seed + 100 * j)):
            (path / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path / "ab"[i % 2] / f"{seed}_{j}_{i:02d}.png")
    return path


def npz(path, seed=0, train=40, test=20, size=8, **changes):
    x = pixels(train + test, size, size, seed=seed)
    arrays = {
        "train_images": x[:train],
        "train_labels": np.arange(train)[::-1] % 2,
        "test_images": x[train:],
        "test_labels": np.arange(test)[::-1] % 2,
    }
    np.savez(path, **{**arrays, **changes})
    return arrays


def pair(private, public, m=6, **changes):
    public = [str(one) for one in public] if isinstance(public, list) else public and str(public)
    return Pair(private=str(private), public=public, m=m, convert=Convert.resize, **changes)


refuse = {"overlap": Overlap.refuse}


# Private and public


@pytest.mark.attack
@pytest.mark.parametrize(("sizes", "more"), [(((20, 30), (33, 21), (16, 16)), 90), (((20, 30),), 300)])
def test_a_public_folder_that_holds_every_private_image_is_refused(tmp_path, sizes, more):
    """With 300 of another size, twice, that is the common size: no copy is equal in the private shape."""
    private = folder(tmp_path / "private", sizes=sizes)
    public = tmp_path / "public"
    shutil.copytree(private, public)
    folder(public, n=more, sizes=((16, 16),), seed=7000)
    n = len(list(public.rglob("*.png")))
    refused = not_loaded(pair(private, public, m=n, **refuse), "", "pair.overlap=leave")
    held = 30 * (len(sizes) + 1)
    said = f"pair.public={public}: {held} of {n} public examples are among the private data {private} too, the first "
    assert refused.startswith(said)
    name = refused.removeprefix(said).split(":")[0]
    assert (private / name).read_bytes() == (public / name).read_bytes()


@pytest.mark.attack
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_one_image_is_enough(tmp_path, part, take):
    own = npz(tmp_path / "own.npz")
    x = pixels(60, 8, 8, seed=1)
    x[57] = own[f"{part}_images"][3]
    if take == Take.train:
        x = x[::-1]  # into the training split
    npz(tmp_path / "other.npz", train_images=x[:40], test_images=x[40:])
    asked = pair(tmp_path / "own.npz", tmp_path / "other.npz", m=40 if take == Take.train else 20, take=take, **refuse)
    where = "" if take == Take.train else "number 17: "
    not_loaded(asked, "", rf"1 of \d+ public examples are among the private data .*, the first {where}")
    npz(tmp_path / "other.npz", seed=1)
    assert len(load(asked, "", False).private.x) == 40


def test_what_is_equal_in_the_private_shape_is_the_same_image(tmp_path):
    """Grey as colour, and a larger copy that is brought to the private size."""
    own = npz(tmp_path / "own.npz")
    grey = pixels(20, 8, 8, seed=1)
    grey[4] = own["train_images"][7]
    colour = np.repeat(grey[..., None], 3, 3)
    npz(tmp_path / "other.npz", train_images=np.repeat(pixels(40, 8, 8, seed=2)[..., None], 3, 3), test_images=colour)
    not_loaded(
        pair(tmp_path / "own.npz", tmp_path / "other.npz", **refuse),
        "",
        r"1 of 6 public examples .* the first number 4",
    )
    assert len(load(pair(tmp_path / "own.npz", tmp_path / "other.npz"), "", False).private.x) == 39


def test_with_a_backbone_the_images_are_compared(tmp_path):
    """Features that say nothing of the images: all of another width, and random."""
    own = npz(tmp_path / "own.npz")
    npz(tmp_path / "other.npz", seed=1, test_images=own["train_images"][:20])

    def through(name, source, like):
        splits = [Split(torch.randn(len(split.x), 5), split.y) for split in (source.train, source.test)]
        return source._replace(train=splits[0], test=splits[1])

    asked = pair(tmp_path / "own.npz", tmp_path / "other.npz", **refuse)
    not_loaded(asked, "", r"6 of 6 public examples", through=through)
    task = load(pair(tmp_path / "own.npz", tmp_path / "other.npz", m=30), "", False, through)
    assert task.public.x.shape == (30, 5)
    assert task.private.x.shape == (20, 5)


@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_private_images_that_are_public_too_leave(tmp_path, take):
    own = npz(tmp_path / "own.npz")
    other = npz(tmp_path / "other.npz", seed=1)
    part = "test_images" if take == Take.test else "train_images"
    other[part][[0, 3]], other[part][5] = own["train_images"][:2], own["test_images"][0]
    np.savez(tmp_path / "other.npz", **other)
    task = load(pair(tmp_path / "own.npz", tmp_path / "other.npz", m=len(other[part]), take=take), "", False)
    assert len(task.public.x) == len(other[part])
    assert (task.private.x[:, 0].numpy() == own["train_images"][2:]).all()
    assert (task.test.x[:, 0].numpy() == own["test_images"][1:]).all()
    (finding,) = [finding for finding in task.findings if finding.name == "public_too"]
    assert "2 training and 1 test images that are public too are left out" in finding.text


def table(path, kind, numbers):
    """Rows, or texts, of some numbers: those of one number are equal."""
    examples = {"text": [f"{number} words" for number in numbers]} if kind == "texts" else {"a": numbers, "b": 1.5}
    places = np.arange(len(numbers))
    answers = {"label": places % 2, "split": np.where(places % 5, "train", "test")}
    pd.DataFrame(examples | answers).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["rows", "texts"])
def test_private_rows_that_are_public_too_leave(tmp_path, kind):
    private = table(tmp_path / "private.csv", kind, range(100))
    public = table(tmp_path / "public.csv", kind, range(90, 200))
    for how, kept in (({"m": 110}, 90), ({"m": 88, "take": Take.train}, 92)):
        task = load(pair(private, public, **how), "", False)
        assert len(task.private.y) + len(task.test.y) == kept
        assert f"{kind} that are public too are left out" in " ".join(task.notes)


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.parametrize("often", [False, True])  # among the public ones: then none leaves
def test_a_row_more_that_is_public_or_not_moves_nobody_else(tmp_path, kind, often):
    """The rule decides about a row by itself and by public data, as a guarantee for one row needs."""
    frame = pd.read_csv(table(tmp_path / "private.csv", kind, range(100)))
    public = table(tmp_path / "public.csv", kind, [95 + i % (60 if often else 110) for i in range(110)])

    def trained_on(frame):
        frame.to_csv(tmp_path / "private.csv", index=False)
        task = load(pair(tmp_path / "private.csv", public, m=110), "", False)
        return {tuple(row) for row in task.private.x.nan_to_num().tolist()}

    every = trained_on(frame)
    for gone, leaves in ((3, True), (97, often)):
        left = trained_on(frame.drop(index=gone))
        assert left < every if leaves else left == every
        assert len(every - left) == leaves


@pytest.mark.parametrize("kind", ["rows", "texts"])
def test_rows_that_are_equal_by_chance_stay(tmp_path, kind):
    private = table(tmp_path / "private.csv", kind, [i % 30 for i in range(100)])
    often = table(tmp_path / "often.csv", kind, [i % 40 for i in range(110)])
    not_loaded(pair(private, often, m=110), "", rf"often.csv: 90 of 110 public {kind} equal private ones", UserError)
    task = load(pair(private, often, m=110, read=Read(accept=["public_too"])), "", False)
    assert len(task.private.y) + len(task.test.y) == 100
    seldom = table(tmp_path / "seldom.csv", kind, [25 + i % 80 for i in range(110)])
    task = load(pair(private, seldom, m=110), "", False)
    assert len(task.private.y) + len(task.test.y) == 100
    assert [finding.severity for finding in task.findings if finding.name == "public_too"] == ["warning"]


def of_people(folder, kind, people, first):
    """Examples of people, each unlike all others: the path of a set of them. first: the number of the first example."""
    numbers = first + np.arange(len(people))
    answers = {"label": numbers % 2, "patient": people}
    if kind in ("npz", "arrays"):
        x = numbers[:, None] + np.zeros(3) if kind == "npz" else pixels(len(people), 8, 8, seed=first)
        np.savez(folder / f"{first}.npz", **({"y": answers.pop("label")} if first == 0 else {}), x=x, patient=people)
        return folder / f"{first}.npz"
    examples = {"text": [f"{number} words" for number in numbers]} if kind == "texts" else {"a": numbers, "b": 1.5}
    if kind == "images":
        examples = {"path": [f"{number}.png" for number in numbers]}
        for path, image in zip(examples["path"], pixels(len(people), 8, 8, seed=first), strict=True):
            Image.fromarray(image).save(folder / path)
    pd.DataFrame(examples | answers).to_csv(folder / f"{first}.csv", index=False)
    return folder / f"{first}.csv"


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["rows", "texts", "images", "npz", "arrays"])
@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_people_who_are_public_too_leave_with_all_their_examples(tmp_path, kind, take):
    """Though no example of theirs is public: with a column, or an array, of the same name."""
    private = of_people(tmp_path, kind, np.array([f"P{i // 3}" for i in range(300)]), 0)
    public = of_people(tmp_path, kind, np.array([f"p{90 + i // 4} " for i in range(400)]), 1000)
    how = {"m": 400} if take == Take.test else {"shots": 400, "take": take}
    how["unit"] = "patient"
    task = load(pair(private, public, **how), "", False)
    of_both = 100 - (len(task.private.y) + len(task.test.y)) // 3
    assert of_both == 10 if take == Take.test else 0 < of_both < 10
    (finding,) = [finding for finding in task.findings if finding.name == "public_too"]
    assert f"{3 * of_both} {'images' if kind == 'arrays' else 'rows' if kind == 'npz' else kind} of" in finding.text
    not_loaded(pair(private, public, **how, **refuse), "", "of people with public ones")


@pytest.mark.attack
@pytest.mark.parametrize("way", ["combined", "pool", "memory"])
def test_people_of_each_public_set_leave(tmp_path, way):
    private = of_people(tmp_path, "rows", np.array([f"P{i // 3}" for i in range(300)]), 0)
    sets = [of_people(tmp_path, "rows", np.array([f"P{i}"] * 50), 1000 * i) for i in (7, 8)]
    with memory.holding(*(examples_in(pd.read_csv(path)) for path in (private, *sets))) as (mine, *others):
        requested = {
            "combined": pair(private, sets, m=100, unit="patient"),
            "pool": pair(private, "pool", pool=list(map(str, sets)), unit="patient"),
            "memory": pair(mine, others, m=100, unit="patient"),
        }[way]
        task = load(requested, "", False)
    of_test = 0 if way == "memory" else len(task.test.y)  # in memory, all are trained on
    assert len(task.private.y) + of_test == 294


@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_equal_rows_of_the_private_set_as_its_own_public_data_stay(tmp_path, take):
    private = table(tmp_path / "private.csv", "rows", [i % 4 for i in range(100)])
    task = load(pair(private, private, m=10, take=take), "", False)
    assert len(task.private.y) + len(task.test.y) == 90


# The private set's own parts


def test_training_images_in_the_own_test_set(tmp_path):
    x = pixels(60, 8, 8)
    x[[45, 50]] = x[[1, 2]]
    npz(tmp_path / "own.npz", train_images=x[:40], test_images=x[40:])
    with pytest.raises(
        UsageError, match=r"own.npz: 2 of its 20 test images are training images too, the first number 5"
    ):
        load(pair(tmp_path / "own.npz", None, **refuse), "", False)
    task = load(pair(tmp_path / "own.npz", None), "", False)
    assert (task.test.x[:, 0].numpy() == x[40:]).all()
    assert (task.private.x[:, 0].numpy() == x[[0, *range(3, 40)]]).all()
    assert any("2 training images that are test images too left the private data" in note for note in task.notes)


@pytest.mark.parametrize("take", [Take.test, Take.train])
def test_a_published_set_keeps_its_split_and_says_so(tmp_path, take):
    """photo_patches has ten test images that are training images; mnist here, an image twice in the test set."""
    x = pixels(60, 28, 28)
    x[[3, 45, 50]] = x[1]
    npz(tmp_path / "mnist.npz", size=28, train_images=x[:40], test_images=x[40:])
    m = 6 if take == Take.test else 35
    task = load(pair("mnist", "mnist", m=m, take=take), str(tmp_path), False)
    assert (len(task.public.x), len(task.private.x), len(task.test.x)) == (
        (6, 40, 14) if take == Take.test else (35, 5, 20)
    )
    said = "\n".join(task.notes)
    assert "mnist: 2 of 20 test images are training images too, as it was published" in said
    part = "test" if take == Take.test else "training"
    assert f"mnist: 1 other {part} images are equal to public ones" in said
    left = load(pair("mnist", "mnist", m=m, take=take, overlap=Overlap.leave), str(tmp_path), False)
    assert len(left.public.x) == m
    sides = [set(overlap.digests(split.x)) for split in (left.public, left.private, left.test)]
    assert all(one.isdisjoint(two) for one, two in itertools.combinations(sides, 2))


# Several public sets, and candidates


def test_public_sets_that_share_an_image(tmp_path):
    npz(tmp_path / "own.npz")
    one, two = npz(tmp_path / "one.npz", seed=1), npz(tmp_path / "two.npz", seed=2)
    mixed = two["test_images"].copy()
    mixed[1] = one["test_images"][2]
    npz(tmp_path / "two.npz", seed=2, test_images=mixed)
    names = [tmp_path / "one.npz", tmp_path / "two.npz"]
    not_loaded(
        pair(tmp_path / "own.npz", names, **refuse),
        "",
        r"two.npz: 1 of 3 public examples are among the public set .*one.npz too",
    )
    task = load(pair(tmp_path / "own.npz", names), "", False)
    assert (task.public.x[1::2, 0].numpy() == mixed[:3]).all()
    assert (task.public.x[0::2, 0].numpy() == one["test_images"][:3]).all()
    assert any("1 of 3 public examples are among the public set" in note for note in task.notes)


@pytest.mark.attack
def test_candidates_are_compared_with_the_private_set(tmp_path):
    own = npz(tmp_path / "own.npz")
    npz(tmp_path / "other.npz", seed=1, test_images=own["train_images"][:20])
    source = open_dataset(str(tmp_path / "own.npz"), "", False)
    asked = (str(tmp_path / "other.npz"), 10, source.train, Reader(""), Convert.resize, str(tmp_path / "own.npz"))
    with pytest.raises(UsageError, match=r"^public=.*other.npz: 10 of 10 public examples .* set overlap=leave"):
        public_examples(*asked, apart=source)
    taken, notes = public_examples(*asked, apart=source, how=Overlap.leave)
    assert len(taken.x) == 10
    assert any("10 of 10 public examples are among the private data" in note for note in notes)


@pytest.mark.parametrize(
    ("private", "public", "share"),
    [
        ("stanford_dogs", "imagenet", True),
        ("tiny_imagenet", "stanford_dogs", True),
        ("ham10000_224", "kagskin", True),
        ("kagskin", "dermamnist", True),
        ("imagenet", "cub200", True),
        ("kagskin", "imagenet", False),
        ("stanford_dogs", "cub200", False),
    ],
)
def test_named_sets_that_contain_each_other_say_so(private, public, share, monkeypatch):
    random_sets(monkeypatch)
    for take in Take:
        notes = load(pair(private, public, take=take), "nowhere", False).notes
        said = f"{public} and {private} share images, at other sizes: some public examples may be private ones"
        assert (said in notes) == share


# What it costs


def test_images_are_hashed_once(tmp_path, monkeypatch):
    npz(tmp_path / "mnist.npz", size=28)
    npz(tmp_path / "fashion_mnist.npz", size=28, seed=1)
    hashed = []
    whole = overlap.of_pixels
    monkeypatch.setattr(overlap, "of_pixels", lambda image: hashed.append(1) or whole(image))
    for cell in range(3):  # of a sweep
        load(pair("mnist", "fashion_mnist"), str(tmp_path), False)
        assert len(hashed) == 60 + 6 * (cell + 1)  # the public ones that are used, beside


def test_images_of_a_prepared_set_are_hashed_by_one_process(tmp_path, monkeypatch):
    from pubsel.data.splits import Listing, Unread

    x = torch.from_numpy(pixels(30, 1, 4, 4))
    parts = [Unread(part.__getitem__, torch.arange(len(part)) % 2) for part in x.split(20)]
    stored.keep_images(tmp_path / "set", "set", Listing(*parts), (1, 4, 4), False)
    found = stored.read(tmp_path / "set")
    source = Source(found.train, found.test, 2, "accuracy", (0.5,), (0.5,), (), kept=tmp_path / "set")
    first = [opened._digests(source, part, (1, 4, 4)).own for part in (0, 1)]
    assert (tmp_path / "set" / "train_digests.npz").is_file()
    hashed = []
    whole = overlap.of_pixels
    monkeypatch.setattr(overlap, "of_pixels", lambda image: hashed.append(1) or whole(image))

    def again():
        overlap._KNOWN.clear()  # another process
        return [opened._digests(source, part, (1, 4, 4)).own for part in (0, 1)]

    assert all((one == two).all() for one, two in zip(first, again(), strict=True))
    assert not hashed
    np.save(tmp_path / "set" / "test_images.npy", pixels(10, 1, 4, 4, seed=9))  # other images: hashed again
    (tmp_path / "set" / "train_digests.npz").write_bytes(b"damaged")
    again()
    assert len(hashed) == 30
    monkeypatch.setattr(overlap.np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left")))
    (tmp_path / "set" / "train_digests.npz").unlink()
    again()  # a cache that cannot be written is no reason to stop
    assert not list((tmp_path / "set").glob("*.part"))


def test_kept_images_are_not_read_again_for_the_digests_of_grey_ones(tmp_path, monkeypatch):
    """A run on features that are kept need not read the images."""
    x = torch.from_numpy(pixels(30, 3, 4, 4))
    x[::3] = x[::3, :1]
    np.save(tmp_path / "train_images.npy", x)
    np.save(tmp_path / "test_images.npy", x[:0])
    split = Split(x, torch.arange(30) % 2)
    source = Source(split, Split(x[:0], split.y[:0]), 2, "accuracy", (0.5,) * 3, (0.5,) * 3, (), kept=tmp_path)
    first = opened.Opened("set", source, source).decoded()
    expected = [overlap.of_pixels(image[:1] if i % 3 == 0 else image) for i, image in enumerate(x.numpy())]
    assert first.tolist() == expected

    overlap._KNOWN.clear()  # another process
    monkeypatch.setattr(overlap, "in_parts", None)
    assert opened.Opened("set", source, source).decoded().tolist() == expected


@pytest.mark.data
@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist", "flowers5", "photo_patches"])
def test_published_sets_load_by_default(name):
    import os

    task = load(pair(name, name, m=200), os.environ["PUBSEL_DATA"], False)
    twice = [note for note in task.notes if "as it was published" in note]
    assert bool(twice) == (name in ("flowers5", "photo_patches"))
