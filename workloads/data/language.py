"""Language models on your own texts: predict the token behind each place of a row of tokens.

The documents of a client, each with an end behind it, are one stream z_0, …, z_(n-1). Window j has the inputs z_(jL),
…, z_(jL + L - 1), and the targets one place later. The last window is padded, or left out. A window has tokens of one
client alone.

Rows count as many times as they have targets: all means are those over tokens.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..classification import Classification, check_logits
from ..files.cache import digest
from ..files.roots import damaged
from ..models.gpt import Gpt
from ..models.head import Head, places_at_once, without_head
from ..models.pretrained import Pretrained
from ..objectives import NOT_COUNTED, CountedTokens
from ..partitions.natural import Natural, client_numbers
from ..partitions.standard import Iid
from ..workload import HELD_OUT, Batch, Columns, Model, Params, Partition
from . import tokens as tokenisers
from .characters import ROWS, check_cuts, read_text
from .images import batches
from .tokens import Coded, Tokeniser

Record = Mapping[str, Any]
"""A row of a file: column -> cell."""
FORMS = (".txt", ".jsonl", ".parquet")


class Rows(NamedTuple):
    """n rows of L tokens. `input`, `label`: (n, L), where `label` is NOT_COUNTED for a place without a target.
    `document`, `position`: (n, L), the document that each place belongs to, -1 for padding, and its position in it.
    `bytes`: (n,) those of the text that the targets stand for."""

    input: np.ndarray
    label: np.ndarray
    document: np.ndarray
    position: np.ndarray
    bytes: np.ndarray

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        return Rows(*map(np.concatenate, zip(*parts, strict=True)))

    def some(self, rows: Any) -> Rows:
        return Rows(*(column[rows] for column in self))


def windows_of(documents: Sequence[Coded], length: int, tail: str, end: Coded) -> Rows:
    """The windows of a stream of documents. tail: pad, or drop for no window that is not full."""
    spans = [len(document.ids) + 1 for document in documents]
    stream = Coded.joined([part for document in documents for part in (document, end)])
    count = max(len(stream.ids) - 1, 0)
    windows = count // length if tail == "drop" else -(-count // length)
    size = windows * length

    def cut(column: np.ndarray, fill: int) -> np.ndarray:
        padded = np.full(size + 1, fill, dtype=np.int32)
        padded[: len(column)] = column[: size + 1]
        return padded

    ids, sizes = cut(stream.ids, int(end.ids[0])), cut(stream.bytes, 0)
    number = np.repeat(np.arange(len(spans)), spans)
    position = np.arange(len(stream.ids)) - np.repeat(np.cumsum(spans) - spans, spans)
    real = np.arange(size) < count
    rows = (
        ids[:-1],
        np.where(real, ids[1:], NOT_COUNTED),
        np.where(real, cut(number, 0)[:-1], -1),
        np.where(real, cut(position, 0)[:-1], 0),
        np.where(real, sizes[1:], 0),
    )
    planes = [column.astype(np.int32).reshape(windows, length) for column in rows]
    return Rows(planes[0], planes[1], planes[2], planes[3], planes[4].sum(1, dtype=np.int64))


@dataclass(frozen=True)
class TextTable(Classification):
    """Texts of a file as rows of tokens. A subclass says how records become rows, and what is predicted.

    `path`: a file .jsonl or .parquet with a record in each row. `length`: the number of tokens that the model reads.
    `tokens`: characters, as the workload `characters` has them; a folder with tokenizer.json; bpe, byte pairs that are
    learnt from the training texts, `vocabulary` of them; or auto, which is the folder of a pretrained model, and
    characters for others. `client`: the column with the name of each record's client; with it the partition is natural
    unless another one is given. `split_column`: the column that says `test` for records that are kept for testing.
    `test_fraction`: without it, the share of each client's records, the last ones, that is kept. Test rows are the test
    set, and the held-out rows of their clients.
    """

    path: str = field(kw_only=True)
    model: Model = Gpt()
    partition: Partition | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    length: int = 64
    tokens: str = "auto"
    vocabulary: int = 512
    client: str | None = None
    split_column: str | None = None
    test_fraction: float = 0.1

    forms: ClassVar[tuple[str, ...]] = FORMS[1:]

    def __post_init__(self) -> None:
        check_cuts(self.length, self.test_fraction)
        if self.vocabulary <= 256:
            raise ValueError(f"vocabulary > 256 must hold, as bytes are tokens, got vocabulary={self.vocabulary}")
        if self.partition is None:
            object.__setattr__(self, "partition", Iid() if self.client is None else Natural())

    # --- a subclass -----------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def apart(self) -> bool:
        """Whether a row may have several documents that must not see each other."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the file that are read, besides the client and the split."""

    @abstractmethod
    def texts(self, record: Record) -> list[str]:
        """The texts of a record from which byte pairs are learnt."""

    @property
    def selection(self) -> str:
        """What the records depend on besides the file, "" for nothing."""
        return ""

    # --- tokens and network ---------------------------------------------------------------------------------------
    @property
    def folder(self) -> Path | None:
        """The folder of the tokeniser, None without one."""
        if self.tokens == "auto":
            return self.model.path if isinstance(self.model, Pretrained) else None
        return None if self.tokens in ("characters", "bpe") else Path(self.tokens).expanduser()

    @cached_property
    def tokeniser(self) -> Tokeniser:
        if self.folder is not None:
            return tokenisers.of_folder(self.folder)
        if self.tokens != "bpe":
            return tokenisers.Characters()
        settings = f"{type(self).__name__} {self.columns} {self.split_column} {self.test_fraction} {self.client}"
        settings += f" {self.selection}" if self.selection else ""
        return tokenisers.byte_pairs(self.vocabulary, self._training_texts, digest([self.file], settings))

    def _training_texts(self) -> list[str]:
        return [text for _, train, _ in self.of_clients() for record in train for text in self.texts(record)]

    def __getstate__(self) -> dict[str, Any]:
        """The settings without the tokeniser."""
        return {name: value for name, value in super().__getstate__().items() if name != "tokeniser"}

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (3, self.length) if self.apart else (self.length,)

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        planes = [batch[name].long() for name in ("input", "document", "position") if name in batch]
        return torch.stack(planes, 1) if self.apart else planes[0]

    # --- data -----------------------------------------------------------------------------------------------------
    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    def check(self) -> None:
        if not self.file.is_file() or self.file.suffix not in self.forms:
            what = " or ".join(self.forms)
            raise ValueError(f"path must be a file {what}, got {self.path}")
        if self.file.suffix == ".txt" and (self.client or self.split_column):
            raise ValueError(f"client and split_column are columns of a table, got {self.path}; leave them out")
        super().check()

    def data_files(self) -> Mapping[str, Path]:
        own = {} if self.folder is None else {tokenisers.FILE: self.folder / tokenisers.FILE}
        return {**super().data_files(), **own, self.file.name: self.file}

    def of_clients(self) -> Iterator[tuple[str, list[Record], list[Record]]]:
        """(client, its records for training, those for testing), in the order of names. Without clients, all records
        are those of one."""
        found: dict[str, list[Record]] = {}
        for record in self.records():
            found.setdefault(self.cell(record, self.client) if self.client else "", []).append(record)
        for name in sorted(found):
            records = found[name]
            if self.split_column is None:
                kept = round((1 - self.test_fraction) * len(records))
                yield name, records[:kept], records[kept:]
            else:
                test = [record for record in records if record[self.split_column] == "test"]
                yield name, [record for record in records if record[self.split_column] != "test"], test

    def cell(self, record: Record, column: str) -> str:
        """What a record has in a column. Raises ValueError for nothing."""
        if record[column] is None:
            raise ValueError(f"{self.path} must have {column} in each record, got null; give it, or leave records out")
        return str(record[column])

    def records(self) -> Iterator[Record]:
        """The records of the file. Raises ValueError for a column that it does not have."""
        wanted = [*self.columns, *filter(None, (self.client, self.split_column))]
        if self.file.suffix == ".parquet":
            for batch in batches(self.file, wanted, ROWS):
                yield from batch.to_pylist()
            return
        # Texts may have other ends of lines, such as U+2028, in the midst of a record.
        for number, line in enumerate(read_text(self.file).split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise damaged(self.file, f"line {number}: {error}") from error
            missing = [name for name in wanted if not isinstance(record, dict) or name not in record]
            if missing:
                raise ValueError(f"{self.path} must have {', '.join(wanted)} in each line, got line {number} without "
                                 f"{missing[0]}")  # fmt: skip
            yield record


@dataclass(frozen=True)
class Language(TextTable):
    """Rows of tokens with the token behind each place, for language models. A subclass says how records become rows.

    `mean`: of losses, over tokens, or over rows. `loss_chunk`: for how many places of each row of a batch logits are
    computed at once, and once more for the gradient; null for so many that they take 64 MiB at most.
    """

    mean: Literal["tokens", "rows"] = "tokens"
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk >= 1 must hold, got loss_chunk={self.loss_chunk}; leave it out for 64 MiB")

    def check(self) -> None:
        super().check()
        if self.loss_chunk is not None and self.last_layer(self.outline) is None:
            raise ValueError(
                f"loss_chunk: the last layer of this network must be a linear one, without an adapter, got "
                f"loss_chunk={self.loss_chunk}; leave it out"
            )

    @abstractmethod
    def rows(self, records: Sequence[Record], tokeniser: Tokeniser) -> Rows:
        """The rows of the records of one client."""

    @property
    def classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of tokens."""
        return self.vocabulary if self.tokens == "bpe" else self.tokeniser.size

    @property
    def objective(self) -> CountedTokens:
        return CountedTokens(self.classes)

    # --- the last layer -------------------------------------------------------------------------------------------
    @staticmethod
    def last_layer(network: nn.Module) -> Head | None:
        """The last layer of a network, None for one that is not known."""
        return network.last_layer() if hasattr(network, "last_layer") else None  # pyright: ignore[reportCallIssue]

    def in_chunks(self, p: Params, batch: Batch) -> tuple[Head, Tensor, int] | None:
        """(the last layer, what it reads (B, T, width), the places of a chunk); None where all logits are computed at
        once."""
        rows, length = batch["label"].shape
        places = places_at_once(self.loss_chunk, rows, self.classes)
        if places >= length or self.last_layer(self.network.module) is None:
            return None
        with without_head():
            hidden = self.logits(p, batch, batch.get("key"))
        head = self.last_layer(self.network.module)  # with the tensors of this call
        assert head is not None
        return head, hidden, places

    def losses(self, p: Params, batch: Batch) -> Tensor:
        found = self.in_chunks(p, batch)
        if found is None:
            return super().losses(p, batch)
        head, hidden, places = found
        given = batch["label"] != NOT_COUNTED
        losses = head.losses(hidden, torch.where(given, batch["label"], 0).long(), places)
        return self.objective.mean(losses, given)

    def trial(self, p: Params, batch: Batch) -> object:
        return check_logits(super().trial(p, batch))

    # --- means ----------------------------------------------------------------------------------------------------
    def row_weights(self, batch: Batch) -> Tensor:
        targets = (batch["label"] != NOT_COUNTED).sum(-1)
        return targets if self.mean == "tokens" else targets.clamp(max=1)

    def targets(self, columns: Columns) -> np.ndarray:
        return (columns["label"] != NOT_COUNTED).sum(-1)

    whole: ClassVar[tuple[str, ...]] = ("bytes", "targets")  # pyright: ignore[reportIncompatibleVariableOverride]

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        given = batch["label"] != NOT_COUNTED
        more = {"bytes": batch["bytes"], "targets": given.sum(-1)}
        found = self.in_chunks(p, batch)
        if found is None:
            return {**super().report(p, batch), **more}
        head, hidden, places = found
        label = torch.where(given, batch["label"], 0).long()
        losses, hits = head.losses(hidden, label, places), head.hits(hidden, label, places)
        means = self.objective.mean(losses, given), self.objective.mean(hits.to(losses.dtype), given)
        return {"loss": means[0], "accuracy": means[1], **more}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """`perplexity`; and `bits_per_byte` of the texts, which can be compared between tokenisers."""
        found = super().summary(means, columns)
        if self.mean == "tokens" and "bytes" in columns and columns["bytes"].sum():
            found["bits_per_byte"] = means["loss"] * columns["targets"].sum() / (math.log(2) * columns["bytes"].sum())
        return found

    def load(self) -> tuple[Columns, Columns]:
        found: list[tuple[str, Rows, Rows]] = []
        for name, *parts in self.of_clients():
            train, test = (self.counted(self.rows(records, self.tokeniser)) for records in parts)
            if len(train.input):
                found.append((name, train, test))
        tests = Rows.joined([test for _, _, test in found]) if found else None
        if tests is None or not len(tests.input):
            part = "training" if tests is None else "test"
            raise ValueError(f"{self.path} must have {part} rows with targets; take more texts or a smaller length")
        trains = Rows.joined([train for _, train, _ in found])
        of_test = self.named(tests)
        if self.client is None:
            return self.named(trains), of_test
        names = [name for name, rows, _ in found for _ in rows.input] + [n for n, _, rows in found for _ in rows.input]
        held_out = np.arange(len(names)) >= len(trains.input)
        rows = {"client": client_numbers(names), HELD_OUT: held_out}
        return {**self.named(Rows.joined([trains, tests])), **rows}, of_test

    @staticmethod
    def counted(rows: Rows) -> Rows:
        """Those rows that have a target."""
        return rows.some((rows.label != NOT_COUNTED).any(1))

    def named(self, rows: Rows) -> dict[str, np.ndarray]:
        """The columns of rows."""
        columns = rows._asdict()
        return columns if self.apart else {name: columns[name] for name in ("input", "label", "bytes")}


@dataclass(frozen=True)
class CausalLm(Language):
    """Language models on your own texts: windows of the stream of each client's documents.

    `path`: a file of text, .txt, or a table, .jsonl or .parquet, with a text in each row. `text`: its column. `per`:
    whether each row is a document, with an end behind it, or a line of the one document of its client. `tail`: whether
    the last window of a client is padded, or left out. `attend`: whether places see all before them in their window,
    or those within their document alone, whose positions then begin with 0. `test_fraction`: the share of each client's
    tokens, the last ones, that is kept for testing, where no `split_column` says what is.
    """

    text: str = "text"
    per: Literal["document", "line"] = "document"
    tail: Literal["pad", "drop"] = "pad"
    attend: Literal["stream", "within"] = "stream"

    forms: ClassVar[tuple[str, ...]] = FORMS

    @property
    def apart(self) -> bool:
        return self.attend == "within"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    def texts(self, record: Record) -> list[str]:
        return [str(record[self.text] or "")]

    def records(self) -> Iterator[Record]:
        if self.file.suffix == ".txt":
            yield {self.text: read_text(self.file)}
        else:
            yield from super().records()

    def of_clients(self) -> Iterator[tuple[str, list[Record], list[Record]]]:
        """Without a column of splits, a client's last characters are kept for testing, also in the midst of a text."""
        for name, train, test in super().of_clients():
            if self.split_column is None:
                texts = self._documents([*train, *test])
                most = round((1 - self.test_fraction) * sum(map(len, texts)))
                cut = [self._cut(texts, most, part) for part in ("train", "test")]
                kept, held_out = ([{self.text: text} for text in part if text] for part in cut)
                yield name, [*kept], [*held_out]
            else:
                yield name, train, test

    def _documents(self, records: Sequence[Record]) -> list[str]:
        texts = [text for record in records for text in self.texts(record)]
        return ["\n".join(texts)] if self.per == "line" and texts else texts

    @staticmethod
    def _cut(texts: Sequence[str], most: int, part: str) -> list[str]:
        """The first `most` characters of texts, or those behind them."""
        ends = np.cumsum([0, *map(len, texts)])[:-1]
        places = [max(most - int(begin), 0) for begin in ends]
        return [text[:at] if part == "train" else text[at:] for text, at in zip(texts, places, strict=True)]

    def rows(self, records: Sequence[Record], tokeniser: Tokeniser) -> Rows:
        documents = tokeniser.coded([text for text in self._documents(records) if text])
        return windows_of(documents, self.length, self.tail, tokeniser.ended)
