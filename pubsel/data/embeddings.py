"""Folders of embeddings: features of public images that were computed before, in shards."""

from pathlib import Path
from typing import Any

from pubsel.settings.identity import is_path

SHARDS = ("*.npy", "*.parquet")


def is_embeddings(name: str) -> bool:
    """Return whether a data set is a folder of embeddings."""
    if not is_path(name):
        return False
    folder = Path(name).expanduser()
    return folder.is_dir() and any(next(folder.rglob(pattern), None) is not None for pattern in SHARDS)


def open_embeddings(name: str) -> Any:
    """Open a folder of embeddings."""
    raise NotImplementedError
