"""Vectors of words: trained with the model, or frozen, in which case they are no part of it and nobody sends them.

Frozen vectors are a file's of GloVe's form (Pennington, Socher, Manning 2014), where a word that is not in it is the
zero vector, or else drawn once and for all from the standard normal law.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from . import counted
from .cache import cache_folder, digest, write_whole
from .roots import damaged

PAD = 0


class Fixed(nn.Module):
    """`table`: (words, width); not a parameter."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        if self.table.device != tokens.device:
            self.table = self.table.to(tokens.device)
        return F.embedding(tokens, self.table)


class Embedded(nn.Module):
    """Numbers (B, T) -> vectors -> a model of sequences; `masked`: which places are padding is told to it."""

    def __init__(self, embedding: nn.Module, body: nn.Module, masked: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.masked = embedding, body, masked

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(next(self.body.parameters()).dtype)
        return self.body(x, tokens != PAD) if self.masked else self.body(x)


def drawn(words: int, width: int) -> Tensor:
    """(words, width), the same for every seed."""
    return counted.normal(counted.key("frozen words"), words * width).view(words, width).float()


def vectors(path: Path, known: dict[str, int], width: int) -> Iterable[tuple[int, np.ndarray]]:
    """(number, vector) of the known words in a file of "word number number …" lines."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                word, _, rest = line.rstrip().partition(" ")
                if word in known:
                    vector = np.array(rest.split(" "), dtype=np.float32)
                    if len(vector) != width:
                        raise ValueError(f"vectors of {len(vector)} numbers, where embedding={width}")
                    yield known[word], vector
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def read(path: Path, known: Callable[[], dict[str, int]], shape: tuple[int, int], of: str) -> np.ndarray:
    """(words, width) float32, NaN where a word has no vector; from the cache but for the first time, since such files
    have gigabytes. known: word -> row; of: what its words depend on."""
    try:
        about = path.stat()
    except OSError as error:
        raise damaged(path, error) from error
    settings = f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {shape} {of}"
    target = cache_folder() / "vectors" / f"{digest([], settings)}.npy"
    if not target.is_file():
        table = np.full(shape, np.nan, dtype=np.float32)
        for number, vector in vectors(path, known(), shape[1]):
            table[number] = vector
        whole = io.BytesIO()
        np.save(whole, table, allow_pickle=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, whole.getvalue())
    return np.load(target, allow_pickle=False)
