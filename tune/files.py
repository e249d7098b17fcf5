"""Experiment files: YAML, by path or by a shipped name, with `a.b=c` overrides.

The command line has priority over the file, and the file over the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Any

from ..engine.config.earlier import today
from ..engine.config.schema import Experiment, experiment
from ..engine.config.yaml_text import parse
from ..engine.errors import ConfigError, nearest
from ..engine.runs.saved_files import FILE_OF_KIND
from ..engine.storage.expanded import expanded
from ..engine.storage.plain_files import read_text

LONGEST_SHOWN = 200
"""The number of characters of an override that a message shows."""
LOCAL = ("steps", "epochs")
EXCLUSIVE = {"federation.local": LOCAL, "experiment.federation.local": LOCAL}
"""Section of an experiment or of a study -> keys that exclude each other: an override of one removes the others that
the file sets."""


def shipped() -> dict[str, Path]:
    """The experiment files that come with the package: name -> path."""
    folder = resources.files(__package__ or "") / "experiments"
    return {Path(str(f)).stem: Path(str(f)) for f in sorted(folder.iterdir(), key=str) if f.name.endswith(".yaml")}


def load(source: str | Path, overrides: str | Iterable[str] = ()) -> Experiment:
    """The experiment in a YAML file, in the folder of a run, or of a shipped name, with overrides applied.

        fedfleet.load("digits", ["method.name=fedavg", "federation.rounds=20"])

    source: a path, or a name of `fedfleet list experiments`. overrides: one `a.b=c`, or several. Raises ConfigError.
    """
    if isinstance(overrides, str):
        overrides = (overrides,)
    if (folder := expanded(source)).is_dir() and (folder / "config.yaml").is_file():
        source = folder / "config.yaml"
    data = load_data(str(source), overrides)
    if "search" in data:
        raise ConfigError(
            f"{source} holds a search; start it by `fedfleet search {source}`, or run the file that the search writes"
        )
    return experiment(data)


def load_data(source: str, overrides: Iterable[str] = (), folder: Path = Path()) -> dict[str, Any]:
    """The same as plain data, before validation. folder: to which a path is relative."""
    path = shipped().get(source) or folder / expanded(source)
    if not path.is_file():
        if "=" in source:
            raise ConfigError(
                f"the experiment is missing before {source}; name one, as in: fedfleet run digits {quote(source)}; "
                f"valid: {', '.join(shipped())}, or the path of a YAML file"
            )
        raise ConfigError(f"there is no experiment {source}; {nearest(source, shipped())}, or the path of a YAML file")
    data = read_yaml(path, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of keys such as method and workload, got {data!r}")
    if "methods" in data and {"experiment", "base"} & data.keys():
        raise ConfigError(f"{source} holds a study, and no single experiment; start it by `fedfleet study {source}`")
    data = override(data, overrides)
    data.setdefault("name", path.stem)
    data["plugins"] = [located(name, path) for name in listed(data.get("plugins"))]
    return data


def read_yaml(path: Path, where: str) -> Any:
    """The data of a YAML file; ConfigError if it cannot be read. where: what messages call it.

    A file of the folder of a run, a study or a search may be of an earlier version, and gets today's keys. A link is
    followed, unless the file is that of a run's folder.
    """
    try:
        text = read_text(path) if path.name == FILE_OF_KIND["run"] else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a YAML file in UTF-8") from None
    data = parse(text, where)
    return today(data) if path.name in FILE_OF_KIND.values() else data


def listed(value: Any) -> list[Any]:
    """A list of the value's items, or of the value if it is none; empty for None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def located(plugin: Any, file: Path) -> Any:
    """The absolute path of a plug-in that lies beside the experiment file; any other plug-in as it is given."""
    if isinstance(plugin, str) and plugin.endswith(".py"):
        beside = file.parent / plugin
        return str(beside.resolve() if beside.is_file() else plugin)
    return plugin


def override(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply overrides `a.b=c` to `data`, in place.

    If an override changes the `name` of a part, the arguments that the file gave to the old part are removed, and
    those that other overrides give to the new part are kept.
    """
    pairs = [pair(text) for text in overrides]
    pairs.sort(key=earliness)
    for keys, _ in pairs:
        drop_rivals(data, keys)
    for keys, value in pairs:
        place = inside(data, keys[:-1])
        if keys[-1] == "name" and len(keys) > 1 and place.get("name") != value:
            place.clear()
        place[keys[-1]] = value
    return data


def earliness(override: tuple[list[str], Any]) -> tuple[int, bool]:
    """Sort key: a whole part comes before its name, and its name before its arguments."""
    keys, _ = override
    named = keys[-1] == "name" and len(keys) > 1
    return len(keys) - named, named


def inside(data: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """The mapping at a path. It is created if it is missing; a part given by its bare name, or trackers by a list of
    names, become {name: …}. Other lists have no keys."""
    for at, key in enumerate(keys, 1):
        inner = data.get(key)
        names = isinstance(inner, list) and key == "tracking"
        if inner is not None and not names and not isinstance(inner, str | dict):
            path = ".".join(keys[:at])
            raise ConfigError(f"{path} is {inner!r}, which has no keys of its own; write {path}=value")
        if not isinstance(inner, dict):
            data[key] = {} if inner is None else {"name": inner}
        data = data[key]
    return data


def drop_rivals(data: dict[str, Any], keys: list[str]) -> None:
    """Remove the keys that the key at this path excludes; see EXCLUSIVE."""
    rivals = EXCLUSIVE.get(".".join(keys[:-1]), ())
    if keys[-1] in rivals:
        place = inside(data, keys[:-1])
        for rival in rivals:
            place.pop(rival, None)


def pair(text: str) -> tuple[list[str], Any]:
    """(path, value) of an override; ConfigError if the text is none."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text} is not an override; write key=value, as in federation.rounds=100")
    return key.split("."), parse(value, text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…")
