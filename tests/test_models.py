"""Sizes of the networks, as the papers give them."""

import pytest
import torch
from torch import nn

from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.standardised import StandardConv2d
from pubsel.messages import UsageError
from pubsel.models import build, parameter_groups, small
from pubsel.rules import canonical
from pubsel.settings.compose import composed
from pubsel.settings.keys import Model, Norm, RunConfig
from pubsel.settings.networks import DROPPED
from pubsel.settings.schema import check


def model(name, architecture=None, input_size=None, norm=Norm.replace):
    return Model(name, architecture, False, None, norm, input_size)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("fmnist_cnn", (1, 28, 28), 10, 26_010),
        ("resnet20", (3, 32, 32), 10, 268_346),
        ("wrn_10_1", (3, 32, 32), 10, 78_938),
        ("wrn_16_4", (3, 32, 32), 10, 2_753_818),
        ("wrn_40_4", (3, 32, 32), 10, 8_961_306),
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


def test_filters_are_centred_and_scaled_to_their_gain():
    """But for one that is all but constant, whose norm is divided by 0.01."""
    torch.manual_seed(0)
    layer = StandardConv2d(3, 4, 3)
    with torch.no_grad():
        layer.gain.copy_(torch.tensor([1.0, -2.0, 0.5, 1.0]))
        layer.bias.zero_()
        layer.weight[3] = 1 + 1e-3 * torch.nn.functional.normalize(layer.weight[3], dim=(0, 1, 2))
    pixels = torch.eye(27).view(27, 3, 3, 3)  # the filters themselves
    filters = nn.functional.pad(pixels, (1, 1, 1, 1))
    filters = layer(filters)[:, :, 2, 2].T
    centred = layer.weight.flatten(1) - layer.weight.flatten(1).mean(1, keepdim=True)
    norms = centred.norm(dim=1).clamp(min=0.01)
    assert norms[3] == 0.01
    torch.testing.assert_close(filters, centred / norms[:, None] * layer.gain[:, None])
    torch.testing.assert_close(filters[:3].norm(dim=1), torch.tensor([1.0, 2.0, 0.5]))


def test_a_wide_block_is_that_of_its_paper():
    """ReLU, GroupNorm, convolution, twice, besides one more unit of 1x1 at the first of a stage, or nothing."""
    torch.manual_seed(0)
    net = small.NETWORKS["wrn_16_4"](3, 8, 8, 10)
    x = torch.randn(2, 64, 8, 8)

    def unit(x, unit):
        return unit.conv(nn.functional.group_norm(x.relu(), 16, unit.norm.weight, unit.norm.bias))

    first, second = net.stage2
    torch.testing.assert_close(first(x), unit(unit(x, first.unit1), first.unit2) + unit(x, first.shortcut))
    x = first(x)
    torch.testing.assert_close(second(x), unit(unit(x, second.unit1), second.unit2) + x)
    sides = [(layer.kernel_size[0], layer.stride[0]) for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    stage = [(3, 1)] * 3
    assert sides == [(3, 1), (3, 1), (3, 1), (1, 1), *stage[:2]] + 2 * [(3, 2), (3, 1), (1, 2), *stage[:2]]
    assert all(isinstance(layer, StandardConv2d) for layer in net.modules() if isinstance(layer, nn.Conv2d))


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


TIMM = ("model=timm", "model.architecture=resnet18")
BACKBONE = ("model=mobilenetv2",)
PIXELS = ("model=pixels",)


def canonical_model(*words):
    with composed("run", ["+experiment=quickstart", "algorithm=dp_sgd", *words]) as values:
        return canonical(check(RunConfig, values)).model


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *[
            ((*network, f"++{key}.options={{{name}: 0.5}}"), rf"^{key}.options: {name} has no effect.*: remove it$")
            for network, key in ((TIMM, "model"), (BACKBONE, "model.backbone"))
            for name in ("drop_rate", "proj_drop_rate")
        ],
        ((*BACKBONE, "++model.backbone.options={weight_init: skip}"), "weight_init has no effect on weights that"),
        ((*TIMM, "model.pretrained=true", "++model.options={weight_init: skip}"), "weight_init has no effect on"),
        ((*TIMM, "model.bias=false"), r"model\.bias=false: is for a linear classifier"),
        ((*PIXELS, "++model.backbone.input_size=8"), r"model\.backbone\.input_size: architecture=pixels ignores it"),
        ((*PIXELS, "++model.backbone.mean=[0.5]"), r"model\.backbone\.mean: architecture=pixels ignores it"),
        ((*BACKBONE, "++model.backbone.prefix=net."), r"model\.backbone\.prefix=net\.: is for .*checkpoint=FILE"),
        ((*TIMM, "++model.mean=[123,117,104]"), r"model\.mean=123\.0: must be at most 1 .*divide .* by 255"),
        ((*BACKBONE, "++model.backbone.mean=[0.5,117,0.5]"), r"backbone\.mean=117\.0: must be at most 1 .* by 255"),
        ((*BACKBONE, "++model.backbone.std=[58.4]"), r"backbone\.std=58\.4: must be at most 1 .*divide .* by 255"),
        ((*TIMM, "++model.std=[0.2,0,0.2]"), r"model\.std=0\.0: must be greater than 0"),
        ((*TIMM, "++model.mean=[-0.1]"), r"model\.mean=-0\.1: must be at least 0"),
    ],
)
def test_a_setting_of_a_network_that_changes_no_result_is_refused(words, says):
    with pytest.raises(UsageError, match=says):
        canonical_model(*words)


def test_settings_of_a_network_that_change_results_are_taken():
    scale = ("++model.backbone.mean=[0.0,1.0,0.4]", "++model.backbone.std=[0.004,1.0,0.2]")
    backbone = canonical_model(*BACKBONE, *scale).backbone
    assert (backbone.mean, backbone.std) == ([0.0, 1.0, 0.4], [0.004, 1.0, 0.2])
    assert canonical_model(*BACKBONE, "model.bias=false").bias is False
    assert canonical_model(*TIMM, "++model.options={weight_init: skip}").options == {"weight_init": "skip"}
    assert canonical_model(*PIXELS).backbone.architecture == "pixels"


@pytest.mark.parametrize("option", DROPPED)
def test_networks_run_without_the_dropping_that_is_refused(option):
    """The reason of the rule: outputs and parameters are those of a network without the option."""
    given = Model("timm", "vit_tiny_patch16_224", False, None, Norm.freeze, None, options={"img_size": 32, "depth": 2})
    x = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    plain = build(given, (3, 32, 32), 4, (0.5,) * 3, (0.5,) * 3, 0)(x)
    given.options[option] = 0.9
    dropping = build(given, (3, 32, 32), 4, (0.5,) * 3, (0.5,) * 3, 0)
    assert not any(module.training for module in dropping.modules())
    assert torch.equal(dropping(x), plain)
