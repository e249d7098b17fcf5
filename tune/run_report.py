"""The report of a single run, from the files in its folder: an interactive HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.config.differences import flatten
from ..engine.records.lineage import lineage_of
from ..engine.records.metrics import better, is_in_short
from ..engine.runs.saved_files import require_kind
from ..engine.storage.atomic_write import write
from .by_client import by_client, distribution, populations
from .page.content import NO_STYLE, Axis, Chart, Curve, Marks, Page, PageSection, numbers, row_of, thinned
from .page.html import render
from .run_files import (
    Columns,
    data_in_part,
    privacy_spent,
    read_columns,
    read_config,
    read_json,
    versions_of,
    why_unfinished,
)
from .units import duration, evaluated_rows, factor, is_share, shown, with_unit, written

PARTS = ("time/compute", "time/state", "time/data", "time/reduce", "time/wait")
"""Columns that add up to the time of all workers; see engine/records/parquet.py."""
OF_SENT = "This is about what clients send: a client's own model is not private against somebody who sees it."
"""What a report says of the privacy of a run whose clients keep parts of a model."""
WORK = {"local steps": "client/steps", "gradients": "client/gradients"}
"""Rows of the table of costs that say how much was computed -> their columns."""


def write_run_report(folder: Path, page: Path | None = None) -> Path:
    """Write the page of the run in a folder; returns its path, by default report.html in the folder."""
    path = page or folder / "report.html"
    write(path, render(page_of(folder)))
    return path


def page_of(folder: Path) -> Page:
    """The page of the run in a folder. Raises ConfigError if the folder holds none."""
    require_kind(folder, "run")
    config = read_config(folder)
    columns, result = read_columns(folder), read_json(folder / "result.json")
    problem = "" if result else failure(folder)
    clients = by_client(folder)
    own = [populations(clients), distribution(clients, config.get("evaluate") or {})]
    drawn = charts(columns, evaluated_rows([config.get("workload")]))
    sections = [metrics(columns), *drawn, *own, costs(columns), settings(config)]
    present = [section for section in sections if section.has_content]
    if spent := privacy_spent(folder):
        own = f" {OF_SENT}" if "personal/parameters" in columns else ""
        present.append(PageSection("Privacy", f"{spent}.{own}"))
    return Page(title(config), facts(config, folder, result), present, problem=problem)


def name_of(part: Any) -> str:
    return str(part.get("name", part)) if isinstance(part, dict) else str(part)


def title(config: dict[str, Any]) -> str:
    return f"{name_of(config.get('method'))} on {name_of(config.get('workload'))}, seed {config.get('seed', 0)}"


def facts(config: dict[str, Any], folder: Path, result: dict[str, Any]) -> list[str]:
    """Texts on the run below the title."""
    sizes = config.get("federation", {})
    made = [
        f"{sizes.get('clients')} clients, {sizes.get('cohort')} of them in each round",
        f"{sizes.get('rounds')} rounds",
    ]
    if result:
        rounds, whole = (duration(float(result.get(key, 0))) for key in ("seconds", "total_seconds"))
        made.append(f"the rounds took {rounds}, the whole run {whole}")
    if run_id := read_json(folder / "run.json").get("run_id"):
        made.append(f"run {run_id}")
    if lineage := lineage_of(folder):
        made += lineage.sentences
    if part := data_in_part(folder):
        made.append(part)
    if versions := versions_of(folder):
        made.append(versions)
    if result:
        made.append(f"model sha256 {str(result.get('model_sha256', ''))[:16]}…")
        made += [f"warning: {sentence}" for sentence in result.get("warnings", [])]
    return made


def failure(folder: Path) -> str:
    """Why there is no result."""
    reason = why_unfinished(folder)
    return f"The run has no result: {reason}" if reason else "The run is not over."


# --- tables -----------------------------------------------------------------------------------------------------------
def metrics(columns: Columns) -> PageSection:
    """The last, the best and the first value of every metric."""
    rows = []
    for name, values in measured(columns, ("eval/", "train/")):
        there = np.flatnonzero(np.isfinite(values))
        # What is no share of right answers, nor of clients that are better off, is a loss, an error or a distance.
        larger_is_better = name.endswith("_better") or (is_share(name) and better(name) == "max")
        best = int(there[np.argmax(values[there]) if larger_is_better else np.argmin(values[there])])
        first, last = (shown(name, float(values[there[i]])) for i in (0, -1))
        rows.append(row_of(name, last, shown(name, float(values[best])), f"{int(columns['round'][best])}", first))
    return PageSection("Metrics", "", ["metric", "last", "best", "in round", "first"], rows)


def costs(columns: Columns) -> PageSection:
    """Totals of traffic, time and work."""
    rows = []
    if columns:
        total = {name: float(np.nansum(values)) for name, values in columns.items()}
        for name, key in (("bytes up", "comm/bytes_up"), ("bytes down", "comm/bytes_down")):
            rows.append(row_of(name, f"{total.get(key, 0) / 1e6:,.1f} MB"))
        rows.append(row_of("rounds", f"{len(columns['round'])}"))
        rows.append(row_of("seconds", f"{total.get('time/seconds', 0):,.1f} s"))
        rows += [row_of(name, f"{total[key]:,.0f}") for name, key in WORK.items() if key in total]
        if dropped := total.get("client/dropped"):
            rows.append(row_of("clients left out", f"{dropped:,.0f}"))
    return PageSection(
        "Costs", "Sums over all rounds; the start of the run is not counted.", ["cost", "of the run"], rows
    )


def settings(config: dict[str, Any]) -> PageSection:
    rows = [row_of(key, written(value)) for key, value in flatten(config).items()]
    return PageSection("Settings", "As in config.yaml, from which the run can be repeated.", ["key", "value"], rows)


# --- charts -----------------------------------------------------------------------------------------------------------
def measured(columns: Columns, prefixes: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """The columns with these prefixes that have a number."""
    for name, values in columns.items():
        if name.startswith(prefixes) and np.isfinite(values).any():
            yield name, values


def charts(columns: Columns, rows: str) -> list[PageSection]:
    """rows: those on which the workload is evaluated, see `units.in_words`."""
    if not columns:
        return []
    shown = [(name, values) for name, values in measured(columns, ("eval/", "train/")) if is_in_short(name)]
    curves = [curve(columns, name, values, rows) for name, values in shown]
    others = measured(columns, ("server/", "client/norm2", "method/"))
    own = [curve(columns, name, values, rows) for name, values in others]
    where = (
        "Seconds that all workers together spent in each round: on local steps (compute), clients' states, batches and "
        "sums, and without a task while the driver waited for others."
    )
    return [
        PageSection("Learning curves", "", charts=curves),
        PageSection("The method's own numbers", "", charts=own),
        PageSection("Where the time goes", where, charts=list(times(columns))),
    ]


def curve(columns: Columns, name: str, values: np.ndarray, rows: str) -> Chart:
    """The chart of one column against rounds, bytes, seconds and the virtual clock, if there is one."""
    there = np.flatnonzero(np.isfinite(values))
    there = there[thinned(len(there))]
    traffic = np.nancumsum(columns["comm/bytes_down"]) + np.nancumsum(columns["comm/bytes_up"])
    x = {
        "round": columns["round"][there].tolist(),
        "MB up and down": numbers(traffic[there] / 1e6),
        "seconds": numbers(np.nancumsum(columns["time/seconds"])[there]),
    }
    if "system/clock" in columns:
        x["virtual seconds"] = numbers(columns["system/clock"][there])
    one = Curve(name, 0, x, numbers(values[there] * factor(name)))
    return Chart("curves", name, Axis("round", whole=True), Axis(with_unit(name, rows)), [one])


def times(columns: Columns) -> Iterator[Chart]:
    """The stacked times of the workers."""
    shown_rounds = thinned(len(columns["round"]))
    rounds = columns["round"][shown_rounds].tolist()
    parts = {name: numbers(np.nan_to_num(columns[name][shown_rounds])) for name in PARTS if name in columns}
    series = [
        Marks(name.removeprefix("time/"), NO_STYLE if name == "time/wait" else i, rounds, values)
        for i, (name, values) in enumerate(parts.items())
    ]
    if series and len(rounds) > 1:
        yield Chart("stack", "", Axis("round", whole=True), Axis("seconds of all workers"), series)
