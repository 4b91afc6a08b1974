"""What README.md and the pages of docs/ tell a reader to type: all of it composes, and what is cheap runs."""

import contextlib
import dataclasses
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pages
import pytest
import slurm
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from hydra_plugins import pubsel_launchers
from pubsel import algorithms, distances
from pubsel.cli import _positional, main
from pubsel.papers import draw, make
from pubsel.rules import canonical
from pubsel.settings import CONF
from pubsel.settings.compose import composed
from pubsel.settings.keys import SCHEMAS, RunConfig
from pubsel.settings.methods import option
from pubsel.settings.schema import check
from tests.forked import Command

CHECKOUT = Path(__file__).resolve().parent.parent
GUIDE = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(GUIDE.glob("*.md"))]
TUTORIALS = [page for page in PAGES if page.stem.startswith("tutorial")]
NOT_RUN = "# not run by the tests"  # the first line of a block that needs what tests have not


class Block(NamedTuple):
    """A fenced block: its language, "" for what a program said, and its text."""

    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


def lines(block: Block) -> list[list[str]]:
    """The commands of a block, in words; one that goes on behind a backslash is one. A comment is none."""
    return [
        words for line in block.text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))
    ]


def commands(page: Path, program: str) -> list[list[str]]:
    """The words behind `program` in each command of the page."""
    found = [words for block in blocks(page) if block.kind == "sh" for words in lines(block)]
    inside = ("pubsel ", "torchrun ")  # sbatch --wrap
    found += [shlex.split(word) for words in found for word in words if word.startswith(inside)]
    found = [words[words.index("pubsel") :] if words[0] == "torchrun" else words for words in found]
    return [words[1:] for words in found if words[0].removeprefix(".venv/bin/") == program]


# Everything composes


@pytest.fixture
def conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def choices(words: list[str]) -> list[list[str]]:
    """The overrides of one cell after the other, each with another value of every word that is swept."""
    swept = []
    for word, one in zip(words, OverridesParser.create().parse_overrides(words), strict=True):
        values = list(one.sweep_string_iterator()) if one.is_sweep_override() else []
        swept.append([f"{one.input_line.partition('=')[0]}={value}" for value in values] or [word])
    return [[cell or first[0] for cell, first in zip(row, swept, strict=True)] for row in zip_longest(*swept)] or [[]]


@pytest.mark.usefixtures("conf")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_composes(page: Path) -> None:
    pubsel_launchers.register()
    for words in commands(page, "pubsel"):
        if "--version" in words or "--help" in words or "--config-dir" in words:
            continue
        assert not {"-m", "--cfg"} <= set(words), words  # Hydra takes one of them
        command, *rest = (word for word in words if word not in ("-m", "--cfg", "job", "..."))
        for overrides in choices(_positional(command, rest)):
            with composed(command, overrides) as values:
                settings: object = check(SCHEMAS[command], values)
            if command == "figure":
                assert settings.figure in draw.figure_names()
            elif isinstance(settings, RunConfig) and settings.replay is None and settings.like is None:
                canonical(settings)
            if command == "make":
                assert make.steps_of(settings.name)
            if command == "table":
                assert settings.table in ("all", *(path.stem for path in (CONF / "tables").glob("*.yaml")))


def test_what_needs_no_training_runs(folder: Path) -> None:
    """Of the commands of all pages but the tutorials, which run below; those that train only compose above."""
    said = [words for page in PAGES if page not in TUTORIALS for words in commands(page, "pubsel")]
    cheap = [words for words in said if words[0] in ("runs", "table", "report") and not {"NAME", "delete"} & set(words)]
    assert len(cheap) >= 3
    for words in cheap:
        assert main(words) == 0, words


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(CHECKOUT / name for name in ("CONTRIBUTING.md", "SECURITY.md")), *(CHECKOUT / "results").glob("*.md")],
    ids=lambda page: str(page.relative_to(CHECKOUT)),
)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Targets of make, scripts, and files behind links."""
    makefile = (CHECKOUT / "Makefile").read_text()
    targets = re.search(r"\.PHONY:((?:.*\\\n)*.*)", makefile)[1].split()  # type: ignore[index]
    text = page.read_text()
    asked = [next(word for word in words if "=" not in word) for words in commands(page, "make")]
    asked += re.findall(r"`make ([a-z][\w-]*)", text)
    for target in asked:
        assert target in targets or make.steps_of(target.replace("-", "_")), target
    for script in set(re.findall(r"\bscripts/\w+\.\w+", text)):
        assert (CHECKOUT / script).is_file(), script
    for link in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        there = link.startswith("http") or (page.parent / link).exists()
        assert there or (page.parent == GUIDE and link in pages.hooks().generated()), link  # of the site alone


# The tutorials


def said(block: Block, names: dict) -> str:
    """What a block prints: python in one namespace, commands in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if block.kind == "python":
            exec(compile(block.text, "tutorial", "exec"), names)
        for words in lines(block) if block.kind == "sh" else []:
            if words[0] == "export":
                continue
            assert words[0] == "pubsel"
            assert main(words[1:]) == 0, words
    return out.getvalue()


def without_numbers(text: str) -> str:
    """What stays the same from run to run: every word, but no number, no run's digest and no width of a column."""
    numbers = r"[0-9a-f]{10}\b|−?\d[\d.,]*(e-\d+)?( (s|minutes?|min|hours?|h)\b)?"
    return re.sub(r"[\s-]+", " ", re.sub(numbers, "#", text)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_runs_and_says_what_it_shows(folder: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The noise is the same each time: it decides what is chosen, and whether classes are named that it hides.
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    names: dict = {"__name__": "tutorial"}
    found = ""
    for block in blocks(page):
        if block.kind == "":
            assert without_numbers(block.text) == without_numbers(found)
        elif not block.text.startswith(NOT_RUN):
            found = said(block, names)
    least = {"tutorial": 150, "tutorial_table": 50, "tutorial_text": 140, "tutorial_embeddings": 180}
    assert names["right"] > least[page.stem] if page.stem in least else names["scores"].mean() > 0.7
    if page.stem == "tutorial":
        record = names["record"]
        assert record["public"] == "./public/digits"
        assert record["utility"] > 0.8


def test_every_kind_of_data_has_a_tutorial() -> None:
    assert {page.stem.partition("_")[2] for page in TUTORIALS} == {"", "table", "text", "embeddings", "notebook"}
    for page in TUTORIALS:
        assert f"(docs/{page.name})" in (CHECKOUT / "README.md").read_text(), page
        assert f": {page.name}\n" in (CHECKOUT / "mkdocs.yml").read_text(), page


# What CONTRIBUTING.md adds


def put(block: Block, folder: Path, clone: Path) -> None:
    """A file as its first line says, `# FILE`; or lines below one of a table, `# FILE, below `NAME``."""
    head, _, text = block.text.partition("\n")
    name, _, above = head.removeprefix("# ").partition(", below ")
    file = folder / name.replace("$PUBSEL", str(clone))
    file.parent.mkdir(parents=True, exist_ok=True)
    if not above:
        assert not file.exists(), file
        file.write_text(block.text)
        return
    lines = file.read_text().splitlines(keepends=True)
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"| {above} |")]
    file.write_text("".join([*lines[: place + 1], text, *lines[place + 1 :]]))


@pytest.mark.slow
def test_contributing_can_be_followed_to_the_letter(tmp_path: Path) -> None:
    """Its files in a folder beside a copy of the checkout, and all its commands in one shell; nothing is added."""
    clone, own = tmp_path / "clone", tmp_path / "own"
    own.mkdir()
    for name in ("pubsel", "hydra_plugins", "conf", "docs", "tests", "scripts", "results/paper", "results/records"):
        shutil.copytree(CHECKOUT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in CHECKOUT.iterdir():
        if path.is_file():
            shutil.copy(path, clone)
    page = blocks(CHECKOUT / "CONTRIBUTING.md")
    for block in page:
        if block.kind != "sh":
            put(block, own, clone)
    script = "".join(f"echo; echo '== {i}'\n{block.text}" for i, block in enumerate(page) if block.kind == "sh")
    environment = os.environ | {"PUBSEL": str(clone), "PYTHONPATH": str(clone)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(shell, cwd=own, text=True, capture_output=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr

    told = done.stdout
    assert re.search(r"-median_clip-eps4-.*differentially private.*\nmedian_clip on digits, white_box: claimed ", told)
    assert "NOT WHAT IS ACCOUNTED FOR" not in told
    assert "leaves: 64 training and 16 test images of 8x8x1, 2 classes" in told
    assert "GSD to leaves" in told
    assert re.search(r"Distance of means to digits.*\ndigits .*\nnoise ", told, re.DOTALL)
    assert len(re.findall(r"^\d+ passed", told, re.MULTILINE)) == 2  # both calls of pytest


def test_what_contributing_shows_is_short() -> None:
    """A new algorithm takes at most 30 lines, a new distance 25, and each one file of options."""
    page = [block for block in blocks(CHECKOUT / "CONTRIBUTING.md") if block.kind in ("python", "yaml")]
    lines = {block.text.partition("\n")[0].split()[1]: block.text.count("\n") - 1 for block in page}
    assert lines["median_clip.py"] <= 30
    assert lines["means.py"] <= 25
    options = {"conf/algorithm/median_clip.yaml", "conf/distance/means.yaml", "conf/dataset/leaves.yaml"}
    options |= {"conf/tables/digits_epsilon.yaml"}
    assert options == {name for name in lines if name.endswith(".yaml") and "waves" not in name}


# Many cells


def launched(folder: Path, launcher: str, **environment: str) -> Command:
    """The quickstart's sweep of the page by this launcher, as typed, and each cell cut down to one step."""
    (words,) = [
        words
        for words in commands(GUIDE / "sweeps.md", "pubsel")
        if f"hydra/launcher={launcher}" in words and "seed=0,1" in words and "+experiment=quickstart" in words
    ]
    small = "training.epochs=1 training.batch_size=1297 distance=none device=cpu threads=1"
    return Command(folder, *words, *small.split(), **environment)


def named(folder: Path, under: str) -> list[str]:
    """Files of the page's table whose names have `under` in them, of which there is none in the results."""
    files = re.findall(r"^\| `((?:sweeps|runs)/\S+)` \|", (GUIDE / "sweeps.md").read_text(), re.MULTILINE)
    assert len(files) == 5
    patterns = [re.sub("TIME|JOB|NAME", "*", file).replace("0003", "0001") for file in files if under in file]
    return [pattern for pattern in patterns if not list((folder / "results").glob(pattern))]


@pytest.mark.slow
def test_the_sweep_on_one_machine_leaves_the_files_that_the_page_names(tmp_path: Path) -> None:
    done = launched(tmp_path, "joblib")
    assert (done.code(300), done.out.count("differentially private")) == (0, 2), done.err
    assert named(tmp_path, "log") == ["sweeps/*/jobs/*/*_log.out"]


@pytest.mark.slow
def test_the_sweep_on_a_cluster_leaves_the_files_that_the_page_names(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "slurm").mkdir()
    slurm.install(tmp_path / "slurm")
    path = f"{tmp_path / 'slurm'}{os.pathsep}{os.environ['PATH']}"
    done = launched(tmp_path, "submitit_slurm", PATH=path)
    assert (done.code(300), done.out.count("differentially private")) == (0, 2), done.err
    assert named(tmp_path, "") == ["sweeps/*/0001.log"]
    asked = {"partition": "gpu", "time": "60", "gpus-per-node": "1", "cpus-per-task": "4", "mem": "16GB"}
    jobs = slurm.jobs(tmp_path / "slurm")
    assert {job.partition("_")[0] for job in jobs} == {"1"}  # one array
    for job in jobs.values():
        assert {key: job["options"][key] for key in asked} == asked


def test_the_table_of_the_launcher_has_all_its_keys() -> None:
    told = table_of(GUIDE / "sweeps.md", "`hydra.launcher.`")
    have = {f.name for f in dataclasses.fields(pubsel_launchers.SlurmConf)} - {"_target_", "cluster"}
    assert set(told) >= have
    options = "timeout_min gpus_per_node cpus_per_task mem_gb array_parallelism max_num_timeout signal_delay_s"
    for name in options.split():
        assert told[name][0] == str(getattr(pubsel_launchers.SlurmConf, name))


# Guarantees


def table_of(page: Path, head: str) -> dict[str, list[str]]:
    """The cells behind each name in the first column of the table whose first head is `head`."""
    found: dict[str, list[str]] = {}
    rows = page.read_text().split(f"| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    for names, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, name
            found[name] = cells
    return found


@pytest.mark.usefixtures("conf")
def test_the_guarantee_of_every_algorithm_is_the_one_that_its_code_declares() -> None:
    told = table_of(GUIDE / "guarantees.md", "`algorithm=`")
    assert sorted(told) == sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
    for name, (guarantee, sensitivity, _, where) in told.items():
        settings = check(RunConfig, compose("run", [f"algorithm={name}"]))
        algorithm = algorithms.build(settings.algorithm)
        root = sensitivity.startswith("sqrt(")
        number = math.sqrt(float(sensitivity[5:-1])) if root else float(sensitivity)
        assert algorithm.sensitivity() == pytest.approx(number, rel=1e-4), name
        expected = "(epsilon, delta)" if algorithm.private else "none"
        assert guarantee == ("epsilon 0" if algorithm.sensitivity() == 0 else expected), name
        assert where == f"`{type(algorithm).__module__.replace('.', '/')}.py`", name
        first = algorithm.first_share
        assert bool(first) == ("algorithm.share" in told[name][2]), name


def test_the_guarantee_of_every_distance_is_the_one_that_its_class_has() -> None:
    told = table_of(GUIDE / "guarantees.md", "`distance=`")
    assert sorted(told) == sorted(path.stem for path in (CONF / "distance").glob("*.yaml"))
    for name, (guarantee, reads, where) in told.items():
        distance = distances.build(option("distance", name))
        if distance is None:
            assert (name, guarantee) == ("none", "nothing is measured")
            continue
        private = isinstance(distance, distances.Releases)
        assert guarantee == ("(epsilon, delta)" if private else "none"), name
        assert where == f"`{type(distance).__module__.replace('.', '/')}.py`", name
        if not private:
            assert "without noise" in distance.statement()["privacy"]
            assert reads.startswith(distance.reads.split(",")[0]), name


def test_the_files_that_the_page_on_guarantees_names_are_there() -> None:
    for name in set(re.findall(r"`(pubsel/[\w/]+\.py)`", (GUIDE / "guarantees.md").read_text())):
        assert (CHECKOUT / name).is_file(), name


def test_the_readme_shows_what_the_tutorial_shows_for_the_same_command() -> None:
    """Three dots are what README leaves out of a line."""
    shown = []
    for page in (CHECKOUT / "README.md", GUIDE / "tutorial.md"):
        every = blocks(page)
        places = [
            i for i, block in enumerate(every) if re.search(r"^pubsel fit .*epsilon=1$", block.text, re.MULTILINE)
        ]
        (command,) = re.findall(r"^pubsel fit .*", every[places[0]].text, re.MULTILINE)
        shown.append((command, every[places[0] + 1].text.splitlines()))
    (command, short), (full_command, full) = shown
    assert command == full_command
    for line in short:
        assert any(re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), whole) for whole in full), line
