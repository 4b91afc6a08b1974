"""Factored gradients of a linear classifier against the same rows written out, and what they may not hold or exceed."""

import math
from itertools import pairwise, product

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pubsel import algorithms
from pubsel.algorithms import View
from pubsel.algorithms.dp_sgd import clipped_sum
from pubsel.data import Split
from pubsel.gradients import factored
from pubsel.gradients.factored import FactoredGradients, LinearGradients
from pubsel.gradients.matrix import LARGEST, Basis, DenseGradients, PerExampleGradients
from pubsel.settings import CONF
from pubsel.training.loop import engine
from tests.made import secret

D, N = 7, 23
TASKS = {"classes": 5, "binary": 2, "one label": 1, "labels": 3}
both = pytest.mark.parametrize("bias", [True, False])
by_task = pytest.mark.parametrize("task", TASKS)


def linear(out, d=D, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Linear(d, out, bias=bias).to(dtype).eval()


def examples(task, n=N, d=D, dtype=torch.float64):
    torch.manual_seed(1)
    x, out = torch.randn(n, d, dtype=dtype), TASKS[task]
    return x, torch.randint(2, (n, out)).float() if "label" in task else torch.randint(out, (n,))


def factors(bias=True, c=5, n=N, d=D, dtype=torch.float64):
    """G as factors, and the same rows written out by an einsum."""
    torch.manual_seed(2)
    r, x = torch.randn(n, c, dtype=dtype), torch.randn(n, d, dtype=dtype)
    rows = torch.einsum("nc,nd->ncd", r, x).flatten(1)
    return FactoredGradients(r, x, bias), DenseGradients(torch.cat([rows, r], dim=1) if bias else rows)


def cuts(p, *at):
    """A basis whose groups are the columns between `at`."""
    torch.manual_seed(3)
    slices = [slice(a, b) for a, b in pairwise([0, *at, p])]
    return Basis(slices, [torch.linalg.qr(torch.randn(s.stop - s.start, 2, dtype=torch.float64)).Q for s in slices])


def close(found, want):
    assert found.shape == want.shape
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12, check_dtype=False)


# The same as written out


@both
@by_task
def test_rows_and_losses_are_those_of_autograd(task, bias):
    model, (x, y) = linear(TASKS[task], bias=bias), examples(task)
    want, found = PerExampleGradients(model, chunk=4).matrix(x, y), LinearGradients(model)
    (block,) = found.blocks(x, y)
    assert (found.size, found.offsets) == (want.rows.shape[1], PerExampleGradients(model).offsets)
    close(block.written_out(torch.ones(N, dtype=torch.bool)), want.rows)
    close(block.losses, want.losses)
    assert not block.losses.requires_grad


def some_unknown(y):
    """0/1 rows of which every third label is not known, none of the first, and all of the second."""
    y = y.clone()
    y.view(-1)[::3] = math.nan
    y[0], y[1] = 1.0, math.nan
    return y


@both
@pytest.mark.parametrize("way", [LinearGradients, PerExampleGradients])
def test_an_unknown_label_adds_nothing_to_the_mean_over_all(bias, way):
    model, (x, y) = linear(3, bias=bias), examples("labels")
    y, (block,) = some_unknown(y), way(model).blocks(x, some_unknown(y), N)
    z = x @ model.weight.T + (model.bias if bias else 0)
    r = torch.where(y.isnan(), 0, (z.sigmoid() - y) / 3).detach()
    rows = torch.einsum("nc,nd->ncd", r, x).flatten(1)
    close(block.written_out(torch.ones(N, dtype=torch.bool)), torch.cat([rows, r], 1) if bias else rows)
    close(block.losses, torch.where(y.isnan(), 0, -(z.sigmoid() - (1 - y)).abs().log()).sum(1).detach() / 3)
    assert not block.written_out(torch.arange(N) == 1).any()


@both
def test_every_product_is_that_of_the_rows_written_out(bias):
    g, want = factors(bias)
    p = want.rows.shape[1]
    assert (len(g), g.dtype) == (N, torch.float64)
    close(g.row_norms(), want.row_norms())
    close(g.gram(), want.gram())
    close(g.squared_sum(), want.squared_sum())
    for weights in (torch.randn(N, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)):
        close(g.combine(weights), want.combine(weights))
    total, weights = torch.ones(p, dtype=torch.float64), torch.rand(N, dtype=torch.float64)
    assert g.combine(weights, None, total) is total
    close(total, want.combine(weights) + 1)
    scale = torch.rand(p, dtype=torch.float64) * torch.logspace(-6, 6, p, dtype=torch.float64)
    close(g.scaled_norms(scale), want.scaled_norms(scale))
    chosen = torch.arange(N) % 3 == 0
    close(g.written_out(chosen), want.written_out(chosen))


@both
@pytest.mark.parametrize("at", [(), (35,), (12, 24), (1, 39), (7, 14), (3, 5), (36, 38)], ids=str)
def test_projections_and_powers_for_groups_that_cut_through_classes(at, bias):
    """Of 5 classes x 7 features (and 5 of the bias): one group, layers, three flat slices, single classes, parts."""
    g, want = factors(bias)
    p = want.rows.shape[1]
    basis = cuts(p, *(a for a in at if a < p - 1))
    close(g.project(basis), want.project(basis))
    for s, b in zip(basis.slices, basis.blocks, strict=True):
        found, expected = torch.ones_like(b), torch.ones_like(b)
        g.add_power(found, s, b)
        want.add_power(expected, s, b)
        close(found, expected)


def test_a_large_batch_comes_in_blocks_that_add_up(monkeypatch):
    monkeypatch.setattr(factored, "BLOCK", 5)
    model, (x, y) = linear(5), examples("classes")
    blocks = list(LinearGradients(model).blocks(x, y))
    assert [len(block) for block in blocks] == [5, 5, 5, 5, 3]
    want = PerExampleGradients(model, chunk=N).matrix(x, y)
    close(torch.cat([block.row_norms() for block in blocks]), want.row_norms())
    close(sum(block.combine(torch.ones(len(block), dtype=torch.float64)) for block in blocks), want.rows.sum(0))
    assert list(LinearGradients(model).blocks(x[:0], y[:0])) == []


def test_a_lower_precision_is_of_the_gradients_and_leaves_the_model():
    model, (x, y) = linear(5), examples("classes")
    (block,) = LinearGradients(model).blocks(x, y, dtype=torch.bfloat16)
    assert block.dtype == torch.bfloat16
    assert model.weight.dtype == torch.float64
    want = PerExampleGradients(model).matrix(x, y).rows
    rows = block.written_out(torch.ones(N, dtype=torch.bool)).double()
    assert (rows - want).norm() < 0.02 * want.norm()


def test_the_loop_takes_factors_for_a_linear_classifier_alone():
    assert isinstance(engine(linear(3), None), LinearGradients)
    assert isinstance(engine(torch.nn.Sequential(linear(3)), None), PerExampleGradients)


# Broken rows, and the bound


def hurtful(c=3, d=600, dtype=torch.float32):
    """Factors made to hurt: huge, tiny, zero, overflowing, not finite, alone and against each other. The factor at the
    logits is at most sqrt 2 in training; here it is anything."""
    torch.manual_seed(4)
    r, x = torch.randn(c), torch.randn(d)
    spike = torch.zeros(d)
    spike[-1] = 1
    pairs = [
        (r * a, x * b) for a in (0, 1e-12, 1, 1e17, 1e30) for b in (0, 1e-30, 1e-23, 1e-6, 1, 1e8, 1e17, 1e25, 3e38)
    ]
    pairs += [(r * a, spike * b) for a in (0, 1e-7, 1) for b in (1e17, 1e25, 3e38)]
    for value in (math.nan, math.inf, -math.inf):
        bad_r, bad_x = r.clone(), x.clone()
        bad_r[1], bad_x[513] = value, value
        pairs += [(bad_r, x), (r, bad_x), (bad_r, bad_x), (bad_r, x * 0), (r * 0, bad_x)]
    return [(a.to(dtype)[None], b.to(dtype)[None]) for a, b in pairs]


@both
def test_broken_rows_count_as_zero(bias):
    """In every product, also where the factor at the logits is zero, and infinity times it is not a number."""
    counted = 0
    for r, x in hurtful():
        g = FactoredGradients(r, x, bias)
        exact = r.double().norm() * (x.double().square().sum() + bias).sqrt()
        p = 3 * (600 + bias)
        products = [g.combine(torch.ones(1)), g.gram(), g.squared_sum(), g.written_out(torch.tensor([True]))]
        products += [g.project(Basis([slice(0, p)], [torch.ones(p, 1) / p])), g.scaled_norms(torch.ones(p))]
        assert all(torch.isfinite(product).all() for product in products)
        whole = torch.isfinite(exact) and max(exact, r.double().norm(), x.double().norm()) < LARGEST
        if whole:
            counted += 1
            tiny = 1e-17 * max(1, float(r.norm())) * max(1, float(x.norm()))  # below what float32 can square
            assert exact * (1 - 2e-6) <= g.row_norms()[0] <= exact * (1 + 2e-6) + tiny
        else:
            assert not any(product.any() for product in products)
            assert g.row_norms().tolist() == [0]
    assert counted > 10


def test_a_broken_row_leaves_the_others_alone():
    (r, x), (bad, worse) = (torch.randn(4, 3), torch.randn(4, 6)), (torch.full((1, 3), math.nan), torch.ones(1, 6))
    g = FactoredGradients(torch.cat([r, bad]), torch.cat([x, worse]), True)
    assert torch.equal(g.combine(torch.ones(5)), FactoredGradients(r, x, True).combine(torch.ones(4)))


@both
def test_the_examples_are_not_changed(bias):
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    x[1] = math.inf
    before = x.clone()
    LinearGradients(linear(3, 6, bias, torch.float32)).matrix(x, y).combine(torch.ones(4))
    assert torch.equal(x, before)


@pytest.mark.attack
@pytest.mark.parametrize("way", [LinearGradients, PerExampleGradients])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e30, math.inf, math.nan])
def test_a_row_with_unknown_labels_moves_the_sum_by_at_most_one(size, way):
    """Whichever labels it does not know, and whatever the others do."""
    model, (x, y) = linear(3), examples("labels")
    others, y = Split(x, some_unknown(y)), torch.tensor(list(product([0.0, 1.0, math.nan], repeat=3)))
    before = clipped_sum(*way(model).blocks(*others, N), 0.1)
    for label in y:
        row = torch.cat([others.x, size * torch.ones(1, D)]), torch.cat([others.y, label[None]])
        moved = clipped_sum(*way(model).blocks(*row, N + 1), 0.1) - before
        assert moved.norm() <= 1 + 1e-12
        counts = size < LARGEST and not label.isnan().all()
        assert counts or moved.norm() < 1e-12
        assert size != 1 or moved.norm() >= 0.5 * counts


@both
@pytest.mark.parametrize("bound", [1e-6, 0.01, 1.0, 100.0])
def test_a_clipped_row_never_exceeds_the_bound(bound, bias):
    """One at a time, and the difference that it makes among others; plain, and scaled by column."""
    torch.manual_seed(5)
    p = 3 * (600 + bias)
    scale = torch.logspace(-3, 6, p)[torch.randperm(p)]
    sums = {
        "clipped": lambda g: clipped_sum(g, bound),
        "conditioned": lambda g: clipped_sum(g, bound, scale),
    }
    others = torch.randn(12, 3), torch.randn(12, 600)
    for name, summed in sums.items():
        without = summed(FactoredGradients(*others, bias)).double()
        reached = 0.0
        for r, x in hurtful():
            alone = float(summed(FactoredGradients(r, x, bias)).double().norm())
            assert alone <= 1, (name, r, x)
            both_sets = (torch.cat([a, b]) for a, b in zip(others, (r, x), strict=True))
            moved = summed(FactoredGradients(*both_sets, bias)).double() - without
            assert moved.norm() <= 1 + 1e-5 * float(without.norm())
            reached = max(reached, alone)
        assert reached > 0.999


@both
@pytest.mark.parametrize("bound", [0.001, 1.0])
def test_an_example_of_any_content_moves_the_sum_by_at_most_one(bound, bias):
    """Features through the classifier itself, where huge ones saturate the softmax."""
    gradients = LinearGradients(linear(3, 600, bias, torch.float32))
    for _, x in hurtful():
        for y in range(3):
            (block,) = gradients.blocks(x, torch.tensor([y]))
            assert clipped_sum(block, bound).double().norm() <= 1


def test_a_bound_that_is_one_in_a_thousand_too_wide_is_found():
    """The attack above can fail."""
    (r, x), bound = hurtful()[-20], 1.0
    g = FactoredGradients(torch.ones_like(r), torch.ones_like(x), True)
    assert (1.001 * clipped_sum(g, bound)).double().norm() > 1


# Memory


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return made


@both
def test_nothing_of_the_size_of_the_rows_is_held(bias):
    n, c, d = 400, 30, 50
    gradients = LinearGradients(linear(c, d, bias, torch.float32))
    x, y = torch.randn(n, d), torch.randint(c, (n,))
    p, third = gradients.size, gradients.size // 3
    slices = [slice(0, third), slice(third, 2 * third), slice(2 * third, p)]
    basis = Basis(slices, [torch.randn(s.stop - s.start, 4) for s in slices])
    with Largest() as seen:
        (g,) = gradients.blocks(x, y)
        clipped_sum(g, 1.0)
        clipped_sum(g, 1.0, torch.rand(p))
        g.squared_sum()
        g.combine(torch.ones(n, 2))
        g.project(basis)
        for s, b in zip(slices, basis.blocks, strict=True):
            g.add_power(torch.zeros_like(b), s, b)
    assert seen.entries <= 2 * n * d < n * p / 10
    with Largest() as seen:
        PerExampleGradients(gradients.model).matrix(x, y)
    assert seen.entries >= n * p  # what it would be


# GEP


@both
@pytest.mark.parametrize("groups", ["layers", "slices"])
@pytest.mark.parametrize("residual", [True, False])
def test_gep_is_the_same_on_factors(groups, residual, bias):
    model, (x, y) = linear(5, 20, bias), examples("classes", 60, 20)
    public = Split(torch.randn(40, 20, dtype=torch.float64), torch.randint(5, (40,)))
    settings = yaml.safe_load((CONF / "algorithm" / "gep.yaml").read_text())
    settings |= {"k": 12, "groups": groups, "residual": residual, "clip_embedding": 0.5, "clip_residual": 0.1}
    found = []
    for gradients in (LinearGradients(model), PerExampleGradients(model, 16)):
        view = View(model, gradients, public, 5, False, secret)
        mechanism = algorithms.build(settings).mechanism(view, 0)
        total = sum(mechanism.clipped_sum(block) for block in gradients.blocks(x, y, mechanism.rows))
        assert total.shape == (mechanism.size,)
        found.append(mechanism.decode(total))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)
