"""Experiment files: YAML, by path or by a shipped name, with `a.b=c` overrides. Command line > file > default."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..engine.config import Experiment, experiment
from ..engine.errors import ConfigError, nearest

EXCLUSIVE = {"federation.local": ("steps", "epochs")}
"""Keys of which an override of one drops the file's other."""


class Loader(yaml.SafeLoader):
    """The safe loader, refusing keys given twice, and reading 1e-3 as the number it is."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {min(twice)} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def shipped() -> dict[str, Path]:
    """The experiment files that come with the package, by name."""
    folder = resources.files(__package__ or "") / "experiments"
    return {Path(str(f)).stem: Path(str(f)) for f in sorted(folder.iterdir(), key=str) if f.name.endswith(".yaml")}


def load(source: str, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a file or a shipped name, overridden."""
    path = shipped().get(source, Path(source))
    if not path.is_file():
        raise ConfigError(f"there is no experiment {source}; give a YAML file or a name: {nearest(source, shipped())}")
    data = parse(path.read_text(), source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of keys such as method and workload, got {data!r}")
    data = override(data, overrides)
    data.setdefault("name", path.stem)
    data["plugins"] = [located(name, path) for name in listed(data.get("plugins"))]
    return experiment(data)


def parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where} is not valid YAML{at}: {getattr(error, 'problem', None) or error}") from None


def listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def located(plugin: Any, file: Path) -> Any:
    """A plug-in's path as seen from the experiment file, else from here."""
    if isinstance(plugin, str) and plugin.endswith(".py"):
        beside = file.parent / plugin
        return str(beside.resolve() if beside.is_file() else plugin)
    return plugin


def override(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply `a.b=c`. Another name for a part starts from that part's own defaults: what the file said to the old one
    is dropped, what the command line says to the new one is kept."""
    pairs = [pair(text) for text in overrides]
    pairs.sort(key=lambda p: p[0][-1] != "name")  # names first, whatever the order they were given in
    for keys, value in pairs:
        place = data
        for key in keys[:-1]:
            inner = place.get(key)
            if not isinstance(inner, dict):
                inner = {} if inner is None else {"name": inner}
            place[key] = inner
            place = inner
        if keys[-1] == "name" and len(keys) > 1 and place.get("name") != value:
            place.clear()
        for rival in EXCLUSIVE.get(".".join(keys[:-1]), ()):
            if keys[-1] in EXCLUSIVE[".".join(keys[:-1])] and rival != keys[-1]:
                place.pop(rival, None)
        place[keys[-1]] = value
    return data


def pair(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text} is not an override; write key=value, as in federation.rounds=100")
    return key.split("."), parse(value, text)
