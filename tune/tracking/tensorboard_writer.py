"""Writes event files for TensorBoard, in the folder `tensorboard` of a run, a search or a study.

    tensorboard --logdir runs

A search or a study has a folder for each of its runs there, which TensorBoard shows under the run's name. The files are
written by tensorboardX; TensorBoard itself is needed only to look at them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ...engine.storage.plain_files import make_folder
from ..identity import effective_settings
from .folder_writer import FolderWriter
from .writer import TOP, Batch, End, package_is_there

MEASURED = ("eval/", "train/", "objective/")
"""Beginnings of the columns whose last values stand beside the settings on TensorBoard's page of hyperparameters."""


class TensorBoardWriter(FolderWriter):
    """Writes event files."""

    tracker = "TensorBoard"

    def __init__(self, folder: Path, what: str) -> None:
        """folder: of the run, search or study. what: run, search or study. Raises ConfigError without tensorboardX."""
        package_is_there("tensorboardX", "tensorboard")
        self.package: Any = None
        self.files: dict[str, Any] = {}  # key -> tensorboardX's writer
        self.last: dict[str, dict[str, float]] = {}  # key -> the last value of each column in MEASURED
        super().__init__(folder, what, "tensorboard")

    def load(self) -> None:
        self.package = import_module("tensorboardX")

    def stop(self) -> None:
        for file in self.files.values():
            file.close()

    def write_records(self, batch: Batch) -> None:
        file, last = self._file(batch.key), self.last.setdefault(batch.key, {})
        for stamp, record in batch.records:
            for name, value in record.items():
                if name != "round":
                    file.add_scalar(name, float(value), int(record["round"]), walltime=stamp / 1000)
            last.update((name, float(value)) for name, value in record.items() if name.startswith(MEASURED))
        file.flush()

    def finish(self, end: End) -> None:
        file, last = self._file(end.key), self.last.pop(end.key, {})
        if end.reason:
            file.add_text("reason", end.reason)
        if last and not self.has_trials(end.key):
            settings = effective_settings(self.header(end.key).parameters).items()
            plain = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in settings}
            for summary in self.package.summary.hparams(plain, last):
                file.file_writer.add_summary(summary)
        self.files.pop(end.key).close()

    def _file(self, key: str) -> Any:
        """The writer of a run's files, which is begun at the first call. TensorBoard then forgets the rounds in the
        files of earlier processes, which are written once more, but not the trials of a search."""
        if key not in self.files:
            place = self.folder if key == TOP else self.folder / self.name_of(key)
            make_folder(place)
            again = None if self.has_trials(key) else 1
            self.files[key] = self.package.SummaryWriter(str(place), purge_step=again)
            tags = yaml.safe_dump(self.header(key).tags, sort_keys=False, allow_unicode=True)
            self.files[key].add_text("tags", "".join(f"    {line}\n" for line in tags.splitlines()))
        return self.files[key]
