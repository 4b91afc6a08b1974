"""How time and memory grow: `make bench-scaling`, or with ARGS=--short. Writes results/scaling.csv and scaling.svg.

Each variable is doubled in turn, the others such that it matters; exponents are by least squares in log-log, and stand
beside those that are expected.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import torch
from benchmark import gep_settings, public_view, random_images, stepping
from measuring import Run
from torch import nn

from pubsel.algorithms import View
from pubsel.algorithms.gep import GEP
from pubsel.data import Split
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.subspace import projection_metric, top_k


@dataclass
class EqualGroups(GEP):
    """GEP with any number of equal slices of columns as groups."""

    count: int = 3

    def columns(self, view: View) -> list[slice]:
        cuts = [round(i * view.gradients.size / self.count) for i in range(self.count + 1)]
        return [slice(a, b) for a, b in pairwise(cuts)]


def _layers(width: int, device: str) -> nn.Module:
    """Return a convolution and two linear layers for 28 x 28 images: 1,363 parameters for each unit of width, and
    90."""
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(1352, width), nn.ReLU(), nn.Linear(width, 10)).eval().to(device)


def gep_of_size(n: int, m: int, width: int, k: int, groups: int, device: str) -> tuple[int, Run]:
    """Return p, and a GEP step."""
    public, (x, y) = Split(*random_images("fmnist_cnn", m, device)), random_images("fmnist_cnn", n, device)
    view = public_view(_layers(width, device), public)
    algorithm = EqualGroups(**vars(gep_settings(k)), count=groups)
    return view.gradients.size, stepping(algorithm, view, x, y, 1.0)


def gsd_of_size(m: int, width: int, device: str) -> tuple[int, Run]:
    """Return p, and GSD of two sets of images; k = 16."""
    engine = PerExampleGradients(_layers(width, device))
    images = [random_images("fmnist_cnn", m, device) for _ in range(2)]
    return engine.size, lambda: projection_metric(*(top_k(engine.matrix(x, y), 16) for x, y in images))


def point(make: Callable[..., tuple[int, Run]], sizes: dict[str, Any], device: str) -> tuple[int, float, float]:
    """Return p, median seconds of three runs, and MiB of the first, after one of tiny size."""
    tiny = {name: min(size, 32) for name, size in sizes.items()}
    make(**tiny, device=device)[1]()
    p, run = make(**sizes, device=device)
    memory = measuring.peak_mib(run)
    return p, statistics.median(measuring.seconds(run) for _ in range(3)), memory


class Growth(NamedTuple):
    """One variable doubled, from `start`; the others such that it matters."""

    make: Callable[..., tuple[int, Run]]
    variable: str
    start: int
    others: dict[str, int]
    expected_time: str
    expected_memory: str


LINE = "{what} in {variable}: time {time_exponent} ({expected_time}), memory {memory_exponent} ({expected_memory})"
GROWTH = {
    "GEP step": [
        Growth(
            gep_of_size,
            "n",
            256,
            {"m": 64, "width": 96, "k": 48, "groups": 3},
            "1: passes and products, for each private row",
            "0: blocks lie in the same memory",
        ),
        Growth(
            gep_of_size,
            "m",
            256,
            {"n": 64, "width": 96, "k": 48, "groups": 3},
            "1: passes and products, for each public row",
            "0: public gradients are summed block by block",
        ),
        Growth(
            gep_of_size,
            "width",
            48,
            {"n": 256, "m": 256, "k": 48, "groups": 3},
            "0 to 1: the convolution 0, all else 1",
            "1: a block of rows and the basis",
        ),
        Growth(
            gep_of_size,
            "k",
            32,
            {"n": 256, "m": 256, "width": 48, "groups": 3},
            "0 to 2: passes 0, products 1, QR 2",
            "0 to 1: a block of rows 0, the basis 1",
        ),
        Growth(
            gep_of_size,
            "groups",
            1,
            {"n": 256, "m": 256, "width": 48, "k": 192},
            "-2 to 0: passes 0, products -1, QR -2",
            "-1 to 0: a block of rows 0, the basis p k / groups",
        ),
    ],
    "GSD": [
        Growth(
            gsd_of_size,
            "m",
            128,
            {"width": 48},
            "1 to 3: passes 1, Gram matrix 2, eigenvectors 3",
            "1: G of one side, m p",
        ),
        Growth(gsd_of_size, "width", 48, {"m": 256}, "0 to 1: the convolution 0, all else 1", "1: G of one side, m p"),
    ],
}


def scaling(short: bool, device: str, threads: int) -> list[dict[str, Any]]:
    """Return four sizes of each variable (three with `short`), and the exponents by least squares in log-log."""
    rows = []
    for what, growths in GROWTH.items():
        for g in growths:
            values = [g.start * 2**i for i in range(3 if short else 4)]
            points = [
                measuring.fresh(threads, point, g.make, g.others | {g.variable: value}, device) for value in values
            ]
            sizes = [p for p, *_ in points] if g.variable == "width" else values
            seconds, memory = [s for _, s, _ in points], [mib for *_, mib in points]
            row = {
                "what": what,
                "variable": "p" if g.variable == "width" else g.variable,
                "sizes": " ".join(map(str, sizes)),
                "seconds": " ".join(f"{s:.4g}" for s in seconds),
                "mib": " ".join(f"{mib:.4g}" for mib in memory),
                "time_exponent": f"{_exponent(sizes, seconds):.2f}",
                "memory_exponent": f"{_exponent(sizes, memory):.2f}",
                "expected_time": g.expected_time,
                "expected_memory": g.expected_memory,
            }
            rows.append(row)
            print(LINE.format(**row), flush=True)
    return rows


def _exponent(sizes: list[int], values: list[float]) -> float:
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw log-log lines, time above memory; dashes: the power law that was fitted."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

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
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.set_ylabel(unit if column == 0 else "")
            panel.set_xlabel(row["variable"])
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print as it goes, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--short", action="store_true", help="three sizes instead of four")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--to", "--output", type=measuring.target, default="results/scaling.csv")
    given = arguments.parse_args()
    where = measuring.origin(given.device, given.threads)
    rows = scaling(given.short, given.device, given.threads)
    measuring.write(given.to, rows, where)
    if given.to.descriptor is None and not given.to.special:
        plot(rows, given.to.path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
