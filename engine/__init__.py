"""The engine runs federated optimisation: `run(Experiment(...))`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import resume, run
    from .config.schema import Experiment
    from .runs.observer import Observer
    from .runs.result import Result

__all__ = ["Experiment", "Observer", "Result", "resume", "run"]


PLACES = {
    "Experiment": ".config.schema",
    "Observer": ".runs.observer",
    "Result": ".runs.result",
    "resume": ".api",
    "run": ".api",
}
"""Name -> the module that it comes from."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import fedfleet` does not wait for torch."""
    if name in PLACES:
        return getattr(import_module(PLACES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
