"""Faults at random: 200 points, each a small experiment that must end with the model of an undisturbed run.

`make chaos` runs all and prints a table, `python -m tests.faults.chaos disk oracle` some; the test suite runs a fixed
sample.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedfleet.engine import Result, run
from fedfleet.engine.checkpoint import read
from fedfleet.engine.errors import ConfigError, DriverDied, Interrupted, StoreFull
from fedfleet.engine.launch import resume

from .disks import NoDisk, enlarge, fill, mounted
from .faulty import ANYONE
from .runs import METHODS, Watch, alone, kill_driver, plan, processes, row_at, rule, same, setting, small

ROUNDS = 8
CALLS = ROUNDS * 3 * 3 + 4 * 4
"""Of the loss, by blocks, and of the report in an undisturbed run."""
SECONDS = 120
"""What a point may take; more is a hang."""

KINDS = {"host": 30, "driver": 20, "launcher": 20, "interrupt": 40, "checkpoint": 40, "disk": 20, "oracle": 30}
SAMPLE = {"host": 2, "driver": 1, "launcher": 3, "interrupt": 4, "checkpoint": 4, "disk": 2, "oracle": 4}


class Point(NamedTuple):
    kind: str
    number: int

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng([list(KINDS).index(self.kind), self.number])


POINTS = [Point(kind, number) for kind, count in KINDS.items() for number in range(count)]


class Case:
    """One point's experiment: the folder with its faults and its files, and how to run it."""

    def __init__(self, point: Point, folder: Path) -> None:
        self.random, self.folder, self.out = point.random, folder, folder / "out"
        self.method = str(self.random.choice(list(METHODS)))
        self.every = {"every": int(self.random.integers(1, 4)), "keep": int(self.random.integers(1, 4))}

    def chosen(self, **engine: Any) -> Any:
        return small(self.folder, self.method, ROUNDS, checkpoint=self.every, **engine)

    def at(self, kind: str) -> None:
        """Have this happen once, at a random call of the loss or the report."""
        plan(self.folder, rule(ANYONE, kind, int(self.random.integers(CALLS)), 1))

    def go_on(self, **engine: Any) -> Result:
        """Resume; from the start where the run had not come to its first checkpoint."""
        try:
            return resume(self.chosen(**engine), self.out)
        except ConfigError as error:
            if "no checkpoint to resume from" not in str(error):
                raise
            left = list((self.out / "checkpoints").glob("round-*"))
            if len(left) > self.damaged:
                raise
            return run(self.chosen(**engine), self.folder / "anew")

    damaged = 0


# --- the kinds --------------------------------------------------------------------------------------------------------
def oracle(case: Case) -> Result:
    """The loss or the report raises once."""
    case.at("raise")
    return run(case.chosen(), case.out)


def interrupt(case: Case) -> Result:
    """Ctrl-C, perhaps again after resuming."""
    for again in range(2):
        case.at("interrupt")
        try:
            return resume(case.chosen(), case.out) if again else run(case.chosen(), case.out)
        except Interrupted:
            continue
        except ConfigError:  # stopped in the first round
            break
    plan(case.folder)
    return case.go_on()


def launcher(case: Case) -> Result:
    """SIGKILL to the process that runs it all."""
    case.at("kill")
    here = multiprocessing.get_context("forkserver")
    here.set_forkserver_preload(["tests.faults.runs"])
    arguments = (setting(case.folder, case.method, ROUNDS, case.every), str(case.out))
    child = here.Process(target=alone, args=arguments, daemon=True)
    child.start()
    child.join(SECONDS)
    assert child.exitcode == -signal.SIGKILL, child.exitcode
    return case.go_on()


def checkpoint(case: Case) -> Result:
    """Ctrl-C, then the newest checkpoint is damaged."""
    plan(case.folder, rule(ANYONE, "interrupt", int(case.random.integers(CALLS // 4, CALLS)), 1))
    try:
        return run(case.chosen(), case.out)
    except Interrupted:
        pass
    folders = sorted((case.out / "checkpoints").iterdir())
    damage(case, folders)
    case.damaged = 1 if len(folders) == 1 else 0
    return case.go_on()


def damage(case: Case, folders: list[Path]) -> None:
    """A bit or the end of a file of the newest checkpoint; or of a row that only it has."""
    files = sorted(folders[-1].iterdir())
    rows = [snapshot.row for snapshot, _ in map(read, folders) if snapshot is not None]
    own = set(rows[-1].tolist()) - {row for others in rows[:-1] for row in others.tolist()} - {-1}
    choice = int(case.random.integers(len(files) + 1))
    if choice == len(files) and own:
        path, begin, each = row_at(case.out, min(own), case.method)
        flip(path, begin + int(case.random.integers(each)))
    elif case.random.random() < 0.5:
        path = files[choice % len(files)]
        flip(path, int(case.random.integers(path.stat().st_size)))
    else:
        path = files[choice % len(files)]
        os.truncate(path, int(case.random.integers(path.stat().st_size)))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << (at % 8))
        file.seek(at)
        file.write(bytes([byte]))


def disk(case: Case) -> Result:
    """The store's disk is too small, then made larger; or the checkpoints' disk is full for some rounds."""
    with mounted(case.folder / "disk", int(case.random.integers(40, 140))) as folder:
        if case.random.random() < 0.5:
            try:
                return run(case.chosen(store=str(folder)), case.out)
            except StoreFull:
                enlarge(folder)
            return case.go_on(store=str(folder))
        enlarge(folder)
        case.out = folder / "out"
        begin = int(case.random.integers(1, ROUNDS - 1))
        end = int(case.random.integers(begin + 1, ROUNDS))
        actions = {f"r{begin}": lambda: fill(folder), f"r{end}": (folder / "filler").unlink}
        return run(case.chosen(store=str(case.folder)), case.out, [Watch(**actions)])


def host(case: Case) -> Result:
    """SIGKILL to a host, some milliseconds after some round."""
    with later(case, lambda: kill_one(case)) as watch:
        return run(case.chosen(backend="ray", hosts=2), case.out, [watch])


def kill_one(case: Case) -> None:
    hosts = processes("HostProcess")
    if hosts:
        hosts[int(case.random.integers(len(hosts)))].kill()


def driver(case: Case) -> Result:
    """SIGKILL to the driver, some milliseconds after some round; resumed on either backend."""
    try:
        with later(case, kill_driver) as watch:
            return run(case.chosen(backend="ray", hosts=1), case.out, [watch])
    except DriverDied:
        return case.go_on(backend=str(case.random.choice(["local", "ray"])), hosts=1)


@contextmanager
def later(case: Case, act: Callable[[], None]) -> Iterator[Watch]:
    """An observer that acts up to a few rounds after a random one; over when this is."""
    timer = threading.Timer(float(case.random.uniform(0, 0.3)), act)
    try:
        yield Watch(**{f"r{case.random.integers(1, ROUNDS)}": timer.start})
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()


ACTS = {act.__name__: act for act in (host, driver, launcher, interrupt, checkpoint, disk, oracle)}


# --- all of them ------------------------------------------------------------------------------------------------------
def undisturbed(folder: Path) -> dict[str, Result]:
    return {method: run(small(folder, method, ROUNDS)) for method in METHODS}


def survive(point: Point, folder: Path, expected: dict[str, Result]) -> None:
    """The model and every round's record, each once; no later than the limit."""
    case = Case(point, folder)
    with limit(SECONDS):
        result = ACTS[point.kind](case)
    assert [row["round"] for row in result.rows] == list(range(1, ROUNDS + 1))
    same(result, expected[case.method])


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def hangs(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s: it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(kinds: list[str]) -> int:
    """kinds: to run, or none for all."""
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    os.environ.setdefault("RAY_worker_niceness", "0")  # as runs have it: Ray's own 15 starves hosts on a busy machine
    ray.init("local", num_cpus=4, object_store_memory=256 * 2**20, **quiet)
    table = {kind: [0, 0, 0.0] for kind in kinds or KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        expected = undisturbed(Path(scratch))
        for point in [point for point in POINTS if point.kind in table]:
            folder, began = Path(scratch) / f"{point.kind}-{point.number}", time.perf_counter()
            folder.mkdir()
            row = table[point.kind]
            try:
                survive(point, folder, expected)
                row[1] += 1
            except NoDisk:
                continue
            except Exception:
                print(f"{point.kind} {point.number}:\n{traceback.format_exc()}", file=sys.stderr)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            row[0] += 1
            row[2] += time.perf_counter() - began
    ray.shutdown()
    print(f"{'kind':<12}{'ran':>6}{'survived':>10}{'seconds':>9}")
    for kind, (ran, survived, seconds) in table.items():
        print(f"{kind:<12}{ran:>6}{survived:>10}{seconds:>9.0f}")
    return int(any(ran != survived for ran, survived, _ in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
