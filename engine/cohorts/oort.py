"""Oort: clients with large losses that do not take long.

Lai et al., OSDI 2021, arXiv:2010.06081; the statements and constants follow the released code, as far as it does not
contradict itself. The utility of a client is its number of examples in a visit times the root mean square of the losses
of these examples, over the first gradients of all its local steps, as in the paper. The code overwrites this mean at
every step, so that only the last batch counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .samplers import NOBODY, Ask, Draw, Feedback, Sampler, State, race, uniform_draw

TINY = 1e-4


@dataclass(frozen=True)
class Oort(Sampler):
    """Clients with large losses and short durations, and some that were never drawn.

    utility: of an example, the root mean square of its losses (`rms`), which compiled chains cannot give, or the
    absolute value of their `mean`, for all kernels; impute: whether a client that was drawn for the first time and was
    cut off as a straggler gets the mean utility of the round, so that it counts as met; explore: the share of the
    cohort that is new, at first; explore_decay: the factor of this share in each round; explore_least: the smallest
    share; percentile: of the durations, up to which a client is fast, at first; step: how far the percentile moves;
    window: the rounds between two moves; penalty: the exponent of preferred duration over duration for slow clients;
    clip: the quantile at which utilities are cut off; cut: of the score of rank S, from which on clients are in the
    pool; wide: whether the pool has ten times as many clients at least; among: how many of the best new clients are in
    the draw for each that is wanted.
    """

    gives_spares: ClassVar[bool] = True
    has_probabilities: ClassVar[bool] = False

    utility: Literal["rms", "mean"] = "rms"
    impute: bool = False
    explore: float = 0.9
    explore_decay: float = 0.98
    explore_least: float = 0.2
    percentile: float = 30.0
    step: float = 5.0
    window: int = 20
    penalty: float = 2.0
    clip: float = 0.9
    cut: float = 0.7
    wide: bool = False
    among: float = 5.0

    def __post_init__(self) -> None:
        for name in ("explore", "explore_decay", "explore_least", "clip", "cut"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"0 <= {name} <= 1 must hold, got {value}; choose a share")
        if self.penalty < 0:
            raise ValueError(f"penalty >= 0 must hold, got {self.penalty}; choose 0 or more")
        if self.window < 1 or self.step <= 0 or self.among < 1 or not 0 < self.percentile <= 100:
            got = f"window={self.window}, step={self.step}, among={self.among}, percentile={self.percentile}"
            raise ValueError(f"window, among >= 1, step > 0 and 0 < percentile <= 100 must hold, got {got}; change one")

    @property
    def needs_rms(self) -> bool:
        return self.utility == "rms"

    def start(self, clients: int, cohort: int) -> State:
        return {
            "utility": np.zeros(clients),
            "last": np.zeros(clients, dtype=np.int64),  # round of the last feedback, 0 before the first
            "exploited": np.zeros(clients, dtype=bool),  # by the last draw
            "explored": np.zeros(clients, dtype=bool),  # by the last draw
            "explore": np.array([self.explore]),
            "percentile": np.array([self.percentile]),
            "history": np.zeros(0),  # mean utilities of the clients that were exploited, of the last 2 windows
        }

    def draw(self, state: State, ask: Ask) -> Draw:
        weights = np.ones(ask.clients)
        wanted = min(ask.size + ask.spares, len(ask.candidates))
        note = {name: np.zeros(ask.clients, dtype=bool) for name in ("exploited", "explored")}
        if ask.number == 1:
            return Draw(uniform_draw(ask, "cohort", ask.candidates, wanted), NOBODY, weights, note=note)
        history, percentile = self._paced(state, ask.number)
        share = max(float(state["explore"][0]) * self.explore_decay, self.explore_least)
        durations = ask.duration()
        preferred = np.inf
        if percentile < 100:
            preferred = np.sort(durations)[min(int(ask.clients * percentile / 100), ask.clients - 1)]
        slow = np.where(durations > preferred, (preferred / durations) ** self.penalty, 1.0)
        met = state["last"] > 0
        utility = np.where(met, state["utility"], np.minimum(ask.sizes, ask.steps * ask.batch))
        exploited = self._exploited(state, ask, utility, slow, wanted - int(wanted * share))
        new = ask.candidates[~met[ask.candidates]]
        count = min(len(new), wanted - len(exploited))
        scores = (utility * slow)[new]
        best = new[np.lexsort((new, -scores))[: max(count, int(self.among * count))]]
        explored = race(ask, "explore", best, (utility * slow)[best], count) if count else NOBODY
        chosen = np.sort(np.concatenate([exploited, explored]))
        rest = np.setdiff1d(ask.candidates, chosen, assume_unique=True)
        more = uniform_draw(ask, "rest", rest, wanted - len(chosen)) if len(chosen) < wanted else NOBODY
        note["exploited"][exploited] = note["explored"][explored] = True
        note |= {"explore": np.array([share]), "percentile": np.array([percentile]), "history": history}
        return Draw(np.sort(np.concatenate([chosen, more])), NOBODY, weights, note=note)

    def _paced(self, state: State, number: int) -> tuple[np.ndarray, float]:
        """(the history with the last draw's mean utility, the percentile of durations)."""
        used = state["exploited"] & (state["last"] == number - 1)
        mean = float(state["utility"][used].sum()) / (int(used.sum()) + TINY)
        history, percentile = np.append(state["history"], mean)[-2 * self.window :], float(state["percentile"][0])
        if number >= 2 * self.window and number % self.window == 0:
            before, now = history[: -self.window].sum(), history[-self.window :].sum()
            if abs(now - before) <= 0.1 * before:
                percentile = min(100.0, percentile + self.step)
            elif abs(now - before) >= 5 * before:
                percentile = max(self.step, percentile - self.step)
        return history, percentile

    def _exploited(self, state: State, ask: Ask, utility: np.ndarray, slow: np.ndarray, wanted: int) -> np.ndarray:
        """`wanted` of the clients that were met before, all of them if there are fewer.

        utility, slow: (N,) of every client, and what its score is multiplied by if it is slow."""
        old = ask.candidates[state["last"][ask.candidates] > 0]
        count = min(wanted, len(old))
        if not count:
            return NOBODY
        values = utility[ask.candidates]  # also of new clients, as in the code
        values = values[values > 0] if (values > 0).any() else np.zeros(1)
        most = np.sort(values)[min(int(len(values) * self.clip), len(values) - 1)]
        low = 0.999 * values.min()
        spread = max(values.max() - low, TINY)
        age = np.sqrt(0.1 * np.log(ask.number) / state["last"][old])
        scores = np.abs(((np.minimum(utility[old], most) - low) / spread + age) * slow[old])
        order = np.lexsort((old, -scores))
        ranked = scores[order]
        pool = int((ranked >= self.cut * ranked[min(count, len(old) - 1)]).sum())
        if self.wide:
            pool = max(pool, min(10 * count + 1, len(old)))
        pool = max(pool, count)
        return race(ask, "exploit", old[order[:pool]], np.maximum(ranked[:pool], TINY), count)

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        utility, last, used = state["utility"].copy(), state["last"].copy(), feedback.clients
        loss = feedback.rms if self.needs_rms else np.abs(feedback.loss)
        utility[used] = np.minimum(ask.sizes[used], ask.steps[used] * ask.batch) * loss
        last[used] = ask.number
        if self.impute and len(used):
            missed = feedback.late[draw.note["explored"][feedback.late]]
            utility[missed], last[missed] = utility[used].mean(), ask.number
        return {**state, **draw.note, "utility": utility, "last": last}
