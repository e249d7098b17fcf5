"""The tables of a report, which all forms of it show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..by_client import differences, seen_and_unseen
from ..page.content import PageSection, TableCell, row_of
from ..study.folder import FAILED, FINISHED
from ..study.spec import Report
from ..units import in_words, is_share, shown
from .findings import Findings, Place, key_of, name_of
from .served import spread_table, worse_off
from .statistics import holm, paired, reached, spread

LEVEL = 0.05
"""Smaller p-values stand out."""


def tables(found: Findings) -> list[PageSection]:
    """All tables that have rows."""
    by_client, metric, served = found.by_client, found.report.metric, found.rows_of_clients
    made = [
        results(found),
        *map(results_by_another, found.others),
        differences(by_client, metric, found.report.best),
        seen_and_unseen(by_client, metric),
        spread_table(served, found.factor, found.head),
        worse_off(served, found.report.against, found.report.best, found.factor, found.head),
        published(found),
        best_of_test(found),
        *targets(found),
        significance(found),
        settings(found),
        costs(found),
    ]
    return [without_level(table) for table in [*made, troubles(found), privacy(found), shared(found)] if table.rows]


def shared(found: Findings) -> PageSection:
    """The settings that all compared runs have in common."""
    note = "Those that are not the defaults."
    return PageSection("Settings of all runs", note, ["key", "value"], [row_of(*one) for one in found.shared.items()])


def without_level(table: PageSection) -> PageSection:
    """The table without the column of levels, if runs without axes have left it empty."""
    if "level" not in table.heads:
        return table
    at = list(table.heads).index("level")
    if any(row[at].text for row in table.rows):
        return table
    rows = [[*row[:at], *row[at + 1 :]] for row in table.rows]
    return table._replace(heads=[*table.heads[:at], *table.heads[at + 1 :]], rows=rows)


def privacy(found: Findings) -> PageSection:
    """What the private runs cost, at each level one line for a method."""
    rows = []
    for place in found.places:
        for method in found.methods:
            if line := next((run.privacy for run in found.at(method, place) if run.privacy), ""):
                rows.append(row_of(name_of(place), method, line))
    note = "Of the first seed; of a run that ended early, after its last round. It is the privacy of a simulation."
    return PageSection("Privacy", note, ["level", "method", "epsilon, and what it depends on"], rows)


def results(found: Findings) -> PageSection:
    """Final values of all methods and levels."""
    best = {place: found.leader(place) for place in found.places}
    rows = [
        [
            TableCell(method),
            *(TableCell(found.mean_and_std(method, place), best[place] == method) for place in found.places),
            *(TableCell(texts[method]) for texts in found.columns.values()),
        ]
        for method in found.methods
    ]
    each = what_of_a_run(found.report)
    note = f"{found.head}: mean ± standard deviation over seeds{each}. The best value of each column stands out."
    for column in dict.fromkeys(found.report.metrics.values()):
        named = [method for method, own in found.report.metrics.items() if own == column]
        note += f" Of {', '.join(named)}, it is the {in_words(column, found.rows)}."
    heads = ["method", *(name_of(place) or found.unit for place in found.places), *found.columns]
    return PageSection("Results", note, heads, rows)


def results_by_another(found: Findings) -> PageSection:
    """Final values by a further metric. None stands out, because it decides nothing."""
    rows = [row_of(method, *(found.mean_and_std(method, place) for place in found.places)) for method in found.methods]
    note = f"Mean ± standard deviation over seeds{what_of_a_run(found.report)}."
    heads = ["method", *(name_of(place) or found.unit for place in found.places)]
    return PageSection(f"Results: {found.unit}", note, heads, rows)


def what_of_a_run(report: Report) -> str:
    """What the value of a run is, unless it is its last evaluation; the end of a sentence."""
    if report.best_round:
        return ", each the best of its evaluations"
    return f", each the mean of its last {report.last} evaluations" if report.last > 1 else ""


def published(found: Findings) -> PageSection:
    """The paper's numbers, ours, and the differences."""
    rows, places = [], {key_of(place): place for place in found.places}
    for method, values in found.published.values.items():
        for level, value in values.items():
            if method in found.methods and level in places:
                mean = found.spread(method, places[level]).mean * found.factor
                form = ".1f" if is_share(found.report.metric) else ".4g"
                here = "–" if math.isnan(mean) else f"{mean:{form}}"
                apart = "–" if math.isnan(mean) else f"{mean - value:+{form}}"
                rows.append(row_of(method, level, f"{value:{form}}", here, apart))
    source = found.published.source or found.paper
    note = f"{found.head}; published: {source}." if source else f"{found.head}."
    if found.notes:
        note += " This study was changed from its file (see above), so the numbers cannot be compared directly."
    return PageSection(
        "Comparison with the published numbers", note, ["method", "level", "published", "here", "difference"], rows
    )


def best_of_test(found: Findings) -> PageSection:
    """The best evaluation of each run on test rows, as many papers report it."""
    rows, best = list[list[TableCell]](), max if found.report.best == "max" else min
    for method in found.methods if found.report.best_of_test else ():
        cells = []
        for place in found.places:
            done = [run.points.values for run in found.at(method, place) if run.points and run.status == FINISHED]
            mean, std, _ = spread([float(best(values)) for values in done])
            cells.append(found.number(mean) + ("" if math.isnan(std) else f" ± {found.number(std)}"))
        rows.append(row_of(method, *cells))
    note = f"{found.head}: the best evaluation of each run on test rows, mean ± standard deviation over seeds."
    heads = ["method", *(name_of(place) or found.unit for place in found.places)]
    return PageSection("As published, optimistic", note, heads, rows)


def targets(found: Findings) -> Iterator[PageSection]:
    """The costs of reaching each target, without targets that no run reached."""
    for target in found.report.targets:
        rows = [row for place in found.places for method in found.methods if (row := to(found, method, place, target))]
        if all(row[3].text == "–" for row in rows):
            continue
        note = (
            "Mean ± standard deviation over the seeds that reached it, each up to its first such evaluation. MB are "
            "those of all clients in both directions. Seconds were measured while other cells ran at the same time."
        )
        heads = ["level", "method", "seeds", "rounds", "MB", "seconds", "client visits", "virtual seconds"]
        if not found.virtual:
            heads, rows = heads[:-2], [row[:-2] for row in rows]
        yield PageSection(f"Costs of reaching {shown(found.report.metric, target)} {found.what}", note, heads, rows)


def to(found: Findings, method: str, place: Place, target: float) -> list[TableCell]:
    """A row of the table of costs; [] without runs."""
    runs = found.at(method, place)
    there = [reached(run.points, target, found.better) for run in runs if run.status == FINISHED]
    took = [one for one in there if one is not None]
    numbers = [(one.rounds, one.sent / 1e6, one.seconds, one.visits, one.clock) for one in took]
    cells = [spread_as_text([row[i] for row in numbers], digits) for i, digits in enumerate((0, 1, 1, 0, 0))]
    return row_of(name_of(place), method, f"{len(took)} of {len(runs)}", *cells) if runs else []


def spread_as_text(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation as text, with this number of digits after the point, or with more where the mean
    would be shown as zero, so that two of its digits are shown."""
    mean, std, _ = spread(values)
    if math.isnan(mean):
        return "–"
    if 0 < abs(mean) < 0.5 * 10.0**-digits:
        digits = 1 - math.floor(math.log10(abs(mean)))
    return f"{mean:,.{digits}f}" + ("" if math.isnan(std) else f" ± {std:,.{digits}f}")


def significance(found: Findings) -> PageSection:
    """The comparison of every method with the best one of its level, paired by seed."""
    rows = []
    for place in found.places:
        ahead = found.leader(place)
        others = [m for m in found.methods if m != ahead and found.finals(m, place)] if ahead else []
        pairs = [paired(found.finals(ahead or "", place), found.finals(other, place)) for other in others]
        for other, pair, p in zip(others, pairs, holm([pair.p for pair in pairs]), strict=True):
            if pair.n < 2:
                continue
            known = not math.isnan(p)
            interval = f"{found.number(pair.low)} … {found.number(pair.high)}" if known else "–"
            p_value = TableCell("–" if not known else f"{p:.3f}" if p >= 0.001 else "< 0.001", p < LEVEL)
            cells = row_of(name_of(place), ahead or "", other, found.number(pair.difference), interval, str(pair.n))
            rows.append([*cells, p_value])
    note = (
        f"{found.head}: the best method of each level minus each other method, paired by seed: mean difference, "
        "its 95 % confidence interval, and the p-value of Student's paired t test, adjusted by Holm's method within "
        "the level. Few seeds give wide intervals. Since the best method is chosen by the same numbers, p is slightly "
        "too small."
    )
    return PageSection("Differences", note, ["level", "best", "minus", "difference", "95 %", "seeds", "p"], rows)


def settings(found: Findings) -> PageSection:
    """The settings that tuning has chosen."""
    rows, paper = [], found.published.settings
    for method in found.methods:
        for place in found.places:
            chosen = [run.chosen for run in found.at(method, place)]
            if any(chosen):
                text = chosen[0] if len(set(chosen)) == 1 else " | ".join(chosen)
                rows.append(row_of(method, name_of(place), text, paper.get(method, {}).get(key_of(place), "")))
    heads = ["method", "level", "chosen", "published"]
    if not any(row[3].text for row in rows):
        heads, rows = heads[:3], [row[:3] for row in rows]
    note = {
        "none": "Not tuned: the first value of every grid.",
        "cell": f"The best point of each grid or range for every seed, {found.chosen_by}; | separates seeds.",
        "level": f"The best point of each grid or range for all seeds of a level, {found.chosen_by}.",
        "once": f"The best point of each grid or range for all levels and seeds, {found.chosen_by}.",
    }[found.tuned]
    return PageSection("Settings", note, heads, rows)


def costs(found: Findings) -> PageSection:
    """Traffic and time of the methods."""
    columns = {"MB up": "up", "MB down": "down", "seconds": "seconds"}
    note = "A run's traffic and the seconds of its rounds, mean ± standard deviation over levels and seeds."
    if found.virtual:
        columns["virtual seconds"] = "clock"
        note = note.replace("seconds of", "measured and the virtual seconds of")
    rows = []
    for method in found.methods:
        if runs := [run for run in found.runs if (run.method, run.status) == (method, FINISHED)]:
            cells = [spread_as_text([getattr(run, name) for run in runs], 1) for name in columns.values()]
            rows.append(row_of(method, *cells))
    return PageSection("Costs", note, ["method", *columns], rows)


def troubles(found: Findings) -> PageSection:
    """The runs that did not finish, and the trials that failed, which tuning has missed."""
    bad = [run for run in found.runs if run.status != FINISHED]
    rows = [row_of(run.method, name_of(run.place), str(run.seed), run.status, run.reason) for run in bad]
    missed = [run for run in found.trials if run.status == FAILED]
    rows += [row_of(run.method, name_of(run.place), str(run.seed), "trial failed", run.reason) for run in missed]
    return PageSection(
        "Not finished",
        "These runs are not included in the tables above, and failed trials not in the choice of settings.",
        ["method", "level", "seed", "how", "why"],
        rows,
    )
