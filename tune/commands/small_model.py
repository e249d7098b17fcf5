"""`fedfleet small-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import click

from ...engine.errors import ConfigError
from ..exit_status import report_errors
from ..streams import say
from .options import KeyedCommand, Out

LARGEST_SEED = (1 << 63) - 1


@click.command("small-model", cls=KeyedCommand)
@click.argument("folder", metavar="FOLDER", type=Out())
@click.option("--text", required=True, type=Out(), help="The text; its first nine tenths are trained on.")
@click.option("--kind", type=click.Choice(["llama", "gpt2"]), default="llama", show_default=True, help="Architecture.")
@click.option(
    "--layers",
    type=click.Choice(["2", "4"]),
    default="4",
    show_default=True,
    help="Number of layers, of width 64 with 2 and of width 128 with 4.",
)
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Number of steps.")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), default=0, show_default=True, help="Of all draws.")
@report_errors
def command(folder: Path, text: Path, kind: str, layers: str, steps: int, seed: int) -> None:
    """Train a small language model of transformers on a text, as a base for tests and studies.

    FOLDER gets config.json, model.safetensors and the tokeniser, which has a token for each of 95 characters, as
    `model: {name: pretrained, folder: FOLDER}` reads them. The same arguments give the same model on one machine with
    as many threads. It needs pip install "fedfleet[text]".
    """
    from ...workloads.models.pretraining import pretrain

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER must be empty or new, got {folder}; give another one")
    try:
        loss = pretrain(
            folder, text, cast(Literal["llama", "gpt2"], kind), cast(Literal[2, 4], int(layers)), steps, seed
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    say(f"{folder}: loss {loss:.3f} in step {steps}")
