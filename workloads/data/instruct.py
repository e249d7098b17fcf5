"""Prompts and answers, or chats, to tune language models on: a row is an example, and the answers' tokens are targets.

The target of a place is the token behind it, so that the first token of an answer is predicted at the last place of its
prompt. An example that is too long loses the beginning of its prompt; an answer that is too long by itself loses its
end, and then has no token for the end. Neither is an example without an answer used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ..files.cache import first_line
from ..models.pretrained import transformers
from ..objectives import NOT_COUNTED
from ..workload import note
from .language import Language, Record, Rows
from .tokens import Coded, Tokeniser

OF_CHATS = ("tokenizer_config.json", "chat_template.jinja")
"""The files of a tokeniser that may have its chat template."""
SHOWN = 80
"""The largest number of characters of a cell in a message."""
OF_PROMPT = 8
"""So many tokens of a prompt stay at least where an answer is too long."""


class Example(NamedTuple):
    """The tokens of an example. `answer`: (n,) bool, those that are targets."""

    tokens: Coded
    answer: np.ndarray


def joined(parts: Sequence[tuple[Coded, bool]]) -> Example:
    """An example from parts that belong to answers or do not."""
    answer = np.concatenate([np.full(len(part.ids), of_answer) for part, of_answer in parts])
    return Example(Coded.joined([part for part, _ in parts]), answer)


def shortened(example: Example, length: int) -> Example:
    """An example of at most length + 1 tokens, see the module."""
    over = len(example.answer) - (length + 1)
    if over <= 0:
        return example
    first = int(np.argmax(example.answer)) if example.answer.any() else len(example.answer)
    begin = min(over, max(first - min(OF_PROMPT, length), 0))
    kept = slice(begin, begin + length + 1)
    return Example(Coded(*(column[kept] for column in example.tokens)), example.answer[kept])


def packed(examples: Sequence[Example], length: int, several: bool) -> Iterator[list[Example]]:
    """The examples of each row, in their order: one, or as many as fit with `several`. An example of m tokens has m - 1
    places."""
    row: list[Example] = []
    for example in examples:
        if row and (not several or sum(len(each.answer) - 1 for each in (*row, example)) > length):
            yield row
            row = []
        row.append(example)
    if row:
        yield row


def rows_of(examples: Sequence[Example], length: int, end: int, several: bool, every: bool) -> Rows:
    """Rows of `length` places from examples of at most length + 1 tokens. end: padding. several: whether a row may have
    several examples. every: whether the tokens of prompts are targets too."""
    rows = [*packed(examples, length, several)]
    input, label, document, position = (
        np.full((len(rows), length), fill, dtype=np.int32) for fill in (end, NOT_COUNTED, -1, 0)
    )
    sizes = np.zeros(len(rows), dtype=np.int64)
    for row, own in enumerate(rows):
        begin = 0
        for number, (tokens, answer) in enumerate(own):
            targets = np.ones_like(answer[1:]) if every else answer[1:]
            places = slice(begin, begin + len(targets))
            input[row, places] = tokens.ids[:-1]
            label[row, places] = np.where(targets, tokens.ids[1:], NOT_COUNTED)
            document[row, places], position[row, places] = number, np.arange(len(targets))
            sizes[row] += tokens.bytes[1:][targets].sum()
            begin = places.stop
    return Rows(input, label, document, position, sizes)


@dataclass(frozen=True)
class Instruct(Language):
    """Prompts and answers, or chats, to tune language models on.

    `path`: a table, .jsonl or .parquet. `prompt`, `answer`: the columns with the texts of an example. `input`: a column
    that is joined to the prompt by a new line. `separator`: what is between prompt and answer. `template`: the text
    around a prompt, in which `{prompt}` stands for it. `messages`: in the place of all these, the column with a list of
    {role, content}, which the chat template of the tokeniser makes a text of. `loss_on`: whether the answers' tokens
    and the end behind each are targets, or all tokens. `pack`: whether a row has as many examples as fit, which do not
    see each other, or one. Partitions deal rows.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    input: str | None = None
    separator: str = "\n"
    template: str | None = None
    messages: str | None = None
    loss_on: Literal["answers", "all"] = "answers"
    pack: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must have {{prompt}} where the prompt stands, got {self.template!r}")

    @property
    def apart(self) -> bool:
        return self.pack

    @property
    def columns(self) -> tuple[str, ...]:
        if self.messages is not None:
            return (self.messages,)
        return (self.prompt, self.answer, *filter(None, [self.input]))

    def check(self) -> None:
        if self.messages is not None:
            _ = self.chat
        super().check()

    @cached_property
    def chat(self) -> Any:
        """The tokeniser of transformers with its chat template. Raises ValueError if there is none."""
        if self.folder is None:
            raise ValueError("messages need a tokeniser with a chat template, got characters or bpe; give its folder")
        try:
            chat = transformers().AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of whatever kind transformers raises on a damaged or unknown tokeniser
            raise ValueError(
                f"messages: transformers cannot read the tokeniser in {self.folder} ({first_line(error)}); give a "
                "folder whose tokeniser needs no code of its own"
            ) from error
        if not chat.chat_template:
            raise ValueError(
                f"messages need a chat template, and tokenizer_config.json in {self.folder} has none; give one, or "
                "prompt and answer"
            )
        return chat

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "chat"}

    def data_files(self) -> dict[str, Path]:
        folder = None if self.messages is None else self.folder
        own = [] if folder is None else [folder / name for name in OF_CHATS]
        return {**super().data_files(), **{path.name: path for path in own if path.is_file()}}

    def texts(self, record: Record) -> list[str]:
        if self.messages is not None:
            return [str(message["content"]) for message in self._messages(record)]
        return [self._prompt(record), str(record[self.answer] or "")]

    def _prompt(self, record: Record) -> str:
        more = "" if self.input is None or not record[self.input] else f"\n{record[self.input]}"
        text = f"{record[self.prompt] or ''}{more}"
        return f"{text}{self.separator}" if self.template is None else self.template.replace("{prompt}", text)

    def rows(self, records: Sequence[Record], tokeniser: Tokeniser) -> Rows:
        if self.messages is None:
            found = self._pairs(records, tokeniser)
        else:
            found = [self._of_chat(self._messages(record), tokeniser) for record in records]
        fitting = [shortened(example, self.length) for example in found]
        self._note_cuts(found, fitting)
        used = [each for each in fitting if len(each.answer) > 1 and (each.answer[1:].any() or self.loss_on == "all")]
        return rows_of(used, self.length, tokeniser.end, self.pack, self.loss_on == "all")

    def _pairs(self, records: Sequence[Record], tokeniser: Tokeniser) -> list[Example]:
        """The examples of prompts and answers, each tokenised by itself."""
        prompts, answers = (
            tokeniser.coded([text[place] for text in map(self.texts, records)]) if records else [] for place in (0, 1)
        )
        return [
            joined([(prompt, False), *([(answer, True), (tokeniser.ended, True)] if len(answer.ids) else [])])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _note_cuts(self, found: Sequence[Example], fitting: Sequence[Example]) -> None:
        """Tell the log how many examples are shorter than they were, and how many are left out."""
        pairs = [*zip(found, fitting, strict=True)]
        prompts = sum(len(a.answer) > len(b.answer) and a.answer.sum() == b.answer.sum() for a, b in pairs)
        answers = sum(a.answer.sum() > b.answer.sum() for a, b in pairs)
        empty = sum(not example.answer[1:].any() for example in fitting) if self.loss_on == "answers" else 0
        if prompts or answers or empty:
            note(
                f"data: of {len(found)} examples, {prompts} lose the beginning of their prompt, {answers} the end of "
                f"their answer, and {empty} have no answer and are left out"
            )

    # --- chats ----------------------------------------------------------------------------------------------------
    def _messages(self, record: Record) -> list[Any]:
        """The messages of a chat. Raises ValueError for anything else."""
        found = record[self.messages or ""]
        if not isinstance(found, list) or not all(
            isinstance(message, dict) and {"role", "content"} <= message.keys() for message in cast(list[Any], found)
        ):
            shown = json.dumps(found, default=str)
            raise ValueError(
                f"messages: {self.messages} must have a list of {{role, content}} in each row of {self.path}, got "
                f"{shown if len(shown) <= SHOWN else shown[:SHOWN] + '…'}"
            )
        return cast(list[Any], found)

    def _of_chat(self, messages: Sequence[Any], tokeniser: Tokeniser) -> Example:
        """The example of a chat, whose answers are what the template marks as generated, or the turns of the assistant.
        Raises ValueError where a template changes the text before a turn afterwards."""
        ids = self._applied(messages)
        if "{% generation" in self.chat.chat_template or "{%- generation" in self.chat.chat_template:
            found = self.chat.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            answer = np.array(found["assistant_masks"], dtype=bool)
        else:
            answer = self._turns(messages, ids)
        return Example(Coded(ids, self._bytes(ids)), answer)

    def _applied(self, messages: Sequence[Any], prompt: bool = False) -> np.ndarray:
        found = self.chat.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=prompt)
        return np.array(found["input_ids"], dtype=np.int32)

    def _turns(self, messages: Sequence[Any], ids: np.ndarray) -> np.ndarray:
        """(n,) bool: the tokens of the turns of the assistant."""
        answer = np.zeros(len(ids), dtype=bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, behind = self._applied(messages[:number], True), self._applied(messages[: number + 1])
            for part in (before, behind):
                if not np.array_equal(part, ids[: len(part)]):
                    raise ValueError(
                        f"messages: the chat template changes what is before turn {number} afterwards, so that its "
                        "answers cannot be found; mark them with {% generation %} in the template"
                    )
            answer[len(before) : len(behind)] = True
        return answer

    def _bytes(self, ids: np.ndarray) -> np.ndarray:
        """(n,) int32: the bytes of each token's text; those of special tokens count as none."""
        special = set(self.chat.all_special_ids)
        texts = ["" if number in special else self.chat.decode([number]) for number in ids.tolist()]
        return np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.int32)
