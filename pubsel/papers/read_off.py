"""Figures of the papers that are read off the cells behind their curves: pure functions from records to a figure.

pillar_best_k           the best k against epsilon (PILLAR, Figure 9)
pillar_drop             the share of its accuracy that a classifier loses to privacy (PILLAR, Figures 6 and 11)
adamix_samples          accuracy against training examples a class, public or private (AdaMix, Figure 2, left)
adamix_boost            how much a private method learns from the private data (AdaMix, Figure 2, right)
adamix_initialisation   CLIP from several starts, next to AdaMix with other models (AdaMix, Figure 4)
"""

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas

from pubsel.papers import figures
from pubsel.papers.figures import CURVES, GRID, RATES, SHOTS, Curve, Drawn
from pubsel.papers.join import Seeds, TableCell, cells, seeds_of
from pubsel.settings import named
from pubsel.settings.methods import option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_K = dataclasses.replace(CURVES["pillar_k"], x="epsilon", line="algorithm", over=GRID)  # the best k as well
SAMPLES = Curve("Public or private", ("only_public", "fully_private"), "pair.shots", study=SHOTS)
MIXED = ("adamix", "adamix_projection", "adamix_clipping", "ngd", "ppgd")  # train on public and private data
BOOST = dataclasses.replace(SAMPLES, algorithms=("only_public", "paragon", *MIXED))
STARTS = Curve("AdaMix from several starts", ("adamix_clip", "adamix"))
# settings in which AdaMix with CLIP differs from AdaMix next to it
OF_START = "_target_ name class_names text_model text_weights text_scale pretrain_epochs one_pass rank".split()
LEVELS = ("zero", "language", "public", "language, then public")  # what AdaMix starts from
X = "training examples a class"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "++", "ooo")  # bars can be told apart in grey by these


# PILLAR, Figure 9


def best_k(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each private set, model and epsilon at which several k were tried: the k that was selected."""
    frame, shown = figures.points(BEST_K, records)
    if frame.empty:
        return frame
    every = cells([record for record in records if record["algorithm"] in BEST_K.algorithms])
    tried = Counter(place for place, _ in {(_place(cell), figures.value(cell, "algorithm.k")) for cell in every})
    frame["k"] = [figures.value(cell, "algorithm.k") for cell in shown]
    frame["tried"] = [tried[_place(cell)] for cell in shown]
    return frame[frame["tried"] > 1].reset_index(drop=True)


def _place(cell: TableCell) -> tuple[Any, ...]:
    return cell["private"], cell["model"], cell["label"], cell["epsilon"]


def draw_best_k(frame: pandas.DataFrame) -> "Figure":
    """Draw a line for each private set and model; no guarantee is the last epsilon."""
    epsilons, ks = sorted(set(frame["x"])), sorted(set(frame["k"]))
    lines = list(frame.groupby(["private", "model", "line"], sort=False))
    names = [
        _with_apart(f"{figures.short(private)}, {figures.short(model)}", line) for (private, model, line), _ in lines
    ]
    aside = np.linspace(-0.12, 0.12, len(lines)) if len(lines) > 1 else [0.0]  # or equal k would hide each other

    with figures.style():
        figure, (axis,) = figures.panel_grid(1)
        styles = figures.line_styles(names)
        for (_, rows), how, shift in zip(lines, styles.values(), aside, strict=True):
            axis.plot([epsilons.index(x) + shift for x in rows["x"]], rows["k"], **how)

        axis.set_yscale("log")
        axis.set_yticks(ks, [f"{k:g}" for k in ks])
        axis.minorticks_off()
        axis.set_xticks(range(len(epsilons)), ["∞" if epsilon == math.inf else f"{epsilon:g}" for epsilon in epsilons])
        axis.set(xlabel="ε", ylabel="best k")
        figures.legend_below(figure, styles)
    return figure


def _with_apart(name: str, line: str) -> str:
    """Return a name, and below it the settings that tell a line of `figures.curve_rows` apart from others."""
    return "\n".join([name, *line.split("\n")[1:]])


# PILLAR, Figures 6 and 11


def drop(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each private set, model and epsilon: the percentage of its accuracy without a guarantee that the
    best cell loses, mean and standard deviation over the seeds that both have."""
    # what is lost is relative to the same line without a guarantee
    frame, shown = figures.curve_rows(BEST_K, records)
    pairs = [(row, by_seed(cell)) for row, cell in zip(frame.to_dict("records"), shown, strict=True)]
    line = itemgetter("private", "model", "line")
    free = {line(row): (row, utilities) for row, utilities in pairs if row["x"] == math.inf}

    rows = []
    for row, private in pairs:
        without, most = free.get(line(row), (row, {}))
        common = sorted(most.keys() & private.keys()) if row["x"] != math.inf else []
        lost = [100 * (most[seeds] - private[seeds]) / most[seeds] for seeds in common]
        if lost:
            kept = {"private": row["private"], "model": row["model"], "line": row["line"], "epsilon": row["x"]}
            kept |= {"utility": row["utility"], "without_guarantee": without["utility"], "metric": row["metric"]}
            std = np.std(lost, ddof=1) if len(lost) > 1 else math.nan
            rows.append(kept | {"drop": np.mean(lost), "std": std, "seeds": len(lost)})
    return pandas.DataFrame(rows)


def by_seed(cell: TableCell) -> dict[Seeds, float]:
    """Return the utility of each of a cell's seeds."""
    return {seeds_of(record): record["utility"] for record in cell.records}


def draw_drop(frame: pandas.DataFrame) -> "Figure":
    """Draw a panel for each epsilon, in it a bar for each private set and model."""
    frame = frame.sort_values("epsilon", kind="stable")
    bar = [_with_apart(figures.short(row["model"]), row["line"]) for row in frame.to_dict("records")]
    panel = [figures.line_name("epsilon", epsilon) for epsilon in frame["epsilon"]]
    return bars(
        frame.assign(panel=panel, group=frame["private"], bar=bar, height=frame["drop"]), "lost to privacy, percent"
    )


# AdaMix, Figure 2 (left)


def samples(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each number of training examples a class: all public, or all private with an epsilon. Only
    private sets that have two numbers of both, and whose classes conf/dataset counts."""
    # only public examples on one side, only private ones on the other
    entries = []
    for cell in figures.best(SAMPLES, records):
        public, count = cell["algorithm"] == "only_public", per_class(cell)
        if count is not None:
            name = "public" if public else f"private, {figures.line_name('epsilon', figures.value(cell, 'epsilon'))}"
            entries.append((cell, name, {"x": count} | figures.utility_columns(cell)))

    # two numbers of both kinds, public ones first
    frame = figures.frame_of(entries, ("pair.shots", "pair.private_share", "epsilon", *RATES))
    if frame.empty:
        return frame
    private = ~frame["line"].str.startswith("public")
    sides = frame.assign(kind=private, ours=frame["x"].where(private), theirs=frame["x"].mask(private))
    counts = sides.groupby(["private", "model"])[["ours", "theirs"]].transform("nunique")
    order = ["private", "model", "kind", "line", "x"]
    kept = sides[(counts >= 2).all(axis=1)].sort_values(order, kind="stable", ignore_index=True)
    return kept[frame.columns]


def per_class(cell: TableCell) -> float | None:
    """Return the number of training examples a class: public ones of training on public data only, else private ones;
    None if conf/dataset does not say how many classes there are."""
    if cell["algorithm"] == "only_public":
        shots: float | None = figures.value(cell, "pair.shots")
        return shots
    path = named("dataset").get(cell["private"])
    classes = option("dataset", path.stem, path.parent.parent).get("classes") if path else None
    return cell["private_examples"] / classes if classes else None


def draw_samples(frame: pandas.DataFrame) -> "Figure":
    """Draw a panel for each private set and model: a line of public examples, and one of private ones for each
    epsilon."""
    figure = figures.curves(frame, X, "line")
    low, high = frame["x"].min(), frame["x"].max()
    # shares of a set are no round numbers
    ticks = [float(step * 10**power) for power in range(7) for step in (1, 2, 5)]
    for axis in figure.axes:
        figures.log_axis(axis, [tick for tick in ticks if low <= tick <= high])
    return figure


# AdaMix, Figure 2 (right)


def boost(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each method that trains on public and private data, its epsilon and the public examples a class.

    `boost` is AdaMix's performance boost, (e_public - e_paragon) / (e_method - e_paragon), e the mean error over the
    seeds that all three have: 1 if the private data do not help, infinite if the method learns from them all that can
    be learned without privacy. `std` is its standard error (jackknife over the seeds), nan for one seed.
    """
    # a method is compared with the paragon and with public data alone
    chosen = figures.best(BOOST, records)
    paragons = {_private_data(cell): cell for cell in chosen if cell["algorithm"] == "paragon"}
    publics = {_data(cell): cell for cell in chosen if cell["algorithm"] == "only_public"}
    entries = []
    for cell in chosen:
        paragon, public = paragons.get(_private_data(cell)), publics.get(_data(cell))
        if cell["algorithm"] not in MIXED or not paragon or not public:
            continue

        # the mean over the seeds that all three have; the paragon trains on all data, and so has no draw of public ones
        best = {record["seed"]: record["utility"] for record in paragon.records}
        without, mixed = by_seed(public), by_seed(cell)
        common = sorted(seeds for seeds in without.keys() & mixed.keys() if seeds[0] in best)
        if common:
            errors = [[1 - utility for utility in (without[seeds], best[seeds[0]], mixed[seeds])] for seeds in common]
            # jackknife: leave out one seed at a time
            of_seeds, seeds = np.array(errors).T, len(common)
            left_out = [_ratio(np.delete(of_seeds, i, axis=1)) for i in range(seeds)] if seeds > 1 else []
            known = bool(left_out) and math.inf not in left_out
            std = math.sqrt(seeds - 1) * float(np.std(left_out)) if known else math.nan
            epsilon = figures.value(cell, "epsilon")
            row = {"algorithm": cell["algorithm"], "epsilon": epsilon, "x": figures.value(cell, "pair.shots")}
            row |= {"boost": _ratio(of_seeds), "std": std, "seeds": seeds}
            entries.append((cell, f"{cell['algorithm']}, {figures.line_name('epsilon', epsilon)}", row))

    # a line needs two points
    frame = figures.frame_of(entries, ("pair.shots", "epsilon", *RATES))
    if frame.empty:
        return frame
    points = frame.groupby(["private", "model", frame["line"].str.partition("\n")[0]])["x"].transform("nunique")
    return frame[points >= 2].sort_values(["private", "model", "line", "x"], kind="stable", ignore_index=True)


def _private_data(cell: TableCell) -> tuple[Any, ...]:
    """Return the private data and the model of a cell."""
    return cell["private"], figures.value(cell, "pair.private_share"), cell["model"]


def _data(cell: TableCell) -> str:
    """Return the data, public ones too, and the model of a cell."""
    pair = {key: value for key, value in cell.settings.items() if key.startswith("pair.")}
    return json.dumps([cell["public"], cell["model"], pair], sort_keys=True)


def _ratio(errors: "np.ndarray[Any, Any]") -> float:
    """Return the boost; `errors`: [public, paragon, method; seeds]."""
    public, paragon, method = errors.mean(1)
    return float((public - paragon) / (method - paragon)) if method > paragon else math.inf


def draw_boost(frame: pandas.DataFrame) -> "Figure":
    """Draw a panel for each private set and model, a line for each method and epsilon; at 1 the private data do not
    help."""
    shown = frame[np.isfinite(frame["boost"])].assign(utility=frame["boost"], metric=None)
    figure = figures.curves(shown, "pair.shots", "line")
    for axis in figure.axes:
        axis.axhline(1, color=figures.INK, lw=0.8)
        axis.set(xlabel="public examples a class", ylabel="performance boost")
    return figure


# AdaMix, Figure 4


def initialisation(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return a row for each model, start and epsilon of the private sets that have AdaMix with CLIP; AdaMix with other
    models only if its data and training are the same."""
    # AdaMix with another model counts only if all else is that of the run with CLIP
    chosen = figures.best(STARTS, records)
    clip = {_training(cell) for cell in chosen if cell["algorithm"] == "adamix_clip"}
    entries = [
        (cell, start(cell), {"epsilon": figures.value(cell, "epsilon")} | figures.utility_columns(cell))
        for cell in chosen
        if _training(cell) in clip
    ]
    frame = figures.frame_of(entries, ("epsilon", *RATES))
    if frame.empty:
        return frame
    parts = frame["line"].str.partition("\n")
    frame.insert(2, "start", parts[0])
    frame.insert(3, "setting", parts[2])
    frame["line"] = frame["start"].map(LEVELS.index)
    frame = frame.sort_values(["private", "epsilon", "model", "line"], kind="stable", ignore_index=True)
    return frame.drop(columns="line")


def start(cell: TableCell) -> str:
    """Return what the weights of a run of AdaMix start from, one of LEVELS."""
    language = bool(figures.value(cell, "algorithm.text_model"))
    public = figures.value(cell, "algorithm.pretrain_epochs") or figures.value(cell, "algorithm.one_pass")
    return LEVELS[2 * bool(public) + language]


def _training(cell: TableCell) -> str:
    """Return the private set and what else AdaMix with CLIP and with another model have in common."""
    left_out = {*RATES, *(f"algorithm.{key}" for key in OF_START)}
    rest = {key: value for key, value in cell.settings.items() if key not in left_out and not key.startswith("model.")}
    return json.dumps([cell["private"], cell["public"], rest], sort_keys=True)


def draw_initialisation(frame: pandas.DataFrame) -> "Figure":
    """Draw a panel for each private set, in it a bar for each epsilon, model and start."""
    named_bars = (frame["model"].map(figures.short) + ", " + frame["start"] + "\n" + frame["setting"]).str.strip()
    group = [figures.line_name("epsilon", epsilon) for epsilon in frame["epsilon"]]
    shown = frame.assign(panel=frame["private"], group=group, bar=named_bars, height=frame["utility"])
    return bars(shown, figures.metric_name(frame))


# Bars


def bars(frame: pandas.DataFrame, label: str) -> "Figure":
    """Draw a panel for each value of the column `panel`, and in it the bars of each `group` next to each other. `bar`
    is the name of one, `height` its height, `std` its error bar; label: of the heights."""
    from matplotlib.patches import Patch

    # one style for a name in all panels, so that one legend serves them
    parts = list(frame.groupby("panel", sort=False))
    styles = figures.line_styles(dict.fromkeys(frame["bar"]))
    names = list(styles)
    faces = {
        name: {"facecolor": how["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        for (name, how), hatch in zip(styles.items(), itertools.cycle(HATCHES), strict=False)
    }
    wide = 0.8 / len(names)

    with figures.style():
        figure, axes = figures.panel_grid(len(parts))
        for axis in axes[1:]:
            axis.sharey(axes[0])
        for axis, (panel, rows) in zip(axes, parts, strict=True):
            groups = list(dict.fromkeys(rows["group"]))
            for i, name in enumerate(names):
                part = rows[rows["bar"] == name]
                places = [groups.index(group) + wide * (i - (len(names) - 1) / 2) for group in part["group"]]
                error = {"yerr": part["std"].fillna(0), "error_kw": {"elinewidth": 0.8, "ecolor": figures.INK}}
                axis.bar(places, part["height"], 0.9 * wide, **faces[name], **error)

            shown = [figures.short(group) for group in groups]
            axis.set_xticks(range(len(groups)), shown)
            if len(groups) > 3:
                axis.tick_params(axis="x", rotation=30)
            axis.grid(visible=False, axis="x")
            axis.set(title=figures.short(panel), ylabel=label)

        handles = [Patch(label=name, **face) for name, face in faces.items()]
        columns = min(len(handles), max(1, int(figure.get_figwidth() / 2)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


class _Kind(NamedTuple):
    rows: Callable[[list[dict[str, Any]]], pandas.DataFrame]
    draw: Callable[[pandas.DataFrame], "Figure"]
    about: str


FIGURES = {
    "pillar_best_k": _Kind(best_k, draw_best_k, "the k that the selection takes"),
    "pillar_drop": _Kind(drop, draw_drop, "drop: percent of the utility without a guarantee; the best cells of both"),
    "adamix_samples": _Kind(samples, draw_samples, f"x: {X}"),
    "adamix_boost": _Kind(boost, draw_boost, "x: public examples a class; std: of the boost, jackknife over seeds"),
    "adamix_initialisation": _Kind(initialisation, draw_initialisation, "start: of the weights"),
}


def drawn(name: str, records: list[dict[str, Any]]) -> list[Drawn]:
    """Return the figure, in a list; none if the records have nothing for it."""
    kind = FIGURES[name]
    frame = kind.rows(records)
    return [] if frame.empty else [Drawn(name, frame, kind.draw(frame), kind.about)]
