"""The private choice of a public set by coverage: its sensitivity attacked, its probabilities, and training with it."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.algorithms import roots
from pubsel.cli import main
from pubsel.messages import UsageError
from pubsel.privacy import accountant, ledger
from pubsel.privacy.people import UNIT, weights_of
from pubsel.privacy.randomness import SystemEntropy
from pubsel.selection import coverage, probabilities
from pubsel.selection.choose import compared
from pubsel.selection.coverage import NONE, Private, Regions
from pubsel.settings.identity import as_json
from pubsel.settings.keys import Backbone, By, Model, Norm, Select
from tests.made import secret, write_npz

WORST = (0.0, -1.0, 1e-30, -1e-45, 1e30, 3e38, math.nan, math.inf, -math.inf)
CHOOSE = """pair.private=private.npz pair.public=auto pair.candidates=[same.npz,other.npz] pair.m=null epsilon_select=1
    select.by=coverage model=pixels algorithm=whitened_head distance=none epsilon=3 privacy.delta=1e-3 download=false
    threads=1""".split()


def examples(kind, n, d=12):
    """Features of one of several kinds: each varies in other directions, around another mean."""
    rows = torch.from_numpy(np.random.RandomState(7 * kind + n).randn(n, d))
    wide = torch.where(torch.arange(d) % 4 == kind, 5.0, 0.3)
    return (rows * wide + 2 * torch.roll(torch.arange(d, dtype=torch.double), kind)).float()


def worst(row):
    """Return examples that could break a count: extreme numbers everywhere, or in one feature of `row`."""
    places = [torch.ones(len(row), dtype=torch.bool), *(torch.arange(len(row)) == i for i in (0, len(row) - 1))]
    return torch.stack([torch.where(place, value, row) for place in places for value in WORST])


def score(places, x, people=None, n=None):
    weights = weights_of(people, len(x))
    return coverage.score(places, coverage.counts(places, x, weights), len(x) if n is None else n)


# Sensitivity


@pytest.mark.parametrize("m", [20, 37, 200])
def test_one_example_more_raises_each_score_by_at_most_one(m):
    """Its count is added to those of the others: test_the_region_of_an_example_depends_on_no_other."""
    x = examples(0, 40)
    more = torch.cat([worst(x[0]), examples(0, 30), examples(1, 30), examples(2, 5)])
    rises = set()
    for places in (coverage.regions(examples(kind, m), "x") for kind in range(3)):
        own = [coverage.counts(places, row[None], [UNIT]) for row in more]
        for before in (coverage.counts(places, x[:many], [UNIT] * many) for many in (0, 7, 40)):
            after = (np.add(before, one).tolist() for one in own)
            rises |= {coverage.score(places, sums, 41) - coverage.score(places, before, 41) for sums in after}
    assert {0, UNIT} <= rises  # the bound is reached
    assert min(rises) == 0
    assert max(rises) == UNIT


@pytest.mark.parametrize("many", [1, 2, 3, 7, 500])
def test_a_person_raises_each_score_by_at_most_one(many):
    places = coverage.regions(examples(0, 60), "x")
    others = examples(0, 30)
    for of_person in (examples(0, many), examples(1, many), examples(0, 1).expand(many, -1)):
        people = torch.tensor([1] * 30)
        before = score(places, others, people, 31)
        after = score(places, torch.cat([others, of_person]), torch.tensor([1] * 30 + [many]), 31)
        assert 0 <= after - before <= UNIT
    assert sum(weights_of(torch.tensor([many]), many)) <= UNIT


def test_the_region_of_an_example_depends_on_no_other():
    """Bit for bit, however the examples lie in memory."""
    places = coverage.regions(examples(0, 200), "x")
    x = torch.cat([examples(0, 50), worst(examples(0, 1)[0])])
    strided = torch.stack([x, x], 2)[..., 0]
    alone = [coverage.counts(places, row[None], [1]) for row in x]
    together = [sum(column) for column in zip(*alone, strict=True)]
    for order in (x, strided, x.flip(0)):
        assert coverage.counts(places, order, [1] * len(x)) == together


def test_a_tie_between_regions_goes_one_way():
    places = Regions(np.zeros(2), np.ones(2), np.eye(2), np.array([[1.0, 0], [0, 1.0]]), [1, 1], 1.0)
    assert {places.of(np.array([scale, scale])) for scale in (1e-12, 0.1, 1, 3e7)} == {0}


# Scores and the choice


def test_private_examples_of_the_same_kind_are_covered_and_those_in_a_corner_are_not():
    public = examples(0, 400)
    places = coverage.regions(public, "x")
    same, other = examples(0, 300)[::2], examples(1, 300)
    assert score(places, same) > 0.8 * UNIT * len(same)
    assert score(places, other) < 0.1 * UNIT * len(other)
    corner = [row for row in same if places.of(roots(row.double()).numpy()) == 0]
    assert len(corner) > 3
    assert score(places, torch.stack(corner)) < 0.5 * UNIT * len(corner)


def test_regions_are_of_the_half_that_the_directions_do_not_follow_from():
    first = examples(0, 40)
    alike, other = (coverage.regions(torch.cat([first, half]), "x") for half in (examples(0, 41), examples(1, 41)))
    assert sum(alike.shares) == sum(other.shares) == 41
    assert other.leftover > 2 * alike.leftover


def choose(private, candidates, epsilon=1.0, with_none=True, people=None, source=secret):
    return coverage.select(epsilon, private, people, candidates, with_none, source)


def test_the_set_of_the_same_kind_is_chosen_and_none_if_there_is_no_such_set():
    private = examples(0, 2000)
    candidates = {f"kind {kind}": examples(kind, 150) for kind in range(3)}
    name, plan = choose(private, candidates)
    assert name == "kind 0"
    assert (plan.epsilon, plan.delta) == (1.0, 0.0)
    del candidates["kind 0"]
    assert choose(private, candidates)[0] == NONE
    assert choose(private, candidates, with_none=False)[0] in candidates
    people = torch.tensor([2] * 1000)
    assert choose(private, candidates, people=people)[0] == NONE


def test_a_single_candidate_without_none_reads_nothing():
    class Unreadable:
        def __len__(self):
            raise AssertionError

    name, plan = choose(Unreadable(), {"only": Unreadable()}, with_none=False)
    assert (name, plan.epsilon) == ("only", 0)


def assert_as_often(drawn, names, expected):
    """Compare by exact binomial tests: a name may be expected far less than once."""
    for name, p in zip(names, expected, strict=True):
        assert stats.binomtest(drawn.count(name), len(drawn), p).pvalue > 1e-6, name


def test_names_come_out_as_often_as_the_scores_say(monkeypatch):
    """And neighbours differ by at most e^epsilon."""
    private, epsilon = examples(0, 30), 0.5
    candidates = {f"kind {kind}": examples(kind, 40) for kind in range(2)}
    names = [*sorted(candidates), NONE]

    def scores(x):
        made = [score(coverage.regions(candidates[name], name), x, n=30) for name in names[:-1]]
        return [*made, int(coverage.LEAST * 30 * UNIT)]

    expected = probabilities(scores(private), epsilon)
    scored = coverage.scores(Private.of(private, None), candidates, True)
    monkeypatch.setattr(coverage, "scores", lambda *_: scored)  # the same each time
    drawn = [choose(private, candidates, epsilon, source=lambda *_: SystemEntropy())[0] for _ in range(800)]
    assert_as_often(drawn, names, expected)
    without = probabilities(scores(private[1:]), epsilon)
    assert np.abs(np.log(expected / without)).max() <= epsilon + 1e-9


def test_what_cannot_be_compared_is_named():
    with pytest.raises(UsageError, match="a: its features are the same for all examples"):
        coverage.regions(torch.ones(50, 5), "a")


# Training with it


def saved(name, images, labels):
    """Save images, of which the last 60 are for testing; private ones are of people with two images each."""
    images = images.astype(np.uint8)
    people = {"train_whose": np.arange(len(images) - 60) // 2, "test_whose": 1000 + np.arange(60) // 2}
    parts = (images[:-60], labels[:-60]), (images[-60:], labels[-60:])
    write_npz(f"{name}.npz", *parts, **(people if name == "private" else {}))


@pytest.fixture
def folder(tmp_path, folder):
    """Private images, two public sets of the same kind and of another, and people with two images each."""
    for name, seed, kind, n in (("private", 0, 0, 400), ("same", 1, 0, 90), ("other", 2, 1, 90)):
        draw = np.random.RandomState(seed)
        labels = draw.randint(3, size=n)
        images = draw.randint(0, 60, (n, 6, 6))
        images[:, :3] += (150 * (labels[:, None, None] == np.arange(3)[None, :, None])).astype(images.dtype)
        if kind:
            images = images.transpose(0, 2, 1)
        saved(name, images, labels)
    saved("foreign", images, labels + 1)
    return tmp_path


def trained(capsys, *words, choose=CHOOSE):
    assert main(["run", *choose, *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    return newest("runs")


def newest(kind):
    """Return the newest record of a kind."""
    path = max(Path("results", kind).glob("*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(path.read_text())


@pytest.mark.parametrize("given", ["coverage", "null"])
def test_a_run_trains_on_what_is_chosen_and_states_both(given, folder, capsys):
    record = trained(capsys, f"select.by={given}")
    assert record["settings"]["select"] == {"by": "coverage"}
    assert accountant.ROUNDED in record["privacy"]["not_covered"]
    assert record["public"] == "same.npz"
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=1e-3)
    assert [part["what"] for part in record["privacy"]["parts"]] == ["selection of the public set", "training"]
    assert record["privacy"]["statement"].startswith("The choice of the public set and the trained weights are (")
    (lines,) = ledger.ledgers("results")
    assert {line["what"]: round(line["epsilon"], 5) for line in lines} == {"choice": 1, "training": 3}


def test_a_run_trains_without_public_data_if_none_is_alike(folder, capsys):
    record = trained(capsys, "pair.candidates=[other.npz]")
    assert record["public"] is record["public_labels"] is None
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=1e-3)


def test_what_a_choice_compares_by_follows_from_the_model_unless_it_is_given():
    """Without features, gsd is the value that old records have: nothing."""
    plain = Model("linear", None, False, None, Norm.replace, None)
    features = dataclasses.replace(plain, backbone=Backbone("scattering"))
    follows = ((None, None, By.coverage), (By.gsd, None, By.gsd), (By.coverage, By.coverage, By.coverage))
    for given, without, with_features in follows:
        for model, by in ((plain, without), (features, with_features)):
            once = compared(Select(by=given), model)
            assert once == compared(once, model) == Select(by=by)
    assert as_json(Select(by=None)) == {}


def test_people_choose_too(folder, capsys):
    record = trained(capsys, "pair.unit=whose")
    assert (record["public"], record["private_units"]) == ("same.npz", 170)


def test_an_algorithm_that_needs_public_data_does_not_get_none(folder, capsys):
    words = ("algorithm=pillar", "training=head", "algorithm.k=5", "pair.candidates=[other.npz]")
    record = trained(capsys, *words)
    assert record["public"] == "other.npz"
    assert record["privacy"]["epsilon"] == pytest.approx(3, abs=1e-3)  # it was the only candidate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=linear", "algorithm=dp_md"], "select.by=coverage: compares features: set model.backbone"),
        (["pair.unit=whose", "select.by=gsd"], "pair.public=auto chooses under a guarantee for one example"),
        (["select.by=gsd"], "epsilon_select: choosing privately goes by GSD alone: give distance=gsd, not none"),
        (["pair.m=19"], "other.npz: 19 public examples are too few to choose by: give 20 or more"),
        (["algorithm=dp_sgd_clip1", "training=head", "privacy.noise_multiplier=1"], "one step already costs more than"),
        (["algorithm=pillar", "training=head", "algorithm.k=40"], "algorithm.k=40 is more than the 36 features"),
        (["algorithm=dope_sgd", "pair.candidates=[same.npz,foreign.npz]"], "needs public labels of the private task"),
        (["algorithm.public_labels=given", "pair.candidates=[same.npz,foreign.npz]"], "needs public labels of the"),
        (["algorithm.k=5"], "algorithm.k=5: directions are of public data"),
        (["epsilon=1e6"], "epsilon=1000000.0: so large that it hardly protects"),
        (["pair.candidates=[[same.npz,other.npz]]"], "pair.m=null: of several combined sets: give a number"),
    ],
)
def test_what_does_not_fit_together_is_named(words, message, folder, capsys):
    assert main(["run", *CHOOSE, *words]) == 2
    assert message in capsys.readouterr().err
    assert not ledger.ledgers("results")


@pytest.mark.parametrize("given", ["coverage", "null"])
def test_rank_chooses_by_features_too(given, folder, capsys):
    words = ["rank", "private=private.npz", "model=pixels", "distance.m=60", "epsilon_select=1", "download=false"]
    for candidates, chosen in (("same.npz,other.npz", "same.npz"), ("other.npz", NONE)):
        assert main([*words, f"public=[{candidates}]", f"select.by={given}"]) == 0, capsys.readouterr().err
        assert f"{chosen} is chosen for private.npz, of" in capsys.readouterr().out
        record = newest("ranks")
        assert record["chosen"] == chosen
        assert record["settings"]["select"] == {"by": "coverage"}
        assert record["candidates"] == [*sorted(candidates.split(",")), NONE]
        assert record["privacy"]["epsilon"] == 1
        assert accountant.ROUNDED in record["privacy"]["not_covered"]
        assert not {"values", "order", "scores"} & set(record)


def test_all_of_a_public_set_is_taken_unless_a_number_is_given(folder, capsys):
    for words, m in (([], 90), (["pair.m=40"], 40)):
        record = trained(capsys, "pair.public=same.npz", "pair.candidates=null", "epsilon_select=null", *words)
        note = f"same.npz: 60 public images from its test split, {m - 60}"
        assert any(line.startswith(note) for line in record["notes"]) == (m > 60)


@pytest.mark.parametrize("seed", range(5))
def test_few_features_have_as_many_regions_as_different_rows(seed):
    """With two centres in one place, private examples would be counted in one of them and public ones in the other."""
    draw = np.random.RandomState(seed)
    private, public = (torch.from_numpy(draw.randn(n, 3)).float() for n in (600, 300))
    each = coverage.scores(coverage.Private.of(private, None), {"like": public}, True)
    assert len(coverage.regions(public, "like").shares) == 2
    assert each["like"] > 0.85 * 600 * coverage.UNIT
