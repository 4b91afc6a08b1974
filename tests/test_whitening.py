"""The distance `whitening`: its formula against gradient descent and the loss itself, hand-made candidates whose order
is known, and what changes nothing."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pubsel.algorithms import Facts
from pubsel.algorithms.dp_sgd import NOISE
from pubsel.algorithms.whitened_head import CLIP, MOMENTUM, ROW, WhitenedHead
from pubsel.data import Split
from pubsel.distances import NONE
from pubsel.distances.whitening import Descent, Learned, descent_of, learned, net_gain, residuals_of, unexplained
from pubsel.messages import UsageError
from pubsel.settings.keys import PublicLabels
from tests.synthetic import distance

D, C = 40, 4


def rows(n, r, seed=0):
    return torch.randn(n, r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def examples(n, first, seed, shift=1.5, d=D):
    """Features [n, d] that are noise, apart from `shift` in the column first + class."""
    y = torch.arange(n) % C
    x = 0.3 * rows(n, d, seed).float()
    x[torch.arange(n), first + y] += shift
    return Split(x, y)


def measured(private, candidates, **settings):
    values = {"m": 200, "initialisations": 2} | settings
    network = nn.Linear(private.x.shape[1], C)
    return distance("whitening", **values).measure(lambda i: network, private, candidates, C, "key")


# The formula


@pytest.mark.parametrize(("n", "r"), [(30, 50), (80, 20)])  # fewer rows than columns, and more
def test_the_weights_are_those_of_gradient_descent_in_small_steps(n, r):
    z, y = rows(n, r), torch.arange(n) % C
    residuals, h, reach, steps = residuals_of(y, C), 1 / C, 7.0, 20_000
    weight = torch.zeros(C, r, dtype=torch.float64)
    for _ in range(steps):
        weight += reach / steps * (residuals - h * z @ weight.T).T @ z / n
    found = learned(z, residuals, Descent(h, reach, 0.0))
    torch.testing.assert_close(found.weights @ found.directions.T, weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("n", "r"), [(6, 9), (40, 5)])
def test_the_noise_that_is_left_is_that_of_noisy_descent(n, r):
    """4,000 descents, each with separate noise in each of 200 steps; logits of other rows."""
    z, other, h, reach, noise, steps = rows(n, r), rows(50, r, seed=1), 1 / C, 7.0, 0.3, 200
    weight = torch.zeros(4000, r, dtype=torch.float64)
    for step in range(steps):
        weight -= reach / steps * h * weight @ (z.T @ z / n)
        weight += noise / math.sqrt(steps) * rows(4000, r, seed=2 + step)

    descent, nothing = Descent(h, reach, noise), torch.zeros(n, 1, dtype=torch.float64)
    found = net_gain(learned(z, nothing, descent), other, rows(50, 1) * 0, descent, 3)
    assert found == pytest.approx(-h / 2 * 3 * float((other @ weight.T).square().mean()), rel=0.05)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_gain_is_what_the_loss_falls_by_to_second_order(multi_label):
    z, weight = rows(60, 9), rows(C, 9, seed=1)
    if multi_label:
        y = (rows(60, C, seed=2) > 0.5).float()
        h, loss = 1 / (4 * C), lambda logits: nn.functional.binary_cross_entropy_with_logits(logits, y.double())
    else:
        y, weight = torch.arange(60) % C, weight - weight.mean(0)  # as descent leaves it: logits with sum 0
        h, loss = 1 / C, lambda logits: nn.functional.cross_entropy(logits, y)

    def gain(size, h):
        one = torch.eye(9, dtype=torch.float64)
        found = Learned(one, size * weight, torch.zeros(9, dtype=torch.float64))
        return net_gain(found, z, residuals_of(y, C), Descent(h, 1.0, 0.0), C)

    at_zero = loss(torch.zeros(60, C, dtype=torch.float64))
    errors = [abs(float(at_zero - loss(z @ (size * weight).T)) - gain(size, h)) for size in (1e-2, 1e-3)]
    assert errors[1] < 5e-3 * errors[0]  # of third order
    assert gain(1e-3, h) != pytest.approx(gain(1e-3, 2 * h), rel=1e-4)


def test_a_single_direction_written_out():
    """Two classes on one line: lambda and G are numbers, and both halves have the same."""
    z = torch.tensor([[2.0], [-2.0]] * 4, dtype=torch.float64)
    y = torch.tensor([0, 1] * 4)
    h, reach, noise = 0.5, 0.3, 0.4
    w = 0.5 * 2 / (h * 4) * (1 - math.exp(-h * reach * 4))  # of class 0; that of class 1 is its negative
    left = noise**2 * (1 - math.exp(-2 * h * reach * 4)) / (2 * h * reach * 4)
    value = 2 * (w * 0.5 * 2) - h / 2 * 2 * w * w * 4 - h / 2 * 1 * left * 4
    halves = (torch.arange(4), torch.arange(4, 8))
    found = unexplained(z, residuals_of(y, 2), halves, Descent(h, reach, noise), False)
    assert found == pytest.approx(1 - value / 0.5)  # |r|^2 / (2 h) = 0.5


@pytest.mark.parametrize("multi_label", [False, True])
def test_weights_that_explain_each_label_leave_nothing(multi_label):
    y = (rows(40, C) > 0).float() if multi_label else torch.arange(40) % C
    residuals, h = residuals_of(y, C), 1 / (4 * C) if multi_label else 1 / C
    halves, descent = (torch.arange(40), torch.arange(40)), Descent(h, 1e9, 0.0)
    assert unexplained(residuals, residuals, halves, descent, multi_label) == pytest.approx(0, abs=1e-6)
    blind = rows(40, 1) * 0 + 1  # nothing but a bias
    assert unexplained(blind, residuals, halves, descent, multi_label) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("n", [1000, 5000])
def test_the_descent_is_that_of_the_head(n):
    """The noise in a logit is what the head chooses its learning rate for; where it gets to grows with n mu."""
    head = WhitenedHead("whitened_head", k=None, public_labels=PublicLabels.none)
    head = head.derived(Facts(n, D, 200, C, False, 0.1))
    found = descent_of(head)
    assert found.noise * ROW == pytest.approx(NOISE)
    assert found.reach == pytest.approx(CLIP * head.steps * head.rate(n, head.steps) / (1 - MOMENTUM))
    assert found.reach == pytest.approx(NOISE * n * 0.1 / (ROW**2 * math.sqrt(1 - 1 / C)))
    without = descent_of(head.derived(Facts(n, D, 200, C, False, math.inf)))
    assert without.noise == 0
    assert without.reach > found.reach


# Candidates


def test_the_order_of_candidates_and_of_none():
    """Own images are nearest; images that vary in other directions are farther than none, the more so if they are all
    far from the private ones."""
    private = examples(1000, 0, 0)
    other = examples(300, 20, 2)
    candidates = {"own": examples(300, 0, 1), "other": other, "far": Split(other.x + 3, other.y)}
    values = measured(private, candidates, epsilon=0.1)
    assert list(values) == [*candidates, NONE]
    assert max(values["own"]) < min(values[NONE])
    assert max(values[NONE]) < min(values["other"])
    assert max(values["other"]) < min(values["far"])


@pytest.mark.parametrize("m", [25, 300])  # fewer than features, and more
def test_a_larger_budget_and_more_examples_leave_less(m):
    private, candidates = examples(1000, 0, 0), {"own": examples(300, 0, 1)}

    def means(**settings):
        values = measured(private, candidates, m=m, **settings)
        return [np.mean(values[name]) for name in ("own", NONE)]

    little, more = means(epsilon=0.05), means(epsilon=1.0)
    assert all(of_more < of_little - 0.1 for of_little, of_more in zip(little, more, strict=True))
    assert means(epsilon=0.3, n=5000)[0] < means(epsilon=0.3)[0] == means(epsilon=0.3, n=1000)[0]
    assert means(epsilon=math.inf)[0] < more[0]


def test_labels_that_features_do_not_tell_leave_all():
    private = examples(1000, 0, 0)
    blind = Split(private.x, private.y[torch.randperm(1000, generator=torch.Generator().manual_seed(0))])
    values = measured(blind, {"own": examples(300, 0, 1)}, epsilon=8)
    assert min(*values["own"], *values[NONE]) > 0.97


def test_what_changes_nothing():
    """The numbers of the classes, the order of the features, labels of the candidate, and other candidates."""
    private, own, other = examples(1000, 0, 0), examples(300, 0, 1), examples(300, 20, 2)
    order, classes = torch.randperm(D, generator=torch.Generator().manual_seed(1)), torch.tensor([2, 0, 3, 1])
    wanted = measured(private, {"own": own, "other": other})
    assert measured(private, {"own": own})["own"] == wanted["own"]
    assert measured(private, {"own": Split(own.x, own.y * 0)})["own"] == wanted["own"]

    changed = measured(Split(private.x[:, order], classes[private.y]), {"own": Split(own.x[:, order], own.y)})
    assert changed["own"] == pytest.approx(wanted["own"], rel=1e-4)
    assert changed[NONE] == pytest.approx(wanted[NONE], rel=1e-4)


def test_several_labels_at_once():
    private = examples(1000, 0, 0)
    several = Split(private.x, nn.functional.one_hot(private.y, C).float())
    values = measured(several, {"own": examples(300, 0, 1), "far": Split(examples(300, 20, 2).x + 3, private.y[:300])})
    assert max(values["own"]) < min(values["far"])
    assert 0 < min(values["own"]) < 1


def test_how_many_private_examples_are_looked_at():
    private, own = examples(1000, 0, 0), {"own": examples(300, 0, 1)}
    assert measured(private, own, private_m=math.inf) == measured(private, own, private_m=1000)
    assert measured(private, own, private_m=400)["own"] != measured(private, own)["own"]


def test_errors_name_what_is_wrong():
    private, same = examples(300, 0, 0), Split(torch.ones(300, D), torch.arange(300) % C)
    with pytest.raises(UsageError, match="features of flat are the same for all examples"):
        measured(private, {"flat": same})
    with pytest.raises(UsageError, match="distance=whitening needs labels, and the private data has none"):
        measured(Split(private.x, private.y * 0), {"own": private})
    with pytest.raises(UsageError, match=r"distance\.epsilon"):
        distance("whitening", epsilon=0.0)
    with pytest.raises(UsageError, match=r"distance\.private_m"):
        distance("whitening", private_m=1.0)
