"""Records of an earlier version: each gets one name of its own, and every table stays as it was."""

import copy
import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pubsel import distances, records
from pubsel.messages import UserError
from pubsel.papers import join
from pubsel.settings import CONF
from pubsel.settings.identity import digest_of

sys.path.insert(0, str(CONF.parent / "scripts"))
from migrate_records import CLASSES, SUBSPACES, is_old, main, migrate, migrated, renamed

RESULTS = CONF.parent / "results"
KEPT = records.read_records(RESULTS) + [
    json.loads(path.read_text()) for kind in ("ranks", "audits") for path in (RESULTS / "records" / kind).glob("*.json")
]
IGNORED = {"k": 1, "labels": "random", "normalise_rows": True, "parameters": "weights"}  # but by gsd


def earlier(record: dict[str, Any], public: bool = True) -> dict[str, Any]:
    """A record as the earlier version wrote it. public: whether its algorithm uses public data."""
    settings, distance = copy.deepcopy(record["settings"]), record["settings"]["distance"]
    if distance is None:
        old = {"name": "none", "k": 16 if public else 1, "m": 2000 if public else 2, "initialisations": 1}
        old |= {"labels": "random", "normalise_rows": True, "parameters": "weights"}
    else:
        old = (IGNORED if distance["name"] not in ("gsd", "dp_gsd") else {}) | distance
        old = {key: value for key, value in old.items() if key != "_target_" and (key != "exact" or value)}
    made = record | {"settings": settings | {"distance": old}}
    made["identity"] = f"{record['identity'][:-10]}{digest_of(made['settings'])}"
    measured = record.get("distance")
    if isinstance(measured, dict) and "settings" in measured:
        what = old | settings["pair"] | {"model": settings["model"]}
        name = f"{measured['identity'][:-10]}{digest_of(what)}"
        made["distance"] = measured | {"settings": what, "identity": name}
    return made


def before(record: dict[str, Any]) -> dict[str, Any]:
    return earlier(record, record["settings"].get("pair", {}).get("public") is not None)


def test_each_kept_record_had_a_name_of_its_own_and_has_one():
    text = gzip.decompress((RESULTS / "records" / "renamed.csv.gz").read_bytes()).decode()
    (head, *rows) = csv.reader(text.splitlines())
    assert head == ["old", "new"]
    old, new = zip(*rows, strict=True)
    assert len(set(old)) == len(set(new)) == len(rows)
    names = dict(zip(new, old, strict=True))
    kept = {record["identity"]: record for record in KEPT}
    assert set(names) <= set(kept)  # those that are newer never had another name
    for record in map(kept.__getitem__, names):
        was = before(record)
        assert was["identity"] == names[record["identity"]]  # the digest of the settings that it had
        assert renamed(was) == record


def test_kept_records_have_todays_settings():
    for record in KEPT:
        assert not is_old(record)
        assert record["identity"].endswith(digest_of(record["settings"]))
        distance = distances.build(record["settings"]["distance"])
        assert (distance is None) == (record.get("distance") is None)
        measured = record.get("distance")
        if isinstance(measured, dict):
            assert measured["settings"] == {key: record["settings"][key] for key in ("distance", "pair", "model")}
            assert measured["name"] == record["settings"]["distance"]["name"]


@pytest.mark.parametrize("name", ["pillar_ours", "distances_ours", "adamix_ours", "gsd_table2"])
def test_tables_of_old_and_new_records_are_equal(name):
    made = records.read_records(RESULTS)
    tables = [join.make(name, sorted(given, key=lambda one: one["identity"])) for given in (made, map(before, made))]
    assert len(tables[0].frame) > 10
    assert tables[0].frame.to_csv() == tables[1].frame.to_csv()
    assert tables[0].ranks.to_csv() == tables[1].ranks.to_csv()


def test_a_folder_of_results_is_renamed_once(tmp_path: Path):
    runs = [before(record) for record in KEPT[:40:8]]
    ranks = [before(record) for record in KEPT if "order" in record][:2]
    for kind, made in (("runs", runs), ("ranks", ranks)):
        for record in made:
            records.write_record(tmp_path / kind / record["identity"] / "result.json", record)
    measured = next(before(record)["distance"] for record in KEPT if isinstance(record.get("distance"), dict))
    records.write_record(tmp_path / "distances" / measured["identity"] / "result.json", measured)
    attack = {"identity": f"loss-{runs[0]['identity']}", "run": runs[0]["identity"], "attack": "loss"}
    records.write_record(tmp_path / "attacks" / attack["identity"] / "result.json", attack)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "loss_attack.csv").write_text(f"auc,run\n0.5,{runs[0]['identity']}\n0.6,another\n")
    (tmp_path / "runs" / runs[0]["identity"] / "model.pt").write_bytes(b"weights")
    (tmp_path / "records").mkdir()
    main(tmp_path)

    want = {record["identity"] for record in KEPT[:40:8]}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == want
    for path in tmp_path.glob("*/*/result.json"):
        assert json.loads(path.read_text())["identity"] == path.parent.name
    new = KEPT[0]["identity"]
    assert (tmp_path / "runs" / new / "model.pt").read_bytes() == b"weights"
    assert json.loads((tmp_path / "attacks" / f"loss-{new}" / "result.json").read_text())["run"] == new
    assert (tmp_path / "tables" / "loss_attack.csv").read_text() == f"auc,run\n0.5,{new}\n0.6,another\n"
    assert migrate(tmp_path) == {}


def test_settings_of_every_distance_are_those_of_its_class():
    """Also of those of which no record is kept, and of a private choice."""
    shared = {"k": 4, "m": 60, "initialisations": 2, "normalise_rows": False, "labels": "given", "parameters": "all"}
    for name in CLASSES:
        budget = {"epsilon": 1.0, "delta": 1e-5} if name == "dp_gsd" else {}
        made = migrated({"distance": {"name": name} | shared | budget, "seed": 0})
        distance = distances.build(made["distance"])
        assert distance is not None
        assert (distance.name, distance.m, distance.initialisations) == (name, 60, 2)
        if "gsd" in name:
            assert all(made["distance"][key] == value for key, value in shared.items() if key in SUBSPACES)
    choice = migrated({"distance": {"name": "gsd", "private_m": "inf", **shared}, "epsilon_select": 0.1})
    assert choice["select"] == {"private_m": "inf"}
    assert "private_m" not in choice["distance"]
    noisy = migrated({"distance": {"name": "dp_gsd", "private_m": "inf", "mechanism": "bingham", **shared}})["distance"]
    assert (noisy["private_m"], noisy["mechanism"], noisy["sketch"], noisy["delta"]) == ("inf", "bingham", 256, None)


def test_a_record_whose_name_is_not_that_of_its_settings_is_left():
    record = before(KEPT[0])
    with pytest.raises(UserError, match="its name is not that of its settings"):
        renamed(record | {"identity": f"{record['identity'][:-10]}0123456789"})
