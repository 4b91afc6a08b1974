"""Per-example gradients against one-at-a-time autograd in float64, and norms that never read low."""

import pytest
import torch
from opacus.grad_sample import GradSampleModule

from pubsel.gradients.matrix import Basis, DenseGradients, PerExampleGradients, clip_factors, product, row_norms
from pubsel.gradients.per_example import losses_of
from pubsel.models import build, small
from pubsel.settings.keys import Model, Norm

SHAPES = {
    "fmnist_cnn": (1, 28, 28),
    "mnist_cnn": (1, 28, 28),
    "linear": (1, 8, 8),
    "resnet20": (3, 16, 16),
    "wrn_10_1": (3, 8, 8),
    "probe": (3, 96, 96),
}


def network(name, dtype=torch.float64):
    torch.manual_seed(0)
    return small.NETWORKS[name](*SHAPES[name], 10).to(dtype).eval()


def one_at_a_time(model, x, y):
    rows = []
    for xi, yi in zip(x, y, strict=True):
        model.zero_grad()
        losses_of(model(xi[None]), yi[None]).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_the_gradients_of_single_examples(name):
    model = network(name)
    x, y = torch.randn(5, *SHAPES[name], dtype=torch.float64), torch.randint(10, (5,))
    found = PerExampleGradients(model, chunk=2).matrix(x, y)
    torch.testing.assert_close(found.rows, one_at_a_time(model, x, y), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_library_models_have_gradients_of_their_own(name):
    """BatchNorm is replaced, so that an example's gradient does not depend on its batch."""
    model = build(
        Model(name, "resnet18", False, None, Norm.replace, None), (3, 32, 32), 4, (0.5,) * 3, (0.5,) * 3, seed=0
    )
    model = model.double()
    x, y = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8), torch.randint(4, (3,))
    found = PerExampleGradients(model, chunk=3).matrix(x, y)
    torch.testing.assert_close(found.rows, one_at_a_time(model, x, y), rtol=1e-8, atol=1e-11)


def test_multi_label_gradients():
    model = network("linear")
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.randint(2, (4, 10)).double()
    found = PerExampleGradients(model, chunk=3).matrix(x, y)
    torch.testing.assert_close(found.rows, one_at_a_time(model, x, y))


def test_blocks_make_up_the_matrix():
    model = network("fmnist_cnn")
    x, y = torch.randn(37, 1, 28, 28, dtype=torch.float64), torch.randint(10, (37,))
    gradients = PerExampleGradients(model, chunk=2)
    blocks = [block.rows.clone() for block in gradients.blocks(x, y, rows=15)]
    assert [len(b) for b in blocks] == [16, 16, 5]
    torch.testing.assert_close(torch.cat(blocks), gradients.matrix(x, y).rows)
    assert list(gradients.blocks(x[:0], y[:0])) == []


def test_chosen_parameters_only():
    model = network("fmnist_cnn")
    names = [n for n, _ in model.named_parameters() if n.endswith("weight")]
    x, y = torch.randn(2, 1, 28, 28, dtype=torch.float64), torch.randint(10, (2,))
    gradients = PerExampleGradients(model, chunk=2, names=names)
    assert gradients.size == sum(p.numel() for n, p in model.named_parameters() if n in names)
    whole = PerExampleGradients(model, chunk=2)
    want = torch.cat([whole.matrix(x, y).rows[:, whole.offsets[n]] for n in names], dim=1)
    torch.testing.assert_close(gradients.matrix(x, y).rows, want)


@pytest.mark.parametrize("name", ["fmnist_cnn", "resnet20"])
def test_clipped_sum_equals_opacus_in_float64(name):
    """The peer: opacus hooks, rows clipped at a bound that cuts about half of them, no noise."""
    model = network(name)
    x, y = torch.randn(6, *SHAPES[name], dtype=torch.float64), torch.randint(10, (6,))
    ours = PerExampleGradients(model, chunk=4).matrix(x, y)
    bound = float(ours.row_norms().median())
    factors = clip_factors(ours.row_norms(), bound)

    peer = GradSampleModule(model.to(memory_format=torch.contiguous_format), loss_reduction="sum").train()
    losses_of(peer(x), y).sum().backward()
    rows = torch.cat([p.grad_sample.flatten(1) for p in peer.parameters()], dim=1)
    want = ((bound / rows.norm(dim=1)).clamp(max=1)[:, None] * rows).sum(0)
    torch.testing.assert_close(ours.combine(factors), want, rtol=3e-5, atol=1e-9)  # the margin of clip_factors


@pytest.mark.parametrize("p", [1, 511, 512, 5000, 268_346])
def test_float32_norms_do_not_read_low(p):
    rows = torch.randn(4, p)
    exact = rows.double().norm(dim=1)
    assert ((row_norms(rows) - exact).abs() / exact).max() < 1e-6


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1, 1e6, 1e15])
def test_no_clipped_row_exceeds_its_bound(scale):
    rows = torch.randn(16, 10_007) * scale
    weights = clip_factors(row_norms(rows), 2.5).float()
    assert ((rows * weights[:, None]).double().norm(dim=1) <= 2.5).all()


def test_products_over_millions_of_columns_are_accurate():
    """In float32, sums over them are off by 3e-4, which hides that much of a residual's norm."""
    rows, b = torch.linspace(0, 1, 2**21)[None], torch.ones(2**21, 1)
    assert float(product(rows, b)) == pytest.approx(float(rows.double().sum()), rel=2e-5)


def test_short_rows_keep_their_direction_and_length():
    rows = torch.randn(3, 100) * 1e-3
    torch.testing.assert_close(rows * clip_factors(row_norms(rows), 1.0).float()[:, None], rows, rtol=2e-5, atol=0)


def test_rows_that_are_not_finite_count_as_zero():
    rows = torch.randn(5, 600)
    rows[1, 3], rows[2, 599], rows[3] = float("nan"), float("inf"), 3e38
    found = DenseGradients(rows.clone())
    assert torch.equal(found.row_norms()[1:4], torch.zeros(3, dtype=torch.float64))
    assert torch.equal(found.rows[1:4], torch.zeros(3, 600))
    assert torch.equal(found.rows[[0, 4]], rows[[0, 4]])


def test_matrix_products():
    rows = torch.randn(7, 12, dtype=torch.float64)
    g = DenseGradients(rows.clone())
    blocks = [torch.linalg.qr(torch.randn(n, 2, dtype=torch.float64)).Q for n in (5, 7)]
    basis = Basis([slice(0, 5), slice(5, 12)], blocks)
    b = torch.block_diag(*blocks)
    torch.testing.assert_close(g.project(basis), rows @ b)
    torch.testing.assert_close(basis.expand(torch.ones(4, dtype=torch.float64)), b.sum(1))
    torch.testing.assert_close(g.combine(torch.ones(7, dtype=torch.float64)), rows.sum(0))
    torch.testing.assert_close(g.gram(), rows @ rows.T)
    assert basis.size == 4
    assert len(g) == 7
