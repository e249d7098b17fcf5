"""A study file: a base experiment, methods by label, axes of levels, seeds; what is tuned, what is reported.

docs/studies.md explains every key. Overrides on the command line change the study as they do an experiment:
`seeds=[0] experiment.federation.cohort=4`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ...engine.config.differences import flatten
from ...engine.config.schema import Section
from ...engine.errors import ConfigError, nearest
from ..files import listed, located, override, own, parse, read
from ..files import shipped as shipped_experiments

CLIENTS, COHORT, ROUNDS = 100, 20, 50
"""What an experiment has where it does not say."""

QUIET = ("tracking.", "experiment.engine.", "reduced.", "name", "notes")
"""Changes of these are no news to a reader of the report, or are told otherwise."""


class Tune(Section):
    """`each`: of what the best point of the grids is chosen: every cell (as most papers do), a level (one point for all
    its seeds), once (one for all levels), or none (the first value of every grid). The choice goes by the mean over the
    last `last` evaluations of `metric`, the report's unless given; its good end is the report's. `rounds`: of a trial,
    the study's unless given; `seeds`: of the trials, the study's unless given; `trials`: how many, where a range is
    searched and not a grid."""

    each: Literal["none", "cell", "level", "once"] = "none"
    metric: str | None = None
    last: int = Field(default=1, ge=1)
    rounds: int | None = Field(default=None, ge=1)
    seeds: tuple[int, ...] | None = None
    trials: int = Field(default=20, ge=1)


class Report(Section):
    """`metric`: a column of rounds.parquet; `best`: its good end; the final value is the mean over the `last`
    evaluations; `targets`: for rounds, bytes and seconds to reach them; `level_axis`: the axis that is drawn from left
    to right, the last one unless given; `log`: draw the metric on a logarithmic scale."""

    metric: str = "eval/accuracy"
    best: Literal["max", "min"] = "max"
    last: int = Field(default=1, ge=1)
    targets: tuple[float, ...] = ()
    level_axis: str | None = None
    log: bool = False


class Published(Section):
    """`values`: method -> level -> number, in the unit of the report's tables (per cent for accuracies); `settings`:
    method -> level -> the best ones, as text; `claims`: what the figures show."""

    source: str = ""
    values: dict[str, dict[str, float]] = Field(default_factory=dict)
    settings: dict[str, dict[str, str]] = Field(default_factory=dict)
    claims: tuple[str, ...] = ()


class Reduced(Section):
    """A study made smaller: `scale` multiplies rounds (and those between evaluations), `rounds` and `clients` set them;
    the cohort shrinks with the clients."""

    scale: float = Field(default=1.0, gt=0)
    rounds: int | None = Field(default=None, ge=1)
    clients: int | None = Field(default=None, ge=1)


class StudyTracking(Section):
    uri: str = "auto"
    experiment: str | None = None


class Study(Section):
    name: str
    title: str = ""
    paper: str = ""
    plugins: tuple[str, ...] = ()
    experiment: dict[str, Any]
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    tune: Tune = Tune()
    report: Report = Report()
    published: Published = Published()
    tracking: StudyTracking = StudyTracking()
    reduced: Reduced = Reduced()
    notes: tuple[str, ...] = ()

    @property
    def deciding(self) -> str:
        """The column that the best point of the grids is chosen by."""
        return self.tune.metric or self.report.metric

    @field_validator("methods", mode="before")
    @classmethod
    def _mappings(cls, methods: Any) -> Any:
        """A bare name is a method with its defaults; labels are text."""
        if not isinstance(methods, dict):
            return methods
        return {str(k): {"name": v} if isinstance(v, str) else v for k, v in methods.items()}

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("must not repeat a seed")
        return seeds

    @model_validator(mode="after")
    def _known_axis(self) -> Study:
        wanted = self.report.level_axis
        if wanted is not None and wanted not in self.axes:
            raise ValueError(f"report.level_axis={wanted} is no axis of the study; {nearest(wanted, self.axes)}")
        return self


def shipped() -> dict[str, Path]:
    """The studies that come with the package, by name: fedmuon-bc/fmnist is studies/fedmuon-bc/fmnist.yaml."""
    root = Path(str(resources.files("fedfleet.tune"))) / "studies"
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def load(source: str, overrides: Iterable[str] = (), reduced: dict[str, Any] | None = None) -> Study:
    """The study of a file or a shipped name, overridden and made smaller; `notes` says in what it differs."""
    data = contents(source)
    full = study(own(data))  # a copy: what overrides change below is shared with it otherwise
    if reduced:
        data["reduced"] = {**data.get("reduced", {}), **reduced}
    changed = study(override(data, overrides))
    return changed.model_copy(update={"notes": (*changed.notes, *differences(full, changed))})


def contents(source: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A study file as plain data, with what it takes from its `base`, another study."""
    path = shipped().get(source, Path(source))
    if not path.is_file():
        raise ConfigError(f"there is no study {source}; {nearest(source, shipped())}, or the path of a YAML file")
    data = parse(read(path), source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of keys such as experiment and methods, got {data!r}")
    data.setdefault("name", source if source in shipped() else path.stem)
    data["plugins"] = [located(name, path) for name in listed(data.get("plugins"))]
    if "experiment" in data:
        data["experiment"] = resolved(data["experiment"], path)
    below = data.pop("base", None)
    if below is None:
        return data
    if not isinstance(below, str) or below in above:
        raise ConfigError(f"base must name another study than {source}, got {below!r}")
    return on_top(contents(below, (*above, source)), data)


def on_top(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """`data`'s keys instead of the base's; those of the experiment one by one; methods may be a list of the base's."""
    made = {**base, **data, "experiment": {**base.get("experiment", {}), **data.get("experiment", {})}}
    if isinstance(data.get("methods"), list):
        for name in data["methods"]:
            if name not in base["methods"]:
                raise ConfigError(f"methods: the base has no {name}; {nearest(str(name), base['methods'])}")
        made["methods"] = {name: base["methods"][name] for name in data["methods"]}
    return made


def resolved(experiment: Any, file: Path) -> Any:
    """A mapping, or what the named experiment file holds."""
    if not isinstance(experiment, str):
        return experiment
    known = shipped_experiments()
    path = known.get(experiment, file.parent / experiment)
    if not path.is_file():
        raise ConfigError(f"experiment: there is no {experiment}; {nearest(experiment, known)}, or the path of a file")
    return parse(read(path), experiment)


def differences(full: Study, changed: Study) -> list[str]:
    """["rounds × 0.1", "seeds is [0], in full [0, 1]", …]"""
    old, new = (flatten(s.model_dump(mode="json")) for s in (full, changed))
    made = smaller(changed) if changed.reduced != full.reduced else []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(QUIET):
            made.append(f"{key} is {shown(new, key)}, in full {shown(old, key)}")
    return made


def smaller(study: Study) -> list[str]:
    reduced, federation = study.reduced, study.experiment.get("federation", {})
    made = [f"rounds × {reduced.scale:g}"] if reduced.scale != 1 and reduced.rounds is None else []
    if reduced.rounds is not None:
        made.append(f"{reduced.rounds} rounds, in full {federation.get('rounds', ROUNDS)}")
    if reduced.clients is not None:
        made.append(
            f"{reduced.clients} clients, in full {federation.get('clients', CLIENTS)}, the cohort in proportion"
        )
    return made


def shown(values: dict[str, Any], key: str) -> str:
    return "not set" if values.get(key) is None else str(values[key])


def study(data: dict[str, Any]) -> Study:
    """Validate; ConfigError with one sentence per mistake."""
    try:
        return Study.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(sentence(e) for e in error.errors()))) from None


def sentence(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key} is not a key of a study; {nearest(str(error['loc'][-1]), keys(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{key} is missing from the study; add it, see docs/studies.md"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be", 1)
    return f"{key} {message}, got {error['input']!r}" if key else message


def keys(path: Iterable[Any]) -> list[str]:
    model: Any = Study
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
