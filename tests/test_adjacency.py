"""Neighbours as they are stated: one unit is there, or counts as nothing, and the number of units stays. Each release
is attacked with the worst unit; and what is said of it in records, on cards and pages."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from pubsel.algorithms import View
from pubsel.algorithms.adassp import statistics
from pubsel.algorithms.class_shares import counted
from pubsel.algorithms.dppl import prototype_scores
from pubsel.algorithms.noisy_sgd import LOGISTIC, chances, signed_examples
from pubsel.algorithms.pillar import noisy_covariance
from pubsel.algorithms.whitened_head import centred
from pubsel.data import Split
from pubsel.distances.dp_gsd import unit
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.people import PeopleGradients
from pubsel.gradients.subspace import triangle
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT, weights_of
from pubsel.release import adversary, card, quality
from pubsel.selection import contributions, coverage, pool, probabilities
from pubsel.selection.coverage import Private
from tests.made import build, secret
from tests.test_coverage import examples

N, D = 12, 12  # units, features
NOTHING = math.nan  # in each feature of a unit that counts as nothing
NEAR = torch.cat([examples(0, 60), examples(1, 60)])


# Sensitivity


def selection_scores(scores):
    """Return the scores of two public sets and of none, in ones."""

    def of(x, people):
        private = Private.of(x, people)
        made = scores(private, {"a": examples(0, 60), "b": examples(1, 60)}, True)
        return torch.tensor([*made.values()], dtype=torch.float64) / UNIT

    return of


def histogram(x, people):
    clusters = pool.clusters_of(NEAR)
    return torch.tensor(coverage.counts(clusters, x, weights_of(people, len(x)))).double() / UNIT


def in_classes(x):
    return Split(x, torch.arange(len(x)) % 3)


def step_of(name):
    """Return the sum of a step of an algorithm."""
    model = torch.nn.Linear(D, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    engine = LinearGradients(model)
    mech = build(name, clip_norm=0.5).mechanism(View(model, engine, in_classes(NEAR), 3, False, secret), 0)

    def of(x, people):
        gradients = engine if people is None else PeopleGradients(engine, people)
        return sum(mech.clipped_sum(block) for block in gradients.blocks(*in_classes(x), rows=1))

    return of


def counts_and_mean(x, people):
    release = counted(centred(D, 100, 0.3, True), 3, 0.3, 0.4, -0.5)
    classes = torch.nn.functional.one_hot(torch.arange(len(x)) % 3, 3) * x.isfinite().all(1, keepdim=True)
    return release.clipped_sum(torch.cat([x, classes.to(x)], 1))


def second_moments(x, people):
    rows = unit(x)
    return triangle(rows.T @ rows)


def confusion(x, people):
    y = torch.where(x.isfinite().all(1), torch.arange(len(x)) % 3, -1)
    weights = torch.tensor(weights_of(people, len(x)))
    table = torch.from_numpy(quality.confusion(y, torch.arange(len(x)) % 2, 3, weights)) / UNIT
    return torch.cat([table.flatten(), table.trace()[None]])


SUMS = {  # by how much one unit may move it, and whether units may be people
    "choice by coverage": (selection_scores(coverage.scores), math.inf, 1.0, True),
    "histogram of a pool": (histogram, 1, 1.0, True),
    "sum of clipped gradients": (step_of("dp_sgd"), 2, 1.0, True),
    "sum of clipped differences": (step_of("dope_sgd"), 2, 1.0, True),
    "first release of dp_pca": (lambda x, people: noisy_covariance(NEAR, 2).clipped_sum(x), 2, 1.0, False),
    "private centre of whitened_head": (lambda x, people: centred(D, 100, 0.3, True).clipped_sum(x), 2, 1.0, False),
    "counts and centre of whitened_head": (counts_and_mean, 2, 1.0, False),
    "first release of dp_fc": (lambda x, people: build("dp_fc").frozen(None, D, secret).clipped_sum(x), 2, 1.0, False),
    "release of adassp": (lambda x, people: statistics(in_classes(x), 3), 2, math.sqrt(3), False),
    "scores of dppl_public": (
        lambda x, people: prototype_scores(in_classes(x), NEAR, 3, 0.0, 1.0) / UNIT,
        math.inf,
        1.0,
        False,
    ),
    "second moments of dp_gsd": (second_moments, 2, 1.0, False),
    "counts of held-out units": (confusion, 2, math.sqrt(2), True),
}


@pytest.mark.attack
@pytest.mark.parametrize("name", SUMS)
def test_a_unit_that_counts_as_nothing_moves_a_release_by_no_more_than_it_declares(name):
    """Of one and of several examples; what is compared has the same length."""
    release, order, bound, of_people = SUMS[name]
    reached = 0.0
    for many in (1, 4) if of_people else (1,):
        sizes = torch.tensor([1] * (N - 1) + [many])
        people = sizes if many > 1 else None
        others = torch.cat([examples(0, 6), examples(2, N - 7)])
        for worst in (examples(0, 1), examples(1, 1), 1e15 * examples(0, 1), 1e-15 * examples(1, 1)):
            there = torch.cat([others, worst.expand(many, -1)])
            nothing = torch.cat([others, torch.full((many, D), NOTHING)])
            move = release(there, people) - release(nothing, people)
            assert move.isfinite().all()
            reached = max(reached, float(move.flatten().norm(order)))
    assert 0.5 * bound < reached <= bound * (1 + accountant.ROUNDING)


def test_a_score_by_coverage_moves_by_one_only_if_their_number_stays():
    """Whatever the other units fill, and wherever the unit lies: with one more in number, the shares grow as well."""
    n, places = 20, SimpleNamespace(shares=[1] * 10)
    most, grown = 0, 0
    for filled in itertools.product((0, 1, 5), (1, 3), (2, 3)):
        others = [int(many * UNIT) for many in (*filled, *[filled[-1]] * 7)]
        for region in range(10):
            more = [many + UNIT * (place == region) for place, many in enumerate(others)]
            before = coverage.score(places, others, n)
            moved = coverage.score(places, more, n) - before
            assert 0 <= moved <= UNIT
            most, grown = max(most, moved), max(grown, coverage.score(places, more, n + 1) - before)
    assert most == UNIT
    assert grown > 1.89 * UNIT


def test_an_example_without_a_gradient_moves_no_choice():
    """It adds the same to all candidates, as one that adds nothing does; any other one adds up to 1 more to some."""
    (nothing,) = contributions(torch.full((1, 3), NOTHING), 0.1).tolist()
    assert len(set(nothing)) == 1
    (worst,) = contributions(torch.tensor([[1.0, 0.0, 0.5]]), 0.1).tolist()
    moves = [more - less for more, less in zip(worst, nothing, strict=True)]
    assert max(moves) - min(moves) == UNIT
    for epsilon, others in itertools.product((0.3, 2.0), ([0, 0, 0], [3, 1, 2])):
        there, gone = (
            probabilities([UNIT * other + add for other, add in zip(others, adds, strict=True)], epsilon)
            for adds in (worst, nothing)
        )
        assert np.abs(np.log(there / gone)).max() <= epsilon * (1 + 1e-9)


def test_a_row_that_counts_as_nothing_moves_the_choice_of_a_halfspace_by_no_more_than_epsilon():
    random, epsilon = np.random.default_rng(0), 1.5
    candidates = np.array([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0]])
    x, y = random.standard_normal((N, 3)), np.ones(N)
    reached = 0.0
    for row in ([1.0, 0, 0], [-1, 0, 0], [0, 1e9, 0]):
        x[-1] = NOTHING
        gone = chances(signed_examples(x, y), candidates, LOGISTIC, epsilon)
        x[-1] = row
        there = chances(signed_examples(x, y), candidates, LOGISTIC, epsilon)
        reached = max(reached, float(np.abs(np.log(there / gone)).max()))
    assert 0.3 * epsilon < reached <= epsilon


# One that is exchanged for another


def test_an_exchange_is_bounded_by_twice_mu():
    """The best test of N(-mu, 1) and N(mu, 1): what one unit adds, or another one that adds the opposite."""
    for mu, delta in itertools.product((0.2, 1.0), (1e-6, 1e-3)):
        epsilon = accountant.gaussian_epsilon(mu, delta)
        part = {"accountant": "exact Gaussian", "noise_multiplier": 3 / mu, "rate": 1, "steps": 9}
        part |= {"epsilon": epsilon, "delta": delta}
        bounds = adversary.exchanged([part])
        assert adversary.success(*bounds) == pytest.approx(norm.cdf(mu))
        assert accountant.gaussian_delta(bounds.epsilon, 2 * mu) == pytest.approx(delta)
        assert epsilon < bounds.epsilon
        assert 2 * accountant.gaussian_delta(0, mu) >= bounds.variation

        # Of Poisson samples nothing but a group of two is known.
        sampled = part | {"accountant": "PRV upper bound", "rate": 0.1, "noise_multiplier": 1.0, "steps": 50}
        assert adversary.exchanged([sampled])[:2] == pytest.approx(adversary.of_group(epsilon, delta, 2))


def test_an_exchange_at_a_choice_is_bounded_by_twice_epsilon():
    for epsilon in (0.1, 1.0):
        choice = accountant.pure(epsilon, 1.0, 1, "permute-and-flip")._asdict()
        bounds = adversary.exchanged([choice])
        reached = 0.0
        for one, other in itertools.product(itertools.product((0, UNIT), repeat=2), repeat=2):
            for ahead in (0, UNIT, 3 * UNIT):
                a, b = (probabilities([first + ahead, second], epsilon) for first, second in (one, other))
                assert np.abs(np.log(a / b)).max() <= bounds.epsilon + 1e-9
                reached = max(reached, float(np.abs(a - b).sum() / 2))
        assert 0.6 * bounds.variation < reached <= bounds.variation
        together = adversary.exchanged([choice, choice])
        assert together[:2] == pytest.approx((4 * epsilon, 0))


# What is said


def test_records_say_what_neighbours_are():
    plan = accountant.pure(1.0, 1.0, 1, "permute-and-flip")
    training = accountant.statement(plan, 1.0, True, False, examples=9, unit="patient")
    held = accountant.measurement_statement("It is", plan, True, 9, kind="held-out")
    assert training["adjacency"] == (
        "one person with all their training examples (those with one patient) is there, or counts as nothing; the "
        "number of people and that of all training examples are known"
    )
    assert held["adjacency"] == (
        "one held-out example is there, or counts as nothing; the number of held-out examples is known"
    )
    for privacy in (training, held):
        (public,) = [line for line in privacy["not_covered"] if "treated as public" in line]
        for words in ("number of", "shape", "number and names of their classes"):
            assert words in public


@pytest.mark.parametrize(
    ("unit", "pair", "drawn"),
    [
        (None, {"validation": 0.1, "overlap": "leave"}, False),  # each is held out by its own pixels
        (None, {"validation": 0.1}, True),
        ("patient", {"validation": 0.1, "overlap": "leave"}, True),
        ("patient", {}, False),
        (None, {"private_share": 0.5, "overlap": "leave"}, True),
        (None, {"take": "train"}, True),
    ],
)
def test_a_folder_says_that_sides_are_drawn_where_one_more_would_move_others(unit, pair, drawn):
    taken = "digits" if "take" in pair else None
    record = {"settings": {"pair": pair | {"public": taken}, "model": {"name": "linear"}}, "privacy": {"unit": unit}}
    record |= {"public": taken, "public_labels": "of the private set", "private": "digits"}
    (public,) = [line for line in card.not_covered(record) if "treated as public" in line]
    who = "person" if unit else "example"
    assert (f"one {who} more or fewer on the list of all would change for others" in public) is drawn
    assert f"which {'people' if unit else 'examples'} were used for training" in public


def test_no_page_or_card_speaks_of_one_more_or_less():
    """The number is printed, so whoever knows all others could count."""
    for name in ("privacy.html", "card.md"):
        assert not re.findall(r"more or less|additional|adding or removing", (card.HERE / name).read_text())
