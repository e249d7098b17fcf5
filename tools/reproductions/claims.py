"""Whether the cells support a claim. The verdict follows from the claim's criterion alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedfleet.tune.report.statistics import bootstrap, paired
from fedfleet.tune.units import is_share

from .inputs import (
    Chosen,
    Claim,
    Interval,
    Least,
    Listed,
    Near,
    NearBest,
    Order,
    Paper,
    Points,
    Rate,
    Rises,
    Sooner,
)
from .measured import SUMMARIES, Measured

REPRODUCED, NOT_REPRODUCED, TIE = "reproduced", "not reproduced", "not reproduced (tie)"
NOT_TRIED = "not tried"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, TIE, NOT_TRIED)


class Verdict(NamedTuple):
    """verdict: one of those above. criterion, evidence: in words."""

    verdict: str
    criterion: str = ""
    evidence: str = ""


class Study(NamedTuple):
    """A study with what its cells say, and the paper with which it is compared."""

    listed: Listed
    measured: Measured
    paper: Paper | None


def seeds_of(claim: Claim, studies: Mapping[str, Study]) -> str:
    """How many seeds decide a claim, "" if it was not tried."""
    some = [studies[folder].measured.study for folder in (claim.folder, claim.also) if folder]
    return str(min(len(study.seeds) for study in some)) if some else ""


def verdict(claim: Claim, studies: Mapping[str, Study]) -> Verdict:
    """The verdict on a claim. studies: folder -> study."""
    if claim.folder is None:
        return Verdict(NOT_TRIED)
    some = [studies[folder] for folder in (claim.folder, claim.also) if folder]
    criterion = claim.criteria[0]
    if isinstance(criterion, Order):
        return order(criterion, claim.level, some)
    if isinstance(criterion, Near):
        return near(criterion, claim.level, some)
    if isinstance(criterion, NearBest):
        return near_best(criterion, claim.level, some)
    if isinstance(criterion, Interval):
        return interval(criterion, claim.level, some)
    if isinstance(criterion, Least):
        return least(criterion, claim.level, some)
    if isinstance(criterion, Chosen):
        return chosen(criterion, some)
    if isinstance(criterion, Sooner):
        return sooner(criterion, claim.level, some[0].measured)
    if isinstance(criterion, Rises):
        return rises(criterion, some)
    if isinstance(criterion, Rate):
        return rate(criterion, some[0])
    assert isinstance(criterion, Points)
    return points(criterion, some)


def values(some: list[Study], method: str, level: str | None, summary: str) -> dict[int, float]:
    """Seed -> value of a method, in the first study that has it."""
    found = next(study.measured for study in some if study.measured.has(method))
    return found.values(method, level or found.levels[0], summary)


def differences(some: list[Study], level: str | None, above: str, below: str) -> list[float]:
    """The mean of one method minus that of another one, by each summary; nan if one of them has no result."""
    return [mean(values(some, above, level, name)) - mean(values(some, below, level, name)) for name in SUMMARIES]


def mean(of: dict[int, float]) -> float:
    return float(np.mean(list(of.values()))) if of else float("nan")


def by_summary(methods: tuple[str, str], apart: list[float]) -> str:
    """The differences of two methods in words."""
    return f"{' − '.join(methods)}: " + ", ".join(
        f"{name} {signed(one)}" for name, one in zip(SUMMARIES, apart, strict=True)
    )


def signed(value: float, form: str = "+.2f") -> str:
    """A difference as text, with the sign of subtraction."""
    return f"{value:{form}}".replace("-", "−")


def order(criterion: Order, level: str | None, some: list[Study]) -> Verdict:
    """The order holds if every pair is apart by the margin, and in this order, by all three summaries; it fails if one
    pair is apart by the margin in the other order by all three. Otherwise it is a tie."""
    if criterion.of != "value":
        return order_of_losses(criterion, level, some[0])
    found = {pair: differences(some, level, *pair) for pair in criterion.pairs}
    weakest = min(found, key=lambda pair: min(found[pair]))
    holds = all(min(apart) >= criterion.margin for apart in found.values())
    fails = any(max(apart) <= -criterion.margin for apart in found.values())
    return Verdict(
        REPRODUCED if holds else NOT_REPRODUCED if fails else TIE,
        f"order, by {criterion.margin:g} or more in all three summaries",
        by_summary(weakest, found[weakest]),
    )


def order_of_losses(criterion: Order, level: str | None, study: Study) -> Verdict:
    """The same by what methods lose on unseen clients."""
    losses = study.measured.losses(level or study.measured.levels[0])
    found = {(above, below): losses[above] - losses[below] for above, below in criterion.pairs}
    weakest = min(found, key=lambda pair: found[pair])
    holds, fails = min(found.values()) >= criterion.margin, min(found.values()) <= -criterion.margin
    told = ", ".join(f"{method} loses {losses[method]:.2f}" for method in weakest)
    return Verdict(
        REPRODUCED if holds else NOT_REPRODUCED if fails else TIE,
        f"order of the losses on unseen clients, by {criterion.margin:g} or more",
        told,
    )


def near_best(criterion: NearBest, level: str | None, some: list[Study]) -> Verdict:
    found = {method: mean(values(some, method, level, SUMMARIES[0])) for method in (criterion.method, *criterion.among)}
    best = max(criterion.among, key=lambda method: found[method])
    apart = found[best] - found[criterion.method]
    return Verdict(
        REPRODUCED if apart <= criterion.within else NOT_REPRODUCED,
        f"at most {criterion.within:g} below the best of {', '.join(criterion.among)}",
        f"{best} − {criterion.method}: {signed(apart)}",
    )


def near(criterion: Near, level: str | None, some: list[Study]) -> Verdict:
    apart = differences(some, level, *criterion.methods)
    return Verdict(
        REPRODUCED if max(map(abs, apart)) <= criterion.within else NOT_REPRODUCED,
        f"± {criterion.within:g} in all three summaries",
        by_summary(criterion.methods, apart),
    )


def interval(criterion: Interval, level: str | None, some: list[Study]) -> Verdict:
    if criterion.of == "each client":
        return interval_over_clients(criterion, level, some[0].measured)
    if criterion.of == "value":
        above, below = (values(some, method, level, SUMMARIES[0]) for method in criterion.methods)
    else:
        made = some[0].measured
        above, below = (made.worst(method, level or made.levels[0]) for method in criterion.methods)
    pair = paired(above, below)
    what = "" if criterion.of == "value" else f" of the {criterion.of}"
    ends = f" ({signed(pair.low)} … {signed(pair.high)}), {pair.n} seeds" if pair.n > 1 else ", one seed"
    return Verdict(
        decided(pair.low, pair.high),
        f"95 % interval{what} (Student's t, paired by seed) above 0",
        f"{' − '.join(criterion.methods)}: {signed(pair.difference)}{ends}",
    )


def interval_over_clients(criterion: Interval, level: str | None, made: Measured) -> Verdict:
    above, below = criterion.methods
    apart = made.differences(below, above, level or made.levels[0])
    _, low, high = bootstrap(apart)
    told = f"{above} − {below}: {with_interval(apart, made)}, {len(apart)} clients"
    return Verdict(decided(low, high), "95 % interval over clients (bootstrap) above 0", told)


def decided(low: float, high: float) -> str:
    """The verdict that an interval is above 0; a tie where it is neither above nor below."""
    return REPRODUCED if low > 0 else NOT_REPRODUCED if high < 0 else TIE


def with_interval(apart: NDArray[np.float64], made: Measured) -> str:
    """The mean of differences by client with its interval, as text."""
    form = "+.2f" if is_share(made.study.report.metric) else "+.3f"
    mean, low, high = (signed(one, form) for one in bootstrap(apart))
    return f"{mean} ({low} … {high})"


def least(criterion: Least, level: str | None, some: list[Study]) -> Verdict:
    found = {method: mean(values(some, method, level, SUMMARIES[0])) for method in criterion.methods}
    return Verdict(
        REPRODUCED if all(value >= criterion.value for value in found.values()) else NOT_REPRODUCED,
        f"{criterion.value:g} or more by the last evaluation",
        ", ".join(f"{method}: {value:.2f}" for method, value in found.items()),
    )


def chosen(criterion: Chosen, some: list[Study]) -> Verdict:
    rows = some[0].measured.rows
    found = {level: [run.chosen for run in rows[criterion.method, level]] for level in criterion.settings}
    same = all(set(found[level]) == {settings} for level, settings in criterion.settings.items())
    told = "; ".join(f"{level}: {' and '.join(dict.fromkeys(texts))}" for level, texts in found.items())
    return Verdict(REPRODUCED if same else NOT_REPRODUCED, "the same settings for every seed", told)


def sooner(criterion: Sooner, level: str | None, measured: Measured) -> Verdict:
    """The claim holds if the first method is first for each value and seed, and fails if it never is. Otherwise it is a
    tie. A method that does not reach a value is last."""
    level = level or measured.levels[0]
    first, others = criterion.methods[0], criterion.methods[1:]
    at = {method: {run.seed: run.evaluations for run in measured.rows[method, level]} for method in criterion.methods}
    ahead = [
        took(at[first][seed], value) < min(took(at[other][seed], value) for other in others)
        for value in criterion.values
        for seed in at[first]
    ]
    told = "; ".join(
        f"to {value:g}: "
        + ", ".join(f"{method} {' / '.join(map(in_evaluations, found))}" for method, found in by_method.items())
        for value in criterion.values
        for by_method in [{method: [took(one, value) for one in at[method].values()] for method in criterion.methods}]
    )
    return Verdict(
        REPRODUCED if all(ahead) else TIE if any(ahead) else NOT_REPRODUCED,
        "the first evaluation at or below each value comes before that of all others, for every seed",
        told,
    )


def took(evaluations: tuple[float, ...], value: float) -> float:
    """The number of the first evaluation at or below a value; infinite if there is none."""
    return next((float(number) for number, one in enumerate(evaluations, 1) if one <= value), float("inf"))


def in_evaluations(number: float) -> str:
    return "–" if number == float("inf") else f"{number:.0f}"


def rises(criterion: Rises, some: list[Study]) -> Verdict:
    """The claim holds if every step from a level to the next one is at least the margin, and fails if one is as large
    in the other direction. Otherwise it is a tie."""
    found = [
        [mean(values(some, criterion.method, level, SUMMARIES[0])) for level in levels] for levels in criterion.lines
    ]
    steps = np.concatenate([np.diff(line) for line in found])
    holds, fails = bool((steps >= criterion.margin).all()), bool((steps <= -criterion.margin).any())
    return Verdict(
        REPRODUCED if holds else NOT_REPRODUCED if fails else TIE,
        f"larger by {criterion.margin:g} or more at each next level",
        "; ".join(f"{criterion.method}: {', '.join(f'{value:.2f}' for value in line)}" for line in found),
    )


def rate(criterion: Rate, study: Study) -> Verdict:
    """The claim holds if the 95 % interval of every slope ends at most `within` above its bound, and fails if one
    begins above that. Otherwise it is a tie."""
    found = [slopes(study.measured, criterion.method, line.levels, criterion.power) for line in criterion.lines]
    most = [line.bound + criterion.within for line in criterion.lines]
    holds = all(high <= limit for (_, _, high), limit in zip(found, most, strict=True))
    fails = any(low > limit for (_, low, _), limit in zip(found, most, strict=True))
    told = [
        f"{signed(mean)} ({signed(low)} … {signed(high)}) at the bound {signed(line.bound)}"
        for (mean, low, high), line in zip(found, criterion.lines, strict=True)
    ]
    return Verdict(
        REPRODUCED if holds else NOT_REPRODUCED if fails else TIE,
        f"95 % interval of the slopes (Student's t over seeds) at most {criterion.within:g} above the bound",
        f"{criterion.method}: {'; '.join(told)}",
    )


def slopes(made: Measured, method: str, levels: Mapping[str, float], power: float) -> tuple[float, float, float]:
    """The mean over seeds of the slopes of a line in logarithmic scales, and the ends of its 95 % interval, which is
    that of the paired differences from 0. levels: level -> x; power: that of each evaluation before their mean."""
    at: dict[int, dict[float, float]] = {}
    for level, x in levels.items():
        for run in made.rows[method, level]:
            if run.evaluations:
                at.setdefault(run.seed, {})[x] = float(np.mean(np.power(run.evaluations, power)))
    whole = {seed: values for seed, values in at.items() if len(values) == len(levels)}
    fitted = {seed: np.polyfit(np.log([*v]), np.log([*v.values()]), 1)[0] for seed, v in whole.items()}
    pair = paired(fitted, dict.fromkeys(fitted, 0.0))
    return pair.difference, pair.low, pair.high


def points(criterion: Points, some: list[Study]) -> Verdict:
    apart = {one.method: one.difference for one in compared(some[0])}
    farthest = max(apart, key=lambda method: abs(apart[method]))
    inside = sum(abs(one) <= criterion.within for one in apart.values())
    return Verdict(
        REPRODUCED if inside == len(apart) else NOT_REPRODUCED,
        f"± {criterion.within:g} points for every method, by the {some[0].measured.reported}",
        f"{inside} of {len(apart)}; farthest {farthest}: {signed(apart[farthest])}",
    )


# --- published numbers ------------------------------------------------------------------------------------------------
class Comparison(NamedTuple):
    """A published number beside ours. place: (table, column, row) of the paper; ours: the mean over seeds of the value
    that the study reports; full: whether all our runs have the paper's number of rounds."""

    method: str
    level: str
    place: tuple[int, str, str]
    published: float
    ours: float
    full: bool

    @property
    def difference(self) -> float:
        return self.ours - self.published


def compared(study: Study) -> list[Comparison]:
    """Every method and level that has a result and a published number."""
    where = study.listed.compared
    if where is None or study.paper is None:
        return []
    found = []
    for level, column in where.columns.items():
        for method in study.measured.study.methods:
            runs, row = study.measured.rows[method, level], where.rows.get(method, method)
            published, rounds = study.paper.published(where.table, column, row)
            ours, full = [run.reported for run in runs if run.values], all(run.rounds == rounds for run in runs)
            if ours:
                place = (where.table, column, row)
                found.append(Comparison(method, level, place, published, float(np.mean(ours)), full))
    return found
