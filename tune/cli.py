"""The command line. The module is quick to import: the file of a command is imported when the command is called, so
that `--help` and the completion of names wait for none of them."""

from __future__ import annotations

from .keyboard import arm, finish

if __name__ == "__main__":
    arm()  # before the other imports, which take some time

from importlib import import_module

import click
from click.shell_completion import CompletionItem

COMMANDS = {
    "attach": "Follow RUN to its end: the id or folder of a detached run, or the id of a job.",
    "bench": "Compare the speed of the engine on this machine with a plain two-process PyTorch loop.",
    "compare": "Compare the runs in these folders.",
    "contribution": "Say what each client contributes to the complete run in the folder RUN.",
    "data": "Check the data sets that STUDY needs: what is missing, damaged or here in part, and all SHA-256.",
    "doctor": "Check versions on every node, placement of workers, storage, authentication and the MLflow store.",
    "export": "Write models of the complete run in the folder RUN to files: those of clients, or that of the server.",
    "fleet": "Print percentiles of the devices in the section `systems` of EXPERIMENT, and write them to files.",
    "fork": "Go on from a committed round of the run in DIRECTORY with other settings, as a run of its own.",
    "list": "List what can be chosen by name.",
    "partition": "Draw how EXPERIMENT distributes its data over the clients, and print measures of heterogeneity.",
    "report": "Write the report of the run, study or search in FOLDER, from what has been run so far.",
    "resume": "Continue the run in DIRECTORY from its last checkpoint.",
    "run": "Run EXPERIMENT, a YAML file or a shipped name (see `fedfleet list experiments`).",
    "search": "Search the ranges in EXPERIMENT, a YAML file or a shipped name.",
    "small-model": "Train a small language model of transformers on a text, as a base for tests and studies.",
    "show": "Print the configuration, the parameters by kind, and the bytes that one round sends.",
    "study": "Run STUDY, a YAML file or a shipped name (see `fedfleet list studies`), or continue it where it stopped.",
    "submit": "Run EXPERIMENT as a job of a cluster and follow its log.",
}
"""Name of a command, which is `commands/NAME.py`, with _ for - -> the first sentence of its help."""


def loaded(name: str) -> click.Command:
    """The command with a name."""
    return import_module(f".commands.{name.replace('-', '_')}", "fedfleet.tune").command


class Commands(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return loaded(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fedfleet")
def main() -> None:
    """FedFleet: federated optimisation at scale, with stateful clients and runs that can be repeated bit for bit."""


if __name__ == "__main__":
    finish(main)
