"""Crops and flips of a batch of training images, all rows at once, drawn from the step's key.

Row b's draws are those of place b in the batch: a client's images are varied alike alone, in a block, and when the
same step's oracle is asked twice. Test images are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import counted
from .base import Batch, Params
from .images import FromFiles

KINDS = ("crop", "flip")
PAD = 4


def crop(x: Tensor, key: Tensor, pad: int = PAD) -> Tensor:
    """(B, C, H, W), each padded by zeros and cut back to H x W at a place of its own."""
    size, _, height, width = x.shape
    draws = counted.uniform(counted.key(key, "crop"), 2 * size).view(size, 2)  # rows b, whatever B is
    down, right = (draws * (2 * pad + 1)).long().unbind(-1)
    padded = F.pad(x, (pad, pad, pad, pad))
    rows = down.view(-1, 1, 1, 1) + torch.arange(height, device=x.device).view(1, 1, -1, 1)
    columns = right.view(-1, 1, 1, 1) + torch.arange(width, device=x.device).view(1, 1, 1, -1)
    tall = padded.gather(2, rows.expand(*x.shape[:3], padded.shape[3]))
    return tall.gather(3, columns.expand(x.shape))


def flip(x: Tensor, key: Tensor) -> Tensor:
    """(B, C, H, W), each mirrored left to right with probability a half."""
    mirrored = counted.uniform(counted.key(key, "flip"), x.shape[0]) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


@dataclass(frozen=True)
class Augmented(FromFiles):
    """`augment`: what is done to training images, of "crop" (4 pixels of padding) and "flip"."""

    augment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.augment) - set(KINDS):
            raise ValueError(f"augment must hold {' and '.join(KINDS)}, got {sorted(unknown)}")

    def losses(self, p: Params, batch: Batch) -> Tensor:
        x = batch["input"]
        for kind in self.augment:
            x = (crop if kind == "crop" else flip)(x, batch["key"])
        return super().losses(p, {**batch, "input": x})
