"""Figures of learning on features from the records of runs: a CSV and a PNG each, in results/figures.

    python scripts/figures.py pillar_k --results results

pillar_k: utility against the dimensions that are left, by epsilon (PILLAR, Figures 4 and 5). pillar_share: against the
share of private data (Figure 7). adamix: every method at each epsilon (AdaMix, Figure 1), with the performance boost;
adamix_quantile, adamix_sigma, adamix_shots: Figures 7, 8 and 2. With settings as of `pubsel run` behind the name:
separability, xi_k of features (PILLAR, Figure 3); reconstruction, what the projection of AdaMix loses (Figure 6), which
looks at the private gradient without noise.
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import torch
from hydra import compose, initialize_config_dir

from pubsel import algorithms, data, results, run, tables, typeset
from pubsel.algorithms import Mechanism, View
from pubsel.algorithms.adamix import AdaMix, project, public_gradient, subspace_around
from pubsel.config import CONF, RunConfig, check
from pubsel.data import Split, features
from pubsel.gradients import GradientMatrix
from pubsel.run import canonical
from pubsel.separability import separability as estimate
from pubsel.tables import Cell
from pubsel.terminal import say
from pubsel.training import fit

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RATES = ["training.learning_rate", "algorithm.pretrain_rate", "algorithm.finish_rate", "algorithm.reuse"]
FAMILY = ["paragon", "adamix", "adamix_clipping", "adamix_projection", "ngd", "ppgd", "fully_private", "only_public"]
# name: algorithms, x axis (a key of the settings), what a line is, what selects, and over which settings
LINES: dict[str, tuple[list[str], str, str, str, list[str]]] = {
    "pillar_k": (["pillar"], "algorithm.k", "epsilon", "validation", RATES),
    "pillar_share": (["pillar", "dp_sgd"], "pair.private_share", "algorithm", "test", [*RATES, "algorithm.k"]),
    "adamix": (FAMILY, "epsilon", "algorithm", "test", RATES),
    "adamix_quantile": (["adamix"], "algorithm.quantile", "epsilon", "test", RATES),
    "adamix_sigma": (["adamix", "ngd"], "privacy.noise_multiplier", "algorithm", "test", RATES),
    "adamix_shots": (["adamix", "only_public", "fully_private"], "pair.shots", "algorithm", "test", RATES),
}
STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"), ("X", "-."), ("*", ":")]


def value(cell: Cell, key: str) -> Any:
    """A key of the record, or a dotted key of its settings."""
    found = cell[key] if key in cell.records[0] else tables.at(cell["settings"], key)
    return math.inf if key == "epsilon" and found is None else found


def points(name: str, folder: Path) -> pandas.DataFrame:
    """A row for each point of the figure, utility in percent, the settings chosen as LINES says."""
    algorithms, x, line, by, over = LINES[name]
    records = [r for r in results.read_records(folder) if r["algorithm"] in algorithms]
    found = tables.selected(tables.cells(records), by, over)
    rows = []
    for cell in found:
        mean, std = cell.utility()
        shown = {"private": cell["private"], "model": cell["model"], "line": value(cell, line), "x": value(cell, x)}
        rows.append({**shown, "utility": mean, "std": std, "seeds": len(cell.records), "metric": cell["metric"]})
    frame = pandas.DataFrame(rows)
    frame["selected"] = tables.SELECTION[by]
    return frame.dropna(subset=["x"]).sort_values(["private", "model", "line", "x"], key=lambda c: c.map(_order))


def _order(key: Any) -> Any:
    return f"{key:020.6f}" if isinstance(key, int | float) else str(key)


def boosted(frame: pandas.DataFrame) -> pandas.DataFrame:
    """AdaMix's performance boost (e_public - e_paragon) / (e_dp - e_paragon), e the error, beside each private method:
    above 1 where private data helps."""
    frame = frame.copy()
    frame["boost"] = np.nan
    for _, rows in frame.groupby(["private", "model"]):
        error = {line: 100 - part["utility"].max() for line, part in rows.groupby("line")}
        if {"only_public", "paragon"} <= set(error):
            gain = error["only_public"] - error["paragon"]
            frame.loc[rows.index, "boost"] = gain / (100 - rows["utility"] - error["paragon"])
    frame.loc[frame["line"].isin(["paragon", "only_public"]), "boost"] = np.nan
    return frame


def draw(frame: pandas.DataFrame, x: str, line: str, path: Path) -> None:
    """A panel for each private set, a line for each value of `line`; error bars are standard deviations over seeds."""
    panels = list(frame.groupby(["private", "model"]))
    fig, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    lines = list(dict.fromkeys(frame["line"]))
    for axis, ((private, model), rows) in zip(axes[0], panels, strict=True):
        for (marker, dash), name in zip(itertools.cycle(STYLES), lines, strict=False):
            part = rows[rows["line"] == name]
            label = f"{line} {name:g}" if isinstance(name, float) else str(name)
            finite = part[np.isfinite(part["x"].astype(float)) & (part["x"].astype(float) > 0)]
            if len(finite):
                spread = finite["std"].fillna(0)
                axis.errorbar(
                    finite["x"], finite["utility"], spread, marker=marker, ls=dash, ms=4, capsize=2, label=label
                )
            elif len(part):  # no epsilon: a level
                axis.axhline(part["utility"].max(), ls=dash, lw=1, color="0.4")
                axis.annotate(
                    label, (0.02, part["utility"].max()), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
                )
        axis.set_xscale("log")
        axis.set_xticks(sorted({v for v in rows["x"] if np.isfinite(float(v)) and v > 0}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.tick_params(axis="x", labelsize=7)
        axis.set(title=f"{private}, {model}", xlabel=x, ylabel=f"{rows['metric'].iloc[0]} in percent")
    axes[0][0].legend(fontsize=7)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=140)
    plt.close(fig)


def composed(words: list[str]) -> RunConfig:
    """The settings of `pubsel run` with these words."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return canonical(check(RunConfig, compose("run", words)))


def separability(words: list[str], sets: list[str]) -> pandas.DataFrame:
    """xi_k for the first two classes of each data set, on the features of `words` (model=NAME) and on pixels."""
    rows = []
    for name, kind in itertools.product(sets, (words, ["model=pixels"])):
        settings = composed([*kind, "distance=none"])
        assert settings.model.backbone is not None
        source = data.open_dataset(name, settings.data_root, download=False)
        device = run.choose_device(settings.device)
        made = features.of_source(name, source, settings.model.backbone, settings.data_root, device, say)
        pair = made.train.y < 2
        x, y = made.train.x[pair][:500].double().numpy(), made.train.y[pair][:500].numpy()
        ks = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= min(x.shape)]
        shown = {"private": name, "features": settings.model.name}
        rows += [{**shown, "k": k, "xi": xi} for k, xi in zip(ks, estimate(x, y, ks), strict=True)]
    return pandas.DataFrame(rows)


class Watched:
    """AdaMix that notes how much of the private gradient each projection loses, before the noise: NOT private."""

    def __init__(self, inner: AdaMix, rank: int):
        self.inner, self.rank = inner, rank
        self.errors: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """The same mechanism, watched."""
        made = self.inner.mechanism(view, step)
        weight = next(view.model.parameters())
        gradient = public_gradient(view.gradients, view.labelled("adamix"))[: weight.numel()].view_as(weight)
        noise = torch.from_numpy(view.random("any", step).standard_normal((weight.shape[1], self.rank)))
        bases = {"public": subspace_around(gradient, self.rank, view.random("directions", step))}
        bases["random"] = (torch.linalg.qr(noise.to(weight)).Q, True)

        def sums(gradients: GradientMatrix) -> torch.Tensor:
            total = made.clipped_sum(gradients)
            rows = total[: weight.numel()].view_as(weight)
            errors = {name: float((rows - project(rows, *b)).norm() / rows.norm()) for name, b in bases.items()}
            self.errors.append({"step": step, **errors})
            return total

        return made._replace(clipped_sum=sums)


def reconstruction(words: list[str]) -> pandas.DataFrame:
    """Relative error of the private gradient on the public subspace, and on a random one, at each step of a run."""
    settings = composed(words)
    algorithm = algorithms.build(settings.algorithm)
    assert isinstance(algorithm, AdaMix)
    assert algorithm.rank is not None
    task = run.load_task(settings, torch.device("cpu"))
    task = task.each(lambda split: Split(torch.nn.functional.normalize(split.x, dim=1), split.y))
    plan, spend, _ = run.guarantee(settings, algorithm, len(task.private.x))
    model = run.network(settings.model, task, settings.seed)
    watched = Watched(algorithm, algorithm.rank)
    with tempfile.TemporaryDirectory() as folder:
        fit(
            model, task, watched, plan, spend.noise_multiplier if spend else 0.0, settings.training, "figure", "figure",
            False, Path(folder) / "checkpoint.pt", lambda now: None,
        )  # fmt: skip
    frame = pandas.DataFrame(watched.errors).groupby("step", as_index=False).mean()
    return frame.assign(private=settings.pair.private, model=settings.model.name, rank=algorithm.rank)


def draw_reconstruction(frame: pandas.DataFrame, path: Path) -> None:
    """Both errors against the step."""
    fig, axis = plt.subplots(figsize=(5, 3.6))
    axis.plot(frame["step"], frame["public"], "k-", label="public gradient's subspace")
    axis.plot(frame["step"], frame["random"], "k--", label="random subspace")
    axis.set(xlabel="step", ylabel="relative error of the private gradient", ylim=(0, None))
    axis.set_title(
        f"{frame['private'][0]}, {frame['model'][0]}, {frame['rank'][0]} dimensions (not private)", fontsize=9
    )
    axis.legend(fontsize=8)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=140)


def draw_separability(frame: pandas.DataFrame, path: Path) -> None:
    """A line for each data set and kind of features."""
    fig, axis = plt.subplots(figsize=(5, 3.6))
    for (marker, dash), ((name, kind), rows) in zip(
        itertools.cycle(STYLES), frame.groupby(["private", "features"]), strict=False
    ):
        axis.plot(rows["k"], rows["xi"], marker=marker, ls=dash, ms=4, label=f"{name}, {kind}")
    axis.set(xscale="log", xlabel="k", ylabel="xi_k", ylim=(0, 1))
    axis.legend(fontsize=7)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=140)


def main() -> None:
    """Write NAME.csv and NAME.png."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("name", choices=[*LINES, "separability", "reconstruction"])
    arguments.add_argument("words", nargs="*", help="separability, reconstruction: settings as of pubsel run")
    arguments.add_argument("--results", type=Path, default=Path("results"))
    arguments.add_argument("--sets", nargs="+", default=["cifar10"], help="separability: data sets")
    given = arguments.parse_args()
    folder = given.results / "figures"
    if given.name == "separability":
        frame = separability(given.words, given.sets)
        draw_separability(frame, folder / "separability.png")
    elif given.name == "reconstruction":
        frame = reconstruction(given.words)
        draw_reconstruction(frame, folder / "reconstruction.png")
    else:
        frame = points(given.name, given.results)
        if given.name.startswith("adamix"):
            frame = boosted(frame)
        draw(frame, *LINES[given.name][1:3], folder / f"{given.name}.png")
    results.write_whole(folder / f"{given.name}.csv", typeset.csv(frame))
    print(frame.to_string(index=False))


if __name__ == "__main__":
    main()
