"""The convolutional networks of the papers, with BatchNorm, GroupNorm or no normalisation (`norm`).

CNN4, CNN8 and CNN10 use BatchNorm by default, as the code of their paper does. ResNet-18 is in use in both forms.
BatchNorm and GroupNorm have the same number of parameters (one scale and one shift per channel), so the numbers of
parameters are those of the papers in either form.

Max pooling comes before the ReLU that the papers have before it. ReLU keeps the order of numbers, so that values and
gradients have the same bits, and after pooling it has a quarter of the numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..files.vision import torchvision_models
from ..workload import Model
from .dropout import Dropout
from .norms import Norm, normalising

STAGES = {
    "cnn4": ((32,), (64,), (128,), (256,)),
    "cnn8": ((32, 32), (64, 64), (128, 128), (256, 256)),
    "cnn10": ((32, 32), (64, 64), (128, 128), (256, 256), (512, 512)),
}
"""Channels of the convolutions; each group has 2 x 2 max pooling at its end."""

SPREAD = 0.01
"""Standard deviation of the initial weights of convolutions and of the last layer, in the code of Li et al. 2025."""


def images(name: str, shape: tuple[int, ...], least: int) -> None:
    """Raise ValueError unless `shape` is (channels, height, width) and both sides have at least `least` pixels. name:
    the network, for the message."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"{name} needs inputs (channels, height >= {least}, width >= {least}), got shape={shape}; "
            "choose mlp or logistic"
        )


@dataclass(frozen=True)
class Normalised(Model):
    """A network with normalisation layers. `norm`: batch, group or none. `groups`: groups of channels of GroupNorm."""

    norm: Norm = "batch"
    groups: int = 2

    def layer(self, channels: int) -> nn.Module:
        """A normalisation layer for inputs with `channels` channels."""
        return normalising(self.norm, self.groups, channels)


def stacked(name: str, shape: tuple[int, ...], classes: int, net: Normalised) -> nn.Module:
    """The network of STAGES[name]: 3 x 3 convolutions without bias, each with normalisation and ReLU, and a last linear
    layer without bias. Without normalisation, initial weights of deviation SPREAD would make the signal vanish from
    layer to layer; then torch's default weights are used."""
    images(name, shape, 2 ** len(STAGES[name]))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, number = shape[0], 0
    for stage, widths in enumerate(STAGES[name], 1):
        for place, width in enumerate(widths, 1):
            number += 1
            layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers[f"norm{number}"] = net.layer(width)
            if place == len(widths):
                layers[f"pool{stage}"] = nn.MaxPool2d(2)
            layers[f"relu{number}"] = nn.ReLU()
            channels = width
    height, width = (side // 2 ** len(STAGES[name]) for side in shape[1:])
    layers["flat"] = nn.Flatten()
    layers["out"] = nn.Linear(channels * height * width, classes, bias=False)
    for layer in layers.values():
        if isinstance(layer, nn.Conv2d | nn.Linear) and net.norm != "none":
            nn.init.normal_(layer.weight, std=SPREAD)
    return nn.Sequential(layers)


@dataclass(frozen=True)
class Cnn4(Normalised):
    """Four convolutions, 32 to 256 channels: 390,880 parameters for 28 x 28 grey images and 399,136 for 32 x 32 colour
    images, both of 10 classes. Li et al. 2025 (FedMUD)."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return stacked("cnn4", shape, classes, self)


@dataclass(frozen=True)
class Cnn8(Normalised):
    """Eight convolutions, as in the text of Li et al. 2025: the ten of their code without the last two. 1,183,456
    parameters for 32 x 32 colour images of 10 classes."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return stacked("cnn8", shape, classes, self)


@dataclass(frozen=True)
class Cnn10(Normalised):
    """Ten convolutions, 32 to 512 channels, as in the code of Li et al. 2025. 4,719,328 parameters for 32 x 32 colour
    images of 10 classes, 4,765,408 for 100 classes."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return stacked("cnn10", shape, classes, self)


@dataclass(frozen=True)
class FemnistCnn(Model):
    """Two convolutions without padding, pooling, and linear layers of 128 outputs and one output per class: 1,206,590
    parameters for 28 x 28 grey images of 62 classes. Takakura et al. 2025, table 5, with the 2 x 2 pooling that the
    table lacks and its number of parameters needs. `dropout`: rates after the pooling and after the layer of 128; 0 as
    in the source that the table cites, .25 and .5 in other code."""

    dropout: tuple[float, float] = (0.0, 0.0)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        images("femnist_cnn", shape, 6)
        channels, height, width = shape
        flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 3),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 64, 3),
                pool=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                drop1=Dropout(self.dropout[0]),
                flat=nn.Flatten(),
                fc=nn.Linear(flat, 128),
                relu3=nn.ReLU(),
                drop2=Dropout(self.dropout[1]),
                out=nn.Linear(128, classes),
            )
        )


@dataclass(frozen=True)
class ResNet18(Normalised):
    """ResNet-18 with the stem for CIFAR (a 3 x 3 convolution, no pooling) and the mean over the last feature map:
    11,173,962 parameters for colour images of 10 classes, 11,220,132 for 100 classes. He et al. 2016; GroupNorm with
    two groups as in the code of FedExP."""

    norm: Norm = "group"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        images("resnet18", shape, 8)
        resnet: Any = torchvision_models().resnet
        net = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=classes, norm_layer=self.layer)
        net.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
        for layer in net.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = False  # vectorised code must not write in place
        return net
