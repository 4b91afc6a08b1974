"""Gradients from layer outputs against vmap in float64, on layers of every kind, and the fall-back to it."""

import copy

import numpy as np
import pytest
import torch
from timm.layers import ScaledStdConv2d, StdConv2d, StdConv2dSame
from torch import nn

from pubsel.gradients import per_example
from pubsel.gradients.matrix import PerExampleGradients, say_once
from pubsel.gradients.per_example import by_layers, by_vmap, losses_of, why_vmap
from pubsel.gradients.standardised import StandardConv2d
from pubsel.messages import UserError
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


class Filters(nn.Module):
    """Standardised ones of pubsel, one of which is too small to be scaled, and of timm."""

    def __init__(self):
        super().__init__()
        self.ours, self.strided = StandardConv2d(3, 6, 3), StandardConv2d(6, 4, 3, stride=2)
        self.timm, self.scaled = StdConv2d(4, 6, 1, bias=True), ScaledStdConv2d(6, 8, 2, padding=1, groups=2)
        with torch.no_grad():
            self.ours.weight[1] *= 1e-3
            for layer in (self.ours, self.strided, self.scaled):
                layer.gain.uniform_(-2, 2)

    def forward(self, x):
        return self.scaled(torch.tanh(self.timm(torch.tanh(self.strided(torch.tanh(self.ours(x)))))))


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
    "standardised filters": Filters(),
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


@pytest.mark.parametrize("way", ["unfolded", "in groups", "many weights"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", KNOWN)
def test_layer_outputs_give_the_gradients_of_vmap(name, layout, way, monkeypatch):
    monkeypatch.setattr(per_example, "PATCHES_OF_ONE", 2**17 if way == "unfolded" else 0)
    monkeypatch.setattr(per_example, "MANY_WEIGHTS", 0 if way == "many weights" else 2**18)
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


class Sequences(nn.Module):
    """Rows [n, 5, 4] that go through a layer of torch as `use` says, places first if the layer wants them so."""

    def __init__(self, layer, use, **options):
        super().__init__()
        self.body, self.layer, self.use, self.options = nn.Linear(4, 6), layer, use, options
        self.first = all(getattr(part, "batch_first", True) for part in layer.modules())

    def turned(self, rows):
        return rows if self.first else rows.transpose(0, 1)

    def forward(self, x):
        made = {name: option(x) if callable(option) else option for name, option in self.options.items()}
        return self.turned(self.use(self, self.turned(torch.tanh(self.body(x))), **made)).flatten(1)


def attended(net, rows, across=False, **options):
    """The outputs; mixed once more by the weights, if there are any."""
    others = (torch.tanh(rows), torch.relu(rows)) if across else (rows, rows)
    output, weights = net.layer(rows, *others, **options)
    if weights is None:
        return output
    return net.turned((weights if weights.dim() == 3 else weights[:, 1]) @ net.turned(output))


def recurred(net, rows, state=None):
    """All outputs, times a number from the last state."""
    output, last = net.layer(rows, state)
    last = torch.cat(last, -1) if isinstance(last, tuple) else last  # [layers, n, size]
    return net.turned(net.turned(output) * last.sum((0, 2))[:, None, None])


def whole(net, rows, **options):
    return net.layer(rows, torch.tanh(rows)) if isinstance(net.layer, nn.Transformer) else net.layer(rows, **options)


def left_out(x):
    """Places for padding, never the first one."""
    return (x[:, :, 0] > 0.6) & (torch.arange(5) > 0)


def causal(x):
    return nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)


def of_each_head(x):
    return torch.linspace(-1, 1, 50, dtype=x.dtype).view(2, 5, 5).repeat(len(x), 1, 1)


def attention(first, use=None, bias=True, **options):
    return Sequences(nn.MultiheadAttention(6, 2, bias=bias, batch_first=first), attended, **options)


def encoder(first, **options):
    layer = nn.TransformerEncoderLayer(6, 2, 7, batch_first=first)
    return Sequences(nn.TransformerEncoder(layer, 2, nn.LayerNorm(6), first), whole, **options)


READ = {  # by whether the layers take examples first
    "attention": lambda first: attention(first, need_weights=False),
    "attention with weights": attention,
    "attention with weights of heads": lambda first: attention(first, average_attn_weights=False),
    "attention without biases": lambda first: attention(first, bias=False),
    "attention to the past": lambda first: attention(first, attn_mask=causal, is_causal=True, need_weights=False),
    "attention without padding": lambda first: attention(first, key_padding_mask=left_out, need_weights=False),
    "attention with a mask for each head": lambda first: attention(first, attn_mask=of_each_head),
    "attention with both masks": lambda first: attention(
        first, attn_mask=lambda x: causal(x) < 0, key_padding_mask=left_out
    ),
    "attention to others": lambda first: attention(first, across=True),
    "transformer encoder": encoder,
    "transformer encoder to the past": lambda first: encoder(first, mask=causal),
    "transformer encoder without padding": lambda first: encoder(first, src_key_padding_mask=left_out),
    "transformer": lambda first: Sequences(nn.Transformer(6, 2, 1, 1, 7, norm_first=True, batch_first=first), whole),
    "LSTM": lambda first: Sequences(nn.LSTM(6, 5, batch_first=first), recurred),
    "LSTM both ways": lambda first: Sequences(nn.LSTM(6, 5, 2, batch_first=first, bidirectional=True), recurred),
    "LSTM without biases": lambda first: Sequences(nn.LSTM(6, 5, bias=False, batch_first=first), recurred),
    "LSTM from a state": lambda first: Sequences(
        nn.LSTM(6, 5, batch_first=first), recurred, state=lambda x: (x[None, :, :, 0], x[None, :, :, 1])
    ),
    "LSTM with dropout, which does not drop": lambda first: Sequences(
        nn.LSTM(6, 5, 2, batch_first=first, dropout=0.5), recurred
    ),
    "GRU": lambda first: Sequences(nn.GRU(6, 5, batch_first=first), recurred),
    "GRU both ways": lambda first: Sequences(nn.GRU(6, 5, 2, batch_first=first, bidirectional=True), recurred),
    "GRU without biases": lambda first: Sequences(nn.GRU(6, 5, bias=False, batch_first=first), recurred),
    "GRU from a state": lambda first: Sequences(
        nn.GRU(6, 5, batch_first=first), recurred, state=lambda x: x[None, :, :, 0].contiguous()
    ),
    "RNN": lambda first: Sequences(nn.RNN(6, 5, 2, batch_first=first), recurred),
    "RNN of ReLUs": lambda first: Sequences(nn.RNN(6, 5, nonlinearity="relu", batch_first=first), recurred),
}


def headed(body, x):
    """The network with a head of three classes, in float64, labels and the names of its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(body, nn.LazyLinear(3)).double().eval()
    model(x)
    return model, torch.arange(len(x)) % 3, [name for name, _ in model.named_parameters()]


def one_by_one(model, x, y, out):
    """Backpropagation of each example."""
    losses = torch.cat([losses_of(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])
    for i, loss in enumerate(losses):
        parameters = [model.get_parameter(name) for name in out]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        for into, gradient in zip(out.values(), gradients, strict=True):
            into[i] = gradient.to_dense()
    return losses.detach()


def assert_by_layers(model, x, y, names):
    assert why_vmap(model, x, y, names) is None
    ours, losses = written(by_layers, model, x, y, names)
    exact, exact_losses = written(one_by_one, model, x, y, names)
    torch.testing.assert_close(losses, exact_losses)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*(nested|mismatched).*:UserWarning")
@pytest.mark.parametrize("first", [True, False], ids=["examples first", "places first"])
@pytest.mark.parametrize("name", READ)
def test_attention_and_recurrent_layers_go_by_layers(name, first):
    x = torch.rand(5, 5, 4, dtype=torch.float64)
    model, y, names = headed(READ[name](first), x)
    assert_by_layers(model, x, y, names)


@pytest.mark.parametrize("trained", ["layer.in_proj_bias", "layer.out_proj.weight", "layer.weight_hh_l0"])
def test_parts_of_attention_and_of_recurrent_layers_train_alone(trained):
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    model, y, _ = headed(READ["GRU" if "hh" in trained else "attention"](True), x)
    model.requires_grad_(False)
    model.get_parameter(f"0.{trained}").requires_grad_(True)
    assert_by_layers(model, x, y, [f"0.{trained}"])


@pytest.mark.parametrize("options", [{"kdim": 6, "vdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_with_rare_options_falls_back_to_vmap(options):
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    layer = nn.MultiheadAttention(6, 2, batch_first=True, **options)
    size = options.get("vdim", 6)
    model, y, names = headed(Sequences(layer, lambda net, rows: net.layer(rows, rows, rows[:, :, :size])[0]), x)
    reason = why_vmap(model, x, y, names)
    assert reason.endswith("with kdim, vdim, add_bias_kv, add_zero_attn or dropout")
    got, want = written(by_vmap, model, x, y, names), written(one_by_one, model, x, y, names)
    torch.testing.assert_close(got, want)


def with_bool_mask(net, rows):
    """Straight to the function of torch, which takes such masks too."""
    a, rows = net.layer, rows.transpose(0, 1)
    weights = (a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0, a.out_proj.weight, a.out_proj.bias)
    mask = torch.ones(5, 5).triu(1).bool()
    output, _ = nn.functional.multi_head_attention_forward(rows, rows, rows, 6, 2, *weights, attn_mask=mask)
    return output.transpose(0, 1)


def twice(net, rows):
    for _ in range(2):
        rows = net.layer(rows, rows, rows)[0]
    return rows


def in_windows(net, rows):
    windows = rows.flatten(0, 1)[:, None]
    return net.layer(windows, windows, windows)[0].view(rows.shape)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (
            with_bool_mask,
            "0.layer.in_proj_weight is used by multi_head_attention_forward with no batch, or masks of bool",
        ),
        (
            lambda net, rows: torch.stack([net.layer(row, row, row)[0] for row in rows]),
            "0.layer.in_proj_weight is used by multi_head_attention_forward with no batch, or masks of bool",
        ),
        (
            in_windows,
            "0.layer.in_proj_weight is used by multi_head_attention_forward with examples that are not kept apart",
        ),
        (twice, "0.layer.in_proj_weight is used twice"),
    ],
)
def test_attention_that_is_used_in_other_ways_falls_back_to_vmap(use, reason):
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    model, y, names = headed(Sequences(nn.MultiheadAttention(6, 2, batch_first=True), use), x)
    assert why_vmap(model, x, y, names) == reason
    got, want = written(by_vmap, model, x, y, names), written(one_by_one, model, x, y, names)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["attention", "transformer encoder", "LSTM both ways", "GRU"])
def test_a_sequence_that_is_not_finite_harms_no_other(name):
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    model, y, names = headed(READ[name](False), x)
    want, _ = written(by_layers, model, x, y, names)
    x[2] = float("nan")
    got, _ = written(by_layers, model, x, y, names)
    for n in names:
        assert not torch.isfinite(got[n][2]).all()
        torch.testing.assert_close(got[n][[0, 1, 3]], want[n][[0, 1, 3]])


class TokensOf(nn.Module):
    """Words, kinds of words and places [n, 6], of few values each."""

    def __init__(self, **options):
        super().__init__()
        self.words, self.kinds = nn.Embedding(9, 4, **options), nn.Embedding(2, 4)
        self.places = nn.Embedding(6, 4)

    def forward(self, x):
        x = x.long() if x.dtype == torch.uint8 else x
        rows = self.words(x) + self.kinds((x > 3).long()) + self.places(torch.arange(6)[None])
        return torch.tanh(rows).flatten(1)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.uint8])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -1}, {"sparse": True}], ids=str)
def test_tokens_go_by_layers(options, dtype):
    x = torch.randint(9, (5, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    model, y, names = headed(TokensOf(**options), x)
    assert_by_layers(model, x, y, names)


def test_the_examples_of_the_check_differ():
    """Or it would not show that they are not kept apart."""
    seen = []
    for size in range(1, 9):
        model = nn.Sequential(nn.Embedding(2, size), nn.Flatten(), nn.Linear(size, 2))
        model[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten()))
        assert why_vmap(model, torch.zeros(1, 1).long(), torch.zeros(1).long(), ["0.weight", "2.weight"]) is None
    assert [sorted(examples.tolist()) for examples in seen if len(examples) == 2] == [[0, 1]] * 8


class Square(torch.autograd.Function):
    """One that torch.func does not know."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, at_output):
        return 2 * at_output * ctx.saved_tensors[0]


def in_place(net, rows):
    total = torch.zeros(rows.shape, dtype=rows.dtype)
    return total.add_(net.layer(rows))


def packed(net, rows):
    pack = nn.utils.rnn.pack_padded_sequence(rows, [5] * len(rows), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(net.layer(pack)[0], batch_first=True)[0]


def looked_at(decide):
    """What an example becomes is decided by all of its batch."""
    return lambda net, rows: net.layer(rows) * (2 if decide(rows) else -1)


NORM = nn.InstanceNorm1d(5, affine=True)
REFUSED = {
    "a function of autograd": (NORM, lambda net, rows: Square.apply(net.layer(rows)), "setup_context"),
    "in place": (NORM, in_place, "broadcast shape"),
    "packed": (nn.GRU(6, 6, batch_first=True), packed, "gru with packed sequences, proj_size or dropout"),
    "projected": (
        nn.LSTM(6, 6, batch_first=True, proj_size=3),
        lambda net, rows: net.layer(rows)[0],
        "lstm with packed sequences, proj_size or dropout",
    ),
    "its table is overwritten": (
        nn.Embedding(2, 3, max_norm=1.0),
        lambda net, rows: net.layer((rows > 0).long()).flatten(2),
        "0.layer.weight is used by embedding",
    ),
}


@pytest.mark.filterwarnings("ignore:.*(performance drop|projections).*:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_neither_way_knows_is_refused_with_its_layer(name):
    layer, use, words = REFUSED[name]
    x = torch.rand(4, 5, 4)
    model, y, _ = headed(Sequences(copy.deepcopy(layer), use), x.double())
    with pytest.raises(UserError) as caught:
        PerExampleGradients(model.float()).matrix(x, y)
    within = f"0.layer ({type(layer).__name__})" if name in ("packed", "projected", "its table is overwritten") else ""
    text = str(caught.value)
    assert text.startswith(f"model: {within or '0 (Sequences)'} has no gradients of single examples: ")
    assert text.endswith("): put another layer in its place")
    assert words in text
    assert "\n" not in text
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "decide",
    [
        lambda rows: rows.sum() > -100,
        lambda rows: rows.max().item() > -1,
        lambda rows: float(rows.detach().mean()) > -1,
        lambda rows: rows.detach().numpy().max() > -1,
        lambda rows: np.asarray(rows.detach()).max() > -1,
        lambda rows: not torch.equal(rows, rows + 1),
    ],
)
def test_no_example_decides_what_is_computed_of_another(decide):
    """All numbers of the check agree: it takes one branch, as do most batches."""
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    model, y, names = headed(Sequences(nn.Linear(6, 6), looked_at(decide)), x)
    with pytest.raises(UserError, match=r"^model: 0 \(Sequences\) has no .*: the data decides what is computed; and"):
        why_vmap(model, x, y, names)


def test_what_depends_on_no_data_may_decide():
    x = torch.rand(4, 5, 4, dtype=torch.float64)
    model, y, names = headed(Sequences(nn.Linear(6, 6), looked_at(lambda rows: torch.ones(rows.shape).sum() > 3)), x)
    assert_by_layers(model, x, y, names)


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


def test_a_convolution_of_many_weights_is_no_convolution_in_groups(monkeypatch):
    """Whose kernel takes four times as long once gradients leave the cache."""
    calls = []
    backward = torch.ops.aten.convolution_backward
    monkeypatch.setattr(
        torch.ops.aten, "convolution_backward", lambda *given: calls.append(given[1]) or backward(*given)
    )
    for outputs in (112, 128):  # 2^18 weights are 114 filters
        model = nn.Sequential(nn.Conv2d(256, outputs, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        names = ["0.weight"]
        written(by_layers, model, torch.randn(2, 256, 9, 9), torch.tensor([0, 1]), names)
    assert [tuple(x.shape) for x in calls] == [(1, 512, 9, 9)]


def test_weights_train_without_their_gains_and_gains_alone_by_vmap():
    model, x, y, names = ready(KNOWN["standardised filters"])
    model, x = model.double(), x.double()
    assert_by_layers(model, x, y, [name for name in names if not name.endswith("gain")])
    gains = [name for name in names if name.endswith("gain")]
    assert why_vmap(model, x, y, gains) == "0.ours.gain is not broadcast over examples"
    torch.testing.assert_close(*(written(way, model, x, y, gains) for way in (by_vmap, one_by_one)))


def test_a_convolution_of_timm_that_pads_its_input_goes_by_vmap():
    model, x, y, names = ready(StdConv2dSame(3, 4, 3, stride=2))
    assert why_vmap(model, x, y, names) is not None


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


@pytest.mark.parametrize("way", [by_layers, by_vmap])
def test_gradients_of_an_example_are_of_the_labels_that_it_knows(way):
    model, x, _, names = ready(KNOWN["pooled"])
    y = torch.randint(2, (6, 5)).float()
    y[torch.rand(6, 5) < 0.4], y[1] = torch.nan, torch.nan
    out, losses = written(way, model, x, y, names)
    for i, known in enumerate(~y.isnan()):
        model.zero_grad()
        logits = model(x[i : i + 1])[0, known]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y[i, known], reduction="sum") / 5
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(out[name][i], parameter.grad)
    assert not any(out[name][1].any() for name in names)


@pytest.mark.parametrize(
    "name", ["pooled", "a token, positions and scales", "scales of channels", "standardised filters"]
)
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
