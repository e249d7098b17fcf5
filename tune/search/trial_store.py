"""The trials in Optuna's storage: the proposed values, the reported ones, and how each trial ended.

The storage is the only record of a search; the executor merely executes trials. A killed search is resumed from the
storage alone: trials that had not ended are run again, with the same numbers and values.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

from ...engine.errors import ConfigError
from .optuna_samplers import sampler
from .optuna_storage import open_storage, suggested
from .plan import INDEPENDENT, MODES_OF, SearchPlan, starts
from .warm_start import IMPORTED, earlier_trials, imported

ENDED = {"finished": "COMPLETE", "pruned": "PRUNED", "diverged": "PRUNED", "failed": "FAIL"}
"""How a trial ended -> Optuna's state. Diverged trials count as pruned, so that TPE learns to avoid their values."""


class Trial(NamedTuple):
    """One trial of a search. `status`: running, finished, pruned, diverged or failed; `params`: by dotted key;
    `values`: of the objectives, in their order, () unless finished; `reason`: of a failure."""

    number: int
    status: str
    params: dict[str, Any]
    values: tuple[float, ...]
    rounds: int
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.number:04d}"


OWNER = "fedfleet.search_id"
"""Attribute of a study in Optuna's storage: the id of the search whose trials it holds."""


class TrialStore:
    """A study of Optuna with the trials of one search."""

    def __init__(self, plan: SearchPlan, url: str, name: str, search_id: str = "", earlier: bool = False) -> None:
        """search_id: of the search that the study belongs to; "" opens a study of no search. earlier: whether the
        search began when studies did not bear ids; then a study without one is taken for its own."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.plan = plan
        self.storage = open_storage(url)
        self.study = self._study(name, search_id, earlier)
        self.study_id = self.storage.get_study_id_from_name(name)
        for point in starts(plan):
            self.study.enqueue_trial(point, skip_if_exists=True)
        self._warm_start()
        there = self._all()
        self.ids = {t.number: t._trial_id for t in there if t.state.name != "WAITING"}
        self.unfinished = [t.number for t in there if t.state.name == "RUNNING"]
        self.waiting = sum(t.state.name == "WAITING" for t in there)  # points to try first, as `starts` has them

    def _study(self, name: str, search_id: str, earlier: bool) -> Any:
        study = optuna.create_study(
            study_name=name,
            storage=self.storage,
            sampler=sampler(self.plan),
            pruner=pruner(self.plan),
            directions=self.plan.directions,
            load_if_exists=True,
        )
        owner = study.user_attrs.get(OWNER, "")
        if owner != search_id and (owner or (not earlier and study.get_trials(deepcopy=False))):
            raise ConfigError(
                f"search.study: the storage already has a study {name} of another search; choose another name, or give "
                f"its trials to this search by search.warm_start, as URL#{name}"
            )
        if [MODES_OF[d.name] for d in study.directions] != list(self.plan.settings.objectives.values()):
            raise ConfigError(
                f"search.study: the study {name} in this storage has other objectives; choose another name"
            )
        if owner != search_id:
            study.set_user_attr(OWNER, search_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(self.plan.settings.objectives))  # for dashboards
        return study

    def _warm_start(self) -> None:
        """Add the trials of earlier searches, unless a trial of this one has begun. A search that was killed while it
        added them adds the others."""
        if not self.plan.settings.warm_start or any(t.state.name != "WAITING" for t in self._all()):
            return
        there = {t.user_attrs[IMPORTED] for t in self.study.get_trials(deepcopy=False) if imported(t)}
        trials = list(earlier_trials(self.plan))  # all of them are checked before the first one is added
        for trial in trials:
            if trial.user_attrs[IMPORTED] not in there:
                self.study.add_trial(trial)

    def _all(self) -> list[Any]:
        """The trials of this search, without those of earlier ones."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if not imported(trial)]

    # --- proposals ------------------------------------------------------------------------------------------------
    def propose(self) -> Trial | None:
        """The next trial to run, with the values that the sampler proposes: first those that had not ended, then a new
        one; None when there are enough."""
        if self.unfinished:
            number = self.unfinished.pop(0)
            trial = optuna.trial.Trial(self.study, self.ids[number])
        elif len(self.ids) < self.plan.trials:
            trial = self._new_trial()
            self.ids[trial.number] = trial._trial_id
        else:
            return None
        return Trial(trial.number, "running", {one.key: suggested(one, trial) for one in self.plan.ranges}, (), 0)

    def _new_trial(self) -> Any:
        """A trial of Optuna that has just begun.

        `ask` reads all trials under way from the storage, to find one that waits and for samplers that learn from
        trials. It takes longer than all the rest where thousands are under way, and so is used only if it is needed.
        """
        if self.waiting == 0 and self.plan.sampler in INDEPENDENT:
            return optuna.trial.Trial(self.study, self.storage.create_new_trial(self.study_id))
        self.waiting = max(0, self.waiting - 1)
        return self.study.ask()

    @property
    def left(self) -> int:
        """The number of trials that are left to run."""
        return len(self.unfinished) + max(0, self.plan.trials - len(self.ids))

    # --- reports --------------------------------------------------------------------------------------------------
    def report(self, number: int, round: int, value: float) -> bool:
        """Record the objective's value after a round; returns whether the pruner ends the trial here."""
        self.storage.set_trial_intermediate_value(self.ids[number], round, value)
        if self.plan.settings.pruner == "none":
            return False
        return bool(self.study.pruner.prune(self.study, self.storage.get_trial(self.ids[number])))

    def end(self, number: int, status: str, values: list[float], facts: dict[str, Any]) -> None:
        """Record how a trial ended. facts: further attributes of the trial."""
        for key, value in {"status": status, **facts}.items():
            self.storage.set_trial_user_attr(self.ids[number], key, value)
        state = optuna.trial.TrialState[ENDED[status]]
        self.study.tell(number, values if status == "finished" else None, state=state)

    # --- what there is --------------------------------------------------------------------------------------------
    def trials(self) -> list[Trial]:
        """All trials that have begun, in the order of their numbers."""
        return [self._seen(t) for t in self._all() if t.state.name != "WAITING"]

    def trial(self, number: int) -> Trial:
        """A trial that has begun."""
        return self._seen(self.storage.get_trial(self.ids[number]))

    def reported(self) -> dict[int, dict[int, float]]:
        """Number of a trial -> round -> value of the objective after it. Empty with several objectives."""
        return {t.number: dict(t.intermediate_values) for t in self._all() if t.state.name != "WAITING"}

    def best(self) -> list[Trial]:
        """The best trial, or the Pareto front of several objectives, from the best in the first objective on; [] if no
        trial finished."""
        done = [t for t in self.trials() if t.status == "finished"]
        signs = [-1 if direction == "maximize" else 1 for direction in self.plan.directions]
        costs = [tuple(sign * value for sign, value in zip(signs, t.values, strict=True)) for t in done]
        if len(signs) == 1:
            return [done[costs.index(min(costs))]] if done else []
        front = [
            (cost[0], trial)
            for trial, cost in zip(done, costs, strict=True)
            if not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other in costs)
        ]
        return [trial for _, trial in sorted(front, key=lambda pair: pair[0])]

    def _seen(self, trial: Any) -> Trial:
        by_key = {r.key: r for r in self.plan.ranges}
        params = {k: by_key[k].coded[v] if by_key[k].listed else v for k, v in trial.params.items()}
        attrs = trial.user_attrs
        rounds = int(attrs.get("rounds", trial.last_step or 0))
        if not trial.state.is_finished():  # `end` writes the attributes first, and may be killed before the state
            return Trial(trial.number, "running", params, (), rounds)
        values = tuple(trial.values or ()) if trial.state.name == "COMPLETE" else ()
        return Trial(trial.number, attrs.get("status", "running"), params, values, rounds, attrs.get("reason", ""))


def pruner(plan: SearchPlan) -> BasePruner:
    """Optuna's pruner for the settings."""
    grace = plan.settings.grace
    if plan.settings.pruner == "asha":
        return SuccessiveHalvingPruner(min_resource=grace, reduction_factor=plan.settings.reduction)
    if plan.settings.pruner == "median":
        return MedianPruner(n_warmup_steps=grace)
    return NopPruner()
