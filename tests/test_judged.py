"""How well distances predict utility: by hand-made records whose order is known."""

import dataclasses

import numpy as np
import pandas
import pytest
from scipy import stats

from pubsel import records
from pubsel.papers import draw, join, judged, report, typeset
from pubsel.settings.keys import FigureConfig, TableConfig
from tests.synthetic import record

UTILITIES = {"mnist": 0.9, "a": 0.8, "b": 0.7, "c": 0.6, None: 0.75}
ORDERS = {  # distances of each set, in two initialisations
    "gsd": {"mnist": [0.1, 0.1], "a": [0.2, 0.2], "b": [0.3, 0.3], "c": [0.4, 0.4]},
    "mmd": {"mnist": [4, 4], "a": [3, 3], "b": [2, 2], "c": [1, 1]},
    "whitening": {"mnist": [0.1, 0.1], "a": [0.5, 0.5], "b": [0.6, 0.6], "c": [0.7, 0.7], "none": [0.4, 0.4]},
}
SPEC = join.Spec(title="A study", records={"label": ["choosing"]}, judged=[*ORDERS])


def runs():
    made = []
    for public, utility in UTILITIES.items():
        for seed in (0, 1, 2):
            one = record(seed=seed, utility=utility + seed / 1000, public=public, values=None, label="choosing")
            pair = {"public": public, "m": 1 if public is None else 500}
            made.append(one | {"private": "mnist", "settings": {**one["settings"], "pair": pair}})

    # own images in a smaller number are another row, and not one of the candidates
    few = record(utility=0.95, public="mnist", values=None, label="choosing")
    return [*made, few | {"identity": "few", "private": "mnist", "settings": {"pair": {"public": "mnist", "m": 50}}}]


def ranks(**changes):
    shared = {
        "private": "mnist",
        "model": "fmnist_cnn",
        "m": 500,
        "settings": {"seed": 0, "distance": {}},
        "reads": "images",
    }
    shared |= {"seconds_private": 1.0, "seconds_candidate": 0.5, "privacy": "not private"} | changes
    return [shared | {"identity": name, "distance": name, "values": values} for name, values in ORDERS.items()]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(join, "spec", lambda name: SPEC)
    return join.make("study", runs())


def test_what_each_distance_loses(table):
    frame = judged.judged(table, ranks()).set_index("measure")
    assert list(frame.index) == [*ORDERS, judged.ALWAYS_NONE]
    assert list(frame["spearman"][:3]) == [-1, 1, -1]
    assert list(frame["kendall"][:3]) == [-1, 1, -1]
    assert list(frame["nearest"]) == ["mnist", "c", "mnist", "none"]
    assert list(frame["regret"]) == [0, 30, 0, 15]
    assert list(frame["nearest_other"]) == ["a", "c", "none", "none"]
    assert list(frame["regret_other"]) == [0, 20, 5, 5]
    assert list(frame["regret_sets"][:3]) == [0, 20, 0]
    assert frame["regret_sets"].isna().tolist() == [False, False, False, True]
    assert set(frame["best"]) == {"mnist"}
    assert set(frame["best_other"]) == {"a"}
    assert list(frame["seconds"][:3]) == [3, 3, 3.5]
    assert list(frame["pairs"][:3]) == [4, 4, 4]  # none is no set


def test_intervals_hold_what_seeds_and_initialisations_change(table):
    """Seeds change every utility by 0.2 points at most; the nearest set changes with the initialisation."""
    unsure = ranks()
    unsure[0]["values"] = {"mnist": [0.1, 0.1], "a": [0.2, 0.4], "b": [0.3, 0.3], "c": [0.5, 0.5]}
    rows = judged.judged(table, unsure).set_index("measure")
    assert (rows.loc["gsd", "regret_other_low"], rows.loc["gsd", "regret_other_high"]) == pytest.approx(
        (0, 10), abs=0.3
    )
    assert rows.loc["gsd", "spearman_low"] == -1
    assert rows.loc["gsd", "spearman_high"] == pytest.approx(-0.8)
    assert rows.loc["mmd", "regret_low"] == pytest.approx(30, abs=0.3)


def test_kendall_of_many_is_that_of_scipy():
    draw = np.random.RandomState(0)
    x, y = draw.randint(0, 4, (20, 8)), draw.randint(0, 9, (20, 8))
    wanted = [stats.kendalltau(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert judged._kendall(x.astype(float), y.astype(float)) == pytest.approx(wanted)
    wanted = [stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert judged._spearman(x.astype(float), y.astype(float)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "changes",
    [{"m": 300}, {"model": "probe"}, {"private": "digits"}, {"settings": {"seed": 0, "distance": {"epsilon": 1.0}}}],
)
def test_distances_of_something_else_are_left_out(table, changes):
    assert judged.judged(table, ranks(**changes)).empty


def test_a_distance_with_an_epsilon_is_of_the_runs_with_this_one(table):
    frame = judged.judged(table, ranks(settings={"distance": {"epsilon": 2.0}}))
    assert len(frame) == 4
    assert set(frame["epsilon"]) == {2.0}


def test_means_over_private_sets(table):
    frame = judged.judged(table, ranks())
    other = frame.assign(private="digits", regret_other=[10.0, 0, 5, 5])
    means = judged.summary(pandas.concat([frame, other])).set_index("measure")
    assert list(means.index) == [*ORDERS, judged.ALWAYS_NONE]
    assert list(means["regret_other"]) == [5, 10, 5, 5]
    assert list(means["regret_most"]) == [10, 20, 5, 5]
    assert list(means["sets"]) == [2] * 4


def test_files_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "spec", lambda name: SPEC)
    for one in runs():
        records.write_record(tmp_path / "runs" / one["identity"] / "result.json", one)
    text = typeset.run(TableConfig(table="choosing", results=str(tmp_path), debug=False))
    assert "Points lost" not in text  # no distance was measured
    assert not list(tmp_path.rglob("*_judged*"))

    for one in ranks():
        records.write_record(tmp_path / "ranks" / one["identity"] / "result.json", one)
    text = typeset.run(TableConfig(table="choosing", results=str(tmp_path), debug=False))
    assert "Means over the private sets" in text
    written = {path.name for path in (tmp_path / "tables").iterdir()}
    assert {f"choosing_judged{end}" for end in (".csv", "_means.csv", ".md", ".tex")} <= written
    page = (tmp_path / "tables" / "choosing_judged.md").read_text()
    assert "gsd reads of the private data: images." in page
    assert r"\toprule" in (tmp_path / "tables" / "choosing_judged.tex").read_text()

    settings = {field.name: None for field in dataclasses.fields(FigureConfig)}
    settings |= {"figure": "choosing", "results": str(tmp_path), "at_epsilon": 1.0}
    assert "choosing_lost.png" in draw.run(FigureConfig(**settings))
    assert "regret_other" in (tmp_path / "figures" / "choosing_lost.csv").read_text()


def test_records_kept_with_the_code_are_read_unless_measured_again(tmp_path):
    first, second, third = ranks()
    kept = tmp_path / "records" / "ranks"
    for one in (first, second):
        records.write_record(kept / f"{one['identity']}.json", one)
    again = first | {"seconds_private": 9.0}
    for one in (
        again,
        third,
        {
            "identity": "x",
            "chosen": "a",
            "candidates": [],
            "privacy": {},
            **{key: third[key] for key in ("private", "model", "settings")},
        },
    ):
        records.write_record(tmp_path / "ranks" / one["identity"] / "result.json", one)
    assert records.read_measured(tmp_path) == [again, third, second]


def test_the_report_has_the_means_of_a_table_that_judges(monkeypatch):
    monkeypatch.setattr(join, "names", lambda: ["study"])
    monkeypatch.setattr(join, "spec", lambda name: SPEC)
    text = report.page(runs(), measured=ranks())
    assert typeset.JUDGED in text
    assert text.count(f'data-by="{judged.ALWAYS_NONE}"') == 1  # one private set, one epsilon
    assert typeset.JUDGED not in report.page(runs())
