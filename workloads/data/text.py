"""Texts as word numbers: words, vocabulary and embedding.

Words are runs of letters, digits and apostrophes in lower case, and single marks `! ? . ,`. Number 0 is padding and
number 1 any unknown word; the numbers from 2 on are the most frequent words of the training texts (of equally frequent
ones, the first by alphabet). A text keeps its first `length` words; a text without words becomes a single 1. The
embedding always has `vocabulary` rows, so that the shapes of the model do not depend on the data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..files.cache import digest
from ..files.roots import Found
from ..models.embeddings import PAD, Embedded, Fixed, drawn, read
from ..models.recurrent import Rnn
from ..partitions.natural import client_numbers
from ..partitions.standard import Iid
from ..workload import Batch, Columns, Model, Partition
from .images import FromFiles

WORD = re.compile(r"[a-z0-9']+|[!?.,]")
OTHER = 1
"""The number of any word that is not in the vocabulary."""


class Rows(NamedTuple):
    """n texts with their labels. `clients`: the natural client of each text, or None if there are none."""

    texts: Sequence[str]
    labels: np.ndarray  # (n,) int64
    clients: Sequence[str] | np.ndarray | None = None


def words(text: str) -> list[str]:
    """The words of a text, see the module."""
    return WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], size: int) -> dict[str, int]:
    """word -> number from 2 to size - 1, in the order of their frequency."""
    counts = Counter(word for text in texts for word in words(text))
    first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - 2]
    return {word: number for number, (word, _) in enumerate(first, 2)}


def numbered(texts: Sequence[str], vocabulary: dict[str, int], length: int) -> np.ndarray:
    """(n, length) int32: the word numbers of n texts, padded at the end."""
    out = np.full((len(texts), length), PAD, dtype=np.int32)
    for row, text in enumerate(texts):
        own = [vocabulary.get(word, OTHER) for word in islice(words(text), length)] or [OTHER]
        out[row, : len(own)] = own
    return out


def columns_of(rows: Rows, tokens: np.ndarray) -> Columns:
    """The columns of a data set from its rows and their word numbers, (n, length)."""
    columns = {"input": tokens, "label": np.asarray(rows.labels, dtype=np.int64)}
    if rows.clients is None:
        return columns
    return {**columns, "client": client_numbers(rows.clients)}


@dataclass(frozen=True)
class Tokens(FromFiles):
    """Sequences of token numbers: inputs (length,) below `vocabulary`, embedded as vectors (embedding,). `embeddings`:
    "trained", or "frozen", which makes the vectors no part of the model. `padded`: whether number 0 is padding, which
    recurrent networks pass over."""

    model: Model
    partition: Partition
    vocabulary: int = 10_000
    length: int = 64
    embedding: int = 300
    embeddings: Literal["trained", "frozen"] = "trained"

    padded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 3), ("length", 1), ("embedding", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} >= {least} must hold, got {name}={getattr(self, name)}")
        if self.embeddings not in ("trained", "frozen"):
            raise ValueError(f"embeddings must be trained or frozen, got embeddings={self.embeddings!r}")

    def build(self) -> nn.Module:
        body = self.model.build((self.length, self.embedding), self.classes)
        trained = self.embeddings == "trained"
        words = nn.Embedding(self.vocabulary, self.embedding) if trained else Fixed(self._fixed())
        return Embedded(words, body, masked=self.padded and hasattr(body, "pool"))

    def _fixed(self) -> Tensor:
        """The frozen vectors, or an empty tensor of their shape where only shapes are asked for (device "meta")."""
        only_shapes = torch.get_default_device().type == "meta"
        return torch.empty(self.vocabulary, self.embedding) if only_shapes else self.fixed_vectors()

    def fixed_vectors(self) -> Tensor:
        """(vocabulary, embedding): the frozen vectors."""
        return drawn(self.vocabulary, self.embedding)

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["input"].long()

    def made_up_inputs(self, label: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(n, length) int32: synthetic texts; a third of their words is the word of the class, the others are
        random."""
        own = (label * 7919 + 2) % (self.vocabulary - 2) + 2
        words = random.integers(2, self.vocabulary, (len(label), self.length))
        return np.where(random.random(words.shape) < 1 / 3, own[:, None], words).astype(np.int32)


@dataclass(frozen=True)
class Text(Tokens):
    """Texts as words. `glove`: a file of lines "word number number …" with the vectors of words; a trained embedding
    begins with them, a frozen one consists of them."""

    model: Model = Rnn(128)
    partition: Partition = Iid()
    glove: str | None = None

    def rows(self, found: Found) -> tuple[Rows, Rows]:
        """The texts of (train, test), for which the readers of `layouts` return `Rows`; ValueError if there are
        none."""
        train, test = found.read()
        for rows in (train, test):
            if not len(rows.texts):
                raise ValueError(f"{self.folder} must have rows, got a split without any; fetch its files again")
        return train, test

    def settings(self) -> str:
        return f"{type(self).__name__} {self.vocabulary} {self.length}"

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        train, test = self.rows(found)
        known = vocabulary_of(train.texts, self.vocabulary)

        def columns(rows: Rows) -> Columns:
            return columns_of(rows, numbered(rows.texts, known, self.length))

        return columns(train), columns(test)

    def check_files(self) -> None:
        if self.glove is not None and not Path(self.glove).expanduser().is_file():
            raise ValueError(f"glove must be a file of word vectors, got no file {self.glove}")
        super().check_files()

    def data_files(self) -> Mapping[str, Path]:
        vectors = {} if self.glove is None else {"word vectors": Path(self.glove).expanduser()}
        return {**super().data_files(), **vectors}

    def known(self) -> dict[str, int]:
        """word -> number, from the training texts."""
        return vocabulary_of(self.rows(self.found())[0].texts, self.vocabulary)

    def given(self) -> np.ndarray:
        """(vocabulary, embedding): the vectors of the file `glove`, NaN for words that it does not have."""
        if self.stand_in:
            raise ValueError("glove needs the words of real files, got stand_in too; leave one of them out")
        assert self.glove is not None
        path, shape = Path(self.glove).expanduser(), (self.vocabulary, self.embedding)
        return read(path, self.known, shape, f"{self.settings()} {digest(self.found().files, '')}")

    def fixed_vectors(self) -> Tensor:
        return super().fixed_vectors() if self.glove is None else torch.from_numpy(self.given()).nan_to_num(0.0)

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
