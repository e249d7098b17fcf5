"""Heterogeneity of an experiment's clients: a table of measures, and a chart of clients and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.records.partition_file import partition_digest
from ..engine.run_spec import RunSpec
from ..engine.workload.split import unused_rows
from ..workloads.client_index import ClientIndex
from .listing import columns
from .page.svg import load_matplotlib

SEVERAL = 100
"""The chart shows up to this many clients in the order of their numbers, and more sorted by their commonest class."""
FEW = 40
"""Up to this many clients or classes are numbered at the axis."""
MOST = 2000
"""Of more clients the chart shows so many, at even distances in its order: it has no more pixels than that."""
BLUE = "#08519c"


class PartitionSummary(NamedTuple):
    """`counts`: (N, C), rows of each class at each client, None if rows have no labels; `tests`: number of test rows;
    `left`: a sentence on training rows that no client has, "" if there are none."""

    client_index: ClientIndex
    counts: np.ndarray | None
    tests: int
    left: str = ""

    @staticmethod
    def of(run_spec: RunSpec) -> PartitionSummary:
        run_spec.workload.check()
        split = run_spec.split()
        tests = len(next(iter(split.test.values())))
        label = split.train.get("label")
        if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
            return PartitionSummary(split.client_index, None, tests, unused_rows(split))
        sizes, classes = split.client_index.sizes, int(label.max()) + 1
        client = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(client * classes + label[split.client_index.rows], minlength=len(sizes) * classes)
        return PartitionSummary(split.client_index, counts.reshape(len(sizes), classes), tests, unused_rows(split))


def measures(summary: PartitionSummary) -> dict[str, np.ndarray]:
    """Name -> (N,), a number for each client. Its label distribution is compared with that of all clients' rows."""
    found: dict[str, np.ndarray] = {"rows": summary.client_index.sizes}
    if summary.counts is None:
        return found
    law = shares(summary.counts)
    whole = summary.counts.sum(0) / summary.counts.sum()
    found["labels"] = (summary.counts > 0).sum(1)
    found["label entropy, bits"] = -np.where(law > 0, law * np.log2(np.where(law > 0, law, 1)), 0).sum(1) + 0.0
    found["total variation to all"] = np.abs(law - whole).sum(1) / 2
    return found


def table_of(summary: PartitionSummary) -> str:
    """Counts, a table of the measures over clients, and the partition's digest."""
    rows: list[tuple[str, ...]] = [("per client", "min", "median", "mean", "max")]
    for name, values in measures(summary).items():
        numbers = (values.min(), np.median(values), values.mean(), values.max())
        rows.append((name, *(f"{number:,.0f}" if number == int(number) else f"{number:,.3f}" for number in numbers)))
    about = f"{len(summary.client_index.sizes):,} clients, {len(summary.client_index.rows):,} training rows"
    about += f", {summary.tests:,} test rows"
    if summary.client_index.held is not None:
        about += f", {len(summary.client_index.held.rows):,} rows held out by clients"
    if summary.client_index.validation is not None:
        about += f", {len(summary.client_index.validation.rows):,} rows for validation"
    about += f"\n{summary.left}" if summary.left else ""
    return f"{about}\n{columns(rows)}\npartition sha256 {partition_digest(summary.client_index)[:16]}…"


def describe(experiment: Experiment, out: Path) -> str:
    """The table of measures as text; the chart is written to `out`. Raises ConfigError."""
    run_spec = RunSpec.of("partition", experiment)
    try:
        summary = PartitionSummary.of(run_spec)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from error
    try:
        draw(summary, run_spec, out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--out: {out} cannot be written: {error}; give the path of a .png, .svg or .pdf file"
        ) from None
    return f"{table_of(summary)}\nchart in {out}"


# --- the chart --------------------------------------------------------------------------------------------------------
def ordered(counts: np.ndarray) -> np.ndarray:
    """(N,), the clients in the order of the chart. counts: (N, C)."""
    if len(counts) <= SEVERAL:
        return np.arange(len(counts))
    law = shares(counts)
    return np.lexsort((-law.max(1), law.argmax(1)))


def shown(summary: PartitionSummary) -> np.ndarray:
    """The clients that the chart shows, in its order: all of them, or MOST at even distances."""
    sizes, counts = summary.client_index.sizes, summary.counts
    if len(sizes) <= MOST:
        return np.arange(len(sizes)) if counts is None else ordered(counts)
    order = np.argsort(sizes, kind="stable") if counts is None else ordered(counts)
    return order[np.linspace(0, len(order) - 1, MOST).round().astype(np.int64)]


def shares(counts: np.ndarray) -> np.ndarray:
    """(N, C): the share of each class in each client's rows. counts: (N, C)."""
    return counts / counts.sum(1, keepdims=True)


def axis_label(clients: int, by_class: bool) -> str:
    """What the horizontal axis shows. by_class: whether more than SEVERAL clients are sorted by their classes."""
    which = "clients" if clients <= MOST else f"{MOST:,} of {clients:,} clients at even distances"
    if by_class and clients > SEVERAL:
        return f"{which}, sorted by their commonest class"
    return "client" if clients <= MOST else f"{which}, sorted by their number of rows"


def draw(summary: PartitionSummary, run_spec: RunSpec, out: Path) -> None:
    """Draw the number of rows of each client, and below it the share of each class in these rows. Of a large population
    a sample is drawn, see MOST."""
    counts, clients = summary.counts, len(summary.client_index.sizes)
    order = shown(summary)
    heights = [1] if counts is None else [1, 2.6]
    size = (10, 2.4 if counts is None else 6)
    figure = load_matplotlib().figure.Figure(figsize=size, dpi=120, layout="tight")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    rows_of(panels[0], summary.client_index.sizes[order])
    panels[0].set_title(title(run_spec, summary), loc="left", fontsize=11)
    if counts is not None:
        classes_of(panels[1], shares(counts[order]).T)
    panels[-1].set_xlabel(axis_label(clients, counts is not None))
    if clients <= FEW:
        panels[-1].set_xticks(range(clients))
    figure.savefig(out)


def rows_of(panel: Any, sizes: np.ndarray) -> None:
    """Bars of the clients' rows. sizes: (N,), in the order of the chart."""
    if len(sizes) <= FEW:
        panel.bar(range(len(sizes)), sizes, width=0.9, color=BLUE)
    else:  # bars of less than a pixel would vanish here and there
        panel.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=BLUE)
    panel.set(ylabel="rows", xlim=(-0.5, len(sizes) - 0.5), ylim=(0, None))
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.spines[["top", "right"]].set_visible(False)


def classes_of(panel: Any, law: np.ndarray) -> None:
    """A colour map of classes and clients. law: (C, N), the share of each class in each client's rows."""
    image = panel.imshow(law, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest", origin="lower")
    panel.set_ylabel("class")
    if len(law) <= FEW:
        panel.set_yticks(range(len(law)))
        panel.set_yticks(np.arange(len(law) - 1) + 0.5, minor=True)
        panel.grid(which="minor", axis="y", color="0.85", linewidth=0.6)
        panel.tick_params(which="minor", length=0)
    inside = panel.inset_axes((1.015, 0.0, 0.015, 1.0))
    panel.figure.colorbar(image, cax=inside, label="share of the client's rows")


def title(run_spec: RunSpec, summary: PartitionSummary) -> str:
    workload = run_spec.experiment.workload
    named, part = (workload["name"], workload.get("partition")) if isinstance(workload, dict) else (workload, None)
    if isinstance(part, dict):
        part = ", ".join([str(part["name"]), *(f"{k} {v}" for k, v in part.items() if k != "name")])
    part = part or repr(getattr(run_spec.workload, "partition", "clients of its own"))
    return f"{named}: {part}; {len(summary.client_index.sizes):,} clients, seed {run_spec.experiment.seed}"
