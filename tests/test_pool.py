"""Public examples chosen privately from a pool: the release attacked, what follows from it, and training with it."""

import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_coverage import saved, trained, worst

from pubsel.algorithms import roots
from pubsel.cli import main
from pubsel.data.embeddings import feature_rows
from pubsel.messages import UsageError
from pubsel.privacy import accountant, ledger
from pubsel.privacy.people import UNIT, weights_of
from pubsel.privacy.randomness import Secret, SystemEntropy, stream
from pubsel.selection import assigned, pool
from pubsel.selection.coverage import Private, counts
from tests.made import interrupted, secret


def examples(kind, n, d=12, seed=0):
    """Features of one of several kinds: each varies in other directions, around another mean."""
    rows = torch.from_numpy(np.random.RandomState(100 * seed + 7 * kind + n).randn(n, d))
    wide = torch.where(torch.arange(d) % 4 == kind, 5.0, 0.3)
    return (rows * wide + 20 * torch.roll(torch.arange(d, dtype=torch.double), 3 * kind)).float()


def mixed(*many):
    """Return a pool of so many examples of each kind, and the kind of each."""
    x = torch.cat([examples(kind, n) for kind, n in enumerate(many)])
    return x, np.repeat(np.arange(len(many)), many)


def sums(clusters, x, people=None):
    return counts(clusters, x, weights_of(people, len(x)))


# Sensitivity


@pytest.mark.parametrize("many", [(40, 40), (300, 300, 300), (5, 600, 20)])
def test_one_example_more_adds_at_most_one_to_one_count(many):
    clusters = pool.clusters_of(mixed(*many)[0])
    rows = torch.cat([worst(examples(0, 40, seed=1)[0]), *(examples(kind, 30, seed=2) for kind in range(3))])
    changes = np.array([sums(clusters, row[None]) for row in rows])
    assert changes.min() == 0
    assert np.count_nonzero(changes, axis=1).max() == 1
    assert {*changes.sum(1)} == {0, UNIT}  # none, or the bound


@pytest.mark.parametrize("many", [1, 2, 3, 7, 500])
def test_a_person_adds_at_most_one_in_all(many):
    clusters = pool.clusters_of(mixed(200, 200, 200)[0])
    theirs = torch.cat([examples(kind, many, seed=3) for kind in range(3)])
    x = torch.cat([examples(0, 10, seed=4), theirs])
    people = torch.tensor([1] * 10 + [len(theirs)])
    change = np.array(sums(clusters, x, people)) - np.array(sums(clusters, x[:10], people[:10]))
    assert change.min() >= 0
    assert UNIT // 2 <= change.sum() <= UNIT
    assert np.count_nonzero(change) > 1

    equal = next(row for row in x if sum(sums(clusters, row[None]))).repeat(many, 1)
    assert UNIT - many < max(sums(clusters, equal, torch.tensor([many]))) <= UNIT


def test_the_cluster_of_an_example_does_not_depend_on_others():
    clusters = pool.clusters_of(mixed(200, 200, 200)[0])
    x = torch.cat([*(examples(kind, 20, seed=5) for kind in range(3)), worst(examples(0, 1)[0])])
    alone = sum(np.array(sums(clusters, row[None])) for row in x)
    assert sums(clusters, x) == alone.tolist()
    assert sums(clusters, x.flip(0)) == alone.tolist()


# The noise


def lower_bound(release, before, after, draws):
    """Return the epsilon that releases of two neighbours show, at a confidence of 99.9 % by event: Clopper-Pearson."""
    from scipy.stats import beta

    a, b = (np.array([release(sums) for _ in range(draws)])[:, 0] for sums in (before, after))
    bounds = [0.0]
    for edge in np.quantile(b, [0.5, 0.8, 0.9, 0.95, 0.99]):
        more, less = int((b >= edge).sum()), int((a >= edge).sum())
        low = beta.ppf(0.001, more, draws - more + 1)
        high = beta.ppf(0.999, less + 1, draws - less)
        bounds.append(math.log(low / high))
    return max(bounds)


def test_neighbours_are_told_apart_no_better_than_claimed():
    epsilon = 1.0
    plan, source = accountant.pure(epsilon, 1.0, 1, "discrete Laplace"), stream("test", "attack")
    before, after = [3 * UNIT], [4 * UNIT]
    bound = lower_bound(lambda sums: pool.noisy_counts(sums, plan, source), before, after, 4000)
    assert 0.7 < bound < epsilon  # close to what is claimed, and below

    wrong = plan._replace(noise_multiplier=plan.noise_multiplier / 2)
    assert lower_bound(lambda sums: pool.noisy_counts(sums, wrong, source), before, after, 4000) > epsilon


def test_the_operating_systems_entropy_serves():
    plan = accountant.pure(1.0, 1.0, 1, "discrete Laplace")
    drawn = pool.noisy_counts([5 * UNIT] * 20, plan, SystemEntropy())
    assert len({*drawn}) > 1
    assert all(abs(count - 5) < 60 for count in drawn)


def test_noise_hides_parts_of_an_example_too():
    """A person's examples add any part of one, which noise of whole ones would leave to be read off."""
    plan = accountant.pure(1.0, 1.0, 1, "discrete Laplace")
    drawn = pool.noisy_counts([UNIT // 3] * 300, plan, stream("test", "parts"))
    assert len({round(count % 1, 1) % 1 for count in drawn}) == 10


# Clusters


def test_clusters_hold_one_kind_each_and_other_kinds_are_in_none():
    x, kinds = mixed(400, 400)
    clusters = pool.clusters_of(x)
    nearest = clusters.nearest(x)
    pure = [max(np.mean(kinds[nearest == c] == kind) for kind in (0, 1)) for c in set(nearest)]
    assert np.mean(pure) > 0.99

    inside = [sum(sums(clusters, examples(kind, 100, seed=6))) / UNIT for kind in range(3)]
    assert inside[0] > 80
    assert inside[1] > 80
    assert inside[2] < 20


def test_an_example_goes_to_the_nearest_centre_as_the_pools_do():
    x, _ = mixed(100, 100, 100)
    clusters = pool.clusters_of(x)
    places = [clusters.of(roots(row.double()).numpy()) for row in x]
    agree = [place == nearest for place, nearest in zip(places, clusters.nearest(x), strict=True) if place is not None]
    assert np.mean(agree) == 1
    assert len(agree) >= 0.9 * len(x)


def test_equal_examples_are_no_pool():
    with pytest.raises(UsageError, match=r"the features of all its examples are the same"):
        pool.clusters_of(torch.ones(50, 4))


@pytest.mark.parametrize("d", [1, 3, 200])
def test_features_of_any_width_make_clusters(d):
    x = torch.from_numpy(np.random.RandomState(0).randn(60, d))
    clusters = pool.clusters_of(x)
    assert sum(clusters.shares) == 60
    assert sum(sums(clusters, x)) >= 0.8 * 60 * UNIT


# What follows from the release


def test_only_clusters_above_the_noise_have_a_share():
    noisy, plan = [600.0, 300.0, 5.0, -8.0], pool.plan_of(0.1, False)
    assert pool.shares(noisy, 1000, plan, False) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert np.count_nonzero(pool.shares(noisy, 1000, pool.plan_of(1.0, False), False)) == 3
    assert pool.shares([1.0, -5.0], 1000, plan, False) == pytest.approx([0.5, 0.5])  # all may be noise


def test_clusters_of_a_part_of_the_private_examples_are_not_used_unless_something_must_be():
    noisy, plan = [300.0, 200.0, 5.0, -8.0], pool.plan_of(0.1, True)
    assert pool.shares(noisy, 1000, plan, True) is None
    assert pool.shares(noisy, 1000, plan, False) == pytest.approx([0.6, 0.4, 0, 0])
    assert pool.shares(noisy, 800, plan, True) == pytest.approx([0.6, 0.4, 0, 0])


@pytest.mark.parametrize(("many", "used"), [((300, 300), True), ((0, 300, 300), False), ((4, 600), False)])
def test_what_is_drawn_is_used_if_it_is_of_the_private_kind(many, used):
    x, _ = mixed(*many)
    clusters = pool.clusters_of(x)
    nearest = clusters.nearest(x)
    private = Private.of(examples(0, 500, seed=7), None)
    noisy = pool.histogram(1.0, private, clusters, True, secret)
    wanted = pool.shares(noisy, 500, pool.plan_of(1.0, True), True)
    drawn = None
    if wanted is not None:
        drawn = x[torch.from_numpy(pool.draw_by_cluster(wanted, nearest, 100, stream("test", "draw")))]
    assert pool.covered(1.0, drawn, private, secret) == used

    spend = pool.pool_cost(1.0, True)
    assert spend.epsilon == spend.claimed_epsilon == 1
    assert spend.noise_multiplier == pytest.approx(2)  # half of epsilon each


def test_all_of_epsilon_is_the_histograms_if_public_data_must_be_used():
    spend = pool.pool_cost(1.0, False)
    assert spend.epsilon == spend.claimed_epsilon == 1
    assert spend.noise_multiplier == pytest.approx(1)
    private = Private.of(examples(0, 500, seed=7), None)
    clusters = pool.clusters_of(mixed(0, 300)[0])
    drawn = partial(pool.histogram, 1.0, private, clusters, secret=lambda *_: SystemEntropy())
    half, whole = ([drawn(with_none=with_none) for _ in range(30)] for with_none in (True, False))
    assert np.std(half, axis=0).mean() > 1.3 * np.std(whole, axis=0).mean()  # twice, less the error of 30 draws


def test_a_draw_has_the_shares_and_no_example_twice():
    nearest = np.repeat([0, 1, 2], [1000, 500, 30])
    places = pool.draw_by_cluster(np.array([0.5, 0.0, 0.5]), nearest, 200, stream("test", "draw"))
    assert len(set(places)) == len(places) == 130
    assert np.bincount(nearest[places], minlength=3).tolist() == [100, 0, 30]
    assert (np.diff(places) < 0).any()  # in random order


@pytest.mark.parametrize(("clusters", "m"), [(400, 20), (400, 150), (400, 250), (62, 100), (3, 100)])
def test_a_draw_has_as_many_as_asked_for_whatever_the_number_of_clusters(clusters, m):
    nearest = np.repeat(np.arange(clusters), 200)
    places = pool.draw_by_cluster(np.full(clusters, 1 / clusters), nearest, m, stream("test", "draw"))
    assert len(places) == m
    many = np.bincount(nearest[places], minlength=clusters)
    assert many.max() - many.min() <= 1


def test_no_stream_is_drawn_from_twice(folder, capsys, monkeypatch):
    """Histogram, choice, and each step of the training, of which any two that share their noise would show it."""
    call, asked = Secret.__call__, list[tuple]()
    monkeypatch.setattr(Secret, "__call__", lambda self, *of: asked.append((self.key, *of)) or call(self, *of))
    chosen(capsys, "pair.pool=[mixed.npz]")
    assert [of for of in set(asked) if asked.count(of) > 1] == []
    assert len(asked) > 30


def test_equal_examples_that_were_drawn_are_not_used():
    x = examples(0, 500, seed=7)
    assert not pool.covered(1.0, x[:1].repeat(50, 1), Private.of(x, None), secret)
    assert not pool.covered(1.0, None, Private.of(x, None), secret)
    assert not pool.covered(1.0, x[:19], Private.of(x, None), secret)
    assert pool.covered(1.0, examples(0, 300, seed=8), Private.of(x, None), secret)


def test_rows_of_several_sets_come_in_the_order_asked_for():
    x = torch.arange(24.0).reshape(12, 2)
    parts = [pool.Features(x[:5]), pool.Features(x[5:6]), pool.Features(x[6:])]
    places = np.array([11, 0, 5, 4, 6, 3])
    assert torch.equal(feature_rows(parts, places), x[torch.from_numpy(places)])
    assert pool.sample_of(parts, stream("test", "sample")).shape == (12, 2)


# Training with it


@pytest.fixture
def folder(tmp_path, folder):
    """Private images, and two public sets: one of three quarters other images, and one of others alone."""
    for name, seed, alike, n in (("private", 0, 1.0, 400), ("mixed", 1, 0.25, 240), ("other", 2, 0.0, 240)):
        draw = np.random.RandomState(seed)
        labels = draw.randint(3, size=n)
        images = draw.randint(0, 60, (n, 6, 6))
        images[:, :3] += (150 * (labels[:, None, None] == np.arange(3)[None, :, None])).astype(images.dtype)
        other = draw.rand(n) >= alike
        images[other] = draw.randint(0, 250, (n, 6, 6))[other] * (draw.rand(n, 1, 6) > 0.5)[other]
        saved(name, images, labels)
    return tmp_path


CHOOSE = """pair.private=private.npz pair.public=pool pair.pool=[mixed.npz,other.npz] epsilon_select=1 model=pixels
    algorithm=whitened_head distance=none epsilon=3 privacy.delta=1e-3 download=false threads=1""".split()
chosen = partial(trained, choose=CHOOSE)


def test_a_run_draws_what_is_like_the_private_images_and_states_both(folder, capsys):
    record = chosen(capsys)
    drawn = record["pool"]["examples"]
    assert record["public"] == "pool"
    assert drawn["mixed.npz"] >= 40  # of 60 that are alike
    assert drawn["other.npz"] <= 30  # of 240
    assert record["public_labels"] == "of another set"
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=1e-3)
    assert [part["what"] for part in record["privacy"]["parts"]] == ["selection of the public examples", "training"]
    stated = "The choice of the public examples (by a noisy histogram) and the trained weights are ("
    assert record["privacy"]["statement"].startswith(stated)
    assert any("last digits" in text for text in record["privacy"]["not_covered"])
    (lines,) = ledger.ledgers("results")
    assert {line["what"]: round(line["epsilon"], 5) for line in lines} == {"choice": 1, "training": 3}


def once(function):
    """The function, which answers as it did the first time."""
    answers = []

    def same(*of):
        if not answers:
            answers.append(function(*of))
        return answers[0]

    return same


def test_another_pool_has_other_noise_even_if_its_clusters_are_the_same(folder, capsys, monkeypatch):
    """A large pool has examples that no sample contains, and that decide the choice after the histogram."""
    call, keys = Secret.__call__, set[str]()
    monkeypatch.setattr(Secret, "__call__", lambda self, *of: keys.add(self.key) or call(self, *of))
    for name in ("clusters_kept", "nearest_of"):
        monkeypatch.setattr(assigned, name, once(getattr(assigned, name)))
    chosen(capsys)
    before = set(keys)
    keys.clear()

    with np.load("other.npz") as values:
        arrays = dict(values)
    arrays["train_images"][0] ^= 1
    np.savez("other.npz", **arrays)
    shutil.rmtree("results")
    chosen(capsys)
    assert not before & keys
    assert len(before) == len(keys) >= 2


def test_a_run_trains_without_public_data_if_the_pool_has_other_kinds_only(folder, capsys):
    record = chosen(capsys, "pair.pool=[other.npz]")
    assert record["public"] is record["public_labels"] is None
    assert record["pool"]["examples"] == {"other.npz": 0}
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=1e-3)


def test_people_are_counted_once(folder, capsys):
    record = chosen(capsys, "pair.unit=whose", "epsilon_select=2")
    assert record["private_units"] == 170
    assert sum(record["pool"]["histogram"]) < 200
    assert record["pool"]["examples"]["mixed.npz"] > 20


def test_the_order_of_the_sets_does_not_change_the_run(folder, capsys):
    assert chosen(capsys)["weights"] == chosen(capsys, "pair.pool=[other.npz,mixed.npz]")["weights"]
    assert len(list(Path("results/runs").glob("*"))) == 1


def test_an_algorithm_that_needs_public_data_gets_some(folder, capsys):
    record = chosen(capsys, "algorithm=pillar", "training=head", "algorithm.k=5", "pair.pool=[other.npz]")
    assert record["pool"]["examples"]["other.npz"] > 0
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("pubsel.release.run.prepare", KeyboardInterrupt),
        ("pubsel.selection.pool.covered", KeyboardInterrupt),
        ("pubsel.selection.pool.covered", UsageError("of what follows")),
    ],
)
def test_a_run_that_was_stopped_draws_no_second_histogram(folder, capsys, monkeypatch, at, error):
    """After the choice, or between histogram and choice."""

    def stop(*_):
        raise error

    secure = ("privacy.secure_noise=true",)
    monkeypatch.setattr(at, stop)
    main(["run", *CHOOSE, *secure])
    (kept,) = Path("results/runs").glob("*/histogram.pt")
    first = torch.load(kept)["drawn"]["noisy"]
    assert (kept.parent / "log.txt").exists()  # something was spent
    monkeypatch.undo()
    monkeypatch.chdir(folder)

    assert chosen(capsys, *secure)["pool"]["histogram"] == first
    assert not kept.exists()
    (lines,) = ledger.ledgers("results")
    assert [line["what"] for line in lines].count("choice") == 1


@pytest.mark.attack
def test_a_second_choice_is_in_the_ledger(folder, capsys, monkeypatch):
    """Which of the two files somebody deletes to have another one drawn does not matter."""
    secure = ("privacy.secure_noise=true",)
    monkeypatch.setattr("pubsel.release.run.prepare", interrupted)
    for n, name in enumerate(["selection.pt", "histogram.pt", "no.pt"], 1):
        assert main(["run", *CHOOSE, *secure]) == 130
        (lines,) = ledger.ledgers("results")
        assert [line["what"] for line in lines].count("choice") == n
        (run,) = Path("results/runs").iterdir()
        (run / name).unlink(missing_ok=True)
        if name == "histogram.pt":
            (run / "selection.pt").unlink()
        capsys.readouterr()


def test_a_finished_run_is_found_again_with_the_examples_that_it_drew(folder, capsys):
    record = chosen(capsys)
    assert main(["attack", "attack=loss", f"run={record['identity']}", "threads=1"]) == 0, capsys.readouterr().err
    assert main(["predict", f"results/runs/{record['identity']}", "private.npz", "to=a.csv"]) == 0
    capsys.readouterr()
    assert Path("a.csv").read_text().count("\n") > 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=linear", "algorithm=dp_md"], "pair.public=pool: compares features: set model.backbone"),
        (["epsilon_select=null"], "pair.pool=[A,B,...] and epsilon_select=... belong together: give all"),
        (["pair.pool=null"], "pair.public=pool, pair.pool=[A,B,...] and epsilon_select=... belong together: give all"),
        (["pair.public=mixed.npz", "pair.m=50"], "belong together"),
        (["pair.pool=[mixed.npz,mixed.npz]"], "pair.pool=[mixed.npz,mixed.npz]: give each set once"),
        (["pair.take=train", "pair.m=30"], "pair.public=pool: its examples are of other sets or test images"),
        (["pair.pool=[private.npz]"], "pair.pool_m=null: private.npz is the private set"),
        (["pair.pool=[mixed.npz]", "pair.pool_m=39"], "pair.pool: 39 examples are too few for a pool: give 40"),
        (["pair.m=19"], "pair.m=19: too few to see whether they are of the private kind: give 20 or more"),
        (["privacy.delta=0.5"], "privacy.delta=0.5 is above 1/n"),
        (["algorithm.public_labels=given"], "algorithm.public_labels=given needs public labels of the private task"),
        (["algorithm=dope_sgd"], "algorithm=dope_sgd needs public labels of the private task"),
        (["pair.pool=[nothing.npz]"], "nothing.npz: no such file"),
    ],
)
def test_what_does_not_fit_together_is_named(words, message, folder, capsys):
    assert main(["run", *CHOOSE, *words]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not ledger.ledgers("results")


def test_images_of_the_private_set_may_be_in_the_pool_and_leave_the_test_set(folder, capsys):
    record = chosen(capsys, "pair.pool=[private.npz,other.npz]", "pair.pool_m=40")
    assert record["test_examples"] == 20
    assert record["pool"]["examples"].keys() == {"private.npz", "other.npz"}
