"""Folders of embeddings: both layouts, what is none of them, and how little memory they take; clusters of a pool and
assignments, which are kept shard by shard."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pubsel.data.embeddings import BLOCK, Shard, check_widths, is_embeddings, open_embeddings
from pubsel.files import ProgressLine
from pubsel.messages import UserError
from pubsel.selection import assigned, pool
from pubsel.selection.assigned import assignment_folder, clusters_kept, nearest_of

D = 12


def rows(n, seed=0, d=D, dtype=np.float16):
    """Embeddings of five kinds."""
    draw = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).normal(size=(5, d))
    return (kinds[draw.integers(0, 5, n)] + 0.3 * draw.normal(size=(n, d))).astype(dtype)


def saved(folder, shards, name="img_emb_{}"):
    """A folder of shards with those numbers, and all their rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, x in shards.items():
        np.save(folder / f"{name.format(number)}.npy", x)
    return np.concatenate([shards[number] for number in sorted(shards)])


def clip_retrieval(folder, shards=None):
    """What clip-retrieval writes."""
    x = saved(folder / "img_emb", shards or {i: rows(n, i) for i, n in ((0, 70), (2, 80), (10, 90))})
    saved(folder / "text_emb", {0: rows(240)[:, ::-1]}, "text_emb_{}")
    (folder / "metadata").mkdir()
    (folder / "metadata" / "metadata_0.parquet").write_bytes(b"PAR1")
    return x


def whole(embeddings):
    return torch.cat([block.float() for block in embeddings.blocks()]).numpy()


# Layouts


def test_shards_of_clip_retrieval_are_read_in_the_order_of_their_numbers(tmp_path):
    x = clip_retrieval(tmp_path / "laion")
    assert is_embeddings(str(tmp_path / "laion"))
    embeddings = open_embeddings(str(tmp_path / "laion"))
    assert [shard.path.name for shard in embeddings.shards] == ["img_emb_0.npy", "img_emb_2.npy", "img_emb_10.npy"]
    assert (embeddings.n, embeddings.d) == (240, D)
    np.testing.assert_array_equal(whole(embeddings), x.astype(np.float32))
    places = np.array([239, 0, 70, 69, 150, 0])
    picked = embeddings.rows(places)
    assert picked.dtype == torch.float32
    np.testing.assert_array_equal(picked.numpy(), x[places].astype(np.float32))


def test_a_plain_folder_of_arrays(tmp_path):
    (tmp_path / "._part-0.npy").write_bytes(b"what a Mac keeps")
    x = saved(tmp_path, {0: rows(BLOCK + 5, dtype=np.float32), 1: rows(3, 1, dtype=np.float32)}, "part-{}")
    embeddings = open_embeddings(str(tmp_path))
    assert [len(block) for block in embeddings.blocks()] == [BLOCK, 5, 3]
    np.testing.assert_array_equal(whole(embeddings), x)
    places = np.random.default_rng(0).integers(0, len(x), 600)
    np.testing.assert_array_equal(embeddings.rows(places).numpy(), x[places])


@pytest.mark.parametrize(
    "files",
    [
        ["cats/1.jpg", "dogs/1.jpg", "features.npy"],  # classes
        ["1.jpg", "2.jpg", "features.npy"],
        ["00000/000000001.jpg", "00000.parquet"],  # img2dataset
        ["img_emb/1.jpg"],
        ["notes.txt", ".hidden.npy"],
        [],
    ],
)
def test_names_files_and_folders_of_images_are_none(tmp_path, files):
    for file in files:
        (tmp_path / "own" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / file).touch()
    assert not any(map(is_embeddings, (str(tmp_path / "own"), "cifar10", "./images.npz", "./nowhere")))


# What goes wrong


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: np.save(path, rows(5, d=D + 1)), r"img_emb_2.npy: 13 numbers a row, and img_emb_0.npy has 12"),
        (lambda path: np.save(path, rows(5)[None]), r"img_emb_2.npy: float16 \[1, 5, 12\]: embeddings are float16 or"),
        (lambda path: np.save(path, rows(5).astype(int)), r"img_emb_2.npy: int64 \[5, 12\]: embeddings are float16"),
        (lambda path: np.save(path, np.asfortranarray(rows(5))), r"img_emb_2.npy cannot be read \(its rows are not"),
        (lambda path: np.save(path, np.array([{}])), r"img_emb_2.npy cannot be read .*: download or compute it again"),
        (cut, r"img_emb_2.npy cannot be read .*: download or compute it again"),
        (lambda path: path.write_bytes(b""), r"img_emb_2.npy cannot be read .*: download or compute it again"),
    ],
)
def test_a_shard_that_is_none_is_named(tmp_path, change, message):
    clip_retrieval(tmp_path)
    change(tmp_path / "img_emb" / "img_emb_2.npy")
    with pytest.raises(UserError, match=message) as raised:
        open_embeddings(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_folder_without_shards_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no embeddings in it: it needs files \*.npy"):
        open_embeddings(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        open_embeddings(str(tmp_path / "absent"))


def test_embeddings_of_another_network_are_refused(tmp_path):
    clip_retrieval(tmp_path)
    embeddings = open_embeddings(str(tmp_path))
    check_widths(embeddings, D)
    with pytest.raises(UserError, match=r"12 numbers a row, and model.backbone gives 1280: take the model"):
        check_widths(embeddings, 1280)


# Memory


LARGE = """
import sys
from pathlib import Path
import numpy as np
import torch
from pubsel.data.embeddings import open_embeddings

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key + ":"))) / 2**10

embeddings = open_embeddings(sys.argv[1])
sum(float(block[0, 0]) for block in embeddings.blocks())
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
print(sum(float(block.max()) for block in embeddings.blocks()))
places = np.random.default_rng(0).integers(0, embeddings.n, 5000)
embeddings.rows(places)
print(status("VmHWM") - before)
"""


def test_a_folder_is_mapped_and_never_in_memory_as_a_whole(tmp_path):
    """1 GiB of zeros, which take no room on disk, but would in memory."""
    for i in range(2):
        array = np.lib.format.open_memmap(tmp_path / f"{i}.npy", "w+", np.float16, (2**18, 1024))
        array[-1, -1] = 7
        del array
    done = subprocess.run([sys.executable, "-c", LARGE, tmp_path], capture_output=True, text=True, check=True)
    total, mib = map(float, done.stdout.split())
    assert total == 14
    assert mib < 300


# Clusters and assignments


@pytest.fixture
def folder(tmp_path):
    clip_retrieval(tmp_path / "laion")
    return tmp_path / "laion"


@pytest.fixture
def parts(folder):
    return [open_embeddings(str(folder))]


@pytest.fixture
def kept(parts, tmp_path):
    return assignment_folder(parts, tmp_path)


@pytest.fixture
def clusters(parts, kept):
    return clusters_kept(parts, kept)


def quiet(text):
    raise AssertionError(text)


def read_shards(monkeypatch):
    """The names of the shards that are read from now on."""
    names, blocks = [], Shard.blocks

    def counted(self):
        names.append(self.path.name)
        return blocks(self)

    monkeypatch.setattr(Shard, "blocks", counted)
    return names


def test_each_embedding_gets_the_nearest_centre(folder, tmp_path):
    parts = [open_embeddings(str(folder)), pool.Features(torch.from_numpy(rows(31, 7, dtype=np.float32)))]
    kept = assignment_folder(parts, tmp_path)
    clusters = clusters_kept(parts, kept)
    x = torch.cat([torch.from_numpy(whole(parts[0])), parts[1].x])
    expected = clusters.nearest(x)
    assert len(set(expected)) > 3
    for place in (kept, kept, None):
        nearest = nearest_of(parts, clusters, place, quiet)
        assert nearest.dtype == np.int16
        np.testing.assert_array_equal(nearest, expected)


def test_clusters_are_the_same_whether_kept_or_not(parts, kept):
    first, second, unkept = clusters_kept(parts, kept), clusters_kept(parts, kept), clusters_kept(parts, None)
    assert first.shares == second.shares == unkept.shares
    for a, b, c in zip(first, second, unkept, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert first.of(np.zeros(D)) == second.of(np.zeros(D))


def test_what_is_not_finite_is_in_no_cluster(tmp_path):
    x = rows(200)
    x[3, 0], x[5, 2], x[9] = np.nan, np.inf, -np.inf
    saved(tmp_path / "own", {0: x})
    parts = [open_embeddings(str(tmp_path / "own"))]
    clusters = clusters_kept(parts, None)
    assert all(np.isfinite(value).all() for value in clusters)
    nearest = nearest_of(parts, clusters, None, quiet)
    assert np.flatnonzero(nearest == assigned.NONE).tolist() == [3, 5, 9]
    shares = np.full(len(clusters.centres), 0.1)
    assert not {3, 5, 9} & set(pool.draw_by_cluster(shares, nearest, 200, np.random.default_rng(0)))


def test_what_is_not_finite_changes_no_row_of_its_block_or_of_another(monkeypatch):
    monkeypatch.setattr(pool, "BLOCK", 50)
    x = torch.from_numpy(rows(200, dtype=np.float32))
    clusters = clusters_kept([pool.Features(x)], None)
    expected = nearest_of([pool.Features(x)], clusters, None, quiet)
    for row in (7, 50, 99, 160):
        broken = x.clone()
        broken[row, 0] = np.nan
        nearest = nearest_of([pool.Features(broken)], clusters, None, quiet)
        assert np.flatnonzero(nearest != expected).tolist() == [row]
        without = clusters_kept([pool.Features(torch.cat([x[:row], x[row + 1 :]]))], None)
        np.testing.assert_array_equal(clusters_kept([pool.Features(broken)], None).centres, without.centres)


def test_what_was_interrupted_goes_on_with_the_next_shard(parts, kept, clusters, monkeypatch):
    expected = nearest_of(parts, clusters, None, quiet)

    real = pool.Clusters.nearest
    monkeypatch.setattr(pool.Clusters, "nearest", lambda self, x: real(self, x) if len(x) == 70 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nearest_of(parts, clusters, kept, quiet)
    assert [path.name[:17] for path in kept.glob("nearest_*.npy")] == ["nearest_img_emb_0"]

    monkeypatch.setattr(pool.Clusters, "nearest", real)
    names = read_shards(monkeypatch)
    np.testing.assert_array_equal(nearest_of(parts, clusters, kept, quiet), expected)
    assert names == ["img_emb_2.npy", "img_emb_10.npy"]
    nearest_of(parts, clusters, kept, quiet)
    assert len(names) == 2


def test_a_shard_without_its_record_or_with_a_damaged_array_is_assigned_again(parts, kept, clusters, monkeypatch):
    expected = nearest_of(parts, clusters, kept, quiet)
    first, second, third = (next(kept.glob(f"nearest_img_emb_{i}_*.json")) for i in (0, 2, 10))
    first.unlink()
    cut(second.with_suffix(".npy"))
    third.write_text(json.dumps(json.loads(third.read_text()) | {"clusters": "of others"}))
    names = read_shards(monkeypatch)
    np.testing.assert_array_equal(nearest_of(parts, clusters, kept, quiet), expected)
    assert names == ["img_emb_0.npy", "img_emb_2.npy", "img_emb_10.npy"]
    for wrong in (expected[:69], expected[:70].astype(np.int64)):
        np.save(first.with_suffix(".npy"), wrong)
        progress = ProgressLine("", 70, quiet)
        nearest, computed = assigned.nearest_in(parts[0].shards[0], clusters, kept, progress)
        assert (nearest.tolist(), nearest.dtype, computed) == (expected[:70].tolist(), np.int16, True)


def test_shards_of_one_name_in_two_folders_are_kept_apart(tmp_path):
    for seed, name in enumerate("ab"):
        saved(tmp_path / name, {0: rows(100, seed)})
    parts = [open_embeddings(str(tmp_path / name)) for name in "ab"]
    kept = assignment_folder(parts, tmp_path)
    clusters = clusters_kept(parts, kept)
    expected = nearest_of(parts, clusters, None, quiet)
    for _ in range(2):
        np.testing.assert_array_equal(nearest_of(parts, clusters, kept, quiet), expected)


@pytest.mark.parametrize("rule", ["SAMPLE", "MOST_CLUSTERS", "EACH", "DIRECTIONS", "TYPICAL"])
def test_clusters_by_other_rules_are_kept_elsewhere(rule, parts, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, rule, getattr(pool, rule) / 2)
    assert assignment_folder(parts, tmp_path) != kept


@pytest.mark.attack
def test_assignments_and_clusters_that_are_others_are_noticed(parts, kept, clusters, capsys):
    expected = nearest_of(parts, clusters, kept, quiet)
    (file,) = kept.glob("nearest_img_emb_2_*.npy")
    np.save(file, np.roll(np.load(file), 1))
    np.testing.assert_array_equal(nearest_of(parts, clusters, kept, quiet), expected)
    assert f"{file} is not what was written" in capsys.readouterr().err

    with np.load(kept / "clusters.npz") as values:
        np.savez(kept / "clusters.npz", **dict(values) | {"centres": values["centres"][::-1]})
    for why, harm in (("what was written", lambda path: None), ("", cut)):
        harm(kept / "clusters.npz")
        with pytest.raises(UserError, match=rf"clusters.npz cannot be read .*{why}.*: delete it"):
            clusters_kept(parts, kept)


def test_a_changed_shard_is_noticed(folder, parts, kept, tmp_path):
    assert assignment_folder([open_embeddings(str(folder))], tmp_path) == kept
    path = folder / "img_emb" / "img_emb_2.npy"
    stat = path.stat()
    np.save(path, -np.load(path))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert path.stat().st_size == stat.st_size
    assert assignment_folder([open_embeddings(str(folder))], tmp_path) != kept
    held = [pool.Features(x) for x in (torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 2), torch.zeros(2, 3))]
    keys = [assignment_folder([*parts, part], tmp_path) for part in held]
    assert keys[0] == keys[1]
    assert len({*keys, kept}) == 4
    assert assignment_folder(held, tmp_path) is None


def test_sets_of_different_networks_are_no_pool(parts):
    with pytest.raises(UserError, match=r"pair.pool: its sets have 3 and 12 features: take those of one network"):
        clusters_kept([*parts, pool.Features(torch.zeros(50, 3))], None)


def test_a_data_folder_that_cannot_be_written_to_is_named(parts, tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(UserError, match=r"cannot write .*pools: Not a directory; make room, fix permissions"):
        clusters_kept(parts, assignment_folder(parts, tmp_path / "data"))


def test_progress_tells_the_time_that_is_left(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = ProgressLine("pool", 5000, lines.append, "examples")
    progress.add(1000, at_once=True)
    now[0] = 5.0
    progress.add(500)
    assert lines == []
    now[0] = 20.0
    progress.add(500)
    assert lines == ["pool: 2,000 of 5,000 examples, about 60 s left"]  # 1,000 in 20 s, without those of before
    now[0] = 90.0
    progress.add(3000)
    assert len(lines) == 1
