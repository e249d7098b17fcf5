"""Keys of a file that were given as options, such as --seeds 0: the message says how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import click


class Command(click.Command):
    """A command that knows the keys of its file, if it has the argument `overrides`."""

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
        """The keys of the command's file with this last part."""
        if not any(one.name == "overrides" for one in self.params):
            return []
        from ..engine.config.schema import Experiment
        from .search.plan import Search
        from .study.spec import Study

        known = list(keys(Experiment))
        if self.name == "study":
            known = [*keys(Study), *(f"experiment.{key}" for key in known)]
        elif self.name == "search":
            known += [f"search.{key}" for key in keys(Search)]
        return [key for key in known if key.rpartition(".")[2] == name]


def keys(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a section and of all sections in it, such as federation.rounds."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if hasattr(inner, "model_fields"):
                yield from keys(inner, f"{prefix}{name}.")
