"""Speed and memory as ratios to named peers: `make bench`, or `make bench ARGS=--short`. Writes results/benchmark.csv.

A case is some work, ours and its peers. Peers get their best setting first, by a quick sweep; then all run in turn,
each in a separate process, RUNS times (fewer, if runs take minutes). A figure is the ratio of medians, the peer's over
ours. All work with huge pages and kept memory, which pubsel's command sets for itself (`ratio`); peers of short
runs once more with memory as a program gets it that sets nothing (`as_it_comes`; not in the short mode, nor for large
work, whose processes would fill the memory). Peak memory is what a first run adds to its inputs. `error` is that of
ours against float64; `bound`, whether a peer's sum of private rows is bounded in floating point, as ours is (empty: it
clips no rows); `left_out`, the peers that cannot do the work.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import peers
import torch
from measuring import Run
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet
from verdict import read, table, verdicts

from pubsel.algorithms import Algorithm, View
from pubsel.algorithms.adamix import AdaMix, Centre
from pubsel.algorithms.dp_sgd import DPSGD, clipped_sum
from pubsel.algorithms.gep import GEP, SLACK, Groups, Precision
from pubsel.data import Split
from pubsel.distances import otdd, task2vec
from pubsel.distances.frechet import frechet, gaussian
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients, clip_factors
from pubsel.gradients.slots import private_slots
from pubsel.gradients.subspace import projection_metric, top_k
from pubsel.models import build, small
from pubsel.privacy import accountant
from pubsel.privacy.randomness import Source, SystemEntropy, stream
from pubsel.settings.keys import Labels, Lora, Model, Norm
from pubsel.training.loop import ONE_PROCESS, by_unit, engine, noisy_mean

RUNS = 5
REPEAT_S = 0.2  # shorter runs are repeated for so long
LONG_S = 2.0  # a setting whose first run takes longer is tried once
MOST_S = 180.0  # of all runs of a candidate, but for the last

LINE = (
    "{ratio:>6} ({as_it_comes:>6}) x time, {memory_ratio:>6} x memory: {work} vs {peer}  "
    "({peer_s} / {ours_s} s, {peer_mib} / {ours_mib} MiB, error {error})"
)
MICRO = (16, 32, 64, 128)
ITERATIONS = (1, 2, 4, 8, 16, 32)  # of torch.svd_lowrank
NETWORKS = {
    "resnet20": (3, 32, 32, 10),
    "fmnist_cnn": (1, 28, 28, 10),
    "probe": (3, 224, 224, 14),
    "mlp": (1, 28, 28, 10),
    "token_mlps": (3, 32, 32, 10),
    "cnn64": (3, 64, 64, 10),
    "vit_tiny": (3, 224, 224, 10),
    "convnext_atto": (3, 64, 64, 10),
    "mobilenetv2": (3, 64, 64, 10),
    "dense_block": (3, 32, 32, 10),
    "vit_small_images": (3, 32, 32, 10),
    "resnet18": (3, 32, 32, 10),
    "wrn_16_4": (3, 32, 32, 10),
    "lstm": (64, 32, 10),  # steps, width
    "text_encoder": (64, 10),  # tokens
}
TIMM: dict[str, tuple[str, dict[str, int]]] = {  # architecture, options
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small_images": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}),
    "convnext_atto": ("convnext_atto", {}),
    "mobilenetv2": ("mobilenetv2_100", {}),
}
WORDS = 1000  # of the text encoder
MOST_GIB = 4  # of gradients that a peer holds at once: more are left out
NOT_BOUNDED = "no"  # of a peer that adds private rows up in float32
BOUNDS = (10.0, 2.0)  # GEP's, on embedding and residual
DENSE = "features.denseblock3.denselayer"
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet152, last layer": ("resnet152", {"trained": ["fc"]}),
    "resnet152, Table 6": ("resnet152", {"trained": ["fc", "layer3.32.conv1.weight"]}),
    "densenet121, Table 6": (
        "densenet121",
        {"trained": ["classifier", f"{DENSE}23.conv1.weight", f"{DENSE}24.conv1.weight"]},
    ),
    "vit_base, LoRA": ("vit_base_patch16_224", {"lora": Lora(["qkv"], 8, 8.0)}),
}


class Candidate(NamedTuple):
    """One way to do the work. build(*setting): all but the work itself is done. trial: cheaper work that tells which of
    `settings` is best. runs: fewer than RUNS where one takes minutes; then without a warm-up. bound: whether its sum of
    private rows is bounded in floating point. reaches(*setting): whether it is exact enough; then the first setting
    that is counts as the best."""

    build: Callable[..., Run]
    settings: tuple[tuple[Any, ...], ...] = ((),)
    trial: Callable[..., Run] | None = None
    runs: int = RUNS
    bound: str = ""
    reaches: Callable[..., bool] | None = None


class Case(NamedTuple):
    """Work, the ways to do it (those of ours are named so), error(name of ours) against float64, and the peers that
    cannot do it, with reasons."""

    work: str
    candidates: dict[str, Candidate]
    error: Callable[[str], float]
    left_out: dict[str, str] | None = None


# The work


def gradients(network: str, n: int, device: str) -> Case:
    """Return per-example gradients, used up block by block."""
    model, x, y = _problem(network, n, device)
    engine = PerExampleGradients(model)

    candidates = {
        "ours": Candidate(lambda: _used_up(engine, x, y)),
        "opacus hooks, one batch": Candidate(lambda: peers.opacus_gradients(model, x, y, n)),
        "opacus hooks, micro-batches": Candidate(partial(peers.opacus_gradients, model, x, y), _upto(MICRO, n)),
        "BackPACK, micro-batches": Candidate(partial(peers.backpack_gradients, model, x, y), _ways(MICRO, n)),
        "vmap(grad), chunks": Candidate(partial(peers.vmap_gradients, model, x, y), _ways((*MICRO, 256), n)),
        "plain forward and backward": Candidate(partial(peers.plain, model, x, y, update=False), _ways((32, 64, n), n)),
    }
    return Case(f"per-example gradients, {network}, n = {n}", candidates, lambda _: _off(engine, x[:64], y[:64]))


def backbone(name: str, n: int, device: str) -> Case:
    """Return per-example gradients of what trains of a large network (GSD, Table 6), at random weights and 224
    pixels."""
    architecture, changes = BACKBONES[name]
    given = Model("timm", architecture, False, None, Norm.freeze, None, **changes)
    model = build(given, (3, 224, 224), 14, (0.5,) * 3, (0.5,) * 3, 0).to(device)
    x, y = torch.randint(256, (n, 3, 224, 224)).byte().to(device), torch.randint(14, (n,)).to(device)
    engine = PerExampleGradients(model)

    sizes = (4, 8, 16, 64, 256)
    candidates = {
        "ours": Candidate(lambda: _used_up(engine, x, y)),
        "opacus hooks, micro-batches": Candidate(partial(peers.opacus_gradients, model, x, y), _upto(sizes, n)),
        "plain forward and backward": Candidate(partial(peers.plain, model, x, y, update=False), _ways(sizes, n)),
    }
    return Case(f"per-example gradients, {name}, n = {n}", candidates, lambda _: _off(engine, x[:2], y[:2]))


def dp_sgd(network: str, n: int, device: str) -> Case:
    """Return a step of DP-SGD, noise and update included. The error is that of the noiseless mean."""
    model, x, y = _problem(network, n, device)
    view, algorithm = public_view(model, None), DPSGD("dp_sgd", 1.0)

    def error(_: str) -> float:
        exact = sum(clipped_sum(block, 1.0) for block in _exact(model, x, y)) / n
        return _relative(stepping(algorithm, view, x, y, 0.0)(), exact)

    candidates, left_out = _private_peers(model, x, y, (*MICRO, n))
    settings = _ways(MICRO, n)
    candidates["vmap(grad), chunks"] = Candidate(partial(peers.vmap_step, model, x, y), settings, bound=NOT_BOUNDED)
    candidates["plain SGD"] = Candidate(partial(peers.plain, model, x, y, update=True), _ways((32, 64, n), n))
    ours = {"ours": Candidate(lambda: _updating(algorithm, view, x, y))}
    return Case(f"DP-SGD step, {network}, n = {n}", {**ours, **candidates}, error, left_out)


def secure_noise(network: str, n: int, device: str) -> Case:
    """Return a step of DP-SGD with seeded noise; its peer is the same with noise of the operating system."""
    model, x, y = _problem(network, n, device)
    view, algorithm = public_view(model, None), DPSGD("dp_sgd", 1.0)
    candidates = {
        "ours": Candidate(lambda: _updating(algorithm, view, x, y)),
        "secure noise": Candidate(lambda: _updating(algorithm, view, x, y, SystemEntropy), bound="yes"),
    }
    return Case(f"DP-SGD step with seeded noise, {network}, n = {n}", candidates, dp_sgd(network, n, device).error)


def linear(n: int, d: int, classes: int, device: str) -> Case:
    """Return a step of DP-SGD for a linear classifier on features, noise and update included. The error is that of the
    noiseless mean."""
    model, x, y = _linear(n, d, classes, device)
    view, algorithm = public_view(model, None), DPSGD("dp_sgd", 1.0)

    def error(_: str) -> float:
        exact = stepping(algorithm, _doubled(view), x.double(), y, 0.0)()
        return _relative(stepping(algorithm, view, x, y, 0.0)(), exact)

    others, left_out = _linear_peers(model, x, y)
    candidates = {"ours": Candidate(lambda: _updating(algorithm, view, x, y)), **others}
    return Case(f"DP-SGD step, linear classifier, n = {n}, d = {d}, C = {classes}", candidates, error, left_out)


def adamix(n: int, d: int, classes: int, device: str) -> Case:
    """Return a full-batch step of AdaMix with two public examples of each class, noise and update included; its peers
    take a step of DP-SGD. The error is that of the noiseless direction; with the projection, it is mostly in a
    direction that rounding picks, because the public gradient has rank C - 1."""
    model, x, y = _linear(n, d, classes, device)
    public = Split(x[: 2 * classes], torch.arange(2 * classes, device=device) % classes)
    view = public_view(model, public, classes)._replace(batch_size=n)
    settings = {
        name: AdaMix("adamix", True, 0, 1.0, None, True, None, 0.9, rank, 0.01, Centre.zero)
        for name, rank in {"ours": None, "ours, with projection": d - 48}.items()
    }

    def error(name: str) -> float:
        exact = stepping(settings[name], _doubled(view), x.double(), y, 0.0)()
        return _relative(stepping(settings[name], view, x, y, 0.0)(), exact)

    ours = {name: Candidate(partial(_updating, value, view, x, y)) for name, value in settings.items()}
    others, left_out = _linear_peers(model, x, y)
    return Case(f"AdaMix step, n = {n}, d = {d}, C = {classes}", {**ours, **others}, error, left_out)


def gep(network: str, m: int, n: int, k: int, device: str) -> Case:
    """Return a step of GEP with its noise. The error is that of the noiseless direction, for the same basis."""
    model, x, y = _problem(network, n, device)
    public = Split(*random_images(network, m, device))
    view = public_view(model, public)
    ways = {"ours": gep_settings(k)}
    if device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():  # elsewhere it is 18 times as slow as float32
        ways["ours, public gradients in bfloat16"] = gep_settings(k, Precision.bfloat16)

    def error(name: str) -> float:
        """Return the error against residuals and their norms written out; the margin of the clipping is in both."""
        basis = ways[name].basis(view, 0)
        blocks = [block.double() for block in basis.blocks]
        total = torch.zeros(view.gradients.size, dtype=torch.float64, device=device)
        for block in _exact(model, x, y):
            parts = [block.rows[:, s] @ b for s, b in zip(basis.slices, blocks, strict=True)]
            inside = torch.cat([w @ b.T for w, b in zip(parts, blocks, strict=True)], 1)
            residual = block.rows - inside
            squares = residual.square().sum(1) + SLACK * block.rows.square().sum(1)
            total += clip_factors(torch.cat(parts, 1).norm(dim=1), BOUNDS[0]) @ inside
            total += clip_factors(squares.sqrt(), BOUNDS[1]) @ residual
        return _relative(stepping(ways[name], view, x, y, 0.0)(), total / n)

    work, trial = (model, public, (x, y), k, BOUNDS), (model, x[:128], y[:128])
    step, few = partial(peers.published_gep, *work), partial(peers.backpack_gradients, *trial)
    published = {
        name: Candidate(partial(step, columns), settings, few, bound=NOT_BOUNDED)
        for name, columns, settings in (
            ("published technique", True, (("NCHW", min(n, 500)),)),
            ("published technique, tuned", False, _ways(MICRO, n)),
        )
    }
    by_qr, few = partial(peers.vmap_gep, *work), partial(peers.vmap_gradients, *trial)
    published["vmap + QR"] = Candidate(by_qr, _ways(MICRO, n), few, bound=NOT_BOUNDED)
    ours = {name: Candidate(partial(stepping, value, view, x, y, 1.0)) for name, value in ways.items()}
    return Case(f"GEP step, {network}, m = {m}, n = {n}, k = {k}", {**ours, **published}, error)


def gsd(m: int, device: str, network: str = "resnet20", k: int = 16, runs: int = RUNS) -> Case:
    """Return the distance once the gradients of both sides are there."""
    model, *_ = _problem(network, 1, device)
    engine = PerExampleGradients(model)
    a, b = (engine.matrix(*random_images(network, m, device)).rows for _ in range(2))

    def ours() -> float:
        return projection_metric(top_k(DenseGradients(a), k), top_k(DenseGradients(b), k))

    def exact(rows: Tensor) -> Tensor:
        rows = rows.double()
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        return torch.linalg.qr(rows.T @ (vectors[:, -k:] / values[-k:].sqrt())).Q

    truth = cache(lambda: projection_metric(exact(a), exact(b)))

    def within(tolerance: float, q: int, niter: int) -> bool:
        distance = peers.random_svd_distance(a, b, k, q, niter)
        return all(abs(distance() - truth()) <= tolerance for _ in range(8))  # it draws anew each time

    build, trial = partial(peers.svd_distance, a, b, k), partial(peers.svd_distance, a[: m // 4], b[: m // 4], k)
    random = partial(peers.random_svd_distance, a, b, k)
    # the cheapest first; what costs more than four Gram matrices is behind that peer whatever it reaches
    products = {(q, niter): 2 * q * (niter + 1) for q in {min(m, w * k) for w in (1, 2, 4, 8)} for niter in ITERATIONS}
    ways = sorted((way for way, columns in products.items() if columns <= 4 * m), key=lambda way: products[way])
    candidates = {
        "ours": Candidate(lambda: ours),
        "Gram matrix and its top eigenvectors by LAPACK": Candidate(lambda: peers.gram_distance(a, b, k)),
        "to 1e-5: torch.svd_lowrank": Candidate(random, tuple(ways), reaches=partial(within, 1e-5)),
        "to 1e-3: torch.svd_lowrank": Candidate(random, tuple(ways), reaches=partial(within, 1e-3)),
        "torch.linalg.svd": Candidate(build, (("of G",), ("of the transpose",)), trial, runs),
    }
    work = f"GSD of two gradient matrices, {network}, m = {m}, k = {k}"
    return Case(work, candidates, lambda _: abs(ours() - truth()))


def otdd_gaussian(m: int, d: int, classes: int, device: str) -> Case:
    """Return OTDD of two sets of m examples, with classes as Gaussians. The error is that against the peer, in
    float64."""
    torch.manual_seed(0)
    x, z = (torch.rand(m, d, dtype=torch.float64).to(device) for _ in range(2))
    y = torch.arange(m).to(device) % classes

    def ours() -> float:
        return otdd.otdd(otdd.labelled_examples(x, y), otdd.labelled_examples(z, y))

    plain, entropic = peers.plain_otdd(x, y, z, y), partial(peers.sinkhorn_otdd, x, y, z, y)

    def within(tolerance: float, *setting: Any) -> bool:
        return abs(entropic(*setting)() / ours() - 1) <= tolerance

    ways = tuple(("sinkhorn", part) for part in (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001))
    candidates = {
        "ours": Candidate(lambda: ours),
        "covariances and their roots, by eigh": Candidate(lambda: plain, runs=1),
        "to 1e-3: POT's Sinkhorn": Candidate(entropic, ways, reaches=partial(within, 1e-3)),
        "to 1e-2: POT's Sinkhorn": Candidate(entropic, ways, reaches=partial(within, 1e-2)),
    }
    left_out = {"POT's Sinkhorn at our error": "its kernel is zero in float64 before"}
    work = f"OTDD, m = {m}, d = {d}, {classes} classes"
    return Case(work, candidates, lambda _: abs(ours() / plain() - 1), left_out)


def frechet_distance(m: int, d: int, device: str) -> Case:
    """Return the Fréchet distance of two sets of features. The error is that against the peer, in float64."""
    torch.manual_seed(0)
    x, z = ((torch.randn(m, d) @ torch.randn(d, d) / d**0.5).to(device) for _ in range(2))

    def ours() -> float:
        return frechet(gaussian(x), gaussian(z))

    plain = peers.cholesky_frechet(x, z)
    candidates = {"ours": Candidate(lambda: ours), "Cholesky and eigvalsh": Candidate(lambda: plain)}
    return Case(f"Fréchet distance, m = {m}, d = {d}", candidates, lambda _: abs(ours() / plain() - 1))


def task2vec_embedding(network: str, m: int, device: str) -> Case:
    """Return the embedding of a task. Not the same numbers: the published technique trains the head for ten epochs, and
    squares the gradient of the mean loss of 64 examples. The error is that of our Fisher in float32, at given labels.
    """
    model, x, y = _problem(network, m, device)

    def error(_: str) -> float:
        exact = task2vec.fisher(_exactly(model), x.double(), y)
        return _relative(task2vec.fisher(PerExampleGradients(model), x, y), exact)

    candidates = {
        "ours": Candidate(lambda: lambda: task2vec.embedding(model, x, y, stream("benchmark", "labels"))),
        "published technique": Candidate(lambda: peers.published_task2vec(model, x, y)),
    }
    return Case(f"Task2Vec embedding, {network}, m = {m}", candidates, error)


def calibration(steps: int, device: str) -> Case:
    """Return noise for epsilon 2, on the CPU. Both to 1e-3; the error is the excess of our noise over PLD at its
    tightest."""
    task = (2.0, 1e-5, 0.02, steps)

    def ours() -> float:
        accountant.calibrate.cache_clear()
        accountant._prv.cache_clear()
        return accountant.plan(*task, 1.0).noise_multiplier

    candidates = {
        "ours": Candidate(lambda: ours),
        "dp_accounting PLD": Candidate(lambda: lambda: peers.pld_sigma(*task, tolerance=2e-3)),
    }
    work = f"calibration, epsilon = 2, delta = 1e-5, rate = 0.02, {steps} steps"
    return Case(work, candidates, lambda _: ours() / peers.pld_sigma(*task, tolerance=1e-6) - 1)


class Work(NamedTuple):
    """make(**sizes) -> Case; `tiny` sizes run first wherever memory is measured, so that libraries are loaded. twins:
    whether peers race without kept memory too, for which large work has no room."""

    make: Callable[..., Case]
    full: dict[str, Any]
    short: dict[str, Any] | None
    tiny: dict[str, Any]
    twins: bool = True


def _network(make: Callable[..., Case], network: str, n: int, short: int | None) -> Work:
    full, small, tiny = ({"network": network, "n": size} for size in (n, short, 8))
    return Work(make, full, small if short else None, tiny)


def _steps(network: str, size: tuple[int, int, int], short: tuple[int, int, int] | None) -> Work:
    full, small, tiny = (
        {"network": network} | dict(zip("mnk", s, strict=True)) for s in (size, short or size, (8, 8, 6))
    )
    return Work(gep, full, small if short else None, tiny)


def _backbone(name: str) -> Work:
    return Work(backbone, {"name": name, "n": 16}, None, {"name": name, "n": 1})


def _features(make: Callable[..., Case], n: int, classes: int, short: int | None, d: int = 2048) -> Work:
    sizes = {"d": d, "classes": classes}
    return Work(make, {"n": n} | sizes, {"n": short} | sizes if short else None, {"n": 8, "d": 64, "classes": 4})


WORK = {
    "gradients_fmnist_cnn": _network(gradients, "fmnist_cnn", 1000, 256),
    "gradients_resnet20": _network(gradients, "resnet20", 256, 32),
    "gradients_probe": _network(gradients, "probe", 64, None),
    "dp_sgd_fmnist_cnn": _network(dp_sgd, "fmnist_cnn", 512, 256),
    "dp_sgd_resnet20": _network(dp_sgd, "resnet20", 256, None),
    "dp_sgd_mlp": _network(dp_sgd, "mlp", 512, 512),
    "dp_sgd_token_mlps": _network(dp_sgd, "token_mlps", 64, None),
    "dp_sgd_cnn64": _network(dp_sgd, "cnn64", 128, None),
    "dp_sgd_vit_tiny": _network(dp_sgd, "vit_tiny", 16, None)._replace(twins=False),
    "dp_sgd_convnext_atto": _network(dp_sgd, "convnext_atto", 32, None),
    "dp_sgd_mobilenetv2": _network(dp_sgd, "mobilenetv2", 32, None),
    "dp_sgd_dense_block": _network(dp_sgd, "dense_block", 64, None),
    "dp_sgd_vit_small_images": _network(dp_sgd, "vit_small_images", 32, None),
    "dp_sgd_resnet18": _network(dp_sgd, "resnet18", 64, None)._replace(twins=False),
    "dp_sgd_wrn_16_4": _network(dp_sgd, "wrn_16_4", 64, None)._replace(twins=False),
    "dp_sgd_lstm": _network(dp_sgd, "lstm", 64, None),
    "dp_sgd_text_encoder": _network(dp_sgd, "text_encoder", 64, None),
    "secure_noise_mlp": _network(secure_noise, "mlp", 512, None),
    "secure_noise_resnet18": _network(secure_noise, "resnet18", 64, None)._replace(twins=False),
    "backbone_resnet152_fc": _backbone("resnet152, last layer"),
    "backbone_resnet152": _backbone("resnet152, Table 6"),
    "backbone_densenet121": _backbone("densenet121, Table 6"),
    "backbone_vit": _backbone("vit_base, LoRA"),
    "linear_c10": _features(linear, 1024, 10, 1024),
    "linear_c100": _features(linear, 1024, 100, None),
    "linear_large_c10": _features(linear, 8000, 10, None, 1280),
    "linear_large_c100": _features(linear, 8000, 100, None, 1280),
    "linear_large_c1000": _features(linear, 2000, 1000, None, 1280)._replace(twins=False),
    "adamix": _features(adamix, 5000, 67, None),
    "gep_fmnist_cnn": _steps("fmnist_cnn", (2000, 1000, 500), (500, 250, 125)),
    "gep_resnet20": _steps("resnet20", (2000, 1000, 1000), None),
    "gsd_500": Work(gsd, {"m": 500}, {"m": 125}, {"m": 40}, twins=False),
    "gsd_1000": Work(gsd, {"m": 1000, "runs": 1}, None, {"m": 40}, twins=False),
    "gsd_fmnist_cnn": Work(
        gsd, {"m": 2000, "network": "fmnist_cnn", "runs": 1}, None, {"m": 40, "network": "fmnist_cnn"}
    ),
    "otdd": Work(
        otdd_gaussian,
        {"m": 2000, "d": 784, "classes": 10},
        {"m": 250, "d": 784, "classes": 5},
        {"m": 20, "d": 8, "classes": 2},
    ),
    "frechet": Work(frechet_distance, {"m": 2000, "d": 1280}, None, {"m": 40, "d": 8}),
    "task2vec_fmnist_cnn": Work(
        task2vec_embedding, {"network": "fmnist_cnn", "m": 2000}, None, {"network": "fmnist_cnn", "m": 40}
    ),
    "calibration": Work(calibration, {"steps": 3000}, {"steps": 3000}, {"steps": 30}),
}


# Its parts


def random_images(network: str, n: int, device: str) -> tuple[Tensor, Tensor]:
    """Return images, or sequences, and labels of the size that `network` takes."""
    *shape, classes = NETWORKS[network]
    x = torch.randint(WORDS, (n, *shape)) if network == "text_encoder" else torch.randn(n, *shape)
    return x.to(device), torch.randint(classes, (n,)).to(device)


def _problem(network: str, n: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return network_of(network).eval().to(device), *random_images(network, n, device)


def network_of(name: str) -> nn.Module:
    """Return one of NETWORKS, all of it trained; those that pubsel has not are kinds of networks that people bring
    along."""
    channels, *pixels, classes = NETWORKS[name]
    if name in small.NETWORKS:
        return small.NETWORKS[name](*NETWORKS[name])
    if name in TIMM:
        architecture, options = TIMM[name]
        given = Model("timm", architecture, False, None, Norm.replace, None, options=options)
        net = build(given, (channels, pixels[0], pixels[1]), classes, (0.5,) * 3, (0.5,) * 3, 0)
        for module in net.modules():
            if hasattr(module, "inplace"):
                module.inplace = False  # type: ignore[assignment] # hooks of opacus fail at what is overwritten
        return net
    if name == "mlp":
        hidden = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, classes))
    if name in ("token_mlps", "lstm", "text_encoder"):
        return {"token_mlps": TokenMLPs, "lstm": Recurrent, "text_encoder": TextEncoder}[name](classes)
    if name == "resnet18":
        resnet = ResNet(Residual, [2, 2, 2, 2], classes, norm_layer=partial(nn.GroupNorm, 32))
        resnet.relu = nn.ReLU()
        return resnet
    if name == "dense_block":
        growing = [DenseLayer(24 + 12 * i, 12) for i in range(6)]
        return nn.Sequential(nn.Conv2d(channels, 24, 3, 2, 1), *growing, *head(24 + 12 * 6, classes))
    widths = [channels, 32, 64, 128, 128]
    layers = [[nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in layer), *head(128, classes))


def head(width: int, classes: int) -> list[nn.Module]:
    """Return a mean over positions, and a classifier."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


class TokenMLPs(nn.Module):
    """Four blocks of two linear layers over 64 tokens, 1.2 M parameters."""

    def __init__(self, classes: int):
        super().__init__()
        self.embed = nn.Conv2d(3, 192, 4, 4)
        blocks = [[nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192)] for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.head = nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT  # [n, 64, 192]
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return self.head(tokens.mean(1))


class Residual(BasicBlock):  # type: ignore[misc] # torchvision has no types
    """A block of ResNet18 that overwrites nothing: hooks of opacus fail at it."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + (x if self.downsample is None else self.downsample(x)))


class Recurrent(nn.Module):
    """An LSTM, and a classifier of its last state."""

    def __init__(self, classes: int):
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TextEncoder(nn.Module):
    """An embedding, two encoder layers, and a classifier of the mean over tokens."""

    def __init__(self, classes: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 128), nn.Linear(128, classes)
        layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


class DenseLayer(nn.Module):
    """A layer of a DenseNet: its output is joined to its input."""

    def __init__(self, width: int, growth: int):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, growth, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], 1)


def _linear(n: int, d: int, classes: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a linear classifier, and features of norm 1 with their labels."""
    torch.manual_seed(0)
    x = nn.functional.normalize(torch.randn(n, d), dim=1)
    return nn.Linear(d, classes).to(device), x.to(device), torch.randint(classes, (n,)).to(device)


Peers = tuple[dict[str, Candidate], dict[str, str]]  # candidates; those left out, with reasons


def _linear_peers(model: nn.Module, x: Tensor, y: Tensor) -> Peers:
    n = len(x)
    candidates, left_out = _private_peers(model, x, y, (256, n))
    candidates["plain SGD"] = Candidate(lambda: peers.plain(model, x, y, "NCHW", n, update=True))
    products = partial(peers.two_products, model, x)
    candidates["two matrix products alone"] = Candidate(products, (("W x^T",), ("x W^T",)))
    return candidates, left_out


def _private_peers(model: nn.Module, x: Tensor, y: Tensor, whole: tuple[int, ...]) -> Peers:
    """Return the peers that take a step of DP-SGD. whole: batches of those that form no gradients of examples."""
    n, left_out = len(x), {}
    ways: dict[str, tuple[Callable[..., Run], tuple[tuple[Any, ...], ...]]] = {
        "opacus hooks, one batch": (lambda: peers.opacus_step(model, x, y, n), ((),)),
        "opacus hooks, virtual steps": (partial(peers.opacus_step, model, x, y), _upto(MICRO, n)),
        "opacus ghost clipping": (partial(peers.ghost_step, model, x, y), _upto(whole, n)),
        "book-keeping as published": (partial(peers.book_keeping_step, model, x, y), _upto(whole, n)),
    }
    gib = n * sum(4 * p.numel() for p in model.parameters()) / 2**30
    if gib > MOST_GIB:
        left_out["opacus hooks, one batch"] = f"{gib:.1f} GiB of gradients"
    try:
        peers.BookKeeping(model)
    except ValueError as reason:  # as published, it does not train such a network whole
        left_out["book-keeping as published"] = str(reason)
    candidates = {name: Candidate(*way, bound=NOT_BOUNDED) for name, way in ways.items() if name not in left_out}
    return candidates, left_out


def _used_up(engine: PerExampleGradients, x: Tensor, y: Tensor) -> Run:
    """Return all blocks, one after the other. The comparison with vmap, in float64 at the first call of all, comes
    before."""
    engine.matrix(x[:1], y[:1])

    def run() -> None:
        for _ in engine.blocks(x, y):
            pass

    return run


def _off(engine: PerExampleGradients, x: Tensor, y: Tensor) -> float:
    """Return relative error of per-example gradients."""
    exact = torch.cat([block.rows.clone() for block in _exact(engine.model, x, y)])
    return _relative(engine.matrix(x, y).rows, exact)


def public_view(model: nn.Module, public: Split | None, classes: int = 10) -> View:
    """Return what an algorithm sees of `model` and public data."""
    return View(model, engine(model, None), public, classes, False, lambda *what: stream("benchmark", *what))


def _doubled(view: View) -> View:
    """Return the same in float64, with gradients by vmap(grad) in place of ours."""
    gradients = _exactly(view.model)
    public = Split(_doubles(view.public.x), view.public.y) if view.public is not None else None
    return view._replace(model=gradients.model, gradients=gradients, public=public)


def gep_settings(k: int, precision: Precision = Precision.float32) -> GEP:
    """Return GEP as published: three slices, clip norms BOUNDS."""
    return GEP("gep", k, *BOUNDS, True, Groups.slices, 1, Labels.random, True, precision)


def stepping(
    algorithm: Algorithm,
    view: View,
    x: Tensor,
    y: Tensor,
    noise: float,
    source: Callable[[], Source] = lambda: stream("benchmark", "noise"),
) -> Callable[[], Tensor]:
    """Return a step on all of x [n, ...], y [n, ...], as `fit` takes it: -> a descent direction [p], noise included.
    What `fit` sets up before its first step, slots, is set up."""
    slots = private_slots(view.gradients, x, y, len(x))
    private = Split(x, y) if slots is None else Split(*slots.arrange(x, y))

    def step() -> Tensor:
        chosen, summed = by_unit(None, None, view.gradients, slots)
        mechanism, batch = ONE_PROCESS.begin(0, private, chosen, partial(algorithm.mechanism, view, 0))
        return mechanism.decode(noisy_mean(mechanism, summed, batch, noise, source(), len(x))[0])

    return step


def _updating(algorithm: Algorithm, view: View, x: Tensor, y: Tensor, *source: Callable[[], Source]) -> Run:
    parameters = list(view.model.parameters())
    optimizer = torch.optim.SGD(parameters, peers.RATE)
    step = stepping(algorithm, view, x, y, 1.0, *source)

    def run() -> None:
        direction = step()
        for parameter, columns in zip(parameters, view.gradients.offsets.values(), strict=True):
            parameter.grad = direction[columns].view_as(parameter)
        optimizer.step()

    return run


def _exactly(model: nn.Module) -> PerExampleGradients:
    """Return gradients in float64, by vmap(grad)."""
    gradients = PerExampleGradients(copy.deepcopy(model).double(), 16)
    gradients._by_layers = False
    return gradients


def _exact(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[DenseGradients]:
    """Yield blocks of G so; of an LSTM, which vmap does not take in float64, example by example."""
    gradients = _exactly(model)
    if not any(isinstance(module, nn.LSTM) for module in model.modules()):
        yield from gradients.blocks(_doubles(x), y)
        return
    for xs, ys in zip(_doubles(x).split(1), y.split(1), strict=True):
        losses = nn.functional.cross_entropy(gradients.model(xs), ys)
        parts = torch.autograd.grad(losses, list(gradients.model.parameters()))
        yield DenseGradients(torch.cat([part.flatten() for part in parts])[None])


def _doubles(x: Tensor) -> Tensor:
    """Return x in float64; tokens as they are."""
    return x.double() if x.is_floating_point() else x


def _relative(found: Tensor, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


def _upto(sizes: tuple[int, ...], n: int) -> tuple[tuple[int], ...]:
    return tuple((size,) for size in sorted({min(size, n) for size in sizes}))


def _ways(sizes: tuple[int, ...], n: int) -> tuple[tuple[Any, ...], ...]:
    """Return layouts of weights and images, and sizes of batches, that a peer is tried at."""
    return tuple((layout, size) for layout in ("NCHW", "NHWC") for (size,) in _upto(sizes, n))


# Measuring


class Timing(NamedTuple):
    """The setting that a candidate was raced with, its median seconds, and of how many runs."""

    setting: tuple[Any, ...]
    seconds: float
    runs: int


class Racer(NamedTuple):
    """A candidate by its name, and whether its process keeps memory."""

    name: str
    keep: bool = True


READY: list[Run] = []  # in a candidate's process: what it repeats


class Survey(NamedTuple):
    """The work; the number of runs of each candidate, and whether its sum is bounded; the peers whose runs are short;
    those that are left out, with reasons."""

    work: str
    runs: dict[str, int]
    bounds: dict[str, str]
    short: list[str]
    left_out: dict[str, str]


def survey(make: Callable[..., Case], sizes: dict[str, Any]) -> Survey:
    """Return what is known of a case before it runs."""
    case = make(**sizes)
    every = case.candidates
    runs, bounds = {name: c.runs for name, c in every.items()}, {name: c.bound for name, c in every.items()}
    short = [name for name, c in every.items() if c.trial is None and not name.startswith("ours")]
    return Survey(case.work, runs, bounds, short, dict(case.left_out or {}))


def get_ready(
    make: Callable[..., Case], sizes: dict[str, Any], name: str, tries: int, warm_s: float
) -> tuple[Any, ...] | None:
    """Set a candidate up at its best setting, by the best of `tries` runs each; warm it up. Returns the setting; None
    if none is exact enough."""
    candidate = make(**sizes).candidates[name]

    def quick(setting: tuple[Any, ...]) -> float:
        run = (candidate.trial or candidate.build)(*setting)
        first = measuring.seconds(run)
        return min([first, *(measuring.seconds(run) for _ in range(tries - 1 if first < LONG_S else 0))])

    if candidate.reaches is not None:
        setting = next((setting for setting in candidate.settings if candidate.reaches(*setting)), None)
        if setting is None:
            return None
    else:
        setting = candidate.settings[0] if len(candidate.settings) == 1 else min(candidate.settings, key=quick)
    READY[:] = [candidate.build(*setting)]
    began = time.perf_counter()
    while candidate.runs >= RUNS and time.perf_counter() < began + warm_s:  # allocators and kernels settle
        READY[0]()
    return setting


def again() -> float:
    """Return seconds of one more run; where it is short, of each of several one after the other, as in training."""
    first = measuring.seconds(READY[0])
    more = int(REPEAT_S / first)
    return measuring.seconds(lambda: [READY[0]() for _ in range(more)]) / more if more else first


def race(
    make: Callable[..., Case], sizes: dict[str, Any], threads: int, short: bool, twins: bool
) -> tuple[Survey, dict[Racer, Timing]]:
    """Return what the work is; and the times of all candidates, which run in turn, each in a process of its own, so
    that none works with what another has left in caches of memory. Those that are not exact enough are left out.
    twins: the peers whose runs are short also race in a process that keeps no memory."""
    known = measuring.fresh(threads, survey, make, sizes)
    racers = [Racer(name) for name in known.runs] + [Racer(name, False) for name in known.short if twins]
    with ExitStack() as stack:
        workers = {racer: stack.enter_context(measuring.process(threads, racer.keep)) for racer in racers}
        effort = (1, 0.2) if short else (3, 2.0)
        tried = {r: w.submit(get_ready, make, sizes, r.name, *effort).result() for r, w in workers.items()}
        settings = {racer: setting for racer, setting in tried.items() if setting is not None}
        times: dict[Racer, list[float]] = {racer: [] for racer in settings}
        for i in range(RUNS):
            for racer in (r for r in settings if i < known.runs[r.name] and sum(times[r]) < MOST_S):
                times[racer].append(workers[racer].submit(again).result())
    known.left_out.update({racer.name: "no setting does" for racer in tried.keys() - settings.keys()})
    return known, {racer: Timing(settings[racer], statistics.median(t), len(t)) for racer, t in times.items()}


def peak(
    make: Callable[..., Case], sizes: dict[str, Any], tiny: dict[str, Any], name: str, setting: tuple[Any, ...]
) -> float:
    """Return MiB that one candidate's first run adds to its inputs."""
    make(**tiny).candidates[name].build(*setting)()
    return measuring.peak_mib(make(**sizes).candidates[name].build(*setting))


def error(make: Callable[..., Case], sizes: dict[str, Any], name: str) -> float:
    """Return the error of ours."""
    return make(**sizes).error(name)


def compare(work: Work, short: bool, device: str, threads: int) -> list[dict[str, Any]]:
    """Return a row for each peer of each of ours."""
    sizes = (work.short if short else work.full) or {}
    sizes, tiny = sizes | {"device": device}, work.tiny | {"device": device}
    known, timings = race(work.make, sizes, threads, short, work.twins and not short)
    kept = {racer.name: timing for racer, timing in timings.items() if racer.keep}
    with ThreadPoolExecutor(2) as pool:  # each in a process of its own, so two at once
        measured = {
            name: pool.submit(measuring.fresh, threads, peak, work.make, sizes, tiny, name, timing.setting)
            for name, timing in kept.items()
        }
        memory = {name: result.result() for name, result in measured.items()}
    rows = []
    for ours in (name for name in kept if name.startswith("ours")):
        wrong = measuring.fresh(threads, error, work.make, sizes, ours)
        seconds = kept[ours].seconds
        for peer in (name for name in kept if not name.startswith("ours")):
            default = timings.get(Racer(peer, False))
            row = {
                "work": known.work + ours.removeprefix("ours"),
                "peer": _label(peer, kept[peer]),
                "ours_s": f"{seconds:.4g}",
                "peer_s": f"{kept[peer].seconds:.4g}",
                "ratio": f"{kept[peer].seconds / seconds:.2f}",
                "as_it_comes": f"{default.seconds / seconds:.2f}" if default else "",
                "ours_mib": f"{memory[ours]:.1f}",
                "peer_mib": f"{memory[peer]:.1f}",
                "memory_ratio": f"{memory[peer] / max(memory[ours], 0.1):.2f}",
                "error": f"{wrong:.1e}",
                "bound": known.bounds[peer],
                "left_out": "; ".join(f"{name}: {reason}" for name, reason in known.left_out.items()),
            }
            rows.append(row)
    return rows


def _label(peer: str, timing: Timing) -> str:
    best = f" ({', '.join(map(str, timing.setting))})" if timing.setting else ""
    return peer + best + f", {timing.runs} run" * (timing.runs < RUNS)


# The command


def main() -> None:
    """Measure, print as it goes, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--short", action="store_true", help="smaller sizes, four to five minutes")
    arguments.add_argument("--only", default="", metavar="NAME", help=f"names that start so: {', '.join(WORK)}")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument(
        "--to", "--output", type=measuring.target, help="a CSV; with --only none is written unless this is given"
    )
    arguments.add_argument("--summary", type=Path, metavar="CSV", help="measure nothing; print the verdicts on a file")
    given = arguments.parse_args()
    if given.summary is not None:
        lines = verdicts(read(given.summary))
        print(table(lines))
        for title, line in (("worst", lines[0]), ("best", lines[-1])):
            print(f"{title}: {line.time:.2f} x time, {line.memory:.2f} x memory: {line.work} vs {line.peer}")
        return
    where = measuring.origin(given.device, given.threads)
    chosen = {name: w for name, w in WORK.items() if name.startswith(given.only) and (w.short or not given.short)}
    if not chosen:
        arguments.error(f"--only {given.only}: no such name; use the start of one of {', '.join(WORK)}")
    rows = []
    for work in chosen.values():
        for row in compare(work, given.short, given.device, given.threads):
            print(LINE.format(**row), flush=True)
            rows.append(row)
        if rows[-1]["left_out"]:
            print(f"left out: {rows[-1]['left_out']}", flush=True)
        path = given.to or (None if given.only else measuring.target("results/benchmark.csv"))
        if path is not None:
            measuring.write(path, rows, where)


if __name__ == "__main__":
    main()
