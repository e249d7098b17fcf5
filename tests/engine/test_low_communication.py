"""Training with little communication, run by the engine in float64: settings under which two methods are one, blocks
and worker processes, and runs that are killed in each of their phases.

TOLERANCE: float64, some 100 sums of numbers near 1 in another order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.engine import resume, run
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.worker import Worker
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.state.checkpoint_store import CheckpointStore

from ..faults.runs import PLUGIN, Watch, interrupt
from .setups import quadratic

TOLERANCE = 1e-12
ADAMW = {"name": "clip", "radius": 1.0, "rule": {"name": "adamw", "lr": 0.05, "betas": [0.9, 0.95], "eps": 0.5}}
ROUGH = {"dim": 6, "noise": 0.1}
EQUAL = {"dim": 6, "heterogeneity": 0.0, "condition": 1.0}
PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_mu": 0.0}


def made(name: str, clients: int = 3, plan: tuple[int, int] = (4, 3), data: Any = ROUGH, **given: Any) -> Experiment:
    """A run of all clients. plan: (rounds, steps). given: arguments of the method, and `engine`."""
    engine = given.pop("engine", {"block": 3})
    method = {"name": name, "rule": ADAMW, **given}
    federation = {"clients": clients, "cohort": clients, "rounds": plan[0], "local": {"steps": plan[1], "batch": 2}}
    return quadratic(method, data, federation, kernels="torch", **engine)


def coded(codec: Any, memory: str, **more: Any) -> dict[str, Any]:
    return {"name": "coded", "codec": codec, "memory": memory, "whole": "never", **more}


SGD = {"name": "sgd", "lr": 0.3}
SAME = {
    "the inner rule alone, however its steps are divided": (
        made("diloco", 1, (4, 3), EQUAL, **PLAIN),
        made("fedavg", 1, (1, 12), EQUAL),
    ),
    "fedavg with kept states": (made("diloco", **PLAIN), made("fedavg", carry="keep")),
    "clients with equal data are one": (made("diloco", 3, data=EQUAL), made("diloco", 1, data=EQUAL)),
    "coded clients with equal data are one": (
        made("sparse_loco", 3, data=EQUAL, size=4, density=0.5),
        made("sparse_loco", 1, data=EQUAL, size=4, density=0.5),
    ),
    "one fragment that is taken at once": (
        made("streaming_diloco", fragments=1, overlap=0, alpha=0.0, compression=None),
        made("diloco"),
    ),
    "one eager worker": (made("eager_diloco", 1), made("diloco", 1)),
    **{
        f"the identity with memory {memory}": (
            made("diloco", compression=coded("identity", memory)),
            made("diloco"),
        )
        for memory in ("none", "error", "ef21")
    },
    "one step of descent": (
        made("diloco", plan=(4, 1), **PLAIN, rule=SGD),
        made("data_parallel", plan=(4, 1), rule=SGD),
    ),
}
"""Settings -> two runs with the same model."""


@pytest.mark.parametrize("block", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("settings", SAME)
def test_two_methods_are_one(settings: str, block: int):
    def in_blocks(each: Experiment) -> Experiment:
        return each.model_copy(update={"engine": each.engine.model_copy(update={"block": block})})

    one, other = (run(in_blocks(each)).model for each in SAME[settings])
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("codec", ["linear", "statistical", "sign", "qsgd", "natural", "e3m0", "top_k", "sparse"])
def test_clients_that_do_not_move_send_nothing(codec: str):
    """The only step of each visit has the size 0."""
    rule = {"name": "sgd", "lr": {"schedule": "linear", "start": 0.1, "over": "visit"}}
    moved = run(made("diloco", plan=(2, 1), rule=rule, compression=coded(codec, "error"))).model
    assert not any(value.any() for value in moved.values()), "the first model is 0"


METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"compression": coded("sign", "error", decay=0.9)},
    "muloco": {
        "rule": {"name": "muon_adamw", "lr": 0.05},
        "compression": coded({"name": "top_k", "ratio": 0.4}, "ef21"),
    },
    "sparse_loco": {"size": 4, "density": 0.5},
    "streaming_diloco": {"fragments": 2, "compression": coded("sign", "error", decay=0.9)},
    "eager_diloco": {"compression": coded("sign", "error", decay=0.9)},
    "data_parallel": {"compression": coded("qsgd", "error")},
}
"""Method -> arguments with which its clients remember something."""


def of(name: str, faults: Path, **engine: Any) -> dict[str, Any]:
    """The plain data of a run of some tensors, so that there are fragments. faults: for `plan`."""
    data = made(name, 6, (5, 2), **METHODS[name], engine=engine).plain()
    data["plugins"] = [PLUGIN]
    data["workload"] = {"name": "faulty", "model": {"name": "mlp", "hidden": [4]}, "faults": str(faults)}
    return data


def trained(name: str, folder: Path, **engine: Any) -> Any:
    return run(experiment(of(name, folder, **engine)))


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_blocks(name: str, tmp_path: Path):
    one, three = (trained(name, tmp_path, block=block).model for block in (1, 3))
    for key, value in one.items():
        np.testing.assert_allclose(value, three[key], TOLERANCE, TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("sparse_loco", "streaming_diloco", "eager_diloco"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("diloco", "muloco", "data_parallel")),
    ],
)
def test_worker_processes(name: str, tmp_path: Path, ray_here: None):
    here, there = (trained(name, tmp_path, block=3, **more) for more in ({}, {"backend": "ray", "workers": 2}))
    assert here.model_sha256 == there.model_sha256


KEEPS: dict[str, dict[str, Any]] = {
    "fedavg": {"rule": {"name": "adamw", "lr": 0.05}, "carry": "keep"},
    "flora": {},
    "fedex_lora": {"rule": {"name": "adamw", "lr": 0.05}, "carry": "keep"},
}
"""Method -> arguments of a run with adapters whose clients keep moments, or whose server keeps a change of weights."""
PHASES: dict[str, tuple[type, str, bool, int]] = {
    "the first block has been trained": (LocalTrainer, "finish", True, 1),
    "the second block has been trained": (LocalTrainer, "finish", True, 2),
    "states of clients are in their files": (Worker, "_save_states", True, 1),
    "the round is to be committed": (Driver, "_commit", False, 1),
    "the round has been committed": (Driver, "_commit", True, 1),
    "the model is to be evaluated": (Worker, "evaluate", False, 1),
    "a part of a checkpoint is on the disk": (CheckpointStore, "put", True, 1),
    "a checkpoint is complete": (CheckpointStore, "write", True, 1),
}
"""Phase of a round -> (class, its function, whether it is over, how often it has been called)."""


def killed_in(phase: str, data: dict[str, Any], out: str) -> None:
    """Resume a run whose process is killed in a phase; the function that a separate process executes."""
    owner, name, is_over, calls = PHASES[phase]
    function, left = getattr(owner, name), [calls]

    def last(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        found = function(*given, **named) if is_over or left[0] else None
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, last)
    resume(experiment(data), out)


def remembering(name: str, faults: Path) -> dict[str, Any]:
    """The plain data of a run with states that a checkpoint must have: those of `METHODS`, or those of `KEEPS`."""
    if name in METHODS:
        data = of(name, faults, block=3)
    else:
        data = made("fedavg", 6, (5, 2), engine={"block": 3}).plain() | {"method": {"name": name, **KEEPS[name]}}
        adapter = {"name": "lora", "targets": "*", "rank": 2}
        data["workload"] = {"name": "digits", "model": {"name": "mlp", "hidden": [4]}, "adapter": adapter}
    data["federation"]["rounds"] = 6
    return data | {"checkpoint": {"every": 1}, "evaluate": {"every": 1}}


@pytest.mark.long
@pytest.mark.parametrize("name", [*KEEPS, "diloco", "muloco", "streaming_diloco", "eager_diloco"])
def test_a_run_that_is_killed_in_every_phase_goes_on_to_the_same_bits(name: str, tmp_path: Path):
    """One process after the other ends by SIGKILL in a phase of a round, also in the middle of a cycle of fragments."""
    data, out = remembering(name, tmp_path), tmp_path / "out"
    here = multiprocessing.get_context("forkserver")
    here.set_forkserver_preload(["tests.engine.test_low_communication"])
    with pytest.raises(Interrupted):
        run(experiment(data), out, [Watch(r1=interrupt)])
    for phase in PHASES:
        child = here.Process(target=killed_in, args=(phase, data, str(out)), daemon=True)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, phase
    undisturbed = run(experiment(data), tmp_path / "undisturbed")
    assert resume(experiment(data), out).model_sha256 == undisturbed.model_sha256
