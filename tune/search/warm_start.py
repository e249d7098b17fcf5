"""Warm starts: the finished trials of earlier searches, from which the sampler and the pruner of a new one learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna import get_all_study_names, load_study
from optuna.trial import TrialState, create_trial

from ...engine.errors import ConfigError, nearest
from ...engine.storage.secrets import redacted
from .folder import KEPT, kept_ids, load
from .optuna_storage import distribution, open_storage, storage_url
from .plan import MODES_OF, SearchPlan

KEY = "search.warm_start"

IMPORTED = "imported"
"""Attribute of a trial in Optuna's storage that comes from an earlier search. Its value says from which trial."""


def imported(trial: Any) -> bool:
    """Whether a trial of Optuna comes from an earlier search."""
    return IMPORTED in trial.user_attrs


def earlier_trials(plan: SearchPlan) -> Iterator[Any]:
    """The finished trials of the searches in `search.warm_start`, as trials of Optuna for the new study.

    Raises ConfigError for a search that cannot be read, or that has other ranges or objectives than the plan.
    """
    for source in plan.settings.warm_start:
        study = study_of(source)
        check_objectives(plan, study, redacted(source))
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if imported(trial):
                continue
            check_ranges(plan, trial.distributions, redacted(source))
            yield create_trial(
                state=TrialState.COMPLETE,
                values=trial.values,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={**trial.user_attrs, IMPORTED: f"{redacted(source)}, trial {trial.number}"},
                intermediate_values=trial.intermediate_values,
            )


def study_of(source: str) -> Any:
    """The study of Optuna in the folder of a search, or in a storage: URL, or URL#STUDY if it has several."""
    url, name = place_of(source)
    storage = opened(url)
    names = get_all_study_names(storage)
    if name and name not in names:
        raise ConfigError(f"{KEY}: {redacted(url)} has no study {name}; {nearest(name, names)}")
    if not name and len(names) != 1:
        there = ", ".join(names) or "none"
        raise ConfigError(f"{KEY}: {redacted(url)} has {len(names)} studies, {there}; write {redacted(url)}#STUDY")
    return load_study(study_name=name or names[0], storage=storage)


def place_of(source: str) -> tuple[str, str]:
    """(URL of the storage, name of the study or "")."""
    if "://" in source:
        url, _, name = source.partition("#")
        return url, name
    folder = Path(source)
    try:
        return storage_url(load(folder).settings.storage, folder), kept_ids(folder / KEPT).study
    except ConfigError:
        raise ConfigError(
            f"{KEY}: {source} holds no search; give the folder of one, or the URL of Optuna's storage"
        ) from None


def opened(url: str) -> Any:
    """The storage at a URL. Optuna would create a SQLite file that is not there."""
    file = url.partition("///")[2]
    if url.startswith("sqlite") and not Path(file).is_file():
        raise ConfigError(f"{KEY}: there is no file {file}; give the folder of a search, or the URL of a storage")
    return open_storage(url)


def check_objectives(plan: SearchPlan, study: Any, source: str) -> None:
    """Raise ConfigError if a study has other objectives than the plan, or other directions."""
    wanted, modes = plan.settings.objectives, [MODES_OF[d.name] for d in study.directions]
    names = study.metric_names or list(wanted)
    if names != list(wanted) or modes != list(wanted.values()):
        found = ", ".join(f"{name} ({mode})" for name, mode in zip(names, modes, strict=False))
        ours = ", ".join(f"{name} ({mode})" for name, mode in wanted.items())
        raise ConfigError(f"{KEY}: {source} searched for {found}, and this search is for {ours}; leave it out")


def check_ranges(plan: SearchPlan, theirs: dict[str, Any], source: str) -> None:
    """Raise ConfigError if the ranges of an earlier search are not those of the plan."""
    ours = {one.key: distribution(one) for one in plan.ranges}
    differ = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if differ:
        key = differ[0]
        raise ConfigError(
            f"{KEY}: {source} has other ranges, {key} is {theirs.get(key, 'none')} there and {ours.get(key, 'none')} "
            "here; give this search the same ranges, or leave it out"
        )
