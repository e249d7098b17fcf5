"""The folder of a search: what it holds, and whether a search may begin or go on in it.

search.yaml, search.json    the plan, and the ids of the search
search.db                   Optuna's storage, unless the plan names another one
trials/NNNN/                the run of each trial
best.yaml, front/, result.json, report.html    the outcome
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, first_line
from ...engine.run_spec import RUN_ID
from ...engine.runs.prepare import new_run_id
from ...engine.runs.saved_files import refuse_other_kind, require_kind
from ...engine.storage.atomic_write import write
from ...engine.storage.plain_files import read_text
from ..files import read_yaml
from ..identity import effective_settings
from .plan import SearchPlan, plan

SAVED = "search.yaml"
KEPT = "search.json"
BEST = "best.yaml"
LOCK = ".search.lock"
PREPARED = (SAVED, KEPT, "search.db")
"""Files that are written before the first trial."""


def trial_folder(search: Path, number: int) -> Path:
    """The folder of a trial's run. search: the search's folder."""
    return search / "trials" / f"{number:04d}"


def load(folder: Path) -> SearchPlan:
    """The search that a folder holds."""
    require_kind(folder, "search")
    path = folder / SAVED
    data = read_yaml(path, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged ({data!r}); put the search's experiment back")
    return plan(data)


# --- its ids ----------------------------------------------------------------------------------------------------------
class SearchIds(NamedTuple):
    """The content of search.json. owns: whether the study bears the search's id; those of older searches may not."""

    search_id: str
    study: str
    owns: bool = False


def search_ids(folder: Path, wanted: SearchPlan) -> SearchIds:
    """The search's id and the name of its Optuna study; a resumed search keeps both."""
    path = folder / KEPT
    if path.is_file():
        return kept_ids(path)
    search_id = new_run_id()
    study = wanted.settings.study or f"{wanted.data.get('name') or 'search'}-{search_id}"
    kept = SearchIds(search_id, study, owns=True)
    write(path, json.dumps(kept._asdict()) + "\n")
    return kept


def kept_ids(path: Path) -> SearchIds:
    """The content of a search.json. Raises ConfigError if it is damaged."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        wrong = first_line(error)
    else:
        known = found if isinstance(found, dict) else {}
        search_id, study = known.get("search_id"), known.get("study")
        if isinstance(study, str) and study and isinstance(search_id, str) and RUN_ID.fullmatch(search_id):
            return SearchIds(search_id, study, known.get("owns") is True)
        wrong = "it names no search and its study"
    raise ConfigError(
        f'{path} is damaged ({wrong}); write {{"search_id": "ID", "study": "NAME"}} into it, as the search\'s storage '
        "has them"
    )


# --- whether a search may use it --------------------------------------------------------------------------------------
FREE = ("trials", "concurrent", "together", "workers", "keep_models")
"""Settings of a search that may change when it is resumed, beside those of the experiment that influence no number."""


def refuse(wanted: SearchPlan, folder: Path, resume: bool) -> None:
    """Raise ConfigError if the folder holds a search and it must not be resumed, or is a different one, or if it holds
    a run or a study."""
    there = (folder / SAVED).is_file()
    if not there:
        refuse_other_kind(folder, "search")
    if there and not resume:
        raise ConfigError(f"{folder} already holds a search; choose another folder, remove it, or resume it")
    if there:
        same(load(folder), wanted, folder)


def same(kept: SearchPlan, wanted: SearchPlan, folder: Path) -> None:
    """Raise ConfigError if the search in the folder differs from the wanted one in a setting that must not change."""
    old, new = settings_of_trials(kept), settings_of_trials(wanted)
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    before, now = (each.settings.model_dump(exclude=set(FREE)) for each in (kept, wanted))
    differing += [f"search.{key}" for key in now if before[key] != now[key]]
    if differing:
        raise ConfigError(f"the search in {folder} differs in {', '.join(differing)}; undo these changes")


def settings_of_trials(plan: SearchPlan) -> dict[str, Any]:
    """The settings that the values of trials may depend on, by dotted key. Settings that the data lack have their
    defaults, so that one may be written out."""
    defaults = Experiment(workload="", method="").plain()
    return {**effective_settings(defaults), **effective_settings(plan.data)}


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """On a ConfigError, remove the files PREPARED, except those that existed before."""
    missing = [folder / name for name in PREPARED if not (folder / name).exists()]
    try:
        yield
    except ConfigError:
        for path in missing:
            path.unlink(missing_ok=True)
        raise
