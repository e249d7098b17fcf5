"""What text sets share: words, a vocabulary, rows of numbers, their embedding.

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
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .base import Batch, Columns, Model, Partition
from .cache import digest
from .embeddings import PAD, Embedded, Fixed, drawn, read
from .images import FromFiles
from .partitions import Iid
from .recurrent import Rnn
from .roots import Found

WORD = re.compile(r"[a-z0-9']+|[!?.,]")
OTHER = 1


class Rows(NamedTuple):
    """`clients`: whose each text is by nature, None where the set does not say."""

    texts: Sequence[str]
    labels: np.ndarray  # (n,) int64
    clients: Sequence[str] | np.ndarray | None = None


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


@dataclass(frozen=True)
class Tokens(FromFiles):
    """Inputs (length,) numbers below `vocabulary`, embedded as vectors of `embedding` numbers. `embeddings`: trained,
    or frozen and then no part of the model."""

    model: Model
    partition: Partition
    vocabulary: int = 10_000
    length: int = 64
    embedding: int = 300
    embeddings: Literal["trained", "frozen"] = "trained"

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 3), ("length", 1), ("embedding", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} >= {least} must hold, got {name}={getattr(self, name)}")
        if self.embeddings not in ("trained", "frozen"):
            raise ValueError(f"embeddings must be trained or frozen, got embeddings={self.embeddings!r}")

    def build(self) -> nn.Module:
        body = self.model.build((self.length, self.embedding), self.classes)
        trained = self.embeddings == "trained"
        words = nn.Embedding(self.vocabulary, self.embedding) if trained else Fixed(self._frozen())
        return Embedded(words, body, masked=hasattr(body, "pool"))

    def _frozen(self) -> Tensor:
        sizing = torch.get_default_device().type == "meta"
        return torch.empty(self.vocabulary, self.embedding) if sizing else self.frozen()

    def frozen(self) -> Tensor:
        """(vocabulary, embedding)"""
        return drawn(self.vocabulary, self.embedding)

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["input"].long()

    def made_up_inputs(self, label: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(n, length) int32: a third of the words are one of the class's own, the others any."""
        own = (label * 7919 + 2) % (self.vocabulary - 2) + 2
        words = random.integers(2, self.vocabulary, (len(label), self.length))
        return np.where(random.random(words.shape) < 1 / 3, own[:, None], words).astype(np.int32)


@dataclass(frozen=True)
class Text(Tokens):
    """Texts as words. `glove`: a file of "word number number …" lines, the vectors of the words that it knows: where
    the embedding begins if it is trained."""

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

    def check_files(self) -> None:
        if self.glove is not None and not Path(self.glove).expanduser().is_file():
            raise ValueError(f"glove must be a file of word vectors, got no file {self.glove}")
        super().check_files()

    def known(self) -> dict[str, int]:
        return vocabulary_of(self.rows_checked(self.found())[0].texts, self.vocabulary)

    def given(self) -> np.ndarray:
        """The file's vectors, (vocabulary, embedding), NaN where it has none."""
        if self.stand_in:
            raise ValueError("glove goes by the words of the set's files, got stand_in too; leave one of them out")
        assert self.glove is not None
        path, shape = Path(self.glove).expanduser(), (self.vocabulary, self.embedding)
        return read(path, self.known, shape, f"{self.settings()} {digest(self.found().files, '')}")

    def frozen(self) -> Tensor:
        return super().frozen() if self.glove is None else torch.from_numpy(self.given()).nan_to_num(0.0)

    def init(self, seed: int) -> dict[str, Tensor]:
        p = super().init(seed)
        if self.glove is None or self.embeddings == "frozen":
            return p
        given = torch.from_numpy(self.given())
        own = p["embedding.weight"]
        return {**p, "embedding.weight": torch.where(given.isnan(), own, given)}

    def made_up_inputs(self, label: np.ndarray, random: np.random.Generator) -> np.ndarray:
        tokens = super().made_up_inputs(label, random)
        ends = random.integers(1, self.length + 1, (len(label), 1))
        return np.where(np.arange(self.length) < ends, tokens, PAD).astype(np.int32)
