"""Small experiments that can be made to fail, and what is done to them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch.utils import _pytree as pytree

from fedfleet.engine import run
from fedfleet.engine.cohorts import sampling
from fedfleet.engine.config.run_spec import RunSpec
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.methods.state_spec import StateSpec
from fedfleet.engine.runs.observer import Observer
from fedfleet.engine.state.row_files import locate, paths, width

PLUGIN = str(Path(__file__).parent / "faulty.py")
CLIENTS, COHORT, STEPS = 30, 9, 3
ALWAYS = 1 << 30

METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    "fedmuon_bc": {"name": "fedmuon_bc", "matrix_lr": 0.01, "vector_lr": 0.1},
    "adam": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "keep"},
    "fed_nsgda_m": {"name": "fed_nsgda_m", "lr": {"primal": 0.01, "dual": 0.1}},
}
SMALL = {"model": {"name": "mlp", "hidden": [16]}}
WORKLOADS: dict[str, dict[str, Any]] = {"fed_nsgda_m": {"name": "faulty_auc", "of": {"name": "digits", **SMALL}}}
"""Of methods that need more than a classification."""


def setting(
    faults: Path, method: str = "scaffold", rounds: int = 6, checkpoint: Any = None, **engine: Any
) -> dict[str, Any]:
    """30 clients with states, 9 a round; the faults that `plan` puts into the folder. The caller's own, to change."""
    return {
        "plugins": [PLUGIN],
        "workload": deepcopy({**WORKLOADS.get(method, {"name": "faulty", **SMALL}), "faults": str(faults)}),
        "method": deepcopy(METHODS[method]),
        "federation": {
            "clients": CLIENTS,
            "cohort": COHORT,
            "rounds": rounds,
            "local": {"steps": STEPS, "batch": 16},
        },
        "engine": {"backend": "local", "block": 4, "cpus": 0.5, **engine},
        "evaluate": {"every": 2, "batch": 100},
        "checkpoint": checkpoint or {},
        "tracking": {"uri": "none"},
    }


def small(faults: Path, method: str = "scaffold", rounds: int = 6, **more: Any) -> Experiment:
    return experiment(setting(faults, method, rounds, **more))


def row_at(out: Path, row: int, method: str = "scaffold") -> tuple[Path, int, int]:
    """The file of a row of a run's states, where it begins there, and its bytes."""
    run_spec = RunSpec.of("width", small(out, method))
    number, place = locate(row)
    each = width(pytree.tree_leaves(StateSpec(run_spec.method(), run_spec.initial_model()).client), narrow=False)
    return Path(paths(str(out / "state"))[number]), place * each, each


def alone(data: dict[str, Any], out: str) -> None:
    """A process's whole work."""
    run(experiment(data), out)


def plan(faults: Path, *rules: dict[str, Any]) -> None:
    """From now on clients fail like this; calls are counted anew."""
    faults.mkdir(parents=True, exist_ok=True)
    for old in faults.glob("met-*"):
        old.unlink()
    (faults / "rules.json").write_text(json.dumps(rules))


def rule(client: int, kind: str, skip: int = 0, times: int = ALWAYS) -> dict[str, Any]:
    return {"client": int(client), "kind": kind, "skip": skip, "times": times}


def cohort_of(number: int) -> np.ndarray:
    return sampling.sample(0, number, CLIENTS, COHORT)


def visitor(number: int, apart: int = 0) -> tuple[int, int]:
    """(a client of this round's cohort, one that was not in round `apart`; how often its loss was called before)."""
    before = [client for round in range(1, number) for client in cohort_of(round).tolist()]
    others = cohort_of(apart) if apart else []
    visits, client = min((before.count(c), c) for c in cohort_of(number).tolist() if c not in others)
    return client, visits * STEPS


def untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The records without what a clock says."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def same(result: Any, expected: Any) -> None:
    """Equal to the bit: model and records."""
    assert result.model_sha256 == expected.model_sha256
    assert untimed(result.rows) == untimed(expected.rows)


class Watch(Observer):
    """An observer: does something once a round is over, hears what is told."""

    def __init__(self, **actions: Callable[[], Any]) -> None:
        """actions: r3=… for round 3, each done once."""
        self.actions, self.told = actions, []

    def record(self, record: dict[str, float]) -> None:
        action = self.actions.pop(f"r{record['round']:.0f}", None)
        if action is not None:
            action()

    def event(self, text: str) -> None:
        self.told.append(text)


def interrupt() -> None:
    """As Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def processes(title: str, of: int | None = None) -> list[psutil.Process]:
    """Ray's processes of this name below a process, this one by default."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{title}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_driver(of: int | None = None) -> None:
    for process in processes("DriverProcess", of):
        process.kill()
