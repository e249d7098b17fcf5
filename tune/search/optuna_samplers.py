"""The samplers, which propose values. A proposal depends only on the seed, the trial's number and the earlier trials,
so a search that is killed and resumed makes the same proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ..ranges import code, points
from .plan import SearchPlan

Space = dict[str, BaseDistribution]


def sampler(plan: SearchPlan) -> BaseSampler:
    """The sampler for a plan."""
    if plan.sampler == "grid":
        return Grid([{key: code(value) for key, value in point.items()} for point in points(plan.ranges)])
    if plan.sampler == "cmaes":
        return Numbered(CmaEs, plan.settings.seed)
    if plan.sampler == "random":
        return Numbered(lambda seed: RandomSampler(seed=seed), plan.settings.seed)
    startup = min(10, max(4, plan.trials // 4))  # Optuna's default of 10 is half of a search of 20
    return Numbered(lambda seed: TPESampler(seed=seed, n_startup_trials=startup), plan.settings.seed)


class Numbered(BaseSampler):
    """A sampler that makes a new inner sampler for each trial, seeded by the trial's number."""

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self.make, self.seed = make, seed
        self.number, self.inner = -1, make(seed)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number != self.number:
            state = np.random.SeedSequence([self.seed, trial.number]).generate_state(1)
            self.number, self.inner = trial.number, self.make(int(state[0]) % 2**31)
        return self.inner

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self._of(trial).sample_independent(study, trial, name, distribution)


class Grid(BaseSampler):
    """Trial n tries point n, so no point is tried twice and no state is needed."""

    def __init__(self, points: Iterable[dict[str, Any]]) -> None:
        self.points = list(points)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self.points[trial.number % len(self.points)][name]


class CmaEs(BaseSampler):
    """CMA-ES over the ranges of numbers; values of lists are drawn at random.

    For each proposal, the optimiser is built again from the trials that have ended, one population after the other in
    the order in which they ended. Optuna's own sampler keeps the optimiser in the storage as a pickle, and reading a
    pickle may run code.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        """The ranges of numbers, taken from the first trial that has ended; {} before that."""
        for past in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            shown = past.distributions.items()
            return {name: d for name, d in sorted(shown) if not isinstance(d, CategoricalDistribution)}
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        if len(search_space) < 2:
            return {}
        from cmaes import CMA  # it loads SciPy

        size = len(search_space)
        box = np.repeat([[0.0, 1.0]], size, axis=0)
        optimiser = CMA(mean=np.full(size, 0.5), sigma=1 / 6, bounds=box, seed=self.seed)
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        ended.sort(key=lambda t: (t.datetime_complete, t.number))
        observed = [(unit(t.params, search_space), sign * float(t.values[0])) for t in ended]
        each = optimiser.population_size
        for at in range(0, len(observed) - each + 1, each):
            optimiser.tell(observed[at : at + each])
        return named(optimiser.ask(), search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self.random.sample_independent(study, trial, name, distribution)


def unit(values: dict[str, Any], space: Space) -> np.ndarray:
    """(n,) in [0, 1]: the position of each value in its range, on a logarithmic scale if the range has one."""
    return np.array([(scaled(values[k], d) - ends(d)[0]) / (ends(d)[1] - ends(d)[0]) for k, d in space.items()])


def named(point: np.ndarray, space: Space) -> dict[str, Any]:
    """The values at a point of [0, 1]^n, rounded to the steps of the ranges."""
    found = {}
    for (key, d), u in zip(space.items(), point, strict=True):
        low, high = ends(d)
        value = low + float(u) * (high - low)
        value = float(np.exp(value)) if d.log else value  # type: ignore[attr-defined]
        if d.step:  # type: ignore[attr-defined]
            value = d.low + round((value - d.low) / d.step) * d.step  # type: ignore[attr-defined]
        value = min(max(value, d.low), d.high)  # type: ignore[attr-defined]
        found[key] = value if isinstance(d, FloatDistribution) else int(value)
    return found


def scaled(value: float, distribution: Any) -> float:
    return float(np.log(value)) if distribution.log else float(value)


def ends(distribution: Any) -> tuple[float, float]:
    return scaled(distribution.low, distribution), scaled(distribution.high, distribution)
