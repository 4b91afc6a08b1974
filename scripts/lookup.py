"""Numbers of pages, looked up in results/: what a page may write between {{ and }}.

    {{ number("recipes", "private=flowers5 algorithm=gep epsilon=1 label=untuned", "utility", 1) }}

The first word is a table of results/tables, a CSV file below results/ (figures/adamix.csv), or a folder of JSON records
(records/audits), whose keys are joined by dots. The second names the row: words such as key=value, key=value|value,
key^=beginning, key!=value, key>0 and key<0. Blanks and line ends of a value are written as commas, an empty value as
NONE. `number` rejects what matches no row or several; so do `spread` (mean ± deviation), `interval` (value [low, high])
and `verdict`. `apart` subtracts the second of two rows, key=first|second, or the row of its word `minus`, from the
first. `span` writes the smallest and the largest of the rows, `mean` their mean, `count` how many there are.
`peers()` is the table of benchmark.csv against other libraries, `rivals()` that of tables_race.csv against its rivals.
"""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from pubsel.messages import UserError

sys.path.insert(0, str(Path(__file__).parent))
import verdict

ROOT = Path(__file__).resolve().parent.parent
CONDITION = re.compile(r"([^\s=!<>^]+)(!=|\^=|=|<|>)(\S+)")
DEVIATIONS = ("{}_std", "std", "deviation")  # columns of the deviation of a column

Row = dict[str, str]


class Numbers:
    """The results, as one page reads them."""

    def __init__(self, page: str):
        self.page = page
        self._read: dict[str, list[Row]] = {}

    def rows(self, file: str, where: str) -> list[Row]:
        """Return the rows that meet all conditions, in the order of the first condition with several values."""
        conditions = CONDITION.findall(where)
        if len(conditions) != len(where.split()):
            self._fail(file, f"'{where}' is not a list of conditions such as key=value")
        chosen = self._rows_of(file)
        for key, sign, value in conditions:
            if chosen and key not in chosen[0]:
                self._fail(file, f"there is no column {key}; there are {', '.join(chosen[0])}")
            chosen = [row for row in chosen if _meets(row[key], sign, value)]
        order = next(((key, value.split("|")) for key, sign, value in conditions if sign == "=" and "|" in value), None)
        return sorted(chosen, key=lambda row: order[1].index(_word(row[order[0]]))) if order else chosen

    def row(self, file: str, where: str) -> Row:
        """Return the only row that meets all conditions."""
        rows = self.rows(file, where)
        if len(rows) != 1:
            self._fail(file, f"{len(rows) or 'no'} row{'s are' if len(rows) > 1 else ' is'} {where}")
        return rows[0]

    def value(self, file: str, row: Row, column: str) -> float:
        """Return a cell as a number."""
        try:
            return float(row[column])
        except (KeyError, ValueError):
            self._fail(file, f"no number is in column {column} of the row {' '.join(filter(None, row.values()))[:90]}")

    def number(self, file: str, where: str, column: str = "utility", digits: int = 1) -> str:
        """Return the number of a row, rounded."""
        return _rounded(self.value(file, self.row(file, where), column), digits)

    def spread(self, file: str, where: str, column: str = "utility", digits: int = 1) -> str:
        """Return mean ± deviation, without the deviation if there is none."""
        row = self.row(file, where)
        mean = _rounded(self.value(file, row, column), digits)
        deviation = next((row[name.format(column)] for name in DEVIATIONS if name.format(column) in row), "")
        return mean + (f" ± {_rounded(float(deviation), digits)}" if deviation else "")

    def interval(self, file: str, where: str, column: str = "difference", digits: int = 1) -> str:
        """Return value [low, high]."""
        row = self.row(file, where)
        low, high = (_rounded(self.value(file, row, f"{column}_{end}"), digits) for end in ("low", "high"))
        return f"{_rounded(self.value(file, row, column), digits)} [{low}, {high}]"

    def verdict(self, file: str, where: str, column: str = "difference") -> str:
        """Return `ahead`, `behind` or `level`: on which side of zero the interval is."""
        row = self.row(file, where)
        low, high = (self.value(file, row, f"{column}_{end}") for end in ("low", "high"))
        return "ahead" if low > 0 else "behind" if high < 0 else "level"

    def apart(self, file: str, where: str, column: str = "utility", digits: int = 1, minus: str = "") -> str:
        """Return the number of the first row minus that of the second, or of the row `minus`."""
        rows = [self.row(file, where), self.row(file, minus)] if minus else self.rows(file, where)
        if len(rows) != 2:
            self._fail(file, f"{len(rows)} rows, not two, are {where}")
        first, second = (self.value(file, row, column) for row in rows)
        return _rounded(first - second, digits)

    def span(self, file: str, where: str, column: str = "utility", digits: int = 1) -> str:
        """Return the smallest and the largest of several rows: `0.8 to 7.3`."""
        values = self._values(file, where, column)
        return f"{_rounded(min(values), digits)} to {_rounded(max(values), digits)}"

    def mean(self, file: str, where: str, column: str = "utility", digits: int = 1) -> str:
        """Return the mean of several rows."""
        values = self._values(file, where, column)
        return _rounded(sum(values) / len(values), digits)

    def count(self, file: str, where: str) -> int:
        """Return how many rows there are."""
        return len(self.rows(file, where))

    def _values(self, file: str, where: str, column: str) -> list[float]:
        rows = self.rows(file, where)
        if len(rows) < 2:
            self._fail(file, f"{len(rows)} rows, not several, are {where}")
        return [self.value(file, row, column) for row in rows]

    def _rows_of(self, file: str) -> list[Row]:
        if file not in self._read:
            self._read[file] = _read(ROOT / "results", file)
            if not self._read[file]:
                self._fail(file, "there is no such table, CSV file or folder of records below results/")
        return self._read[file]

    def _fail(self, file: str, words: str) -> NoReturn:
        raise UserError(f"{self.page}: {file}: {words}: mend the page, or make the table anew")


def rendered(text: str, page: str) -> str:
    """Return the text of a page with its numbers. UserError if one is not there."""
    functions = ("number", "spread", "interval", "verdict", "apart", "span", "mean", "count")
    numbers = Numbers(page)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.globals |= {name: getattr(numbers, name) for name in functions}
    environment.globals["peers"] = lambda: verdict.table(verdict.verdicts(verdict.read(ROOT / "results/benchmark.csv")))
    environment.globals["rivals"] = _rivals
    try:
        return environment.from_string(text).render()
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{page}, line {error.lineno}: {error.message}: mend the page") from None
    except jinja2.UndefinedError as error:
        raise UserError(f"{page}: {error.message}: mend the page") from None


def _rivals() -> str:
    from tables_race import differences  # late: it imports torch, which other pages do not need

    return differences(ROOT / "results/tables_race.csv")


def _read(results: Path, file: str) -> list[Row]:
    path = results / (file if "/" in file or file.endswith(".csv") else f"tables/{file}.csv")
    if path.is_dir():
        return [dict(_flat(json.loads(one.read_text()))) for one in sorted(path.glob("*.json"))]
    if not path.is_file():
        return []
    with path.open(newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _flat(record: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    pairs = []
    for key, value in record.items():
        inside = isinstance(value, dict)
        pairs += _flat(value, f"{before}{key}.") if inside else [(before + key, "" if value is None else str(value))]
    return pairs


def _meets(cell: str, sign: str, value: str) -> bool:
    if sign in "<>":
        return bool(cell) and (float(cell) < float(value) if sign == "<" else float(cell) > float(value))
    if sign == "^=":
        return _word(cell).startswith(value)
    return (_word(cell) in value.split("|")) == (sign == "=")


def _word(cell: str) -> str:
    return re.sub(r"\s+", ",", cell) or "NONE"


def _rounded(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # plus zero: no -0.0
