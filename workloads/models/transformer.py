"""A vision transformer for small images, trained from scratch. Dosovitskiy et al. 2021, arXiv:2010.11929.

Its size is that of Zhang and Gao 2025, table 2: patches of 4 pixels, 6 layers, 8 heads of width 64, inner width 512,
dropout 0.1. The table does not give the width of a token; the code that it follows has 512. As in that code, LayerNorm
comes before attention and before the feed-forward layers.

Figure 4 of Takakura et al. 2025 has the network of the repository omihub777/ViT-CIFAR, which is `{depth: 7, width: 384,
heads: 12, head: 32, mlp: 384, dropout: 0, bias: true, scale: width, last_gelu: true}`. It divides products of queries
and keys by the root of a token's width, and has a second GELU after the feed-forward layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..workload import Model
from .convolutional import Dropout, images


class Attention(nn.Module):
    """Multi-head self-attention of tokens (B, T, width), with LayerNorm before it."""

    def __init__(self, vit: Vit) -> None:
        super().__init__()
        self.heads, inner = vit.heads, vit.heads * vit.head
        self.factor = (vit.width if vit.scale == "width" else vit.head) ** -0.5
        self.norm = nn.LayerNorm(vit.width)
        self.qkv = nn.Linear(vit.width, 3 * inner, bias=vit.bias)
        self.out = nn.Linear(inner, vit.width)
        self.drop_weights, self.drop = Dropout(vit.dropout), Dropout(vit.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)"""
        batch, length = x.shape[:2]
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * self.factor, -1)  # (B, heads, T, T)
        mixed = self.drop_weights(weights) @ v
        return self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them and LayerNorm before them: (B, T, width) -> (B, T, width)."""

    def __init__(self, vit: Vit) -> None:
        super().__init__()
        self.last_gelu = vit.last_gelu
        self.norm = nn.LayerNorm(vit.width)
        self.up, self.down = nn.Linear(vit.width, vit.mlp), nn.Linear(vit.mlp, vit.width)
        self.drop_up, self.drop = Dropout(vit.dropout), Dropout(vit.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop_up(F.gelu(self.up(self.norm(x)))))
        return self.drop(F.gelu(y) if self.last_gelu else y)


class Encoder(nn.Module):
    """The network: patches and a class token with learned positions, layers of attention and feed-forward, and a linear
    layer on the class token: (B, channels, height, width) -> (B, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, vit: Vit) -> None:
        super().__init__()
        side = vit.patch
        self.side = side
        count = (shape[1] // side) * (shape[2] // side)
        self.patches = nn.Linear(shape[0] * side * side, vit.width)
        self.token = nn.Parameter(torch.randn(1, 1, vit.width))
        self.positions = nn.Parameter(torch.randn(1, count + 1, vit.width))
        self.drop = Dropout(vit.dropout)
        self.blocks = nn.ModuleList(nn.ModuleList([Attention(vit), FeedForward(vit)]) for _ in range(vit.depth))
        self.norm = nn.LayerNorm(vit.width)
        self.out = nn.Linear(vit.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        s = self.side
        cut = x.view(batch, channels, height // s, s, width // s, s).permute(0, 2, 4, 3, 5, 1)
        y = self.patches(cut.reshape(batch, -1, s * s * channels))
        y = torch.cat([self.token.expand(batch, -1, -1), y], 1) + self.positions
        y = self.drop(y)
        for attention, forward in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            y = y + attention(y)
            y = y + forward(y)
        return self.out(self.norm(y[:, 0]))


@dataclass(frozen=True)
class Vit(Model):
    """A vision transformer: 9,523,722 parameters for 32 x 32 colour images of 10 classes. `patch`: the side of a patch
    in pixels. `width`: the width of a token. `depth`: the number of layers. `heads`: the number of heads of attention,
    each of width `head`. `mlp`: the inner width of the feed-forward layers. `dropout`: the rate of dropout. `bias`:
    whether queries, keys and values have biases. `scale`: products of queries and keys are divided by the root of the
    width of a head or of a token (width). `last_gelu`: whether GELU follows the second feed-forward layer, too."""

    patch: int = 4
    width: int = 512
    depth: int = 6
    heads: int = 8
    head: int = 64
    mlp: int = 512
    dropout: float = 0.1
    bias: bool = False
    scale: Literal["head", "width"] = "head"
    last_gelu: bool = False

    def __post_init__(self) -> None:
        for name in ("patch", "width", "depth", "heads", "head", "mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} >= 1 must hold, got {name}={getattr(self, name)}")
        if self.scale not in ("head", "width"):
            raise ValueError(f"scale must be head or width, got scale={self.scale!r}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        images("vit", shape, self.patch)
        if shape[1] % self.patch or shape[2] % self.patch:
            raise ValueError(f"patch must divide height and width, got patch={self.patch}, shape={shape}")
        return Encoder(shape, classes, self)
