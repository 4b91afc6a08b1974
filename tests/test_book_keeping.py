"""Wide layers that are kept as inputs and errors: the same numbers as gradients that are written out."""

import copy

import pytest
import torch
from torch import nn

from pubsel.gradients.book_keeping import BookKeeping, KeptInputs, LayeredGradients
from pubsel.gradients.matrix import Basis, DenseGradients, PerExampleGradients, clip_factors
from pubsel.gradients.per_example import by_vmap
from pubsel.gradients.standardised import StandardConv2d
from pubsel.privacy.accountant import ROUNDING

N = 23


class OverTokens(nn.Module):
    """A mean over three tokens that went through two wide layers, and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 400), nn.Linear(400, 350, bias=False)
        self.norm, self.head = nn.LayerNorm(350), nn.Linear(350, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(torch.relu(self.first(x)))).mean(1))


class TokensFirst(nn.Module):
    """The mean over tokens of a transformer of torch, as it is by default: [tokens, n, 64]. It has two wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.TransformerEncoderLayer(64, 2, 1024), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.transpose(0, 1)).mean(0))


def mlp() -> nn.Module:
    layers = nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 300, bias=False), nn.ReLU(), nn.Linear(300, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def convolutions() -> nn.Module:
    """Two wide ones of four positions each after a narrow one."""
    wide = nn.Conv2d(40, 300, 2, stride=2, padding=1), nn.ReLU(), nn.Conv2d(300, 120, 1, bias=False), nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.ReLU(), *wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(120, 5)
    )


NETWORKS = {
    "mlp": (mlp, (1, 28, 28)),
    "tokens": (OverTokens, (3, 300)),
    "tokens first": (TokensFirst, (3, 64)),
    "convolutions": (convolutions, (3, 4, 4)),
}


@pytest.fixture(params=NETWORKS)
def problem(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    build, shape = NETWORKS[request.param]
    torch.manual_seed(1)
    return build().eval(), torch.randn(N, *shape), torch.arange(N) % 5


def one_block(engine: PerExampleGradients, x: torch.Tensor, y: torch.Tensor):
    (block,) = engine.blocks(x, y, rows=len(x))
    return block


def test_it_is_what_vmap_computes_in_float64(problem) -> None:
    """In several passes; norms, sums, and all that needs the columns."""
    model, x, y = problem
    double = copy.deepcopy(model).double()
    out = {name: torch.zeros(N, *p.shape, dtype=torch.float64) for name, p in double.named_parameters()}
    losses = by_vmap(double, x.double(), y, out)
    rows = torch.cat([part.flatten(1) for part in out.values()], 1)
    exact = DenseGradients(rows.clone())

    block = one_block(BookKeeping(double, 8), x.double(), y)
    assert isinstance(block, LayeredGradients)
    assert len(block.kept) == 2
    weights = torch.rand(N, dtype=torch.float64)
    torch.testing.assert_close(block.row_norms(), exact.row_norms(), rtol=1e-10, atol=0)
    torch.testing.assert_close(block.combine(weights), exact.combine(weights))
    for g in (block, exact):  # added to the sum of other blocks, where that is
        total = torch.ones(rows.shape[1], dtype=torch.float64)
        assert g.combine(weights, None, total) is total
        torch.testing.assert_close(total, exact.combine(weights) + 1)
    torch.testing.assert_close(block.losses, losses)
    assert "rows" not in vars(block)  # nothing was written out for these
    torch.testing.assert_close(block.written_out(), rows)
    torch.testing.assert_close(block.gram(), exact.gram())
    torch.testing.assert_close(block.squared_sum(), exact.squared_sum())
    torch.testing.assert_close(block.combine(weights[:, None]), exact.combine(weights[:, None]))
    torch.testing.assert_close(block.scaled_norms(rows[0]), exact.scaled_norms(rows[0]))
    basis = Basis([slice(0, 50), slice(50, rows.shape[1])], [torch.eye(50, 3).double(), rows[:2, 50:].T.contiguous()])
    torch.testing.assert_close(block.project(basis), exact.project(basis))


def test_a_float32_step_is_that_of_gradients_that_are_written_out(problem) -> None:
    model, x, y = problem
    want, got = (one_block(kind(model), x, y) for kind in (PerExampleGradients, BookKeeping))
    factors = clip_factors(want.row_norms(), 0.1)
    torch.testing.assert_close(got.row_norms(), want.row_norms(), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.combine(factors), want.combine(factors), rtol=1e-5, atol=1e-8)


def test_what_has_no_wide_layer_is_written_out() -> None:
    small = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.Linear(20, 3)).eval()
    engine = BookKeeping(small)
    assert isinstance(one_block(engine, torch.randn(4, 1, 4, 4), torch.zeros(4, dtype=torch.long)), DenseGradients)
    # the square of so many tokens is more than the gradient
    for many_tokens, x in ((OverTokens(), torch.randn(2, 300, 300)), (TokensFirst(), torch.randn(2, 4, 64))):
        block = one_block(BookKeeping(many_tokens.eval()), x, torch.zeros(2, dtype=torch.long))
        assert type(block) is DenseGradients
    assert list(BookKeeping(small).blocks(torch.randn(0, 1, 4, 4), torch.zeros(0, dtype=torch.long))) == []


def test_memory_does_not_hold_the_gradients() -> None:
    """A pass takes many examples although one gradient is large."""
    model = mlp().eval()
    engine, written = BookKeeping(model), PerExampleGradients(model)
    x, y = torch.randn(300, 1, 28, 28), torch.arange(300) % 10
    assert written.chunk(x) < 100
    block = next(engine.blocks(x, y))
    assert (engine.chunk(x), len(block)) == (256, 300)
    kept = sum(layer.a.numel() + layer.e.numel() for layer in block.kept)
    assert block.narrow.numel() + kept < 256 * engine.size / 20


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["random", "cancels", "cancels nearly", "huge", "tiny", "not finite", "infinite"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_one_row_moves_the_clipped_sum_by_at_most_one(kind: str, tokens: int) -> None:
    """Whatever its inputs and errors are: also where those of its tokens cancel, to the last bit or nearly."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def block(a: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        kept = [KeptInputs(slice(3, 3 + 30 * 40), slice(1203, 1233), a, e)]
        g = LayeredGradients(torch.ones(len(a), 3), [slice(0, 3)], kept, 1233)
        return g.combine(clip_factors(g.row_norms(), 1.0))

    for trial in range(30):
        a, e = random(50, tokens, 40), random(50, tokens, 30)
        row_a, row_e = random(1, tokens, 40), random(1, tokens, 30)
        if kind.startswith("cancels"):
            row_a, row_e = 1e8 * row_a[:, :1].expand(1, tokens, 40).clone(), row_e[:, :1].repeat(1, tokens, 1)
            row_e *= torch.tensor([1.0, -1.0]).repeat(tokens)[:tokens, None]
            row_e += 1e-7 * random(1, tokens, 30) if kind == "cancels nearly" else 0
        row_a *= {"huge": 1e15, "tiny": 1e-30}.get(kind, 1.0)
        if kind in ("not finite", "infinite"):
            row_e[0, -1, trial] = {"not finite": torch.nan, "infinite": torch.inf}[kind]
        moved = block(torch.cat([a, row_a]), torch.cat([e, row_e])) - block(a, e)
        assert moved.isfinite().all()
        assert moved.norm() <= 1 + ROUNDING


@pytest.mark.attack
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("inputs", "errors"), [(1e17, 2e-23), (2e-23, 1e17), (1e18, 1e-22), (1e-30, 1e-30), (1e12, 1)])
def test_no_norm_is_read_too_small_where_squares_vanish_in_float32(inputs: float, errors: float, tokens: int) -> None:
    """A huge factor makes a tiny one count, whose squares are 0 in float32: a small clip norm would not be met."""
    generator = torch.Generator().manual_seed(0)
    a, e = (scale * torch.rand(4, tokens, d, generator=generator) for scale, d in ((inputs, 40), (errors, 3000)))
    rows = torch.einsum("ntb,nta->nba", e.double(), a.double()).flatten(1)
    block = LayeredGradients(torch.zeros(4, 0), [], [KeptInputs(slice(0, 120_000), None, a, e)], 120_000)
    assert (block.row_norms() >= rows.norm(dim=1) * (1 - 1e-6)).all()
    clipped = 1e-6
    for i in range(4):
        weights = clip_factors(block.row_norms(), clipped) * (torch.arange(4) == i)
        assert block.combine(weights).norm() <= clipped


def test_a_row_that_cancels_nearly_keeps_its_norm() -> None:
    """What is added for rounding clips no row that is to be released as it is."""
    generator = torch.Generator().manual_seed(0)
    a, e = torch.randn(5, 4, 40, generator=generator), torch.randn(5, 4, 30, generator=generator)
    kept = KeptInputs(slice(0, 1200), None, a, e)
    exact = torch.einsum("ntb,nta->nba", e.double(), a.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(kept.squared_norms().sqrt(), exact, rtol=1e-9, atol=0)


def test_standardised_filters_are_written_out() -> None:
    """Their gradients are not products of inputs and errors; wide ones too."""
    torch.manual_seed(1)
    wide = StandardConv2d(40, 300, 3, stride=2)
    model = nn.Sequential(wide, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(300, 5)).double().eval()
    x, y = torch.randn(4, 40, 3, 3, dtype=torch.float64), torch.arange(4)
    block = one_block(BookKeeping(model), x, y)
    assert type(block) is DenseGradients
    out = {name: torch.zeros(4, *p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    by_vmap(model, x, y, out)
    torch.testing.assert_close(block.rows, torch.cat([part.flatten(1) for part in out.values()], 1))
