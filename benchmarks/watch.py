"""Runs an experiment in another process and measures when its rounds end and how much memory driver and workers have.

python benchmarks/watch.py '{"workload": ..., ...}' [--out DIR] [--every 1]     prints one JSON line, a `Seen`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.observer import Observer

MIB = 2**20


class Seen(NamedTuple):
    """What was measured in a run: the records of its rounds, when they came, and the memory."""

    rows: list[dict[str, float]]
    arrivals: list[float]  # seconds from the start of the process to each record
    memory: list[dict[str, float]]
    """At some rounds: MiB of the driver, of all workers together, and of shared memory."""
    processor: dict[str, float]  # seconds until the first record, see `processor_seconds`

    @property
    def startup(self) -> float:
        """Seconds from the start of the process to the beginning of round 1."""
        return self.arrivals[0] - self.rows[0]["time/seconds"]

    @property
    def seconds(self) -> list[float]:
        """(R - 1,) seconds from record to record, which include what is done between rounds."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def watch(config: dict[str, Any], out: Path | None = None, every: int = 1) -> Seen:
    """Run an experiment in another process. out: folder of the run. every: rounds between measurements of memory."""
    command = [sys.executable, __file__, json.dumps(config), "--every", str(every)]
    command += ["--out", str(out)] if out is not None else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Seen(*json.loads(done.stdout.splitlines()[-1]))


class Watch(Observer):
    """Measures a run. Memory is RssAnon, which excludes the page cache. Data sets, tasks and results are in memory that
    driver and workers share (RssShmem), of which each process counts the pages that it has used."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, Seen([], [], [], {})
        self.began = psutil.Process().create_time()
        self.found: dict[str, list[int]] = {}

    def event(self, text: str) -> None:
        print(text, file=sys.stderr)

    def record(self, record: dict[str, float]) -> None:
        self.seen.arrivals.append(time.time() - self.began)
        self.seen.rows.append(record)
        if not self.seen.processor:
            self.seen.processor.update(processor_seconds())
        if int(record["round"]) % self.every == 0 and (found := self._memory()):
            self.seen.memory.append({"round": record["round"], **found})

    def _memory(self) -> dict[str, float]:
        """MiB of the driver, the workers and shared memory; empty if a process is gone, as soon after the last
        round."""
        if not self.found:
            self.found = processes()
        weights = {name: [status(pid) for pid in pids] for name, pids in self.found.items()}
        together = [weight for some in weights.values() for weight in some]
        if not all("RssAnon" in weight for weight in together):
            return {}
        found = {name: sum(weight["RssAnon"] for weight in some) for name, some in weights.items()}
        for name, some in weights.items():
            for kind in ("File", "Shmem"):
                found[f"{name}/{kind}"] = sum(weight[f"Rss{kind}"] for weight in some)
        return {**found, "shared": max(weight["RssShmem"] for weight in together)}


def processes() -> dict[str, list[int]]:
    """The process ids of the driver and of the workers, of the Ray that this process has started."""
    named = {"driver": "ray::DriverProcess", "workers": "ray::WorkerProcess"}
    mine = [(child.pid, " ".join(child.cmdline())) for child in psutil.Process().children(recursive=True)]
    return {name: [pid for pid, line in mine if line.startswith(title)] for name, title in named.items()}


def processor_seconds() -> dict[str, float]:
    """The processor seconds so far of this process (launcher), of the driver, of all workers, and of Ray's own
    processes. They depend much less than seconds on what else the machine does."""
    roles = {pid: name for name, pids in processes().items() for pid in pids}
    found = dict.fromkeys(("launcher", "driver", "workers", "Ray"), 0.0)
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            role = "launcher" if process.pid == os.getpid() else roles.get(process.pid, "Ray")
            found[role] += times.user + times.system
    return found


def status(pid: int) -> dict[str, float]:
    """The sizes in /proc/PID/status by their names, in MiB; empty for a process that is gone."""
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
