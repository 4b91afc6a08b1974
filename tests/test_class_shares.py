"""Balanced accuracy: the released counts of classes, the weights that follow from them, and what they gain."""

import math

import numpy as np
import pytest
import torch

from pubsel.algorithms import Facts, FirstRelease, Frozen, View, columns
from pubsel.algorithms.class_shares import counted, shares_of, weights_by_rarity
from pubsel.algorithms.dp_sgd import NOISE, clip_weights, clipped_sum
from pubsel.algorithms.whitened_head import BALANCE, centred, discriminant
from pubsel.cli import main
from pubsel.data import Split
from pubsel.gradients.factored import LinearGradients, OffsetLinear
from pubsel.training.loop import noisy_sum
from tests.made import build, only_record, secret, write_npz

C, D = 3, 8
BEFORE = {
    "nothing": Frozen(),
    "private centre": centred(D, 100, 0.3, True),
    "histogram": columns.released(D, D, 100, 0.3, 1.0),
}


def with_classes(x, y):
    return torch.cat([x, torch.nn.functional.one_hot(y, C).to(x)], 1)


# The release


@pytest.mark.attack
@pytest.mark.parametrize("before", BEFORE)
def test_one_example_moves_map_and_counts_by_at_most_one_together(before):
    release = counted(BEFORE[before], C, 0.3, 0.4, BALANCE)
    torch.manual_seed(0)
    others = with_classes(torch.randn(20, D), torch.randint(C, (20,)))
    without, reached = release.clipped_sum(others), 0.0
    for size in (1e-30, 1.0, 1e30):
        for c in range(C):
            row = with_classes(size * torch.randn(1, D), torch.tensor([c]))
            reached = max(reached, float((release.clipped_sum(torch.cat([others, row])) - without).norm()))
    assert 0.999 < reached <= release.sensitivity == 1.0
    sizes = {"nothing": 0, "private centre": D, "histogram": D * (len(columns.edges()) - 1)}
    assert release.size == len(without) == C + sizes[before]


@pytest.mark.attack
def test_a_person_moves_counts_by_at_most_one_however_many_examples():
    release = counted(BEFORE["private centre"], C, 0.3, 0.4, BALANCE)
    sums = []

    def total(x, y, sizes):
        kept = release._replace(decode=sums.append)
        noisy_sum(kept, x, 0.0, secret("x", 0), 64, torch.tensor(sizes), y)
        return sums.pop()

    x, y = torch.randn(6, D), torch.tensor([0, 1, 2, 0, 1, 2])
    alike = torch.randn(1, D).expand(300, D)
    moved = total(torch.cat([x, alike]), torch.cat([y, y.new_full((300,), 2)]), [2, 4, 300]) - total(x, y, [2, 4])
    assert 0.9999 < float(moved.norm()) <= 1


def test_a_release_of_classes_is_never_of_features_alone():
    with pytest.raises(AssertionError):
        noisy_sum(counted(Frozen(), C, 0.3, 1.0, BALANCE), torch.zeros(4, D + C), 0.0, secret("x", 0))


@pytest.mark.parametrize("before", BEFORE)
def test_what_is_decoded(before):
    """Without noise: the map of `before`, and weights of the true shares."""
    torch.manual_seed(1)
    x, y = torch.randn(100, D), torch.tensor([0] * 64 + [1] * 32 + [2] * 4)
    inner, release = BEFORE[before], counted(BEFORE[before], C, 1e9, 0.4, BALANCE)
    frozen = release.decode(release.clipped_sum(with_classes(x, y)))
    torch.testing.assert_close(frozen.class_weights, torch.tensor([0.25, 8**-0.5, 1.0]))
    plain = inner.decode(inner.clipped_sum(x)) if isinstance(inner, FirstRelease) else inner
    torch.testing.assert_close(frozen(x), plain(x))
    again = Frozen.of_parts(frozen.parts())  # as it is kept on disk
    assert torch.equal(again(x), frozen(x))
    assert torch.equal(again.class_weights, frozen.class_weights)


def test_counts_are_no_smaller_than_their_noise():
    counts = torch.tensor([-30.0, 0.5, 4, 96], dtype=torch.float64)
    assert shares_of(counts, 0.0).tolist() == pytest.approx([1 / 102, 1 / 102, 4 / 102, 96 / 102])
    assert shares_of(counts, 8.0).tolist() == pytest.approx([1 / 15, 1 / 15, 1 / 15, 12 / 15])
    assert weights_by_rarity(torch.tensor([0.01, 0.25, 0.74]), -0.5).tolist() == pytest.approx(
        [1, 0.2, 0.1 / 0.74**0.5]
    )


@pytest.mark.parametrize(
    ("facts", "share"),
    [
        (Facts(n=4000, d=D, m=0, classes=C, mu=1.0), 0.08),  # with a private centre
        (Facts(n=4000, d=D, m=0, classes=C, mu=1.0, raw=D), 0.33),  # with a histogram of columns
        (Facts(n=4000, d=D, m=90, classes=C, mu=0.5), 0.03),
        (Facts(n=4000, d=D, m=90, classes=C, mu=0.5, same_task=True), 0.0),  # public labels are counted
    ],
)
def test_the_counts_are_paid_for(facts, share):
    plain, algorithm = (build("whitened_head").derived(facts._replace(balanced=b)) for b in (False, True))
    assert algorithm.released == pytest.approx(share)
    assert (algorithm.mu / facts.mu) ** 2 == pytest.approx(1 - share)
    assert algorithm.first_steps == (max(1, round(algorithm.steps * share / (1 - share))) if share else 0)
    assert plain.counts == build("whitened_head_once").derived(facts._replace(m=90, balanced=True)).counts == 0


def test_counts_have_the_noise_of_their_share():
    algorithm = build("whitened_head").derived(Facts(n=4000, d=D, m=0, classes=C, mu=0.5, balanced=True))
    release = algorithm.frozen(None, D, secret)
    mu = 0.5 * math.sqrt(algorithm.first_steps / (algorithm.first_steps + algorithm.steps))
    scale = math.sqrt(algorithm.counts / algorithm.released)  # of a count in the sum, whose noise is 1 / mu
    total = release.clipped_sum(with_classes(torch.zeros(40, D), torch.zeros(40).long()))
    assert total.tolist() == pytest.approx([0.0] * D + [40 * scale, 0, 0])
    noise = 1 / (mu * scale)
    total[D:] = scale * torch.tensor([100 * noise, 4 * noise, noise / 9])
    torch.testing.assert_close(release.decode(total).class_weights, torch.tensor([0.1, 0.5, 1.0]))


# Weights in training


def model_with(weights, offsets=False):
    torch.manual_seed(0)
    model = (OffsetLinear if offsets else torch.nn.Linear)(D, C)
    model.register_buffer("class_weights", weights, persistent=False)
    return model


@pytest.mark.parametrize("offsets", [False, True])
def test_the_loss_of_an_example_is_multiplied_by_the_weight_of_its_class(offsets):
    weights = torch.tensor([1.0, 0.5, 0.1])
    model = model_with(weights, offsets)
    x, y = torch.randn(7, D + (C if offsets else 0)), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    made = LinearGradients(model).matrix(x, y)
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none") * weights[y]
    torch.testing.assert_close(made.losses, losses.detach())
    for i in range(7):
        grads = torch.autograd.grad(losses[i], list(model.parameters()), retain_graph=True)
        torch.testing.assert_close(made.written_out()[i], torch.cat([g.flatten() for g in grads]))
    assert "class_weights" not in model.state_dict()  # no part of what is given away


@pytest.mark.attack
def test_a_weighted_row_is_clipped_after_its_weight():
    x, y = 1e4 * torch.randn(30, D), torch.randint(C, (30,))
    made = LinearGradients(model_with(torch.tensor([1e6, 1.0, 1e-6]))).matrix(x, y)
    assert float((made.row_norms() * clip_weights(made, 0.5)).max()) <= 1
    rows = [clipped_sum(LinearGradients(model_with(torch.tensor([1e6, 1.0, 1.0]))).matrix(x[:1], y[:1] * 0), 0.5)]
    assert 0.99 < float(rows[0].norm()) <= 1


# After training


def finished(algorithm, public=None, weights=None):
    model = model_with(weights)
    bias = model.bias.detach().clone()
    view = View(model, LinearGradients(model), public, C, False, secret, 1000, steps=30, same_task=True)
    algorithm.finish(view)
    return bias, model.bias.detach()


def test_biases_are_of_classes_that_are_equally_frequent():
    """By public labels in full; by weights as far as these have not done it, before what has noise is divided."""
    facts = Facts(n=1000, d=D, m=7, classes=C, mu=0.5, same_task=True, balanced=True)
    public = Split(torch.zeros(7, D), torch.tensor([0, 0, 0, 0, 0, 1, 1]))
    before, after = finished(build("whitened_head").derived(facts), public)
    want = torch.tensor([6.0, 3.0, 1.0]).log()
    torch.testing.assert_close((before - after).diff(), want.diff())

    unlabelled = build("whitened_head").derived(facts._replace(same_task=False))
    shares = torch.tensor([0.7, 0.2, 0.1])
    before, after = finished(unlabelled, public, weights_by_rarity(shares, BALANCE))
    plain = finished(build("whitened_head").derived(facts._replace(same_task=False, balanced=False)))[1]
    want = (1 + BALANCE) * shares.log() / math.sqrt(1 + math.pi * NOISE**2 / 8)
    torch.testing.assert_close((plain - after).diff(), want.diff(), rtol=1e-3, atol=0)


def test_a_discriminant_of_equally_frequent_classes_has_no_shares():
    torch.manual_seed(0)
    sums, counts = 0.05 * torch.randn(C, 4), torch.tensor([0.6, 0.3, 0.1]) - 1 / 3
    plain, balanced = (discriminant(sums, counts, 1e-6, False, b) for b in (False, True))
    torch.testing.assert_close(plain[0], balanced[0])
    want = torch.tensor([0.6, 0.3, 0.1]).log()
    torch.testing.assert_close((plain[1] - balanced[1]).diff(), want.diff(), rtol=1e-4, atol=1e-4)


# From the command line


@pytest.fixture
def folder(tmp_path, folder):
    """Images of two classes, of which one in twenty is of the second; hard to tell apart."""
    draw = np.random.RandomState(0)
    labels = (np.arange(1600) % 20 == 0).astype(int)
    labels[1200:] = np.arange(400) % 2
    images = draw.randint(0, 200, (1600, 6, 6))
    images[:, :2] += 40 * labels[:, None, None]
    images = images.astype(np.uint8)
    write_npz("rare.npz", (images[:1200], labels[:1200]), (images[1200:], labels[1200:]))
    return tmp_path


WORDS = """
run pair.private=rare.npz model=pixels distance=none download=false threads=1 epsilon=4 privacy.delta=1e-4
pair.validation=0
""".split()
KNOWN = {
    "labels": ["pair.public=rare.npz", "pair.take=train", "pair.m=200"],
    "no labels": ["pair.public=rare.npz", "pair.take=train", "pair.m=200", "algorithm.public_labels=none"],
    "no public data": ["pair.public=null"],
}


def test_a_fit_that_never_answers_a_class_names_the_remedy(folder, capsys):
    words = ["fit", "rare.npz", "features=pixels", "epsilon=1", "delta=1e-4", "held_out=0", "download=false"]
    remedy = "metric=balanced_accuracy"
    for metric, shown in (("accuracy", True), ("balanced_accuracy", False)):
        assert main([*words, f"metric={metric}", f"to={metric}"]) == 0, capsys.readouterr().err
        assert (remedy in capsys.readouterr().out) == shown


@pytest.mark.parametrize("name", ["whitened_head", "whitened_head_once", "whitened_head_start"])
@pytest.mark.parametrize("known", KNOWN)
def test_a_rare_class_is_learned_if_the_balanced_accuracy_counts(name, known, folder, capsys):
    if (name, known) in (("whitened_head_once", "no public data"), ("whitened_head_start", "no public data")):
        pytest.skip("it needs public data")
    if (name, known) == ("whitened_head_start", "no labels"):
        pytest.skip("it needs public labels")
    utilities = []
    for metric in ("accuracy", "balanced_accuracy"):
        words = [*WORDS, *KNOWN[known], f"algorithm={name}", f"pair.metric={metric}", f"results={metric}"]
        assert main(words) == 0, capsys.readouterr().err
        record = only_record(metric)
        utilities.append(record["utility"])  # the two classes are equally frequent in the test part
        privacy, derived = record["privacy"], record["derived"]
        if name == "whitened_head":
            assert derived.get("balanced", False) == (metric == "balanced_accuracy")
            first = sum(value for key, value in derived.items() if key.startswith("steps_of_"))
            assert privacy["steps"] == derived["steps"] + first
            assert privacy["epsilon"] <= 4
    more, least = (0.04, 0.54) if name == "whitened_head_once" else (0.05, 0.7)
    assert utilities[1] > utilities[0] + more, utilities
    assert utilities[1] > least
