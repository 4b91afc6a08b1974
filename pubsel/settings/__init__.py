"""Every key of every sub-command: its type, range and meaning, and the identity of a run. Imports no torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parents[1]
CONF = next(
    path for path in (_HERE.parent / "conf", _HERE / "conf") if (path / "run.yaml").exists()
)  # checkout, or wheel
FETCHES = ContextVar("FETCHES", default=True)  # whether published weights that are not here may be fetched
OWN: ContextVar[tuple[Path, ...]] = ContextVar("OWN", default=())  # --config-dir of a command that Hydra does not read
_OFFLINE: list[bool] = []  # of every thread; the last one counts


@contextmanager
def fetching(allowed: bool) -> Iterator[None]:
    """Set FETCHES while a command runs: its key `download`. Without it no library may ask the network for weights or
    data either: an OSError takes the place of each request, and files that were fetched before are still read."""
    before = FETCHES.set(allowed)
    try:
        if allowed:
            yield
            return
        with _offline():
            yield
    finally:
        FETCHES.reset(before)


@contextmanager
def _offline() -> Iterator[None]:
    # The hub of Hugging Face has a switch: in the environment until it is imported, in its module afterwards.
    name, hub = "HF_HUB_OFFLINE", "huggingface_hub.constants"
    in_environment, in_module = os.environ.get(name), getattr(sys.modules.get(hub), name, False)
    os.environ[name] = "1"
    if hub in sys.modules:
        setattr(sys.modules[hub], name, True)

    if not _OFFLINE:
        sys.addaudithook(_refuse)  # nothing can remove a hook
    _OFFLINE.append(True)
    try:
        yield
    finally:
        _OFFLINE.append(False)
        del os.environ[name]
        if in_environment is not None:
            os.environ[name] = in_environment
        if hub in sys.modules:
            setattr(sys.modules[hub], name, in_module)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise OSError if urllib is about to fetch something while nothing is to be fetched."""
    if event == "urllib.Request" and _OFFLINE[-1] and not str(arguments[0]).startswith("file:"):
        raise OSError("download=false")


def own_folders() -> list[Path]:
    """Return the user's own folders of options, next to conf/: --config-dir of the command that runs."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return list(OWN.get())
    sources = hydra.HydraConfig.get().runtime.config_sources
    return [Path(source.path) for source in sources if source.schema == "file" and Path(source.path) != CONF]


def named(group: str) -> dict[str, Path]:
    """Return the files of a folder of conf/ by name, and those of the same folder in `own_folders`. A name that both
    have is that of conf/, as for Hydra's options."""
    files = [path for folder in (CONF, *own_folders()) for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: path for path in reversed(files)}
