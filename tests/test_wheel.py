"""The package as others install it: everything it needs lies in the wheel."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
