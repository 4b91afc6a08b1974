"""Distances between every two of some data sets, clustered (GSD, Figure 4).

    pubsel figure clustermap pair.private=ham10000 sets=[ham10000,kagchest,cifar10] distance=task2vec

It reads the first m private examples and the first m of each set, all in the private shape, and shows the mean over
initialisations, and over both directions if they differ (MMD^2, whose bandwidth is that of one side). The trees are of
average linkage. Private examples are read without noise: this is not differentially private.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import squareform

from pubsel.cell import choose_device, networks, use_threads
from pubsel.commands.rank import canonical_rank, distance_of, open_candidates
from pubsel.data import Split
from pubsel.distances import Releases
from pubsel.messages import UsageError
from pubsel.papers import figures
from pubsel.settings.keys import Common, FigureConfig, RankConfig, public_sets


def matrix(settings: RankConfig) -> pandas.DataFrame:
    """Return distances [sets, sets], symmetric: between the private set, which has "(private)" after its name, and the
    public ones; also of each set to itself, as it is measured. UsageError for a distance that is a release."""
    # a distance that spends a budget would spend it for each pair
    device, distance = choose_device(settings.device), distance_of(settings)
    if isinstance(distance, Releases):
        raise UsageError(f"distance={distance.name}: each pair would be a release of its own: take another distance")

    with tempfile.TemporaryDirectory() as kept:
        task, public = open_candidates(settings, device, Path(kept))
        m = distance.m
        sets = {f"{settings.private} (private)": Split(task.private.x[:m], task.private.y[:m]), **public}
        build = networks(settings.model, task, settings.seed, settings.data_root, device)
        key = f"rank {settings.seed}"
        measured = {name: distance.measure(build, split, sets, task.classes, key) for name, split in sets.items()}

    # symmetric by the mean of both directions: gradients are taken at the labels of one side
    means = {name: {other: np.mean(v) for other, v in row.items()} for name, row in measured.items()}
    frame = pandas.DataFrame(means)
    return (frame + frame.T) / 2


def draw(frame: pandas.DataFrame, title: str) -> Figure:
    """Draw the matrix in the order of its trees, which are above and to the left of it."""
    # a set is at distance 0 from itself in the tree, whatever was measured
    apart = frame.to_numpy(copy=True)
    np.fill_diagonal(apart, 0)
    tree = linkage(squareform(apart, checks=False).clip(min=0), "average", optimal_ordering=True)

    side = 2.5 + 0.7 * len(frame)
    with figures.style():
        figure = Figure(figsize=(side + 1, side), layout="constrained")
        axes = figure.subplots(2, 2, width_ratios=[1, 4], height_ratios=[1, 4])

        # trees above and to the left, in the same order as the matrix
        how = {"color_threshold": 0, "above_threshold_color": figures.INK, "no_labels": True}
        order = dendrogram(tree, ax=axes[0, 1], **how)["leaves"]
        dendrogram(tree, ax=axes[1, 0], orientation="left", **how)
        axes[1, 0].invert_yaxis()
        for axis in (axes[0, 0], axes[0, 1], axes[1, 0]):
            axis.set_axis_off()

        shown = frame.iloc[order, order]
        axes[1, 1].imshow(shown, cmap="viridis", aspect="auto")
        axes[1, 1].grid(False)

        # each distance as a number in its field
        largest = shown.to_numpy().max()
        for (i, j), value in np.ndenumerate(shown.to_numpy()):
            text = f"{value:.3f}" if largest < 10 else f"{value:.0f}"
            color = "k" if value > 0.7 * largest else "w"  # readable on its background
            axes[1, 1].text(j, i, text, ha="center", va="center", color=color, fontsize=8)

        places = range(len(shown))
        axes[1, 1].set_xticks(places, shown.columns, rotation=30, ha="right", fontsize=8)
        axes[1, 1].set_yticks(places, shown.index, fontsize=8)
        axes[1, 1].yaxis.tick_right()
        figure.suptitle(title, fontsize=9)

    return figure


def rank_settings(settings: FigureConfig) -> RankConfig:
    """Return what `pubsel rank` would take to measure the same: `sets` are the candidates."""
    sets = settings.sets or public_sets(settings.pair.public)
    shared = {f.name: getattr(settings, f.name) for f in dataclasses.fields(Common)}
    pair = {key: getattr(settings.pair, key) for key in ("private", "convert", "overlap")}
    return canonical_rank(RankConfig(public=sets, model=settings.model, distance=settings.distance, **pair, **shared))


def drawn(settings: FigureConfig) -> figures.Drawn:
    """Return the figure clustermap_DISTANCE_PRIVATE."""
    ranked = rank_settings(settings)
    use_threads(ranked.threads)
    frame = matrix(ranked)
    distance = distance_of(ranked)
    return figures.Drawn(
        f"clustermap_{distance.name}_{Path(ranked.private).stem}",
        frame.reset_index(names="set"),
        draw(frame, f"{distance.title}, {ranked.model.name}, m = {distance.m} (not private)"),
        text=frame.to_string(float_format="%.4g"),
    )
