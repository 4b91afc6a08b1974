"""DPPL-Public: the scores of prototypes, and the exponential mechanism that chooses them."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax

from pubsel.algorithms import dppl
from pubsel.algorithms.dppl import exponential, prototype_scores
from pubsel.cli import main
from pubsel.data import Split
from pubsel.messages import UsageError
from pubsel.privacy.accountant import ROUNDING
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import SystemEntropy, stream
from tests.made import build, hurtful, secret, write_npz
from tests.test_adassp import C, examples, joined, unit
from tests.test_pillar import TINY, features, folder  # noqa: F401

PUBLIC = unit(torch.cat([features(20, 6, seed=5), torch.eye(6), -torch.eye(6)]))
NOTHING = torch.full((1, 6), math.nan)


# Sensitivity


@pytest.mark.attack
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.2, 0.5)])
def test_one_example_adds_between_0_and_1_to_the_scores_for_its_class_alone(low, high):
    others, most, least = examples(30), 0, UNIT
    without = prototype_scores(joined(others, Split(NOTHING, torch.tensor([0]))), PUBLIC, C, low, high)
    assert torch.equal(without, prototype_scores(others, PUBLIC, C, low, high))
    for row in torch.cat([hurtful(6), unit(hurtful(6)), PUBLIC]).split(1):
        for label in range(C):
            moved = prototype_scores(joined(others, Split(row, torch.tensor([label]))), PUBLIC, C, low, high) - without
            assert not moved[torch.arange(C) != label].any()
            assert (moved >= 0).all()
            most, least = max(most, int(moved.max())), min(least, int(moved[label].min()))
    assert (1 - 1e-4) * UNIT < most <= UNIT
    assert least == 0


@pytest.mark.attack
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_the_choice_is_private_and_its_bound_is_reached(epsilon):
    """The largest change of a log probability: of a row that is near one public example, and of none."""
    others, worst = Split(unit(features(3, 6)), torch.zeros(3)), 0.0

    def logs(of):
        return np.log(softmax(epsilon * prototype_scores(of, PUBLIC, 1, 0.0, 1.0)[0].numpy() / UNIT))

    before = logs(others)
    for row in PUBLIC.split(1):
        worst = max(worst, np.abs(logs(joined(others, Split(row, torch.zeros(1)))) - before).max())
    assert 0.5 * epsilon < worst <= epsilon


def test_scores_are_sums_of_clipped_cosines(monkeypatch):
    some = examples(50)
    cosines = (some.x.double() @ PUBLIC.double().T - 0.1).clamp(0, 0.4) / 0.4
    want = torch.stack([cosines[some.y == c].sum(0) for c in range(C)])
    monkeypatch.setattr(dppl, "ENTRIES", 100)
    found = prototype_scores(some, PUBLIC, C, 0.1, 0.5).double() / UNIT
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-2)


# Choice


@pytest.mark.parametrize("make", [lambda: stream("test", "choice"), SystemEntropy], ids=["seeded", "system"])
def test_the_exponential_mechanism_draws_with_its_probabilities(make):
    values, epsilon, source = [0, UNIT, 3 * UNIT, 2 * UNIT // 3], Fraction(3, 4), make()
    counts = np.bincount([exponential(values, epsilon, source) for _ in range(4000)], minlength=4)
    assert stats.chisquare(counts, 4000 * softmax(0.75 * np.array(values) / UNIT)).pvalue > 1e-6


def test_each_class_has_one_choice_with_all_of_epsilon(monkeypatch):
    """They are of other examples. Less what rounding may add."""
    asked = []
    monkeypatch.setattr(dppl, "exponential", lambda scores, epsilon, _: asked.append(epsilon) or 0)
    _, cost = build("dppl_public").solve(examples(30), Split(PUBLIC, None), C, 0.5, 1e-5, secret("solve", 0))
    assert (cost.epsilon, cost.delta, cost.steps) == (0.5, 0.0, 1)
    assert float(asked[0]) == pytest.approx(0.5 / (1 + ROUNDING + 60 / UNIT), rel=1e-9)
    assert asked[0] <= 0.5
    assert len(asked) == C


def test_with_much_epsilon_prototypes_are_the_most_similar_public_examples():
    """Their labels are not read; one that is not finite is never the best."""
    centres, y = torch.eye(6)[:C], torch.arange(300) % C
    x = unit(centres[y] + 0.3 * features(300, 6).sign() * torch.rand(300, 6))
    public = torch.cat([torch.full((1, 6), math.nan), -centres, unit(centres + 0.1), unit(centres - 0.8)])
    weight, _ = build("dppl_public").solve(Split(x, y), Split(public, None), C, 50.0, 1e-5, secret("solve", 0))
    torch.testing.assert_close(weight, unit(centres + 0.1), rtol=1e-4, atol=1e-4)
    assert ((x @ weight.T).argmax(1) == y).double().mean() > 0.95


def test_a_class_without_private_examples_has_any_prototype():
    drawn = [
        build("dppl_public").solve(Split(PUBLIC[:1], torch.zeros(1)), Split(PUBLIC, None), 2, 9.0, 0, secret("s", i))
        for i in range(30)
    ]
    assert len({tuple(weight[1].tolist()) for weight, _ in drawn}) > 10


def test_the_ledger_has_no_delta(folder, capsys):  # noqa: F811
    assert main(["run", "algorithm=dppl_public", *TINY]) == 0, capsys.readouterr().err
    (ledger,) = Path("results/ledger").glob("*.jsonl")
    (entry,) = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert (entry["epsilon"], entry["delta"]) == (2, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["epsilon=inf"], "epsilon=inf: algorithm=dppl_public plans its noise by epsilon: give a number"),
        (["algorithm.low=1"], "algorithm.low=1.0: must be less than 1"),
        (["pair.public=null"], "algorithm=dppl_public needs public data"),
        (
            ["pair.private=labels.npz", "pair.public=labels.npz"],
            "algorithm=dppl_public learns one class of each example, not several labels",
        ),
    ],
)
def test_what_cannot_end_well_is_refused_before_anything_is_spent(words, says, folder, capsys):  # noqa: F811
    draw = np.random.RandomState(0)
    x, y = draw.randint(256, size=(120, 6, 6)).astype(np.uint8), draw.randint(2, size=(120, 4))
    write_npz("labels.npz", (x[:60], y[:60]), (x[60:], y[60:]))
    assert main(["run", "algorithm=dppl_public", *TINY, *words]) != 0
    assert says in capsys.readouterr().err
    assert not Path("results/ledger").exists()


def test_bounds_that_leave_nothing_are_refused():
    with pytest.raises(UsageError, match=r"algorithm\.low=0.5: give a number below algorithm\.high=0.5"):
        build("dppl_public", low=0.5, high=0.5).account(10, 1.0, 1e-5)
    with pytest.raises(UsageError, match="algorithm=dppl_public needs public data"):
        build("dppl_public").frozen(None, 6, secret)
