"""Studies from records, and the cluster map."""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from pubsel import records
from pubsel.commands import clustermap, rank
from pubsel.settings import CONF
from pubsel.settings.keys import FigureConfig, RankConfig
from pubsel.settings.schema import check
from pubsel.tables import figures
from tests.synthetic import record as synthetic

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from compare_distances import compare


def test_a_cluster_map_of_digits(tmp_path):
    """Symmetric, nothing between a set and itself, and the private digits next to the public ones."""
    words = ["figure=clustermap", "pair.private=digits", "sets=[digits,noise]", "model=digits_cnn", "distance=task2vec",
             "distance.m=100", "distance.initialisations=1", f"results={tmp_path}", "device=cpu"]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = clustermap.settings_of(check(FigureConfig, compose("figure", words)))
        same = [word for word in words if not word.startswith(("figure", "pair", "sets"))]
        asked = compose("rank", ["private=digits", "public=[digits,noise]", *same])
    assert settings == rank.canonical(check(RankConfig, asked))
    frame = clustermap.matrix(settings)
    assert list(frame) == list(frame.index) == ["digits (private)", "digits", "noise"]
    values = frame.to_numpy()
    assert (values == values.T).all()
    assert values.diagonal() == pytest.approx([0, 0, 0], abs=1e-9)
    assert 0 < values[0, 1] < values[0, 2]
    drawn = figures.save(clustermap.draw(frame, "digits"), tmp_path / "map")
    assert [path.suffix for path in drawn] == [".png", ".svg", ".pdf"]
    assert all(f">{value:.3f}</text>" in drawn[1].read_text() for value in values.flat)


def test_distances_are_compared_by_the_order_of_utility(tmp_path):
    utilities = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}
    for public, utility in utilities.items():
        for seed in (0, 1, 2):
            made = synthetic(seed=seed, utility=utility + seed / 100, public=public, label="fifth")
            made["settings"]["pair"] = {**made["settings"].get("pair", {}), "public": public}
            records.write_record(tmp_path / "runs" / made["identity"] / "result.json", made)
    for name, near_first in (("gsd", "abcd"), ("mmd", "dcba")):
        values = {public: [place + i / 10 for i in range(3)] for place, public in enumerate(near_first)}
        rank = {"identity": name, "distance": name, "private": "fashion_mnist", "model": "probe", "m": 300}
        rank |= {"values": values, "settings": {"distance": {}}, "seconds_candidate": 1.5, "seconds_private": 0.5}
        records.write_record(tmp_path / "ranks" / name / "result.json", rank)
    rows, points = compare(tmp_path)
    assert list(rows["spearman"]) == [-1, 1]
    assert list(rows["nearest"]) == ["a", "d"]
    assert list(rows["lost"]) == pytest.approx([0, 30])
    assert list(points["public"]) == list("abcd")
    assert list(points["mmd (probe)"]) == pytest.approx([3.1, 2.1, 1.1, 0.1])
