"""Features of several layers of a frozen network of timm: those of the last one, and of stages before it."""

import inspect

import torch
from torch import Tensor, nn

from pubsel.messages import UsageError

MOST = 5  # stages


class Stages(nn.Module):
    """A network whose features [n, d] are followed by mean and deviation over positions, [n, 2 c], of the outputs
    [n, c, h, w] of at most MOST stages before the last one; of many blocks, such as those of a ViT, evenly spaced ones.
    `width`: how many features these are. size: of images, in pixels.

    UsageError for a network that does not return its stages.
    """

    def __init__(self, net: nn.Module, name: str, channels: int, size: int):
        super().__init__()
        self.net = net
        returns = getattr(net, "forward_intermediates", None)
        if returns is None:
            raise UsageError(
                f"model.backbone.architecture={name}: it does not return its stages: set model.backbone.stages=false"
            )
        # of networks whose stages are several blocks, all blocks
        self.more = {"extra_blocks": True} if "extra_blocks" in inspect.signature(returns).parameters else {}
        with torch.no_grad():
            device = next(net.parameters()).device
            outputs = returns(torch.zeros(1, channels, size, size, device=device), **self.more)[1]
        step = max(1, len(outputs) // (MOST + 1))
        self.chosen = [*range(len(outputs) - 2, -1, -step)][:MOST][::-1]
        self.width = 2 * sum(outputs[i].shape[1] for i in self.chosen)

    def forward(self, x: Tensor) -> Tensor:
        last, outputs = self.net.forward_intermediates(x, indices=self.chosen, **self.more)  # type: ignore[operator]
        parts = [self.net.forward_head(last).flatten(1)]  # type: ignore[operator]
        for output in outputs:
            positions = output.flatten(2)
            parts += [positions.mean(2), positions.std(2, correction=0)]
        return torch.cat(parts, 1)
