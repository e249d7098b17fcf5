"""The engine runs federated optimisation: `run(Experiment(...))`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import resume, run
    from .config.schema import Experiment
    from .runs.observer import Observer
    from .runs.result import Result

__all__ = ["Experiment", "Observer", "Result", "resume", "run"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import fedfleet` does not wait for torch."""
    if name == "Experiment":
        from .config.schema import Experiment

        return Experiment
    if name == "Observer":
        from .runs.observer import Observer

        return Observer
    if name in ("Result", "resume", "run"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
