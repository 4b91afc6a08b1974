"""`pubsel pool`: clusters and assignments of a pool, and features of images as one, by shards and through launchers."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from test_embeddings import rows, saved

from pubsel.cli import main
from pubsel.data import extracted, open_dataset
from pubsel.data.embeddings import open_embeddings
from pubsel.data.extracted import Part, extract, listed
from pubsel.data.features import embed, load_backbone
from pubsel.messages import UserError
from pubsel.selection import assigned
from pubsel.settings.keys import Backbone
from pubsel.settings.schema import check
from tests.forked import Command

NETWORK, SIDE = "test_efficientnet", 32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PUBSEL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(timm.create_model(NETWORK, num_classes=0).state_dict(), str(path))
    return path


@pytest.fixture
def network(weights):
    values = {"architecture": NETWORK, "checkpoint": str(weights), "input_size": SIDE, "crop": 1.0}
    return load_backbone(check(Backbone, values), "", CPU)


@pytest.fixture
def cli(capsys):
    def run(*words):
        code = main(["pool", *words])
        text = capsys.readouterr()
        return code, text.out, text.err

    return run


@pytest.fixture
def photographs(tmp_path):
    """Forty images of two sizes, some grey, in folders of classes; the twelfth is damaged."""
    draw = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "crawl" / f"class {i % 3}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (50 if i % 2 else 36, 40, *([] if i % 5 == 0 else [3]))
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(path)
    images = sorted((tmp_path / "crawl").rglob("*.png"))
    images[12].write_bytes(b"no image")
    return images


def model_words(weights):
    return [
        "model=mobilenetv2_coral", f"model.backbone.architecture={NETWORK}", f"model.backbone.checkpoint={weights}",
        f"model.backbone.input_size={SIDE}", "+model.backbone.crop=1.0", "device=cpu", "threads=1",
    ]  # fmt: skip


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).rglob("*.np[yz]"))}


def lines(text):
    raise AssertionError(text)


# Clusters and assignments


def pool_of(folder, shards=4):
    saved(folder / "a", {i: rows(60 + i, i) for i in range(shards - 1)})
    saved(folder / "b", {0: rows(50, 9)})


def test_shards_one_after_another_are_those_of_one_command(cli, folder):
    pool_of(folder)
    words = ["pool=[./b,./a]", "threads=1"]
    for shard in (2, 0, 3, 1):
        code, out, err = cli(*words, f"shard={shard}", "data_root=first")
        assert (code, err) == (0, "")
        n = 50 if shard == 3 else 60 + shard
        assert f"{n} embeddings of shard {shard} of 4 shards assigned, 0 of 1 before" in out
    code, out, _ = cli(*words, "data_root=second")
    assert "233 embeddings of all 4 shards assigned, 0 of 4 before" in out
    assert len(content("first")) == 5
    assert content("first") == content("second")
    assert "4 of 4 before" in cli(*words, "data_root=first")[1]

    parts = [open_embeddings("./a"), open_embeddings("./b")]
    kept = assigned.kept_folder(parts, "first")
    assert str(kept) in out.replace("second", "first")
    nearest = assigned.nearest_of(parts, assigned.clusters_kept(parts, kept), kept, lines)
    assert len(nearest) == 233
    assert nearest.min() >= 0


@pytest.mark.slow
def test_the_shards_of_a_sweep_are_those_of_one_process(cli, folder):
    """By joblib, two at a time: the clusters are computed by one of them, and each shard by one."""
    pool_of(folder, 4)
    sweep = ["pool=[./a,./b]", "shard=range(0,4)", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "threads=1"]
    command = Command(folder, "pool", "-m", *sweep, "data_root=by_two", "device=cpu")
    assert command.code() == 0, command.err
    assert command.out.count("0 of 1 before") == 4
    assert cli("pool=[./a,./b]", "threads=1", "data_root=by_one")[0] == 0
    assert len(content("by_two")) == 5
    assert content("by_two") == content("by_one")
    records = [json.loads(path.read_text()) for path in Path("by_two").rglob("nearest_*.json")]
    assert sorted(record["n"] for record in records) == [50, 60, 61, 62]
    assert len({record["clusters"] for record in records}) == 1


# Features of images


def test_shards_have_the_features_of_a_named_set(network, folder):
    images = listed("digits", ".", False)
    source = open_dataset("digits", ".", False)
    x = torch.cat([source.train.x, source.test.x])
    for shard in range(4):
        assert extract(Part("digits", folder / "out", shard, 4), images, network, lines)
    embeddings = open_embeddings(str(folder / "out"))
    assert (embeddings.n, embeddings.weights) == (len(x), network.weights)
    assert [shard.n for shard in embeddings.shards] == [449, 449, 449, 450]
    expected = embed(x, network)
    found = torch.cat(list(embeddings.blocks()))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=1e-4)


def test_images_of_a_folder_keep_their_order_and_their_size(network, folder, photographs):
    """One is not readable: its row is not a number, and the others stay where they are."""
    told = []
    images = listed("./crawl", ".", False)
    assert images.n == 40
    for shard in (2, 0, 1):
        assert extract(Part("./crawl", folder / "out", shard, 3), images, network, told.append)
    assert told == ["img_emb_0000.npy: 1 of 13 images are not readable: their rows are not numbers"]
    found = torch.cat([block.float() for block in open_embeddings(str(folder / "out")).blocks()])
    assert torch.isnan(found).all(1).nonzero().tolist() == [[12]]
    for place in (0, 5, 11, 13, 39):
        image = np.array(Image.open(photographs[place]))
        x = torch.from_numpy(image).reshape(*image.shape[:2], -1).permute(2, 0, 1)
        torch.testing.assert_close(found[place], embed(x[None], network)[0], rtol=2e-3, atol=1e-4)
    record = json.loads((folder / "out" / "img_emb_0000.json").read_text())
    seconds = record.pop("seconds")
    assert record.pop("digest")
    assert seconds >= 0
    assert record == {
        "images": "./crawl", "shards": 3, "shard": 0, "n": 13, "unreadable": 1, "of": 40, "network": network.key,
        "weights": network.weights,
    }  # fmt: skip


def test_several_threads_give_the_same_features(network, folder, photographs, monkeypatch):
    monkeypatch.setattr(extracted, "CPU_BATCH", 4)
    images, told = listed("./crawl", ".", False), list[str]()
    extract(Part("./crawl", folder / "one", 0, 1), images, network, told.append)
    assert told == ["img_emb_0000.npy: 1 of 40 images are not readable: their rows are not numbers"]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        extract(Part("./crawl", folder / "two", 0, 1), images, network, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    one, two = (np.load(folder / name / "img_emb_0000.npy").astype(np.float32) for name in ("one", "two"))
    np.testing.assert_allclose(one, two, rtol=2e-3, atol=1e-4)


def test_a_shard_that_is_there_is_left_and_one_that_was_interrupted_is_computed(network, folder, monkeypatch):
    images, part = listed("digits", ".", False), Part("digits", folder / "out", 3, 100)
    real, calls = extracted._features, []

    def killed(batch, extractor):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(batch, extractor)

    monkeypatch.setattr(extracted, "_features", killed)
    with pytest.raises(KeyboardInterrupt):
        extract(part, images, network, lines)
    assert [path.name for path in (folder / "out").iterdir() if path.suffix != ".lock"] == []

    assert extract(part, images, network, lines)
    assert part.file.name == "img_emb_0003.npy"
    before = part.file.stat().st_mtime_ns
    assert not extract(part, images, network, lines)
    assert part.file.stat().st_mtime_ns == before
    part.file.with_suffix(".json").unlink()  # killed between both files
    assert extract(part, images, network, lines)


def test_a_shard_that_another_process_computed_meanwhile_is_left(network, folder, monkeypatch):
    images, part, locked = listed("digits", ".", False), Part("digits", folder / "out", 3, 100), extracted.locked

    @contextmanager
    def waited(*given, **more):
        monkeypatch.setattr(extracted, "locked", locked)
        assert extract(part, images, network, lines)
        with locked(*given, **more):
            yield

    monkeypatch.setattr(extracted, "locked", waited)
    assert not extract(part, images, network, lines)


def test_a_shard_of_something_else_is_refused(network, folder):
    images, part = listed("digits", ".", False), Part("digits", folder / "out", 0, 2)
    extract(part, images, network, lines)
    for other, extractor, key in (
        (part._replace(shards=3, shard=1), network, "shards"),
        (part._replace(name="noise", shard=1), network, "images"),
        (part._replace(shard=1), network._replace(weights="others"), "weights"),
        (part._replace(shard=1), network._replace(key="others"), "network"),
    ):
        with pytest.raises(
            UserError, match=rf"img_emb_0000.json is of another extraction \({key}\): set to= to another"
        ):
            extract(other, images, extractor, lines)
    with pytest.raises(UserError, match=r"img_emb_0000.json is of another extraction \(of\)"):  # an image was added
        extract(part._replace(shard=1), images._replace(n=images.n + 1), network, lines)
    with pytest.raises(UserError, match=r"1 of 2 shards are there: `pubsel pool images=... to=.* shards=2` computes"):
        open_embeddings(str(folder / "out"))

    extract(part._replace(shard=1), images, network, lines)
    assert open_embeddings(str(folder / "out")).weights == network.weights
    record = folder / "out" / "img_emb_0001.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps(values | {"weights": "others"}))
    with pytest.raises(UserError, match=r"img_emb_0000.npy and img_emb_0001.npy are not of one extraction"):
        open_embeddings(str(folder / "out"))
    record.write_text(json.dumps(values | {"n": 3}))
    with pytest.raises(UserError, match=r"img_emb_0001.json is not the record of img_emb_0001.npy: delete both"):
        open_embeddings(str(folder / "out"))
    record.write_text(json.dumps(values))
    shard = record.with_suffix(".npy")
    np.save(shard, np.roll(np.load(shard), 1, axis=0))
    with pytest.raises(UserError, match=r"img_emb_0001.json is not the record of img_emb_0001.npy: delete both"):
        open_embeddings(str(folder / "out"))


def test_images_of_which_none_can_be_read_are_refused(network, folder):
    (folder / "crawl").mkdir()
    for i in range(3):
        (folder / "crawl" / f"{i}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"./crawl: none of the 3 images of img_emb_0000.npy is readable: unpack"):
        extract(Part("./crawl", folder / "out", 0, 1), listed("./crawl", ".", False), network, lines)
    assert list((folder / "out").glob("*.npy")) == []


def test_features_that_float16_cannot_hold_are_refused(network, folder):
    huge = network._replace(net=lambda x: network.net(x) * 1e9)
    with pytest.raises(UserError, match=r"features are not finite in float16: check model.backbone and its checkpoint"):
        extract(Part("digits", folder / "out", 0, 50), listed("digits", ".", False), huge, lines)


def test_from_images_to_clusters(cli, folder, weights):
    words = ["images=digits", "to=./out", "shards=8", *model_words(weights)]
    code, out, err = cli(*words, "shard=3")
    assert (code, err) == (0, "")
    assert out.startswith("out/img_emb_0003.npy: features of 225 images, 0 of 1 shards before, in ")
    code, out, _ = cli(*words)
    assert out.startswith("./out: all 8 shards: features of 1,797 images, 1 of 8 shards before, in ")
    code, out, _ = cli("pool=./out", "threads=1")
    assert code == 0
    assert "1,797 embeddings of all 8 shards assigned" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "pubsel pool pool=[FOLDER,...], of embeddings; or images=FOLDER to=FOLDER"),
        (["pool=[./a]", "images=digits"], 2, "pubsel pool pool=[FOLDER,...], of embeddings; or images=FOLDER"),
        (["pool=[./a,./a]"], 2, "give each set once"),
        (["pool=[./absent]"], 1, "./absent: no such folder"),
        (["pool=[./a]", "shard=3"], 2, "shard=3: the pool has 3 shards, 0 to 2"),
        (["images=digits"], 2, "images=digits: set to=FOLDER, the folder of embeddings to make"),
        (["images=digits", "to=./o", "model=scattering"], 2, "images=digits: needs a network: set model, such as"),
        (["images=digits", "to=./o", "model=fmnist_cnn"], 2, "images=digits: needs a network: set model, such as"),
        (["images=digits", "to=./o", "shards=3", "shard=3"], 2, "shard=3: shards=3 are 0 to 2"),
        (
            ["images=digits", "to=./o", "shards=2000", "shard=3"],
            2,
            "shards=2000: digits has 1797 images: set a smaller",
        ),
    ],
)
def test_what_is_wrong_is_one_line(cli, folder, weights, words, code, message):
    pool_of(folder)
    given = {word.partition("=")[0] for word in words}
    words = words + ([] if "model" in given or "pool" in given else model_words(weights))
    result, out, err = cli(*words)
    assert (result, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.gpu
def test_a_gpu_gives_the_same_features(network, weights, folder, photographs):
    """Threads read and prepare images, and the network takes them on its device; here on a pretended one."""
    values = {"architecture": NETWORK, "checkpoint": str(weights), "input_size": SIDE, "crop": 1.0}
    on_gpu = load_backbone(check(Backbone, values), "", torch.device("cuda"))
    images = listed("./crawl", ".", False)
    extract(Part("./crawl", folder / "cpu", 0, 1), images, network, lambda text: None)
    extract(Part("./crawl", folder / "gpu", 0, 1), images, on_gpu, lambda text: None)
    cpu, gpu = (np.load(folder / name / "img_emb_0000.npy").astype(np.float32) for name in ("cpu", "gpu"))
    np.testing.assert_allclose(gpu, cpu, rtol=2e-3, atol=1e-4)
