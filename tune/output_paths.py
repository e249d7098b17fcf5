"""Checks of the folders and files that a command is to write, before anything is computed."""

from __future__ import annotations

from pathlib import Path

from ..engine.errors import ConfigError
from ..engine.storage.expanded import check_folder


def check_page(option: str, path: Path) -> Path:
    """The path of an HTML page that an option names, in a folder that exists now. Raises ConfigError."""
    if path.suffix != ".html":
        raise ConfigError(f"{option} must end with .html, got {path}; charts and a .md file may be written beside it")
    check_folder(f"{option} {path}", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_chart(option: str, path: Path) -> None:
    """Raise ConfigError unless a chart can be drawn into the file that an option names, before anything is computed."""
    if path.suffix not in (".png", ".svg", ".pdf") or path.is_dir():
        raise ConfigError(f"{option} must name a .png, .svg or .pdf file, got {str(path)!r}; choose another")
    check_folder(f"{option} {path}", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def check_out(out: Path) -> None:
    """Raise ConfigError for a folder that cannot be created, before anything is computed."""
    check_folder(f"--out {out}", out)
