import re
import shutil
import subprocess

import pytest

from pubsel import records as results
from pubsel.papers import join, measured, typeset
from pubsel.settings import CONF
from tests.synthetic import record, save

HOSTILE = r"50% of_$x^2 & {a}~\b#<script>|*`[1]"


def made(tmp_path, *records):
    return join.make("gsd_table2", results.read_records(save(tmp_path, *records)))


def rows_of(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_notes_say_what_mixes_and_what_holds(tmp_path):
    records = [
        record(0),
        record(1) | {"commit": "b" * 40},
        record(public="mnist") | {"commit": "c" * 40 + "-dirty"},
        record(public="flowers5") | {"commit": None, "privacy": {"valid": False}},
    ]
    notes = "\n".join(typeset.notes(made(tmp_path, *records)))
    for commit in ("a", "bbbbbbb", "ccccccc-dirty", "unknown"):
        assert f"{commit} (1 run)" in notes
    assert "within the seeds of 1 row." in notes
    assert "flowers5 stands in for the paper's flowers102" in notes
    assert "1 rows of ours have no valid privacy guarantee" in notes
    clean = "\n".join(typeset.notes(made(tmp_path / "clean", record(0), record(1))))
    assert "Mixed versions" not in clean
    assert "no valid" not in clean


def test_rows_that_were_tested_on_other_examples_say_so(tmp_path):
    fewer, all_of_them = record(0) | {"test_examples": 8000}, record(public="mnist") | {"test_examples": 10_000}
    line = "fashion_mnist: tested on 8,000 or 10,000 examples"
    assert line in "\n".join(typeset.notes(made(tmp_path, fewer, all_of_them)))
    assert "tested on" not in "\n".join(typeset.notes(made(tmp_path / "same", all_of_them)))


def test_what_selected_the_settings_is_said():
    for name, word in (("adamix_table1", "oracle"), ("pillar_ours", "held-out private")):
        assert word in "\n".join(typeset.notes(join.make(name, [])))


def test_every_letter_of_a_name_survives_markdown_and_latex(tmp_path):
    table = made(tmp_path, record(public=HOSTILE), record(1, public=HOSTILE, label="[x]"))
    rows = rows_of(typeset.table_files(table, [])[".md"].split("###")[0])
    assert len({len(row) for row in rows}) == 1
    column = rows[0].index("Public data")
    assert HOSTILE in {re.sub(r"\\(.)", r"\1", row[column]) for row in rows}
    tex = typeset.table_files(table, [])[".tex"]
    assert "<script>" not in tex
    bare = re.sub(r"\\[\\{}%&_#$]", "", tex)
    assert bare.count("{") == bare.count("}")
    body = bare.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len({line.count("&") for line in body}) == 1
    assert not any("%" in line or "#" in line for line in body)


@pytest.mark.parametrize("name", join.table_names())
def test_every_table_has_the_same_cells_in_every_format(name):
    table = join.make(name, [])
    shown, _ = typeset.columns(table.frame)
    assert len(rows_of(typeset.table_files(table, [])[".md"])) >= len(table.frame) + 2
    tex = typeset.table_files(table, [])[".tex"]
    parts = max(1, -(-len(table.frame) // typeset.LONG))
    bodies = [part.split(r"\bottomrule")[0].strip().splitlines() for part in tex.split(r"\midrule")[1 : parts + 1]]
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == parts + (not table.ranks.empty)
    assert all(len(body) <= typeset.LONG for body in bodies)
    assert sum(map(len, bodies)) == len(table.frame)
    assert {re.sub(r"\\.", "", line).count("&") for body in bodies for line in body} <= {len(shown) - 1}


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no pdflatex")
def test_latex_compiles(tmp_path):
    """With the packages that its first line names, and no others."""
    tables = made(tmp_path, record(public=HOSTILE)), join.make("pillar_table2", [])
    body = "".join(typeset.table_files(table, [])[".tex"] for table in tables)
    head = r"\documentclass{article}\usepackage{booktabs,graphicx}"
    (tmp_path / "page.tex").write_text(f"{head}\\begin{{document}}{body}\\end{{document}}")
    done = subprocess.run(["pdflatex", "-halt-on-error", "page.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert b"Overfull" not in done.stdout


def test_the_index_of_tables_has_what_was_run_and_invents_nothing(tmp_path):
    """Of a table that selects, the runs that were not selected count too."""
    on = {"hardware": "A", "device": "cpu", "threads": 1}
    runs = [record(seed, public="mnist") | on | {"seconds": took} for seed, took in enumerate((100.0, 200.0, 3300.0))]
    runs += [record() | {"model": "mobilenetv2", "label": "mobilenetv2", "seconds": 4.0} | on]
    runs += [runs[-1] | {"settings": runs[-1]["settings"] | {"training": {"epochs": 7}}, "seconds": 6.0}]
    records = results.read_records(save(tmp_path, *runs))
    shown = typeset.index([join.make(name, records) for name in join.table_names()], records)
    rows = {row[0]: row for row in rows_of(shown)}
    assert len(rows) == 2 + len(join.table_names())
    row = "`make gsd-table2`|1 of 15|3|200|1.00|A; cpu, threads: 1"
    assert rows["[gsd_table2](gsd_table2.md)"][2:] == row.split("|")
    assert rows["[pillar_ours](pillar_ours.md)"][3:7] == ["1 of 1", "2", "5.0", "0.00"]
    assert rows["gep_table1"][3:] == ["0 of 36", "not run", "", "", ""]
    kept = results.read_records(CONF.parent / "results")
    ranks = measured.read_ranks(CONF.parent / "results")
    made = typeset.index([join.make(name, kept, ranks) for name in join.table_names()], kept)
    now = (CONF.parent / "results" / "tables" / "README.md").read_text()
    assert now == made, "records have changed: run pubsel table all"
