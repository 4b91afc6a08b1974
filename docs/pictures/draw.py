"""Draw the pictures of the README and of the front page, each once for light pages and once for dark ones:

    python docs/pictures/draw.py

gain: accuracy against epsilon, from results/tables/recipes.csv and results/opacus_head.csv. architecture: how data,
algorithms, the training loop and records belong together.
"""

import sys
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from pubsel.papers import figures

HERE = Path(__file__).resolve().parent
INK = {"light": "#1f2328", "dark": "#e6edf3"}
LINES = {  # of rows, the last of the script
    "light": ("#0b6e4f", "#0b6e4f", "#5a8f7b", "#7a4fb5", "#b4540a"),
    "dark": ("#5fd3a5", "#5fd3a5", "#9fcbb8", "#c3a3f0", "#f0a35e"),
}
DASHES = ("-", "--", ":", "-")
BOX = {"light": "#eef4f1", "dark": "#1d2b27"}
PRIVATE = {"light": "#fdf1e6", "dark": "#33261a"}
PANELS = {  # private data, and the text next to the axis
    "flowers5": "flowers5: accuracy, %",
    "cifar10": "CIFAR-10: accuracy, %",
    "ham10000": "HAM10000: AUC, %",
}
OURS = "model == 'mobilenetv2' and algorithm == 'whitened_head' and epsilon > 0 and "
ROWS = {  # of the table `recipes`
    "pubsel, labelled public images": OURS + "label == 'untuned' and public == private",
    "pubsel, unlabelled public images": OURS + "label == 'unlabelled'",
    "pubsel, no public images": OURS + "label == 'untuned' and public.isna()",
    "PILLAR": "model == 'mobilenetv2' and algorithm == 'pillar' and label == 'stages'",
}
SCRIPT = "Opacus, best of three rates (oracle)"
EPSILONS = (0.1, 0.3, 1, 2)


# Accuracy against epsilon


def gain(theme: str, race: pandas.DataFrame, script: pandas.DataFrame) -> Figure:
    """Draw our head with public data, with and without their labels, and without public data; PILLAR; and a short
    script with Opacus, whose learning rate the test set chooses from three."""
    with figures.style():
        figure = Figure(figsize=(10.4, 3.9), layout="constrained")
        for axis, (private, label) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
            rows = race[race["private"] == private]
            for colour, dash, (name, where) in zip(LINES[theme][:-1], DASHES, ROWS.items(), strict=True):
                line = rows.query(where).sort_values("epsilon")
                bars = {"yerr": line["utility_std"], "capsize": 0}
                axis.errorbar(line["epsilon"], line["utility"], **bars, color=colour, ls=dash, marker="o", label=name)
            best = 100 * script[script["private"] == private].groupby("epsilon")["utility"].max()
            axis.plot(best.index, best, color=LINES[theme][-1], ls=":", marker="s", label=SCRIPT)
            axis.set(xscale="log", ylabel=label, xlabel="epsilon")
            axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
            axis.minorticks_off()
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        ordered = {name: handles[name] for name in (*ROWS, SCRIPT)}
        figure.legend(ordered.values(), ordered.keys(), loc="outside lower center", ncols=3, fontsize=11)
    return figure


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
    results = HERE.parent.parent / "results"
    race, script = pandas.read_csv(results / "tables" / "recipes.csv"), pandas.read_csv(results / "opacus_head.csv")
    for theme in INK:
        drawn: Any = figures._drawn(gain(theme, race, script), "svg", transparent=True)
        text = drawn.decode().replace(figures.INK, INK[theme])
        (folder / f"gain-{theme}.svg").write_text(text)
        (folder / f"architecture-{theme}.svg").write_text(architecture(theme))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
