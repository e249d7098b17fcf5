"""An experiment: typed, validated, plain data that YAML can hold.

`workload` and `method` are a name with arguments, {name: digits, model: mlp}, a bare name, or in Python an object that
is already built.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from ..errors import ConfigError, nearest
from ..storage.secrets import redacted, without_secrets

LARGEST_COUNT = 2**31 - 1
"""The largest count of anything; seeds may have 63 bits."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: Any) -> Any:
        """`true` is 1 to Python; here it is a mistake."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}")
        return value


class Local(Section):
    """One client's work in a round: `steps` batches, or `epochs` passes over its own data."""

    steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    epochs: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    batch: int = Field(default=32, ge=1, le=LARGEST_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _one_measure(cls, values: Any) -> Any:
        if isinstance(values, dict):
            given = [key for key in ("steps", "epochs") if values.get(key) is not None]
            if len(given) == 2:
                raise ValueError("give either steps or epochs, not both; drop one")
            if not given:
                values = {**values, "steps": 5}
        return values


class Federation(Section):
    """`clients` is N, `cohort` is S, the clients sampled each round. `weights`: of the mean of the models."""

    clients: int = Field(default=100, ge=1, le=LARGEST_COUNT)
    cohort: int = Field(default=20, ge=1, le=LARGEST_COUNT)
    rounds: int = Field(default=50, ge=1, le=LARGEST_COUNT)
    local: Local = Field(default_factory=lambda: Local.model_validate({}))
    weights: Literal["uniform", "examples"] = "uniform"

    @model_validator(mode="after")
    def _cohort_fits(self) -> Federation:
        if self.cohort > self.clients:
            raise ValueError(
                f"cohort <= clients must hold, got cohort={self.cohort}, clients={self.clients}; "
                "lower federation.cohort"
            )
        return self


class WorkerGroup(Section):
    """Workers that are alike. `cpus`: engine.cpus, unless given; `labels`, `resources`: of the nodes that they may be
    on, and what they take there, as Ray has them."""

    count: int = Field(ge=1, le=LARGEST_COUNT)
    cpus: float | None = Field(default=None, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    labels: dict[str, str] = {}
    resources: dict[str, float] = {}

    def needs(self) -> dict[str, float]:
        """What one worker takes of a node, by Ray's names."""
        return {"CPU": self.cpus or 1.0, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}


def kind_of_workers(value: Any) -> str:
    """Which of the three ways to say it."""
    return "tuple[" if isinstance(value, list | tuple) else "literal[" if value == "auto" else "int"


Workers = Annotated[
    Annotated[int, Tag("int")]
    | Annotated[Literal["auto"], Tag("literal[")]
    | Annotated[tuple[WorkerGroup, ...], Tag("tuple[")],
    Discriminator(kind_of_workers),
]


class Engine(Section):
    """Where it runs. `workers`, `cpus`, `gpus` and `backend` never change a bit of the result; `block`, `kernels`,
    `vectorise`, `threads`, `dtype` and `device` may, within rounding, `precision` within bfloat16's.

    `precision`: of the forward and backward passes of training; weights, gradients and all state stay in `dtype`.

    `state_dtype`: of clients' states between rounds; `store`: their folder (default: the run's, else a temporary one),
    removed at the end unless `keep_state`. `on_failure`: a client that fails again alone ends the run, or is dropped
    from the round. `patience`: seconds without a local step after which a worker counts as dead. On a cluster,
    `placement`: workers on as few nodes as hold them, or spread over all; `wait`: seconds for what others hold.
    """

    backend: Literal["ray", "local"] = "ray"
    workers: Workers = "auto"
    cpus: float = Field(default=1.0, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    block: int | Literal["auto"] = "auto"
    kernels: Literal["auto", "torch", "native", "chain"] = "auto"
    vectorise: bool = True
    device: str = "auto"
    threads: int = Field(default=1, ge=1, le=4096)
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["same", "bfloat16"] = "same"
    state_dtype: Literal["same", "bfloat16"] = "same"
    store: str | None = None
    keep_state: bool = False
    address: str | None = None
    on_failure: Literal["fail", "drop"] = "fail"
    patience: float = Field(default=600.0, gt=0)
    placement: Literal["pack", "spread"] = "pack"
    wait: float = Field(default=60.0, gt=0)

    @field_validator("device")
    @classmethod
    def _known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|(cuda|xpu)(:\d+)?|mps", value):
            raise ValueError("must be auto, cpu, cuda or cuda:0")
        return value

    @field_validator("workers", "block")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be a positive integer or auto")
        if isinstance(value, int) and value > LARGEST_COUNT:
            raise ValueError(f"must be at most {LARGEST_COUNT}, or auto")
        if isinstance(value, tuple) and not value:
            raise ValueError("must name a group at least, as in [{count: 2}]")
        return value

    def groups(self) -> tuple[WorkerGroup, ...]:
        """Workers to start: as given, or as many alike as this machine's processors allow."""
        if isinstance(self.workers, tuple):
            return tuple(group.model_copy(update={"cpus": group.cpus or self.cpus}) for group in self.workers)
        count = max(1, int((os.cpu_count() or 1) / self.cpus)) if self.workers == "auto" else self.workers
        return (WorkerGroup(count=count, cpus=self.cpus, gpus=self.gpus),)

    def count_workers(self) -> int:
        return sum(group.count for group in self.groups())

    def on_gpus(self) -> bool:
        """Whether any worker has one."""
        return any(group.gpus > 0 for group in self.groups())


class Evaluate(Section):
    """`every`: rounds between evaluations (the last round always is one); 0 evaluates the last round only.
    `fairness`: also on every client's own training rows, of which the mean over clients and over the worst tenth.
    `held_out`: the fraction of each client's rows that it does not train on; the same means over them."""

    every: int = Field(default=5, ge=0, le=LARGEST_COUNT)
    batch: int = Field(default=500, ge=1, le=LARGEST_COUNT)
    fairness: bool = False
    held_out: float = Field(default=0.0, ge=0, lt=1)


class Checkpoint(Section):
    """`every`: rounds between checkpoints, 0 for none but on interruption; `keep`: how many; `folder`: where complete
    copies of them go that other machines can resume, a path or a URL (file:///…, s3://bucket/…), in the run's id."""

    every: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    keep: int = Field(default=2, ge=1, le=LARGEST_COUNT)
    folder: str | None = Field(default=None, min_length=1)

    @field_validator("folder")
    @classmethod
    def _no_secret(cls, value: str | None) -> str | None:
        return value and without_secrets(value)


class Tracking(Section):
    """`uri`: an MLflow store: auto (SQLite beside the runs), none, sqlite:///…, or a server's http(s)://…; `clients`:
    also write each round's loss, movement and steps of every client, to Parquet in the run's folder."""

    uri: str = "auto"
    experiment: str = "default"
    name: str = "mlflow"
    clients: bool = False


class Experiment(Section):
    seed: int = Field(default=0, ge=0, lt=2**63)
    name: str = ""
    plugins: tuple[str, ...] = ()
    workload: Any
    method: Any
    federation: Federation = Field(default_factory=lambda: Federation.model_validate({}))
    engine: Engine = Field(default_factory=Engine)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    tracking: Tracking = Field(default_factory=Tracking)

    @field_validator("plugins", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("workload", "method")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value.get("name"), str):
            raise ValueError("needs a name, as in {name: digits}")
        if value is None or isinstance(value, int | float | list | tuple):
            raise ValueError("must be a name or {name: …, arguments}")
        return value

    def plain(self) -> dict[str, Any]:
        """As YAML can hold it; built objects by their representation."""
        data = self.model_dump(mode="python", exclude={"workload", "method"})
        data["plugins"] = list(self.plugins)
        data["tracking"]["uri"] = redacted(self.tracking.uri)
        for key in ("workload", "method"):
            value = getattr(self, key)
            data[key] = value if isinstance(value, str | dict) else repr(value)
        return data


RANGES = ("uniform", "loguniform", "int", "choice", "grid")
"""Kinds of ranges, which `fedfleet search` and `fedfleet study` put values in the place of."""


def range_in(data: Any, path: tuple[str, ...] = ()) -> tuple[str, Any] | None:
    """(dotted key, the range) of the first {search: uniform, …} in the place of a value."""
    if not isinstance(data, dict):
        return None
    if path and "name" not in data and (data.get("search") in RANGES or {"search", "low"} <= data.keys()):
        return ".".join(path), data
    return next((found for key, inner in data.items() if (found := range_in(inner, (*path, str(key))))), None)


def experiment(data: dict[str, Any]) -> Experiment:
    """Validate; ConfigError with one sentence per mistake."""
    if found := range_in(data):
        raise ConfigError(
            f"{found[0]} is a range, got {found[1]!r}; give a value, or have `fedfleet search` choose one"
        )
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_sentence(e) for e in error.errors()))) from None


RENAMED = {"engine.hosts": "engine.workers"}
"""Keys of earlier versions, with their names of today."""


def _sentence(error: Any) -> str:
    path = [str(part) for part in error["loc"] if not str(part).startswith(("literal[", "tuple[", "int", "function-"))]
    key = ".".join(path)
    if key in RENAMED:
        return f"{key} is called {RENAMED[key]} now, got {error['input']!r}; write {RENAMED[key]}"
    if error["type"] == "extra_forbidden":
        return f"{key} is not a key; {nearest(path[-1], _keys(path[:-1]))}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be", 1)
    if error["type"] == "missing":
        return f"{key} is missing; add {key}: {{name: …}}"
    if error["type"] == "value_error":
        got = "" if isinstance(error["input"], dict) else f", got {redacted(repr(error['input']))}"
        return f"{key}: {message}{got}" if key else message
    message = re.sub(r"a valid dictionary or instance of \w+", "a mapping of keys", message)
    return f"{key} {message}, got {error['input']!r}"


def _keys(path: list[str]) -> list[str]:
    """The valid keys of a section."""
    model: Any = Experiment
    for part in path:
        model = WorkerGroup if part.isdigit() or part == "workers" else model.model_fields[part].annotation
    return list(model.model_fields)
