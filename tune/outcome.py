"""The end of a command: what it prints, and its exit status."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from ..engine.errors import ConfigError, FedFleetError, Interrupted
from .run_files import privacy_spent
from .streams import say, tell


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of commands that prints an error as one sentence instead of a traceback.

    The exit status is 2 for a configuration that cannot run, 1 for a failure, 128 + signal for an interruption.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            fail(error, 2)
        except Interrupted as error:
            tell(f"interrupted{error.detail}")
            sys.exit(128 + error.signal)
        except (FedFleetError, OSError) as error:
            fail(error, 1)
        except KeyboardInterrupt:
            tell("interrupted")
            sys.exit(130)

    return wrapped


def fail(error: Exception, status: int) -> None:
    tell(f"error: {' '.join(str(error).split())}")
    sys.exit(status)


def show_result(result: Any, as_json: bool) -> None:
    say(json.dumps(result.summary()) if as_json else text_of(result))


def text_of(result: Any) -> str:
    """A run's result in three lines, in one more if it is private, and in one more for each warning."""
    summary, spent = result.summary(), privacy_spent(result.directory) if result.directory else ""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items() if not math.isnan(value))
    return "\n".join(
        [
            f"{summary['rounds']} rounds in {summary['seconds']:.1f} s, the whole run in "
            f"{summary['total_seconds']:.1f} s   {metrics}",
            f"down {megabytes(summary['bytes_down'])}, up {megabytes(summary['bytes_up'])}   "
            f"model sha256 {summary['model_sha256'][:16]}…",
            f"run {summary['run_id']} in {summary['directory']}",
            *([f"privacy: {spent}"] if spent else []),
            *(f"warning: {sentence}" for sentence in summary["warnings"]),
        ]
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
