"""Text as characters: predict the one that follows each place of a window. The workload for small language models.

There are 97 tokens: 0 for the end of a text, 1 for a new line, and 2 to 96 for the characters 32 to 126. A tab and any
other character count as blanks. A text, and the token 0 behind it, is cut into windows of `length` + 1 tokens, each of
which begins with the last token of the one before: their first `length` tokens are the inputs, and the token behind
each of them is its label. The rest of a text that fills no window is left out, so that all windows have as many
labels, and the mean over windows is the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..classification import Classification
from ..files.roots import damaged
from ..models.gpt import Gpt
from ..objectives import NextToken
from ..partitions.natural import Natural, client_numbers
from ..partitions.standard import Iid
from ..workload import HELD_OUT, Batch, Columns, Model, Partition
from .images import batches

TOKENS = 97
END, NEW_LINE, BLANK, FIRST = 0, 1, 2, 32
ROWS = 65536
"""The rows of a Parquet file that are read at once."""


class Document(NamedTuple):
    """The text of one client, `train`, and what is kept of it for testing, `test`."""

    client: str
    train: str
    test: str


def tokens_of(text: str) -> np.ndarray:
    """(n + 1,) int32: the tokens of a text of n characters, and END."""
    codes = np.frombuffer(text.replace("\r\n", "\n").encode("utf-32-le"), dtype=np.uint32)
    tokens = np.where(
        (codes >= FIRST) & (codes < FIRST + TOKENS - BLANK), codes.astype(np.int64) - FIRST + BLANK, BLANK
    )
    return np.append(np.where(codes == ord("\n"), NEW_LINE, tokens), END).astype(np.int32)


def windows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """(n, length + 1) the windows of a text."""
    count = max(len(tokens) - 1, 0) // length
    return tokens[: count * length + 1][np.arange(count)[:, None] * length + np.arange(length + 1)]


def check_cuts(length: int, test_fraction: float) -> None:
    """Raise ValueError for a length of windows, or a share of texts that is kept for testing, that cannot be."""
    if length < 1:
        raise ValueError(f"length >= 1 must hold, got length={length}")
    if not 0 < test_fraction < 1:
        raise ValueError(f"0 < test_fraction < 1 must hold, got test_fraction={test_fraction}")


@dataclass(frozen=True)
class Characters(Classification):
    """Windows of characters of your own texts. Without clients of their own, windows are dealt by the partition.

    `path`: a file of text, .txt, or a Parquet file with a text in each row. `length`: the number of tokens that the
    model reads. `text`, `client`: the columns of a Parquet file with the texts and with the name of the client of each
    of them, whose texts are joined by new lines in the order of the file; with clients the partition is natural unless
    another one is given. `split_column`: the column that says `test` for texts that are kept for testing.
    `test_fraction`: without it, the share of each client's text, its end, that is kept. Test windows are the test set,
    and the held-out rows of their clients. Clients whose text fills no window are left out.
    """

    path: str = field(kw_only=True)
    model: Model = Gpt()
    partition: Partition | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    length: int = 64
    text: str = "text"
    client: str | None = None
    split_column: str | None = None
    test_fraction: float = 0.1

    classes: ClassVar[int] = TOKENS

    def __post_init__(self) -> None:
        check_cuts(self.length, self.test_fraction)
        if self.partition is None:
            object.__setattr__(self, "partition", Iid() if self.client is None else Natural())

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.length,)

    @property
    def objective(self) -> NextToken:
        return NextToken(TOKENS)

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    def check(self) -> None:
        if not self.file.is_file():
            raise ValueError(f"path must be a file, got {self.path}; give a .txt or .parquet file")
        if self.file.suffix not in (".txt", ".parquet"):
            raise ValueError(f"path must end with .txt or .parquet, got {self.path}")
        if self.file.suffix == ".txt" and (self.client or self.split_column):
            raise ValueError(f"client and split_column are columns of a Parquet file, got {self.path}; leave them out")
        super().check()

    def data_files(self) -> Mapping[str, Path]:
        return {**super().data_files(), self.file.name: self.file}

    def documents(self) -> list[Document]:
        """The texts, in the order of their clients' names."""
        if self.file.suffix == ".txt":
            return [self._cut("", read_text(self.file))]
        wanted = [column for column in (self.text, self.client, self.split_column) if column is not None]
        columns = read_parquet(self.file, wanted)
        clients = [""] * len(columns[self.text]) if self.client is None else columns[self.client]
        if self.split_column is None:
            return [self._cut(name, text) for name, text in joined(clients, columns[self.text])]
        kept = np.array([value == "test" for value in columns[self.split_column]])
        train, test = (
            dict(joined(*(np.array(column, dtype=object)[rows] for column in (clients, columns[self.text]))))
            for rows in (~kept, kept)
        )
        return [Document(name, text, test.get(name, "")) for name, text in train.items()]

    def _cut(self, client: str, text: str) -> Document:
        place = round((1 - self.test_fraction) * len(text))
        return Document(client, text[:place], text[place:])

    def load(self) -> tuple[Columns, Columns]:
        found: list[tuple[np.ndarray, np.ndarray, str]] = []  # the windows of a client, for training and for testing
        for document in self.documents():
            train, test = (windows_of(tokens_of(text), self.length) for text in (document.train, document.test))
            if len(train):
                found.append((train, test, document.client))
        if not found:
            raise ValueError(
                f"{self.path} must have a text of {self.length + 1} characters or more; lower length or take more text"
            )
        if not any(len(test) for _, test, _ in found):
            raise ValueError(
                f"{self.path} has no test text of {self.length + 1} characters; raise test_fraction or lower length"
            )
        train, test = (np.concatenate([each[place] for each in found]) for place in (0, 1))
        of_test = labelled(test)
        if self.client is None:
            return labelled(train), of_test
        names = [client for train, _, client in found for _ in train] + [
            client for _, test, client in found for _ in test
        ]
        held_out = np.arange(len(names)) >= len(train)
        rows = {"client": client_numbers(names), HELD_OUT: held_out}
        return {**labelled(np.concatenate([train, test])), **rows}, of_test

    def targets(self, columns: Columns) -> np.ndarray:
        return np.full(len(columns["label"]), self.length)

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch["input"].long()


def labelled(windows: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of windows (n, length + 1)."""
    return {"input": windows[:, :-1].copy(), "label": windows[:, 1:].copy()}


def joined(clients: Iterable[str], texts: Iterable[str]) -> list[tuple[str, str]]:
    """(client, its texts with new lines between them), in the order of names."""
    found: dict[str, list[str]] = {}
    for client, text in zip(clients, texts, strict=True):
        found.setdefault(client, []).append(text)
    return [(client, "\n".join(found[client])) for client in sorted(found)]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error


def read_parquet(path: Path, columns: list[str]) -> dict[str, list[str]]:
    """The columns of a Parquet file as texts; cells without one are empty. Raises ValueError for a column that it does
    not have."""
    found: dict[str, list[str]] = {name: [] for name in columns}
    for batch in batches(path, columns, ROWS):
        for name, cells in found.items():
            cells += [str(cell or "") for cell in batch.column(name).to_pylist()]
    return found
