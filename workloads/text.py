"""What text sets share: words, a vocabulary, rows of numbers, an embedding that is trained from scratch.

Words are runs of letters, digits and apostrophes in lower case, and single marks `! ? . ,`. The vocabulary is the
training texts' most frequent words (of equals, the first by alphabet) after two of our own: 0, padding, and 1, any
other word. A text keeps its first `length` words; one without any is a single 1. The embedding has `vocabulary` rows
however few words there are, so that the model's shape does not depend on the data.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .base import Batch, Columns, Model, Partition
from .images import FromFiles
from .partitions import Iid
from .recurrent import Rnn
from .roots import Found, damaged

WORD = re.compile(r"[a-z0-9']+|[!?.,]")
PAD, OTHER = 0, 1


class Rows(NamedTuple):
    """`clients`: whose each text is by nature, None where the set does not say."""

    texts: Sequence[str]
    labels: np.ndarray  # (n,) int64
    clients: Sequence[str] | None = None


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], size: int) -> dict[str, int]:
    """word -> number, 2 … size - 1, the most frequent first."""
    counts = Counter(word for text in texts for word in words(text))
    first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - 2]
    return {word: number for number, (word, _) in enumerate(first, 2)}


def numbered(texts: Sequence[str], vocabulary: dict[str, int], length: int) -> np.ndarray:
    """(n, length) int32, padded at the end."""
    out = np.full((len(texts), length), PAD, dtype=np.int32)
    for row, text in enumerate(texts):
        own = [vocabulary.get(word, OTHER) for word in islice(words(text), length)] or [OTHER]
        out[row, : len(own)] = own
    return out


def columns_of(rows: Rows, tokens: np.ndarray) -> Columns:
    columns = {"input": tokens, "label": np.asarray(rows.labels, dtype=np.int64)}
    if rows.clients is None:
        return columns
    return {**columns, "client": np.unique(np.asarray(rows.clients), return_inverse=True)[1].astype(np.int64)}


class Embedded(nn.Module):
    """Numbers (B, T) -> vectors -> a model of sequences; `masked`: which places are padding is told to it."""

    def __init__(self, vocabulary: int, width: int, body: nn.Module, masked: bool) -> None:
        super().__init__()
        self.embedding, self.body, self.masked = nn.Embedding(vocabulary, width), body, masked

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.body(x, tokens != PAD) if self.masked else self.body(x)


@dataclass(frozen=True)
class Tokens(FromFiles):
    """Inputs (length,) numbers below `vocabulary`, embedded as vectors of `embedding` numbers."""

    model: Model
    partition: Partition
    data_root: str | None = None
    vocabulary: int = 10_000
    length: int = 64
    embedding: int = 300

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 3), ("length", 1), ("embedding", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} >= {least} must hold, got {name}={getattr(self, name)}")

    def build(self) -> nn.Module:
        body = self.model.build((self.length, self.embedding), self.classes)
        return Embedded(self.vocabulary, self.embedding, body, masked=hasattr(body, "pool"))

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["input"].long()


@dataclass(frozen=True)
class Text(Tokens):
    """Texts as words. `glove`: a file of "word number number …" lines, from which the embedding of known words begins;
    it is trained all the same."""

    model: Model = Rnn(128)
    partition: Partition = Iid()
    glove: str | None = None

    @abstractmethod
    def rows(self, found: Found) -> tuple[Rows, Rows]:
        """The texts of (train, test)."""

    def rows_checked(self, found: Found) -> tuple[Rows, Rows]:
        train, test = self.rows(found)
        for rows in (train, test):
            if not len(rows.texts):
                raise ValueError(f"{self.folder} must have rows, got a split without any; fetch its files again")
        return train, test

    def settings(self) -> str:
        return f"{type(self).__name__} {self.vocabulary} {self.length}"

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        train, test = self.rows_checked(found)
        known = vocabulary_of(train.texts, self.vocabulary)
        return tuple(columns_of(rows, numbered(rows.texts, known, self.length)) for rows in (train, test))  # pyright: ignore[reportReturnType] two of them

    def init(self, seed: int) -> dict[str, Tensor]:
        p = super().init(seed)
        if self.glove is None:
            return p
        known = vocabulary_of(self.rows_checked(self.found())[0].texts, self.vocabulary)
        table = p["embedding.weight"].clone()
        for number, vector in vectors(Path(self.glove).expanduser(), known, self.embedding):
            table[number] = torch.from_numpy(vector)
        return {**p, "embedding.weight": table}


def vectors(path: Path, known: dict[str, int], width: int) -> Iterable[tuple[int, np.ndarray]]:
    """(number, vector) of the known words in a file of GloVe's form."""
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
