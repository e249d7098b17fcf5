"""Parts by name: methods, rules, workloads, models, partitions, trackers, and those of a user's own.

A plug-in is a module with tables (METHODS, RULES, BALLS, WORKLOADS, MODELS, PARTITIONS, TRACKERS): name -> a callable,
or an entry that says where to find it (`build`, "module:attribute") and what it is (`summary`). The project's own parts
come in through the same door, the entry points of the group "fedfleet.plugins".
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import linecache
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError, nearest

GROUP = "fedfleet.plugins"
TABLES = ("METHODS", "RULES", "BALLS", "WORKLOADS", "MODELS", "PARTITIONS", "TRACKERS")


class Plugin(NamedTuple):
    """A user's module on its way to other processes: by source where it is one file, else by name."""

    module: str
    path: str
    source: str | None

    def load(self) -> types.ModuleType:
        if self.source is None:
            if self.path not in sys.path:
                sys.path.append(self.path)
            return importlib.import_module(self.module)
        known = sys.modules.get(self.module)
        if known is not None and getattr(known, "__fedfleet_source__", None) == self.source:
            return known
        module = types.ModuleType(self.module)
        vars(module).update(__file__=self.path, __fedfleet_source__=self.source)
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(True), self.path)
        sys.modules[self.module] = module
        try:
            exec(compile(self.source, self.path, "exec"), vars(module))
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def find_plugin(name: str) -> Plugin:
    """A path to a .py file, or the name of a module that can be imported from here."""
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"plugins: there is no file {name}; give a path to a .py file or a module's name")
        return Plugin(f"fedfleet_plugin_{path.stem}", str(path), path.read_text())
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"plugins: no module {name} can be imported; give a path to a .py file or a module's name")
    single = found.origin is not None and found.submodule_search_locations is None and "." not in name
    if single and "site-packages" not in str(found.origin):
        return Plugin(name, str(found.origin), Path(str(found.origin)).read_text())
    return Plugin(name, here, None)


@functools.cache
def _installed() -> tuple[types.ModuleType, ...]:
    """Modules behind the entry points. ours first, so that a plug-in of a user's can shadow a name."""
    points = sorted(metadata.entry_points(group=GROUP), key=lambda p: (not p.value.startswith("fedfleet."), p.name))
    return tuple(importlib.import_module(point.value) for point in points)


class Parts:
    """All tables, with the plug-ins of one experiment."""

    def __init__(self, plugins: Iterable[Plugin] = ()) -> None:
        self.tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
        for module in _installed():
            self._add(module)
        for plugin in plugins:
            try:
                module = plugin.load()
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise ConfigError(f"plugins: {plugin.path} cannot be loaded: {what}") from error
            if not self._add(module):
                raise ConfigError(f"plugins: {plugin.path} has none of the tables {', '.join(TABLES)}; add one")

    def _add(self, module: types.ModuleType) -> bool:
        found = {table: getattr(module, table) for table in TABLES if hasattr(module, table)}
        for table, entries in found.items():
            self.tables[table].update(entries)
        return bool(found)

    def build(self, table: str, spec: Any, path: str, **more: Any) -> Any:
        """The part that `spec` names, with its arguments; `path` is its key, for messages."""
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            return spec
        name = spec.get("name")
        if name not in self.tables[table]:
            what = table.lower().rstrip("s").replace("ie", "y")
            raise ConfigError(f"{path}.name: no {what} is called {name}; {nearest(str(name), self.tables[table])}")
        target = resolve(self.tables[table][name])
        hints, parameters = signature(target)
        arguments = {key: value for key, value in spec.items() if key != "name"}
        for key in arguments:
            if key not in parameters:
                raise ConfigError(f"{path}.{key} is not an argument of {name}; {nearest(key, parameters)}")
        values = {k: self._value(hints.get(k, Any), v, f"{path}.{k}") for k, v in arguments.items()}
        missing = [k for k, p in parameters.items() if p.default is p.empty and k not in values and k not in more]
        if missing:
            raise ConfigError(f"{path}.{missing[0]} is missing: {name} needs it")
        try:
            return target(**values, **more)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        tables = [option.table for option in options if hasattr(option, "table")]
        if tables and (isinstance(value, Mapping) or (isinstance(value, str) and value in self.tables[tables[0]])):
            return self.build(tables[0], value, path)
        simple = tuple(option for option in options if not hasattr(option, "table"))
        if not simple:
            if isinstance(value, str):
                return self.build(tables[0], value, path)
            raise ConfigError(f"{path} must be a name or {{name: …, arguments}}, got {value!r}")
        return check(typing.Union[simple], value, path)  # noqa: UP007 built from a tuple


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def check(hint: Any, value: Any, path: str) -> Any:
    """The value as the annotation wants it, or one sentence."""
    from pydantic import TypeAdapter, ValidationError

    if hint is Any:
        return value
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Input ").replace("should be", "must be", 1)
        raise ConfigError(f"{path} {message}, got {value!r}") from None


def resolve(entry: Any) -> Any:
    """The callable behind a table's entry."""
    target = getattr(entry, "build", entry) if not inspect.isclass(entry) else entry
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return target


def signature(target: Any) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """(annotations resolved, parameters) of a function or a dataclass."""
    return typing.get_type_hints(target), dict(inspect.signature(target).parameters)


def summary(entry: Any) -> str:
    """One line on an entry, from its table or its docstring."""
    text = getattr(entry, "summary", None) or inspect.getdoc(resolve(entry)) or ""
    return text.strip().split("\n")[0]
