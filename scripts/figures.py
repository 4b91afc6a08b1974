"""Figures of learning on features from the records of runs: a CSV and a PNG each, in results/figures.

    python scripts/figures.py pillar_k --results results

pillar_k: utility against the dimensions that are left, by epsilon (PILLAR, Figures 4 and 5). pillar_share: against the
share of private data (Figure 7). adamix: every method at each epsilon (AdaMix, Figure 1), with the performance boost;
adamix_quantile, adamix_sigma, adamix_shots: Figures 7, 8 and 2. separability: xi_k of features (PILLAR, Figure 3).
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas

from pubsel import results
from pubsel.results import Cell

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
    found = cell[key] if key in cell.records[0] else results._at(cell["settings"], key)
    return math.inf if key == "epsilon" and found is None else found


def points(name: str, folder: Path) -> pandas.DataFrame:
    """A row for each point of the figure, utility in percent, the settings chosen as LINES says."""
    algorithms, x, line, by, over = LINES[name]
    records = [r for r in results.read_records(folder) if r["algorithm"] in algorithms]
    found = results.selected(results.cells(records), by, over)
    rows = []
    for cell in found:
        mean, std = cell.utility()
        shown = {"private": cell["private"], "model": cell["model"], "line": value(cell, line), "x": value(cell, x)}
        rows.append({**shown, "utility": mean, "std": std, "seeds": len(cell.records), "metric": cell["metric"]})
    frame = pandas.DataFrame(rows)
    frame["selected"] = results.SELECTION[by]
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
                axis.annotate(label, (0.02, part["utility"].max()), xycoords=("axes fraction", "data"), fontsize=7)
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


def separability(data_root: str, model: str, names: list[str]) -> pandas.DataFrame:
    """xi_k for the first pair of classes of each data set, on features and on pixels."""
    from hydra import compose, initialize_config_dir

    from pubsel import data, run
    from pubsel.config import CONF, RunConfig, check
    from pubsel.data import features
    from pubsel.separability import separability as estimate

    rows = []
    for name in names:
        for kind in (model, "pixels"):
            with initialize_config_dir(str(CONF), version_base="1.3"):
                settings = check(RunConfig, compose("run", [f"model={kind}"]))
            source = data.open_dataset(name, data_root, download=False)
            assert settings.model.backbone is not None
            made = features.of_source(
                name, source, settings.model.backbone, data_root, run.choose_device(settings.device), run.say
            )
            pair = made.train.y < 2
            x, y = made.train.x[pair][:2000].double().numpy(), made.train.y[pair][:2000].numpy()
            ks = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= min(x.shape)]
            rows += [
                {"private": name, "features": kind, "k": k, "xi": xi}
                for k, xi in zip(ks, estimate(x, y, ks), strict=True)
            ]
    return pandas.DataFrame(rows)


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
    arguments.add_argument("name", choices=[*LINES, "separability"])
    arguments.add_argument("--results", type=Path, default=Path("results"))
    arguments.add_argument("--data-root", default="data")
    arguments.add_argument("--model", default="mobilenetv2", help="separability: a model with a backbone")
    arguments.add_argument("--sets", nargs="+", default=["cifar10"], help="separability: data sets")
    given = arguments.parse_args()
    folder = given.results / "figures"
    if given.name == "separability":
        frame = separability(given.data_root, given.model, given.sets)
        draw_separability(frame, folder / "separability.png")
    else:
        frame = points(given.name, given.results)
        if given.name.startswith("adamix"):
            frame = boosted(frame)
        draw(frame, *LINES[given.name][1:3], folder / f"{given.name}.png")
    results.write_table(frame, folder / f"{given.name}.csv")
    print(frame.to_string(index=False))


if __name__ == "__main__":
    main()
