"""Sizes of the networks, as the papers give them."""

import pytest
import torch

from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError
from pubsel.models import build, parameter_groups
from pubsel.settings.keys import Model, Norm


def model(name, architecture=None, input_size=None, norm=Norm.replace):
    return Model(name, architecture, False, None, norm, input_size)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("fmnist_cnn", (1, 28, 28), 10, 26_010),
        ("resnet20", (3, 32, 32), 10, 268_346),
        ("probe", (3, 224, 224), 14, 30_782),
        ("mnist_cnn", (1, 28, 28), 10, 14_394),
    ],
)
def test_parameter_counts(name, shape, classes, count):
    net = build(model(name), shape, classes, (0.5,) * shape[0], (0.5,) * shape[0], seed=0)
    assert sum(p.numel() for p in net.parameters()) == count


def test_images_are_scaled_resized_and_normalised():
    net = build(model("linear", input_size=2), (1, 1, 1), 2, (0.25,), (0.5,), seed=0)
    seen = []
    net.net.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    net(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8))
    torch.testing.assert_close(seen[0], torch.full((1, 1, 2, 2), 1.5))


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(123)
    a = build(model("fmnist_cnn"), (1, 28, 28), 10, (0.5,), (0.5,), seed=1)
    torch.manual_seed(456)
    before = torch.random.get_rng_state()
    b = build(model("fmnist_cnn"), (1, 28, 28), 10, (0.5,), (0.5,), seed=1)
    c = build(model("fmnist_cnn"), (1, 28, 28), 10, (0.5,), (0.5,), seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_groups_of_resnet20_are_the_papers_five():
    net = build(model("resnet20"), (3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3, seed=0)
    groups = parameter_groups(net, PerExampleGradients(net, 1).offsets)
    assert {name: s.stop - s.start for name, s in groups.items()} == {
        "net.conv1": 432,
        "net.stage1": 13_824,
        "net.stage2": 50_688,
        "net.stage3": 202_752,
        "net.fc": 650,
    }


def test_frozen_batchnorm_keeps_examples_apart():
    net = build(model("torchvision", "resnet18", norm=Norm.freeze), (3, 32, 32), 4, (0.5,) * 3, (0.5,) * 3, seed=0)
    x = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), atol=1e-5, rtol=1e-4)
    assert not any(p.requires_grad for n, p in net.named_parameters() if "bn" in n)


@pytest.mark.parametrize(
    ("given", "shape", "says"),
    [
        (model("nope"), (1, 28, 28), "model.name=nope"),
        (model("timm"), (3, 32, 32), "model.architecture"),
        (model("timm", "resnet1888"), (3, 32, 32), "no such model"),
        (model("torchvision", "nope"), (3, 32, 32), "no such model"),
        (model("torchvision", "resnet18"), (1, 32, 32), "3 channels"),
        (model("probe"), (1, 28, 28), "does not fit"),
    ],
)
def test_what_cannot_be_built_is_named(given, shape, says):
    with pytest.raises(UsageError, match=says):
        build(given, shape, 10, (0.5,) * shape[0], (0.5,) * shape[0], seed=0)
