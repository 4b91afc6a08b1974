"""Every key of every sub-command: its type, range and meaning, and the identity of a run. Imports no torch."""

from pathlib import Path

_HERE = Path(__file__).resolve().parents[1]


CONF = next(
    path for path in (_HERE.parent / "conf", _HERE / "conf") if (path / "run.yaml").exists()
)  # checkout, or wheel
