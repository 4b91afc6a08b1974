"""Studies from records, and the cluster map."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from pubsel import records
from pubsel.cell import Cell
from pubsel.commands import rank
from pubsel.papers import clustermap, figures
from pubsel.settings import CONF
from pubsel.settings.keys import FigureConfig, RankConfig
from pubsel.settings.schema import check
from tests.synthetic import record as synthetic

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "scripts"))
import calibration  # noqa: E402
import rented  # noqa: E402
from compare_distances import compare  # noqa: E402
from rare_classes import calibration_error, measured, with_share  # noqa: E402
from spectra import OF_MEANS, TEXTS, accuracy, drawn, texts  # noqa: E402


def test_a_cluster_map_of_digits(tmp_path):
    """Symmetric, nothing between a set and itself, and the private digits next to the public ones."""
    words = [
        "figure=clustermap",
        "pair.private=digits",
        "sets=[digits,noise]",
        "model=digits_cnn",
        "distance=task2vec",
        "distance.m=100",
        "distance.initialisations=1",
        f"results={tmp_path}",
        "device=cpu",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = clustermap.rank_settings(check(FigureConfig, compose("figure", words)))
        same = [word for word in words if not word.startswith(("figure", "pair", "sets"))]
        asked = compose("rank", ["private=digits", "public=[digits,noise]", *same])
    assert settings == rank.canonical_rank(check(RankConfig, asked))
    frame = clustermap.matrix(settings)
    assert list(frame) == list(frame.index) == ["digits (private)", "digits", "noise"]
    values = frame.to_numpy()
    assert (values == values.T).all()
    assert values.diagonal() == pytest.approx([0, 0, 0], abs=1e-9)
    assert 0 < values[0, 1] < values[0, 2]
    drawn = figures.save_figure(clustermap.draw(frame, "digits"), tmp_path / "map")
    assert [path.suffix for path in drawn] == [".svg", ".pdf"]
    assert all(f">{value:.3f}</text>" in drawn[0].read_text() for value in values.flat)


def test_distances_are_compared_by_the_order_of_utility(tmp_path):
    utilities = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}
    for public, utility in utilities.items():
        for seed in (0, 1, 2):
            made = synthetic(seed=seed, utility=utility + seed / 100, public=public, label="fifth")
            made["settings"]["pair"] = {"private": "fashion_mnist", "public": public, "take": "same_test"}
            records.write_record(tmp_path / "runs" / made["identity"] / "result.json", made)
    for name, near_first in (("gsd", "abcd"), ("mmd", "dcba")):
        values = {public: [place + i / 10 for i in range(3)] for place, public in enumerate(near_first)}
        rank = {"identity": name, "distance": name, "private": "fashion_mnist", "model": "fmnist_cnn", "m": 300}
        rank |= {"values": values, "settings": {"distance": {}, "seed": 0}}
        rank |= {"seconds_candidate": 1.5, "seconds_private": 0.5}
        records.write_record(tmp_path / "ranks" / name / "result.json", rank)
    rows, points = compare(tmp_path)
    assert list(rows["spearman"]) == [-1, 1]
    assert list(rows["nearest"]) == ["a", "d"]
    assert list(rows["lost"]) == pytest.approx([0, 30])
    assert list(points["public"]) == list("abcd")
    assert list(points["mmd (fmnist_cnn)"]) == pytest.approx([3.1, 2.1, 1.1, 0.1])


@pytest.mark.parametrize(("share", "left"), [(0.03, 12), (0.05, 21)])
def test_images_of_the_rare_class_are_left_out_until_it_has_its_share(share, left):
    y = torch.arange(800) % 2
    places = with_share(y, 1, share, np.random.default_rng(0))
    assert places.tolist() == sorted(set(places.tolist()))
    assert y[places].bincount().tolist() == [400, left]
    assert left / (400 + left) == pytest.approx(share, abs=1e-3)
    assert places.tolist() != with_share(y, 1, share, np.random.default_rng(1)).tolist()


def test_the_calibration_error_of_known_probabilities():
    """Three bins: two of three right at 0.9, one of one at 0.6, one of one at 1."""
    first = torch.tensor([0.9, 0.9, 0.1, 0.4, 1.0], dtype=torch.float64)
    probabilities, y = torch.stack([first, 1 - first], 1), torch.tensor([0, 1, 1, 1, 0])
    gaps = 3 * abs(2 / 3 - 0.9), 0.4, 0.0
    assert calibration_error(probabilities, y, torch.full((5,), 0.2)) == pytest.approx(sum(gaps) / 5)
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert calibration_error(probabilities, y, weights) == pytest.approx((0.9 + 0.4) / 2)


@pytest.mark.parametrize("public", calibration.PUBLIC)
def test_calibration_is_that_of_the_cells_of_the_race(public, monkeypatch):
    race = records._read_lines(CHECKOUT / "results" / "records" / "recipes.jsonl.gz")
    monkeypatch.setattr(calibration, "EPSILONS", (2,))
    name = Cell.of(calibration.settings_of("digits", public, 2, 0), "studies").name
    (recorded,) = [each["utility"] for each in race if each["identity"] == name]
    (columns,) = calibration.measured("digits", public, 0)
    assert columns["accuracy"] == pytest.approx(recorded, abs=0.05)
    assert 0 < columns["ece_undivided"] != columns["ece"] < 0.2


def test_figures_weigh_the_test_images_by_the_classes_of_training():
    y, divided = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([[2.0, 0], [2, 0], [0, 2], [0, 2], [2, 0]])
    plain, balanced = (measured((divided, 2 * divided), y, 1, 0.1, m) for m in ("accuracy", "balanced_accuracy"))
    assert plain["recall"] == 0.5
    assert plain["balanced_accuracy"] == pytest.approx(7 / 12)
    assert plain["accuracy"] == pytest.approx(0.9 * 2 / 3 + 0.1 / 2)
    sure = torch.tensor(2.0).sigmoid().item()  # of each answer
    assert plain["ece"] == plain["ece_at_shares"] == pytest.approx(sure - 0.65)
    assert balanced["ece"] == pytest.approx(sure - 7 / 12)
    assert balanced["ece_at_shares"] == plain["ece"]
    assert plain["ece_undivided"] > plain["ece"]


def test_features_have_their_spectrum_and_own_public_data_do_not_cost_accuracy():
    d, classes, power = 20, 4, 1.0
    parts = drawn(d, classes, power, (200, 2000, 1000), 0)
    assert [part.x.shape for part in parts] == [(200, d), (2000, d), (1000, d)]
    means = torch.stack([parts[1].x[parts[1].y == c].mean(0) for c in range(classes)])
    within = torch.linalg.eigvalsh((parts[1].x - means[parts[1].y]).T.cov()).flip(0)
    torch.testing.assert_close(within, (1 - OF_MEANS) * torch.arange(1, d + 1) ** -power, rtol=0.2, atol=0)
    (own, rest), (none, nothing) = (accuracy(parts, classes, 1.0, public, 0) for public in (True, False))
    assert nothing == 0 < rest < 1
    assert 100 >= own > none - 3 > 25


@pytest.mark.slow
def test_own_public_texts_do_not_cost_accuracy_at_a_large_budget():
    """They cost four points when the share of all features did not grow with the budget."""
    parts = texts(3)
    assert [part.x.shape for part in parts] == [(n, 4096) for n in TEXTS]
    (own, rest), (none, _) = (accuracy(parts, 20, 4.0, public, 0) for public in (True, False))
    assert 0.5 < rest < 0.8
    assert own > none - 2.5 > 40


@pytest.mark.slow
def test_a_rented_machine_does_the_next_piece_of_a_list_and_packs_it(tmp_path):
    """Bare and without network: interrupted when its time is over, the next machine goes on with the packed state."""
    listed = tmp_path / "list.txt"
    run = "python -m pubsel run +experiment=quickstart distance=none device=cpu threads=1 download=false"
    listed.write_text(
        f"# a remark\n{run} training.steps=3\npython -c 'raise SystemExit(5)'\n"
        f"{run} seed=1 training.epochs=400 training.checkpoint_seconds=0.2\n"
    )
    state, epochs = [], []
    for call, minutes in enumerate((1.2, 1.2)):
        machine, out = tmp_path / f"machine{call}", tmp_path / f"out{call}"
        shutil.copytree(CHECKOUT, machine, ignore=shutil.ignore_patterns(".*", "results", "data", "build"))
        shutil.copytree(CHECKOUT / "pubsel" / "data", machine / "pubsel" / "data", dirs_exist_ok=True)
        shutil.copytree(CHECKOUT / "conf", machine / "conf", dirs_exist_ok=True)
        words = [sys.executable, str(machine / "scripts" / "rented.py"), str(out), "--list", str(listed)]
        offline = ["unshare", "-rn"] if subprocess.run(["unshare", "-rn", "true"], check=False).returncode == 0 else []
        done = subprocess.run(
            [*offline, *words, f"--minutes={minutes}", *state],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ""},
        )
        assert done.returncode == 1, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["ended", "failed", "interrupted"]
        assert {path.name for path in out.iterdir()} == {"state.tar", "summary.txt"}
        state = ["--state", str(out / "state.tar")]
        with tarfile.open(out / "state.tar") as packed:
            names = packed.getnames()
            printed = packed.extractfile("results/rented/2.txt").read().decode()
        assert sum(name.endswith("result.json") for name in names) == 1
        assert sum(name.endswith("checkpoint.pt") for name in names) == 1
        assert not any(name.endswith("model.pt") for name in names)
        epochs.append(max(float(epoch) for epoch in re.findall(r"epoch +([\d.]+)", printed)))
        assert printed.count("steps, sampling rate") == call + 1  # added to what the first call printed
    assert epochs[1] > epochs[0]


def test_what_a_rented_machine_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rented, "PACKAGES", {"nowhere": "no-such-package"})
    monkeypatch.setattr(rented, "INSTALLED", tmp_path / "installed")
    with pytest.raises(SystemExit, match="no-such-package missing: give --wheels FOLDER"):
        rented.install(None)
    with pytest.raises(SystemExit, match="lacks a wheel of one of no-such-package"):
        rented.install(tmp_path)
    with zipfile.ZipFile(tmp_path / "no_such_package-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nowhere.py", "here = True")
        about = "no_such_package-1.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: no-such-package\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    rented.install(tmp_path)
    assert (tmp_path / "installed" / "nowhere.py").exists()
    rented.install(None)  # it is there now
    (tmp_path / "state.tar").write_text("nothing of that kind")
    with pytest.raises(SystemExit, match=r"state\.tar cannot be unpacked"):
        rented.unpack(tmp_path / "state.tar", tmp_path)
