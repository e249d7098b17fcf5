"""Pieces of Markdown: tables, and what docstrings say about single arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest
from typing import Any

MENTION = re.compile(r"((?:`\w+`(?:, | and )?)+|(?:^|(?<=[.;] )|(?<=, or ))\w+(?:, \w+)*): ")
"""The beginning of words about arguments: "`lr`, `mu`: ", or at the beginning of a sentence "lr, mu: "."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown. Cells are Markdown too."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """The text as a cell: on one line, and without bars that would end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def explained(docstring: str, known: Container[str]) -> dict[str, str]:
    """Name -> what a docstring says of it, where it says "`name`: text" or "`name`, `other`: text" of known names."""
    said: dict[str, str] = {}
    for paragraph in docstring.split("\n\n"):
        text = " ".join(paragraph.split())
        found = [m for m in MENTION.finditer(text) if all(name in known for name in names_in(m[1]))]
        for this, following in zip_longest(found, found[1:]):
            words = text[this.end() : following.start() if following else None].strip().rstrip(";")
            for name in names_in(this[1]):
                said.setdefault(name, words)
    return said


def names_in(mention: str) -> list[str]:
    """The names in "`lr`, `mu`" or "lr and mu"."""
    return [name for name in re.findall(r"\w+", mention) if name != "and"]


def meanings(target: Any, known: Container[str]) -> dict[str, str]:
    """Argument -> what the docstrings of a callable say of it; those of a class and then of its base classes."""
    said: dict[str, str] = {}
    for owner in getattr(target, "__mro__", (target,)):
        if owner is not object:
            for name, words in explained(inspect.cleandoc(owner.__doc__ or ""), known).items():
                said.setdefault(name, words)
    return said


def sentence(text: str) -> str:
    """The text with a full stop at its end, and with a capital letter at its beginning if it begins with a word."""
    text = text.strip()
    begin = text[:1].upper() if re.match(r"[a-z]+(?![\w:=]| =|\.\w)", text) else text[:1]
    return f"{begin}{text[1:]}{'' if text.endswith(('.', '…')) else '.'}" if text else ""
