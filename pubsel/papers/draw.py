"""`pubsel figure NAME`: NAME.csv, NAME.svg and NAME.pdf in results/figures. This file imports no torch.

From records: a name of figures.CURVES (utility against epsilon, k, noise, public examples; with adamix the performance
boost), or of read_off.FIGURES (what the papers read off such cells); a name of a table, its utility against distance
(NAME_distance), if it has a reference, against time at one epsilon, for each model (NAME_time-MODEL-epsEPSILON), and if
it judges distances, what each loses (NAME_lost); all, each of these that the records allow;
adamix_attack, the area under the ROC curve of the loss attack against test error (AdaMix, Figure 1, right);
per_instance, next to each audits/*/per_instance.csv its figure.

Measured, with settings of `pubsel run`: those of during_training.py, initialisation.py, clustermap.py
and projections.py.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from pubsel import records as results
from pubsel.messages import UsageError, UserError
from pubsel.papers import figures, intended, join, judged, paired, read_off, typeset
from pubsel.papers.figures import Drawn
from pubsel.papers.measured import read_measured
from pubsel.settings.keys import FigureConfig
from pubsel.settings.schema import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLLOWED = ("gsd_figure1", "gsd_figure3", "gsd_lemma41", "gep_figure2", "gep_figure4", "gep_figure5", "gep_figure7")
# what looks at data, not at records, by the module that does (each imports torch)
MEASURED = dict.fromkeys(FOLLOWED, "theory.during_training") | {
    "gep_figure1": "theory.initialisation",
    "clustermap": "clustermap",
    **dict.fromkeys(("separability", "reconstruction"), "theory.projections"),
}
OF_RECORDS = ("all", *figures.CURVES, *read_off.FIGURES, "adamix_attack", "per_instance")  # and the tables


def figure_names() -> list[str]:
    """Return the names of every figure."""
    return [*OF_RECORDS, *join.table_names(), *MEASURED]


def run(settings: FigureConfig) -> str:
    """Draw `settings.figure`; return what there is to say of it, and the files. UsageError lists the figures; UserError
    if there is no record for it."""
    name, folder = settings.figure, Path(settings.results)
    if name not in figure_names():
        known = figure_names()
        raise UsageError(f"unknown figure {name!r}{nearest(name, known)}: use one of {', '.join(known)}")

    # what is measured has figures to print, not only files
    if name in MEASURED:
        drawn = import_module(f"pubsel.papers.{MEASURED[name]}").drawn(settings)
        return "\n".join([*([drawn.text] if drawn.text else []), *map(str, write(drawn, folder))])

    if name == "per_instance":
        paths, missing = draw_losses(folder), "no audits/*/per_instance.csv: pubsel audit audit.kind=per_instance"
    else:
        records, ranks = results.read_records(folder), read_measured(folder)
        each = [*figures.CURVES, *read_off.FIGURES, *join.table_names()] if name == "all" else [name]
        if name == "adamix_attack":
            frame = attack_figure(records, folder)
            figures_now = [] if frame.empty else [Drawn(name, frame, against_error(frame))]
        else:
            figures_now = [of for part in each for of in of_records(part, records, ranks, settings.at_epsilon)]
        paths = [path for of in figures_now for path in write(of, folder)]
        missing = "no attacked run: pubsel attack loss" if name == "adamix_attack" else "no record for it"
    if not paths:
        raise UserError(f"figure={name}: {missing}, in {folder}")
    return "\n".join(map(str, paths))


def write(drawn: Drawn, folder: Path) -> list[Path]:
    """Write the figure in all formats, and its numbers, to RESULTS/figures; return the files."""
    path = folder / "figures" / drawn.name
    results.write_table(drawn.frame, path.with_name(f"{path.name}.csv"), drawn.about)
    return figures.save_figure(drawn.figure, path)


def of_records(name: str, records: list[dict[str, Any]], ranks: list[dict[str, Any]], at_epsilon: float) -> list[Drawn]:
    """Return a curve, what is read off one, or the figures of a table: utility against distance, against time at an
    epsilon, and what each distance loses; none if there are no records for it."""
    # a curve of the records, what is read off one, or a table
    if name in figures.CURVES:
        curve = figures.CURVES[name]
        frame, _ = figures.points(curve, records)
        if frame.empty:
            return []
        frame = figures.boosted(frame) if name.startswith("adamix") else frame
        return [Drawn(name, frame, figures.curves(frame, curve.x, curve.line))]

    if name in read_off.FIGURES:
        return read_off.drawn(name, records)

    table = intended.intended_table(name, records)
    frame, lost = figures.scatter_rows(table), judged.judged(table, ranks)
    drawn = [] if frame.empty else [Drawn(f"{name}_distance", frame, figures.scatter(frame))]
    if not lost.empty:
        drawn.append(Drawn(f"{name}_lost", lost, figures.lost(lost), "\n".join(typeset.ABOUT_JUDGED)))
    timed = paired.timed(table, at_epsilon)
    if timed.empty:
        return drawn

    # a figure for each model: features of two models in one panel are too many markers
    about = f"seconds: of training alone, the median over seeds; 0 or none counts as {paired.SHORTEST:g}\n"
    about += f"on: {paired.machines(table)}"
    for model, rows in timed.groupby("model", sort=False):
        title = f"{name}_time-{model}-eps{at_epsilon:g}"
        drawn.append(Drawn(title, rows, figures.against_time(rows), about))
    return drawn


# AdaMix, Figure 1 (right)


def attack_figure(records: list[dict[str, Any]], folder: Path) -> pandas.DataFrame:
    """Return a row for each method and epsilon of AdaMix's Figure 1, the settings chosen as there: test error in
    percent and AUC of the loss attack, means over those seeds that were attacked. Empty if none was."""
    # runs that were attacked, of those that AdaMix's figure is about
    paths = (folder / "attacks").glob("loss-*/result.json")
    auc = {record["run"]: record["auc"] for record in results.readable(paths, results.LossAttack)}
    curve = figures.CURVES["adamix"]
    belong = [record for record in records if record["algorithm"] in curve.algorithms]

    rows = []
    for cell in join.selected(join.cells(belong), curve.by, list(curve.over)):
        with_auc = [record for record in cell.records if record["identity"] in auc]
        pairs = [(100 - 100 * record["utility"], auc[record["identity"]]) for record in with_auc]
        if pairs:
            error, leak = np.mean(pairs, axis=0)
            shown = {"private": cell["private"], "model": cell["model"], "line": cell["algorithm"]}
            epsilon = figures.value(cell, "epsilon")
            rows.append(shown | {"epsilon": epsilon, "error": error, "auc": leak, "seeds": len(pairs)})

    frame = pandas.DataFrame(rows)
    return frame.sort_values(["private", "model", "line", "epsilon"]) if rows else frame


def against_error(frame: pandas.DataFrame) -> "Figure":
    """Draw a panel for each private set, a line for each method, its points marked with epsilon; 0.5 is chance."""
    # methods in the order and the colours of AdaMix's other figures
    panels = list(frame.groupby(["private", "model"]))
    styles = figures.line_styles(name for name in figures.ADAMIX if name in set(frame["line"]))

    with figures.style():
        figure, axes = figures.panel_grid(len(panels))
        for axis, ((private, model), rows) in zip(axes, panels, strict=True):
            for name, how in styles.items():
                part = rows[rows["line"] == name]
                axis.plot(part["error"], part["auc"], label=name, **how)
                for _, row in part.iterrows():
                    axis.annotate(f"{row['epsilon']:g}", (row["error"], row["auc"]), fontsize=7)
            # chance
            axis.axhline(0.5, lw=0.8, color="0.6")
            axis.set(xlabel="test error, percent", ylabel="AUC of the attack", title=f"{private}, {model}")
            axis.legend()
    return figure


# AdaMix, Figure 3


def draw_losses(folder: Path) -> list[Path]:
    """Draw the sorted privacy losses and their histogram next to the claimed epsilon, for each per-instance audit in
    `folder`."""
    paths: list[Path] = []
    for path in sorted((folder / "audits").glob("*/per_instance.csv")):
        record = next(results.readable([path.with_name("result.json")], results.AuditRecord), None)
        if record is None:
            continue
        losses = np.sort(pandas.read_csv(path)["epsilon"])[::-1]

        with figures.style():
            figure, (left, right) = figures.panel_grid(2)
            left.plot(losses, color=figures.COLOURS[0])
            left.axhline(record["claimed"], color=figures.INK, ls="--", label=f"claimed, delta {record['delta']:g}")
            left.set(xlabel="private examples, sorted", ylabel="epsilon of the example", ylim=(0, None))
            left.legend()
            right.hist(losses, bins=50, color=figures.COLOURS[0])
            right.axvline(record["claimed"], color=figures.INK, ls="--")
            right.set(xlabel="epsilon of the example", ylabel="private examples")
            figure.suptitle(f"{record['algorithm']}, {record['private']} (not private: do not publish)", fontsize=9)

        paths += figures.save_figure(figure, path.with_suffix(""))
    return paths
