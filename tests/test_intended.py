"""A run with other settings than a paper's is never shown as the paper's."""

import json
import math
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from hydra_plugins import pubsel_launchers
from pubsel import records as results
from pubsel.papers import intended, join, make, typeset
from pubsel.settings import CONF
from pubsel.settings.keys import TableConfig
from tests.synthetic import record, save
from tests.test_make import shown

CHECKOUT = Path(__file__).parent.parent
QUICK = ("gsd_table2", "gep_table1", "gsd_table11a")
OTHERS = [name for name in join.table_names() if (spec := join.spec(name)).paper and spec.runs and name not in QUICK]
TOY = {"algorithm__k": 250}


def intended_runs(name):
    """The first and the last run of each sweep of a table, as its record is."""
    pubsel_launchers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composer = make.Composer("run")
        for step in make.steps_of(name):
            cells = composer.cells(step.words) if step.command == "run" else []
            for words in cells[:: max(1, len(cells) - 1)]:
                yield json.loads(json.dumps(composer.cell(words).settings, default=str))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_what_make_runs_for_a_table_is_the_paper_s(name):
    """And with another number of steps it is not."""
    runs = [shown(settings) | {"identity": f"{i}"} for i, settings in enumerate(intended_runs(name))]
    assert intended.with_own_label(name, runs) == runs
    belong = {run["identity"] for run in join.belonging(join.spec(name), runs)}  # a table may make runs of others
    papers = [run for run in runs if run["label"] == "paper" and run["identity"] in belong]
    short = [
        run | {"settings": run["settings"] | {"training": run["settings"]["training"] | {"steps": 1}}} for run in papers
    ]
    of = [(run["label"], run["differ"]) for run in intended.with_own_label(name, short)]
    assert of == [("own", ["training.steps"])] * len(papers)


def test_no_record_that_is_kept_with_the_code_is_another():
    kept = results.read_records(CHECKOUT / "results")
    for name in ("gsd_table2", "gep_table1"):
        assert intended.with_own_label(name, kept) == kept


def test_seeds_public_sets_and_epsilon_may_be_any():
    runs = [record(7, public="tiny_imagenet"), record(label="tuned", **TOY), record() | {"epsilon": 1.0}]
    assert intended.with_own_label("gsd_table2", runs) == runs
    one = record(**TOY)
    one["settings"]["pair"]["m"] = 100
    (labelled,) = intended.with_own_label("gsd_table2", [one])
    assert (labelled["label"], labelled["differ"]) == ("own", ["algorithm.k", "pair.m"])


def test_a_default_that_a_record_leaves_out_is_compared_too():
    held_out = {"pair.validation": 0.1, "training.momentum": 0.9}  # the second has no default
    assert intended.keys_apart({}, held_out, set()) == ["pair.validation"]
    assert intended.keys_apart({"pair.validation": 0.1}, held_out, {"pair.m"}) == []


def test_a_table_shows_it_apart_and_takes_no_difference(tmp_path):
    save(tmp_path, *(record(seed, 0.5, (0.1, 0.2), **TOY) for seed in (0, 1)))
    text = typeset.run(TableConfig(table="gsd_table2", results=str(tmp_path), debug=False))
    assert "own: a run whose settings, in the column Setting, differ from the paper's: no difference is taken." in text

    table = intended.intended_table("gsd_table2", results.read_records(tmp_path))
    rows = table.frame[(table.frame["private"] == "fashion_mnist") & (table.frame["public"] == "fashion_mnist")]
    paper, own = (rows[rows["label"] == label].iloc[0] for label in ("paper", "own"))
    assert (paper["paper_utility"], math.isnan(paper["utility"])) == (85.25, True)
    assert (own["utility"], own["seeds"], own["setting"]) == (50, 2, "algorithm.k=250")
    assert math.isnan(own["paper_utility"])
    assert math.isnan(own["difference"])
    assert set(table.ranks["label"]) == {"paper"}
    assert join.table_cells("gsd_table2", intended.with_own_label("gsd_table2", results.read_records(tmp_path))) == []


def test_a_table_of_the_paper_s_runs_alone_shows_it_too():
    """pillar_table2 takes the label `paper` alone."""
    spec = join.Spec(title="", records={"label": ["paper"]})
    assert len(join.belonging(spec, [record(), record(label="own"), record(label="tuned")])) == 2
