"""Draw the pictures of the README and of the front page, each once for light pages and once for dark ones:

    python docs/pictures/draw.py

utility: what GEP reaches with public data near and far, from the records in results/records (`pubsel table gsd_table2`
and `pubsel table medical_ours` have the same numbers). architecture: how data, algorithms, the training loop and
records belong together.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import binom

from pubsel.papers import figures, join
from pubsel.records import read_records

HERE = Path(__file__).resolve().parent
INK = {"light": "#1f2328", "dark": "#e6edf3"}
LINE = {"light": ("#0b6e4f", "#b4540a"), "dark": ("#5fd3a5", "#f0a35e")}  # points; the level without public data
BOX = {"light": "#eef4f1", "dark": "#1d2b27"}
PRIVATE = {"light": "#fdf1e6", "dark": "#33261a"}
PANELS = {  # private data: the table, the label of its rows, and what stands beside the axis
    "fashion_mnist": ("gsd_table2", "official", "Fashion-MNIST: accuracy, %"),
    "ham10000": ("medical_ours", "head", "HAM10000: AUC, %"),
    "kagchest": ("medical_ours", "head", "KagChest: accuracy, %"),
}
PLACES = {  # where the name of a public set stands beside its point: points to the right, points up, alignment
    ("fashion_mnist", "mnist"): (9, 6, "left"),
    ("ham10000", "ham10000"): (9, -13, "left"),
    ("ham10000", "flowers5"): (8, 7, "left"),
    ("ham10000", "tiny_imagenet"): (-8, 2, "right"),
    ("ham10000", "cifar10"): (-8, -6, "right"),
    ("ham10000", "fashion_mnist"): (8, -3, "left"),
    ("ham10000", "kagchest"): (8, -6, "left"),
    ("kagchest", "ham10000"): (8, 2, "left"),
    ("kagchest", "cifar10"): (-8, -12, "right"),
    ("kagchest", "chestxray_pneumonia"): (-9, 0, "right"),
    ("kagchest", "kagchest"): (9, -20, "left"),
}
NAMES = {"chestxray_pneumonia": "chest X-rays"}


# Utility against distance


def utility(theme: str, made: dict[str, join.Table]) -> Figure:
    """GEP on three private sets, a point for each public set; the dashed level is DP-SGD in the same setting, without
    public data."""
    with figures.style():
        figure = Figure(figsize=(10.4, 3.3), layout="constrained")
        for axis, (private, (name, label, beside)) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
            shown = made[name].frame.assign(cell=made[name].cells)
            _panel(axis, shown[(shown["private"] == private) & (shown["label"] == label)], theme)
            axis.set_ylabel(beside, fontsize=11)
            axis.set_xlabel("distance of the public data", fontsize=11)
            axis.set_title(_correlation(made[name].ranks, private, label), loc="left", fontsize=11)
    return figure


def _correlation(ranks: pandas.DataFrame, private: str, label: str) -> str:
    """Spearman's rank correlation of distance and utility, with its interval if there are several seeds."""
    belongs = (ranks["private"] == private) & (ranks["label"] == label) & (ranks["algorithm"] == "gep")
    (row,) = ranks[belongs].to_dict("records")
    low, high = row.get("spearman_low"), row.get("spearman_high")
    interval = "" if pandas.isna(low) else f" [{low:.2f}, {high:.2f}]"
    return f"rank correlation {row['spearman']:.2f}{interval}".replace("-", "−")


def spread(row: pandas.Series) -> list[float]:
    """What lies below and above a utility, in percent: one standard deviation over seeds; of a single seed the 95 %
    interval over test examples."""
    if not pandas.isna(row["utility_std"]):
        return [row["utility_std"], row["utility_std"]]
    (record,) = row["cell"].records
    bounds = binom.interval(0.95, record["test_examples"], record["utility"])
    low, high = (100 * count / record["test_examples"] for count in bounds)
    return [row["utility"] - low, high - row["utility"]]


def _panel(axis: Axes, rows: pandas.DataFrame, theme: str) -> None:
    points, level = LINE[theme]
    gep = rows[rows["algorithm"] == "gep"]
    bars = np.array([spread(row) for _, row in gep.iterrows()]).T  # [2, points]
    axis.errorbar(gep["distance"], gep["utility"], bars, gep["distance_std"], ls="none", marker="o", color=points)
    for _, row in gep.iterrows():
        x, y, side = PLACES.get((row["private"], row["public"]), (9, 5, "left"))
        axis.annotate(
            NAMES.get(row["public"], row["public"]),
            (row["distance"], row["utility"]),
            (x, y),
            textcoords="offset points",
            ha=side,
            fontsize=10,
            color=figures.INK,
        )

    # The clip norm of DP-SGD is that of GEP's embedding: 5 on Fashion-MNIST, 3 elsewhere.
    without = rows[(rows["algorithm"] == "dp_sgd") & ~rows["setting"].fillna("").str.contains("clip_norm=0.1")]
    (none,) = without.to_dict("records")
    axis.axhline(none["utility"], color=level, ls="--", lw=1.4)
    axis.axhspan(none["utility"] - none["utility_std"], none["utility"] + none["utility_std"], color=level, alpha=0.15)
    axis.annotate(
        "DP-SGD, no public data",
        (0.02, none["utility"]),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=level,
        fontsize=10,
    )
    axis.margins(0.12, 0.12)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.25 * (right - left))  # room for names
    axis.tick_params(labelsize=10)


# The architecture


def box(x: int, y: int, wide: int, high: int, title: str, lines: list[str], fill: str) -> str:
    """A box with a title and lines of text."""
    text = [f'<text x="{x + 14}" y="{y + 26}" class="title">{title}</text>']
    text += [f'<text x="{x + 14}" y="{y + 48 + 19 * i}">{line}</text>' for i, line in enumerate(lines)]
    return f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="8" fill="{fill}"/>{"".join(text)}'


def arrow(ends: tuple[int, int, int, int], text: str = "", at: tuple[int, int] = (0, 0), dashed: bool = False) -> str:
    """An arrow between two points, and what it carries, written at a third."""
    x1, y1, x2, y2 = ends
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<path d="M{x1} {y1}L{x2} {y2}" class="arrow"{dash} marker-end="url(#head)"/>'
    return line + (f'<text x="{at[0]}" y="{at[1]}" class="small">{text}</text>' if text else "")


def architecture(theme: str) -> str:
    """Public data shapes the step, one loop spends the privacy, one record per run, tables are joins of records."""
    ink, plain, private = INK[theme], BOX[theme], PRIVATE[theme]
    parts = [
        box(10, 20, 200, 92, "public data", ["candidates,", "or one that you name"], plain),
        box(280, 20, 220, 92, "distances, selection", ["which set is near;", "chosen with a guarantee"], plain),
        box(570, 20, 250, 92, "algorithms", ["DP-SGD, GEP, PILLAR, AdaMix:", "they see public data only"], plain),
        box(10, 210, 200, 92, "private data", ["folders, CSV, npz,", "or a named set"], private),
        box(
            280,
            210,
            540,
            92,
            "training",
            ["sample, clip, sum, add noise, step: the only place", "that trains on private data"],
            private,
        ),
        box(280, 352, 220, 92, "privacy", ["accountant, randomness,", "ledger of every release"], plain),
        box(570, 352, 250, 92, "records, tables", ["one record per run, joined", "with the papers' numbers"], plain),
        arrow((210, 66, 274, 66)),
        arrow((500, 66, 564, 66)),
        arrow((210, 256, 274, 256)),
        arrow((170, 210, 330, 118), "no noise unless asked for", (40, 166), dashed=True),
        arrow((640, 112, 640, 204), "mechanism, sensitivity", (472, 163)),
        arrow((710, 210, 710, 118), "weights", (722, 163)),
        arrow((390, 352, 390, 308), "noise", (402, 336)),
        arrow((660, 302, 660, 346), "guarantee, utility", (672, 330)),
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 454" role="img"
 aria-label="Public data shapes the step, one loop spends the privacy, one record per run, tables join records.">
<style>text {{ font: 15px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {ink}; }}
.title {{ font-weight: 600; font-size: 17px; }} .small {{ font-size: 14px; font-style: italic; }}
.arrow {{ stroke: {ink}; stroke-width: 1.6; fill: none; }} rect {{ stroke: {ink}; stroke-width: 1; }}</style>
<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
<path d="M0 0L9 4L0 8z" fill="{ink}"/></marker></defs>
{chr(10).join(parts)}
</svg>
"""


def main(folder: Path = HERE) -> None:
    """Write the four files."""
    records = read_records(HERE.parent.parent / "results")
    made = {name: join.make(name, records) for name, _, _ in PANELS.values()}
    for theme in INK:
        drawn: Any = figures._drawn(utility(theme, made), "svg", transparent=True)
        text = drawn.decode().replace(figures.INK, INK[theme])
        (folder / f"utility-{theme}.svg").write_text(text)
        (folder / f"architecture-{theme}.svg").write_text(architecture(theme))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
