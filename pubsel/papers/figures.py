"""Figures: pure functions from a table or the cells of records to matplotlib, which is imported by the first of them.

Each line differs in colour, marker and dash, so that lines can be told apart in grey and by colour-blind
people (colours after Okabe and Ito, darkened to stand out from white). `save_figure` writes SVG and PDF.
"""

import contextlib
import html
import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas

from pubsel.files import write_whole
from pubsel.papers.join import (
    SELECTION,
    WITHOUT_PUBLIC,
    Table,
    TableCell,
    cells,
    rank_correlation,
    selected,
    setting_texts,
)
from pubsel.papers.paired import SHORTEST
from pubsel.papers.typeset import short_keys
from pubsel.records import at
from pubsel.settings.identity import default_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#c98500", "#882255", "#3a94cf", "#6b6b6b", "#c0609a", "#d55e00", "#009e73")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5)), (0, (4, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (8, 2, 2, 2)))
INK = "#010203"  # of text and axes; nothing else has it, so that a page can replace it with its text colour
FORMATS = ("svg", "pdf")
WIDTH, HEIGHT = 4.2, 3.4  # of a panel, inches
NAME = 2.6  # inches of a method's name in a legend
LONGEST = 24  # letters of a name in a drawing
GAP = 0.1  # between the names of two public sets, as a share of the axis

RATES = ("training.learning_rate", "algorithm.pretrain_rate", "algorithm.finish_rate", "algorithm.reuse")
GRID = (*RATES, "training.epochs", "algorithm.k", "algorithm.share", "algorithm.damping")
PILLAR = ("pillar", "dp_raft_pillar", "dp_raft", "adadps", "gep", "jl", "dp_pca", "dp_sgd")
SHOTS = "shots"  # label of AdaMix's study of how many public examples
DOMAINS = "domains"  # of that of public examples of another domain
OTHERS = ("choosing", "untuned", "unlabelled", "tuned", "goal", SHOTS, DOMAINS)  # of studies shown apart
ADAMIX = ("adamix", "ngd", "adamix_projection", "adamix_clipping", "ppgd", "fully_private", "only_public", "paragon")


@dataclass(frozen=True)
class Curve:
    """Utility against a setting, by the best cells."""

    title: str
    algorithms: tuple[str, ...]
    x: str = "epsilon"  # key of the record, or dotted key of its settings
    line: str = "algorithm"  # the same: what a line is
    by: str = "test"  # what selects, of SELECTION
    over: tuple[str, ...] = RATES  # the settings that are selected
    features: bool = True  # whether a linear classifier on features is meant
    study: str = ""  # the label of OTHERS whose runs alone are drawn; "": those of no such label


CURVES = {
    "pillar_epsilon": Curve("PILLAR and its baselines against epsilon", PILLAR, by="validation", over=GRID),
    "pillar_k": Curve(
        "PILLAR against the dimension k (its Figures 4, 5)", ("pillar",), "algorithm.k", "epsilon", "validation"
    ),
    "pillar_share": Curve(
        "PILLAR against the share of private data (its Figure 7)", ("pillar", "dp_sgd"), "pair.private_share", over=GRID
    ),
    "adamix": Curve("AdaMix and its baselines against epsilon (its Figure 1)", ADAMIX),
    "adamix_quantile": Curve(
        "AdaMix against the clipping quantile (its Figure 7)", ("adamix",), "algorithm.quantile", "epsilon"
    ),
    "adamix_sigma": Curve("AdaMix against the noise (its Figure 8)", ("adamix", "ngd"), "privacy.noise_multiplier"),
    "adamix_shots": Curve(
        "AdaMix against public examples a class (its Figure 2)",
        ("adamix", "only_public", "fully_private"),
        "pair.shots",
        study=SHOTS,
    ),
    "adamix_domains": Curve(
        "AdaMix with public data of another domain (its Figure 3, right)",
        ("adamix", "only_public", "paragon"),
        study=DOMAINS,
    ),
    "gep_m": Curve(
        "GEP against the number of public examples (its Table 6)", ("gep",), "pair.m", "public", features=False
    ),
    "gep_k": Curve(
        "GEP and B-GEP against the dimension k (GEP, Figure 6)", ("gep", "b_gep"), "algorithm.k", features=False
    ),
}


class Drawn(NamedTuple):
    """A figure, and what its files hold besides."""

    name: str  # of the files
    frame: pandas.DataFrame  # its numbers
    figure: "Figure"
    about: str = ""  # comment lines of the CSV
    text: str = ""  # for the screen


# What is drawn


def points(curve: Curve, records: list[dict[str, Any]]) -> tuple[pandas.DataFrame, list[TableCell]]:
    """Return a row for each point, utility in percent, settings chosen as the curve says; and the cell behind each.

    A line joins cells that differ in nothing but x (and what was selected): if others do, their lines are named
    apart. Runs of other studies (OTHERS) than the curve's are left out. Empty if no line has two values of x.
    """
    frame, shown = curve_rows(curve, records)
    if frame.empty:
        return frame, []
    finite = frame[frame["x"].map(_finite)]
    most = finite.groupby(["private", "model", "line"])["x"].nunique().max()  # nan if no x is finite
    return (pandas.DataFrame(), []) if most < 2 else (frame, shown)


def best(curve: Curve, records: list[dict[str, Any]]) -> list[TableCell]:
    """Return the cells that a curve selects, of its study alone; of a curve of none, without those of OTHERS."""

    def belongs(record: dict[str, Any]) -> bool:
        of_study = record["label"] == curve.study if curve.study else record["label"] not in OTHERS
        on_features = at(record["settings"], "model.backbone") is not None
        return record["algorithm"] in curve.algorithms and of_study and on_features == curve.features

    return selected(cells([record for record in records if belongs(record)]), curve.by, list(curve.over))


def curve_rows(curve: Curve, records: list[dict[str, Any]]) -> tuple[pandas.DataFrame, list[TableCell]]:
    """Return what `points` does, even if no line has two values of x."""
    shown = [cell for cell in best(curve, records) if None not in (value(cell, curve.x), value(cell, curve.line))]
    entries = [(cell, value(cell, curve.line), {"x": value(cell, curve.x)} | utility_columns(cell)) for cell in shown]
    # what the axis or the line's name shows already is no difference
    known = (curve.x, curve.line, "pair.public" if curve.line == "public" else "", *curve.over)
    frame = frame_of(entries, known).assign(selected=SELECTION[curve.by])
    if frame.empty:
        return frame, []

    def place(i: int) -> list[str]:
        line = entries[i][1]
        first = curve.algorithms.index(line) if line in curve.algorithms else line
        apart = str(frame["line"][i]).partition("\n")[2]
        key = (frame["private"][i], frame["model"][i], first, apart, entries[i][2]["x"])
        return [f"{part:020.6f}" if isinstance(part, int | float) else str(part) for part in key]

    order = sorted(frame.index, key=place)
    return frame.loc[order].reset_index(drop=True), [shown[i] for i in order]


def frame_of(entries: list[tuple[TableCell, Any, dict[str, Any]]], known: tuple[str, ...]) -> pandas.DataFrame:
    """Return a row for each cell, the name of its line and further columns. Cells of one line that differ in more than
    the settings `known` have lines of their own: these settings are below its name."""
    rows = [{"private": cell["private"], "model": cell["model"], "line": line} | more for cell, line, more in entries]
    frame = pandas.DataFrame(rows)
    if frame.empty:
        return frame
    lines = frame.assign(cell=[cell for cell, _, _ in entries]).groupby(["private", "model", "line"])["cell"]
    apart = lines.transform(lambda cells: setting_texts(list(cells), known))
    names = zip(frame["line"], apart.map(short_keys), strict=True)
    return frame.assign(line=[f"{line}\n{text}" if text else line for line, text in names])


def utility_columns(cell: TableCell) -> dict[str, Any]:
    """Return the columns of a cell that figures share: its utility in percent, over how many seeds, and its metric."""
    mean, std = cell.utility()
    return {"utility": mean, "std": std, "seeds": len(cell.records), "metric": cell.records[0].get("metric")}


def value(cell: TableCell, key: str) -> Any:
    """Return the value of a key of the record, or of a dotted key of its settings, which may have its default; an
    epsilon that is left out is infinite."""
    result = cell[key] if key in cell.records[0] else at(cell["settings"], key)
    result = default_of(key) if result is None else result
    return math.inf if key == "epsilon" and result is None else result


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x) and x > 0


def boosted(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the frame with AdaMix's performance boost (e_public - e_paragon) / (e_dp - e_paragon), e the error, in
    the rows of each private method: above 1 if private data helps. Each end is the best point of its line, of all its
    seeds, whatever the public examples; `read_off.boost` pairs seeds and public examples."""
    frame = frame.assign(boost=np.nan)
    for _, rows in frame.groupby(["private", "model"]):
        error = {line: 100 - part["utility"].max() for line, part in rows.groupby("line")}
        if {"only_public", "paragon"} <= set(error):
            gain = error["only_public"] - error["paragon"]
            frame.loc[rows.index, "boost"] = gain / (100 - rows["utility"] - error["paragon"])
    frame.loc[frame["line"].isin(["paragon", "only_public"]), "boost"] = np.nan
    return frame


def scatter_rows(table: Table) -> pandas.DataFrame:
    """Return the rows of a table for `scatter`: a point for each cell with a distance, and levels without public data.
    What is drawn together (private data, model, label) is one panel. Empty if no panel has two distances."""
    metrics = [cell.records[0].get("metric") if cell else None for cell in table.cells]
    frame = table.frame.assign(metric=metrics)
    frame = frame[frame["utility"].notna()]
    level = frame["algorithm"].isin(WITHOUT_PUBLIC) | frame["public"].isna()
    frame = frame[level | frame["distance"].notna()].assign(level=level)

    # a panel is worth drawing if it has two distances
    measured = frame.assign(measured=frame["distance"].mask(level)).groupby(["private", "model", "label"])["measured"]
    return frame[measured.transform("nunique") > 1]


# Drawing


def curves(frame: pandas.DataFrame, x: str, line: str, styles: dict[Any, Any] | None = None) -> "Figure":
    """Draw a panel for each private set and model, a line for each value of `line`; error bars are standard deviations
    over seeds. `frame` is that of `points`. Lines without a finite x (no guarantee, no private data) are levels.

    styles: those of the lines, for a figure that shares them (and a `legend`) with others.
    """
    panels = list(frame.groupby(["private", "model"], sort=False))
    alone = styles is None
    styles = line_styles(dict.fromkeys(frame["line"])) if styles is None else styles

    with style():
        figure, axes = panel_grid(len(panels))
        for axis, ((private, model), rows) in zip(axes, panels, strict=True):
            for name, how in styles.items():
                part = rows[rows["line"] == name]
                label = line_name(line, name)
                finite = part[part["x"].map(_finite)]
                # a line without a finite x is a level
                if len(finite):
                    spread = finite["std"].fillna(0)
                    axis.errorbar(finite["x"], finite["utility"], spread, label=label, **how)
                elif len(part):
                    level = {"color": how["color"], "ls": how["ls"], "lw": 1.2}
                    axis.axhline(part["utility"].max(), label=label, **level)

            log_axis(axis, sorted({v for v in rows["x"] if _finite(v)}))
            axis.set(title=f"{short(private)}, {short(model)}", xlabel=axis_name(x), ylabel=metric_name(rows))

        if alone:
            legend_below(figure, {line_name(line, name): how for name, how in styles.items()})
    return figure


def line_plot(named: dict[str, tuple[pandas.Series, pandas.Series]], **axes: Any) -> "tuple[Figure, Axes]":
    """Draw lines, x and y by the name of each, in a single panel; axes: what `Axes.set` takes."""
    with style():
        figure, (axis,) = panel_grid(1)
        for (name, (x, y)), how in zip(named.items(), line_styles(named).values(), strict=True):
            axis.plot(x, y, label=name, markevery=max(1, len(x) // 12), **how)
        axis.set(**axes)
        axis.legend()
    return figure, axis


def legend(styles: dict[str, Any]) -> "Figure":
    """Draw the legend alone, for figures that share their styles; `styles`: by the name that is shown."""
    from matplotlib.figure import Figure

    with style():
        high = sum(1 + name.count("\n") for name in styles) / 2
        figure = Figure(figsize=(WIDTH, 0.22 * math.ceil(high) + 0.1))
        legend_below(figure, styles, "upper left")
    return figure


def scatter(frame: pandas.DataFrame) -> "Figure":
    """Draw utility against distance, of `scatter_rows`: a series for each method and epsilon. Error bars are standard
    deviations (over seeds; over initialisations), the legend gives Spearman's rho, a level is a method without public
    data."""
    several = frame["epsilon"].nunique(dropna=False) > 1
    frame = frame.assign(series=[_series(row, several) for _, row in frame.iterrows()])
    levels_last = frame.sort_values("level", kind="stable")
    styles = line_styles(dict.fromkeys(levels_last["series"]))
    panels = list(frame.groupby(["private", "model", "label"], sort=False))

    with style():
        figure, axes = panel_grid(len(panels), 1.5)
        for axis, ((private, _, label), rows) in zip(axes, panels, strict=True):
            for name, part in rows.groupby("series", sort=False):
                how = dict(styles[str(name)])
                if part["level"].all():  # a method without public data has no distance
                    for level in part["utility"]:
                        axis.axhline(level, color=how["color"], ls=how["ls"], lw=1.2, label=str(name))

                    continue

                # rho only if these points give one; see `join.make` for its uncertainty
                _, rho, _ = rank_correlation(list(zip(part["distance"], part["utility"], strict=True)))
                shown = "" if rho is None else f" (ρ = {rho:.2f})".replace("-", "−")
                spread = part["utility_std"].fillna(0), part["distance_std"].fillna(0)
                points_style = how | {"ls": "none"}
                axis.errorbar(part["distance"], part["utility"], *spread, label=f"{name}{shown}", **points_style)

            axis.margins(0.1)
            _name_points(axis, rows[~rows["level"]])

            axis.set_title(f"{short(private)}, {short(label)}", pad=60, loc="left")
            axis.set(xlabel="distance", ylabel=metric_name(rows))
            axis.legend(loc="upper left", bbox_to_anchor=(0, -0.16))
    return figure


def against_time(frame: pandas.DataFrame) -> "Figure":
    """Draw utility against seconds of training, of `paired.timed` and one model: a panel for each private set, a marker
    for each method in the colour of its algorithm, error bars are standard deviations over seeds."""
    panels = list(frame.groupby("private", sort=False))
    styles = method_styles(dict(zip(frame["method"], frame["algorithm"], strict=True)))
    fastest, slowest = frame["seconds"].min(), frame["seconds"].max()

    with style():
        figure, axes = panel_grid(len(panels))
        for axis, (private, rows) in zip(axes, panels, strict=True):
            for method, part in rows.groupby("method", sort=False):
                axis.errorbar(part["seconds"], part["utility"], part["std"].fillna(0), **styles[method])

            # all panels have one time axis, with a label at each 1, 2 and 5 if they fit
            decades = range(-2, 7)
            steps = (1, 2, 5) if slowest / fastest < 300 else (1,)
            log_axis(axis, [step * 10.0**power for power in decades for step in steps])
            axis.set_xlim(fastest / 1.5, slowest * 1.5)
            axis.set(title=short(private), ylabel=metric_name(rows))
            axis.set_xlabel(f"seconds of training (0 counts as {SHORTEST:g})")

        tuned = "; the time of choosing settings is not counted" if frame["chosen"].any() else ""
        epsilon = line_name("epsilon", frame["epsilon"].iloc[0])
        title = f"{short(frame['model'].iloc[0])}, {epsilon}{tuned}"
        figure.suptitle("\n".join(textwrap.wrap(title, int(11 * figure.get_figwidth()))), fontsize=10)

        # room for the legend, so that the panels keep theirs
        named = {}
        for method, how in styles.items():
            name, _, apart = method.partition("\n")
            named["\n".join([name, *textwrap.wrap(short_keys(apart), 34, break_on_hyphens=False)])] = how
        lines = sum(1 + name.count("\n") for name in named) / max(1, int(figure.get_figwidth() / NAME))
        figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(lines))
        legend_below(figure, named, column=NAME)
    return figure


def lost(frame: pandas.DataFrame) -> "Figure":
    """Draw the points that each distance loses, of `judged.judged`, without the private set's own images among the
    candidates: a panel for each epsilon, a row for each distance, a marker for each private set, a bar at their mean;
    error bars are its intervals."""
    panels = list(frame.groupby("epsilon"))
    measures = list(dict.fromkeys(frame["measure"]))[::-1]
    styles = line_styles(dict.fromkeys(frame["private"]))
    apart = np.linspace(0.3, -0.3, len(styles))  # of the markers in a row

    with style():
        figure, axes = panel_grid(len(panels), 1.2)
        for axis, (epsilon, rows) in zip(axes, panels, strict=True):
            for (private, how), shift in zip(styles.items(), apart, strict=True):
                part = rows[rows["private"] == private]
                places = [measures.index(measure) + shift for measure in part["measure"]]
                middle = part["regret_other"]
                low, high = (middle - part["regret_other_low"]).clip(0), (part["regret_other_high"] - middle).clip(0)
                axis.errorbar(middle, places, xerr=[low, high], **(how | {"ls": "none", "elinewidth": 0.8}))

            means = rows.groupby("measure")["regret_other"].mean()
            at = [measures.index(measure) for measure in means.index]
            axis.barh(at, means, height=0.8, color="#808080", alpha=0.3, zorder=0)
            axis.set_yticks(range(len(measures)), measures)
            axis.set(title=line_name("epsilon", epsilon), xlabel="points lost", xlim=(0, None))
        legend_below(figure, {short(private): how for private, how in styles.items()})
    return figure


def method_styles(algorithms: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return for each method, of this algorithm, what `errorbar` takes: the colour of its algorithm, and a marker that
    no other method has in this colour; up to eight markers differ whatever their colour."""
    spread = (COLOURS[0], *COLOURS[:0:-1])  # the two blues far from each other
    colours = {name: spread[i % len(spread)] for i, name in enumerate(dict.fromkeys(algorithms.values()))}

    styles: dict[str, dict[str, Any]] = {}
    for place, (method, algorithm) in enumerate(algorithms.items()):
        colour = colours[algorithm]
        taken = {how["marker"] for how in styles.values() if how["color"] == colour}
        turned = [MARKERS[(place + i) % len(MARKERS)] for i in range(len(MARKERS))]
        marker = next((marker for marker in turned if marker not in taken), turned[0])
        styles[method] = {"color": colour, "marker": marker, "ls": "none"}
    return styles


def _series(row: Any, epsilon: bool) -> str:
    """Return the name of a series in a legend. epsilon: whether there are several, so that it is named."""
    setting = row.get("setting")
    below = "" if pandas.isna(setting) or not setting else short_keys(setting)
    method = short(row["algorithm"])
    number = math.inf if pandas.isna(row["epsilon"]) else row["epsilon"]
    head = f"{method}, {line_name('epsilon', number)}" if epsilon else method
    return "\n".join([head, *textwrap.wrap(below, 46, break_on_hyphens=False)])


def _name_points(axis: "Axes", rows: pandas.DataFrame) -> None:
    """Write the public sets above the axes, each with a line to its distance; spread out if they are close."""
    low, high = axis.get_xlim()
    places = rows.groupby("public")["distance"].mean().sort_values()
    at = ((places - low) / (high - low)).tolist()  # [sets], as a share of the axis

    # from right to left room for the rest, then from left to right a gap after each
    spread = [max(0.0, min(x, 1 - GAP * (len(at) - 1 - i))) for i, x in enumerate(at)]
    for i in range(1, len(spread)):
        spread[i] = max(spread[i], spread[i - 1] + GAP)

    line: dict[str, Any] = {"arrowstyle": "-", "color": "#808080", "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
    how: dict[str, Any] = {"rotation": 30, "rotation_mode": "anchor", "fontsize": 8, "color": INK, "arrowprops": line}
    for name, x, label in zip(places.index, at, spread, strict=True):
        axis.annotate(short(name), (x, 1), (label, 1.06), "axes fraction", "axes fraction", **how)


def panel_grid(count: int, taller: float = 1.0) -> "tuple[Figure, list[Axes]]":
    """Return a figure with `count` panels, up to three next to each other."""
    from matplotlib.figure import Figure

    wide = 2 if count == 4 else min(count, 3)
    high = -(-count // wide)
    figure = Figure(figsize=(WIDTH * wide, HEIGHT * taller * high), layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, list(axes[:count])


def legend_below(
    figure: "Figure", styles: dict[str, Any], where: Any = "outside lower center", column: float = 1.7
) -> None:
    """Draw one legend for all panels; column: the inches of a name and its line."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **how) for name, how in styles.items()]
    columns = min(len(handles), max(1, int(figure.get_figwidth() / column)))
    figure.legend(handles=handles, loc=where, ncols=columns)


def log_axis(axis: "Axes", ticks: list[float]) -> None:
    """Make the horizontal axis logarithmic, with these ticks alone."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def line_name(key: str, name: Any) -> str:
    """Return what a line is called whose `Curve.line` is `key`."""
    number = "∞" if name == math.inf else f"{name:g}" if isinstance(name, int | float) else str(name)
    line, _, apart = number.partition("\n")
    line = f"ε = {line}" if key == "epsilon" else short(line)
    return "\n".join([line, *textwrap.wrap(apart, 46, break_on_hyphens=False)])


def short(name: Any) -> str:
    """Return a name that leaves room for the drawing: the middle of a long one is left out."""
    text = str(name)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-(LONGEST // 2) + 1 :]}"


def axis_name(key: str) -> str:
    """Return the label of an axis along which the setting `key` changes."""
    return "ε" if key == "epsilon" else key.rpartition(".")[2]


def metric_name(rows: pandas.DataFrame) -> str:
    """Return the label of an axis of utility, of these rows."""
    names = {"auc": "AUC", "balanced_accuracy": "balanced accuracy"}
    metrics = dict.fromkeys(names.get(m, str(m)) for m in rows["metric"].dropna())
    return " or ".join(metrics) + ", percent"


# Style and files, for every figure of the project


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Make matplotlib draw, inside `with`, as all figures of the project are drawn."""
    import matplotlib

    values: dict[Any, Any] = matplotlib.rc_params_from_file(
        Path(__file__).with_suffix(".mplstyle"), use_default_template=False
    )
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(values | dict.fromkeys(ink, INK)):
        yield


def line_styles(names: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """Return for each name what `plot` and `errorbar` take: colour, marker and dash; all three differ for up to eight
    names, and no two of up to 64 are the same."""
    styles = {}
    for place, name in enumerate(names):
        turn = place + place // len(MARKERS)
        marker, dash = MARKERS[place % len(MARKERS)], DASHES[turn % len(DASHES)]
        styles[name] = {"color": COLOURS[turn % len(COLOURS)], "marker": marker, "ls": dash}
    return styles


def save_figure(figure: "Figure", path: Path) -> list[Path]:
    """Write PATH.svg and PATH.pdf: each whole or not at all, all drawn before the first is written. Equal
    figures give equal bytes."""
    contents = {path.with_name(f"{path.name}.{kind}"): _drawn(figure, kind) for kind in FORMATS}
    for file, content in contents.items():
        write_whole(file, content)
    return list(contents)


def inline(figure: "Figure", prefix: str, about: str) -> str:
    """Return an <svg> for a page: without a background, in the page's font, text colour (currentColor) and colours
    (var(--line-1) and so on). `prefix` keeps its ids apart from those of others, `about` is its text for those who do
    not see it."""
    svg = _drawn(figure, "svg", transparent=True).decode()

    # metadata and style would clash with those of other figures on the page
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", svg))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]+)"', renamed, svg)
    svg = re.sub(r"((?:url\(|href=\")#)", rf"\g<1>{prefix}", svg)

    # colours of the page, so that it can have a dark mode
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg).replace(INK, "currentColor")
    for number, colour in enumerate(COLOURS, 1):
        svg = svg.replace(colour, f"var(--line-{number})")

    width = figure.get_figwidth() * 96
    head = f'<svg role="img" aria-label="{html.escape(about)}" style="max-width: {width:.0f}px"'
    return re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', rf"{head}\1", svg, count=1)


def _drawn(figure: "Figure", kind: str, transparent: bool = False) -> bytes:
    metadata = {"Date" if kind == "svg" else "CreationDate": None, "Creator": None}
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=kind, metadata=metadata, transparent=transparent)
    return buffer.getvalue()
