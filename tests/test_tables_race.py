"""The race on data that packages ship: how splits, rivals and differences are made."""

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from pubsel.settings import CONF

ROOT = CONF.parent
sys.path.insert(0, str(ROOT / "scripts"))
import tables_race  # noqa: E402


@pytest.fixture
def plain() -> tables_race.Split:
    return tables_race.numbers(tables_race.split(*load_breast_cancer(return_X_y=True), seed=0))


def test_a_fifth_is_tested_on_and_columns_are_those_of_the_training_rows(plain: tables_race.Split) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    one = tables_race.split(x, y, 0)
    assert sorted(map(tuple, np.vstack([one.x, one.new]).tolist())) == sorted(map(tuple, x.tolist()))
    assert (len(one.x), len(one.new)) == (455, 114)
    assert np.allclose((plain.x.mean(0), plain.x.std(0)), np.array([[0.0], [1.0]]))
    assert np.allclose(plain.new, (one.new - one.x.mean(0)) / one.x.std(0))


def test_texts_are_hashed() -> None:
    texts = np.array(["a dog", "a cat"], object)[:, None]
    one = tables_race.numbers(tables_race.Split(texts, np.array([0, 1]), texts[:1], np.array([0])))
    assert one.x.shape == (2, 4096)
    assert np.array_equal(one.new[0], one.x[0])


@pytest.mark.parametrize("way", [tables_race.ONE, tables_race.GRID[-1], tables_race.GRID[-4]])
def test_opacus_classifies_without_noise_and_not_with_much(way, plain, monkeypatch) -> None:
    reached = []
    for noise in (1e-3, 1e4):
        monkeypatch.setattr(tables_race, "noise", lambda *_, noise=noise: noise)
        reached.append(float((tables_race.by_opacus(plain, 1.0, *way) == plain.answers).mean()))
    assert reached[0] > 0.88
    assert reached[0] > reached[1]


def test_noise_is_that_of_the_epsilon() -> None:
    """By the formula of Balle and Wang for ten steps on all rows: 11.797 at epsilon 1."""
    assert 11.797 < tables_race.noise(1.0, 1.0, 10) < 11.95 * 1.001


def test_diffprivlib_equals_no_privacy_at_a_huge_epsilon(plain) -> None:
    pytest.importorskip("diffprivlib", exc_type=ImportError)
    (reached,) = ((tables_race.by_diffprivlib(plain, 1e9, 1.0, True, 4.0, False) == plain.answers).mean(),)
    assert reached == pytest.approx((tables_race.not_private(plain, 1e9, 1.0) == plain.answers).mean(), abs=0.01)


def test_the_best_setting_is_that_of_the_best_mean(monkeypatch) -> None:
    ones = [tables_race.Split(np.zeros((4, 1)), np.ones(4), np.zeros((4, 1)), np.array([1, 1, 1, 0])) for _ in range(2)]
    says = (lambda one, epsilon, c: np.full(4, c), [(0,), (1,)], [(0,)], "C={}")
    monkeypatch.setitem(tables_race.RIVALS, "some", says)
    reached, setting = tables_race.accuracies("some", ones, ones, 1.0)
    assert (reached.tolist(), setting) == ([0.75, 0.75], "C=1")


def test_a_quarter_of_the_grid_is_tried_on_all_splits(monkeypatch) -> None:
    """The two of eight that are best on the first three."""
    ones = [tables_race.Split(np.full((1, 1), i), np.ones(1), np.zeros((1, 1)), np.ones(1)) for i in range(5)]
    tried = []

    def answers(one: tables_race.Split, _epsilon: float, way: int) -> np.ndarray:
        tried.append((int(one.x[0, 0]), way))
        return np.full(1, way in (5, 6) and (way == 6 or one.x[0, 0] < 4))

    monkeypatch.setitem(tables_race.RIVALS, "opacus tuned", (answers, [(i,) for i in range(8)], [], "way={}"))
    reached, setting = tables_race.accuracies("opacus tuned", ones, ones, 1.0)
    assert (reached.tolist(), setting) == ([1.0] * 5, "way=6")
    assert tried == [*((i, way) for i in range(3) for way in range(8)), (3, 5), (3, 6), (4, 5), (4, 6)]


def test_differences_have_intervals(tmp_path: Path) -> None:
    lines = ["table,n,columns,epsilon,method,accuracy,deviation,seeds,set"]
    for epsilon in (0.1, 0.5, 1.0, 4.0):
        for method, accuracy in {"pubsel": 90, "diffprivlib": 80, "opacus": 85, "opacus tuned": 91}.items():
            lines.append(f"wine,178,13,{epsilon},{method},{accuracy},{3 if method == 'pubsel' else 4},10,")
    (tmp_path / "race.csv").write_text("\n".join(lines[:-1]))
    first, *others = tables_race.differences(tmp_path / "race.csv").splitlines()[2:]
    # 2.262 is t of nine degrees, and sqrt((3^2 + 4^2) / 10) = 1.581
    assert first == "| wine | diffprivlib |" + " 10.0 [6.4, 13.6] |" * 4
    assert [line.split(" | ")[1::4] for line in others] == [
        ["opacus", "5.0 [1.4, 8.6] |"],
        ["opacus tuned", " |"],  # a row that is not there yet
    ]


def test_bounds_are_those_of_columns_and_never_empty() -> None:
    one = tables_race.Split(np.array([[1.0, 5], [3, 5]]), np.ones(2), np.ones((1, 2)), np.ones(1))
    assert tables_race.bounds(one) == {"0": [1.0, 3.0], "1": [4.0, 6.0]}


def test_the_page_has_the_differences_of_the_file() -> None:
    page = (ROOT / "results" / "study_columns.md").read_text()
    assert tables_race.differences(ROOT / "results" / "tables_race.csv") in page
