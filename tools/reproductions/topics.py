"""Pages about several studies of one topic, with claims, and figures that others have published in other settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fedfleet.tune.by_client import better_off
from fedfleet.tune.report.served import Row, both, pairs
from fedfleet.tune.units import factor, is_share

from . import page
from .claims import Study, seeds_of, verdict, with_interval
from .inputs import RESULTS, Claim, Elsewhere, studies, topic
from .measured import measured
from .page import MADE, mean_and_std, mean_of, t_interval, table

PAGES = tuple(RESULTS / f"{name}.md" for name in ("personal", "language"))


def topic_page(place: Path) -> str:
    """The text of one of the PAGES."""
    listed = topic(place.stem)
    some = found_of(listed.folders)
    parts = [
        f"# {listed.title}",
        MADE,
        listed.intro,
        *("\n".join(f"- {text}" for text in listed.reading) for _ in listed.reading[:1]),
        *(section(study) if study.measured.clients else page.section(study) for study in some.values()),
        f"## Claims\n\n{claims(listed.claims, some)}",
        f"## Published figures\n\n{listed.about_published}",
        *map(published, listed.published),
    ]
    return "\n\n".join(parts) + "\n"


def found_of(folders: tuple[str, ...]) -> Mapping[str, Study]:
    """Folder -> study."""
    listed = {one.folder: one for one in studies().studies}
    return {folder: Study(listed[folder], measured(RESULTS / folder, of_clients=True), None) for folder in folders}


def section(study: Study) -> str:
    listed, made = study.listed, study.measured
    parts = [f"## {listed.title}", f"`{listed.command}`; [the report]({listed.folder}/report.md). {listed.what}"]
    levels = list(dict.fromkeys(row.level for row in made.clients))
    for level in levels:
        rows = {row.method: row for row in made.clients if row.level == level}
        mean = "weighted" if made.study.report.metric.endswith("_weighted") else "mean"
        heads = ["method", "seeds", mean, "95 % interval", "deviation", "worst tenth", "unseen"]
        for name in made.study.report.against:
            heads += [f"better / worse than {name}", f"minus {name}, 95 % interval over clients"]
        heads += ["gradients", "MB up", "settings"]
        body = table(heads, (line(study, row, rows) for row in rows.values()))
        parts.append(f"### {level[:1].upper()}{level[1:]}\n\n{body}" if len(levels) > 1 else body)
    parts += ["\n".join(f"- {note}" for note in listed.notes)] if listed.notes else []
    return "\n\n".join(parts)


def line(study: Study, row: Row, rows: Mapping[str, Row]) -> Iterator[str]:
    made = study.measured
    report, runs = made.study.report, made.rows[row.method, row.level]
    scale, values = factor(report.metric), [run.values["last"] for run in runs if run.values]
    form, coarse = (".2f", ".1f") if is_share(report.metric) else (".3f", ".2f")
    yield from (row.method, str(len(row.runs)), mean_and_std(values, form), t_interval(values, form))
    for name in ("std", "worst", "unseen"):
        of_runs = [getattr(run, name) * scale for run in row.runs.values()]
        hidden = name == "unseen" and row.method == "Local"  # which has no model for them but the first one
        yield "–" if hidden or math.isnan(sum(of_runs)) else f"{sum(of_runs) / len(of_runs):{coarse}}"
    for name in report.against:
        if name == row.method or name not in rows:
            yield from ("", "")
        else:
            better, _, worse = better_off(*pairs(*both(rows[name], row)), report.best)[0]
            yield f"{better:.0%} / {worse:.0%}"
            yield with_interval(made.differences(name, row.method, row.level), made)
    gradients = [run.gradients for run in row.runs.values()]
    yield f"{sum(gradients) / len(gradients):,.0f}"
    yield from (mean_of(runs, "megabytes"), " / ".join(dict.fromkeys(run.chosen for run in runs)))


def claims(some: Iterable[Claim], known: Mapping[str, Study]) -> str:
    rows = []
    for claim in some:
        decided = verdict(claim, known)
        found = (claim.says, f"**{decided.verdict}**", seeds_of(claim, known), decided.evidence, decided.criterion)
        rows.append((*found, claim.remark))
    return table(("claim", "verdict", "seeds", "the cells say", "criterion", "remark"), rows)


def published(one: Elsewhere) -> str:
    """Figures of others, with their setting."""
    rows = ((name, *("" if value is None else f"{value:g}" for value in values)) for name, values in one.rows.items())
    return f"### {one.source}\n\n{one.setting}\n\n{table(('method', *one.columns), rows)}"
