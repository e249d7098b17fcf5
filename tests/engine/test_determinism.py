"""The same seed and block size give the same bits on every backend."""

from __future__ import annotations

import pytest
import torch

from fedfleet.engine import run

from .setups import EPOCHS, METHODS, STEPS, digits

LOCALS = {"steps": STEPS, "epochs": EPOCHS}


def untimed(result):
    """The records without times."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in result.rows]


long = pytest.mark.long
MARKS = {("scaffold", "steps"): (), ("scaffold", "epochs"): long, ("fedmuon_bc", "epochs"): long}
"""When a case is tested; all others only by `make slow`, since their workers do the same."""


@pytest.mark.parametrize(
    ("method", "local"),
    [
        pytest.param(method, local, marks=MARKS.get((method, local), pytest.mark.slow))
        for method in METHODS
        for local in LOCALS
    ],
)
def test_one_worker_two_workers_and_in_process_agree_to_the_bit(method, local, ray_here):
    results = [run(digits(method, LOCALS[local]))]
    results += [run(digits(method, LOCALS[local], backend="ray", workers=workers)) for workers in (1, 2)]
    assert len({result.model_sha256 for result in results}) == 1
    assert untimed(results[0]) == untimed(results[1]) == untimed(results[2])


def test_another_seed_gives_another_model():
    first = digits("fedavg", STEPS)
    second = first.model_copy(update={"seed": 1})
    assert run(first).model_sha256 == run(first).model_sha256 != run(second).model_sha256


def test_the_global_random_state_is_neither_read_nor_written():
    torch.manual_seed(1)
    expected = run(digits("fedmuon_bc", EPOCHS)).model_sha256
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert run(digits("fedmuon_bc", EPOCHS)).model_sha256 == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_of_the_caller_are_left_alone():
    before = torch.get_num_threads()
    run(digits("fedavg", STEPS, rounds=1, threads=2 if before == 1 else 1))
    assert torch.get_num_threads() == before
