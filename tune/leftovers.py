"""Where the files of a run, a search or a study may go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class NoFolder(click.ClickException):
    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)


class Out(click.ParamType):
    """A path on the command line. The empty text is refused: as a path it would be the folder that one is in."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value).strip():
            flag = param.opts[0] if param is not None else "--out"
            raise NoFolder(f"{flag} must name a folder or file, got an empty text; give one, or leave {flag} out")
        return Path(value)


def check_out(out: Path) -> None:
    """Refuse a folder that could not be made, before anything is computed."""
    from ..engine.config.limits import check_folder

    check_folder(f"--out {out}", out)
