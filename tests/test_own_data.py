"""A user's own data: how a model of them is measured."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score

import pubsel
from pubsel import data
from pubsel.cli import main
from pubsel.messages import UsageError
from pubsel.settings.identity import as_json
from pubsel.settings.keys import Convert, Metric, Pair
from pubsel.tables import join

RUN = ["model=linear", "algorithm=non_private", "pair.public=null", "distance=none", "training.epochs=20",
       "training.batch_size=20", "estimate=false", "threads=1"]  # fmt: skip
METRICS = ("null", "balanced_accuracy", "auc")


def npz(path: Path, **changes: np.ndarray) -> Path:
    """Three classes, of which the last has few examples; each tends to a grey of its own."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, counts in (("train", (60, 40, 8)), ("test", (30, 20, 3))):
        y = draw.permutation(np.repeat([0, 1, 2], counts))
        x = (draw.normal(60 + 40 * y, 40)[:, None, None] + draw.normal(0, 20, (len(y), 6, 6))).clip(0, 255)
        arrays |= {f"{part}_images": x.astype(np.uint8), f"{part}_labels": y}
    np.savez(path, **arrays | changes)
    return path


def pair(private: Path, metric: Metric | None = None) -> Pair:
    return Pair(private=str(private), public=None, m=5, convert=Convert.resize, metric=metric)


# How a model is measured


def test_a_run_is_measured_as_its_owner_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "mine.npz")
    plain = pubsel.train("pair.private=mine.npz", *RUN)
    balanced = pubsel.train("pair.private=mine.npz", "pair.metric=balanced_accuracy", "pair.validation=0", *RUN)
    told = balanced.predict("mine.npz")
    test = [i for i, file in enumerate(told.files) if "/test_images/" in file]
    expected = balanced_accuracy_score(np.load("mine.npz")["test_labels"], told.probabilities[test].argmax(1))
    assert plain["metric"] == "accuracy"
    assert balanced["metric"] == "balanced_accuracy"
    assert balanced["utility"] == pytest.approx(expected, rel=1e-12)
    assert balanced["utility"] != plain["utility"]
    assert balanced["utility_interval"][0] <= balanced["utility"] <= balanced["utility_interval"][1]
    assert plain["identity"] != balanced["identity"]
    assert "metric" not in plain["settings"]["pair"]
    assert balanced["settings"]["pair"]["metric"] == "balanced_accuracy"
    assert pubsel.train("pair.private=mine.npz", "pair.metric=auc", *RUN)["metric"] == "auc"


def test_a_table_has_a_row_for_each_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "mine.npz")
    records = [pubsel.train("pair.private=mine.npz", f"pair.metric={metric}", *RUN) for metric in METRICS]
    frame = join.others([dict(record) for record in records]).frame
    assert dict(zip(frame["setting"].fillna(""), frame["utility"], strict=True)) == {
        setting: round(100 * record["utility"], 2)
        for setting, record in zip(("", "pair.metric=balanced_accuracy", "pair.metric=auc"), records, strict=True)
    }


def test_a_metric_changes_no_identity_until_it_is_given(tmp_path: Path) -> None:
    default = as_json(pair(tmp_path))
    assert "metric" not in default
    assert as_json(pair(tmp_path, Metric.auc)) == {**default, "metric": "auc"}


@pytest.mark.parametrize("metric", [Metric.accuracy, Metric.balanced_accuracy])
def test_several_labels_an_image_are_measured_by_auc_alone(tmp_path: Path, metric: Metric) -> None:
    several = {part: np.eye(2)[np.arange(n) % 2] for part, n in (("train_labels", 108), ("test_labels", 53))}
    path = npz(tmp_path / "several.npz", **several)
    assert data.load(pair(path), "", False).metric == "auc"
    assert data.load(pair(path, Metric.auc), "", False).metric == "auc"
    with pytest.raises(UsageError, match=rf"^pair.metric={metric.name}: an image of .* has several labels") as error:
        data.load(pair(path, metric), "", False)
    assert "\n" not in str(error.value)


def test_a_test_set_of_one_class_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "one.npz", test_labels=np.ones(53, dtype=int))
    assert main(["run", "pair.private=one.npz", "pair.metric=balanced_accuracy", *RUN]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "balanced accuracy" in line]
    assert "balanced accuracy needs examples of at least two classes, the test set has one" in line


def test_a_class_without_test_images_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    y = np.load(npz(tmp_path / "mine.npz"))["test_labels"]
    npz(tmp_path / "mine.npz", test_labels=np.where(y == 2, 1, y))
    record = pubsel.train("pair.private=mine.npz", "pair.metric=balanced_accuracy", *RUN)
    told = record.predict("mine.npz")
    answers = told.probabilities[[i for i, file in enumerate(told.files) if "/test_images/" in file]].argmax(1)
    y = np.load("mine.npz")["test_labels"]
    assert record["utility"] == pytest.approx(np.mean([(answers == c)[y == c].mean() for c in (0, 1)]), rel=1e-12)
