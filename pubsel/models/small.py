"""The small networks of the GSD and GEP papers, and wide residual networks. Each takes (channels, height, width,
classes)."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pubsel.gradients.standardised import StandardConv2d


def _flat(features: nn.Module, channels: int, height: int, width: int) -> int:
    with torch.no_grad():
        return features(torch.zeros(1, channels, height, width)).numel()


def _two_convolutions(channels: int) -> OrderedDict[str, nn.Module]:
    """Return the convolutional part of GSD's Table 5a, with pooling at stride 1: 512 outputs for 28 x 28 images."""
    return OrderedDict(
        conv1=nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2, stride=1),
        conv2=nn.Conv2d(16, 32, 4, stride=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2, stride=1),
        flatten=nn.Flatten(),
    )


def fmnist_cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the network of GSD, Table 5a, with 26,010 parameters for Fashion-MNIST: its pooling at stride 1, where the
    table says 2."""
    features = _two_convolutions(channels)
    width_flat = _flat(nn.Sequential(features), channels, height, width)
    head = OrderedDict(fc1=nn.Linear(width_flat, 32), relu3=nn.ReLU(), fc2=nn.Linear(32, classes))
    return nn.Sequential(features | head)


def mnist_cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the network of GEP, Section 4: two convolutions with max-pooling and one linear layer; the paper gives no
    sizes, so those of GSD's Table 5a are taken: 14,394 parameters for MNIST."""
    features = _two_convolutions(channels)
    width_flat = _flat(nn.Sequential(features), channels, height, width)
    return nn.Sequential(features | OrderedDict(fc=nn.Linear(width_flat, classes)))


def probe(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the network of GSD, Table 5b: 30,782 parameters at 3 x 224 x 224 and 14 classes. No ReLU (the authors'
    code)."""
    features = OrderedDict(
        conv1=nn.Conv2d(channels, 64, 8, stride=5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(64, 16, 4, stride=3),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    width_flat = _flat(nn.Sequential(features), channels, height, width)
    return nn.Sequential(features | OrderedDict(fc=nn.Linear(width_flat, classes)))


def linear(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return multinomial logistic regression on the pixels."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(channels * height * width, classes)))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(4, width, affine=False)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: subsample, normalise, pad channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        self.stride, self.padding = stride, outputs - inputs
        self.shortcut = _norm(inputs) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(nn.functional.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x[:, :, :: self.stride, :: self.stride])
            x = nn.functional.pad(x, (0, 0, 0, 0, self.padding // 2, self.padding - self.padding // 2))
        return nn.functional.relu(x + y)


class ResNet20(nn.Module):
    """He et al. 2016 (arXiv:1512.03385), Section 4.2, with GroupNorm as in GEP: 268,346 parameters at 3 channels and
    10 classes."""

    def __init__(self, channels: int, height: int, width: int, classes: int, filters: int = 16):
        super().__init__()
        a, b, c = filters, 2 * filters, 4 * filters
        self.conv1 = nn.Conv2d(channels, a, 3, padding=1, bias=False)
        self.norm1 = _norm(a)
        self.stage1 = nn.Sequential(Block(a, a, 1), Block(a, a, 1), Block(a, a, 1))
        self.stage2 = nn.Sequential(Block(a, b, 2), Block(b, b, 1), Block(b, b, 1))
        self.stage3 = nn.Sequential(Block(b, c, 2), Block(c, c, 1), Block(c, c, 1))
        self.fc = nn.Linear(c, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean((2, 3)))


class Unit(nn.Module):
    """ReLU, GroupNorm in 16 groups and a convolution with standardised filters."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        super().__init__()
        self.norm = nn.GroupNorm(16, inputs)
        self.conv = StandardConv2d(inputs, outputs, size, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(nn.functional.relu(x)))


class WideBlock(nn.Module):
    """Two such units of 3x3 convolutions, and a shortcut: the first of a stage is one more unit, 1x1."""

    def __init__(self, inputs: int, outputs: int, first: bool, stride: int = 1):
        super().__init__()
        self.unit1 = Unit(inputs, outputs, 3, stride)
        self.unit2 = Unit(outputs, outputs, 3)
        self.shortcut = Unit(inputs, outputs, 1, stride) if first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.unit2(self.unit1(x)) + self.shortcut(x)


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    others = [WideBlock(outputs, outputs, False) for _ in range(blocks - 1)]
    return nn.Sequential(WideBlock(inputs, outputs, True, stride), *others)


class WideResNet(nn.Module):
    """Wide residual network of De, Berrada, Hayes, Smith, Balle (arXiv:2204.13650): that of Zagoruyko and Komodakis
    (arXiv:1605.07146) with GroupNorm and standardised filters. With depth 16 and 4 times the filters, it has 2,753,818
    parameters at 3 channels and 10 classes.

    As in the authors' code, GroupNorm follows the ReLU, and each convolution has a bias. Unlike there, a convolution of
    stride 2 pads its input on all sides, not on two, and weights are drawn from normal distributions that are not cut
    off.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int, depth: int, factor: int):
        super().__init__()
        blocks, (a, b, c) = (depth - 4) // 6, (16 * factor, 32 * factor, 64 * factor)
        self.conv1 = StandardConv2d(channels, 16, 3)
        self.stage1, self.stage2 = _stage(16, a, blocks, 1), _stage(a, b, blocks, 2)
        self.stage3 = _stage(b, c, blocks, 2)
        self.norm = nn.GroupNorm(16, c)
        self.fc = nn.Linear(c, classes)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear")
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.conv1(x))))
        return self.fc(self.norm(nn.functional.relu(x)).mean((2, 3)))


NETWORKS: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "fmnist_cnn": fmnist_cnn,
    "mnist_cnn": mnist_cnn,
    "probe": probe,
    "linear": linear,
    "resnet20": ResNet20,
    "wrn_10_1": partial(WideResNet, depth=10, factor=1),
    "wrn_16_4": partial(WideResNet, depth=16, factor=4),
    "wrn_40_4": partial(WideResNet, depth=40, factor=4),
}
