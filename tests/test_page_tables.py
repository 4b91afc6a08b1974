"""Tables of pages against the tables of results."""

import sys
from pathlib import Path

import pytest

from pubsel.messages import UserError
from pubsel.settings import CONF

sys.path.insert(0, str(CONF.parent / "scripts"))
import page_tables

COMMENT = "<!-- table: tables/race.csv model=features: private, algorithm; epsilon -->\n"
HEAD = "| data | method | 0.1 | inf |\n|---|---|---|---|\n"
CSV = """private,public,model,algorithm,epsilon,label,utility,utility_std
a,a,features,head,0.1,untuned,63.92,1.14
a,a,features,head,,untuned,70.0,
a,,features,head,0.1,untuned,50.0,1
a,a,features,head,0.1,tuned,64.0,2
a,a,other,head,0.1,untuned,1.0,
b,,features,dp_sgd,,untuned,40.0,0.5
"""
LINES = [
    "| a | `head` | 63.9 ± 1.1 | 70.0 |",
    "|  | `head`, no public data | 50.0 ± 1.0 |  |",
    "|  | `head`, tuned | 64.0 ± 2.0 |  |",
    "| b | dp_sgd |  | 40.0 ± 0.5 |",
]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "results" / "tables").mkdir(parents=True)
    (tmp_path / "results" / "tables" / "race.csv").write_text(CSV)
    monkeypatch.setattr(page_tables, "ROOT", tmp_path)
    return tmp_path


def page(lines: list[str]) -> str:
    body = "\n".join(lines)
    return f"Before.\n\n{COMMENT}{HEAD}{body}\n\nAfter.\n"


@pytest.mark.parametrize("path", page_tables.PAGES, ids=lambda path: path.name)
def test_each_marked_table_is_that_of_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "ROOT", CONF.parent)
    text = path.read_text()
    assert page_tables.filled(text) == text, "run: python scripts/page_tables.py"


def test_all_marked_tables_are_read() -> None:
    pages = page_tables.PAGES + [template.with_suffix("") for template in page_tables.TEMPLATES]
    texts = [path.read_text() for path in pages]
    marked = sum(text.count("<!-- table: ") for text in texts)
    assert marked == sum(len(page_tables.TABLE.findall(text)) for text in texts) >= 5


def test_old_numbers_are_replaced_and_the_rest_stays() -> None:
    old = [line.replace("63.9", "99.9").replace("50.0 ± 1.0", "") for line in LINES]
    assert page_tables.filled(page(old)) == page(LINES) == page_tables.filled(page(LINES))


def test_a_csv_may_call_its_columns_accuracy_and_deviation(results: Path) -> None:
    (results / "results" / "tables" / "race.csv").write_text(CSV.replace("utility,utility_std", "accuracy,deviation"))
    assert page_tables.filled(page(LINES).replace("63.9 ± 1.1", "1.0")) == page(LINES)


def test_rows_of_either_value_are_taken() -> None:
    comment = COMMENT.replace("model=features", "label=untuned|tuned model=features")
    text = page(LINES).replace(COMMENT, comment)
    assert page_tables.filled(text) == text
    with pytest.raises(UserError, match=r"no row is .*tuned"):
        page_tables.filled(text.replace("untuned|tuned", "untuned|unlabelled"))


def test_a_line_in_bold_stays() -> None:
    lines = [*LINES, "| **difference** |  | 1.0 | 2.0 |"]
    assert page_tables.filled(page(lines)) == page(lines)


def test_a_line_without_a_row_and_a_row_without_a_line_are_refused() -> None:
    with pytest.raises(UserError, match=r"tables/race.csv: no row is .*'gep'.* mend the line"):
        page_tables.filled(page([*LINES, "|  | gep | 1.0 |  |"]))
    with pytest.raises(UserError, match=r"tables/race.csv: no line is for b, dp_sgd: add one"):
        page_tables.filled(page(LINES[:-1]))


def test_a_line_that_fits_several_rows_is_refused(results: Path) -> None:
    both = CSV.replace("dp_sgd,,untuned", "dp_sgd,,first") + "b,,features,dp_sgd,,second,1.0,\n"
    (results / "results" / "tables" / "race.csv").write_text(both)
    with pytest.raises(UserError, match=r"2 rows of the CSV are .*: name more of their columns"):
        page_tables.filled(page(LINES))
