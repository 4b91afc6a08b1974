"""When does it pay to choose settings privately? results/tuning.csv and its picture.

    python scripts/race_sets.py
    python scripts/when_tuning_pays.py --to results/tuning.csv

For each set, method and epsilon, accuracy on test images of: one run with settings that nobody chose (untuned), which
has all of epsilon and trains on all private examples; what `pubsel tune` releases, ten seeds each, paired; and the
setting that is best on the test set (oracle). Finished runs are not repeated. The picture is written next to the CSV
file; its copy in docs/pictures is on the page.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import measuring
from scipy import stats

import pubsel
from pubsel.commands.tune import grid

matplotlib.use("svg")
import matplotlib.pyplot as plt

EPSILONS = (0.5, 2.0, 8.0)
SEEDS, FEW = range(10), range(3)  # FEW: of each setting, for the oracle
SETS = {  # words, dimensions of a projection that are tried, and the one of an untuned one
    "digits": ("pair.private=digits model=pixels pair.m=130", (10, 20, 40), 40),
    "tumours": ("pair.private=./tumours.csv model=rows pair.m=45", (5, 10, 20), 20),
    "flowers5": ("pair.private=flowers5 model=mobilenetv2_coral pair.m=350", (10, 40, 160), 40),
    "kagchest": ("pair.private=kagchest model=mobilenetv2_coral pair.m=456", (10, 40, 160), 40),
}
RATES = "training.learning_rate=null,0.1,1,10"
COMMON = ["+experiment=recipes", "label=tuning", "threads=1"]


class Method(NamedTuple):
    """A method: its words, those of its untuned run, and the settings to choose from; {k}: of the set."""

    words: str
    untuned: str
    over: str


METHODS = {
    "PILLAR": Method(
        "algorithm=pillar training=head training.steps=100", "algorithm.k={k}", RATES + " algorithm.k={ks}"
    ),
    "DP-SGD": Method(
        "algorithm=dp_sgd_clip1 training=head training.steps=100", "", RATES + " algorithm.clip_norm=0.3,1,3"
    ),
    "GEP": Method("algorithm=gep_k100 training=gep training.steps=30", "algorithm.k={k}", "algorithm.k={ks}"),
}


def accuracies(words: list[str], epsilon: float, seeds: range, results: Path) -> list[float]:
    """Return the accuracy of a run with each seed, in percent."""
    records = (pubsel.train(*words, "pair.validation=0", epsilon=epsilon, seed=seed, results=results) for seed in seeds)
    return [100 * record["utility"] for record in records]


def compared(name: str, of: str, epsilon: float, results: Path) -> dict[str, Any]:
    """Return a row: a set, a method and an epsilon."""
    of_set, ks, k = SETS[name]
    method = METHODS[of]
    words = [*COMMON, *of_set.split(), *method.words.split()]
    over = method.over.format(ks=",".join(map(str, ks)))
    untuned = accuracies([*words, *method.untuned.format(k=k).split()], epsilon, SEEDS, results)

    # what is released is measured on test examples, like all others
    tuned, each = [], 0.0
    for seed in SEEDS:
        record = pubsel.tune(over, *words, epsilon=epsilon, seed=seed, results=results)
        tuned.append(100 * record["utility"])
        each = record["tuning"]["epsilon"]

    best = max(statistics.mean(accuracies([*words, *cell], epsilon, FEW, results)) for cell in grid(over))
    gains = [a - b for a, b in zip(tuned, untuned, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    margin = float(stats.t.ppf(0.975, len(gains) - 1)) * error
    row: dict[str, Any] = {"set": name, "method": of, "epsilon": epsilon, "settings": len(grid(over))}
    row |= {"epsilon_of_a_run": f"{each:.3g}", "seeds": len(gains)}
    values = {"untuned": statistics.mean(untuned), "tuned": statistics.mean(tuned), "oracle": best}
    values |= {"gain": statistics.mean(gains), "low": statistics.mean(gains) - margin}
    values |= {"high": statistics.mean(gains) + margin}
    return row | {key: f"{value:.2f}" for key, value in values.items()}


def rows(results: Path) -> Iterator[dict[str, Any]]:
    """Yield all rows, those of the smallest sets first."""
    for name in SETS:
        for of in METHODS:
            for epsilon in EPSILONS:
                yield compared(name, of, epsilon, results)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the gain over untuned runs against epsilon, with its interval, and that of the oracle as a line."""
    figure, axes = plt.subplots(1, len(METHODS), figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, of in zip(axes, METHODS, strict=True):
        for i, name in enumerate(SETS):
            here = [row for row in found if (row["set"], row["method"]) == (name, of)]
            x = [row["epsilon"] * 1.06**i for row in here]  # next to each other
            gains = [float(row["gain"]) for row in here]
            wide = [float(row["high"]) - float(row["gain"]) for row in here]
            panel.errorbar(x, gains, wide, fmt="o", color=f"C{i}", label=name, markersize=4, capsize=2)
            oracle = [float(row["oracle"]) - float(row["untuned"]) for row in here]
            panel.plot(x, oracle, ":", color=f"C{i}", linewidth=1)
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set(xscale="log", title=of, xlabel="epsilon")
        panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes[0].set_ylabel("points over untuned runs")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Make what is missing, and write the rows and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of the runs")
    parser.add_argument("--to", type=measuring.target, help="the CSV file; the picture has its name, with .svg")
    given = parser.parse_args()

    found = []
    for row in rows(given.results):
        print(row, flush=True)
        found.append(row)
        if given.to is not None:
            measuring.write(given.to, found, measuring.origin("cpu", 1))
    if given.to is not None and given.to.descriptor is None and not given.to.special:
        draw(found, given.to.path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
