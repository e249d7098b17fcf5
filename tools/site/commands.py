"""The page of the commands: usage, arguments and options as `fedfleet COMMAND --help` has them."""

from __future__ import annotations

import inspect

import click

from fedfleet.tune.cli import COMMANDS, loaded, main

from .text import sentence, table

HEAD = """\
# Commands

This page is generated from the command line. Every command also explains itself: `fedfleet COMMAND --help`.

A command that cannot start its work ends with status 2 and one sentence on what is wrong. A run that fails (it
diverged, or a client raised an exception) ends with status 1.
"""


def page() -> str:
    rows = [(f"[`{name}`](#{name})", sentence(text)) for name, text in COMMANDS.items()]
    with click.Context(main, info_name="fedfleet") as context:
        sections = [section(name, loaded(name), context) for name in COMMANDS]
    return "\n".join([HEAD, table(("command", "what it does"), rows), *sections])


def section(name: str, command: click.Command, parent: click.Context) -> str:
    with click.Context(command, info_name=name, parent=parent) as context:
        usage = command.get_usage(context).removeprefix("Usage: ")
        records = [record for p in command.params if (record := p.get_help_record(context))]
    rows = [(f"`{option}`", sentence(text)) for option, text in records if text]
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    options = table(("option", "meaning"), rows) if rows else ""
    return f"## `{name}` {{ #{name} }}\n\n```text\n{' '.join(usage.split())}\n```\n\n{text}\n\n{options}"
