"""What a user is told where memory runs out: the block, the model and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ConfigError, FedFleetError, OutOfMemory
from ..memory import bounded, exhausted, first_line
from ..user_code import placed

if TYPE_CHECKING:
    from .run_spec import RunSpec


def remedy(job: RunSpec) -> str:
    """The block, the model, and what to change, as a clause."""
    layout, engine = job.layout, job.experiment.engine
    parameters = sum(layout.sizes)
    size = job.dtype.itemsize * parameters / 2**20
    lower = "engine.block, engine.workers" if engine.backend == "ray" else "engine.block"
    return (
        f"a block has {job.block(parameters)} clients, and the model of workload {named(job)} has {parameters:,} "
        f"parameters, {size:,.1f} MiB for each client; lower {lower} or federation.local.batch, or choose a smaller "
        "model"
    )


def named(job: RunSpec) -> str:
    """The workload's name, as the experiment gives it."""
    spec = job.experiment.workload
    return str(spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


@contextmanager
def told(job: RunSpec) -> Iterator[None]:
    """What runs out of memory meanwhile ends as OutOfMemory, one sentence."""
    try:
        yield
    except Exception as error:
        found = error.__cause__ if isinstance(error, FedFleetError) and error.__cause__ is not None else error
        if isinstance(error, ConfigError | OutOfMemory) or not exhausted(found):
            raise
        raise OutOfMemory(f"memory ran out ({first_line(found)}): {remedy(job)}") from error


@contextmanager
def building(job: RunSpec) -> Iterator[None]:
    """While a model is built: ConfigError where there is no memory for it, and not the kernel's end of the process."""
    try:
        with bounded():
            yield
    except Exception as error:
        if not exhausted(error):
            raise
        raise ConfigError(
            f"workload: the model of {named(job)} cannot be allocated ({first_line(error)}){placed(error)}, got "
            f"{job.experiment.workload}; choose a smaller model"
        ) from error
