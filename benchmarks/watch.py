"""Runs an experiment in a process of its own and watches it: when rounds come, what the driver and the workers weigh.

python benchmarks/watch.py '{"workload": ..., ...}' [--out DIR] [--every 1]     prints one JSON line, a `Seen`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.observer import Observer

MIB = 2**20


class Seen(NamedTuple):
    rows: list[dict[str, float]]
    arrivals: list[float]  # seconds from the start of the process to each record
    memory: list[dict[str, float]]
    """By round: MiB of the driver, of the workers together, and of what they share."""

    @property
    def startup(self) -> float:
        """Seconds from the start of the process to that of round 1."""
        return self.arrivals[0] - self.rows[0]["time/seconds"]

    @property
    def seconds(self) -> list[float]:
        """(R - 1,) from record to record: the rounds, and whatever is done between them."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def watch(config: dict[str, Any], out: Path | None = None, every: int = 1) -> Seen:
    """out: the run's folder; every: rounds between looks at memory."""
    command = [sys.executable, __file__, json.dumps(config), "--every", str(every)]
    command += ["--out", str(out)] if out is not None else []
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Seen(*json.loads(told.stdout.splitlines()[-1]))


class Watch(Observer):
    """An observer. Memory is RssAnon, the page cache aside: rows of states are mapped files, data sets and the board
    between driver and workers are shared memory, of which each process shows what it has touched."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, Seen([], [], [])
        self.began = psutil.Process().create_time()
        self.found: dict[str, list[int]] = {}

    def event(self, text: str) -> None:
        print(text, file=sys.stderr)

    def record(self, record: dict[str, float]) -> None:
        self.seen.arrivals.append(time.time() - self.began)
        self.seen.rows.append(record)
        if int(record["round"]) % self.every == 0 and (found := self._memory()):
            self.seen.memory.append({"round": record["round"], **found})

    def _memory(self) -> dict[str, float]:
        """Nothing where a process is gone, as they are soon after the last round."""
        if not self.found:
            self.found = processes()
        weights = {name: [status(pid) for pid in pids] for name, pids in self.found.items()}
        together = [weight for some in weights.values() for weight in some]
        if not all("RssAnon" in weight for weight in together):
            return {}
        found = {name: sum(weight["RssAnon"] for weight in some) for name, some in weights.items()}
        return {**found, "shared": max(weight["RssShmem"] for weight in together)}


def processes() -> dict[str, list[int]]:
    """Of the Ray that this process has started: numbers of the driver's and the workers' processes."""
    named = {"driver": "ray::DriverProcess", "workers": "ray::WorkerProcess"}
    mine = [(child.pid, " ".join(child.cmdline())) for child in psutil.Process().children(recursive=True)]
    return {name: [pid for pid, line in mine if line.startswith(title)] for name, title in named.items()}


def status(pid: int) -> dict[str, float]:
    """MiB by the names of /proc/PID/status; nothing of a process that is gone."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[-1] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiment")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1)
    asked = parser.parse_args()
    watched = Watch(asked.every)
    run(experiment(json.loads(asked.experiment)), asked.out, [watched])
    print(json.dumps(watched.seen))


if __name__ == "__main__":
    main()
