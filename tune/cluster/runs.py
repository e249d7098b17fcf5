"""Detached runs: starting one on the cluster, listing them, and following one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from ...engine.backends.ray.connect import join
from ...engine.config.schema import Experiment
from ...engine.errors import FedFleetError
from ...engine.runs import detached
from ...engine.runs.prepare import prepare
from ...engine.runs.result import Result
from ...engine.runs.run_directory import read_run_id, refuse_run
from ...engine.storage.expanded import expanded
from ..keyboard import keyboard
from ..one_run import resumable
from ..progress import observers
from ..tracking.stores import store


def leave(experiment: Experiment, folder: Path, run_id: str) -> str:
    """Start a detached run; returns a sentence on how to follow it."""
    refuse_run(folder)
    if experiment.tracking.uri == "auto":  # the store of this machine, not of the node that the process will run on
        tracking = experiment.tracking.model_copy(update={"uri": store("auto")})
        experiment = experiment.model_copy(update={"tracking": tracking})
    address = experiment.engine.address
    detached.detach(prepare(experiment, run_id, folder.resolve()))
    return f"run {run_id} continues in {folder}; to follow it: fedfleet attach {run_id} --address {address}"


def going(address: str) -> Sequence[str]:
    """The detached runs of a cluster, one line each."""
    join(address)
    return detached.running()


def follow_run(run: str, address: str, stop: bool, quiet: bool) -> Result:
    """Follow a detached run to its end. run: its id or its folder; stop: ask it for a checkpoint and its end; quiet:
    whether to show no progress."""
    folder = expanded(run)
    run_id = read_run_id(folder) if (folder / "run.json").is_file() else run
    try:
        with keyboard(), resumable(folder):
            return detached.attach(run_id, address, observers(quiet, tracks=False), signal.SIGTERM if stop else 0)
    except KeyboardInterrupt:
        raise FedFleetError(
            f"the run continues; to follow it again: fedfleet attach {run_id} --address {address}"
        ) from None
