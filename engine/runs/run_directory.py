"""A run's folder: config.yaml, environment.json, rounds.parquet, model.safetensors, result.json, run.log.

One process at a time runs in a folder. The launcher holds `.run.lock` from before it writes anything until it ends; the
driver, which on Ray is another process, perhaps on another node, holds `.driver.lock` beside it. A launcher that is
killed may leave a driver behind for a moment, so the next launcher also waits for that one.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import yaml

from ..errors import ConfigError, FedFleetError, Interrupted, NotSaved, StoreFull, first_line, full_traceback
from ..records.best_model import FILE as BEST
from ..records.history import History, Record
from ..records.lineage import Lineage, write_lineage
from ..run_spec import RUN_ID, RunSpec
from ..state.checkpoint import checkpointed_rounds, remove_all
from ..state.checkpoint_store import name_of
from ..state.row_files import remove_files
from ..storage.atomic_write import cleared, release, temporary_path, write
from ..storage.lock import LAUNCHER, driver_lock, exclusive
from ..storage.plain_files import open_plain, read_text, refuse_unusual
from .environment import NAME as ENVIRONMENT
from .environment import environment, with_earlier
from .observer import Observer
from .result import Result, model_digest
from .saved_files import (
    FILES,
    FOLDERS,
    FROZEN,
    INITIAL,
    NAMES,
    RESULT,
    SavedResult,
    read_result,
    refuse_other_kind,
    require_kind,
    save_model,
)

PARTIAL = ".rounds.partial"
"""What becomes rounds.parquet where a run ends without a result. A result may be kept under the temporary name."""


class RunDirectory(Observer):
    """The observer that writes the files of a run's folder. `rows`: the records of all rounds so far."""

    def __init__(self, path: Path, run_id: str = "", lineage: Lineage | None = None) -> None:
        """lineage: of a fork that begins."""
        self.path, self.run_id, self.lineage = path.resolve(), run_id, lineage
        self.rows = History()
        self.locked = True  # False if the file system has no locks
        self.frozen: tuple[str, ...] = ()  # names of tensors
        self.complete = False  # whether the run is, and is to be made longer
        self.config = ""  # the content of config.yaml

    @staticmethod
    def new(path: Path) -> RunDirectory:
        refuse_run(path)
        return RunDirectory(path)

    @staticmethod
    def old(path: Path) -> RunDirectory:
        """The folder of a run, which may be complete. Raises ConfigError if it is not one."""
        require_kind(path, "run", "run.json")
        refuse_unusual(path, NAMES)
        found = RunDirectory(path, read_run_id(path))
        found.complete = (found.path / "result.json").is_file()
        return found

    @contextmanager
    def exclusive(self, resume: bool) -> Iterator[None]:
        """A context in which no other process runs in the folder.

        Raises InUse if another process runs there, and ConfigError if the folder already holds a run (or files that a
        run would overwrite), or if the run in it has been completed in the meantime. If a new run raises a ConfigError
        before its first round, the files that it has written are removed by name, so the folder is as it was.
        """
        with exclusive(self.path, LAUNCHER) as lock:
            process = os.getpid()
            self.locked = lock.supported
            with driver_lock(self.path):
                pass  # wait until no driver of an earlier launcher is left
            if resume and not self.complete:
                refuse_result(self.path)  # another process may have written it in the meantime
            elif not resume:
                refuse_run(self.path)
            try:
                yield
            except (ConfigError, StoreFull):
                if not resume and not self.rows:
                    self._remove()
                raise
            finally:
                if os.getpid() == process:  # a process that was forked meanwhile has only a copy of the run
                    release(self.path)

    def _remove(self) -> None:
        """Remove what a run that could not begin has written. None of it was there before, see `refuse_run`."""
        with suppress(OSError):
            (self.path / PARTIAL).unlink(missing_ok=True)
            for name in FILES:
                for path in (self.path / name, temporary_path(self.path / name)):
                    path.unlink(missing_ok=True)
        remove_files(str(self.path / "state"))
        remove_all(self.path)

    def begin(self, run_spec: RunSpec) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.config = yaml.safe_dump(run_spec.experiment.plain(), sort_keys=False)
        if not run_spec.resume:
            write(self.path / "config.yaml", self.config)
        found = with_earlier(environment(run_spec), self.path / ENVIRONMENT)
        write(self.path / ENVIRONMENT, json.dumps(found, indent=2) + "\n")
        backend, why = run_spec.backend
        write(self.path / "run.json", json.dumps({"run_id": run_spec.run_id, "backend": backend}) + "\n")
        if self.lineage is not None:
            write_lineage(self.path, self.lineage)
        if run_spec.given_model is not None and not run_spec.resume:
            save_model(run_spec.given_model, cleared(self.path / INITIAL))
        self.run_id, self.frozen = run_spec.run_id, tuple(run_spec.frozen_one_by_one)
        if self.frozen and not run_spec.resume:
            write(self.path / FROZEN, json_of_frozen(run_spec))
        self._log(f"run {run_spec.run_id} {'resumes' if run_spec.resume else 'begins'}")
        if self.complete:
            rounds = run_spec.experiment.federation.rounds
            self._log(f"the run was complete, and is made longer: federation.rounds={rounds}")
        if why:
            self._log(f"engine.backend=auto is {backend}: {why}")
        if not self.locked:
            self._log("the file system of this folder has no locks: nothing keeps a second process out of it")

    def record(self, record: Record) -> None:
        self.rows.replace(record)
        self._log(" ".join(f"{name}={value:.6g}" for name, value in record.items()))

    def resumed(self, records: list[Record]) -> None:
        """The checkpoint is sound and fits: now the folder is that of an unfinished run with this configuration."""
        (self.path / "result.json").unlink(missing_ok=True)
        write(self.path / "config.yaml", self.config)
        self.rows = History(records)

    def event(self, text: str) -> None:
        self._log(text)

    def end(self, result: Result) -> None:
        """Write the result: all files under temporary names first, then each gets its name.

        Raises NotSaved if that fails; the message says where the result is kept instead.
        """
        release(self.path)
        try:
            self._write_result(self.path, result)
            for name in RESULT:
                if temporary_path(self.path / name).exists():
                    temporary_path(self.path / name).replace(self.path / name)
        except Exception as error:  # safetensors and pyarrow wrap the system's errors in their own
            raise NotSaved(self._keep_elsewhere(result, error)) from error
        if result.best is None:
            (self.path / BEST).unlink(missing_ok=True)  # an earlier part of the run had another checkpoint.best
        for folder in self._other_folders():
            shutil.rmtree(folder, ignore_errors=True)
        self._log("finished")

    def _write_result(self, folder: Path, result: Result) -> None:
        self._write_rounds(cleared(temporary_path(folder / "rounds.parquet")))
        save_model(result.model, cleared(temporary_path(folder / "model.safetensors")), self.frozen)
        best = temporary_path(folder / BEST)
        best.unlink(missing_ok=True)
        if result.best is not None:
            write(best, result.best.saved(self.frozen))
        write(temporary_path(folder / "result.json"), json.dumps(result.summary(), indent=2) + "\n")

    def _keep_elsewhere(self, result: Result, error: Exception) -> str:
        """Keep a result that could not be written in another place, where `kept_result` finds it. Returns a message."""
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        for folder in (self.path, *self._other_folders()):
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if not is_own(folder):
                    continue
                self._write_result(folder, result)
            except Exception:
                for name in RESULT:
                    temporary_path(folder / name).unlink(missing_ok=True)
                continue
            return (
                f"the run is over, and its result could not be written to {self.path} ({why}); it is kept in {folder}, "
                f"in {', '.join(temporary_path(Path(name)).name for name in RESULT)}: make room, or take away what is "
                f"in the way, and `fedfleet resume {self.path}` puts it in its place"
            )
        rounds = checkpointed_rounds(self.path)
        how = f"`fedfleet resume {self.path}` goes on after {name_of(rounds[-1])}" if rounds else "run it again"
        return (
            f"the run is over, and its result could be written neither to {self.path} ({why}) nor to "
            f"{tempfile.gettempdir()}; make room, and {how}"
        )

    def _other_folders(self) -> list[Path]:
        """Other folders where a result may be kept."""
        return [Path(tempfile.gettempdir()) / f"fedfleet-{self.run_id}-result"] if self.run_id else []

    def kept_result(self, run_spec: RunSpec) -> SavedResult | None:
        """The result that an earlier process kept, if it has the number of rounds of this run; else None."""
        for folder in filter(is_own, (self.path, *self._other_folders())):
            try:
                kept = read_result(folder, temporary_path)
            except Exception:  # not there, or not whole
                continue
            complete = kept.summary["model_sha256"] == model_digest(kept.outcome.model)
            ended = len(kept.rows) == run_spec.last_round or bool(kept.outcome.stopped)
            if complete and kept.summary["run_id"] == self.run_id and ended:
                return kept
        return None

    def failed(self, error: BaseException) -> None:
        """Log the error and write the rounds, as far as possible. It raises nothing: the disk may be full."""
        if self.path.is_dir():
            cause = error.__cause__ if isinstance(error, FedFleetError) else error
            trace = f"\n{full_traceback(cause)}" if cause is not None else ""
            stopped = isinstance(error, Interrupted)
            self._log(f"stopped: {error}" if stopped else f"failed: {type(error).__name__}: {error}{trace}")
            with suppress(Exception):  # there may be no memory left to write with, either
                if self.rows:
                    self._write_rounds(cleared(self.path / PARTIAL))
                    (self.path / PARTIAL).replace(self.path / "rounds.parquet")
            with suppress(OSError):
                (self.path / PARTIAL).unlink(missing_ok=True)  # something may be in the way of its name

    def _write_rounds(self, path: Path) -> None:
        import pyarrow.parquet as pq

        from ..records.parquet import to_table

        pq.write_table(to_table(self.rows), path)

    def _log(self, line: str) -> None:
        log_line(self.path, line)


def log_line(folder: Path, line: str) -> None:
    """Add a line to the log in the folder of a run. On a full disk the line is lost, and the run goes on."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with suppress(OSError), os.fdopen(open_plain(folder / "run.log", flags), "a") as log:
        log.write(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} {line}\n")


def is_own(folder: Path) -> bool:
    """Whether `folder` is a folder that belongs to this user: in the temporary folder, any user may make one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def json_of_frozen(run_spec: RunSpec) -> str:
    """The content of frozen.json."""
    return json.dumps(run_spec.frozen_facts, indent=2) + "\n"


def clear(path: Path) -> None:
    """Remove the whole folder of a run that is to start again. Raises InUse if a process runs in it."""
    if path.exists():
        with exclusive(path, LAUNCHER):
            shutil.rmtree(path)


def refuse_run(path: Path) -> None:
    """Raise ConfigError if the folder holds a run, a study or a search, or files that a run would overwrite."""
    refuse_other_kind(path, "run")
    if (path / "config.yaml").exists():
        raise ConfigError(f"--out {path} already holds a run; choose another folder, remove it, or resume it")
    for name in (*FILES, *FOLDERS):
        if os.path.lexists(path / name):
            raise ConfigError(f"--out {path} already holds {name}, which a run writes; choose another folder")


def refuse_result(path: Path) -> None:
    if (path / "result.json").is_file():
        raise ConfigError(f"{path}: the run is complete; to make it longer: fedfleet resume {path} federation.rounds=N")


def read_run_id(path: Path) -> str:
    """The run's id in run.json. Raises ConfigError if the file is damaged, because the id is used in paths."""
    file = path / "run.json"
    try:
        found = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        wrong = first_line(error)
    else:
        run_id = found.get("run_id") if isinstance(found, dict) else None
        if isinstance(run_id, str) and RUN_ID.fullmatch(run_id):
            return run_id
        wrong = "it holds no valid run_id"
    raise ConfigError(
        f'{file} is damaged ({wrong}); write {{"run_id": "ID"}} into it, with the id in the first line of run.log'
    )
