"""Sentiment of texts, two classes: 0 negative, 1 positive.

sst2            sentences and phrases of film reviews, from the files of GLUE; its dev set is the test set
sentiment140    tweets, one client per user; neutral rows of the test file are left out
yelp            reviews, one client per business category
imdb            long film reviews
parquet_text    your own Parquet files with a column of texts, one of labels, and optionally one of clients
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.cells import Clients, Labels, Texts
from ..files.roots import Found, Layout, damaged
from ..models.recurrent import Rnn
from ..partitions.standard import Iid
from ..workload import Model, Partition
from .images import columns_of
from .published import check_fraction, test_rows
from .text import Rows, Text


def glue(paths: list[Path], train: bool) -> Rows:
    """The rows of a file of GLUE: a header `sentence<TAB>label`, then one row per line."""
    (path,) = paths
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line.rsplit("\t", 1) for line in lines]
        labels = np.array([int(row[1]) for row in rows], dtype=np.int64)
    except (ValueError, IndexError) as error:
        raise damaged(path, error) from error
    if header != "sentence\tlabel":
        raise damaged(path, f"its first line is {header[:40]!r}, not sentence<TAB>label")
    return Rows([row[0] for row in rows], labels)


def tweets(paths: list[Path], train: bool) -> Rows:
    """The rows of the files of Sentiment140, in latin-1 without a header: target (0, 2, 4), id, date, query, user,
    text."""
    kept = [row for path in paths for row in csv_rows(path) if row[0] != "2"]
    labels = np.array([int(row[0] == "4") for row in kept], dtype=np.int64)
    return Rows([row[5] for row in kept], labels, [row[4] for row in kept])


def csv_rows(path: Path) -> Iterator[list[str]]:
    """The rows of one file of Sentiment140, six texts each; ValueError if the file is damaged."""
    with path.open(encoding="latin-1", newline="") as file:
        try:
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                if len(row) != 6 or row[0] not in ("0", "2", "4"):
                    raise damaged(path, f"row {number} is not target, id, date, query, user, text")
                yield row
        except csv.Error as error:
            raise damaged(path, error) from error


@dataclass(frozen=True)
class Sst2(Text):
    """SST-2. It has no natural clients."""

    model: Model = Rnn(128)
    partition: Partition = Iid()

    folder: ClassVar[str] = "sst2"
    fetch: ClassVar[str] = "GLUE's SST-2.zip has them"
    classes: ClassVar[int] = 2
    full_rows: ClassVar[tuple[int, int] | None] = (67_349, 872)

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout((f"{top}train.tsv",), (f"{top}dev.tsv",), glue) for top in ("SST-2/", ""))


@dataclass(frozen=True)
class Sentiment140(Text):
    """Sentiment140. The natural clients are the users. The training file is the published one, or a part of it whose
    name is train….csv."""

    model: Model = Rnn(128)
    partition: Partition = Iid()
    length: int = 40

    folder: ClassVar[str] = "sentiment140"
    fetch: ClassVar[str] = "http://help.sentiment140.com has them"
    classes: ClassVar[int] = 2
    full_rows: ClassVar[tuple[int, int] | None] = (1_600_000, 359)

    def layouts(self) -> tuple[Layout, ...]:
        trains = ("training.1600000.processed.noemoticon.csv", "train*.csv")
        return tuple(Layout((train,), ("testdata.manual.2009.06.14.csv",), tweets) for train in trains)


def read_texts(paths: list[Path], columns: tuple[str, str, str | None]) -> Rows:
    """The rows of Parquet files. columns: the names of the columns of texts, labels and (or None) clients."""
    text, label, client = columns
    wanted = [Texts(text), Labels(label), *([] if client is None else [Clients(client)])]
    texts, labels, *clients = columns_of(paths, wanted)
    return Rows([re.sub(r"<br\s*/?>", " ", one) for one in texts], labels, *clients)


def chosen(rows: Rows, mask: np.ndarray) -> Rows:
    """The rows where the mask, (n,) bool, is true."""
    clients = None if rows.clients is None else np.asarray(rows.clients)[mask]
    return Rows([text for text, taken in zip(rows.texts, mask, strict=True) if taken], rows.labels[mask], clients)


@dataclass(frozen=True)
class ParquetText(Text):
    """Texts in Parquet files. `folder`: the folder below the data root, with train*.parquet and test*.parquet. `text`,
    `label`, `client`: names of the columns; without `client` there are no natural clients. `classes`: number of
    classes. `test_fraction`: the fraction of the training rows that are test rows, in the place of test files."""

    model: Model = Rnn(128)
    partition: Partition = Iid()
    length: int = 200
    folder: str = "texts"  # pyright: ignore[reportIncompatibleVariableOverride]
    text: str = "text"
    label: str = "label"
    client: str | None = None
    classes: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    test_fraction: float = 0.0

    fetch: ClassVar[str] = "put your files there, or set workload.folder"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise ValueError(f"classes >= 2 must hold, got classes={self.classes}")
        check_fraction(self.test_fraction)

    def settings(self) -> str:
        drawn = f" {self.test_fraction}" if self.test_fraction else ""
        return f"{super().settings()} {self.text} {self.label} {self.client} checked{drawn}"

    def rows(self, found: Found) -> tuple[Rows, Rows]:
        if not self.test_fraction:
            return super().rows(found)
        rows = found.layout.read(found.train, True)
        tests = test_rows(len(rows.texts), self.test_fraction)
        return chosen(rows, ~tests), chosen(rows, tests)

    def layouts(self) -> tuple[Layout, ...]:
        columns = (self.text, self.label, self.client)
        tests = "train*.parquet" if self.test_fraction else "test*.parquet"
        return (Layout(("train*.parquet",), (tests,), lambda paths, train: read_texts(paths, columns)),)


@dataclass(frozen=True)
class Yelp(ParquetText):
    """Yelp reviews; the published set is Yelp Review Polarity. The natural clients are the categories of businesses,
    where the files name them."""

    folder: str = "yelp"  # pyright: ignore[reportIncompatibleVariableOverride]
    client: str | None = "category"

    full_rows: ClassVar[tuple[int, int] | None] = (560_000, 38_000)


@dataclass(frozen=True)
class Imdb(ParquetText):
    """IMDB film reviews. They have no natural clients."""

    folder: str = "imdb"  # pyright: ignore[reportIncompatibleVariableOverride]

    full_rows: ClassVar[tuple[int, int] | None] = (25_000, 25_000)
