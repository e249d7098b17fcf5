"""The data of a run, after all checks that need it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...workloads.workload import Split
from ..clients.modules import check_draws
from ..cohorts.tasks import steps_of
from ..errors import ConfigError
from ..records.event_log import STILL
from ..records.partition_file import about_partition, write_partition
from ..run_spec import RunSpec
from ..user_code import current_line
from .trial_step import try_step

SLOW_SECONDS = 60.0
"""The seconds after which a workload that still reads its data is told, and then after twice, four times … as long."""


def to_standard_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked_split(
    run_spec: RunSpec, split: Split | None = None, say: Callable[[str], object] = to_standard_error
) -> Split:
    """The data and the rows of every client. Raises ConfigError if workload or method break a rule on this data.

    The partition is written to the folder of the run, if it has one and is not resumed. split: what `RunSpec.split`
    returns for this run, if that is known already. say: called with a line if reading the data takes long, from
    another thread.
    """
    if split is None:
        with told_while_slow(say):
            split = run_spec.split()
    keep_partition(run_spec, split)
    check_turns(run_spec, split)
    check_draws(run_spec.workload, {**dict(run_spec.checked_initial_model().items()), **run_spec.frozen}, split)
    try_step(run_spec, split)
    return split


@contextmanager
def told_while_slow(say: Callable[[str], object]) -> Iterator[None]:
    """A context in which data are read. It tells after a while where that goes on: `load` may never return."""
    thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        seconds = waited = SLOW_SECONDS
        while not over.wait(seconds):
            where = current_line(thread)
            say(f"{STILL}reading the data of the workload after {waited:g} s{f', {where}' if where else ''}")
            seconds, waited = waited, 2 * waited

    threading.Thread(target=watch, name="reading data", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def check_turns(run_spec: RunSpec, split: Split) -> None:
    """Raise ConfigError if a client's visit is too short for both parts of a split, that of the section `personal` or
    of the method."""
    least, personal = run_spec.method().least_steps, run_spec.experiment.personal
    steps = int(steps_of(split.client_index.sizes, run_spec.experiment.federation.local).min()) if least > 1 else 1
    if steps < least:
        where, given = "method", ""
        if personal is not None and personal.split != "together":
            where, given = "personal", f"{list(personal.split)} with "
        raise ConfigError(
            f"{where}.split: both parts must get a step, got {given}{steps} local steps; choose [1, 1], or {least} "
            "steps or more"
        )


def keep_partition(run_spec: RunSpec, split: Split) -> None:
    """Write the partition to the folder of the run, if it has one and is not resumed. Without a folder, trackers get
    what the file would have from the run."""
    label = split.train.get("label")
    if run_spec.directory is None:
        if run_spec.experiment.tracking.names:
            run_spec.dealt.update(about_partition(split.client_index, label))
    elif not run_spec.resume:
        write_partition(split.client_index, Path(run_spec.directory), label)
