"""Tables for readers: the same columns and notes as text, Markdown and LaTeX (booktabs); and as CSV for programs.

A cell of `Column` is a number and its uncertainty: "85.09" and "± 0.31". What is missing is an em dash.
"""

import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from pubsel.files import write_whole
from pubsel.messages import UsageError, aligned
from pubsel.papers import attacked, intended, judged, paired
from pubsel.papers.attacked import Attacked
from pubsel.papers.join import OWN_LABEL, Table, belonging, table_names
from pubsel.papers.measured import read_choices, read_measured, read_ranks
from pubsel.records import as_csv, at, outdated, read_records
from pubsel.settings.keys import WEIGHTLESS, TableConfig
from pubsel.settings.schema import nearest

MISSING = "—"
NOTHING = {
    "public": "none",
    "epsilon": "∞",
    "setting": "",
    "paper_public": "",
    "selected": "",
    "reference_is": "",
}  # where an empty field is no gap
ORDER = (  # of columns
    "measure comparison private public algorithm epsilon label model setting selected utility paper_utility difference "
    "p reference_is seeds common_seeds seconds distance paper_distance paper_public valid pairs paper_pairs spearman "
    "paper_spearman kendall paper_kendall sets nearest best regret nearest_other best_other regret_other "
    "nearest_sets best_sets regret_sets regret_most attack gsd_values features private_examples known_members "
    "trials asked success_rate auc paper_success_rate cells gain gain_least gain_most first near ahead "
    "behind"
).split()
HEADS = {key: key.replace("_", " ").capitalize() for key in ORDER} | {
    "private": "Private data",
    "public": "Public data",
    "epsilon": "ε",
    "selected": "Selected by",
    "utility": "Ours",
    "paper_utility": "Paper",
    "paper_distance": "Paper's distance",
    "paper_public": "Paper's public data",
    "valid": "Guarantee",
    "pairs": "Public sets",
    "paper_pairs": "Paper's public sets",
    "spearman": "Spearman's ρ",
    "paper_spearman": "Paper's ρ",
    "kendall": "Kendall's τ",
    "paper_kendall": "Paper's τ",
    "sets": "Private sets",
    "regret": "Points lost",
    "regret_other": "Points lost, others",
    "nearest_sets": "Nearest set",
    "best_sets": "Best set",
    "regret_sets": "Points lost, sets",
    "regret_most": "Most lost, others",
    "gsd_values": "With GSD",
    "known_members": "Members known",
    "success_rate": "Success, %",
    "auc": "AUC",
    "paper_success_rate": "Paper, %",
    "p": "p",
    "reference_is": "Reference is",
    "gain": "Median gain",
    "gain_least": "Least",
    "gain_most": "Most",
    "near": "First or within one deviation",
    "ahead": "Ahead beyond Holm",
    "behind": "Behind beyond Holm",
}
MEASURED = (
    "utility paper_utility difference seconds distance paper_distance spearman paper_spearman success_rate auc "
    "paper_success_rate"
).split()
NOT_SHOWN = ("commits",)  # in the notes
RANKS = "Rank correlation of distance and utility (near −1: the nearer the public data, the better)"
JUDGED = "Does the order of distances predict that of utilities?"
ABOUT_JUDGED = (
    "ρ and τ: rank correlation of distance and utility over the public sets; near −1 if the nearer a set, the better.",
    "Points lost: what the nearest candidate loses against the best one, in points of utility, where no public data is "
    "one of the candidates. Others: images of the private set itself are no candidate. Sets: no public data is none "
    "either.",
    f"{judged.ALWAYS_NONE}: what is lost by taking none in any case.",
    "[low, high]: 95 % of resamples of the seeds and of the initialisations, not of the sets. Seconds: of one "
    "initialisation, all candidates together, their features computed before.",
)
TIME = "Seconds: of training alone, the median over seeds, by the machine and code of the time."
AHEAD = "Where the first row is more than one standard deviation of the reference above it"
DIFFERENCES = (
    "Difference: the row minus the reference, in points, so above 0 if the row is better: the mean over the seeds that "
    "both have, and its 95 % t interval. A single common seed gives no interval, none gives nothing.",
    "An interval covers what the seed changes, and none of the other rows: of many intervals, some miss.",
    "A row with ε 0, which reads no private example, is compared at every ε.",
    "p: two-sided paired t-test. Reference is: ahead or behind, if the difference is significant with Holm's "
    "correction. With few common seeds, only differences far above their spread are.",
)
GAINS = "Gains in points, over the best row of each cell of private data and model"
ABOUT_GAINS = (
    "Gain: the mean over seeds minus that of the best of the rows it is compared with, tuned ones among them; of the "
    "cells, the median, the smallest and the largest.",
    "Numbers of cells in which it has the best mean; in which it is at most one standard deviation (over its seeds) "
    "below the best; and in which it is significantly better or worse than the best of the others (paired t-test, with "
    "Holm's correction over all comparisons).",
)
LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': "''",
    "“": "``",
    "”": "''",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "ε": r"$\varepsilon$",
    "ρ": r"$\rho$",
    "τ": r"$\tau$",
    "∞": r"$\infty$",
    "−": r"$-$",
    MISSING: "---",
    "→": r"$\to$",
}
UNCERTAINTY = {
    "utility_std": "±: sample standard deviation over seeds; of a distance, over random initialisations.",
    "utility_low": "[low, high]: of one seed, a 95 % bootstrap interval over test examples; it does not cover "
    "training.",
}
SELECTED_BY = {
    "validation": "held-out private examples",
    "public": "labels of the public examples",
    "test": "the test set (oracle)",
}
LONG = 45  # rows that fit on a page
WIDE = {"setting": "p{35mm}"}  # columns of a table in LaTeX whose text is broken
NARROW = r"\small\setlength{\tabcolsep}{3pt}"
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


@dataclass(frozen=True)
class Column:
    """A column as it is shown; `entries`: for each row the value and its uncertainty, "" for nothing."""

    key: str
    head: str
    entries: list[tuple[str, str]]
    numeric: bool

    def texts(self) -> list[str]:
        """Return value and spread in one text for each row."""
        return [f"{value} {spread}".strip() for value, spread in self.entries]


def columns(frame: pandas.DataFrame) -> tuple[list[Column], list[str]]:
    """Return the columns that say something, ours next to the paper's; and what is the same in every row, as "ε 2".

    Empty columns are left out, except "utility": no number of ours is shown as missing.
    """
    # known columns in the order of HEADS, those of a user's table after them
    order = [key for key in HEADS if key in frame] + [str(key) for key in frame if key not in HEADS]
    shown: list[Column] = []
    constant: list[str] = []

    for key in order:
        if re.search("_(std|low|high)$", key) or key in NOT_SHOWN:
            continue

        # an empty field has no number of ours, so it is no exception
        known = frame[key].dropna()
        if key == "valid" and len(known) and (known == True).all():  # noqa: E712
            constant.append(f"{HEADS[key]} valid")
            continue
        empty = key != "utility" and frame[key].isna().all()
        pairs = frame[["public", "paper_public"]].dropna() if key == "paper_public" else pandas.DataFrame()
        if empty or (key == "paper_public" and (pairs["public"] == pairs["paper_public"]).all()):
            continue

        beside = [frame.get(f"{key}_{what}", [None] * len(frame)) for what in ("std", "low", "high")]
        entries = [_entry(key, *values) for values in zip(frame[key], *beside, strict=True)]
        if key == "paper_public":  # only shown if it is another than ours
            both = zip(entries, frame["public"], strict=True)
            entries = [("", "") if entry[0] == public else entry for entry, public in both]

        # a further distance has its name in the head
        plain = next((head for head in ("paper_distance", "distance") if key.startswith(f"{head}_")), "")
        head = f"{HEADS[plain]}, {key.removeprefix(plain + '_')}" if plain else HEADS.get(key, key)
        is_bool = pandas.api.types.is_bool_dtype(frame[key])
        numeric = pandas.api.types.is_numeric_dtype(frame[key]) and not is_bool
        column = Column(key, head, entries, numeric)

        if key not in MEASURED and len(frame) > 1 and len(set(entries)) == 1:
            constant.append(f"{column.head} {entries[0][0]}")
        else:
            shown.append(column)

    return shown, constant


def notes(table: Table) -> list[str]:
    """Return what a reader has to know of a table's numbers: their uncertainty, what selected them, what is missing."""
    frame, lines = table.frame, []
    for column, about in UNCERTAINTY.items():
        if column in frame and frame[column].notna().any():
            lines.append(about)

    lines += _selection(table)
    for ours, paper in table.spec.stand_ins.items():
        if (frame["public"] == ours).any():
            lines.append(f"{ours} stands in for the paper's {paper}: no difference is taken.")

    if (frame["label"] == OWN_LABEL).any():
        differ = "a run whose settings, in the column Setting, differ from the paper's"
        lines.append(f"{OWN_LABEL}: {differ}: no difference is taken.")

    # report rows that are missing, and guarantees that do not hold
    if missing := table.cells.count(None):
        lines.append(f"{MISSING}: no record. {missing} of {len(frame)} rows have none of ours.")
    lines += _tested(table) + _weights(table) + _versions(table)
    lines += [TIME] if "seconds" in frame else []
    lines += paired.paired_summary(table)

    kinds = Counter(cell.valid() for cell in table.cells if cell and cell.trained())
    if invalid := kinds[False]:
        lines.append(f"{invalid} rows of ours have no valid privacy guarantee (column {HEADS['valid']}).")
    if weak := kinds["weak"]:
        lines.append(f"{weak} rows of ours have a weak privacy guarantee: its delta is above 1/n (n private examples).")
    return lines


def _selection(table: Table) -> list[str]:
    """Return a line on what selected the settings, if anything did."""
    if not table.spec.select:
        return []
    by, labels = table.spec.select["by"], ", ".join(table.spec.chosen)
    settings = f"Settings of rows with label {labels}" if labels else "Settings"
    if by == "test":
        whose = "these" if labels else "ours"
        return [f"{settings} were selected on the test set (oracle): {whose} are too good by that."]
    return [f"{settings} were selected by {SELECTED_BY[by]}; the privacy guarantee does not cover the selection."]


def _tested(table: Table) -> list[str]:
    """Return a line for each private set whose rows were not all tested on the same number of examples."""
    sizes: dict[str, set[int]] = {}
    for record in table.records():
        if tested := record.get("test_examples"):
            sizes.setdefault(record["private"], set()).add(tested)
    return [
        f"{name}: tested on {' or '.join(f'{size:,}' for size in sorted(of_set))} examples, as public "
        "examples are left out: rows with different numbers differ by more than the method (pair.take=same_test tests "
        "all on the same)."
        for name, of_set in sizes.items()
        if len(of_set) > 1
    ]


def _weights(table: Table) -> list[str]:
    """Return a line on the published weights that networks began with, or a file with others, if there are any."""
    # one line for each network, whatever else differs between its runs
    weights = set()
    models = (at(run, "settings.model") or {} for run in table.records())
    for model in {str(model): model for model in models}.values():
        for network, published in ((model, False), (model.get("backbone") or {}, True)):  # by default
            name, file = network.get("architecture"), network.get("checkpoint")
            if file:
                weights.add(f"{name} with the file {file}")
            elif name and name not in WEIGHTLESS and network.get("pretrained", published):
                weights.add(f"{name} as it is published")
    return [f"Weights: {', '.join(sorted(weights))}."] if weights else []


def _versions(table: Table) -> list[str]:
    """Return lines on the versions of the code that made the numbers, if there are several or earlier ones."""
    # numbers of an earlier program are comparable, but not repeated bit for bit
    lines, runs = [], table.records()
    if earlier := sum(bool(outdated(record)) for record in runs):
        lines.append(
            f"Of {len(runs)} runs, {earlier} are of an earlier version of their method, or of what decides numbers: "
            "this program does not repeat them."
        )

    commits = Counter(
        "unknown" if commit is None else commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")
        for commit in (record.get("commit") for record in runs)
    )
    if len(commits) < 2:
        return lines
    counted = ", ".join(f"{commit} ({count} run{'s'[: count != 1]})" for commit, count in commits.most_common())

    # worst within a row, whose seeds should differ in nothing else
    versions = [{record.get("commit") for record in cell.records} for cell in table.cells if cell]
    within = sum(len(of_cell) > 1 for of_cell in versions)
    inside = f"; within the seeds of {within} row{'s'[: within != 1]}" if within else ""
    return [*lines, f"Mixed versions of the code: {counted}{inside}."]


def text(frame: pandas.DataFrame, title: str = "") -> str:
    """Return the table for the screen, in columns."""
    shown, constant = columns(frame)
    lines = [title] if title else []
    lines += [f"In every row: {', '.join(constant)}"] if constant else []
    return "\n".join([*lines, *aligned(zip(*([column.head, *column.texts()] for column in shown), strict=True))])


def _markdown(value: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(value.split()))


def markdown(name: str, title: str, *parts: pandas.DataFrame | list[str] | str) -> str:
    """Return a page of Markdown: below its title tables, lists of notes, and headings."""
    texts = [f"## {title}"]
    for part in parts:
        if isinstance(part, pandas.DataFrame):
            shown, constant = columns(part)
            rows = [[column.head for column in shown], *zip(*(column.texts() for column in shown), strict=True)]
            lines = ["| " + " | ".join(map(_markdown, row)) + " |" for row in rows]
            lines.insert(1, "|" + "|".join("---:" if column.numeric else "---" for column in shown) + "|")
            texts += [f"In every row: {_markdown(', '.join(constant))}."] if constant else []
            texts.append("\n".join(lines))
        elif isinstance(part, str):
            texts.append(f"### {_markdown(part)}")
        elif part:
            texts.append("\n".join(f"- {_markdown(note)}" for note in part))
    return "\n\n".join([*texts, f"Made by `pubsel table {name}`."]) + "\n"


def latex(name: str, *tables: tuple[pandas.DataFrame, str, list[str], str]) -> str:
    """Return each table (its title, its notes, the end of its label) as a `table` no wider than the page, or several if
    it is longer; for a document with booktabs and graphicx."""
    head = f"% pubsel table {name}; needs \\usepackage{{booktabs,graphicx}}\n"
    return head + "\n".join(_latex_table(*about[:3], f"tab:{name}{about[3]}") for about in tables)


def _latex_table(frame: pandas.DataFrame, title: str, below: list[str], label: str) -> str:
    # numbers to the right, texts to the left; long ones are broken
    shown, constant = columns(frame)
    align = "".join("r" if column.numeric else WIDE.get(column.key, "l") for column in shown)
    caption = " ".join([f"{title}.", f"In every row: {', '.join(constant)}." if constant else ""]).strip()
    captions = [
        f"\\caption{{{_latex(caption)}}}\\label{{{label}}}",
        f"\\par {_latex(title)}, continued\\par\\smallskip",
    ]

    head = " & ".join(_latex(column.head) for column in shown) + r" \\"
    cells = zip(*(column.texts() for column in shown), strict=True)
    body = [" & ".join(map(_latex, row)) + r" \\" for row in cells]
    texts = [f"{_latex(note)}\\par" for note in below]
    foot = [r"\par\smallskip\noindent", r"\begin{minipage}{\linewidth}\footnotesize", *texts, r"\end{minipage}"]

    # split a long table across pages; only the last part has the notes
    lines = []
    for start in range(0, max(1, len(body)), LONG):
        lines += [r"\begin{table}", f"\\centering{NARROW}", captions[start > 0], FITTED]
        lines += [f"\\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body[start : start + LONG]]
        lines += [r"\bottomrule", r"\end{tabular}}", *(foot if below and start + LONG >= len(body) else [])]
        lines += [r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex(value: str) -> str:
    quoted = re.sub('"([^"]*)"', r"“\1”", " ".join(value.split()))
    text = "".join(LATEX.get(letter, letter) for letter in quoted)
    return f"{{{text}}}" if text.startswith("[") else text  # \\ would take it for its argument


def table_files(table: Table, ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the files of a table, by what follows its name the content; _paired with rows to compare with the
    reference, _judged if the table judges distances. ranks: the records of `pubsel rank` (`read_measured`)."""
    name, title, known = table.name, table.spec.title, notes(table)
    gains, of_gains = paired.gains(table)
    of_gains = [*ABOUT_GAINS, *of_gains]
    first = [] if gains.empty else [(gains, f"{name}: {GAINS}", of_gains, "_gains")]
    above = [] if gains.empty else [GAINS, gains, of_gains, "All rows"]
    further = [] if table.ranks.empty else [RANKS, table.ranks]
    correlations = [] if table.ranks.empty else [(table.ranks, RANKS, list[str](), "_correlation")]
    files = {
        ".csv": as_csv(table.frame),
        "_correlation.csv": as_csv(table.ranks),
        ".md": markdown(name, _markdown(title), *above, table.frame, known, *further),
        ".tex": latex(name, *first, (table.frame, title, known, ""), *correlations),
    }
    files |= {} if gains.empty else {"_gains.csv": as_csv(gains)}

    # differences to the reference, if the table names one
    if not (frame := paired.paired_differences(table)).empty:
        title = f"{name}: differences to the reference ({paired.reference_name(table.spec.reference)})"
        known, ahead = [*DIFFERENCES, *_selection(table), *paired.paired_summary(table)], paired.exceptions(table)
        page = markdown(name, _markdown(title), frame, known, *([AHEAD, ahead] if ahead else []))
        files |= {"_paired.csv": as_csv(frame), "_paired.md": page}
        files |= {"_paired.tex": latex(name, (frame, title, known, "_paired"))}

    # how well the order of distances predicts that of utilities
    if not (frame := judged.judged(table, ranks)).empty:
        means, about = judged.summary_by_distance(frame), list(ABOUT_JUDGED)
        models = {cell["model"] for cell in table.cells if cell}
        reads = {record["distance"]: record["reads"] for record in ranks if record["model"] in models}
        shown = [measure for measure in frame["measure"].unique() if measure in reads]
        about += [f"{measure} reads of the private data: {reads[measure]}." for measure in shown]
        parts = ["Means over the private sets", means, about, "Each private set", frame]
        files |= {"_judged.csv": as_csv(frame), "_judged_means.csv": as_csv(means)}
        files |= {"_judged.md": markdown(name, f"{name}: {JUDGED}", *parts)}
        files |= {"_judged.tex": latex(name, (means, f"{JUDGED} Means", list(ABOUT_JUDGED), "_judged"))}

    return files


def files_of_attacks(table: Attacked) -> dict[str, str]:
    """Return the files of a table of attacks as `table_files` returns those of others."""
    return {
        ".csv": as_csv(table.frame),
        ".md": markdown(table.name, _markdown(table.title), table.frame, table.notes),
        ".tex": latex(table.name, (table.frame, table.title, table.notes, "")),
    }


def write(name: str, files: dict[str, str], results: Path) -> list[Path]:
    """Write the files of a table to RESULTS/tables, each whole or not at all; return their paths."""
    contents = {results / "tables" / f"{name}{end}": content for end, content in files.items()}
    for path, content in contents.items():
        write_whole(path, content)
    return list(contents)


def _entry(key: str, value: Any, spread: Any, low: Any, high: Any) -> tuple[str, str]:
    # texts first; a number follows with as many digits as its kind has
    if pandas.isna(value):
        return NOTHING.get(key, MISSING), ""
    if isinstance(value, bool) or key == "valid":
        return "weak" if value == "weak" else "valid" if value else "none", ""
    if key == "setting":
        return short_keys(str(value)), ""
    if not isinstance(value, float):
        return str(value), ""

    if key == "epsilon":
        return "∞" if value == float("inf") else f"{value:g}", ""

    if key == "p":
        return (f"{value:.3f}" if value >= 0.001 else "< 0.001"), ""

    digits = 2 if re.search("utility|difference|regret|gain|success", key) else 1 if key == "seconds" else 3
    number = f"{value:{'+' if re.match('difference|gain', key) else ''}.{digits}f}".replace("-", "−")
    if not pandas.isna(spread):
        return number, f"± {spread:.{digits}f}"
    return number, "" if pandas.isna(low) else f"[{low:.{digits}f}, {high:.{digits}f}]".replace("-", "−")


def short_keys(setting: str) -> str:
    """Return "k=10 epochs=5" for "algorithm.k=10 training.epochs=5", unless two keys would become the same."""
    keys = re.findall(r"(?:^| )(?:\w+\.)*(\w+)=", setting)
    if len(set(keys)) < len(keys):
        return setting
    return re.sub(r"(^| )(?:\w+\.)+(\w+)=", r"\1\2=", setting)


def shown_rows(name: str, results: Path) -> pandas.DataFrame:
    """Return the rows of one table, from the records in `results`. UsageError for a table that there is not."""
    known = sorted([*table_names(), *attacked.TABLES])
    if name not in known:
        raise UsageError(f"unknown table {name!r}{nearest(name, known)}: use one of {', '.join(known)}")
    if name in attacked.TABLES:
        return attacked.from_records(name, results).frame
    return intended.intended_table(name, read_records(results), read_ranks(results)).frame


def run(settings: TableConfig) -> str:
    """Write the files of one table, or of all that have a record (`pubsel table`); return what to show. UsageError for
    a table that there is not."""
    results, known = Path(settings.results), sorted([*table_names(), *attacked.TABLES])
    if settings.table not in ["all", *known]:
        near = nearest(settings.table, known)
        raise UsageError(f"unknown table {settings.table!r}{near}: use all, or one of {', '.join(known)}")

    if settings.table in attacked.TABLES:
        attacks = attacked.from_records(settings.table, results)
        parts = [text(attacks.frame, attacks.title), "\n".join(attacks.notes)]
        return _report(parts, write(settings.table, files_of_attacks(attacks), results), attacks.records, "attacks")

    # read once for all tables
    records, ranks, measured = read_records(results), read_ranks(results), read_measured(results)

    if settings.table == "all":
        tables = [intended.intended_table(name, records, ranks) for name in table_names()]
        write_whole(results / "tables" / "README.md", index(tables, records))
        return "\n".join([*_run_all(results, tables, measured), *choices(read_choices(results))])

    # one table: its files, and the same for the screen
    table = intended.intended_table(settings.table, records, ranks)
    paths = write(settings.table, table_files(table, measured), results)
    gains, _ = paired.gains(table)
    parts = [] if gains.empty else [text(gains, GAINS)]
    parts += [text(table.frame, table.spec.title), "\n".join(notes(table))]
    if not table.ranks.empty:
        parts.append(text(table.ranks, RANKS))
    if not (frame := judged.judged(table, measured)).empty:
        parts.append(text(judged.summary_by_distance(frame), f"{JUDGED} Means over the private sets"))
    if table.spec.ranks:
        chosen = [record | {"public": record["chosen"]} for record in read_choices(results)]
        parts.append("\n".join(choices(belonging(table.spec, chosen))))
    return _report(parts, paths, table.records(), "runs")


def _report(parts: list[str], paths: list[Path], records: list[dict[str, Any]], kind: str) -> str:
    if not records:
        folder = paths[0].parent.with_name(kind)
        parts = [*parts, f"No record of this table in {folder} yet: the figures are the paper's alone."]
    written = f"Written: {paths[0]} and {', '.join(path.name for path in paths[1:])}"
    return "\n\n".join(part for part in [*parts, written] if part)


def choices(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each private choice of public data: which, of which, and what it spent. It has no distance to
    show."""
    return [
        f"Chosen privately for {record['private']}, of {', '.join(record['candidates'])}: {record['chosen']} "
        f"(epsilon {record['privacy']['epsilon']:g}, seed {record['settings']['seed']}, no distance is shown)"
        for record in records
    ]


INDEX = """# Tables: command, time and cost

Written by `pubsel table all` from the records. Rows: those with a run of ours, of all that the table has, the paper's
among them. Runs: all that belong to it, also those whose settings were not selected. Seconds a run: the median, of
training alone, by the code of the time; hours: their sum. What has no run has no time.

| table | what | command | rows | runs | seconds a run | hours | hardware |
|---|---|---|---:|---:|---:|---:|---|"""


def index(tables: list[Table], records: list[dict[str, Any]]) -> str:
    """Return Markdown: for each table the command that makes its runs, how many there are, what they took, and on what
    hardware."""
    lines = [INDEX]
    for table in tables:
        target, runs = table.spec.target(table.name), belonging(table.spec, records)
        name = f"[{table.name}]({table.name}.md)" if table.records() else table.name

        command = f"`make {target}`" if target else "none; `pubsel report` has that of each run"
        filled = f"{sum(cell is not None for cell in table.cells)} of {len(table.cells)}"

        cost = ["not run", "", "", ""]
        if seconds := [run["seconds"] for run in runs if "seconds" in run]:
            on = {f"{run.get('hardware')}; {run.get('device')}, threads: {run.get('threads')}" for run in runs}
            middle, hours = statistics.median(seconds), sum(seconds) / 3600
            cost = [str(len(runs)), f"{middle:.{0 if middle >= 10 else 1}f}", f"{hours:.2f}"]
            cost.append("<br>".join(sorted(map(_markdown, on))))

        lines.append("| " + " | ".join([name, _markdown(table.spec.title), command, filled, *cost]) + " |")
    return "\n".join(lines) + "\n"


def _run_all(results: Path, tables: list[Table], ranks: list[dict[str, Any]]) -> list[str]:
    lines, without = [], []
    for table in tables:
        if records := table.records():
            paths = write(table.name, table_files(table, ranks), results)
            filled = sum(cell is not None for cell in table.cells)
            lines.append(f"{paths[0]}: {filled} of {len(table.cells)} rows, {len(records)} runs")
        else:
            without.append(table.name)

    # attacks have tables without the paper's structure
    for attacks in (attacked.from_records(name, results) for name in attacked.TABLES):
        if attacks.records:
            paths = write(attacks.name, files_of_attacks(attacks), results)
            lines.append(f"{paths[0]}: {len(attacks.frame)} rows, {len(attacks.records)} attacks")
        else:
            without.append(attacks.name)
    return [*lines, f"No record yet: {', '.join(without)}"] if without else lines
