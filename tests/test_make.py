"""`pubsel make`: which cells a table or figure has, which of them are there, and that only the others are run."""

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from hydra_plugins import pubsel_launchers
from pubsel import records as results
from pubsel.cli import _positional
from pubsel.messages import UsageError, UserError
from pubsel.papers import join, make
from pubsel.rules import canonical
from pubsel.settings import CONF
from pubsel.settings.compose import composed
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import AttackConfig, AuditConfig, FigureConfig, RunConfig, TableConfig
from pubsel.settings.schema import check
from tests.made import Cli, done, failed

CHECKOUT = Path(__file__).resolve().parent.parent
MINE = {
    "title": "Mine",
    "records": {"label": ["mine"]},
    "parts": {"weak": {"epsilon": 4}, "strong": {"epsilon": 2}},
    "common": "+experiment=quickstart label=mine epsilon={epsilon} distance=none training.epochs=1 "
    "training.batch_size=1297 training.chunk=256 model=linear algorithm.k=5",
    "runs": ["run seed=0,1"],
}
HERE = ["--config-dir", "own", "device=cpu", "threads=1"]


@pytest.fixture(autouse=True)
def folder(folder: Path) -> Path:
    """A folder of one's own, with a table and a dataset in own/."""
    write_table(MINE)
    return folder


def write_table(about: dict, name: str = "mine", group: str = "tables") -> None:
    path = Path("own", group, f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(about, sort_keys=False))


@pytest.fixture(scope="module")
def kept() -> dict[str, make.Composer]:
    """What is composed for one test serves the others."""
    return {command: make.Composer(command) for command in make.SWEPT}


@pytest.fixture
def composers(kept: dict[str, make.Composer]) -> Iterator[dict[str, make.Composer]]:
    """By command, where Hydra is at work, as it is within `pubsel make`."""
    pubsel_launchers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield kept


# What stands in conf/


@pytest.mark.parametrize("name", sorted(make.works()))
def test_every_step_of_conf_composes(composers: dict[str, make.Composer], name: str) -> None:
    """The first cell of each sweep: a key that an algorithm lacks is in every cell. A table shows this cell, and the
    last one. Of a sweep whose words are all in others too, the options alone are composed."""
    schemas = {"attack": AttackConfig, "audit": AuditConfig, "figure": FigureConfig, "table": TableConfig}
    about = join.spec(name) if name in join.table_names() else None
    steps, seen = [step for step in make.steps_of(name) if step.of == name], set[str]()
    assert steps
    for step in steps:
        if step.command == "more_seeds":
            assert re.fullmatch(r"\d+(,\d+)*", step.words[0])
            assert all(word == "pair.seed=${seed}" for word in step.words[1:])
        elif make.swept_by(step):
            composer = composers[step.command]
            cells = composer.cells(step.words)
            if seen.issuperset(step.words):
                continue
            seen.update(step.words)
            in_table = about is not None and step.command == "run"
            for words in cells[:: max(1, len(cells) - 1)] if in_table else cells[:1]:
                cell = composer.cell(words)
                assert not in_table or join.belonging(about, [shown(cell.settings)]), " ".join(words)
        else:
            with composed(step.command, _positional(step.command, step.words)) as values:
                assert check(schemas[step.command], values)  # type: ignore[type-var]


def shown(settings: dict) -> dict:
    """What a table knows of a record by its settings."""
    of = {"settings": settings} | {key: settings["pair"][key] for key in ("private", "public")}
    of |= {key: settings[key] for key in ("epsilon", "label", "seed")}
    return of | {key: settings[key]["name"] for key in ("model", "algorithm")}


def test_how_many_cells_a_table_has(composers: dict[str, make.Composer]) -> None:
    counts = {"gsd_table2_fmnist": 30, "gep_table1_svhn": 9, "gsd_table16": 27, "medical_ours_kagchest_head": 42}
    for name, count in (counts | {"adamix_ours_flowers5": 48, "pillar_table2": 19278}).items():
        steps = [step for step in make.steps_of(name) if step.command == "run"]
        words = [tuple(cell) for step in steps for cell in composers["run"].cells(step.words)]
        assert len(words) == len(set(words)) == count, name


@pytest.mark.parametrize("name", ["adamix_ours_flowers5", "adamix_figure2_right_flowers5"])
def test_the_cells_of_a_paper_are_those_of_the_records(composers: dict[str, make.Composer], name: str) -> None:
    """Learning rates are those of the paper, as when the records were made."""
    kept = {record["identity"] for record in results.read_records(CHECKOUT / "results")}
    for step in make.steps_of(name):
        if step.command == "run":
            assert {composers["run"].cell(words).name for words in composers["run"].cells(step.words)} <= kept


@pytest.mark.parametrize("name", ["pillar_ours_kagchest", "medical_ours_kagchest_layers", "gsd_table13b"])
def test_a_changed_copy_is_what_hydra_composes(composers: dict[str, make.Composer], name: str) -> None:
    composer = composers["run"]
    for step in make.steps_of(name):
        if step.command == "run":
            every = composer.cells(step.words)
            for cell in (every[-1], every[0], [*every[0], "seed=7"]):
                assert check(RunConfig, composer.composed(cell)) == check(RunConfig, compose("run", cell))


@pytest.mark.parametrize(
    ("words", "checks"),
    [
        (["+experiment=pillar_ours"], 6),  # pair.seed follows the seed
        (["+experiment=adamix_ours", "label=of_${seed}_${epsilon}"], 6),
        (["algorithm=non_private", "pair.private=mnist"], 6),  # epsilon is inf
        (["+experiment=adamix_ours", "algorithm=only_public", "training.learning_rate=0.5"], 7),
        (["+experiment=pillar_ours", "epsilon=4", "training={learning_rate:3.0}"], 6),
    ],
)
def test_cells_that_differ_in_numbers_alone_are_checked_once(composers, words: list[str], checks: int) -> None:
    """Those of inf apart; of seed 0 a key that follows it has its default, which settings leave out."""
    composer, checked = make.Composer("run"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "check", lambda *values: checked.append(values) or check(*values))
        rates = [word.replace("0.5", rate) for word in words[2:] for rate in ("0.5", "1e-05")] or [""]
        cells = [
            [*words, f"epsilon={epsilon}", f"seed={seed}", *([rate] if "rate=" in rate else [])]
            for epsilon in ("1", "2.5", "inf")
            for seed in (3, 0, 1)
            for rate in rates
        ]
        made = [composer.cell(cell) for cell in cells]
    for cell, (_, name, settings) in zip(cells, made, strict=True):
        whole = canonical(check(RunConfig, compose("run", cell)))
        assert (name, settings) == (identity_of(whole), as_json(whole)), cell
    assert len(checked) == checks


@pytest.mark.parametrize("word", ["seed=-1", "seed=1.5", "epsilon=1e40", "epsilon=-2", "training.learning_rate=1e-40"])
def test_a_number_that_is_wrong_is_named_after_others(composers, word: str) -> None:
    composer = composers["run"]
    words = ["+experiment=quickstart", "seed=1", "epsilon=2", "training.learning_rate=0.5"]
    composer.cell(words)
    with pytest.raises(UsageError, match=f"^{word.partition('=')[0]}[:=]"):
        composer.cell([*words, word])


def test_a_wrong_value_is_named_as_by_a_run_and_leaves_no_trace_in_the_next_cell(
    composers: dict[str, make.Composer],
) -> None:
    composer = composers["run"]
    words = ["+experiment=quickstart", "seed=1"]
    before = check(RunConfig, composer.composed([*words, "epsilon=2"]))
    with pytest.raises(UsageError, match=r"^epsilon: .*'some'"):
        check(RunConfig, composer.composed([*words, "epsilon=some"]))
    options = [composer.composed([*words, f"++model.options={{{key}: 1}}"]).model.options for key in "ab"]
    assert options == [{"a": 1}, {"b": 1}]
    assert check(RunConfig, composer.composed([*words, "epsilon=2"])) == before


def test_public_takes_the_place_of_the_sets_that_a_sweep_goes_through(composers: dict[str, make.Composer]) -> None:
    composer = composers["run"]

    def publics(*words: str) -> set[str]:
        return {str(composer.composed(cell).pair.public) for cell in composer.cells(words, public="mnist,svhn")}

    assert publics("+experiment=gsd_table3") == {"mnist", "svhn"}
    assert publics("+experiment=gsd_table3", "pair.public=null", "algorithm=dp_sgd_clip01", "distance=none") == {"None"}
    assert publics("+experiment=gsd_table16") == {"['sprxray', 'chexpert']", "['chexpert', 'cifar100']"}
    assert publics("+experiment=pillar_table3") == {"cifar10_1"}


def test_public_takes_the_place_of_the_sets_of_a_figure(cli: Cli) -> None:
    out, _ = done(cli, "make", "gsd_figure1", "dry=true", "public=mnist,svhn", "seed=3", "results=there")
    assert "sets=[mnist,svhn] seed=3 results=there" in out.splitlines()[2].replace("'", "")


def test_a_key_that_few_options_have_is_set_in_a_sweep_as_in_a_command(composers: dict[str, make.Composer]) -> None:
    """Hydra would have refused the cells: the option has no such key."""
    words = next(step.words for step in make.steps_of("recipes_flowers5") if "label=stages" in step.words)
    (cell, *_) = composers["run"].cells(words)
    assert compose("run", cell).model.backbone.stages is True


# What is there


def test_dry_lists_what_is_there_and_what_the_rest_takes(cli: Cli) -> None:
    out, _ = done(cli, "make", "mine", *HERE, "dry=true")
    title, _, *cells, table, summary = out.splitlines()
    assert title == "Mine"
    assert [line.split()[0] for line in cells] == ["missing"] * 4
    assert all(line.endswith("(unknown)") for line in cells)
    assert table.startswith("then     pubsel table mine")
    assert summary == "mine: 0 of 4 cells are there; the other 4: hours unknown"

    # one that ran, by which the time of the others is told
    assert cli("make", "mine_weak", *HERE, "dry=true", "seed=0")[0] == 0
    assert cli("run", *MINE["common"].format(epsilon=4).split(), "seed=0", *HERE)[0] == 0  # type: ignore[attr-defined]
    (path,) = Path("results/runs").glob("*/result.json")
    record = json.loads(path.read_text()) | {"seconds": 7200.0}
    path.write_text(json.dumps(record))
    lines = cli("make", "mine", *HERE, "dry=true")[1].splitlines()[2:]
    assert lines[0] == f"there    {record['identity']}"
    assert [line.split("  ")[-1] for line in lines[1:4]] == ["(2.0 h)"] * 3
    assert lines[-1] == "mine: 1 of 4 cells are there; the other 3: about 6.0 h, by the records of the same kind"


def test_a_part_that_gives_null_has_no_such_command(cli: Cli) -> None:
    parts = {"weak": {"epsilon": 4, "seeds": None}, "strong": {"epsilon": 2, "seeds": "5,6"}}
    write_table(MINE | {"parts": parts, "runs": ["run seed=0", "run seed={seeds}"]})
    cells = done(cli, "make", "mine", *HERE, "dry=true")[0].splitlines()[2:-2]
    assert [re.search(r"eps\d-seed\d", line).group() for line in cells] == [  # type: ignore[union-attr]
        "eps4-seed0",
        "eps2-seed0",
        "eps2-seed5",
        "eps2-seed6",
    ]


def test_hours_grow_with_steps_batches_and_k(composers: dict[str, make.Composer]) -> None:
    """A run of 3 steps told 14 s for one of 50 epochs."""
    words = ["+experiment=gep_cifar10", "training.epochs=50", "training.batch_size=1000"]

    def cell(*more: str) -> make.SweptCell:
        return composers["run"].cell([*words, *more])

    toy = recorded(cell("algorithm.k=100", "training.steps=3"), seconds=14.0, private_examples=50_000)
    results.write_record(Path("results/runs/toy/result.json"), toy)
    kept = make.KnownRuns.read(Path("results"))
    for more, seconds in [
        (["algorithm.k=100", "training.steps=3", "seed=7", "epsilon=1"], 14),
        (["algorithm.k=100"], 14 * 2500 / 3),
        (["algorithm.k=100", "training.batch_size=500"], 14 * 2500 / 3),
        (["algorithm.k=200", "training.steps=6"], 14 * 4),
        (["algorithm=dp_sgd"], None),
        (["algorithm.k=100", "model=fmnist_cnn"], None),
        (["algorithm.k=100", "pair.private_share=0.5"], None),
    ]:
        assert kept.expected(cell(*more).settings) == (seconds and pytest.approx(seconds)), more


def test_a_target_without_cells_has_none_that_are_there(cli: Cli) -> None:
    assert done(cli, "make", "pillar_figure3", "dry=true")[0].splitlines()[-1] == "pillar_figure3: no cells to run"


def test_a_record_that_came_with_the_code_is_not_run_again(cli: Cli) -> None:
    """It is so for the tables of ours, whose records are in results/records."""
    kept = CHECKOUT / "results" / "records"
    Path("kept/records").mkdir(parents=True)
    for name in ("distances_ours", "medical_ours"):
        shutil.copy(kept / f"{name}.jsonl.gz", "kept/records")
    code, out, _ = cli("make", "distances_ours", "dry=true", "results=kept")
    assert (code, out.splitlines()[-1]) == (0, "distances_ours: all of 60 cells are there")


# What is run


def test_make_runs_what_is_missing_then_more_seeds_and_writes_the_table(cli: Cli) -> None:
    write_table(MINE | {"runs": ["run seed=0,1", "more_seeds 1,5"]})
    out, err = done(cli, "make", "mine_weak", *HERE)
    paths = sorted(Path("results/runs").glob("*/result.json"))
    assert sorted(json.loads(path.read_text())["seed"] for path in paths) == [0, 1, 5]
    assert {json.loads(path.read_text())["epsilon"] for path in paths} == {4.0}
    assert out.count("differentially private") == 3
    assert len(join.paper_rows(None)) == 0
    assert Path("results/tables/mine.csv").exists()
    assert "mine_weak, run: 0 of 2 cells are there" in err
    assert "mine_weak, more seeds: 1 of 2 cells are there" in err

    # a second time nothing runs; a record that is lost runs alone, side by side with nothing
    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[0].unlink()
    code, out, err = cli("make", "mine_weak", *HERE)
    assert (code, out.count("differentially private")) == (0, 1)
    assert [path.stat().st_mtime_ns == before[path] for path in paths] == [False, True, True]
    code, out, err = cli("make", "mine_weak", *HERE)
    assert (code, out.count("differentially private"), "sampling rate" in err) == (0, 0, False)


def test_a_failed_cell_stops_no_other_but_the_steps_after_it(cli: Cli) -> None:
    write_table(MINE | {"runs": ["run seed=0 pair.m=200,501", "more_seeds 1"]})
    code, out, err = cli("make", "mine_strong", *HERE)
    assert (code, out.count("differentially private")) == (1, 1)
    assert "1 cells failed" in err
    assert err.splitlines()[-1].startswith("pubsel: mine_strong: stopped, since a step failed; pubsel make mine_strong")
    assert not Path("results/tables").exists()


def test_ranks_and_other_commands_are_steps_too(cli: Cli) -> None:
    words = "private=digits model=digits_cnn distance.m=50 distance.initialisations=1 seed=0,1"
    write_table({"title": "Near", "runs": [f"rank {words} public=[digits,noise]", "table mine"]}, "near", "work")
    out, _ = done(cli, "make", "near", *HERE)
    assert len(list(Path("results/ranks").glob("*/result.json"))) == 2
    assert "Mine" in out
    lines = cli("make", "near", *HERE, "dry=true")[1].splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["there", "there", "then", "near:"]


# More seeds


SEEDED = {
    "gep": ["+experiment=quickstart"],
    "dp_sgd": ["+experiment=gep_cifar10", "algorithm=dp_sgd"],
    "pillar": ["+experiment=pillar_ours", "algorithm.k=7"],
    "adamix": ["+experiment=adamix_ours", "algorithm.rank=100", "epsilon=3"],
    "only_public": ["+experiment=adamix_ours", "algorithm=only_public"],
    "non_private": ["algorithm=non_private", "pair.private=mnist"],
}


def recorded(cell: make.SweptCell, **more: object) -> dict:
    """A record of a cell that nobody ran."""
    fields = {"identity": cell.name, "settings": cell.settings, "seed": cell.settings["seed"], "label": "mine"}
    texts = dict.fromkeys(("private", "model", "algorithm"), "a")
    values = {"public": None, "epsilon": None, "utility": 0.5} | texts | fields
    return values | {"selection": {"test": 0.5}} | more


@pytest.mark.parametrize("words", SEEDED.values(), ids=SEEDED)
def test_another_seed_of_a_record_is_the_run_of_the_command_line(words: list[str], composers, monkeypatch) -> None:
    composer = composers["run"]
    record = recorded(composer.cell([*words, "seed=3"]))
    results.write_record(Path("results/runs/a/result.json"), record)
    monkeypatch.setattr(join, "spec", lambda name: join.Spec(title="", records={}))
    drawn = ["pair.seed=${seed}"] if "seed" in record["settings"]["pair"] else []
    have, more = make.seeded("any", [3, 5], results.read_records(Path("results")), composer, ["threads=1"], drawn)
    assert have.name == record["identity"]
    assert drawn or have.words == []
    assert more.name == composer.cell([*words, "seed=5"]).name
    assert composer.composed(more.words).threads == 1


def test_more_seeds_of_what_is_drawn_too(composers: dict[str, make.Composer], monkeypatch) -> None:
    composer, words = composers["run"], [*SEEDED["pillar"], "++pair.validation=0.1"]
    results.write_record(Path("results/runs/a/result.json"), recorded(composer.cell([*words, "seed=0"])))
    monkeypatch.setattr(join, "spec", lambda name: join.Spec(title="", records={}))
    (more,) = make.seeded("any", [5], results.read_records(Path("results")), composer, [], ["pair.seed=${seed}"])
    assert (more.settings["seed"], more.settings["pair"]["seed"]) == (5, 5)
    assert more.name == composer.cell([*words, "seed=5", "++pair.seed=5"]).name

    # both are of one cell of the table, with two seeds
    results.write_record(Path("results/runs/b/result.json"), recorded(more))
    (cell,) = join.table_cells("any", results.read_records(Path("results")))
    assert [record["seed"] for record in cell.records] == [0, 5]


def test_a_record_that_today_would_be_another_run_gets_no_more_seeds(composers, monkeypatch) -> None:
    composer = composers["run"]
    cell = composer.cell([*SEEDED["pillar"], "seed=3"])
    cell.settings["algorithm"]["clip_norm"] = "1"  # a type that today's settings do not keep
    results.write_record(Path("results/runs/a/result.json"), recorded(cell))
    monkeypatch.setattr(join, "spec", lambda name: join.Spec(title="", records={}))
    with pytest.raises(UserError, match="run its sweep again"):
        make.seeded("any", [5], results.read_records(Path("results")), composer, [])


# What is wrong


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"runs": ["train seed=0"]}, "'train' is no command here: use run, rank"),
        ({"runs": ["make mine"]}, "it makes itself, by mine > mine"),
        ({"runs": ["run epsilon={delta}"]}, "its parts give no 'delta'"),
        ({"runs": []}, "mine.yaml lists no runs: pubsel table mine"),
        ({"run": []}, "mine.yaml: Spec.__init__() got an unexpected keyword argument 'run'"),
    ],
)
def test_a_file_that_is_wrong_is_named(cli: Cli, about: dict, message: str) -> None:
    write_table({key: value for key, value in MINE.items() if key != "runs"} | about)
    code, _, err = cli("make", "mine", *HERE, "dry=true")
    assert code in (1, 2)
    assert len(err.splitlines()) == 1
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "cannot make 'nothing': use one of adamix_figure1_right, adamix_figure2_left"),
        (["gsd_table2_mnist"], "cannot make 'gsd_table2_mnist'"),
        ([], "pubsel make NAME: one of adamix_figure1_right, adamix_figure2_left"),
        (["mine", "-m"], "pubsel make sweeps by itself: leave -m out"),
        (["mine", "--config-dir", "own", "nonsense=1"], "unknown key nonsense"),
    ],
)
def test_what_cannot_be_made_is_told_in_one_line(cli: Cli, words: list[str], message: str) -> None:
    err = failed(cli, "make", *words)
    assert message in err.splitlines()[-1]


# A sweep over the cells of a file


def test_a_sweep_takes_cells_from_a_file(cli: Cli) -> None:
    words = MINE["common"].format(epsilon=2)  # type: ignore[attr-defined]
    Path("cells").write_text("# two cells\nseed=1 epsilon=3\n\nseed=4 'label=a b'\n")
    _, err = done(cli, "run", "-m", *words.split(), "device=cpu", "threads=1", "hydra.sweeper.cells=cells")
    records = [json.loads(path.read_text()) for path in Path("results/runs").glob("*/result.json")]
    assert sorted((r["seed"], r["epsilon"], r["label"]) for r in records) == [(1, 3.0, "mine"), (4, 2.0, "a b")]
    code, _, err = cli("run", "-m", *words.split(), "hydra.sweeper.cells=nowhere")
    assert (code, err) == (2, "pubsel: hydra.sweeper.cells=nowhere: No such file or directory\n")


# A user's own folder


def test_a_dataset_of_one_s_own_folder_is_as_good_as_one_of_conf(cli: Cli) -> None:
    known = yaml.safe_load((CONF / "dataset" / "digits.yaml").read_text())
    write_table(known | {"title": "my digits"}, "my_digits", "dataset")
    write_table(known | {"title": "not mine"}, "digits", "dataset")  # conf/ has this name
    words = [*MINE["common"].format(epsilon=2).split(), "pair.private=my_digits", "pair.public=noise"]  # type: ignore[attr-defined]
    _, err = done(cli, "run", *words, *HERE)
    (path,) = Path("results/runs").glob("*/result.json")
    assert json.loads(path.read_text())["private"] == "my_digits"
    _, out, _ = cli("data", "list", "--config-dir", "own")
    assert any(line.startswith("my_digits") and "my digits" in line for line in out.splitlines())
    assert "not mine" not in out
    assert cli("data", "check", "my_digits", "--config-dir", "own")[0] == 0
    code, _, err = cli("run", *words, "seed=9")
    assert (code, "unknown dataset 'my_digits'" in err) == (2, True)


def test_a_table_of_one_s_own_folder_is_shown_with_its_paper(cli: Cli) -> None:
    write_table(MINE | {"paper": "mine.csv"})
    row = {"private": "digits", "public": "digits", "model": "m", "algorithm": "gep", "epsilon": "4", "utility": "91.5"}
    row |= {"utility_std": "", "distance": ""}
    Path("own/tables/mine.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    out, _ = done(cli, "table", "mine", "--config-dir", "own")
    assert "91.50" in out
    assert cli("table", "mine")[0] == 2
    assert "mine" in cli("table", "all", "--config-dir", "own")[1]


# The Makefile


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (["pillar-ours"], "make pillar_ours"),
        (["gsd-table2-svhn"], "make gsd_table2_svhn"),
        (["table2"], "make gsd_table2"),
        (["table2-svhn", "PUBLIC=a,b", "ARGS=device=cpu seed=1"], "make gsd_table2_svhn public=a,b device=cpu seed=1"),
        (["adamix-figure1-right"], "make adamix_figure1_right"),
        (["tables", "ARGS=results=there"], "table all results=there"),
        (["figures"], "figure all"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_target_of_make_is_one_command(target: list[str], words: str) -> None:
    shutil.copy(CHECKOUT / "Makefile", "Makefile")
    Path(".venv").mkdir()
    Path("pyproject.toml").touch()
    Path(".venv/installed").touch()
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(["make", "-n", *target], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [".venv/bin/pubsel", *words.split()]


def test_the_makefile_is_short_and_holds_no_hyperparameters() -> None:
    text = (CHECKOUT / "Makefile").read_text()
    assert len(text.splitlines()) < 80
    recipes = [line for line in text.splitlines() if line.startswith("\t")]
    assert not [line for line in recipes if re.search(r"\b(epsilon|algorithm|training|pair|model|seed)[.\w]*=", line)]


def test_each_table_of_conf_has_a_target() -> None:
    for name in join.table_names():
        target = join.spec(name).target(name)
        assert target is not None, name
        assert make.steps_of(target.replace("-", "_"))
    with contextlib.suppress(UsageError):
        make.steps_of("mine")  # of another folder
        raise AssertionError


def test_a_listing_is_made_without_looking_for_garbage(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(make.Steps, "listing", lambda *_: f"collects: {gc.isenabled()}")
    assert done(cli, "make", "mine", *HERE, "dry=true")[0].strip() == "collects: False"
    assert gc.isenabled()
