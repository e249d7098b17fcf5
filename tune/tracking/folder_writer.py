"""What writers have in common that write files into a folder of the run, search or study."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from pathlib import Path

from ...engine.storage.plain_files import make_folder, open_plain, read_text
from .writer import TOP, End, Writer

ENDED = "ended.txt"
"""File with a line for each run of a search or study that has been written whole: its key and its status."""


class FolderWriter(Writer):
    """Writes files into a folder. What is resumed writes the runs that have not ended anew: their records come once
    more from the first round on."""

    is_local = True

    def __init__(self, folder: Path, what: str, name: str = "") -> None:
        """folder: of the run, search or study. what: run, search or study. name: of the folder in it for the files, ""
        for the folder itself."""
        self.folder, self.name = folder / name, name
        super().__init__(what)

    def open(self) -> None:
        """Make the folder for the files. Only that of a run may be a link, as its user chose it."""
        if self.name:
            make_folder(self.folder)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)

    def begin_top(self) -> None:
        """Nothing: the files of the top run begin with its first record."""

    def stop(self) -> None:
        """Nothing runs beside the thread."""

    def is_refusal(self, error: Exception) -> bool:
        return False

    def is_written(self, end: End) -> bool:
        file = self.folder / ENDED
        return end.once and file.is_file() and line_of(end) in read_text(file).splitlines()

    def write_end(self, end: End) -> None:
        self.finish(end)
        if end.key != TOP:
            append(self.folder / ENDED, f"{line_of(end)}\n")

    @abstractmethod
    def finish(self, end: End) -> None:
        """Write what comes with the end of a run, whose records have been written."""

    def name_of(self, key: str) -> str:
        """The name of a run of the search or study as the name of a file or folder."""
        return re.sub(r"^\.|[^\w.,=+ -]", "_", self.header(key).name)

    def has_trials(self, key: str) -> bool:
        """Whether the records are the trials of a search, whose round is the number of the trial."""
        return key == TOP and self.what != "run"


def append(place: Path, text: str) -> None:
    """Write text in UTF-8 to the end of a plain file, which is made if it is missing. Raises OSError."""
    handle = open_plain(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(handle, "a", encoding="utf-8", newline="") as file:
        file.write(text)


def line_of(end: End) -> str:
    """What stands in ENDED for the end of a run."""
    return f"{end.key} {end.status}"
