"""What clients are served with in the runs of a study: how the reported metric is spread over them, and how many of
them are worse off than with another method.

Clients are compared one by one, in runs of the same seed whose clients have the same rows. Those that are never trained
with have columns of their own, and are not compared, since a method without a shared model has nothing for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...engine.records.client_models import FILE
from ..by_client import BETTER_OFF, better_off, of_clients
from ..page.content import PageSection, TableCell, row_of
from ..run_files import Columns, parquet, read_json


class Served(NamedTuple):
    """What the clients of a run get at its end. Of those that are trained with, the mean, the mean weighted by rows,
    the standard deviation and the mean over the worst tenth. `unseen`: the mean over the others, nan without any;
    `gradients`: all local gradients of the run; `split`: the digest of which client has which rows, "" if it is not
    known; `clients`: client -> the metric on its rows."""

    mean: float
    weighted: float
    std: float
    worst: float
    unseen: float
    gradients: float
    split: str
    clients: Mapping[int, float]


def served(folder: Path, columns: Columns, metric: str) -> Served | None:
    """Of the run in a folder, None if the metric is not about clients' models. columns: those of its record."""
    of = of_clients(metric)
    base = "" if of is None else f"eval/{of.model}/{of.metric}"
    if of is None or base not in columns:
        return None
    names = (base, f"{base}_weighted", f"{base}_std", f"{base}_worst", base.replace("eval/", "eval/unseen/", 1))
    mean, weighted, std, worst, unseen = (float(columns[n][-1]) if n in columns else math.nan for n in names)
    gradients = float(columns["client/gradients"].sum()) if "client/gradients" in columns else math.nan
    split = str(read_json(folder / "partition.json").get("sha256", ""))
    return Served(mean, weighted, std, worst, unseen, gradients, split, clients_of(folder, of.column))


def clients_of(folder: Path, name: str) -> dict[int, float]:
    """Client -> its value in a column of clients.parquet, of those that are trained with and have such rows."""
    table = parquet(folder / FILE)
    if table is None or name not in table.column_names:
        return {}
    seen = ["seen"] * table.num_rows if "population" not in table.column_names else table["population"].to_pylist()
    rows = zip(table["client"].to_pylist(), table[name].to_pylist(), seen, strict=True)
    return {client: value for client, value, population in rows if population == "seen" and value is not None}


def pairs(base: Sequence[Served], other: Sequence[Served]) -> tuple[np.ndarray, np.ndarray]:
    """(n,), (n,): the values of clients in the base runs and in the other ones, of runs that have the same split."""
    found = [
        (left.clients[client], right.clients[client])
        for left, right in zip(base, other, strict=True)
        if left.split and left.split == right.split
        for client in left.clients.keys() & right.clients.keys()
    ]
    columns = np.array(found, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def differences(base: Sequence[Served], other: Sequence[Served]) -> np.ndarray:
    """(clients,): for each client its value in the other runs minus that in the base runs, as a mean over the runs that
    have the same split."""
    found: dict[int, list[float]] = {}
    for left, right in zip(base, other, strict=True):
        if left.split and left.split == right.split:
            for client in left.clients.keys() & right.clients.keys():
                found.setdefault(client, []).append(right.clients[client] - left.clients[client])
    return np.array([np.mean(found[client]) for client in sorted(found)])


# --- tables -----------------------------------------------------------------------------------------------------------
class Row(NamedTuple):
    """A method at a level. runs: seed -> what its clients get."""

    level: str
    method: str
    runs: Mapping[int, Served]


def both(base: Row, other: Row) -> tuple[list[Served], list[Served]]:
    """The runs of two methods with the same seeds."""
    seeds = [seed for seed in base.runs if seed in other.runs]
    return [base.runs[seed] for seed in seeds], [other.runs[seed] for seed in seeds]


def spread_table(rows: Iterable[Row], factor: float, title: str) -> PageSection:
    """How the metric is spread over the clients. factor: to the unit of the tables; title: the metric with its unit."""
    names = ("mean", "weighted", "std", "worst", "unseen")
    made = [
        row_of(row.level, row.method, *(mean_of(row, name, factor) for name in names), mean_of(row, "gradients", 1.0))
        for row in rows
    ]
    note = (
        f"{title}: over the clients that are trained with, the mean, the mean weighted by rows, the standard deviation "
        "and the mean of the worst tenth; then the mean over the unseen clients. All are means over seeds. Gradients "
        "are those of all clients' batches in a run, without those of an adaptation."
    )
    heads = ["level", "method", "mean", "weighted", "deviation", "worst tenth", "unseen", "gradients"]
    return PageSection("Spread over clients", note, heads, made)


def mean_of(row: Row, name: str, factor: float) -> str:
    mean = float(np.mean([getattr(run, name) for run in row.runs.values()])) * factor
    return "–" if math.isnan(mean) else f"{mean:.4g}"


def worse_off(rows: Sequence[Row], against: Sequence[str], best: str, factor: float, title: str) -> PageSection:
    """How many clients are better and worse off than with each method of `against`; – where no client can be compared,
    as in runs that were restored from cells.jsonl and have not kept the values of the clients."""
    bases = {(row.level, row.method): row for row in rows}
    made = [line for name in against for row in rows for line in lines(bases.get((row.level, name)), row, best, factor)]
    note = (
        f"{title}: shares of the clients that are trained with, each compared with itself in the run of the same seed "
        "with the other method. Only runs with the same split are compared, and better and worse are strict."
    )
    heads = ["level", "against", "method", "better", "equal", "worse", "mean difference", "pairs"]
    return PageSection(BETTER_OFF, note, heads, made)


def lines(base: Row | None, row: Row, best: str, factor: float) -> Iterator[list[TableCell]]:
    if base is None or base.method == row.method:
        return
    left, right = pairs(*both(base, row))
    cells = ["–"] * 4
    if len(left):
        parts, difference = better_off(left, right, best)
        cells = [*(f"{share:.1%}" for share in parts), f"{difference * factor:+.4g}"]
    yield row_of(row.level, base.method, row.method, *cells, f"{len(left)}")
