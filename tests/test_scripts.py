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
