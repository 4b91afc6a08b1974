"""Brings records of an earlier version to today's settings, once: python scripts/migrate_records.py [RESULTS]

A distance is now named by its class, and has its own settings alone (null: none is measured); a private choice has its
own. The identity of a record is a digest of its settings, so that the record gets another name too, and with it its
file or folder. Results, and all else that stands in the record, stay as they are. Finished requests below RESULTS and
what is kept in RESULTS/records are renamed; what is half done is not, and starts again. RESULTS/records/renamed.csv.gz
has each old name with its new one; the ledger keeps the old ones.
"""

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

from pubsel.files import write_whole
from pubsel.messages import UserError
from pubsel.records import write_lines, write_record
from pubsel.settings.identity import digest_of

CLASSES = {
    "gsd": "gsd.GSD", "dp_gsd": "dp_gsd.DPGSD", "task2vec": "task2vec.Task2Vec", "otdd": "otdd.OTDD",
    "frechet": "frechet.Frechet", "mmd": "mmd.MMD",
}  # fmt: skip
ALL = ("name", "m", "initialisations")
SUBSPACES = (*ALL, "k", "normalise_rows", "labels", "parameters")
OF_DISTANCE = (*SUBSPACES, "exact", "epsilon", "delta", "mechanism", "private_m", "sketch")
FOLDERS = ("runs", "ranks", "distances", "audits", "attacks")


def distance_of(old: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of a distance, from those of the earlier version, which left out what had its default then."""
    name = old["name"]
    if name == "none":
        return None
    target: dict[str, Any] = {"_target_": f"pubsel.distances.{CLASSES[name]}"}
    if name in ("gsd", "dp_gsd"):
        target |= {key: old[key] for key in SUBSPACES}
    else:
        target |= {key: old[key] for key in ALL}
    if name == "otdd":
        target |= {"exact": old.get("exact", False)}
    if name == "dp_gsd":
        target |= {"epsilon": old.get("epsilon"), "delta": old.get("delta"), "mechanism": old.get("mechanism", "gauss")}
        target |= {"private_m": old.get("private_m", float(old["m"])), "sketch": old.get("sketch", 256)}
    return target


def is_earlier(settings: dict[str, Any]) -> bool:
    """Whether the settings of a record are those of the earlier version."""
    distance = settings.get("distance")
    return isinstance(distance, dict) and "_target_" not in distance


def migrated(old: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, a ranking, an audit or an attack."""
    distance = old["distance"]
    new = old | {"distance": distance_of(distance)}
    chosen = {key: distance[key] for key in ("private_m", "sketch") if key in distance and distance["name"] == "gsd"}
    return new | {"select": old.get("select", {}) | chosen} if chosen else new


def renamed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with today's settings and identity; UserError if its name is not that of its settings."""
    if "distance" in record["settings"]:
        settings = migrated(record["settings"])
    else:  # of a distance: settings of the distance, the pair and the network side by side
        given = {key: value for key, value in record["settings"].items() if key in OF_DISTANCE}
        pair = {key: value for key, value in record["settings"].items() if key not in given and key != "model"}
        distance = distance_of(given | {"m": record["m"]})
        settings = {"distance": distance, "pair": pair | {"m": given["m"]}, "model": record["settings"]["model"]}
    readable, _, digest = record["identity"].rpartition("-")
    if digest != digest_of(record["settings"]):
        raise UserError(f"{record['identity']}: its name is not that of its settings: leave it out")
    new = record | {"settings": settings, "identity": f"{readable}-{digest_of(settings)}"}
    measured = record.get("distance")
    if isinstance(measured, dict) and "settings" in measured and "distance" not in measured["settings"]:
        new["distance"] = renamed(measured)
    return new


def is_old(record: dict[str, Any]) -> bool:
    """Whether a record is one of the earlier version."""
    settings = record.get("settings", {})
    return is_earlier(settings) or ("name" in settings and "normalise_rows" in settings)


def migrate(results: Path) -> dict[str, str]:
    """Rename all in a folder of results; old names with their new ones. UserError if two get the same one."""
    names: dict[str, str] = {}

    def taken(record: dict[str, Any]) -> dict[str, Any]:
        new = renamed(record)
        names[record["identity"]] = new["identity"]
        return new

    # What is kept with the code: files that are named after records, and files with a record a line.
    for path in sorted((results / "records").rglob("*.json")):
        record = json.loads(path.read_text())
        if is_old(record):
            new = taken(record)
            path.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
            path.rename(path.with_name(f"{new['identity']}.json"))
    for path in sorted((results / "records").glob("*.jsonl.gz")):
        records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        if any(map(is_old, records)):
            write_lines(path, [taken(record) if is_old(record) else record for record in records])

    # What was made here: a folder for each request, with files beside the record.
    for path in sorted(path for kind in FOLDERS for path in (results / kind).glob("*/result.json")):
        record = json.loads(path.read_text())
        if is_old(record):
            new = taken(record)
            write_record(path, new)
            (path.parent / "settings.json").unlink(missing_ok=True)
            path.parent.rename(path.parent.with_name(new["identity"]))
    if len(set(names.values())) < len(names):
        raise UserError(f"{results}: two records have the same settings now")
    _mend_attacks(results, names)
    return names


def _mend_attacks(results: Path, names: dict[str, str]) -> None:
    """Attacks on trained models name the run that they attacked, in their records and in a table."""
    for path in sorted((results / "attacks").glob("loss-*/result.json")):
        record = json.loads(path.read_text())
        if record["run"] in names:
            run = names[record["run"]]
            write_record(path, record | {"run": run, "identity": f"loss-{run}"})
            path.parent.rename(path.parent.with_name(f"loss-{run}"))
    table = results / "tables" / "loss_attack.csv"
    if table.exists():
        lines = [line.rpartition(",") for line in table.read_text().splitlines()]
        write_whole(table, "".join(f"{row}{comma}{names.get(run, run)}\n" for row, comma, run in lines))


def main(results: Path) -> None:
    """Migrate, and write down the names beside those of earlier times."""
    names, path = migrate(results), results / "records" / "renamed.csv.gz"
    if names:
        before = csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines()) if path.exists() else ()
        table = io.StringIO()
        rows = {(old, new) for old, new in before if old != "old"} | set(names.items())
        csv.writer(table, lineterminator="\n").writerows([("old", "new"), *sorted(rows)])
        write_whole(path, gzip.compress(table.getvalue().encode(), mtime=0))
    print(f"{len(names)} records renamed")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
    except UserError as error:
        raise SystemExit(f"migrate_records: {error}") from None
