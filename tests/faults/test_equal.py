"""Runs whose processes are killed have the outcome of an undisturbed run, to the bit."""

from __future__ import annotations

import shutil

import pytest

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import DriverDied

from .runs import (
    CLIENTS,
    METHODS,
    Watch,
    asynchronous,
    kill_driver,
    plan,
    rounds_with_checkpoints,
    rule,
    same,
    small,
    visitor,
)

pytestmark = pytest.mark.long

ROUNDS, UPDATES = 7, 30
SOME = ["scaffold", "fed_nsgda_m", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedmuon_bc", "adam"))]
"""METHODS, of which two are left to `make slow`: what is killed and resumed is the same for all states."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Method -> the result of its undisturbed run in one process."""
    return {method: run(small(tmp_path_factory.mktemp("none"), method, ROUNDS)) for method in METHODS}


@pytest.mark.parametrize("method", SOME)
def test_a_worker_killed_in_every_third_round(method, expected, tmp_path, ray_here):
    """The worker is killed by SIGKILL in the middle of a client's local steps."""
    (first, before), (second, before_second) = visitor(3), visitor(6, apart=3)
    plan(tmp_path, rule(first, "kill", before + 1, 1), rule(second, "kill", before_second + 1, 1))
    watch = Watch()
    same(run(small(tmp_path, method, ROUNDS, backend="ray", workers=2), observers=[watch]), expected[method])
    assert len([text for text in watch.told if "worker died" in text and "another one starts" in text]) == 2


@pytest.mark.parametrize("method", SOME)
def test_the_driver_killed_and_resumed_on_either_backend(method, expected, tmp_path, ray_here):
    out, copy = tmp_path / "out", tmp_path / "copy"
    every = {"every": 2, "keep": 2}
    with pytest.raises(DriverDied):
        run(
            small(tmp_path, method, ROUNDS, backend="ray", workers=3, checkpoint=every),
            out,
            [Watch(r5=kill_driver)],
        )
    assert not (out / "result.json").exists()
    shutil.copytree(out, copy)
    same(resume(small(tmp_path, method, ROUNDS, backend="ray", workers=1, checkpoint=every), out), expected[method])
    same(resume(small(tmp_path, method, ROUNDS, checkpoint=every), copy), expected[method])
    for folder in (out, copy):
        assert rounds_with_checkpoints(folder) == [ROUNDS]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers(method, workers, expected, tmp_path, ray_here):
    """Undisturbed runs; the tests above have 2, 3 and 1 workers."""
    same(run(small(tmp_path, method, ROUNDS, backend="ray", workers=workers)), expected[method])


# --- asynchronous runs ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of the undisturbed asynchronous run in one process."""
    return run(experiment(asynchronous(tmp_path_factory.mktemp("none"), UPDATES)))


def test_workers_killed_in_an_asynchronous_run(undisturbed, tmp_path, ray_here):
    """Two workers; each of some clients kills its worker in the middle of its first local steps."""
    plan(tmp_path, *(rule(client, "kill", 1, 1) for client in range(0, CLIENTS, 5)))
    watch = Watch()
    data = asynchronous(tmp_path, UPDATES, backend="ray", workers=2)
    same(run(experiment(data), observers=[watch]), undisturbed)
    assert len([text for text in watch.told if "worker died" in text and "another one starts" in text]) >= 2


def test_the_driver_of_an_asynchronous_run_killed_and_resumed_on_either_backend(undisturbed, tmp_path, ray_here):
    """Results of clients in flight, which were lost with the driver, are computed again."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    every = {"every": 2, "keep": 2}
    data = asynchronous(tmp_path, UPDATES, backend="ray", workers=3, checkpoint=every)
    with pytest.raises(DriverDied):
        run(experiment(data), out, [Watch(r5=kill_driver)])
    assert not (out / "result.json").exists()
    shutil.copytree(out, copy)
    data = asynchronous(tmp_path, UPDATES, backend="ray", workers=1, checkpoint=every)
    same(resume(experiment(data), out), undisturbed)
    same(resume(experiment(asynchronous(tmp_path, UPDATES, checkpoint=every)), copy), undisturbed)
    for folder in (out, copy):
        assert rounds_with_checkpoints(folder) == [UPDATES]
