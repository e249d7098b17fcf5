"""Which run a fork is a fork of: the file fork.json in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import first_line
from ..storage.atomic_write import write
from ..storage.plain_files import read_text

FILE = "fork.json"


class Lineage(NamedTuple):
    """What a fork comes from. run: the parent's id; folder: its folder; round: after which the fork begins, 0 for the
    beginning; changes: of settings, as ["method.rule.lr was 0.1, is 0.05"]; before: the same of the parent, if it is a
    fork too."""

    run: str
    folder: str
    round: int
    changes: list[str]
    before: Lineage | None = None

    @property
    def sentence(self) -> str:
        """The fork in words."""
        when = f"after round {self.round}" if self.round else "from the beginning"
        return f"fork of run {self.run} {when}: {'; '.join(self.changes) or 'no change'}"

    @property
    def sentences(self) -> list[str]:
        """One for this fork, one for each run before it."""
        return [self.sentence, *(self.before.sentences if self.before else [])]

    def plain(self) -> dict[str, Any]:
        """The lineage as JSON can hold it."""
        before = None if self.before is None else self.before.plain()
        return {**self._asdict(), "before": before}


def of_plain(data: dict[str, Any] | None) -> Lineage | None:
    """The inverse of `Lineage.plain`."""
    if data is None:
        return None
    changes = [str(change) for change in data["changes"]]
    return Lineage(str(data["run"]), str(data["folder"]), int(data["round"]), changes, of_plain(data["before"]))


def lineage_of(folder: str | Path | None) -> Lineage | None:
    """The lineage of the run in a folder; None for a run that is no fork, or that has no folder.

    A damaged file does not prevent a run or a report: it is a lineage that says what is wrong.
    """
    if folder is None or not (file := Path(folder) / FILE).is_file():
        return None
    try:
        return of_plain(json.loads(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Lineage("unknown", "", 0, [f"{FILE} is damaged ({first_line(error)})"])


def write_lineage(folder: Path, lineage: Lineage) -> None:
    write(folder / FILE, json.dumps(lineage.plain(), indent=2) + "\n")
