"""Gradients from layer outputs against vmap in float64, on layers of every kind, and the fall-back to it."""

import copy

import pytest
import torch
from torch import nn

from pubsel.gradients import per_example
from pubsel.gradients.matrix import PerExampleGradients, say_once
from pubsel.gradients.per_example import by_layers, by_vmap, losses_of, why_vmap
from pubsel.models import build
from pubsel.settings.keys import Model, Norm


class LayerNorm2d(nn.LayerNorm):
    """Of the channels of images, as in timm and torchvision."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Embedded(nn.Module):
    """A table of what each of four grey levels becomes; levels occur several times."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 5)

    def forward(self, x):
        return torch.tanh(self.table((x.abs() * 7).long() % 4).mean((1, 2)))


class Tokens(nn.Module):
    """The parameters of a vision transformer that belong to no layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 9))
        self.places = nn.Parameter(torch.randn(1, 31, 9))
        self.scale = nn.Parameter(torch.randn(9))
        self.one = nn.Parameter(torch.randn(()))
        self.mix = nn.Linear(9, 9)

    def forward(self, x):
        rows = x.flatten(1, 2)  # [n, 30, 9]
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.places
        rows = rows + self.mix(rows).mul_(self.scale)
        return self.one * torch.tanh(rows)


class Scaled(nn.Module):
    """A block of a ConvNeXt, in timm's way and in torchvision's."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1, groups=3), LayerNorm2d(6)
        self.gamma, self.layer_scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 1, 1))
        self.alpha, self.beta = nn.Parameter(torch.randn(1, 6, 1, 1)), nn.Parameter(torch.randn(1, 6, 1, 1))

    def forward(self, x):
        x = torch.tanh(self.norm(self.conv(x))).mul(self.gamma.reshape(1, -1, 1, 1))
        x = torch.addcmul(self.beta, self.alpha, torch.tanh(x))
        return self.layer_scale.view(6, 1, 1) * (self.layer_scale * torch.tanh(x))


KNOWN = {
    "3x3": nn.Conv2d(3, 4, 3, padding=1),
    "many channels": nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 6, 3, bias=False)),
    "strided, dilated, not square": nn.Conv2d(3, 4, (2, 3), stride=(2, 1), dilation=(1, 2), padding=(0, 2)),
    "strided, dilated, many channels": nn.Sequential(
        nn.Conv2d(3, 10, 1), nn.Conv2d(10, 4, (2, 3), stride=(2, 1), dilation=(2, 1), padding=(1, 0))
    ),
    "in groups": nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=4)),
    "depthwise": nn.Conv2d(3, 6, 3, groups=3),
    "pooled": nn.Sequential(nn.Conv2d(3, 9, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(9, 8, 2), nn.MaxPool2d(2)),
    "group norm": nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 2, 3)),
    "batch norm": nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Tanh()),
    "layer norm": nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 4)),
    "ReLU in place": nn.Sequential(nn.Conv2d(3, 9, 3), nn.Tanh(), nn.Conv2d(9, 4, 3), nn.ReLU(inplace=True)),
    "ReLU in place, first layer": nn.Sequential(nn.Conv2d(3, 9, 3), nn.ReLU(inplace=True)),
    "many positions and channels": nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3)),
    "few positions": nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.Tanh(), nn.Conv2d(16, 32, 3)),
    "1x1": nn.Sequential(nn.Conv2d(3, 16, 1), nn.Tanh(), nn.Conv2d(16, 16, 1, stride=2)),
    "RMS norm": nn.Sequential(nn.Linear(9, 7), nn.RMSNorm(7, eps=1e-5), nn.Tanh(), nn.Linear(7, 4)),
    "embedding": Embedded(),
    "a token, positions and scales": Tokens(),
    "scales of channels": Scaled(),
    "a linear layer overwritten": nn.Sequential(  # whose output is a view in some versions of torch
        nn.Linear(9, 7), nn.ReLU(inplace=True), nn.Linear(7, 7), nn.ReLU(inplace=True), nn.Linear(7, 4)
    ),
    "linear along the last dimension": nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4, bias=False)),
}


class Used(nn.Module):
    """A layer that is used as `use` says."""

    def __init__(self, use):
        super().__init__()
        self.use, self.layer = use, nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.use(self.layer, x)


class Odd(nn.Module):
    """A parameter that is used as `use` says."""

    def __init__(self, use, *shape):
        super().__init__()
        self.use, self.odd, self.layer = use, nn.Parameter(torch.randn(*shape)), nn.Conv2d(3, 3, 3)

    def forward(self, x):
        return self.layer(self.use(x, self.odd))


UNKNOWN = {
    "a parameter under an exponential": Odd(lambda x, p: x * p.exp(), 1),
    "a parameter that is divided by": Odd(lambda x, p: x / p, 1),
    "a parameter in two roles": Odd(lambda x, p: (x * p).add(torch.stack([p, p]).sum()), 1),
    "a parameter that is not used": Odd(lambda x, p: x, 1),
    "a parameter for places in a batch": Odd(lambda x, p: x + p[: len(x)], 6, 1, 1, 1),
    "used twice": Used(lambda layer, x: layer(torch.tanh(layer(x)))),
    "used apart": Used(lambda layer, x: nn.functional.conv2d(x, layer.weight, layer.bias)),  # and never called
    "used once more": Used(lambda layer, x: layer(x) * layer.weight.sum()),  # only a comparison would notice
    "instance norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "circular padding": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "padding by name": nn.Conv2d(3, 4, 3, padding="same"),
    "transposed": nn.ConvTranspose2d(3, 4, 3),
}


def ready(body):
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(body), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(6, 3, 10, 9)
    model(x)
    return model.eval(), x, torch.randint(5, (6,)), [name for name, _ in model.named_parameters()]


def written(way, model, x, y, names):
    """Gradients by name, and losses; into rows that are parts of wider ones, as in use."""
    sizes = [model.get_parameter(n).numel() for n in names]
    parts = torch.zeros(len(x), sum(sizes), dtype=next(model.parameters()).dtype).split(sizes, dim=1)
    out = {n: part.view(-1, *model.get_parameter(n).shape) for n, part in zip(names, parts, strict=True)}
    losses = way(model, x, y, out)
    return out, losses


@pytest.mark.parametrize("fits", [True, False], ids=["unfolded", "in groups"])  # patches of an image into a cache
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", KNOWN)
def test_layer_outputs_give_the_gradients_of_vmap(name, layout, fits, monkeypatch):
    monkeypatch.setattr(per_example, "PATCHES_OF_ONE", 2**17 if fits else 0)
    monkeypatch.setattr(per_example, "PATCHES", 1500)  # of some images at once, not of all
    model, x, y, names = ready(KNOWN[name])
    model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    model, x = model.double(), x.double()
    ours, losses = written(by_layers, model, x, y, names)
    exact, exact_losses = written(by_vmap, model, x, y, names)
    torch.testing.assert_close(losses, exact_losses)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
    assert why_vmap(model, x, y, names) is None
    assert not any(p.grad is not None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_layers_fall_back_to_vmap(name):
    model, x, y, names = ready(UNKNOWN[name])
    assert why_vmap(model, x, y, names) is not None
    assert not any(module._forward_hooks for module in model.modules())
    rows = PerExampleGradients(model, 4).matrix(x, y).rows
    exact, _ = written(by_vmap, model, x, y, names)
    torch.testing.assert_close(rows, torch.cat([exact[n].flatten(1) for n in names], 1), rtol=1e-4, atol=1e-5)


def test_it_is_said_once_which_layer_needs_vmap(capsys):
    model, x, y, _ = ready(UNKNOWN["instance norm"])
    say_once.cache_clear()
    for _ in range(2):
        PerExampleGradients(model).matrix(x, y)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "gradients of examples come from torch.func.vmap, which is slower: 0.1.weight is used by instance_norm"
    ]


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        ("resnet18", 32),
        ("densenet121", 32),
        ("mobilenetv2_100", 32),
        ("mobilenetv3_small_050", 32),
        ("convnext_atto", 32),
        ("vit_tiny_patch16_224", 224),
    ],
)
def test_kinds_of_networks_that_are_trained_whole_need_no_vmap(architecture, size):
    given = Model("timm", architecture, False, None, Norm.replace, None)
    model = build(given, (3, size, size), 3, (0.5,) * 3, (0.5,) * 3, 0)
    names = [n for n, _ in model.named_parameters()]
    assert why_vmap(model, torch.zeros(1, 3, size, size).byte(), torch.zeros(1, dtype=torch.long), names) is None


def test_a_model_whose_layers_are_never_called_falls_back():
    model, x, y = nn.Sequential(UNKNOWN["used apart"], nn.Flatten()), torch.randn(2, 3, 4, 4), torch.tensor([0, 1])
    assert why_vmap(model, x, y, ["0.layer.weight"]) == "0.layer is not called"


def test_a_head_of_zeros_hides_nothing():
    """All other gradients vanish at such a head; the check moves the weights."""
    model, x, y, names = ready(UNKNOWN["used once more"])
    nn.init.zeros_(model[-1].weight)
    assert why_vmap(model, x, y, names) is not None


def test_only_trained_parameters_and_only_what_lies_above_them():
    """A frozen layer below the first trained one is in no graph."""
    model, x, y, _ = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)))
    model[0][0].requires_grad_(False)
    names = ["0.2.bias", "2.weight"]
    assert why_vmap(model, x, y, names) is None
    ours, _ = written(by_layers, model, x, y, names)
    exact, _ = written(by_vmap, model, x, y, names)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6)


def test_layers_of_a_network_whose_parameters_are_frozen_meanwhile_are_known():
    model, x, y, names = ready(KNOWN["group norm"])
    assert why_vmap(model.requires_grad_(False), x, y, names) is None
    assert not any(p.requires_grad for p in model.parameters())


def test_gradients_are_there_whatever_is_switched_off_around_them():
    model, x, y, names = ready(KNOWN["a token, positions and scales"])
    want, _ = written(by_layers, model, x, y, names)
    with torch.no_grad():
        assert why_vmap(model, x, y, names) is None
        got, _ = written(by_layers, model, x, y, names)
    assert all(torch.equal(got[n], want[n]) for n in names)


def test_which_way_is_taken_does_not_depend_on_the_data():
    """The check sees shapes alone: the choice can tell nothing of a private example."""
    model, x, y, names = ready(KNOWN["3x3"])
    seen = []
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    why_vmap(model, x, y, names)
    why_vmap(model, torch.full_like(x, 7.0), y + 1, names)
    assert torch.equal(seen[0], seen[len(seen) // 2])


def test_losses_are_each_examples_own():
    logits, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(losses_of(logits, y).sum(), nn.functional.cross_entropy(logits, y, reduction="sum"))
    rows = nn.functional.one_hot(y, 3)
    want = nn.functional.binary_cross_entropy_with_logits(logits, rows.float(), reduction="sum") / 3
    torch.testing.assert_close(losses_of(logits, rows).sum(), want)


@pytest.mark.parametrize("name", ["pooled", "a token, positions and scales", "scales of channels"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_overflows_harms_no_other(bad, name):
    model, x, y, names = ready(KNOWN[name])
    want, _ = written(by_layers, model, x, y, names)
    x[2] = bad
    found, _ = written(by_layers, model, x, y, names)
    others = [0, 1, 3, 4, 5]
    assert not all(torch.isfinite(found[n][2]).all() for n in names)
    for n in names:
        torch.testing.assert_close(found[n][others], want[n][others], rtol=1e-4, atol=1e-6)


class Stopped(RuntimeError):
    """As submitit's, which its handler of a signal raises."""


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, y: by_layers(model, x, y, {"weight": torch.empty(2, 3, 4)}),
        lambda model, x, y: why_vmap(model, x, y, ["weight"]),
    ],
)
def test_a_signal_in_the_middle_of_a_layer_ends_the_run(monkeypatch: pytest.MonkeyPatch, call) -> None:
    def stop(*_: object) -> None:
        raise Stopped("requeued")

    monkeypatch.setattr(per_example, "_write", stop)
    with pytest.raises(Stopped):
        call(nn.Linear(4, 3), torch.rand(2, 4), torch.tensor([0, 1]))
