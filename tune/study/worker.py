"""A process that runs cells, one after the other, each in-process and into a folder of its own.

It heeds a terminal's Ctrl-C not at all: the study asks it to stop, by SIGTERM. If the study is killed it dies too.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.api import resume, run
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, Diverged, Interrupted, InUse
from ...engine.rounds.driver import Record
from ...engine.runs.observer import Observer
from ...engine.runs.run_directory import clear
from ...engine.storage.atomic_write import write

NEWS_SECONDS = 0.5
INTERRUPTED = "interrupted"


class Task(NamedTuple):
    folder: str
    data: dict[str, Any]
    keep_model: bool = False


class News(Observer):
    """An observer: how far the run is, twice a second at most."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.last = pipe, 0.0

    def begin(self, run_spec: Any, facts: dict[str, Any]) -> None: ...

    def record(self, record: Record) -> None:
        if time.monotonic() - self.last > NEWS_SECONDS:
            self.last = time.monotonic()
            self.pipe.send(("round", record["round"]))

    def event(self, text: str) -> None: ...

    def end(self, result: Any) -> None: ...

    def failed(self, error: BaseException) -> None: ...


def work(pipe: Any, lock: str) -> None:
    """Take tasks from the pipe until it is closed. `lock`: of the study's workers, held as long as this lives."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()
    with Path(lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(("over", perform(task, News(pipe))))


def die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def perform(task: Task, news: News) -> str:
    """Run a cell to its end, from its checkpoint where it has one; what became of it."""
    folder = Path(task.folder)
    try:
        go(task, folder, news)
    except Interrupted:
        return INTERRUPTED
    except Diverged as error:
        return failure(folder, "diverged", str(error))
    except Exception as error:  # whatever a method, a workload or the disk raises is this cell's affair
        return failure(folder, "failed", f"{type(error).__name__}: {error}")
    finally:
        if not task.keep_model:
            (folder / "model.safetensors").unlink(missing_ok=True)
    return "finished"


def go(task: Task, folder: Path, news: News) -> None:
    made = experiment(task.data)
    if any((folder / "checkpoints").glob("round-*")):
        try:
            resume(made, folder, [news])
            return
        except InUse:
            raise
        except ConfigError:  # damaged, or of another configuration
            pass
    clear(folder)
    run(made, folder, [news])


def failure(folder: Path, status: str, reason: str) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "failure.json", json.dumps({"status": status, "reason": " ".join(reason.split())}) + "\n")
    except OSError:
        pass  # a full disk: the study hears of it from what is returned
    return status
