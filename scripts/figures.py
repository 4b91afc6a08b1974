"""Figures from the records of runs: NAME.csv, NAME.png, NAME.svg and NAME.pdf in results/figures.

    python scripts/figures.py all --results results

A name of pubsel.tables.figures.CURVES: utility against epsilon, k, noise, public examples; with adamix the
performance boost.
A name of a table: its utility against distance (NAME_distance). all: each of these that the records allow. With
settings of `pubsel run` behind the name: separability, xi_k of features (PILLAR, Figure 3); reconstruction, what the
projection of AdaMix loses (Figure 6), which looks at the private gradient without noise.
adamix_attack: area under the ROC curve of the loss attack against test error (Figure 1, right), from what `pubsel
attack loss run=all` wrote. per_instance: beside each audits/*/per_instance.csv its figure.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from pubsel import algorithms, data
from pubsel import records as results
from pubsel.algorithms import Mechanism, View
from pubsel.algorithms.adamix import AdaMix, project, public_gradient, subspace_around
from pubsel.cell import Cell, canonical, choose_device, guarantee, load_task, network
from pubsel.commands import run
from pubsel.data import Split, features
from pubsel.gradients.matrix import GradientMatrix
from pubsel.messages import say
from pubsel.settings import CONF
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check
from pubsel.tables import figures, join
from pubsel.theory.separability import separability as estimate
from pubsel.training.loop import Job, fit


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
        device = choose_device(settings.device)
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
    task = load_task(settings, torch.device("cpu"))
    task = task.each(lambda split: Split(torch.nn.functional.normalize(split.x, dim=1), split.y))
    plan, spend, _ = guarantee(settings, algorithm, len(task.private.x))
    model = network(settings.model, task, settings.seed)
    secret = run.training_secret(Cell.of(settings), task, model, plan, spend)
    watched: Any = Watched(algorithm, algorithm.rank)
    with tempfile.TemporaryDirectory() as folder:
        fit(
            model,
            task,
            Job(
                watched,
                plan,
                spend.noise_multiplier if spend else 0.0,
                settings.training,
                "figure",
                Path(folder) / "checkpoint.pt",
            ),
            secret,
        )
    frame = pandas.DataFrame(watched.errors).groupby("step", as_index=False).mean()
    return frame.assign(private=settings.pair.private, model=settings.model.name, rank=algorithm.rank)


def draw_reconstruction(frame: pandas.DataFrame) -> Figure:
    """Both errors against the step."""
    with figures.style():
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axis = figure.subplots()
        for (column, label), how in zip(
            {"public": "public gradient's subspace", "random": "random subspace"}.items(),
            figures.line_styles(["public", "random"]).values(), strict=True,
        ):  # fmt: skip
            axis.plot(frame["step"], frame[column], label=label, color=how["color"], ls=how["ls"])
        axis.set(xlabel="step", ylabel="relative error of the private gradient", ylim=(0, None))
        about = f"{frame['private'][0]}, {frame['model'][0]}, {frame['rank'][0]} dimensions (not private)"
        axis.set_title(about, fontsize=9)
        axis.legend()
    return figure


def draw_separability(frame: pandas.DataFrame) -> Figure:
    """A line for each data set and kind of features."""
    kinds = list(frame.groupby(["private", "features"], sort=False))
    with figures.style():
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axis = figure.subplots()
        for (key, rows), how in zip(kinds, figures.line_styles(key for key, _ in kinds).values(), strict=True):
            axis.plot(rows["k"], rows["xi"], label=", ".join(key), **how)
        axis.set(xscale="log", xlabel="k", ylabel="xi_k", ylim=(0, 1))
        axis.legend()
    return figure


def write(name: str, frame: pandas.DataFrame, figure: Figure, folder: Path) -> None:
    """The figure in all formats, and its numbers."""
    results.write_whole(folder / f"{name}.csv", join.as_csv(frame))
    print(*figures.save(figure, folder / name), sep="\n")


def attacked(records: list[dict[str, Any]], folder: Path) -> pandas.DataFrame:
    """A row for each method and epsilon of AdaMix's Figure 1, the settings chosen as there: test error in percent and
    AUC of the loss attack, means over those seeds that were attacked."""
    paths = (folder / "attacks").glob("loss-*/result.json")
    auc = {record["run"]: record["auc"] for record in (results.read_record(path, ("run", "auc")) for path in paths)}
    curve = figures.CURVES["adamix"]
    belong = [record for record in records if record["algorithm"] in curve.algorithms]
    rows = []
    for cell in join.selected(join.cells(belong), curve.by, list(curve.over)):
        found = [(100 - 100 * r["utility"], auc[r["identity"]]) for r in cell.records if r["identity"] in auc]
        if found:
            error, leak = np.mean(found, axis=0)
            shown = {"private": cell["private"], "model": cell["model"], "line": cell["algorithm"]}
            epsilon = figures.value(cell, "epsilon")
            rows.append(shown | {"epsilon": epsilon, "error": error, "auc": leak, "seeds": len(found)})
    if not rows:
        sys.exit(f"no attacked run of {', '.join(curve.algorithms)} in {folder}: pubsel attack loss run=all")
    return pandas.DataFrame(rows).sort_values(["private", "model", "line", "epsilon"])


def draw_attacked(frame: pandas.DataFrame) -> Figure:
    """A panel for each private set, a line for each method, its points marked with epsilon; 0.5 is chance."""
    panels = list(frame.groupby(["private", "model"]))
    styles = figures.line_styles(name for name in figures.ADAMIX if name in set(frame["line"]))
    with figures.style():
        figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, ((private, model), rows) in zip(axes, panels, strict=True):
            for name, how in styles.items():
                part = rows[rows["line"] == name]
                axis.plot(part["error"], part["auc"], label=name, **how)
                for _, row in part.iterrows():
                    axis.annotate(f"{row['epsilon']:g}", (row["error"], row["auc"]), fontsize=7)
            axis.axhline(0.5, lw=0.8, color="0.6")
            axis.set(xlabel="test error, percent", ylabel="AUC of the attack", title=f"{private}, {model}")
            axis.legend()
    return figure


def draw_losses(folder: Path) -> None:
    """Sorted losses and their histogram beside the claimed epsilon, for each per-instance audit in `folder`."""
    for path in sorted((folder / "audits").glob("*/per_instance.csv")):
        record = results.read_record(path.with_name("result.json"), ("claimed", "delta", "algorithm", "private"))
        losses = np.sort(pandas.read_csv(path)["epsilon"])[::-1]
        with figures.style():
            figure = Figure(figsize=(8, 3.6), layout="constrained")
            left, right = figure.subplots(1, 2)
            left.plot(losses, color=figures.COLOURS[0])
            left.axhline(record["claimed"], color=figures.INK, ls="--", label=f"claimed, delta {record['delta']:g}")
            left.set(xlabel="private examples, sorted", ylabel="epsilon of the example", ylim=(0, None))
            left.legend()
            right.hist(losses, bins=50, color=figures.COLOURS[0])
            right.axvline(record["claimed"], color=figures.INK, ls="--")
            right.set(xlabel="epsilon of the example", ylabel="private examples")
            figure.suptitle(f"{record['algorithm']}, {record['private']} (not private: do not publish)", fontsize=9)
        print(*figures.save(figure, path.with_suffix("")), sep="\n")


def of_records(name: str, records: list[dict[str, Any]], folder: Path) -> bool:
    """Draw a curve, or a table's distances; False where there are no records for it."""
    if name in figures.CURVES:
        curve = figures.CURVES[name]
        frame, _ = figures.points(curve, records)
        if len(frame):
            frame = figures.boosted(frame) if name.startswith("adamix") else frame
            write(name, frame, figures.curves(frame, curve.x, curve.line), folder)
    else:
        frame = figures.distances(join.make(name, records))
        if len(frame):
            write(f"{name}_distance", frame, figures.scatter(frame), folder)
    return len(frame) > 0


def main() -> None:
    """Draw what is asked for."""
    of_files = [*figures.CURVES, *join.names()]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "name", choices=["all", *of_files, "separability", "reconstruction", "adamix_attack", "per_instance"]
    )
    arguments.add_argument("words", nargs="*", help="separability, reconstruction: settings as of pubsel run")
    arguments.add_argument("--results", type=Path, default=Path("results"))
    arguments.add_argument("--sets", nargs="+", default=["cifar10"], help="separability: data sets")
    given = arguments.parse_args()
    folder = given.results / "figures"
    if given.name == "per_instance":
        draw_losses(given.results)
    elif given.name == "adamix_attack":
        frame = attacked(results.read_records(given.results), given.results)
        write(given.name, frame, draw_attacked(frame), folder)
    elif given.name == "separability":
        frame = separability(given.words, given.sets)
        write(given.name, frame, draw_separability(frame), folder)
    elif given.name == "reconstruction":
        frame = reconstruction(given.words)
        write(given.name, frame, draw_reconstruction(frame), folder)
    else:
        records = results.read_records(given.results)
        drawn = [of_records(name, records, folder) for name in (of_files if given.name == "all" else [given.name])]
        if not any(drawn):
            sys.exit(f"no record in {given.results} for {given.name}")


if __name__ == "__main__":
    main()
