"""A run on its way to other processes: the experiment as data, the users' plug-ins as source."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...algorithms.contract import Algorithm, Deferred, RunContext
from ...algorithms.tree import Layout, Tree
from ...workloads.base import Split, Workload
from ..errors import ConfigError
from ..methods.batch_norm import Buffered
from ..user_code import blamed
from . import schedules
from .finite import check_finite
from .held_out import hold_out
from .limits import check_size
from .memory_errors import building
from .registry import Plugin, Registry, find_plugin
from .schema import Experiment

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Folders, actors and tags are named after a run's id, so it must not be a path of several parts."""


class ExecutionPlan(NamedTuple):
    """Clients at once, and by which kernels."""

    block: int
    kernels: str  # torch or native


@dataclass(frozen=True)
class RunSpec:
    run_id: str
    experiment: Experiment
    plugins: tuple[Plugin, ...] = ()
    directory: str | None = None  # of the run's files
    resume: bool = False  # from the directory's last checkpoint
    chosen: ExecutionPlan | None = None  # once it is settled, see `path`
    proved: str | None = None  # where the chosen kernels were proven, see `proof.place`
    lacking: tuple[str, ...] = ()  # why machines of the run cannot have kernels of our own, a sentence each

    @staticmethod
    def of(run_id: str, experiment: Experiment, directory: str | None = None, resume: bool = False) -> RunSpec:
        plugins = tuple(find_plugin(name) for name in experiment.plugins)
        return RunSpec(run_id, experiment, plugins, directory, resume)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Without what was built here: a plug-in's classes mean nothing elsewhere before it is loaded there."""
        given = (self.run_id, self.experiment, self.plugins, self.directory, self.resume, self.chosen, self.proved)
        return RunSpec, (*given, self.lacking)

    def by(self, chosen: ExecutionPlan, proved: str | None = None) -> RunSpec:
        """The same, settled; what was built is kept."""
        return self._with(chosen=chosen, proved=proved)

    def on_machines(self, lacking: tuple[str, ...]) -> RunSpec:
        """The same, knowing which machines of the run lack kernels of our own; what was built is kept."""
        return self._with(lacking=lacking)

    def _with(self, **changes: Any) -> RunSpec:
        run_spec = replace(self, **changes)
        vars(run_spec).update({name: value for name, value in vars(self).items() if name not in vars(run_spec)})
        return run_spec

    @cached_property
    def proofs(self) -> dict[str, Any]:
        """Kernels of our own that were tried on the run's data: why they are not to be used, None where they may."""
        return {}

    @cached_property
    def registry(self) -> Registry:
        return Registry(self.plugins)

    @cached_property
    def workload(self) -> Workload:
        built = self.registry.build("WORKLOADS", self.experiment.workload, "workload")
        if not isinstance(self.experiment.workload, str | dict):
            check_finite(built, "workload")
        if not isinstance(built, Workload):
            raise ConfigError(f"workload: {self.experiment.workload!r} is not a workload; give a name or a Workload")
        return built

    def method(self, round: int = 1) -> Algorithm:
        """The method with its schedules resolved for a round (1 … R)."""
        spec = schedules.at(self.experiment.method, round, self.experiment.federation.rounds, "method")
        built = self.registry.build("METHODS", spec, "method")
        if isinstance(built, Deferred):
            with blamed("method"):
                built = built.build(self.context)
        if not isinstance(self.experiment.method, str | dict):
            check_finite(self.experiment.method, "method")
        if not isinstance(built, Algorithm):
            raise ConfigError(f"method: {spec!r} is not a method; give a name or an Algorithm")
        return Buffered(built, len(self.buffers)) if self.buffers else built

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the model's running statistics."""
        with blamed("workload", settings=self.experiment.workload):
            return self.workload.buffers

    @property
    def context(self) -> RunContext:
        federation = self.experiment.federation
        sizes = (federation.cohort, federation.clients, federation.rounds, federation.local.steps)
        return RunContext(*sizes, self.experiment.seed, self.layout)

    @cached_property
    def layout(self) -> Layout:
        """Of the model without buffers."""
        layout = self.started().layout
        return layout.pick(set(layout.names) - set(self.buffers))

    def started(self) -> Tree:
        """`start`, where a model that cannot be built is a mistake in the configuration."""
        with blamed("workload", settings=self.experiment.workload):
            check_size(self.workload)
            return self.start()

    @property
    def changes(self) -> bool:
        """Whether the method differs from round to round."""
        return schedules.has_schedule(self.experiment.method)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.experiment.engine.dtype)

    @property
    def precision(self) -> torch.dtype | None:
        """Of forward and backward passes, where it is another than `dtype`."""
        return torch.bfloat16 if self.experiment.engine.precision == "bfloat16" else None

    @property
    def device(self) -> torch.device:
        wanted = self.experiment.engine.device
        if wanted == "auto":
            wanted = "cuda" if self.experiment.engine.on_gpus() else "cpu"
        return torch.device(wanted)

    @property
    def workers(self) -> int:
        """Processes that train."""
        engine = self.experiment.engine
        return engine.count_workers() if engine.backend == "ray" else 1

    def on_processor(self) -> RunSpec:
        """The same for a worker without a GPU."""
        engine = self.experiment.engine.model_copy(update={"device": "cpu"})
        return replace(self, experiment=self.experiment.model_copy(update={"engine": engine}))

    def block(self, parameters: int) -> int:
        """Clients that run at once, for a model of so many parameters."""
        engine, plan = self.experiment.engine, self.experiment.federation
        if self.chosen is not None:
            return self.chosen.block
        if engine.block == "auto":
            return auto_block(parameters, plan.cohort, self.device.type)
        return min(engine.block, plan.cohort)

    def plan_to_seal(self) -> dict[str, Any]:
        """The number of clients in a block and the kernels, as checkpoints keep them."""
        chosen = self.chosen or ExecutionPlan(self.block(self.start().flat.numel()), self.kernels)
        return chosen._asdict()

    @property
    def kernels(self) -> str:
        """torch or native."""
        if self.chosen is not None:
            return self.chosen.kernels
        wanted = self.experiment.engine.kernels
        return "torch" if wanted == "auto" else wanted

    def start(self) -> Tree:
        """The model before round 1; buffers, where it has any, come last."""
        with building(self):
            tensors = self.workload.init(self.experiment.seed)
            tensors = {**tensors, **{name: tensors.pop(name) for name in self.buffers}}  # these last
            return Tree.of({name: value.to(self.dtype) for name, value in tensors.items()})

    def split(self) -> Split:
        """The data, and the rows of every client."""
        clients = self.experiment.federation.clients
        with blamed("workload"):
            split = self.workload.split(self.experiment.seed, clients)
        if not isinstance(split, Split):
            raise ConfigError(f"workload: split must return a workloads.base.Split, got {type(split).__name__}")
        with blamed("workload"):
            self.workload.check_split(split, torch.finfo(self.dtype).max)
        sizes = split.client_index.sizes
        if len(sizes) != clients or not sizes.all():
            got = f"rows for {int((sizes > 0).sum())} of {clients} clients"
            raise ConfigError(f"workload: every client must have a row, got {got}; lower federation.clients")
        asked = self.experiment.evaluate
        split = hold_out(split, asked.held_out, self.experiment.seed)
        by_client = "fairness" if asked.fairness else "held_out" if split.client_index.held is not None else ""
        if by_client and (lacking := set(split.test) - set(split.train)):
            raise ConfigError(
                f"evaluate.{by_client}: the workload's report goes by {', '.join(sorted(lacking))}, which training "
                f"rows do not have; set it to {'false' if asked.fairness else 0}"
            )
        return split


def auto_block(parameters: int, cohort: int, device: str) -> int:
    """Clients to vectorise over where the experiment leaves it open and nothing was measured.

    On a processor vectorising pays while a step's cost is the dispatch of its operations, which
    `benchmarks/blocks.py` finds to be so below 50,000 parameters; convolutions and large layers run faster one client
    at a time. A GPU needs many clients to be busy at all.
    """
    wanted = 64 if device == "cuda" else 16 if parameters < 50_000 else 1
    return min(cohort, wanted)
