"""The lines of the benchmark: a work with a method and engine settings, timed alternately with the plain loop."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

from ...engine.api import run
from ...engine.config.schema import Experiment, experiment
from ...engine.errors import FedFleetError
from ...engine.planning import autotune
from ...engine.planning.execution_plan import measured_plan
from ...engine.run_spec import RunSpec
from ...engine.runs.observer import Observer
from .works import FEDERATIONS

WARMUP = 2
"""Rounds that are not timed."""
PARTS = ("compute", "data", "state", "reduce", "wait", "driver")
"""Parts of a round's time. The first four are kinds of work of the workers; `wait`: a worker has no task; `driver`: the
time between the tasks of two rounds."""

SGD = {"rule": {"name": "sgd", "lr": 0.05}}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", **SGD},
    "scaffold": {"name": "scaffold", **SGD},
    "fedmuon_bc": {"name": "fedmuon_bc"},
    "fedmuon_bc_bfloat16": {"name": "fedmuon_bc", "ball": {"name": "newton_schulz", "dtype": "bfloat16"}},
}
"""Methods with other arguments than their default ones."""


class Peer(NamedTuple):
    """Another simulator. The last line that `command` prints is a JSON object with "clients_per_s": a number, or a list
    with one number per round. {work} and {rounds} in the command are replaced."""

    name: str
    command: str


class Candidate(NamedTuple):
    """What is timed. engine: settings of the section `engine`; peer: another simulator instead of the engine."""

    work: str
    method: str = "fedavg"
    engine: dict[str, Any] = {}  # noqa: RUF012 never written to
    peer: Peer | None = None

    @property
    def name(self) -> str:
        if self.peer:
            return f"{self.work} {self.peer.name}"
        settings = " ".join(f"{key} {value}" for key, value in self.engine.items())
        return " ".join([self.work, self.method, settings]).strip()


class Measurement(NamedTuple):
    """One measurement of the plain loop and of a run after it; medians over rounds."""

    plain: float  # clients/s
    ours: float  # clients/s of the engine or the peer; nothing else is known of a peer
    first: float | None  # seconds from the call to the end of the first round
    parts: dict[str, float]  # share of each of PARTS in workers x duration of a round
    chosen: str  # the execution plan that was measured, "" if the settings give one

    @property
    def ratio(self) -> float:
        return self.ours / self.plain


class FirstRound(Observer):
    """An observer that measures the time until the first record, in seconds."""

    def __init__(self) -> None:
        self.began, self.first = time.perf_counter(), 0.0

    def record(self, record: dict[str, float]) -> None:
        self.first = self.first or time.perf_counter() - self.began


def plain(work: str, rounds: int) -> float:
    """Median clients per second of the plain loop, in processes of its own."""
    command = [sys.executable, "-m", f"{__package__}.plain_loop", "--work", work, "--rounds", str(rounds)]
    return speed_of("the plain loop", command)


def speed_of(name: str, command: list[str]) -> float:
    """Median clients per second that a command prints; FedFleetError if it prints none. name: for the message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise FedFleetError(f"{name} cannot be run: {error}") from None
    lines = done.stdout.splitlines()
    try:
        found = json.loads(lines[-1] if done.returncode == 0 else "")["clients_per_s"]
        return float(median(found) if isinstance(found, list) else found)
    except (IndexError, ValueError, KeyError, TypeError):
        last = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        raise FedFleetError(f"{name} did not print its clients_per_s: {last[-1]}") from None


def with_execution_plan(made: Experiment) -> tuple[Experiment, str]:
    """The experiment with the execution plan that a long run would choose, and a description of that plan.

    The timed runs are too short to measure plans themselves.
    """
    engine = made.engine
    if "auto" not in (engine.block, engine.kernels):
        return made, ""
    run_spec = RunSpec.of("bench", made)
    (block, kernels), how = measured_plan(run_spec, run_spec.split(), autotune.measure)
    engine = engine.model_copy(update={"block": block, "kernels": kernels})
    return made.model_copy(update={"engine": engine}), f"blocks of {block}, {kernels} kernels, {how}"


def pair(line: Candidate, rounds: int, workers: int) -> Measurement:
    """Measure the plain loop, then the line."""
    yardstick = plain(line.work, rounds)
    if line.peer:
        words = [word.format(work=line.work, rounds=rounds) for word in shlex.split(line.peer.command)]
        return Measurement(yardstick, speed_of(line.peer.name, words), None, {}, "")
    made = experiment(
        {
            "plugins": [f"{__package__}.works"],
            "workload": line.work,
            "method": METHODS.get(line.method, line.method),
            "federation": {**FEDERATIONS[line.work], "rounds": rounds + WARMUP + 1},
            "engine": {"workers": workers, "device": "cpu", **line.engine},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    made, chosen = with_execution_plan(made)
    workers = RunSpec.of("bench", made).workers
    watch = FirstRound()
    rows = run(made, observers=[watch]).rows[WARMUP:-1]  # the last round evaluates
    speed = median(row["client/count"] / row["time/seconds"] for row in rows)
    shares = [shares_of(row, workers) for row in rows]
    parts = {name: median(share[name] for share in shares) for name in PARTS}
    return Measurement(yardstick, speed, watch.first, parts, chosen)


def shares_of(row: dict[str, float], workers: int) -> dict[str, float]:
    """A round's time by PARTS, as shares whose sum is 1."""
    whole = workers * row["time/seconds"]
    shares = {name: row[f"time/{name}"] / whole for name in PARTS[:-1]}
    return {**shares, "driver": 1 - sum(shares.values())}


def alternate(
    lines: list[Candidate], repeats: int, rounds: int, workers: int, log: Callable[[str], None]
) -> Iterator[tuple[Candidate, Measurement]]:
    """Measure every line once, then every line again, so that a disturbance of the machine affects all of them."""
    for number in range(repeats):
        for line in lines:
            found = pair(line, rounds, workers)
            log(
                f"{number + 1}/{repeats}  {line.name}: {found.ours:.1f} clients/s, plain loop {found.plain:.1f}"
                + (f", first round after {found.first:.1f} s" if found.first is not None else "")
                + (f"; {found.chosen}" if found.chosen else "")
            )
            yield line, found
