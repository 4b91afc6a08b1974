"""Scripts that repeat runs."""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from pubsel import config
from pubsel.config import CONF, RunConfig, UsageError, check
from pubsel.run import canonical

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from more_seeds import with_seed

CELLS = {
    "gep": ["+experiment=quickstart"],
    "dp_sgd": ["+experiment=gep_cifar10", "algorithm=dp_sgd"],
    "pillar": ["+experiment=pillar_ours", "algorithm.k=7"],
    "adamix": ["+experiment=adamix_ours", "algorithm.rank=100", "epsilon=3"],
    "non_private": ["algorithm=non_private", "pair.private=mnist"],
}


def composed(words):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("run", words)


def settings(words):
    return canonical(check(RunConfig, composed(words)))


def record_of(made):
    return {"identity": config.identity(made), "settings": config.settings(made)}


@pytest.mark.parametrize("words", CELLS.values(), ids=CELLS)
def test_another_seed_of_a_record_is_the_run_of_the_command_line(words):
    record = record_of(settings([*words, "seed=3"]))
    again = with_seed(record, 5, composed(["threads=1", "results=elsewhere"]))
    assert config.identity(again) == config.identity(settings([*words, "seed=5"]))
    assert (again.threads, again.results) == (1, "elsewhere")


def test_a_record_that_today_would_be_another_run_is_not_repeated():
    record = record_of(settings(CELLS["pillar"]))
    record["settings"]["training"]["epochs"] = 7
    with pytest.raises(UsageError, match="run its sweep again"):
        with_seed(record, 5, composed([]))


def test_a_cluster_map_of_digits(tmp_path):
    """Symmetric, nothing between a set and itself, and the private digits next to the public ones."""
    from clustermap import draw, matrix

    from pubsel.config import RankConfig
    from pubsel.rank import canonical as canonical_rank

    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "distance=task2vec", "distance.m=100",
             "distance.initialisations=1", f"results={tmp_path}", "device=cpu"]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        frame = matrix(canonical_rank(check(RankConfig, compose("rank", words))))
    assert list(frame) == list(frame.index) == ["digits (private)", "digits", "noise"]
    values = frame.to_numpy()
    assert (values == values.T).all()
    assert values.diagonal() == pytest.approx([0, 0, 0], abs=1e-9)
    assert 0 < values[0, 1] < values[0, 2]
    draw(frame, "digits", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
