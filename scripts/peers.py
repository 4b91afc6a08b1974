"""What benchmark.py measures against: other tools and the published technique, each as its authors mean it to be used.

A peer's gradients are used up as they come, layer by layer; ours also lie in one matrix, with their norms. Functions
that return a `Run` have set the peer up, on a copy of the model, and leave only the work to be timed.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import dp_accounting
import ot
import scipy.linalg
import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad
from dp_accounting.pld import PLDAccountant
from measuring import Run
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.subspace import projection_metric
from pubsel.models.trained import head

Examples = tuple[Tensor, Tensor]  # x [n, ...], y [n]
RATE = 1e-4  # of learning: small, so that hundreds of timed steps leave the weights where they were


def _batches(x: Tensor, y: Tensor, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(micro), y.split(micro), strict=True)


def _copy(model: nn.Module, layout: str) -> nn.Module:
    """Return a copy in layout NCHW, torch's own, or NHWC, which suits networks that pool. Opacus unfolds images as if
    they were NCHW: its gradients in NHWC are wrong, by 6 % (DenseNet-121, 1 x 1 convolutions) to 94 % (ResNet20)."""
    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    return copy.deepcopy(model).to(memory_format=memory)


# Per-example gradients


def opacus_gradients(model: nn.Module, x: Tensor, y: Tensor, micro: int) -> Run:
    """Return Opacus hooks, `micro` examples at a time."""
    hooked = GradSampleModule(_copy(model, "NCHW"), loss_reduction="sum").train()
    for layer in hooked.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()  # frozen

    def run() -> None:
        for xs, ys in _batches(x, y, micro):
            hooked.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(hooked(xs), ys, reduction="sum").backward()

    return run


def backpack_batches(model: nn.Module, layout: str, micro: int) -> Callable[[Tensor, Tensor], Iterator[list[Tensor]]]:
    """Yield (x, y) -> BackPACK's BatchGrad, [n, *shape] of each parameter, `micro` examples at a time.

    Each layer that has parameters is extended on its own: a whole ResNet20 cannot be (its mean over positions and its
    padding are functions), and the other layers need no extension for first derivatives.
    """
    extended = _copy(model, layout)
    for layer in extended.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            extend(layer)

    def run(x: Tensor, y: Tensor) -> Iterator[list[Tensor]]:
        for xs, ys in _batches(x, y, micro):
            extended.zero_grad(set_to_none=True)
            with backpack(BatchGrad()):
                nn.functional.cross_entropy(extended(xs), ys, reduction="sum").backward()
            yield [p.grad_batch for p in extended.parameters()]  # type: ignore[attr-defined]
            for p in extended.parameters():
                del p.grad_batch  # type: ignore[attr-defined]

    return run


def backpack_gradients(model: nn.Module, x: Tensor, y: Tensor, layout: str, micro: int) -> Run:
    """Return BackPACK's BatchGrad, `micro` examples at a time."""
    batches = backpack_batches(model, layout, micro)

    def run() -> None:
        for _ in batches(x, y):
            pass

    return run


def by_vmap_alone(model: nn.Module, layout: str, chunk: int) -> PerExampleGradients:
    """Return per-example gradients by torch.func's vmap(grad), `chunk` examples at a time."""
    engine = PerExampleGradients(copy.deepcopy(model), chunk)
    engine.model, engine._by_layers = _copy(model, layout), False
    return engine


def vmap_gradients(model: nn.Module, x: Tensor, y: Tensor, layout: str, chunk: int) -> Run:
    """Return torch.func's vmap(grad), `chunk` examples at a time, into memory that is used again, as ours."""
    engine = by_vmap_alone(model, layout, chunk)

    def run() -> None:
        for _ in engine.blocks(x, y):
            pass

    return run


def plain(model: nn.Module, x: Tensor, y: Tensor, layout: str, micro: int, update: bool) -> Run:
    """Return a forward and a backward pass without any per-example gradient; with `update`, a step of SGD."""
    net = _copy(model, layout)
    images = x.to(memory_format=torch.channels_last) if layout == "NHWC" and x.dim() == 4 else x
    optimizer = torch.optim.SGD(net.parameters(), RATE)

    def run() -> None:
        optimizer.zero_grad()
        for xs, ys in _batches(images, y, micro):
            (nn.functional.cross_entropy(net(xs), ys, reduction="sum") / len(x)).backward()
        if update:
            optimizer.step()

    return run


# Layers that opacus and book-keeping know


class Attention(nn.Module):
    """nn.MultiheadAttention over [n, T, d] as two linear layers, with the same parameters in the same order. In place
    of DPMultiheadAttention, which mixes up heads and positions with batch_first=True (opacus 1.6.0)."""

    batch_first = False  # for nn.TransformerEncoderLayer: no way around forward

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        width = attention.embed_dim
        self.heads, self.joined = attention.num_heads, nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.joined.weight, self.joined.bias = attention.in_proj_weight, attention.in_proj_bias
        self.out_proj.weight, self.out_proj.bias = attention.out_proj.weight, attention.out_proj.bias

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return self-attention: all three are the same."""
        q, k, v = self.joined(query).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [n, h, T, d / h]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


def in_known_layers(model: nn.Module) -> nn.Module:
    """Return the model with layers that opacus and book-keeping know for those of torch: attention as linear layers,
    DPLSTM for nn.LSTM. It shares the parameters of attention."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            model.set_submodule(name, Attention(module))
    return ModuleValidator.fix(model) if any(isinstance(module, nn.LSTM) for module in model.modules()) else model


# Steps


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, micro: int, noise: float = 1.0) -> Run:
    """Return a DP-SGD step, clipped to 1, by Opacus hooks; virtual steps of `micro` examples. Returns the noisy mean
    [p]."""
    hooked = GradSampleModule(in_known_layers(_copy(model, "NCHW"))).train()
    optimizer = DPOptimizer(
        torch.optim.SGD(hooked.parameters(), RATE),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )

    def run() -> list[Tensor | None]:
        for i, (xs, ys) in enumerate(_batches(x, y, micro)):
            optimizer.signal_skip_step((i + 1) * micro < len(x))
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(hooked(xs), ys).backward()
            optimizer.step()
        return [p.grad for p in hooked.parameters()]

    return run


def ghost_step(model: nn.Module, x: Tensor, y: Tensor, micro: int, noise: float = 1.0) -> Run:
    """Return the same by Opacus ghost clipping, which passes backward twice and forms no per-example gradient."""
    hooked = GradSampleModuleFastGradientClipping(
        in_known_layers(_copy(model, "NCHW")), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    ).train()
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(hooked.parameters(), RATE),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )
    loss = DPLossFastGradientClipping(hooked, optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean")

    def run() -> list[Tensor | None]:
        for i, (xs, ys) in enumerate(_batches(x, y, micro)):
            optimizer.signal_skip_step((i + 1) * micro < len(x))
            optimizer.zero_grad(set_to_none=True)
            loss(hooked(xs), ys).backward()
            optimizer.step()
        return [p.grad for p in hooked.parameters()]

    return run


def vmap_step(model: nn.Module, x: Tensor, y: Tensor, layout: str, chunk: int, noise: float = 1.0) -> Run:
    """Return the same by torch.func's vmap(grad), `chunk` examples at a time: rows clipped and added up in float32."""
    engine = by_vmap_alone(model, layout, chunk)
    optimizer = torch.optim.SGD(engine.model.parameters(), RATE)

    def run() -> Tensor:
        total = noise * torch.randn(engine.size, device=x.device)
        for block in engine.blocks(x, y):
            total += (1 / block.rows.norm(dim=1)).clamp(max=1) @ block.rows
        for weight, columns in zip(engine.model.parameters(), engine.offsets.values(), strict=True):
            weight.grad = (total[columns] / len(x)).view_as(weight)
        optimizer.step()
        return total / len(x)

    return run


class BookKeeping:
    """A DP-SGD step by mixed book-keeping, written down from the paper (Bu, Wang, Zha, Karypis 2023, BK-MixOpt;
    fastDP), in float32: activations are kept, one backward pass goes to the outputs of layers, a layer's norms come
    from products of its positions if 2 T^2 <= a b, else from its gradients, which are then kept for the sum.

    It knows linear layers, attention as linear layers, convolutions, embeddings and normalisation; ValueError if
    another parameter is trained.
    """

    def __init__(self, model: nn.Module):
        self.net = in_known_layers(_copy(model, "NCHW")).requires_grad_(False)
        self.kept: list[tuple[nn.Module, Tensor, Tensor]] = []
        known = (nn.Linear, nn.Conv2d, nn.Embedding, nn.GroupNorm, nn.LayerNorm)
        layers = [module for module in self.net.modules() if type(module) in known and list(module.parameters())]
        owned = {id(p) for layer in layers for p in layer.parameters()}
        others = [name for name, p in self.net.named_parameters() if id(p) not in owned]
        if others:
            raise ValueError(f"it knows no layer that the parameter {others[0]} belongs to")
        for layer in layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()
        self.kept.append((layer, inputs[0].detach(), output))

    def sums(self, x: Tensor, y: Tensor) -> dict[Tensor, Tensor]:
        """Return the sum of gradients clipped to norm 1, by parameter."""
        self.kept.clear()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="sum")
        errors = torch.autograd.grad(losses, [output for _, _, output in self.kept])

        squares: Tensor = torch.zeros(len(x), device=x.device)
        parts: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []  # parameter, factors [n] -> its sum
        for (layer, inputs, _), e in zip(self.kept, errors, strict=True):
            for parameter, norms, total in _parts(layer, inputs, e):
                squares += norms
                parts.append((parameter, total))
        factors = squares.rsqrt().clamp(max=1)
        return {parameter: total(factors) for parameter, total in parts}


Part = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]  # parameter, squared norms [n], factors [n] -> sum


def _parts(layer: nn.Module, x: Tensor, e: Tensor) -> Iterator[Part]:
    """Yield what book-keeping keeps of a layer with inputs x and gradients e of its outputs."""

    def written(parameter: Tensor, g: Tensor) -> Part:  # g [n, *shape]
        return parameter, g.flatten(1).square().sum(1), lambda factors: torch.tensordot(factors, g, 1)

    if isinstance(layer, nn.Embedding):
        same = x[:, :, None] == x[:, None]
        norms = (same * (e @ e.mT)).sum((1, 2))
        empty = torch.zeros_like(layer.weight)
        yield layer.weight, norms, lambda f: empty.index_add(0, x.flatten(), (e * f[:, None, None]).flatten(0, 1))
        return

    if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
        last = isinstance(layer, nn.LayerNorm)
        normal = (
            nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            if isinstance(layer, nn.LayerNorm)
            else nn.functional.group_norm(x, layer.num_groups, eps=layer.eps)
        )
        places = tuple(range(1, e.dim() - 1)) if last else tuple(range(2, e.dim()))
        yield written(layer.weight, (e * normal).sum(places) if places else e * normal)
        yield written(layer.bias, e.sum(places) if places else e)
        return

    assert isinstance(layer, nn.Linear | nn.Conv2d)
    groups = 1
    if isinstance(layer, nn.Conv2d):
        x = nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT  # type: ignore[arg-type]
        e, groups = e.flatten(2).mT, layer.groups
    a, e = x.reshape(len(x), -1, x.shape[-1]), e.reshape(len(e), -1, e.shape[-1])  # [n, T, a], [n, T, b]
    weight, positions = layer.weight, a.shape[1]
    if layer.bias is not None:
        yield written(layer.bias, e.sum(1))
    if groups > 1:
        parts = (rows.unflatten(2, (groups, -1)).transpose(1, 2) for rows in (e, a))  # [n, g, T, b / g], [n, g, T, a]
        yield written(weight, torch.einsum("ngtb,ngta->ngba", *parts).reshape(-1, *weight.shape))
        return
    if 2 * positions**2 > weight.numel():
        yield written(weight, (e.mT @ a).view(-1, *weight.shape))
        return
    norms = ((a @ a.mT) * (e @ e.mT)).sum((1, 2))
    yield (
        weight,
        norms,
        lambda factors: ((e * factors[:, None, None]).flatten(0, 1).T @ a.flatten(0, 1)).view_as(weight),
    )


def book_keeping_step(model: nn.Module, x: Tensor, y: Tensor, micro: int, noise: float = 1.0) -> Run:
    """Return the same by book-keeping, `micro` examples at a time."""
    keeper = BookKeeping(model)
    parameters = list(keeper.net.parameters())
    optimizer = torch.optim.SGD(parameters, RATE)

    def run() -> list[Tensor | None]:
        for parameter in parameters:
            parameter.grad = noise * torch.randn_like(parameter)
        for xs, ys in _batches(x, y, micro):
            for trained, total in keeper.sums(xs, ys).items():
                assert trained.grad is not None
                trained.grad += total
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= len(x)
        optimizer.step()
        return [parameter.grad for parameter in parameters]

    return run


def two_products(model: nn.Module, x: Tensor, order: str) -> Run:
    """Return the matrix products of a linear classifier's step and nothing else: logits of x, in either order, and R^T
    x."""
    weight = next(model.parameters()).detach()
    r = torch.randn(len(x), len(weight), device=x.device)
    if order == "x W^T":
        return lambda: (x @ weight.T, r.T @ x)
    return lambda: (weight @ x.T, r.T @ x)


def gram_schmidt(rows: Tensor) -> Tensor:
    """Return [k, p] -> orthonormal rows, in place, one after the other; each is taken out of all that follow at
    once."""
    for i in range(len(rows)):
        rows[i] /= rows[i].norm()
        rest = rows[i + 1 :]
        rest -= (rest @ rows[i])[:, None] * rows[i]
    return rows


def gram_schmidt_columns(columns: Tensor) -> Tensor:
    """Return [p, k] -> orthonormal columns, in place, as published: by a product of the size of the rest."""
    for i in range(columns.shape[1]):
        column, rest = columns[:, i : i + 1], columns[:, i + 1 :]
        column /= column.norm()
        rest -= (column * rest).sum(0) * column
    return columns


def published_gep(
    model: nn.Module,
    public: Examples,
    private: Examples,
    k: int,
    bounds: tuple[float, float],
    columns: bool,
    layout: str,
    micro: int,
    noise: float = 1.0,
) -> Run:
    """Return a GEP step as published: per-example gradients by BackPACK, Gram-Schmidt column by column.

    columns: a basis is [p, k], as published, and not [k, p], which is faster. Without the published diagnostic of the
    basis; BackPACK in micro-batches, not all at once; rows clipped together, not in a loop: each makes it faster than
    the published code.
    """
    batches = backpack_batches(model, layout, micro)

    def matrix(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.cat([g.flatten(1) for g in parts], 1) for parts in batches(x, y)])

    def basis(g: Tensor, start: Tensor) -> Tensor:
        return gram_schmidt_columns(g.T @ (g @ start.T)).T if columns else gram_schmidt((start @ g.T) @ g)

    return lambda: _gep_direction(matrix(*public), matrix(*private), basis, k, bounds, noise)


def vmap_gep(
    model: nn.Module,
    public: Examples,
    private: Examples,
    k: int,
    bounds: tuple[float, float],
    layout: str,
    chunk: int,
    noise: float = 1.0,
) -> Run:
    """Return the same by torch.func's vmap(grad) and torch.linalg.qr."""
    engine = by_vmap_alone(model, layout, chunk)

    def basis(g: Tensor, start: Tensor) -> Tensor:
        return torch.linalg.qr(g.T @ (g @ start.T)).Q.T

    return lambda: _gep_direction(engine.matrix(*public).rows, engine.matrix(*private).rows, basis, k, bounds, noise)


def _gep_direction(
    g_public: Tensor,
    g_private: Tensor,
    basis_of: Callable[[Tensor, Tensor], Tensor],
    k: int,
    bounds: tuple[float, float],
    noise: float,
) -> Tensor:
    """Return a descent direction [p] from G [m, p] and G [n, p], which are held: three slices of columns, one power
    iteration by basis_of(G_slice, start [k / 3, p / 3]), the residual [n, p] written out, both clipped, noise on
    both."""

    def noisy_sum(rows: Tensor, bound: float) -> Tensor:
        rows *= (bound / rows.norm(dim=1)).clamp(max=1)[:, None]
        return rows.sum(0) + noise * 2**0.5 * bound * torch.randn(rows.shape[1], device=rows.device)

    p = g_public.shape[1]
    slices = [slice(round(a), round(b)) for a, b in pairwise(i * p / 3 for i in range(4))]
    bases, embeddings, residual = [], [], torch.empty_like(g_private)
    for s in slices:
        start = torch.randn(k // 3, s.stop - s.start, device=g_public.device)
        bases.append(basis_of(g_public[:, s], start))
        embeddings.append(g_private[:, s] @ bases[-1].T)
        residual[:, s] = g_private[:, s] - embeddings[-1] @ bases[-1]
    parts = noisy_sum(torch.cat(embeddings, 1), bounds[0]).split([len(basis) for basis in bases])
    direction = torch.cat([part @ basis for part, basis in zip(parts, bases, strict=True)])
    return (direction + noisy_sum(residual, bounds[1])) / len(g_private)


# Distances and accounting


def svd_distance(a: Tensor, b: Tensor, k: int, side: str) -> Run:
    """Return GSD's projection metric between G [m, p] and G [m, p] by a full SVD of each, as it lies or of its
    transpose, which LAPACK may do several times faster."""

    def top(rows: Tensor) -> Tensor:
        if side == "of the transpose":
            return torch.linalg.svd(rows.T, full_matrices=False).U[:, :k]
        return torch.linalg.svd(rows, full_matrices=False).Vh[:k].T

    return lambda: projection_metric(top(a), top(b))


def gram_distance(a: Tensor, b: Tensor, k: int) -> Run:
    """Return the same by LAPACK's top k eigenvectors of the Gram matrix alone, in float64."""

    def top(rows: Tensor) -> Tensor:
        m = len(rows)
        gram = (rows @ rows.T).double().cpu().numpy()
        values, vectors = (torch.from_numpy(part) for part in scipy.linalg.eigh(gram, subset_by_index=[m - k, m - 1]))
        return torch.linalg.qr((rows.T @ (vectors / values.sqrt()).to(rows)).double()).Q

    return lambda: projection_metric(top(a), top(b))


def random_svd_distance(a: Tensor, b: Tensor, k: int, q: int, niter: int) -> Callable[[], float]:
    """Return the same by torch.svd_lowrank; its vectors are made orthonormal once more in float64, as float32 leaves
    them too long."""

    def top(rows: Tensor) -> Tensor:
        return torch.linalg.qr(torch.svd_lowrank(rows, q, niter)[2][:, :k].double()).Q

    return lambda: projection_metric(top(a), top(b))


def cholesky_frechet(x: Tensor, z: Tensor) -> Callable[[], float]:
    """Return the squared Fréchet distance of features x [n, d] and z [m, d], n > d, by a Cholesky root L of one
    covariance and the eigenvalues of L^T S L."""

    def run() -> float:
        a, b = x.double(), z.double()
        s, t = a.T.cov(), b.T.cov()
        root = torch.linalg.cholesky(s)
        crossed = torch.linalg.eigvalsh(root.T @ t @ root).clamp(min=0).sqrt().sum()
        return float((a.mean(0) - b.mean(0)).square().sum() + s.trace() + t.trace() - 2 * crossed)

    return run


def sinkhorn_otdd(
    x: Tensor, p: Tensor, z: Tensor, q: Tensor, method: str, regularisation: float, tolerance: float = 1e-6
) -> Callable[[], float]:
    """Return OTDD by POT's Sinkhorn, as the authors' code has it, with the entropy's weight as a part of the largest
    cost, until the marginals are within `tolerance`. Roots of products of covariances by their nuclear norms, which
    small classes make fast."""

    def run() -> float:
        a, b = (torch.stack([rows[y == c].mean(0) for c in y.unique()]) for rows, y in ((x, p), (z, q)))
        ours, theirs = (
            [(rows[y == c] - rows[y == c].mean(0)) / ((y == c).sum() - 1) ** 0.5 for c in y.unique()]
            for rows, y in ((x, p), (z, q))
        )
        between = torch.cdist(a, b).square()
        for i, r in enumerate(ours):
            for j, s in enumerate(theirs):
                between[i, j] += r.square().sum() + s.square().sum() - 2 * torch.linalg.svdvals(r @ s.T).sum()
        cost = (torch.cdist(x, z).square() + between[p][:, q]).numpy()
        weight = regularisation * cost.max()
        plan = ot.sinkhorn([], [], cost, weight, method, numItermax=10**5, stopThr=tolerance)
        return float((plan * cost).sum()) ** 0.5

    return run


def plain_otdd(x: Tensor, p: Tensor, z: Tensor, q: Tensor) -> Callable[[], float]:
    """Return OTDD as its authors' "spectral" way has it: a covariance [d, d] and its root for each class, by eigh, and
    the root of each product of two; then the optimum by POT, where theirs is entropic."""

    def root(s: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    def run() -> float:
        a, b = (torch.stack([rows[y == c].mean(0) for c in y.unique()]) for rows, y in ((x, p), (z, q)))
        ours, theirs = ([rows[y == c].T.cov() for c in y.unique()] for rows, y in ((x, p), (z, q)))
        roots = [root(s) for s in ours]
        between = torch.cdist(a, b).square()
        for i, (s, r) in enumerate(zip(ours, roots, strict=True)):
            for j, t in enumerate(theirs):
                crossed = torch.linalg.eigvalsh(r @ t @ r).clamp(min=0).sqrt().sum()
                between[i, j] += s.trace() + t.trace() - 2 * crossed
        cost = torch.cdist(x, z).square() + between[p][:, q]
        return float(ot.emd2([], [], cost.numpy(), numItermax=10**7)) ** 0.5

    return run


def published_task2vec(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    """Return Task2Vec as published, on the same examples: outputs of the body kept; the head by Adam (rate 4e-4, decay
    1e-4), 10 epochs of 64; then one backward pass for each 64, with drawn labels, its gradients squared. The published
    sampler of 10,000 examples is left out, which makes it faster."""
    probe = copy.deepcopy(model)
    last = probe.get_submodule(head(probe))
    assert isinstance(last, nn.Linear)
    kept: list[Tensor] = []
    last.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))

    def run() -> list[Tensor]:
        kept.clear()
        with torch.no_grad():
            for part in x.split(64):
                probe(part)
        z = torch.cat(kept)
        last.reset_parameters()
        adam = torch.optim.Adam(last.parameters(), 4e-4, weight_decay=1e-4)
        for _ in range(10):
            order = torch.randperm(len(z), device=z.device)
            for chosen in order.split(64):
                adam.zero_grad()
                nn.functional.cross_entropy(last.forward(z[chosen]), y[chosen]).backward()
                adam.step()
        squares = [torch.zeros_like(p) for p in probe.parameters()]
        for part in x.split(64):
            logits = probe(part)
            drawn = torch.multinomial(logits.softmax(1), 1)[:, 0].detach()
            probe.zero_grad()
            nn.functional.cross_entropy(logits, drawn).backward()
            for total, p in zip(squares, probe.parameters(), strict=True):
                total += p.grad.square()  # type: ignore[union-attr]
        return squares

    return run


def pld_sigma(epsilon: float, delta: float, rate: float, steps: int, tolerance: float) -> float:
    """Return noise multiplier by dp_accounting's PLD accountant, to `tolerance`."""

    def event(sigma: float) -> dp_accounting.DpEvent:
        sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(sampled, steps)

    bracket = dp_accounting.LowerEndpointAndGuess(0.3, 2.0)
    return dp_accounting.calibrate_dp_mechanism(PLDAccountant, event, epsilon, delta, bracket, tol=tolerance)
