"""Features of a frozen network: made once, kept under a name that says all, never read half-written; and the public
part of a training split, which takes the same way."""

import os
import resource
import shutil
import signal
import subprocess
import time
from errno import EFBIG
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from pubsel.commands.rank import open_candidates
from pubsel.data import Source, Split, features, load, open_dataset
from pubsel.data.features import embed, load_backbone, of_source
from pubsel.files import _KNOWN
from pubsel.messages import LIMITS, ROOM, UsageError, UserError
from pubsel.models import build
from pubsel.models.stages import MOST, Stages
from pubsel.models.traced import as_graph, faster
from pubsel.rules import canonical
from pubsel.settings.datasets import dataset_info
from pubsel.settings.keys import Backbone, Convert, Pair, Take
from pubsel.settings.schema import check
from tests.forked import heard
from tests.made import checked, write_npz

NETWORK = "test_efficientnet"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def whatever_is_free(request, monkeypatch):
    """No image passes through the network to see what it holds, so that passes can be counted, one after the other."""
    if "refused_before" not in request.node.name:
        monkeypatch.setattr(features, "refuse_batches", lambda *given: None)
    monkeypatch.setattr(features, "workers", lambda extractor: 1)
    monkeypatch.setattr(features, "TRACED_FROM", 10**9)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A weight file of a tiny network with its head, as networks are published."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(timm.create_model(NETWORK, num_classes=10).state_dict(), str(path))
    return path


def backbone(weights, **changes):
    values = {"architecture": NETWORK, "checkpoint": str(weights), "input_size": 32, "crop": 1.0}
    return check(Backbone, values | changes)


def pictures(n=5, channels=3, size=40, seed=0):
    draw = np.random.RandomState(seed)
    return torch.from_numpy(draw.randint(0, 256, (n, channels, size, size), dtype=np.uint8))


def source(train, test):
    y = [torch.arange(len(x)) % 2 for x in (train, test)]
    half = (0.5,) * train.shape[1]
    return Source(Split(train, y[0]), Split(test, y[1]), 2, "accuracy", half, half, ())


def compute(x, weights, folder, **changes):
    """Features, and the number of times that the network was asked."""
    extractor, calls = load_backbone(backbone(weights, **changes), str(folder), CPU), []
    extractor.net.register_forward_hook(lambda *_: calls.append(1))
    return features.features("pictures", x, extractor, NETWORK, folder, lambda line: None), len(calls)


def files(folder):
    return sorted(path.name for path in Path(folder).glob("*.npy"))


# What is computed


def test_they_are_those_of_the_network_on_images_prepared_as_usual(weights, tmp_path):
    """Against timm's own network and torchvision's functions, one image at a time."""
    from torchvision.transforms.v2 import functional as images

    x = pictures(size=48)
    found, _ = compute(x, weights, tmp_path, crop=0.8, mean=[0.2, 0.3, 0.4], std=[0.5, 0.6, 0.7])
    torch.manual_seed(0)
    net = timm.create_model(NETWORK, num_classes=10).eval()
    rows = []
    for image in x:
        image = images.resize(image[None].float() / 255, [40], images.InterpolationMode.BICUBIC, antialias=True)
        image = images.center_crop(image, [32]).clamp(0, 1)
        image = (image - torch.tensor([0.2, 0.3, 0.4])[:, None, None]) / torch.tensor([0.5, 0.6, 0.7])[:, None, None]
        with torch.no_grad():
            rows.append(net.forward_head(net.forward_features(image), pre_logits=True)[0])
    assert found.shape == (5, 256)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_an_example_has_the_same_features_in_any_company(weights, tmp_path):
    """Otherwise one example more or less would change the others, which no accountant knows of."""
    x = pictures(70)
    found, _ = compute(x, weights, tmp_path)
    alone, _ = compute(x[40:41], weights, tmp_path)  # whose features are not refused as all equal
    torch.testing.assert_close(found[40:41], alone, rtol=1e-5, atol=1e-6)


def test_grey_images_are_taken_as_colour(weights):
    extractor = load_backbone(backbone(weights), "", CPU)
    x = pictures(channels=1)
    torch.testing.assert_close(embed(x, extractor), embed(x.repeat(1, 3, 1, 1), extractor))


def test_pixels_are_the_images_themselves(tmp_path):
    given = source(pictures(6, 1, 4), pictures(3, 1, 4, seed=1))
    found = of_source("some", given, check(Backbone, {"architecture": "pixels"}), str(tmp_path), CPU, print)
    assert torch.equal(found.train.x, given.train.x.reshape(6, 16) / 255)
    assert torch.equal(found.test.x, given.test.x.reshape(3, 16) / 255)
    assert torch.equal(found.train.y, given.train.y)
    assert list(tmp_path.iterdir()) == []
    rows = check(Backbone, {"architecture": "rows"})
    assert of_source("some", found, rows, str(tmp_path), CPU, print) is found
    with pytest.raises(UsageError, match="set model=rows"):
        of_source("some", found, check(Backbone, {"architecture": "pixels"}), str(tmp_path), CPU, print)
    with pytest.raises(UsageError, match="has images"):
        of_source("some", given, rows, str(tmp_path), CPU, print)


@pytest.mark.parametrize("empty", ["neither", "train", "test"])
def test_both_parts_of_a_source_of_which_one_may_be_empty(weights, tmp_path, empty):
    """A source with an empty part can still be public."""
    parts = {"train": pictures(6), "test": pictures(3, seed=1)}
    parts |= {empty: pictures(0)} if empty in parts else {}
    given = source(**parts)
    found = of_source("some", given, backbone(weights), str(tmp_path), CPU, print)
    assert [split.x.shape for split in (found.train, found.test) if len(split.x)] == [
        (len(x), 256) for x in parts.values() if len(x)
    ]
    assert torch.equal(found.train.y, given.train.y)
    assert len(files(tmp_path / "features")) == sum(len(x) > 0 for x in parts.values())


# What is kept


def test_they_are_computed_once_and_nobody_writes_to_the_file(weights, tmp_path):
    first, calls = compute(pictures(), weights, tmp_path)
    want, names = first.clone(), files(tmp_path)
    first.zero_()
    again, none = compute(pictures(), weights, tmp_path)
    assert (calls, none, len(names)) == (1, 0, 1)
    assert torch.equal(again, want)
    assert files(tmp_path) == names
    assert not list(tmp_path.glob("*.part"))


def test_what_is_there_needs_no_right_to_write(weights, tmp_path, monkeypatch):
    """A data folder that is shared may be read-only."""
    compute(pictures(), weights, tmp_path)
    monkeypatch.setattr(features, "locked", Mock(side_effect=OSError(30, "Read-only file system")))
    assert compute(pictures(), weights, tmp_path)[1] == 0
    with pytest.raises(UserError, match=r"cannot write features to .*Read-only file system: take a folder"):
        compute(pictures(seed=1), weights, tmp_path)


def test_whatever_decides_the_content_decides_the_name(weights, tmp_path):
    x = pictures()
    changed = x.clone()
    changed[3, 2, 39, 39] ^= 1
    torch.manual_seed(1)
    other = timm.create_model(NETWORK, num_classes=10).state_dict()
    save_file(other, str(tmp_path / "other.safetensors"))
    one_entry = {key: value.clone() for key, value in other.items()}
    one_entry["conv_stem.weight"][0, 0, 0, 0] += 1e-3
    save_file(one_entry, str(tmp_path / "one_entry.safetensors"))
    variants = [(images, {}) for images in (x, changed, x[:4], x.flip(0), x.reshape(5, 3, 20, 80))]
    variants += [(x, {"checkpoint": str(tmp_path / f"{name}.safetensors")}) for name in ("other", "one_entry")]
    others = {"input_size": 40, "crop": 0.5, "mean": [0.1] * 3, "std": [0.1] * 3, "options": {"pad_type": "same"}}
    variants += [(x, {name: value}) for name, value in others.items()]
    found = [compute(images, weights, tmp_path, **changes)[0] for images, changes in variants]
    assert len(files(tmp_path)) == len(variants)
    assert all(row.shape[1] == 256 for row in found)
    assert len({row.numpy().tobytes() for row in found}) == len(variants)


def test_the_versions_are_part_of_the_name(weights, monkeypatch):
    key = load_backbone(backbone(weights), "", CPU).key
    assert load_backbone(backbone(weights), "", CPU).key == key
    monkeypatch.setattr(timm, "__version__", "another")
    assert load_backbone(backbone(weights), "", CPU).key != key


def work(weights, folder, seconds, said):
    """One process: a stand-in for the network, which says each pass and takes its time."""

    def slow(x, extractor):
        said.put("passed")
        time.sleep(seconds)
        return x.flatten(1)[:, :7].float()

    features.embed = slow
    extractor = load_backbone(backbone(weights), "", CPU)
    said.put(features.features("pictures", pictures(70), extractor, "tiny", folder, lambda line: None).sum().item())


def test_two_processes_compute_once_and_a_killed_one_leaves_nothing_that_is_read(weights, tmp_path):
    assert heard(work, weights, tmp_path, 0.3, words=2, killed=True) == ["passed", "passed"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".part"]

    said = heard(work, weights, tmp_path, 0.1, words=7, processes=2)
    assert said.count("passed") == 5
    want = float(pictures(70).flatten(1)[:, :7].float().sum())
    assert [value for value in said if value != "passed"] == [want, want]
    assert len(files(tmp_path)) == 1
    assert not list(tmp_path.glob("*.part"))


def test_candidates_of_a_ranking_have_features_of_their_m_images_alone(weights, tmp_path, monkeypatch):
    """The first of the test split and, where it is too short, of the training split: as among those of all images."""
    asked, computed = [], features.features
    monkeypatch.setattr(
        features, "features", lambda what, x, *more: asked.append((what, len(x))) or computed(what, x, *more)
    )
    for name, seed in (("private", 0), ("public", 1)):
        parts = [(pictures(n, seed=seed + n).permute(0, 2, 3, 1).numpy(), np.arange(n) % 2) for n in (30, 12)]
        write_npz(tmp_path / f"{name}.npz", *parts)
    words = "private=private.npz public=[public.npz] distance=frechet distance.m=20 device=cpu overlap=leave".split()
    network = f"model=linear ++model.backbone.architecture={NETWORK} ++model.backbone.checkpoint={weights}".split()
    monkeypatch.chdir(tmp_path)
    settings = checked("rank", *words, *network, "++model.backbone.input_size=32", "data_root=.")
    _, candidates = open_candidates(settings, CPU, tmp_path)
    assert asked == [("private.npz train", 30), ("private.npz test", 12), ("public.npz test", 20)]

    source = open_dataset(str(tmp_path / "public.npz"), ".", False)
    whole = of_source("public", source, settings.model.backbone, ".", CPU, print)
    want = torch.cat([whole.test.x, whole.train.x[:8]])
    torch.testing.assert_close(candidates["public.npz"].x, want, rtol=1e-5, atol=1e-5)


# How fast it is


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_take_batches_in_turn_and_change_nothing(weights, tmp_path, monkeypatch, threads):
    x = pictures(200)
    want, _ = compute(x, weights, tmp_path / "by_one")
    monkeypatch.setattr(features, "workers", lambda extractor: threads)
    given, passes = compute(x, weights, tmp_path / "by_many")
    assert passes == 13
    torch.testing.assert_close(given, want, rtol=1e-5, atol=1e-6)


def test_what_goes_wrong_in_a_thread_is_told(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "workers", lambda extractor: 2)
    extractor = load_backbone(backbone(weights), str(tmp_path), CPU)
    broken = extractor._replace(net=Mock(side_effect=UsageError("too small")))
    before = torch.get_num_threads()
    with pytest.raises(UsageError, match="too small"):
        features.features("some", pictures(100), broken, NETWORK, tmp_path, print)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert torch.get_num_threads() == before or before != 2


def test_no_more_than_a_few_batches_wait_for_the_disk(weights, monkeypatch):
    monkeypatch.setattr(features, "workers", lambda extractor: 2)
    passed = []
    monkeypatch.setattr(features, "embed", lambda x, extractor: passed.append(len(x)) or x.flatten(1).float())
    rows = features.embedded(pictures(1000, size=2), load_backbone(backbone(weights), "", CPU))
    next(rows)
    time.sleep(0.3)
    assert len(passed) <= 5  # of 63
    rows.close()


def test_many_images_pass_through_a_traced_graph(weights, tmp_path, monkeypatch):
    """One graph for all batches, the last of which is smaller, and for the next part of a set."""
    monkeypatch.setattr(features, "TRACED_FROM", 20)
    monkeypatch.setattr(features, "_TRACED", {})
    want, passes = compute(pictures(19), weights, tmp_path)
    assert passes == 2  # too few to be worth it
    x, trace = pictures(21), Mock(side_effect=torch.jit.trace)
    monkeypatch.setattr(torch.jit, "trace", trace)
    extractor = load_backbone(backbone(weights), "", CPU)
    with torch.no_grad():
        want = torch.cat([embed(part, extractor) for part in x.split(1)])
    for images, part in ((x, want), (x.flip(0), want.flip(0))):
        torch.testing.assert_close(compute(images, weights, tmp_path)[0], part, rtol=1e-4, atol=1e-5)
    assert trace.call_count == 1
    alone, _ = compute(x.roll(7, 0), weights, tmp_path)
    assert torch.equal(alone.roll(-7, 0), compute(x, weights, tmp_path)[0])  # whatever its place and its company


def test_a_graph_that_disagrees_is_not_used(capsys):
    class Unstable(torch.nn.Module):
        def forward(self, x):
            return x.mean((2, 3)) * (1 if torch.jit.is_tracing() else 1.01)

    net = Unstable().eval()
    assert faster(net, (3, 8, 8), 4) is net
    why = "its features differ by 0.01 of the largest"
    assert capsys.readouterr().err == f"this network is computed layer by layer, not as a traced graph: {why}\n"


def test_a_graph_takes_batches_of_fewer(weights):
    """Threads may share it, and the number that torch may use stays."""
    net, threads = load_backbone(backbone(weights), "", CPU).net, torch.get_num_threads()
    graph = as_graph(net, (3, 32, 32), 4)
    assert torch.get_num_threads() == threads
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for n in (1, 3, 4):
            torch.testing.assert_close(graph(x[:n]), net(x[:n]), rtol=1e-4, atol=1e-4)


# What it will take


def test_how_long_all_images_take_is_told_while_they_are_computed(weights, tmp_path, monkeypatch):
    """A batch of 16 takes 3 s: a line each 4 batches."""
    now, passed = [0.0], features.embed

    def slow(x, extractor):
        now[0] += 3
        return passed(x, extractor)

    monkeypatch.setattr(features, "embed", slow)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    extractor, lines = load_backbone(backbone(weights), str(tmp_path), CPU), []
    features.features("pictures", pictures(3200), extractor, NETWORK, tmp_path, lines.append)
    assert lines[0] == "features of pictures: 64 of 3,200 images, about 10 min left"
    assert len(lines) == 49
    features.features("pictures", pictures(3200), extractor, NETWORK, tmp_path, lambda line: pytest.fail(line))


def test_a_batch_that_does_not_fit_is_refused_before_it_passes(weights, tmp_path, monkeypatch):
    asked, passed = [], features.embed
    monkeypatch.setattr(features, "embed", lambda x, extractor: asked.append(x.clone()) or passed(x, extractor))
    monkeypatch.setattr(features, "free", lambda device: 2**10)
    extractor = load_backbone(backbone(weights), str(tmp_path), CPU)
    with pytest.raises(UserError, match=r"features of pictures need about \d+ MiB of memory and 0 MiB are free on cpu"):
        features.features("pictures", pictures(100), extractor, NETWORK, tmp_path, lambda line: None)
    assert [len(x) for x in asked] == [1]
    assert not asked[0].any()
    assert not files(tmp_path)


# What goes wrong


def damaged(path, at=None):
    """4 KiB of zeros in the middle of a file, whose time stays."""
    whole, stat = bytearray(path.read_bytes()), path.stat()
    at = len(whole) // 2 if at is None else at % len(whole)
    whole[at : at + 4096] = bytes(len(whole[at : at + 4096]))
    with path.open("r+b") as file:
        file.write(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.attack
@pytest.mark.parametrize("damage", [None, 128, -20, "cut 0", "cut 5", "cut 1000", "swapped", "no digest"])
def test_damaged_features_are_named_and_computed_again(weights, tmp_path, damage, capsys):
    """A page of zeros in the middle, at the start and at the end: a run ended with 0.183 for 0.350. Features of two
    sets in each other's place; a file that is cut; one of an earlier version, without a digest."""
    want = compute(pictures(16), weights, tmp_path)[0].clone()
    (name,) = files(tmp_path)
    if damage == "swapped":
        compute(255 - pictures(16), weights, tmp_path)
        (other,) = set(files(tmp_path)) - {name}
        (tmp_path / name).write_bytes((tmp_path / other).read_bytes())
    elif damage == "no digest":
        np.save(tmp_path / name, np.zeros((16, 256), dtype=np.float32))
    elif isinstance(damage, str):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[: int(damage.split()[1])])
    else:
        damaged(tmp_path / name, damage)
    _KNOWN.clear()  # another process
    found, calls = compute(pictures(16), weights, tmp_path)
    assert torch.equal(found, want)
    assert calls == 1
    assert f"{tmp_path / name} is not what was written" in capsys.readouterr().err
    assert compute(pictures(16), weights, tmp_path)[1] == 0
    assert capsys.readouterr().err == ""


def test_a_process_hashes_a_file_once_until_it_is_another(weights, tmp_path):
    compute(pictures(16), weights, tmp_path)
    (name,) = files(tmp_path)
    compute(pictures(16), weights, tmp_path)
    damaged(tmp_path / name, 128)
    assert compute(pictures(16), weights, tmp_path)[1] == 0  # no sign that it is another file
    os.utime(tmp_path / name)
    assert compute(pictures(16), weights, tmp_path)[1] == 1


@pytest.mark.attack
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o377])
def test_nobody_else_reads_features_of_private_images(weights, tmp_path, umask):
    before = os.umask(umask)
    try:
        compute(pictures(), weights, tmp_path / "features")
    finally:
        os.umask(before)
    assert (tmp_path / "features").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "features").iterdir()} == {0o600}


def fill(weights, folder, said):
    """A process that computes features in a folder that may be too small: what it is told, in a queue."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    features.embed = lambda x, extractor: x.flatten(1).float()  # a stand-in for the network
    try:
        compute(pictures(3000, size=8), weights, folder)
        said.put("written")
    except UserError as error:
        said.put(str(error))


@pytest.mark.attack
def test_a_full_disk_is_one_line_and_no_signal(weights, tmp_path):
    """A file system of 1 MiB, for features of 3 MiB: a memory map of them is a hole that nothing fits in."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "pubsel-test", str(small)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        (said,) = heard(fill, weights, small, words=1)
        assert said.count("\n") == 0
        assert said == f"cannot write features to {small}: No space left on device: {ROOM}"
        assert [path.suffix for path in small.iterdir()] == [".lock"]
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        assert heard(fill, weights, small, words=1) == ["written"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_that_may_not_grow_is_one_line(weights, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        (said,) = heard(fill, weights, tmp_path, words=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == f"cannot write features to {tmp_path}: File too large: {LIMITS[EFBIG]}"
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert heard(fill, weights, tmp_path, words=1) == ["written"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: out.fill_(0.5), "are all equal"),
        (lambda out: out.index_fill_(1, torch.tensor([7]), np.nan), "are not finite"),
        (lambda out: out.index_fill_(0, torch.tensor([2]), np.inf), "are not finite"),
    ],
)
def test_useless_features_are_refused_and_not_kept(weights, tmp_path, change, says):
    extractor = load_backbone(backbone(weights), "", CPU)
    extractor.net.register_forward_hook(lambda module, given, out: change(out))
    with pytest.raises(UserError, match=rf"the features of pictures {says}: check model\.backbone"):
        features.features("pictures", pictures(), extractor, NETWORK, tmp_path, print)
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"architecture": "test_efficientnot"}, UsageError, r"=test_efficientnot: timm has no such .*test_e"),
        ({"architecture": "test_resnet"}, UserError, r"tiny\.safetensors does not fit: .*check architecture"),
        ({"checkpoint": "nowhere.pt"}, UserError, r"checkpoint=nowhere\.pt: no such file"),
        ({"checkpoint": __file__}, UserError, r"test_features\.py: not a readable weight file"),
        ({"prefix": "backbone."}, UserError, r"does not fit: .*prefix"),
        ({"options": {"nope": 1}}, UsageError, r"options=.*nope"),
        ({"options": {"global_pool": "nonsense"}}, UsageError, r"options=.*nonsense"),
    ],
    ids=str,
)
def test_a_backbone_that_cannot_be_had_is_one_line(weights, tmp_path, changes, kind, says):
    with pytest.raises(kind, match=says) as caught:
        load_backbone(backbone(weights, **changes), str(tmp_path), CPU)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_fetched_are_one_line(monkeypatch):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=OSError("We couldn't connect\nand so on")))
    says = r"weights cannot be fetched \(We couldn't connect\): give .*checkpoint=FILE; model=scattering needs"
    with pytest.raises(UserError, match=says):
        load_backbone(check(Backbone, {"architecture": NETWORK}), "", CPU)
    with pytest.raises(UserError, match="FILE, or take model=mobilenetv2_coral, which reads a file; model=scattering"):
        load_backbone(check(Backbone, {"architecture": "mobilenetv2_100"}), "", CPU)


def test_a_network_whose_weights_are_not_at_hand_names_the_other_source(monkeypatch, tmp_path):
    create = timm.create_model

    def offline(name, pretrained, *more, **options):
        if pretrained:
            raise OSError("We couldn't connect")
        return create(name, pretrained, *more, **options)

    sources = {"layers_coral": "; model=mobilenetv2_layers fetches", "layers": "model=mobilenetv2_layers_coral"}
    for name, says in sources.items():
        model = checked("run", f"model=mobilenetv2_{name}").model
        monkeypatch.setattr(timm, "create_model", offline)
        with pytest.raises(UserError, match=says):
            build(model, (3, 64, 64), 10, (0.5,) * 3, (0.2,) * 3, 0, str(tmp_path))


def test_a_weight_file_may_lie_in_the_data_folder_and_under_a_prefix(weights, tmp_path):
    state = timm.create_model(NETWORK, num_classes=0).state_dict()
    renamed = {f"backbone.{key}": value for key, value in state.items()} | {"head.weight": torch.zeros(2, 2)}
    torch.save({"state_dict": renamed}, tmp_path / "student.pt")
    found = load_backbone(backbone("student.pt", prefix="backbone."), str(tmp_path), CPU)
    assert all(torch.equal(value, state[key]) for key, value in found.net.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.net.parameters())
    assert not found.net.training


# The public part of a training split


def npz(path, train=40, test=20, size=4, labels=None):
    """Images whose first pixel is their number, with cycling labels."""
    parts = []
    for i, n in enumerate((train, test)):
        images = np.random.RandomState(i).randint(0, 256, (n, size, size), dtype=np.uint8)
        images[:, 0, 0] = 100 * i + np.arange(n)
        parts.append((images, labels[i] if labels else np.arange(n)[::-1] % 4))
    write_npz(path, *parts)
    return str(path)


def taken(path, public=None, **changes):
    values = {"private": path, "public": public or path, "m": 10, "take": "train", "convert": "resize"}
    return load(check(Pair, values | changes), "data", False)


def numbers(split):
    return split.x[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("name", [None, "./set.npz"])  # the same file by another name
def test_public_examples_are_a_fixed_part_that_leaves_the_private_data(tmp_path, folder, name):
    path = npz(tmp_path / "set.npz")
    task, again = taken(path, name), taken(path)
    public, private = numbers(task.public), numbers(task.private)
    assert len(public) == 10
    assert sorted(public + private) == list(range(40))
    assert public == sorted(public) != list(range(10))
    assert numbers(again.public) == public
    assert sorted(numbers(task.test)) == list(range(100, 120))
    for split in (task.public, task.private):
        assert split.y.tolist() == [(39 - n) % 4 for n in numbers(split)]
    assert any("10 public examples were drawn" in note and "left the private data" in note for note in task.notes)
    assert set(numbers(taken(path, m=5).public)) < set(public)


def test_of_another_set_the_training_split_is_taken_and_private_data_stay(tmp_path):
    path, other = npz(tmp_path / "set.npz"), npz(tmp_path / "other.npz", train=30, size=6)
    task = taken(path, other)
    assert numbers(task.private) == list(range(40))
    assert task.public.x.shape == (10, 1, 4, 4)
    drawn = np.sort(np.random.RandomState(0).permutation(30)[:10])
    assert task.public.y.tolist() == np.load(other)["train_labels"][drawn].tolist()


@pytest.mark.parametrize("shots", [1, 3])
def test_shots_are_so_many_of_each_class(tmp_path, shots):
    path = npz(tmp_path / "set.npz")
    task = taken(path, shots=shots)
    assert np.bincount(task.public.y, minlength=4).tolist() == [shots] * 4
    assert sorted(numbers(task.public) + numbers(task.private)) == list(range(40))
    assert not any("all examples" in note for note in task.notes)


def test_a_class_of_fewer_examples_than_shots_is_public_as_a_whole(tmp_path):
    """As DomainNet's paintings, of which class 313 has one and class 327 none."""
    y = np.repeat([0, 1, 2, 4], [20, 1, 17, 2])
    task = taken(npz(tmp_path / "set.npz", labels=(y, np.arange(20) % 5)), shots=3, read={"accept": ["class_lost"]})
    assert np.bincount(task.public.y).tolist() == [3, 1, 3, 0, 2]
    assert np.bincount(task.private.y).tolist() == [17, 0, 14]
    assert sorted(numbers(task.public) + numbers(task.private)) == list(range(40))
    assert "pair.shots=3: all examples of smaller classes are public: 1, 4" in task.notes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shots": 10}, r"no training images of .* would remain"),
        ({"m": 41}, r"pair\.m=41: the training split of .* has only 40"),
        ({"m": 40}, r"no training images of .* would remain"),
        ({"shots": 2, "take": "test"}, r"pair\.shots.*pair\.take=train"),
        ({"validation": 0.001}, r"pair\.validation=0\.001: 0 of 30"),
        ({"validation": 0.99}, r"pair\.validation=0\.99: 30 of 30"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_data(tmp_path, changes, says):
    with pytest.raises(UsageError, match=says):
        taken(npz(tmp_path / "set.npz"), **changes)


def test_shots_need_classes(tmp_path):
    two = np.eye(4) + np.roll(np.eye(4), 1, axis=1)
    path = npz(tmp_path / "set.npz", labels=(two[np.arange(40) % 4], two[np.arange(20) % 4]))
    with pytest.raises(UsageError, match=r"pair\.shots=2: .*several labels.*pair\.m"):
        taken(path, shots=2)
    assert taken(path).public.y.shape == (10, 4)


def test_validation_examples_are_private_ones_that_are_not_trained_on(tmp_path):
    path = npz(tmp_path / "set.npz")
    whole, task = taken(path), taken(path, validation=0.2)
    assert whole.validation is None
    assert 2 <= len(task.validation.x) <= 12
    assert sorted(numbers(task.private) + numbers(task.validation)) == sorted(numbers(whole.private))
    assert numbers(task.public) == numbers(whole.public)
    assert task.validation.y.tolist() == [(39 - n) % 4 for n in numbers(task.validation)]


def test_a_share_of_the_private_data(tmp_path):
    path = npz(tmp_path / "set.npz", labels=(np.arange(40) % 2, np.arange(20) % 2))
    third, half = taken(path, private_share=1 / 3), taken(path, private_share=0.5, validation=0.2)
    assert 5 <= len(third.private.x) <= 15
    assert 8 <= len(half.private.x) + len(half.validation.x) <= 22
    used = set(numbers(half.private) + numbers(half.validation))
    assert set(numbers(third.private)) < used < set(numbers(taken(path).private))
    assert numbers(half.public) == numbers(taken(path).public)


def test_public_features_of_another_width_are_refused(tmp_path):
    path, other = npz(tmp_path / "set.npz"), npz(tmp_path / "other.npz", size=6)
    pixels = check(Backbone, {"architecture": "pixels"})

    def through(name, given, like):
        return of_source(name, given, pixels, str(tmp_path), CPU, print)

    for take in Take:
        values = Pair(private=path, public=other, m=4, take=take, convert=Convert.resize)
        with pytest.raises(UsageError, match=r"other\.npz: its examples are \(36,\), the private ones \(16,\)"):
            load(values, "data", False, through)


@pytest.mark.data
def test_features_of_real_images():
    """MobileNetV2 on 64 photographs of flowers."""
    root = os.environ["PUBSEL_DATA"]
    model = checked("run", "model=mobilenetv2_coral", "model.backbone.input_size=128").model
    if not (Path(root) / model.backbone.checkpoint).is_file():
        pytest.skip(f"no {model.backbone.checkpoint} in PUBSEL_DATA")
    extractor = load_backbone(model.backbone, root, CPU)
    x = open_dataset("flowers5", root, False).train.x[:64]
    assert dataset_info("flowers5").shape == list(x.shape[1:])
    found = torch.cat([embed(part, extractor) for part in x.split(32)])
    assert found.shape == (64, 1280)
    assert torch.isfinite(found).all()
    assert (found.std(0) > 0).float().mean() > 0.5


# Features of several layers


@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [
        ("test_efficientnet", 32, None),
        ("resnet18", 32, ["act1", "layer1", "layer2", "layer3"]),
        ("mobilenetv2_100", 32, [f"blocks.{i}" for i in range(1, 6)]),
        ("test_vit", 160, None),
        ("test_convnext", 64, None),
    ],
)
def test_features_of_stages_follow_those_of_the_last_layer(name, size, layers):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=0).eval()
    seen: list[torch.Tensor] = []
    for layer in layers or []:
        net.get_submodule(layer).register_forward_hook(lambda *call: seen.append(call[2].clone()))
    whole, x = Stages(net, name, 3, size).eval(), torch.randn(3, 3, size, size)
    with torch.no_grad():
        last = net(x)
        seen.clear()
        found = whole(x)
    assert found.shape == (3, last.shape[1] + whole.width)
    torch.testing.assert_close(found[:, : last.shape[1]], last)
    assert 0 < len(whole.chosen) <= MOST
    moments = [part for output in seen for part in (output.mean((2, 3)), output.flatten(2).std(2, correction=0))]
    if moments:
        torch.testing.assert_close(found[:, last.shape[1] :], torch.cat(moments, 1))


def test_a_network_that_does_not_return_its_stages_is_refused(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Flatten())
    with pytest.raises(UsageError, match=r"architecture=flat: it does not return its stages: set model\.backbone\.sta"):
        Stages(net, "flat", 3, 8)


def test_a_source_has_features_of_stages_and_keeps_them_apart(weights, tmp_path):
    plain, several = backbone(weights), backbone(weights, stages=True)
    one, two = (
        of_source("a", source(pictures(), pictures(3)), each, str(tmp_path), CPU, lambda line: None)
        for each in (plain, several)
    )
    d = one.train.x.shape[1]
    assert (one.stages, two.stages) == (0, two.train.x.shape[1] - d)
    assert two.stages > 0
    torch.testing.assert_close(two.test.x[:, :d], one.test.x)
    assert len(files(tmp_path / "features")) == 4  # two parts, with and without


def test_a_traced_network_gives_its_stages_too(weights, tmp_path):
    extractor = load_backbone(backbone(weights, stages=True), str(tmp_path), CPU)
    x = features.network_input(pictures(4), extractor.prepare)
    with torch.no_grad():
        torch.testing.assert_close(as_graph(extractor.net, (3, 32, 32), 4)(x), extractor.net(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (["algorithm=whitened_head"], True),
        (["algorithm=whitened_head", "model.backbone.stages=false"], False),
        (["algorithm=whitened_head", "pair.public=null"], None),
        (["algorithm=whitened_head", "pair.public=null", "model.backbone.stages=true"], True),
        (["algorithm=pillar"], None),
        (["algorithm=pillar", "model.backbone.stages=false"], None),
        (["algorithm=pillar", "model.backbone.stages=true"], True),
    ],
)
def test_stages_are_taken_by_default_where_public_data_bring_them_to_one_scale(words, stages):
    settings = checked("run", "pair=own_part", "pair.private=flowers5", "model=mobilenetv2_coral", *words)
    once = canonical(settings)
    assert once.model.backbone is not None
    assert once.model.backbone.stages is stages
    assert canonical(once) == once


@pytest.mark.parametrize("model", ["scattering", "pixels", "rows"])
def test_what_is_no_network_has_no_stages(model, tmp_path):
    words = ["pair=own_part", "pair.private=digits", f"model={model}", "algorithm=whitened_head"]
    assert canonical(checked("run", *words)).model.backbone.stages is None
    with pytest.raises(UsageError, match=rf"model\.backbone\.stages: architecture={model} ignores it: remove it"):
        load_backbone(canonical(checked("run", *words, "model.backbone.stages=true")).model.backbone, ".", CPU)
