"""build(...) -> a network that takes uint8 images [n, channels, height, width] and gives logits [n, classes]."""

import torch
from torch import Tensor, nn

from pubsel.config import Model, Norm, UsageError
from pubsel.models import small


class Network(nn.Module):
    """Images as they lie on disk -> logits: scale to [0, 1], resize if asked, normalise, then `net`."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], input_size: int | None):
        super().__init__()
        self.net = net
        self.input_size = input_size
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # uint8 [n, c, h, w] -> [n, classes]
        x = x.to(self.mean.dtype) / 255
        if self.input_size is not None and x.shape[-2:] != (self.input_size, self.input_size):
            shrinks = x.shape[-1] > self.input_size or x.shape[-2] > self.input_size
            size = (self.input_size, self.input_size)
            x = nn.functional.interpolate(x, size, mode="bilinear", antialias=shrinks)
        return self.net((x - self.mean) / self.std)


def build(
    model: Model, shape: tuple[int, int, int], classes: int, mean: tuple[float, ...], std: tuple[float, ...], seed: int
) -> Network:
    """A network in eval mode, its random weights drawn from `seed`. shape: channels, height, width of the images.

    Raises UsageError for an unknown model, or one that does not fit the images.
    """
    channels, height, width = shape
    if model.input_size is not None:
        height = width = model.input_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if model.name in ("timm", "torchvision"):
                net = _library(model, channels, classes)
            elif model.name in small.NETWORKS:
                net = small.NETWORKS[model.name](channels, height, width, classes)
            else:
                raise UsageError(
                    f"model.name={model.name}: unknown, use {', '.join(small.NETWORKS)}, timm or torchvision"
                )
            network = Network(net, mean, std, model.input_size).eval()
            with torch.no_grad():
                network(torch.zeros(1, *shape, dtype=torch.uint8))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"model={model.name} does not fit images of {channels}x{height}x{width}: {reason}; "
                "take another model or set model.input_size"
            ) from None
    return network


def _library(model: Model, channels: int, classes: int) -> nn.Module:
    """A timm or torchvision network with `classes` outputs, without a layer that mixes examples."""
    from opacus.validators import ModuleValidator

    name = model.architecture
    if name is None:
        raise UsageError(f"model={model.name} needs model.architecture=NAME, such as resnet18")
    if model.name == "timm":
        import timm

        if not timm.is_model(name):
            near = ", ".join(timm.list_models(f"*{name[:6]}*")[:5]) or "see timm.list_models()"
            raise UsageError(f"model.architecture={name}: timm has no such model; near it: {near}")
        net = timm.create_model(
            name,
            pretrained=model.pretrained,
            num_classes=classes,
            in_chans=channels,
            checkpoint_path=model.checkpoint or "",
        )
    else:
        import torchvision

        if name not in torchvision.models.list_models():
            raise UsageError(f"model.architecture={name}: torchvision has no such model")
        if channels != 3:
            raise UsageError(f"model=torchvision takes images with 3 channels, these have {channels}: use model=timm")
        if model.pretrained:
            net = torchvision.models.get_model(name, weights="DEFAULT")
            net = _new_head(net, classes)
        else:
            net = torchvision.models.get_model(name, num_classes=classes)
    if model.norm == Norm.replace:
        net = ModuleValidator.fix(net)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # frozen: statistics and affine part
            for parameter in module.parameters():
                parameter.requires_grad_(False)
    return net


def _new_head(net: nn.Module, classes: int) -> nn.Module:
    name, last = [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)][-1]
    net.set_submodule(name, nn.Linear(last.in_features, classes))
    return net


def parameter_groups(model: nn.Module, offsets: dict[str, slice]) -> dict[str, slice]:
    """The columns of G that belong together in GEP: one group for each child of the network that has parameters.

    For resnet20 these are the paper's five (input layer, three stages, output layer); for the small networks, each
    layer. offsets: columns of each parameter name, as in PerExampleGradients.
    """
    groups: dict[str, slice] = {}
    for name, columns in offsets.items():
        child = ".".join(name.split(".")[:2]) if name.startswith("net.") else name.split(".")[0]
        start = groups[child].start if child in groups else columns.start
        groups[child] = slice(start, columns.stop)
    return groups
