"""Errors for memory that runs out: they name the block, the model and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ConfigError, FedFleetError, OutOfMemory, type_and_first_line
from ..memory import bounded_address_space, is_out_of_memory
from ..user_code import location_clause

if TYPE_CHECKING:
    from .run_spec import RunSpec


def memory_remedy(run_spec: RunSpec) -> str:
    """A clause with the size of the block, the size of the model, and the settings to lower."""
    layout, engine = run_spec.layout, run_spec.experiment.engine
    parameters = sum(layout.sizes)
    size = run_spec.dtype.itemsize * parameters / 2**20
    lower = "engine.block, engine.workers" if engine.backend == "ray" else "engine.block"
    return (
        f"a block has {run_spec.block(parameters)} clients, and the model of workload {workload_name(run_spec)} has "
        f"{parameters:,} parameters, {size:,.1f} MiB for each client; "
        f"lower {lower} or federation.local.batch, or choose a smaller model"
    )


def workload_name(run_spec: RunSpec) -> str:
    """The name of the workload as the experiment gives it."""
    spec = run_spec.experiment.workload
    return str(spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


@contextmanager
def memory_errors(run_spec: RunSpec) -> Iterator[None]:
    """Turns any exception that means that memory ran out into OutOfMemory, with one sentence."""
    try:
        yield
    except Exception as error:
        found = error.__cause__ if isinstance(error, FedFleetError) and error.__cause__ is not None else error
        if isinstance(error, ConfigError | OutOfMemory) or not is_out_of_memory(found):
            raise
        raise OutOfMemory(f"memory ran out ({type_and_first_line(found)}): {memory_remedy(run_spec)}") from error


@contextmanager
def building_model(run_spec: RunSpec) -> Iterator[None]:
    """For code that builds a model: raises ConfigError if there is not enough memory for the model.

    The address space is bounded meanwhile. Without the bound the kernel would kill the process.
    """
    try:
        with bounded_address_space():
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"workload: the model of {workload_name(run_spec)} cannot be allocated ({type_and_first_line(error)})"
            f"{location_clause(error)}, got {run_spec.experiment.workload}; choose a smaller model"
        ) from error
