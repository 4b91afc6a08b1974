import errno
import itertools
import math
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from unittest.mock import Mock

import numpy as np
import pandas
import pytest

from pubsel import records as results
from pubsel.papers import figures, join
from pubsel.settings import CONF
from tests.synthetic import record, save

HOSTILE = r"$\frac{</script><b>& %_^"


def swept(algorithm="pillar", epsilon=1.0, seed=0, utility=0.5, private="flowers5", rate=0.1, **more):
    """A synthetic record of a linear classifier on features, with a choice by held-out examples."""
    made = record(seed, utility, None, private, algorithm, "mobilenetv2") | {"private": private, "epsilon": epsilon}
    made["settings"] |= {"model": {"backbone": {"architecture": "a"}}, "epsilon": "inf" if epsilon is None else epsilon}
    made["settings"]["algorithm"] = {"name": algorithm} | more
    made["settings"]["training"] = {"learning_rate": rate}
    made["selection"] = {"validation": utility}
    return made


def by_distance(tmp_path, *records):
    return figures.scatter_rows(join.make("gsd_table2", results.read_records(save(tmp_path, *records))))


def three(label="paper", **more):
    sets = {"fashion_mnist": (0.1, 0.9), "mnist": (0.3, 0.8), "flowers5": (0.5, 0.85)}
    return [record(0, u, (d, d + 0.02), p, label=label, **more) for p, (d, u) in sets.items()]


# What is drawn


def test_points_are_the_selected_cells_in_the_order_of_x():
    records = [swept(k=k, seed=seed, utility=0.4 + k / 100) for k in (20, 5, 10) for seed in (0, 1)]
    records += [swept(k=5, utility=0.9, rate=0.01) | {"selection": {"validation": 0.2}}]  # not selected
    frame, cells = figures.points(figures.CURVES["pillar_k"], records)
    assert list(frame["x"]) == [5, 10, 20]
    assert list(frame["utility"]) == pytest.approx([45, 50, 60])
    assert list(frame["seeds"]) == [2, 2, 2]
    assert [cell["settings"]["algorithm"]["k"] for cell in cells] == [5, 10, 20]
    assert set(frame["selected"]) == {"held-out private"}


def test_a_setting_that_has_its_default_is_a_point_too():
    """Records leave it out: all private examples are share 1."""
    records = [swept(utility=0.4), swept(utility=0.3), swept(utility=0.2)]
    for made, share in zip(records, (None, 0.5, 0.1), strict=True):
        made["settings"]["pair"] = {"m": 50} | ({"private_share": share} if share else {})
        made["selection"]["test"] = made["utility"]
    assert list(figures.points(figures.CURVES["pillar_share"], records)[0]["x"]) == [0.1, 0.5, 1]


def test_a_line_joins_only_what_differs_in_x():
    records = [swept(k=k, groups=groups) for k in (5, 10) for groups in ("layers", "slices")]
    frame, _ = figures.points(figures.CURVES["pillar_k"], records)
    assert list(frame["line"]) == [f"1.0\ngroups={groups}" for groups in ("layers", "layers", "slices", "slices")]
    assert figures.line_name("epsilon", frame["line"][0]) == "ε = 1.0\ngroups=layers"
    assert figures.points(figures.CURVES["pillar_k"], [records[0], records[3]])[0].empty  # no line has two points


def test_lines_come_in_the_order_of_the_algorithms_and_no_epsilon_is_infinite():
    records = [swept(a, e) for a in ("dp_sgd", "pillar") for e in (0.1, 0.7, None)]
    frame, _ = figures.points(figures.CURVES["pillar_epsilon"], records)
    assert list(dict.fromkeys(frame["line"])) == ["pillar", "dp_sgd"]
    assert list(frame["x"]) == [0.1, 0.7, np.inf] * 2


def test_distances_are_of_panels_with_two_of_them_and_keep_the_level_without_public_data(tmp_path):
    level = record(0, 0.7, None, None, "dp_sgd")
    frame = by_distance(tmp_path / "a", *three(), level, record(0, 0.6, None, None, "dp_sgd", "tuned"))
    assert list(frame["utility"]) == [90, 85, 80, 70]
    assert list(frame["level"]) == [False, False, False, True]
    assert by_distance(tmp_path / "b", record(), level).empty


# What is seen


def drawn(figure, tmp_path):
    svg, pdf = figures.save_figure(figure, tmp_path / "figure")
    assert pdf.read_bytes()[:5] == b"%PDF-"
    return "".join(ElementTree.fromstring(svg.read_text()).itertext())


def test_each_epsilon_is_a_series(tmp_path):
    """Points of two budgets in one series have a correlation that none of them has."""
    frame = by_distance(tmp_path, *three())
    order = {"utility": [80.0, 90, 85], "epsilon": 8.0}  # the farther, the better
    drawings = [frame, pandas.concat([frame, frame.assign(**order), frame.assign(epsilon=math.nan)])]
    one, several = (figures.scatter(each).axes[0].get_legend_handles_labels()[1] for each in drawings)
    assert one == ["gep (ρ = −0.50)"]
    assert several == ["gep, ε = 2 (ρ = −0.50)", "gep, ε = 8 (ρ = 1.00)", "gep, ε = ∞ (ρ = −0.50)"]


def test_hostile_names_are_shown_as_they_are(tmp_path):
    frame = by_distance(tmp_path, *three(label=HOSTILE), record(0, 0.9, (0.9,), HOSTILE, label=HOSTILE))
    text = drawn(figures.scatter(frame), tmp_path)
    assert text.count(HOSTILE) == 2

    # equal figures are equal bytes, and say nothing of when and with what they were drawn
    paths = [figures.save_figure(figures.scatter(frame), tmp_path / name) for name in ("one", "two")]
    for first, second in zip(*paths, strict=True):
        assert first.read_bytes() == second.read_bytes()
        assert not re.search(rb"20\d\d-\d\d-\d\d|CreationDate", first.read_bytes())
    assert [path.suffix for path in paths[0]] == [".svg", ".pdf"]


def test_no_drawing_of_a_result_is_in_git():
    """`make figures` draws them; a picture that is drawn anew at each change made the repository large."""
    files = subprocess.run(["git", "ls-files", "results"], cwd=CONF.parent, capture_output=True, text=True, check=False)
    assert not re.findall(r".*\.(?:png|svg|pdf)$", files.stdout, re.MULTILINE)


def test_up_to_64_lines_differ_and_eight_in_everything():
    styles = [tuple(map(str, style.values())) for style in figures.line_styles(range(64)).values()]
    assert len(set(styles)) == 64
    assert [len(set(column)) for column in zip(*styles[:8], strict=True)] == [8, 8, 8]


def lightness(colour):
    """CIE L* of #rrggbb, 0 to 100."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 116 * float(np.dot(linear, [0.2126, 0.7152, 0.0722])) ** (1 / 3) - 16


def test_colours_stand_out_from_white_and_the_first_differ_in_grey():
    values = [lightness(colour) for colour in figures.COLOURS]
    assert max(values) < 64  # a contrast of 3 to white
    assert min(abs(a - b) for a, b in itertools.pairwise(values[:5])) > 10


# Files


def test_a_figure_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    figure = figures.scatter(by_distance(tmp_path / "records", *three()))
    for kind in figures.FORMATS:
        (tmp_path / f"figure.{kind}").write_text("old")

    broken = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    whole = figures._drawn
    monkeypatch.setattr(figures, "_drawn", lambda f, kind: broken() if kind == "pdf" else whole(f, kind))
    with pytest.raises(OSError, match="No space"):
        figures.save_figure(figure, tmp_path / "figure")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.*")} == {
        f"figure.{kind}": "old" for kind in figures.FORMATS
    }


def test_the_boost_is_above_one_where_private_data_helps():
    lines = {"line": ["paragon", "only_public", "adamix"], "utility": [90.0, 50, 80]}
    frame = pandas.DataFrame(lines).assign(private="a", model="m", x=1.0)
    boost = figures.boosted(frame)["boost"]
    assert boost.isna().tolist() == [True, True, False]
    assert boost[2] == pytest.approx(40 / 10)


def test_a_curve_has_no_runs_of_studies_with_figures_apart():
    runs = [swept(epsilon=epsilon, utility=epsilon / 4) for epsilon in (1.0, 2.0)]
    curve = figures.CURVES["pillar_epsilon"]
    alone, _ = figures.points(curve, runs)
    others = [one | {"label": label, "identity": label} for one in runs for label in figures.OTHERS]
    together, _ = figures.points(curve, [*runs, *others])
    assert len(alone) == 2
    assert together.equals(alone)
