"""The plan of a search: the experiment with its ranges, and the settings in its section `search`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_validator

from ...engine.config.schema import LARGEST_COUNT, Experiment, Section, experiment, validated
from ...engine.config.yaml_text import own
from ...engine.errors import ConfigError, nearest
from ...engine.records.metrics import refuse_test_metric
from ...engine.storage.expanded import expanded_address
from ..ranges import Range, corners, decided, ranges
from ..validation import fraction

TOTALS = ("bytes", "seconds")
"""Objectives that are no columns of the record: bytes in both directions, and seconds, of a whole run."""

INDEPENDENT = ("grid", "random")
"""Samplers that learn from no trial."""

TRIALS_OF_PROCESS = 64
"""The most trials that are under way in a process by default. With them the blocks of most models are full, and each
trial takes memory and a thread."""

Direction = Literal["minimize", "maximize"]
MODES: dict[str, Direction] = {"min": "minimize", "max": "maximize"}
MODES_OF: dict[str, str] = {word.upper(): mode for mode, word in MODES.items()}
"""Optuna's name of a direction -> mode."""


class SearchSettings(Section):
    """The section `search`."""

    objectives: dict[str, Literal["max", "min"]] = Field(default_factory=lambda: {"eval/accuracy": "max"})
    """What is searched for, a column of rounds.parquet, or `bytes` or `seconds` of the whole run, each with `max` or
    `min` (default: the largest eval/accuracy; with `evaluate.validation`, eval/validation_accuracy)."""
    last: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The number of last evaluated rounds whose mean is the value of a trial, at least 1."""
    sampler: Literal["auto", "tpe", "random", "cmaes", "grid"] = "auto"
    """The algorithm that proposes values; `auto` (default) is grid if all ranges are grids, else tpe."""
    trials: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of trials (default: all points of a grid, else 20)."""
    seed: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    """The seed of the sampler, 0 or more."""
    pruner: Literal["none", "asha", "median"] = "none"
    """Which trials that lag behind end early: `asha` (asynchronous successive halving), `median`, or `none` (default).
    """
    grace: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The number of rounds of a trial before it may be pruned, at least 1."""
    reduction: int = Field(default=3, ge=2, le=LARGEST_COUNT)
    """With asha, the best of every so many trials continues at each rung, at least 2."""
    concurrent: int | Literal["auto"] = "auto"
    """The number of simultaneous trials; `auto` (default): as many as fit, and with `together` all trials of a grid or
    of random, and a quarter of them with samplers that learn from earlier ones, but at most 64 in a process."""
    together: Literal["auto"] | bool = "auto"
    """Whether trials share processes of this machine, and with them the data, and train their clients together: true,
    false or `auto` (default), which is true without worker processes, GPUs and a cluster, and if no objective is
    `seconds`."""
    workers: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    """The number of worker processes of a trial; 0 (default): a trial runs in its own process, on `engine.cpus` and
    `engine.gpus`."""
    storage: str = "auto"
    """Optuna's storage, the URL of a database; `auto` (default): `search.db` in the folder of the search."""
    study: str = ""
    """The name of the study in the storage (default: the name of the experiment and the id of the search)."""
    start: tuple[dict[str, Any], ...] = ()
    """Points to try first, as in [{method.rule.lr: 0.1}]."""
    warm_start: tuple[str, ...] = ()
    """Earlier searches over the same ranges with the same objectives, from whose finished trials the sampler and the
    pruner learn: their folders, or URLs of Optuna storages (URL#STUDY if one has several studies)."""
    keep_models: bool = False
    """Whether every trial's final model is kept in its folder."""

    @field_validator("objectives")
    @classmethod
    def _some(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise ValueError("needs an objective, as in {eval/accuracy: max}")
        return value

    @field_validator("warm_start", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("storage")
    @classmethod
    def _with_home(cls, value: str) -> str:
        return expanded_address(value)

    @field_validator("warm_start")
    @classmethod
    def _with_homes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(expanded_address, value))

    @field_validator("concurrent")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, int) and not 1 <= value <= LARGEST_COUNT:
            raise ValueError(f"must be a whole number from 1 to {LARGEST_COUNT}, or auto")
        return value


CHOSE_A_SEED = (
    "the search also chose a seed, so the best value is partly luck; leave the range of seed out, or compare settings "
    "over several seeds in a study"
)
"""Said of a search with a range for `seed`."""
TRIALS = 20
"""Number of trials if neither the settings nor a grid determine it."""


@dataclass(frozen=True)
class SearchPlan:
    """A search to run. `data`: plain data of the experiment with its ranges, without the section `search`."""

    data: dict[str, Any]
    settings: SearchSettings

    @cached_property
    def ranges(self) -> list[Range]:
        return ranges(self.data)

    @property
    def sampler(self) -> str:
        if self.settings.sampler != "auto":
            return self.settings.sampler
        return "grid" if all(r.kind == "grid" for r in self.ranges) else "tpe"

    @property
    def trials(self) -> int:
        if self.sampler == "grid":
            size = math.prod(len(r.values) for r in self.ranges)
            return min(size, self.settings.trials or size)
        return self.settings.trials or TRIALS

    def at_once(self, processes: int) -> int:
        """The number of simultaneous trials that share this number of processes."""
        if self.settings.concurrent != "auto":
            return self.settings.concurrent
        wanted = self.trials if self.sampler in INDEPENDENT else max(processes, -(-self.trials // 4))
        return min(wanted, TRIALS_OF_PROCESS * processes)

    @property
    def directions(self) -> list[Direction]:
        return [MODES[mode] for mode in self.settings.objectives.values()]

    @property
    def aim(self) -> str:
        """What is searched for, such as "largest eval/accuracy, smallest bytes"."""
        words = {"max": "largest", "min": "smallest"}
        return ", ".join(f"{words[mode]} {name}" for name, mode in self.settings.objectives.items())

    def experiment(self, values: dict[str, Any]) -> Experiment:
        """The experiment with these values. values: dotted key -> value."""
        return experiment(decided(self.data, values))

    def plain(self) -> dict[str, Any]:
        """The plan as the plain data of a file."""
        settings = self.settings.model_dump(mode="json", exclude_defaults=True)
        return {**own(self.data), "search": settings}


def plan(data: dict[str, Any]) -> SearchPlan:
    """The plan for a file's plain data; ConfigError if it cannot be searched as it is written."""
    data = own(data)
    given = data.pop("search", None) or {}
    if fraction(data) and isinstance(given, dict):
        given = {"objectives": {"eval/validation_accuracy": "max"}, **given}
    made = SearchPlan(data, settings(given))
    check(made)
    return made


def settings(given: Any) -> SearchSettings:
    """Validate the section `search`; ConfigError names all errors."""
    if not isinstance(given, dict):
        raise ConfigError(f"search must be a mapping of keys, got {given!r}; write search: {{trials: 20}}")
    return validated(SearchSettings, given, "search.")


def check(made: SearchPlan) -> None:
    """Raise ConfigError for settings that exclude each other or do not suit the ranges."""
    found, asked = made.ranges, made.settings
    if not found:
        raise ConfigError(
            "there is nothing to search: no value is a range; write for example method.rule.lr: "
            "{search: loguniform, low: 1e-3, high: 1}, or give --paper-grid"
        )
    lists = [r.key for r in found if not r.listed]
    for metric in asked.objectives if fraction(made.data) else ():
        refuse_test_metric("search.objectives", metric)
    if made.sampler == "grid" and lists:
        raise ConfigError(
            f"search.sampler: grid needs lists of values, and {lists[0]} is a range; use tpe, random or cmaes"
        )
    if made.sampler == "cmaes" and sum(r.numeric for r in found) < 2:
        raise ConfigError("search.sampler: cmaes needs at least two ranges of numbers; use tpe")
    if made.sampler == "cmaes" and len(asked.objectives) > 1:
        raise ConfigError(f"search.sampler: cmaes needs one objective, got {len(asked.objectives)}; use tpe or random")
    if asked.pruner != "none" and len(asked.objectives) > 1:
        raise ConfigError(f"search.pruner: {asked.pruner} needs one objective, got {len(asked.objectives)}; use none")
    if asked.start and made.sampler == "grid":
        raise ConfigError("search.start: a grid tries all its points anyway; leave start out")
    if asked.warm_start and made.sampler in INDEPENDENT:
        raise ConfigError(
            f"search.warm_start: the sampler {made.sampler} learns from no trial; use tpe or cmaes, or leave it out"
        )
    starts(made)
    for values in corners(found):
        made.experiment(values)


def starts(made: SearchPlan) -> list[dict[str, Any]]:
    """The points to try first, coded as in the storage. Raises ConfigError for values outside the ranges."""
    by_key = {r.key: r for r in made.ranges}
    for point in made.settings.start:
        for key in point:
            if key not in by_key:
                raise ConfigError(f"search.start: {key} is not a range of this search; {nearest(key, by_key)}")
    return [{key: by_key[key].check(value) for key, value in point.items()} for point in made.settings.start]
