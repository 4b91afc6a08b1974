"""The whitened head: its map written out, what follows from a task, its noise, and its releases under attack."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import pubsel.release.run
from pubsel.algorithms import Facts, View, roots
from pubsel.algorithms.dp_sgd import CORRECTION, NOISE
from pubsel.algorithms.whitened_head import (
    CLIP,
    EXPONENT,
    FEWEST,
    LENGTH,
    MOST,
    PRIOR,
    ROW,
    centred,
    class_weights,
    directions_of,
    discriminant,
    public_classifier,
    rest_of,
    spread_of,
    whitened,
)
from pubsel.cell import derived
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.gradients.factored import LinearGradients, OffsetLinear
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.sampling import schedule
from pubsel.rules import Budget
from pubsel.settings.keys import Training
from pubsel.training.loop import Job, fit
from tests.made import build, only_record, secret, write_npz
from tests.synthetic import secret_named


def features(m, d=30, seed=0):
    """Features of differing variances, correlated, positive and negative."""
    draw = np.random.RandomState(seed)
    mixing = np.random.RandomState(99).standard_normal((d, d)) * np.logspace(0, -1, d)[:, None]
    return torch.from_numpy(draw.standard_normal((m, d)) @ mixing * np.linspace(0.1, 3, d)).float()


def at_zero(d, classes, bias=True):
    model = torch.nn.Linear(d, classes, bias=bias)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def training_of(algorithm):
    return Training(chunk=None, checkpoint_seconds=1e9, **algorithm.training)


# The map


@pytest.mark.parametrize("m", [10, 25, 60, 5000])
def test_the_map_is_the_written_out_one(m):
    """With fewer public examples than features and with more, each example by itself."""
    public, k = features(m), min(m // 2, 12)
    draw = np.random.RandomState(1).standard_normal((7, 30)) * 3

    def rooted(x):
        return np.sign(x) * np.sqrt(np.abs(x))

    p = rooted(public.double().numpy())
    mean, scale = p.mean(0), 1 / np.sqrt(p.std(0))
    covariance = (p - mean) * scale
    values, vectors = np.linalg.eigh(covariance.T @ covariance / m)
    values, vectors = values[::-1], vectors[:, ::-1]
    rows = ((rooted(draw) - mean) * scale) @ vectors[:, :k] * (values[:k] + values.mean()) ** EXPONENT
    want = LENGTH * rows / np.linalg.norm(rows, axis=1, keepdims=True)

    frozen = whitened(public, k)
    found = torch.cat([frozen(row) for row in torch.from_numpy(draw).float().split(1)]).numpy()
    signs = np.sign((found * want).sum(0))
    np.testing.assert_allclose(found * signs, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("labels", [False, True])
def test_features_of_images_that_take_both_signs_vary_alike_before_all_else(labels):
    """As of wavelet scattering, where the scale of a feature says nothing; not activations, nor columns of texts."""
    y, scale = torch.arange(60) % 3, torch.logspace(-1, 1, 30)
    for signed, shape, same in ((True, (1, 4, 4), True), (True, (30,), False), (False, (1, 4, 4), False)):
        public, x = (part if signed else part.abs() for part in (features(60), features(9, seed=1)))

        def rows(public, x, shape=shape):
            sides = Split(x, torch.zeros(len(x), dtype=torch.int64)), Split(public, y)
            task = Task(*sides, sides[0], 3, "accuracy", (), (), (), same_task=labels, shape=shape)
            algorithm = derived(build("whitened_head", k=8), Budget(1.0, 1e-5), task)
            return algorithm.frozen(task.public, 30, secret)(x)

        plain, scaled = rows(public, x), rows(public * scale, x * scale)
        assert plain.shape[1] >= 8 + 3 * labels
        assert (plain.shape == scaled.shape and torch.allclose(scaled.abs(), plain.abs(), rtol=1e-2, atol=1e-2)) == same


@pytest.mark.parametrize("m", [20, 60])
def test_an_example_of_twice_the_weight_is_two_examples(m):
    public, twice = features(m), torch.arange(m) % 3 == 0
    copied = torch.cat([public, public[twice]])
    weights = (1.0 + twice.double()) / len(copied)
    x = features(9, seed=1)
    want, got = whitened(copied, 8)(x), whitened(public, 8, weights)(x)
    signs = (want * got).sum(0).sign()
    torch.testing.assert_close(got * signs, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose((whitened(public, 8)(x)).abs(), want.abs(), atol=0.1)


def test_examples_of_a_rare_class_weigh_more_each_and_less_together():
    """Nine examples of class 0, one of class 3; classes 1 and 2 are absent."""
    weights = class_weights(torch.tensor([0] * 9 + [3]))
    torch.testing.assert_close(weights, torch.tensor([1 / 12] * 9 + [3 / 12], dtype=torch.float64))
    torch.testing.assert_close(class_weights(torch.arange(6) % 2), torch.full((6,), 1 / 6, dtype=torch.float64))


def test_only_labels_of_the_private_task_count():
    """Those of other public data mean other classes."""
    public, rare, even = features(40), (torch.arange(40) < 4).long(), torch.arange(40) % 2

    def projection(y, **changes):
        algorithm = build("whitened_head", k=5).derived(Facts(n=100, d=30, m=40, **changes))
        return algorithm.frozen(Split(public, y), 30, secret).projection

    assert torch.equal(projection(rare), projection(even))
    assert torch.equal(projection(even, same_task=True), projection(even))
    assert not torch.allclose(projection(rare, same_task=True), projection(even), rtol=1e-2)

    budget = Budget(1.0, 1e-5)
    for choice, same in (("auto", True), ("auto", False), ("given", False), ("none", True)):
        split = Split(public, rare)
        task = Task(split, split, split, 2, "accuracy", (0.5,), (0.5,), (), same_task=same)
        algorithm = derived(build("whitened_head", public_labels=choice), budget, task)
        assert algorithm.labelled == (same if choice == "auto" else choice == "given")
        assert algorithm.offsets == 2 * algorithm.labelled == algorithm.frozen(split, 30, secret).offsets
        assert not derived(build("whitened_head", public_labels=choice), budget, task._replace(public=None)).labelled


@pytest.mark.parametrize("y", [torch.full((40,), 2), torch.zeros(40, 2)])
def test_labels_of_another_task_are_refused(y):
    algorithm = build("whitened_head", k=5, public_labels="given").derived(Facts(n=100, d=30, m=40))
    model = at_zero(30, 2)
    with pytest.raises(UsageError, match=r"algorithm\.public_labels=given needs public labels of the private task"):
        algorithm.check(View(model, LinearGradients(model), Split(features(40), y), 2, False, secret))


# What it starts from


@pytest.mark.parametrize(("classes", "several"), [(2, False), (5, False), (3, True)])
def test_the_public_classifier_is_the_most_likely_one(classes, several):
    """The loss, with the made-up rows and the prior, has no gradient there; the last class, or label, is absent."""
    torch.manual_seed(0)
    x = torch.randn(60, 8)
    y = torch.randint(2, (60, 3)) * torch.tensor([1, 1, 0]) if several else torch.randint(classes - 1, (60,))
    weight, bias = (part.double().requires_grad_() for part in public_classifier(x, y, classes))
    assert (weight.shape, bias.shape) == ((classes, 8), (classes,))

    x = x.double()
    if several:
        rows, labels = torch.cat([x, torch.zeros(2, 8)]), torch.cat([y, torch.tensor([[0] * 3, [1] * 3])]).double()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(rows @ weight.T + bias, labels, reduction="sum")
    else:
        rows, labels = torch.cat([x, torch.zeros(classes, 8)]), torch.cat([y, torch.arange(classes)])
        loss = torch.nn.functional.cross_entropy(rows @ weight.T + bias, labels, reduction="sum")
    prior = weight.square().sum() * (2 if classes == 2 else 1)  # of two classes, one set of weights, their difference
    (loss + prior / (2 * PRIOR)).backward()
    assert float(weight.grad.abs().max()) < 0.05
    assert float(bias.grad.abs().max()) < 0.05
    assert bool((torch.isfinite(bias) & (bias.abs() < 6)).all())


def test_the_public_classifier_fits_each_label_on_the_rows_that_know_it():
    torch.manual_seed(0)
    x, y = torch.randn(60, 8), torch.randint(2, (60, 3)).float()
    y[::2, 1], y[:, 2] = torch.nan, torch.nan
    weight, bias = public_classifier(x, y, 3)
    for label, known in enumerate((slice(None), slice(1, None, 2), slice(0))):
        want = public_classifier(x[known], y[known, label : label + 1], 1)
        torch.testing.assert_close((weight[label], bias[label]), (want[0][0], want[1][0]))
    assert not weight[2].any()  # of the added rows alone
    assert bias[2] == pytest.approx(0)


def test_a_map_with_public_labels_has_the_logits_of_the_public_classifier():
    """Each example by itself; of features less their mean, in rows of one length, without whitening."""
    public, y = features(40), torch.arange(40) % 3
    algorithm = build("whitened_head", k=6).derived(Facts(n=100, d=30, m=40, classes=3, same_task=True))
    frozen = algorithm.frozen(Split(public, y), 30, secret)
    plain = whitened(public, 6, class_weights(y))

    def rows(x):
        centred = x.sign() * x.abs().sqrt() - plain.shift
        return LENGTH * centred / centred.norm(dim=1, keepdim=True)

    weight, bias = public_classifier(rows(public), y, 3)
    x = features(7, seed=1)
    want = torch.cat([plain(x), rows(x) @ weight.T + bias], 1)
    torch.testing.assert_close(torch.cat([frozen(row) for row in x.split(1)]), want, rtol=1e-3, atol=1e-3)
    assert float((frozen(public)[:, 6:].argmax(1) == y).float().mean()) > 0.6


@pytest.mark.parametrize("several", [False, True])
def test_gradients_of_a_correction_are_those_of_its_own_weights(several):
    """Against autograd, example by example; the logits that it corrects are given."""
    torch.manual_seed(0)
    model, x = OffsetLinear(6, 4), torch.randn(5, 10)
    y = torch.randint(2, (5, 4)).float() if several else torch.randint(4, (5,))
    rows = LinearGradients(model).matrix(x, y).written_out()
    for i in range(5):
        logits = x[i, :6] @ model.weight.T + model.bias + x[i, 6:]
        loss = torch.nn.functional.binary_cross_entropy_with_logits if several else torch.nn.functional.cross_entropy
        parts = torch.autograd.grad(loss(logits, y[i]), [model.weight, model.bias])
        torch.testing.assert_close(rows[i], torch.cat([part.flatten() for part in parts]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(x[i : i + 1])[0], logits)


def test_a_correction_is_allowed_the_less_noise_the_more_public_examples_there_are():
    def deviation(**changes):
        facts = {"n": 5000, "d": 1280, "m": 500, "classes": 10, "mu": 0.1, "same_task": True} | changes
        return build("whitened_head", k=50).derived(Facts(**facts)).deviation

    assert deviation(same_task=False) == NOISE
    assert deviation(mu=math.inf) == CORRECTION
    assert deviation(m=50) > deviation() > deviation(m=5000) > 0
    assert deviation(mu=0.01) < deviation() < deviation(n=50_000) < CORRECTION
    assert deviation() == pytest.approx(CORRECTION * math.sqrt(500**2 / (500**2 + 500 * 50 * 10)))


def test_a_direction_in_which_public_data_do_not_vary_counts_for_nothing():
    """Two constant features, and fewer directions than asked for; private data may vary there."""
    public = features(40)
    public[:, 3:] = 7
    frozen = whitened(public, 6)
    x = features(9, seed=1)
    other = x.clone()
    other[:, 3:] += 5
    assert frozen(x).shape == (9, 6)
    assert torch.isfinite(frozen(x)).all()
    torch.testing.assert_close(frozen(x), frozen(other), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(frozen(x).norm(dim=1), torch.full((9,), LENGTH))


@pytest.mark.parametrize("m", [20, 60])
def test_fewer_directions_than_asked_for_leave_the_others_zero(m):
    """Public data in three dimensions; along all others private data could vary as they like."""
    torch.manual_seed(0)
    inside = torch.randn(m, 3) @ torch.randn(3, 30)  # as the roots will be
    frozen = whitened(inside.sign() * inside.square(), 6)
    assert (frozen.projection.norm(dim=0) > 0).tolist() == [True] * 3 + [False] * 3


def test_public_features_that_are_all_the_same_are_refused():
    with pytest.raises(UsageError, match=r"pair\.public: its features are the same for all examples"):
        whitened(features(1).repeat(20, 1), 5)


def test_without_public_data_rows_have_one_length_and_nothing_is_read():
    frozen = build("whitened_head").derived(Facts(n=100, d=30, mu=0.1)).frozen(None, 30, secret)
    x = features(8)
    want = x.sign() * x.abs().sqrt()
    want = want - want.mean(1, keepdim=True)
    torch.testing.assert_close(frozen(x), LENGTH * want / want.norm(dim=1, keepdim=True))
    with pytest.raises(UsageError, match=r"algorithm\.k=7: directions are of public data"):
        build("whitened_head", k=7).derived(Facts(n=100, d=30))
    wide = build("whitened_head", k=31).derived(Facts(n=100, d=30, m=80))
    with pytest.raises(UsageError, match=r"algorithm\.k=31 is more than the 30 features"):
        wide.frozen(Split(features(80), torch.zeros(80)), 30, secret)


def test_without_public_data_a_noisy_mean_of_rows_is_subtracted_where_there_are_enough():
    algorithm = build("whitened_head").derived(Facts(n=4000, d=30, mu=1.0))
    release, share = (
        algorithm.frozen(None, 30, secret),
        algorithm.first_steps / (algorithm.steps + algorithm.first_steps),
    )
    assert share == pytest.approx(0.05, rel=0.4)
    x = features(4000)
    plain = roots(x) - roots(x).mean(1, keepdim=True)
    plain = plain / plain.norm(dim=1, keepdim=True)
    torch.testing.assert_close(release.clipped_sum(x), plain.double().sum(0), rtol=2e-5, atol=1e-2)
    rows = release.decode(4000 * plain.double().mean(0))(x)
    middle = plain.mean(0)
    kept = 1 - 30 / (share * 4000**2) / middle.square().sum()  # what is known to be noise is taken off
    want = plain - kept * middle
    torch.testing.assert_close(rows, LENGTH * want / want.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-4)
    noise = release.decode(torch.zeros(30, dtype=torch.float64))(x)
    torch.testing.assert_close(noise, LENGTH * plain)  # no more than noise was found


def test_one_row_moves_the_sum_of_rows_by_at_most_one_whatever_it_is():
    release = centred(30, 400, 0.3, True)
    others = features(50)
    without = release.clipped_sum(others)
    hurtful = torch.cat([features(20, seed=3), 1e30 * features(4), 1e-38 * features(4), torch.zeros(1, 30)])
    broken = torch.full((3, 30), 1.0) * torch.tensor([math.nan, math.inf, -math.inf])[:, None]
    reached = 0.0
    for row in torch.cat([hurtful, broken]).split(1):
        moved = float((release.clipped_sum(torch.cat([others, row])) - without).norm())
        assert moved <= release.sensitivity
        reached = max(reached, moved)
    assert reached > 0.999
    torch.testing.assert_close(release.clipped_sum(torch.cat([others, broken])), without, rtol=0, atol=1e-9)


def test_features_of_earlier_stages_vary_as_much_as_those_of_the_last_layer_allow():
    """Whatever their scale, which no private example decides."""
    public = torch.cat([features(60, 20), 1e3 * features(60, 10, seed=1)], 1)
    algorithm = build("whitened_head", k=5).derived(Facts(n=100, d=30, m=60, stages=10, public=public))
    frozen = algorithm.frozen(Split(public, torch.zeros(60)), 30, secret)
    assert isinstance(frozen.scale, torch.Tensor)
    assert torch.equal(frozen.scale[:20], torch.ones(20))
    variances = roots(public / frozen.scale).double().var(0, correction=0)
    assert float(variances[20:].sum() / variances[:20].sum()) == pytest.approx(0.7)
    other = torch.cat([public[:, :20], public[:, 20:] / 1e3], 1)
    same = build("whitened_head", k=5).derived(Facts(n=100, d=30, m=60, stages=10, public=other))
    rows = same.frozen(Split(other, torch.zeros(60)), 30, secret)(other)
    torch.testing.assert_close(frozen(public).abs(), rows.abs(), rtol=1e-3, atol=1e-3)
    constant = torch.cat([torch.ones(60, 20), public[:, 20:]], 1)
    assert algorithm.frozen(Split(constant, torch.zeros(60)), 30, secret)(public).isfinite().all()


# What follows from the task


@pytest.mark.parametrize("classes", [2, 10, 200])
def test_directions_grow_with_the_budget_within_their_bounds(classes):
    def k(**changes):
        return directions_of(Facts(**({"n": 5000, "d": 1280, "m": 5000, "classes": classes, "mu": 0.1} | changes)))

    wanted = [k(n=n) for n in (50, 500, 5000, 50_000, 500_000)]
    assert wanted == sorted(wanted)
    assert wanted[0] == FEWEST
    assert k(n=2 * 10**6, mu=2.0) == MOST == k(mu=math.inf)
    assert k(n=10_000, mu=0.05) == k()  # examples and budget count alike
    assert k(classes=4 * classes) <= k()
    assert k(d=3) == 3


def test_all_features_have_the_share_of_directions_that_public_examples_do_not_span():
    """None if they span all that are wanted; the rows keep their length."""
    facts = Facts(n=10**5, d=30, classes=2, mu=1.0)
    for m, rest in ((31, 0.0), (25, 6 / 30), (2, 29 / 30)):
        algorithm = build("whitened_head").derived(facts._replace(m=m))
        assert algorithm.rest == pytest.approx(rest)
        assert algorithm.k == min(30, m - 1)
        x, public = features(9, seed=1), Split(features(m), torch.zeros(m))
        rows = algorithm.frozen(public, 30, secret)(x)
        assert rows.shape == (9, algorithm.width(30))
        torch.testing.assert_close(rows.norm(dim=1), torch.full((9,), LENGTH))
        plain = whitened(public.x, algorithm.k)
        centred = x.sign() * x.abs().sqrt() - plain.shift
        want = [math.sqrt(1 - rest) * plain(x), math.sqrt(rest) * LENGTH * centred / centred.norm(dim=1, keepdim=True)]
        torch.testing.assert_close(rows, torch.cat(want[: 1 + (rest > 0)], 1))
    assert build("whitened_head_once").derived(facts._replace(m=2)).rest == 0


@pytest.mark.parametrize("m", [20, 100, 3000])
@pytest.mark.parametrize(("power", "d"), [(0.0, 40), (0.5, 40), (1.0, 400)])
def test_the_spread_of_directions_is_that_of_the_population_however_few_rows_are_known(m, power, d):
    """Variances j^-power of d directions, turned at random, so that all features vary alike."""
    variances = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    turn = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
    x = (torch.randn(m, d, dtype=torch.float64) * variances.sqrt()) @ turn
    want = spread_of((torch.randn(20_000, d, dtype=torch.float64) * variances.sqrt()) @ turn, root=False)
    assert spread_of(x, root=False) == pytest.approx(want, rel=0.35 if m == 20 else 0.2)
    assert spread_of(x[:1]) == 0 == spread_of(torch.ones(9, 4))


def test_where_all_directions_vary_alike_all_features_count_as_far_as_the_budget_can_tell_classes_apart():
    flat, steep = torch.randn(1000, 60), torch.randn(1000, 60) * torch.arange(1, 61) ** -2.0
    facts = Facts(n=2000, d=60, m=1000, classes=10, mu=1.0, public=flat)
    rests = [build("whitened_head").derived(facts._replace(mu=mu)).rest for mu in (0.01, 0.1, 1.0, math.inf)]
    assert rests == sorted(rests)
    assert rests[0] == 0 < rests[1] < rests[2] == rests[3] > 0.8
    mixed = facts._replace(public=flat @ torch.diag(torch.arange(1, 61) ** -0.5) @ torch.linalg.qr(flat[:60]).Q)
    assert 0.2 < build("whitened_head").derived(mixed).rest < 0.8
    assert build("whitened_head").derived(facts._replace(public=steep @ torch.linalg.qr(flat[:60]).Q)).rest == 0
    assert build("whitened_head_once").derived(facts).rest == 0


def test_all_features_count_more_where_few_directions_are_kept_for_many_classes():
    """77 classes, 84 directions: public data cost 7 points against none before."""
    facts = Facts(n=9000, d=300, m=900, mu=0.73)
    # the budget at which the squared ratio is 10
    at_ten = [facts._replace(classes=c, mu=c * math.sqrt(830) / 9000) for c in (3, 20, 21, 77)]
    shares = [rest_of(each, 83, 84) for each in at_ten]
    assert shares == pytest.approx([83 / 300, 83 / 300, 83 / 300, 1 - 84 / (4 * 77)])
    assert rest_of(facts._replace(classes=77, mu=0.05), 83, 84) == 0
    assert [rest_of(facts._replace(classes=77), spread, 84) > 0 for spread in (29, 31)] == [False, True]


def test_a_large_budget_needs_no_public_data_to_choose_directions():
    """Texts of 20 topics: at epsilon 4, public data cost 3.5 points against none before."""
    texts = Facts(n=4320, d=4096, m=480, classes=20)
    ks = {0.25: 42, 0.46: 61, 0.67: 76, 0.86: 88, 1.56: 127}  # by mu; of epsilon 1, 2, 3, 4 and 8
    shares = [rest_of(texts._replace(mu=mu), 979, k) for mu, k in ks.items()]
    assert shares == sorted(shares)
    assert shares[0] < 0.25 < 0.4 < shares[2] < 0.6 < shares[3] < 0.7
    assert shares[4] == pytest.approx(1 - 127 / 979)
    # where the k directions are most of those that rows vary in, they keep half of a row or so
    assert 0.4 < rest_of(Facts(n=8000, d=300, m=800, classes=20, mu=0.7), 78, 112) < 0.5


@pytest.mark.parametrize(("classes", "several"), [(2, False), (10, False), (200, False), (1, True), (14, True)])
def test_the_clip_norm_is_that_of_gradients_at_zero_weights(classes, several):
    model = at_zero(6, classes)
    x = LENGTH * torch.nn.functional.normalize(torch.randn(9, 6), dim=1)
    y = torch.randint(2, (9, classes)).float() if several else torch.randint(classes, (9,))
    norms = LinearGradients(model).matrix(x, y).row_norms()
    bound = build("whitened_head").clip_norm(classes, several)
    torch.testing.assert_close(norms, torch.full_like(norms, bound / CLIP), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("n", "epsilon", "classes", "several", "m", "steps"),
    [
        (300, 0.1, 2, False, 100, 30),
        (3000, 1.0, 10, False, 100, 30),
        (900, 0.5, 3, True, 100, 30),
        (3000, 8.0, 10, False, 0, 58),
    ],
)
def test_the_noise_of_a_logit_is_the_same_on_every_task(n, epsilon, classes, several, m, steps, tmp_path):
    """Through the loop, on rows that are not finite, which count as zero: what is left is noise."""
    mu = accountant.gaussian_mu(epsilon, 1e-5)
    algorithm = build("whitened_head", k=20 if m else None).derived(Facts(n, 20, m, classes, several, mu))
    y = torch.zeros(n, classes) if several else torch.zeros(n, dtype=torch.long)
    private = Split(torch.full((n, 20), math.nan), y)
    task = Task(private, None, private, classes, "accuracy", (0.5,), (0.5,), ())
    model = at_zero(20, classes)

    training = training_of(algorithm)
    plan = schedule(n, training)._replace(steps=algorithm.steps)
    spend = accountant.plan(epsilon, 1e-5, plan.rate, plan.steps + algorithm.first_steps, algorithm.sensitivity())
    job = Job(algorithm, plan, spend.noise_multiplier, training, "name", tmp_path / "checkpoint.pt")
    assert (plan.rate, plan.steps) == (1.0, steps)
    fit(model, task, job, secret_named())

    rows = LENGTH * torch.nn.functional.normalize(torch.randn(20_000, 20), dim=1)
    spread = float(model(rows).detach().square().mean().sqrt())
    momentum = training.momentum
    kept = math.sqrt(sum((1 - momentum**t) ** 2 for t in range(1, steps + 1)) / steps)  # the start of the momentum
    calibrated = math.sqrt(1 + math.pi * NOISE**2 / 8)
    assert spread == pytest.approx(NOISE * kept / calibrated, rel=0.35)  # of 20 to 210 random weights


def test_probabilities_are_those_on_average_over_the_known_noise():
    """Logits of a true classifier plus noise of the known deviation, divided as `finish` does."""
    algorithm = build("whitened_head").derived(Facts(n=3000, d=20, classes=2, mu=0.5))
    model = at_zero(20, 2)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    batch = View(model, LinearGradients(model), None, 2, False, secret, 3000, steps=algorithm.steps)
    algorithm.finish(batch)
    factor = float(model.weight[0, 0])
    assert factor == pytest.approx(1 / math.sqrt(1 + math.pi * NOISE**2 / 8), rel=1e-3)

    true = 2 * torch.randn(10**6, dtype=torch.float64)
    noisy = true + NOISE * torch.randn(10**6, dtype=torch.float64)
    happens = (torch.rand(10**6) < true.sigmoid()).double()

    def log_loss(logits):
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, happens))

    assert log_loss(factor * noisy) < log_loss(noisy) - 0.02
    assert build("whitened_head_once").derived(Facts(n=3000, d=20, m=50)).finish(batch) is None
    assert float(model.weight[0, 0]) == factor


@pytest.mark.parametrize(
    ("m", "epsilon", "steps"),
    [(0, 0.1, 30), (0, 1.0, 140), (0, 2.0, 262), (0, 4.0, 300), (0, math.inf, 300), (5000, 2.0, 45), (20, 2.0, 269)],
)
def test_as_many_steps_as_the_noise_and_a_stable_rate_allow(m, epsilon, steps):
    """The rate times the steps is how far descent goes: up to the most steps, as far as the noise allows."""
    mu = accountant.gaussian_mu(epsilon, 1e-5) if math.isfinite(epsilon) else math.inf
    algorithm = build("whitened_head").derived(Facts(45_000, 1280, m, 10, False, mu))
    assert algorithm.steps == algorithm.values(algorithm.steps)["steps"] == steps
    rate, stable = algorithm.rate(45_000, steps), 2 * 1.9 / algorithm.curvature
    assert rate <= stable
    if steps < 300:
        noise = rate * steps * ROW * algorithm.clip_norm(10, False) / (0.1 * 45_000 * algorithm.mu)
        assert noise == pytest.approx(NOISE)
    if steps > 30:
        assert rate > stable * (1 - 1 / steps)
        assert algorithm.rate(45_000, 30) == stable


# Attacks


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "labelled"), [("whitened_head", False), ("whitened_head", True), ("whitened_head_once", True)]
)
@pytest.mark.parametrize(("classes", "several"), [(2, False), (200, False), (14, True)])
def test_one_example_moves_the_sum_by_at_most_one(name, labelled, classes, several):
    """From its features to the sum, at zero weights and far from them, whether or not they correct a public
    classifier: examples that are not finite, huge, tiny."""
    torch.manual_seed(0)
    algorithm = build(name, k=10).derived(Facts(500, 30, 60, classes, several, 0.2, labelled))
    public_y = torch.randint(2, (60, classes)) if several else torch.randint(classes, (60,))
    frozen = algorithm.frozen(Split(features(60), public_y), 30, secret)
    assert (frozen.offsets > 0) == (labelled and name == "whitened_head")
    x = features(40, seed=1)
    attacks = torch.cat([x[:4] * size for size in (1e-30, 1e-3, 1e3, 1e18, 3e38)] + [torch.zeros(1, 30)])
    broken = x[:3].clone()
    broken[0, 4], broken[1, 4], broken[2] = math.nan, math.inf, 3e38
    attacks = torch.cat([attacks, broken])

    def labels(rows):
        y = torch.randint(classes, (rows,))
        return torch.nn.functional.one_hot(y, classes).float() if several else y

    for scale in (0.0, 1.0, 1e3):
        model = (OffsetLinear if frozen.offsets else torch.nn.Linear)(10, classes)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=scale)
        gradients = LinearGradients(model)
        view = View(model, gradients, None, classes, several, secret, 500, steps=30)
        mechanism, y = algorithm.mechanism(view, 0), labels(40)
        assert mechanism.sensitivity == 1.0
        without = mechanism.clipped_sum(gradients.matrix(frozen(x), y))
        for row in attacks.split(1):
            label = labels(1)
            moved = mechanism.clipped_sum(gradients.matrix(frozen(torch.cat([x, row])), torch.cat([y, label])))
            assert torch.isfinite(moved).all()
            assert float((moved - without).norm()) <= 1 + accountant.ROUNDING


# The single release


@pytest.mark.parametrize("bias", [True, False])
def test_one_step_without_noise_is_the_linear_discriminant(bias, tmp_path):
    """Of four classes, one of which is absent: the weights of the class means over one variance."""
    torch.manual_seed(0)
    y = torch.arange(600) % 3
    x = LENGTH * torch.nn.functional.normalize(torch.randn(600, 8) + 1.5 * torch.eye(8)[y], dim=1)
    x = x - x.mean(0)  # as a public mean would
    x = x * LENGTH / x.norm(dim=1).max()  # none is clipped
    algorithm = build("whitened_head_once", k=8).derived(Facts(600, 8, 100, 4, False, math.inf))
    model = at_zero(8, 4, bias)
    training = training_of(algorithm)
    private = Split(x, y)
    task = Task(private, None, private, 4, "accuracy", (0.5,), (0.5,), ())
    job = Job(algorithm, schedule(600, training), 0.0, training, "name", tmp_path / "checkpoint.pt")
    fit(model, task, job, secret_named())
    assert job.schedule.steps == 1

    shares = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.025]) / 1.025 if bias else torch.full((4,), 0.25)
    sums = torch.stack([x[y == c].sum(0) for c in range(4)]) / 600
    means = sums / shares[:, None]
    variance = (LENGTH**2 - (shares * means.square().sum(1)).sum()) / 8
    torch.testing.assert_close(model.weight.detach(), means / variance, rtol=1e-3, atol=1e-3)
    if bias:
        want = shares.log() - means.square().sum(1) / (2 * variance)
        torch.testing.assert_close(model.bias.detach(), want, rtol=1e-3, atol=1e-3)
    assert float((model(x).argmax(1) == y).float().mean()) > 0.75


def test_one_step_of_several_labels_ranks_the_examples_of_each():
    torch.manual_seed(0)
    y = (torch.rand(800, 3) < torch.tensor([0.5, 0.2, 0.05])).float()
    x = LENGTH * torch.nn.functional.normalize(torch.randn(800, 9) + 2 * torch.nn.functional.pad(y, (0, 6)), dim=1)
    x = x - x.mean(0)
    sums, counts = (y - 0.5).T @ x / 800 / 3, (y - 0.5).mean(0) / 3
    weights, biases = discriminant(sums, counts, 1e-4, True)
    scores = x @ weights.T + biases
    for label in range(3):
        has = y[:, label] > 0
        assert float((scores[has, label][:, None] > scores[~has, label]).float().mean()) > 0.75
    assert biases[2] < biases[1] < biases[0]


def test_a_discriminant_of_pure_noise_is_small():
    """A mean that the noise hides is shrunk away."""
    torch.manual_seed(0)
    weights, _ = discriminant(0.1 * torch.randn(5, 40), 0.1 * torch.randn(5), 0.1, False)
    plain, _ = discriminant(0.1 * torch.randn(5, 40), 0.1 * torch.randn(5), 0.0, False)
    assert float(weights.norm()) < 0.1 * float(plain.norm())


# From the command line to the record

WORDS = """run model=pixels distance=none download=false threads=1 epsilon=2 privacy.delta=1e-3
    pair.private=tiny.npz""".split()
PUBLIC = ["pair.public=tiny.npz", "pair.m=30", "pair.take=train"]


@pytest.fixture
def folder(tmp_path, folder):
    """A folder with images of three classes, and with images that have each of three labels or not."""
    draw = np.random.RandomState(0)
    for name, several in (("tiny", False), ("labels", True)):
        chosen = draw.randint(2, size=(460, 3)) if several else np.eye(3, dtype=int)[draw.randint(3, size=460)]
        images = draw.randint(0, 60, (460, 6, 6)).astype(np.uint8)
        images[:, ::2, :] += (180 * chosen[:, :, None]).astype(np.uint8)
        labels = chosen if several else chosen.argmax(1)
        write_npz(f"{name}.npz", (images[60:], labels[60:]), (images[:60], labels[:60]))
    return tmp_path


@pytest.mark.parametrize("name", ["whitened_head", "whitened_head_once"])
@pytest.mark.parametrize("data", ["tiny", "labels"])
def test_a_run_needs_no_settings(name, data, folder, capsys):
    words = [word.replace("tiny", data) for word in (*WORDS, *PUBLIC)]
    assert main([*words, f"algorithm={name}"]) == 0, capsys.readouterr().err
    record = only_record()
    assert record["privacy"]["steps"] == (1 if name.endswith("once") else 30)
    assert (record["privacy"]["sampling"], record["privacy"]["accountant"]) == ("full batch", "exact Gaussian")
    assert record["privacy"]["epsilon"] == pytest.approx(2)
    all_features = 36 if record["derived"].get("rest") else 0
    assert record["derived"]["k"] == record["parameters"] // 3 - 1 - all_features == 29
    norm = math.sqrt(2 / 3) if data == "tiny" else 1 / (2 * math.sqrt(3))
    assert record["derived"]["clip_norm"] == pytest.approx((1 if name.endswith("once") else CLIP) * ROW * norm)
    assert record["utility"] > 0.75


def test_settings_of_training_that_are_given_make_no_other_run(folder, capsys):
    assert main([*WORDS, *PUBLIC, "algorithm=whitened_head"]) == 0, capsys.readouterr().err
    others = ["training=pillar", "training.learning_rate=3", "training.momentum=0", "training.average=true"]
    assert main([*WORDS, *PUBLIC, "algorithm=whitened_head", *others]) == 0
    assert "finished before" in capsys.readouterr().err
    training = only_record()["settings"]["training"]
    assert [training[key] for key in ("steps", "momentum", "batch_size")] == [30, 0.9, 10**9]


def test_a_run_without_public_data(folder, capsys):
    assert main([*WORDS, "pair.public=null", "algorithm=whitened_head"]) == 0, capsys.readouterr().err
    record = only_record()
    assert (record["public"], record["private_examples"], record["derived"]["k"]) == (None, 400, 36)
    assert record["utility"] > 0.75
    assert main([*WORDS, "pair.public=null", "algorithm=whitened_head_once"]) == 2
    assert "algorithm=whitened_head_once needs public data" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["whitened_head", "whitened_head_once"])
def test_without_noise(name, folder, capsys):
    assert main([*WORDS, *PUBLIC, f"algorithm={name}", "epsilon=inf"]) == 0, capsys.readouterr().err
    assert only_record()["utility"] > 0.9


BALANCED = ["pair.public=null", "epsilon=40", "pair.metric=balanced_accuracy"]  # the first release has counts too


@pytest.mark.parametrize("which", [PUBLIC, ["pair.public=null", "epsilon=40"], BALANCED])
def test_a_run_that_was_killed_ends_like_another(which, folder, capsys, monkeypatch):
    words = [*WORDS, *which, "algorithm=whitened_head", "training.checkpoint_seconds=0"]
    assert main(words) == 0, capsys.readouterr().err
    record = only_record()
    whole, steps = record["weights"], record["privacy"]["steps"]
    assert steps == record["derived"]["steps"] + record["derived"].get("steps_of_mean", 0)
    assert (steps > 30) == (which != PUBLIC)
    assert record["privacy"]["epsilon"] == pytest.approx(record["epsilon"])
    assert record["privacy"]["noise_multiplier"] == pytest.approx(
        math.sqrt(steps) / accountant.gaussian_mu(record["epsilon"], 1e-3), rel=1e-3
    )
    report = pubsel.training.loop._report

    def killed(step, *rest):
        report(step, *rest)
        if step == 11:
            raise KeyboardInterrupt

    monkeypatch.setattr("pubsel.training.loop._report", killed)
    assert main([*words, "results=other"]) == 130
    monkeypatch.setattr("pubsel.training.loop._report", report)
    assert main([*words, "results=other"]) == 0, capsys.readouterr().err
    assert only_record("other")["weights"] == whole


@pytest.mark.parametrize("name", ["whitened_head", "whitened_head_once"])
def test_a_finished_run_is_repeated_attacked_and_audited(name, folder, capsys):
    words = [*WORDS, *PUBLIC, f"algorithm={name}"]
    assert main(words) == 0, capsys.readouterr().err
    (path,) = Path("results").glob("runs/*/result.json")
    assert main(["run", f"replay={path}"]) == 0, capsys.readouterr().err
    assert main(["attack", "loss", "run=all", "device=cpu"]) == 0, capsys.readouterr().err
    assert 0.3 < only_record(kind="attacks")["auc"] < 0.7
    assert main(["audit", *words[1:], "audit.kind=per_instance"]) == 0, capsys.readouterr().err
    assert only_record(kind="audits")["failed"] == []
