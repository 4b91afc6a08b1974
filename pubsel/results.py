"""One record per run, written whole or not at all, and where its number comes from. This file imports no torch."""

import contextlib
import gzip
import importlib.metadata
import json
import os
import platform
import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

from pubsel import __version__, config

_HERE = Path(__file__).resolve().parent

NEEDED = ("identity", "label", "seed", "private", "public", "model", "algorithm", "epsilon", "utility", "settings")
FAILED = "failed: "  # how the last line of a failed run's log begins, behind the time


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes `record` as JSON with sorted keys. `path` has either its old content or the whole record, never a part.

    UserError names the folder where it cannot be written; nothing half-written is left there.
    """
    write_whole(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_record(path: Path, needed: tuple[str, ...] = NEEDED) -> dict[str, Any]:
    """The record at `path`; UserError names the file where it is corrupt, truncated or lacks a key of `needed`."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise config.UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # no JSON, or no UTF-8
        raise config.UserError(f"{path} is no complete record: delete it to run the cell again") from None
    missing = [key for key in needed if not isinstance(record, dict) or key not in record]
    if missing:
        raise config.UserError(f"{path} is no record, it lacks {missing[0]!r}: delete it to run the cell again")
    return record


def read_records(results: Path) -> list[dict[str, Any]]:
    """Every results/runs/*/result.json, and of results/records (kept with the code) those of other cells: *.json, and
    *.jsonl.gz with a record a line. Sorted by identity. The first corrupt one raises UserError."""
    made = [read_record(path) for path in sorted((Path(results) / "runs").glob("*/result.json"))]
    kept = [read_record(path) for path in sorted((Path(results) / "records").glob("*.json"))]
    for path in sorted((Path(results) / "records").glob("*.jsonl.gz")):
        kept += _read_lines(path)
    names = {record["identity"] for record in made}
    return sorted(made + [r for r in kept if r["identity"] not in names], key=lambda record: record["identity"])


def read_ranks(results: Path) -> list[dict[str, Any]]:
    """Every results/ranks/*/result.json as records of what trains nothing: one for each candidate, with its distance,
    and without algorithm, epsilon and utility."""
    needed = ("identity", "private", "model", "values", "settings")
    found = [read_record(path, needed) for path in sorted((Path(results) / "ranks").glob("*/result.json"))]
    return [
        {key: rank.get(key) for key in ("private", "model", "settings", "commit")}
        | {"identity": f"{rank['identity']} {public}", "public": public, "seed": rank["settings"]["seed"]}
        | {"label": "paper", "algorithm": None, "epsilon": None, "utility": None, "distance": {"values": values}}
        for rank in found
        for public, values in rank["values"].items()
    ]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
    except (OSError, ValueError, EOFError) as error:
        raise config.UserError(f"{path} does not read ({error}): restore it") from None
    if any(not isinstance(record, dict) or key not in record for record in records for key in NEEDED):
        raise config.UserError(f"{path}: a line is no record: restore it")
    return records


def at(values: Any, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Records, one a line, compressed; equal records give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def provenance() -> dict[str, Any]:
    """Where a number comes from: `versions` (None: not installed), `commit` (None outside a checkout) and `hardware`.

    No host name, no user name and no path.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "pubsel": __version__}
    for package in ("torch", "numpy", "opacus", "prv-accountant"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions, "commit": _commit(_HERE.parent), "hardware": f"{_cpu()}, {os.cpu_count()} cores"}


def _commit(checkout: Path) -> str | None:
    """HEAD of `checkout`, with "-dirty" where pubsel/ or conf/ differ from it; None where it is no checkout's top."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(checkout), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return None  # installed somewhere below another project's checkout
        head = git("rev-parse", "--verify", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--", "pubsel", "conf") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file: `path` has either its old content or all of the new. UserError names a folder that cannot be
    written to."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        why = error.strerror or str(error)
        raise config.UserError(
            f"cannot write {path.name} in folder {path.parent}: {why}; mend it, or set results=..."
        ) from None
    except BaseException:
        _remove(temporary)
        raise
    _sync_folder(path.parent)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes the rename last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
