"""How many ideas a reader of the project meets: counts of its structure, and the files that one round enters.

    python -m tools.structure           files, lines of code, classes, late imports, circles, what tests import
    python -m tools.structure round     the files that a round enters, and how often a call moves between files

Lines of code have neither comments nor docstrings. A circle is a group of modules that import each other, directly or
over others, imports in functions and those for type checkers included. A round is the second of three, in process and
without an evaluation: by then everything that is made once has been made.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "algorithms", "workloads", "tune")
RUNS = {
    "SCAFFOLD": [],
    "SCAFFOLD with Krum against IPM": ["aggregate={name: krum, f: 2}", "attack={name: ipm, share: 0.2}"],
}
"""name -> the settings, besides those of the preset `digits`, of the runs whose rounds are walked."""


class Module(NamedTuple):
    """One file of Python. name: engine.clients.worker for engine/clients/worker.py."""

    name: str
    package: list[str]
    source: str
    tree: ast.Module


def modules(folder: str) -> Iterator[Module]:
    """The modules of one of the folders at the top of the repository."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        source = path.read_text(encoding="utf-8")
        yield Module(".".join(parts).removesuffix(".__init__"), parts[:-1], source, ast.parse(source))


def code_lines(module: Module) -> int:
    """The number of lines with code: no comments, no docstrings, no empty lines."""
    texts = [
        node.body[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    ]
    docstrings = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(module.source).readline) if t.type not in empty]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings)


def late_imports(module: Module) -> int:
    """The number of import statements in functions."""
    functions = [n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return len({n for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)})


def imported(module: Module) -> Iterator[str]:
    """The names of the project's modules, or of objects in them, that a module imports."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join([*module.package[: len(module.package) - node.level + 1], *filter(None, [node.module])])
            else:
                base = (node.module or "").removeprefix("fedfleet.")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circles(found: list[Module]) -> list[list[str]]:
    """The groups of modules that import each other, each in alphabetical order."""
    names = {module.name for module in found}
    arrows = {
        module.name: {name if name in names else name.rpartition(".")[0] for name in imported(module)} & names
        for module in found
    }
    reached = {name: closure(name, arrows) for name in arrows}
    groups = {tuple(sorted(n for n in reached[name] if name in reached[n])) for name in names if name in reached[name]}
    return sorted(list(group) for group in groups)


def closure(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """All modules that `start` imports, directly or over others."""
    seen: set[str] = set()
    waiting = set(arrows[start])
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= arrows[name] - seen
    return seen


def tell_structure() -> None:
    """Print the counts of each folder, the circles, and how many modules of the engine tests import."""
    print(f"{'folder':12}{'files':>7}{'code':>8}{'classes':>9}{'late imports':>14}")
    everything: list[Module] = []
    for folder in FOLDERS:
        found = list(modules(folder))
        everything += found
        classes = sum(isinstance(node, ast.ClassDef) for module in found for node in ast.walk(module.tree))
        code, late = sum(map(code_lines, found)), sum(map(late_imports, found))
        print(f"{folder:12}{len(found):7}{code:8}{classes:9}{late:14}")
    groups = circles(everything)
    print(f"circles: {len(groups)}")
    for group in groups:
        print("  " + ", ".join(group))
    engine = {module.name for module in everything if module.name.startswith("engine.")}
    of_tests = {
        each if each in engine else each.rpartition(".")[0] for test in modules("tests") for each in imported(test)
    }
    print(f"modules of the engine that tests import: {len(of_tests & engine)} of {len(engine)}")


class Walk:
    """Follows calls between the project's files, as a profiler of `sys.setprofile`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.moves = 0
        self.last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(str(ROOT)) or "/.venv/" in file or "/tools/" in file:
            return
        self.files.add(file)
        self.moves += file != self.last
        self.last = file


def tell_rounds() -> None:
    """Print, for each run of RUNS, the files that its second round enters and the moves between files."""
    import fedfleet

    fixed = ["federation.rounds=3", "evaluate.every=0", "engine.backend=local", "tracking.uri=none"]
    for name, settings in RUNS.items():
        rounds = fedfleet.rounds(fedfleet.load("digits", [*settings, *fixed]))
        next(rounds)
        walk = Walk()
        sys.setprofile(walk)
        try:
            next(rounds)
        finally:
            sys.setprofile(None)
        for _ in rounds:
            pass
        print(f"{name}: one round enters {len(walk.files)} files and moves {walk.moves} times between files")
        for file in sorted(walk.files):
            print("  " + str(Path(file).relative_to(ROOT)))


if __name__ == "__main__":
    tell_rounds() if sys.argv[1:] == ["round"] else tell_structure()
