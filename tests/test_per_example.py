"""Gradients from layer outputs against vmap in float64, on layers of every kind, and the fall-back to it."""

import copy

import pytest
import torch
from torch import nn

from pubsel.gradients import per_example
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.gradients.per_example import by_layers, by_vmap, known_layers, layers_agree, losses_of


def images(model):
    return nn.Sequential(model, nn.Flatten(), nn.LazyLinear(5))


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
    "linear along the last dimension": nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4, bias=False)),
}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Apart(nn.Module):
    """A layer whose weight is used without calling the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return nn.functional.conv2d(x, self.layer.weight, self.layer.bias)


class Half(nn.Module):
    """A layer that is called, whose weight is used once more elsewhere: nothing but a comparison would notice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.layer(x) * self.layer.weight.sum()


UNKNOWN = {
    "used twice": Twice(),
    "used apart": Apart(),
    "used once more": Half(),
    "instance norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "circular padding": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "padding by name": nn.Conv2d(3, 4, 3, padding="same"),
    "transposed": nn.ConvTranspose2d(3, 4, 3),
}


def ready(body):
    torch.manual_seed(0)
    model = images(copy.deepcopy(body))
    x = torch.randn(6, 3, 10, 9)
    model(x)
    return model.eval(), x, torch.randint(5, (6,))


def written(way, model, x, y, names):
    """Gradients by name, and losses; into rows that are parts of wider ones, as in use."""
    sizes = [model.get_parameter(n).numel() for n in names]
    parts = torch.zeros(len(x), sum(sizes), dtype=next(model.parameters()).dtype).split(sizes, dim=1)
    out = {n: part.unflatten(1, model.get_parameter(n).shape) for n, part in zip(names, parts, strict=True)}
    losses = way(model, x, y, out)
    return out, losses


@pytest.mark.parametrize("fits", [True, False], ids=["unfolded", "in groups"])  # patches of an image into a cache
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", KNOWN)
def test_layer_outputs_give_the_gradients_of_vmap(name, layout, fits, monkeypatch):
    monkeypatch.setattr(per_example, "PATCHES_OF_ONE", 2**17 if fits else 0)
    monkeypatch.setattr(per_example, "PATCHES", 1500)  # of some images at once, not of all
    model, x, y = ready(KNOWN[name])
    model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    model, x, names = model.double(), x.double(), [n for n, _ in model.named_parameters()]
    ours, losses = written(by_layers, model, x, y, names)
    exact, exact_losses = written(by_vmap, model, x, y, names)
    torch.testing.assert_close(losses, exact_losses)
    assert set(ours) == set(names)
    for n in names:
        torch.testing.assert_close(ours[n], exact[n], rtol=1e-9, atol=1e-12)
    assert layers_agree(model, x, y, names)
    assert not any(p.grad is not None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_layers_fall_back_to_vmap(name):
    model, x, y = ready(UNKNOWN[name])
    names = [n for n, _ in model.named_parameters()]
    assert not layers_agree(model, x, y, names)
    assert not any(module._forward_hooks for module in model.modules())
    rows = PerExampleGradients(model, 4).matrix(x, y).rows
    exact, _ = written(by_vmap, model, x, y, names)
    torch.testing.assert_close(rows, torch.cat([exact[n].flatten(1) for n in names], 1), rtol=1e-4, atol=1e-5)


def test_a_model_whose_layers_are_never_called_falls_back():
    model, x, y = nn.Sequential(Apart(), nn.Flatten()), torch.randn(2, 3, 4, 4), torch.tensor([0, 1])
    assert not layers_agree(model, x, y, ["0.layer.weight"])


def test_a_head_of_zeros_hides_nothing():
    """All other gradients vanish at such a head; the check moves the weights."""
    model, x, y = ready(Half())
    nn.init.zeros_(model[-1].weight)
    assert not layers_agree(model, x, y, [n for n, _ in model.named_parameters()])


def test_only_trained_parameters_and_only_what_lies_above_them():
    """A frozen layer below the first trained one is in no graph."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    model, x, y = ready(body)
    model[0][0].requires_grad_(False)
    names = ["0.2.bias", "2.weight"]
    assert layers_agree(model, x, y, names)
    ours, _ = written(by_layers, model, x, y, names)
    exact, _ = written(by_vmap, model, x, y, names)
    assert set(ours) == set(names)
    for n in names:
        torch.testing.assert_close(ours[n], exact[n], rtol=1e-4, atol=1e-6)


def test_which_way_is_taken_does_not_depend_on_the_data():
    """The check sees shapes alone: the choice can tell nothing of a private example."""
    model, x, y = ready(KNOWN["3x3"])
    seen = []
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    names = [n for n, _ in model.named_parameters()]
    layers_agree(model, x, y, names)
    layers_agree(model, torch.full_like(x, 7.0), y + 1, names)
    assert torch.equal(seen[0], seen[len(seen) // 2])


def test_losses_are_each_examples_own():
    logits, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(losses_of(logits, y).sum(), nn.functional.cross_entropy(logits, y, reduction="sum"))
    rows = nn.functional.one_hot(y, 3)
    want = nn.functional.binary_cross_entropy_with_logits(logits, rows.float(), reduction="sum") / 3
    torch.testing.assert_close(losses_of(logits, rows).sum(), want)


def test_known_layers_are_those_of_the_papers():
    model, _, _ = ready(nn.Conv2d(3, 4, 3))
    assert set(known_layers(model, ["0.weight", "0.bias", "2.weight"])) == {"0", "2"}
    assert known_layers(nn.Sequential(nn.RMSNorm(3)), ["0.weight"]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_overflows_harms_no_other(bad):
    model, x, y = ready(KNOWN["pooled"])
    names = [n for n, _ in model.named_parameters()]
    want, _ = written(by_layers, model, x, y, names)
    x[2] = bad
    found, _ = written(by_layers, model, x, y, names)
    others = [0, 1, 3, 4, 5]
    assert not all(torch.isfinite(found[n][2]).all() for n in names)
    for n in names:
        torch.testing.assert_close(found[n][others], want[n][others], rtol=1e-4, atol=1e-6)
