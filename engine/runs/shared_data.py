"""What the runs of one process share besides their phases: data, checks of the data, and proofs of kernels."""

from __future__ import annotations

import json
from collections.abc import Hashable

from ...workloads.workload import Split
from ..memory import Recent
from ..method_form.numbers import form
from ..planning.data import checked_split, keep_partition
from ..planning.execution_plan import asks_for_kernels, kernels_to_try
from ..run_spec import ProofsOnData, RunSpec

KEPT_BYTES = 1 << 30
"""The data of earlier runs is kept for later ones up to this size, at least that of the last run."""


class SharedData:
    """Data, checks and proofs that were made for earlier runs of this process."""

    def __init__(self) -> None:
        self.splits: Recent[Split] = Recent(KEPT_BYTES, byte_count)
        self.proofs: dict[Hashable, ProofsOnData] = {}
        self.checked: set[Hashable] = set()  # what runs that broke no rule on their data have in common with others

    def split(self, run_spec: RunSpec) -> Split:
        """The data of a run after all checks. Runs whose methods differ in numbers alone are checked once."""
        split, same = self._split(run_spec), same_but_numbers(run_spec)
        if same in self.checked:
            keep_partition(run_spec, split)
            return split
        split = checked_split(run_spec, split)
        if same is not None:
            self.checked.add(same)
        return split

    def get_ready(self, run_spec: RunSpec) -> None:
        """Load the data of a run, check them, and prove the kernels that it may choose, before the run begins."""
        split = self.split(run_spec)
        run_spec = run_spec.with_proofs(self.proofs_of(run_spec))
        if asks_for_kernels(run_spec, split):
            kernels_to_try(run_spec, split)

    def _split(self, run_spec: RunSpec) -> Split:
        """The data of a run, loaded and divided once for all runs with the same data, clients and seed."""
        key = data_key(run_spec)
        if key is None:
            return run_spec.split()
        split = self.splits.of(key, run_spec.split)
        run_spec.check_clients(split)  # they may be those of another run
        return split

    def proofs_of(self, run_spec: RunSpec) -> ProofsOnData:
        """The proofs for all runs with the same data and model whose methods differ in numbers alone."""
        same = same_but_numbers(run_spec)
        return ProofsOnData() if same is None else self.proofs.setdefault(same, ProofsOnData())


def same_but_numbers(run_spec: RunSpec) -> Hashable | None:
    """What runs with the same data and model have in common whose methods differ in numbers alone; None if it cannot be
    compared."""
    experiment, key = run_spec.experiment, data_key(run_spec)
    if key is None:
        return None
    sections = (experiment.federation.local.model_dump_json(), experiment.engine.model_dump_json())
    with_rms = run_spec.sampler.needs_rms  # the losses of single examples, which a chain does not give
    return (key, form(run_spec.method()), *sections, with_rms)


def data_key(run_spec: RunSpec) -> str | None:
    """What the data of a run depends on, as text; None if it cannot be compared."""
    experiment = run_spec.experiment
    if not isinstance(experiment.workload, str | dict) or not isinstance(experiment.attack, str | dict | None):
        return None
    evaluate, plugins = experiment.evaluate.model_dump(mode="json"), [plugin.module for plugin in run_spec.plugins]
    federation = experiment.federation
    where = [experiment.seed, federation.clients, federation.unseen, experiment.engine.dtype]
    where += [column] if (column := run_spec.sampler.grouped_by) else []
    return json.dumps([experiment.workload, experiment.attack, evaluate, plugins, where], sort_keys=True, default=repr)


def byte_count(split: Split) -> int:
    """The bytes of the columns of a split."""
    return sum(column.nbytes for columns in (split.train, split.test) for column in columns.values())
