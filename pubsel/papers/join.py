"""Tables: records beside the papers' own numbers.

Sources of results/paper/*.csv: gsd_* Gradient Subspace Distance (Gu, Kamath, Wu), workshop_* its workshop version,
gep_* Gradient Embedding Perturbation (Yu et al., ICLR 2021), pillar_* PILLAR (Pinto et al., SaTML 2024), adamix_*
AdaMix (Golatkar et al., CVPR 2022). Utilities there are in percent, as printed.
What belongs to a table is stated in conf/tables. This file imports no torch.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas
import yaml
from numpy.typing import NDArray
from scipy import stats

from pubsel.messages import UsageError, UserError
from pubsel.records import at, guarantee_kind
from pubsel.settings import named, own_folders
from pubsel.settings.identity import default_of
from pubsel.settings.schema import leaves, nearest

_HERE = Path(__file__).resolve().parents[1]
PAPER = next((path for path in (_HERE.parent / "results" / "paper", _HERE / "paper") if path.is_dir()), _HERE / "paper")
W = TypeVar("W", bound="Work")
T = TypeVar("T")
Array = NDArray[np.float64]
RESAMPLES = 1000  # of seeds and initialisations

Seeds = tuple[int, int]  # of a run, and of what is drawn of its data
CELL = ("private", "public", "model", "algorithm", "epsilon", "label")
OWN_LABEL = "own"  # of runs whose settings are not those of the paper (intended.py)
WITHOUT_PUBLIC = ("dp_sgd", "non_private", "pate")
SELECTION = {"validation": "held-out private", "public": "public labels", "test": "test (oracle)"}
COLUMNS_OURS = "setting utility utility_std utility_low utility_high seeds seconds distance distance_std".split()
COLUMNS_IF_ANY = ("utility_low", "utility_high", "seconds")  # left out of a table that has none of them
COLUMNS_PAPER = ("paper_public", "paper_utility", "paper_utility_std", "paper_distance", "difference")
COLUMNS_CODE = ("valid", "commits")


# What belongs to a table


@dataclass(frozen=True, kw_only=True)
class Work:
    """One file of conf/work: what `pubsel make` does for it, and its title."""

    title: str
    notes: str = ""  # what differs from the paper, and which other file has it on other data: docs/papers.md
    runs: list[str] = field(default_factory=list)  # commands as after `pubsel`; more in make.py
    common: str = ""  # settings of each `run` among them
    parts: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # name: what stands for {key} in commands

    def target(self, name: str) -> str | None:
        """Return the target of the Makefile that runs the commands; None if there are none."""
        return name.replace("_", "-") if self.runs else None


@dataclass(frozen=True, kw_only=True)
class Spec(Work):
    """One file of conf/tables."""

    paper: str | None = None  # file in results/paper, or next to the table's file
    records: dict[str, list[Any]]  # key of the record, or dotted key of its settings: the values that belong
    labels: dict[str, list[str]] = field(default_factory=dict)  # algorithm: labels shown apart from `paper`
    stand_ins: dict[str, str] = field(default_factory=dict)  # our public data: the paper's that it stands for
    match: dict[str, str] = field(default_factory=dict)  # column of the paper's CSV: dotted key of the settings
    select: dict[str, Any] = field(default_factory=dict)  # by: SELECTION; over: dotted keys of the settings to choose
    names: dict[str, str] = field(default_factory=dict)  # our data set: the paper's name of the same
    ranks: bool = False  # whether distances of `pubsel rank` belong too
    # column, of the paper's CSV too: the other distance of `pubsel rank` that it shows, by keys of its settings
    further: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)  # keys as of `records`: the row that others compare with
    judged: list[str] = field(default_factory=list)  # distances whose order is compared with utility's (judged.py)
    chosen: list[str] = field(default_factory=list)  # labels of rows whose settings were chosen at a cost not counted
    # name: `of`, a row as `reference` is, and `over`, the algorithms whose best row it is compared with in each cell
    gains: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chooses(self, label: str) -> bool:
        """Return whether the settings of rows with a label are selected: of all, if no label is `chosen`."""
        return bool(self.select) and (label in self.chosen or not self.chosen)


@dataclass(frozen=True)
class TableCell:
    """Records that differ in nothing but seeds; what a table says of them (percent, points)."""

    records: tuple[dict[str, Any], ...]
    settings: dict[str, str]  # dotted key: JSON value; without `seed` and `pair.seed`

    def __getitem__(self, key: str) -> Any:
        return self.records[0][key]

    def same(self, left_out: Sequence[str] = (), keys: Sequence[str] = CELL) -> str:
        """Return what cells have in common that differ in nothing but seeds, the settings `left_out`, and other keys
        than `keys`."""
        # as text: settings may be of any type
        settings = {key: value for key, value in self.settings.items() if key not in left_out}
        return json.dumps([[self[key] for key in keys], settings], sort_keys=True)

    def utility(self) -> tuple[float, float | None]:
        """Return the mean over seeds in percent, and the sample standard deviation; None for a single seed."""
        return _mean_std([100 * record["utility"] for record in self.records])

    def trained(self) -> bool:
        """Return whether there is a utility: not for a distance of `pubsel rank` alone."""
        return self.records[0]["utility"] is not None

    def epsilon(self) -> float:
        """Return the requested epsilon: infinite if there is no guarantee."""
        return math.inf if self["epsilon"] is None else float(self["epsilon"])

    def place(self) -> tuple[str, str, float]:
        """Return private data, model and epsilon, of what stands next to each other."""
        return self["private"], self["model"], self.epsilon()

    def seconds(self) -> float | None:
        """Return the median over seeds of the seconds of training; None if no record has them."""
        known = [record["seconds"] for record in self.records if record.get("seconds") is not None]
        return statistics.median(known) if known else None

    def interval(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of a single seed's utility over test examples, in percent; None for several seeds,
        which have a standard deviation, and for records without it."""
        interval = self.records[0].get("utility_interval") if len(self.records) == 1 else None
        return (100 * interval[0], 100 * interval[1]) if interval else (None, None)

    def distance(self) -> tuple[float | None, float | None]:
        """Return mean and sample standard deviation over all random initialisations of all seeds; None if not
        measured."""
        values = self.distances()
        return _mean_std(values) if values else (None, None)

    def distances(self) -> list[float]:
        """Return a value for each random initialisation; what was measured once and is in the record of each seed is
        counted once."""
        measured = {
            record["distance"].get("identity") or record["identity"]: record["distance"]
            for record in self.records
            if record.get("distance")
        }
        return [value for distance in measured.values() for value in distance.get("values") or [distance["mean"]]]

    def selection(self, by: str, seeds: set[Seeds]) -> float:
        """Return the mean over these seeds of the utility that settings are selected by; -inf if a record has none."""
        records = [record for record in self.records if seeds_of(record) in seeds]
        values = [record.get("selection", {}).get(by) for record in records]
        return statistics.fmean(values) if values and None not in values else -math.inf

    def valid(self) -> bool | str:
        """Return whether every record has a valid privacy guarantee, or "weak" if one of these is."""
        guarantees = {guarantee_kind(record) for record in self.records}
        return "weak" if "weak" in guarantees and "none" not in guarantees else "none" not in guarantees


def json_text(value: Any) -> str:
    """Return JSON: tables write few values many times."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else _scalar(value)


@lru_cache(maxsize=None, typed=True)  # 1, 1.0 and true are equal
def _scalar(value: Any) -> str:
    return json.dumps(value)


def cells(records: list[dict[str, Any]]) -> list[TableCell]:
    """Return groups of equal private, public, model, algorithm, epsilon, label and settings, apart from both seeds: of
    the run, and of what is drawn of its data.

    Raise UserError if two records of a cell have the same seeds: they are copies of one run, and no spread over seeds.
    """
    alone, result = list[TableCell](), list[TableCell]()
    for record in records:
        values = leaves(record["settings"])
        settings = {key: json_text(value) for key, value in values if key not in ("seed", "pair.seed")}
        alone.append(TableCell((record,), settings))

    for group in groups_by(alone, TableCell.same):
        together = sorted((cell.records[0] for cell in group), key=seeds_of)
        for first, second in pairwise(together):
            if seeds_of(first) == seeds_of(second):
                identities = f"{first['identity']} and {second['identity']}"
                raise UserError(f"two records of one run, {identities} (seed {first['seed']}): delete one")
        result.append(TableCell(tuple(together), group[0].settings))

    return result


def groups_by(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """Return the items that have the same key together, in the order in which they come."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def seeds_of(record: dict[str, Any]) -> Seeds:
    """Return the seed of a record's run, and that of what is drawn of its data."""
    return record["seed"], record["settings"].get("pair", {}).get("seed", 0)


def selected(candidates: list[TableCell], by: str, over: list[str]) -> list[TableCell]:
    """Return the best of cells that differ in the settings `over` alone, by `by`, a key of SELECTION: on the seeds that
    all of them have; among equals the one with most seeds, which was chosen before. Cells whose records contain no such
    utility stay only if there is nothing else."""
    best = []
    for group in groups_by(candidates, lambda cell: cell.same(over)):
        # cells are compared on equal terms: on the seeds that all of them have
        seeds = set.intersection(*({seeds_of(record) for record in cell.records} for cell in group))
        ranks = [(cell.selection(by, seeds), len(cell.records), str(cell.settings)) for cell in group]
        best.append(group[ranks.index(max(ranks))])
    return best


def setting_texts(group: list[TableCell], shown: tuple[str, ...] = ()) -> list[str]:
    """Return for each cell its settings that are not the same in the whole group, as "algorithm.k=250
    training.epochs=20".

    Keys in `shown` have a column of their own and are left out.
    """
    keys = differing(group, shown)
    return [settings_text(cell, keys) for cell in group]


def differing(group: list[TableCell], shown: tuple[str, ...] = ()) -> list[str]:
    """Return the settings, apart from those in `shown`, that are not the same in the whole group."""
    keys = sorted({key for cell in group for key in cell.settings} - set(shown))
    return [key for key in keys if len({cell.settings.get(key) for cell in group}) > 1]


def settings_text(cell: TableCell, keys: list[str]) -> str:
    """Return those of these settings that a cell has, as "algorithm.k=250 training.epochs=20"."""
    return " ".join(f"{key}={cell.settings[key].strip(chr(34))}" for key in keys if key in cell.settings)


def table_names() -> list[str]:
    """Return the names of the tables in conf/tables and in the user's --config-dir."""
    return sorted(named("tables"))


def spec(name: str) -> Spec:
    """Return what the file of a table says; UsageError lists the known names; UserError names the key that it
    does not take."""
    # a typing error in a file is named here, and not where the table is made
    path = named("tables").get(name)
    if path is None:
        known = table_names()
        raise UsageError(f"unknown table {name!r}{nearest(name, known)}: use all, or one of {', '.join(known)}")
    about: Spec = read_work(Spec, path, "gsd_table2.yaml")
    if about.select and (set(about.select) != {"by", "over"} or about.select["by"] not in SELECTION):
        raise UserError(f"{path}: select takes by ({', '.join(SELECTION)}) and over")
    if not (isinstance(about.reference, dict) and isinstance(about.chosen, list)):
        raise UserError(f"{path}: reference takes keys with a value each, and chosen a list of labels")
    for name, gain in about.gains.items():
        if set(gain) != {"of", "over"} or not (isinstance(gain["of"], dict) and isinstance(gain["over"], list)):
            raise UserError(f"{path}: gains, {name}: takes of (keys with a value each) and over (a list of algorithms)")
    return about


def read_work(kind: type[W], path: Path, example: str) -> W:
    """Return a file of conf/tables or conf/work; UserError names a key that is wrong, and an `example` for the right
    ones."""
    try:
        return kind(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}; see {example} for the keys") from None


def paper_rows(file: str | None) -> list[dict[str, Any]]:
    """Return the rows of one CSV in results/paper, or next to the user's tables (none for None): numbers as float,
    empty fields as None. Raise UserError if the file is missing."""
    if file is None:
        return []
    # the user's own tables bring the numbers of their paper with them
    folders = [PAPER, *(folder / "tables" for folder in own_folders())]
    path = next((folder / file for folder in folders if (folder / file).is_file()), PAPER / file)
    try:
        frame = pandas.read_csv(path, keep_default_na=False, na_values=[""])
    except OSError:
        missing = f"no file {file} with the paper's numbers in {PAPER}, nor next to the table: "
        raise UserError(f"{missing}reinstall pubsel, or put it there") from None
    except ValueError as error:
        raise UserError(f"{path}: {str(error).strip()}: mend it") from None
    frame = frame.astype(dict.fromkeys(frame.select_dtypes("number"), float)).astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


def table_cells(name: str, records: list[dict[str, Any]]) -> list[TableCell]:
    """Return the cells of the records of runs that the table `name` shows, selected as it says; none with OWN_LABEL."""
    return [cell for cell in _scope(spec(name), records, []) if cell.trained() and cell["label"] != OWN_LABEL]


def belonging(spec: Spec, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that a table is built from, before any is selected, their data sets by the paper's names."""

    def named(sets: str | None) -> str | None:
        return sets and "+".join(spec.names.get(name, name) for name in sets.split("+"))

    # few of thousands of records belong, so that these alone are copied
    sets = ("private", "public")
    for key, values in spec.records.items():
        if spec.names and key in sets:
            records = [record for record in records if named(record[key]) in values]
        else:
            wanted = [*values, OWN_LABEL] if key == "label" and "paper" in values else values
            records = [record for record in records if value_of(record, key) in wanted]
    # a data set may have another name in the paper
    if spec.names:
        records = [record | {key: named(record[key]) for key in sets} for record in records]
    return records


def value_of(record: dict[str, Any], key: str) -> Any:
    """Return the value of a key of the record, or of a dotted key of its settings, its default if it is left out; None
    if it has none."""
    if key in record:
        return record[key]
    group, _, last = key.rpartition(".")
    values = at(record["settings"], group) if group else record["settings"]
    return values[last] if isinstance(values, dict) and last in values else default_of(key)


def _scope(spec: Spec, records: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[TableCell]:
    """Return the cells that a table shows."""
    candidates = cells(belonging(spec, [*records, *ranks] if spec.ranks else records))
    if not spec.select:
        return candidates
    # what nobody chose is not selected either
    chosen = [cell for cell in candidates if spec.chooses(cell["label"])]
    others = [cell for cell in candidates if not spec.chooses(cell["label"])]
    return [*others, *selected(chosen, spec.select["by"], spec.select["over"])]


# Tables


@dataclass(frozen=True)
class Table:
    """A table of conf/tables as `make` returns it, with the records of each row."""

    name: str
    spec: Spec
    frame: pandas.DataFrame
    cells: list[TableCell | None]  # for each row of `frame`; None: the paper's numbers alone
    ranks: pandas.DataFrame
    groups: list[list[TableCell]]  # for each row of `ranks`

    def records(self) -> list[dict[str, Any]]:
        """Return every record that a number of the table comes from."""
        return [record for cell in self.cells if cell for record in cell.records]


def make(name: str, records: list[dict[str, Any]], ranks: list[dict[str, Any]] | None = None) -> Table:
    """Return the table `name` of conf/tables, from `read_records`, and from `read_ranks` if it takes these; UsageError
    for another name.

    frame: utilities in percent, a row for each cell (records that differ in the seed alone) and each row of the paper
    without a record. `setting` tells cells of one private data set, model, algorithm, epsilon and label apart. If a
    data set stands in for the paper's, `paper_public` differs from `public` and `difference` is empty.

    ranks: rank correlations of distance and utility over the public sets, ours next to the paper's; near -1 if the
    nearer a set, the better. A row for each private set, model, algorithm, epsilon and label; cells with other settings
    than the public data's name and conversion are not put into one. Empty with fewer than 3 points or without spread.
    spearman_low and _high: 95 % of resamples of the seeds and of the initialisations, not of the public sets.
    """
    about = spec(name)
    shown = _scope(about, records, ranks or [])
    return Table(name, about, *_joined(name, about, shown, ranks or []), *_ranked(about, shown))


def others(records: list[dict[str, Any]]) -> Table:
    """Return the runs that belong to no table of conf/tables, such as those on a user's data, as a table `others`."""
    known = {record["identity"] for name in table_names() for record in belonging(spec(name), records)}
    about = Spec(title="Other runs. Those that no table of conf/tables takes; utility in percent", records={})
    shown = cells([record for record in records if record["identity"] not in known])
    return Table("others", about, *_joined("others", about, shown, []), *_ranked(about, shown))


def _joined(
    name: str, spec: Spec, shown: list[TableCell], ranks: list[dict[str, Any]]
) -> tuple[pandas.DataFrame, list[TableCell | None]]:
    """Return frame and cells of a `Table`."""
    # keys of the paper's rows must be unique, or a record would match two of them
    paper, key = _paper(spec), ["private", "model", "algorithm", "epsilon", *spec.match]
    if paper.duplicated([*key, "paper_public"]).any():
        raise UserError(f"{spec.paper} has two rows for one cell: name their difference under `match` of {name}")

    # columns in one order in all tables
    selection = ["selected"] if spec.select else []
    further = [f"distance_{column}{end}" for column in spec.further for end in ("", "_std")]
    theirs = [f"paper_distance_{column}" for column in spec.further]
    columns = [*CELL, *spec.match, *selection, *COLUMNS_OURS, *further, *COLUMNS_PAPER, *theirs, *COLUMNS_CODE]

    # the records' cells, each next to the paper's row of the same key; a stand-in counts as what it stands for
    ours = pandas.DataFrame([_row(cell, spec, ranks) for cell in shown], columns=[*columns, "cell"], dtype=object)
    alike = ours.groupby([key for key in CELL if key != "public"], dropna=False, sort=False)["cell"]
    shown_apart = ("pair.public", *spec.match.values())
    setting = alike.transform(lambda cells: setting_texts(list(cells), shown_apart))
    ours["setting"] = setting.mask(setting == "")
    is_own = ours["label"] == OWN_LABEL
    ours.loc[is_own, "setting"] = [settings_text(cell, cell["differ"]) for cell in ours["cell"][is_own]]
    ours["stands_for"] = ours["public"].map(lambda public: spec.stand_ins.get(public, public))
    ours = ours.drop(columns=[*COLUMNS_PAPER, *theirs])
    rows = ours.merge(paper, how="left", left_on=[*key, "stands_for"], right_on=[*key, "paper_public"])
    difference = rows["utility"].astype(float) - rows["paper_utility"].astype(float)
    rows["difference"] = difference.mask(rows["public"].isin(list(spec.stand_ins)))
    rows.loc[rows["label"] == OWN_LABEL, [*COLUMNS_PAPER, *theirs]] = None

    # the paper's rows that no record fills
    filled = set(zip(rows["place"], rows["label"], strict=True))
    labels = [["paper", *spec.labels.get(algorithm, [])] for algorithm in paper["algorithm"]]
    every = paper.assign(public=paper["paper_public"], label=labels).explode("label")
    empty = [pair not in filled for pair in zip(every["place"], every["label"], strict=True)]
    rows = pandas.concat([rows, every[empty]], ignore_index=True)

    # the paper's order of rows and labels; what is empty in all rows is left out
    places = {(algorithm, label): i for algorithm, labels in spec.labels.items() for i, label in enumerate(labels)}
    pairs = zip(rows["algorithm"], rows["label"], strict=True)
    rows["of_label"] = [-1 if pair[1] == "paper" else places.get(pair, math.inf) for pair in pairs]
    texts = ["algorithm", "model", "epsilon", "public", "label", "setting"]
    rows = _in_order(rows, paper, ["place", "of_label"], texts)
    present = [name for name in columns if name not in COLUMNS_IF_ANY or rows[name].notna().any()]
    return as_frame(rows, present), [cell if isinstance(cell, TableCell) else None for cell in rows["cell"]]


def _paper(spec: Spec) -> pandas.DataFrame:
    """Return the paper's rows: their keys, their numbers as `paper_...`, and their place."""
    numbers = {key: f"paper_{key}" for key in ("public", "utility", "utility_std", "distance")}
    numbers |= {column: f"paper_distance_{column}" for column in spec.further}
    columns = ["private", "model", "algorithm", "epsilon", *spec.match, *numbers.values()]
    frame = pandas.DataFrame(paper_rows(spec.paper)).rename(columns=numbers)
    return frame.reindex(columns=columns).astype(object).assign(place=range(len(frame)))


def _in_order(
    rows: pandas.DataFrame, paper: pandas.DataFrame, numbers: list[str], texts: list[str]
) -> pandas.DataFrame:
    """Return rows in the order of the paper's private sets, then of these columns; what is missing comes last among
    numbers, first among texts."""
    places = {private: place for place, private in enumerate(paper["private"].unique())}
    keys = {"first": rows["private"].map(places), "private": rows["private"]} | {key: rows[key] for key in numbers}
    keys |= {key: rows[key].map(lambda value: "" if pandas.isna(value) else str(value)) for key in texts}
    return rows.loc[pandas.DataFrame(keys).sort_values(list(keys), kind="stable").index]


def _row(cell: TableCell, spec: Spec, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what our columns show of a cell; a distance alone is a row too, without a utility."""
    row = {"cell": cell, **{key: cell[key] for key in CELL}}
    row |= {column: at(cell["settings"], key) for column, key in spec.match.items()}
    row |= {"selected": SELECTION[spec.select["by"]] if spec.chooses(cell["label"]) else None, "valid": cell.valid()}
    row |= {"seeds": len(cell.records), "commits": len({record.get("commit") for record in cell.records})}
    row["utility"], row["utility_std"] = cell.utility() if cell.trained() else (None, None)
    row["utility_low"], row["utility_high"] = cell.interval()
    row["distance"], row["distance_std"] = cell.distance()
    row["seconds"] = cell.seconds() if spec.reference else None

    # further distances between the same sets, by the network of the cell
    keys = ("private", "public", "model")
    between = [record for record in ranks if spec.further and all(record[key] == cell[key] for key in keys)]
    for column, wanted in spec.further.items():
        of = [record for record in between if all(value_of(record, key) == value for key, value in wanted.items())]
        if len(of) > 1:
            raise UserError(f"{of[0]['identity']} and {of[1]['identity']}: both are {column}: say which under further")
        if of:
            row[f"distance_{column}"], row[f"distance_{column}_std"] = _mean_std(of[0]["distance"]["values"])
    return row


def _ranked(spec: Spec, shown: list[TableCell]) -> tuple[pandas.DataFrame, list[list[TableCell]]]:
    """Return ranks and groups of a `Table`."""
    # ours: of cells that differ in the public data alone
    block, public_keys = ["private", "model", "algorithm", "epsilon"], ("pair.public", "pair.convert")
    rows = [
        [*(cell[key] for key in block[:3]), cell.epsilon(), cell["label"], cell.same(public_keys, ()), cell]
        for cell in shown
        if cell["algorithm"] not in WITHOUT_PUBLIC and cell["public"] is not None
        if cell.trained() and cell.distances() and cell["label"] != OWN_LABEL
    ]
    keys = [*block, "label", "rest"]
    ours = pandas.DataFrame(rows, columns=[*keys, "cells"], dtype=object)
    ours = ours.groupby(keys)["cells"].agg(list).reset_index()

    # groups with the same head need their settings in the row to be told apart
    first = ours.assign(first=[cells[0] for cells in ours["cells"]]).groupby(keys[:-1])["first"]
    setting = first.transform(lambda cells: setting_texts(list(cells), public_keys))
    ours["setting"] = setting.mask(setting == "")
    ranks, interval = ["pairs", "spearman", "kendall"], ["spearman_low", "spearman_high"]
    ours = ours.join(pandas.DataFrame(map(_correlations, ours["cells"]), columns=[*ranks, *interval]))

    # the paper's, of the same private set, model, algorithm and epsilon
    paper = _paper(spec)
    points = paper.dropna(subset=["paper_distance", "paper_utility"])
    groups = points[~points["algorithm"].isin(WITHOUT_PUBLIC)].groupby(block, dropna=False)
    pairs = groups[["paper_distance", "paper_utility"]]
    theirs = [[*key, *rank_correlation(part.to_numpy(float).tolist())] for key, part in pairs]
    columns = [f"paper_{rank}" for rank in ranks]
    both = ours.merge(pandas.DataFrame(theirs, columns=[*block, *columns], dtype=object), how="outer", on=block)

    heads = [*block, "label", "setting"]
    both = _in_order(both.fillna({"label": "paper"}), paper, [], heads[1:])
    cells = [cells if isinstance(cells, list) else [] for cells in both["cells"]]
    return as_frame(both, [*heads, *ranks, *interval, *columns]), cells


def _correlations(cells: list[TableCell]) -> tuple[float | None, ...]:
    """Return `rank_correlation` and `rank_interval` of cells with a distance and a utility."""
    points = [(cell.distance()[0] or 0.0, cell.utility()[0]) for cell in cells]
    utilities = [[record["utility"] for record in cell.records] for cell in cells]
    return *rank_correlation(points), *rank_interval([cell.distances() for cell in cells], utilities)


def as_frame(rows: pandas.DataFrame, columns: list[str]) -> pandas.DataFrame:
    """Return these columns of rows, rounded (percent and points to 2 digits, distances and correlations to 4), with
    whole numbers and truth values as such."""
    frame = rows.reindex(columns=columns).infer_objects().reset_index(drop=True)
    for column in columns:
        if re.search("utility|difference|regret|gain|distance|spearman|kendall|epsilon", column):
            digits = 2 if re.search("utility|difference|regret|gain", column) else 4
            frame[column] = frame[column].astype(float).round(digits) + 0.0
        elif column in ("seeds", "common_seeds", "commits", "m", "pairs", "paper_pairs", "sets"):
            frame[column] = frame[column].astype("Int64")
        elif column == "valid" and not (frame[column] == "weak").any():
            frame[column] = frame[column].astype("boolean")
    return frame


def rank_correlation(points: list[tuple[float, float]]) -> tuple[int | None, float | None, float | None]:
    """Return the number of (distance, utility) points, Spearman's rho and Kendall's tau-b; None if they say nothing."""
    # of two points, and of ties alone, a rank correlation says nothing
    if len(points) < 3 or any(len(set(values)) < 2 for values in zip(*points, strict=True)):
        return len(points) or None, None, None
    distances, utilities = zip(*points, strict=True)
    spearman, kendall = stats.spearmanr(distances, utilities), stats.kendalltau(distances, utilities)
    return len(points), float(spearman.statistic), float(kendall.statistic)


def rank_interval(distances: list[list[float]], utilities: list[list[float]]) -> tuple[float | None, float | None]:
    """Return a percentile bootstrap interval of Spearman's rho: of each point, over the initialisations of its
    distance and the seeds of its utility; None if one of them is alone."""
    if len(distances) < 3 or min(map(len, distances + utilities)) < 2:
        return None, None
    # the same resamples each time, so that a table is made byte for byte
    draw = np.random.RandomState(0)
    correlations = correlation_of_rows("spearman", resampled(distances, draw), resampled(utilities, draw))
    return (None, None) if np.isnan(correlations).all() else middle(correlations)


def middle(values: Array) -> tuple[float, float]:
    """Return the interval of the middle 95 % of resampled values, without those that are nan."""
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return low, high


def resampled(values: Sequence[Sequence[float]], draw: np.random.RandomState) -> Array:
    """Return means [RESAMPLES, len(values)], each over as many values as there are, drawn with replacement."""
    return np.stack([draw.choice(of_point, (RESAMPLES, len(of_point))).mean(1) for of_point in values], axis=1)


def correlation_of_rows(kind: str, x: Array, y: Array) -> Array:
    """Return Spearman's rho or Kendall's tau-b of each row of x and y, [rows, points]; nan for one without spread."""
    first, second = np.triu_indices(x.shape[1], 1)
    a, b = (
        stats.rankdata(side, axis=1) - (side.shape[1] + 1) / 2
        if kind == "spearman"
        else np.sign(side[:, first] - side[:, second])
        for side in (x, y)
    )
    with np.errstate(invalid="ignore"):
        result: Array = (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return result


def _mean_std(values: list[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
