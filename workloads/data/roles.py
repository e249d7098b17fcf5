"""The speaking roles of Shakespeare's plays as clients of a language model, each with the lines that it speaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from ..files.roots import Layout, locate
from .language import CausalLm, Record

USER, PLAY, SPLIT = "user", "play", "split"
FILE = "shakespeare_roles.parquet"
SHOWN = 3
"""The largest number of names in a message."""


@dataclass(frozen=True)
class Roles(CausalLm):
    """Language models on the lines of Shakespeare's roles. Each role is a client, whose lines are one document, joined
    by new lines; the column `split` says which of them it keeps for testing.

    `data_root`: a folder that contains shakespeare/shakespeare_roles.parquet, or that folder itself; by default
    $FEDFLEET_DATA. `path`: such a file elsewhere, with the columns user, play, split and text. `plays`: the plays whose
    roles are clients, all by default. `without_plays`: plays that are left out. `least`: the number of characters of
    training text from which on a role is a client. `largest`: how many of these roles are clients, those with the most
    characters of training text, of equal ones the first by name; null for all.
    """

    path: str = field(default="", kw_only=True)
    per: Literal["document", "line"] = "line"
    client: str | None = USER
    split_column: str | None = SPLIT
    data_root: str | None = None
    plays: tuple[str, ...] = ()
    without_plays: tuple[str, ...] = ()
    least: int = 0
    largest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.client, self.split_column) != (USER, SPLIT):
            raise ValueError(
                f"client={USER} and split_column={SPLIT} must hold, as in the file, got client={self.client}, "
                f"split_column={self.split_column}; leave both out"
            )
        if self.least < 0:
            raise ValueError(f"least >= 0 must hold, got least={self.least}")
        if self.largest is not None and self.largest < 1:
            raise ValueError(f"largest >= 1 must hold, got largest={self.largest}; leave it out for all roles")

    @property
    def file(self) -> Path:
        if self.path:
            return super().file
        layout = Layout((FILE,), (FILE,), lambda files, train: files)
        fetch = "put a table with the columns user, play, split and text there, or give path"
        return locate(self.data_root, "shakespeare", (layout,), fetch).train[0]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, PLAY)

    @property
    def selection(self) -> str:
        return f"{self.plays} {self.without_plays} {self.least} {self.largest}"

    def records(self) -> Iterator[Record]:
        lines = list(super().records())
        self._check_plays({str(line[PLAY]) for line in lines})
        lines = [line for line in lines if self._of_plays(str(line[PLAY]))]
        sizes = Counter[str]()
        for line in lines:
            sizes[self.cell(line, USER)] += len(self.texts(line)[0]) if line[SPLIT] != "test" else 0
        roles = sorted((role for role in sizes if sizes[role] >= self.least), key=lambda role: (-sizes[role], role))
        if not roles:
            most = max(sizes.values(), default=0)
            raise ValueError(f"least: a role must have so many characters, got least={self.least} of {most} at most; "
                             "lower it, or take more plays")  # fmt: skip
        chosen = {*roles[: self.largest]}
        return (line for line in lines if self.cell(line, USER) in chosen)

    def _of_plays(self, play: str) -> bool:
        return (not self.plays or play in self.plays) and play not in self.without_plays

    def _check_plays(self, known: set[str]) -> None:
        """Raise ValueError for a play that the file does not have."""
        named: Sequence[tuple[str, tuple[str, ...]]] = (("plays", self.plays), ("without_plays", self.without_plays))
        for key, plays in named:
            for play in plays:
                if play not in known:
                    near = get_close_matches(play, sorted(known), SHOWN, 0.3) or sorted(known)[:SHOWN]
                    raise ValueError(f"{key}: no play is called {play}; nearest are {', '.join(near)}")
