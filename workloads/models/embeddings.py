"""Word embeddings: trained with the model, or frozen. Frozen vectors are not part of the model and are never sent.

Frozen vectors come from a file in the format of GloVe (Pennington, Socher, Manning 2014), and a word that the file does
not have is the zero vector. Without a file they are drawn from the standard normal distribution.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from .. import counted
from ..files.cache import cache_folder, digest, read_sealed, write_sealed
from ..files.roots import damaged

PAD = 0
"""The number of the padding in a text."""


class Fixed(nn.Module):
    """An embedding whose `table`, (words, width), is not a parameter."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        if self.table.device != tokens.device:
            self.table = self.table.to(tokens.device)
        return F.embedding(tokens, self.table)


class Embedded(nn.Module):
    """An embedding followed by a model of sequences: word numbers (B, T) -> logits. `masked`: whether the model also
    gets a mask (B, T), true at the places that are not padding."""

    def __init__(self, embedding: nn.Module, body: nn.Module, masked: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.masked = embedding, body, masked

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(next(self.body.parameters()).dtype)
        return self.body(x, tokens != PAD) if self.masked else self.body(x)


def drawn(words: int, width: int) -> Tensor:
    """(words, width) float32: random vectors, the same in every run."""
    return counted.normal(counted.key("frozen words"), words * width).view(words, width).float()


def vectors(path: Path, known: dict[str, int], width: int) -> Iterable[tuple[int, np.ndarray]]:
    """(row, vector (width,)) of each word of `known` in a file of lines "word number number …". known: word -> row."""
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
    """The vectors of a file as an array of `shape` (words, width), float32; NaN where a word has no vector.

    Such files have gigabytes, so the result is cached. known: function that returns word -> row. of: text that
    identifies the words in the cache.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise damaged(path, error) from error
    settings = f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {shape} {of}"
    target = cache_folder() / "vectors" / f"{digest([], settings)}.npy"
    data = read_sealed(target)
    if data is None:
        table = np.full(shape, np.nan, dtype=np.float32)
        for number, vector in vectors(path, known(), shape[1]):
            table[number] = vector
        whole = io.BytesIO()
        np.save(whole, table, allow_pickle=False)
        data = whole.getvalue()
        write_sealed(target, data)
    return np.load(io.BytesIO(data), allow_pickle=False)
