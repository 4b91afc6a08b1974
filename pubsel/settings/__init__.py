"""Every key of every sub-command: its type, range and meaning, and the identity of a run. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_HERE = Path(__file__).resolve().parents[1]


CONF = next(
    path for path in (_HERE.parent / "conf", _HERE / "conf") if (path / "run.yaml").exists()
)  # checkout, or wheel


FETCHES = ContextVar("FETCHES", default=True)  # whether published weights that are not here may be fetched


@contextmanager
def fetching(allowed: bool) -> Iterator[None]:
    """Set FETCHES while a command runs: its key `download`."""
    before = FETCHES.set(allowed)
    try:
        yield
    finally:
        FETCHES.reset(before)


def own_folders() -> list[Path]:
    """Return the user's own folders of options, next to conf/: --config-dir, as Hydra knows it while a command runs."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return []
    sources = HydraConfig.get().runtime.config_sources
    return [Path(source.path) for source in sources if source.schema == "file" and Path(source.path) != CONF]


def named(group: str) -> dict[str, Path]:
    """Return the files of a folder of conf/ by name, and those of the same folder in `own_folders`. A name that both
    have is that of conf/, as for Hydra's options."""
    files = [path for folder in (CONF, *own_folders()) for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: path for path in reversed(files)}
