"""How a command ends: what it prints, and with which status."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from ..engine.errors import ConfigError, Diverged, FedFleetError, Interrupted, NotSaved


def told(command: Callable[..., Any]) -> Callable[..., Any]:
    """One sentence and a status instead of a traceback: 2 for what cannot run as written, 1 for what failed."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            fail(error, 2)
        except Interrupted as error:
            click.echo(f"interrupted{error.detail}", err=True)
            sys.exit(128 + error.signal)
        except (FedFleetError, OSError) as error:
            fail(error, 1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)

    return wrapped


def fail(error: Exception, status: int) -> None:
    click.echo(f"error: {' '.join(str(error).split())}", err=True)
    sys.exit(status)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Say how to go on, where a run that stops early left a checkpoint. What Ray prints meanwhile goes to stderr:
    stdout is for the result."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (ConfigError, Diverged, NotSaved):
        raise
    except FedFleetError as error:
        from ..engine.state.checkpoint import written

        last = written(folder)[-1].name if written(folder) else ""
        if not last:
            raise
        how = f"; checkpoint after round {int(last.removeprefix('round-'))}; to go on: fedfleet resume {folder}"
        if isinstance(error, Interrupted):
            raise Interrupted(error.signal, how) from None
        raise FedFleetError(f"{error}{how}") from error


def show_result(result: Any, as_json: bool) -> None:
    click.echo(json.dumps(result.summary()) if as_json else told_of(result))


def told_of(result: Any) -> str:
    summary = result.summary()
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    return "\n".join(
        [
            f"{summary['rounds']} rounds in {summary['seconds']:.1f} s   {metrics}",
            f"down {megabytes(summary['bytes_down'])}, up {megabytes(summary['bytes_up'])}   "
            f"model sha256 {summary['model_sha256'][:16]}…",
            f"run {summary['run_id']} in {summary['directory']}",
        ]
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
