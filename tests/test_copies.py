"""Cells of a sweep in one process: composed once for each choice of options, the same as if Hydra composed each."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from hydra_plugins import pubsel_launchers
from pubsel import algorithms, cli, records
from pubsel.messages import UsageError
from pubsel.papers import make
from pubsel.settings import CONF, methods
from pubsel.settings.copies import Loader
from pubsel.settings.keys import SCHEMAS
from pubsel.settings.methods import option
from pubsel.settings.schema import check

BASE = ["+experiment=quickstart", "seed=1"]


class Both:
    """Two loaders of one sweep: that of the basic launcher, and Hydra's."""

    def __init__(self, command: str):
        self.schema = SCHEMAS[command]
        self.hydra: Any = GlobalHydra.instance().config_loader()
        self.master = self.hydra.load_configuration(command, ["hydra.verbose=false"], RunMode.MULTIRUN)
        self.quick = Loader(self.hydra)

    def parts(self, config: DictConfig) -> tuple[Any, Any]:
        """Return the settings of a cell as a job gets them, and what Hydra knows of the cell."""
        HydraConfig.instance().set_config(config)  # as a job does, after which the hydra part is read only
        task = copy.deepcopy(config)
        with open_dict(task):
            del task["hydra"]
        return check(self.schema, task), OmegaConf.to_container(config.hydra, resolve=False)

    def agree(self, cell: list[str]) -> bool:
        """Return whether both give the same."""
        expected = self.parts(self.hydra.load_sweep_config(self.master, cell))
        return self.parts(self.quick.load_sweep_config(self.master, cell)) == expected


@pytest.fixture
def both() -> Iterator[type[Both]]:
    """For one command, where Hydra is at work."""
    pubsel_launchers.register()
    before = HydraConfig.instance().cfg
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield Both
    HydraConfig.instance().cfg = before


WORDS = [
    ["seed=0", "epsilon=inf", "threads=1"],
    ["pair.public=null", "algorithm=dp_sgd"],
    ["pair.public=[mnist,svhn]", "pair.m=50"],
    ["pair.seed=${seed}", "label=of_${seed}_${epsilon}", "epsilon=3"],
    ["label=1.10", "training.milestones=[0.25,0.5]"],
    ["training={learning_rate:3.0}", "training.epochs=2"],
    ["+model.options.depth=3", "model.options.depth=4", "model.norm=freeze"],
    ["+model.options={a:1}", "~model.options.a", "++model.options={b:2}"],
    ["~distance", "++distance={_target_:pubsel.distances.gsd.GSD,name:gsd,k:7}"],
    ["distance=none", "training=head", "privacy.delta=1e-6"],
    ["hydra.job.name=other", "+hydra.job.env_set.SOME=1", "seed=2"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_cell_is_what_hydra_composes_whatever_its_words(both: type[Both], words: list[str]) -> None:
    """A second time without a composition, and with nothing left of it in the next cell."""
    run, cell = both("run"), [*BASE, *words]
    assert run.agree(BASE)
    assert run.agree(cell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", None)
        again, base = (run.parts(run.quick.load_sweep_config(run.master, each)) for each in (cell, BASE))
    assert base == run.parts(run.hydra.load_sweep_config(run.master, BASE))
    assert again != base


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("epsilon=some", UsageError),
        ("training.steps=1.5", UsageError),
        ("algorithm.no=3", ConfigCompositionException),
        ("model.options.depth=4 +model.options.depth=3", ConfigCompositionException),
        ("label.x=1", ConfigCompositionException),
        ("no_group=1", ConfigCompositionException),
        ("pair=no_option", Exception),
    ],
)
def test_a_word_that_is_wrong_has_hydras_message(both: type[Both], word: str, error: type[Exception]) -> None:
    run, texts = both("run"), []
    assert run.agree(BASE)
    for loader in (run.hydra, run.quick):
        with pytest.raises(error) as raised:
            run.parts(loader.load_sweep_config(run.master, [*BASE, *word.split()]))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert run.agree(BASE)


def test_a_scalar_where_a_list_belongs_is_left_to_the_command(both: type[Both]) -> None:
    """`_do` makes a list of it."""
    rank = both("rank")
    cells = [loader.load_sweep_config(rank.master, ["public=digits"]) for loader in (rank.quick, rank.hydra)]
    assert [cell.public for cell in cells] == ["digits", "digits"]


def test_another_search_path_is_left_to_hydra(both: type[Both], tmp_path: Path) -> None:
    (tmp_path / "label").mkdir()
    (tmp_path / "label" / "mine.yaml").write_text("# @package _global_\nlabel: of_mine\n")
    run = both("run")
    assert run.agree([*BASE, f"hydra.searchpath=[file://{tmp_path}]", "+label=mine"])
    with pytest.raises(ConfigCompositionException, match="No match in the defaults list"):
        run.quick.load_sweep_config(run.master, [*BASE, f"hydra.searchpath=[file://{tmp_path}]", "label=mine"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(make.works()))
def test_cells_of_conf_are_what_hydra_composes(both: type[Both], name: str) -> None:
    """Ten of each file, from its first cell to its last."""
    for command in make.SWEPT:
        swept = [step for step in make.steps_of(name) if step.command == command]
        cells = [cell for step in swept for cell in make.Composer(command).cells(step.words)]
        loaders = both(command)
        for cell in [*cells[:: max(1, len(cells) // 8)], *cells[-2:]]:
            assert loaders.agree(cell), " ".join(cell)


def test_a_sweep_composes_no_further_cell(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The first is composed four times: for Hydra's mode, for the sweep, to find wrong words, and to be run."""
    seen, composed, load = [], [], ConfigLoaderImpl.load_configuration

    def do(command: str, values: DictConfig) -> str:
        job = HydraConfig.get()
        seen.append((check(SCHEMAS[command], values).seed, job.job.num, job.overrides.task[-1]))  # type: ignore[attr-defined]
        return ""

    monkeypatch.setattr(cli, "_do", do)
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", lambda *a, **k: composed.append(a) or load(*a, **k))
    assert cli.main(["run", "-m", "+experiment=quickstart", "seed=3,4,5,6"]) == 0
    assert seen == [(seed, number, f"seed={seed}") for number, seed in enumerate((3, 4, 5, 6))]
    assert len(composed) == 4


# What cells have in common besides


def test_a_method_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell has its own instance; 1 and 1.0, which compare equal, are two settings."""
    checked: list[Any] = []
    monkeypatch.setattr(methods, "check", lambda *values: checked.append(values) or check(*values))
    monkeypatch.setattr(methods, "_CHECKED", {})
    values = option("algorithm", "pillar")
    first, second, third = (algorithms.build({**values, "k": k}) for k in (3, 3, 4))
    assert (first, len(checked)) == (second, 2)
    assert first is not second
    assert third != first
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^algorithm\.k"):
            algorithms.build({**values, "k": 1.5})


def test_the_origin_of_a_record_takes_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = records.provenance()
    started: list[Any] = []
    run = records.subprocess.run
    monkeypatch.setattr(records.subprocess, "run", lambda *a, **k: started.append(a) or run(*a, **k))
    monkeypatch.setattr(records.importlib.metadata, "version", None)
    assert records.provenance() == before
    assert len(started) == 1
