"""Tokenisers of texts from local files: characters, the tokenizer.json of a model, and byte pairs learnt from texts.

A text becomes token numbers, and for each of them the bytes of the text that it stands for, so that losses in bits per
byte can be compared between tokenisers.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files.cache import cache_folder, read_sealed, write_sealed
from ..files.roots import damaged
from ..workload import note
from .characters import END, TOKENS, tokens_of

FILE = "tokenizer.json"
END_OF_BPE = "<end>"


class Coded(NamedTuple):
    """A text as tokens. `ids`, `bytes`: (n,) int32, see the module."""

    ids: np.ndarray
    bytes: np.ndarray

    @staticmethod
    def joined(parts: Sequence[Coded]) -> Coded:
        none = Coded(np.zeros(0, np.int32), np.zeros(0, np.int32))
        return Coded(*map(np.concatenate, zip(none, *parts, strict=True)))


class Tokeniser(ABC):
    """`size`: the number of tokens. `end`: the number of the one behind a text. `padding`: of the one behind that, in
    rows of one text."""

    size: int
    end: int

    @property
    def padding(self) -> int:
        return self.end

    @abstractmethod
    def coded(self, texts: Sequence[str]) -> list[Coded]:
        """The texts, each without special tokens and without `end`."""

    def whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts as a model for classes of texts reads them, with its special tokens."""
        return [coded.ids for coded in self.coded(texts)]

    @property
    def ended(self) -> Coded:
        """The token behind a text."""
        return Coded(np.array([self.end], dtype=np.int32), np.zeros(1, dtype=np.int32))


def codes_of(text: str) -> np.ndarray:
    """(n,) the code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def byte_places(text: str) -> np.ndarray:
    """(n + 1,) the number of bytes before each of n characters in UTF-8, and of all."""
    codes = codes_of(text)
    lengths = 1 + sum((codes >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
    return np.append(0, np.cumsum(lengths))


class Characters(Tokeniser):
    """The 97 tokens of the workload `characters`."""

    size, end = TOKENS, END

    def coded(self, texts: Sequence[str]) -> list[Coded]:
        return [self._coded(text) for text in texts]

    def _coded(self, text: str) -> Coded:
        codes, lengths = codes_of(text), np.diff(byte_places(text)).astype(np.int32)
        before_new_line = np.append((codes[:-1] == ord("\r")) & (codes[1:] == ord("\n")), False)[: len(codes)]
        lengths[1:][before_new_line[:-1]] += 1  # one token for both characters
        return Coded(tokens_of(text)[:-1], lengths[~before_new_line])


class FromFile(Tokeniser):
    """A tokenizer.json, by the package tokenizers. text: the content of the file; end: the text of the token behind
    texts. Raises ValueError for what is none, or has no such token."""

    def __init__(self, text: str, end: str | None, where: object, padding: str | None = None) -> None:
        try:
            self.inner: Any = tokenizers().Tokenizer.from_str(text)
        except Exception as error:  # the package raises Exception itself
            raise ValueError(
                f"tokens: {where} is no tokenizer.json ({error}); give a file that the package tokenizers has written"
            ) from error
        self.inner.no_padding()
        self.inner.no_truncation()
        number = None if end is None else self.inner.token_to_id(end)
        if number is None:
            raise ValueError(
                f"tokens: {where} must have a token for the end of texts, got eos_token {end!r}; name one in "
                "tokenizer_config.json"
            )
        self.size, self.end = self.inner.get_vocab_size(with_added_tokens=True), number
        self.pad = None if padding is None else self.inner.token_to_id(padding)

    @property
    def padding(self) -> int:
        return self.end if self.pad is None else self.pad

    def coded(self, texts: Sequence[str]) -> list[Coded]:
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [
            Coded(np.array(each.ids, dtype=np.int32), bytes_of(text, each.offsets))
            for text, each in zip(texts, found, strict=True)
        ]

    def whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(each.ids, dtype=np.int32) for each in self.inner.encode_batch(list(texts))]


def bytes_of(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(n,) int32: the bytes from the end of the token before to the end of each token; the last one has the rest.
    offsets: (begin, end) of the tokens, in characters."""
    if not offsets:
        return np.zeros(0, dtype=np.int32)
    ends = np.maximum.accumulate([end for _, end in offsets])
    ends[-1] = len(text)
    return np.diff(byte_places(text)[ends], prepend=0).astype(np.int32)


def tokenizers() -> Any:
    """The package. Raises ValueError if it is not installed."""
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError('tokens need the package tokenizers; run: pip install "fedfleet[text]"') from error
    return tokenizers


def of_folder(folder: Path) -> Tokeniser:
    """The tokeniser in a folder, as transformers saves it. Raises ValueError if there is none."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"tokens: there is no {FILE} in {folder}; give a folder that has one, characters or bpe")
    end = named_in(folder, "eos_token") or named_in(folder, "sep_token")
    return FromFile(path.read_text("utf-8"), end, path, named_in(folder, "pad_token"))


def named_in(folder: Path, key: str) -> str | None:
    """The text of a special token that the files of a tokeniser name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise damaged(path, error) from error
        token = found.get(key) if isinstance(found, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def byte_pairs(size: int, texts: Callable[[], Sequence[str]], settings: str) -> Tokeniser:
    """Byte pairs, learnt from texts once and kept in the cache: token 0 is the end, and 256 tokens are bytes. size: the
    number of tokens. settings: what the texts depend on."""
    name = hashlib.blake2b(f"{size}\0{settings}".encode(), digest_size=16).hexdigest()
    target = cache_folder() / "bpe" / f"{name}.json"
    if (found := read_sealed(target)) is None:
        found = learnt(size, texts()).encode()
        write_sealed(target, found)
    note(f"data: {size} byte pairs are learnt from the clients' texts, which is not private")
    return FromFile(found.decode(), END_OF_BPE, target)


def learnt(size: int, texts: Sequence[str]) -> str:
    """The tokenizer.json of so many byte pairs of texts."""
    package = tokenizers()
    tokeniser = package.Tokenizer(package.models.BPE())
    tokeniser.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokeniser.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END_OF_BPE],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokeniser.train_from_iterator(texts, trainer)
    return tokeniser.to_str()


def of_characters() -> str:
    """The tokenizer.json of `Characters`, for models that are saved."""
    package = tokenizers()
    vocabulary = {END_OF_BPE: END, "\n": 1, **{chr(code): code - 30 for code in range(32, 127)}}
    tokeniser = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token=" "))
    replaced = [
        package.normalizers.Replace("\r\n", "\n"),
        package.normalizers.Replace(package.Regex(r"[^\n -~]"), " "),
    ]
    tokeniser.normalizer = package.normalizers.Sequence(replaced)
    tokeniser.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), "isolated")
    tokeniser.decoder = package.decoders.Fuse()
    tokeniser.add_special_tokens([END_OF_BPE])
    return tokeniser.to_str()
