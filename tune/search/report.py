"""The report of a search: an interactive HTML page with the trials, their values and the sensitivity to each range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ...engine.config.differences import flatten
from ...engine.storage.atomic_write import write
from ...engine.storage.secrets import redacted
from ..page.content import NO_STYLE, Axis, Chart, Curve, Marks, Page, PageSection, TableCell, numbers, row_of, thinned
from ..page.html import render
from ..ranges import Range, number
from ..units import evaluated_rows, factor, setting, shown, with_unit, written
from .importance import importances, may_have_importances
from .plan import CHOSE_A_SEED, SearchPlan
from .trial_store import Trial, TrialStore

LEADERS = 6
"""Number of the best trials whose curves have colours of their own."""


def import_packages(plan: SearchPlan) -> None:
    """Import the packages of the report before it is to be written: those of the importances take a second."""
    import_module("jinja2")
    if may_have_importances(plan):
        import_module("optuna.importance")


def write_search_report(plan: SearchPlan, store: TrialStore, page: Path) -> Path:
    """Write the page of a search; returns its path."""
    write(page, render(page_of(plan, store.trials(), store.best(), store.reported())))
    return page


def page_of(plan: SearchPlan, trials: list[Trial], best: list[Trial], reported: dict[int, dict[int, float]]) -> Page:
    """The page. best: the best trial, or the Pareto front. reported: trial -> round -> value of the objective."""
    objectives = list(plan.settings.objectives)
    trial_numbers = "In the order of their numbers. The line is the best value so far."
    framed = "The trials that no other trial surpasses in all objectives are framed."
    framed_too = "The best one is framed." if len(best) < 2 else "Those on the Pareto front are framed."
    every = f"Slices: every trial that finished, against each of its values. {framed_too}"
    sections = [
        best_table(plan, best),
        PageSection("Values by trial", trial_numbers, charts=list(progress(plan, trials))),
        PageSection("Pareto front", framed, charts=list(pareto(plan, trials, best))),
        PageSection("Importance", IMPORTANCE, charts=list(importance(plan, trials))),
        PageSection("Sensitivity", every, charts=list(sensitivity(plan, trials, best))),
        PageSection("Curves of the trials", curves_note(objectives[0]), charts=list(curves(plan, trials, reported))),
        trial_table(plan, trials, best),
        ranges(plan),
        settings(plan),
    ]
    present = [section for section in sections if section.has_content]
    unfinished = "" if best else "No trial has finished yet."
    return Page(f"Search: {plan.data.get('name') or 'search'}", facts(plan, trials), present, problem=unfinished)


def unit_of(plan: SearchPlan, name: str) -> str:
    """An objective in words with its unit, for an axis."""
    return with_unit(name, evaluated_rows([plan.data.get("workload")]))


def facts(plan: SearchPlan, trials: list[Trial]) -> list[str]:
    counts = [f"{n} {s}" for s in dict.fromkeys(t.status for t in trials) if (n := sum(t.status == s for t in trials))]
    pruner = f", pruned by {plan.settings.pruner}" if plan.settings.pruner != "none" else ""
    return [
        plan.aim,
        f"sampler {plan.sampler}{pruner}",
        f"{len(trials)} of {plan.trials} trials: {', '.join(counts) or 'none'}",
        *([CHOSE_A_SEED] if any(one.key == "seed" for one in plan.ranges) else []),
    ]


def describe(plan: SearchPlan, trial: Trial) -> str:
    """A trial as the text that appears when the reader points at it."""
    named = zip(plan.settings.objectives, trial.values, strict=False)
    values = [f"{name} {shown(name, value)}" for name, value in named]
    params = [f"{key.removeprefix('method.')} {setting(value)}" for key, value in trial.params.items()]
    return "\n".join([f"trial {trial.number}, {trial.status}", *values, *params])


# --- tables -----------------------------------------------------------------------------------------------------------
def best_table(plan: SearchPlan, best: list[Trial]) -> PageSection:
    title, note = "Best trial", "best.yaml has it as an experiment file."
    if len(best) > 1:
        title = "Best trials"
        note = (
            "No other trial surpasses one of these in all objectives. best.yaml is the first one as an experiment file."
        )
    return PageSection(title, note, heads(plan), [row(plan, t, ()) for t in best])


def heads(plan: SearchPlan) -> list[str]:
    ranged = (one.key.removeprefix("method.") for one in plan.ranges)
    return ["trial", *plan.settings.objectives, *ranged, "rounds", "status"]


def row(plan: SearchPlan, trial: Trial, best: tuple[int, ...]) -> list[TableCell]:
    values = [shown(name, v) for name, v in zip(plan.settings.objectives, trial.values, strict=False)]
    values += ["–"] * (len(plan.settings.objectives) - len(values))
    params = [setting(trial.params[r.key]) if r.key in trial.params else "–" for r in plan.ranges]
    status = f"{trial.status}: {trial.reason}" if trial.reason else trial.status
    cells = [str(trial.number), *values, *params, str(trial.rounds), status]
    return [TableCell(cell, trial.number in best) for cell in cells]


def trial_table(plan: SearchPlan, trials: list[Trial], best: list[Trial]) -> PageSection:
    numbers_of_best = tuple(trial.number for trial in best)
    rows = [row(plan, trial, numbers_of_best) for trial in trials]
    return PageSection("All trials", "A click on a head sorts. The best stand out.", heads(plan), rows)


def ranges(plan: SearchPlan) -> PageSection:
    rows = [row_of(r.key, r.kind, str(r)) for r in plan.ranges]
    return PageSection("Ranges", "", ["key", "kind", "values"], rows)


def settings(plan: SearchPlan) -> PageSection:
    """Everything that is no range, without the settings that a search does not use."""
    keys = (*(f"{r.key}." for r in plan.ranges), "engine.backend", "engine.workers")
    fixed = {key: value for key, value in flatten(plan.data).items() if not key.startswith(keys)}
    rows = [row_of(key, redacted(written(value))) for key, value in fixed.items()]
    return PageSection("Settings", "Of every trial.", ["key", "value"], rows)


# --- charts -----------------------------------------------------------------------------------------------------------
def finished(trials: list[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.values]


def progress(plan: SearchPlan, trials: list[Trial]) -> Iterator[Chart]:
    """The value of each trial, and the best so far, one chart for each objective."""
    done = finished(trials)
    for at, (name, mode) in enumerate(plan.settings.objectives.items() if done else ()):
        values = [trial.values[at] * factor(name) for trial in done]
        texts = [describe(plan, trial) for trial in done]
        x = [trial.number for trial in done]
        steps, so_far = best_so_far(x, values, max if mode == "max" else min)
        series = [
            Marks("best so far", 1, steps, numbers(so_far), line=True, markers=False),
            Marks("finished", 0, x, numbers(values), texts=texts),
        ]
        low = min(values) if mode == "max" else max(values)
        for status in ("pruned", "diverged", "failed"):
            if ended := [trial for trial in trials if trial.status == status]:
                x, texts = [trial.number for trial in ended], [describe(plan, trial) for trial in ended]
                y = numbers([low] * len(ended))
                series.append(Marks(status, NO_STYLE, x, y, texts=texts, symbol=SYMBOLS[status]))
        yield Chart("marks", name, Axis("trial", whole=True), Axis(unit_of(plan, name)), series)


def best_so_far(
    trials: list[int], values: list[float], choose: Callable[[list[float]], float]
) -> tuple[list[int], list[float]]:
    """The best value so far as a line with steps: (numbers of trials, values), with two points where it changes."""
    x, best = trials[:1], values[:1]
    for number_of_trial, value in zip(trials[1:], values[1:], strict=True):
        better = choose([best[-1], value])
        x += [number_of_trial] * (1 + (better != best[-1]))
        best += [best[-1], better] if better != best[-1] else [better]
    return x, best


SYMBOLS = {"pruned": "line-ns-open", "diverged": "x-thin-open", "failed": "cross-thin-open"}
"""Markers of the trials without a value, which are drawn at the height of the worst one."""


def pareto(plan: SearchPlan, trials: list[Trial], best: list[Trial]) -> Iterator[Chart]:
    """The second objective, and each further one, against the first one."""
    names, done = list(plan.settings.objectives), finished(trials)
    for at in range(1, len(names) if done else 0):
        points = {t.number: (t.values[at] * factor(names[at]), t.values[0] * factor(names[0])) for t in done}
        front = sorted(points[trial.number] for trial in best)
        texts = [describe(plan, trial) for trial in done]
        of_all, of_front = (
            (numbers(x for x, _ in some), numbers(y for _, y in some)) for some in (points.values(), front)
        )
        series = [
            Marks("", NO_STYLE, *of_front, line=len(names) == 2, markers=False),
            Marks("trials", 0, *of_all, texts=texts),
            Marks("front", 1, *of_front, symbol="square-open"),
        ]
        yield Chart("marks", "", Axis(unit_of(plan, names[at])), Axis(unit_of(plan, names[0])), series)


IMPORTANCE = (
    "The share of each range in what sets the best tenth of the trials apart from all of them, by PED-ANOVA. A range "
    "with a small share may keep any of its values. With few trials the shares are rough."
)


def importance(plan: SearchPlan, trials: list[Trial]) -> Iterator[Chart]:
    """The importance of each range, one series for each objective; nothing if there are too few trials or ranges."""
    shares = importances(plan, trials)
    if not shares:
        return
    keys = list(next(iter(shares.values())))  # the first one, with the largest share, is drawn at the top
    names = tuple(key.removeprefix("method.") for key in keys)
    series = []
    for at, (objective, of_key) in enumerate(shares.items()):
        x = numbers(100 * of_key[key] for key in keys)
        texts = [f"{name}\n{objective}: {100 * of_key[key]:.0f} %" for key, name in zip(keys, names, strict=True)]
        series.append(Marks(objective, at, x, list(range(len(keys))), texts=texts, legend=len(shares) > 1))
    yield Chart("bars", "", Axis("importance (%)", zero=True), Axis("", labels=names), series)


def sensitivity(plan: SearchPlan, trials: list[Trial], best: list[Trial]) -> Iterator[Chart]:
    """Each objective against the values of each range."""
    done = finished(trials)
    for at, name in enumerate(plan.settings.objectives if len(done) > 1 else ()):
        for one in plan.ranges:
            yield slice_of(plan, one, at, name, done, best)


def slice_of(plan: SearchPlan, one: Range, at: int, name: str, done: list[Trial], best: list[Trial]) -> Chart:
    """One objective against the values of one range. at: the objective's place in the values of a trial."""
    known = [trial for trial in done if one.key in trial.params]
    axis, place = axis_of(one)
    texts = [describe(plan, trial) for trial in known]
    y = numbers(trial.values[at] * factor(name) for trial in known)
    series = [Marks("", 0, [place(trial.params[one.key]) for trial in known], y, texts=texts, legend=False)]
    for trial in best:
        x, top = [place(trial.params[one.key])], numbers([trial.values[at] * factor(name)])
        series.append(Marks("", 1, x, top, texts=[describe(plan, trial)], symbol="square-open", legend=False))
    title = one.key.removeprefix("method.")
    if len(plan.settings.objectives) > 1:
        title = f"{name} against {title}"
    return Chart("marks", title, axis, Axis(unit_of(plan, name)), series)


def axis_of(one: Range) -> tuple[Axis, Any]:
    """The axis of a range, and the function from its values to places on the axis."""
    name = one.key.removeprefix("method.")
    if not one.listed:
        return Axis(name, log=one.kind == "loguniform" or bool(one.spec.get("log"))), float
    if all(number(value) and value > 0 for value in one.values):
        return Axis(name, log=True), float
    texts = list(dict.fromkeys(setting(value) for value in one.values))
    return Axis(name, labels=tuple(texts)), lambda value: texts.index(setting(value))


def curves_note(objective: str) -> str:
    return f"{objective} after each evaluated round. The best {LEADERS} trials have colours; pruned trials end early."


def curves(plan: SearchPlan, trials: list[Trial], reported: dict[int, dict[int, float]]) -> Iterator[Chart]:
    """The objective over the rounds of each trial."""
    name, mode = next(iter(plan.settings.objectives.items()))
    sign = -1 if mode == "max" else 1
    order = sorted(finished(trials), key=lambda t: sign * t.values[0])
    leaders = {trial.number: place for place, trial in enumerate(order[:LEADERS])}
    series = []
    for trial in sorted(trials, key=lambda t: leaders.get(t.number, -1)):
        points = sorted(reported.get(trial.number, {}).items())
        if len(points) > 1:
            points = [points[i] for i in thinned(len(points))]
            label = f"trial {trial.number}" if trial.number in leaders else "other trials"
            style = leaders.get(trial.number, NO_STYLE)
            values = numbers(value * factor(name) for _, value in points)
            series.append(Curve(label, style, {"round": [r for r, _ in points]}, values))
    if series:
        yield Chart("curves", "", Axis("round", whole=True), Axis(unit_of(plan, name)), series)
