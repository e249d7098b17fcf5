"""What a large run needs of this machine, computed from shapes before anything is built.

It is memory for the frozen tensors and for one client at work, and room on the disk for the states of clients.
Activations are not counted, nor what a block of several clients needs besides: blocks are measured. So a run that is
refused here cannot fit, and one that is not may still be too large.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from ...algorithms.tree import Tree
from ...workloads.stateless import parameters_of
from ..config.schema import Federation, Pace, part_name
from ..errors import ConfigError
from ..memory import available_memory
from ..method_form.state_spec import StateSpec, byte_count
from ..run_spec import RunSpec
from ..user_code import plugin_errors
from ..workload.model import check_size

LARGE = 1 << 30
"""Bytes of the tensors of a model, and of the states of all clients, from which on their room is looked at first."""
MOST = 0.8
"""The share of the free memory from which on a run that fits is told of in the log."""
SHARED_MEMORY = Path("/dev/shm")
"""Where Ray has what all processes of a node read."""
COPIES = 3
"""How often a worker has the weights that a method holds: as they were sent, as they are used, and before round 1."""


INDEPENDENT = ("uniform", "binomial", "poisson")
"""Samplers that draw all clients alike, and each round anew."""


class Needs(NamedTuple):
    """Bytes. `base`: of the frozen tensors; `held`: of the weights that a method holds for a round; `model`: of the
    tensors that clients train; `at_work`: of what one client carries from step to step; `row`: of what it keeps."""

    base: int
    held: int
    model: int
    at_work: int
    row: int

    @staticmethod
    def of(run_spec: RunSpec) -> Needs | None:
        """The needs of a run whose workload has an outline of its network, and None otherwise."""
        outline = run_spec.workload.outline
        if outline is None:
            return None
        names, parameters = run_spec.held, parameters_of(outline)
        trained = {name: value for name, (value, _) in parameters.items() if value.requires_grad or name in names}
        size = run_spec.dtype.itemsize
        stored = run_spec.workload.stored() if run_spec.experiment.engine.base == "as_stored" else None
        types = {} if stored is None else stored.types_in_files
        base = sum(
            value.numel() * run_spec.frozen_type(types.get(name, value.dtype)).itemsize
            for name, (value, _) in parameters.items()
            if name not in trained
        )
        held = size * sum(trained[name].numel() for name in names)
        model = size * sum(value.numel() for value in trained.values()) - held
        if not trained or run_spec.experiment.personal is not None:  # it divides the model by values
            return Needs(base, held, model, model, 0)
        x = Tree.of({name: torch.empty_like(v, dtype=run_spec.dtype, device="meta") for name, v in trained.items()})
        method = run_spec.method_for(x.layout)
        try:
            spec = StateSpec(method, x)
        except RuntimeError:  # it draws numbers or looks at them, and there are none
            return Needs(base, held, model, model, 0)
        return Needs(base, held, model, spec.at_work, byte_count(spec.client))

    @property
    def client(self) -> int:
        """Of one client at work: what it carries from step to step, and the gradient."""
        return self.at_work + self.model


def check_needs(run_spec: RunSpec) -> None:
    """Raise ConfigError for a run that cannot fit into this machine. On a cluster it is not known where workers are."""
    if run_spec.experiment.engine.address or run_spec.workload.outline is None:
        return
    check_size(run_spec.workload.outline)
    if sum(value.numel() for value in run_spec.workload.outline.parameters()) * run_spec.dtype.itemsize < LARGE:
        return
    with plugin_errors("method", settings=run_spec.experiment.method):
        needs = Needs.of(run_spec)
    assert needs is not None
    check_base(run_spec, needs)
    if run_spec.device.type == "cpu":
        check_client(run_spec, needs)
    check_rows(run_spec, needs.row)


def nearly_too_large(run_spec: RunSpec) -> str:
    """A line for the log where one client takes most of the memory beside the frozen tensors, "" elsewhere."""
    outline, free = run_spec.workload.outline, available_memory()
    if run_spec.experiment.engine.address or outline is None or free is None or run_spec.device.type != "cpu":
        return ""
    if sum(value.numel() for value in outline.parameters()) * run_spec.dtype.itemsize < LARGE:
        return ""
    needs = Needs.of(run_spec)
    return "" if needs is None else warning(needs, free)


def warning(needs: Needs, free: int) -> str:
    """`nearly_too_large` of needs, with so many bytes free."""
    asked = needs.base + needs.client
    if asked < MOST * free:
        return ""
    return (
        f"memory: the frozen tensors and one client need {gigabytes(asked)}, {asked / free:.0%} of the "
        f"{gigabytes(free)} that are free, and activations come on top"
    )


def check_base(run_spec: RunSpec, needs: Needs) -> None:
    """Raise ConfigError if the frozen tensors do not fit into the memory that processes share."""
    if run_spec.backend.name == "ray" and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if needs.base > free:
            halves = run_spec.workload.casts_up and run_spec.frozen_type(run_spec.dtype).itemsize > 2
            smaller = "give engine.base: bfloat16, " if halves else ""
            raise ConfigError(
                f"workload: the frozen tensors need {gigabytes(needs.base)} of shared memory, {SHARED_MEMORY} has "
                f"{gigabytes(free)} free; {smaller}make it larger, give engine.backend: local, or choose a smaller "
                "model"
            )


def check_client(run_spec: RunSpec, needs: Needs) -> None:
    """Raise ConfigError if one client, or what the method holds, does not fit into memory beside the frozen tensors."""
    free = available_memory()
    if free is None:
        return
    left = max(0, free - needs.base)
    if needs.client > left:
        kept = needs.at_work - needs.model
        raise ConfigError(
            f"workload: one client of this model needs {gigabytes(needs.client)} besides the frozen tensors "
            f"({needs.model / 1e9:.1f} parameters, {needs.model / 1e9:.1f} gradient, {kept / 1e9:.1f} state of the "
            f"local steps), {gigabytes(left)} are free; train adapters (workload.adapter), give engine.device, or a "
            "smaller model"
        )
    changes = COPIES * needs.held + 8 * needs.held // run_spec.dtype.itemsize
    if changes > left - needs.client:
        raise ConfigError(
            f"method: {part_name(run_spec.experiment.method)} holds {gigabytes(changes)} of weights and sums beside "
            f"the frozen tensors, {gigabytes(left - needs.client)} are free; adapt fewer modules, or choose "
            "another method"
        )


def check_rows(run_spec: RunSpec, row: int) -> None:
    """Raise ConfigError if what clients keep between rounds does not fit on the disk. row: bytes of one client.

    Less than LARGE is not looked at: the run itself says that a folder cannot be made or that a small disk is full.
    """
    federation = run_spec.experiment.federation
    row //= 2 if run_spec.experiment.engine.state_dtype == "bfloat16" else 1
    clients = different_clients(federation)
    if run_spec.resume or clients * row < LARGE:
        return
    folder = run_spec.state_folder
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if clients * row > free:
        raise ConfigError(
            f"federation.clients: {clients:,} clients keep {gigabytes(row)} each between rounds, "
            f"{gigabytes(clients * row)}, {gigabytes(free)} are free in {there}; give carry: reset, train adapters "
            "(workload.adapter), or set engine.store to a larger disk"
        )


def different_clients(federation: Federation) -> int:
    """How many different clients take part in a run, in the mean where cohorts are drawn independently of each other;
    otherwise at most."""
    n, rounds = federation.clients, federation.rounds
    if federation.sampler in INDEPENDENT and isinstance(federation.pace, Pace) and federation.cohort < n:
        return round(n * -math.expm1(rounds * math.log1p(-federation.cohort / n)))
    return min(n, federation.largest_cohort * rounds)


def gigabytes(count: float) -> str:
    """Bytes for a message."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
