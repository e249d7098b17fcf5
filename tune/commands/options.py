"""What several commands have in common: options, overrides, and how the command line tells what went wrong in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ...engine.config.schema import KEYS_OF_PARTS, Experiment, dotted_keys
from ...engine.errors import ConfigError
from ...engine.storage.expanded import expanded
from ..streams import tell

overrides = click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
at = click.option(
    "--address", help="Address of a running Ray cluster: auto (on this machine), HOST:PORT, or ray://HOST:PORT."
)
quiet = click.option("--quiet", is_flag=True, help="Print no progress, only the result.")
json_result = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line."
)


def on_cluster(overrides: Iterable[str], address: str | None, *keys: str) -> tuple[str, ...]:
    """The overrides, with those of --address in front. keys: those to set (default: the backend and the address)."""
    if address is None:
        return tuple(overrides)
    keys = keys or ("engine.backend", "engine.address")
    values = {"engine.backend": "ray", "engine.address": address}
    return (*(f"{key}={values[key]}" for key in keys), *overrides)


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


class KeyedCommand(click.Command):
    """A command that knows the keys of its file, if it has the argument `overrides`. To a key that was given as an
    option, such as --seeds 0, it answers how it is written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            found = self._keys(error.option_name.lstrip("-").replace("-", "_"))
            if not found:
                raise
            told = f"No such option '{error.option_name}'. Write keys without dashes: "
            raise click.UsageError(told + " or ".join(f"{key}=VALUE" for key in found), ctx) from None

    def _keys(self, name: str) -> list[str]:
        """The keys of the command's file that are called so, or have this last part."""
        if not any(one.name == "overrides" for one in self.params):
            return []
        known = [*dotted_keys(Experiment), *KEYS_OF_PARTS]
        if self.name in ("study", "data"):
            from ..study.spec import Study

            known = [*dotted_keys(Study), *(f"experiment.{key}" for key in known)]
        elif self.name == "search":
            from ..search.plan import SearchSettings

            known += [f"search.{key}" for key in dotted_keys(SearchSettings)]
        return [key for key in dict.fromkeys(known) if f".{key}".endswith(f".{name}")]
