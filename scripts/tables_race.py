"""Private classifiers on tables that packages ship: `scripts/tables_race.py FILE METHOD...`.

FILE is a CSV that gets the rows of these methods that it lacks. diffprivlib 0.6 needs scikit-learn before 1.5, so it
runs in another environment, without pubsel.

Each row is a table, an epsilon and a method, with mean and standard deviation of the accuracy on a fifth of the rows
over SEEDS splits. Needs diffprivlib and statsmodels (pip install diffprivlib statsmodels); nothing is fetched.

pubsel       `pubsel.fit` on the columns as they are: nothing is set; delta 1e-5
bounds       the same with the exact least and most of each column, as if these were public (oracle)
diffprivlib  its LogisticRegression on columns that were standardised exactly, without noise (oracle), with the best of
             28 pairs of C and data_norm by mean accuracy on the test rows (oracle); delta 0
not private  scikit-learn's LogisticRegression on standardised columns
"""

import csv
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

SEEDS, EPSILONS, SHARE = 10, (0.1, 0.5, 1.0, 4.0), 0.2
TRIED = [*product((1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0), (0.1, 0.5, 1.0, 2.0))]  # C; data_norm, over sqrt(columns)
Array = NDArray[Any]


class Split(NamedTuple):
    """Rows to train and to test on, with their labels."""

    x: Array
    y: Array
    new: Array
    answers: Array


def tables() -> Iterator[tuple[str, Array, Array]]:
    """Yield the name, rows and labels of each table."""
    for name, load in {"breast cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}.items():
        yield name, *load(return_X_y=True)
    shipped = files("statsmodels") / "datasets"

    def read(name: str, between: str) -> pd.DataFrame:
        frame = pd.read_csv(str(shipped / name / f"{name}.csv"), sep=between)
        return frame.rename(columns=lambda column: column.strip("'\" "))

    votes, affairs, visits = read("anes96", "\t"), read("fair", ","), read("randhie", ",")
    yield "anes96", votes.drop(columns="vote").to_numpy(float), votes["vote"].to_numpy(int)
    yield "fair", affairs.drop(columns="affairs").to_numpy(float), (affairs["affairs"] > 0).to_numpy(int)
    yield "randhie", visits.drop(columns="mdvis").to_numpy(float), (visits["mdvis"] > 0).to_numpy(int)


def split(x: Array, y: Array, seed: int) -> Split:
    """Return one split of a table."""
    order = np.random.RandomState(seed).permutation(len(y))
    m = round(SHARE * len(y))
    return Split(x[order[m:]], y[order[m:]], x[order[:m]], y[order[:m]])


def ours(one: Split, epsilon: float, bounds: bool) -> float:
    """Return the accuracy of `pubsel.fit`."""
    import pubsel

    with tempfile.TemporaryDirectory() as ledger:
        known = {str(i): [float(low), float(high)] for i, (low, high) in enumerate(zip(*_range(one.x), strict=True))}
        release = pubsel.fit(one.x, one.y, epsilon=epsilon, bounds=known if bounds else None, results=ledger)
    return float((release.predict(one.new) == one.answers).mean())


def _range(x: Array) -> tuple[Array, Array]:
    """Return the least and most of each column; of one that is constant a range around it."""
    low, high = x.min(0), x.max(0)
    return np.where(low < high, low, low - 1), np.where(low < high, high, high + 1)


def rival(one: Split, epsilon: float) -> list[float]:
    """Return the accuracy of diffprivlib with each of TRIED."""
    from diffprivlib.models import LogisticRegression as Private

    scaler = StandardScaler().fit(one.x)
    x, new = scaler.transform(one.x), scaler.transform(one.new)
    reached = []
    for c, norm in TRIED:
        model = Private(epsilon=epsilon, C=c, data_norm=norm * np.sqrt(x.shape[1]), max_iter=500)
        reached.append(float((model.fit(x, one.y).predict(new) == one.answers).mean()))
    return reached


def not_private(one: Split) -> float:
    """Return the accuracy without privacy."""
    scaler = StandardScaler().fit(one.x)
    model = LogisticRegression(max_iter=2000).fit(scaler.transform(one.x), one.y)
    return float((model.predict(scaler.transform(one.new)) == one.answers).mean())


def main(path: Path, methods: Sequence[str]) -> None:
    """Write the rows of some methods that are not there yet."""
    warnings.simplefilter("ignore")
    columns = ["table", "n", "columns", "epsilon", "method", "accuracy", "deviation", "seeds", "set"]
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    done = {(str(t), str(e), str(m)) for t, e, m in known[["table", "epsilon", "method"]].itertuples(index=False)}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if not done:
            writer.writeheader()
        for (name, x, y), epsilon in product([*tables()], EPSILONS):
            splits = [split(x, y, seed) for seed in range(SEEDS)]
            for method in methods:
                if (name, str(epsilon), method) in done:
                    continue
                setting = ""
                if method == "diffprivlib":
                    every = np.array([rival(one, epsilon) for one in splits])  # [seeds, tried]
                    best = int(every.mean(0).argmax())
                    reached, setting = every[:, best], f"C={TRIED[best][0]:g} data_norm={TRIED[best][1]:g} sqrt(d)"
                elif method == "not private":
                    reached = np.array([not_private(one) for one in splits])
                else:
                    reached = np.array([ours(one, epsilon, method == "bounds") for one in splits])
                row = {"table": name, "n": len(y), "columns": x.shape[1], "epsilon": epsilon, "method": method}
                row |= {"accuracy": f"{100 * reached.mean():.1f}", "deviation": f"{100 * reached.std(ddof=1):.1f}"}
                writer.writerow(row | {"seeds": SEEDS, "set": setting})
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
