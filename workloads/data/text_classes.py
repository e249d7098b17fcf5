"""Your own texts with a class for each, for models of transformers from a local folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from ..models.pretrained import CONFIG, Pretrained
from ..models.stored import StoredTensors
from ..objectives import Classes
from ..partitions.natural import client_numbers
from ..workload import HELD_OUT, Columns, Params
from .language import Record, TextTable


@dataclass(frozen=True)
class TextClasses(TextTable):
    """The classes of your own texts, by a pretrained model with a head for classes. Texts are cut behind `length`
    tokens.

    `path`: a table, .jsonl or .parquet. `text`, `label`: the columns with the texts and with their classes. `labels`:
    the classes, in the order of the numbers of the head.
    """

    text: str = "text"
    label: str = "label"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.labels) < 2:
            raise ValueError(f"labels must name two classes or more, got {list(self.labels)}; such as [bad, good]")

    @property
    def apart(self) -> bool:
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, self.label)

    @property
    def classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.labels)

    @property
    def objective(self) -> Classes:
        return Classes(self.classes)

    def check(self) -> None:
        if not isinstance(self.model, Pretrained):
            raise ValueError(
                f"model must be pretrained for classes of texts, got {type(self.model).__name__}; choose parquet_text "
                "for networks on words"
            )
        super().check()

    @property
    def with_head(self) -> Pretrained:
        """The model with a head for classes."""
        assert isinstance(self.model, Pretrained)  # otherwise `check` refuses it
        return replace(self.model, head="classify")

    def build(self) -> nn.Module:
        return self.with_head.build(self.shape, self.classes)

    def _of_model(self) -> StoredTensors | None:
        return self.with_head.stored(self.shape, self.classes)

    def published(self, p: Params) -> dict[str, Any]:
        files = self.with_head.published(self.shape, self.classes, p)
        names = {str(number): label for number, label in enumerate(self.labels)}
        files[CONFIG] |= {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}
        return files

    def texts(self, record: Record) -> list[str]:
        return [str(record[self.text] or "")]

    def load(self) -> tuple[Columns, Columns]:
        train: list[tuple[str, Record]] = []
        test: list[tuple[str, Record]] = []
        for name, own, held_out in self.of_clients():
            train += [(name, record) for record in own]
            test += [(name, record) for record in held_out if own]
        for records, part in ((train, "training"), (test, "test")):
            if not records:
                raise ValueError(f"{self.path} must have {part} rows; take more texts")
        of_test = self.named([record for _, record in test])
        if self.client is None:
            return self.named([record for _, record in train]), of_test
        held_out = np.arange(len(train) + len(test)) >= len(train)
        rows = {"client": client_numbers([name for name, _ in (*train, *test)]), HELD_OUT: held_out}
        return {**self.named([record for _, record in (*train, *test)]), **rows}, of_test

    def named(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """The columns of records. Raises ValueError for a label that is none of `labels`."""
        numbers = {name: number for number, name in enumerate(self.labels)}
        labels = [self.cell(record, self.label) for record in records]
        if unknown := sorted({*labels} - {*numbers}):
            raise ValueError(f"labels must name all classes of {self.path}, got no {unknown[0]}; add it")
        shape = (len(records), self.length)
        input, document = np.full(shape, self.tokeniser.padding, np.int32), np.full(shape, -1, np.int32)
        for row, ids in enumerate(self.tokeniser.whole([self.texts(record)[0] for record in records])):
            count = max(min(len(ids), self.length), 1)  # a text without tokens is one of padding
            input[row, : len(ids)], document[row, :count] = ids[: self.length], 0
        position = np.broadcast_to(np.arange(self.length, dtype=np.int32), shape).copy()
        label = np.array([numbers[name] for name in labels], dtype=np.int64)
        return {"input": input, "document": document, "position": position, "label": label}
