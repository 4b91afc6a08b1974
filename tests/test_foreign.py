"""Folders and records from others: nothing of them is run, nothing is fetched or written for them, and they take no
more memory than they have bytes."""

import contextlib
import csv
import dataclasses
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest
import synthetic
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import pubsel
from pubsel import records
from pubsel.cell import weights_digest
from pubsel.cli import main
from pubsel.messages import UserError
from pubsel.models import build, memory
from pubsel.models import weights as of_weights
from pubsel.release import classifier
from pubsel.release.bundle import public_facts
from pubsel.rules import canonical
from pubsel.settings import fetching
from pubsel.settings.explain import method_class
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import Model, Norm
from tests.made import checked

PLAIN = {
    "name": "any",
    "architecture": None,
    "pretrained": False,
    "checkpoint": None,
    "norm": "freeze",
    "input_size": None,
}
NETWORK = "test_resnet"
NOW = {"numbers": records.NUMBERS}
EVIL = "open('ran', 'w').close()\nfrom pubsel.algorithms.dp_sgd import DPSGD\nclass Evil(DPSGD):\n    x: int = 1\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PUBSEL_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("a.png")
    return tmp_path


@pytest.fixture
def server():
    """A server on loopback, with the requests that it has seen."""
    seen = []

    class Seen(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Seen) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/x.pth", seen
        running.shutdown()


def folder(backbone=None, **changed):
    """A folder as `pubsel export` makes one: a linear classifier, of features of a backbone if one is named."""
    whole = nn.Linear(4, 2)
    whole.load_state_dict({"weight": torch.arange(8.0).view(2, 4), "bias": torch.zeros(2)})
    x = classifier.example_input(whole, {"shape": [4]})
    facts = {
        "model": PLAIN | ({"backbone": backbone} if backbone else {}),
        "classes": ["a", "b"],
        "multi_label": False,
        "shape": [3, 8, 8],
        "mean": [],
        "std": [],
        "backbone": None,
        "frozen": None,
        "weights": weights_digest(whole),
        "example": classifier.logits_of(whole, x),
    }
    Path("given").mkdir(exist_ok=True)
    save_file(whole.state_dict(), "given/model.safetensors")
    Path("given/config.json").write_text(json.dumps(facts | {"privacy": {"statement": "."}} | changed))
    return facts


def refused(capsys, *words):
    """The one line with which a command fails."""
    assert main([*words, "threads=1"]) in (1, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


PLACES = """
cache_dir pretrained_cfg pretrained_cfg_overlay checkpoint_path features_only norm_layer_url pruned scriptable
""".split()


@pytest.mark.attack
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("command", ["predict", "load", "export"])
@pytest.mark.parametrize("download", ["false", "true"])
def test_no_option_of_a_folder_names_a_file_or_an_address(name, command, download, server, capsys):
    url, seen = server
    Path("site-packages").mkdir()
    overlay = {"url": url, "hf_hub_id": None, "file": "/etc/passwd"}
    values = {"cache_dir": "site-packages", "pretrained_cfg_overlay": {"url": url, "hf_hub_id": None}}
    options = values | {name: values.get(name, overlay)}
    facts = folder({"architecture": "resnet18", "pretrained": True, "options": options})
    if command == "load":
        with pytest.raises(UserError, match="options"):
            pubsel.load("given").predict("a.png", threads=1, download=download == "true")
    elif command == "export":
        with pytest.raises(UserError, match="options"):
            public_facts(facts, nn.Linear(4, 2))
    else:
        assert "options" in refused(capsys, "predict", "given", "a.png", f"download={download}")
    assert (seen, [*Path("site-packages").iterdir()]) == ([], [])


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "local-dir:given", "resnet18.hf-hub:a/b", "a\nb", "../x"])
@pytest.mark.parametrize("where", ["backbone", "network"])
def test_an_architecture_is_a_registered_name(name, where, capsys, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("made"))
    if where == "backbone":
        folder({"architecture": name, "pretrained": True})
    else:
        named = PLAIN | {"name": "timm", "architecture": name}
        folder(model=named, mean=[0.5] * 3, std=[0.5] * 3)
    assert "architecture=" in refused(capsys, "predict", "given", "a.png", "download=true")


@pytest.mark.attack
@pytest.mark.parametrize("words", [[], ["download=false"]])
def test_weights_are_fetched_only_if_this_is_allowed(words, capsys, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("made")) if words else None
    monkeypatch.setattr(memory, "check_size", lambda *_: None)
    monkeypatch.setattr("pubsel.data.features.check_size", lambda *_: None)
    monkeypatch.setattr(of_weights, "kept", lambda name: None)
    folder({"architecture": "resnet18", "pretrained": True})
    assert "download=true" in refused(capsys, "predict", "given", "a.png", *words)


def test_weights_that_are_kept_are_read_without_a_request(monkeypatch, tmp_path):
    net = timm.create_model(NETWORK, num_classes=0)
    full = timm.create_model(NETWORK)
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "model.safetensors"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked"))
    with fetching(False):
        net = of_weights.of_timm(NETWORK, True, {"num_classes": 0})
    assert all(torch.equal(value, full.state_dict()[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["vit_b_16", "resnet18", "googlenet", "inception_v3", "fcn_resnet50"])
def test_a_network_of_torchvision_is_rebuilt_without_its_published_weights(name, monkeypatch):
    def fetched(*_, **__):
        pytest.fail("fetched")

    monkeypatch.setattr(torchvision.models._api.WeightsEnum, "get_state_dict", fetched)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fetched)
    model = Model("torchvision", name, True, None, Norm.freeze, None)
    side = 299 if name == "inception_v3" else 224 if name == "vit_b_16" else 64
    with torch.device("meta"), contextlib.nullcontext() if name != "fcn_resnet50" else pytest.raises(UserError):
        net = build(model, (3, side, side), 2, (0.5,) * 3, (0.5,) * 3, 0, None)
        assert getattr(net.net, "transform_input", True) is True


# Modules


def evil_record(group):
    """The record of a run that pubsel would read again, if it were not for the class that it names."""
    made = canonical(checked("run", "+experiment=quickstart", "algorithm=gep", "algorithm.k=10", "distance=gsd"))
    made = dataclasses.replace(made, **{group: getattr(made, group) | {"_target_": "evil.Evil"}})
    settings, identity = as_json(made), identity_of(made)
    n = len(pubsel.open_dataset("digits").train.y)
    changed = {"settings": settings, "identity": identity, "private_examples": n, "weights": "0", "test_examples": 9}
    stated = synthetic.STATED | {"epsilon": 4.0, "sampling_rate": 1.0}
    return synthetic.record() | changed | {"privacy": stated, "metric": "accuracy"} | NOW


@pytest.mark.attack
@pytest.mark.parametrize("group", ["algorithm", "distance"])
@pytest.mark.parametrize(
    "words",
    [
        ["predict", "given", "a.png"],
        ["export", "given", "to=new", "anyway=true"],
        ["run", "replay=given"],
        ["attack", "loss", "run=*"],
        ["load"],
    ],
    ids=" ".join,
)
def test_no_module_of_a_folder_is_imported(words, group, monkeypatch, tmp_path, capsys):
    if group == "distance" and words[0] != "run":
        pytest.skip("no distance is built")
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("evil.py").write_text(EVIL)
    record = evil_record(group)
    for place in ("given", f"results/runs/{record['identity']}"):
        Path(place).mkdir(parents=True)
        records.write_record(Path(place, "result.json"), record)
        torch.save({"weight": torch.zeros(1)}, Path(place, "model.pt"))
    says = "_target_=evil.Evil" if words[0] == "run" else "model.json: no such file"  # before the class is looked at
    if words == ["load"]:
        with pytest.raises(UserError, match=says):
            pubsel.Record(record, Path("given"), "").predict("a.png", threads=1)
    else:
        assert says in refused(capsys, *words)
    assert not Path("ran").exists()
    assert "evil" not in sys.modules


@pytest.mark.attack
def test_the_settings_of_a_class_are_not_read_from_a_module_of_a_folder(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    run = "from os import mkdir\nfrom dataclasses import dataclass\n@dataclass\nclass Evil:\n    x: int = mkdir('ran')"
    Path("evil.py").write_text(run)
    assert method_class("evil.Evil") is None
    assert not Path("ran").exists()


@pytest.mark.attack
def test_python_m_pubsel_imports_nothing_of_the_folder_it_is_started_in(tmp_path):
    folder()
    for name in ("json", "filelock", "torch", "hydra_plugins/evil", "yaml", "evil"):
        path = Path("given", f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("open('ran', 'w').close()\n")
    env = os.environ | {"PYTHONPATH": str(Path(pubsel.__file__).parents[1])}
    words = [sys.executable, "-m", "pubsel", "runs", "show", "nothing"]
    done = subprocess.run(words, cwd="given", env=env, capture_output=True, text=True)
    assert not Path("given/ran").exists(), done.stderr


@pytest.mark.parametrize("where", ["options", "settings"])
def test_no_value_of_a_file_is_taken_from_the_environment(where, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "s3cret")
    folder({"architecture": NETWORK, "pretrained": False, "checkpoint": "${oc.env:SECRET}"})
    err = refused(capsys, "predict", "given", "a.png")
    assert "s3cret" not in err
    assert "in place of a value" in err


# Memory


VIT = {"name": "timm", "architecture": "vit_tiny_patch16_224", "norm": "freeze"}
LARGE = {
    "shape": {"shape": [3, 10**6, 10**6]},
    "classes": {"classes": "ab"},
    "a row": {"shape": [10**12]},
    "width": {"backbone": {"options": {"embed_dim": 10**9}}},
    "tokens": {"backbone": {"options": {"img_size": 4096, "patch_size": 1}}},
    "pixels": {"backbone": {"input_size": 16384, "crop": 0.1, "options": {}}},
    "adapters": {"model": VIT | {"adapters": {"layers": ["mlp"], "size": 10**9}}},
    "ranks": {"model": VIT | {"lora": {"layers": ["qkv"], "r": 10**9, "alpha": 1.0}}},
    "image": {"model": {"name": "fmnist_cnn", "input_size": 16384}},
    "wide": {"model": VIT | {"options": {"embed_dim": 8192, "depth": 2, "num_heads": 8}}},
}


@pytest.mark.attack
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_sizes_are_bounded_before_memory_is_taken(case, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 2**30)
    changed, backbone = dict(case), None
    if "backbone" in case:
        backbone = {"architecture": "vit_tiny_patch16_224", "pretrained": False} | changed.pop("backbone")
    if "model" in case:
        changed |= {"model": PLAIN | case["model"], "mean": [0.5] * 3, "std": [0.5] * 3}
    folder(backbone, **changed)
    before = torch.empty
    largest = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: largest.append(x := before(*a, **k)) or x)
    refused(capsys, "predict", "given", "a.png")
    taken = [tensor.nbytes for tensor in largest if tensor.device.type == "cpu"]
    assert max(taken, default=0) < 2**28


@pytest.mark.parametrize("kind", ["compressed", "repeated"])
def test_a_file_of_weights_takes_no_more_memory_than_it_is_large(kind, tmp_path):
    path = tmp_path / "model.pt"
    value = torch.zeros(2**22) if kind == "compressed" else torch.zeros(1).expand(2**40)
    torch.save({"weight": value}, path)
    if kind == "compressed":
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new", "w", zipfile.ZIP_DEFLATED) as new:
            for part in old.infolist():
                new.writestr(part.filename, old.read(part))
        os.replace(tmp_path / "new", path)
    with pytest.raises(ValueError, match=r"compressed|repeat"):
        classifier._state(path)


# Spreadsheets


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\uff1d1"]


@pytest.mark.attack
@pytest.mark.parametrize("name", FORMULAS)
def test_no_spreadsheet_runs_the_name_of_a_class(name):
    cell = f"'{name}".replace("\r", "\n")
    folder({"architecture": "pixels", "pretrained": False}, classes=[name, "-1.5e3"], shape=[1, 2, 2])
    assert main(["predict", "given", "a.png", "all=true", "threads=1"]) == 0
    with Path("answers.csv").open(newline="") as file:
        head, row = csv.reader(file)
    assert head[3:] == [cell, "-1.5e3"]
    assert row[1] in head[3:]
    table = records.as_csv(pandas.DataFrame({"private": [name], "public": ["-1.5"]}))
    assert [*csv.reader(io.StringIO(table, newline=""))] == [["private", "public"], [cell, "-1.5"]]
