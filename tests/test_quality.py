"""Quality that may be published: what one example moves, the noise, and how often the intervals contain the truth."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT, weights_of
from pubsel.release import quality
from pubsel.release.quality import BINS, Released

DRAWS = 2000
STANDS_OUT = 6  # deviations of its noise by which the smallest class is above 0
NUMBERS = (math.nan, math.inf, -math.inf, -5.0, -1e-300, 0.0, 1e-300, 0.5, 1.0, 2.0, 3.0, 255.0, 1e300)
MATRICES = {
    "balanced": [[0.45, 0.05], [0.1, 0.4]],
    "unbalanced": [[0.85, 0.05], [0.02, 0.08]],
    "three classes": [[0.3, 0.02, 0.02], [0.03, 0.25, 0.05], [0.03, 0.03, 0.27]],
}
CASES = [(0.05, 200), (1.0, 2000)]  # hardly more than noise, and hardly any


def sigma_of(epsilon, sensitivity=2**0.5):
    return accountant.deviation(accountant.plan(epsilon, 1e-5, 1.0, 1, sensitivity).noise_multiplier, sensitivity)


def drawn(probabilities, n, sigma, random, **beside):
    """Noisy tables [DRAWS, ...] of n examples each; beside: `right` or `sizes`, and how it follows from the counts."""
    counts = random.multinomial(n, probabilities.ravel(), DRAWS).reshape(DRAWS, *probabilities.shape)
    exact = {name: of(counts) for name, of in beside.items()}
    noisy = {name: values + sigma * random.standard_normal(values.shape) for name, values in exact.items()}
    return Released(counts + sigma * random.standard_normal(counts.shape), sigma, n, **noisy)


def right(counts):
    return np.trace(counts, axis1=-2, axis2=-1)


def sizes(counts):
    return counts.sum(-1)


def whole(steps, sigma, n):
    """Counts in steps as if they had been released with hardly any noise."""
    return Released(steps / UNIT, sigma, n)


def ones(n):
    """The weights of n examples, each of which is a unit."""
    return torch.tensor(weights_of(None, n))


def coverage(figure, truth):
    return ((figure.low <= truth) & (truth <= figure.high)).mean(0)


# What one example moves


@pytest.mark.attack
@pytest.mark.parametrize("classes", [2, 10])
def test_an_example_of_any_kind_moves_a_confusion_matrix_by_at_most_one(classes):
    random = torch.Generator().manual_seed(0)
    y, predicted = torch.randint(-2, classes + 2, (2, 500), generator=random).double()
    base = quality.confusion(y, predicted, classes, ones(500))
    for pair in itertools.product(NUMBERS, NUMBERS):
        label, answer = torch.tensor(pair, dtype=torch.float64)[:, None]
        more = quality.confusion(torch.cat([y, label]), torch.cat([predicted, answer]), classes, ones(501))
        moved = (more - base) / UNIT
        for beside in (np.trace(moved)[None], moved.sum(1)):
            assert np.linalg.norm([*moved.ravel(), *beside]) <= quality.sensitivity(base)
        assert (more >= base).all()


@pytest.mark.attack
@pytest.mark.parametrize("labels", [1, 5])
def test_an_example_of_any_kind_moves_histograms_by_at_most_the_root_of_the_labels(labels):
    random = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (500, labels), generator=random).double()
    scores = torch.rand(500, labels, generator=random).double()
    base = quality.histograms(y, scores, ones(500))
    assert base.shape == (labels, 2, BINS)
    most = quality.sensitivity(base)
    assert most == math.sqrt(labels)
    for label, score in itertools.product(NUMBERS, NUMBERS):
        row, of_row = (torch.full((1, labels), value, dtype=torch.float64) for value in (label, score))
        more = quality.histograms(torch.cat([row, y]), torch.cat([of_row, scores]), ones(501))
        assert np.linalg.norm((more - base) / UNIT) <= most * (1 + accountant.ROUNDING)
        assert more.sum() == (500 + (not math.isnan(label))) * labels * UNIT  # NaN: it is not known


def test_an_unknown_label_is_in_no_histogram():
    y, scores = torch.tensor([[0, 1], [torch.nan, 1], [1, torch.nan]]), torch.full((3, 2), 0.5)
    counts = quality.histograms(y, scores, torch.tensor([1, 2, 4]))
    assert counts.sum(2).tolist() == [[1, 4], [0, 3]]


def test_scores_that_are_no_probability_have_a_bin():
    scores = torch.tensor([math.nan, -math.inf, -1, 0, 1, 2, math.inf, 0.5])[:, None]
    (table,) = quality.histograms(torch.ones(8, 1), scores, ones(8))
    assert {place: count for place, count in enumerate(table[1] // UNIT) if count} == {0: 4, BINS // 2: 1, BINS - 1: 3}
    assert not table[0].any()


# The noise


@pytest.mark.parametrize(("shape", "sensitivity"), [((40, 40), math.sqrt(2)), ((9, 2, 90), 3.0)])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_noise_is_that_of_the_plan_and_the_sensitivity(shape, sensitivity, balanced):
    plan = accountant.plan(0.5, 1e-5, 1.0, 1, sensitivity)
    asked = []

    def source(purpose, step):
        asked.append((purpose, step))
        return np.random.default_rng(0)

    noisy = quality.release(np.full(shape, 7 * UNIT), 1000, plan, source, balanced)
    assert noisy.deviation == pytest.approx(accountant.deviation(plan.noise_multiplier, sensitivity), rel=1e-8)
    assert noisy.deviation >= accountant.deviation(plan.noise_multiplier, sensitivity)
    noise = noisy.counts - 7
    low, high = chi2.ppf([1e-6, 1 - 1e-6], noise.size)
    assert low < (noise**2).sum() / noisy.deviation**2 < high
    assert asked == [(f"noise of the quality {shape}", 0)]  # tables of other kinds share no noise
    assert plan.epsilon <= 0.5

    # The sums have noise of their own.
    beside = {"right": noisy.right, "sizes": noisy.sizes}
    assert [name for name, values in beside.items() if values is not None] == (
        [] if len(shape) == 3 else ["sizes" if balanced else "right"]
    )
    if balanced and len(shape) == 2:
        assert (np.abs(noisy.sizes - noisy.counts.sum(1)) > 1e-3).all()
        assert (np.abs(noisy.sizes - 7 * 40) < 6 * noisy.deviation).all()


@pytest.mark.attack
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_no_digit_of_a_count_tells_which_count_it_was(epsilon):
    """With noise in float64, a value proved in up to 40 % of draws that a count was 0 and not 1, or the other way: it
    is then no multiple of the deviation plus the other one. Here both give the same values: each that is likely enough
    to be seen in 6,000 draws of one is seen in those of the other."""
    plan, n = accountant.plan(epsilon, 1e-5, 1.0, 1, math.sqrt(2)), 6_000
    seen = []
    for count in (0, 1):
        table = np.zeros((2, 1, n // 2), np.int64) + count * UNIT
        noisy = quality.release(table, n, plan, lambda purpose, step, count=count: np.random.default_rng(count))
        seen.append(noisy.counts.ravel())
        assert np.array_equal(noisy.counts, noisy.counts.round(1))  # no digits beyond a tenth

    middle, wide = 0.5, 1.5 * noisy.deviation
    tenths = [{round(10 * value) for value in values if abs(value - middle) < wide} for values in seen]
    many = len(tenths[0] | tenths[1])
    least = n * 0.1 / noisy.deviation * 0.12  # draws of a value at 1.5 deviations, on average
    assert len(tenths[0] ^ tenths[1]) <= 3 + 3 * many * math.exp(-least)


@pytest.mark.parametrize(("rate", "steps"), [(0.5, 1), (1.0, 2)])
def test_a_plan_of_another_mechanism_is_refused(rate, steps):
    plan = accountant.plan(1.0, 1e-5, 1.0, 1, 1.0)._replace(rate=rate, steps=steps)
    with pytest.raises(ValueError, match="one step at rate 1"):
        quality.release(np.zeros((2, 2), np.int64), 10, plan, lambda purpose, step: np.random.default_rng(0))


# The figures


def test_figures_are_those_of_the_examples_if_there_is_no_noise():
    random = np.random.default_rng(0)
    y, predicted = random.integers(0, 3, 300), random.integers(0, 3, 300)
    predicted = np.where(random.random(300) < 0.6, y, predicted)
    matrix = whole(quality.confusion(torch.tensor(y), torch.tensor(predicted), 3, ones(300)), 1e-9, 300)
    correct = int((y == predicted).sum())
    exact = quality.accuracy(matrix)
    wilson = binomtest(correct, 300).proportion_ci(method="wilson")
    assert exact.estimate == pytest.approx(correct / 300)
    assert (exact.low, exact.high) == (pytest.approx(wilson.low, abs=1e-4), pytest.approx(wilson.high, abs=1e-4))
    assert quality.recalls(matrix).estimate == pytest.approx([(predicted[y == c] == c).mean() for c in range(3)])
    assert quality.noisy_balanced_accuracy(matrix).estimate == pytest.approx(balanced_accuracy_score(y, predicted))


def test_the_auc_is_that_of_binned_scores_if_there_is_no_noise():
    random = np.random.default_rng(0)
    y = random.integers(0, 2, (400, 3))
    scores = (y + random.normal(0, 1, y.shape)).clip(-1, 2) / 3 + 1 / 3
    table = whole(quality.histograms(torch.tensor(y), torch.tensor(scores), ones(400)), 1e-9, 400)
    binned = np.minimum(np.floor(scores * BINS), BINS - 1)
    truth = [roc_auc_score(y[:, label], binned[:, label]) for label in range(3)]
    assert quality.aucs(table).estimate == pytest.approx(truth)
    assert quality.noisy_auc(table).estimate == pytest.approx(np.mean(truth))
    assert truth == pytest.approx([roc_auc_score(y[:, label], scores[:, label]) for label in range(3)], abs=0.01)


def test_intervals_of_any_table_contain_the_estimate_and_are_within_zero_and_one():
    random = np.random.default_rng(0)
    for scale in (0.1, 10, 1000):
        for figure in (
            *(f(Released(random.normal(0, scale, (500, 4, 4)), 5.0, 50)) for f in (quality.accuracy, quality.recalls)),
            quality.noisy_balanced_accuracy(Released(random.normal(0, scale, (500, 4, 4)), 5.0, 50)),
            quality.noisy_auc(Released(random.normal(0, scale, (500, 1, 2, BINS)), 5.0, 50)),
            quality.noisy_auc(Released(random.normal(0, scale, (500, 3, 2, BINS)), 5.0, 50)),
        ):
            assert (figure.low >= 0).all()
            assert (figure.low <= figure.estimate).all()
            assert (figure.estimate <= figure.high).all()
            assert (figure.high <= 1).all()


# How often intervals contain the value of the population


@pytest.mark.parametrize(("epsilon", "n"), CASES)
@pytest.mark.parametrize("name", MATRICES)
def test_intervals_of_a_confusion_matrix_contain_the_truth_in_95_percent(name, epsilon, n):
    probabilities, sigma = np.array(MATRICES[name]), sigma_of(epsilon)
    recall = np.diag(probabilities) / probabilities.sum(1)
    for beside in ({}, {"right": right}, {"sizes": sizes}):
        matrix = drawn(probabilities, n, sigma, np.random.default_rng(1), **beside)
        assert 0.93 <= coverage(quality.accuracy(matrix), np.trace(probabilities)) <= 0.97

        # A class that is lost in the noise is taken as anything, so more than 95 % is right.
        clear = n * probabilities.sum(1).min() >= STANDS_OUT * sigma * math.sqrt(len(probabilities))
        covered = coverage(quality.recalls(matrix), recall)
        assert 0.93 <= covered.min() <= covered.max() <= (0.97 if clear else 0.98), covered
        covered = coverage(quality.noisy_balanced_accuracy(matrix), recall.mean())
        assert 0.93 <= covered <= (0.97 if clear else 1), covered


def test_sums_of_their_own_make_the_figures_more_precise():
    """At the same epsilon, of ten classes and 76 images: the 95 % error of the accuracy is little more than half, that
    of the balanced accuracy less than nine tenths of what a table alone would have."""
    classes, n, epsilon = 10, 76, 1.0
    probabilities = np.full((classes, classes), 0.3 / classes / (classes - 1))
    np.fill_diagonal(probabilities, 0.7 / classes)

    def errors(figure_of, sensitivity, **beside):
        matrix = drawn(probabilities, n, sigma_of(epsilon, sensitivity), np.random.default_rng(1), **beside)
        figure = figure_of(matrix)
        assert 0.93 <= coverage(figure, 0.7) <= 1
        return np.quantile(np.abs(figure.estimate - 0.7), 0.95), (figure.high - figure.low).mean()

    alone, both = errors(quality.accuracy, 1.0), errors(quality.accuracy, math.sqrt(2), right=right)
    assert both[0] < 0.55 * alone[0]
    assert both[1] < 0.65 * alone[1]
    alone, both = (
        errors(quality.noisy_balanced_accuracy, s, **b) for s, b in ((1.0, {}), (math.sqrt(2), {"sizes": sizes}))
    )
    assert both[0] < 0.9 * alone[0]


@pytest.mark.parametrize(("moved", "beside"), [(1.0, {}), (2**0.5, {"sizes": sizes})])
def test_the_balanced_accuracy_of_many_small_classes_has_no_bias(moved, beside):
    """Each noisy row is a denominator. With 100 classes, each ratio a little too large, intervals missed every second
    time."""
    classes, n, sigma = 50, 10_000, sigma_of(1.0, moved)
    probabilities = np.full((classes, classes), 0.1 / classes / (classes - 1))
    np.fill_diagonal(probabilities, 0.9 / classes)
    matrix = drawn(probabilities, n, sigma, np.random.default_rng(4), **beside)
    figure = quality.noisy_balanced_accuracy(matrix)
    assert figure.estimate.mean() == pytest.approx(0.9, abs=0.005)
    assert 0.93 <= coverage(figure, 0.9) <= 0.98


def scores_of(share):
    """Probabilities [1, 2, BINS] of scores, `share` of them positive, and the area under their curve."""
    x = np.linspace(0, 1, BINS)
    negative, positive = np.exp(-3 * x), np.exp(2 * x)
    negative, positive = negative / negative.sum(), positive / positive.sum()
    above = np.cumsum(positive[::-1])[::-1] - positive / 2
    return np.stack([(1 - share) * negative, share * positive])[None], float(negative @ above)


@pytest.mark.parametrize(("epsilon", "n"), CASES)
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_intervals_of_the_auc_contain_the_truth_in_95_percent(share, epsilon, n):
    probabilities, truth = scores_of(share)
    sigma = sigma_of(epsilon)
    covered = coverage(quality.noisy_auc(drawn(probabilities, n, sigma, np.random.default_rng(2))), truth)
    clear = n * share >= STANDS_OUT * sigma * math.sqrt(BINS)
    assert 0.93 <= covered <= (0.97 if clear else 1), covered


@pytest.mark.parametrize(("alike", "most"), [(True, 0.97), (False, 1.0)])
def test_intervals_of_the_mean_auc_hold_for_labels_that_go_together_and_others(alike, most):
    """Labels that are copies of one another are the worst case: there the interval is as wide as it must be."""
    probabilities, truth = scores_of(0.3)
    random, sigma = np.random.default_rng(3), sigma_of(8.0, math.sqrt(4))
    tables = random.multinomial(2000, probabilities.ravel(), (DRAWS, 1 if alike else 4))
    counts = tables.repeat(4 if alike else 1, axis=1).reshape(DRAWS, 4, 2, BINS)
    noisy = Released(counts + sigma * random.standard_normal(counts.shape), sigma, 2000)
    assert 0.93 <= coverage(quality.noisy_auc(noisy), truth) <= most


# People


def of_people(random, draws, n, alike):
    """Tables [draws, 3, 3] of n people with 1 to 6 images. A person's images are of one class or of any, and for some
    people the model is right more often; and the accuracy, and the recalls [3], of images of which each person's weigh
    as much as another's."""
    shape = (draws, n, 6)
    many = random.integers(1, 7, (draws, n, 1))
    weights = (np.arange(6) < many) / many
    skill = random.choice([0.3, 0.95], (draws, n, 1), p=[0.3, 0.7])  # 0.755 on average
    labels = random.choice(3, (draws, n, 1) if alike else shape, p=[0.6, 0.3, 0.1])
    labels = np.broadcast_to(labels, shape)
    right = random.random((draws, n, 1) if alike else shape) < skill
    predicted = np.where(right, labels, (labels + 1) % 3)
    counts = np.zeros((draws, 3, 3))
    np.add.at(counts, (np.arange(draws)[:, None, None], labels, predicted), weights)
    return counts, 0.755, np.full(3, 0.755)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("epsilon", "n"), [(1.0, 300), (8.0, 2000)])
def test_intervals_of_people_contain_the_truth_in_95_percent_or_more(alike, epsilon, n):
    """If images of a person are alike, they are as good as one, and the intervals no wider than they must be."""
    random, sigma = np.random.default_rng(5), sigma_of(epsilon)
    counts, accuracy, recalls = of_people(random, 1000, n, alike)
    matrix = Released(counts + sigma * random.standard_normal(counts.shape), sigma, n)
    covered = coverage(quality.accuracy(matrix), accuracy)
    assert 0.93 <= covered <= (0.97 if alike else 1), covered
    assert (coverage(quality.recalls(matrix), recalls) >= 0.93).all()
    assert coverage(quality.noisy_balanced_accuracy(matrix), accuracy) >= 0.93


def test_people_who_have_all_classes_are_no_more_certain_than_their_number():
    """Each person has one image of each class, all of which are right or none is: the errors of all recalls are one."""
    random, n, classes = np.random.default_rng(6), 400, 8
    right = random.binomial(n, 0.7, 2000)[:, None, None] / classes
    counts = right * np.eye(classes) + (n / classes - right) * np.roll(np.eye(classes), 1, 1)
    figure = quality.noisy_balanced_accuracy(Released(counts, 1e-6, n))
    assert 0.93 <= coverage(figure, 0.7) <= 0.97
