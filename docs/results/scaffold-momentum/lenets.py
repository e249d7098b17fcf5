"""LeNet with other activations, poolings, normalisations and initial weights, and momentum as a moving average."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedfleet.algorithms.local import Rule
from fedfleet.algorithms.parts.rules import Averaged, Sgd
from fedfleet.workloads.workload import Model


@dataclass(frozen=True)
class LeNetVariant(Model):
    """LeNet for 28 x 28 grey images; with the defaults it is the built-in lenet. `norm`: GroupNorm of two groups after
    each convolution, or none. `init`: torch's default weights, or Xavier's or He's normal weights with zero biases."""

    activation: Literal["relu", "tanh"] = "relu"
    pool: Literal["max", "average"] = "max"
    norm: Literal["none", "group"] = "none"
    init: Literal["torch", "xavier", "he"] = "torch"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = shape[0]
        for number, (width, padding) in enumerate(((6, 2), (16, 0)), 1):
            layers[f"conv{number}"] = nn.Conv2d(channels, width, 5, padding=padding)
            if self.norm == "group":
                layers[f"norm{number}"] = nn.GroupNorm(2, width)
            layers[f"act{number}"] = self._activation()
            layers[f"pool{number}"] = nn.MaxPool2d(2) if self.pool == "max" else nn.AvgPool2d(2)
            channels = width
        layers["flat"] = nn.Flatten()
        width = 400
        for number, wider in enumerate((120, 84), 1):
            layers[f"fc{number}"] = nn.Linear(width, wider)
            layers[f"act{number + 2}"] = self._activation()
            width = wider
        layers["out"] = nn.Linear(width, classes)
        if self.init != "torch":
            for layer in layers.values():
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    draw = nn.init.xavier_normal_ if self.init == "xavier" else nn.init.kaiming_normal_
                    draw(layer.weight)
                    nn.init.zeros_(layer.bias)
        return nn.Sequential(layers)

    def _activation(self) -> nn.Module:
        return nn.ReLU() if self.activation == "relu" else nn.Tanh()


def ema(lr: float = 0.1, mu: float = 0.9) -> Rule:
    """m <- mu m + (1 - mu) v;  y <- y - lr m: momentum as a moving average, whose steps are 1 - mu times as long."""
    return Averaged(Sgd(lr), mu, nesterov=False)


MODELS = {"lenet_variant": LeNetVariant}
RULES = {"ema": ema}
