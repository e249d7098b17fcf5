"""The data of a run, once all checks that need it have passed."""

from __future__ import annotations

from pathlib import Path

from ...workloads.base import Split
from ..clients.modules import check_draws
from ..config.run_spec import RunSpec
from ..records.partition_file import keep
from .trial_step import try_step


def checked_split(job: RunSpec) -> Split:
    """The data and the rows of every client; ConfigError where the workload or the method cannot be trained on it.

    The partition is written to the run's folder, if the run has one and is not resumed.
    """
    split = job.split()
    if job.directory is not None and not job.resume:
        keep(split.client_index, Path(job.directory))
    check_draws(job.workload, job.started(), split)
    try_step(job, split)
    return split
