"""Which parameters train: the counts of the papers' networks, and what the new layers compute."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.per_example import by_vmap
from pubsel.messages import UsageError, UserError
from pubsel.models import _apart, _torchvision_scale, build
from pubsel.models.trained import LowRank, choose, head, heads, replaced_heads, trained_parameters
from pubsel.settings.keys import Adapters, Lora, Model, Norm

DENSE = "features.denseblock3.denselayer"
TABLE_6 = {  # GSD, Table 6, for the 14 labels of ChestX-ray14
    "resnet152": ({"trained": ["fc", "layer3.32.conv1.weight"]}, 2048 * 14 + 14 + 256 * 1024),
    "densenet121": (
        {"trained": ["classifier", f"{DENSE}23.conv1.weight", f"{DENSE}24.conv1.weight"]},
        1024 * 14 + 14 + 128 * (256 + 22 * 32) + 128 * (256 + 23 * 32),
    ),
    "vit_base_patch16_224": ({"lora": Lora(["qkv"], 8, 8.0)}, 768 * 14 + 14 + 12 * 8 * (768 + 3 * 768)),
}


def model(architecture, **changes):
    return Model("timm", architecture, False, None, Norm.freeze, None, **changes)


def network(given, classes=5, size=32, seed=0):
    return build(given, (3, size, size), classes, (0.5,) * 3, (0.5,) * 3, seed)


def contiguous(net):
    return {name: tensor.contiguous() for name, tensor in net.state_dict().items()}


def images(n, size=32):
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8), torch.arange(n) % 5


@pytest.mark.parametrize("architecture", TABLE_6)
def test_as_many_parameters_train_as_the_paper_says(architecture):
    changes, count = TABLE_6[architecture]
    with torch.device("meta"):
        net = network(model(architecture, **changes), 14, 224)
    assert trained_parameters(net) == PerExampleGradients(net).size == count


WAYS = {
    "head": ({"trained": ["head"]}, {"fc.weight", "fc.bias"}),
    "a layer and a parameter": (
        {"trained": ["fc", "layer4.1.conv2.weight"]},
        {"fc.weight", "fc.bias", "layer4.1.conv2.weight"},
    ),
    "a block": ({"trained": ["layer4.1"]}, {"layer4.1.conv1.weight", "layer4.1.conv2.weight"}),  # without batch norm
    "batch norm": ({"trained": ["layer4.1.bn1"]}, {"layer4.1.bn1.weight", "layer4.1.bn1.bias"}),
    "first and last": ({"trained": ["first_last"]}, {"conv1.weight", "fc.weight", "fc.bias"}),
}


@pytest.mark.parametrize(("changes", "names"), WAYS.values(), ids=WAYS)
def test_what_is_named_trains_and_nothing_else(changes, names):
    net = network(model("resnet18", **changes))
    assert {n.removeprefix("net.") for n, p in net.named_parameters() if p.requires_grad} == names


def test_biases_train_with_the_head():
    net = network(model("resnet18", trained=["bias"]))
    trained = [n for n, p in net.named_parameters() if p.requires_grad]
    assert {n.rpartition(".")[2] for n in trained if "fc" not in n} == {"bias"}
    assert len(trained) == 20 + 2


def test_without_a_word_all_but_frozen_batchnorm_trains():
    net = network(model("resnet18"))
    frozen = {n for n, p in net.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("bn" in n or "downsample.1" in n for n in frozen)


SMALL = {
    "lora": {"lora": Lora(["qkv", "fc1"], 2, 4.0)},
    "adapters": {"adapters": Adapters(["attn", "mlp"], 3)},
    "bias": {"trained": ["bias"]},
}


@pytest.mark.parametrize("changes", SMALL.values(), ids=SMALL)
def test_gradients_of_what_is_new_are_exact_and_found_from_layers(changes):
    """Against vmap in float64; new layers start without effect, and are moved off zero first."""
    given = model("vit_tiny_patch16_224", options={"img_size": 32, "depth": 2}, **changes)
    net, plain = network(given), network(model("vit_tiny_patch16_224", options={"img_size": 32, "depth": 2}))
    x, y = images(3)
    if "trained" not in changes:
        assert not torch.equal(net.net.head.weight, torch.zeros_like(net.net.head.weight))
        plain.net.load_state_dict({n.replace("layer.", ""): t for n, t in net.net.state_dict().items()}, strict=False)
        torch.testing.assert_close(net(x), plain(x))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    net = net.double()
    engine = PerExampleGradients(net)
    rows = engine.matrix(x, y).rows
    assert engine._by_layers
    exact = {n: torch.zeros(3, *net.get_parameter(n).shape, dtype=torch.float64) for n in engine.offsets}
    by_vmap(net, x, y, exact)
    torch.testing.assert_close(rows, torch.cat([g.flatten(1) for g in exact.values()], 1), rtol=1e-8, atol=1e-12)
    assert (rows.abs().amax(0) > 0).double().mean() > 0.9


def test_low_rank_is_the_formula():
    layer = nn.Linear(6, 4)
    new = LowRank(layer, 2, 8.0)
    nn.init.normal_(new.up.weight)
    x = torch.randn(3, 6)
    torch.testing.assert_close(new(x), x @ (layer.weight + 8 / 2 * new.up.weight @ new.down.weight).T + layer.bias)


def test_frozen_layers_below_are_in_no_graph():
    """Their outputs need no memory for a backward pass."""
    net = network(model("resnet18", trained=["fc", "layer4.1.conv2"]))
    graphs = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, i, o, name=name: graphs.__setitem__(name, o.requires_grad))
    engine = PerExampleGradients(net)
    engine.matrix(*images(2))
    graphs.clear()
    engine.matrix(*images(2))
    assert engine._by_layers
    assert {name for name, there in graphs.items() if there} <= {"net.layer4.1.conv2"}


def test_weights_of_a_file_go_below_a_new_head(tmp_path):
    """Its own thousand classes are left out; grey images reach it as colours, in its own normalisation."""
    source = network(model("resnet18"), classes=1000).net
    path = tmp_path / "weights.safetensors"
    save_file(contiguous(source), path)
    given = model("resnet18", mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0])
    given.checkpoint = "weights.safetensors"
    net = build(given, (1, 32, 32), 5, (0.5,), (0.5,), 0, str(tmp_path))
    assert torch.equal(net.net.conv1.weight, source.conv1.weight)
    assert net.net.fc.out_features == 5
    assert net.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    grey, _ = images(2)
    torch.testing.assert_close(net(grey[:, :1]), net(grey[:, :1].expand(-1, 3, -1, -1)))


def test_a_file_that_does_not_fit_or_is_absent_is_named(tmp_path):
    given = model("resnet34")
    given.checkpoint = str(tmp_path / "no.safetensors")
    with pytest.raises(UserError, match=r"model\.checkpoint=.*no such file"):
        network(given)
    save_file(contiguous(network(model("resnet18")).net), tmp_path / "no.safetensors")
    with pytest.raises(UserError, match=r"model\.checkpoint=.*does not fit.*layer1\.2"):
        network(given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trained": ["layer4.9"]}, r"no layer layer4\.9.*layer4"),
        ({"trained": ["relu"]}, "no layer relu"),
        ({"trained": []}, r"model\.trained=\[\]"),
        ({"lora": Lora(["q_proj"], 8, 8.0)}, r"model\.lora\.layers=\['q_proj'\].*it has none"),
        ({"lora": Lora(["fc"], 8, 8.0)}, r"model\.lora\.layers=\['fc'\].*below its head"),
        ({"options": {"depth": 1}}, r"model\.options=\{'depth': 1\}.*resnet18"),
        ({"mean": [0.5]}, r"model\.mean"),
        ({"adapters": Adapters(["nothing"], 8)}, r"model\.adapters\.layers"),
        ({"adapters": Adapters(["layer1"], 8)}, "width"),
    ],
)
def test_names_that_the_network_lacks_are_answered_with_those_that_it_has(changes, says):
    with pytest.raises(UsageError, match=says):
        network(model("resnet18", **changes))


def test_a_head_is_the_last_linear_layer_and_can_be_lent():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    old = net[2]
    own = replaced_heads(net, 7, torch.Generator().manual_seed(0))
    assert list(own) == ["2"]
    assert own["2"] is old
    assert net[2].out_features == 7
    again = replaced_heads(net, 7, torch.Generator().manual_seed(0))["2"]
    assert torch.equal(again.weight, net[2].weight)
    with pytest.raises(UsageError, match="no linear layer"):
        head(nn.Sequential(nn.Conv2d(1, 1, 1)))


DEIT = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}  # `deit_tiny_distilled`, smaller


@pytest.mark.parametrize("word", ["head", "bias", "first_last"])
def test_both_heads_of_a_distilled_network_train(word):
    net = network(model("deit_tiny_distilled_patch16_224", options=DEIT, trained=[word]))
    trained = {n.removeprefix("net.") for n, p in net.named_parameters() if p.requires_grad}
    both = {f"{name}.{kind}" for name in ("head", "head_dist") for kind in ("weight", "bias")}
    assert both <= trained
    assert word != "head" or trained == both
    rows = PerExampleGradients(net).matrix(*images(2)).rows
    assert (rows.abs().amax(0) > 0).double().mean() > 0.9
    assert heads(network(model("resnet18")).net) == ["fc"]


def test_both_heads_of_a_distilled_network_are_new_and_can_be_lent(tmp_path):
    """A file of another task keeps neither of its heads; a temporary head is two."""
    source = network(model("deit_tiny_distilled_patch16_224", options=DEIT), classes=9).net
    save_file(contiguous(source), tmp_path / "w.safetensors")
    given = model("deit_tiny_distilled_patch16_224", options=DEIT, lora=Lora(["qkv", "head"], 2, 4.0))
    given.checkpoint = str(tmp_path / "w.safetensors")
    net = network(given)
    assert {name for name, layer in net.net.named_modules() if isinstance(layer, LowRank)} == {"blocks.0.attn.qkv"}
    assert (net.net.head.out_features, net.net.head_dist.out_features) == (5, 5)
    assert torch.equal(net.net.patch_embed.proj.weight, source.patch_embed.proj.weight)
    x, _ = images(2)
    before = net(x)
    own = replaced_heads(net, 7, torch.Generator().manual_seed(0))
    assert list(own) == ["net.head", "net.head_dist"]
    assert net(x).shape == (2, 7)
    for name, layer in own.items():
        net.set_submodule(name, layer)
    assert torch.equal(net(x), before)


def test_batch_normalisation_with_an_activation_is_replaced_and_the_activation_stays():
    """That of timm's MobileNet and its like: one layer does both."""
    given = model("mobilenetv2_100")
    given.norm = Norm.replace
    net = network(given)
    kinds = [type(module).__name__ for module in net.modules()]
    assert not any("BatchNorm" in kind for kind in kinds)
    assert kinds.count("GroupNorm") == 52
    assert kinds.count("ReLU6") == 35
    x = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), atol=1e-5, rtol=1e-4)  # examples do not mix


class Own(nn.BatchNorm2d):
    """Of a kind that nobody knows."""


def test_batch_normalisation_that_cannot_be_replaced_or_was_trained_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"model\.norm=replace cannot replace.*freeze"):
        _apart(nn.Sequential(Own(3)), Norm.replace, False)
    save_file(contiguous(network(model("resnet18")).net), tmp_path / "w.safetensors")
    given = model("resnet18")
    given.norm, given.checkpoint = Norm.replace, str(tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"model\.norm=replace discards"):
        network(given)


def test_settings_that_a_small_network_would_ignore_are_refused():
    for change in ({"pretrained": True}, {"checkpoint": "no.pt"}, {"options": {"a": 1}}, {"std": [1.0]}):
        given = dataclasses.replace(Model("linear", None, False, None, Norm.replace, None), **change)
        with pytest.raises(UsageError, match=rf"model\.{next(iter(change))}"):
            network(given)


def test_published_weights_of_torchvision_come_with_their_normalisation():
    assert _torchvision_scale("resnet18") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_choosing_twice_changes_nothing():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for _ in range(2):
        choose(net, model("any", trained=["1.bias"]))
        assert [n for n, p in net.named_parameters() if p.requires_grad] == ["1.bias"]
