"""The private unit is a person: nobody on two sides, one row a person, and what the record says of it."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from pubsel import algorithms
from pubsel.algorithms import View
from pubsel.algorithms.dp_sgd import DPSGD
from pubsel.algorithms.pillar import noisy_covariance
from pubsel.cli import main
from pubsel.data import Reader, Split, Task, load, open_dataset, opening
from pubsel.data.examples import unit_of
from pubsel.gradients.book_keeping import BookKeeping
from pubsel.gradients.factored import LinearGradients, OffsetLinear
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.people import PeopleGradients, members
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import schedule
from pubsel.settings.keys import Convert, Overlap, Pair, Read, Take
from pubsel.settings.methods import option
from pubsel.training import loop
from pubsel.training.loop import Job, clipped_sum, fit, noisy_sum
from pubsel.training.once import units_of
from tests.made import Scaled, not_loaded, not_opened, only_record, picture, training
from tests.synthetic import secret_named
from tests.test_data import ham10000
from tests.test_report import Page

SIZES = [1, 3, 1, 2, 7, 1, 500, 4]  # examples of each person


def pair(private, **changes):
    given = {"public": None, "m": 1, "convert": Convert.resize, "unit": "patient"}
    return Pair(private=str(private), **(given | changes))


def people_of(count, seed=0):
    """People with 1 to 5 examples each, in a random order: their names [n]."""
    random = np.random.RandomState(seed)
    names = np.repeat([f"p{i:03d}" for i in range(count)], random.randint(1, 6, size=count))
    return names[random.permutation(len(names))]


def npz(path, train=60, test=30, shared=0, unit="patient", side=8):
    """A prepared npz of 3 classes, whose `shared` first people are on both sides. Returns the names of people."""
    random = np.random.RandomState(1)
    parts = {"train": people_of(train), "test": np.char.add("t", people_of(test, 2))}
    parts["test"][: 2 * shared] = parts["train"][: 2 * shared]
    arrays = {}
    for part, people in parts.items():
        y = random.randint(3, size=len(people))
        y[:3] = 0, 1, 2
        x = random.randint(256, size=(len(people), side, side))
        x[:, : side // 2] = x[:, : side // 2] // 2 + 40 * y[:, None, None]
        arrays |= {f"{part}_images": x.astype(np.uint8), f"{part}_labels": y, f"{part}_{unit}": people}
    np.savez(path, **arrays)
    return parts


# --- Data


def table(folder, rows, columns="path,label,patient"):
    """A CSV and its images: image i has the value i."""
    for i, row in enumerate(rows):
        picture(folder / row.partition(",")[0], i, (4, 4), "L")
    (folder / "table.csv").write_text("\n".join([columns, *rows]))
    return folder / "table.csv"


def test_a_column_names_the_people_of_a_csv_and_whole_people_are_held_out(tmp_path):
    rows = [f"{i}.png,{i % 2},patient {i // 4}" for i in range(80)]
    path = table(tmp_path, rows)
    source = open_dataset(str(path), "", False, "patient")
    sides = [set((part.x[:, 0, 0, 0] // 4).tolist()) for part in (source.train, source.test)]
    assert not sides[0] & sides[1]
    assert 0 < len(sides[1]) < len(sides[0])
    assert any("held out as the test set, by person" in note for note in source.notes)

    # numbers follow the examples, whatever their order
    for part, groups in zip((source.train, source.test), source.groups, strict=True):
        by_value = {int(value) // 4: int(group) for value, group in zip(part.x[:, 0, 0, 0], groups, strict=True)}
        assert len(set(by_value.values())) == len(by_value)
        assert [by_value[int(value) // 4] for value in part.x[:, 0, 0, 0]] == groups.tolist()
    assert open_dataset(str(path), "", False).groups is None
    for unit, why in (("name", "no column name"), ("label", "name the column")):
        not_opened(str(path), "", why, UserError, unit)


def test_folders_within_class_folders_are_people(tmp_path):
    """A folder of one name in two classes is one person."""
    for i in range(60):
        picture(tmp_path / ("cat", "dog")[i % 2] / f"person {i // 5}/{i}.png", i, (4, 4), "L")
    source = open_dataset(str(tmp_path), "", False, "folder")
    assert source.names == ("cat", "dog")
    assert len(source.train.x) + len(source.test.x) == 60
    sides = [set((part.x[:, 0, 0, 0] // 5).tolist()) for part in (source.train, source.test)]
    assert not sides[0] & sides[1]
    assert len(sides[0]) + len(sides[1]) == 12
    for part, groups in zip((source.train, source.test), source.groups, strict=True):
        shows = part.x[:, 0, 0, 0] // 5
        assert torch.equal(groups[:, None] == groups, shows[:, None] == shows)
    assert torch.equal(source.train.y, source.train.x[:, 0, 0, 0].long() % 2)

    not_opened(str(tmp_path), "", r"set unit=folder", UsageError, "patient")
    not_opened(str(tmp_path), "", r"lie deeper.*set unit=folder", UserError)
    shutil.copy(tmp_path / "cat" / "person 0" / "0.png", tmp_path / "cat" / "loose.png")
    not_opened(str(tmp_path), "", r"loose.png is next to the folders of people", UserError, "folder")
    for name in ("cat", "dog"):
        picture(tmp_path / "without people" / name / "0.png")
    not_opened(str(tmp_path / "without people"), "", r"needs <class>/<person>", UserError, "folder")


def test_arrays_of_an_npz_name_the_people(tmp_path):
    path = tmp_path / "a.npz"
    names = npz(path, unit="groups")
    for unit, arrays in (("groups", names), ("lesion", None)):
        if arrays is None:  # the other order of words
            with np.load(path) as file:
                values = {key: file[key] for key in file.files}
            for part in ("train", "test"):
                values[f"lesion_{part}"] = values.pop(f"{part}_groups")
            np.savez(path, **values)
        groups = open_dataset(str(path), "", False, unit).groups
        for part, numbers in zip(("train", "test"), groups, strict=True):
            assert torch.equal(numbers[:, None] == numbers, torch.from_numpy(names[part][:, None] == names[part]))

    values["lesion_train"] = values["lesion_train"][:-1]
    np.savez(path, **values)
    for wrong in (values["lesion_train"], np.linspace(0, 1, len(names["train"]))):
        np.savez(path, **(values | {"lesion_train": wrong}))
        not_opened(str(path), "", "lesion_train does not name the person of each example", UserError, "lesion")
    not_opened(str(path), "", "no array train_patient, test_patient", UserError, "patient")
    not_opened("digits", "", "digits does not tell whose images", UsageError, "patient")


def test_images_that_somebody_has_several_of_are_not_protected_alone(tmp_path):
    for i in range(60):
        picture(tmp_path / f"{i}.png", i, (4, 4), "L")
    names = [f"P{i // 2}" for i in range(60)]
    rows = [f"{i}.png,{i % 2},{names[i]},{i}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["path,label,patient_id,image_id", *rows]))
    images, y = np.arange(60)[:, None, None] * np.ones((4, 4)), np.arange(60) % 2
    np.savez(tmp_path / "a.npz", x_train=images.astype(np.uint8), y_train=y, patient_id=np.array(names, object))
    for file in ("a.csv", "a.npz"):
        (finding,) = (f for f in open_dataset(str(tmp_path / file), "", False).findings if f.severity == "error")
        assert (finding.name, finding.remedy[:19]) == ("ids", "set unit=patient_id")
        assert finding.text[-42:].endswith("patient_id names people, and is left out")
        assert Reader("", public=True)(str(tmp_path / file)).images.findings
        with pytest.raises(UserError, match="patient_id names people"):
            Reader("")(str(tmp_path / file))
    source = open_dataset(str(tmp_path / "a.csv"), "", False, "patient_id")
    assert not [finding for finding in source.findings if finding.name == "ids"]


def test_a_named_set_tells_the_lesion_that_an_image_shows(tmp_path):
    ham10000(tmp_path, 40)
    for _ in ("first read", "then mapped"):
        source = open_dataset("ham10000", str(tmp_path), False, "lesion")
        for part, groups in zip((source.train, source.test), source.groups, strict=True):
            shows = part.x[:, 0, 32, 32].long()
            assert torch.equal(groups[:, None] == groups, shows[:, None] == shows)
    for file in (tmp_path / "prepared").glob("*/*_lesion.npy"):  # as an earlier version kept it
        file.unlink()
    opening._open_stored.cache_clear()
    assert open_dataset("ham10000", str(tmp_path), False, "lesion").groups is not None  # it is prepared again
    assert len(open_dataset("ham10000", str(tmp_path), False).train.x) + len(source.test.x) == 40


def test_the_examples_of_a_person_lie_in_a_row(tmp_path):
    names = npz(tmp_path / "a.npz")["train"]
    task = load(pair(tmp_path / "a.npz"), "", False)
    source = open_dataset(str(tmp_path / "a.npz"), "", False, "patient")
    assert task.units == len(task.people) == 60 < len(task.private.x) == len(names)
    numbers = np.array([unit_of(name) for name in names])
    assert task.people.tolist() == np.unique(numbers, return_counts=True)[1].tolist()
    order = np.argsort(numbers, kind="stable")
    assert torch.equal(task.private.x, source.train.x[order])
    assert torch.equal(task.private.y, source.train.y[order])
    alone = pair(tmp_path / "a.npz", unit=None)
    alone.read = Read(accept=["ids"])
    assert load(alone, "", False).people is None


def test_somebody_with_training_and_test_images_is_tested_alone(tmp_path):
    names = npz(tmp_path / "a.npz", shared=3)
    both = np.isin(names["test"], names["train"])
    not_loaded(
        pair(tmp_path / "a.npz", overlap=Overlap.refuse),
        "",
        rf"pair.unit: .*: {both.sum()} of its .* test images .*overlap=leave",
    )

    # all that they have leaves the private data
    task = load(pair(tmp_path / "a.npz"), "", False)
    assert len(task.test.x) == len(names["test"])
    assert len(task.private.x) == (~np.isin(names["train"], names["test"])).sum() < len(names["train"])


def whose(split, images, names):
    """The names of those whose images are in a split, by the images themselves, which are all different."""
    return {name for name, image in zip(names, images, strict=True) if (image == split.x).flatten(1).all(1).any()}


@pytest.mark.parametrize(
    "changes",
    [
        {"validation": 0.3},
        {"private_share": 0.5, "validation": 0.25},
        {"take": Take.train, "public_share": 0.3, "public": "itself"},
        {"take": Take.train, "public_share": 0.3, "public": "itself", "validation": 0.3},
    ],
)
def test_nobody_is_on_two_sides(tmp_path, changes):
    path = tmp_path / "a.npz"
    names = npz(path)
    if changes.get("public"):
        changes = changes | {"public": str(path)}
    task = load(pair(path, **changes), "", False)
    images = open_dataset(str(path), "", False).train.x
    splits_of = [split for split in (task.private, task.validation, task.public) if split is not None]
    sides = [whose(split, images, names["train"]) for split in splits_of]
    assert len(sides) >= 2
    assert sum(map(len, sides)) == len(set.union(*sides)) > 0
    assert len(sides[0]) == len(task.people)

    # people are drawn: of each one here, all their images are here
    counts = dict(zip(*np.unique(names["train"], return_counts=True), strict=True))
    assert sum(counts[name] for name in sides[0]) == len(task.private.x) == int(task.people.sum())
    if task.validation is not None:
        assert sum(counts[name] for name in sides[1]) == len(task.validation.x)
        each = list(zip(images, names["train"], strict=True))
        order = [next(name for image, name in each if (image == one).all()) for one in task.validation.x]
        in_turn = [(name, len(list(of))) for name, of in itertools.groupby(order)]
        assert [many for _, many in in_turn] == task.held_out_people.tolist()
        assert len(dict(in_turn)) == len(in_turn) == task.held_out_units
    if "private_share" in changes:
        assert 20 <= len(set.union(*sides)) <= 40


# --- Gradients


def wide():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 3))


def conv():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(36, 3)
    )


def linear(bias=True):
    torch.manual_seed(1)
    return torch.nn.Linear(64, 3, bias=bias)


ENGINES = {
    "conv": lambda: PerExampleGradients(conv().eval(), 16),
    "a chunk that fits no person": lambda: PerExampleGradients(conv().eval(), 3),
    "wide": lambda: BookKeeping(wide().eval()),
    "linear": lambda: LinearGradients(linear()),
    "linear without bias": lambda: LinearGradients(linear(bias=False)),
}


def examples(name, n, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n, 64) if "linear" in name else torch.randn(n, 1, 8, 8)
    return Split(x, torch.randint(3, (n,)))


def each_row(gradients, batch, **named):
    """All rows of G, each behind its loss."""
    blocks = gradients.blocks(batch.x, batch.y, **named)
    return torch.cat([torch.cat([block.losses[:, None], block.written_out().clone()], 1) for block in blocks])


def rows_of(gradients, batch, **named):
    """All rows of G, each with its loss, as a set: in whatever order people come."""
    rows = each_row(gradients, batch, **named)
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_a_row_is_the_mean_over_the_examples_of_a_person(name, rows):
    sizes = torch.tensor(SIZES)
    batch = examples(name, int(sizes.sum()))
    engine = ENGINES[name]()
    each = each_row(engine, batch)
    want = torch.stack([part.double().mean(0) for part in each.split(SIZES)])
    rows_there = rows_of(PeopleGradients(engine, sizes), batch, rows=rows)
    torch.testing.assert_close(rows_there.double(), want[want[:, 0].argsort()], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["conv", "linear"])
def test_all_examples_of_a_person_with_thousands_count(name):
    """Half of the mean is of the last ones."""
    batch, engine = examples(name, 2600), ENGINES[name]()
    row = rows_of(PeopleGradients(engine, torch.tensor([2600])), batch)[0]
    torch.testing.assert_close(row[1:], each_row(engine, batch)[:, 1:].mean(0), atol=1e-5, rtol=1e-4)


def test_a_multi_label_task_and_an_offset_have_means_too():
    torch.manual_seed(0)
    sizes, x, y = torch.tensor([2, 1, 3, 3]), torch.randn(9, 5), torch.randint(2, (9, 4)).float()
    for model, features in ((torch.nn.Linear(5, 4), x), (OffsetLinear(5, 4), torch.cat([x, torch.randn(9, 4)], 1))):
        each = LinearGradients(model).matrix(features, y)
        want = torch.stack([part.mean(0) for part in each.written_out().split(sizes.tolist())])
        losses = torch.stack([part.mean() for part in each.losses.split(sizes.tolist())])
        rows_there = rows_of(PeopleGradients(LinearGradients(model), sizes), Split(features, y))
        torch.testing.assert_close(rows_there[:, 1:], want[losses.argsort()])


@pytest.mark.parametrize("name", ENGINES)
def test_passes_and_blocks_are_as_large_for_a_person_with_a_thousand_examples(name, monkeypatch):
    engine, seen = ENGINES[name](), []
    kind = LinearGradients if "linear" in name else PerExampleGradients
    monkeypatch.setattr("pubsel.gradients.people.MOST_FACTORS", 64)
    what = "matrix" if "linear" in name else "chunk"
    inner = getattr(kind, what)
    if "linear" in name:
        monkeypatch.setattr(kind, what, lambda self, x, *rest: seen.append(len(x)) or inner(self, x, *rest))
    people = PeopleGradients(engine, torch.tensor([1000, 1, 2000]))
    batch = examples(name, 3001)
    blocks = list(map(len, people.blocks(batch.x, batch.y)))
    assert sum(blocks) == 3
    if seen:
        assert max(seen) <= 2 * 64
    else:
        assert engine._scratch is None or len(engine._scratch) <= people.chunk(batch.x) <= 256


def test_examples_that_are_not_those_of_the_people_are_refused():
    batch = examples("linear", 5)
    for sizes in ([2, 2], [5, 0], [3, 3]):
        with pytest.raises(ValueError, match="5 examples are not those of people"):
            list(PeopleGradients(ENGINES["linear"](), torch.tensor(sizes)).blocks(batch.x, batch.y))


def test_members_are_all_examples_of_the_chosen_in_order():
    sizes = torch.tensor([2, 1, 3, 1])
    places, chosen = members(sizes, torch.tensor([0, 2]))
    assert (places.tolist(), chosen.tolist()) == ([0, 1, 3, 4, 5], [2, 3])
    places, chosen = members(sizes, torch.tensor([], dtype=torch.int64))
    assert (len(places), len(chosen)) == (0, 0)
    assert members(sizes, None)[0] is None
    batch = examples("conv", 0)
    assert list(PeopleGradients(ENGINES["conv"](), chosen).blocks(batch.x, batch.y)) == []


# --- The sensitivity, attacked


def attackers(name):
    """People of 1 to 500 examples made to hurt: huge, not finite, cancelling each other, one bad one among many."""
    torch.manual_seed(2)

    def some(n, scale=1.0):
        return examples(name, n, seed=n).x * scale

    alike = some(1).expand(500, *some(1).shape[1:])
    bad = some(40)
    bad[3], bad[4], bad[5] = torch.nan, torch.inf, 3e38
    huge = some(2, 1e15)
    huge[1] = -huge[0]
    mixed = some(500)
    mixed[::7] *= 1e12
    mixed[::11] = -torch.inf
    constant = [torch.full_like(some(1), torch.nan), torch.full_like(some(500), 3e38)]
    return [some(1), some(2, 100.0), alike, 1e4 * alike, some(500, 1e-6), bad, huge, some(3, 1e17), mixed, *constant]


def mechanism_of(name, engine, method):
    torch.manual_seed(3)
    public = examples(name, 40, seed=9)
    smaller = {"k": 10} if "gep" in method else {"rank": 20} if "rank" in option("algorithm", method) else {}
    algorithm = algorithms.build(option("algorithm", method) | smaller)
    view = View(engine.model, engine, public, 3, False, lambda purpose, step: stream("test", purpose, step))
    return algorithm.mechanism(view, 0)


def moved(mechanism, engine, others, person, sizes=None):
    """By how much a person moves the sum over the others: a split and how many examples each of them has. sizes: of the
    rows that the person becomes."""
    batch, people = others
    y = torch.arange(len(person)) % 3
    joined = Split(torch.cat([batch.x[:3], person, batch.x[3:]]), torch.cat([batch.y[:3], y, batch.y[3:]]))
    with_person = torch.cat([people[:1], torch.tensor(sizes or [len(person)]), people[1:]])
    sums = [
        clipped_sum(mechanism, PeopleGradients(engine, counts), split)[0]
        for split, counts in ((batch, people), (joined, with_person))
    ]
    assert all(torch.isfinite(total).all() for total in sums)
    return float((sums[1] - sums[0]).norm())


@pytest.mark.parametrize("name", ["conv", "wide", "linear"])
@pytest.mark.parametrize("method", ["dp_sgd", "gep_digits", "adadps", "fully_private"])
def test_a_person_of_any_size_moves_the_sum_by_at_most_the_sensitivity(name, method):
    engine = ENGINES[name]()
    mechanism = mechanism_of(name, engine, method)
    others = examples(name, 13), torch.tensor([3, 1, 2, 7])
    reached = [moved(mechanism, engine, others, person) for person in attackers(name)]
    assert max(reached) <= mechanism.sensitivity * (1 + accountant.ROUNDING)
    assert max(reached) > 0.6 * mechanism.sensitivity


@pytest.mark.parametrize("name", ["conv", "wide", "linear"])
def test_the_attack_notices_a_person_who_is_several_rows(name):
    """The planted faults: a person whose examples are in two blocks, or are clipped one by one."""
    engine = ENGINES[name]()
    mechanism = mechanism_of(name, engine, "dp_sgd")
    others = examples(name, 13), torch.tensor([3, 1, 2, 7])
    person = 1e4 * examples(name, 1, seed=1).x.expand(500, *examples(name, 1).x.shape[1:])
    assert moved(mechanism, engine, others, person, [250, 250]) > 1.2 * mechanism.sensitivity
    assert moved(mechanism, engine, others, person, [1] * 500) > 100 * mechanism.sensitivity


def test_a_first_release_moves_by_at_most_its_sensitivity_for_a_person():
    torch.manual_seed(0)
    release = noisy_covariance(torch.randn(50, 6), 2)
    sums = []

    def total(x, sizes):
        noisy_sum(release._replace(decode=sums.append), x, 0.0, stream("test", "release"), 64, torch.tensor(sizes))
        return sums.pop()

    others = torch.randn(6, 6)
    alike = torch.randn(1, 6).expand(500, 6)
    people = [torch.randn(1, 6) * 1e5, alike, 1e9 * alike, torch.full((3, 6), torch.nan), torch.randn(40, 6) * 100]
    people.append(torch.cat([torch.full((1, 6), torch.inf), torch.randn(9, 6)]))
    reached = []
    for person in people:
        both = total(torch.cat([others[:4], person, others[4:]]), [4, len(person), 2])
        reached.append(float((both - total(others, [4, 2])).norm()))
    assert max(reached) <= release.sensitivity * (1 + accountant.ROUNDING)
    assert max(reached) > 0.99
    want = sum(release.clipped_sum(part) / len(part) for part in (others[:4], others[4:]))
    torch.testing.assert_close(total(others, [4, 2]), want)


# --- Training


def task(sizes=None, features=False):
    """A task whose example i has the value of its person in each pixel."""
    torch.manual_seed(0)
    people = torch.tensor(sizes or [1, 4, 2, 1, 1, 3, 9, 1, 1, 2] * 6)
    who = torch.arange(len(people)).repeat_interleave(people)
    x = who[:, None, None, None].expand(-1, 1, 8, 8).to(torch.uint8).clone()
    x = x.flatten(1).float() / 30 if features else x
    y = who % 3
    private = Split(x, y)
    return Task(private, None, private, 3, "accuracy", (0.5,), (0.5,), (), people=people)


def train(tmp_path, problem, noise=0.5, report=lambda p: None, n=None, device="cpu", **changes):
    images = torch.nn.Sequential(Scaled(most=60), conv()).eval()
    model = (linear() if problem.private.x.dim() == 2 else images).to(device)
    settings = training(**({"epochs": 3, "batch_size": 12} | changes))
    plan = schedule(n or problem.units, settings)
    tmp_path.mkdir(exist_ok=True)
    job = Job(DPSGD("dp_sgd", 1.0), plan, noise, settings, "name", tmp_path / "checkpoint.pt")
    fit(model, problem, job, secret_named(), report)
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize(("features", "batch_size"), [(False, 12), (True, 12), (True, 1000)])
def test_people_are_sampled_with_all_their_examples(tmp_path, monkeypatch, batch_size, features):
    """Of each batch: whoever is in it has all their examples in one row, and people are as many as the rate says."""
    problem, batches, inner = task(features=features), [], loop.noisy_mean

    def spy(mechanism, gradients, batch, *rest):
        assert isinstance(gradients, PeopleGradients)
        per_person = batch.x.flatten(1)[:, 0] * (30 if features else 1)
        values, counts = per_person.round().long().unique_consecutive(return_counts=True)
        assert counts.tolist() == gradients.sizes.tolist() == problem.people[values].tolist()
        batches.append(values.tolist())
        return inner(mechanism, gradients, batch, *rest)

    monkeypatch.setattr(loop, "noisy_mean", spy)
    train(tmp_path, problem, batch_size=batch_size, epochs=10)
    assert len(batches) == 10 * (5 if batch_size == 12 else 1)
    hits = np.bincount(np.concatenate(batches).astype(int), minlength=60) / len(batches)
    if batch_size == 1000:
        assert (hits == 1).all()
    else:
        assert np.abs(hits - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / len(batches))  # a person of 9 as often as one of 1


def test_a_schedule_for_examples_in_place_of_people_is_an_error(tmp_path):
    problem = task()
    with pytest.raises(ValueError, match="people"):
        train(tmp_path, problem, n=len(problem.private.x))


@pytest.mark.gpu
@pytest.mark.parametrize(("features", "batch_size"), [(False, 12), (True, 1000)])
def test_a_gpu_trains_on_people_as_a_cpu_does(tmp_path, features, batch_size):
    weights = []
    for device in ("cpu", "cuda"):
        weights.append(train(tmp_path / device, task(features=features), device=device, batch_size=batch_size))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_a_person_with_one_example_is_an_example(tmp_path):
    """With one example each, training is bit for bit what it is without people."""
    for features in (True, False):
        alone = task([1] * 40, features)
        with_people = train(tmp_path / f"people {features}", alone)
        without = train(tmp_path / f"examples {features}", alone._replace(people=None))
        torch.testing.assert_close(with_people, without, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("features", [False, True])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, features):
    problem = task(features=features)
    whole = train(tmp_path / "whole", problem)

    def stop(progress):
        if progress.step >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", problem, report=stop, checkpoint_seconds=0)
    assert (tmp_path / "killed" / "checkpoint.pt").exists()
    assert torch.equal(train(tmp_path / "killed", problem), whole)


def test_who_an_example_is_of_decides_the_noise_too():
    problem = task()
    other = problem._replace(people=problem.people.flip(0))
    first, second = (torch.cat([part.flatten() for part in units_of(of)]) for of in (problem, other))
    assert not torch.equal(first, second)
    assert len(units_of(problem._replace(people=None))) == 2


# --- Commands

HEAD = """
pair.unit=patient distance=none threads=1 model=pixels training=head training.steps=6 training.batch_size=20
training.learning_rate=0.1 privacy.delta=0.001
""".split()


def command(tmp_path, *words, name="run"):
    where = [f"pair.private={tmp_path / 'a.npz'}", f"results={tmp_path / 'results'}"]
    return [name, *where, *HEAD, *words]


@pytest.fixture
def private(tmp_path):
    npz(tmp_path / "a.npz", train=80)
    return tmp_path


ITSELF = ["pair.take=train", "pair.public_share=0.3"]
AUTO = ["pair.public=auto", "pair.candidates=[digits,noise]", "epsilon_select=1"]


@pytest.mark.parametrize(
    ("words", "algorithm"),
    [
        ([], "dp_sgd_clip1"),
        (ITSELF, "whitened_head"),
        (ITSELF, "dp_pca"),
        ([], "dp_fc"),
        ([*ITSELF, "algorithm.k=20"], "gep_digits"),
    ],
)
def test_a_run_protects_people_and_says_so(private, words, algorithm, capsys):
    if "pair.public_share=0.3" in words:
        words = [f"pair.public={private / 'a.npz'}", *words]
    if algorithm == "dp_pca":
        words = [*words, "algorithm.k=5"]
    run = command(private, f"algorithm={algorithm}", "epsilon=3", *words)
    assert main(run) == 0, capsys.readouterr().err
    record = only_record(private / "results")
    units = record["private_units"]
    assert 40 < units <= 80
    assert record["private_examples"] > 2 * units
    assert record["privacy"]["valid"] is True
    assert record["privacy"]["unit"] == "patient"
    assert record["privacy"]["adjacency"].startswith("one person with all their training examples (those")
    assert "for a person with all their examples (those with one patient)" in record["privacy"]["statement"]
    if algorithm not in ("whitened_head", "dp_fc"):  # of full batches
        assert record["privacy"]["sampling_rate"] == 20 / units

    # what a method derives from the number of examples, it derives from that of people
    if algorithm == "whitened_head":
        taken = next(note for note in record["notes"] if "public examples were drawn" in note)
        mu = accountant.gaussian_mu(3, 0.001)
        rest = record["derived"]["rest"]  # by the public features, which are not at hand here
        facts = algorithms.Facts(units, 64, int(taken.split()[0]), 3, False, mu, True, True)
        method = algorithms.build(option("algorithm", algorithm)).derived(facts)
        method.rest = rest
        assert record["derived"] == method.values(record["privacy"]["steps"])

    # of dp_pca the first release, too
    (ledger,) = (private / "results" / "ledger").glob("*.jsonl")
    noted = [json.loads(line)["what"] for line in ledger.read_text().splitlines()]
    assert len(noted) == 1 + (algorithm == "dp_pca")
    assert all(what.endswith(", for a person (patient)") for what in noted)

    capsys.readouterr()
    assert main(["run", f"replay={record['identity']}", f"results={private / 'results'}"]) == 0
    printed = capsys.readouterr().out
    assert "the same, bit for bit" in printed
    assert record["weights"] in printed


def test_the_guarantee_is_weak_if_delta_is_above_one_over_the_number_of_people(private):
    words = command(private, "algorithm=dp_sgd_clip1", "epsilon=3")
    n = len(load(pair(private / "a.npz"), "", False).private.x)
    assert 1 / n < 0.01 < 1 / 80
    assert main([*words, "privacy.delta=0.01"]) == 0
    assert "weak" not in only_record(private / "results")["privacy"]
    assert main([*words, "privacy.delta=0.02"]) == 2


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("run", ["algorithm=noisy_sgd", "pair.public=digits"], "algorithm=noisy_sgd protects single examples only"),
        ("run", [*AUTO, "algorithm=dp_md", "distance=gsd", "select.by=gsd"], "pair.public=auto chooses"),
        ("audit", ["algorithm=dp_sgd_clip1"], "audit.kind=white_box is of single examples"),
        ("audit", ["algorithm=dp_sgd_clip1", "audit.kind=per_instance"], "audit.kind=per_instance is of single"),
        ("figure", ["figure=reconstruction", "algorithm=dp_sgd_clip1"], "this figure is of single examples"),
        ("figure", ["figure=gep_figure2", "algorithm=non_private", "distance=gsd"], "this figure is of"),
    ],
)
def test_what_reads_examples_one_by_one_is_refused(private, name, words, why, capsys):
    assert main(command(private, *words, "epsilon=3", name=name)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pubsel:")]
    assert line.startswith("pubsel: pair.unit=patient: ")
    assert why in line


def test_what_is_given_away_says_that_a_person_is_protected(private):
    run = command(private, "algorithm=dp_sgd_clip1", "epsilon=3", "privacy.secure_noise=true")
    assert main(run) == 0
    record = only_record(private / "results")
    assert main(["export", f"{private / 'results' / 'runs' / record['identity']}", f"to={private / 'release'}"]) == 0
    texts = {name: (private / "release" / name).read_text() for name in ("README.md", "privacy.html", "config.json")}
    unit = json.loads(texts["config.json"])["privacy"]["unit"]
    assert unit == "one person with all their training examples"

    images, card, page = f"{record['private_examples']:,}", texts["README.md"], texts["privacy.html"]
    assert f"| private examples | {images} of 80 people |" in card
    assert "for one person whose training images are there, or count as nothing." in card
    assert "- One person with all their images is protected. Those with one patient count as one person's." in card
    assert "<dt>people</dt><dd>80</dd>" in page
    assert "Each of the 80 people by themselves, <strong>with all their training images</strong>" in page
    assert "All other people, how many people and images there are, and all else that is" in page
    assert "asks whether the images of a certain person were used, or nothing in their place" in page
    assert Page(page).open == []
    for text in (card, page):
        assert "A person whose examples have several values of patient" in text
        for wrong in ("not one person", "one training image", "one image", "a certain image", "pubsel audit"):
            assert wrong not in text, wrong


def test_several_processes_and_the_loss_attack_are_refused(private, monkeypatch, capsys):
    assert main(command(private, "algorithm=dp_sgd_clip1", "epsilon=3")) == 0
    assert main(["attack", "attack=loss", "run=all", f"results={private / 'results'}"]) == 2
    assert "pair.unit=patient: the attack is of single examples" in capsys.readouterr().err
    monkeypatch.setattr("pubsel.training.torchrun.place", lambda: (0, 2))
    monkeypatch.setattr("pubsel.training.parallel._start", lambda: None)
    assert main(command(private, "algorithm=dp_sgd_clip1", "epsilon=2")) == 2
    assert "a person stays in one process" in capsys.readouterr().err


def test_who_is_held_out_is_the_same_for_each_public_set_that_takes_some_away(tmp_path):
    """A choice reads the private data next to one candidate, and training next to another: nobody who was chosen by may
    be measured."""
    names = npz(tmp_path / "a.npz")["train"]
    images = torch.from_numpy(np.load(tmp_path / "a.npz")["train_images"]).reshape(len(names), 1, 8, 8)
    sides = []
    for i, taken in enumerate(["p000", "p031", "p059", None]):
        theirs = images[names == taken].numpy() if taken else np.zeros((0, 1, 8, 8), np.uint8)
        other = np.random.RandomState(50 + i).randint(0, 256, (40, 1, 8, 8), dtype=np.uint8)
        x = np.concatenate([theirs, other]).reshape(-1, 8, 8)
        labels = np.arange(len(x)) % 3
        test = {"test_images": x[-5:], "test_labels": labels[-5:]}
        np.savez(tmp_path / f"{i}.npz", train_images=x, train_labels=labels, **test)
        changes = {"public": str(tmp_path / f"{i}.npz"), "m": len(x) - 5, "overlap": Overlap.leave, "validation": 0.3}
        task = load(pair(tmp_path / "a.npz", **changes), "", False)
        sides.append([whose(split, images, names) for split in (task.private, task.validation)])
        assert taken not in set.union(*sides[-1])
    for trained, _ in sides:
        for _, held in sides:
            assert not trained & held
