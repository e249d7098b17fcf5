"""Shakespeare, one client per speaking role: predict the character that follows 80 others. McMahan et al. 2017; the
files are those of LEAF, Caldas et al. 2018.

There are 79 characters: the 80 of LEAF without the newline, which LEAF's preparation replaces by a blank. Any other
character counts as a blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.leaf import read
from ..files.roots import Layout, damaged
from ..metrics import perplexities, perplexity
from ..models.recurrent import Lstm
from ..partitions.natural import Natural
from ..workload import Columns, Model, Partition
from .text import Rows, Tokens, columns_of

CHARACTERS = " !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80


def coded(text: str) -> np.ndarray:
    """(n,) int32: the place of each of n characters in CHARACTERS."""
    table = np.zeros(128, dtype=np.int32)
    table[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return np.where(codes < 128, table[np.minimum(codes, 127)], 0).astype(np.int32)


def windows(paths: list[Path], train: bool) -> Columns:
    """The columns "input", "label" and "client" of LEAF's files."""
    found = read(paths)
    for x, y in zip(found.x, found.y, strict=True):
        if len(x) != LENGTH or len(y) != 1:
            raise damaged(paths[0], f"a window of {len(x)} characters and {len(y)} after it, not {LENGTH} and 1")
    labels = coded("".join(found.y)).astype(np.int64)
    return columns_of(Rows(found.x, labels, found.users), coded("".join(found.x)).reshape(-1, LENGTH))


@dataclass(frozen=True)
class Shakespeare(Tokens):
    """Inputs (80,) places in CHARACTERS, 79 classes. The natural clients are the speaking roles."""

    model: Model = Lstm()
    partition: Partition = Natural()
    vocabulary: int = len(CHARACTERS)
    length: int = LENGTH
    embedding: int = 256

    folder: ClassVar[str] = "shakespeare"
    fetch: ClassVar[str] = "LEAF's data/shakespeare/preprocess.sh makes them"
    classes: ClassVar[int] = len(CHARACTERS)
    padded: ClassVar[bool] = False  # number 0 is the blank
    lower: ClassVar[tuple[str, ...]] = ("loss", "perplexity")  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.vocabulary, self.length) != (len(CHARACTERS), LENGTH):
            raise ValueError(
                f"vocabulary={len(CHARACTERS)} and length={LENGTH} must hold, as in the files, "
                f"got vocabulary={self.vocabulary}, length={self.length}; leave both out"
            )

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """`perplexity`: e to the mean loss in nats. A loss of the same size belongs to a uniform choice among so many
        characters."""
        return {"perplexity": perplexity(means["loss"])}

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"perplexity": perplexities(means["loss"])}

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout((f"{top}train/*.json",), (f"{top}test/*.json",), windows) for top in ("", "leaf/", "data/"))
