"""A network in two parts computes what the whole one does, and training the upper part trains the whole."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError, UserError
from pubsel.models import Network, build
from pubsel.models.layers import split
from pubsel.settings.keys import Lora, Model, Norm
from pubsel.training.once import below_once
from tests.made import write_npz

NETWORKS = {
    "resnet18": (32, {"trained": ["layer4.1.conv2", "fc"]}),
    "densenet121": (32, {"trained": ["features.denseblock3.denselayer23.conv1", "classifier"]}),
    "mobilenetv2_100": (32, {"trained": ["blocks.5.2.conv_dw", "classifier"], "input_size": 64}),
    "vit_tiny_patch16_224": (32, {"trained": ["head"], "options": {"img_size": 32, "depth": 2}}),
}


def network(name, **instead):
    size, changes = NETWORKS[name]
    changes = instead or changes
    given = Model("any", name, False, None, Norm.freeze, changes.get("input_size"))
    given = dataclasses.replace(given, **changes)
    return build(given, (3, size, size), 5, (0.5,) * 3, (0.5,) * 3, 0)


def images(n=6, size=32):
    torch.manual_seed(0)
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8), torch.arange(n) % 5


@pytest.mark.parametrize("name", NETWORKS)
def test_the_parts_are_the_whole(name):
    """Logits, gradients and the names of what trains."""
    net, (x, y) = network(name), images()
    below, above = split(net, x)
    z = below(x)
    assert (z.dim(), z.requires_grad) == (2, False)
    torch.testing.assert_close(above(z), net(x), atol=1e-5, rtol=1e-5)
    upper, whole = PerExampleGradients(above), PerExampleGradients(net)
    assert upper.offsets == whole.offsets
    rows = whole.matrix(x, y).rows
    torch.testing.assert_close(upper.matrix(z, y).rows, rows, atol=2e-5 * float(rows.abs().max()), rtol=1e-3)


def test_training_the_upper_part_trains_the_whole():
    net, (x, _) = network("resnet18"), images()
    below, above = split(net, x)
    before = net(x)
    with torch.no_grad():
        for parameter in above.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    assert not torch.allclose(net(x), before)
    torch.testing.assert_close(above(below(x)), net(x), atol=1e-5, rtol=1e-5)


class Turns(nn.Module):
    """Its way depends on the image."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


class Shared(nn.Module):
    """A frozen parameter is used below and above what trains."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.flat, self.one, self.two = nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2)
        self.one.requires_grad_(False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(self.flat(x)) * self.scale)) * self.scale


def test_what_is_frozen_may_be_used_below_and_above_and_one_image_is_enough():
    net = Network(Shared(), (0.5,), (0.5,), None).eval()
    x = torch.randint(256, (1, 3, 2, 2), dtype=torch.uint8)
    below, above = split(net, x)
    assert below(x).shape == (1, 4)
    torch.testing.assert_close(above(below(x)), net(x))


def test_a_network_that_cannot_be_traced_is_named():
    net = Network(Turns(), (0.5,), (0.5,), None)
    with pytest.raises(UsageError, match=r"model\.once=true: .*traced"):
        split(net, torch.zeros(2, 3, 2, 2, dtype=torch.uint8))


class Overwrites(nn.Module):
    """What trains is given a tensor that a frozen layer overwrites afterwards."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.one.requires_grad_(False)

    def forward(self, x):
        x = self.one(x)
        y = self.two(x)
        return (y + torch.relu_(x)).flatten(1)


class AddsTo(Overwrites):
    """What trains is added, in place, to what does not."""

    def forward(self, x):
        x = self.one(x)
        y = torch.tanh(x)
        y.add_(self.two(x))
        return y.flatten(1)


@pytest.mark.parametrize("body", [Overwrites(), AddsTo()])
def test_a_network_that_overwrites_what_the_parts_share_is_named(body):
    with pytest.raises(UsageError, match=r"model\.once=true: cut in two"):
        split(Network(body, (0.5,), (0.5,), None).eval(), torch.zeros(2, 3, 2, 2, dtype=torch.uint8))


def test_a_network_whose_parts_share_more_than_outputs_is_named():
    """LoRA in every block of a transformer: the number of images passes into the upper part."""
    net = network("vit_tiny_patch16_224", lora=Lora(["qkv"], 2, 2.0), options={"img_size": 32, "depth": 2})
    with pytest.raises(UsageError, match=r"model\.once=true: more than"):
        split(net, images()[0])


def test_outputs_that_do_not_fit_are_refused(capsys):
    x, y = images()
    task = Task(Split(x, y), None, Split(x, y), 5, "accuracy", (0.5,) * 3, (0.5,) * 3, ())
    net = network("resnet18")
    above, changed = below_once(net, task, 2**30)
    assert "for each of 12 images" in capsys.readouterr().err
    torch.testing.assert_close(above(changed.test.x), net(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"model\.once=true: .*[GM]iB"):
        below_once(net, task, 10)


def test_a_run_ends_alike_whether_frozen_layers_run_once_or_in_each_pass(folder, capsys):
    draw = np.random.RandomState(0)
    y = draw.randint(2, size=100)
    x = (draw.randint(100, size=(100, 16, 16, 3)) + 120 * y[:, None, None, None]).astype("u1")
    write_npz("own.npz", (x[:60], y[:60]), (x[60:], y[60:]))
    words = (
        "model=timm model.architecture=resnet10t model.norm=freeze model.trained=[fc,layer4.0.downsample.1] epsilon=inf"
    )
    words += " algorithm=second_phase pair.private=own.npz pair.public=own.npz pair.take=train pair.public_share=0.4"
    words += " training=fine_tune threads=1"
    words += " training.batch_size=60 training.epochs=2 distance=none"
    for once_ in ("true", "false"):
        assert main(["run", *words.split(), f"model.once={once_}"]) == 0, capsys.readouterr().err
    found = [json.loads(path.read_text()) for path in Path("results").glob("runs/*/result.json")]
    assert len(found) == 2
    assert found[0]["utility"] == found[1]["utility"]
    assert found[0]["parameters"] == found[1]["parameters"] > 0
    one, two = (torch.load(path, weights_only=True) for path in Path("results").glob("runs/*/model.pt"))
    assert list(one) == list(two)
    changed = [name for name in one if not torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4)]
    assert changed == []


@pytest.mark.gpu
def test_frozen_layers_run_on_a_gpu_and_their_outputs_wait_in_memory():
    x, y = images()
    task = Task(Split(x, y), None, Split(x, y), 5, "accuracy", (0.5,) * 3, (0.5,) * 3, ())
    net = network("resnet18").cuda()
    above, changed = below_once(net, task, 2**30)
    assert changed.private.x.device.type == "cpu"
    torch.testing.assert_close(above(changed.private.x.cuda()), net(x.cuda()), atol=1e-3, rtol=1e-3)
