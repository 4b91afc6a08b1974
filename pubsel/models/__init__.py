"""build(...) -> a network that takes uint8 images [n, channels, height, width] and gives logits [n, classes]."""

from typing import Any

import torch
from torch import Tensor, nn

from pubsel.messages import UsageError, UserError
from pubsel.models import small
from pubsel.models.memory import check_size
from pubsel.models.trained import choose, heads
from pubsel.models.weights import (
    NOT_HERE,
    check_timm,
    digest_of_weights,
    load_weights,
    of_hub,
    of_timm,
    tensors_alone,
    weight_file,
)
from pubsel.settings import FETCHES
from pubsel.settings.keys import Model, Norm
from pubsel.settings.schema import nearest

KEY = "model.checkpoint"


class Network(nn.Module):
    """Images as they are on disk -> logits: scale to [0, 1], resize if asked, normalise, then `net`. A network for
    colour images gets a grey one in all three channels."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        input_size: int | None,
        start: str | None = None,
    ):
        """Hold `net`. start: the digest of the weights that it was given, without a head; None if all were drawn."""
        super().__init__()
        self.net = net
        self.input_size = input_size
        self.start = start
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # uint8 [n, c, h, w] -> [n, classes]
        return self.net(self.normalised(x))

    def normalised(self, x: Tensor) -> Tensor:
        """Return images [n, c, h, w], 0 to 255, as `net` takes them."""
        x = x.to(self.mean.dtype) / 255

        if self.input_size is not None and x.shape[-2:] != (self.input_size, self.input_size):
            shrinks = x.shape[-1] > self.input_size or x.shape[-2] > self.input_size
            size = (self.input_size, self.input_size)
            x = nn.functional.interpolate(x, size, mode="bilinear", antialias=shrinks)

        return (x - self.mean) / self.std  # x with one channel is broadcast here


def build(
    model: Model,
    shape: tuple[int, int, int],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    seed: int,
    data_root: str | None = ".",
) -> Network:
    """Return a network in eval mode, its random weights drawn from `seed`, in which what `model` names is trained.
    shape: channels, height, width of the images. mean, std: theirs, which a network with weights replaces by its own.
    data_root: where a file of weights may be; None: no weights are read or fetched, since others will be loaded.

    Raises UsageError for an unknown model, or one that does not fit the images; UserError for a weight file that is
    absent or does not fit, and for a network that memory does not hold.
    """
    channels, height, width = shape

    # The seed decides the random weights, and leaves the caller's random numbers as they were.
    with torch.random.fork_rng(devices=[]):
        try:
            check_size(f"model={model.name}", lambda: _made(model, shape, classes, mean, std, None))
            torch.manual_seed(seed)
            return _made(model, shape, classes, mean, std, data_root)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"model={model.name} does not fit images of {channels}x{height}x{width}: {reason}; "
                "take another model or set model.input_size"
            ) from None


def _made(
    model: Model,
    shape: tuple[int, int, int],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    data_root: str | None,
) -> Network:
    """Return the network of `build`, with what random numbers torch gives."""
    channels, height, width = shape
    if model.input_size is not None:
        height = width = model.input_size
    with_weights = bool(model.pretrained or model.checkpoint)
    read = with_weights and data_root is not None

    # each source of networks takes other settings, and refuses those that it would ignore
    if model.name in small.NETWORKS:
        _refuse(model, "pretrained", "checkpoint", "architecture", "options", "mean", "std")
        net = small.NETWORKS[model.name](channels, height, width, classes)
    elif model.architecture is None:
        if model.name in ("timm", "torchvision"):
            raise UsageError(f"model={model.name} needs model.architecture=NAME, such as resnet18")
        near = nearest(model.name, [*small.NETWORKS, "timm", "torchvision"])
        known = ", ".join(small.NETWORKS)
        raise UsageError(f"model.name={model.name}: unknown{near}, use {known}, timm or torchvision")
    elif model.name == "torchvision":
        _refuse(model, "checkpoint", "options", "mean", "std")
        net = _torchvision(model, model.architecture, channels, classes, read)
        if read:
            mean, std = _torchvision_scale(model.architecture)
    else:
        net = _timm(model, model.architecture, channels, classes, data_root)
        if read:
            published: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
            mean, std = tuple(model.mean or published["mean"]), tuple(model.std or published["std"])
        elif not with_weights:
            _refuse(model, "mean", "std")
    start = digest_of_weights(net, heads(net)) if read else None

    # An image of zeros shows at once whether the network takes this shape.
    choose(net, model)
    network = Network(net, mean, std, model.input_size, start).eval()
    with torch.no_grad():
        network(torch.zeros(1, *shape, dtype=torch.uint8))
    return network


def _refuse(model: Model, *keys: str) -> None:
    """Raise UsageError for a setting that this kind of network would ignore."""
    for key in keys:
        if getattr(model, key):
            raise UsageError(f"model.{key}: model={model.name} without weights of timm ignores it: remove it")


def _timm(model: Model, name: str, channels: int, classes: int, data_root: str | None) -> nn.Module:
    """Return a timm network with `classes` outputs: random, with its published weights, or those of a file."""
    check_timm("model", name, model.options or {})
    ours = name.startswith("mobilenetv2_100")  # with weights of two sources in conf/model
    published = "; model=mobilenetv2_layers fetches published weights" if ours else ""
    read = data_root is not None
    path = weight_file(KEY, model.checkpoint, data_root, published) if model.checkpoint and data_root else None
    fetch = model.pretrained and path is None and read
    with_weights = fetch or path is not None
    sizes = {"num_classes": classes, "in_chans": 3 if with_weights else channels}
    try:
        net = of_timm(name, fetch, sizes, **model.options or {})
    except TypeError as error:
        reason = str(error).partition("\n")[0][:100]
        raise UsageError(f"model.options={model.options}: not for model.architecture={name} ({reason})") from None
    except OSError as error:
        reason = str(error).partition("\n")[0][:100]
        raise UserError(
            f"model.architecture={name}: its weights cannot be fetched ({reason}): give {KEY}=FILE"
            + (", or take model=mobilenetv2_layers_coral, which reads a file" if ours else "")
        ) from None

    # Published weights for another number of classes have no head for this task.
    trained_head = fetch and net.pretrained_cfg["num_classes"] == classes  # type: ignore[index]
    if path is not None:
        trained_head = load_weights(net, path, None, KEY, heads(net))
    if with_weights and not trained_head:
        net = _new_heads(net, classes)
    return _apart(net, model.norm, with_weights)


def _torchvision(model: Model, name: str, channels: int, classes: int, read: bool) -> nn.Module:
    """Return a network of torchvision with `classes` outputs. read: with its published weights, if it has any."""
    import torchvision

    # Others than those that classify fetch a backbone by themselves.
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(f"model.architecture={name}: torchvision has no such model that classifies images")
    if channels != 3:
        raise UsageError(f"model=torchvision takes images with 3 channels, these have {channels}: use model=timm")

    # Published weights come with a head for other classes, which is replaced. They decide what some networks are.
    if model.pretrained:
        weights = torchvision.models.get_model_weights(name).DEFAULT
        form: dict[str, Any] = {"weights": weights}
        if not read:
            form = {"image_size": weights.meta["min_size"][0]} if name.startswith("vit_") else {}
            if name in ("googlenet", "inception_v3"):
                form = {"transform_input": True, "aux_logits": False, "init_weights": False}
        elif not FETCHES.get() and not of_hub(weights.url).is_file():
            raise UserError(f"model.architecture={name}: {NOT_HERE}")
        with tensors_alone():
            net = torchvision.models.get_model(name, **form)
        net = _new_heads(net, classes)
    else:
        net = torchvision.models.get_model(name, num_classes=classes)
    return _apart(net, model.norm, model.pretrained)


def _torchvision_scale(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that published weights were trained with."""
    import torchvision

    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return tuple(preset.mean), tuple(preset.std)


def _apart(net: nn.Module, norm: Norm, with_weights: bool) -> nn.Module:
    """Return the network without a layer that mixes examples: BatchNorm replaced by GroupNorm, or frozen, statistics
    and affine part. Channels last, in which deep networks are fastest on a CPU."""
    from opacus.validators import ModuleValidator

    def mixing() -> bool:
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())

    if norm == Norm.replace and with_weights and mixing():
        raise UsageError("model.norm=replace discards what BatchNorm has learned: set model.norm=freeze")
    if norm == Norm.replace:
        # timm's layers of BatchNorm and an activation become one of each, which can be replaced
        from timm.layers import BatchNormAct2d  # type: ignore[attr-defined]

        joined = {name: module for name, module in net.named_modules() if isinstance(module, BatchNormAct2d)}
        for name, module in joined.items():
            plain = nn.BatchNorm2d(module.num_features, module.eps, affine=module.affine)
            net.set_submodule(name, nn.Sequential(plain, module.drop, module.act))
        net = ModuleValidator.fix(net)
        if mixing():
            raise UsageError("model.norm=replace cannot replace this network's BatchNorm: set model.norm=freeze")

    return net.to(memory_format=torch.channels_last)


def _new_heads(net: nn.Module, classes: int) -> nn.Module:
    """Return the network with heads as torch draws them: those of some timm networks start with logits in the tens."""
    for name in heads(net):
        net.set_submodule(name, nn.Linear(net.get_submodule(name).in_features, classes))  # type: ignore[arg-type]
    return net


def parameter_groups(model: nn.Module, offsets: dict[str, slice]) -> dict[str, slice]:
    """Return the columns of G that belong together in GEP: one group for each child of the network that has parameters.

    For resnet20 these are the paper's five (input layer, three stages, output layer); for the small networks, each
    layer. offsets: columns of each parameter name, as in PerExampleGradients.
    """
    groups: dict[str, slice] = {}
    for name, columns in offsets.items():
        child = ".".join(name.split(".")[:2]) if name.startswith("net.") else name.split(".")[0]
        start = groups[child].start if child in groups else columns.start
        groups[child] = slice(start, columns.stop)
    return groups
