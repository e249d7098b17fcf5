"""Oort, client by client in plain Python, from its description: the draw of one round after the other.

The random numbers are those of the engine: a number for each client in each race, and uniform choices of some clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Uniform = Callable[[str, int, int], float]
"""(purpose, client, round) -> a number in [0, 1)."""
Choice = Callable[[str, int, Sequence[int], int], list[int]]
"""(purpose, round, clients, count) -> `count` of these clients."""


@dataclass
class Settings:
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
    impute: bool = False


@dataclass
class Reference:
    """The server's side of Oort. size: how many clients are wanted. full: the examples of a whole visit by client."""

    settings: Settings
    size: int
    full: list[int]
    uniform: Uniform
    choice: Choice
    utility: dict[int, float] = field(default_factory=dict)  # of the clients that were met
    last: dict[int, int] = field(default_factory=dict)  # round of their last feedback
    exploited: list[int] = field(default_factory=list)
    explored: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # in the last round
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.share, self.percentile = self.settings.explore, self.settings.percentile

    def draw(self, number: int, eligible: Sequence[int], durations: Sequence[float]) -> list[int]:
        """The clients of a round, ascending."""
        s = self.settings
        wanted = min(self.size, len(eligible))
        if number == 1:
            return sorted(self.choice("cohort", number, eligible, wanted))
        self.pace(number)
        preferred = math.inf
        if self.percentile < 100:
            rank = min(math.floor(len(durations) * self.percentile / 100), len(durations) - 1)
            preferred = sorted(durations)[rank]

        def slowed(value: float, client: int) -> float:
            return value * (preferred / durations[client]) ** s.penalty if durations[client] > preferred else value

        utilities = [self.utility.get(client, float(self.full[client])) for client in eligible]
        utilities = [utility for utility in utilities if utility > 0]
        cap = sorted(utilities)[min(math.floor(len(utilities) * s.clip), len(utilities) - 1)]
        low = 0.999 * min(utilities)
        width = max(max(utilities) - low, 1e-4)
        met = [client for client in eligible if client in self.last]
        score = {}
        for client in met:
            value = (min(self.utility[client], cap) - low) / width
            value += math.sqrt(0.1 * math.log(number) / self.last[client])
            score[client] = abs(slowed(value, client))

        self.share = max(self.share * s.explore_decay, s.explore_least)
        exploit = min(wanted - math.floor(wanted * self.share), len(met))
        best = sorted(met, key=lambda client: (-score[client], client))
        self.exploited = []
        if exploit:
            limit = s.cut * score[best[min(exploit, len(met) - 1)]]
            least = max(exploit, 10 * exploit + 1 if s.wide else 0)
            pool = [client for rank, client in enumerate(best) if score[client] >= limit or rank < least]
            self.exploited = self.race("exploit", number, pool, score, exploit)

        new = [client for client in eligible if client not in self.last]
        explore = min(len(new), wanted - exploit)
        rate = {client: slowed(float(self.full[client]), client) for client in new}
        ranked = sorted(new, key=lambda client: (-rate[client], client))[: math.floor(s.among * explore)]
        self.explored = self.race("explore", number, ranked, rate, explore)
        drawn = [*self.exploited, *self.explored]
        others = [client for client in eligible if client not in drawn]
        if len(drawn) < wanted:
            drawn += self.choice("rest", number, others, wanted - len(drawn))
        return sorted(drawn)

    def race(self, purpose: str, number: int, clients: list[int], rate: dict[int, float], count: int) -> list[int]:
        times = {i: -math.log1p(-self.uniform(purpose, i, number)) / rate[i] for i in clients}
        return sorted(clients, key=lambda client: (times[client], client))[:count]

    def pace(self, number: int) -> None:
        s = self.settings
        those = [client for client in self.exploited if client in self.used]
        self.history.append(sum(self.utility[client] for client in those) / (len(those) + 1e-4))
        if number >= 2 * s.window and number % s.window == 0:
            before, now = sum(self.history[-2 * s.window : -s.window]), sum(self.history[-s.window :])
            if abs(now - before) <= 0.1 * before:
                self.percentile = min(100, self.percentile + s.step)
            elif abs(now - before) >= 5 * before:
                self.percentile = max(s.step, self.percentile - s.step)

    def told(self, number: int, loss: dict[int, float], late: Sequence[int]) -> None:
        """loss: of the clients that were used, the value that stands for the loss of one of their examples. late: the
        clients that were drawn and cut off."""
        self.used = set(loss)
        for client, value in loss.items():
            self.utility[client], self.last[client] = self.full[client] * value, number
        if self.settings.impute and loss:
            mean = sum(self.utility[client] for client in loss) / len(loss)
            for client in late:
                if client in self.explored:
                    self.utility[client], self.last[client] = mean, number


def root_mean_square(steps: Sequence[Sequence[float]]) -> float:
    """Of the losses of all examples of all local steps of a visit."""
    losses = [loss for step in steps for loss in step]
    return math.sqrt(sum(loss**2 for loss in losses) / len(losses))
