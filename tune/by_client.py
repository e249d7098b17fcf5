"""What clients' own models reach, client by client: how it is distributed in a run, and how two runs differ.

A run whose clients are evaluated with models of their own has the file clients.parquet, with a row for each client
(`engine/records/client_models.py`). Runs can be compared client by client where the clients have the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..engine.records.client_models import FILE
from .page.content import NO_STYLE, Axis, Chart, Curve, Marks, PageSection, TableCell, numbers, row_of
from .run_files import Columns, columns_of
from .units import factor, with_unit

MODELS = ("server", "own", "adapted")
"""Whose models the columns are of, in the order in which they are shown."""
BETTER_OFF = "Clients that are better or worse off"
PARTS = 100
"""A quantile curve has so many parts."""


class ByClient(NamedTuple):
    """The table of a run. label: of its settings; seed: of the run."""

    label: str
    seed: int
    columns: Columns

    def has_rows_of(self, other: ByClient) -> bool:
        """Whether the clients of both have the same numbers of rows of each kind."""
        rows = [name for name in self.columns if name == "client" or name.startswith("rows_")]
        return all(name in other.columns and np.array_equal(self.columns[name], other.columns[name]) for name in rows)


def by_client(folder: Path, label: str = "", seed: int = 0) -> ByClient | None:
    """The table in a run's folder, None if it has none."""
    columns = columns_of(folder / FILE)
    return ByClient(label, seed, columns) if columns else None


def metric_of(name: str) -> str:
    """The column of the records whose values a column of the table has: own_test_loss -> eval/own/test_loss."""
    return f"eval/{name.replace('_', '/', 1)}"


# --- one run ----------------------------------------------------------------------------------------------------------
def distribution(run: ByClient | None) -> PageSection:
    """How each metric is distributed over the clients of a run."""
    note = "Of each model, the value that a share of the clients does not reach, at the last evaluation."
    return PageSection("Clients' models", note, charts=[] if run is None else list(quantiles(run)))


def quantiles(run: ByClient) -> Iterator[Chart]:
    """A chart for each metric on each kind of rows, with a curve for each model."""
    found = [re.fullmatch(rf"({'|'.join(MODELS)})_(.+)", name) for name in run.columns]
    for name in dict.fromkeys(one[2] for one in found if one):
        series = [
            curve
            for style, model in enumerate(MODELS)
            if (curve := quantile_curve(model, style, run.columns.get(f"{model}_{name}"), name)) is not None
        ]
        if series:
            yield Chart("curves", name.replace("_", " "), Axis("% of the clients"), Axis(unit(f"own_{name}")), series)


def quantile_curve(label: str, style: int, values: np.ndarray | None, name: str) -> Curve | None:
    """values: (c,), nan for clients without such rows; None for a model that was not evaluated."""
    there = np.empty(0) if values is None else values[np.isfinite(values)]
    if len(there) < 2:
        return None
    at = np.linspace(0, 1, min(PARTS, len(there) - 1) + 1)
    return Curve(label, style, {"% of the clients": numbers(100 * at)}, numbers(np.quantile(there, at) * factor(name)))


def unit(name: str) -> str:
    """The title of an axis with the values of a column of the table, without whose models they are of."""
    return with_unit(f"eval/{name.partition('_')[2]}")


# --- runs beside each other -------------------------------------------------------------------------------------------
def compared(runs: Sequence[ByClient], metric: str) -> str | None:
    """The column by which clients are compared: the one that the metric of a comparison is of, or that of own models
    with its last word; None if not all runs have it."""
    of = re.fullmatch(r"eval/(own|adapted)/(.+?)(_(weighted|std|worst|decile|q\d\d|better|equal|worse))?", metric)
    last = metric.rpartition("/")[2].rpartition("_")[2]
    wanted = [f"{of[1]}_{of[2]}"] if of else [f"own_{kind}_{last}" for kind in ("test", "validation", "training")]
    return next((name for name in wanted if runs and all(name in run.columns for run in runs)), None)


def pairs(runs: Sequence[ByClient], label: str, name: str) -> Iterator[list[np.ndarray]]:
    """[clients, values of the first label, values of another label] of the clients that both have, for each seed in
    which the clients have the same rows."""
    first = {run.seed: run for run in runs if run.label == runs[0].label}
    for run in runs:
        base = first.get(run.seed)
        if run.label == label and base is not None and base.has_rows_of(run):
            there = np.isfinite(base.columns[name]) & np.isfinite(run.columns[name])
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
    sign = 1 if best == "max" else -1
    for label in others(runs):
        if found := list(pairs(runs, label, name)):
            base, value = (np.concatenate([each[i] for each in found]) for i in (1, 2))
            shares = [float(np.mean(np.sign(value - base) * sign == way)) for way in (1, 0, -1)]
            change = float((value - base).mean()) * factor(metric_of(name))
            rows.append(row_of(label, *(f"{share:.1%}" for share in shares), f"{change:+.4g}", f"{len(base)}"))
    note = f"{unit(name)} of each client's model, against {runs[0].label}, where a client has the same rows and seed."
    return PageSection(BETTER_OFF, note, ["method", "better", "equal", "worse", "mean difference", "clients"], rows)


def scatters(runs: Sequence[ByClient], metric: str) -> PageSection:
    """A chart for each label, a point for each client: the value with the first label, and with this one."""
    name, charts = compared(runs, metric), list[Chart]()
    for style, label in enumerate(others(runs) if name is not None else (), 1):
        found = None if name is None else next(pairs(runs, label, name), None)
        if name is not None and found is not None and len(found[0]):
            x, y = (values * factor(metric_of(name)) for values in found[1:])
            ends = numbers([min(x.min(), y.min()), max(x.max(), y.max())])
            each = zip(found[0], x, y, strict=True)
            texts = [f"client {int(client)}\n{a:.4g} and {b:.4g}" for client, a, b in each]
            equal = Marks("equal", NO_STYLE, ends, ends, line=True, markers=False, legend=False)
            axes = (Axis(f"{unit(name)}, {runs[0].label}"), Axis(f"{unit(name)}, {label}"))
            points = Marks(label, style, numbers(x), numbers(y), texts=texts)
            charts.append(Chart("marks", label, *axes, [equal, points]))
    note = "A point is a client, at the first seed. Clients above the line have a larger value than in the first runs."
    return PageSection("Client by client", note, charts=charts)


def of_runs(folders: Mapping[Path, tuple[str, int]]) -> list[ByClient]:
    """The tables of runs. folders: folder -> (label, seed)."""
    found = (by_client(folder, *of) for folder, of in folders.items())
    return [run for run in found if run is not None]
