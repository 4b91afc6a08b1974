"""`pubsel report`: one HTML file with every table and figure, and the runs behind every number.

The page needs no network and no program but a browser: page.html is the template, page.css and page.js are inlined, the
runs are in it as JSON and are shown on demand. Whatever comes from a record is text there, never markup.
"""

import base64
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pubsel import __version__
from pubsel.messages import at_most
from pubsel.papers import figures, join, judged, typeset
from pubsel.papers.intended import intended_table
from pubsel.papers.join import Table
from pubsel.papers.measured import read_choices, read_measured, read_ranks
from pubsel.papers.report import own
from pubsel.papers.report.linked import LINKED, Runs, shown_of
from pubsel.privacy import composition, ledger
from pubsel.records import guarantee_kind, read_records
from pubsel.settings import outputs
from pubsel.settings.command_line import command
from pubsel.settings.keys import ReportConfig

HERE = Path(__file__).resolve().parent
OURS = ("utility", "spearman")
BESIDE = {"setting": "algorithm", "paper_public": "public"}  # columns that are shown below the value of another
UNDER = {"setting": "", "paper_public": "for the paper's "}
PAPERS = ("gsd", "gep", "pillar", "adamix", "workshop")
LARGEST = 2**20  # bytes of a drawing in results/figures that is taken into the page


def run(settings: ReportConfig) -> str:
    """Write the page; return what to print."""
    results = Path(settings.results)
    to = settings.to or str(results / "report.html")
    # no page replaces what it is made from
    files = [path for name in outputs.OWNED for path in (results / name).rglob("*") if path.suffix != ".html"]
    output = outputs.output(to, files)
    records = read_records(results)
    text = page(
        records,
        read_ranks(results),
        drawings(results / "figures"),
        read_choices(results),
        ledger.ledgers(results, ledger.stating(results)),
        own.class_names_in(results, records),
        settings.results,
        read_measured(results),
    )
    with output.open() as file:
        file.write(text)
    return output.report(f"{to}: {len(records)} records, {len(text.encode()) / 1e6:.1f} MB; open it in a browser")


def page(
    records: list[dict[str, Any]],
    ranks: list[dict[str, Any]] | None = None,
    others: dict[str, str] | None = None,
    choices: list[dict[str, Any]] | None = None,
    released: list[list[ledger.Line]] | None = None,
    classes: dict[str, list[str]] | None = None,
    results: str = "results",
    measured: list[dict[str, Any]] | None = None,
) -> str:
    """Return the page of these records, measured distances and private choices. others: further drawings, name: SVG;
    released: the ledger of each private data set; classes: their names, by the identity of a run on the user's data;
    results: the folder, for commands; measured: records of distances, for the tables that judge them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # the user's own data come first, and have no place in the tables of the papers
    runs, everything = Runs(), records
    privates = own.split_own(records, ranks or [], choices or [], released or [])
    sections = [own.section(private, i, runs, classes or {}, results) for i, private in enumerate(privates, 1)]
    records, ranks, choices = own.without(records), own.without(ranks or []), own.without(choices or [])
    alone = bool(sections) and not (records or ranks or choices)

    names = [] if alone else sorted(join.table_names(), key=_place)
    tables = [intended_table(name, records, ranks) for name in names]
    rest = join.others(records)
    tables += [rest] if rest.records() else []

    # tables with a run of ours come first, then what is left to run
    shown = [_table(table, runs, measured or [], records, released) for table in tables if table.records()]
    missing = [_table(table, runs, [], []) for table in tables if not table.records()]
    drawn = [entry for name in figures.CURVES if (entry := _curve(name, everything, runs))]

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["above"] = at_most
    environment.globals |= {"JUDGED": typeset.JUDGED, "ABOUT_JUDGED": typeset.ABOUT_JUDGED}
    environment.globals |= {"LINKED": LINKED, "BESIDE": BESIDE, "UNDER": UNDER, "OURS": OURS}
    environment.globals |= {"OF_UNITS": ledger.OF_UNITS, "MISSING": typeset.MISSING, "BREAK": Markup("_<wbr>")}

    # an <img> runs no script in a drawing
    encoded = {name: base64.b64encode(svg.encode()).decode() for name, svg in (others or {}).items()}
    images = {name: f"data:image/svg+xml;base64,{text}" for name, text in encoded.items()}
    values = {
        "tables": shown,
        "missing": missing,
        "curves": drawn,
        "others": images,
        "choices": [choice | {"command": command(choice)} for choice in choices],
        "own": sections,
        "alone": alone,
        "facts": _facts(everything, shown),
        "version": __version__,
        "data": Markup(runs.json()),
        "style": Markup(_asset("css", bool(sections))),
        "script": Markup(_asset("js", bool(sections))),
    }
    return environment.get_template("page.html").render(values).strip() + "\n"


def _asset(kind: str, private: bool) -> str:
    """Return the style or the script; private: with that of the sections on the user's own data."""
    return "".join((HERE / f"{name}.{kind}").read_text() for name in (["page", "own"] if private else ["page"]))


def _place(name: str) -> tuple[int, list[str]]:
    """Return a sort key: papers in the order of this project, their tables in theirs, our tables after them."""
    paper = next((i for i, paper in enumerate(PAPERS) if name.startswith(paper)), len(PAPERS))
    ours = 100 * name.endswith("_ours")
    return ours + paper, [part.zfill(4) for part in re.findall(r"\d+|\D+", name)]


def _table(
    table: Table,
    runs: Runs,
    measured: list[dict[str, Any]],
    records: list[dict[str, Any]],
    released: list[list[ledger.Line]] | None = None,
) -> dict[str, Any]:
    from markupsafe import Markup

    # rows without a record of ours have no runs to link to
    cells = [runs.add(f"{table.name}/{i}", [cell]) if cell else None for i, cell in enumerate(table.cells, 1)]
    groups: list[str | None] = [runs.add(f"{table.name}/rank/{i}", group) for i, group in enumerate(table.groups, 1)]

    # how well distances predict utility: the means, not each private set
    rows = judged.judged(table, measured)
    means = rows if rows.empty else judged.summary_by_distance(rows)

    # one drawing per panel, so that the page can place them side by side or in a column
    plots, panels = [], figures.scatter_rows(table).groupby(["private", "model", "label"], sort=False)
    for i, ((private, _, label), panel) in enumerate(panels):
        about = f"Utility against distance on {private}, {label}: the numbers of the table above"
        plots.append(Markup(figures.inline(figures.scatter(panel), f"{table.name}-{i}-", about)))

    # whatever settings the table selects from was compared
    compared = table.records() if table.name == "others" else join.belonging(table.spec, records)
    head, _, rest = table.spec.title.partition(". ")
    return {
        "name": table.name,
        "title": head,
        "lead": rest,
        "target": table.spec.target(table.name),
        "oracle": table.spec.select.get("by") == "test",
        "mixed": len({record.get("commit") for record in table.records()}) > 1,
        "filled": sum(cell is not None for cell in table.cells),
        "table": shown_of(table.frame, cells),
        "ranks": None if table.ranks.empty else shown_of(table.ranks, groups),
        "judged": None if means.empty else shown_of(means, [None] * len(means)),
        "notes": [*typeset.notes(table), *composition.best_of(compared, released or [])],
        "plots": plots,
    }


def _curve(name: str, records: list[dict[str, Any]], runs: Runs) -> dict[str, Any] | None:
    """Return a curve, panel by panel, with its legend and its numbers; None if the records do not allow it."""
    from markupsafe import Markup

    curve = figures.CURVES[name]
    frame, cells = figures.points(curve, records)
    if frame.empty:
        return None

    # all panels share the styles, so that one legend serves them
    styles = figures.line_styles(dict.fromkeys(frame["line"]))
    plots = []
    for i, ((private, _), rows) in enumerate(frame.groupby(["private", "model"], sort=False)):
        drawn = figures.curves(rows, curve.x, curve.line, styles)
        about = f"{curve.title}, on {private}: see The numbers"
        plots.append(Markup(figures.inline(drawn, f"{name}-{i}-", about)))
    legend = figures.legend({figures.line_name(curve.line, line): how for line, how in styles.items()})

    numbers = frame[["private", "model", "line", "x", "utility", "std", "seeds"]].round({"utility": 2})
    numbers["line"] = [figures.line_name(curve.line, line) for line in frame["line"]]
    heads = {"line": figures.axis_name(curve.line), "x": figures.axis_name(curve.x), "std": "utility_std"}
    numbers = numbers.rename(columns=heads)

    keys: list[str | None] = [runs.add(f"{name}/{i + 1}", [cell]) for i, cell in enumerate(cells)]
    return {
        "name": name,
        "title": curve.title,
        "selected": typeset.SELECTED_BY[curve.by],
        "oracle": curve.by == "test",
        "plots": plots,
        "legend": Markup(figures.inline(legend, f"{name}-legend-", "Legend")),
        "table": shown_of(numbers, keys),
    }


def drawings(folder: Path) -> dict[str, str]:
    """Return further SVG in results/figures, by name: those that the page does not draw itself."""
    drawn_here = {*figures.CURVES, *(f"{name}_distance" for name in join.table_names())}
    paths = [path for path in sorted(folder.glob("*.svg")) if path.stem not in drawn_here]
    small = [path for path in paths if path.stat().st_size <= LARGEST]
    return {path.stem: path.read_text(encoding="utf-8") for path in small}


def _facts(records: list[dict[str, Any]], shown: list[dict[str, Any]]) -> dict[str, Any]:
    finished = sorted(record["finished"][:10] for record in records if record.get("finished"))
    return {
        "records": len(records),
        "valid": sum(guarantee_kind(record) == "valid" for record in records),
        "weak": sum(guarantee_kind(record) == "weak" for record in records),
        "tables": len(shown),
        "versions": len(Counter(record.get("commit") for record in records)),
        "first": finished[0] if finished else "",
        "last": finished[-1] if finished else "",
    }
