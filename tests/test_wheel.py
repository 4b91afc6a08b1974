"""The package as others install it: everything it needs lies in the wheel."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import pubsel

CHECKOUT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("hatchling"), reason="hatchling is not installed: pip install .[dev]"
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("pubsel-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_settings_and_paper_numbers_and_no_tests(unpacked: Path) -> None:
    for there, here in (("conf", "conf"), ("paper", "results/paper")):
        packed = {path.relative_to(unpacked / "pubsel" / there) for path in (unpacked / "pubsel" / there).rglob("*.*")}
        assert packed == {path.relative_to(CHECKOUT / here) for path in (CHECKOUT / here).rglob("*.*")} != set()
    assert {path.name.partition("-")[0] for path in unpacked.iterdir()} == {"pubsel", "hydra_plugins"}


def test_extras_are_installed_in_the_same_words_everywhere() -> None:
    """From a clone: the package is on no index."""
    folders = ("docs", "conf", "pubsel", "hydra_plugins")
    paths = [path for folder in folders for path in (CHECKOUT / folder).rglob("*")] + [*CHECKOUT.glob("*.md")]
    text = "\n".join(path.read_text() for path in paths if path.suffix in (".md", ".jinja", ".yaml", ".py"))
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'needs_extra\(.(\w+).\)|python -m pip install "\.\[(\w+)\]"', text)
    assert {one or other for one, other in named} == extras.keys() - {"dev", "docs"}
    assert re.findall(r"pubsel\[\w+\]|(?<!python -m )pip install .*\[|install h5py", text) == []


def test_the_sdist_holds_what_its_tests_and_pages_need(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=CHECKOUT, capture_output=True, check=True, timeout=300)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < 8 * 2**20
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    want = "CONTRIBUTING.md SECURITY.md Makefile README.md.jinja scripts/lookup.py results/study_head.md.jinja"
    assert {*want.split(), "results/tables/recipes.csv", "results/records/recipes.jsonl.gz"} <= names
    assert [name for name in names if name.startswith(("results/runs/", "data/", ".venv"))] == []


COMMANDS = {
    "run --cfg job +experiment=quickstart": "private: digits",
    "data list": "svhn_extra",
    "table gsd_table2": "58.63",
    "report to=page.html": "0 records",
}


def test_the_wheel_works_without_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    code = (
        "import pubsel, pubsel.settings, sys; print(pubsel.__file__, pubsel.settings.CONF, file=sys.stderr)\n"
        "from pubsel.cli import main\n"
        f"for words in {list(COMMANDS)}:\n"
        "    assert main(words.split()) == 0, words"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for expected in COMMANDS.values():
        assert expected in done.stdout
    assert done.stderr.split() == [str(unpacked / "pubsel" / "__init__.py"), str(unpacked / "pubsel" / "conf")]


def test_the_wheel_runs_as_a_module(unpacked: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-P", "-m", "pubsel", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"pubsel-{done.stdout.strip()}.dist-info" in os.listdir(unpacked)


def runs(python: str | Path) -> bool:
    """Whether it is more than the name of a version that is not chosen."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_sdist_and_wheel_install_in_a_clean_environment(version: str, tmp_path: Path) -> None:
    """The wheel is built from the sdist. No index is asked for the packages that it needs: those of this environment
    serve, if it is of the same version of Python; under another version the files compile."""
    same = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    places = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    known = [sys.executable] if same else [place for place in places if place and runs(place)]
    if not known:
        pytest.skip(f"no python{version} on this machine")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def succeed(*words: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # what is published: the archive of the sources, and the wheel that follows from it
    build = [sys.executable, "-m", "hatchling", "build", "-d", tmp_path]
    succeed(*build, "-t", "sdist", cwd=CHECKOUT)
    (archive,) = tmp_path.glob("pubsel-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    succeed(*build, "-t", "wheel", cwd=tmp_path / archive.name.removesuffix(".tar.gz"))
    (wheel,) = tmp_path.glob("pubsel-*.whl")

    environment = tmp_path / "environment"
    succeed(known[0], "-m", "venv", "--without-pip", environment)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    succeed(*pip, "install", "--no-index", "--no-deps", wheel)
    (site,) = environment.glob("lib/python*/site-packages")
    if not same:
        succeed(environment / "bin" / "python", "-m", "compileall", "-q", site / "pubsel", site / "hydra_plugins")
        return

    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    script = environment / "bin" / "pubsel"
    assert succeed(script, "-V") == f"{pubsel.__version__}\n"
    for words, expected in COMMANDS.items():
        assert expected in succeed(script, *words.split())
    where = succeed(environment / "bin" / "python", "-c", "import pubsel; print(pubsel.__file__)")
    assert Path(where.strip()) == site / "pubsel" / "__init__.py"
