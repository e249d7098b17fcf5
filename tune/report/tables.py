"""The tables of a report as text, which all forms of the report show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..page.content import PageTable, TableCell
from ..study.spec import Report
from ..units import is_share
from .findings import Findings, Place, Run, key_of, name_of
from .statistics import Spread, holm, paired, reached, spread

LEVEL = 0.05
"""Smaller p-values stand out."""


def tables(found: Findings) -> list[PageTable]:
    """All tables that have rows."""
    made = [results(found), published(found), *targets(found), significance(found), settings(found), costs(found)]
    return [without_level(table) for table in [*made, troubles(found), privacy(found)] if table.rows]


def without_level(table: PageTable) -> PageTable:
    """The table without the column of levels, if runs without axes have left it empty."""
    if "level" not in table.heads:
        return table
    at = table.heads.index("level")
    if any(row[at].text for row in table.rows):
        return table
    heads, *rows = ([*line[:at], *line[at + 1 :]] for line in (table.heads, *table.rows))
    return table._replace(heads=heads, rows=rows)


def privacy(found: Findings) -> PageTable:
    """What the private runs cost, at each level one line for a method."""
    rows = []
    for place in found.places:
        for method in found.methods:
            if line := next((run.privacy for run in found.at(method, place) if run.privacy), ""):
                rows.append(plain(name_of(place), method, line))
    note = "Of the first seed; of a run that ended early, after its last round. It is the privacy of a simulation."
    return PageTable("Privacy", note, ["level", "method", "epsilon, and what it depends on"], rows)


def plain(*cells: str) -> list[TableCell]:
    return [TableCell(cell) for cell in cells]


def mean_and_std(found: Findings, what: Spread, of: int) -> str:
    """Mean and standard deviation as text, such as "91.2 ± 0.4", with the number of seeds if some are missing."""
    if not what.n:
        return "–"
    few = f" ({what.n} of {of})" if what.n < of else ""
    sd = "" if math.isnan(what.std) else f" ± {found.number(what.std)}"
    return f"{found.number(what.mean)}{sd}{few}"


def results(found: Findings) -> PageTable:
    """Final values of all methods and levels."""
    spreads = {(m, p): spread(list(found.finals(m, p).values())) for m in found.methods for p in found.places}
    best = {place: leader(found, place) for place in found.places}
    rows = []
    for method in found.methods:
        cells = [
            TableCell(mean_and_std(found, spreads[method, place], len(found.at(method, place))), best[place] == method)
            for place in found.places
        ]
        rows.append([TableCell(method), *cells])
    each = what_of_a_run(found.report)
    note = f"{found.head}: mean ± standard deviation over seeds{each}. The best value of each column stands out."
    return PageTable("Results", note, ["method", *(name_of(place) or found.unit for place in found.places)], rows)


def what_of_a_run(report: Report) -> str:
    """What the value of a run is, unless it is its last evaluation; the end of a sentence."""
    if report.best_round:
        return ", each the best of its evaluations"
    return f", each the mean of its last {report.last} evaluations" if report.last > 1 else ""


def leader(found: Findings, place: Place) -> str | None:
    """The method with the best mean at a level; None if nothing finished there."""
    ahead, value = None, math.nan
    for method in found.methods:
        mean = spread(list(found.finals(method, place).values())).mean
        if not math.isnan(mean) and (ahead is None or found.better(mean, value)):
            ahead, value = method, mean
    return ahead


def published(found: Findings) -> PageTable:
    """The paper's numbers, ours, and the differences."""
    rows, places = [], {key_of(place): place for place in found.places}
    for method, values in found.published.values.items():
        for level, value in values.items():
            if method in found.methods and level in places:
                mean = spread(list(found.finals(method, places[level]).values())).mean * found.factor
                form = ".1f" if is_share(found.report.metric) else ".4g"
                here = "–" if math.isnan(mean) else f"{mean:{form}}"
                apart = "–" if math.isnan(mean) else f"{mean - value:+{form}}"
                rows.append(plain(method, level, f"{value:{form}}", here, apart))
    source = found.published.source or found.paper
    note = f"{found.head}; published: {source}." if source else f"{found.head}."
    if found.notes:
        note += " This study was changed from its file (see above), so the numbers cannot be compared directly."
    return PageTable(
        "Comparison with the published numbers", note, ["method", "level", "published", "here", "difference"], rows
    )


def targets(found: Findings) -> Iterator[PageTable]:
    """The costs of reaching each target, without targets that no run reached."""
    for target in found.report.targets:
        rows = [row for place in found.places for method in found.methods if (row := to(found, method, place, target))]
        if all(row[3].text == "–" for row in rows):
            continue
        note = (
            "Costs until the first evaluation that reached the target, mean ± standard deviation over the seeds "
            "that reached it. MB are those of all clients in both directions. Seconds were measured while other "
            "cells ran at the same time."
        )
        heads = ["level", "method", "seeds", "rounds", "MB", "seconds", "client visits", "virtual seconds"]
        if not found.virtual:
            heads, rows = heads[:-2], [row[:-2] for row in rows]
        yield PageTable(f"Costs of reaching {found.with_unit(target)} {found.what}", note, heads, rows)


def to(found: Findings, method: str, place: Place, target: float) -> list[TableCell]:
    """A row of the table of costs; [] without runs."""
    runs = found.at(method, place)
    there = [reached(run.points, target, found.better) for run in runs if run.status == "finished"]
    took = [one for one in there if one is not None]
    numbers = [(one.rounds, one.sent / 1e6, one.seconds, one.visits, one.clock) for one in took]
    cells = [bare(spread([row[i] for row in numbers]), digits) for i, digits in enumerate((0, 1, 1, 0, 0))]
    return plain(name_of(place), method, f"{len(took)} of {len(runs)}", *cells) if runs else []


def bare(what: Spread, digits: int) -> str:
    """Mean and standard deviation as text."""
    if not what.n or math.isnan(what.mean):
        return "–"
    sd = "" if math.isnan(what.std) else f" ± {what.std:,.{digits}f}"
    return f"{what.mean:,.{digits}f}{sd}"


def significance(found: Findings) -> PageTable:
    """The comparison of every method with the best one of its level, paired by seed."""
    rows = []
    for place in found.places:
        ahead = leader(found, place)
        others = [m for m in found.methods if m != ahead and found.finals(m, place)] if ahead else []
        pairs = [paired(found.finals(ahead or "", place), found.finals(other, place)) for other in others]
        for other, pair, p in zip(others, pairs, holm([pair.p for pair in pairs]), strict=True):
            if pair.n < 2:
                continue
            interval = f"{found.number(pair.low)} … {found.number(pair.high)}"
            p_value = TableCell(f"{p:.3f}" if p >= 0.001 else "< 0.001", p < LEVEL)
            cells = plain(name_of(place), ahead or "", other, found.number(pair.difference), interval, str(pair.n))
            rows.append([*cells, p_value])
    note = (
        f"{found.head}: the best method of each level minus each other method, paired by seed: mean difference, "
        "its 95 % confidence interval, and the p-value of Student's paired t test, adjusted by Holm's method within "
        "the level. Few seeds give wide intervals. Since the best method is chosen by the same numbers, p is slightly "
        "too small."
    )
    return PageTable("Differences", note, ["level", "best", "minus", "difference", "95 %", "seeds", "p"], rows)


def settings(found: Findings) -> PageTable:
    """The settings that tuning has chosen."""
    rows, paper = [], found.published.settings
    for method in found.methods:
        for place in found.places:
            chosen = [run.chosen for run in found.at(method, place)]
            if any(chosen):
                text = chosen[0] if len(set(chosen)) == 1 else " | ".join(chosen)
                rows.append(plain(method, name_of(place), text, paper.get(method, {}).get(key_of(place), "")))
    heads = ["method", "level", "chosen", "published"]
    if not any(row[3].text for row in rows):
        heads, rows = heads[:3], [row[:3] for row in rows]
    note = {
        "none": "Not tuned: the first value of every grid.",
        "cell": f"The best point of each grid or range for every seed, {found.chosen_by}; | separates seeds.",
        "level": f"The best point of each grid or range for all seeds of a level, {found.chosen_by}.",
        "once": f"The best point of each grid or range for all levels and seeds, {found.chosen_by}.",
    }[found.tuned]
    return PageTable("Settings", note, heads, rows)


def costs(found: Findings) -> PageTable:
    """Traffic and time of the methods."""
    heads, getters, rows = ["method", "MB up", "MB down", "seconds"], [up, down, seconds], []
    note = "A run's traffic and the seconds of its rounds, mean ± standard deviation over levels and seeds."
    if found.virtual:
        heads, getters = [*heads, "virtual seconds"], [*getters, virtual_seconds]
        note = note.replace("seconds of", "measured and the virtual seconds of")
    for method in found.methods:
        runs = [run for run in found.runs if (run.method, run.status) == (method, "finished")]
        if runs:
            rows.append(plain(method, *(bare(spread([get(run) for run in runs]), 1) for get in getters)))
    return PageTable("Costs", note, heads, rows)


def up(run: Run) -> float:
    return run.up / 1e6


def down(run: Run) -> float:
    return run.down / 1e6


def seconds(run: Run) -> float:
    return run.seconds


def virtual_seconds(run: Run) -> float:
    """Those until the last evaluation; nan without a virtual clock."""
    return math.nan if run.points is None or run.points.clock is None else float(run.points.clock[-1])


def troubles(found: Findings) -> PageTable:
    """The runs that did not finish, and the trials that failed, which tuning has missed."""
    bad = [run for run in found.runs if run.status != "finished"]
    rows = [plain(run.method, name_of(run.place), str(run.seed), run.status, run.reason) for run in bad]
    missed = [run for run in found.trials if run.status == "failed"]
    rows += [plain(run.method, name_of(run.place), str(run.seed), "trial failed", run.reason) for run in missed]
    return PageTable(
        "Not finished",
        "These runs are not included in the tables above, and failed trials not in the choice of settings.",
        ["method", "level", "seed", "how", "why"],
        rows,
    )
