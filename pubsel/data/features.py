"""Features of images from a frozen timm network, or from wavelet scattering, computed once and kept; of texts from a
text encoder, computed each time.

A file <data folder>/features/<network>-<digest>.npy holds float32 [n, d]. Its name depends on all that decides its
content: the images themselves, the network, its weights, the preprocessing, and the versions of torch and timm; so a
file is never stale, and splits that share images share it. It is written under another
name, then renamed, with a digest at its end of its name and content, and only its owner may read it. A file that is not
what was written is computed again.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Generator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.data import Source, Split, overlap
from pubsel.data.convert import LUMA, Shape, converted, describe, to_shape
from pubsel.data.decoded import map_threads
from pubsel.files import (
    ProgressLine,
    digest,
    file_digest,
    in_parts,
    locked,
    npy_map,
    private_folder,
    reading,
    whole,
    write_whole,
)
from pubsel.messages import UsageError, UserError, cannot_write, gib, say
from pubsel.models import scattering, text_encoder
from pubsel.models.memory import Held, check_room, check_size, free
from pubsel.models.stages import Stages
from pubsel.models.traced import Network, faster
from pubsel.models.weights import check_timm, digest_of_weights, load_weights, of_timm, weight_file
from pubsel.settings.identity import digest_of
from pubsel.settings.keys import Backbone, Convert, Scattering

CPU_BATCH, GPU_BATCH = 16, 256  # images at a time through the network, on a CPU for each thread
TRACED_FROM = 1000  # images from which the seconds that it takes to trace a network come back
MARK = b"blake2b-16:"  # before the digest at a file's end; numpy reads as much as the header says
END = len(MARK) + 16
KEY = "model.backbone.checkpoint"
AGAIN = "delete it to have it computed again"
NO_WEIGHTS = "; model=scattering needs no weights"
PUBLISHED = "; model=mobilenetv2 fetches published weights"
CORAL = ", or take model=mobilenetv2_coral, which reads a file"
ROWS = "rows"  # the architecture of what takes rows of numbers as they are
FLOATS = 4  # bytes of a float32
LARGEST = 32  # scattering: larger images are resized to this side, in pixels


class Preparation(NamedTuple):
    """The preparation of images for a network."""

    resize: int  # the shorter side, pixels
    size: int  # of the centre that is kept
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str


class Extractor(NamedTuple):
    """A maker of features of images, uint8 [n, c, h, w] on `device`. key: a digest of all that decides them."""

    net: Callable[[Tensor], Tensor]
    prepare: Preparation | None  # None: `net` takes them as they are
    device: torch.device
    key: str
    weights: str  # a digest of the network's weights; of scattering its version
    stages: int = 0  # of the features, how many come last and are of earlier stages of the network

    def __call__(self, x: Tensor) -> Tensor:
        """Return features [n, d] of images, of which nothing is kept."""
        return torch.from_numpy(np.concatenate([*embedded(x, self)]))


def of_source(
    name: str,
    source: Source,
    backbone: Backbone,
    data_root: str,
    device: torch.device,
    report: Callable[[str], None],
    like: Shape | None = None,
    convert: Convert = Convert.resize,
) -> Source:
    """Return the source with features [n, d] in place of images; `backbone.architecture` pixels: the images themselves,
    flat, in [0, 1]. Features that a source has already stay.

    like: the shape of the private images. Scattering gives as many features as the shape of an image says, so it takes
    public images in that shape, brought to it as `convert` says; a network gives as many for any image.
    UsageError for a network that does not take what the source has.
    """
    rows = backbone.architecture == ROWS
    of_texts = backbone.architecture.startswith(text_encoder.PREFIX)
    if of_texts and source.texts is None:
        raise UsageError(f"{name}: has no texts, and {backbone.architecture} takes texts: take another model")
    if source.texts is not None and not (rows or of_texts):
        raise UsageError(f"{name}: has texts, which a network for images does not take: set model=rows or text_encoder")
    if source.kind == "rows" and not (rows or of_texts):
        raise UsageError(f"{name}: has rows of numbers, which a network for images does not take: set model=rows")
    if source.kind == "images" and rows:
        raise UsageError(f"{name}: has images, and model=rows takes rows of numbers: take a network, as scattering")
    if rows:
        return source
    request = (name, repr(backbone), data_root, device, like, convert)
    if not (_LAST and _LAST[0] is source and _LAST[1] == request):
        note: tuple[str, ...] = ()
        if backbone.architecture != "scattering" or tuple(source.train.x.shape[1:]) == like:
            like = None
        if like is not None:  # whether it may be, and what to note: images are brought to it a batch at a time
            _, note = converted(name, source.train.x[:1], like, convert)

        with_note = source._replace(notes=(*source.notes, *note))
        if source.texts is not None:
            encoder, texts = text_encoder.load_text_encoder(backbone, device), source.texts._asdict()
            result = _changed(with_note, lambda part, _: encoder.features(texts[part], f"{name} {part}"))
            result = result._replace(weights=encoder.weights)
        elif backbone.architecture == "pixels":
            result = _changed(with_note, lambda _, x: x.flatten(1).float() / 255)
        else:
            extractor = load_backbone(backbone, data_root, device, like)
            short, folder = backbone.architecture.split(".")[0], Path(data_root).expanduser() / "features"

            def of_part(part: str, x: Tensor) -> Tensor:
                known = source.kept / f"{part}_features.json" if source.kept else None
                if not source.untested:
                    return features(f"{name} {part}", x, extractor, short, folder, report, known)
                # of data in memory nothing is kept: mapped from a file that is gone when this returns
                with tempfile.TemporaryDirectory(prefix="pubsel-", ignore_cleanup_errors=True) as scratch:
                    return features(f"{name} {part}", x, extractor, short, Path(scratch), report)

            result = _changed(with_note, of_part)
            result = result._replace(weights=extractor.weights, stages=extractor.stages)
        _LAST[:] = [source, request, result]
    return _LAST[2]


_LAST: list[Any] = []  # source, request, and its features: for the next cell of a sweep


def _changed(source: Source, change: Callable[[str, Tensor], Tensor]) -> Source:
    """Return the source with change(name of the part, x) in place of the examples x of each part."""
    # a network may refuse a batch of no images
    parts = {part: split for part, split in (("train", source.train), ("test", source.test)) if len(split.x)}
    changed = {part: Split(change(part, split.x), split.y) for part, split in parts.items()}

    # An empty part is as wide as the other one.
    empty = next((split.x[:0] for split in changed.values()), torch.zeros(0, 1))
    train = changed.get("train", Split(empty, source.train.y))
    test = changed.get("test", Split(empty, source.test.y))
    return source._replace(train=train, test=test)


def of_images(
    backbone: Backbone, shape: tuple[int, ...], data_root: str, device: torch.device
) -> tuple[Any, str | None]:
    """Return what makes features [n, d] of images, uint8 [n, *shape], or of texts, as `of_source` does, and
    keeps none of them; and `Extractor.weights`, None of pixels."""
    if backbone.architecture == "pixels":
        return lambda x: x.flatten(1).float() / 255, None
    if backbone.architecture.startswith(text_encoder.PREFIX):
        encoder = text_encoder.load_text_encoder(backbone, device)
        return encoder, encoder.weights
    extractor = load_backbone(backbone, data_root, device, (shape[0], shape[1], shape[2]))
    return extractor, extractor.weights


def load_backbone(backbone: Backbone, data_root: str, device: torch.device, like: Shape | None = None) -> Extractor:
    """Return the network of `backbone` with its published weights, or those of a file; or wavelet scattering, of images
    that are first brought to the shape `like`.

    UsageError for an unknown architecture or an option that it does not take; UserError for a weight file that is
    absent or does not fit, or weights that cannot be fetched.
    """
    name = backbone.architecture
    if name == "scattering":
        return _scattering(backbone, device, like)
    import timm  # three seconds, for networks alone

    if backbone.scattering is not None:
        raise UsageError(f"model.backbone.scattering: for architecture=scattering, not for {name}: remove it")
    check_timm("model.backbone", name, backbone.options)
    path = weight_file(KEY, backbone.checkpoint, data_root, PUBLISHED + NO_WEIGHTS) if backbone.checkpoint else None
    fetch = backbone.pretrained and path is None
    try:
        logging.disable(logging.WARNING)  # of the hub, about what the message below says
        check_size(f"model.backbone.architecture={name}", lambda: _check_vector(backbone))
        net = _network(backbone, fetch)
    except UserError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:100] or type(error).__name__
        if fetch and isinstance(error, OSError | RuntimeError):
            raise UserError(
                f"model.backbone.architecture={name}: its weights cannot be fetched ({reason}): "
                f"give model.backbone.checkpoint=FILE{CORAL if name.startswith('mobilenetv2_100') else ''}{NO_WEIGHTS}"
            ) from None
        changed = f"options={backbone.options}" + f" and input_size={backbone.input_size}" * bool(backbone.input_size)
        raise UsageError(f"model.backbone.architecture={name} with {changed}: {reason}") from None
    finally:
        logging.disable(logging.NOTSET)

    if path is not None:
        load_weights(net, path, backbone.prefix, KEY)
    net = net.eval().requires_grad_(False)

    how = _preparation(backbone, net)

    # The key depends on all that decides features, so that a kept file is never stale.
    weights = digest_of_weights(net)
    versions = [torch.__version__, timm.__version__]
    decides = {"network": [name, backbone.options, weights], "how": list(how), "versions": versions}
    if not backbone.stages:
        return Extractor(net.to(device), how, device, digest_of(decides), weights)
    whole = Stages(net, name, len(how.mean), how.size)
    key = digest_of(decides | {"stages": whole.chosen})
    return Extractor(whole.eval().to(device), how, device, key, weights, whole.width)


def _network(backbone: Backbone, pretrained: bool) -> nn.Module:
    """Return the timm network of `backbone`, without a head, unless its options have one."""
    return of_timm(backbone.architecture, pretrained, {"num_classes": 0}, **backbone.options)


@torch.no_grad()
def _check_vector(backbone: Backbone) -> None:
    """Raise UsageError if a network gives anything but a vector of an image; it is made without its numbers."""
    net = _network(backbone, False).eval()
    how = _preparation(backbone, net)
    y = net(torch.zeros(1, len(how.mean), how.size, how.size))
    if not isinstance(y, Tensor) or y.dim() != 2:
        raise UsageError(
            f"model.backbone.architecture={backbone.architecture}: it gives no vector of an image, so it is no encoder"
        )


def _preparation(backbone: Backbone, net: nn.Module) -> Preparation:
    """Return how images reach a network: as they did when its weights were trained, unless the settings differ."""
    from timm.data import resolve_model_data_config  # type: ignore[attr-defined]

    # what the settings leave open is as the weights were trained
    data = resolve_model_data_config(net)  # type: ignore[no-untyped-call]
    size = backbone.input_size or data["input_size"][-1]
    mean, std = tuple(backbone.mean or data["mean"]), tuple(backbone.std or data["std"])
    resize = round(size / (backbone.crop or data["crop_pct"]))
    check_room(f"model.backbone.input_size={size}", CPU_BATCH * FLOATS * 3 * resize**2)
    interpolation = backbone.interpolation.name if backbone.interpolation else data["interpolation"]
    return Preparation(resize, size, mean, std, interpolation)


def described(backbone: Backbone) -> tuple[dict[str, Any], str]:
    """Return how images reach a backbone, and where its weights are from. Neither reads weights; UsageError for an
    architecture that timm does not know."""
    name = backbone.architecture
    if name == "pixels":
        return {"features": "pixels / 255, channels, rows and columns in one row"}, "none: it has no weights"
    if name == ROWS:
        return {"features": "rows of numbers as they are; of a table, as `columns` says"}, "none: it has no weights"
    if name.startswith(text_encoder.PREFIX):
        return text_encoder.described_encoder(backbone)
    if name == "scattering":
        settings = {} if backbone.scattering is None else dataclasses.asdict(backbone.scattering)
        how = {"features": f"scattering, version {scattering.VERSION}", "input_size": backbone.input_size, **settings}
        return how, "none: it has no weights"
    check_timm("model.backbone", name, backbone.options)
    check_size(f"model.backbone.architecture={name}", lambda: _network(backbone, False))
    net = _network(backbone, False)
    how = {"scale": "pixels / 255, grey as three equal channels", **_preparation(backbone, net)._asdict()}
    how = {key: list(value) if isinstance(value, tuple) else value for key, value in how.items()}
    if backbone.checkpoint:
        return how, f"the file {Path(backbone.checkpoint).name}, which is not published with timm"
    if not backbone.pretrained:
        return how, "none: its weights are random"
    published: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    hub = published.get("hf_hub_id")
    return how, f"https://huggingface.co/{hub}" if hub else published.get("url") or f"timm {name}"


def _scattering(backbone: Backbone, device: torch.device, like: Shape | None) -> Extractor:
    """Return wavelet scattering with the settings of `backbone`; UsageError for one that only a network takes."""
    settings = backbone.scattering
    if settings is None:
        raise UsageError("model.backbone.architecture=scattering: take model=scattering, which has its settings")
    for unused in ("checkpoint", "prefix", "options", "crop", "mean", "std", "interpolation", "stages"):
        if getattr(backbone, unused):
            raise UsageError(f"model.backbone.{unused}: architecture=scattering ignores it: remove it")

    # Complex numbers of one image by pairs of angles, and the pixels of a batch.
    side = backbone.input_size or LARGEST
    needed = 3 * side**2 * (2 * FLOATS * settings.L**settings.order + CPU_BATCH * FLOATS)
    check_room(f"model.backbone.input_size={side} with L={settings.L}", needed)

    how = [dataclasses.asdict(settings), backbone.input_size, LARGEST, like, scattering.VERSION]
    key = digest_of({"network": "scattering", "how": how, "versions": [torch.__version__]})
    version = f"scattering {scattering.VERSION}"
    return Extractor(lambda x: _scattered(x, settings, backbone.input_size, like), None, device, key, version)


def _scattered(x: Tensor, settings: Scattering, size: int | None, like: Shape | None) -> Tensor:
    """Return scattering features [n, d] of images x, uint8 [n, c, h, w], in the shape `like`, resized to side `size`;
    if that is None, to LARGEST if they are larger: more features than that drown in noise."""
    x = x if like is None else to_shape(x, like)
    shape: Shape = tuple(x.shape[1:])  # type: ignore[assignment]
    J, groups = settings.J, settings.groups
    x = x.float() / 255
    if shape[0] == 3 and not settings.colour:
        x = (x * torch.tensor(LUMA, device=x.device)[:, None, None]).sum(1, keepdim=True)

    if size is None and max(shape[1:]) > LARGEST:
        size = LARGEST
    if size is not None:
        from torchvision.transforms.v2 import functional as images  # two seconds, only if it is used

        x = images.center_crop(images.resize(x, [size], antialias=True), [size])
    if min(x.shape[2:]) <= 2**J:
        raise UsageError(
            f"model.backbone.scattering.J={J}: images of {describe(shape)} are too small, their sides must exceed "
            f"2^J={2**J}: lower J, or set model.backbone.input_size"
        )

    coefficients = scattering.scattering(x.flatten(0, 1), J, settings.L, settings.order)  # [n c, K, h, w]
    coefficients = coefficients.unflatten(0, (x.shape[0], -1)).flatten(1, 2)
    if groups is None:
        return coefficients.flatten(1)
    if groups > (K := coefficients.shape[1]):
        raise UsageError(f"model.backbone.scattering.groups={groups}: there are {K} channels: lower it")
    return scattering.grouped(coefficients, groups).flatten(1)


def features(
    what: str,
    x: Tensor,
    extractor: Extractor,
    name: str,
    folder: Path,
    report: Callable[[str], None],
    known: Path | None = None,
) -> Tensor:
    """Return features, float32 [n, d], of images x, uint8 [n, c, h, w], mapped from a file that is written if it is not
    there.

    what: names the images in messages. name: of the network, in the file's name. known: as for `content_of`. UserError
    if features are not finite or all equal: then nothing is kept.
    """
    content = content_of(x, extractor.key, known)
    path = folder / f"{name}-{content}.npy"
    try:
        if not _is_kept(path):  # what is there needs no lock: the folder may be read-only
            private_folder(folder)
            with locked(path.with_suffix(".lock"), f"features of {what}"):
                if not _is_kept(path):
                    if path.exists():
                        say(f"{path} is not what was written, or of an earlier version: it is computed again")
                    _write(path, what, x, extractor, report)
    except OSError as error:
        raise cannot_write(f"features to {folder}", error) from None

    with reading(path, AGAIN):
        return torch.from_numpy(npy_map(path))


def content_of(x: Tensor, key: str, known: Path | None) -> str:
    """Return a digest of images x, uint8 [n, c, h, w], and of the key of an extractor.

    known: a file next to that of the images, train_features.json for train_images.npy, in which such digests are kept,
    as long as that file is the same: to compute one is to read all images.
    """
    kept = dict[str, str]()
    if known is not None:
        stamp = list(overlap.file_state(known.with_name(known.name.replace("features.json", "images.npy"))))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # whatever is wrong, hash again
            before = json.loads(known.read_text(encoding="utf-8"))
            kept = before["digests"] if before["stamp"] == stamp else {}
        if key in kept:
            return kept[key]

    pixels = (np.ascontiguousarray(part.numpy()).data for part in in_parts(x, CPU_BATCH))
    content = digest(chain(pixels, [f"{tuple(x.shape)}{key}"]))

    if known is not None:
        text = json.dumps({"stamp": stamp, "digests": {**kept, key: content}})
        with contextlib.suppress(UserError):  # a folder that cannot be written to, or a full disk
            write_whole(known, text, private=True)
    return content


def _is_kept(path: Path) -> bool:
    """Return whether the features of a file are those that were written. Features of a damaged file would train a
    network, only a worse one."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - END))
        end = file.read()
    return end == MARK + bytes.fromhex(file_digest(path, path.name, END))


def _write(path: Path, what: str, x: Tensor, extractor: Extractor, report: Callable[[str], None]) -> None:
    """Write the file row after row, and not through a memory map, in which a full disk ends the process. Nobody else
    may read it, since the images may be private."""
    refuse_batches(what, x, extractor)

    content = hashlib.blake2b(path.name.encode(), digest_size=16)
    first, finite, alike = None, True, True
    progress = ProgressLine(f"features of {what}", len(x), report)

    with whole(path, private=True) as partial:
        with partial.open("wb") as file, contextlib.closing(embedded(x, extractor)) as batches:
            for rows in batches:
                # The width of the features is known with the first batch.
                if first is None:
                    first, header = rows[:1], io.BytesIO()
                    shape = {"descr": "<f4", "fortran_order": False, "shape": (len(x), rows.shape[1])}
                    np.lib.format.write_array_header_1_0(header, shape)
                    content.update(header.getvalue())
                    file.write(header.getvalue())

                finite = finite and bool(np.isfinite(rows).all())
                alike = alike and bool((rows == first).all())
                content.update(rows.tobytes())
                file.write(rows.tobytes())
                progress.add(len(rows))
            file.write(MARK + content.digest())

        # Such features come from unsuitable weights, so they are not kept.
        if not finite:
            raise UserError(f"the features of {what} are not finite: check model.backbone and its checkpoint")
        if len(x) > 1 and alike:
            raise UserError(f"the features of {what} are all equal: check model.backbone and its checkpoint")


def workers(extractor: Extractor) -> int:
    """Return how many threads each take a batch: on a CPU all, since a layer is too small to be shared."""
    return torch.get_num_threads() if extractor.device.type == "cpu" else 1


def embedded(x: Tensor, extractor: Extractor) -> Generator[np.ndarray]:
    """Yield features, float32 [batch, d], of images x, uint8 [n, c, h, w], in their order. On a CPU, a network computes
    many of them as a traced graph, of which a process keeps the last one."""
    net, how = extractor.net, extractor.prepare
    if isinstance(net, nn.Module) and how is not None and extractor.device.type == "cpu" and len(x) >= TRACED_FROM:
        if extractor.key not in _TRACED:
            _TRACED.clear()
            _TRACED[extractor.key] = faster(net, (len(how.mean), how.size, how.size), CPU_BATCH)
        extractor = extractor._replace(net=_TRACED[extractor.key])

    # a thread for each batch, since the layers of one batch are too small to be shared
    batches = in_parts(x, CPU_BATCH if extractor.device.type == "cpu" else GPU_BATCH)

    def rows(part: Tensor) -> np.ndarray:
        return embed(part, extractor).cpu().numpy().astype(np.float32)

    yield from map_threads(rows, batches) if workers(extractor) > 1 else map(rows, batches)


_TRACED: dict[str, Network] = {}  # by the key of the extractor


def refuse_batches(what: str, x: Tensor, extractor: Extractor) -> None:
    """Raise UserError if batches do not fit in memory, by what one image of them takes."""
    # one image is measured: a batch that is too large would end the process
    device = extractor.device
    with Held(device) as counted:
        embed(torch.zeros_like(x[:1]), extractor)

    batch = CPU_BATCH if device.type == "cpu" else GPU_BATCH
    size, available = counted.peak * min(batch * workers(extractor), len(x)), free(device)
    if size > available:
        raise UserError(
            f"features of {what} need about {gib(size)} of memory and {gib(available)} are free on {device}: "
            "lower model.backbone.input_size, or take a smaller model.backbone"
        )


@torch.no_grad()
def embed(x: Tensor, extractor: Extractor) -> Tensor:
    """Return features [n, d] of images x, uint8 [n, c, h, w]."""
    x = x.to(extractor.device)
    if extractor.prepare is not None:
        x = network_input(x, extractor.prepare)
    return extractor.net(x).flatten(1).float()


def network_input(x: Tensor, how: Preparation) -> Tensor:
    """Return images x, uint8 [n, c, h, w], as a network takes them: grey as RGB, side resized, centre cut out,
    normalised; channels last."""
    from torchvision.transforms.v2 import functional as images

    x = x.expand(-1, len(how.mean), -1, -1) if x.shape[1] == 1 else x
    mode = images.InterpolationMode(how.interpolation)
    x = images.resize(x.float() / 255, [how.resize], mode, antialias=True)
    x = images.center_crop(x, [how.size])

    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (how.mean, how.std))
    return ((x.clamp(0, 1) - mean) / std).contiguous(memory_format=torch.channels_last)
