"""Measures time and memory of 10,000 and of 100,000 stateful clients on a small machine.

    python benchmarks/scale.py lenet          10,000 SCAFFOLD clients with LeNet: memory, share of state I/O in a round
    python benchmarks/scale.py mlp            100,000 SCAFFOLD clients with 9,985 parameters: start-up, memory, rounds
    python benchmarks/scale.py checkpoints    the cost of checkpoints for the 10,000 clients
    python benchmarks/scale.py million        1,000,000 clients, FedAvg and SCAFFOLD, two models: start-up, memory, disk
    python benchmarks/scale.py lenet --method ditto       the same clients with whole models of their own

Each run is a process of its own, on Ray with two workers; runs that are compared go in turn. Data are synthetic,
because only speed is measured. The folders of runs are made under --folder and removed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from watch import Seen, watch

WARMUP = 3
"""Rounds at the beginning that are not counted."""


def config(work: str, plan: dict[str, Any], every: int = 0, method: str = "scaffold") -> dict[str, Any]:
    """The experiment of a work. plan: keys of `federation`. every: rounds between checkpoints, 0 for none."""
    return {
        "plugins": [str(Path(__file__).with_name("works.py"))],
        "workload": {"name": work, "clients": plan["clients"]},
        "method": {"name": method, "rule": {"name": "sgd", "lr": 0.01}},
        "federation": {"local": {"steps": 5, "batch": 10}, **plan},
        "engine": {"workers": 2},
        "evaluate": {"every": 0},
        "checkpoint": {"every": every},
        "tracking": {"uri": "none"},
    }


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least … most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def rounds(seen: Seen) -> list[float]:
    """Seconds of each round after the warm-up."""
    return [row["time/seconds"] for row in seen.rows[WARMUP:-1]]  # the last round evaluates


def show(name: str, seen: Seen) -> None:
    """Print what was measured in a run."""
    most = {key: max(look[key] for look in seen.memory) for key in ("driver", "workers", "shared")}
    share = [100 * row["time/state"] / row["time/workers"] for row in seen.rows[WARMUP:-1]]
    fifths = [statistics.median(part) for part in np.array_split(share, 5)]
    print(f"{name}: {len(seen.rows)} rounds, {len(seen.memory)} looks at memory")
    processor = ", ".join(f"{role} {seconds:.1f}" for role, seconds in seen.processor.items())
    print(f"  start-up {seen.startup:.1f} s, {spread(rounds(seen))} s per round")
    print(f"  processor seconds until the first record: {sum(seen.processor.values()):.1f} ({processor})")
    print(
        f"  state I/O {spread(share, 1)} % of the workers' time; "
        f"by fifths {', '.join(f'{part:.1f}' for part in fifths)}"
    )
    print(
        f"  most memory: driver {most['driver']:.0f} MiB, workers {most['workers']:.0f} MiB, "
        f"{most['shared']:.0f} shared"
    )


def lenet(asked: argparse.Namespace) -> None:
    plan = {"clients": asked.clients or 10_000, "cohort": 500, "rounds": asked.rounds or 200}
    for name, out in (("without a folder", None), ("with a folder", asked.folder / "lenet")):
        if out is None and asked.short:
            continue
        made = config("many_lenet", plan, method=asked.method)
        made["engine"] |= {"kernels": asked.kernels}
        made["evaluate"]["clients"] = {"own": False}  # the last round evaluates, which takes no memory of states
        show(f"lenet, {asked.method}, {plan['clients']:,} clients, {name}", watch(made, out))


def mlp(asked: argparse.Namespace) -> None:
    plan = {"clients": asked.clients or 100_000, "cohort": 1000, "rounds": asked.rounds or 40}
    for number in range(asked.repeats):
        seen = watch(config("many_mlp", plan), asked.folder / f"mlp{number}")
        show(f"mlp, {plan['clients']:,} clients", seen)


def checkpoints(asked: argparse.Namespace) -> None:
    """The cost of one checkpoint: the difference of the times of two runs, without checkpoints and with one every
    `often` rounds, divided by the number of checkpoints. Its share of the time with one every 50 rounds is that cost
    relative to the time of 50 rounds."""
    often, plan = asked.often, {"clients": asked.clients or 10_000, "cohort": 500, "rounds": asked.rounds or 40}
    costs, shares, pauses = [], [], []
    for number in range(asked.repeats):
        without, kept = (
            watch(config("many_lenet", plan, every), asked.folder / f"checkpoints{number}-{every}", every=10)
            for every in (0, often)
        )
        bare, saved = (sum(seen.seconds[WARMUP:-1]) for seen in (without, kept))
        count = sum(1 for row in kept.rows[WARMUP + 1 : -1] if row["round"] % often == 0)
        costs.append((saved - bare) / count)
        shares.append(100 * costs[-1] / (50 * bare / len(without.seconds[WARMUP:-1])))
        after = [  # the pause of round r lies between its record and that of r + 1
            (second - row["time/seconds"]) * 1e3
            for row, second in zip(kept.rows[1:], kept.seconds, strict=True)
            if (row["round"] - 1) % often == 0
        ]
        pauses += after
        print(f"without {bare:.1f} s, with one every {often}: {saved:.1f} s; one costs {costs[-1]:.2f} s", flush=True)
    print(f"one costs {spread(costs)} s; every 50 rounds: {spread(shares, 1)} % of the time")
    print(f"the driver pauses {spread(pauses, 0)} ms for one")


def million(asked: argparse.Namespace) -> None:
    """Start-up, memory of the driver and disk space of the states. The time per round relative to a small population is
    that of `benchmarks/populations.py --million`, whose rounds go in turn."""
    plan = {"clients": asked.clients or 1_000_000, "cohort": 100, "rounds": asked.rounds or 20}
    for work, method in product(("many_logistic", "many_mlp"), ("fedavg", "scaffold")):
        folder, store = asked.folder / f"{work}-{method}", asked.folder / "store"
        made = config(work, plan)
        made["method"]["name"] = method
        made["engine"] |= {"store": str(store), "keep_state": True}
        show(f"{work}, {method}, {plan['clients']:,} clients", watch(made, folder))
        used = sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file())
        print(f"  states: {used / 2**20:.1f} MiB on the disk", flush=True)
        shutil.rmtree(store, ignore_errors=True)


COMMANDS = {"million": million, "lenet": lenet, "mlp": mlp, "checkpoints": checkpoints}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--often", type=int, default=5, help="rounds between checkpoints")
    parser.add_argument("--kernels", default="auto", help="lenet: engine.kernels")
    parser.add_argument(
        "--method", default="scaffold", help="lenet: one whose clients keep a vector of the model's size"
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--folder", help="folder in which the folders of runs are made; its disk matters")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        asked.folder = Path(folder)
        COMMANDS[asked.command](asked)


if __name__ == "__main__":
    main()
