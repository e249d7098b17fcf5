"""Random crops and flips of training images, drawn from the key of the step.

The draws for an image depend on its place in the batch. Therefore a client's images are augmented in the same way when
the client runs alone, in a block, and when a method asks the oracle of one step twice. Test images are not augmented.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import counted
from ..workload import Batch, Params
from .images import FromFiles

KINDS = ("crop", "flip")
PAD = 4
"""Pixels of zeros around an image before it is cropped."""


def crop(x: Tensor, key: Tensor, pad: int = PAD) -> Tensor:
    """Images x, (B, C, H, W), each padded with `pad` zeros on every side and cut back to H x W at a random place."""
    size, _, height, width = x.shape
    draws = counted.uniform(counted.key(key, "crop"), 2 * size).view(size, 2)  # image b has draws 2 b and 2 b + 1
    down, right = (draws * (2 * pad + 1)).long().unbind(-1)
    padded = F.pad(x, (pad, pad, pad, pad))
    rows = down.view(-1, 1, 1, 1) + torch.arange(height, device=x.device).view(1, 1, -1, 1)
    columns = right.view(-1, 1, 1, 1) + torch.arange(width, device=x.device).view(1, 1, 1, -1)
    tall = padded.gather(2, rows.expand(*x.shape[:3], padded.shape[3]))
    return tall.gather(3, columns.expand(x.shape))


def flip(x: Tensor, key: Tensor) -> Tensor:
    """Images x, (B, C, H, W), each mirrored left to right with probability 1/2."""
    mirrored = counted.uniform(counted.key(key, "flip"), x.shape[0]) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


@dataclass(frozen=True)
class Augmented(FromFiles):
    """A set of images. `augment`: the augmentations of training images in their order, "crop" or "flip"."""

    augment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not set(self.augment) <= set(KINDS):
            raise ValueError(
                f"augment may have {' and '.join(KINDS)} alone, got augment={list(self.augment)}; leave the others out"
            )

    def losses(self, p: Params, batch: Batch) -> Tensor:
        x = batch["input"]
        for kind in self.augment:
            x = (crop if kind == "crop" else flip)(x, batch["key"])
        return super().losses(p, {**batch, "input": x})
