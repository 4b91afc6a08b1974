"""Tables and figures of made-up records, byte for byte those in tests/golden."""

import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from test_draw import asked
from test_judged import of_choosing
from test_paired import methods
from test_paired import runs as raced
from test_read_off import boosted, by_k, of_test, started

from pubsel import records
from pubsel.papers import draw, typeset
from pubsel.settings.keys import TableConfig
from tests.synthetic import save

GOLDEN = Path(__file__).parent / "golden"
TABLES = ("gsd_table2", "recipes", "choosing", "gsd_table9")  # plain, with a reference, judged, of attacks
FIGURES = """pillar_k pillar_epsilon pillar_best_k pillar_drop adamix_samples adamix_shots adamix_boost
    adamix_initialisation gsd_table2 recipes choosing""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results from which each kind of table and of figure can be made."""
    folder = tmp_path_factory.mktemp("golden")
    runs, ranks = of_choosing()
    runs += methods() + raced("only_public", {0: 60, 1: 65}, epsilon=0.0)
    runs += [
        run
        for private in ("flowers5", "kagchest")
        for epsilon, k in ((0.1, 10), (0.7, 40), (None, 160))
        for run in by_k(epsilon, k, private=private)
    ]
    shots = [(5, 0.6, 0.3), (20, 0.75, 0.7)]
    runs += [boosted(mixed, shots=n, seed=seed) for n, mixed, _ in shots for seed in (0, 1)]
    runs += [boosted(alone, "only_public", None, n, seed) for n, _, alone in shots for seed in (0, 1)]
    runs += [boosted(0.8, "paragon", None, None, seed) for seed in (0, 1)]
    runs += [started(utility=0.8), started(utility=0.3, pretrain_epochs=0), started("adamix", "resnet50_sl", 0.6)]
    for n in (5, 20):
        of_mnist = {"public": "mnist", "private": "mnist", "utility": n / 50}
        runs.append(of_test("only_public", None, pair={"shots": n}, **of_mnist) | {"label": "shots"})
        share = {"private_share": n / 6000}
        private = of_test("fully_private", 1.0, pair=share, private="mnist", utility=n / 60)
        runs.append(private | {"label": "shots", "private_examples": 10 * n})

    save(folder, *runs)
    shutil.copytree(GOLDEN / "runs", folder / "runs", dirs_exist_ok=True)
    for one in ranks:
        records.write_record(folder / "ranks" / one["identity"] / "result.json", one)
    row = {"attack": "black_box", "features": "images", "gsd_values": None, "known_members": 1800, "private": "digits"}
    row |= {"model": "probe", "private_examples": 2000, "trials": 1, "success": 0.5, "success_interval": [0.4, 0.61]}
    row |= {"members": 200, "others": 200, "auc": 0.51}
    attack = {"identity": "gsd_black_box-1", "rows": [row, row | {"features": "outputs"}], "privacy": "Not private."}
    records.write_record(folder / "attacks" / "gsd_black_box-1" / "result.json", attack | {"settings": {}})
    return folder


def check(kind: str, files: dict[str, bytes]) -> None:
    """Compare files with those in tests/golden/KIND; write these instead if PUBSEL_GOLDEN=write."""
    for name, content in files.items():
        if os.environ.get("PUBSEL_GOLDEN") == "write":
            (GOLDEN / kind / name).write_bytes(content)
        assert content.decode() == (GOLDEN / kind / name).read_text(), name
    assert sorted(files) == sorted(path.name for path in (GOLDEN / kind).iterdir())


def test_tables(folder):
    files = {}
    for name in TABLES:
        text = typeset.run(TableConfig(table=name, results=str(folder), debug=False))
        files[f"{name}.txt"] = text.replace(f"{folder}/", "").encode() + b"\n"
    check("tables", files | {path.name: path.read_bytes() for path in (folder / "tables").iterdir()})
    assert all("SYNTHETIC" in path.read_text() for path in GOLDEN.glob("runs/*/result.json"))


def test_figures(folder):
    for name in FIGURES:
        draw.run(asked(name, folder))
    paths = list((folder / "figures").iterdir())
    assert {path.suffix for path in paths} == {".csv", ".svg", ".pdf"}
    files = {path.name: path.read_bytes() for path in paths if path.suffix == ".csv"}
    for path in (path for path in paths if path.suffix == ".svg"):
        words = [" ".join(text.split()) for text in ElementTree.parse(path).getroot().itertext()]
        files[f"{path.stem}.txt"] = "\n".join(filter(None, words)).encode() + b"\n"
    check("figures", files)
