"""`fedfleet export`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...engine.config.schema import part_name
from ...engine.errors import ConfigError
from ...engine.run_spec import RunSpec
from ...engine.runs.client_states import FOLDER
from ...engine.runs.result import Result
from ...engine.runs.saved_files import save_model
from ...engine.storage.atomic_write import write
from ...engine.user_code import plugin_errors
from ...workloads.wrappers.wrapped import Wrapped
from ..exit_status import report_errors
from ..forking import client_numbers
from ..streams import say
from .options import KeyedCommand, Out

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("tensors", "personal", "adapter", "merged", "model")


@click.command("export", cls=KeyedCommand)
@click.argument("run", metavar="RUN", type=Out())
@click.option(
    *("--client", "--clients", "clients"),
    multiple=True,
    metavar="I,J",
    help="The clients (may be repeated), or all; needed for --as tensors and --as personal.",
)
@click.option(
    *("--as", "form"),
    type=click.Choice(FORMS),
    default="tensors",
    help="All tensors of a model (default); those alone that stay with the client; its adapter alone, in the layout of "
    "peft; the network without adapters, whose weights have the changes; or this as a folder of transformers with "
    "config.json and the tokeniser. Without clients, the last three are of the server.",
)
@click.option(
    "--adapt",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=1,
    default=None,
    metavar="N",
    help="The models after the adaptation of the run, or after number N of several.",
)
@click.option(
    "--out",
    type=Out(),
    help=f"The file of one client, or the folder of the files of several (default: {FOLDER}/ in RUN).",
)
@report_errors
def command(run: Path, clients: tuple[str, ...], form: str, adapt: int | None, out: Path | None) -> None:
    """Write models of the complete run in the folder RUN to files: those of clients, or that of the server.

    By default a file has all tensors of the model that a client is served with after the last round. Runs with an
    adapter, or with a model of transformers, have further forms, in which the server's model can be written, too; its
    tensors as they are lie in model.safetensors in RUN. Plug-ins that the run's config.yaml names are executed: do not
    export from a folder that you do not trust.
    """
    if form not in ("tensors", "personal"):
        return export_adapted(run, clients, form, adapt or 0, out)
    if not clients:
        raise ConfigError("--client is missing; give the clients whose models are written, or all, or --as merged")
    numbers = None if clients == ("all",) else client_numbers(clients, "--client")
    states = Result.load(run).client_states(adapt or 0)
    chosen = states.clients if numbers is None else numbers
    states.check(chosen)
    folder = out or run / FOLDER
    if out is not None and numbers is not None and len(numbers) == 1:
        files = [out]
    else:
        files = [folder / states.file_name(client) for client in chosen]
    for client, file in zip(chosen, files, strict=True):
        states.save(client, file, "personal" if form == "personal" else "whole")
    say(str(files[0]) if len(files) == 1 else f"{len(files)} models in {folder}")


def export_adapted(run: Path, clients: tuple[str, ...], form: str, adapt: int, out: Path | None) -> None:
    """Write the model of one client, or of the server, as its adapter alone or without an adapter."""
    if out is None:
        raise ConfigError(f"--out is missing; give a {'file' if form == 'merged' else 'folder'} for --as {form}")
    result = Result.load(run)
    numbers = client_numbers(clients, "--client") if clients else []
    if len(numbers) > 1:
        raise ConfigError(f"--client: --as {form} writes one model, got {len(numbers)} clients; give one of them")
    if adapt and not numbers:
        raise ConfigError("--adapt is for models of clients, got none; give --client")
    tensors = result.client_model(numbers[0], adapt) if numbers else result.model
    run_spec = RunSpec.of(result.run_id, result.experiment)
    if form == "adapter" and run_spec.held:
        method = part_name(result.experiment.method)
        raise ConfigError(
            f"{run}: --as adapter has the factors alone, and {method} has changed the weights, too; give --as merged"
        )
    workload: Any = run_spec.workload
    while isinstance(workload, Wrapped):
        workload = workload.of
    adapter: Any = getattr(workload, "adapter", None)
    if adapter is None and form != "model":
        raise ConfigError(
            f"{run}: --as {form} needs a run with workload.adapter, got none; for the tensors of a client leave "
            "--as out"
        )
    if not hasattr(workload, "published"):
        raise ConfigError(
            f"{run}: --as {form} needs a workload with a network, got none; for the tensors of a client leave --as out"
        )
    with plugin_errors(str(run)):
        if adapter is None or form == "model":
            whole = tensors if adapter is None else adapter.merged(workload.outline, tensors)
            save_files(workload.published(whole), out)
        elif form == "merged":
            save(adapter.merged(workload.outline, tensors), out)
        else:
            save_files(adapter.written(workload.outline, tensors), out)
    say(str(out))


def save_files(files: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a folder: mappings of JSON, bytes, or tensors, whose files say that they are torch's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            write(folder / name, content)
        elif name.endswith(".json"):
            write(folder / name, json.dumps(content, indent=2) + "\n")
        else:
            save(content, folder / name)


def save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors. The folder of the file is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_model({name: value.contiguous() for name, value in tensors.items()}, file)
