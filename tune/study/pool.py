"""Processes that run cells, a few at a time. One that dies costs its cell, and is replaced."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from .cells import Cell
from .folder import FAILED, Folder
from .worker import INTERRUPTED, Task, failure, work

TICK = 0.2
"""Seconds between looks at whether to stop."""

CELLS = 8
"""That one process runs: its memory grows from cell to cell, and a fresh one costs a fork and loading the data."""

GRACE = 30.0
"""Seconds that workers have to checkpoint when the study is stopped."""


class Event(NamedTuple):
    """`what`: started, round (of `number`), or how the cell ended."""

    cell: Cell
    what: str
    number: int = 0


class Worker:
    def __init__(self, lock: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fedfleet.tune.study.worker"])
        self.pipe, theirs = context.Pipe()
        self.process: Any = context.Process(target=work, args=(theirs, lock), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None
        self.given = 0

    def give(self, cell: Cell, folder: Folder, keep_model: bool) -> None:
        self.cell = cell
        self.given += 1
        self.pipe.send(Task(str(folder.of(cell)), cell.data, keep_model))

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Pool:
    """`stop`: asked often; once it says so, no cell is begun, and those under way are checkpointed."""

    def __init__(self, folder: Folder, jobs: int, stop: Callable[[], int], keep_models: bool = False) -> None:
        self.folder, self.jobs, self.stop, self.keep = folder, jobs, stop, keep_models
        self.workers: list[Worker] = []
        self.asked = 0.0

    def run(self, cells: list[Cell]) -> Iterator[Event]:
        """Until all are over, or what was under way when `stop` said so."""
        waiting = list(reversed(cells))
        while True:
            if self.stop():
                waiting.clear()
                self._ask()
            while waiting and len(self._busy()) < self.jobs:
                yield self._begin(waiting.pop())
            if not self._busy():
                return
            yield from self._hear()

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.cell is not None]

    def _begin(self, cell: Cell) -> Event:
        idle = next((worker for worker in self.workers if worker.cell is None and worker.process.is_alive()), None)
        if idle is None:
            idle = Worker(str(self.folder.path / ".workers.lock"))
            self.workers.append(idle)
        idle.give(cell, self.folder, self.keep)
        return Event(cell, "started")

    def _ask(self) -> None:
        """Once politely; after a while not."""
        if not self.asked:
            self.asked = time.monotonic()
            for worker in self._busy():
                worker.process.terminate()
        elif time.monotonic() - self.asked > GRACE:
            for worker in self._busy():
                worker.process.kill()

    def _hear(self) -> Iterator[Event]:
        busy: dict[Any, Worker] = {worker.pipe: worker for worker in self._busy()}
        for pipe in connection.wait(list(busy), TICK):
            worker = busy[pipe]
            assert worker.cell is not None
            try:
                what, value = worker.pipe.recv()
            except (EOFError, ConnectionError):
                yield self._dead(worker)
                continue
            if what == "round":
                yield Event(worker.cell, "round", int(value))
            else:
                yield Event(self._free(worker), value)

    def _free(self, worker: Worker) -> Cell:
        """The cell that it is done with."""
        assert worker.cell is not None
        cell, worker.cell = worker.cell, None
        if worker.given >= CELLS:
            self.workers.remove(worker)
            worker.close()
        return cell

    def _dead(self, worker: Worker) -> Event:
        assert worker.cell is not None
        cell = worker.cell
        worker.process.join()
        self.workers.remove(worker)
        worker.close()
        if self.asked:
            return Event(cell, INTERRUPTED)
        code = worker.process.exitcode
        cause = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        failure(Path(self.folder.of(cell)), FAILED, f"the process that ran it ended {cause}")
        return Event(cell, FAILED)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()
