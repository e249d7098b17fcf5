"""FedFleet's Python API: the names that scripts and notebooks use.

    import fedfleet

    result = fedfleet.run(fedfleet.load("digits", "federation.rounds=20"))
    result.plot()

The names are those that the stub beside this file imports, where editors and type checkers read them too. Each is
imported when it is first used, so that `import fedfleet` does not wait for torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES: dict[str, str] = {
    alias.name: f"{__name__}.{node.module}"
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Name -> the module that it comes from."""

__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll] it reads the stub


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedfleet")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
