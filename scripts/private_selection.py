"""How often private selection picks the non-private winner: `scripts/private_selection.py FILE.csv [key=value ...]`.

The settings are those of pubsel rank: private=..., public=[...], model=..., distance.k, select.private_m (how many
private examples are measured: the pool that samples are drawn from; inf: all), results=FOLDER. What is measured is kept
in RESULTS/selection/NAME.npz, and the mechanisms are then simulated, on samples of all n private examples and on
smaller private sets; a pair that is there already is not measured again. The file gets a row for each mechanism,
epsilon and size of the sample; other pairs' rows in it stay.

The winner is the candidate of least mean GSD over the same initialisations; where others are as near, `excess` says
more: how much larger the GSD of the chosen one is, on average. Mechanisms, each at the same epsilon:
  median, best, worst  permute-and-flip on shares of energy relative to the example's median, best or worst candidate,
                       cut at `cap`; pubsel rank takes median
  exponential          the exponential mechanism on the scores of median
  votes                permute-and-flip on how often a candidate holds most of an example's gradient
  dp_gsd_gauss         DP-GSD, delta 1e-5, nearest candidate; dp_gsd_bingham with delta 0
  sketch               energies tr(V^T A V) of the noisy second moments that dp_gsd_gauss releases
"""

import csv
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray
from torch import Tensor

from pubsel import distances, selection
from pubsel.cell import choose_device, network
from pubsel.commands import rank
from pubsel.distances import dp_gsd
from pubsel.distances.gsd import GSD
from pubsel.gradients.subspace import projection_metric
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import stream
from pubsel.settings import CONF
from pubsel.settings.identity import as_json, digest_of, short_name
from pubsel.settings.keys import RankConfig
from pubsel.settings.methods import option
from pubsel.settings.schema import check

EPSILONS = (0.05, 0.1, 0.5, 1.0, 2.0)
SIZES = (500, 2000)  # of smaller private sets, subsets of the pool
CAPS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
DELTA = 1e-5
SAMPLES, DRAWS = 200, 20  # of the private data for each row; the same for DP-GSD, whose every draw takes a while
SKETCH = option("distance", "dp_gsd")["sketch"]


def measured(settings: RankConfig) -> dict[str, Any]:
    """Return the figures of one pair: names [J]; gsd [J, T]; u [N, J], energies of the pool; x [T, N, s] and v [T, J,
    s, k], sketched private rows and public subspaces for DP-GSD; n, the private examples there are."""
    folder = Path(settings.results) / "selection"
    path = folder / f"{short_name(settings.private)}-{settings.model.name}-{digest_of(as_json(settings))}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            found = _measure(settings, Path(kept))
        np.savez(path.with_suffix(".part.npz"), **found)
        path.with_suffix(".part.npz").replace(path)
    return dict(np.load(path))


def _measure(settings: RankConfig, kept: Path) -> dict[str, Any]:
    device, distance, select = choose_device(settings.device), gsd_of(settings), settings.select
    task, candidates = rank.open_candidates(settings, device, kept)
    classes, private, key = max(2, task.classes), task.private, f"selection {settings.seed}"
    pool = stream(key, "pool").permutation(len(private.x))[: int(min(len(private.x), select.private_m or distance.m))]
    chosen = torch.from_numpy(np.sort(pool))

    def build(i: int) -> torch.nn.Module:
        return network(settings.model, task, settings.seed + i, settings.data_root).to(device)

    def source(purpose: str, i: int) -> np.random.Generator:
        return stream(key, purpose, i)

    values = distance.measure(build, private, candidates, classes, f"rank {settings.seed}")
    sets = selection.Comparison(build, private, candidates, classes, key, source)
    u = selection.energies(distance, select.sketch, sets, chosen)
    rows, subspaces = [], []
    for i in range(distance.initialisations):
        side = dp_gsd.Side(distance, build(i), classes, private.y.dim() == 2, SKETCH, key, i)
        rows.append(torch.cat(list(side.private(private, chosen, source("labels", i)))).float())
        subspaces.append(torch.stack([side.public(name, split) for name, split in candidates.items()]))
    gsd = np.array([values[name] for name in candidates])
    result = {"names": np.array(list(candidates)), "gsd": gsd, "u": u.numpy()}
    return result | {"x": torch.stack(rows).numpy(), "v": torch.stack(subspaces).numpy(), "n": len(private.x)}


def gsd_of(settings: RankConfig) -> GSD:
    """Return the settings of GSD, by which a choice goes."""
    return selection.gsd_of(distances.build(settings.distance))


def scores(kind: str, u: Tensor, cap: float) -> Tensor:
    """Return contributions [N, J] in steps of 1 / UNIT; a row's differ by at most UNIT, which is all that the proof
    needs."""
    if kind == "median":
        return selection.contributions(u, cap)
    if kind == "votes":
        return torch.nn.functional.one_hot(u.argmax(1), u.shape[1]) * UNIT
    ends = {"best": 1 - (u.amax(1, keepdim=True) - u) / cap, "worst": (u - u.amin(1, keepdim=True)) / cap}
    return (ends[kind].clamp(0, 1) * UNIT).round().long()


def softmax(total: list[int], epsilon: float) -> NDArray[np.float64]:
    """Return probabilities of the exponential mechanism."""
    q = np.array(total) / UNIT
    p = np.exp(epsilon * (q - q.max()))
    shares: NDArray[np.float64] = p / p.sum()
    return shares


def simulated(settings: RankConfig, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows of the table of one pair."""
    u, n, far = torch.from_numpy(found["u"]), int(found["n"]), found["gsd"].mean(1)
    seen = {"private": settings.private, "model": settings.model.name, "candidates": "+".join(found["names"])}
    seen |= {"winner": str(found["names"][far.argmin()]), "best_energy": str(found["names"][int(u.mean(0).argmax())])}
    named = [(kind, cap) for kind in ("median", "best", "worst", "exponential") for cap in CAPS] + [("votes", 1.0)]
    cases = {(n, min(gsd_of(settings).m, len(u))), (n, len(u)), *((size, size) for size in SIZES if size < len(u))}
    for n, m in sorted(cases):
        keep = torch.stack([drawn(len(u), n, m, stream("selection", "sample", i)) for i in range(SAMPLES)]).double()
        inner = {epsilon: 1 / accountant.pure(epsilon, m / n, 1, "").noise_multiplier for epsilon in EPSILONS}
        for kind, cap in named:
            each = scores("median" if kind == "exponential" else kind, u, cap)
            totals = (keep @ each.double()).long().tolist()  # exact: below 2^53
            rule = softmax if kind == "exponential" else selection.probabilities
            for epsilon in EPSILONS:
                p = np.array([rule(total, inner[epsilon]) for total in totals])
                yield seen | row(n, m, kind, cap, epsilon, 0.0, p, far)
        for epsilon in EPSILONS:
            for kind, p in dp_gsd_choices(settings, found, n, m, epsilon).items():
                yield seen | row(n, m, kind, None, epsilon, 0.0 if kind == "dp_gsd_bingham" else DELTA, p, far)


def drawn(pool: int, n: int, m: int, source: np.random.Generator) -> Tensor:
    """Return which of the pool's examples take part, bool [pool]: of a private set of n = m examples all, else a
    Poisson sample of m expected ones."""
    uniform = torch.from_numpy(source.random(pool))
    return uniform <= uniform.sort().values[m - 1] if m == n else uniform < m / pool


def row(
    n: int, m: int, kind: str, cap: float | None, epsilon: float, delta: float, p: NDArray[np.float64], far: Any
) -> dict[str, Any]:
    """Return a row, from the probabilities p [trials, J] of each choice and the GSD `far` [J]: that of the winner, with
    its standard error; and by how much the chosen set's GSD is larger, on average."""
    right = p[:, far.argmin()]
    error = right.std() / math.sqrt(len(right))
    excess = max(0.0, (p @ far).mean() - far.min())
    about = {"n": n, "m": m, "mechanism": kind, "cap": cap or "", "epsilon": epsilon, "delta": delta}
    figures = {"probability": f"{right.mean():.4f}", "error": f"{error:.4f}", "trials": len(right)}
    return about | figures | {"excess": f"{excess:.4f}"}


def dp_gsd_choices(
    settings: RankConfig, found: dict[str, Any], n: int, m: int, epsilon: float
) -> dict[str, NDArray[np.float64]]:
    """Return the choices of each way by DP-GSD, 0/1 [DRAWS, J]. The exponential mechanism takes longest and finds
    least: only where most examples are."""
    x, v = torch.from_numpy(found["x"]), torch.from_numpy(found["v"])
    steps, rate, k = len(x), m / n, gsd_of(settings).k
    gauss = accountant.plan(epsilon, DELTA, rate, steps, 1.0).noise_multiplier
    inner = 1 / accountant.pure(epsilon, rate, steps, "").noise_multiplier
    kinds = ["dp_gsd_gauss", "sketch"] + (["dp_gsd_bingham"] if m == x.shape[1] else [])
    choices = {kind: np.zeros((DRAWS, v.shape[1])) for kind in kinds}
    for draw in range(DRAWS):
        far = {kind: np.zeros(v.shape[1]) for kind in kinds}
        for i in range(steps):
            source = stream("selection", f"dp_gsd {epsilon} {m} {draw}", i)
            rows = x[i][drawn(x.shape[1], n, m, source)].double()
            second = rows.T @ rows
            released = dp_gsd.noisy(second, gauss, source)
            own = {"dp_gsd_gauss": torch.linalg.eigh(released).eigenvectors[:, -k:]}
            if "dp_gsd_bingham" in kinds:
                own["dp_gsd_bingham"] = dp_gsd.exponential_subspace(second, k, inner, source)
            for kind, basis in own.items():
                far[kind] += [projection_metric(basis, public) for public in v[i]]
            far["sketch"] -= [float((public * (released @ public)).sum()) for public in v[i]]
        for kind in kinds:
            choices[kind][draw, far[kind].argmin()] = 1
    return choices


def main(path: Path, words: list[str]) -> None:
    """Measure a pair, simulate, and put its rows into the table."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = check(RankConfig, compose("rank", overrides=words))
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    rows = [{key: str(value) for key, value in new.items()} for new in simulated(settings, measured(settings))]
    old = list(csv.DictReader(path.open())) if path.exists() else []
    pair = ("private", "model", "candidates")
    rows = [kept for kept in old if any(kept[key] != rows[0][key] for key in pair)] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[-1]], restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(path.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
