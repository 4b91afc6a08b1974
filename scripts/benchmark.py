"""Speed and memory as ratios to named peers: `make bench`, or `make bench ARGS=--short`. Writes results/benchmark.csv.

A case is some work, ours and its peers. Peers get their best setting first, by a quick sweep; then all run in turn in
one process, RUNS times, and a figure is the ratio of medians, the peer's over ours. Peak memory is what a run adds to
its inputs, each candidate in a process of its own. The error of ours against float64 stands beside. `--scaling`
measures instead how time and memory grow, into results/scaling.csv and .png.
"""

import argparse
import copy
import csv
import ctypes
import gc
import importlib.metadata
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for all alike; read when torch is imported

import peers
import torch
from peers import Run
from torch import Tensor, nn

from pubsel import privacy, results
from pubsel.algorithms import Algorithm, View
from pubsel.algorithms.dp_sgd import DPSGD, clipped_sum
from pubsel.algorithms.gep import GEP, SLACK, Groups, Precision
from pubsel.config import Labels
from pubsel.data import Split
from pubsel.gradients import DenseGradients, PerExampleGradients, clip_factors
from pubsel.models import small
from pubsel.randomness import stream
from pubsel.subspace import projection_metric, top_k
from pubsel.training import noisy_mean

RUNS = 5
CHUNK = 32  # ours, always
MICRO = (16, 32, 64)
NETWORKS = {"resnet20": (3, 32, 32, 10), "fmnist_cnn": (1, 28, 28, 10), "probe": (3, 224, 224, 14)}
BOUNDS = (10.0, 2.0)  # GEP's, on embedding and residual
PROCESSES = multiprocessing.get_context("forkserver")  # of a server that has imported, and computed nothing
PROCESSES.set_forkserver_preload(["opacus", "backpack.extensions", "dp_accounting.pld", "pubsel.training"])


class Candidate(NamedTuple):
    """One way to do the work. build(*setting): all but the work itself is done. trial: cheaper work that tells which of
    `settings` is best. runs: fewer than RUNS where one takes minutes; then without a warm-up."""

    build: Callable[..., Run]
    settings: tuple[tuple, ...] = ((),)
    trial: Callable[..., Run] | None = None
    runs: int = RUNS


class Case(NamedTuple):
    """Work, the ways to do it (those of ours are named so), and error(name of ours) against float64."""

    work: str
    candidates: dict[str, Candidate]
    error: Callable[[str], float]


# The work


def gradients(network: str, n: int, device: str) -> Case:
    """Per-example gradients, used up block by block."""
    model, x, y = _problem(network, n, device)
    engine = PerExampleGradients(model, CHUNK)
    sizes = _upto(MICRO, n)

    def ours() -> None:
        for _ in engine.blocks(x, y):
            pass

    def error(_: str) -> float:
        rows = engine.matrix(x[:64], y[:64]).rows
        return _relative(rows, torch.cat([block.rows.clone() for block in _exact(model, x[:64], y[:64])]))

    candidates = {
        "ours": Candidate(lambda: ours),
        "opacus hooks, one batch": Candidate(lambda: peers.opacus_gradients(model, x, y, n)),
        "opacus hooks, micro-batches": Candidate(partial(peers.opacus_gradients, model, x, y), sizes),
        "BackPACK, micro-batches": Candidate(partial(peers.backpack_gradients, model, x, y), sizes),
        "vmap(grad), chunks": Candidate(partial(peers.vmap_gradients, model, x, y), _upto((*MICRO, 128), n)),
        "plain forward and backward": Candidate(partial(peers.plain, model, x, y, update=False), _plain(n)),
    }
    return Case(f"per-example gradients, {network}, n = {n}", candidates, error)


def dp_sgd(network: str, n: int, device: str) -> Case:
    """A step of DP-SGD, noise and update included. The error is that of the noiseless mean."""
    model, x, y = _problem(network, n, device)
    view, algorithm = _view(model, None), DPSGD("dp_sgd", 1.0)

    def error(_: str) -> float:
        exact = sum(clipped_sum(block, 1.0) for block in _exact(model, x, y)) / n
        return _relative(_step(algorithm, view, x, y, 0.0), exact)

    candidates = {
        "ours": Candidate(lambda: _updating(algorithm, view, x, y)),
        "opacus hooks, one batch": Candidate(lambda: peers.opacus_step(model, x, y, n)),
        "opacus hooks, virtual steps": Candidate(partial(peers.opacus_step, model, x, y), _upto(MICRO, n)),
        "opacus ghost clipping": Candidate(partial(peers.ghost_step, model, x, y), _upto((*MICRO, n), n)),
        "plain SGD": Candidate(partial(peers.plain, model, x, y, update=True), _plain(n)),
    }
    return Case(f"DP-SGD step, {network}, n = {n}", candidates, error)


def gep(network: str, m: int, n: int, k: int, device: str) -> Case:
    """A step of GEP with its noise. The error is that of the noiseless direction, for the same basis."""
    model, x, y = _problem(network, n, device)
    public = Split(*_images(network, m, device))
    view = _view(model, public)
    settings = {"ours": _gep(k), "ours, public gradients in bfloat16": _gep(k, Precision.bfloat16)}

    def error(name: str) -> float:
        """Against residuals and their norms written out; the margin of the clipping is in both."""
        basis = settings[name].basis(view, 0)
        blocks = [block.double() for block in basis.blocks]
        total = torch.zeros(view.gradients.size, dtype=torch.float64, device=device)
        for block in _exact(model, x, y):
            parts = [block.rows[:, s] @ b for s, b in zip(basis.slices, blocks, strict=True)]
            inside = torch.cat([w @ b.T for w, b in zip(parts, blocks, strict=True)], 1)
            residual = block.rows - inside
            squares = residual.square().sum(1) + SLACK * block.rows.square().sum(1)
            total += clip_factors(torch.cat(parts, 1).norm(dim=1), BOUNDS[0]) @ inside
            total += clip_factors(squares.sqrt(), BOUNDS[1]) @ residual
        return _relative(_step(settings[name], view, x, y, 0.0), total / n)

    published = Candidate(
        partial(peers.published_gep, model, public, (x, y), k, BOUNDS),
        _upto(MICRO, n),
        partial(peers.backpack_gradients, model, x[:128], y[:128]),
    )
    ours = {name: Candidate(partial(_stepping, value, view, x, y)) for name, value in settings.items()}
    work = f"GEP step, {network}, m = {m}, n = {n}, k = {k}"
    return Case(work, {**ours, "published technique, micro-batches": published}, error)


def gsd(m: int, device: str, network: str = "resnet20", k: int = 16, runs: int = RUNS) -> Case:
    """The distance once the gradients of both sides are there."""
    model, *_ = _problem(network, 1, device)
    engine = PerExampleGradients(model, CHUNK)
    a, b = (engine.matrix(*_images(network, m, device)).rows for _ in range(2))

    def ours() -> float:
        return projection_metric(top_k(DenseGradients(a), k), top_k(DenseGradients(b), k))

    def exact(rows: Tensor) -> Tensor:
        rows = rows.double()
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        return torch.linalg.qr(rows.T @ (vectors[:, -k:] / values[-k:].sqrt())).Q

    build, trial = partial(peers.svd_distance, a, b, k), partial(peers.svd_distance, a[: m // 4], b[: m // 4], k)
    peer = Candidate(build, (("of G",), ("of the transpose",)), trial, runs)
    candidates = {"ours": Candidate(lambda: ours), "torch.linalg.svd": peer}
    work = f"GSD of two gradient matrices, {network}, m = {m}, k = {k}"
    return Case(work, candidates, lambda _: abs(ours() - projection_metric(exact(a), exact(b))))


def calibration(steps: int, device: str) -> Case:
    """Noise for epsilon 2, on the CPU. Both to 1e-3; the error is the excess of our noise over PLD at its tightest."""
    task = (2.0, 1e-5, 0.02, steps)

    def ours() -> float:
        privacy.calibrate.cache_clear()
        privacy._prv.cache_clear()
        return privacy.plan(*task, 1.0).noise_multiplier

    candidates = {
        "ours": Candidate(lambda: ours),
        "dp_accounting PLD": Candidate(lambda: lambda: peers.pld_sigma(*task, tolerance=2e-3)),
    }
    work = f"calibration, epsilon = 2, delta = 1e-5, rate = 0.02, {steps} steps"
    return Case(work, candidates, lambda _: ours() / peers.pld_sigma(*task, tolerance=1e-6) - 1)


class Work(NamedTuple):
    """make(**sizes) -> Case; `tiny` sizes run first wherever memory is measured, so that libraries are loaded."""

    make: Callable[..., Case]
    full: dict[str, Any]
    short: dict[str, Any] | None
    tiny: dict[str, Any]


def _network(make: Callable[..., Case], network: str, *sizes: int) -> Work:
    return Work(make, *({"network": network, "n": n} for n in (*sizes, 8)))


def _steps(network: str, *sizes: tuple[int, int, int]) -> Work:
    return Work(gep, *({"network": network, "m": m, "n": n, "k": k} for m, n, k in (*sizes, (8, 8, 6))))


WORK = {
    "gradients_fmnist_cnn": _network(gradients, "fmnist_cnn", 1000, 256),
    "gradients_resnet20": _network(gradients, "resnet20", 256, 64),
    "gradients_probe": _network(gradients, "probe", 64, 32),
    "dp_sgd_fmnist_cnn": _network(dp_sgd, "fmnist_cnn", 512, 256),
    "dp_sgd_resnet20": _network(dp_sgd, "resnet20", 256, 64),
    "gep_fmnist_cnn": _steps("fmnist_cnn", (2000, 1000, 500), (500, 250, 125)),
    "gep_resnet20": _steps("resnet20", (2000, 1000, 1000), (250, 125, 125)),
    "gsd_500": Work(gsd, {"m": 500}, {"m": 125}, {"m": 40}),
    "gsd_2000": Work(gsd, {"m": 2000, "runs": 1}, None, {"m": 40}),
    "calibration": Work(calibration, {"steps": 3000}, {"steps": 3000}, {"steps": 30}),
}


# Its parts


def _images(network: str, n: int, device: str) -> tuple[Tensor, Tensor]:
    *shape, classes = NETWORKS[network]
    return torch.randn(n, *shape).to(device), torch.randint(classes, (n,)).to(device)


def _problem(network: str, n: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = small.NETWORKS[network](*NETWORKS[network]).eval().to(device)
    return model, *_images(network, n, device)


def _view(model: nn.Module, public: Split | None) -> View:
    engine = PerExampleGradients(model, CHUNK)
    return View(model, engine, public, 10, False, lambda purpose, step: stream("benchmark", purpose, step))


def _gep(k: int, precision: Precision = Precision.float32) -> GEP:
    return GEP("gep", k, *BOUNDS, True, Groups.slices, 1, Labels.random, True, precision)


def _step(algorithm: Algorithm, view: View, x: Tensor, y: Tensor, noise: float) -> Tensor:
    mechanism = algorithm.mechanism(view, 0)
    source = stream("benchmark", "noise")
    return mechanism.decode(noisy_mean(mechanism, view.gradients, Split(x, y), noise, source, len(x))[0])


def _stepping(algorithm: Algorithm, view: View, x: Tensor, y: Tensor) -> Run:
    return lambda: _step(algorithm, view, x, y, 1.0)


def _updating(algorithm: Algorithm, view: View, x: Tensor, y: Tensor) -> Run:
    parameters = list(view.model.parameters())
    optimizer = torch.optim.SGD(parameters, peers.RATE)

    def run() -> None:
        direction = _step(algorithm, view, x, y, 1.0)
        for parameter, columns in zip(parameters, view.gradients.offsets.values(), strict=True):
            parameter.grad = direction[columns].view_as(parameter)
        optimizer.step()

    return run


def _exact(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Blocks of G in float64, by vmap(grad)."""
    engine = PerExampleGradients(copy.deepcopy(model).double(), 16)
    engine._by_layers = False
    return engine.blocks(x.double(), y)


def _relative(found: Tensor, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


def _upto(sizes: tuple[int, ...], n: int) -> tuple[tuple[int], ...]:
    return tuple((size,) for size in sorted({min(size, n) for size in sizes}))


def _plain(n: int) -> tuple[tuple, ...]:
    return tuple((layout, size) for layout in ("NCHW", "NHWC") for (size,) in _upto((32, 64, n), n))


# Measuring: race, peak, error and point run in a fresh process each


class Timing(NamedTuple):
    """The setting that a candidate was raced with, its median seconds, and of how many runs."""

    setting: tuple
    seconds: float
    runs: int


def race(make: Callable[..., Case], sizes: dict[str, Any]) -> tuple[str, dict[str, Timing]]:
    """What the work is; and each candidate at its best setting, by the better of two runs; then all in turn."""
    work, candidates, _ = make(**sizes)

    def quick(candidate: Candidate, setting: tuple) -> float:
        run = (candidate.trial or candidate.build)(*setting)
        return min(_seconds(run) for _ in range(2))

    settings = {
        name: c.settings[0] if len(c.settings) == 1 else min(c.settings, key=partial(quick, c))
        for name, c in candidates.items()
    }
    runs = {name: c.build(*settings[name]) for name, c in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        if candidates[name].runs >= RUNS:
            run()
    for i in range(RUNS):
        for name, run in runs.items():
            if i < candidates[name].runs:
                times[name].append(_seconds(run))
    return work, {name: Timing(settings[name], statistics.median(t), len(t)) for name, t in times.items()}


def peak(make: Callable[..., Case], sizes: dict[str, Any], tiny: dict[str, Any], name: str, setting: tuple) -> float:
    """MiB that one candidate's first run adds to its inputs."""
    make(**tiny).candidates[name].build(*setting)()
    return _peak(make(**sizes).candidates[name].build(*setting))


def error(make: Callable[..., Case], sizes: dict[str, Any], name: str) -> float:
    """The error of ours."""
    return make(**sizes).error(name)


def _seconds(run: Run) -> float:
    synchronise: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    synchronise()
    start = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - start


def _peak(run: Run) -> float:
    """MiB above the level before: of the GPU where it is used, else resident, by the kernel's own high-water mark."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    start = _status("VmRSS")
    run()
    return (_status("VmHWM") - start) / 2**10


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key + ":")))


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # hooks of opacus and BackPACK


def fresh(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a process that has computed nothing before."""
    with ProcessPoolExecutor(1, PROCESSES, initializer=_prepare, initargs=(threads,)) as pool:
        return pool.submit(function, *arguments).result()


def compare(work: Work, short: bool, device: str, threads: int) -> list[dict[str, Any]]:
    """A row for each peer of each of ours."""
    sizes = (work.short if short else work.full) or {}
    sizes, tiny = sizes | {"device": device}, work.tiny | {"device": device}
    title, timings = fresh(threads, race, work.make, sizes)
    memory = {name: fresh(threads, peak, work.make, sizes, tiny, name, t.setting) for name, t in timings.items()}
    rows = []
    for ours in (name for name in timings if name.startswith("ours")):
        wrong = fresh(threads, error, work.make, sizes, ours)
        for peer in (name for name in timings if not name.startswith("ours")):
            rows.append({
                "work": title + ours.removeprefix("ours"),
                "peer": _label(peer, timings[peer]),
                "ours_s": f"{timings[ours].seconds:.4g}",
                "peer_s": f"{timings[peer].seconds:.4g}",
                "ratio": f"{timings[peer].seconds / timings[ours].seconds:.2f}",
                "ours_mib": f"{memory[ours]:.1f}",
                "peer_mib": f"{memory[peer]:.1f}",
                "memory_ratio": f"{memory[peer] / max(memory[ours], 0.1):.2f}",
                "error": f"{wrong:.1e}",
            })  # fmt: skip
    return rows


def _label(peer: str, timing: Timing) -> str:
    best = f" ({', '.join(map(str, timing.setting))})" if timing.setting else ""
    return peer + best + f", {timing.runs} run" * (timing.runs < RUNS)


# Scaling


@dataclass
class EqualGroups(GEP):
    """GEP with any number of equal slices of columns as groups."""

    count: int = 3

    def columns(self, view: View) -> list[slice]:
        cuts = [round(i * view.gradients.size / self.count) for i in range(self.count + 1)]
        return [slice(a, b) for a, b in pairwise(cuts)]


def _layers(width: int, device: str) -> nn.Module:
    """A convolution and two linear layers for 28 x 28 images: 1,363 parameters for each unit of width, and 90."""
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(1352, width), nn.ReLU(), nn.Linear(width, 10)).eval().to(device)


def gep_of_size(n: int, m: int, width: int, k: int, groups: int, device: str) -> tuple[int, Run]:
    """p, and a GEP step."""
    public, (x, y) = Split(*_images("fmnist_cnn", m, device)), _images("fmnist_cnn", n, device)
    view = _view(_layers(width, device), public)
    algorithm = EqualGroups(**vars(_gep(k)), count=groups)
    return view.gradients.size, partial(_step, algorithm, view, x, y, 1.0)


def gsd_of_size(m: int, width: int, device: str) -> tuple[int, Run]:
    """p, and GSD of two sets of images; k = 16."""
    engine = PerExampleGradients(_layers(width, device), CHUNK)
    images = [_images("fmnist_cnn", m, device) for _ in range(2)]
    return engine.size, lambda: projection_metric(*(top_k(engine.matrix(x, y), 16) for x, y in images))


def point(make: Callable[..., tuple[int, Run]], sizes: dict[str, Any], device: str) -> tuple[int, float, float]:
    """p, median seconds of three runs, and MiB of the first, after one of tiny size."""
    tiny = {name: min(size, 32) for name, size in sizes.items()}
    make(**tiny, device=device)[1]()
    p, run = make(**sizes, device=device)
    memory = _peak(run)
    return p, statistics.median(_seconds(run) for _ in range(3)), memory


class Growth(NamedTuple):
    """One variable doubled, from `start`; the others such that it matters."""

    make: Callable[..., tuple[int, Run]]
    variable: str
    start: int
    others: dict[str, int]
    expected_time: str
    expected_memory: str


GROWTH = {
    "GEP step": [
        Growth(gep_of_size, "n", 256, {"m": 64, "width": 96, "k": 48, "groups": 3},
               "1: passes and products, for each private row", "0: blocks lie in the same memory"),
        Growth(gep_of_size, "m", 256, {"n": 64, "width": 96, "k": 48, "groups": 3},
               "1: passes and products, for each public row", "0: public gradients are summed block by block"),
        Growth(gep_of_size, "width", 48, {"n": 256, "m": 256, "k": 48, "groups": 3},
               "0 to 1: the convolution 0, all else 1", "1: a block of rows and the basis"),
        Growth(gep_of_size, "k", 32, {"n": 256, "m": 256, "width": 48, "groups": 3},
               "0 to 2: passes 0, products 1, QR 2", "0 to 1: a block of rows 0, the basis 1"),
        Growth(gep_of_size, "groups", 1, {"n": 256, "m": 256, "width": 48, "k": 192},
               "-2 to 0: passes 0, products -1, QR -2", "-1 to 0: a block of rows 0, the basis p k / groups"),
    ],
    "GSD": [
        Growth(gsd_of_size, "m", 128, {"width": 48},
               "1 to 3: passes 1, Gram matrix 2, eigenvectors 3", "1: G of one side, m p"),
        Growth(gsd_of_size, "width", 48, {"m": 256}, "0 to 1: the convolution 0, all else 1", "1: G of one side, m p"),
    ],
}  # fmt: skip


def scaling(short: bool, device: str, threads: int) -> list[dict[str, Any]]:
    """Four sizes of each variable (three with `short`), and the exponents by least squares in log-log."""
    rows = []
    for what, growths in GROWTH.items():
        for g in growths:
            values = [g.start * 2**i for i in range(3 if short else 4)]
            points = [fresh(threads, point, g.make, g.others | {g.variable: value}, device) for value in values]
            sizes = [p for p, *_ in points] if g.variable == "width" else values
            seconds, memory = [s for _, s, _ in points], [mib for *_, mib in points]
            rows.append({
                "what": what,
                "variable": "p" if g.variable == "width" else g.variable,
                "sizes": " ".join(map(str, sizes)),
                "seconds": " ".join(f"{s:.4g}" for s in seconds),
                "mib": " ".join(f"{mib:.4g}" for mib in memory),
                "time_exponent": f"{_exponent(sizes, seconds):.2f}",
                "memory_exponent": f"{_exponent(sizes, memory):.2f}",
                "expected_time": g.expected_time,
                "expected_memory": g.expected_memory,
            })  # fmt: skip
            print("{what} in {variable}: time {time_exponent} ({expected_time}), "
                  "memory {memory_exponent} ({expected_memory})".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


def _exponent(sizes: list[int], values: list[float]) -> float:
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Log-log lines, time above memory; dashes: the power law that was fitted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * len(rows), 5), layout="constrained")
    axes = figure.subplots(2, len(rows))
    for column, row in enumerate(rows):
        sizes = [int(size) for size in row["sizes"].split()]
        for line, (key, unit) in enumerate((("seconds", "s"), ("mib", "MiB"))):
            values = [float(value) for value in row[key].split()]
            exponent = _exponent(sizes, values)
            centre = statistics.fmean(math.log(v) - exponent * math.log(s) for s, v in zip(sizes, values, strict=True))
            fitted = [math.exp(centre) * size**exponent for size in sizes]
            panel = axes[line, column]
            panel.loglog(sizes, values, "ko-", sizes, fitted, "k--", linewidth=1, markersize=4)
            panel.set_title(f"{row['what']}, {row['variable']}: {exponent:.2f}", fontsize=9)
            panel.set_ylim(min(values) / 2, max(values) * 2)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=45, minor=False)
            panel.set_xticks([], minor=True)
            panel.set_ylabel(unit if column == 0 else "")
            panel.set_xlabel(row["variable"])
    figure.savefig(path, dpi=150)


# The command


def _origin(device: str, threads: int) -> dict[str, Any]:
    origin = results.provenance()
    hardware = torch.cuda.get_device_name() if device == "cuda" else origin["hardware"]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
    versions["backpack"] = importlib.metadata.version("backpack-for-pytorch")
    return {"device": device, "threads": threads, "hardware": hardware} | versions | {"commit": origin["commit"]}


def _write(path: Path, rows: list[dict[str, Any]], origin: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin])
        writer.writeheader()
        writer.writerows(row | origin for row in rows)


def main() -> None:
    """Measure, print as it goes, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--short", action="store_true", help="smaller sizes, a few minutes")
    arguments.add_argument("--only", default="", metavar="NAME", help=f"names that start so: {', '.join(WORK)}")
    arguments.add_argument("--scaling", action="store_true", help="how time and memory grow, instead")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--output", type=Path, help="a CSV; with --only none is written unless this is given")
    given = arguments.parse_args()
    origin = _origin(given.device, given.threads)
    if given.scaling:
        path = given.output or Path("results/scaling.csv")
        rows = scaling(given.short, given.device, given.threads)
        _write(path, rows, origin)
        plot(rows, path.with_suffix(".png"))
        return
    chosen = {name: w for name, w in WORK.items() if name.startswith(given.only) and (w.short or not given.short)}
    if not chosen:
        arguments.error(f"--only {given.only}: no such name; use the start of one of {', '.join(WORK)}")
    rows = []
    for work in chosen.values():
        for row in compare(work, given.short, given.device, given.threads):
            print(
                "{ratio:>6} x time, {memory_ratio:>6} x memory: {work} vs {peer}  "
                "({peer_s} / {ours_s} s, {peer_mib} / {ours_mib} MiB, error {error})".format(**row), flush=True
            )  # fmt: skip
            rows.append(row)
        path = given.output or (None if given.only else Path("results/benchmark.csv"))
        if path is not None:
            _write(path, rows, origin)


if __name__ == "__main__":
    main()
