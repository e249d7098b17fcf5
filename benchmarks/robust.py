"""Seconds of a round with a rule of aggregation relative to the mean's, on the work w1.

    python benchmarks/robust.py --rounds 30
    python benchmarks/robust.py --backend ray --rounds 60

W1 is LeNet with 61,706 parameters, 100 of 1,000 clients in a round. One process has a run of the mean and a run of each
rule, and goes through their rounds in turn: mean, rule, mean, rule. A pair is a round of a rule and the mean's round
right before it, so both meet the same load of the machine. `seconds` is the ratio of their durations, `processor` that
of the processor time of the process, which other work on the machine hardly changes. With --backend ray two workers
have processes of their own, and only durations are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import fedfleet
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.bench.measure import METHODS
from fedfleet.tune.bench.works import FEDERATIONS

WARMUP = 4
"""Rounds of each run that are not counted: memory and files are new in them."""
RULES: dict[str, tuple[Any, float]] = {
    "Multi-Krum after NNM": ({"name": "multi_krum", "f": 20, "before": ["nnm"]}, 1.3),
    "median": ("median", 1.5),
    "centred clipping": ("centred_clipping", 1.3),
    "trimmed mean": ({"name": "trimmed_mean", "f": 20}, 1.5),
    "geometric median": ("geometric_median", 1.3),
}
"""Name -> (the section `aggregate`, the goal for the ratio of a round)."""


def rounds_of(aggregate: Any, count: int, engine: dict[str, Any]) -> Iterator[Any]:
    made = experiment(
        {
            "plugins": ["fedfleet.tune.bench.works"],
            "workload": "w1",
            "method": METHODS["fedavg"],
            "aggregate": aggregate,
            "federation": {**FEDERATIONS["w1"], "rounds": count},
            "engine": {"block": 1, "kernels": "chain", **engine},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    return iter(fedfleet.rounds(made))


def timed(rounds: Iterator[Any]) -> tuple[float, float, dict[str, float]]:
    """(seconds, processor seconds, record) of the next round."""
    began, processor = time.perf_counter(), time.process_time()
    record = next(rounds)
    return time.perf_counter() - began, time.process_time() - processor, record


def spread(numbers: list[float]) -> str:
    """Median (quartile … quartile)."""
    ordered = sorted(numbers)
    return f"{median(ordered):.2f} ({ordered[len(ordered) // 4]:.2f} … {ordered[-1 - len(ordered) // 4]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="pairs for each rule")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--rules", nargs="*", choices=list(RULES), default=list(RULES))
    arguments = parser.parse_args()
    engine = {"backend": arguments.backend}
    if arguments.backend == "ray":
        engine |= {"workers": 2, "cpus": 0.1}
    for name in arguments.rules:
        aggregate, goal = RULES[name]
        count = arguments.rounds + WARMUP
        runs = [rounds_of(each, count + 1, engine) for each in ("mean", aggregate)]
        pairs = [tuple(timed(rounds) for rounds in runs) for _ in range(count)][WARMUP:]
        line = f"{name}: seconds {spread([rule[0] / mean[0] for mean, rule in pairs])}"
        if arguments.backend == "local":
            line += f", processor {spread([rule[1] / mean[1] for mean, rule in pairs])}"
        parts = ", ".join(
            f"{part} {1e3 * median(rule[2][f'time/{part}'] for _, rule in pairs):.0f}"
            for part in ("train", "compute", "reduce", "aggregate")
        )
        durations = [1e3 * median(pair[which][0] for pair in pairs) for which in (0, 1)]
        print(f"{line}; goal {goal}; ms: mean {durations[0]:.0f}, rule {durations[1]:.0f} ({parts})", flush=True)


if __name__ == "__main__":
    main()
