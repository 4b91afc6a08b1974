"""The trained parameters of a network: all, some of its layers (GSD, Table 6), its biases, or small new ones next to
frozen layers.

LoRA and adapters are modules of this file: peft has them too, but brings transformers and accelerate along, and its
layers are unknown to per_example.by_layers. These consist of nn.Linear, which it knows.
"""

import difflib
import math

import torch
from torch import Tensor, nn

from pubsel.messages import UsageError
from pubsel.settings.keys import Adapters, Model

WORDS = ("all", "head", "bias", "first_last")


class LowRank(nn.Module):
    """layer(x) + alpha / r up(down(x)). Hu et al.: LoRA, ICLR 2022, Section 4: down [r, a] random, up [b, r] zero."""

    def __init__(self, layer: nn.Linear, r: int, alpha: float):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, r, bias=False)
        self.up = nn.Linear(r, layer.out_features, bias=False)
        self.scale = alpha / r
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * self.up(self.down(x))


class Bottleneck(nn.Module):
    """y + up(gelu(down(y))) of a layer's output y [..., d]. Houlsby et al.: Parameter-Efficient Transfer Learning for
    NLP, ICML 2019, Section 2: near the identity at the start (here: up is zero)."""

    def __init__(self, layer: nn.Module, d: int, size: int):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(d, size)
        self.up = nn.Linear(size, d)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        y: Tensor = self.layer(*args, **kwargs)
        return y + self.up(nn.functional.gelu(self.down(y)))


def choose(net: nn.Module, model: Model) -> None:
    """Put in what `model` adds, and let only what it names require gradients: `model.trained`, else the new layers and
    the head, else all. UsageError, with the names that are near, for one that the network does not have."""
    # new layers come first, since `trained` may name them
    added = []
    if (lora := model.lora) is not None:
        for name in _ending(net, lora.layers, "model.lora.layers", nn.Linear):
            net.set_submodule(name, LowRank(net.get_submodule(name), lora.r, lora.alpha))  # type: ignore[arg-type]
            added += [f"{name}.{part}.weight" for part in ("down", "up")]
    added += add_adapters(net, model.adapters) if model.adapters is not None else []
    if model.trained is not None and not model.trained:
        raise UsageError("model.trained=[]: nothing would train: name layers, or head, bias, first_last, all")

    # BatchNorm stays as it is, unless it is named.
    normalising = {
        f"{name}.{kind}"
        for name, module in net.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for kind in ("weight", "bias")
    }

    chosen = set(added)
    for name in model.trained or (["head"] if added else ["all"]):
        parameters = parameters_of(net, name)
        named = name == "bias" or parameters <= normalising
        chosen |= parameters if named else parameters - normalising

    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in chosen)


def parameters_of(net: nn.Module, name: str) -> set[str]:
    """Return the parameters of a layer, a single parameter, or one of WORDS. bias: all biases and the head (Bu et al.
    2022, BiTFiT); first_last: the first layer with weights and the head (Cattan et al. 2022). UsageError if
    there is no such layer."""
    names = [n for n, _ in net.named_parameters()]

    def inside(layer: str) -> set[str]:
        return {n for n in names if n == layer or n.startswith(f"{layer}.")}

    # A network without a linear layer has no head, but "all" and layers of it can train.
    of_heads: set[str] = set()
    if name in WORDS[1:]:
        of_heads = of_heads.union(*(inside(layer) for layer in heads(net)))

    if name == "all":
        return set(names)
    if name == "head":
        return of_heads
    if name == "bias":
        return {n for n in names if n.rpartition(".")[2] == "bias"} | of_heads
    if name == "first_last":
        first = next(n for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear))
        return inside(first) | of_heads

    parameters = inside(name)
    if not parameters:
        known = [n for n, module in net.named_modules() if n and next(module.parameters(), None) is not None]
        near = difflib.get_close_matches(name, [*known, *names, *WORDS], n=4, cutoff=0.3)
        raise UsageError(f"model.trained: no layer {name} with parameters in this network; near it: {', '.join(near)}")
    return parameters


def head(net: nn.Module) -> str:
    """Return the name of the last linear layer; UsageError if there is none."""
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UsageError("model: this network has no linear layer for its head: take one that has, or model.trained")
    return linear[-1]


def heads(net: nn.Module) -> list[str]:
    """Return the name of the head; of both heads of a distilled network (DeiT, LeViT: head and head_dist), whose
    answers are averaged."""
    last = head(net)
    first = last.replace("head_dist", "head")
    return [first, last] if first != last and first in dict(net.named_modules()) else [last]


def add_adapters(net: nn.Module, adapters: Adapters) -> list[str]:
    """Put a Bottleneck after each layer whose name ends in one of `adapters.layers`; return the names of the new
    parameters. UsageError if a layer has no width."""
    # the width of a layer is that of its last linear layer
    names = _ending(net, adapters.layers, "model.adapters.layers", nn.Module)

    for name in names:
        layer = net.get_submodule(name)
        linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise UsageError(f"model.adapters.layers: {name} ends in no linear layer, so its width is not known")
        net.set_submodule(name, Bottleneck(layer, linear[-1].out_features, adapters.size))

    return [f"{name}.{part}.{kind}" for name in names for part in ("down", "up") for kind in ("weight", "bias")]


def _ending(net: nn.Module, ends: list[str], key: str, kind: type[nn.Module]) -> list[str]:
    excluded = ("", *heads(net))
    below_head = [(name, layer) for name, layer in net.named_modules() if name not in excluded]
    fitting = [name for name, layer in below_head if kind is nn.Module or type(layer) is kind]

    names = [name for name in fitting if name.rpartition(".")[2] in ends]
    if not names:
        known = sorted({name.rpartition(".")[2] for name in fitting} - {str(i) for i in range(1000)})
        raise UsageError(
            f"{key}={ends}: this network has no such layer below its head; it has {', '.join(known[:12]) or 'none'}"
        )
    return names


def trained_parameters(net: nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def replaced_heads(net: nn.Module, classes: int, generator: torch.Generator) -> dict[str, nn.Module]:
    """Put new heads of `classes` outputs, which train, in the place of the `heads` of `net`; return the old ones by
    name. Their weights are uniform in +-1 / sqrt(inputs), as torch's own, from `generator`."""
    replaced: dict[str, nn.Module] = {}
    for name in heads(net):
        # a head of other classes is of no use; its biases and inputs stay as they were
        old = net.get_submodule(name)
        assert isinstance(old, nn.Linear)

        new = nn.Linear(old.in_features, classes, old.bias is not None)
        bound = 1 / math.sqrt(old.in_features)
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.uniform_(-bound, bound, generator=generator)

        net.set_submodule(name, new.to(old.weight))
        replaced[name] = old
    return replaced
