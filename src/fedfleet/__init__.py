"""FedFleet's Python API: the names that scripts and notebooks use.

    import fedfleet

    result = fedfleet.run(fedfleet.load("digits", "federation.rounds=20"))
    result.plot()

This folder is installed as the package `fedfleet` itself, beside its four sub-packages. Every name is imported when it
is first used, so that `import fedfleet` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.api import resume, rounds, run
    from .engine.backends.ray.connect import shutdown
    from .engine.config.schema import (
        Checkpoint,
        Engine,
        Evaluate,
        Experiment,
        Federation,
        Local,
        Tracking,
        WorkerGroup,
    )
    from .engine.errors import ConfigError, Diverged, FedFleetError, Interrupted
    from .engine.records.history import Record
    from .engine.runs.observer import Observer
    from .engine.runs.result import Result
    from .engine.runs.rounds import Rounds
    from .tune.comparison import compare
    from .tune.files import load
    from .tune.forking import fork
    from .tune.progress import Progress
    from .tune.search.api import search
    from .tune.search.run import Found

    __version__: str

__all__ = [
    "Checkpoint",
    "ConfigError",
    "Diverged",
    "Engine",
    "Evaluate",
    "Experiment",
    "FedFleetError",
    "Federation",
    "Found",
    "Interrupted",
    "Local",
    "Observer",
    "Progress",
    "Record",
    "Result",
    "Rounds",
    "Tracking",
    "WorkerGroup",
    "__version__",
    "compare",
    "fork",
    "load",
    "resume",
    "rounds",
    "run",
    "search",
    "shutdown",
]

_MODULES = {
    "engine.api": ("resume", "rounds", "run"),
    "engine.backends.ray.connect": ("shutdown",),
    "engine.config.schema": (
        *("Checkpoint", "Engine", "Evaluate", "Experiment", "Federation", "Local", "Tracking", "WorkerGroup"),
    ),
    "engine.errors": ("ConfigError", "Diverged", "FedFleetError", "Interrupted"),
    "engine.records.history": ("Record",),
    "engine.runs.observer": ("Observer",),
    "engine.runs.result": ("Result",),
    "engine.runs.rounds": ("Rounds",),
    "tune.comparison": ("compare",),
    "tune.files": ("load",),
    "tune.forking": ("fork",),
    "tune.progress": ("Progress",),
    "tune.search.api": ("search",),
    "tune.search.run": ("Found",),
}
"""Module of this package -> the names that come from it."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedfleet")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
