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
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas
import yaml
from numpy.typing import NDArray
from scipy import stats

from pubsel.messages import UsageError, UserError
from pubsel.records import at, guarantee_kind, read_records
from pubsel.settings import named, own_folders
from pubsel.settings.identity import default_of

_HERE = Path(__file__).resolve().parents[1]
PAPER = next((path for path in (_HERE.parent / "results" / "paper", _HERE / "paper") if path.is_dir()), _HERE / "paper")
W = TypeVar("W", bound="Work")
Array = NDArray[np.float64]
RESAMPLES = 1000  # of seeds and initialisations

Seeds = tuple[int, int]  # of a run, and of what is drawn of its data
CELL = ("private", "public", "model", "algorithm", "epsilon", "label")
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
    further: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # column, of the paper's CSV too: the other distance of `pubsel rank` that it shows, by keys of its settings
    reference: dict[str, Any] = field(default_factory=dict)  # keys as of `records`: the row that others compare with
    judged: list[str] = field(
        default_factory=list
    )  # distances whose order is compared with that of utility (judged.py)
    chosen: list[str] = field(default_factory=list)  # labels of rows whose settings were chosen at a cost not counted


@dataclass(frozen=True)
class TableCell:
    """Records that differ in nothing but seeds; what a table says of them (percent, points)."""

    records: tuple[dict[str, Any], ...]
    settings: dict[str, str]  # dotted key: JSON value; without `seed` and `pair.seed`

    def __getitem__(self, key: str) -> Any:
        return self.records[0][key]

    def utility(self) -> tuple[float, float | None]:
        """Return the mean over seeds in percent, and the sample standard deviation; None for a single seed."""
        return _mean_std([100 * record["utility"] for record in self.records])

    def trained(self) -> bool:
        """Return whether there is a utility: not for a distance of `pubsel rank` alone."""
        return self.records[0]["utility"] is not None

    def seconds(self) -> float | None:
        """Return the median over seeds of the seconds of training; None if no record has them."""
        known = [record["seconds"] for record in self.records if record.get("seconds") is not None]
        return statistics.median(known) if known else None

    def interval(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of a single seed's utility over test examples, in percent; None for several seeds,
        which have a standard deviation, and for records without it."""
        if len(self.records) > 1:
            return None, None
        interval = self.records[0].get("utility_interval")
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
        lists = [distance.get("values") or [distance["mean"]] for distance in measured.values()]
        return [value for values in lists for value in values]

    def selection(self, by: str, seeds: set[Seeds]) -> float:
        """Return the mean over these seeds of the utility that settings are selected by; -inf if a record has none."""
        records = [record for record in self.records if seeds_of(record) in seeds]
        values = [record.get("selection", {}).get(by) for record in records]
        return statistics.fmean(values) if values and None not in values else -math.inf

    def valid(self) -> bool | str:
        """Return whether every record has a valid privacy guarantee, or "weak" if one of these is."""
        guarantees = {guarantee_kind(record) for record in self.records}
        return "weak" if "weak" in guarantees and "none" not in guarantees else "none" not in guarantees


def cells(records: list[dict[str, Any]]) -> list[TableCell]:
    """Return groups of equal private, public, model, algorithm, epsilon, label and settings, apart from both seeds: of
    the run, and of what is drawn of its data.

    Raise UserError if two records of a cell have the same seeds: they are copies of one run, and no spread over seeds.
    """
    # a cell is what its records have in common, as text: settings may be of any type
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        same = json.dumps([[record[key] for key in CELL], _without_seeds(record)], sort_keys=True)
        groups.setdefault(same, []).append(record)

    result = []
    for group in groups.values():
        group.sort(key=seeds_of)
        for first, second in pairwise(group):
            if seeds_of(first) == seeds_of(second):
                identities = f"{first['identity']} and {second['identity']}"
                raise UserError(f"two records of one run, {identities} (seed {first['seed']}): delete one")
        result.append(TableCell(tuple(group), _without_seeds(group[0])))

    return result


def seeds_of(record: dict[str, Any]) -> Seeds:
    """Return the seed of a record's run, and that of what is drawn of its data."""
    return record["seed"], record["settings"].get("pair", {}).get("seed", 0)


def _without_seeds(record: dict[str, Any]) -> dict[str, str]:
    return {key: value for key, value in dotted_values(record["settings"]).items() if key not in ("seed", "pair.seed")}


def selected(candidates: list[TableCell], by: str, over: list[str]) -> list[TableCell]:
    """Return the best of cells that differ in the settings `over` alone, by `by`, a key of SELECTION: on the seeds that
    all of them have; among equals the one with most seeds, which was chosen before. Cells whose records contain no such
    utility stay only if there is nothing else."""
    # only cells that differ in nothing else compete with each other
    groups: dict[str, list[TableCell]] = {}
    for cell in candidates:
        rest = {key: value for key, value in cell.settings.items() if key not in over}
        same = json.dumps([[cell[key] for key in CELL], rest], sort_keys=True)
        groups.setdefault(same, []).append(cell)
    best = []
    for group in groups.values():
        # cells are compared on equal terms: on the seeds that all of them have
        seeds = set.intersection(*({seeds_of(record) for record in cell.records} for cell in group))

        def rank(cell: TableCell, seeds: set[Seeds] = seeds) -> tuple[float, int, str]:
            return cell.selection(by, seeds), len(cell.records), str(cell.settings)

        best.append(max(group, key=rank))
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
    """Return what the file of a table says; UsageError lists the known names."""
    # a typing error in a file is named here, and not where the table is made
    path = named("tables").get(name)
    if path is None:
        raise UsageError(f"unknown table {name!r}: use all, or one of {', '.join(table_names())}")
    about: Spec = read_work(Spec, path, "gsd_table2.yaml")
    if about.select and (set(about.select) != {"by", "over"} or about.select["by"] not in SELECTION):
        raise UserError(f"{path}: select takes by ({', '.join(SELECTION)}) and over")
    if not (isinstance(about.reference, dict) and isinstance(about.chosen, list)):
        raise UserError(f"{path}: reference takes keys with a value each, and chosen a list of labels")
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


def table_cells(name: str, results: Path) -> list[TableCell]:
    """Return the cells of records in `results` that the table `name` shows, selected as it says."""
    return [cell for cell in _scope(spec(name), read_records(results), []) if cell.trained()]


def belonging(spec: Spec, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that a table is built from, before any is selected, their data sets by the paper's names."""

    def named(sets: str | None) -> str | None:
        return sets and "+".join(spec.names.get(name, name) for name in sets.split("+"))

    # a data set may have another name in the paper
    if spec.names:
        records = [record | {key: named(record[key]) for key in ("private", "public")} for record in records]

    def belongs(record: dict[str, Any]) -> bool:
        return all(value_of(record, key) in values for key, values in spec.records.items())

    return [record for record in records if belongs(record)]


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
    return selected(candidates, spec.select["by"], spec.select["over"]) if spec.select else candidates


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
    paper = paper_rows(spec.paper)
    privates = list(dict.fromkeys(row["private"] for row in paper))
    key = [name for name in CELL if name != "label"]
    places = {tuple(row[name] for name in (*key, *spec.match)): place for place, row in enumerate(paper)}
    if len(places) < len(paper):
        raise UserError(f"{spec.paper} has two rows for one cell: name their difference under `match` of {name}")

    # the records' cells, each next to the paper's row of the same key
    sortable: list[tuple[tuple[Any, ...], dict[str, Any], TableCell | None]] = []
    filled = set()
    for cell, setting in _with_setting(shown, spec):
        # a stand-in counts as what it stands for
        values = {name: cell[name] for name in key} | {"public": spec.stand_ins.get(cell["public"], cell["public"])}
        place = places.get((*values.values(), *(at(cell["settings"], name) for name in spec.match.values())))
        filled.add((place, cell["label"]))
        row = _row(cell, setting, paper[place] if place is not None else None, spec)
        row |= _further(cell, spec, ranks)
        sortable.append((_order(row, place, privates, spec), row, cell))

    # the paper's rows that no record fills
    for place, row in enumerate(paper):
        for label in ["paper", *spec.labels.get(row["algorithm"], [])]:
            if (place, label) not in filled:
                empty = {name: row[name] for name in (*key, *spec.match)} | {"label": label} | _beside(row, spec)
                sortable.append((_order(empty, place, privates, spec), empty, None))

    sortable.sort(key=lambda entry: entry[0])
    rows = [row for _, row, _ in sortable]

    # columns in one order in all tables, those that are empty left out
    selection = ["selected"] if spec.select else []
    further = [name for column in spec.further for name in (f"distance_{column}", f"distance_{column}_std")]
    theirs = [f"paper_distance_{column}" for column in spec.further]
    columns = [*CELL, *spec.match, *selection, *COLUMNS_OURS, *further, *COLUMNS_PAPER, *theirs, *COLUMNS_CODE]
    absent = {name for name in COLUMNS_IF_ANY if all(row.get(name) is None for row in rows)}
    present = [name for name in columns if name not in absent]
    return as_frame(rows, present), [cell for _, _, cell in sortable]


Ranked = tuple[tuple[Any, ...], list[TableCell]]  # a row of the correlations, and the cells that it is computed from


def _ranked(spec: Spec, shown: list[TableCell]) -> tuple[pandas.DataFrame, list[list[TableCell]]]:
    """Return ranks and groups of a `Table`."""
    # ours, next to the paper's of the same private set, model, algorithm and epsilon
    paper = _paper_points(spec)
    rows = _our_correlations(shown, paper)

    present = {row[:4] for row, _ in rows}
    absent = [key for key in paper if key not in present]
    nothing = (*rank_correlation([]), None, None)
    rows += [((*key, "paper", None, *nothing, *rank_correlation(paper[key])), []) for key in absent]

    # in the order of the paper
    privates = list(dict.fromkeys(row["private"] for row in paper_rows(spec.paper)))
    rows.sort(key=lambda entry: (_index(privates, entry[0][0]), [str(value) for value in entry[0][:6]]))

    ranks = ("pairs", "spearman", "kendall")
    interval = ("spearman_low", "spearman_high")
    heads = ["private", "model", "algorithm", "epsilon", "label", "setting"]
    columns = [*heads, *ranks, *interval, *(f"paper_{r}" for r in ranks)]
    named = [dict(zip(columns, row, strict=True)) for row, _ in rows]
    return as_frame(named, columns), [group for _, group in rows]


def _paper_points(spec: Spec) -> dict[tuple[Any, ...], list[tuple[float, float]]]:
    """Return the paper's (distance, utility) points by (private, model, algorithm, epsilon)."""
    paper: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in paper_rows(spec.paper):
        is_point = row["distance"] is not None and row["utility"] is not None
        if is_point and row["algorithm"] not in WITHOUT_PUBLIC:
            block = (row["private"], row["model"], row["algorithm"], row["epsilon"])
            paper.setdefault(block, []).append((row["distance"], row["utility"]))
    return paper


def _our_correlations(shown: list[TableCell], paper: dict[tuple[Any, ...], list[tuple[float, float]]]) -> list[Ranked]:
    """Return a row for each group of cells that differ in the public data alone, with the paper's correlation if it
    has points for the same key."""
    public_keys = ("pair.public", "pair.convert")
    ours: dict[tuple[Any, ...], list[TableCell]] = {}
    for cell in shown:
        if cell["algorithm"] in WITHOUT_PUBLIC or not cell.trained():
            continue
        if cell["public"] is not None and cell.distance()[0] is not None:
            epsilon = math.inf if cell["epsilon"] is None else float(cell["epsilon"])
            same = json.dumps([[k, v] for k, v in sorted(cell.settings.items()) if k not in public_keys])
            key = (cell["private"], cell["model"], cell["algorithm"], epsilon, cell["label"], same)
            ours.setdefault(key, []).append(cell)

    # groups with the same head need their settings in the row to be told apart
    rows: list[Ranked] = []
    for head, keys in groupby(sorted(ours), key=lambda key: key[:5]):
        together = list(keys)
        texts = setting_texts([ours[key][0] for key in together], public_keys)
        for key, setting in zip(together, texts, strict=True):
            points = [(cell.distance()[0] or 0.0, cell.utility()[0]) for cell in ours[key]]
            utilities = [[record["utility"] for record in cell.records] for cell in ours[key]]
            uncertain = rank_interval([cell.distances() for cell in ours[key]], utilities)
            numbers = (*rank_correlation(points), *uncertain, *rank_correlation(paper.get(key[:4], [])))
            rows.append(((*head, setting or None, *numbers), ours[key]))

    return rows


def _row(cell: TableCell, setting: str, paper: dict[str, Any] | None, spec: Spec) -> dict[str, Any]:
    # a distance alone is a row too, without a utility
    utility, utility_std = cell.utility() if cell.trained() else (None, None)
    distance, distance_std = cell.distance()

    row = {key: cell[key] for key in CELL}
    row |= {column: at(cell["settings"], key) for column, key in spec.match.items()}
    row |= {"setting": setting or None, "selected": SELECTION[spec.select["by"]] if spec.select else None}
    row |= {"seeds": len(cell.records), "valid": cell.valid()}
    row |= {"utility": utility, "utility_std": utility_std}
    row |= {"distance": distance, "distance_std": distance_std}
    row["utility_low"], row["utility_high"] = cell.interval()
    row["seconds"] = cell.seconds() if spec.reference else None
    row["commits"] = len({record.get("commit") for record in cell.records})

    if paper is not None:
        row |= _beside(paper, spec)
        if paper["public"] == cell["public"] and paper["utility"] is not None and utility is not None:
            row["difference"] = utility - paper["utility"]
    return row


def _beside(paper: dict[str, Any], spec: Spec) -> dict[str, Any]:
    beside = {f"paper_{key}": paper[key] for key in ("public", "utility", "utility_std", "distance")}
    return beside | {f"paper_distance_{column}": paper.get(column) for column in spec.further}


def _further(cell: TableCell, spec: Spec, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the further distances of a table between a cell's sets, by its network: means over initialisations, and
    standard deviations. UserError if two records are of one of them."""
    row: dict[str, Any] = {}
    between = [record for record in ranks if all(record[key] == cell[key] for key in ("private", "public", "model"))]
    for column, wanted in spec.further.items():
        of = [record for record in between if all(value_of(record, key) == value for key, value in wanted.items())]
        if len(of) > 1:
            raise UserError(f"{of[0]['identity']} and {of[1]['identity']}: both are {column}: say which under further")
        if of:
            row[f"distance_{column}"], row[f"distance_{column}_std"] = _mean_std(of[0]["distance"]["values"])
    return row


def _with_setting(shown: list[TableCell], spec: Spec) -> list[tuple[TableCell, str]]:
    """Return each cell with what tells it apart from others of its private data, model, algorithm, epsilon, label."""
    # what has a column is not repeated in the setting
    columns = ("pair.public", *spec.match.values())
    blocks: dict[tuple[Any, ...], list[TableCell]] = {}
    for cell in shown:
        blocks.setdefault(tuple(cell[key] for key in CELL if key != "public"), []).append(cell)
    pairs: list[tuple[TableCell, str]] = []
    for block in blocks.values():
        pairs += zip(block, setting_texts(block, columns), strict=True)
    return pairs


def _order(row: dict[str, Any], place: int | None, privates: list[str], spec: Spec) -> tuple[Any, ...]:
    """Return a sort key: the paper's order within each private dataset; what the paper lacks comes last."""
    labels = ["paper", *spec.labels.get(row["algorithm"], [])]
    rest = [str(row.get(key) or "") for key in ("algorithm", "model", "epsilon", "public", "label", "setting")]
    last = place if place is not None else math.inf
    return (_index(privates, row["private"]), row["private"], last, _index(labels, row["label"]), rest)


def as_frame(rows: list[dict[str, Any]], columns: list[str]) -> pandas.DataFrame:
    """Return rows as a frame, rounded (percent and points to 2 digits, distances and correlations to 4), with
    whole numbers and truth values as such."""
    frame = pandas.DataFrame([[row.get(column) for column in columns] for row in rows], columns=columns)
    for column in columns:
        if re.search("utility|difference|regret|distance|spearman|kendall|epsilon", column):
            digits = 2 if re.search("utility|difference|regret", column) else 4
            frame[column] = frame[column].astype("Float64").astype("float64").round(digits) + 0.0
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


def resampled(values: list[list[float]], draw: np.random.RandomState) -> Array:
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


def dotted_values(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {"algorithm.k": "250"} for {"algorithm": {"k": 250}}: dotted keys, JSON values."""
    leaves: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            leaves |= dotted_values(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.dumps(value)
    return leaves


def _index(names: list[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
