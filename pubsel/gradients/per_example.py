"""The gradient of each example's own loss: in general by vmap, and faster from the outputs of layers.

by_layers: one forward pass; one backward pass to the OUTPUTS of the trained layers, which forms no weight gradient;
then each layer's weight gradients of all examples at once from its input and the gradient of its output. It knows
nn.Linear, nn.Conv2d and normalisation that keeps examples apart, each used once, and is taken only after its float64
result on two random examples has agreed with by_vmap's. Layers below the first trained one run without a graph.

Both write into `out`, {parameter name: [n, *its shape]}, and return losses [n]: memory that is taken anew for each pass
costs more than many of the gradients in it.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call, grad_and_value, vmap

from pubsel.messages import out_of_memory

PATCHES = 2**20  # entries of unfolded input at once, so that they stay in a cache
GPU_PATCHES = 2**28  # those that a GPU takes at once: each product is a kernel to start
WIDE = 2**15  # entries of a weight that is worth the trouble
PATCHES_OF_ONE = 2**17  # those of one image, for the cache of one core


def losses_of(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each example [n]: cross-entropy for classes y [n]; binary cross-entropy, mean over labels, for 0/1 rows
    y [n, labels]."""
    if y.dim() == logits.dim():
        return nn.functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean(1)
    return nn.functional.cross_entropy(logits, y, reduction="none")


def by_vmap(model: nn.Module, x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
    """Gradients of the parameters named in `out` at x [n, ...], y [n, ...], for any model."""
    state = _state(model)
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


# of a linear layer's gradients: its inputs [n, ..., a], and the gradients of its outputs [n, ..., b]
Factors = tuple[Tensor, Tensor]


def by_layers(
    model: nn.Module, x: Tensor, y: Tensor, out: dict[str, Tensor], keep: dict[str, Factors] | None = None
) -> Tensor:
    """The same from layer outputs. RuntimeError where a layer is used twice, or not as a layer.

    keep: the linear layers, by name, whose factors are put there and whose gradients are not written out.
    """
    keep = keep or {}
    names = [*out, *(f"{owner}.weight" for owner in keep)]
    layers = known_layers(model, names)
    if layers is None:
        raise RuntimeError("a trained parameter belongs to no layer that is known here")
    called: set[str] = set()
    start = torch.zeros((), requires_grad=True)

    def record(owner: str, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if owner in called:
            raise RuntimeError(f"layer {owner} is used twice")
        called.add(owner)
        output = output if output.requires_grad else _Start.apply(output, start)
        if owner in keep:
            output.register_hook(partial(hold, owner, inputs[0].detach()))
            return output
        write = partial(_write, layers[owner], inputs[0].detach(), out.get(f"{owner}.weight"), out.get(f"{owner}.bias"))
        output.register_hook(write)  # at once: gradients of outputs need not wait for each other
        return output

    def hold(owner: str, inputs: Tensor, at_output: Tensor) -> None:
        keep[owner] = inputs, at_output

    hooks = [
        layer.register_forward_hook(lambda _, inputs, output, owner=owner: record(owner, inputs, output))
        for owner, layer in layers.items()
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)  # the gradient of no weight is formed
        with torch.enable_grad():
            losses = losses_of(model(x), y)
            if len(called) < len(layers):
                raise RuntimeError("a layer with trained parameters is not called")
            losses.sum().backward()
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for hook in hooks:
            hook.remove()
    return losses.detach()


class _Start(torch.autograd.Function):
    """x itself, with a gradient from here on. No leaf of the graph, so that a ReLU may overwrite it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, start: Tensor) -> Tensor:  # start: any number that takes a gradient
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, _: Tensor) -> tuple[None, None]:
        return None, None


def _write(layer: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None, at_output: Tensor) -> None:
    """Per-example gradients of a layer with input x into `weight` and `bias`, [n, *shape], from those of its output."""
    if weight is not None and isinstance(layer, nn.Conv2d):
        _convolution(layer, x, at_output, weight)
    elif weight is not None and isinstance(layer, nn.Linear):
        _linear(x, at_output, weight)
    elif weight is not None:
        _over_positions(layer, at_output * _normalised(layer, x), weight)
    if bias is not None:
        _over_positions(layer, at_output, bias)


def wide_layers(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, int]:
    """The linear layers whose factors are cheaper to work with than their gradients [b, a], and how many numbers are
    then kept of an example like x [n, ...]. By counted work: T (a + b) numbers in place of a b, and for the norm
    T^2 (a + b) products in place of the T a b that write the gradient (mixed ghost clipping; Bu et al. 2022,
    arXiv:2205.10683)."""
    layers = {owner: layer for owner, layer in (known_layers(model, names) or {}).items() if type(layer) is nn.Linear}
    layers = {owner: layer for owner, layer in layers.items() if f"{owner}.weight" in names}
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, owner=owner: inputs.__setitem__(owner, given[0]))
        for owner, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()

    wide = {}
    for owner, layer in layers.items():
        b, a = layer.weight.shape
        tokens = inputs[owner][0].numel() // a
        if a * b >= WIDE and 4 * tokens**2 * (a + b) <= a * b:
            wide[owner] = tokens * (a + b)
    return wide


def known_layers(model: nn.Module, names: list[str]) -> dict[str, nn.Module] | None:
    """The layers that own the parameters `names`; None where by_layers does not know one of them."""
    layers: dict[str, nn.Module] = {}
    for name in names:
        owner, _, kind = name.rpartition(".")
        layer = model.get_submodule(owner)
        plain = type(layer) is nn.Linear or (
            type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        )
        plain = plain or isinstance(layer, nn.GroupNorm | nn.BatchNorm2d)
        plain = plain or (isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1)
        if not plain or kind not in ("weight", "bias"):
            return None
        layers[owner] = layer
    return layers


def layers_agree(model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> bool:
    """Tell whether by_layers is right for this model: in float64, on two random examples shaped like x [n, ...] and
    y [n, ...], at weights slightly moved."""
    if known_layers(model, names) is None:
        return False

    # if a head is all zeros, no gradient comes through it, and a mistake below would not show
    generator = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.01 * noise.to(parameter.device))

    examples = torch.randint(256, (2, *x.shape[1:]), generator=generator).to(x.device)
    examples = examples.to(x.dtype) if not x.is_floating_point() else examples.double() / 255
    labels = torch.zeros(2, *y.shape[1:], dtype=y.dtype, device=y.device)
    shapes = {name: moved.get_parameter(name).shape for name in names}
    ours, exact = ({name: examples.new_zeros(2, *s, dtype=torch.float64) for name, s in shapes.items()} for _ in "12")
    try:
        by_layers(moved, examples, labels, ours)
    except RuntimeError as error:
        if out_of_memory(error):  # vmap would need more
            raise
        return False

    by_vmap(moved, examples, labels, exact)
    return all(torch.allclose(ours[name], exact[name], 1e-8, 1e-10) for name in names)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _over_positions(layer: nn.Module, x: Tensor, out: Tensor) -> None:
    """x, in the shape of the layer's output -> out [n, features]: summed over all else."""
    features = -1 if isinstance(layer, nn.Linear | nn.LayerNorm) else 1
    out.copy_(x.movedim(features, 1).reshape(*out.shape, -1).sum(2))


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """What a normalisation multiplies by its weight: the gradient of the weight is this times that of the output."""
    if isinstance(layer, nn.LayerNorm):
        return nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return nn.functional.group_norm(x, layer.num_groups, eps=layer.eps)
    assert isinstance(layer, nn.BatchNorm2d)  # in eval mode, see PerExampleGradients
    return nn.functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _linear(x: Tensor, g: Tensor, out: Tensor) -> None:
    """Input [n, ..., a], gradient of the output [n, ..., b] -> out [n, b, a], summed over positions."""
    if x.dim() == 2:
        torch.mul(g[:, :, None], x[:, None, :], out=out)
    else:
        torch.bmm(g.flatten(1, -2).mT, x.flatten(1, -2), out=out)


def _convolution(layer: nn.Conv2d, x: Tensor, g: Tensor, out: Tensor) -> None:
    """Input [n, c, h, w], gradient of the output [n, o, h', w'] -> out [n, o, c / groups, kernel].

    A convolution with n * groups groups has exactly these weight gradients, and on a CPU a fast kernel. A batched
    product with the unfolded patches of the input is faster where there are few input channels, or where images are
    channels last and the patches of one fit into a cache; and, it is expected (not measured), on a GPU.
    """
    assert not isinstance(layer.padding, str)  # see known_layers
    n, c = x.shape[:2]
    o, h, w = g.shape[1:]
    (kh, kw), (dh, dw), (th, tw) = layer.kernel_size, layer.dilation, layer.stride
    entries = h * w * kh * kw * c
    last = x.is_contiguous(memory_format=torch.channels_last) and entries <= PATCHES_OF_ONE
    if layer.groups > 1 or not (c < 8 or last or x.is_cuda):
        weight = torch.empty(1, dtype=x.dtype, device=x.device).expand(n * o, *layer.weight.shape[1:])
        gradient = torch.ops.aten.convolution_backward(
            g.reshape(1, n * o, h, w), x.reshape(1, n * c, *x.shape[2:]), weight, None,
            layer.stride, layer.padding, layer.dilation, False, (0, 0), n * layer.groups, (False, True, False),
        )[1]  # fmt: skip
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
            into.flatten(2).copy_(torch.bmm(gs, rows.mT))
