"""Packs what a job of a cluster needs into one folder: this package, the experiment and its plug-ins."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import yaml

from ...engine.config.registry import find_plugin
from ...engine.errors import ConfigError
from ..files import load, load_data

FILE = "experiment.yaml"


def pack(folder: Path, source: str, overrides: Iterable[str]) -> None:
    """Fill the folder. Raises ConfigError for an experiment that could not run, before anything is sent."""
    overrides = tuple(overrides)
    load(source, overrides)
    data = load_data(source, overrides)
    (folder / "plugins").mkdir()
    data["plugins"] = [shipped(name, folder) for name in data["plugins"]]
    (folder / FILE).write_text(yaml.safe_dump(data, sort_keys=False))
    package = Path(str(importlib.import_module("fedfleet").__file__)).parent
    shutil.copytree(package, folder / "fedfleet", ignore=shutil.ignore_patterns("__pycache__"))
    describe(folder)


def describe(folder: Path) -> None:
    """Write the package's metadata beside it, as an installation has them: they say which version it is."""
    ours = metadata.distribution("fedfleet")
    beside = folder / f"fedfleet-{ours.version}.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text(ours.read_text("METADATA") or ours.read_text("PKG-INFO") or "")


def shipped(plugin: str, folder: Path) -> str:
    """The plug-in's name in the job. A file, or a package that lies in a folder, is copied; an installed package keeps
    its name and must be installed on the cluster too."""
    found = find_plugin(plugin)
    if found.source is not None:
        name = f"{found.module}.py"
        (folder / "plugins" / name).write_text(found.source)
        return f"plugins/{name}"
    top = found.module.partition(".")[0]
    package = Path(found.path) / top
    if not package.is_dir():
        return plugin
    if top == "fedfleet":
        raise ConfigError(f"plugins: {plugin} has the name of this package; rename it")
    if not (folder / top).exists():
        shutil.copytree(package, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    return plugin
