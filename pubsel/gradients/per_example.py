"""The gradient of each example's own loss: in general by vmap, and faster from the outputs of layers.

by_layers: one forward pass; one backward pass to the OUTPUTS of the trained layers, which forms no weight gradient;
then each layer's weight gradients of all examples at once from its input and the gradient of its output. It knows
nn.Linear, nn.Conv2d, convolutions with standardised filters (standardised.py), nn.Embedding and normalisation that
keeps examples apart, each used once, and attention and recurrent layers, which sequences.py writes out as linear ones.
A parameter outside of such layers, which is added to activations, multiplied with them or joined to them, is copied for
each example (`Copies`). by_layers is used only for models on which, for two random examples in float64, it agrees with
backpropagation of each. Layers below the first trained one run without a graph.

Both write into `out`, {parameter name: [n, *its shape]}, and return losses [n]: memory that is taken anew for each pass
costs more than many of the gradients in it.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pubsel.gradients.sequences import SEQUENCES, UnknownUse
from pubsel.gradients.standardised import is_standardised, to_weights
from pubsel.messages import UserError, out_of_memory, raised_by_torch

PATCHES = 2**20  # entries of unfolded input at once, so that they stay in a cache
GPU_PATCHES = 2**28  # those that a GPU takes at once: each product is a kernel to start
WIDE = 2**15  # entries of a weight that is worth the trouble
PATCHES_OF_ONE = 2**17  # those of one image, for the cache of one core
FEW_POSITIONS = 32  # of a convolution's output
KINDS = "weight", "bias", "gain"  # of a layer's parameters
MANY_WEIGHTS = 2**18  # of a convolution, whose gradients of a few examples leave the cache


def losses_of(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each example [n]: cross-entropy for classes y [n]; binary cross-entropy, mean over labels, for
    0/1 rows y [n, labels]. An unknown label, NaN, counts as zero in this mean, and so does its gradient."""
    if y.dim() == logits.dim():
        y = y.to(logits.dtype)
        # masked before the loss: backward, a masked loss would pass on 0 * NaN
        known = (~y.isnan()).to(y.dtype)
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(logits, y.nan_to_num(), known, reduction="none").mean(1)
    return nn.functional.cross_entropy(logits, y, reduction="none")


def by_vmap(model: nn.Module, x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
    """Write the gradients of the parameters named in `out` at x [n, ...], y [n, ...], for any model."""
    # what does not train stays constant under vmap
    state = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    trained = {name: state.pop(name) for name in out}

    def loss(trained: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return losses_of(functional_call(model, (trained, state), (xi[None],)), yi[None]).sum()

    overwriting = [module for module in model.modules() if getattr(module, "inplace", False)]  # vmap fails at some
    try:
        for module in overwriting:
            module.inplace = False  # type: ignore[assignment]
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(trained, x, y)
    finally:
        for module in overwriting:
            module.inplace = True  # type: ignore[assignment]
    for name, into in out.items():
        into.copy_(gradients[name])
    return losses


# of a linear layer's gradients: its inputs [n, ..., a], and the gradients of its outputs [n, ..., b]; of a
# convolution's: patches of its inputs [n, positions, a], and [n, positions, b]
Factors = tuple[Tensor, Tensor]


def by_layers(
    model: nn.Module, x: Tensor, y: Tensor, out: dict[str, Tensor], keep: dict[str, Factors] | None = None
) -> Tensor:
    """Write the same from layer outputs. UnknownUse if a layer is used twice, or not as a layer.

    keep: the layers, by name, whose factors are put there and whose gradients are not written out.
    """
    keep = keep or {}

    # each trained layer reports its input on the way forward, and its error on the way back
    layers, loose = layers_of(model, [*out, *(f"{owner}.weight" for owner in keep)])
    copies = Copies(model, {name: out[name] for name in loose}, len(x))
    called: set[str] = set()
    turned = turned_layers(model)

    def record(owner: str, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if owner in called:
            raise UnknownUse(f"{owner} is used twice")
        called.add(owner)
        first = inputs[0].detach()
        if first.shape[:1] == (1,) and not owner.startswith(turned):  # such as places, the same ones for all examples
            first, output = (part.expand(len(x), *part.shape[1:]) for part in (first, output))
        return hooked(output, partial(take, owner, first))  # gradients need not wait for each other

    def take(owner: str, inputs: Tensor, at_output: Tensor) -> None:
        layer = layers[owner]
        if owner.startswith(turned):
            inputs, at_output = inputs.transpose(0, 1), at_output.transpose(0, 1)
        try:
            if owner in keep:
                keep[owner] = _factors(layer, inputs, at_output)
            else:
                _write(layer, inputs, at_output, *(out.get(f"{owner}.{kind}") for kind in KINDS))
        except RuntimeError as error:
            if not raised_by_torch(error) or out_of_memory(error):
                raise
            raise UnknownUse(f"{owner} ({type(layer).__name__}) is used in a way that is not known here") from error

    hooks = [
        layer.register_forward_hook(lambda _, inputs, output, owner=owner: record(owner, inputs, output))
        for owner, layer in layers.items()
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)  # the gradient of no weight is formed
        with torch.enable_grad():
            with copies:
                losses = losses_of(model(x), y)
            for owner in sorted(layers.keys() - called):
                raise UnknownUse(f"{owner} is not called")
            losses.sum().backward()
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for hook in hooks:
            hook.remove()

    copies.write()
    return losses.detach()


def turned_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of names of layers with inputs [positions, n, size], as torch's transformers have by
    default."""
    prefixes = []
    for name, module in model.named_modules():
        if type(module).__module__ == nn.Transformer.__module__:
            turned = not all(getattr(part, "batch_first", True) for part in module.modules())
            prefixes += [f"{name}."] * turned
    return tuple(prefixes)


class Copies(TorchFunctionMode):
    """Context in which the parameters named in `out` are copied for each of n examples: activations [n, ...] meet the
    copies [n, *shape] in place of the parameter, each example its copy.

    It knows sums and products with activations, to which a parameter is broadcast, parameters whose first dimension, of
    size 1, is that of the examples (tokens, positions), and those of SEQUENCES, which need no copies: UnknownUse if
    anything else is done with one.
    """

    def __init__(self, model: nn.Module, out: dict[str, Tensor], n: int):
        super().__init__()
        self.n, self.out = n, out
        self.names = {id(model.get_parameter(name)): name for name in out}
        self.copies = {
            name: model.get_parameter(name).detach().expand(n, *model.get_parameter(name).shape).requires_grad_()
            for name in out
        }

    def __enter__(self) -> "Copies":
        if self.names:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self.names:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call func, with copies in place of the parameters."""
        name, kwargs = func.__name__, kwargs or {}
        passed = (*args, *kwargs.values())
        within = [part for value in passed for part in (value if isinstance(value, list) else [value])]
        used = [self.names[id(part)] for part in within if id(part) in self.names]
        if name == "__get__" or not used:
            return func(*args, **kwargs)
        if not self.copies.keys() >= set(used):
            raise UnknownUse(f"{used[0]} is used twice")

        # attention and recurrent layers are written out as linear ones, whose gradients come as they are
        if name in SEQUENCES:
            for each in used:
                del self.copies[each]
            try:
                return SEQUENCES[name](self._record, *args, **kwargs)
            except UnknownUse as error:
                raise UnknownUse(f"{used[0]} is used by {name} with {error}") from None

        # sums and products broadcast a parameter over the examples
        if name in ELEMENTWISE and not kwargs:
            dimensions = max(argument.dim() for argument in args if isinstance(argument, Tensor))
            return func(*(self._spread(argument, dimensions) for argument in args))

        # expand(n, -1, ...), reshape(1, -1, ...): what follows broadcasts over the examples, or joins to them
        first, sizes = args[0], list(args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:])
        if name == "expand" and first.shape[:1] == (1,) and sizes[:1] == [self.n]:
            return self._first(first).expand(*sizes)
        if name in ("reshape", "view"):
            return self.copies[used[0]].reshape(self.n, *(sizes[1:] if sizes[:1] == [1] else sizes))
        raise UnknownUse(f"{used[0]} is used by {name}")

    def _spread(self, argument: Any, dimensions: int) -> Any:
        """Return the copies of a parameter, in as many dimensions as the activations have; anything else as it is."""
        if id(argument) not in self.names:
            return argument
        if argument.dim() < dimensions:
            between = [1] * (dimensions - 1 - argument.dim())
            return self.copies[self.names[id(argument)]].reshape(self.n, *between, *argument.shape)
        if argument.shape[:1] == (1,):
            return self._first(argument)
        raise UnknownUse(f"{self.names[id(argument)]} is not broadcast over examples")

    def _first(self, parameter: Tensor) -> Tensor:
        """Return the copies [n, ...] of a parameter [1, ...]."""
        return self.copies[self.names[id(parameter)]].squeeze(1)

    def _record(
        self, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, part: slice = slice(None)
    ) -> Tensor:
        """Return the output [n, ..., b] of a linear layer, of rows `part` of weight and bias, whose gradients are
        written once that of the output is known."""
        if len(x) != self.n:
            raise UnknownUse("examples that are not kept apart")
        out = {id(p): self.out[self.names[id(p)]][:, part] for p in (weight, bias) if id(p) in self.names}
        return hooked(output, partial(_linear, x.detach(), out.get(id(weight)), out.get(id(bias))))

    def write(self) -> None:
        """Write the gradients of the copies into out[name], [n, *shape]. UnknownUse if none reached a copy."""
        for name, copies in self.copies.items():
            if copies.grad is None:
                raise UnknownUse(f"{name} is not used")
            self.out[name].copy_(copies.grad)


ELEMENTWISE = {"add", "add_", "__add__", "__radd__", "mul", "mul_", "__mul__", "__rmul__", "addcmul"}


def hooked(output: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    """Return a layer's output, whose gradient is passed to `hook`."""
    if not output.requires_grad or output._is_view():  # a hook of a view is lost once the view is overwritten
        output = _Start.apply(output, torch.zeros((), requires_grad=True))
    output.register_hook(hook)
    return output


class _Start(torch.autograd.Function):
    """x itself, with a gradient from here on. Neither a leaf nor a view, so that a ReLU may overwrite it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, start: Tensor) -> Tensor:  # start: any number that takes a gradient
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, at_output: Tensor) -> tuple[Tensor, None]:
        return at_output, None


def _write(
    layer: nn.Module, x: Tensor, at_output: Tensor, weight: Tensor | None, bias: Tensor | None, gain: Tensor | None
) -> None:
    """Write per-example gradients of a layer with input x into `weight`, `bias` and `gain`, [n, *shape], from those of
    its output."""
    if isinstance(layer, nn.Linear):
        _linear(x, weight, bias, at_output)
        return
    if weight is not None and isinstance(layer, nn.Conv2d):
        _convolution(layer, x, at_output, weight)
        if is_standardised(layer):
            to_weights(layer, weight, gain)
    elif weight is not None and isinstance(layer, nn.Embedding):
        # Equal indices add up.
        indices = x.flatten(1)[:, :, None].expand(-1, -1, at_output.shape[-1])
        weight.zero_().scatter_add_(1, indices, at_output.flatten(1, -2))
        if layer.padding_idx is not None:
            weight[:, layer.padding_idx] = 0
    elif weight is not None:
        _over_positions(layer, at_output * _normalised(layer, x), weight)
    if bias is not None:
        _over_positions(layer, at_output, bias)


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None, at_output: Tensor) -> None:
    """Write the same of a linear layer: x [n, ..., a], at_output [n, ..., b]."""
    if weight is not None and x.dim() == 2:
        torch.mul(at_output[:, :, None], x[:, None, :], out=weight)
    elif weight is not None:  # summed over positions
        torch.bmm(at_output.flatten(1, -2).mT, x.flatten(1, -2), out=weight)
    if bias is not None:
        bias.copy_(at_output.movedim(-1, 1).reshape(*bias.shape, -1).sum(2))


def _factors(layer: nn.Module, x: Tensor, at_output: Tensor) -> Factors:
    """Return the factors of the weight gradients of a layer with input x."""
    if not isinstance(layer, nn.Conv2d):
        return x, at_output
    assert not isinstance(layer.padding, str)  # see layers_of
    patches = nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.mT, at_output.flatten(2).mT


def wide_layers(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, int]:
    """Return the linear and convolutional layers whose factors are cheaper to work with than their gradients [b, a],
    and how many numbers are then kept of an example like x [n, ...]. By counted work: T (a + b) numbers in place of a
    b, and for the norm T^2 (a + b) products in place of the T a b that write the gradient (mixed ghost clipping; Bu et
    al. 2022, arXiv:2205.10683)."""
    layers = {owner: layer for owner, layer in layers_of(model, names)[0].items() if f"{owner}.weight" in names}
    layers = {
        owner: layer
        for owner, layer in layers.items()
        if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
    }
    # a convolution is as costly as it has positions, which only a pass shows
    positions: dict[str, int] = {}

    def count(owner: str, layer: nn.Module, output: Tensor) -> None:
        positions[owner] = output.numel() // len(layer.get_parameter("weight"))

    hooks = [
        layer.register_forward_hook(lambda layer, _, output, owner=owner: count(owner, layer, output))
        for owner, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()

    # by counted work, so that every machine takes the same way
    wide = {}
    for owner, layer in layers.items():
        weight, t = layer.get_parameter("weight"), positions[owner]
        b, a = weight.flatten(1).shape
        if a * b >= WIDE and 4 * t**2 * (a + b) <= a * b:
            wide[owner] = t * (a + b)
    return wide


def layers_of(model: nn.Module, names: list[str]) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the layers that are known here among the owners of the parameters `names`, by name; and the parameters
    that none of them owns."""
    layers: dict[str, nn.Module] = {}
    loose = []
    for name in names:
        owner, _, kind = name.rpartition(".")
        layer = model.get_submodule(owner)
        plain = isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)  # of attention
        convolution = type(layer) is nn.Conv2d or is_standardised(layer)
        plain = plain or (convolution and layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
        plain = plain or (type(layer) is nn.Embedding and layer.max_norm is None)
        plain = plain or isinstance(layer, nn.GroupNorm | nn.BatchNorm2d)
        plain = plain or (isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) == 1)
        # a gain comes with the weights that it scales
        scales = kind == "gain" and is_standardised(layer) and f"{owner}.weight" in names
        if plain and (kind in ("weight", "bias") or scales):
            layers[owner] = layer
        else:
            loose.append(name)
    return layers, loose


def why_vmap(model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> str | None:
    """Return why by_layers is not right for this model; None if it is: in float64, on two random examples shaped like
    x [n, ...] and y [n, ...], at weights slightly moved. UserError if by_vmap cannot run it either."""
    # if a head is all zeros, no gradient comes through it, and a mistake below would not show
    generator = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.01 * noise.to(parameter.device))
    for module in moved.modules():
        if isinstance(module, nn.RNNBase) and not module.training:  # cuDNN has no gradients of it in eval mode
            module.training, module.dropout = True, 0.0

    # 0 and 1 are in every table; the examples differ, so that it shows if they are not kept apart
    tables = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in moved.modules())
    values = 256 if x.is_floating_point() or (x.dtype == torch.uint8 and not tables) else 2
    examples = torch.randint(values, (2, *x.shape[1:]), generator=generator)
    examples[1] += torch.equal(examples[0], examples[1])
    examples = (examples % values).to(x.device)
    examples = examples.to(x.dtype) if not x.is_floating_point() else examples.double() / 255
    labels = torch.zeros(2, *y.shape[1:], dtype=y.dtype, device=y.device)

    reason = _difference(moved, examples, labels, names)
    if reason is not None:
        _check_vmap(model, examples.to(x.dtype), labels, names, reason)
    return reason


def _difference(model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> str | None:
    """Return how by_layers differs from backpropagation of each example; None if it does not."""
    ours = {name: x.new_zeros(len(x), *model.get_parameter(name).shape, dtype=torch.float64) for name in names}
    try:
        by_layers(model, x, y, ours)
    except UnknownUse as error:
        return str(error)
    except RuntimeError as error:
        if not raised_by_torch(error) or out_of_memory(error):  # vmap would need more memory
            raise
        return "a parameter is used in a way that is not known here"

    # each example alone: so examples that are not kept apart are noticed too
    parameters = [model.get_parameter(name).requires_grad_() for name in names]
    for i in range(len(x)):
        try:
            with torch.enable_grad(), Decisions(model):
                loss = losses_of(model(x[i : i + 1]), y[i : i + 1]).sum()
        except UnknownUse as error:
            return str(error)
        for name, exact in zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if exact is None or not torch.allclose(ours[name][i], exact.to_dense(), 1e-8, 1e-10):
                return f"{name} is used in a way that is not known here"
    return None


class Decisions(TorchFunctionMode):
    """Context that raises UnknownUse where the data decides what is computed (`if x.sum() > 0`): in a batch, an example
    would decide about others, on which its gradient may not depend. No comparison of numbers is sure to notice that."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.constant = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call func, and remember its results if they depend on no data."""
        kwargs = kwargs or {}
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        constant = all(id(tensor) in self.constant for tensor in used)
        if func.__name__ in DECIDING and not constant:
            raise UnknownUse("the data decides what is computed")
        result = func(*args, **kwargs)
        if constant:
            self.constant |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


DECIDING = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "item",
    "tolist",
    "numpy",
    "__array__",
    "equal",
    "allclose",
}


def _check_vmap(model: nn.Module, x: Tensor, y: Tensor, names: list[str], reason: str) -> None:
    """Raise UserError, with the layer that fails, if by_vmap cannot run a model for which by_layers is not right."""
    # a layer that is entered and not left is where it failed
    entered: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        label = f"{name or 'the network'} ({type(module).__name__})"
        hooks.append(module.register_forward_pre_hook(lambda *_, label=label: entered.append(label)))
        hooks.append(module.register_forward_hook(lambda *_: entered.pop() and None))
    parameters = {name: model.get_parameter(name).detach() for name in names}
    out = {name: parameter.new_zeros(len(x), *parameter.shape) for name, parameter in parameters.items()}
    try:
        by_vmap(model, x, y, out)
    except RuntimeError as error:
        if not raised_by_torch(error) or out_of_memory(error):
            raise
        words = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(
            f"model: {entered[-1] if entered else 'the backward pass of a layer'} has no gradients of single examples:"
            f" {reason}; and torch.func.vmap fails ({words}): put another layer in its place"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _over_positions(layer: nn.Module, x: Tensor, out: Tensor) -> None:
    """Write x, in the shape of the layer's output, into out [n, features]: summed over all else."""
    features = -1 if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and not _channels_first(layer) else 1
    out.copy_(x.movedim(features, 1).reshape(*out.shape, -1).sum(2))


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what a normalisation multiplies by its weight: the gradient of the weight is this times that of the
    output."""
    if isinstance(layer, nn.LayerNorm) and _channels_first(layer):
        return nn.functional.layer_norm(x.movedim(1, -1), layer.normalized_shape, eps=layer.eps).movedim(-1, 1)
    if isinstance(layer, nn.LayerNorm):
        return nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return nn.functional.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return nn.functional.group_norm(x, layer.num_groups, eps=layer.eps)
    assert isinstance(layer, nn.BatchNorm2d)  # in eval mode, see PerExampleGradients
    return nn.functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _channels_first(layer: nn.Module) -> bool:
    """Return whether a LayerNorm is of channels of images: timm and torchvision have a subclass for it, each called
    so."""
    return type(layer).__name__ == "LayerNorm2d"


def _convolution(layer: nn.Conv2d, x: Tensor, g: Tensor, out: Tensor) -> None:
    """Write out [n, o, c / groups, kernel] from the input [n, c, h, w] and the output's gradient [n, o, h', w'].

    A convolution with n * groups groups has exactly these weight gradients, and on a CPU a fast kernel. A batched
    product with the unfolded patches of the input is faster if there are few input channels, or not a multiple of 16,
    or few positions, or many weights, or if images are channels last and the patches of one fit into a cache; and, it
    is expected (not measured), on a GPU.
    """
    assert not isinstance(layer.padding, str)  # see layers_of
    n, c = x.shape[:2]
    o, h, w = g.shape[1:]
    (kh, kw), (dh, dw), (th, tw) = layer.kernel_size, layer.dilation, layer.stride
    entries = h * w * kh * kw * c
    last = x.is_contiguous(memory_format=torch.channels_last) and entries <= PATCHES_OF_ONE
    uneven = c < 8 or c % 16 > 0 or o % 16 > 0 or h * w <= FEW_POSITIONS or kh * kw == 1
    if layer.groups > 1 or not (uneven or last or layer.weight.numel() >= MANY_WEIGHTS or x.is_cuda):
        weight = torch.empty(1, dtype=x.dtype, device=x.device).expand(n * o, *layer.weight.shape[1:])
        shape = layer.stride, layer.padding, layer.dilation, False, (0, 0), n * layer.groups
        grads, inputs = g.reshape(1, n * o, h, w), x.reshape(1, n * c, *x.shape[2:])
        only_weight = (False, True, False)
        _, gradient, _ = torch.ops.aten.convolution_backward(grads, inputs, weight, None, *shape, only_weight)
        out.copy_(gradient.view(out.shape))
        return

    # views of the input, one for each position of the kernel; as many at once as stay in a cache
    top, left = layer.padding
    padded = nn.functional.pad(x, (left, left, top, top))
    sn, sc, sh, sw = padded.stride()
    patches = padded.as_strided((n, h, w, kh, kw, c), (sn, sh * th, sw * tw, sh * dh, sw * dw, sc))
    step = max(1, (GPU_PATCHES if x.is_cuda else PATCHES) // entries)
    for gs, ps, into in zip(g.flatten(2).split(step), patches.split(step), out.split(step), strict=True):
        if last:
            product = torch.bmm(gs, ps.reshape(len(ps), h * w, -1))  # [n', o, kernel * c]
            into.copy_(product.view(len(ps), o, kh, kw, c).permute(0, 1, 4, 2, 3))
        else:
            rows = ps.permute(0, 5, 3, 4, 1, 2).reshape(len(ps), -1, h * w)  # [n', c * kernel, h' * w']
            torch.bmm(gs, rows.mT, out=into.flatten(2))
