"""Small experiments that can be made to fail, and functions that make them fail."""

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

from fedfleet.engine import Observer, run
from fedfleet.engine.cohorts.samplers import sample
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.state.checkpoint import checkpoints_in
from fedfleet.engine.state.checkpoint_store import BLOBS, name_of
from fedfleet.engine.state.row_files import locate, paths, width

PLUGIN = str(Path(__file__).parent / "faulty.py")
CLIENTS, COHORT, STEPS = 30, 9, 3
ALWAYS = 1 << 30
EVERY = {"every": 2, "keep": 3}
"""When runs that are broken off write checkpoints."""

METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    "fedmuon_bc": {"name": "fedmuon_bc", "matrix_lr": 0.01, "vector_lr": 0.1},
    "adam": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "keep"},
    "fed_nsgda_m": {"name": "fed_nsgda_m", "lr": {"primal": 0.01, "dual": 0.1}},
}
SMALL = {"model": {"name": "mlp", "hidden": [16]}}
WORKLOADS: dict[str, dict[str, Any]] = {"fed_nsgda_m": {"name": "faulty_auc", "of": {"name": "digits", **SMALL}}}
"""The workloads of methods that need another problem than classification."""


def setting(
    faults: Path, method: str = "scaffold", rounds: int = 6, checkpoint: Any = None, **engine: Any
) -> dict[str, Any]:
    """The plain data of an experiment with 30 clients with states, 9 of them in each round, and with the faults that
    `plan` writes to the folder. The caller may change the data."""
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


def asynchronous(faults: Path, rounds: int = 6, **more: Any) -> dict[str, Any]:
    """The plain data of the same with SCAFFOLD as an asynchronous run, whose updates have four results each."""
    data = setting(faults, "scaffold", rounds, **more)
    data["federation"]["pace"] = {"name": "buffered", "buffer": 4}
    return data | {"systems": {"devices": {"name": "lognormal", "sigma": 1.0}, "dropout": 0.1}}


def row_at(out: Path, row: int, method: str = "scaffold") -> tuple[Path, int, int]:
    """(file of a row of a run's client states, the row's offset in it, its number of bytes)."""
    run_spec = RunSpec.of("width", small(out, method))
    number, place = locate(row)
    each = width(pytree.tree_leaves(StateSpec(run_spec.method(), run_spec.initial_model()).client), bfloat16=False)
    return Path(paths(str(out / "state"))[number]), place * each, each


def rounds_with_checkpoints(out: Path) -> list[int]:
    """The rounds of which a run's folder has checkpoints. Each must be sound."""
    store = checkpoints_in(out)
    for number in store.rounds():
        store.read(number)
    return store.rounds()


def checkpoint_file(store: Path, number: int, name: str) -> Path:
    """The file of a checkpoint that its manifest names, or its manifest. store: the folder of checkpoints."""
    manifest = store / f"{name_of(number)}.json"
    return manifest if name == "manifest" else store / BLOBS / json.loads(manifest.read_text())["files"][name]


def alone(data: dict[str, Any], out: str) -> None:
    """Run an experiment; the function that a separate process executes."""
    run(experiment(data), out)


def plan(faults: Path, *rules: dict[str, Any]) -> None:
    """Write the rules by which clients fail from now on; calls are counted from zero again."""
    faults.mkdir(parents=True, exist_ok=True)
    for old in faults.glob("met-*"):
        old.unlink()
    (faults / "rules.json").write_text(json.dumps(rules))


def rule(client: int, kind: str, skip: int = 0, times: int = ALWAYS) -> dict[str, Any]:
    return {"client": int(client), "kind": kind, "skip": skip, "times": times}


def cohort_of(number: int) -> np.ndarray:
    return sample(0, number, CLIENTS, COHORT)


def visitor(number: int, apart: int = 0) -> tuple[int, int]:
    """(a client of this round's cohort that was not in round `apart`, how often its loss was called before)."""
    before = [client for round in range(1, number) for client in cohort_of(round).tolist()]
    others = cohort_of(apart) if apart else []
    visits, client = min((before.count(c), c) for c in cohort_of(number).tolist() if c not in others)
    return client, visits * STEPS


def untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The records without times."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def same(result: Any, expected: Any) -> None:
    """Check that model and records are equal to the bit."""
    assert result.model_sha256 == expected.model_sha256
    assert untimed(result.rows) == untimed(expected.rows)


class Watch(Observer):
    """An observer that calls functions after given rounds and keeps the lines of the log."""

    def __init__(self, **actions: Callable[[], Any]) -> None:
        """actions: r3=… for round 3; each function is called once."""
        self.actions, self.told = actions, []

    def record(self, record: dict[str, float]) -> None:
        action = self.actions.pop(f"r{record['round']:.0f}", None)
        if action is not None:
            action()

    def event(self, text: str) -> None:
        self.told.append(text)


def interrupt() -> None:
    """Send SIGINT to this process, as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def processes(title: str, of: int | None = None) -> list[psutil.Process]:
    """The descendants of a process, by default of this one, that have this title; Ray gives its processes titles."""
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
