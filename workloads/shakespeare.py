"""Shakespeare by speaking role: the next character after 80. McMahan et al. 2017; LEAF's files, Caldas et al. 2018.

79 characters: LEAF's 80 without the newline, which its preparation turns into a blank; any other counts as a blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Columns, Model, Partition
from .leaf import read
from .metrics import perplexity
from .natural import Natural
from .recurrent import Lstm
from .roots import Layout, damaged
from .text import Rows, Tokens, columns_of

CHARACTERS = " !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80


def coded(text: str) -> np.ndarray:
    """(n,) int32, places in CHARACTERS."""
    table = np.zeros(128, dtype=np.int32)
    table[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return np.where(codes < 128, table[np.minimum(codes, 127)], 0).astype(np.int32)


def windows(paths: list[Path], train: bool) -> Columns:
    found = read(paths)
    for x, y in zip(found.x, found.y, strict=True):
        if len(x) != LENGTH or len(y) != 1:
            raise damaged(paths[0], f"a window of {len(x)} characters and {len(y)} after it, not {LENGTH} and 1")
    labels = coded("".join(found.y)).astype(np.int64)
    return columns_of(Rows(found.x, labels, found.users), coded("".join(found.x)).reshape(-1, LENGTH))


@dataclass(frozen=True)
class Shakespeare(Tokens):
    """Inputs (80,) places in the alphabet; 79 classes; clients are roles."""

    model: Model = Lstm()
    partition: Partition = Natural()
    vocabulary: int = len(CHARACTERS)
    length: int = LENGTH
    embedding: int = 256

    folder: ClassVar[str] = "shakespeare"
    fetch: ClassVar[str] = "LEAF's data/shakespeare/preprocess.sh makes them"
    classes: ClassVar[int] = len(CHARACTERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.vocabulary, self.length) != (len(CHARACTERS), LENGTH):
            raise ValueError(
                f"vocabulary={len(CHARACTERS)}, length={LENGTH} must hold, the files have it so, "
                f"got vocabulary={self.vocabulary}, length={self.length}"
            )

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """Perplexity: how many equally likely characters are as hard to tell; e to the mean loss in nats."""
        return {"perplexity": perplexity(means["loss"])}

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout((f"{top}train/*.json",), (f"{top}test/*.json",), windows) for top in ("", "leaf/", "data/"))
