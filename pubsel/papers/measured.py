"""Records of `pubsel rank` and of attacks, as tables, figures and the report take them. This file imports no torch."""

from pathlib import Path
from typing import Any

from pubsel.records import Rank, readable


def read_ranks(results: Path) -> list[dict[str, Any]]:
    """Read every record of `pubsel rank` that measured distances as records that train nothing: one for each candidate,
    with its distance, and without algorithm, epsilon and utility. Private choices measure nothing that may be shown:
    `read_choices`."""
    records = []
    for rank in read_kind(results, "ranks"):
        if "chosen" in rank:
            continue
        shared = {key: rank.get(key) for key in ("private", "model", "settings", "commit")}
        shared |= {"seed": rank["settings"]["seed"], "label": "paper"}
        shared |= {"algorithm": None, "epsilon": None, "utility": None}

        for public, values in rank["values"].items():
            name = f"{rank['identity']} {public}"
            records.append(shared | {"identity": name, "public": public, "distance": {"values": values}})
    return records


def read_choices(results: Path) -> list[dict[str, Any]]:
    """Return the records of private choices, by `pubsel rank`: those that have `chosen`, of `candidates`."""
    return [rank for rank in read_kind(results, "ranks") if "chosen" in rank]


def read_measured(results: Path) -> list[dict[str, Any]]:
    """Return every record of `pubsel rank` that measured distances, and how long it took."""
    return [rank for rank in read_kind(results, "ranks") if "values" in rank and "seconds_private" in rank]


def read_kind(results: Path, kind: str, schema: type = Rank, pattern: str = "*") -> list[dict[str, Any]]:
    """Read every results/KIND/PATTERN/result.json, and of results/records/KIND (kept with the code) the others. One
    that is none is left out, with a line."""
    paths = sorted((Path(results) / kind).glob(f"{pattern}/result.json"))
    paths += sorted((Path(results) / "records" / kind).glob(f"{pattern}.json"))
    records: dict[str, dict[str, Any]] = {}
    for record in readable(paths, schema):
        records.setdefault(record["identity"], record)
    return list(records.values())
