# ruff: noqa: E402 (torch and numpy are imported below, once they know how many threads they may have)
import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # a process of tests for each core: torch and numpy read this when they are imported

import numpy as np
import pytest
import torch
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig
from pretend_cuda import pretended

from pubsel import records
from pubsel.cli import main
from pubsel.data import Reader, Split, open_dataset, public_examples
from pubsel.settings import CONF, datasets
from pubsel.settings.keys import Convert
from tests.made import Cli

WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")  # events that the interpreter tells of
CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KEPT = ("__pycache__", ".pytest_cache", ".hypothesis", ".coverage", ".cache", ".config")  # what libraries keep


def pytest_collection_modifyitems(items):
    """gpu and data tests skip with a reason where their means are absent; most gpu tests can be pretended to."""
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu and gpu.kwargs.get("real") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("data") and "PUBSEL_DATA" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="PUBSEL_DATA names no folder with real data"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A gpu test where there is none sees a pretended one."""
    pretend = item.get_closest_marker("gpu") and not torch.cuda.is_available()
    with pretended() if pretend else contextlib.nullcontext():
        return (yield)


def pytest_collection_finish():
    """All modules are imported: the garbage collector need not go through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


# Seeded noise follows from the source of the package, the processor and the number of threads: each edit and each
# machine would be another throw of the dice for tests that train. tests/test_releases.py has what these are for.


@pytest.fixture(autouse=True, scope="session")
def noise_that_no_edit_and_no_machine_changes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_package", lambda: "the package")
        patch.setattr(records, "processor", lambda: "a processor")
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "its vectors")
        yield


@pytest.fixture(autouse=True, scope="session")
def real_data() -> Iterator[str | None]:
    """The folder with real data. Only tests that are marked with it see it: others would keep in it what they make."""
    folder = os.environ.get("PUBSEL_DATA")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PUBSEL_DATA", raising=False)
        yield folder


@pytest.fixture(autouse=True, scope="session")
def written_elsewhere(real_data: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """What this process has written, made, renamed or removed in the checkout, with the real data, or at home."""
    folders = [Path(__file__).parent.parent, Path.home(), *([Path(real_data)] if real_data else [])]
    watched = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
    own = str(tmp_path_factory.getbasetemp().resolve())
    written, during = set[str](), True

    def watch(event: str, given: tuple) -> None:
        if during and event in WRITES and isinstance(given[0], str | os.PathLike):
            path = os.path.abspath(given[0])
            # A name within a folder that is open: of a folder that is removed, which is an event, too.
            writes = given[-1] in (-1, None) if event != "open" else (given[2] or 0) & CHANGE
            if writes and path.startswith(watched) and not path.startswith(own) and not any(map(path.count, KEPT)):
                written.add(path)

    sys.addaudithook(watch)
    yield written
    during = False


@pytest.fixture(autouse=True)
def writes_nothing_elsewhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, real_data: str | None, written_elsewhere: set[str]
) -> Iterator[None]:
    if real_data and request.node.get_closest_marker("data"):
        monkeypatch.setenv("PUBSEL_DATA", real_data)
    yield
    written = sorted(written_elsewhere)
    written_elsewhere.clear()
    assert not written, f"written outside of the test's folder: {', '.join(written)}"


@pytest.fixture(autouse=True)
def alike_in_any_order() -> None:
    """Whatever ran before: a run sets the number of threads of its process, and every draw moves a global stream."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it, and sys.argv: both come back after a test
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `pubsel WORDS` in this process and a folder of its own; exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def digits() -> tuple[Split, Split, Split]:
    """Training and test examples of digits, and images of noise."""
    source = open_dataset("digits", "nowhere", False)
    noise, _ = public_examples("noise", 100, source.train, Reader("nowhere"), Convert.resize)
    return source.train, source.test, noise


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[None]:
    """Hydra composes the same words of a command once, and each file of a dataset is checked once. Without this each
    command composes twice: first only to read `hydra.mode`."""
    compose, check = ConfigLoaderImpl.load_configuration, datasets.check
    composed, checked = dict[object, bytes](), dict[object, bytes]()

    def load_configuration(self, config_name: str | None, overrides: list[str], *arguments, **named) -> DictConfig:
        folders = {source.path for source in self.repository.get_sources() if source.scheme() == "file"}
        if folders != {str(CONF)}:
            return compose(self, config_name, overrides, *arguments, **named)  # a test may change its own files
        key = (config_name, *overrides, str(arguments), str(named))
        if key not in composed:
            composed[key] = pickle.dumps(compose(self, config_name, overrides, *arguments, **named))
        values = pickle.loads(composed[key])
        values.hydra.runtime.cwd = os.getcwd()
        return values

    def get_mode(self, config_name: str | None, overrides: list[str]) -> RunMode | None:
        with contextlib.suppress(Exception):  # it is raised again by the command
            return self.compose_config(config_name, overrides, RunMode.RUN).hydra.mode
        return None

    def check_once(schema: type, values, where: str = ""):
        if schema is not datasets.Dataset:
            return check(schema, values, where)
        key = (where, str(values))
        if key not in checked:
            checked[key] = pickle.dumps(check(schema, values, where))
        return pickle.loads(checked[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigLoaderImpl, "load_configuration", load_configuration)
        patch.setattr(Hydra, "get_mode", get_mode)
        patch.setattr(datasets, "check", check_once)
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        yield
