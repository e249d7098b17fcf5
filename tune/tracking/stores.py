"""MLflow stores: their addresses, and opening one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...engine.errors import ConfigError
from ...engine.storage.secrets import redacted

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Unless the environment says otherwise: an absent server is given up after seconds (MLflow's own: minutes), `--json`
has its line for itself, and a run talks to no server but the user's."""

STORES = r"sqlite(\+\w+)?:///.+|https?://[^/].*|(postgresql|mysql|mssql)(\+\w+)?://.+|databricks(-uc)?(://.*)?"


SECONDS = 10.0
"""That a run waits, when it is over, for a store that has not been opened yet."""


def store(uri: str) -> str:
    """The store's URI; "auto" is a SQLite file in the current folder."""
    if uri == "auto":
        return f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    if not re.fullmatch(STORES, uri):
        raise ConfigError(
            f"tracking.uri must be auto, none, sqlite:///… or a server's http(s)://…, got {redacted(uri)!r}"
        )
    return uri


def load_mlflow() -> None:
    """Import MLflow, which takes seconds, with its loggers quiet."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def open_store(uri: str, experiment: str) -> tuple[Any, str]:
    """(client, the experiment's id)."""
    from mlflow import MlflowClient

    check_database(uri)
    with one_at_a_time(uri):
        make_database(uri)
        client = MlflowClient(uri)
        return client, experiment_id(client, experiment, uri)


def check_database(uri: str) -> None:
    """OSError where a SQLite store cannot be opened or made. MLflow would try for minutes."""
    import sqlite3

    from ...engine.config.limits import check_folder

    if not uri.startswith("sqlite"):
        return
    file = Path(uri.partition("///")[2])
    if not file.exists():
        check_folder("tracking.uri", file.parent)
        return
    if not file.is_file():
        raise OSError(f"tracking.uri: {file} is no file, so it cannot be a store; give another")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=SECONDS)) as store:
            store.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise OSError(
            f"tracking.uri: {file} cannot be opened as a store ({error}), got {uri!r}; give another"
        ) from error


def make_database(uri: str) -> None:
    """A SQLite store, where there is none yet: made beside, moved into place when complete. MLflow makes its tables one
    by one and cannot go on where a kill stopped it."""
    from mlflow import MlflowClient

    file = Path(uri.partition("///")[2])
    if not uri.startswith("sqlite") or file.exists() or not file.parent.is_dir():
        return
    beside = file.with_name(f".{file.name}.new")
    beside.unlink(missing_ok=True)
    MlflowClient(f"{uri.partition('///')[0]}///{beside}").search_experiments(max_results=1)
    beside.replace(file)


@contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """The first use of a SQLite store creates its tables, and MLflow lets two processes try at once: both break."""
    if not uri.startswith("sqlite"):
        yield
        return
    import fcntl

    database = Path(uri.partition("///")[2]).resolve()
    folder = os.open(next(path for path in database.parents if path.is_dir()), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # a folder can be locked: there is no file to leave behind
        yield
    finally:
        os.close(folder)


def experiment_id(client: Any, name: str, uri: str) -> str:
    """The experiment's id, made if it is new; a local store keeps artifacts beside its database."""
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None:
        return known.experiment_id
    beside = None
    if uri.startswith("sqlite:///"):
        folder = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / re.sub(r"[^\w-]+", "_", name)
        beside = folder.resolve().as_uri()
    try:
        return client.create_experiment(name, artifact_location=beside)
    except MlflowException:  # another process was quicker
        known = client.get_experiment_by_name(name)
        if known is None:
            raise
        return known.experiment_id
