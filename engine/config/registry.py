"""Parts by name: methods, rules, workloads, models, partitions and trackers, including the user's own.

A plug-in is a module with tables (METHODS, RULES, BALLS, COMPRESSIONS, CODECS, WORKLOADS, MODELS, ADAPTERS,
PARTITIONS, TRACKERS, AGGREGATORS, PREAGGREGATORS, ATTACKS, MECHANISMS, DEVICES, DISTRIBUTIONS, AVAILABILITIES,
LOCAL_WORK, SAMPLERS, KERNELS). They map names to callables, or to entries that say where a callable is (`build`,
"module:attribute") and what it does (`summary`). The project's own tables are in the modules `BUILT_IN`. Those of
installed packages are found by entry points of the group "fedfleet.plugins".
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import linecache
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from ..errors import RAISED_BY_USERS, ConfigError, nearest, type_and_first_line
from ..storage.sha256 import sha256
from ..user_code import location_clause, plugin_errors
from .finite import check_finite, may_be_infinite

GROUP = "fedfleet.plugins"
BUILT_IN = tuple(
    f"fedfleet.{name}.table" for name in ("algorithms", "workloads", "tune", "engine.fleet", "engine.kernels")
)
"""The modules with the project's own tables. They are named here, and not as entry points, so that they are found where
the package is only on the path and not installed, as on a bare machine or in a folder that a job was sent to."""
TABLES = (
    "METHODS",
    "RULES",
    "BALLS",
    "COMPRESSIONS",
    "CODECS",
    "WORKLOADS",
    "MODELS",
    "ADAPTERS",
    "PARTITIONS",
    "TRACKERS",
    "AGGREGATORS",
    "PREAGGREGATORS",
    "ATTACKS",
    "MECHANISMS",
    "DEVICES",
    "DISTRIBUTIONS",
    "AVAILABILITIES",
    "LOCAL_WORK",
    "SAMPLERS",
    "KERNELS",
)

SINGULAR = {
    "DEVICES": "kind of devices",
    "AVAILABILITIES": "availability",
    "LOCAL_WORK": "local work",
    "KERNELS": "kind of kernels",
}
"""What an entry of a table is called in messages, where it is not the table's name without its last letter."""


class Plugin(NamedTuple):
    """A user's module, which can be sent to other processes: as source if it is one file, else by its name.

    A module that is sent as source is named after a digest of its text, so that two versions of it can exist in one
    process.
    """

    module: str
    path: str
    source: str | None

    def __str__(self) -> str:
        return self.module if self.source is None else self.path

    @property
    def content(self) -> str:
        """What stands for the module in a digest of settings: the digest of its text, wherever the file lies, or the
        name of a module that is more than a file."""
        return self.module if self.source is None else sha256(self.source)

    def load(self) -> types.ModuleType:
        """Import the module, or run its source if this process has not done so yet."""
        if self.source is None:
            if self.path not in sys.path:
                sys.path.append(self.path)
            return importlib.import_module(self.module)
        if self.module in sys.modules:
            return sys.modules[self.module]
        module = types.ModuleType(self.module)
        module.__file__ = self.path
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(True), self.path)
        sys.modules[self.module] = module
        try:
            exec(compile(self.source, self.path, "exec"), vars(module))
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def find_plugin(name: str) -> Plugin:
    """The plug-in with this name: a path to a .py file, or the name of a module that can be imported from here."""
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"plugins: there is no file {name}; give a path to a .py file or a module's name")
        return _by_source(path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    found = _spec(name)
    if found is None:
        raise ConfigError(f"plugins: no module {name} can be imported; give a path to a .py file or a module's name")
    origin, package = str(found.origin), found.submodule_search_locations is not None
    if origin.endswith(".py") and not package and "." not in name and "site-packages" not in origin:
        return _by_source(Path(origin))
    return Plugin(name, here, None)


def _by_source(path: Path) -> Plugin:
    source = path.read_text(encoding="utf-8")
    digest = sha256(f"{path}\0{source}")
    return Plugin(f"fedfleet_plugin_{path.stem}_{digest[:12]}", str(path), source)


def _spec(name: str) -> ModuleSpec | None:
    """Where a module would be imported from, None if there is no such module. Finding a.b imports a."""
    try:
        return importlib.util.find_spec(name)
    except RAISED_BY_USERS as error:
        missing = error.name if isinstance(error, ImportError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            return None
        raise _broken(name, error) from error


def _broken(what: object, error: BaseException, file: str = "") -> ConfigError:
    """The error for a module that raised an exception when it was imported, with the line of `file` that raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = f" (line {lines[-1]})" if lines else ""
    return ConfigError(f"plugins: {what} cannot be loaded{line}: {type_and_first_line(error)}")


@functools.cache
def _installed() -> tuple[Any, ...]:
    """The project's own modules, then those of all entry points, so that a user's plug-in can replace a name."""
    found = [importlib.import_module(name) for name in BUILT_IN]
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        if point.value in BUILT_IN:  # an installation of an older version names them
            continue
        try:
            found.append(point.load())
        except RAISED_BY_USERS as error:
            raise _broken(f"the entry point {point.name} = {point.value}", error) from error
    return tuple(found)


class Registry:
    """All tables, including those of one experiment's plug-ins."""

    def __init__(self, plugins: Iterable[Plugin] = ()) -> None:
        self.tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
        for module in _installed():
            self._add(module, getattr(module, "__name__", str(module)))
        for plugin in plugins:
            try:
                module = plugin.load()
            except RAISED_BY_USERS as error:
                raise _broken(plugin, error, plugin.path) from error
            if not self._add(module, str(plugin)):
                raise ConfigError(f"plugins: {plugin} has none of the tables {', '.join(TABLES)}; add one")

    def _add(self, module: Any, where: str) -> bool:
        found = {table: getattr(module, table) for table in TABLES if hasattr(module, table)}
        for table, entries in found.items():
            if not isinstance(entries, Mapping):
                raise ConfigError(f"plugins: {table} in {where} must be a table, name -> callable, got {entries!r}")
            self.tables[table].update(entries)
        return bool(found)

    def build(self, table: str, spec: Any, path: str, **more: Any) -> Any:
        """The part that `spec` describes: a name, or a mapping with a name and arguments. Other values are returned
        unchanged.

        `path`: the key of the part, which messages name. `more`: further arguments that are not checked.
        """
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            return spec
        name = spec.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{path} needs a name, got {spec!r}; {nearest('', self.tables[table])}")
        target, hints, parameters = self._target(table, name, f"{path}.name")
        arguments = {key: value for key, value in spec.items() if key != "name"}
        old = getattr(target, "renamed", {})
        for key in arguments:
            if key in old:
                raise ConfigError(f"{path}.{key} is called {old[key]} now, got {arguments[key]!r}; write {old[key]}")
            if key not in parameters:
                raise ConfigError(f"{path}.{key} is not an argument of {name}; {nearest(str(key), parameters)}")
        values = {k: self._value(hints.get(k, Any), v, f"{path}.{k}") for k, v in arguments.items()}
        missing = [k for k, p in parameters.items() if p.default is p.empty and k not in values and k not in more]
        if missing:
            raise ConfigError(f"{path}.{missing[0]} is missing: {name} needs it")
        with plugin_errors(path):
            return target(**values, **more)

    def parameters(self, table: str, name: str, path: str) -> set[str]:
        """The names of the arguments that the part with this name takes. path: its key, which messages name."""
        return set(self._target(table, name, f"{path}.name")[2])

    def _target(self, table: str, name: str, path: str) -> tuple[Any, dict[str, Any], dict[str, inspect.Parameter]]:
        """(callable, annotations, parameters) of the part with this name."""
        if name not in self.tables[table]:
            what = SINGULAR.get(table, table.lower().rstrip("s").replace("ie", "y"))
            raise ConfigError(f"{path}: no {what} is called {name}; {nearest(str(name), self.tables[table])}")
        try:
            target = resolve(self.tables[table][name])
            if inspect.isabstract(target):
                raise TypeError(f"it does not define {', '.join(sorted(target.__abstractmethods__))}")
            return target, *signature(target)
        except RAISED_BY_USERS as error:  # importing the module that an entry names may raise anything
            raise ConfigError(f"{path}: {name} cannot be built: {error}{location_clause(error)}") from error

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        """An argument as its annotation requires. Where the annotation names a kind of part, the part is built; where
        it names a tuple of parts, each of them is."""
        member = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple and typing.get_args(hint) else None
        if hasattr(member, "table"):
            several = value if isinstance(value, list | tuple) else [value]
            return tuple(self._value(member, one, path) for one in several)
        if is_dataclass(member) and isinstance(value, list | tuple):
            return tuple(self._value(member, one, f"{path}.{number}") for number, one in enumerate(value))
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        records: list[Any] = [o for o in options if is_dataclass(o) and not hasattr(o, "table")]
        if records and isinstance(value, Mapping) and "name" not in value:
            return self._record(records[0], value, path)
        if records and isinstance(value, tuple(records)):
            return value
        if records == [hint]:
            raise ConfigError(f"{path} must be a mapping of {', '.join(signature(hint)[1])}, got {value!r}")
        kinds = [option for option in options if hasattr(option, "table")]
        if kinds and (isinstance(value, Mapping) or (isinstance(value, str) and value in self.tables[kinds[0].table])):
            return self._part(kinds[0], value, path)
        simple = tuple(option for option in options if not hasattr(option, "table") and option not in records)
        left_out = value is None and type(None) in simple
        if kinds and not left_out and not {*simple} - {type(None)}:
            if isinstance(value, str):  # the name of no part
                return self._part(kinds[0], value, path)
            raise ConfigError(f"{path} must be a name or {{name: …, arguments}}, got {value!r}")
        return check(typing.Union[simple], value, path)  # noqa: UP007 built from a tuple

    def _part(self, kind: Any, value: Any, path: str) -> Any:
        """A part of a kind. It need not be a subclass of the kind, but it must have what the kind leaves abstract."""
        built = self.build(kind.table, value, path)
        lacking = [name for name in sorted(getattr(kind, "__abstractmethods__", ())) if not hasattr(built, name)]
        if lacking:
            raise ConfigError(
                f"{path} is a {type(built).__name__}, which has no method {' and no '.join(lacking)}, got {value!r}; "
                f"an entry of {kind.table} must give a subclass of {kind.__name__}"
            )
        return built

    def _record(self, record: Any, value: Mapping[Any, Any], path: str) -> Any:
        """A dataclass from a mapping such as {primal: 0.1, dual: 1.0}, in which every key without a default must be
        given."""
        hints, parameters = signature(record)
        needed = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
        for key in (*value, *needed):
            if key not in parameters:
                raise ConfigError(f"{path}.{key} is not a key of it; {nearest(str(key), parameters)}")
            if key not in value:
                raise ConfigError(f"{path}.{key} is missing; give {' and '.join(needed)}")
        return record(**{key: self._value(hints[key], inner, f"{path}.{key}") for key, inner in value.items()})


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def check(hint: Any, value: Any, path: str) -> Any:
    """The value converted to the type of the annotation. Raises ConfigError if that is impossible."""
    try:
        found = value if hint is Any else TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Input ").replace("should be", "must be", 1)
        raise ConfigError(f"{path} {message}, got {value!r}") from None
    check_finite(found, path, may_be_infinite(hint))
    return found


def resolve(entry: Any) -> Any:
    """The callable of a table's entry."""
    target = getattr(entry, "build", entry) if not inspect.isclass(entry) else entry
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return target


def signature(target: Any) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """(resolved annotations, parameters by name) of a function, a functools.partial, or a class."""
    function = target.func if isinstance(target, functools.partial) else target
    if inspect.isclass(function) and not is_dataclass(function):
        function = function.__init__
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {k: p for k, p in inspect.signature(target).parameters.items() if p.kind not in several}
    return typing.get_type_hints(function, include_extras=True), parameters


def summary(entry: Any) -> str:
    """One line that describes an entry, from its table or its docstring."""
    text = getattr(entry, "summary", None)  # of a workload it is a method
    if not isinstance(text, str):
        text = inspect.getdoc(resolve(entry)) or ""
    return text.strip().split("\n")[0]
