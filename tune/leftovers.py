"""Checks of `--out`: the folder for the files of a run, a search or a study, a page or a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..engine.errors import ConfigError
from ..engine.storage.expanded import expanded
from .streams import tell


class NoFolder(click.ClickException):
    """The value of an option is no path."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        tell(f"error: {self.message}")


class Out(click.ParamType):
    """Type of a path on the command line. The empty text is refused, since it would mean the current folder.

    here: whether the path is one of this machine, so that a ~ is the home folder of this user.
    """

    name = "path"

    def __init__(self, here: bool = True) -> None:
        self.here = here

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value).strip():
            flag = param.opts[0] if param is not None else "--out"
            raise NoFolder(f"{flag} must name a folder or file, got an empty text; give one, or leave {flag} out")
        try:
            return expanded(value) if self.here else Path(value)
        except ConfigError as error:
            raise NoFolder(str(error)) from None


def check_page(option: str, path: Path) -> Path:
    """The path of an HTML page that an option names, in a folder that exists now. Raises ConfigError."""
    from ..engine.config.limits import check_folder

    if path.suffix != ".html":
        raise ConfigError(f"{option} must end with .html, got {path}; charts and a .md file may be written beside it")
    check_folder(f"{option} {path}", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_chart(option: str, path: Path) -> None:
    """Raise ConfigError unless a chart can be drawn into the file that an option names, before anything is computed."""
    from ..engine.config.limits import check_folder
    from ..engine.errors import ConfigError

    if path.suffix not in (".png", ".svg", ".pdf") or path.is_dir():
        raise ConfigError(f"{option} must name a .png, .svg or .pdf file, got {str(path)!r}; choose another")
    check_folder(f"{option} {path}", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def check_out(out: Path) -> None:
    """Raise ConfigError for a folder that cannot be created, before anything is computed."""
    from ..engine.config.limits import check_folder

    check_folder(f"--out {out}", out)
