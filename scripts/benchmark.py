"""Speed as ratios: `make bench`, or `make bench ARGS=--short`. Writes results/benchmark.csv.

Ours and a named peer run in turn, five times or more, in one process; a figure is the peer's median time over ours.
Correctness against float64 stands beside each. Peers get their best chunk size too.
"""

import argparse
import copy
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from pubsel import results
from pubsel.algorithms import View
from pubsel.algorithms.dp_sgd import clipped_sum
from pubsel.algorithms.gep import GEP, Groups, Precision
from pubsel.config import Labels
from pubsel.data import Split
from pubsel.gradients import DenseGradients, PerExampleGradients, loss_of
from pubsel.models import small
from pubsel.randomness import stream
from pubsel.subspace import power_basis, projection_metric, top_k

CHUNK = 32


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one warm-up, in turn."""
    for run in runs.values():
        run()
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronise()
            start = time.perf_counter()
            run()
            synchronise()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def opacus_rows(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """Per-example gradients [n, p] by opacus hooks, `chunk` examples at a time."""
    parts = []
    for xs, ys in zip(x.split(chunk), y.split(chunk), strict=True):
        model.zero_grad()
        loss_of(model(xs), ys).backward()
        parts.append(torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], dim=1))  # type: ignore[attr-defined]
    return torch.cat(parts)


def gradients(name: str, shape: tuple[int, int, int], n: int, repeats: int) -> list[dict[str, object]]:
    """Per-example gradients, and the clipped sum of a DP-SGD step, against opacus hooks."""
    torch.manual_seed(0)
    model = small.NETWORKS[name](*shape, 10).eval()
    x, y = torch.randn(n, *shape), torch.randint(10, (n,))
    ours = PerExampleGradients(model, CHUNK)
    peer = GradSampleModule(copy.deepcopy(model), loss_reduction="sum").train()

    def plain() -> None:
        for xs, ys in zip(x.split(64), y.split(64), strict=True):
            model.zero_grad()
            loss_of(model(xs), ys).backward()

    def step() -> Tensor:
        return sum((clipped_sum(block, 1.0) for block in ours.blocks(x, y)), torch.zeros(ours.size))

    def opacus_step(chunk: int) -> Tensor:
        total = torch.zeros(ours.size)
        for xs, ys in zip(x.split(chunk), y.split(chunk), strict=True):
            rows = opacus_rows(peer, xs, ys, chunk)
            total += (1.0 / rows.norm(dim=1)).clamp(max=1) @ rows
        return total

    exact = PerExampleGradients(copy.deepcopy(model).double(), CHUNK).matrix(x[:64].double(), y[:64]).rows
    error = float((ours.matrix(x[:64], y[:64]).rows - exact).norm() / exact.norm())
    rows: list[dict[str, object]] = []
    times = interleaved(
        {
            "ours": lambda: ours.matrix(x, y),
            "opacus, one batch": lambda: opacus_rows(peer, x, y, n),
            "opacus, micro-batches of 32": lambda: opacus_rows(peer, x, y, 32),
            "plain forward and backward": plain,
        },
        repeats,
    )
    rows += _against(f"per-example gradients, {name}, n = {n}", times, error)
    times = interleaved(
        {
            "ours": step,
            "opacus, one batch": lambda: opacus_step(n),
            "opacus, micro-batches of 32": lambda: opacus_step(32),
        },
        repeats,
    )
    return rows + _against(f"clipped sum of a DP-SGD step, {name}, n = {n}", times, error)


def gep_step(m: int, n: int, k: int, repeats: int) -> list[dict[str, object]]:
    """A GEP step on fmnist_cnn against the published technique: a loop over columns, and the residual written out."""
    torch.manual_seed(0)
    model = small.fmnist_cnn(1, 28, 28, 10).eval()
    public = Split(torch.randn(m, 1, 28, 28), torch.randint(10, (m,)))
    x, y = torch.randn(n, 1, 28, 28), torch.randint(10, (n,))
    engine = PerExampleGradients(model, CHUNK)
    view = View(model, engine, public, 10, False, lambda purpose, step: stream("benchmark", purpose, step))

    def settings(precision: Precision) -> GEP:
        return GEP("gep", k, 10.0, 2.0, True, Groups.slices, 1, Labels.random, True, precision)

    def ours(precision: Precision) -> Tensor:
        mechanism = settings(precision).mechanism(view, 0)
        total = sum((mechanism.clipped_sum(block) for block in engine.blocks(x, y)), torch.zeros(mechanism.size))
        return mechanism.decode(total)

    def published() -> Tensor:
        algorithm = settings(Precision.float32)
        rows, private = engine.matrix(public.x, public.y).rows, engine.matrix(x, y).rows
        direction, slices = torch.zeros(engine.size), algorithm.columns(view)
        bases, embeddings, residuals = [], [], []
        for s in slices:
            b = rows[:, s].T @ (rows[:, s] @ torch.randn(s.stop - s.start, k // 3))
            for i in range(b.shape[1]):
                b[:, i] /= b[:, i].norm()
                b[:, i + 1 :] -= b[:, i, None] * (b[:, i] @ b[:, i + 1 :])
            bases.append(b)
            embeddings.append(private[:, s] @ b)
            residuals.append(private[:, s] - embeddings[-1] @ b.T)
        w, r = torch.cat(embeddings, 1), torch.cat(residuals, 1)
        w = (w * (10 / w.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
        r = (r * (2 / r.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
        for s, b, part in zip(slices, bases, w.split(k // 3), strict=False):
            direction[s] = b @ part
        return direction + r

    times = interleaved(
        {
            "ours": lambda: ours(Precision.float32),
            "the published technique": published,
            "ours, bfloat16 public gradients": lambda: ours(Precision.bfloat16),
        },
        repeats,
    )
    return _against(f"GEP step, fmnist_cnn, m = {m}, n = {n}, k = {k}", times, None)


def gsd(m: int, repeats: int) -> list[dict[str, object]]:
    """The distance from two gradient matrices, against a full SVD; fmnist_cnn, k = 16."""
    torch.manual_seed(0)
    model = small.fmnist_cnn(1, 28, 28, 10).eval()
    engine = PerExampleGradients(model, CHUNK)
    a, b = (engine.matrix(torch.randn(m, 1, 28, 28), torch.randint(10, (m,))).rows for _ in range(2))

    def ours() -> float:
        return projection_metric(top_k(DenseGradients(a), 16), top_k(DenseGradients(b), 16))

    def full(x: Tensor, y: Tensor) -> float:
        v1, v2 = (torch.linalg.svd(rows, full_matrices=False).Vh[:16].T for rows in (x, y))
        return projection_metric(v1, v2)

    error = abs(ours() - full(a.double(), b.double()))
    times = interleaved({"ours": ours, "torch.linalg.svd": lambda: full(a, b)}, repeats)
    return _against(f"GSD of two gradient matrices, fmnist_cnn, m = {m}, k = 16", times, error)


def orthogonalisation(repeats: int) -> list[dict[str, object]]:
    """Basis of one group, p = 89,449, k = 200, against a loop over columns."""
    torch.manual_seed(0)
    rows, start = torch.randn(300, 89_449), torch.randn(89_449, 200)

    def loop() -> Tensor:
        b = rows.T @ (rows @ start)
        for i in range(b.shape[1]):
            b[:, i] /= b[:, i].norm()
            b[:, i + 1 :] -= b[:, i, None] * (b[:, i] @ b[:, i + 1 :])
        return b

    error = float((power_basis(rows, start, 1).T @ power_basis(rows, start, 1) - torch.eye(200)).abs().max())
    times = interleaved({"ours": lambda: power_basis(rows, start, 1), "column loop": loop}, repeats)
    return _against("power basis, m = 300, p = 89,449, k = 200", times, error)


def _against(work: str, times: dict[str, float], error: float | None) -> list[dict[str, object]]:
    ours = times.pop("ours")
    return [
        {
            "work": work,
            "peer": peer,
            "ours_s": f"{ours:.4g}",
            "peer_s": f"{seconds:.4g}",
            "ratio": f"{seconds / ours:.2f}",
            "error": "" if error is None else f"{error:.1e}",
        }
        for peer, seconds in times.items()
    ]


def main() -> None:
    """Run all, print as it goes, write results/benchmark.csv."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--short", action="store_true", help="smaller sizes, under a minute or two")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--output", type=Path, default=Path("results/benchmark.csv"))
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_default_device(given.device)
    short = given.short
    rows: list[dict[str, object]] = []
    for part in (
        lambda: gradients("fmnist_cnn", (1, 28, 28), 256 if short else 1000, 5),
        lambda: gradients("resnet20", (3, 32, 32), 64 if short else 256, 5),
        lambda: gep_step(500 if short else 2000, 250 if short else 1000, 125 if short else 500, 5),
        lambda: gsd(200 if short else 500, 5),
        lambda: orthogonalisation(5),
    ):
        for row in part():
            print(f"{row['ratio']:>6} x  {row['work']} vs {row['peer']}  (error {row['error'] or '-'})", flush=True)
            rows.append(row)
    origin = results.provenance()
    where = {"device": given.device, "threads": given.threads, "hardware": origin["hardware"]}
    where |= {name: origin["versions"][name] for name in ("torch", "opacus")} | {"commit": origin["commit"]}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows(row | where for row in rows)


if __name__ == "__main__":
    main()
