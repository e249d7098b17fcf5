"""What `fedfleet compare` shows beside the metric: columns that the reader chose, and settings that all runs share."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.config.differences import flatten
from ...engine.config.registry import Registry
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError
from .. import units
from ..report.statistics import spread
from ..run_files import column, has_measured, read_table
from .labels import PARTS, argument, as_text, named

IN_TITLE = ("method.name", "workload.name", "federation.clients", "federation.cohort", "federation.rounds")
"""Settings that the title of a comparison has, if all runs share them."""

NONE = inspect.Parameter.empty
"""The value of what a run does not have."""

KINDS = "valid: columns of rounds.parquet, such as eval/loss, and keys of the configuration, such as method.rule.lr"


# --- columns that the reader chose ------------------------------------------------------------------------------------
def chosen_columns(
    names: Sequence[str], labels: Sequence[str], folders: Sequence[Path], configurations: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Name of a column -> label -> text.

    names: of columns of rounds.parquet, of which a table has the last values, mean and standard deviation over the runs
    of a label; or keys of the configuration. Raises ConfigError for a name that no run has.
    """
    records = [read_table(folder) for folder in folders]
    settings = [with_names(flatten(data)) for data in configurations]
    of_sections, tables = defaults(), Registry().tables
    found = {}
    for name in names:
        if "/" in name:
            values = [last(record, name) for record in records]
            known = [one for record in records if record is not None for one in record.column_names]
        else:
            values = [one.get(name, default_of(one, name, of_sections, tables)) for one in settings]
            known = [key for one in settings for key in one]
        if all(value is NONE for value in values):
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else KINDS
            raise ConfigError(f"--columns: no run has {name}; {remedy}")
        of: dict[str, list[Any]] = {}
        for label, value in zip(labels, values, strict=True):
            of.setdefault(label, []).append(value)
        found[name] = {label: text_of(name, some) for label, some in of.items()}
    return found


def with_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which a method or a workload that is a name alone is written as one with arguments."""
    return {f"{key}.name" if key in PARTS else key: value for key, value in settings.items()}


def last(record: Any, name: str) -> Any:
    """The last value of a column that was measured; NONE if the record has none."""
    if record is None or not has_measured(record, name):
        return NONE
    values = column(record, name)
    there = np.flatnonzero(np.isfinite(values))
    return float(values[there[-1]]) if len(there) else NONE


def text_of(name: str, values: Sequence[Any]) -> str:
    """The values of the runs of a label as one text."""
    there = [value for value in values if value is not NONE]
    if "/" not in name:
        return ", ".join(dict.fromkeys(map(units.setting, there))) or "–"
    mean, std, _ = spread(there)
    return units.number(name, mean) + ("" if math.isnan(std) else f" ± {units.number(name, std)}")


# --- settings that all runs share -------------------------------------------------------------------------------------
def shared_settings(configurations: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Key -> value of the settings that all runs share, that differ from the defaults, and that the title of a
    comparison does not have. configurations: as `settings_of` gives them."""
    written = {key for data in configurations for key in data}
    alike = [named(data, written) for data in configurations]
    first, tables = alike[0], Registry().tables
    of_sections = defaults()
    return {
        key: units.setting(first[key])
        for key in keys_in_common(alike)
        if key not in IN_TITLE and as_text(first[key]) != as_text(default_of(first, key, of_sections, tables))
    }


def keys_in_common(configurations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The keys that have the same value in all configurations."""
    first, *others = configurations
    for key, value in first.items():
        if all(key in other and as_text(other[key]) == as_text(value) for other in others):
            yield key


def defaults() -> dict[str, Any]:
    """The value of each key of an experiment's sections that nobody sets."""
    return flatten(experiment({"workload": "digits", "method": "fedavg"}).plain())


def default_of(data: Mapping[str, Any], key: str, of_sections: Mapping[str, Any], tables: Mapping[str, Any]) -> Any:
    """The value that a setting has if nobody sets it; NONE for one that has none."""
    if key.partition(".")[0] not in PARTS:
        return of_sections.get(key, NONE)
    part = key.removesuffix("name") if key.endswith(".name") else key  # without the name arguments mean nothing
    return argument({other: value for other, value in data.items() if not other.startswith(part)}, key, tables)
