"""Numbers of pages, looked up in the files of results."""

import re
import sys
from pathlib import Path

import pytest

from pubsel.messages import UserError
from pubsel.settings import CONF

sys.path.insert(0, str(CONF.parent / "scripts"))
import lookup
import page_tables

ROOT = CONF.parent
RACE = """# a comment
private,public,epsilon,label,utility,utility_std,gain,gain_low,gain_high
a,,0.1,two words,63.949,1.14,2.5,0.5,4.5
a,a,0.1,plain,-0.04,,-3,-4,-2
b,,0.1,plain,40.25,,1,-1,3
"""


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    (folder / "tables").mkdir(parents=True)
    (folder / "records" / "audits").mkdir(parents=True)
    (folder / "tables" / "race.csv").write_text(RACE)
    (folder / "speed.csv").write_text("what,seconds\nstart,2\nend,1.5\n")
    (folder / "records" / "audits" / "one.json").write_text(
        '{"name": "x", "plan": {"steps": 100, "unit": null}, "refuted": false}'
    )
    monkeypatch.setattr(lookup, "ROOT", tmp_path)
    return folder


def shown(expression: str) -> str:
    return lookup.rendered("{{ " + expression + " }}", "page.md")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ('number("race", "private=b")', "40.2"),
        ('number("race", "private=a public=NONE")', "63.9"),
        ('number("race", "label=two,words", "utility", 2)', "63.95"),
        ('number("race", "label=two,words", digits=0)', "64"),
        ('number("race", "private=a public!=NONE")', "0.0"),  # no -0.0
        ('number("race", "utility>50")', "63.9"),
        ('number("race", "utility<0", digits=2)', "-0.04"),
        ('number("speed.csv", "what=start", "seconds", 0)', "2"),
        ('number("speed.csv", "what^=st", "seconds", 0)', "2"),
        ('number("records/audits", "name=x refuted=False", "plan.steps", 0)', "100"),
        ('number("records/audits", "plan.unit=NONE", "plan.steps", 0)', "100"),
        ('spread("race", "private=a public=NONE")', "63.9 ± 1.1"),
        ('spread("race", "private=b")', "40.2"),
        ('interval("race", "private=b", "gain")', "1.0 [-1.0, 3.0]"),
        ('verdict("race", "private=b", "gain")', "level"),
        ('verdict("race", "private=a public=NONE", "gain")', "ahead"),
        ('verdict("race", "private=a public=a", "gain")', "behind"),
        ('apart("race", "private=b|a public=NONE")', "-23.7"),
        ('apart("race", "private=a|b public=NONE")', "23.7"),
        ('apart("race", "private=b", minus="private=a public=a")', "40.3"),
        ('span("speed.csv", "seconds>0", "seconds")', "1.5 to 2.0"),
        ('mean("speed.csv", "seconds>0", "seconds", 2)', "1.75"),
        ('count("race", "gain_low>0")', "1"),
    ],
)
def test_a_number_is_that_of_its_row_rounded(expression: str, text: str) -> None:
    assert shown(expression) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('number("race", "private=c")', "page.md: race: no row is private=c: "),
        ('number("race", "private=a")', "page.md: race: 2 rows are private=a: "),
        ('number("race", "model=a")', "page.md: race: there is no column model; there are private, public"),
        (
            'number("race", "private=b", "utility_std")',
            "page.md: race: no number is in column utility_std of the row b",
        ),
        ('number("race", "private=b", "auc")', "page.md: race: no number is in column auc"),
        ('number("race", "b")', "page.md: race: 'b' is not a list of conditions"),
        ('number("racing", "private=b")', "page.md: racing: there is no such table"),
        ('apart("race", "private=a|b")', "page.md: race: 3 rows, not two, are private"),
        ('span("race", "private=b")', "page.md: race: 1 rows, not several, are private=b"),
        ('nothing("race")', "page.md: .*nothing.* is undefined"),
        ('number("race"', "page.md, line 1: "),
    ],
)
def test_what_is_not_one_number_is_refused_with_page_file_and_row(expression: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shown(expression)


def test_a_changed_table_changes_the_page(results: Path) -> None:
    before = shown('number("race", "private=b")')
    (results / "tables" / "race.csv").write_text(RACE.replace("40.25", "41.25"))
    assert (before, shown('number("race", "private=b")')) == ("40.2", "41.2")


# Pages


def test_a_template_is_filled_and_its_long_lines_broken(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "ROOT", results.parent)
    words = "word " * 40
    table = "<!-- table: speed.csv: what; what -->"
    text = "- {{ number('race', 'private=b') }} " + words + "\n\n```sh\n" + words + "\n```\n\n" + table + "\n"
    (results / "page.md.jinja").write_text(text)
    lines = page_tables.generated(results / "page.md.jinja").splitlines()
    assert lines[0] == "<!-- Generated from page.md.jinja by scripts/page_tables.py. -->"
    assert lines[1].startswith("- 40.2 word")
    assert lines[2].startswith("  word")
    assert len(lines[1]) <= page_tables.WIDTH
    assert words.strip() in [line.strip() for line in lines[4:]]
    (results / "page.md.jinja").write_text("{{ number('race', 'private=c') }}")
    with pytest.raises(UserError, match=r"results/page.md.jinja: race: no row is private=c"):
        page_tables.generated(results / "page.md.jinja")


def test_no_broken_line_begins_a_list() -> None:
    line = "word " * 23 + "as of 1. More"
    assert page_tables.wrapped(line) == line + "\n"
    assert page_tables.wrapped(line.replace("1.", "one")) == line.replace(" 1.", "\none") + "\n"


def test_lines_of_a_paragraph_or_list_item_are_joined_first() -> None:
    text = "one\ntwo\n\n- three\n  four\n- `a b` five\n\n| a\n\n```sh\nc\nd\n```\n\n<!-- e\nf -->\n"
    joined = text.replace("one\n", "one ", 1).replace("three\n ", "three")
    assert page_tables.wrapped(text) == joined
    assert "\n`a b c`\n" in page_tables.wrapped("word " * 23 + "\n`a b c`\n\nmore")


@pytest.mark.parametrize("template", page_tables.TEMPLATES, ids=lambda path: path.name)
def test_each_generated_page_is_that_of_its_template(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ROOT", ROOT)
    page = template.with_suffix("").read_text()
    assert page == page_tables.generated(template), "change the template, then run: python scripts/page_tables.py"


def test_every_page_of_results_has_a_template() -> None:
    pages_of_results = {path.with_suffix(".md.jinja") for path in (ROOT / "results").glob("*.md")}
    assert pages_of_results <= set(page_tables.TEMPLATES)


@pytest.mark.parametrize("page", page_tables.PAGES, ids=lambda path: path.name)
def test_a_page_without_a_template_looks_nothing_up(page: Path) -> None:
    text = page.read_text()
    assert "{{" not in text
    assert "<!-- claim" not in text


def test_pages_are_as_short_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ROOT", ROOT)
    facts = lookup.rendered((ROOT / "docs" / "results.md").read_text(), "results.md")
    assert re.findall(r"^(\d+)\. ", facts, re.MULTILINE) == [str(i) for i in range(1, 11)]
    assert len(facts.split()) <= 600
    assert len((ROOT / "docs" / "method.md").read_text().split()) <= 1500
    index = (ROOT / "results" / "README.md").read_text()
    assert len(index.split()) <= 2500
    entries = re.split(r"^- |^#", index.split("## Tables of the papers")[1], flags=re.MULTILINE)
    assert max(len(entry.split()) for entry in entries) <= 100
