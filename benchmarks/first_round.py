"""Measures the seconds from a command to the end of its first round, as a terminal shows it.

    python benchmarks/first_round.py

It runs w1 on Ray with two workers three times, then once on the local backend.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def first_round(backend: str, folder: Path) -> float:
    """Seconds until the terminal of a run shows its first round; the run goes on to its end."""
    file = folder / "w1.yaml"
    file.write_text(FILE)
    command = [str(Path(sys.executable).with_name("fedfleet")), "run", str(file), f"engine.backend={backend}"]
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


def main() -> None:
    for backend in ("ray", "ray", "ray", "local"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{backend}: the first round ends after {first_round(backend, Path(folder)):.1f} s", flush=True)


if __name__ == "__main__":
    main()
