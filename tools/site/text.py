"""Pieces of Markdown: tables and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown. Cells are Markdown too."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """The text as a cell: on one line, and without bars that would end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def sentence(text: str) -> str:
    """The text with a full stop at its end, and with a capital letter at its beginning if it begins with a word."""
    text = text.strip()
    begin = text[:1].upper() if re.match(r"[a-z]+(?![\w:=]| =|\.\w)", text) else text[:1]
    return f"{begin}{text[1:]}{'' if text.endswith(('.', '…')) else '.'}" if text else ""
