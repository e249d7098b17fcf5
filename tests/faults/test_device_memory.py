"""A device whose memory runs out: blocks are halved, and the run has the bits of one that began with such blocks.

The faulty workload raises torch's own exception where a block has too many clients, as an allocator of a device does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import resume, run
from fedfleet.engine.errors import Interrupted, OutOfMemory

from .runs import Watch, cohort_of, interrupt, plan, rule, same, small


def crowded(folder: Path, most: int, skip: int = 0, **more: Any) -> Any:
    """A run whose device has room for so many clients at once. skip: how often larger blocks found room before."""
    plan(folder, rule(most, "card", skip))
    return small(folder, **more)


def recorded(out: Path) -> dict[str, Any]:
    return json.loads((out / "plan.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("method", ["scaffold", pytest.param("adam", marks=pytest.mark.slow)])
def test_blocks_are_halved_in_round_1(method, tmp_path):
    watch = Watch()
    found = run(crowded(tmp_path, 1, method=method), tmp_path / "out", [watch])
    same(found, run(small(tmp_path / "none", method, block=1)))
    halved = [text for text in watch.told if "clients instead of" in text]
    assert [text.partition("; ")[2] for text in halved] == [
        "blocks have 2 clients instead of 4 from here on",
        "blocks have 1 clients instead of 2 from here on",
    ]
    assert "failed twice on this process: OutOfMemoryError: CUDA out of memory: 3 clients" in halved[0]
    assert not any("begins again" in text for text in watch.told)
    assert recorded(tmp_path / "out") == {
        "block": 1,
        "kernels": "torch",
        "how": "halved, because the memory of the device ran out with blocks of 2",
    }


def test_later_rounds_are_run_again(tmp_path):
    """27 calls a round: the loss is called once for each of a block's three steps, in three blocks."""
    watch = Watch()
    copies = {"every": 1, "folder": str(tmp_path / "copies")}
    found = run(crowded(tmp_path, 2, skip=20, checkpoint=copies), tmp_path / "out", [watch])
    same(found, run(small(tmp_path / "none", block=2)))
    assert any("the run begins again, because 2 rounds had blocks of 4 clients" in text for text in watch.told)
    assert recorded(tmp_path / "out")["block"] == 2


def test_a_run_with_smaller_blocks_is_resumed_with_them(tmp_path):
    expected = run(small(tmp_path / "none", block=2))
    with pytest.raises(Interrupted):
        run(crowded(tmp_path, 2, checkpoint={"every": 2}), tmp_path / "out", [Watch(r3=interrupt)])
    plan(tmp_path)  # there is room for larger blocks now
    same(resume(tmp_path / "out"), expected)


def test_a_neighbour_that_leaves_costs_a_retry_only(tmp_path, expected):
    """A block that finds room at the second attempt stays as it is."""
    plan(tmp_path, rule(2, "card", 0, 1))
    watch = Watch()
    same(run(small(tmp_path), tmp_path / "out", [watch]), expected)
    assert any("CUDA out of memory" in text for text in watch.told)
    assert recorded(tmp_path / "out")["block"] == 4


@pytest.mark.long
def test_a_worker_that_loses_its_device_is_replaced(tmp_path, expected, ray_here):
    """It reports the task and ends: its process can do nothing more with the device. The task runs again."""
    plan(tmp_path, rule(int(cohort_of(2)[3]), "device", 0, 1))
    watch = Watch()
    same(run(small(tmp_path, backend="ray", workers=2), observers=[watch]), expected)
    told = "\n".join(watch.told)
    assert "CUDA error: an illegal memory access was encountered" in told
    assert "it lost its device" in told
    assert "another one starts" in told


@pytest.mark.long
@pytest.mark.parametrize("engine", [{}, {"vectorise": False}], ids=["vectorised", "one at a time"])
def test_one_client_that_is_too_large_ends_the_run(engine, tmp_path):
    with pytest.raises(OutOfMemory, match=r"one client alone failed on this process for lack of memory: .*CUDA out of"):
        run(crowded(tmp_path, 0, **engine))
