"""What clients' own models reach, client by client: how it is distributed in a run, and how two runs differ.

A run whose clients are evaluated with models of their own has the file clients.parquet, with a row for each client
(`engine/records/client_models.py`). Runs can be compared client by client where the clients have the same rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..engine.records.client_models import FILE
from ..engine.records.metrics import DETAIL, OWN
from .page.content import NO_STYLE, Axis, Chart, Curve, Marks, PageSection, TableCell, numbers, row_of
from .run_files import Columns, column, parquet, same
from .units import ROWS, factor, with_unit

MODELS = rf"(server|{OWN})"
"""Matches whose models a column is of."""
POPULATION = "population"
"""The column that says which clients are unseen."""
TEXTS = (POPULATION, "name")
"""The columns that are no numbers."""
UNSEEN = ", unseen"
"""Behind a name: of the clients that are never trained with."""
BETTER_OFF = "Clients that are better or worse off"
SEEN_AND_UNSEEN = "Seen and unseen clients"
HEADS = ("seen", "unseen", "difference")
WEIGHTED = (
    "Means over the clients that are trained with, and over those that are not, weighted by rows. Their difference is "
    "the participation gap."
)
ORDER = ("server", "own", "adapted", "chosen")
"""The order in which models are shown."""
PARTS = 100
"""A quantile curve has so many parts."""


class ByClient(NamedTuple):
    """The table of a run. label: of its settings; seed: of the run; unseen: (c,) bool, the clients that are never
    trained with, None where there are no such clients."""

    label: str
    seed: int
    columns: Columns
    unseen: np.ndarray | None = None

    @property
    def populations(self) -> dict[str, np.ndarray]:
        """What is said behind a name -> (c,) bool, the clients that it is about."""
        if self.unseen is None:
            return {"": np.ones(len(self.columns["client"]), dtype=bool)}
        return {"": ~self.unseen, UNSEEN: self.unseen}

    def has_rows_of(self, other: ByClient) -> bool:
        """Whether the clients of both have the same numbers of rows of each kind."""
        rows = [name for name in self.columns if name == "client" or name.startswith("rows_")]
        return all(name in other.columns and np.array_equal(self.columns[name], other.columns[name]) for name in rows)


def by_client(folder: Path, label: str = "", seed: int = 0) -> ByClient | None:
    """The table in a run's folder, None if it has none."""
    table = parquet(folder / FILE)
    if table is None:
        return None
    columns = {name: column(table, name) for name in table.column_names if name not in TEXTS}
    unseen = (
        np.array([one == "unseen" for one in table[POPULATION].to_pylist()])
        if POPULATION in table.column_names
        else None
    )
    return ByClient(label, seed, columns, unseen)


def metric_of(name: str) -> str:
    """The column of the records whose values a column of the table has: own_test_loss -> eval/own/test_loss."""
    return f"eval/{name.replace('_', '/', 1)}"


# --- one run ----------------------------------------------------------------------------------------------------------
def distribution(run: ByClient | None, evaluate: Mapping[str, Any] = MappingProxyType({})) -> PageSection:
    """How each metric is distributed over the clients of a run. evaluate: the section of its configuration."""
    note = "Of each model, the value that a share of the clients does not reach, at the last evaluation."
    note = " ".join([note, *([] if run is None else rows_in_words(run, evaluate))])
    return PageSection("Clients' models", note, charts=[] if run is None else list(quantiles(run)))


def rows_in_words(run: ByClient, evaluate: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each kind of rows that clients do not train on: drawn, or marked by a column of the data."""
    for kind, key in (("test", "held_out"), ("validation", "validation")):
        if f"rows_{kind}" in run.columns:
            share = evaluate.get(key) or 0
            yield (
                f"The {kind} rows are {share:.0%} of each client's rows, drawn at random."
                if share
                else f"The {kind} rows are those that a column of the data marks."
            )


def quantiles(run: ByClient) -> Iterator[Chart]:
    """A chart for each metric on each kind of rows, with a curve for each model."""
    models, metrics = models_and_metrics(run)
    for name in metrics:
        drawn = [
            (f"{model}{who}", run.columns[f"{model}_{name}"][some])
            for model in models
            if f"{model}_{name}" in run.columns
            for who, some in run.populations.items()
        ]
        found = (quantile_curve(label, style, values, name) for style, (label, values) in enumerate(drawn))
        if series := [curve for curve in found if curve is not None]:
            yield Chart("curves", name.replace("_", " "), Axis("% of the clients"), Axis(unit(f"own_{name}")), series)


def models_and_metrics(run: ByClient) -> tuple[list[str], list[str]]:
    """(the models of which the table has metrics, the metrics with their rows, such as test_loss)."""
    found = [one for name in run.columns if (one := re.fullmatch(rf"{MODELS}_({'|'.join(ROWS)})_(.+)", name))]
    models = sorted(dict.fromkeys(one[1] for one in found), key=lambda name: (ORDER.index(name.split("@")[0]), name))
    return models, list(dict.fromkeys(f"{one[4]}_{one[5]}" for one in found))


def quantile_curve(label: str, style: int, values: np.ndarray, name: str) -> Curve | None:
    """values: (c,), nan for clients without such rows."""
    there = values[np.isfinite(values)]
    if len(there) < 2:
        return None
    at = np.linspace(0, 1, min(PARTS, len(there) - 1) + 1)
    return Curve(label, style, {"% of the clients": numbers(100 * at)}, numbers(np.quantile(there, at) * factor(name)))


def populations(run: ByClient | None) -> PageSection:
    """What clients get that are trained with, and those that are not."""
    rows = []
    if run is not None and run.unseen is not None:
        models, metrics = models_and_metrics(run)
        pairs = [(model, name) for name in metrics for model in models if f"{model}_{name}" in run.columns]
        rows = [row_of(model, unit(f"own_{name}"), *beside([run], f"{model}_{name}")) for model, name in pairs]
    return PageSection(SEEN_AND_UNSEEN, WEIGHTED, ["model", "metric", *HEADS], rows)


def beside(runs: Sequence[ByClient], name: str) -> list[str]:
    """The cells of a metric of seen and of unseen clients, and their difference, as means over the runs."""
    means, kind = [], name.partition("_")[2].partition("_")[0]
    for run in runs:
        values, weights = run.columns[name], run.columns[f"rows_{kind}"]
        there = [some & np.isfinite(values) for some in run.populations.values()]
        means.append(
            [float(np.average(values[some], weights=weights[some])) if some.any() else np.nan for some in there]
        )
    seen, unseen = np.mean(means, axis=0) * factor(metric_of(name))
    return [f"{seen:.4g}", f"{unseen:.4g}", f"{seen - unseen:+.4g}"]


def unit(name: str) -> str:
    """The title of an axis with the values of a column of the table, without whose models they are of."""
    return with_unit(f"eval/{name.partition('_')[2]}")


class OfClients(NamedTuple):
    """What a metric over clients' models is of: the name of the models, and the metric of one client."""

    model: str
    metric: str

    @property
    def column(self) -> str:
        return f"{self.model}_{self.metric}"


def of_clients(metric: str) -> OfClients | None:
    """eval/unseen/own/test_loss_q05 -> own, test_loss; None for a metric that is not over clients' models."""
    found = re.fullmatch(rf"eval/(?:unseen/)?(?P<model>{MODELS})/(?P<of>.+?)({DETAIL}|_gap)?", metric)
    return None if found is None else OfClients(found["model"], found["of"])


def better_off(base: np.ndarray, other: np.ndarray, best: str) -> tuple[list[float], float]:
    """(shares of the clients that are better, equal and worse off with the other values than with the base values, mean
    difference), nan without clients. base, other: (c,); best: "max" or "min".

    Values that are the `same` are equal.
    """
    apart = other - base
    if not len(apart):
        return [math.nan] * 3, math.nan
    better = np.where(same(other, base), 0, np.sign(apart)) * (1 if best == "max" else -1)
    return [float(np.mean(better == way)) for way in (1, 0, -1)], float(apart.mean())


# --- runs beside each other -------------------------------------------------------------------------------------------
def compared(runs: Sequence[ByClient], metric: str) -> str | None:
    """The column by which clients are compared: the one that the metric of a comparison is of, or that of own models
    with its last word; None if not all runs have it."""
    of, last = of_clients(metric), metric.rpartition("/")[2].rpartition("_")[2]
    wanted = [f"own_{kind}_{last}" for kind in ROWS] if of is None else [of.column]
    return next((name for name in wanted if runs and all(name in run.columns for run in runs)), None)


def pairs(runs: Sequence[ByClient], label: str, name: str, who: str = "") -> Iterator[list[np.ndarray]]:
    """[clients, values of the first label, values of another label] of the clients of a population that both have, for
    each seed in which the clients have the same rows. who: as in `ByClient.populations`."""
    first = {run.seed: run for run in runs if run.label == runs[0].label}
    for run in runs:
        base = first.get(run.seed)
        if run.label == label and base is not None and base.has_rows_of(run) and who in run.populations:
            there = run.populations[who] & np.isfinite(base.columns[name]) & np.isfinite(run.columns[name])
            yield [each[there] for each in (run.columns["client"], base.columns[name], run.columns[name])]


def others(runs: Sequence[ByClient]) -> list[str]:
    """The labels of the runs, without that of the first one."""
    return [label for label in dict.fromkeys(run.label for run in runs) if label != runs[0].label]


def differences(runs: Sequence[ByClient], metric: str, best: str) -> PageSection:
    """How many clients are better and worse off with each label than with the first one. best: "max" or "min", which
    values of the metric are better."""
    name, rows = compared(runs, metric), list[list[TableCell]]()
    if name is None:
        return PageSection(BETTER_OFF, "")
    for label, who in ((label, who) for label in others(runs) for who in ("", UNSEEN)):
        if found := list(pairs(runs, label, name, who)):
            base, value = (np.concatenate([each[i] for each in found]) for i in (1, 2))
            parts, change = better_off(base, value, best)
            cells = [*(f"{part:.1%}" for part in parts), f"{change * factor(metric_of(name)):+.4g}", f"{len(base)}"]
            rows.append(row_of(f"{label}{who}", *cells))
    note = f"{unit(name)} of each client's model, against {runs[0].label}, where a client has the same rows and seed."
    return PageSection(BETTER_OFF, note, ["method", "better", "equal", "worse", "mean difference", "clients"], rows)


def seen_and_unseen(runs: Sequence[ByClient], metric: str) -> PageSection:
    """What clients that are trained with and those that are not get with each label."""
    name, rows = compared(runs, metric), list[list[TableCell]]()
    for label in dict.fromkeys(run.label for run in runs) if name is not None else ():
        some = [run for run in runs if run.label == label and run.unseen is not None]
        if some and name is not None:
            rows.append(row_of(label, *beside(some, name)))
    note = f"{unit(name)} of each client's model. {WEIGHTED}" if name is not None else ""
    return PageSection(SEEN_AND_UNSEEN, note, ["method", *HEADS], rows)


def scatters(runs: Sequence[ByClient], metric: str) -> PageSection:
    """A chart for each label, a point for each client: the value with the first label, and with this one."""
    name, charts = compared(runs, metric), list[Chart]()
    for style, label in enumerate(others(runs) if name is not None else (), 1):
        assert name is not None
        series = []
        for who in ("", UNSEEN):
            found = next(pairs(runs, label, name, who), None)
            if found is not None and len(found[0]):
                x, y = (values * factor(metric_of(name)) for values in found[1:])
                texts = [f"client {int(i)}\n{a:.4g} and {b:.4g}" for i, a, b in zip(found[0], x, y, strict=True)]
                symbol = "x" if who else ""
                series.append(Marks(f"{label}{who}", style, numbers(x), numbers(y), texts=texts, symbol=symbol))
        if series:
            values = [value for marks in series for value in (*marks.x, *marks.y)]
            ends = numbers([min(values), max(values)])
            equal = Marks("equal", NO_STYLE, ends, ends, line=True, markers=False, legend=False)
            axes = (Axis(f"{unit(name)}, {runs[0].label}"), Axis(f"{unit(name)}, {label}"))
            charts.append(Chart("marks", label, *axes, [equal, *series]))
    note = "A point is a client, at the first seed. Clients above the line have a larger value than in the first runs."
    return PageSection("Client by client", note, charts=charts)


def of_runs(folders: Mapping[Path, tuple[str, int]]) -> list[ByClient]:
    """The tables of runs. folders: folder -> (label, seed)."""
    found = (by_client(folder, *of) for folder, of in folders.items())
    return [run for run in found if run is not None]
