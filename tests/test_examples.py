"""The table of examples: one unit more or less moves nobody else, copies are one, people are who they are."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pubsel.data import load, open_dataset
from pubsel.data.examples import Role, drawn, examples_of, folded, people_of, take_public, unit_of
from pubsel.data.overlap import Digests
from pubsel.messages import UserError
from pubsel.settings.keys import Convert, Overlap, Pair, Read, Take

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def image(i):
    """An image that says which one it is."""
    return np.full((4, 4), i, dtype=np.uint8)


def write(path, rows, sides=True):
    """An npz of rows (image, label, person, test)."""
    arrays = {}
    for part in ("train", "test") if sides else ("train",):
        mine = [row for row in rows if not sides or row[3] == (part == "test")]
        arrays[f"{part}_images"] = np.stack([image(row[0]) for row in mine]) if mine else np.zeros((0, 4, 4), np.uint8)
        arrays[f"{part}_labels"] = np.array([row[1] for row in mine], dtype=np.int64)
        arrays[f"{part}_who"] = np.array([row[2] for row in mine], dtype=str)
    np.savez(path, **arrays)
    return str(path)


def roles(task):
    """The images of each side of a task, with how often each is there."""
    sides = {"private": task.private, "held out": task.validation, "test": task.test, "public": task.public}
    return {name: sorted(split.x[:, 0, 0, 0].tolist()) for name, split in sides.items() if split is not None}


ROWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 1), st.integers(0, 12), st.booleans()), min_size=12, max_size=60
)
KEYS = st.fixed_dictionaries(
    {
        "unit": st.sampled_from([None, "who"]),
        "validation": st.sampled_from([0.0, 0.3]),
        "private_share": st.sampled_from([1.0, 0.6]),
        "seed": st.integers(0, 3),
        "public": st.sampled_from([None, "other", "own share", "own m", "own test", "own shots"]),
    }
)


@pytest.mark.attack
@SETTINGS
@given(ROWS, KEYS, st.booleans())
def test_without_one_unit_nobody_else_moves(tmp_path, rows, keys, sides):
    """Whatever the keys, images of people or copies, given or drawn parts, with public data that share images."""
    other = write(tmp_path / "other.npz", [(i, i % 2, 0, False) for i in range(30, 50)], sides=False)
    pair = {key: value for key, value in keys.items() if key != "public"}
    pair |= {"public": None, "m": 1}
    if keys["public"] == "other":
        pair |= {"public": other, "m": 12}
    if str(keys["public"]).startswith("own"):
        amount = {"share": {"public_share": 0.3, "m": None}, "m": {"m": 4}, "shots": {"shots": 2, "m": None}}
        how = keys["public"].removeprefix("own ")
        changes = {"m": 2} if how == "test" else amount[how] | {"take": Take.train}
        pair |= {"public": str(tmp_path / "own.npz")} | changes

    def sides_of(some):
        path = write(tmp_path / "own.npz", some, sides)
        accept = Read(accept=["conflict"])
        return roles(load(Pair(private=path, convert=Convert.resize, read=accept, **pair), "", False))

    try:
        whole = sides_of(rows)
    except UserError:
        return  # too few on a side

    # every image says whose it is, or is itself the unit
    by_person = keys["unit"] is not None
    units = sorted({row[2] if by_person else row[0] for row in rows})
    if str(keys["public"]).startswith("own"):  # who is public is not protected
        public = set(whole["public"])
        units = [unit for unit in units if not public & {row[0] for row in rows if row[2 if by_person else 0] == unit}]
    for unit in units:
        rest = [row for row in rows if (row[2] if by_person else row[0]) != unit]
        try:
            left = sides_of(rest)
        except UserError:
            continue
        if keys["public"] == "other":  # which stay as they are
            assert left.pop("public") == whole["public"]
        for name, images in whole.items():
            if name not in left:
                continue
            if by_person:  # what remains is there, and what goes is of the person
                gone = list(images)
                for value in left[name]:
                    assert value in gone, (name, unit)
                    gone.remove(value)
                theirs = [row[0] for row in rows if row[2] == unit]
                assert set(gone) <= set(theirs), (name, unit)
            else:
                assert left[name] == [value for value in images if value != unit], (name, unit)


def test_a_draw_depends_on_the_unit_alone_and_is_about_its_share():
    unit = np.array([unit_of(str(i)) for i in range(20_000)])
    for share in (0.1, 0.5):
        chosen = drawn(unit, share, "test")
        assert abs(chosen.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(unit))
        assert (drawn(unit[::3], share, "test") == chosen[::3]).all()
    one, two, other = drawn(unit, 0.5, "test"), drawn(unit, 0.5, "held out"), drawn(unit, 0.5, "test", seed=1)
    for second in (two, other):
        assert abs((one == second).mean() - 0.5) < 4 * 0.5 / np.sqrt(len(unit))


@pytest.mark.parametrize(
    "ways",
    [
        ("P7", "P7 ", " p7", "P7\u00a0", "P7\u200b", '"P7"', "\u201cP7\u201d", "\uff307", "p7\ufeff"),
        # marks that dialogs and tables paste, and quotes of other countries
        (
            "P7",
            "P7\u200e",
            "\u202aP7\u202c",
            "P7\ufe0f",
            "\u2066P7\u2069",
            "P7\0",
            "\u201eP7\u201c",
            "\u2039P7\u203a",
            '="P7"',
        ),
        ("P-7", "P\u20117", "P\u20137"),
        ("Doe^John", "Doe^John^^"),
        ("7", "07", "7.0", " 7", "7.", "+7", "007.00"),
        ("0", "0.0", "00"),
        ("-1", "-1.0", "-01"),
        ("Müller", "Mu\u0308ller", "MÜLLER ", "müller"),
        ("straße", "STRASSE"),
    ],
)
def test_ways_to_write_a_name_are_one(ways):
    assert len({folded(way) for way in ways}) == 1


def test_names_of_different_people_stay_apart():
    different = ["P7", "P70", "7", "-7", "7.5", "70", "7a", "a7", "P 7", "0x7", "7e1", "İ", "i"]
    assert len({folded(name) for name in different}) == len(different)


@pytest.mark.parametrize(
    "nobody", ["nan", "", " ", "NaN", "None", "null", "unknown", "-", "?", "N/A", "<NA>", "NaT", "--", "ANONYMOUS"]
)
def test_somebody_without_a_name_is_an_error(nobody):
    unit, findings = people_of("table", ["a", "b", nobody, "c"])
    assert [(finding.name, finding.severity) for finding in findings] == [("nobody", "error")]
    assert "1 of 4 examples name nobody" in findings[0].text
    assert len(unit) == 4


def test_one_person_with_most_examples_is_doubtful():
    _, findings = people_of("table", ["x"] * 30 + [f"p{i}" for i in range(70)])
    assert [finding.name for finding in findings] == ["large"]
    assert "x has 30" in findings[0].text
    assert not people_of("table", ["a", "b", "c"] * 5)[1]
    unit, findings = people_of("table", ["P7", "P7 ", "p8"])
    assert unit[0] == unit[1] != unit[2]
    assert "'P7' and 'P7 '" in findings[0].text


def test_copies_are_one_example_of_their_unit(tmp_path):
    rows = [(i, 0, i, False) for i in range(20)] + [(100, 1, 5, False)] * 12 + [(i, 1, i, False) for i in range(30, 50)]
    path = write(tmp_path / "own.npz", rows + [(200 + i, i % 2, 90 + i, True) for i in range(10)])
    task = load(Pair(private=path, public=None, m=1, convert=Convert.resize), "", False)
    assert roles(task)["private"] == [*range(20), *range(30, 50), 100]
    assert task.units == 41
    (finding,) = [finding for finding in task.findings if finding.name == "copies"]
    assert "62 images are 51 different ones" in finding.text

    # two people with the same image have it both; one has it once
    again = [*rows, (100, 1, 6, False)]
    path = write(tmp_path / "own.npz", again + [(200 + i, i % 2, 90 + i, True) for i in range(10)])
    task = load(Pair(private=path, public=None, m=1, convert=Convert.resize, unit="who"), "", False)
    assert roles(task)["private"].count(100) == 2
    assert task.units == 40


def test_whatever_is_named_by_a_path_is_a_users_own(tmp_path):
    """A record says so of it, so copies are one example: also of the file of a named set in the data folder."""
    rows = [(i, i % 2, 0, False) for i in range(20)] + [(3, 1, 0, False)] + [(i, i % 2, 0, True) for i in range(30, 40)]
    path = write(tmp_path / "mnist.npz", rows)
    task = load(Pair(private=path, public=None, m=1, convert=Convert.resize), str(tmp_path), False)
    assert (task.units, len(task.private.x)) == (20, 20)


def test_an_image_with_two_labels_is_an_error_or_left_out(tmp_path):
    rows = [(i, i % 2, 0, False) for i in range(20)] + [(3, 0, 0, False), (50, 0, 0, True), (51, 1, 0, True)]
    pair = Pair(private=write(tmp_path / "own.npz", rows), public=None, m=1, convert=Convert.resize)
    with pytest.raises(UserError, match=r"2 images have copies with other labels.*pair.read.accept=\[conflict\]"):
        load(pair, "", False)
    pair.read.accept = ["conflict"]
    assert 3 not in roles(load(pair, "", False))["private"]


def test_public_examples_of_private_data_are_as_many_as_was_said(tmp_path):
    path = write(tmp_path / "own.npz", [(i, i % 2, i, i > 30) for i in range(60)])
    whole = open_dataset(path, "", False)
    for changes, m in (
        ({"m": 5}, 5),
        ({"m": 5, "take": Take.train}, 5),
        ({"m": None, "take": Take.train, "shots": 2}, 4),
        ({"m": None, "take": Take.train, "public_share": 0.4}, None),
    ):
        task = load(Pair(private=path, public=path, convert=Convert.resize, **changes), "", False)
        assert len(task.public.x) == m or (m is None and 3 < len(task.public.x) < 25)
        assert sum(map(len, (task.public.x, task.private.x, task.test.x))) == len(whole.train.x) + len(whole.test.x)


def test_who_has_a_public_example_of_a_published_set_leaves():
    """All that a person has leaves the part, whatever else it shows."""
    y, content = torch.arange(12) % 2, Digests(np.arange(12), np.arange(12))
    people = torch.arange(12) // 3
    empty = Digests(np.zeros(0, np.int64), np.zeros(0, np.int64))
    table = examples_of("set", (y, y[:0]), (content, empty), (people, people[:0]), True)
    table, findings = take_public(table, np.arange(12) == 4, Overlap.refuse)
    assert table.has(Role.public).nonzero()[0].tolist() == [4]
    assert table.has(Role.left_out).nonzero()[0].tolist() == [3, 5]
    assert "2 other training images of people with public ones are left out" in findings[0].text


@pytest.mark.parametrize("how", list(Overlap))
def test_a_public_image_of_one_person_stays_with_another(how):
    """Or whoever is asked for would decide what another one is trained on."""
    y, content = torch.zeros(6), Digests(*(np.array([0, 1, 2, 0, 4, 5]),) * 2)
    people = torch.tensor([7, 7, 7, 8, 8, 9])
    empty = Digests(np.zeros(0, np.int64), np.zeros(0, np.int64))
    table = examples_of("set", (y, y[:0]), (content, empty), (people, people[:0]), False)
    table, _ = take_public(table, np.arange(6) == 0, how)
    assert table.has(Role.private).nonzero()[0].tolist() == [3, 4, 5]


def test_the_unit_is_the_image_as_it_was_decoded():
    """Its digest in the shape of all depends on the images that decide this shape."""
    content = Digests(np.array([1, 2, 3]), np.array([7, 7, 8]))
    none = Digests(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    table = examples_of("x", (torch.zeros(3), torch.zeros(0)), (content, none), None, published=False)
    assert table.unit.tolist() == [1, 2, 3]
