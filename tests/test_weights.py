"""Files of weights: those that hold a program, and those in the layouts of others."""

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
from torch import nn

from pubsel import models
from pubsel.data.features import load_backbone
from pubsel.messages import UserError
from pubsel.models.weights import tensors_alone
from pubsel.settings.keys import Backbone
from pubsel.settings.schema import check
from tests.synthetic import secret_named

NETWORK = "test_resnet.r160_in1k"
CPU = torch.device("cpu")


class Payload:
    """What makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


@pytest.fixture
def evil(tmp_path):
    """A weight file with a payload, and the file that it would make."""
    made = tmp_path / "made"
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "more": Payload(made)}, tmp_path / "evil.pth")
    return tmp_path / "evil.pth", made


@pytest.fixture
def trusting(monkeypatch):
    """timm as it is before 1.0.26, which unpickles everything unless told otherwise."""
    from timm.models import _helpers

    for function in (_helpers.load_state_dict, _helpers.load_checkpoint):
        before = function.__defaults__
        monkeypatch.setattr(function, "__defaults__", tuple(False if value is True else value for value in before))


def test_the_payload_is_one(evil):
    path, made = evil
    torch.load(path, weights_only=False)
    assert made.exists()


@pytest.mark.attack
@pytest.mark.parametrize("options", [False, True], ids=["checkpoint", "options"])
@pytest.mark.parametrize("of_backbone", [True, False], ids=["backbone", "model"])
@pytest.mark.usefixtures("trusting")
def test_a_weight_file_runs_no_code(evil, tmp_path, of_backbone, options):
    path, made = evil
    given = {"options": {"checkpoint_path": str(path)}} if options else {"checkpoint": str(path)}
    asked = {"architecture": NETWORK, "pretrained": False, "input_size": None, "checkpoint": None, **given}

    def network():
        if of_backbone:
            return load_backbone(check(Backbone, asked), "", CPU)
        of_model = check(models.Model, asked | {"name": "timm", "norm": "freeze"})
        return models.build(of_model, (3, 32, 32), 2, (0.5,) * 3, (0.5,) * 3, 0, str(tmp_path))

    with pytest.raises(UserError) as refused:
        network()
    assert not made.exists()
    assert "\n" not in str(refused.value)
    assert ("checkpoint_path" if options else "evil.pth") in str(refused.value)


@pytest.mark.attack
def test_weights_of_a_text_tower_run_no_code(evil, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="needs the extra clip")
    import json

    from test_text import SMALL

    from pubsel.models.class_names import text_weights

    (tmp_path / "pubsel-small.json").write_text(json.dumps(SMALL))
    open_clip.add_model_config(tmp_path)
    path, made = evil
    with pytest.raises(UserError, match=r"text_weights=.*evil\.pth"):
        text_weights(["daisy"], "pubsel-small", str(path), 1.0)
    assert not made.exists()


@pytest.mark.attack
def test_kept_files_of_a_run_run_no_code(evil):
    """A checkpoint, a first release and a finished model, which another process may have put there."""
    from pubsel.training.once import released_once

    path, made = evil
    with pytest.raises(UserError, match=r"evil\.pth cannot be read"):
        released_once(path, secret_named(), dict)
    assert not made.exists()


def test_whoever_calls_torch_load_takes_tensors_alone(evil, monkeypatch):
    path, made = evil
    for before in ({}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}):
        for key, value in before.items():
            monkeypatch.setenv(key, value)
        with tensors_alone(), pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=False)
        assert not made.exists()
        assert {key: os.environ.get(key) for key in before} == before
        assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


# Layouts of others


def random_numbers(net: nn.Module) -> nn.Module:
    """The network with other numbers in each tensor, those of BatchNorm too."""
    torch.manual_seed(0)
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if value.dim() == 1 else torch.randn_like(value) * 0.1)
    return net.eval()


def encoder(path: Path, **backbone) -> nn.Module:
    """The network of a backbone with the weights of a file."""
    return load_backbone(check(Backbone, backbone | {"pretrained": False, "checkpoint": str(path)}), "", CPU).net


def norm(size: int, relu: bool = True) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(size), nn.ReLU() if relu else nn.Identity())


class Block(nn.Module):
    """A bottleneck with the names of SimCLRv2-Pytorch."""

    def __init__(self, before: int, after: int, stride: int, first: bool):
        super().__init__()
        inner = after // 4
        self.projection = nn.Sequential()
        if first:
            self.projection.add_module("shortcut", nn.Conv2d(before, after, 1, stride, bias=False))
            self.projection.add_module("bn", norm(after, relu=False))
        self.net = nn.Sequential(
            *(nn.Conv2d(before, inner, 1, bias=False), norm(inner)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner)),
            *(nn.Conv2d(inner, after, 1, bias=False), norm(after, relu=False)),
        )

    def forward(self, x):
        return (self.projection(x) + self.net(x)).relu()


class Simclr(nn.Module):
    """A ResNet of double width with the names of SimCLRv2-Pytorch, pooled as in TensorFlow."""

    def __init__(self, layers: list[int], channels: list[int]):
        super().__init__()
        pool = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(3, 2))
        self.net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 128, 7, 2, 3, bias=False), norm(128), pool))
        before = 128
        for stage, (depth, size) in enumerate(zip(layers, channels, strict=True)):
            group = nn.Sequential()
            for i in range(depth):
                stride = 2 if stage and not i else 1
                group.append(Block(before, 2 * size, stride, not i))
                before = 2 * size
            self.net.append(nn.Sequential())
            self.net[-1].add_module("blocks", group)
        self.fc = nn.Linear(before, 1000)

    def forward(self, x):
        return self.net(x).mean((2, 3))


SHAPE = {"layers": [2, 1, 3, 1], "channels": [32, 64, 96, 128]}
SIMCLR = {
    "architecture": "resnetv2_152",
    "options": {**SHAPE, "width_factor": 2, "preact": False, "stem_type": "same"},
}
SOLO = {"architecture": "resnet50", "options": {"layers": [1, 2, 1, 1]}}
IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def simclr_file(folder: Path) -> tuple[Path, dict, nn.Module]:
    """A file as SimCLRv2-Pytorch writes it, what it holds, and the network that it is of."""
    net = random_numbers(Simclr(**SHAPE))
    head = {"layers.0.weight": torch.zeros(3, 3)}
    return folder / "r152_2x_sk0.pth", {"resnet": net.state_dict(), "head": head}, net


def solo_file(folder: Path, prefix: str = "encoder.") -> tuple[Path, dict, nn.Module]:
    """A checkpoint as solo-learn writes it, what it holds, and the network that it is of."""
    net = random_numbers(timm.create_model("resnet50", num_classes=0, **SOLO["options"]))
    weights = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    momentum = {f"momentum_{name}": torch.zeros_like(value) for name, value in weights.items()}
    more = {"classifier.weight": torch.zeros(9, 2048), "projector.0.weight": torch.zeros(4, 4)}
    return folder / "byol.ckpt", {"epoch": 99, "state_dict": {**momentum, **weights, **more}}, net


def test_a_file_of_simclr_gives_what_its_network_gives(tmp_path):
    path, content, net = simclr_file(tmp_path)
    torch.save(content, path)
    with torch.no_grad():
        torch.testing.assert_close(encoder(path, **SIMCLR)(IMAGES), net(IMAGES), rtol=1e-5, atol=1e-5)


@pytest.mark.attack
@pytest.mark.parametrize("prefix", ["encoder.", "backbone."])
def test_a_file_of_solo_learn_gives_what_its_network_gives_and_runs_no_code(tmp_path, prefix, monkeypatch):
    path, content, net = solo_file(tmp_path, prefix)
    made = tmp_path / "made"
    library = ModuleType("a_library")
    library.Callback = type("Callback", (), {"__module__": "a_library"})
    library.Code = type("Code", (), {"__reduce__": lambda self: (exec, (f"open({str(made)!r}, 'w')",))})
    monkeypatch.setitem(sys.modules, "a_library", library)
    settings = library.Callback()
    settings.rate = 0.1
    torch.save(content | {"callbacks": {library.Callback: [settings]}, "hyper_parameters": library.Code()}, path)
    monkeypatch.delitem(sys.modules, "a_library")

    with torch.no_grad():
        assert torch.equal(encoder(path, **SOLO)(IMAGES), net(IMAGES))
    assert not made.exists()


@pytest.mark.parametrize(
    ("make", "of", "name"),
    [
        (simclr_file, SIMCLR, "net.3.blocks.2.net.1.0.running_var"),
        (solo_file, SOLO, "encoder.layer2.1.bn3.weight"),
    ],
)
@pytest.mark.parametrize("fault", ["absent", "misshapen", "deeper"])
def test_a_file_of_another_network_is_refused(tmp_path, make, of, name, fault):
    path, content, _ = make(tmp_path)
    weights = content.get("resnet") or content["state_dict"]
    value = weights.pop(name)
    if fault != "absent":
        weights[name] = value[1:] if fault == "misshapen" else value
    if fault == "deeper":
        weights[name.replace(".2.", ".9.").replace("layer2.1", "layer2.9")] = value
    torch.save(content, path)
    with pytest.raises(UserError) as refused:
        encoder(path, **of)
    counts = {"absent": (0, 1, 0), "misshapen": (1, 0, 0), "deeper": (0, 0, 1)}[fault]
    message = "{} weights of another shape, {} absent, {} without a place, the first ".format(*counts)
    assert f"{path} does not fit: {message}" in str(refused.value)
    assert "\n" not in str(refused.value)
