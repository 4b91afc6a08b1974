"""Rows of a table next to its reference: differences by seed, who is first, and accuracy against time."""

import math
from dataclasses import replace

import pandas
import pytest

from pubsel import records as results
from pubsel.messages import UserError
from pubsel.papers import figures, join, paired, typeset
from pubsel.settings import CONF
from tests.synthetic import record

HEAD = "whitened_head"


def run(algorithm=HEAD, seed=0, utility=0.8, public="own", **more):
    """A synthetic record of the table `recipes`; more: keys of the record, and rate, that of learning."""
    about = {"private": "flowers5", "model": "mobilenetv2", "epsilon": 1.0, "label": "untuned", "seconds": 1.0} | more
    public = about["private"] if public == "own" else public
    rate = about.pop("rate", 1.0)
    shown = record(seed, utility, None, public, algorithm, about["label"]) | about
    shown["settings"] |= {"training": {"learning_rate": rate}, "model": {"name": about["model"]}}
    shown["identity"] += f"-{about['private']}-{about['model']}-{about['epsilon']}-{rate}"
    return shown


def runs(algorithm, utilities, **more):
    """A record for each seed, in percent."""
    return [run(algorithm, seed, utility / 100, **more) for seed, utility in utilities.items()]


def table(*records):
    return join.make("recipes", list(records))


REFERENCE = runs(HEAD, {0: 80, 1: 82, 2: 84})


# Differences


def test_differences_and_their_interval_by_hand():
    """Differences of -1, -2 and +1 points: mean -2/3, standard deviation sqrt(7/3), t of 2 degrees of freedom 4.302653;
    a seed that only one of the two has does not count."""
    frame = paired.paired_differences(table(*REFERENCE, *runs("pillar", {0: 79, 1: 80, 2: 85, 7: 10})))
    (row,) = frame.to_dict("records")
    margin = 4.302653 * math.sqrt(7 / 3 / 3)
    assert (row["algorithm"], row["public"], row["label"], row["epsilon"]) == ("pillar", "flowers5", "untuned", 1)
    assert row["common_seeds"] == 3
    assert row["difference"] == pytest.approx(-2 / 3, abs=0.005)
    assert row["difference_low"] == pytest.approx(-2 / 3 - margin, abs=0.005)
    assert row["difference_high"] == pytest.approx(-2 / 3 + margin, abs=0.005)


def test_pairs_are_of_one_seed_whatever_the_order_of_the_records():
    """A spread of seeds that both rows share is no spread of their difference."""
    far = runs(HEAD, {0: 50, 1: 70, 2: 90})
    near = runs("pillar", {2: 91, 0: 51, 1: 71})
    (row,) = paired.paired_differences(table(*reversed(far), *near)).to_dict("records")
    assert [row[key] for key in ("difference", "difference_low", "difference_high")] == [1, 1, 1]


def test_without_a_common_seed_there_is_no_difference_and_with_one_no_interval():
    rows = paired.paired_differences(
        table(*REFERENCE, *runs("pillar", {3: 79, 4: 80}), *runs("dp_raft", {2: 80, 5: 1}))
    )
    by_name = {row["algorithm"]: row for row in rows.to_dict("records")}
    assert by_name["pillar"]["common_seeds"] == 0
    assert all(math.isnan(by_name["pillar"][key]) for key in ("difference", "difference_low", "difference_high"))
    assert (by_name["dp_raft"]["common_seeds"], by_name["dp_raft"]["difference"]) == (1, -4)
    assert math.isnan(by_name["dp_raft"]["difference_low"])

    shown, _ = typeset.columns(rows)
    texts = {column.key: column.texts() for column in shown}
    assert sorted(texts["difference"]) == sorted([typeset.MISSING, "−4.00"])


def test_of_a_tuned_row_the_seeds_of_the_selected_settings_are_paired():
    worse = runs("pillar", {0: 70, 1: 72, 2: 74}, label="tuned", rate=10.0)
    better = runs("pillar", {0: 81, 1: 83, 2: 85}, label="tuned", rate=0.1)
    for row in worse + better:
        row["selection"] = {"test": 0.9 if row in better else 0.1}
    (row,) = paired.paired_differences(table(*REFERENCE, *worse, *better)).to_dict("records")
    assert (row["label"], row["difference"], row["common_seeds"]) == ("tuned", 1, 3)


def test_settings_of_tuned_rows_alone_are_selected_and_over_presets():
    """What nobody chose, the test set does not choose either."""
    records = []
    for label in ("untuned", "tuned"):
        for rate, steps, reached in ((1.0, 500, 0.7), (3.0, 300, 0.9)):
            (one,) = runs("pillar", {0: 100 * reached}, label=label, rate=rate)
            one["settings"]["training"] |= {"steps": steps, "batch_size": 2 * steps, "momentum": rate / 10}
            records.append(one | {"selection": {"test": reached}, "identity": f"{one['identity']}-{label}"})
    shown = table(*REFERENCE, *records)
    rows = shown.frame[shown.frame["algorithm"] == "pillar"]
    assert rows[["label", "utility", "selected"]].fillna("").to_numpy().tolist() == [
        ["tuned", 90, "test (oracle)"],
        ["untuned", 70, ""],
        ["untuned", 90, ""],
    ]
    oracle = "label tuned, mobilenetv2 were selected on the test set (oracle): these are too good"
    assert oracle in "\n".join(typeset.notes(shown))


def test_the_reference_is_the_row_with_public_data_of_its_own():
    alone = runs(HEAD, {0: 79, 1: 81, 2: 83}, public=None)
    foreign = runs(HEAD, {0: 78, 1: 80, 2: 82}, public="cifar10")
    rows = paired.paired_differences(table(*alone, *REFERENCE, *foreign))
    assert dict(zip(rows["public"].fillna("none"), rows["difference"], strict=True)) == {"none": -1, "cifar10": -2}


def test_rows_that_the_reference_does_not_tell_apart_are_not_compared_but_named():
    second = runs(HEAD, {0: 90, 1: 90}, rate=3.0)
    for row in second:
        row["settings"]["pair"]["m"] = 77
    other = runs("pillar", {0: 79, 1: 80})
    alone = runs("pillar", {0: 79, 1: 80}, private="mnist")
    shown = table(*REFERENCE, *second, *other, *alone)
    assert paired.paired_differences(shown).empty
    assert "none or several rows fit the reference: flowers5, mobilenetv2, ε 1; mnist, mobilenetv2, ε 1." in "\n".join(
        paired.paired_summary(shown)
    )


def test_a_table_without_a_reference_compares_nothing(monkeypatch):
    without = replace(join.spec("gsd_table2"), reference={})
    monkeypatch.setattr(join, "spec", lambda name: without)
    shown = join.make("gsd_table2", [record()])
    assert paired.paired_differences(shown).empty
    assert paired.paired_summary(shown) == []
    assert paired.timed(shown, 2.0).empty
    assert "seconds" not in shown.frame
    assert not [name for name in typeset.table_files(shown, []) if "paired" in name]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("reference: whitened_head", "reference takes keys with a value each"),
        ("gains: {mine: {of: {}, over: pillar}}", "gains, mine: takes of .* and over"),
    ],
)
def test_what_is_no_comparison_is_refused(text, why, tmp_path, monkeypatch):
    path = tmp_path / "race.yaml"
    path.write_text(f"title: a\nrecords: {{}}\n{text}\n")
    monkeypatch.setattr(join, "named", lambda _: {"race": path})
    with pytest.raises(UserError, match=rf"race\.yaml: {why}"):
        join.spec("race")


# Leads beyond Holm's correction


def test_p_is_that_of_the_paired_t_test():
    """Differences of -1, -2 and +1 points: t of -0.755929, by scipy p of 0.528595."""
    frame = paired.paired_differences(table(*REFERENCE, *runs("pillar", {0: 79, 1: 80, 2: 85})))
    assert frame["p"].tolist() == [0.529]
    assert frame["reference_is"].isna().all()


@pytest.mark.parametrize(("step", "p", "lead"), [(-0.1, 0, "ahead"), (0.3, 0, "behind"), (0, 1, None)])
def test_equal_differences_are_certain_and_warn_of_nothing(recwarn, step, p, lead):
    """Sums of floats differ in their last digits, which are no spread. The reference is ahead of a row below it."""
    row = runs("pillar", {seed: 100 * one["utility"] + step for seed, one in enumerate(REFERENCE)})
    (shown,) = paired.paired_differences(table(*REFERENCE, *row)).to_dict("records")
    assert (shown["difference"], shown["p"], shown["reference_is"]) == (step, p, lead)
    assert not recwarn


def test_holm_steps_down_until_one_is_not_significant():
    """Of 5 p the thresholds are 0.01, 0.0125, 0.0167, 0.025 and 0.05: 0.018 ends it, and so 0.02 and 0.04 do not count,
    although they are below theirs. Without a p there is no comparison."""
    assert paired.holm([0.02, None, 0.012, 0.04, 0.009, 0.018]) == [False, False, True, False, True, False]
    assert paired.holm([0.05]) == [True]
    assert paired.holm([0.03, 0.03]) == [False, False]
    assert paired.holm([None]) == [False]


def test_the_correction_is_over_all_comparisons_of_a_table():
    """Differences of -5, -6 and -4 points: t of -8.66, p of 0.0131, which is below a third of 0.05, and no fourth."""

    def noisy(algorithm, **more):
        return runs(algorithm, {0: 70, 1: 86, 2: 85}, **more)

    def lead(*others):
        records = [*REFERENCE, *runs("pillar", {0: 75, 1: 76, 2: 80}), *runs("dp_raft", {0: 10}), *others]
        return paired.paired_differences(table(*records)).set_index("algorithm")["reference_is"].fillna("")["pillar"]

    third = [*noisy("jl"), *noisy("dp_pca")]
    assert lead() == lead(*third) == "ahead"
    assert lead(*third, *noisy("adamix")) == ""
    assert lead(*third, *runs("adamix", {0: 50, 1: 52, 2: 54})) == "ahead"  # the second step of four
    # on other data too
    elsewhere = [*runs(HEAD, {0: 80, 1: 82, 2: 84}, epsilon=2.0), *noisy("adamix", epsilon=2.0)]
    assert lead(*third, *elsewhere) == ""


def test_a_lead_over_every_row_is_counted():
    records = [*REFERENCE, *runs("pillar", {0: 70, 1: 72, 2: 74}), *runs("dp_raft", {0: 79, 1: 81, 2: 83})]
    first, *_ = paired.paired_summary(table(*records))
    assert first.endswith("beyond Holm's correction ahead of every other row in 1, behind one or more in 0.")
    first, _, corrected = paired.paired_summary(table(*records, *runs("jl", {0: 90, 1: 92, 2: 94})))
    assert first.endswith("ahead of every other row in 0, behind one or more in 1.")
    about = "Holm's correction, 5 % over 3 comparisons of two or more common seeds"
    assert corrected == f"{about}: ahead in 2, behind in 1."


def test_a_row_that_reads_no_private_example_is_compared_at_every_epsilon():
    records = [one for epsilon in (0.1, 2.0) for one in runs(HEAD, {0: 80, 1: 82}, epsilon=epsilon)]
    shown = table(*records, *runs("only_public", {0: 81, 1: 83}, epsilon=0.0))
    frame = paired.paired_differences(shown)
    assert frame[["epsilon", "algorithm", "difference"]].to_numpy().tolist() == [
        [0.1, "only_public", 1],
        [2.0, "only_public", 1],
    ]
    assert (
        paired.paired_summary(shown)[0]
        .split("; ")[0]
        .endswith("first in 0 of 2 cells of private data, model and epsilon")
    )
    assert sorted(paired.timed(shown, 2.0)["algorithm"]) == ["only_public", HEAD]


# Gains over the best of several methods


def test_gains_over_the_best_of_each_cell_by_hand():
    """82 over 80 of adamix and 70 of only_public: +2. 82 over 78 of only_public, tuned: +4, but for differences of -4
    and -2. 82 next to 83 of adamix: -1, within a standard deviation of 2. The median is 2, the mean 1.67."""
    label = "over the better of adamix and only_public"
    records = []
    for private in ("flowers5", "kagchest", "mnist"):
        records += runs(HEAD, {0: 80, 1: 82, 2: 84}, private=private)
        records += runs("jl", {0: 99}, private=private)  # not among the rivals
    records += runs("adamix", {0: 78, 1: 80, 2: 82}) + runs("only_public", {0: 70, 1: 70}, epsilon=0.0)
    records += runs("adamix", {0: 60, 1: 60}, private="kagchest")
    records += runs("only_public", {0: 76, 1: 80}, private="kagchest", epsilon=0.0, label="tuned")
    records += runs("adamix", {0: 81, 1: 83, 2: 85}, private="mnist")
    records += runs("adamix", {0: 50}, private="mnist", epsilon=2.0)  # whose reference is missing
    frame, notes = paired.gains(table(*records))
    (row,) = [row for row in frame.to_dict("records") if row["comparison"] == label]
    spread = {"gain": 2, "gain_least": -1, "gain_most": 4}
    assert row == {
        "comparison": label,
        "epsilon": 1,
        "cells": 3,
        **spread,
        "first": 2,
        "near": 3,
        "ahead": 1,
        "behind": 1,
    }
    about = (
        f"{label}: of algorithm {HEAD}, public own, label untuned; over adamix, only_public. Not counted, since none "
    )
    assert notes[0] == about + "or several rows fit the reference: mnist, mobilenetv2, ε 2."


def test_gains_come_first_on_the_page_and_have_a_file_of_their_own():
    files = typeset.table_files(table(*REFERENCE, *runs("adamix", {0: 70, 1: 72, 2: 74})), [])
    head, line = files["_gains.csv"].splitlines()
    assert head == "comparison,epsilon,cells,gain,gain_least,gain_most,first,near,ahead,behind"
    assert line == "over the better of adamix and only_public,1,1,10,10,10,1,1,1,0"
    assert files[".md"].index(typeset.GAINS) < files[".md"].index("### All rows")
    assert "_gains.csv" not in typeset.table_files(table(*REFERENCE), [])


# Who is first


def test_how_often_the_reference_is_first_or_nearly_so():
    """First at 0.1; one point below, half its standard deviation, at 0.3; far below at 1, but to a tuned row alone; and
    below by its standard deviation and a little at 2."""
    records = []
    others = (0.1, 79, "untuned"), (0.3, 83, "untuned"), (1.0, 95, "tuned"), (2.0, 84.1, "untuned")
    for epsilon, best, label in others:
        records += runs(HEAD, {0: 80, 1: 82, 2: 84}, epsilon=epsilon)
        records += runs("pillar", {0: best, 1: best}, epsilon=epsilon, label=label)
        records += runs("dp_sgd", {0: 20, 1: 20}, epsilon=epsilon, public=None)
    shown = table(*records)
    compared = paired.comparisons(paired.groups_of(shown))
    untuned, every = (paired.standings(compared, without) for without in (["tuned"], []))
    assert [row.behind <= 0 for row in untuned] == [True, False, True, False]
    assert [row.near for row in untuned] == [True, True, True, False]
    assert [row.near for row in every] == [True, True, False, False]
    assert [round(row.behind, 6) for row in every] == [-3, 1, 13, 2.1]

    first, second, corrected = paired.paired_summary(shown)
    assert "rows whose settings nobody chose: first in 2 of 4 cells" in first
    assert "all rows: first in 1 of 4 cells" in second
    assert (
        "its over seeds, in 3; beyond Holm's correction ahead of every other row in 0, behind one or more in 0" in first
    )
    assert "its over seeds, in 2; " in second
    # dp_sgd is 60 and 62 points below: t of 61, p of 0.0104, above an eighth of 0.05
    about = "Holm's correction, 5 % over 8 comparisons of two or more common seeds"
    assert corrected == f"{about}: ahead in 0, behind in 0."
    assert paired.exceptions(shown) == [
        "flowers5, mobilenetv2, ε 1: pillar, tuned (oracle) is 13.00 points above.",
        "flowers5, mobilenetv2, ε 2: pillar is 2.10 points above.",
    ]


def test_a_reference_of_one_seed_has_no_deviation_to_be_within():
    shown = table(*runs(HEAD, {0: 80}), *runs("pillar", {0: 80.5}))
    assert [row.near for row in paired.standings(paired.comparisons(paired.groups_of(shown)))] == [False]


def test_the_kept_differences_are_those_of_the_kept_records():
    kept = CONF.parent / "results"
    shown = join.make("recipes", results.read_records(kept))
    written = (kept / "tables" / "recipes_paired.csv").read_text()
    assert written == typeset.table_files(shown, [])["_paired.csv"], "records have changed: run pubsel table all"


# Time


def methods():
    """Five methods on two sets; settings tell two of PILLAR apart."""
    records = []
    for private in ("flowers5", "mnist"):
        records += [run(HEAD, 0, 0.8, private=private, seconds=0.0), run(HEAD, 1, 0.82, private=private, seconds=None)]
        records += [run(HEAD, 0, 0.7, None, private=private, seconds=2.0)]
        records += [run("pillar", seed, 0.6, private=private, seconds=3.0 + seed) for seed in (0, 1, 5)]
        records += [run("pillar", 0, 0.65, private=private, seconds=9.0)]
        records[-1]["settings"]["training"]["steps"] = 7
        records += [run("pillar", 0, 0.5, private=private, seconds=20.0, label="tuned")]
    return [*records, run("dp_raft", epsilon=2.0)]


def test_a_method_has_one_name_in_all_groups():
    """Two trainings of PILLAR on one set are told apart on the other set too, which has only one of them."""
    short, long = run("pillar"), run("pillar", utility=0.7)
    long["settings"]["training"]["steps"] = 7
    elsewhere = run("pillar", private="mnist")
    elsewhere["settings"]["training"]["steps"] = 7
    frame = paired.timed(table(run(), run(private="mnist"), short, long, elsewhere), 1.0)
    names = {private: list(rows["method"]) for private, rows in frame.groupby("private")}
    assert names["mnist"] == [HEAD, "pillar\ntraining.steps=7"]
    assert set(names["flowers5"]) == {HEAD, "pillar", "pillar\ntraining.steps=7"}


def test_each_panel_has_a_point_for_each_method():
    frame = paired.timed(table(*methods()), 1.0)
    figure = figures.against_time(frame)
    assert [axis.get_title() for axis in figure.axes] == ["flowers5", "mnist"]
    for axis in figure.axes:
        points = {tuple(container.lines[0].get_xydata()[0].round(3)) for container in axis.containers}
        assert points == {(0.05, 81), (2, 70), (4, 60), (9, 65), (20, 50)}
        assert axis.get_xscale() == "log"
        left, right = axis.get_xlim()
        assert left < 0.05
        assert right > 20
        looks = [(c.lines[0].get_color(), c.lines[0].get_marker()) for c in axis.containers]
        assert len(set(looks)) == 5
        assert len({colour for colour, _ in looks}) == 2  # that of the algorithm


@pytest.mark.parametrize("sets", [1, 3, 7])
def test_nothing_of_a_figure_against_time_is_cut_off(sets):
    """Every text of it lies within the page, also if all methods have long names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    frame = paired.timed(table(*methods()), 1.0).head(5)
    long = [f"{method}\nalgorithm.a_setting_with_a_name={i}" for i in range(3) for method in frame["method"]]
    frame = pandas.concat([frame] * 3).assign(method=long)
    figure = figures.against_time(pandas.concat([frame.assign(private=f"set {i}") for i in range(sets)]))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    inside = figure.get_tightbbox(canvas.get_renderer()).transformed(figure.dpi_scale_trans)  # pixels
    assert min(inside.x0, inside.y0) >= -1
    assert inside.x1 <= figure.bbox.x1 + 1
    assert inside.y1 <= figure.bbox.y1 + 1


def test_methods_of_one_algorithm_differ_in_their_marker():
    algorithms = {f"method {i}": f"algorithm {i % 9}" for i in range(30)}
    looks = [(how["color"], how["marker"]) for how in figures.method_styles(algorithms).values()]
    assert len(set(looks)) == 30
    assert len({marker for _, marker in looks[:8]}) == 8
