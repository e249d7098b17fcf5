"""Code for a fresh interpreter in which some packages are missing."""

from __future__ import annotations


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
