"""The layers: which folder may import what, no circles, no method's name in the engine, light imports."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from fedfleet.algorithms.table import METHODS

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "algorithms": (r"algorithms\b", r"workloads\.(counted|entry|pair)$"),
    "workloads": (r"workloads\b",),
    "engine": (
        r"engine\b",
        r"algorithms\.(contract|local|tree|parts\.(orthogonal|own_model|turns)|aggregation\.messages)$",
        r"algorithms\.(aggregation|attacks)\.contract$",
        r"algorithms\.privacy\.(mechanism|clipping|noise)$",
        r"workloads\.(workload|classification|objectives|client_index|stateless|drawing|counted|entry|pair|processors)$",
        r"workloads\.models\.(attention|derivatives|narrow)$",
    ),
    "tune": (r"tune\b", r"engine\b", r"algorithms\b", r"workloads\b"),
}
"""folder -> patterns of the modules that it may import, as docs/design.md says."""

ROOMS = [
    "errors",
    "user_code",
    "memory",
    "stopping",
    "storage",
    "method_form",
    "config",
    "workload",
    "privacy",
    "kernels",
    "accelerators",
    "reduction",
    "cohorts",
    "records",
    "state",
    "aggregation",
    "run_spec",
    "fleet",
    "clients",
    "planning",
    "rounds",
    "backends",
    "backends.ray",
    "runs",
    "api",
]
"""The modules and sub-packages of the engine. Each may import those before it, also inside functions."""

LAZY = {
    "ray",
    "optuna",
    "mlflow",
    "torchvision",
    "sklearn",
    "pandas",
    "matplotlib",
    "safetensors",
    "dp_accounting",
    "absl",
}
"""Imported inside functions only, so that a bare machine can run without them and `--help` does not wait for them."""


class Import(NamedTuple):
    target: str  # "folder.module" or "folder" for modules of this project, else the name of the package
    ours: bool
    relative: bool
    at_head: bool  # run when the module is imported: not in a function, not under TYPE_CHECKING
    where: str


def name_of(path: Path) -> str:
    """engine/clients/worker.py -> engine.worker, engine/__init__.py -> engine."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {name_of(path): path for path in FILES}
RAY = "engine.backends.ray."
EXCEPTIONS = {module: {"ray"} for module in MODULES if module.startswith(RAY) or module == "engine.runs.detached"}
"""module -> packages of LAZY that it may import at its head. These modules are about Ray, and are imported on use."""


def statements(node: ast.AST, at_head: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements below a node, and whether they run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_head
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from statements(ast.Module([part], []), False)
            for part in child.orelse:
                yield from statements(ast.Module([part], []), at_head)
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(child, at_head and not lazy)


def targets(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement imports, those of this project as "fedfleet.…"; `from . import tree` imports the
    module tree if there is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = ["fedfleet", *module.split(".")]
        package = package if MODULES[module].name == "__init__.py" else package[:-1]
        base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name.removeprefix("fedfleet.") in MODULES else base for name in inner]


def imports(module: str) -> Iterator[Import]:
    for node, at_head in statements(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        where = f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for target in targets(module, node):
            root = target.partition(".")[0]
            ours = root == "fedfleet" or root in ALLOWED
            yield Import(target.removeprefix("fedfleet.") if ours else root, ours, relative, at_head, where)


Imports = list[tuple[str, Import]]
"""Modules and what they import."""


@pytest.fixture(scope="module")
def everything() -> Imports:
    return [(module, found) for module in MODULES for found in imports(module)]


@pytest.fixture(scope="module")
def ours(everything: Imports) -> Imports:
    return [(module, found) for module, found in everything if found.ours]


def test_arrows(ours: Imports):
    wrong = [
        found.where
        for module, found in ours
        if not any(re.match(pattern, found.target) for pattern in ALLOWED[module.partition(".")[0]])
    ]
    assert not wrong, "ALLOWED has what a folder may import of the project, no more:\n" + "\n".join(wrong)


def room_of(module: str) -> str:
    """engine.backends.ray.connect -> backends.ray, engine.errors -> errors."""
    parts = module.split(".")[1:]
    return ".".join(parts[:-1]) or parts[0]


def test_rooms_import_only_the_rooms_below(ours: Imports):
    wrong = []
    for module, found in ours:
        if module.startswith("engine.") and found.target.startswith("engine."):
            package = MODULES[module].name == "__init__.py"
            room = module.removeprefix("engine.") if package else room_of(module)
            if room_of(found.target) not in ROOMS[: ROOMS.index(room) + 1]:
                wrong.append(found.where)
    assert not wrong, "a room of the engine may import those before it in ROOMS, no more:\n" + "\n".join(wrong)


def test_own_modules_exist(ours: Imports):
    wrong = [found.where for _, found in ours if found.target not in MODULES]
    assert not wrong, "no such modules, they may have been moved:\n" + "\n".join(wrong)


def test_own_modules_are_imported_relatively(ours: Imports):
    wrong = [found.where for _, found in ours if not found.relative]
    assert not wrong, "write `from .` or `from ..`, which editors and type checkers follow:\n" + "\n".join(wrong)


def test_no_circles(ours: Imports):
    """Imports inside functions and for type checkers count too: who reads one module would have to read them all."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, found in ours:
        graph[module] |= {found.target} - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other in a circle: " + " <- ".join(error.args[1]))


def room(module: str) -> str:
    """tune.search.plan -> tune.search, a sub-package; tune.files -> tune.files, a module that stands alone."""
    return ".".join(module.split(".")[:2])


def test_no_circles_between_the_rooms_of_tune(ours: Imports):
    """Imports inside functions count too: two rooms that need each other should be one room."""
    graph: dict[str, set[str]] = {room(module): set() for module in MODULES if module.startswith("tune.")}
    for module, found in ours:
        if module.startswith("tune.") and found.target.startswith("tune."):
            graph[room(module)] |= {room(found.target)} - {room(module)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("sub-packages need each other in a circle: " + " <- ".join(error.args[1]))


def test_engine_knows_no_method():
    names = re.compile(rf"(?<!path\.)\b({'|'.join(map(re.escape, METHODS))})\b")  # path.stem is pathlib's
    wrong = [
        f"{path.relative_to(ROOT)}:{n}: {line}"
        for path in sorted((ROOT / "engine").rglob("*.py"))
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if names.search(line)
    ]
    assert not wrong, "the engine runs any method and names none:\n" + "\n".join(wrong)


def test_heavy_packages_are_imported_where_they_are_used(everything: Imports):
    wrong = []
    for module, found in everything:
        heavy = LAZY - EXCEPTIONS.get(module, set())
        if found.at_head and not module.startswith("tune"):
            ours_too = found.target in EXCEPTIONS and module not in EXCEPTIONS
            if ours_too or (not found.ours and found.target in heavy):
                wrong.append(found.where)
    assert not wrong, "import these inside the function that needs them:\n" + "\n".join(wrong)
