"""The end of a command that fails: what it prints, and its exit status."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import Any

from ..engine.errors import ConfigError, FedFleetError, Interrupted
from .streams import tell


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
    text = str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"{error.filename or 'a file'}: {error.strerror}; make room, and give the same command again"
    tell(f"error: {' '.join(text.split())}")
    sys.exit(status)
