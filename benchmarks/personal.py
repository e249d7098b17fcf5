"""Measures what clients' own models cost, in processor time on the local backend and in turn in one process.

    python benchmarks/personal.py [w1] [--rounds 24] [--kernels torch chain] [--block 1]

evaluation   The time of an evaluation of all clients, with an adaptation of as many steps as a visit has, relative to
             that of the round of all clients right before it. Clients hold out a fifth of their rows.
fedper …     The time of a round of the work with the head of each client as its own, and of Ditto, relative to that of
             the round of FedAvg right before it.

Printed are medians (quartiles) of the ratios, and milliseconds per client.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from statistics import median, quantiles
from typing import Any

from fedfleet.engine.api import rounds
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.bench.works import FEDERATIONS

SKIPPED = 2
"""The number of first rounds that do not count."""
SGD = {"name": "sgd", "lr": 0.01}
PERSONAL: dict[str, Any] = {
    "fedper": {"method": {"name": "fedavg", "rule": SGD}, "personal": {"tensors": "head"}},
    "ditto": {"method": {"name": "ditto", "rule": SGD}},
}


def started(work: str, count: int, engine: dict[str, Any], **more: Any) -> Any:
    """The rounds of a run that has `count` rounds. more: sections of the experiment."""
    given = {"method": {"name": "fedavg", "rule": SGD}, "evaluate": {"every": 0}, **more}
    given["federation"] = {**FEDERATIONS[work], "rounds": count, **given.get("federation", {})}
    base = {"plugins": ["fedfleet.tune.bench.works"], "workload": work, "tracking": {"uri": "none"}}
    return rounds(experiment({**base, **given, "engine": {"backend": "local", **engine}}))


def seconds(records: Iterator[dict[str, Any]]) -> float:
    """The processor time of the next round."""
    began = time.process_time()
    next(records)
    return time.process_time() - began


def shown(name: str, ratios: list[float], times: list[float], clients: int) -> None:
    low, middle, high = quantiles(ratios, n=4)
    each = 1e3 * median(times) / clients
    print(f"{name}: {middle:.2f} ({low:.2f}, {high:.2f}), {each:.3f} ms per client", flush=True)


def evaluation(work: str, count: int, engine: dict[str, Any]) -> None:
    plan = FEDERATIONS[work]
    adapt = {"steps": plan["local"]["steps"]}
    evaluate = {"every": 2, "held_out": 0.2, "clients": {"adapt": adapt}}
    own = {"federation": {"cohort": plan["clients"]}, "evaluate": evaluate}
    with closing(started(work, 2 * count, engine, **own)) as records:
        pairs = [(seconds(records), seconds(records)) for _ in range(count)][SKIPPED:]
    times = [both - alone for alone, both in pairs]
    ratios = [extra / alone for (alone, _), extra in zip(pairs, times, strict=True)]
    shown(f"{work}, {engine['kernels']}: evaluation with adaptation / round", ratios, times, plan["clients"])


def methods(work: str, count: int, engine: dict[str, Any]) -> None:
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(closing(started(work, count, engine, **more)))
            for name, more in {"fedavg": {}, **PERSONAL}.items()
        }
        taken = [{name: seconds(run) for name, run in runs.items()} for _ in range(count)][SKIPPED:]
    for name in PERSONAL:
        ratios = [each[name] / each["fedavg"] for each in taken]
        times = [each[name] for each in taken]
        shown(f"{work}, {engine['kernels']}: {name} / FedAvg", ratios, times, FEDERATIONS[work]["cohort"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("works", nargs="*", default=["w1"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--kernels", nargs="+", default=["torch", "chain"])
    parser.add_argument("--block", type=int, default=1)
    asked = parser.parse_args()
    for work in asked.works:
        for kernels in asked.kernels:
            engine = {"kernels": kernels, "block": asked.block}
            evaluation(work, max(SKIPPED + 2, asked.rounds // 4), engine)
            methods(work, asked.rounds, engine)


if __name__ == "__main__":
    main()
