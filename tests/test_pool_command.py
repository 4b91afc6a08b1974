"""`pubsel pool`: clusters and assignments of a pool, by shards and through launchers."""

import json
from pathlib import Path

import pytest
from test_embeddings import rows, saved

from pubsel.data.embeddings import open_embeddings
from pubsel.selection import assigned
from tests.forked import Command
from tests.made import failed


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).rglob("*.np[yz]"))}


# Clusters and assignments


def pool_of(folder, shards=4):
    saved(folder / "a", {i: rows(60 + i, i) for i in range(shards - 1)})
    saved(folder / "b", {0: rows(50, 9)})


def test_shards_one_after_another_are_those_of_one_command(cli, folder):
    pool_of(folder)
    words = ["pool=[./b,./a]", "threads=1"]
    for shard in (2, 0, 3, 1):
        code, out, err = cli("pool", *words, f"shard={shard}", "data_root=first")
        assert (code, err) == (0, "")
        n = 50 if shard == 3 else 60 + shard
        assert f"{n} embeddings of shard {shard} of 4 shards assigned, 0 of 1 before" in out
    code, out, _ = cli("pool", *words, "data_root=second")
    assert "233 embeddings of all 4 shards assigned, 0 of 4 before" in out
    assert len(content("first")) == 5
    assert content("first") == content("second")
    assert "4 of 4 before" in cli("pool", *words, "data_root=first")[1]

    parts = [open_embeddings("./a"), open_embeddings("./b")]
    kept = assigned.assignment_folder(parts, "first")
    assert str(kept) in out.replace("second", "first")
    nearest = assigned.nearest_of(parts, assigned.clusters_kept(parts, kept), kept, pytest.fail)
    assert len(nearest) == 233
    assert nearest.min() >= 0


@pytest.mark.slow
def test_the_shards_of_a_sweep_are_those_of_one_process(cli, folder):
    """By joblib, two at a time: the clusters are computed by one of them, and each shard by one."""
    pool_of(folder, 4)
    sweep = ["pool=[./a,./b]", "shard=range(0,4)", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "threads=1"]
    command = Command(folder, "pool", "-m", *sweep, "data_root=by_two")
    assert command.code() == 0, command.err
    assert command.out.count("0 of 1 before") == 4
    assert cli("pool", "pool=[./a,./b]", "threads=1", "data_root=by_one")[0] == 0
    assert len(content("by_two")) == 5
    assert content("by_two") == content("by_one")
    records = [json.loads(path.read_text()) for path in Path("by_two").rglob("nearest_*.json")]
    assert sorted(record["n"] for record in records) == [50, 60, 61, 62]
    assert len({record["clusters"] for record in records}) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "pubsel pool pool=[FOLDER,...], of embeddings"),
        (["pool=[./a,./a]"], 2, "give each set once"),
        (["pool=[./absent]"], 1, "./absent: no such folder"),
        (["pool=[./a]", "shard=3"], 2, "shard=3: the pool has 3 shards, 0 to 2"),
    ],
)
def test_what_is_wrong_is_one_line(cli, folder, words, code, message):
    pool_of(folder)
    err = failed(cli, "pool", *words, code=code)
    assert message in err
    assert err.count("\n") == 1
