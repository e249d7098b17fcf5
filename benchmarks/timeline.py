"""What the driver and the hosts do in a round, by the clock: the profile behind `fedfleet bench`.

    python benchmarks/timeline.py w2 fedavg --rounds 150

A run with two hosts on Ray whose driver is this process. Functions of the engine are timed from outside: this file is
also a plug-in, which does so in the hosts. Prints what each takes a round, and one round from beginning to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from fedfleet.engine import board, driver, host, host_process, hosts, totals

FOLDER = "FEDFLEET_TIMELINE"
"""Variable of the environment: where processes write what they did."""
DRIVER = f"{FOLDER}_DRIVER"
"""Another: the number of the process that is the driver."""
WARMUP = 10
Mark = tuple[float, int, str]
marks: list[Mark] = []

IN_DRIVER = (
    *((driver.Driver, name) for name in ("_next", "_train", "_commit")),
    *((driver.cohort, name) for name in ("sample", "plan")),
    *((hosts.RayFleet, name) for name in ("start", "_begin", "_gather")),
    *((hosts.pickle, "dumps"), (ray.actor.ActorMethod, "remote"), (ray, "wait"), (totals, "plus_leaves")),
)
IN_HOSTS = (
    *((host_process.HostProcess, name) for name in ("work", "train", "_block")),
    *((board.Board, name) for name in ("put", "posted")),
    (host, "stream"),
)


def timed(where: Any, name: str) -> None:
    """Note when a function begins and ends."""
    function: Callable[..., Any] = getattr(where, name)

    def noted(*args: Any, **more: Any) -> Any:
        marks.append((time.monotonic(), os.getpid(), f"+{name}"))
        try:
            return function(*args, **more)
        finally:
            marks.append((time.monotonic(), os.getpid(), f"-{name}"))
            if name in ("work", "_next"):
                write()

    setattr(where, name, noted)


def write() -> None:
    with open(Path(os.environ[FOLDER]) / str(os.getpid()), "a") as file:
        file.writelines(f"{moment:.6f} {process} {what}\n" for moment, process, what in marks)
    marks.clear()


def read() -> list[Mark]:
    lines = [line.split() for file in Path(os.environ[FOLDER]).iterdir() for line in file.read_text().splitlines()]
    return sorted((float(moment), int(process), what) for moment, process, what in lines)


def show(found: list[Mark]) -> None:
    mine = os.getpid()
    rounds = [moment for moment, process, what in found if process == mine and what == "+_next"][WARMUP:]
    spent, calls, begun = defaultdict(float), Counter[tuple[str, str]](), {}
    for moment, process, what in found:
        if rounds[0] <= moment < rounds[-1]:
            if what[0] == "+":
                begun[process, what[1:]] = moment
            elif (process, what[1:]) in begun:
                name = ("driver" if process == mine else "hosts", what[1:])
                spent[name] += moment - begun.pop((process, what[1:]))
                calls[name] += 1
    count = len(rounds) - 1
    length = statistics.median(1e3 * (end - begin) for begin, end in pairwise(rounds))
    print(f"a round takes {length:.1f} ms, median of {count}; means of calls, which may lie in each other:")
    for name in sorted(spent, key=lambda name: (name[0], -spent[name])):
        whole, number = 1e3 * spent[name] / count, calls[name] / count
        print(f"  {' '.join(name):18s} {whole:7.2f} ms a round, {number:5.1f} of {whole / number:.3f}")
    begin, end = rounds[count // 2], rounds[count // 2 + 1]
    print("one round, ms:")
    for moment, process, what in found:
        if begin <= moment < end and what[1:] not in ("_block", "stream", "put", "plus_leaves"):
            print(f"  {1e3 * (moment - begin):7.2f} {'driver' if process == mine else f'host {process}'} {what}")


def main() -> None:
    from populations import play

    from fedfleet.engine.config import experiment
    from fedfleet.engine.connect import start_ray
    from fedfleet.engine.job import Job
    from fedfleet.engine.launch import new_run_id
    from fedfleet.tune.bench.measure import METHODS
    from fedfleet.tune.bench.works import FEDERATIONS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", choices=list(FEDERATIONS))
    parser.add_argument("method", choices=list(METHODS), nargs="?", default="fedavg")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kernels", default="chain")
    asked = parser.parse_args()
    made = experiment(
        {
            "plugins": ["fedfleet.tune.bench.works", str(Path(__file__).resolve())],
            "workload": asked.work,
            "method": METHODS[asked.method],
            "federation": {**FEDERATIONS[asked.work], "rounds": asked.rounds},
            "engine": {"hosts": 2, "block": 1, "kernels": asked.kernels},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    job = Job.of(new_run_id(), made)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER: folder, DRIVER: str(os.getpid())}
        for where, name in IN_DRIVER:
            timed(where, name)
        start_ray(job)
        for _ in play(job):
            pass
        show(read())
        ray.shutdown()


if __name__ == "__main__":
    main()
elif os.environ.get(DRIVER, str(os.getpid())) != str(os.getpid()):  # a host, which has this file as a plug-in
    for each in IN_HOSTS:
        timed(*each)

WORKLOADS: dict[str, Any] = {}
