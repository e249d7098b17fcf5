"""Faults at random: 200 points, each a small experiment that must end with the model of an undisturbed run.

A fault that comes too late, or finds no process to hit, proves nothing. Therefore the log of the run must show that the
fault took effect; otherwise the point is drawn again. `make chaos` runs all points and prints a table, `python -m
tests.faults.chaos disk oracle` runs two kinds, and the test suite runs a fixed sample.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedfleet.engine import Result, run
from fedfleet.engine.api import resume
from fedfleet.engine.errors import ConfigError, DriverDied, Interrupted, StoreFull
from fedfleet.engine.state.checkpoint import checkpointed_rounds, checkpoints_in

from .disks import NoDisk, enlarge, fill, mounted
from .faulty import ANYONE
from .runs import (
    METHODS,
    Watch,
    alone,
    checkpoint_file,
    kill_driver,
    plan,
    processes,
    row_at,
    rule,
    same,
    setting,
    small,
)

ROUNDS = 8
CALLS = ROUNDS * 3 * 3 + 4 * 4
"""The numbers of calls of the loss, for each block size, and of the report in an undisturbed run."""
SECONDS = 120
"""Seconds that one draw of a point may take; a longer one counts as a hang."""
DRAWS = 12
"""The largest number of draws of a point until one takes effect."""

KINDS = {"worker": 30, "driver": 20, "launcher": 20, "interrupt": 40, "checkpoint": 40, "disk": 20, "oracle": 30}
SAMPLE = {"worker": 2, "driver": 1, "launcher": 3, "interrupt": 4, "checkpoint": 4, "disk": 2, "oracle": 4}


class Point(NamedTuple):
    kind: str
    number: int

    def random(self, draw: int) -> np.random.Generator:
        return np.random.default_rng([list(KINDS).index(self.kind), self.number, *([draw] if draw else [])])


POINTS = [Point(kind, number) for kind, count in KINDS.items() for number in range(count)]


class Missed(Exception):
    """The fault had no effect, so the draw proves nothing."""


class Case:
    """One draw of a point: the folder with its faults and files, and functions to run it."""

    def __init__(self, point: Point, folder: Path, draw: int = 0) -> None:
        self.random, self.folder, self.out = point.random(draw), folder, folder / "out"
        self.met: list[str] = []  # texts that show that the fault took effect
        self.method = str(self.random.choice(list(METHODS)))
        self.every = {"every": int(self.random.integers(1, 4)), "keep": int(self.random.integers(1, 4))}

    def chosen(self, **engine: Any) -> Any:
        return small(self.folder, self.method, ROUNDS, checkpoint=self.every, **engine)

    def at(self, kind: str) -> None:
        """Plan a fault of this kind, once, at a random call of the loss or the report."""
        plan(self.folder, rule(ANYONE, kind, int(self.random.integers(CALLS)), 1))

    def meet(self, told: list[str], words: str) -> None:
        """Note the lines of the log that have the words of the fault."""
        self.met += [text for text in told if words in text]

    def go_on(self, **engine: Any) -> Result:
        """Resume the run; start it again if it had not reached its first checkpoint or its first round."""
        watch = Watch()
        try:
            result = resume(self.chosen(**engine), self.out, [watch])
            self.meet(watch.told, self.damage_is_told)
            return result
        except ConfigError as error:
            if not any(words in str(error) for words in ("no checkpoint to resume from", "holds no run")):
                raise
            self.meet([str(error)], self.damage_is_told)
            left = list((self.out / "checkpoints").glob("round-*"))
            if len(left) > self.damaged:
                raise
            return run(self.chosen(**engine), self.folder / "anew")

    damaged = 0
    damage_is_told = "is damaged ("


# --- the kinds of faults; each of them notes in `met` that its fault took effect ------------------------------------
def oracle(case: Case) -> Result:
    """The loss or the report raises an exception once."""
    case.at("raise")
    watch = Watch()
    result = run(case.chosen(), case.out, [watch])
    case.meet(watch.told, "is broken")
    return result


def interrupt(case: Case) -> Result:
    """Ctrl-C, and perhaps a second one after resuming."""
    for again in range(2):
        case.at("interrupt")
        try:
            return resume(case.chosen(), case.out) if again else run(case.chosen(), case.out)
        except Interrupted as error:
            case.met.append(repr(error))
        except ConfigError:  # stopped in the first round
            break
    plan(case.folder)
    return case.go_on()


def launcher(case: Case) -> Result:
    """SIGKILL to the process that launched the run."""
    case.at("kill")
    here = multiprocessing.get_context("forkserver")
    here.set_forkserver_preload(["tests.faults.runs"])
    arguments = (setting(case.folder, case.method, ROUNDS, case.every), str(case.out))
    child = here.Process(target=alone, args=arguments, daemon=True)
    child.start()
    child.join(SECONDS)
    if child.exitcode == 0:
        raise Missed
    assert child.exitcode == -signal.SIGKILL, child.exitcode
    assert not (case.out / "result.json").exists()
    case.met.append("the launcher ended by SIGKILL")
    return case.go_on()


def checkpoint(case: Case) -> Result:
    """Ctrl-C, then the newest checkpoint is damaged, which the log of the resumed run must say."""
    plan(case.folder, rule(ANYONE, "interrupt", int(case.random.integers(CALLS // 4, CALLS)), 1))
    with suppress(Interrupted):
        run(case.chosen(), case.out)
        raise Missed
    damage(case)
    case.damaged = 1 if len(checkpointed_rounds(case.out)) == 1 else 0
    return case.go_on()


def damage(case: Case) -> None:
    """Damage a bit or the end of a file of the newest checkpoint, or of a row that only this checkpoint has."""
    store = checkpoints_in(case.out)
    rows = [store.read(number).row for number in store.rounds()]
    newest = store.rounds()[-1]
    names = ("manifest", *sorted(store.manifests[newest]["files"]))
    files = [checkpoint_file(case.out / "checkpoints", newest, name) for name in names]
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
    """The disk of the client states is too small and then made larger, or the disk of the checkpoints is full for some
    rounds."""
    with mounted(case.folder / "disk", int(case.random.integers(40, 140))) as folder:
        if case.random.random() < 0.5:
            told = ""
            try:
                run(case.chosen(store=str(folder)), case.out)
            except StoreFull as error:
                told = str(error)
            if not told:
                raise Missed
            assert f"in {folder}" in told
            assert "No space left" in told
            case.met.append(told)
            enlarge(folder)
            return case.go_on(store=str(folder))
        enlarge(folder)
        case.out = folder / "out"
        begin = int(case.random.integers(1, ROUNDS - 1))
        end = int(case.random.integers(begin + 1, ROUNDS))
        watch = Watch(**{f"r{begin}": lambda: fill(folder), f"r{end}": (folder / "filler").unlink})
        result = run(case.chosen(store=str(case.folder)), case.out, [watch])
        case.meet(watch.told, "no checkpoint could be written (No space left")
        return result


def worker(case: Case) -> Result:
    """SIGKILL to a worker some milliseconds after a round; the driver must have noticed its death."""
    with later(case, lambda: kill_one(case)) as watch:
        result = run(case.chosen(backend="ray", workers=2), case.out, [watch])
    case.meet(watch.told, "another one starts")
    return result


def kill_one(case: Case) -> None:
    workers = processes("WorkerProcess")
    if workers:
        workers[int(case.random.integers(len(workers)))].kill()


def driver(case: Case) -> Result:
    """SIGKILL to the driver some milliseconds after a round; the run is resumed on either backend."""
    try:
        with later(case, kill_driver) as watch:
            run(case.chosen(backend="ray", workers=1), case.out, [watch])
        raise Missed
    except DriverDied as error:
        case.met.append(str(error))
    return case.go_on(backend=str(case.random.choice(["local", "ray"])), workers=1)


@contextmanager
def later(case: Case, act: Callable[[], None]) -> Iterator[Watch]:
    """An observer that calls `act` some milliseconds after a random round, once. The context ends when that is done."""
    timer = threading.Timer(float(case.random.uniform(0, 0.3)), act)
    try:
        yield Watch(**{f"r{case.random.integers(1, ROUNDS)}": timer.start})
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()


ACTS = {act.__name__: act for act in (worker, driver, launcher, interrupt, checkpoint, disk, oracle)}


# --- all of them ------------------------------------------------------------------------------------------------------
def undisturbed(folder: Path) -> dict[str, Result]:
    return {method: run(small(folder, method, ROUNDS)) for method in METHODS}


def survive(point: Point, folder: Path, expected: dict[str, Result]) -> int:
    """Check that the run has the expected model and the record of every round once, within the time limit, although the
    fault took effect. Returns the number of draws until it took effect; the runs of the other draws must be right as
    well."""
    for draw in range(DRAWS):
        place = folder / f"draw-{draw}"
        place.mkdir()
        case = Case(point, place, draw)
        try:
            with limit(SECONDS):
                result = ACTS[point.kind](case)
        except Missed:
            continue
        assert [row["round"] for row in result.rows] == list(range(1, ROUNDS + 1))
        same(result, expected[case.method])
        if case.met:
            return draw + 1
    raise AssertionError(f"none of {DRAWS} draws of {point.kind} {point.number} has had an effect")


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
    """kinds: the kinds of faults to run; [] for all."""
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in runs; Ray's default of 15 starves workers
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray gives a busy machine 30
    ray.init("local", num_cpus=4, object_store_memory=256 * 2**20, **quiet)
    table = {kind: [0, 0, 0, 0.0] for kind in kinds or KINDS}  # points, draws, survived, seconds
    with tempfile.TemporaryDirectory() as scratch:
        expected = undisturbed(Path(scratch))
        for point in [point for point in POINTS if point.kind in table]:
            folder, began = Path(scratch) / f"{point.kind}-{point.number}", time.perf_counter()
            folder.mkdir()
            row = table[point.kind]
            try:
                row[1] += survive(point, folder, expected)
                row[2] += 1
            except NoDisk:
                continue
            except Exception:
                print(f"{point.kind} {point.number}:\n{traceback.format_exc()}", file=sys.stderr)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            row[0] += 1
            row[3] += time.perf_counter() - began
    ray.shutdown()
    print(f"{'kind':<12}{'points':>7}{'draws':>7}{'hit and survived':>18}{'seconds':>9}")
    for kind, (points, draws, survived, seconds) in table.items():
        print(f"{kind:<12}{points:>7}{draws:>7}{survived:>18}{seconds:>9.0f}")
    return int(any(points != survived for points, _, survived, _ in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
