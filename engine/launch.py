"""`run(experiment)`: from a validated experiment to records, a model and a run directory."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .config import Experiment
from .driver import Driver, Record, Setup
from .errors import ConfigError
from .fleet import InProcess
from .forms import Forms
from .host import Data
from .job import Job

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Result:
    """A finished run. `records`: one row a round; `model`: name -> tensor; bytes and seconds of the whole run."""

    run_id: str
    experiment: Experiment
    rows: list[Record]
    model: dict[str, Tensor]
    seconds: float
    directory: Path | None = None

    @property
    def records(self) -> pa.Table:
        from .records import to_table

        return to_table(self.rows)

    @property
    def model_sha256(self) -> str:
        return digest(self.model)

    @property
    def metrics(self) -> Record:
        """The final values of what was evaluated, and the final training loss."""
        return {key: value for key, value in self.rows[-1].items() if key.startswith(("eval/", "train/"))}

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "run_id": self.run_id,
            "rounds": len(self.rows),
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "model_sha256": self.model_sha256,
            "bytes_down": int(sum(row["comm/bytes_down"] for row in self.rows)),
            "bytes_up": int(sum(row["comm/bytes_up"] for row in self.rows)),
            "seconds": round(self.seconds, 3),
            "directory": str(self.directory) if self.directory else None,
        }


class Observer(Protocol):
    """Watches a run: a progress bar, a tracker, a run directory."""

    def begin(self, job: Job, facts: dict[str, Any]) -> None: ...

    def record(self, record: Record) -> None: ...

    def end(self, result: Result) -> None: ...

    def failed(self, error: BaseException) -> None: ...


def digest(model: dict[str, Tensor]) -> str:
    """SHA-256 of the tensors' names and bytes, in the order of names."""
    sha = hashlib.sha256()
    for name in sorted(model):
        sha.update(name.encode() + b"\0")
        sha.update(model[name].detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def new_run_id() -> str:
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def prepare(experiment: Experiment, run_id: str) -> Job:
    """Resolve every name, so that a mistake is told before anything starts."""
    job = Job.of(run_id, experiment)
    method, engine = job.method(), experiment.engine
    try:
        job.workload.check()
        Forms(method, job.start())
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from error
    if job.device.type == "cuda" and not engine.address and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device={engine.device}, engine.gpus={engine.gpus:g}: no CUDA device is here; use cpu"
        )
    return job


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    run_id: str | None = None,
) -> Result:
    """Run to the last round.

    out: a folder for the run's files (configuration, environment, rounds.parquet, model, log); None writes none.
    observers: told of every round. Raises ConfigError for what cannot run, Diverged where the model explodes.
    """
    from .directory import RunDirectory

    job = prepare(experiment, run_id or new_run_id())
    watching: list[Observer] = list(observers)
    directory = RunDirectory(Path(out)) if out is not None else None
    if directory is not None:
        watching.insert(0, directory)
    if experiment.tracking.uri != "none":
        watching.append(job.parts.build("TRACKERS", tracker_spec(experiment, directory), "tracking"))
    return _watched(job, watching, directory.path if directory else None)


def tracker_spec(experiment: Experiment, directory: Any) -> dict[str, Any]:
    tracking = experiment.tracking
    return {
        "name": tracking.name,
        "uri": tracking.uri,
        "experiment": tracking.experiment,
        "directory": str(directory.path) if directory else None,
    }


def _watched(job: Job, observers: list[Observer], directory: Path | None) -> Result:
    started, rows = time.perf_counter(), []
    begun: list[Observer] = []
    try:
        for observer in observers:
            begun.append(observer)
            observer.begin(job, {})
        play = _on_ray(job) if job.experiment.engine.backend == "ray" else in_process(job)
        model: dict[str, Tensor] = {}
        while True:
            try:
                record = next(play)
            except StopIteration as stop:
                model = stop.value
                break
            rows.append(record)
            for observer in observers:
                observer.record(record)
        result = Result(job.run_id, job.experiment, rows, model, time.perf_counter() - started, directory)
        for observer in observers:
            observer.end(result)
        return result
    except BaseException as error:
        for observer in begun:
            observer.failed(error)
        raise


def _on_ray(job: Job) -> Iterator[Record]:
    from .ray_backend import play

    return play(job)


def in_process(job: Job) -> Iterator[Record]:
    """Run in this process; yields records, returns the final model's tensors."""
    split = job.split()
    data = Data.of(split.train, split.test, split.parts)
    setup = Setup(split.parts, len(next(iter(split.test.values()))))
    threads = torch.get_num_threads()
    driver = Driver(job, setup, lambda store: InProcess(job, data, store))
    try:
        yield from driver.rounds()
        return driver.tensors()
    finally:
        driver.close()
        torch.set_num_threads(threads)
