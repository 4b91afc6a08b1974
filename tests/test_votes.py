"""The private choice of a public set by votes: its sensitivity attacked, ties, and what it chooses."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.algorithms import roots
from pubsel.messages import UsageError
from pubsel.privacy.people import UNIT, weights_of
from pubsel.privacy.randomness import SystemEntropy
from pubsel.selection import coverage, probabilities, votes
from pubsel.selection.coverage import NONE, Private
from tests.test_coverage import WORST, assert_as_often, examples, secret

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def candidates():
    """Two sets of one kind, one of another."""
    mixed = torch.cat([examples(0, 190), examples(1, 10)])[torch.from_numpy(np.random.RandomState(0).permutation(200))]
    return {"a": examples(0, 200), "b": mixed, "c": examples(1, 150)}


def scored(candidates, x, people=None, n=None):
    units = n or (len(x) if people is None else len(people))
    return votes.scores(Private(x, weights_of(people, len(x)), units), candidates, True)


def choose(private, candidates):
    return coverage.select(1.0, private, None, candidates, True, secret, votes.scores)


# Sensitivity


def rises(before, after):
    return [after[name] - before[name] for name in (*NAMES, NONE)]


def test_one_example_more_raises_each_score_by_at_most_one_and_lowers_none(candidates):
    x = examples(0, 40)
    worst = [torch.full((12,), value) for value in WORST]
    worst += [torch.where(torch.arange(12) == i, value, x[0]) for i in (0, 11) for value in WORST]
    seen = set()
    for others in (x[:0], x):
        before = scored(candidates, others, n=41)
        for row in [*worst, *examples(0, 10), *examples(1, 10), *examples(2, 3)]:
            some = rises(before, scored(candidates, torch.cat([others, row[None]]), n=41))
            assert min(some) >= 0
            assert max(some) <= UNIT
            seen.update(some)
    assert seen >= {0, UNIT * 3 // 4, UNIT}  # the bound is reached


@pytest.mark.parametrize("many", [1, 3, 7, 500])
def test_a_person_raises_each_score_by_at_most_one(candidates, many):
    others = examples(0, 30)
    before = scored(candidates, others, torch.tensor([1] * 30), 31)
    for of_person in (examples(0, many), examples(1, many), examples(0, 1).expand(many, -1)):
        people = torch.tensor([1] * 30 + [many])
        some = rises(before, scored(candidates, torch.cat([others, of_person]), people, 31))
        assert min(some) >= 0
        assert max(some) <= UNIT


@pytest.mark.parametrize("likely", [(0.0, 0.0, 0.0), (1.0, 2.0, -math.inf), (math.nan, 1.0, math.inf), (math.nan,) * 3])
@pytest.mark.parametrize("explained", [[True] * 3, [False, True, False], [False] * 3])
def test_a_ballot_is_within_the_weight_whatever_the_likelihoods(likely, explained):
    for weight in (0, 1, 2, 5, UNIT // 3, UNIT):
        ballot = votes.ballot(np.array(likely), np.array(explained), weight)
        assert all(isinstance(vote, int) and 0 <= vote <= weight for vote in ballot)
        assert all(vote == 0 for vote, some in zip(ballot, explained, strict=True) if not some)


def test_the_vote_of_an_example_depends_on_no_other(candidates):
    """Bit for bit, however the examples lie in memory: far below the share of a region, scores are sums."""
    x = torch.cat([examples(0, 30), examples(1, 20)])
    alone = [scored(candidates, row[None], n=10**6) for row in x]
    together = {name: sum(each[name] for each in alone) for name in NAMES}
    strided = torch.stack([x, x], 2)[..., 0]
    for every in (x, strided, x.flip(0)):
        assert {name: scored(candidates, every, n=10**6)[name] for name in NAMES} == together
    places = votes.gaussians(candidates)
    rows = [*coverage.one_by_one(x)]
    assert len({places.of(rows[-1].copy()).tobytes() for _ in range(20)}) == 1


# What it chooses


def test_the_best_explanation_has_the_whole_vote_and_equal_ones_have_it_all(candidates):
    likely, explained = np.array([1.0, 3.0, 3.0, 9.0]), np.array([True, True, True, False])
    assert votes.ballot(likely, explained, 8) == [6, 8, 8, 0]
    twins = {"a": candidates["a"], "again": candidates["a"]}
    each = scored(twins, examples(0, 50))
    assert each["a"] == each["again"] > 0.7 * 50 * UNIT


def test_examples_are_most_likely_under_the_gaussian_of_their_kind():
    candidates = {str(kind): examples(kind, 300) for kind in range(3)}
    gaussians = votes.gaussians(candidates)
    for kind in range(3):
        likely = np.array([gaussians.of(row) for row in coverage.one_by_one(examples(kind, 100))])
        assert (likely.argmax(1) == kind).sum() > 95
        assert ((likely >= gaussians.least)[:, kind]).sum() > 85
    assert np.isnan(gaussians.of(np.full(12, math.nan))).all()


def test_of_two_sets_that_cover_alike_the_purer_one_is_ahead_by_more_than_in_coverage(candidates):
    private = examples(0, 500)
    every = Private(private, [UNIT] * 500, 500)
    ahead = [each["a"] - each["b"] for each in (f(every, candidates, True) for f in (votes.scores, coverage.scores))]
    assert ahead[0] > ahead[1] + 0.03 * 500 * UNIT
    name, plan = choose(private, candidates)
    assert (name, plan.epsilon, plan.delta) == ("a", 1.0, 0.0)


@pytest.mark.parametrize(("inside", "least", "expected"), [
    ((0, 0, 0), (0, 0, 0), (3, 4, 3)), ((0, None, 0), (0, 0, 0), (3, 0, 4)), ((0, 0, 0), (0, 9, 2.5), (4, 0, 0)),
    ((None, 0, None), (9, 9, 9), (0, 0, 0)),
])  # fmt: skip
def test_a_set_explains_what_lies_in_a_region_and_is_likely_enough(inside, least, expected, candidates, monkeypatch):
    """The second is the likeliest, then the third; in quarters of a vote."""
    places = {name: SimpleNamespace(shares=[1], of=lambda row, i=i: i) for name, i in zip(NAMES, inside, strict=True)}
    likely = SimpleNamespace(of=lambda row: np.array([1.0, 3.0, 2.0]), least=np.array(least))
    monkeypatch.setattr(votes, "regions", lambda public, name: places[name])
    monkeypatch.setattr(votes, "gaussians", lambda sets: likely)
    each = scored(candidates, examples(0, 1))
    assert [each[name] * 4 // UNIT for name in NAMES] == list(expected)


def test_likelihoods_are_those_of_normal_distributions(candidates):
    gaussian, row = votes.gaussians(candidates), next(coverage.one_by_one(examples(0, 1)))
    expected = [
        stats.multivariate_normal(mean, np.linalg.inv(whiten.T @ whiten)).logpdf(gaussian.place(row))
        for mean, whiten in zip(gaussian.means, gaussian.whiten, strict=True)
    ]
    np.testing.assert_allclose(np.diff(gaussian.of(row)), np.diff(expected), rtol=1e-6)


def test_each_set_counts_alike_however_many_examples_it_has():
    few, many = examples(0, 20), examples(1, 400)
    means = [roots(part.double()).numpy().mean(0) for part in (few[:10], many[:200])]
    np.testing.assert_allclose(votes.gaussians({"a": few, "b": many}).shift, np.mean(means, axis=0))


def test_how_likely_a_set_is_under_its_gaussian_is_told_by_the_half_that_did_not_make_it():
    first = examples(0, 200)
    least = [votes.gaussians({"a": torch.cat([first, other])}).least[0] for other in (examples(0, 190), 9 * first)]
    assert least[1] < least[0] - 5


def test_none_is_chosen_if_no_set_is_alike_and_parts_of_one_set_do_not_lose_to_it(candidates):
    assert choose(examples(2, 500), candidates)[0] == NONE
    every = examples(0, 900)
    parts = {f"part {i}": every[100 * i : 100 * i + 100] for i in range(9)}
    assert choose(examples(0, 1000), parts)[0] in parts


def test_names_come_out_as_often_as_the_scores_say(candidates):
    """And neighbours differ by at most e^epsilon."""
    private, epsilon = examples(0, 30), 0.5
    each = scored(candidates, private)
    expected = probabilities([*each.values()], epsilon)
    draw = (epsilon, private, None, candidates, True, lambda *_: SystemEntropy(), lambda *_: each)
    drawn = [coverage.select(*draw)[0] for _ in range(300)]
    assert_as_often(drawn, [*each], expected)
    without = probabilities([*scored(candidates, private[1:], n=30).values()], epsilon)
    assert np.abs(np.log(expected / without)).max() <= epsilon + 1e-9


def test_what_cannot_be_compared_is_named():
    with pytest.raises(UsageError, match="a: 19 public examples are too few to choose by: give 20 or more"):
        votes.gaussians({"a": examples(0, 19)})
    with pytest.raises(UsageError, match="b: its features are the same for all examples"):
        votes.gaussians({"a": examples(0, 50), "b": torch.ones(50, 5)})


@pytest.mark.parametrize("d", [1, 2, 3])
def test_few_features_and_few_examples_are_enough(d):
    candidates = {"a": examples(0, 20, d), "b": examples(1, 20, d) + 50}
    assert scored(candidates, examples(0, 40, d))["a"] > scored(candidates, examples(0, 40, d))["b"]
