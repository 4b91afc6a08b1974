"""Scripts that repeat runs."""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from pubsel import records
from pubsel.cell import canonical
from pubsel.messages import UsageError
from pubsel.settings import CONF
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check
from pubsel.tables import figures
from tests.synthetic import record as synthetic

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from compare_distances import compare
from more_seeds import with_seed

CELLS = {
    "gep": ["+experiment=quickstart"],
    "dp_sgd": ["+experiment=gep_cifar10", "algorithm=dp_sgd"],
    "pillar": ["+experiment=pillar_ours", "algorithm.k=7"],
    "adamix": ["+experiment=adamix_ours", "algorithm.rank=100", "epsilon=3"],
    "only_public": ["+experiment=adamix_ours", "algorithm=only_public"],
    "non_private": ["algorithm=non_private", "pair.private=mnist"],
}


def composed(words):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("run", words)


def settings(words):
    return canonical(check(RunConfig, composed(words)))


def record_of(made):
    return {"identity": identity_of(made), "settings": as_json(made)}


@pytest.mark.parametrize("words", CELLS.values(), ids=CELLS)
def test_another_seed_of_a_record_is_the_run_of_the_command_line(words):
    record = record_of(settings([*words, "seed=3"]))
    again = with_seed(record, 5, composed(["threads=1", "results=elsewhere"]))
    assert identity_of(again) == identity_of(settings([*words, "seed=5"]))
    assert (again.threads, again.results) == (1, "elsewhere")


def test_a_record_that_today_would_be_another_run_is_not_repeated():
    record = record_of(settings(CELLS["pillar"]))
    record["settings"]["training"]["epochs"] = 7
    with pytest.raises(UsageError, match="run its sweep again"):
        with_seed(record, 5, composed([]))


def test_a_cluster_map_of_digits(tmp_path):
    """Symmetric, nothing between a set and itself, and the private digits next to the public ones."""
    from clustermap import draw, matrix

    from pubsel.commands.rank import canonical as canonical_rank
    from pubsel.settings.keys import RankConfig

    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "distance=task2vec", "distance.m=100",
             "distance.initialisations=1", f"results={tmp_path}", "device=cpu"]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        frame = matrix(canonical_rank(check(RankConfig, compose("rank", words))))
    assert list(frame) == list(frame.index) == ["digits (private)", "digits", "noise"]
    values = frame.to_numpy()
    assert (values == values.T).all()
    assert values.diagonal() == pytest.approx([0, 0, 0], abs=1e-9)
    assert 0 < values[0, 1] < values[0, 2]
    drawn = figures.save(draw(frame, "digits"), tmp_path / "map")
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
