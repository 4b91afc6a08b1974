"""Weights from a file, for a whole network or for one without its head.

A .pth file is a pickle, which can contain any program: nothing but tensors is taken from it."""

import contextlib
import difflib
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pubsel.files import digest, plain
from pubsel.messages import UsageError, UserError, limit
from pubsel.settings import FETCHES
from pubsel.settings.networks import check_network

# open_clip's names of image towers, and what timm calls their sizes
CLIP = re.compile(r"vit-(so400m|bigg|[tsblhg])-(\d+)", re.IGNORECASE)
TOWERS = {"t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "bigg": "gigantic"}
# SimCLRv2-Pytorch's names of layers, and timm's in a ResNetV2
STEM = {"net.0.0": "stem.conv", "net.0.1.0": "stem.norm"}
IN_BLOCK = {
    "projection.shortcut": "downsample.conv",
    "projection.bn.0": "downsample.norm",
    "net.0": "conv1",
    "net.1.0": "norm1",
    "net.2": "conv2",
    "net.3.0": "norm2",
    "net.4": "conv3",
    "net.5.0": "norm3",
}
BLOCK = re.compile(r"net\.(\d+)\.blocks\.(\d+)\.(.+)")
NOT_HERE = "its published weights are not on this machine: give download=true to fetch them"


def weight_file(key: str, checkpoint: str, data_root: str, remedy: str = "") -> Path:
    """Return the file `checkpoint`, looked for here and in `data_root`. key: of the setting, for the message, which
    `remedy` ends. UserError if there is none."""
    relative = Path(checkpoint).expanduser()
    for path in (relative, Path(data_root).expanduser() / relative):
        if plain(path).is_file():
            return path
    raise UserError(f"{key}={checkpoint}: no such file, neither here nor in {data_root}{remedy}")


@contextlib.contextmanager
def tensors_alone() -> Iterator[None]:
    """Have torch.load refuse a file with anything but tensors, whichever library calls it, and whatever that asks."""
    keys = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    # libraries call torch.load themselves, so the switch is in the environment
    before = {key: os.environ.pop(key, None) for key in keys}

    os.environ[keys[0]] = "1"
    try:
        yield
    finally:
        del os.environ[keys[0]]
        os.environ.update({key: value for key, value in before.items() if value is not None})


class Dropped:
    """A placeholder for an object in a weight file that is not a tensor, such as training settings. It does nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


def dropping(path: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.load, restricted to tensors, replaces other objects of a file by `Dropped`."""
    zipped = zipfile.is_zipfile(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
    # a pair is a class and the name that it answers to: what has this name is neither imported nor called
    return torch.serialization.safe_globals([(Dropped, name) for name in names])


def of_simclr(resnet: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file of SimCLRv2-Pytorch, without the classifier, under the names of timm's ResNetV2 with
    preact=false."""
    weights = {}
    for name, value in resnet.items():
        layer, _, kind = name.rpartition(".")
        if block := BLOCK.fullmatch(layer):
            layer = f"stages.{int(block[1]) - 1}.blocks.{block[2]}.{IN_BLOCK.get(block[3], block[3])}"
        weights[f"{STEM.get(layer, layer)}.{kind}"] = value
    return {name: value for name, value in weights.items() if not name.startswith("fc.")}


def of_solo_learn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the encoder in a checkpoint of solo-learn; older ones call it encoder."""
    prefixes = ("backbone.", "encoder.")
    return {name.partition(".")[2]: value for name, value in state.items() if name.startswith(prefixes)}


def of_published(state: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the weights of a file in a layout that is known by its names, under timm's names; None for any other."""
    if isinstance(state.get("resnet"), Mapping):
        return of_simclr(state["resnet"])
    if "backbone.conv1.weight" in state or "encoder.conv1.weight" in state:
        return of_solo_learn(state)
    return None


def check_timm(key: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that may not be set, or, with the names that are near, for an architecture that
    timm does not have."""
    import timm

    check_network(key, name, options)
    if not timm.is_model(name):
        raise UsageError(f"{key}.architecture={name}: timm has no such model; {like_names(name)}")
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:
        network = name.partition(".")[0]
        tags = ", ".join(timm.list_models(f"{network}.*", pretrained=True)) or "none"
        raise UsageError(f"{key}.architecture={name}: timm has no such weights of {network}; it has: {tags}") from None


def like_names(name: str) -> str:
    """Return in words which names of timm are like one that it does not have, such as open_clip's ViT-B-32."""
    import timm

    # open_clip and timm name the same image towers
    if tower := CLIP.match(name):
        size, kind = tower[1].lower(), "siglip" if "siglip" in name.lower() else "clip"
        names = timm.list_models(f"vit_{TOWERS.get(size, size)}_patch{tower[2]}_{kind}*", pretrained=True)
    else:
        names = difflib.get_close_matches(name, timm.list_models(), 5)
    near = ", ".join(names[:5])
    return f"near it: {near}" if near else "pubsel models PATTERN lists the names"


def of_timm(name: str, pretrained: bool, sizes: Mapping[str, Any], **options: Any) -> nn.Module:
    """Return a network of timm, `pretrained` with what timm itself publishes for this name; OSError if these weights
    are not at hand and cannot be fetched, or may not (FETCHES). options: `networks.OPTIONS`; they replace `sizes`."""
    import timm

    # A file that was fetched before is read as it is: the hub would ask whether there is another one by now.
    overlay = None
    if pretrained and published(name) is None:
        raise OSError("timm publishes none")
    if pretrained and not FETCHES.get():
        path = kept(name)
        if path is None:
            raise OSError(NOT_HERE)
        overlay = {"file": str(path), "custom_load": path.suffix == ".npz"}
    with tensors_alone():
        net: nn.Module = timm.create_model(name, pretrained, None, overlay, **{**sizes, **options})
    return net


def published(name: str) -> Any:
    """Return what timm says of the weights that it publishes for a name; None if there are none."""
    import timm

    config = timm.get_pretrained_cfg(name)
    return config if config is not None and config.has_weights else None


def kept(name: str) -> Path | None:
    """Return the file of the weights that timm publishes for a name, if an earlier download has left it here."""
    from huggingface_hub import try_to_load_from_cache

    config = published(name)
    if config is not None and config.hf_hub_id:
        repository, _, revision = config.hf_hub_id.partition("@")
        file = config.hf_hub_filename or "pytorch_model.bin"
        safe = file.replace("pytorch_model.bin", "model.safetensors"), file.replace(".bin", ".safetensors")
        for name in (*safe, file):
            cached = try_to_load_from_cache(repository, name, revision=revision or None)
            if isinstance(cached, str):
                return Path(cached)
    path = of_hub(config.url) if config is not None and config.url else None
    return path if path is not None and path.is_file() else None


def of_hub(url: str | tuple[str, str]) -> Path:
    """Return where torch keeps what it has fetched from an address, which may come with another name for the file."""
    name = url.rpartition("/")[2] if isinstance(url, str) else url[1]
    return Path(torch.hub.get_dir(), "checkpoints", name)


def digest_of_weights(net: nn.Module, heads: Sequence[str] = ()) -> str:
    """Return a digest of the names and weights of a network, without those of the layers `heads`."""
    return digest(
        name.encode() + value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, value in net.state_dict().items()
        if not any(name.startswith(f"{head}.") for head in heads)
    )


def load_weights(net: nn.Module, path: Path, prefix: str | None, key: str, heads: Sequence[str] = ()) -> bool:
    """Load the weights of a file into a network, and return whether the layers `heads` are among them: they stay as
    they are if the file has none of their shape. What the network has no place for is left out, unless the file is in a
    known layout (`of_published`). UserError if anything else is absent or misshapen."""
    from timm.models import load_state_dict  # half a second, for who loads weights alone

    try:
        with tensors_alone(), dropping(path):
            state = load_state_dict(str(path), use_ema=False, weights_only=True)
        converted = None if prefix else of_published(state)
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise UserError(f"{key}={path}: {limit(error) or f'not a readable weight file ({reason})'}") from None
    if prefix:
        state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    state = state if converted is None else converted

    # A head for other classes is of no use: the network keeps its random one.
    wanted = net.state_dict()
    of_heads = [name for name in wanted if any(name.startswith(f"{head}.") for head in heads)]
    with_head = all(name in state and state[name].shape == wanted[name].shape for name in of_heads)
    if not with_head:
        state |= {name: wanted[name] for name in of_heads}

    # all that does not fit is counted, and the first is named
    misfits = [name for name in wanted if name in state and state[name].shape != wanted[name].shape]
    absent = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in converted or () if name not in wanted]
    if misfits or absent or extra:
        raise UserError(
            f"{key}={path} does not fit: {len(misfits)} weights of another shape, {len(absent)} absent, {len(extra)} "
            f"without a place, the first {[*misfits, *absent, *extra][0]}: check architecture, options and prefix"
        )

    net.load_state_dict({name: state[name] for name in wanted if name in state}, strict=False)
    return with_head
