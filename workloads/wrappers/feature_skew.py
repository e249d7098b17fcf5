"""Any workload of images that every client sees in its own way: turned, blurred, brighter, or with a cast of colour.

    rotate   a client's images are turned counter-clockwise by one of these angles. Ghosh et al. 2020 (IFCA),
             arXiv:2006.04088, turn MNIST and CIFAR by multiples of 90 degrees, which here move pixels and change none
    blur     a Gaussian filter, whose standard deviation in pixels each client draws from [0, blur]
    gain     a factor for each channel, which each client draws from [1 - gain, 1 + gain]: the brightness of grey
             images, and a cast of colour images

The images are changed once, when the data are read, so that local steps take no longer. Bytes stay in 0 to 255. Noise
that grows with the number of the client, as NIID-Bench has it (Li et al. 2022), is `features` of the workload noisy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import counted
from ..settings import check_finite_from
from ..workload import Split
from .wrapped import OtherRows


class Views(NamedTuple):
    """How each of N clients sees images of C channels."""

    angle: np.ndarray  # (N,) degrees
    blur: np.ndarray  # (N,) standard deviation in pixels
    gain: np.ndarray  # (N, C) factors


@dataclass(frozen=True)
class FeatureSkew(OtherRows):
    """`of`: the inner workload. `rotate`: angles in degrees, each of which equally many clients have. `blur`: the
    largest standard deviation of a filter, in pixels. `gain`: how far a channel's factor may be from 1. `test`: test
    rows that belong to no client are as they are (clean), or each is seen as a client drawn at random sees it
    (mixed)."""

    rotate: tuple[float, ...] = ()
    blur: float = 0.0
    gain: float = 0.0
    test: Literal["clean", "mixed"] = "clean"

    def __post_init__(self) -> None:
        check_finite_from(self, blur=0)
        if not 0 <= self.gain <= 1:
            raise ValueError(f"0 <= gain <= 1 must hold, got gain={self.gain}")
        if not all(math.isfinite(angle) for angle in self.rotate):
            raise ValueError(f"rotate must hold finite angles in degrees, got rotate={self.rotate}")
        if self.test not in ("clean", "mixed"):
            raise ValueError(f"test must be clean or mixed, got test={self.test!r}")

    def check(self) -> None:
        super().check()
        shape = getattr(self.of, "shape", ())
        if len(shape) != 3 or min(shape[1:]) < 2:
            raise ValueError(
                f"feature_skew needs images, (channels, height, width), got inputs of the shape {tuple(shape)}; take "
                "noisy with features for other inputs"
            )

    def views(self, seed: int, clients: int) -> Views:
        random = counted.numpy_generator(seed, "feature skew")
        which = random.permutation(clients)
        angle = np.array(self.rotate or (0.0,), dtype=np.float64)[which % max(1, len(self.rotate))]
        blur = random.uniform(0, self.blur, clients)
        return Views(angle, blur, random.uniform(1 - self.gain, 1 + self.gain, (clients, self.shape[0])))

    def differences(self, seed: int, clients: int) -> dict[str, np.ndarray]:
        views, found = self.views(seed, clients), dict(self.of.differences(seed, clients))
        if self.rotate:
            found["rotation, degrees"] = views.angle
        if self.blur:
            found["blur, pixels"] = views.blur
        if self.gain:
            channels = [f" of channel {c}" for c in range(self.shape[0])] if self.shape[0] > 1 else [""]
            found |= {f"gain{name}": views.gain[:, c] for c, name in enumerate(channels)}
        return found

    def split(self, seed: int, clients: int) -> Split:
        split, views = self.of.split(seed, clients), self.views(seed, clients)
        rows, offsets = split.client_index.rows, split.client_index.offsets
        train = seen(split.train["input"], ((i, rows[b:e]) for i, (b, e) in enumerate(pairwise(offsets))), views)
        test = split.test["input"]
        if self.test == "mixed":
            owner = counted.numpy_generator(seed, "feature skew", "test").integers(0, clients, len(test))
            test = seen(test, ((client, np.flatnonzero(owner == client)) for client in np.unique(owner)), views)
        return split._replace(train={**split.train, "input": train}, test={**split.test, "input": test})


def seen(images: np.ndarray, of_clients: Iterable[tuple[int, np.ndarray]], views: Views) -> np.ndarray:
    """(n, C, H, W): the images as clients see them. of_clients: (client, its rows)."""
    found = images.copy()
    for client, rows in of_clients:
        x = torch.from_numpy(images[rows])
        y = turned(x.float(), views.angle[client] % 360)
        y = blurred(y, views.blur[client]) * torch.from_numpy(views.gain[client]).float().view(-1, 1, 1)
        found[rows] = (y.round().clamp(0, 255) if x.dtype == torch.uint8 else y).to(x.dtype).numpy()
    return found


def turned(x: Tensor, angle: float) -> Tensor:
    """Images (n, C, H, W), turned counter-clockwise about their centre by `angle` degrees, 0 to 360. Places that were
    outside are 0. Quarter turns of squares, and half turns, move pixels; all else is bilinear."""
    turns, rest = divmod(angle, 90)
    if rest == 0 and (turns % 2 == 0 or x.shape[2] == x.shape[3]):
        return torch.rot90(x, int(turns), (2, 3))
    cos, sin, (height, width) = math.cos(math.radians(angle)), math.sin(math.radians(angle)), x.shape[2:]
    # Coordinates run from -1 to 1 along either side, whatever its length.
    back = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(back.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bilinear", "zeros", align_corners=False)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Images (n, C, H, W) through a Gaussian filter of this standard deviation, cut off after three of them; pixels
    beyond the edge are those at the edge."""
    reach = math.ceil(3 * sigma)
    if reach == 0:
        return x
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    weights, (height, width) = (weights / weights.sum()).tolist(), x.shape[2:]
    # Sums of shifted images add up in one order on every machine, which a convolution need not do.
    x = F.pad(x, (0, 0, reach, reach), "replicate")
    x = sum((w * x[:, :, k : k + height] for k, w in enumerate(weights)), x.new_zeros(()))
    x = F.pad(x, (reach, reach, 0, 0), "replicate")
    return sum((w * x[..., k : k + width] for k, w in enumerate(weights)), x.new_zeros(()))
