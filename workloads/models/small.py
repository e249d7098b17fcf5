"""Small networks of plain torch modules. They vectorise under torch.func.vmap: nothing random, nothing in place."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import prod

from torch import nn

from ..workload import Model


@dataclass(frozen=True)
class Logistic(Model):
    """One linear layer."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(OrderedDict(flat=nn.Flatten(), out=nn.Linear(prod(shape), classes)))


@dataclass(frozen=True)
class Mlp(Model):
    """Linear layers with ReLU between them. `hidden`: the widths of the hidden layers."""

    hidden: tuple[int, ...] = (200,)

    def __post_init__(self) -> None:
        if min(self.hidden, default=1) < 1:
            raise ValueError(f"hidden must hold widths of 1 or more, got hidden={self.hidden}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
        width = prod(shape)
        for number, wider in enumerate(self.hidden, 1):
            layers[f"fc{number}"] = nn.Linear(width, wider)
            layers[f"relu{number}"] = nn.ReLU()
            width = wider
        layers["out"] = nn.Linear(width, classes)
        return nn.Sequential(layers)


@dataclass(frozen=True)
class LeNet(Model):
    """LeNet-5 with ReLU and max pooling: 61,706 parameters for 28 x 28 grey images of 10 classes. LeCun et al. 1998.

    A convolution of 6 channels (5 x 5, padding 2), pooling, one of 16 channels (5 x 5), pooling, and linear layers of
    120, 84 and `classes` outputs.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 3 or min(shape[1:]) < 12:
            raise ValueError(
                f"lenet needs inputs (channels, height >= 12, width >= 12), got shape={shape}; choose mlp or logistic"
            )
        channels, height, width = shape
        flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 6, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flat=nn.Flatten(),
                fc1=nn.Linear(flat, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                out=nn.Linear(84, classes),
            )
        )
