"""Images of one shape as images of another: grey or colour, scaled to cover, cut at the centre."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pubsel.messages import UsageError
from pubsel.settings.keys import Convert

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
CHUNK = 128  # images in floating point at once
Shape = tuple[int, int, int]  # channels, height, width


def describe(shape: Sequence[int]) -> str:
    """Return a shape as people write it: height x width x channels."""
    channels, height, width = shape
    return f"{height}x{width}x{channels}"


def to_shape(x: Tensor, shape: Shape) -> Tensor:
    """Return images [n, c, h, w] (uint8) in `shape`, in the same order.

    Colour becomes grey by the ITU-R 601 luma, grey becomes colour by repetition. If the size differs, the image is
    scaled (bilinear with antialias) until it covers the target, and what extends beyond it is cut off evenly on both
    sides.
    Values are rounded to uint8 once, at the end. UsageError for channels other than 1 and 3.
    """
    if tuple(x.shape[1:]) == shape:
        return x
    if x.shape[1] != shape[0] and {x.shape[1], shape[0]} != {1, 3}:
        raise UsageError(f"pair.convert: cannot turn {x.shape[1]} channels into {shape[0]}, only grey and colour")
    if len(x) == 0:
        return x.new_empty((0, *shape))
    return torch.cat([_convert(part, shape) for part in x.split(CHUNK)])


def _convert(x: Tensor, shape: Shape) -> Tensor:
    channels, height, width = shape
    values = x.float()  # [n, c, h, w]
    if x.shape[1] == 3 and channels == 1:
        values = (values * torch.tensor(LUMA, device=x.device)[:, None, None]).sum(1, keepdim=True)  # [n, 1, h, w]

    if x.shape[2:] != (height, width):
        scale = max(height / x.shape[2], width / x.shape[3])
        rows = max(height, math.floor(x.shape[2] * scale + 0.5))
        columns = max(width, math.floor(x.shape[3] * scale + 0.5))
        values = F.interpolate(values, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)

        # The scaled image covers the target; only its centre is kept.
        top, left = (rows - height) // 2, (columns - width) // 2
        values = values[:, :, top : top + height, left : left + width]

    # Only now to uint8: rounding after each step would add up.
    values = values.round().clamp(0, 255).to(torch.uint8)
    return values.expand(-1, channels, -1, -1).contiguous()  # [n, channels, height, width]


def converted(name: str, x: Tensor, shape: Shape, how: Convert) -> tuple[Tensor, tuple[str, ...]]:
    """Return images of dataset `name` in `shape`, and a note if they were changed. With `exact` any difference is a
    UsageError."""
    have: Shape = tuple(x.shape[1:])  # type: ignore[assignment]
    if have == shape:
        return x, ()
    if how == Convert.exact:
        raise UsageError(
            f"convert=exact: {name} has images {describe(have)}, the private data {describe(shape)}: "
            f"use convert=resize (pair.convert in a run), or public data of the same shape"
        )
    return to_shape(x, shape), (f"{name} {describe(have)} -> {describe(shape)}, scaled to cover, bilinear",)
