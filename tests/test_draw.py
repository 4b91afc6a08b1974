"""`pubsel figure`: which files it leaves, and what it refuses."""

import sys
from pathlib import Path

import pandas
import pytest
from test_figures import swept, three
from test_paired import run as raced

from pubsel import records
from pubsel.cli import main
from pubsel.messages import UsageError, UserError
from pubsel.papers import draw
from pubsel.settings.keys import FigureConfig
from tests.made import checked
from tests.synthetic import save


def asked(name: str, folder: Path, *words: str) -> FigureConfig:
    return checked("figure", f"figure={name}", f"results={folder}", *words)


def test_all_draws_each_figure_that_the_records_allow(tmp_path: Path) -> None:
    save(tmp_path, *three(), *(swept(k=k) for k in (5, 10)))
    paths = draw.run(asked("all", tmp_path)).splitlines()
    names = ("pillar_k", "gsd_settings_distance", "gsd_table2_distance")  # one record is in two tables
    assert paths == [str(tmp_path / "figures" / f"{name}.{kind}") for name in names for kind in ("svg", "pdf")]
    assert sorted(path.name for path in (tmp_path / "figures").glob("*.csv")) == sorted(f"{name}.csv" for name in names)
    assert draw.run(asked("pillar_k", tmp_path)).splitlines() == paths[:2]


def test_a_table_with_a_reference_is_drawn_against_time_at_one_epsilon(tmp_path: Path) -> None:
    save(tmp_path, *(raced(name, epsilon=epsilon) for name in ("whitened_head", "pillar") for epsilon in (0.1, 1.0)))
    draw.run(asked("recipes", tmp_path, "at_epsilon=0.1"))
    low = pandas.read_csv(tmp_path / "figures" / "recipes_time-mobilenetv2-eps0.1.csv", comment="#")
    assert list(low["method"]) == ["whitened_head", "pillar"]
    with pytest.raises(UserError, match="figure=recipes: no record for it"):
        draw.run(asked("recipes", tmp_path, "at_epsilon=3"))


def test_the_attack_is_drawn_against_the_error_of_the_runs_that_were_attacked(tmp_path: Path) -> None:
    runs = [swept("adamix", epsilon, seed) for epsilon in (1.0, 3.0) for seed in (0, 1)]
    for run in runs:
        run["settings"]["model"]["backbone"] = {"architecture": "a"}
        run["selection"]["test"] = run["utility"]
        run["identity"] += f"-{run['epsilon']}"
    save(tmp_path, *runs)
    with pytest.raises(UserError, match="no attacked run: pubsel attack loss"):
        draw.run(asked("adamix_attack", tmp_path))
    for run in runs[:3]:
        attack = {"run": run["identity"], "auc": 0.6 if run["seed"] else 0.5}
        records.write_record(tmp_path / "attacks" / f"loss-{run['identity']}" / "result.json", attack)
    draw.run(asked("adamix_attack", tmp_path))
    frame = pandas.read_csv(tmp_path / "figures" / "adamix_attack.csv")
    assert list(frame["auc"]) == pytest.approx([0.55, 0.5])
    assert list(frame["seeds"]) == [2, 1]


def test_losses_are_drawn_beside_their_audit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"per_instance\.csv"):
        draw.run(asked("per_instance", tmp_path))
    audit = tmp_path / "audits" / "a"
    record = {"identity": "a", "claimed": 2.0, "delta": 1e-5, "algorithm": "adamix", "private": "digits"}
    records.write_record(audit / "result.json", record)
    (audit / "per_instance.csv").write_text("example,epsilon\n0,0.5\n1,1.5\n")
    assert draw.run(asked("per_instance", tmp_path)).splitlines()[0] == str(audit / "per_instance.svg")


def test_separability_of_pixels(tmp_path: Path) -> None:
    words = ["model=pixels", "model.name=flat", "sets=[digits]", f"data_root={tmp_path}", "device=cpu"]
    draw.run(asked("separability", tmp_path, *words))
    frame = pandas.read_csv(tmp_path / "figures" / "separability.csv")
    assert set(frame["features"]) == {"flat", "pixels"}
    both = [part["xi"].tolist() for _, part in frame.groupby("features")]
    assert both[0] == both[1] == sorted(both[0], reverse=True)


def test_reconstruction_on_the_public_and_a_random_subspace(tmp_path: Path) -> None:
    words = (
        "pair=own_part pair.private=digits pair.m=60 model=scattering algorithm=adamix training=adamix threads=1 "
        "privacy=adamix distance=none epsilon=2 training.epochs=3 algorithm.rank=200 device=cpu"
    )
    draw.run(asked("reconstruction", tmp_path, *words.split(), f"data_root={tmp_path}"))
    frame = pandas.read_csv(tmp_path / "figures" / "reconstruction.csv")
    assert list(frame["step"]) == list(range(len(frame)))
    assert len(frame) > 1
    assert frame[["public", "random"]].gt(0).all(axis=None)
    assert frame[["public", "random"]].lt(1).all(axis=None)
    assert frame["public"][0] < frame["random"][0]  # the first gradients are alike


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("nothing", [], "unknown figure 'nothing': use one of all, pillar_epsilon"),
        ("pillar_k", [], "figure=pillar_k: no record for it"),
        ("separability", ["model=digits_cnn"], "model=mnist_cnn has no features"),
        ("reconstruction", ["+experiment=quickstart"], "is of AdaMix with a projection"),
        ("clustermap", ["pair.private=digits", "sets=[noise]", "distance=dp_gsd"], "a release of its own"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(tmp_path: Path, name: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        draw.run(asked(name, tmp_path, *words))
    assert "\n" not in str(error.value)
    assert isinstance(error.value, UsageError) == (name != "pillar_k")


def test_one_set_or_one_k_needs_no_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    words = "+experiment=quickstart algorithm=non_private training.steps=1 pair.m=50 threads=1 points=1 device=cpu"
    assert main(["figure", "gsd_figure1", *words.split(), "sets=noise", "k=3", f"results={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "nearest set in 1 of 1 steps" in shown
    assert shown.splitlines()[-1] == str(tmp_path / "figures" / "gsd_figure1-digits-mnist_cnn-quickstart.pdf")
