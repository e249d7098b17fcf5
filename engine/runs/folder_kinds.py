"""What the folders of commands hold: a run, a study or a search. The module is quick to import."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

FILE_OF_KIND = {"run": "config.yaml", "study": "study.yaml", "search": "search.yaml"}
"""What a folder may hold, and the file that says so. The runs of studies and searches lie in folders below it."""


def refuse_other_kind(path: Path, kind: str) -> None:
    """Raise ConfigError if the folder holds something else than what shall be written into it, since both have files of
    the same names. kind: of FILE_OF_KIND."""
    for held, name in FILE_OF_KIND.items():
        if held != kind and (path / name).exists():
            raise ConfigError(
                f"--out {path} already holds a {held} ({name}), and a {kind} needs a folder of its own; choose another "
                "folder"
            )
