"""The data of a run, after all checks that need it."""

from __future__ import annotations

from pathlib import Path

from ...workloads.base import Split
from ..clients.modules import check_draws
from ..config.run_spec import RunSpec
from ..records.partition_file import write_partition
from .trial_step import try_step


def checked_split(run_spec: RunSpec, split: Split | None = None) -> Split:
    """The data and the rows of every client. Raises ConfigError if workload or method break a rule on this data.

    The partition is written to the folder of the run, if it has one and is not resumed. split: what `RunSpec.split`
    returns for this run, if that is known already.
    """
    split = split or run_spec.split()
    keep_partition(run_spec, split)
    check_draws(run_spec.workload, {**dict(run_spec.checked_initial_model().items()), **run_spec.frozen}, split)
    try_step(run_spec, split)
    return split


def keep_partition(run_spec: RunSpec, split: Split) -> None:
    """Write the partition to the folder of the run, if it has one and is not resumed."""
    if run_spec.directory is not None and not run_spec.resume:
        write_partition(split.client_index, Path(run_spec.directory))
