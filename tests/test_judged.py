"""Distances as predictors of utility: by made-up records whose order is known."""

import numpy as np
import pandas
import pytest
from scipy import stats

from pubsel import records
from pubsel.papers import join, judged, measured, report, typeset
from tests.synthetic import record

UTILITIES = {"mnist": 0.9, "a": 0.8, "b": 0.7, "c": 0.6, None: 0.75}
ORDERS = {  # distances of each set, in two initialisations
    "gsd": {"mnist": [0.1, 0.1], "a": [0.2, 0.2], "b": [0.3, 0.3], "c": [0.4, 0.4]},
    "mmd": {"mnist": [4, 4], "a": [3, 3], "b": [2, 2], "c": [1, 1]},
    "whitening": {"mnist": [0.1, 0.1], "a": [0.5, 0.5], "b": [0.6, 0.6], "c": [0.7, 0.7], "none": [0.4, 0.4]},
}


def run(public, utility, m=500, seed=0):
    made = record(seed, utility, None, public, "whitened_head", "choosing")
    pair = {"public": public, "m": 1 if public is None else m}
    return made | {"private": "mnist", "model": "mobilenetv2", "settings": made["settings"] | {"pair": pair}}


def of_choosing(**changes):
    """Runs of the table `choosing`, and what `pubsel rank` measured. Own images in a smaller number are another row,
    and not one of the candidates."""
    runs = [run(public, u + seed / 1000, seed=seed) for public, u in UTILITIES.items() for seed in (0, 1, 2)]
    shared = {"private": "mnist", "model": "mobilenetv2", "m": 500, "settings": {"seed": 0, "distance": {}}}
    shared |= {"seconds_private": 1.0, "seconds_candidate": 0.5, "privacy": "not private", "reads": "images"} | changes
    ranks = [shared | {"identity": name, "distance": name, "values": values} for name, values in ORDERS.items()]
    return [*runs, run("mnist", 0.95, m=50) | {"identity": "few"}], ranks


def frame_of(**changes):
    runs, ranks = of_choosing(**changes)
    return judged.judged(join.make("choosing", runs), ranks)


def test_what_each_distance_loses():
    frame = frame_of().set_index("measure")
    assert list(frame.index) == [*ORDERS, judged.ALWAYS_NONE]
    assert list(frame["spearman"][:3]) == list(frame["kendall"][:3]) == [-1, 1, -1]
    assert list(frame["nearest"]) == ["mnist", "c", "mnist", "none"]
    assert list(frame["regret"]) == [0, 30, 0, 15]
    assert list(frame["nearest_other"]) == ["a", "c", "none", "none"]
    assert list(frame["regret_other"]) == [0, 20, 5, 5]
    assert list(frame["regret_sets"][:3]) == [0, 20, 0]
    assert frame["regret_sets"].isna().tolist() == [False, False, False, True]
    assert (set(frame["best"]), set(frame["best_other"])) == ({"mnist"}, {"a"})
    assert list(frame["seconds"][:3]) == [3, 3, 3.5]
    assert list(frame["pairs"][:3]) == [4, 4, 4]  # none is no set

    other = frame.reset_index().assign(private="digits", regret_other=[10.0, 0, 5, 5])
    means = judged.summary_by_distance(pandas.concat([frame.reset_index(), other])).set_index("measure")
    assert list(means.index) == list(frame.index)
    assert list(means["regret_other"]) == [5, 10, 5, 5]
    assert list(means["regret_most"]) == [10, 20, 5, 5]
    assert list(means["sets"]) == [2] * 4


def test_intervals_hold_what_seeds_and_initialisations_change():
    """Seeds change every utility by 0.2 points at most; the nearest set changes with the initialisation."""
    runs, unsure = of_choosing()
    unsure[0]["values"] = {"mnist": [0.1, 0.1], "a": [0.2, 0.4], "b": [0.3, 0.3], "c": [0.5, 0.5]}
    rows = judged.judged(join.make("choosing", runs), unsure).set_index("measure")
    assert list(rows.loc["gsd", ["regret_other_low", "regret_other_high"]]) == pytest.approx([0, 10], abs=0.3)
    assert list(rows.loc["gsd", ["spearman_low", "spearman_high"]]) == pytest.approx([-1, -0.8])
    assert rows.loc["mmd", "regret_low"] == pytest.approx(30, abs=0.3)


def test_correlations_of_rows_are_those_of_scipy():
    draw = np.random.RandomState(0)
    x, y = draw.randint(0, 4, (20, 8)), draw.randint(0, 9, (20, 8))
    for kind, of_row in (("kendall", stats.kendalltau), ("spearman", stats.spearmanr)):
        wanted = [of_row(a, b).statistic for a, b in zip(x, y, strict=True)]
        assert join.correlation_of_rows(kind, x.astype(float), y.astype(float)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "changes",
    [{"m": 300}, {"model": "probe"}, {"private": "digits"}, {"settings": {"seed": 0, "distance": {"epsilon": 1.0}}}],
)
def test_distances_of_something_else_are_left_out(changes):
    assert frame_of(**changes).empty
    assert len(frame_of(settings={"distance": {"epsilon": 2.0}})) == 4  # that of the runs


def test_records_kept_with_the_code_are_read_unless_measured_again(tmp_path):
    first, second, third = of_choosing()[1]
    for one in (first, second):
        records.write_record(tmp_path / "records" / "ranks" / f"{one['identity']}.json", one)
    again = first | {"seconds_private": 9.0}
    choice = {"identity": "x", "chosen": "a", "candidates": [], "privacy": {}}
    choice |= {key: third[key] for key in ("private", "model", "settings")}
    for one in (again, third, choice):
        records.write_record(tmp_path / "ranks" / one["identity"] / "result.json", one)
    assert measured.read_measured(tmp_path) == [again, third, second]


def test_the_report_has_the_means_of_a_table_that_judges():
    runs, ranks = of_choosing()
    text = report.page(runs, measured=ranks)
    assert typeset.JUDGED in text
    assert text.count(f'data-by="{judged.ALWAYS_NONE}"') == 1  # one private set, one epsilon
    assert typeset.JUDGED not in report.page(runs)
