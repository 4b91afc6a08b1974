"""Accuracy, balanced accuracy and AUC against values computed by hand; their intervals against scikit-learn, scipy."""

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import binom, bootstrap
from sklearn.metrics import roc_auc_score

from pubsel.messages import UserError
from pubsel.privacy.randomness import stream
from pubsel.training.evaluation import (
    auc,
    auc_interval,
    check_classes,
    interval,
    logits,
    one_against_rest,
    utility,
    weighted_auc,
)


def test_outputs_that_differ_in_the_last_digit_are_told_apart():
    """Those of float32; of half precision they would be ties."""
    outputs = torch.tensor([[1.0, 1.0 + 1e-6], [1.0 + 1e-6, 1.0]])
    assert utility(outputs, torch.tensor([1, 0]), "accuracy") == 1.0
    assert utility(outputs[:, 1:], torch.tensor([[1.0], [0.0]]), "auc") == 1.0


def test_auc_is_the_share_of_pairs_in_order():
    logits = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]])
    assert auc(logits, torch.tensor([0, 1, 0, 1])) == 0.75  # 3 of 4 pairs, for either class


def test_multi_label_auc_leaves_out_labels_of_one_value():
    outputs = torch.tensor([[1.0, 0.0, 9.0], [2.0, 1.0, 9.0], [3.0, 2.0, 9.0]])
    y = torch.tensor([[0.0, 1, 1], [0, 0, 1], [1, 0, 1]])
    assert auc(outputs, y) == 0.5  # the first label 1, the second 0, the third has one value only


def test_the_auc_of_a_label_is_over_the_examples_that_know_it():
    nan, outputs = torch.nan, torch.tensor([[1.0, 0, 3], [2, 1, 2], [3, 5, 1], [9, 9, 0]])
    y = torch.tensor([[0, 1, 1], [nan, 0, nan], [1, nan, 1], [0, 1, nan]])
    assert auc(outputs, y) == pytest.approx((0.5 + 0.5) / 2)  # pairs 1 > 0 of 2 each; the third label has one value
    y[3, 0] = nan
    assert auc(outputs, y) == pytest.approx((1 + 0.5) / 2)


def test_balanced_accuracy_is_the_mean_of_the_recalls_of_the_classes_that_are_there():
    outputs = torch.eye(4)[[0, 0, 1, 3, 2, 2]]
    y = torch.tensor([0, 0, 0, 0, 2, 3])  # no example of class 1; recalls 1/2, 1, 0
    assert utility(outputs, y, "balanced_accuracy") == pytest.approx(0.5)
    assert utility(outputs, y, "accuracy") == 0.5
    y[1] = 3  # recalls 1/3, 1, 0
    assert utility(outputs, y, "balanced_accuracy") == pytest.approx(4 / 9)


def test_only_accuracy_needs_no_two_classes():
    check_classes(torch.ones(3, dtype=torch.long), "accuracy", "the test set")
    check_classes(torch.tensor([0, 2]), "auc", "the test set")
    check_classes(torch.tensor([[0.0, 1], [1, 1]]), "auc", "the test set")
    for y in (
        torch.ones(3, dtype=torch.long),
        torch.tensor([[0.0, 1], [0, 1]]),
        torch.tensor([[0, torch.nan], [torch.nan, 1]]),
    ):
        for metric, words in (("auc", "AUC"), ("balanced_accuracy", "balanced accuracy"))[: 3 - y.dim()]:
            with pytest.raises(UserError, match=rf"{words} needs .* at least two classes, the test set has one"):
                check_classes(y, metric, "the test set")
            with pytest.raises(UserError, match="at least two classes"):
                utility(torch.zeros(len(y), 2), y, metric)


# Intervals


@pytest.mark.parametrize("digits", [1, 8], ids=["many ties", "no ties"])
def test_weighted_auc_is_that_of_scikit_learn_on_each_resample(digits):
    random = np.random.default_rng(0)
    truth = random.random(300) < 0.2
    scores = (random.normal(size=300) + truth).round(digits)
    drawn = random.integers(300, size=(50, 300))
    counts = np.stack([np.bincount(sample, minlength=300) for sample in drawn]).astype(np.uint8)
    expected = [roc_auc_score(truth[sample], scores[sample]) for sample in drawn]
    np.testing.assert_allclose(weighted_auc(truth, scores, counts), expected, rtol=1e-12)


def test_weighted_auc_of_one_class_is_unknown():
    counts = np.array([[1, 2, 0], [0, 0, 3]], np.uint8)
    with warnings.catch_warnings(action="error"):
        found = weighted_auc(np.array([False, True, False]), np.array([0.1, 0.2, 0.3]), counts)
    assert found[0] == 1
    assert np.isnan(found[1])


def outputs_and_labels(kind, n=400):
    """Outputs of a middling model, and labels: classes [n], unbalanced ones, or 0/1 [n, labels], the last label
    rare."""
    random = np.random.default_rng(1)
    if kind == "unbalanced":
        y = random.choice(4, size=n, p=[0.7, 0.2, 0.1 - 3 / n, 3 / n])
        return torch.from_numpy(random.normal(size=(n, 4)) + 2 * np.eye(4)[y] * [1, 0.5, 0.2, 1]), torch.from_numpy(y)
    if kind in ("labels", "unknown"):
        y = random.random((n, 3)) < [0.5, 0.2, 3 / n]
        outputs, known = (
            random.normal(size=(n, 3)) + y,
            random.random((n, 3)) < ([0.2, 0.5, 1] if kind != "labels" else 1),
        )
        return torch.from_numpy(outputs), torch.from_numpy(np.where(known, y, np.nan)).float()
    y = random.integers(4, size=n)
    return torch.from_numpy(random.normal(size=(n, 4)) + np.eye(4)[y]), torch.from_numpy(y)


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        ("classes", "accuracy"),
        ("classes", "auc"),
        ("labels", "auc"),
        ("unknown", "auc"),
        ("classes", "balanced_accuracy"),
        ("unbalanced", "balanced_accuracy"),
    ],
)
def test_intervals_are_those_of_a_plain_bootstrap(kind, metric):
    outputs, y = outputs_and_labels(kind)

    def resampled(rows):
        return utility(outputs[rows], y[rows], metric)

    plain = bootstrap(
        (np.arange(len(y)),), resampled, vectorized=False, n_resamples=300, method="percentile", random_state=0
    ).confidence_interval
    with warnings.catch_warnings(action="error"):
        low, high = interval(outputs, y, metric, stream("a run", "bootstrap"))
    assert low < utility(outputs, y, metric) < high
    assert (low, high) == pytest.approx(plain, abs=0.2 * (high - low))
    assert interval(outputs, y, metric, stream("a run", "bootstrap")) == (low, high)
    assert interval(outputs, y, metric, stream("another", "bootstrap")) != (low, high)


@pytest.mark.parametrize(("kind", "metric"), [("classes", "accuracy"), ("labels", "auc"), ("one", "auc")])
def test_the_ends_are_the_quantiles_at_2_5_and_97_5_percent(kind, metric):
    """Of many resamples, for the mean of several intervals: of the normal's 3.92 standard deviations 90 % are 3.29."""
    outputs, y = outputs_and_labels("classes" if kind == "classes" else "labels")
    if kind == "one":
        outputs, y = outputs[:, :1], y[:, :1]
    random = np.random.default_rng(2)
    if metric == "accuracy":
        want = binom.ppf([0.025, 0.975], len(y), utility(outputs, y, metric)) / len(y)
    else:
        counts = np.stack([np.bincount(random.integers(400, size=400), minlength=400) for _ in range(4000)])
        each = [weighted_auc(*problem[1:], counts.astype(np.uint8)) for problem in one_against_rest(outputs, y)]
        want = np.percentile(np.nanmean(each, axis=0), [2.5, 97.5])
    streams = [stream(f"run {i}", "bootstrap") for i in range(10)]
    if kind == "one":
        found = [auc_interval(y[:, 0].numpy() == 1, outputs[:, 0].numpy(), source) for source in streams]
    else:
        found = [interval(outputs, y, metric, source) for source in streams]
    np.testing.assert_allclose(np.mean(found, axis=0), want, atol=0.03 * (want[1] - want[0]))


def test_resamples_without_two_classes_are_left_out():
    outputs, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [0.0], [1.0]])
    with warnings.catch_warnings(action="error"):
        assert interval(outputs, y, "auc", stream("a run", "bootstrap")) == (1.0, 1.0)


@pytest.mark.parametrize(("side", "most"), [(8, 1000), (224, 8), (2000, 8)])
def test_large_images_are_evaluated_a_few_at_a_time(side, most):
    """A deep network's outputs of a thousand large images would take more memory than its training."""
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            seen.append(len(x))
            return torch.zeros(len(x), 2)

    assert logits(Net(), torch.zeros(1, 3, side, side).expand(1100, -1, -1, -1)).shape == (1100, 2)
    assert max(seen) == most
    assert sum(seen) == 1100


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "auc"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_no_numbers_have_no_utility(metric, bad):
    outputs = torch.tensor([[0.0, 1.0], [bad, 0.0], [1.0, 0.0]])
    with pytest.raises(UserError, match="not finite"):
        utility(outputs, torch.tensor([1, 0, 0]), metric)
