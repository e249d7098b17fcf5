"""The data of a run, once all checks that need it have passed."""

from __future__ import annotations

from pathlib import Path

from ...workloads.base import Split
from ..clients.modules import check_draws
from ..config.run_spec import RunSpec
from ..records.partition_file import write_partition
from .trial_step import try_step


def checked_split(run_spec: RunSpec) -> Split:
    """The data and the rows of every client; ConfigError where the workload or the method cannot be trained on it.

    The partition is written to the run's folder, if the run has one and is not resumed.
    """
    split = run_spec.split()
    if run_spec.directory is not None and not run_spec.resume:
        write_partition(split.client_index, Path(run_spec.directory))
    check_draws(run_spec.workload, run_spec.checked_initial_model(), split)
    try_step(run_spec, split)
    return split
