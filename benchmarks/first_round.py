"""Measures the seconds from a command to the end of its first round, as a terminal shows it.

    python benchmarks/first_round.py            three times on Ray, once on the local backend
    python benchmarks/first_round.py --where    once on Ray, with the processor time of each process until then

It runs w1, on Ray with two workers. The processor time divided by the number of processors is the least that the start
can take, in whatever order its parts run.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
FILE = """
plugins: [fedfleet.tune.bench.works]
workload: w1
method: {name: fedavg, rule: {name: sgd, lr: 0.05}}
federation: {clients: 1000, cohort: 100, rounds: 2, local: {steps: 5, batch: 10}}
engine: {workers: 2}
evaluate: {every: 0}
tracking: {uri: none}
"""


def first_round(backend: str, folder: Path, rounds: int = 2) -> float:
    """Seconds until the terminal of a run shows its first round; the run goes on to its end."""
    file = folder / "w1.yaml"
    file.write_text(FILE)
    command = [str(Path(sys.executable).with_name("fedfleet")), "run", str(file), f"engine.backend={backend}"]
    command.append(f"federation.rounds={rounds}")
    began, (ours, theirs) = time.perf_counter(), pty.openpty()
    run = subprocess.Popen([*command, "--out", str(folder / backend)], stdout=theirs, stderr=theirs)
    os.close(theirs)
    found, shown = 0.0, b""
    try:
        while True:
            shown = shown[-200:] + os.read(ours, 65536)
            if not found and b"round 1/" in COLOURS.sub(b"", shown):
                found = time.perf_counter() - began
    except OSError:  # the command has ended, and the terminal with it
        os.close(ours)
    if run.wait() or not found:
        sys.exit(f"{' '.join(command)} failed or showed no round: {shown.decode(errors='replace')}")
    return found


class ProcessTimes:
    """The processor seconds of all descendants of this process, looked at every LOOK_SECONDS."""

    LOOK_SECONDS = 0.2

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by process
        self.names: dict[int, str] = {}
        self.over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the processes until the block ends."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def _watch(self) -> None:
        while not self.over.wait(self.LOOK_SECONDS):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    times, command = process.cpu_times(), process.cmdline()
                    self.seconds[process.pid] = times.user + times.system
                    self.names[process.pid] = " ".join(Path(part).name for part in command[:4]) or process.name()

    def show(self) -> None:
        for pid, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            if seconds >= 0.1:
                print(f"  {seconds:5.1f} s  {self.names[pid][:80]}")
        print(f"  {sum(self.seconds.values()):5.1f} s  in all, on {os.cpu_count()} processors")


def show_where() -> None:
    """Print the processor time of each process of a run on Ray that ends with its first round."""
    times = ProcessTimes()
    with tempfile.TemporaryDirectory() as folder, times.watched():
        seconds = first_round("ray", Path(folder), rounds=1)
    print(f"ray: the first and only round ends after {seconds:.1f} s; processor time of the whole command:")
    times.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--where", action="store_true")
    if parser.parse_args().where:
        return show_where()
    for backend in ("ray", "ray", "ray", "local"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{backend}: the first round ends after {first_round(backend, Path(folder)):.1f} s", flush=True)


if __name__ == "__main__":
    main()
