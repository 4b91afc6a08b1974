"""Weights from a file, for a whole network or for one without its head.

A .pth file is a pickle, which can contain any program: nothing but tensors is taken from it."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pubsel.files import digest, plain
from pubsel.messages import UsageError, UserError, limit
from pubsel.settings import FETCHES
from pubsel.settings.networks import check_network

# open_clip's names of image towers, and what timm calls their sizes
CLIP = re.compile(r"vit-(so400m|bigg|[tsblhg])-(\d+)", re.IGNORECASE)
TOWERS = {"t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "bigg": "gigantic"}
NOT_HERE = "its published weights are not on this machine: give download=true to fetch them"


def weight_file(key: str, checkpoint: str, data_root: str, remedy: str = "") -> Path:
    """Return the file `checkpoint`, looked for here and in `data_root`. key: of the setting, for the message, which
    `remedy` ends."""
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
    they are if the file has none of their shape. What the network has no place for is left out. UserError if anything
    else is absent or misshapen."""
    from timm.models import load_state_dict  # half a second, for who loads weights alone

    try:
        with tensors_alone():
            state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise UserError(f"{key}={path}: {limit(error) or f'not a readable weight file ({reason})'}") from None
    if prefix:
        state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    # A head for other classes is of no use: the network keeps its random one.
    wanted = net.state_dict()
    of_heads = [name for name in wanted if any(name.startswith(f"{head}.") for head in heads)]
    with_head = all(name in state and state[name].shape == wanted[name].shape for name in of_heads)
    if not with_head:
        state |= {name: wanted[name] for name in of_heads}

    # all that does not fit is counted, and the first is named
    misfits = [name for name in wanted if name in state and state[name].shape != wanted[name].shape]
    absent = [name for name in wanted if name not in state and not name.endswith("num_batches_tracked")]
    if misfits or absent:
        first = misfits[0] if misfits else absent[0]
        raise UserError(
            f"{key}={path} does not fit: {len(misfits)} weights of another shape, {len(absent)} absent, the first "
            f"{first}: check architecture, options and prefix"
        )

    net.load_state_dict({name: state[name] for name in wanted if name in state}, strict=False)
    return with_head
