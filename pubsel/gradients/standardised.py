"""Convolutions whose filters are standardised (Qiao, Wang, Liu, Shen, Yuille: Micro-Batch Training with Batch-Channel
Normalization and Weight Standardization, 2019, arXiv:1903.10520), and their per-example gradients.

All examples meet the same filters, so each example's gradient of the weights is its gradient of the filters, brought
through one linear map.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn

SMALLEST = 1e-4  # squared norm of a centred filter that is still brought to norm 1


class StandardConv2d(nn.Conv2d):
    """Convolution whose filters are centred and scaled to norm `gain` (Brock, De, Smith 2021, arXiv:2101.08692)."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        super().__init__(inputs, outputs, size, stride, padding=size // 2)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        centred, scale, _ = filters_of(self)
        filters = (centred * (self.gain * scale)[:, None]).view_as(self.weight)
        return self._conv_forward(x, filters, self.bias)


def is_standardised(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a layer is such a convolution, or one of timm (which is slow to import), but for those that pad
    their input themselves."""
    of_timm = type(layer).__module__ == "timm.layers.std_conv" and not type(layer).__name__.endswith("Same")
    return isinstance(layer, StandardConv2d) or of_timm


def filters_of(layer: nn.Conv2d) -> tuple[Tensor, Tensor, Tensor]:
    """Return the filters less their means [o, size]; the factor that scales each [o], without its gain; and minus the
    derivative of its logarithm by half the squared norm of the filter [o]."""
    filters = layer.weight.flatten(1)
    centred = filters - filters.mean(1, keepdim=True)
    squares = centred.square().sum(1)
    if isinstance(layer, StandardConv2d):
        scale = squares.clamp(min=SMALLEST).rsqrt()
        return centred, scale, scale.square() * (squares > SMALLEST)
    size, eps, fixed = filters.shape[1], float(layer.eps), float(getattr(layer, "scale", 1.0))  # type: ignore[arg-type]
    scale = (squares / size + eps).rsqrt()
    return centred, fixed * scale, scale.square() / size


@torch.no_grad()
def to_weights(layer: nn.Conv2d, out: Tensor, gain: Tensor | None) -> None:
    """Bring gradients of the standardised filters, `out` [n, *shape of the weight], to those of the weights, in place,
    and write those of the gains into `gain`, [n, *its shape]."""
    centred, scale, slope = filters_of(layer)
    gains = getattr(layer, "gain", torch.ones_like(scale)).flatten()
    # remove the components along a constant filter and along the filter, by batched products, which are fastest
    rows = out.flatten(2).transpose(0, 1)  # [o, n, size]
    along = torch.bmm(torch.stack([torch.ones_like(centred), centred], 1), rows.mT)  # [o, 2, n]
    if gain is not None:
        gain.copy_((along[:, 1] * scale[:, None]).T.reshape(gain.shape))
    back = torch.stack([torch.full_like(centred, 1 / centred.shape[1]), slope[:, None] * centred], 1)
    rows.baddbmm_(along.mT, back, alpha=-1).mul_((gains * scale)[:, None, None])
