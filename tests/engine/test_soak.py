"""A run's memory does not grow with its rounds. `benchmarks/soak.py` has the long run on Ray.

Each measurement has a process of its own: what threads that earlier tests left allocate meanwhile is not memory of the
run."""

from __future__ import annotations

import gc
import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from .setups import STEPS, digits, driver_here

EVERY = 20
"""Rounds between checkpoints, and between measurements."""


def looks(tmp_path: Path, rounds: int) -> list[tuple[int, int]]:
    """(bytes that Python and numpy hold, resident bytes) after every EVERY rounds of SCAFFOLD with checkpoints, in a
    fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(looks_here, tmp_path, rounds).result()


def looks_here(tmp_path: Path, rounds: int) -> list[tuple[int, int]]:
    """What `looks` returns, measured in this process."""
    plain = digits("scaffold", STEPS, rounds=rounds).model_dump() | {"checkpoint": {"every": EVERY}}
    made, found, done = type(digits("scaffold", STEPS)).model_validate(plain), [], 0
    tracemalloc.start()
    try:
        with driver_here(made, tmp_path) as driver:
            for told in driver.rounds():
                if not isinstance(told, dict):
                    continue
                done += 1
                if done % EVERY == 0:
                    assert driver.checkpoints is not None
                    driver.log_lines += driver.checkpoints.finish()
                    gc.collect()
                    found.append((tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss))
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.long
def test_what_is_held_does_not_grow(tmp_path):
    """The record has 22 columns of 9 bytes per round. It exists twice (the other copy is for a checkpoint), with space
    to grow, which makes at most 600 bytes per round. A leak of one float per client or of one object per task would be
    more."""
    traced = [held for held, _ in looks(tmp_path, 300)]
    late = traced[len(traced) // 2 :]
    rounds = EVERY * (len(late) - 1)
    assert late[-1] - late[0] < 600 * rounds + 20_000, traced


@pytest.mark.slow
def test_resident_memory_is_flat(tmp_path):
    """1,500 rounds, of which the first third does not count: at most 1 MiB per 1,000 rounds, and 2 MiB for the noise of
    the allocator."""
    resident = [rss / 2**20 for _, rss in looks(tmp_path, 1500)]
    late = resident[len(resident) // 3 :]
    assert late[-1] - late[0] < EVERY * len(late) / 1000 + 2, resident
