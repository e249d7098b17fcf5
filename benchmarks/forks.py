"""Measures what a fork costs: its time and its bytes on the disk, for a run with many clients that keep states.

    python benchmarks/forks.py                    10,000 clients, SCAFFOLD, an MLP with 9,985 parameters
    python benchmarks/forks.py many_logistic      the same with 650 parameters
    python benchmarks/forks.py many_lenet --method ditto   clients with whole models of their own
    python benchmarks/forks.py --folder /mnt/x    with the runs' folders on another disk

A run takes three rounds, in each of which all clients take part, and is forked after round 2. For each fork the script
prints the seconds until it is made, the seconds from then until its first round begins (every run that is resumed takes
them: it loads the data and verifies all states by their digests), and by how many bytes the fork has enlarged what the
folders take on the disk. Data are synthetic, and everything runs in this process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from scale import config

import fedfleet
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.launch import play
from fedfleet.tune.forking import prepared

MIB = 2**20
AFTER = 2


def on_disk(folder: Path) -> int:
    """The bytes that the files below a folder take on the disk; a file with several names counts once."""
    stats = [path.lstat() for path in folder.rglob("*")]
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in stats}.values())


def settings(work: str, clients: int, method: str) -> dict[str, Any]:
    plan = {"clients": clients, "cohort": clients, "rounds": AFTER + 1, "local": {"steps": 1, "batch": 10}}
    made = config(work, plan, 1, method)
    made["evaluate"]["clients"] = {"own": False}
    made["engine"] = {"backend": "local", "block": 50, "kernels": "torch", "keep_state": True}
    made["checkpoint"] |= {"keep": 9}
    return made


def measure(parent: Path, out: Path) -> tuple[float, float, int]:
    """(seconds until a fork is made, seconds until its first round begins, bytes that it took on the disk)."""
    before, began = on_disk(parent.parent), time.perf_counter()
    run_spec, folder = prepared(parent, AFTER, "method.rule.lr=0.005", out)
    made, grown = time.perf_counter(), on_disk(parent.parent)
    for record in play(run_spec, folder, [], lambda: 0):
        started = time.perf_counter() - record["time/seconds"] - made
        return made - began, started, grown - before
    raise AssertionError("the fork has no round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", default="many_mlp", choices=["many_mlp", "many_logistic", "many_lenet"])
    parser.add_argument("--method", default="scaffold", help="one whose clients keep a vector of the model's size")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--forks", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        folder = Path(made)
        fedfleet.run(experiment(settings(asked.work, asked.clients, asked.method)), folder / "parent")
        states = on_disk(folder / "parent" / "state")
        what = f"{asked.work}, {asked.method}, {asked.clients:,} clients"
        print(f"{what}, {states / MIB:,.0f} MiB of states in {AFTER + 1} rounds")
        for number in range(asked.forks):
            forked, started, grown = measure(folder / "parent", folder / f"fork-{number}")
            print(
                f"fork {number + 1}: made in {forked:.2f} s, begins {started:.2f} s later, {grown / MIB:.2f} MiB more"
            )


if __name__ == "__main__":
    main()
