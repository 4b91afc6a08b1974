"""Generates README.md and pages of docs/ and results/ from the templates next to them (NAME.md.jinja), whose numbers
are looked up (lookup.py), and fills the tables of other pages of docs/: python scripts/page_tables.py

A comment right before a table of a page or template names the CSV file below results, which of its rows to take, which
columns the first cells of a line stand for, and which one the head of the other cells does:

    <!-- table: tables/recipes.csv model=mobilenetv2 label=untuned|tuned: private, algorithm; epsilon -->

Empty first cells are those of the line above. A cell such as `pillar`, tuned has conditions after its comma (MEANT).
The other cells become the mean and the standard deviation of the utility or accuracy; or a median gain, the smallest
and the largest, in how many cells it is not below zero, and in how many it is ahead and behind beyond Holm's
correction. Each line, except what is in bold, has to have a row of the CSV, and each row that the comment takes a line;
lines stay in their order, and none is added.
"""

import csv
import re
import sys
import textwrap
from pathlib import Path

from pubsel.files import write_whole
from pubsel.messages import UserError

sys.path.insert(0, str(Path(__file__).parent))
import lookup

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = sorted(path for folder in (ROOT, ROOT / "docs", ROOT / "results") for path in folder.glob("*.md.jinja"))
PAGES = sorted({*(ROOT / "docs").glob("*.md")} - {template.with_suffix("") for template in TEMPLATES})
TABLE = re.compile(r"<!-- table: (\S+\.csv)([^:]*): ([^;]+); (\S+) -->\n(\|.*\n)\|[-|]+\n((?:\|.*\n)+)")
WIDTH = 120
BLOCK = re.compile(
    r"^(?! {4}| *[|#<!])( *(?:[-*] |\d+\. )?)(\S.*(?:\n(?! *(?:[-*+] |\d+\. |[|#<!]|```|$)).+)*)", re.MULTILINE
)  # a paragraph or list item: its mark, its words
MEANT = {
    "no public data": {"public": ""},
    "tuned": {"label": "tuned"},
    "unlabelled": {"label": "unlabelled"},
    "epsilon 0": {"epsilon": "0"},
}
WITHOUT = {"inf": ""}  # an epsilon that the CSV leaves empty
MEANS, DEVIATIONS = ("utility", "accuracy"), ("utility_std", "deviation")  # columns of the CSV, which has one of each

Row = dict[str, str]


def cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table, without spaces around them."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def wanted(names: list[str], values: list[str]) -> Row:
    """Return what the first cells of a line ask of a row of the CSV: column and value."""
    asked: Row = {}
    for name, value in zip(names, values, strict=True):
        value, *conditions = value.replace("`", "").split(", ")
        asked[name] = value
        for condition in conditions:
            if condition not in MEANT:
                raise UserError(f"'{condition}' after a comma means nothing: name it in MEANT of {Path(__file__).name}")
            asked |= MEANT[condition]
    return asked


def chosen(rows: list[Row], asked: Row) -> Row | None:
    """Return the one row that has what is asked for, or None. Of several, that with the private set's own public
    images, and untuned; UserError if that leaves several."""
    fitting = [row for row in rows if all(row[name] == value for name, value in asked.items())]
    if len(fitting) > 1 and "public" not in asked:
        fitting = [row for row in fitting if row["public"] == row["private"]] or fitting
    if len(fitting) > 1 and "label" not in asked:
        fitting = [row for row in fitting if row["label"] == "untuned"] or fitting
    if len(fitting) > 1:
        raise UserError(f"{len(fitting)} rows of the CSV are {asked}: name more of their columns in the comment")
    return fitting[0] if fitting else None


def shown(row: Row | None) -> str:
    """Return the utility as a page has it: 63.9 ± 1.1, without a deviation if there is one seed."""
    if row is None:
        return ""
    if "gain" in row:
        median, least, most = (f"{float(row[name]):+.1f}" for name in ("gain", "gain_least", "gain_most"))
        return f"{median} ({least} to {most}); {row['first']} of {row['cells']}; {row['ahead']} and {row['behind']}"
    mean, deviation = (row[next(name for name in names if name in row)] for names in (MEANS, DEVIATIONS))
    return f"{float(mean):.1f}" + (f" ± {float(deviation):.1f}" if deviation else "")


def filled(text: str) -> str:
    """Return the text of a page with the marked tables as their CSV files have them. UserError if a line of a table has
    no row in its file, or a row no line."""
    return TABLE.sub(table, text)


def table(match: re.Match[str]) -> str:
    """Return one marked table, comment and all."""
    file, where, first, column, head, body = match.groups()
    names = first.split(", ")
    taken = [word.split("=") for word in where.split()]
    with (ROOT / "results" / file).open() as source:
        rows = [row for row in csv.DictReader(source) if all(row[name] in values.split("|") for name, values in taken)]

    lines, above, missing = [], [""] * len(names), rows
    for line in body.splitlines():
        given = cells(line)
        if "**" in line:
            lines.append(line)
            continue
        above = [now or before for now, before in zip(given, above, strict=False)]
        asked = wanted(names, above)
        found = [chosen(rows, {column: WITHOUT.get(value, value)} | asked) for value in cells(head)[len(names) :]]
        if not any(found):
            raise UserError(f"{file}: no row is {asked}: mend the line '{line}' or make the table anew")
        missing = [row for row in missing if not any(row is one for one in found)]
        lines.append("| " + " | ".join([*given[: len(names)], *map(shown, found)]) + " |")
    if missing:
        raise UserError(f"{file}: no line is for {', '.join(missing[0][name] for name in names)}: add one")
    end = match.group(0).index(body)
    return match.group(0)[:end] + "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    """Return the text with its paragraphs and list items broken anew; tables, headings, comments and code stay."""
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else BLOCK.sub(broken, part) for i, part in enumerate(parts)).rstrip("\n") + "\n"


def broken(block: re.Match[str]) -> str:
    """Return a paragraph or list item in lines of at most WIDTH, as it is if one of them would begin a list."""
    mark, words = block.groups()
    whole = re.sub(r"`[^`]*`", lambda code: "\0".join(code.group().split()), words)  # no break in code
    lines = textwrap.wrap(
        " ".join(whole.split()),
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    lists = any(re.match(r"\s*([-*+#]+|\d+\.)( |$)", line) for line in lines[1:])
    return block.group() if lists else "\n".join(lines).replace("\0", " ")


def generated(template: Path) -> str:
    """Return the page of a template."""
    name = str(template.relative_to(ROOT))
    try:
        text = filled(wrapped(lookup.rendered(template.read_text(), name)))
    except UserError as error:
        raise UserError(f"{name}: {error}" if name not in str(error) else str(error)) from None
    return f"<!-- Generated from {template.name} by scripts/page_tables.py. -->\n{text}"


def main() -> None:
    """Fill the tables of all pages, generate those of templates, and name the pages that changed."""
    made = {page: filled(page.read_text()) for page in PAGES}
    made |= {template.with_suffix(""): generated(template) for template in TEMPLATES}
    for page, text in made.items():
        if not page.exists() or page.read_text() != text:
            write_whole(page, text)
            print(f"{page.relative_to(ROOT)}: written")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
