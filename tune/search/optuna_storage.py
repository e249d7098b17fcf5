"""Optuna's storage of a search: its address, how it is opened, and how it describes ranges."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from optuna import Trial
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage, get_storage

from ...engine.errors import ConfigError, first_line
from ...engine.storage.secrets import redacted
from ..ranges import Range

LOCKED_SECONDS = 60
"""How long SQLite waits for a reader, such as a dashboard."""


def storage_url(asked: str, folder: Path) -> str:
    """The URL of the storage. asked: the setting, a URL or auto."""
    return f"sqlite:///{folder.resolve() / 'search.db'}" if asked == "auto" else asked


def open_storage(url: str) -> Any:
    """Optuna's storage at a URL; ConfigError if it cannot be opened."""
    logging.getLogger("alembic").setLevel(logging.ERROR)
    waits = {"connect_args": {"timeout": LOCKED_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return get_storage(RDBStorage(url, engine_kwargs=waits))
    except Exception as error:  # SQLAlchemy, a missing driver and Optuna raise different classes
        raise ConfigError(
            f"search.storage: {redacted(url)} cannot be opened: {redacted(first_line(error))}; give auto or the URL of "
            "a database"
        ) from None


def distribution(one: Range) -> CategoricalDistribution | FloatDistribution | IntDistribution:
    """A range as Optuna describes it."""
    if one.listed:
        return CategoricalDistribution(list(one.coded))
    low, high, step = one.spec["low"], one.spec["high"], one.spec.get("step")
    if one.kind == "int":
        return IntDistribution(low, high, log=one.spec.get("log", False), step=step or 1)
    return FloatDistribution(low, high, log=one.kind == "loguniform", step=step)


def suggested(one: Range, trial: Trial) -> Any:
    """The value of a range that Optuna's sampler proposes for a trial."""
    like = distribution(one)
    if isinstance(like, CategoricalDistribution):
        return one.coded[trial.suggest_categorical(one.key, like.choices)]
    if isinstance(like, IntDistribution):
        return trial.suggest_int(one.key, like.low, like.high, step=like.step, log=like.log)
    return trial.suggest_float(one.key, like.low, like.high, step=like.step, log=like.log)
