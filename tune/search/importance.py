"""How much each range of a search matters, by PED-ANOVA (Watanabe, Bansal, Hutter 2023, arXiv:2304.10255) of Optuna."""

from __future__ import annotations

import warnings

import optuna
from optuna.distributions import BaseDistribution

from ..ranges import code
from .optuna_storage import distribution
from .plan import SearchPlan
from .trial_store import Trial

LEAST_TRIALS = 8
"""The number of finished trials below which importances would be mere chance."""


def may_have_importances(plan: SearchPlan) -> bool:
    """Whether the search has enough ranges, and will have enough trials, for importances."""
    return len(plan.ranges) > 1 and plan.trials >= LEAST_TRIALS


def importances(plan: SearchPlan, trials: list[Trial]) -> dict[str, dict[str, float]]:
    """Objective -> key of a range -> its share of the importance, from 0 to 1; {} for fewer than two ranges or
    LEAST_TRIALS finished trials.

    PED-ANOVA compares where the best tenth of the trials lies with where all of them lie. It needs no model of the
    objective, and no random numbers.
    """
    done = [trial for trial in trials if trial.values]
    if len(plan.ranges) < 2 or len(done) < LEAST_TRIALS:
        return {}
    spaces: dict[str, BaseDistribution] = {one.key: distribution(one) for one in plan.ranges}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        for at, (name, direction) in enumerate(zip(plan.settings.objectives, plan.directions, strict=True)):
            study = optuna.create_study(direction=optuna.study.StudyDirection[direction.upper()])
            for trial in done:
                params = {key: code(trial.params[key]) for key in spaces}
                study.add_trial(optuna.trial.create_trial(value=trial.values[at], params=params, distributions=spaces))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found[name] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return found
