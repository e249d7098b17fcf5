"""The configuration in the folder of a run. The module is quick to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.yaml_text import parse
from ..errors import ConfigError, first_line
from ..storage.plain_files import read_text


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration that the run in a folder was started with. Raises ConfigError if the file is damaged."""
    file = folder / "config.yaml"
    try:
        found = parse(read_text(file), "it")
    except (OSError, ValueError) as error:
        found = first_line(error)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged ({found}); put the run's configuration back")
    return found
