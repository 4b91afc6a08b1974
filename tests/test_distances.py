"""Distances beside GSD: closed forms, POT itself, symmetry, what a set is from itself, and what they refuse."""

import importlib
import os
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

from pubsel import distances
from pubsel.commands.rank import open_candidates
from pubsel.data import Reader, Split, open_dataset, public_examples
from pubsel.data.splits import NO_CLASS
from pubsel.distances import frechet, mmd, otdd, task2vec
from pubsel.distances.inputs import class_numbers, penultimate
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError
from pubsel.models import build
from pubsel.privacy.randomness import stream
from pubsel.settings import CONF
from pubsel.settings.keys import Convert, Model, Norm
from pubsel.settings.methods import option
from tests import made
from tests.synthetic import distance

FILES = sorted(path.stem for path in (CONF / "distance").glob("*.yaml"))
RIVALS = [name for name in FILES if option("distance", name).get("name") == name and "gsd" not in name]  # one a class


def settings(name, **changes):
    return distance(name, **({"m": 60, "initialisations": 2} | ({"k": 5} if name == "gsd" else {}) | changes))


network = partial(made.network, name="mnist_cnn", size=28)


def normal(n, mean, spread, seed):
    """Rows whose sample mean and sample covariance are exactly `mean` [d] and diag(spread^2)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, len(mean), generator=generator, dtype=torch.float64)
    x = torch.linalg.qr(x - x.mean(0)).Q * (n - 1) ** 0.5
    return x * torch.as_tensor(spread, dtype=torch.float64) + torch.as_tensor(mean, dtype=torch.float64)


MEANS, SPREADS = ([0.0, 1.0, 2.0], [1.0, 3.0, 1.0]), ([1.0, 2.0, 0.5], [2.0, 2.0, 0.0])
BETWEEN = (1 + 4 + 1) + (1 + 0 + 0.25)  # |m_a - m_b|^2 + sum (s_a - s_b)^2: W2^2 of these Gaussians


# Fréchet


def test_frechet_of_gaussians_with_diagonal_covariances():
    a, b = (frechet.gaussian(normal(50, MEANS[i], SPREADS[i], seed=i)) for i in (0, 1))
    assert frechet.frechet(a, b) == pytest.approx(BETWEEN, rel=1e-9)
    assert frechet.frechet(b, a) == pytest.approx(BETWEEN, rel=1e-9)
    assert frechet.frechet(a, a) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("n", [8, 40])  # fewer examples than dimensions, and more
def test_frechet_is_the_formula_of_fid_and_of_pot(n):
    x, y = torch.randn(n, 12, dtype=torch.float64), 2 * torch.randn(n, 12, dtype=torch.float64) + 1
    found = frechet.frechet(frechet.gaussian(x), frechet.gaussian(y))
    s, t = np.cov(x.T.numpy()), np.cov(y.T.numpy())
    means = float((x.mean(0) - y.mean(0)).square().sum())
    roots = np.sqrt(np.linalg.eigvals(s @ t).real.clip(min=0))
    assert found == pytest.approx(means + np.trace(s + t) - 2 * roots.sum(), rel=1e-5)
    if n > 12:  # both take the root of a singular matrix for what it is not
        assert found == pytest.approx(means + np.trace(s + t - 2 * sqrtm(s @ t).real), rel=1e-6)
        pot = ot.gaussian.bures_wasserstein_distance(x.mean(0).numpy(), y.mean(0).numpy(), s, t)
        assert found == pytest.approx(float(pot) ** 2, rel=1e-6)


# MMD


def test_mmd_written_out():
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64) + 1

    def kernel(a, b):
        return float(torch.exp(-(a - b).square().sum() / (2 * 1.5**2)))

    own = [np.mean([kernel(a, b) for a, b in permutations(s, 2)]) for s in (x, y)]
    want = sum(own) - 2 * np.mean([kernel(a, b) for a in x for b in y])
    assert mmd.mmd(x, y, 1.5) == pytest.approx(want, rel=1e-9)
    assert mmd.mmd(y, x, 1.5) == pytest.approx(want, rel=1e-9)


def test_mmd_of_a_sample_and_itself_is_what_its_docstring_says():
    x = torch.randn(20, 3, dtype=torch.float64)
    assert mmd.mmd(x, x, 1.0) == pytest.approx(2 * (mmd.within(x, 1.0) - 1) / 20, rel=1e-9)
    assert mmd.mmd(x, x, 1.0) < 0


def test_mmd_is_unbiased_and_far_apart_is_the_sum_of_both():
    """Over 400 pairs of samples of one distribution the mean is 0 within four of its standard errors."""
    generator = torch.Generator().manual_seed(0)
    found = [mmd.mmd(*torch.randn(2, 10, 2, generator=generator, dtype=torch.float64), 1.0) for _ in range(400)]
    assert abs(np.mean(found)) < 4 * np.std(found) / 20
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    apart = mmd.mmd(x, x + 1e3, 1.0)
    assert apart == pytest.approx(2 * mmd.within(x, 1.0))


def test_bandwidth_is_the_median_distance():
    x = torch.tensor([[0.0], [1.0], [3.0]])
    assert mmd.median_distance(x) == pytest.approx(2)


# OTDD


def two_classes(seed, shift=0.0):
    """Two classes of 30 examples each."""
    x = torch.cat([normal(30, [0.0 + shift, 0.0], [1, 2], seed), normal(30, [9.0 + shift, 1.0], [2, 1], seed + 1)])
    return otdd.labelled_examples(x, torch.arange(60) // 30)


def test_otdd_of_one_class_sets_is_w2_of_the_examples_and_of_their_gaussians():
    x, y = normal(40, MEANS[0], SPREADS[0], 0), normal(40, MEANS[1], SPREADS[1], 1)
    one = torch.zeros(40, dtype=torch.int64)
    a, b = otdd.labelled_examples(x, one), otdd.labelled_examples(y, one)
    examples = ot.emd2([], [], ot.dist(x.numpy(), y.numpy()))
    assert otdd.otdd(a, b) == pytest.approx((examples + BETWEEN) ** 0.5, rel=1e-9)
    assert otdd.otdd(a, b, exact=True) == pytest.approx((2 * examples) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("exact", [False, True])
def test_otdd_is_the_definition_written_out_on_pot(exact):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = torch.arange(20) % 3, torch.arange(20) // 10
    label = np.zeros((3, 2))
    for i in range(3):
        for j in range(2):
            one, two = x[p == i].numpy(), y[q == j].numpy()
            moments = one.mean(0), two.mean(0), np.cov(one.T), np.cov(two.T)
            exactly = ot.emd2([], [], ot.dist(one, two))
            label[i, j] = exactly if exact else ot.gaussian.bures_wasserstein_distance(*moments) ** 2
    cost = ot.dist(x.numpy(), y.numpy()) + label[p.numpy()][:, q.numpy()]
    found = otdd.otdd(otdd.labelled_examples(x, p), otdd.labelled_examples(y, q), exact)
    assert found == pytest.approx(ot.emd2([], [], cost) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_otdd_of_a_set_and_itself_and_of_a_shifted_one(exact):
    """Moved by s, every example and every class moves by s: the optimum is sqrt(2) s."""
    a, b = two_classes(0), two_classes(0, shift=0.5)
    assert otdd.otdd(a, a, exact) == pytest.approx(0, abs=1e-5)
    assert otdd.otdd(a, b, exact) == pytest.approx(0.5 * 2**0.5, rel=1e-6)
    assert otdd.otdd(b, a, exact) == pytest.approx(otdd.otdd(a, b, exact), rel=1e-9)


def test_otdd_knows_labels_that_images_alone_do_not_show():
    """The same examples with other labels: Fréchet and MMD are blind to them."""
    a = two_classes(0)
    mixed = otdd.labelled_examples(a.x, torch.arange(60) % 2)
    assert otdd.otdd(a, mixed) > 1


def test_classes_of_one_example_have_no_spread():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    a, b = (otdd.labelled_examples(rows, torch.tensor([0, 1])) for rows in (x, x + 1))
    assert otdd.otdd(a, b) == pytest.approx((2 + 2) ** 0.5)


def test_pixels_count_from_0_to_1():
    x = torch.tensor([0, 255, 51, 102], dtype=torch.uint8).view(2, 1, 1, 2)
    assert otdd.labelled_examples(x, torch.tensor([0, 1])).x.flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4])


# Task2Vec


@pytest.mark.parametrize("multi_label", [False, True])
def test_fisher_of_a_linear_classifier(multi_label):
    """F of the weight w_cj is E p_c (1 - p_c) x_j^2, of several labels too; a filter is an output, so its mean over
    j."""
    model = nn.Linear(3, 4, bias=False)
    x = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]]).repeat(10_000, 1)
    logits = model(x).detach().double()
    p = logits.sigmoid() if multi_label else logits.softmax(1)
    want = (p * (1 - p)).T @ x.double().square() / len(x)
    y = task2vec.sample_labels(logits, multi_label, stream("a", "b"))
    found = task2vec.fisher(PerExampleGradients(model), x, y)
    torch.testing.assert_close(found, want.mean(1), rtol=0.05, atol=0)


@pytest.mark.parametrize("multi_label", [False, True])
def test_fisher_of_a_shift_is_that_of_a_layer_before_the_head(multi_label):
    """With inputs of +-1 each weight of filter j has the squared gradient of the shift of its output."""
    body, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3).requires_grad_(False)
    nn.init.eye_(body.weight)
    x = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [-1, 1, 1, 1]]).repeat(10_000, 1)
    logits = last(x).double()
    y = task2vec.sample_labels(logits, multi_label, stream("a", "b"))
    drawn = task2vec.fisher(PerExampleGradients(nn.Sequential(body, last), names=["0.weight"]), x, y)
    exact = task2vec.fisher_of_shift(last.weight.double(), logits, multi_label)
    torch.testing.assert_close(drawn, exact, rtol=0.05, atol=0)


def test_labels_are_drawn_from_the_model():
    logits = torch.tensor([[0.0, 1.0, -1.0]]).repeat(20_000, 1).double()
    drawn = task2vec.sample_labels(logits, False, stream("a", "b"))
    torch.testing.assert_close(drawn.bincount() / 20_000, logits[0].softmax(0).float(), atol=0.02, rtol=0)
    several = task2vec.sample_labels(logits, True, stream("a", "b"))
    torch.testing.assert_close(several.mean(0), logits[0].sigmoid().float(), atol=0.02, rtol=0)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_head_is_at_the_optimum_of_its_objective(classes):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, 5, generator=generator, dtype=torch.float64) * torch.tensor([1, 10, 0.1, 1, 0]) + 3
    y = (z[:, 0] > 3).long() + (2 * (z[:, 3] > 3).long() if classes == 4 else 0)
    weight, bias = task2vec.fit_head(z, y)
    assert weight.shape == (classes, 5)
    assert float(((z @ weight.T + bias).argmax(1) == y).double().mean()) > 0.9
    standard = (z - z.mean(0)) / z.std(0).masked_fill(z.std(0) == 0, 1)
    moved = (weight * z.std(0)).requires_grad_()
    free = (bias + weight @ z.mean(0)).detach().requires_grad_()
    loss = nn.functional.cross_entropy(standard @ moved.T + free, y, reduction="sum")
    penalty = moved.square().sum() if classes > 2 else (moved[1] - moved[0]).square().sum()
    (loss + penalty / 2).backward()
    assert float(moved.grad.abs().max()) < 0.05
    assert float(free.grad.abs().max()) < 0.05


def test_a_label_that_all_have_or_none_has_is_as_likely_as_that():
    z = torch.randn(8, 2, dtype=torch.float64)
    y = torch.stack([torch.ones(8), torch.zeros(8), (z[:, 0] > 0).float()], 1)
    weight, bias = task2vec.fit_head(z, y)
    assert not weight[:2].any()
    assert torch.sigmoid(bias[:2]).tolist() == pytest.approx([0.9, 0.1])


def test_task2vec_is_a_cosine_distance_of_shares():
    a, b = torch.tensor([1.0, 0.0, 3.0, 0.0]).double(), torch.tensor([0.0, 2.0, 3.0, 0.0]).double()
    assert task2vec.task2vec(a, b) == pytest.approx(1 - 0.25 / 1.25)  # (1, 0, 1/2) and (0, 1, 1/2)
    assert task2vec.task2vec(b, a) == task2vec.task2vec(a, b)
    assert task2vec.task2vec(a, a) == pytest.approx(0, abs=1e-12)
    assert task2vec.task2vec(a, 7 * a) == pytest.approx(0, abs=1e-12)
    assert task2vec.task2vec(a[[0, 1]], b[[0, 1]]) == 1
    with pytest.raises(ValueError, match="zero"):
        task2vec.task2vec(a, 0 * a)


def test_the_embedding_has_a_number_for_each_filter_and_leaves_the_network_as_it_was(digits):
    train, *_ = digits
    model = network(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = task2vec.embedding(model, train.x[:50], train.y[:50], stream("a", "b"))
    assert found.shape == (16 + 32,)
    assert bool((found >= 0).all())  # a filter whose ReLU never opens has 0
    assert int((found > 0).sum()) > 24
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_order_of_examples_does_not_matter_to_task2vec_beyond_the_labels_drawn():
    z = torch.randn(80, 6, dtype=torch.float64)
    y = (z[:, 0] > 0).long() + (z[:, 1] > 1).long()
    order = torch.randperm(80)
    found = [task2vec.embedding(nn.Linear(6, 3), *xy, stream("a", "b")) for xy in ((z, y), (z[order], y[order]))]
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


# All of them


@pytest.mark.parametrize("name", [*RIVALS, "gsd"])
def test_own_test_images_are_nearer_than_noise(name, digits):
    train, test, noise = digits
    values = settings(name).measure(network, train, {"digits": test, "noise": noise}, 10, "key")
    assert all(a < b for a, b in zip(values["digits"], values["noise"], strict=True)), values


@pytest.mark.parametrize("name", [*RIVALS, "gsd"])
def test_values_are_paired_and_do_not_depend_on_the_other_candidates(name, digits):
    """A candidate given twice, or alone, has the same values; the second time, under another name, it is a tie."""
    train, test, noise = digits
    method, seen = settings(name).measure, []
    report = lambda *said: seen.append(said)  # noqa: E731
    both = method(network, train, {"a": test, "noise": noise, "b": test}, 10, "key", report)
    alone = method(network, train, {"a": test}, 10, "key")
    assert both["a"] == both["b"] == alone["a"]
    names = [*both]
    assert names[:3] == ["a", "noise", "b"]
    assert names[3:] == [distances.NONE] * settings(name).without
    assert [said[:2] for said in seen[: 2 * len(names)]] == [(i, c) for i in range(2) for c in names]
    assert all(said[2] == both[said[1]][said[0]] and said[3] > 0 for said in seen)


@pytest.mark.parametrize("name", ["otdd", "frechet", "mmd"])
def test_the_order_of_examples_does_not_matter(name, digits):
    train, test, _ = digits
    private, public = Split(train.x[:60], train.y[:60]), Split(test.x[:60], test.y[:60])
    order = torch.randperm(60)
    changed = Split(public.x[order], public.y[order])
    found = settings(name).measure(network, private, {"as is": public, "changed": changed}, 10, "k")
    assert found["as is"] == pytest.approx(found["changed"], rel=1e-5)


@pytest.mark.parametrize(("name", "least"), [("task2vec", 0), ("otdd", 0), ("frechet", 0), ("mmd", -0.04)])
def test_a_set_and_itself(name, least, digits):
    """m is all there is, so both sides are the same examples. MMD^2, unbiased, is -2 (1 - within) / m there."""
    train, *_ = digits
    private = Split(train.x[:60], train.y[:60])
    values = settings(name).measure(network, private, {"itself": private}, 10, "key")
    assert values["itself"] == pytest.approx([0, 0], abs=1e-4 if least == 0 else -least)
    assert all(least <= value <= 1e-4 for value in values["itself"])


@pytest.mark.parametrize("name", sorted({*RIVALS} - {"whitening"}))  # to which a set that varies alike is as near
def test_features_are_measured_as_they_are(name):
    """What `model=` with a backbone makes of images; nothing of the network counts, which starts at zero."""
    generator = torch.Generator().manual_seed(0)

    def sample(shift):
        y = torch.arange(100) % 4
        return Split(torch.randn(100, 12, generator=generator) + nn.functional.one_hot(y, 12) * shift, y)

    def linear(i):
        return nn.Linear(12, 4)

    found = settings(name, m=80).measure(linear, sample(5), {"like": sample(5), "other": sample(-3)}, 4, "key")
    assert all(a < b for a, b in zip(found["like"], found["other"], strict=True)), found


@pytest.mark.parametrize("name", ["task2vec", "otdd"])
def test_several_labels_at_once(name, digits):
    train, test, noise = digits
    private = Split(train.x, torch.stack([train.y % 2 == 0, train.y > 5, train.y > 20], 1).float())
    values = settings(name).measure(network, private, {"a": test, "b": noise}, 3, "key")
    assert all(a < b for a, b in zip(values["a"], values["b"], strict=True)), values


def test_each_set_of_labels_is_a_class():
    y = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert class_numbers("x", y, "otdd").tolist() == [1, 0, 1, 2]
    assert class_numbers("x", torch.tensor([7, 3, 7]), "otdd").tolist() == [1, 0, 1]


def test_labels_that_are_not_known_are_no_class():
    with pytest.raises(UsageError, match="distance=otdd compares labels, and x has some that are not known"):
        class_numbers("x", torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), "otdd")


@pytest.mark.parametrize("name", ["task2vec", "otdd"])
@pytest.mark.parametrize(("labels", "says"), [(0, "no.* has none, or one class alone"), (NO_CLASS, "combines sets")])
def test_candidates_without_labels_are_named(name, labels, says, digits):
    train, test, _ = digits
    flat = Split(test.x, torch.full((len(test.x),), labels))
    with pytest.raises(UsageError, match=rf"distance={name} needs labels, and no.*{says.removeprefix('no.*')}"):
        settings(name).measure(network, train, {"no": flat}, 10, "key")


@pytest.mark.parametrize("name", [*RIVALS, "gsd"])
def test_too_few_examples_are_named(name, digits):
    train, _, noise = digits
    with pytest.raises(UsageError, match=r"distance\.m=101: noise has 100 examples"):
        settings(name, m=101).measure(network, train, {"noise": noise}, 10, "key")
    few = Split(train.x[:70], train.y[:70])
    with pytest.raises(UsageError, match=r"distance\.m=80: the private data has 70 examples"):
        settings(name, m=80).measure(network, few, {"noise": noise}, 10, "key")


@pytest.mark.parametrize("name", ["gsd", "task2vec"])
def test_a_candidate_whose_gradients_are_all_zero_is_named(name):
    y = torch.arange(80) % 4
    good, zero = Split(torch.randn(80, 12), y), Split(torch.zeros(80, 12), y)
    with pytest.raises(UsageError, match="on blank, all gradients are zero"):
        settings(name).measure(lambda i: nn.Linear(12, 4), good, {"good": good, "blank": zero}, 4, "key")


def test_mmd_needs_private_examples_that_differ():
    y = torch.arange(80) % 4
    same = Split(torch.ones(80, 12), y)
    with pytest.raises(UsageError, match="most private examples have the same features"):
        settings("mmd").measure(lambda i: nn.Linear(12, 4), same, {"a": same}, 4, "key")


def test_the_features_are_what_the_head_takes(digits):
    train, *_ = digits
    model = network(0)
    z = penultimate(model, train.x[:300])  # more than one pass
    assert z.dtype == torch.float64
    torch.testing.assert_close(model.net.fc(z.float()), model(train.x[:300]), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="no linear layer"):
        penultimate(nn.Sequential(nn.Conv2d(1, 2, 3)), train.x[:3])


@pytest.mark.parametrize(
    ("name", "of_a_side"),
    [
        ("gsd", "basis_of"),
        ("task2vec", "embedding"),
        ("otdd", "labelled_examples"),
        ("frechet", "gaussian"),
        ("mmd", "penultimate"),
    ],
)
def test_the_private_side_is_computed_once_and_candidates_one_at_a_time(name, of_a_side, digits, monkeypatch):
    """An initialisation computes one side for the private data and one for each candidate, each when its turn comes."""
    train, test, _ = digits
    steps, module = [], importlib.import_module(f"pubsel.distances.{name}")
    side = getattr(module, of_a_side)
    monkeypatch.setattr(module, of_a_side, lambda *args: steps.append("side") or side(*args))
    candidates = {"a": test, "b": test, "c": test}
    settings(name).measure(network, train, candidates, 10, "key", lambda i, name, *_: steps.append(name))
    assert steps == 2 * ["side", "side", "a", "side", "b", "side", "c"]


def test_none_is_no_distance():
    assert distances.build(None) is None
    assert distances.build(option("distance", "none")) is None


def test_each_says_what_it_read():
    reads = {name: distance(name).statement()["reads"] for name in ["dp_gsd", "gsd", *RIVALS]}
    assert {"frechet", "mmd"} <= {name for name in reads if "labels" not in reads[name]}
    assert all("labels" in reads[name] for name in ("task2vec", "otdd", "whitening", "dp_gsd"))
    assert "random labels" in reads["gsd"]
    given = distance("gsd", labels="given").statement()
    assert "images and labels" in given["reads"]
    assert "not differentially private" in given["privacy"]


def test_only_a_distance_with_a_guarantee_is_released():
    assert [name for name in FILES if isinstance(distance(name), distances.Releases)] == ["dp_gsd"]
    with pytest.raises(NotImplementedError):
        settings("dp_gsd", m=2, k=1).to_private(None)


def test_optimal_transport_is_imported_by_what_uses_it():
    """It takes a second, which `pubsel run` need not spend."""
    assert not hasattr(otdd, "ot")


@pytest.mark.data
@pytest.mark.parametrize("name", sorted({*RIVALS, "gsd"} - {"whitening"}))  # which is for features that say more
def test_order_on_fashion_mnist(name):
    """Own test images are nearer than digits."""
    root = os.environ["PUBSEL_DATA"]
    source = open_dataset("fashion_mnist", root, False)
    candidates = {
        name: public_examples(name, 300, source.train, Reader(root), Convert.resize, private="fashion_mnist")[0]
        for name in ("fashion_mnist", "mnist")
    }

    def fmnist_cnn(i):
        return build(Model("fmnist_cnn", None, False, None, Norm.replace, None), (1, 28, 28), 10, (0.286,), (0.353,), i)

    values = settings(name, m=300).measure(fmnist_cnn, source.train, candidates, 10, "key")
    assert all(a < b for a, b in zip(values["fashion_mnist"], values["mnist"], strict=True)), values


def test_the_examples_of_candidates_lie_in_files_not_in_memory(tmp_path):
    """A hundred candidates take no more memory than one: their pages are those of files, which the system can drop."""
    words = ["private=digits", "public=[digits,noise]", "model=linear", "distance=mmd", "distance.m=90"]
    settings = made.checked("rank", *words, "data_root=nowhere")
    task, candidates = open_candidates(settings, torch.device("cpu"), tmp_path)
    digits = open_dataset("digits", "nowhere", False)
    assert torch.equal(candidates["digits"].x, digits.test.x[:90])
    assert torch.equal(task.private.x, digits.train.x)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    for place, split in enumerate(candidates.values()):
        own = [words[0].split("-") for words in mapped if words[-1] == str(tmp_path / f"{place}.npy")]
        assert any(int(low, 16) <= split.x.data_ptr() < int(high, 16) for low, high in own)
