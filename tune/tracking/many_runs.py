"""Tracks a search or a study: a run of its own, and a nested one for each of its runs.

Its runs do not write to the trackers themselves. What a killed process had not written yet is read from their folders.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ...engine.config.schema import Trackers
from ...engine.storage.secrets import redacted_data
from ..executor.source import Run, RunsObserver
from .writer import TOP, End, RunHeader
from .writers import WRITERS, Target


class TrackerOfRuns(RunsObserver[Run]):
    """An observer that writes a search or a study to its trackers. `what`: search or study; `child_tag`: the tag with
    the key of a nested run; `files`: the files and folders that become artifacts at the end."""

    what: ClassVar[str]
    child_tag: ClassVar[str]
    files: ClassVar[tuple[str, ...]]

    def __init__(self, tracking: Trackers, experiment: str, folder: Path, system: bool) -> None:
        """experiment: name of MLflow's experiment, or of W&B's project. folder: of the search or study. system: whether
        to record the load of this machine."""
        self.folder = folder
        self.has_content = False  # whether there is anything to write
        target = Target(self.what, folder, "", tracking.uri, experiment, self.child_tag, system=system)
        self.writers = [WRITERS[name](target) for name in tracking.names if name in WRITERS]
        self.begin(TOP, self.header)

    @abstractmethod
    def header(self) -> RunHeader:
        """The header of the run of the search or study."""

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """The search or study as plain data, with its secrets."""

    def settings(self) -> dict[str, str]:
        """The file of the search or study, without the secrets that it has in the folder."""
        return {f"{self.what}.yaml": yaml.safe_dump(redacted_data(self.plain()), sort_keys=False)}

    def begin(self, key: str, header: Callable[[], RunHeader]) -> None:
        """A run begins."""
        for writer in self.writers:
            writer.begin(key, header)

    def write(self, end: End) -> None:
        """Write that a nested run has ended."""
        self.has_content = True
        for writer in self.writers:
            writer.end(end)

    def ends(self, status: str) -> None:
        if self.has_content:
            files = tuple(self.folder / name for name in self.files)
            self.write(End(TOP, status, files=files, texts=self.settings))
        for writer in self.writers:
            writer.close()
