"""Addresses of MLflow stores, and opening a store."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...engine.errors import ConfigError
from ...engine.storage.expanded import cache_folder, check_folder
from ...engine.storage.secrets import redacted

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables for MLflow, unless they are set already.

A server that does not answer is given up after seconds (MLflow's defaults: minutes), nothing is printed between the
lines of `--json`, and no other server than the user's is contacted.
"""

STORES = r"sqlite(\+\w+)?:///.+|https?://[^/].*|(postgresql|mysql|mssql)(\+\w+)?://.+|databricks(-uc)?(://.*)?"
"""Regular expression of the addresses that MLflow accepts."""

FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"
"""MLflow's environment variable that allows its old store of plain files, file:///…."""

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment that makes MLflow's pages open its training runs, not its page for language models."""

SECONDS = 10.0
"""How long a run that is over waits for a store that has not been opened yet."""


def store(uri: str) -> str:
    """The URI of the store; "auto" stands for a SQLite file in the current folder. Raises ConfigError."""
    if uri == "auto":
        return f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    if uri.startswith("file:///") and os.environ.get(FILE_STORE, "").lower() in ("1", "true"):
        return uri
    if not re.fullmatch(STORES, uri):
        raise ConfigError(
            f"tracking.uri must be auto, none, sqlite:///… or a server's http(s)://…, got {redacted(uri)!r}"
        )
    return uri


def load_mlflow() -> Any:
    """The module mlflow, whose import takes seconds, with silent loggers."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return mlflow


def open_store(uri: str, experiment: str) -> tuple[Any, str]:
    """(client of the store, id of the experiment)."""
    check_database(uri)
    with one_at_a_time(uri):
        make_database(uri)
        client = load_mlflow().MlflowClient(uri)
        return client, experiment_id(client, experiment, uri)


def check_database(uri: str) -> None:
    """Raise OSError for a SQLite store that cannot be opened or created. MLflow would try for minutes."""
    if not uri.startswith("sqlite"):
        return
    file = Path(uri.partition("///")[2])
    if not file.exists():
        check_folder("tracking.uri", file.parent)
        return
    if not file.is_file():
        raise OSError(f"tracking.uri: {file} is not a file, so it cannot be a store; give another address")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=SECONDS)) as store:
            store.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise OSError(
            f"tracking.uri: {file} cannot be opened as a store ({error}), got {uri!r}; give another address"
        ) from error


def make_database(uri: str) -> None:
    """Create a SQLite store, unless it exists. It is created under another name and renamed when it is complete, since
    MLflow creates its tables one by one and cannot continue after a kill. As this takes more than a second of processor
    time, an empty store of the same version of MLflow is kept in the cache folder and copied."""
    file = Path(uri.partition("///")[2])
    if not uri.startswith("sqlite") or file.exists() or not file.parent.is_dir():
        return
    new_file = file.with_name(f".{file.name}.new")
    empty = empty_store()
    if not empty.is_file() or not copied(empty, new_file):
        create_tables(new_file)
        keep_empty(new_file, empty)
    new_file.replace(file)


def empty_store() -> Path:
    """The file in the cache folder for an empty store of this version of MLflow; it need not exist."""
    return cache_folder() / "mlflow" / f"{load_mlflow().__version__}.db"


def create_tables(file: Path) -> None:
    """Have MLflow create the tables of a new store."""
    file.unlink(missing_ok=True)
    load_mlflow().MlflowClient(f"sqlite:///{file}").search_experiments(max_results=1)


def keep_empty(file: Path, empty: Path) -> None:
    """Keep a copy of a new store, without the experiment Default, which MLflow creates again with the folder of its
    store. A cache folder that cannot be written to costs the time of the next store and is no error."""
    try:
        empty.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=empty.parent) as temporary:
            made = Path(temporary) / empty.name
            if copied(file, made):
                with closing(sqlite3.connect(made)) as store:
                    store.execute("DELETE FROM experiments")
                    store.commit()
                made.replace(empty)
    except (OSError, sqlite3.Error):
        pass


def copied(file: Path, target: Path) -> bool:
    """Copy a SQLite file; returns whether it is a sound one."""
    target.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as old:
            sound = old.execute("PRAGMA quick_check").fetchone() == ("ok",)
            with closing(sqlite3.connect(target)) as new:
                old.backup(new)
    except sqlite3.Error:
        return False
    return sound


@contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """Let one process at a time open a SQLite store. The first use creates the tables, and two processes that try this
    at the same time both fail in MLflow."""
    if not uri.startswith("sqlite"):
        yield
        return
    database = Path(uri.partition("///")[2]).resolve()
    folder = os.open(next(path for path in database.parents if path.is_dir()), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # locking the folder leaves no lock file behind
        yield
    finally:
        os.close(folder)


def experiment_id(client: Any, name: str, uri: str) -> str:
    """The id of the experiment, which is created if it is new. A local store keeps artifacts beside its database."""
    known = client.get_experiment_by_name(name)
    if known is not None:
        if not KIND.keys() & known.tags.keys():
            client.set_experiment_tag(known.experiment_id, *next(iter(KIND.items())))
        return known.experiment_id
    artifacts = None
    if uri.startswith("sqlite:///"):
        folder = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / re.sub(r"[^\w-]+", "_", name)
        artifacts = folder.resolve().as_uri()
    try:
        return client.create_experiment(name, artifact_location=artifacts, tags=KIND)
    except load_mlflow().exceptions.MlflowException:  # another process has created it
        known = client.get_experiment_by_name(name)
        if known is None:
            raise
        return known.experiment_id
