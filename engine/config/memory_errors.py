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


def remedy(run_spec: RunSpec) -> str:
    """The block, the model, and what to change, as a clause."""
    layout, engine = run_spec.layout, run_spec.experiment.engine
    parameters = sum(layout.sizes)
    size = run_spec.dtype.itemsize * parameters / 2**20
    lower = "engine.block, engine.workers" if engine.backend == "ray" else "engine.block"
    return (
        f"a block has {run_spec.block(parameters)} clients, and the model of workload {named(run_spec)} has "
        f"{parameters:,} "
        f"parameters, {size:,.1f} MiB for each client; lower {lower} or federation.local.batch, or choose a smaller "
        "model"
    )


def named(run_spec: RunSpec) -> str:
    """The workload's name, as the experiment gives it."""
    spec = run_spec.experiment.workload
    return str(spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


@contextmanager
def told(run_spec: RunSpec) -> Iterator[None]:
    """What runs out of memory meanwhile ends as OutOfMemory, one sentence."""
    try:
        yield
    except Exception as error:
        found = error.__cause__ if isinstance(error, FedFleetError) and error.__cause__ is not None else error
        if isinstance(error, ConfigError | OutOfMemory) or not exhausted(found):
            raise
        raise OutOfMemory(f"memory ran out ({first_line(found)}): {remedy(run_spec)}") from error


@contextmanager
def building(run_spec: RunSpec) -> Iterator[None]:
    """While a model is built: ConfigError where there is no memory for it, and not the kernel's end of the process."""
    try:
        with bounded():
            yield
    except Exception as error:
        if not exhausted(error):
            raise
        raise ConfigError(
            f"workload: the model of {named(run_spec)} cannot be allocated ({first_line(error)}){placed(error)}, got "
            f"{run_spec.experiment.workload}; choose a smaller model"
        ) from error
