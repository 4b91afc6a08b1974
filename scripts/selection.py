"""How often private selection picks the non-private winner: `python scripts/selection.py FILE.csv [key=value ...]`.

The settings are those of pubsel rank: private=..., public=[...], model=..., distance.k, distance.private_m (how many
private examples are measured: the pool that samples are drawn from; inf: all), results=FOLDER. What is measured is kept
in RESULTS/selection/NAME.npz, and the mechanisms are then simulated; a pair that is there already is not measured
again. The file gets a row for each mechanism, epsilon and size of the sample; other pairs' rows in it stay.

The winner is the candidate of least mean GSD over the same initialisations. Mechanisms, each at the same epsilon:
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from pubsel import config, privacy, rank, selection
from pubsel.config import CONF, RankConfig, check
from pubsel.distances import dp_gsd, gsd
from pubsel.randomness import stream
from pubsel.run import choose_device, network
from pubsel.subspace import projection_metric

EPSILONS = (0.05, 0.1, 0.5, 1.0, 2.0)
CAPS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
DELTA = 1e-5
SAMPLES, DRAWS = 200, 20  # of the private data for each row; the same for DP-GSD, whose every draw takes a while
UNIT = selection.UNIT


def measured(settings: RankConfig) -> dict[str, Any]:
    """Of one pair: names [J]; gsd [J, T]; u [N, J], energies of the pool; x [T, N, s] and v [T, J, s, k], sketched
    private rows and public subspaces for DP-GSD; n, the private examples there are."""
    folder = Path(settings.results) / "selection"
    path = (
        folder
        / f"{config.short(settings.private)}-{settings.model.name}-{config.digest(config.settings(settings))}.npz"
    )
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{path.stem}-candidates"
        kept.mkdir(exist_ok=True)
        found = _measure(settings, kept)
        np.savez(path.with_suffix(".part.npz"), **found)
        path.with_suffix(".part.npz").replace(path)
    return dict(np.load(path))


def _measure(settings: RankConfig, kept: Path) -> dict[str, Any]:
    device, distance = choose_device(settings.device), settings.distance
    task, candidates = rank.candidates_of(settings, device, kept)
    classes, private, key = max(2, task.classes), task.private, f"selection {settings.seed}"
    pool = stream(key, "pool").permutation(len(private.x))[: int(min(len(private.x), distance.private_m or distance.m))]
    chosen = torch.from_numpy(np.sort(pool))

    def build(i: int) -> torch.nn.Module:
        return network(settings.model, task, settings.seed + i, settings.data_root).to(device)

    def source(purpose: str, i: int) -> np.random.Generator:
        return stream(key, purpose, i)

    values = gsd.measure(distance, build, private, candidates, classes, f"rank {settings.seed}")
    u = selection.energies(distance, build, private, chosen, candidates, classes, key, source)
    rows, subspaces = [], []
    for i in range(distance.initialisations):
        side = dp_gsd.Side(distance, build(i), classes, private.y.dim() == 2, dp_gsd.SKETCH, key, i)
        rows.append(torch.cat(list(side.private(private, chosen, source("labels", i)))).float())
        subspaces.append(torch.stack([side.public(name, split) for name, split in candidates.items()]))
    return {
        "names": np.array(list(candidates)), "gsd": np.array([values[name] for name in candidates]), "u": u.numpy(),
        "x": torch.stack(rows).numpy(), "v": torch.stack(subspaces).numpy(), "n": len(private.x),
    }  # fmt: skip


def scores(kind: str, u: Tensor, cap: float) -> Tensor:
    """Contributions [N, J] in steps of 1 / UNIT; a row's differ by at most UNIT, which is all that the proof needs."""
    if kind == "median":
        return selection.contributions(u, cap)
    if kind == "votes":
        return torch.nn.functional.one_hot(u.argmax(1), u.shape[1]) * UNIT
    ends = {"best": 1 - (u.amax(1, keepdim=True) - u) / cap, "worst": (u - u.amin(1, keepdim=True)) / cap}
    return (ends[kind].clamp(0, 1) * UNIT).round().long()


def softmax(total: list[int], epsilon: float) -> np.ndarray[Any, Any]:
    """Probabilities of the exponential mechanism."""
    q = np.array(total) / UNIT
    p = np.exp(epsilon * (q - q.max()))
    return np.asarray(p / p.sum())


def simulated(settings: RankConfig, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the table of one pair."""
    u, n = torch.from_numpy(found["u"]), int(found["n"])
    winner = int(found["gsd"].mean(1).argmin())
    seen = {"private": settings.private, "model": settings.model.name, "candidates": "+".join(found["names"]), "n": n}
    seen |= {"winner": str(found["names"][winner]), "best_energy": str(found["names"][int(u.mean(0).argmax())])}
    rules: dict[str, Callable[[list[int], float], Any]] = {"exponential": softmax}
    named = [(kind, cap) for kind in ("median", "best", "worst", "exponential") for cap in CAPS] + [("votes", 1.0)]
    for m in sorted({min(settings.distance.m, len(u)), len(u)}):
        samples = SAMPLES if m < n else 1  # all examples: one sample
        keep = torch.stack([torch.from_numpy(stream("selection", "sample", i).random(len(u))) for i in range(samples)])
        keep = (keep < m / len(u)).double()  # [samples, N]
        inner = {epsilon: 1 / privacy.pure(epsilon, min(1.0, m / n), 1, "").noise_multiplier for epsilon in EPSILONS}
        for kind, cap in named:
            each = scores("median" if kind == "exponential" else kind, u, cap)
            totals = (keep @ each.double()).long().tolist()  # exact: below 2^53
            rule = rules.get(kind, selection.probabilities)
            for epsilon in EPSILONS:
                right = [float(rule(total, inner[epsilon])[winner]) for total in totals]
                yield seen | row(m, kind, cap, epsilon, 0.0, right)
        for epsilon in EPSILONS:
            for kind, hits in dp_gsd_hits(settings, found, m, epsilon, winner).items():
                yield seen | row(m, kind, None, epsilon, 0.0 if kind == "dp_gsd_bingham" else DELTA, hits)


def row(m: int, kind: str, cap: float | None, epsilon: float, delta: float, found: list[float]) -> dict[str, Any]:
    """A row: mean of `found`, and its standard error."""
    error = np.std(found) / math.sqrt(len(found))
    return {
        "m": m, "mechanism": kind, "cap": cap, "epsilon": epsilon, "delta": delta,
        "probability": f"{np.mean(found):.4f}", "error": f"{error:.4f}", "trials": len(found),
    }  # fmt: skip


def dp_gsd_hits(
    settings: RankConfig, found: dict[str, Any], m: int, epsilon: float, winner: int
) -> dict[str, list[float]]:
    """Of each way by DP-GSD, 1 for each draw that picked the winner, else 0."""
    x, v, n = torch.from_numpy(found["x"]), torch.from_numpy(found["v"]), int(found["n"])
    steps, rate, k = len(x), min(1.0, m / n), settings.distance.k
    gauss = privacy.plan(epsilon, DELTA, rate, steps, 1.0).noise_multiplier
    inner = 1 / privacy.pure(epsilon, rate, steps, "").noise_multiplier
    hits: dict[str, list[float]] = {"dp_gsd_gauss": [], "dp_gsd_bingham": [], "sketch": []}
    for draw in range(DRAWS):
        far = {kind: np.zeros(v.shape[1]) for kind in hits}
        for i in range(steps):
            source = stream("selection", f"dp_gsd {epsilon} {m} {draw}", i)
            rows = x[i][torch.from_numpy(source.random(x.shape[1]) < m / x.shape[1])].double()
            second = rows.T @ rows
            released = dp_gsd.noisy(second, gauss, source)
            own = {
                "dp_gsd_gauss": torch.linalg.eigh(released).eigenvectors[:, -k:],
                "dp_gsd_bingham": dp_gsd.exponential_subspace(second, k, inner, source),
            }
            for kind, basis in own.items():
                far[kind] += [projection_metric(basis, public) for public in v[i]]
            far["sketch"] -= [float((public * (released @ public)).sum()) for public in v[i]]
        for kind in hits:
            hits[kind].append(float(far[kind].argmin() == winner))
    return hits


def main(path: Path, words: list[str]) -> None:
    """Measure a pair, simulate, and put its rows into the table."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = check(RankConfig, compose("rank", overrides=words))
    rows = [{key: str(value) for key, value in new.items()} for new in simulated(settings, measured(settings))]
    old = list(csv.DictReader(path.open())) if path.exists() else []
    pair = ("private", "model", "candidates")
    rows = [kept for kept in old if any(kept[key] != rows[0][key] for key in pair)] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    print(path.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
