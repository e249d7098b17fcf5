"""A small language model: a decoder of a transformer with normalisation before each part, and no biases.

    h <- E[token] (+ P[place])
    for each block    h <- h + O softmax(mask(q k^T / sqrt(d))) v,    q, k, v = Q n, K n, V n of n = norm(h)
                      h <- h + Down gelu(Up norm(h))
    logits            norm(h) E^T, or those of a head of its own

Each place sees itself and the places before it. Radford et al. 2019; rotary positions: Su et al. 2021,
arXiv:2104.09864; RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467; groups of heads with common keys and values:
Ainslie et al. 2023, arXiv:2305.13245. Matrices and embeddings are drawn from N(0, 0.02^2), O and Down from
N(0, 0.02^2 / (2 depth)), as in nanoGPT, whose places of dropout these are, too: the embeddings, the weights of
attention, and what a block adds. For `muon_adamw`, the patterns `*embed*` and `head*` name what is no hidden
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..workload import Model
from .attention import attended
from .dropout import Dropout
from .head import WITHOUT_HEAD, Head
from .narrow import as_held, is_linear, linear
from .published import load, stored_in
from .stored import StoredTensors

EPS = 1e-5
STD = 0.02


def normalisation(kind: str, width: int) -> nn.Module:
    return nn.LayerNorm(width, EPS, bias=False) if kind == "layer" else nn.RMSNorm(width, EPS)


def dropping(rate: float) -> nn.Module:
    """Dropout whose draws follow from the key of the batch, or nothing for the rate 0."""
    return Dropout(rate) if rate else nn.Identity()


class Places(NamedTuple):
    """The places of rows of T tokens. `position`: (T,), or (B, 1, T) where rows differ. `unseen`: (T, T), or
    (B, 1, T, T): whether a place does not see another one."""

    position: Tensor
    unseen: Tensor

    @staticmethod
    def of(tokens: Tensor) -> tuple[Tensor, Places]:
        """(tokens (B, T), their places), from tokens (B, T), or from (B, 3, T): tokens, the document of each place, -1
        for padding, and its position in the document. Places see those before them, in their document alone."""
        count = torch.arange(tokens.shape[-1], device=tokens.device)
        later = torch.ones(len(count), len(count), dtype=torch.bool, device=tokens.device).triu(1)
        if tokens.ndim == 2:
            return tokens, Places(count, later)
        tokens, document, position = tokens.unbind(1)
        apart = (document.unsqueeze(-1) != document.unsqueeze(-2)) | (document < 0).unsqueeze(-1)
        itself = count.unsqueeze(-1) == count
        return tokens, Places(position.unsqueeze(1), ((later | apart) & ~itself).unsqueeze(1))


def rotated(x: Tensor, theta: float, position: Tensor) -> Tensor:
    """(…, T, d): the pairs (x_j, x_{j + d/2}) of a vector are turned by the angle position theta^(-2j/d)."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    rates = theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angles = position.to(wide).unsqueeze(-1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Attention to the places before, and two layers at each place: (B, T, width) -> (B, T, width)."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.heads, self.theta = gpt.heads, gpt.theta if gpt.positions == "rope" else None
        self.groups, width = gpt.kv_heads or gpt.heads, gpt.width
        inner, keys = gpt.inner or 4 * width, width // gpt.heads * self.groups
        self.norm1 = normalisation(gpt.norm, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = normalisation(gpt.norm, width)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        for layer in (self.q, self.k, self.v, self.out, self.up, self.down):
            last = layer is self.out or layer is self.down
            nn.init.normal_(layer.weight, std=STD / math.sqrt(2 * gpt.depth) if last else STD)
        self.drop_weights, self.drop_out, self.drop_down = (dropping(gpt.dropout) for _ in range(3))

    def forward(self, h: Tensor, places: Places) -> Tensor:
        h = h + self.drop_out(self.out(self.attended(self.norm1(h), places)))
        return h + self.drop_down(self.down(F.gelu(self.up(self.norm2(h)))))

    def attended(self, n: Tensor, places: Places) -> Tensor:
        batch, length = n.shape[:2]
        q, k, v = (
            layer(n).view(batch, length, heads, -1).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )  # (B, heads, T, d)
        if self.theta is not None:
            q, k = (rotated(x, self.theta, places.position) for x in (q, k))
        if self.groups < self.heads:
            k, v = (x.repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        return attended(q, k, v, places.unseen, self.drop_weights)


class Decoder(nn.Module):
    """The network: tokens (B, T), or (B, 3, T) as in `Places.of`, -> logits (B, T, vocabulary)."""

    def __init__(self, length: int, vocabulary: int, gpt: Gpt) -> None:
        super().__init__()
        embeddings = {"tokens": nn.Embedding(vocabulary, gpt.width)}
        if gpt.positions == "learned":
            embeddings["positions"] = nn.Embedding(length, gpt.width)
        self.embed = nn.ModuleDict(embeddings)
        self.drop_embeddings = dropping(gpt.dropout)
        self.blocks = nn.ModuleList(Block(gpt) for _ in range(gpt.depth))
        self.norm = normalisation(gpt.norm, gpt.width)
        self.head = None if gpt.tied else nn.Linear(gpt.width, vocabulary, bias=False)
        for layer in (*embeddings.values(), *filter(None, [self.head])):
            nn.init.normal_(layer.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens, places = Places.of(tokens)
        h = self.embed["tokens"](tokens)
        if "positions" in self.embed:
            own, position = self.embed["positions"], places.position
            h = h + own(position if position.ndim == 1 else position.squeeze(1) % tokens.shape[-1])
        h = self.drop_embeddings(h)
        for block in self.blocks:
            h = block(h, places)
        h = self.norm(h)
        if WITHOUT_HEAD.get():
            return h
        return linear(h, as_held(self.embed["tokens"], "weight"), None) if self.head is None else self.head(h)

    def last_layer(self) -> Head | None:
        """See `Pretrained`'s classes."""
        layer: Any = self.embed["tokens"] if self.head is None else self.head
        return Head(as_held(layer, "weight")) if self.head is None or is_linear(layer) else None


@dataclass(frozen=True)
class Gpt(Model):
    """A decoder of a transformer for tokens. `width`: the width of a token. `depth`: the number of blocks. `heads`: the
    number of heads of attention. `kv_heads`: the number of heads for keys and values, null for as many. `inner`: the
    inner width of a block's layers, null for 4 width. `positions`: learned, or rope for rotary ones. `theta`: the
    base of the rotary angles. `norm`: layer or rms. `tied`: whether the embedding of tokens is the last layer too.
    `dropout`: the share of numbers that training sets to zero, see the module.
    `weights`: a safetensors file with initial weights, such as the model of another run."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    kv_heads: int | None = None
    inner: int | None = None
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    tied: bool = True
    theta: float = 10_000.0
    dropout: float = 0.0
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "kv_heads", "inner"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} >= 1 must hold, got {name}={value}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got width={self.width}, heads={self.heads}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(f"rope needs heads of even width, got width={self.width}, heads={self.heads}")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"1 < theta < infinity must hold, got theta={self.theta}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"0 <= dropout < 1 must hold, got dropout={self.dropout}")

    def files(self) -> Mapping[str, Path]:
        return {} if self.weights is None else {"weights": Path(self.weights).expanduser()}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) not in (1, 2) or shape[:-1] not in ((), (3,)):
            raise ValueError(f"gpt needs tokens (length,), got shape={shape}; choose it for the workload characters")
        network = Decoder(shape[-1], classes, self)
        if self.weights is not None:
            load(network, Path(self.weights).expanduser())
        return network

    def stored(self, shape: tuple[int, ...], classes: int) -> StoredTensors | None:
        if self.weights is None:
            return None
        with torch.device("meta"):
            network = Decoder(shape[-1], classes, self)
        return stored_in(Path(self.weights).expanduser(), network)
