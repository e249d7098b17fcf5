"""Fresh interpreters in which some packages are missing."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def without(packages: str) -> str:
    """The first lines of a script that cannot import these packages, whose names have spaces between them.

    They are missing for the script's process alone. The lines end the process if a package can still be imported.
    """
    return f'''
import sys
from importlib.machinery import PathFinder

MISSING = set("{packages}".split())


class Bare(PathFinder):
    """Finds what PathFinder finds, as if MISSING were not installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
for name in MISSING:
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{{name}} is not hidden")
'''


def bare_python(folder: Path, without: str = "") -> tuple[str, dict[str, str]]:
    """(the interpreter, environment variables) of a machine with the packages of this environment, but without an
    installed fedfleet and without the packages with these names, which have spaces between them.

    The interpreter is the one that this environment was made from. It finds links to the packages in the folder.
    """
    hidden = {"fedfleet", "__editable__", *without.lower().split()}
    folder.mkdir()
    for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(packages).iterdir():
            name = path.name.lower().replace("-", "_")
            if not any(name == each or name.startswith((f"{each}_", f"{each}.")) for each in hidden):
                (folder / path.name).symlink_to(path)
    python = getattr(sys, "_base_executable", sys.executable)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return python, {**kept, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
