"""The runs of a study: its cells, the trials of its grids, and the choice of a grid's point for each cell.

The module keeps no state: the same study and the same results always give the same cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, NamedTuple

from ...engine.config.earlier import before_samplers
from ...engine.config.registry import Plugin, find_plugin
from ...engine.errors import ConfigError, nearest
from ...engine.storage.sha256 import sha256_of_json
from ..files import override
from ..identity import effective_settings
from ..ranges import corners, decided, points, ranges
from ..run_files import same
from ..validation import fraction
from .spec import CLIENTS, COHORT, ROUNDS, Study

NO_FILES: Mapping[str, str] = {}
SIZES = {"clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS}


class Fork(NamedTuple):
    """What a cell is a fork of. parent, earlier: the keys of a cell; round: after which it begins."""

    parent: str
    round: int
    earlier: tuple[str, ...] = ()


class Cell(NamedTuple):
    """One run of a study. `settings`: dotted key -> the value that was chosen from the method's grids."""

    method: str
    place: tuple[str, ...]  # the label of the level on each axis
    seed: int
    settings: dict[str, Any]
    data: dict[str, Any]  # plain data of the experiment
    key: str  # name of its folder, the same for the same configuration
    fork: Fork | None = None  # what it is a fork of, on an axis with `fork`
    earlier: tuple[str, ...] = ()  # the keys that versions gave it which took files by their paths, the latest first

    @property
    def label(self) -> str:
        return ", ".join([self.method, *self.place, f"seed {self.seed}"])

    @property
    def chosen(self) -> str:
        """The settings as text, such as "rule.lr 0.1, server_lr 1", without the prefix "method."."""
        return ", ".join(f"{key.removeprefix('method.')} {value}" for key, value in self.settings.items())


Score = Callable[[Cell], float]
"""Trial -> its value, where larger is better; -inf if the trial diverged, failed or has not been run."""


# --- levels -----------------------------------------------------------------------------------------------------------
class Level(NamedTuple):
    """A level of an axis. `overrides`: dotted key -> value, for all methods; `own`: method -> further ones."""

    label: str
    overrides: dict[str, Any]
    own: dict[str, dict[str, Any]]

    def of(self, method: str) -> list[str]:
        """The overrides for a method, as text."""
        return [f"{key}={json.dumps(value)}" for key, value in {**self.overrides, **self.own.get(method, {})}.items()]


def levels(study: Study) -> list[tuple[tuple[str, ...], tuple[Level, ...]]]:
    """(labels, levels) of every combination of the axes' levels."""
    axes = [axis_levels(name, axis, study) for name, axis in study.axes.items()]
    return [(tuple(level.label for level in combination), combination) for combination in product(*axes)]


def axis_levels(name: str, axis: dict[str, Any], study: Study) -> list[Level]:
    """The levels of an axis.

    axis: {key: a.b, values: [1, 2]}, where the key may be a mapping by method, or {label: {a.b: 1, …}, …}, which
    may have the round of a fork, see `fork_axis`.
    """
    if not axis:
        raise ConfigError(f"axes.{name} has no level; give it some, or drop the axis")
    axis = {label: level for label, level in axis.items() if not is_fork(label, level)}
    if set(axis) == {"key", "values"} and isinstance(axis["values"], list):
        made = [value_level(name, axis["key"], value, study) for value in axis["values"]]
        if not made:
            raise ConfigError(f"axes.{name} has no level; give it some values, or drop the axis")
        if len({level.label for level in made}) < len(made):
            raise ConfigError(f"axes.{name}.values must be different, got {axis['values']!r}; drop what is repeated")
    else:
        made = [labelled_level(name, label, overrides, study) for label, overrides in axis.items()]
    for key in (key for level in made for keys in (level.overrides, *level.own.values()) for key in keys):
        if key in ("seed", "method"):
            raise ConfigError(f"axes: {key} is set by the study's {key}s; give them there")
        if "=" in str(key) or not all(str(key).split(".")):
            raise ConfigError(
                f"axes.{name}: levels must change keys of an experiment, got the key {key!r}; write one as in "
                "federation.local.steps"
            )
    return made


def value_level(name: str, key: Any, value: Any, study: Study) -> Level:
    """The level at which the key of an axis has a value. key: one for all methods, or a mapping by method."""
    label = f"{name} = {value}"
    if isinstance(key, str):
        return Level(label, {key: value}, {})
    known(f"axes.{name}.key", key, study)
    return Level(label, {}, {method: {own: value} for method, own in key.items()})


def labelled_level(name: str, label: Any, overrides: Any, study: Study) -> Level:
    """A level that is written as a mapping of overrides."""
    if not isinstance(overrides, dict):
        raise ConfigError(
            f"axes.{name}.{label} must be a mapping of overrides, got {overrides!r}; or write the axis as "
            "{key: federation.local.steps, values: [1, 5]}"
        )
    own = overrides.get("methods", {})
    known(f"axes.{name}.{label}.methods", own, study)
    for method, mine in own.items():
        if not isinstance(mine, dict):
            raise ConfigError(
                f"axes.{name}.{label}.methods.{method} must be a mapping of overrides, got {mine!r}; write one "
                "as in {method.rule.lr: 0.1}"
            )
    return Level(str(label), {key: value for key, value in overrides.items() if key != "methods"}, own)


def is_fork(label: str, level: Any) -> bool:
    """Whether an entry of an axis is the round of a fork, and not a level that is called so."""
    return label == "fork" and not isinstance(level, dict)


def fork_axis(study: Study) -> tuple[int, str, int] | None:
    """(place of the axis whose levels are forks, label of the level that they are forks of, round) or None.

    It is the axis with the entry `fork: ROUND`. The parents are the cells of its level without overrides. Raises
    ConfigError if there are several such axes, or no such level.
    """
    found = [name for name, axis in study.axes.items() if any(is_fork(*entry) for entry in axis.items())]
    if not found:
        return None
    name, number = found[0], study.axes[found[0]]["fork"]
    if len(found) > 1:
        raise ConfigError(f"axes: only one axis may have fork, got {', '.join(found)}; drop it from the others")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"axes.{name}.fork must be the number of a round, at least 1, got {number!r}; change it")
    if study.tune.each != "none":
        raise ConfigError(f"axes.{name}.fork goes with tune.each: none, got {study.tune.each}; tune in another study")
    parents = [label for label, level in study.axes[name].items() if level == {}]
    if len(parents) != 1:
        raise ConfigError(
            f"axes.{name} must have one level without overrides, which the others are forks of, got {len(parents)}; "
            "write one as in none: {}"
        )
    return list(study.axes).index(name), str(parents[0]), number


def known(path: str, methods: Any, study: Study) -> None:
    """Raise ConfigError unless `methods` is a mapping whose keys are methods of the study."""
    if not isinstance(methods, dict):
        raise ConfigError(f"{path} must be a mapping by method, got {methods!r}")
    for method in methods:
        if method not in study.methods:
            raise ConfigError(f"{path}: the study has no method {method}; {nearest(str(method), study.methods)}")


# --- cells ------------------------------------------------------------------------------------------------------------
def planned(study: Study, method: str, at: Sequence[Level], seed: int) -> dict[str, Any]:
    """Plain data of the experiment of one method, at a level of each axis, and one seed, with its grids and ranges."""
    data = deepcopy({**study.experiment, "method": study.methods[method]})
    data = override(data, [text for level in at for text in level.of(method)])
    check_sizes(data)
    full = {**SIZES, **data.get("federation", {})}["rounds"]
    data = reduce(data, study)
    if forks := fork_axis(study):
        number = fork_round(forks[2], full, data)
        data["checkpoint"] = {"every": number, "keep": 1 + data["federation"]["rounds"] // number}
        data["engine"] = {**data.get("engine", {}), "keep_state": True}
    data.update(seed=seed, plugins=list(study.plugins), tracking={"uri": "none"})
    data["engine"] = {**data.get("engine", {}), "backend": "local"}
    return data


COUNTS = {"federation": {"rounds": 1, "clients": 1, "cohort": 1}, "evaluate": {"every": 0}, "engine": {}}
"""section of an experiment -> key that a study may reduce -> its least value."""


def check_sizes(data: dict[str, Any]) -> None:
    """Raise ConfigError if the sections of an experiment that a study reads are no mappings, or their numbers no whole
    ones."""
    for section, keys in COUNTS.items():
        given = data.get(section, {})
        if not isinstance(given, dict):
            raise ConfigError(
                f"experiment.{section} must be a mapping of keys, got {given!r}; write one, or leave it out"
            )
        for key, least in keys.items():
            value = given.get(key, least)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"experiment.{section}.{key} must be a whole number of at least {least}, got {value!r}; change it"
                )


def fork_round(number: int, full: int, data: dict[str, Any]) -> int:
    """The round of a fork in a study that may be reduced: at the same fraction of the run. full: its full rounds."""
    return max(1, round(number * data["federation"]["rounds"] / full))


def grid(study: Study, method: str, place: tuple[str, ...], at: Sequence[Level], seed: int) -> Iterator[Cell]:
    """A cell for each point of the method's grids; a single one with its ranges if it has ranges (see `searches`)."""
    data = planned(study, method, at, seed)
    if has_ranges(data):
        yield made(study, method, place, seed, {}, data)
        return
    for settings in points(ranges(data)):
        yield made(study, method, place, seed, settings, decided(data, settings))


def has_ranges(data: dict[str, Any]) -> bool:
    """Whether the data contain a range that is no grid."""
    return not all(one.listed for one in ranges(data))


def first_values(data: dict[str, Any]) -> dict[str, Any]:
    """The experiment with the first value of each grid and the lower end of each range."""
    return decided(data, next(corners(ranges(data))))


def made(
    study: Study, method: str, place: tuple[str, ...], seed: int, settings: dict[str, Any], data: dict[str, Any]
) -> Cell:
    cell = Cell(method, place, seed, settings, {**data, "name": ", ".join([method, *place])}, "")
    return with_keys(cell, study)


def with_keys(cell: Cell, study: Study) -> Cell:
    """The cell with the keys that follow from its data."""
    key = digest(cell.data, study.files)
    earlier = digest_by_paths(cell.data, study.files), digest_by_paths(cell.data, NO_FILES)
    return cell._replace(key=key, earlier=earlier)


def reduce(data: dict[str, Any], study: Study) -> dict[str, Any]:
    """The experiment with the study's reduced rounds and clients; evaluations stay at the same fractions of the run."""
    scale, rounds, clients = study.reduced.scale, study.reduced.rounds, study.reduced.clients
    federation = data["federation"] = {**SIZES, **data.get("federation", {})}
    full = federation["rounds"]
    federation["rounds"] = rounds or max(1, round(full * scale))
    if every := data.get("evaluate", {}).get("every"):
        data["evaluate"] = {**data["evaluate"], "every": max(1, round(every * federation["rounds"] / full))}
    if clients is not None:
        federation["cohort"] = max(1, round(federation["cohort"] * clients / federation["clients"]))
        federation["clients"] = clients
    return data


def trial_of(cell: Cell, study: Study) -> Cell:
    """The trial with the settings of a cell; the cell itself if that is what it would run."""
    data = trial_data(cell.data, study)
    return cell if data is cell.data else with_keys(cell._replace(data=data), study)


def trial_data(data: dict[str, Any], study: Study) -> dict[str, Any]:
    """The experiment with the number of rounds of a trial, if it has more of them, and with the rows that trials hold
    out. Raises ConfigError if it holds out some of its own."""
    federation, rounds = data["federation"], study.trial_rounds
    if rounds is not None and rounds < federation["rounds"]:
        data = {**data, "federation": {**federation, "rounds": rounds}}
    if held_out := study.tune.validation:
        if own := fraction(data):
            raise ConfigError(
                f"tune.validation: the runs hold out rows of their own, evaluate.validation is {own}, got {held_out}; "
                "drop one of them"
            )
        data = {**data, "evaluate": {**data.get("evaluate", {}), "validation": held_out}}
    return data


def digest(data: dict[str, Any], files: Mapping[str, str] = NO_FILES) -> str:
    """16 hex digits that depend on all settings that influence the numbers of a run, and on the content of plug-ins.

    files: SHA-256 of the files that settings of the workload name. It stands for such a file in place of its path, so
    that other content is another cell, and the same content elsewhere the same one.
    """
    return digest_of(data, files, [plugin.content for plugin in plugins_of(data)])


def digest_by_paths(data: dict[str, Any], files: Mapping[str, str]) -> str:
    """The digest that earlier versions had, in which plug-ins have their paths beside their content."""
    return digest_of(data, files, [plugin.module for plugin in plugins_of(data)])


def plugins_of(data: dict[str, Any]) -> list[Plugin]:
    return [find_plugin(name) for name in data.get("plugins", [])]


def digest_of(data: dict[str, Any], files: Mapping[str, str], plugins: list[str]) -> str:
    """plugins: what stands for each of them."""
    settings = effective_settings(data)
    for key, value in settings.items():
        if key.startswith("workload.") and isinstance(value, str) and value in files:
            settings[key] = {"sha256": files[value]}
    return sha256_of_json([before_samplers(settings), plugins])[:16]


# --- tuning -----------------------------------------------------------------------------------------------------------
def trials(study: Study) -> list[Cell]:
    """The cells that tuning has to run, in the order of the cells that wait for them."""
    if study.tune.each == "none":
        return []
    found = [
        trial_of(cell, study)
        for method in study.methods
        for _, _, offered in grids_of(study, method, study.tune.seeds or study.seeds)
        for cell in (offered if len(offered) > 1 else [])
    ]
    return list({cell.key: cell for cell in found}.values())


def cells(study: Study, score: Score | None = None) -> list[Cell]:
    """The study's runs, each with the best settings by `score`, or with the first of every grid if it is None."""
    score = score and once_each(score)
    return with_forks(study, [cell for method in study.methods for cell in of_method(study, method, score)])


def once_each(score: Score) -> Score:
    """The same function, which computes the value of every trial only once: a value is read from files. Methods that
    share a trial may be tuned by different columns of it."""
    known: dict[tuple[str, str], float] = {}

    def of(cell: Cell) -> float:
        at = cell.method, cell.key
        if at not in known:
            known[at] = score(cell)
        return known[at]

    return of


def with_forks(study: Study, cells: list[Cell]) -> list[Cell]:
    """The cells, in which those on an axis with `fork` know what they are forks of."""
    found = fork_axis(study)
    if found is None:
        return cells
    at, label, _ = found
    parents = {(cell.method, cell.place, cell.seed): cell for cell in cells if cell.place[at] == label}
    made = []
    for cell in cells:
        parent = parents[cell.method, (*cell.place[:at], label, *cell.place[at + 1 :]), cell.seed]
        if parent is not cell:
            number = parent.data["checkpoint"]["every"]
            key = sha256_of_json([cell.key, parent.key, number])[:16]
            both = zip(cell.earlier, parent.earlier, strict=True)
            earlier = tuple(sha256_of_json([own, above, number])[:16] for own, above in both)
            cell = cell._replace(key=key, fork=Fork(parent.key, number, parent.earlier), earlier=earlier)
        made.append(cell)
    return made


def of_method(study: Study, method: str, score: Score | None) -> Iterator[Cell]:
    """The cells of a method. All cells of a group take the same point of their grids, which is chosen once."""
    if study.tune.each == "none":
        for place, at in levels(study):
            for seed in study.seeds:
                yield next(grid(study, method, place, at, seed))
        return
    offered = grids_of(study, method, study.seeds)
    if score is None:
        yield from (run[0] for _, _, run in offered)
        return
    tried = grids_of(study, method, study.tune.seeds) if study.tune.seeds else offered
    chosen = {group: best(runs, study, score) for group, runs in in_groups(study, tried).items()}
    for place, seed, run in offered:
        yield run[chosen[group_of(study, place, seed)]]


def grids_of(study: Study, method: str, seeds: Sequence[int]) -> list[tuple[tuple[str, ...], int, list[Cell]]]:
    """(labels of the level, seed, cells of all points of the method's grids) for each level and seed.

    Raises ConfigError if one point is to be chosen for all levels, and their grids have different numbers of points.
    """
    made = [(place, seed, [*grid(study, method, place, at, seed)]) for place, at in levels(study) for seed in seeds]
    sizes = {", ".join(place): len(run) for place, _, run in made}
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if study.tune.each == "once" and sizes[least] < sizes[most]:
        raise ConfigError(
            f"tune.each must be level or cell if the number of points in a grid depends on the level, got once, where "
            f"methods.{method} has {sizes[least]} at {least} and {sizes[most]} at {most}; change it, or give all "
            "levels the same grids"
        )
    return made


def group_of(study: Study, place: tuple[str, ...], seed: int) -> Any:
    """What the cells have in common for which one point is chosen, and the trials whose mean decides."""
    if study.tune.each == "once":
        return None
    return (place, seed) if study.tune.each == "cell" and study.tune.seeds is None else place


def in_groups(study: Study, tried: list[tuple[tuple[str, ...], int, list[Cell]]]) -> dict[Any, list[list[Cell]]]:
    """Group -> the points of each level and seed that decide which one its cells take.

    Group: as of `group_of`. tried: as `grids_of` returns them.
    """
    groups: dict[Any, list[list[Cell]]] = {}
    for place, seed, run in tried:
        groups.setdefault(group_of(study, place, seed), []).append(run)
    return groups


def best(runs: list[list[Cell]], study: Study, score: Score) -> int:
    """The number of the point with the best mean score, the first one of those whose means are the `same`.

    runs: the points of each level and seed that decide.
    """
    if len(runs[0]) == 1:
        return 0
    values = mean_scores(runs, study, score)
    return next(number for number, value in enumerate(values) if same(value, max(values)))


def mean_scores(runs: list[list[Cell]], study: Study, score: Score) -> list[float]:
    """The mean score of every point over the levels and seeds that decide, -inf if it has none in one of them."""
    values = []
    for point in zip(*runs, strict=True):
        scores = [score(trial_of(cell, study)) for cell in point]
        values.append(sum(scores) / len(scores) if all(map(math.isfinite, scores)) else -math.inf)
    return values
