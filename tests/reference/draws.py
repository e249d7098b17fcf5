"""The spread of the random factors that a weight starts from, and the sizes of factors, with torch's own layers.

Nothing here knows the engine. FedLMT replaces a convolution by two, whose weights are Kaiming's normal: so the two
convolutions are built, and torch itself draws their weights or counts their fans. FedPara's factors are parameters of a
layer of its own, so that torch counts them as parameters of their shapes.
"""

import math

import torch
from torch import nn


def two_layers(shape, rank):
    """The layers that stand for a weight: (first, second), a 1 x w convolution i -> r and an h x 1 one r -> o; of a
    linear layer's weight (o, i) two linear layers."""
    if len(shape) == 2:
        return nn.Linear(shape[1], rank, bias=False), nn.Linear(rank, shape[0], bias=False)
    o, i, h, w = shape
    return nn.Conv2d(i, rank, (1, w), bias=False), nn.Conv2d(rank, o, (h, 1), bias=False)


def deviation(parameter, mode):
    """The standard deviation of torch's Kaiming normal for a ReLU; mode: fan_in or fan_out."""
    return math.sqrt(2 / nn.init._calculate_correct_fan(parameter, mode))


def of_layers(shape, rank, mode):
    """{factor: (number of entries, standard deviation)} of the factors U and V of W = U V^T."""
    first, second = two_layers(shape, rank)
    return {
        "u": (second.weight.numel(), deviation(second.weight, mode)),
        "v": (first.weight.numel(), deviation(first.weight, mode)),
    }


def of_parameters(shapes, mode):
    """The same of factors that are parameters of these shapes, {factor: shape}."""
    made = {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
    return {name: (parameter.numel(), deviation(parameter, mode)) for name, parameter in made.items()}
