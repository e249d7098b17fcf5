"""The trials in Optuna's storage, which is the truth: what was proposed, what was reported, how it ended.

Tune only executes. A search that is killed is gone on with from the storage alone: trials that had not ended are run
again under their own numbers, with their own values.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import ConfigError
from ...engine.storage.secrets import redacted
from .plan import Plan, starts

LOCKED_SECONDS = 60
"""What SQLite may wait for a reader, such as a dashboard."""

ENDED = {"finished": "COMPLETE", "pruned": "PRUNED", "diverged": "PRUNED", "failed": "FAIL"}
"""How a trial ended -> Optuna's state. Diverged ones count as pruned, so that TPE learns to keep away from them."""


class Proposal(NamedTuple):
    number: int
    values: dict[str, Any]  # by dotted key


class Trial(NamedTuple):
    """One trial of a search. `status`: running, finished, pruned, diverged or failed; `value`: of the objectives, in
    their order, or () ; `reason`: of a failure."""

    number: int
    status: str
    params: dict[str, Any]
    values: tuple[float, ...]
    rounds: int
    reason: str = ""


class Ledger:
    def __init__(self, plan: Plan, url: str, name: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.plan, self.optuna = plan, optuna
        self.storage = open_storage(url)
        self.study = self._study(name)
        for point in starts(plan):
            self.study.enqueue_trial(point, skip_if_exists=True)
        self.ids = {t.number: t._trial_id for t in self._all() if t.state.name != "WAITING"}
        self.unfinished = [t.number for t in self._all() if t.state.name == "RUNNING"]

    def _study(self, name: str) -> Any:
        from .samplers import sampler

        study = self.optuna.create_study(
            study_name=name,
            storage=self.storage,
            sampler=sampler(self.plan),
            pruner=pruner(self.plan),
            directions=self.plan.directions,
            load_if_exists=True,
        )
        if [MODES[d.name] for d in study.directions] != list(self.plan.settings.objectives.values()):
            raise ConfigError(
                f"search.study: the study {name} in this storage has other objectives; choose another name"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(self.plan.settings.objectives))  # for dashboards
        return study

    def _all(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    # --- proposals ------------------------------------------------------------------------------------------------
    def propose(self) -> Proposal | None:
        """What to run next: first what had not ended, then something new, None where there are enough."""
        if self.unfinished:
            number = self.unfinished.pop(0)
            trial = self.optuna.trial.Trial(self.study, self.ids[number])
        elif len(self.ids) < self.plan.trials:
            trial = self.study.ask()
            self.ids[trial.number] = trial._trial_id
        else:
            return None
        return Proposal(trial.number, {r.key: r.suggest(trial) for r in self.plan.ranges})

    def open(self) -> bool:
        """Whether there is a trial left to run."""
        return bool(self.unfinished) or len(self.ids) < self.plan.trials

    # --- reports --------------------------------------------------------------------------------------------------
    def report(self, number: int, round: int, value: float) -> bool:
        """Record the value after a round; whether the trial should end here."""
        self.storage.set_trial_intermediate_value(self.ids[number], round, value)
        return bool(self.study.pruner.prune(self.study, self.storage.get_trial(self.ids[number])))

    def end(self, number: int, status: str, values: list[float], facts: dict[str, Any]) -> None:
        """facts: kept with the trial."""
        for key, value in {"status": status, **facts}.items():
            self.storage.set_trial_user_attr(self.ids[number], key, value)
        state = self.optuna.trial.TrialState[ENDED[status]]
        self.study.tell(number, values if status == "finished" else None, state=state)

    # --- what there is --------------------------------------------------------------------------------------------
    def trials(self) -> list[Trial]:
        """All that have begun, in the order of their numbers."""
        return [self._seen(t) for t in self._all() if t.state.name != "WAITING"]

    def best(self) -> list[Trial]:
        """The one best trial, or the Pareto front; empty where none finished."""
        if not any(t.status == "finished" for t in self.trials()):
            return []
        found = self.study.best_trials if len(self.plan.directions) > 1 else [self.study.best_trial]
        return [self._seen(t) for t in found]

    def _seen(self, trial: Any) -> Trial:
        by_key = {r.key: r for r in self.plan.ranges}
        params = {k: by_key[k].coded[v] if by_key[k].listed else v for k, v in trial.params.items()}
        attrs = trial.user_attrs
        values = tuple(trial.values or ()) if trial.state.name == "COMPLETE" else ()
        rounds = int(attrs.get("rounds", trial.last_step or 0))
        return Trial(trial.number, attrs.get("status", "running"), params, values, rounds, attrs.get("reason", ""))


MODES = {"MINIMIZE": "min", "MAXIMIZE": "max"}


def pruner(plan: Plan) -> Any:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    grace = plan.settings.grace
    if plan.settings.pruner == "asha":
        return SuccessiveHalvingPruner(min_resource=grace, reduction_factor=plan.settings.reduction)
    if plan.settings.pruner == "median":
        return MedianPruner(n_warmup_steps=grace)
    return NopPruner()


def storage_url(asked: str, folder: Path) -> str:
    return f"sqlite:///{folder.resolve() / 'search.db'}" if asked == "auto" else asked


def open_storage(url: str) -> Any:
    """Optuna's storage at a URL; ConfigError where there is none."""
    from optuna.storages import RDBStorage, get_storage

    logging.getLogger("alembic").setLevel(logging.ERROR)
    waits = {"connect_args": {"timeout": LOCKED_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return get_storage(RDBStorage(url, engine_kwargs=waits))
    except Exception as error:  # of SQLAlchemy, of a database's driver that is missing, of Optuna's versions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"search.storage: {redacted(url)} cannot be opened: {redacted(reason)}; give auto or a database's URL"
        ) from None
