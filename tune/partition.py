"""Heterogeneity of an experiment's clients: a table of measures, and a chart.

The chart has the rows of every client and the classes of these rows; below them, where there is any of it, what else
differs between clients (rates of wrong labels, angles of images …), how their classes drift over the rounds, and images
as some of the clients see them.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.records.heterogeneity import measures, spread
from ..engine.records.partition_file import partition_digest
from ..engine.run_spec import RunSpec
from ..engine.workload.split import seen_and_unseen, unused_rows
from ..workloads.client_index import ClientIndex
from ..workloads.workload import Columns
from .listing import columns
from .page.svg import load_matplotlib

SEVERAL = 100
"""The chart shows up to this many clients in the order of their numbers, and more sorted by their commonest class."""
FEW = 40
"""Up to this many clients or classes are numbered at the axis."""
MOST = 2000
"""Of more clients the chart shows so many, at even distances in its order: it has no more pixels than that."""
BLUE = "#08519c"
ROUNDS, DRIFTING = 200, 30
"""The most rounds and clients of which the chart shows the drift, at even distances."""
WIDE = 110
"""Letters in a line of the title."""
PICTURED, EACH = 16, 4
"""The most clients whose images the chart shows, and images of each."""
NAMES = {"label_entropy": "label entropy, bits", "total_variation": "total variation to all"}
"""Measure -> its name in the table, if that is another."""


class PartitionSummary(NamedTuple):
    """`counts`: (N, C), rows of each class at each client, None if rows have no labels; `tests`: number of test rows;
    `left`: a sentence on training rows that no client has, "" if there are none; `train`: the training columns;
    `differences`: those that the workload makes, see `Workload.differences`; `rounds`: R."""

    client_index: ClientIndex
    counts: np.ndarray | None
    tests: int
    left: str = ""
    train: Columns = MappingProxyType({})
    differences: Mapping[str, np.ndarray] = MappingProxyType({})
    rounds: int = 1

    @staticmethod
    def of(run_spec: RunSpec) -> PartitionSummary:
        run_spec.workload.check()
        split = run_spec.split()
        experiment, tests = run_spec.experiment, len(next(iter(split.test.values())))
        seen, _ = seen_and_unseen(experiment.federation, experiment.seed)
        found = run_spec.workload.differences(experiment.seed, experiment.federation.all_clients)
        differences = {name: values[seen] for name, values in found.items()}
        more = (tests, unused_rows(split), split.train, differences, experiment.federation.rounds)
        label = split.train.get("label")
        if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
            return PartitionSummary(split.client_index, None, *more)
        return PartitionSummary(split.client_index, class_counts(split.client_index.whole, label), *more)

    @property
    def pictures(self) -> np.ndarray | None:
        """The training inputs, (n, C, height, width), if they are images; else None."""
        x = self.train.get("input")
        return x if x is not None and x.ndim == 4 and min(x.shape[2:]) > 3 and x.dtype.kind in "uf" else None


def class_counts(index: ClientIndex, label: np.ndarray) -> np.ndarray:
    """(N, C): the rows of each class at each client. label: (n,) of all training rows."""
    clients, classes = len(index.sizes), int(label.max()) + 1
    client = np.repeat(np.arange(clients), index.sizes)
    return np.bincount(client * classes + label[index.rows], minlength=clients * classes).reshape(clients, classes)


def named_measures(summary: PartitionSummary) -> dict[str, np.ndarray]:
    """Name in the table -> (N,), a number for each client."""
    index = summary.client_index
    measured = measures(index.whole, summary.train.get("label"))
    found = {NAMES.get(name, name): values for name, values in measured.items()}
    drifting = {} if index.drift is None else {"rows of a round": index.sizes}
    return {"rows": found.pop("rows"), **drifting, **found, **summary.differences}


def table_of(summary: PartitionSummary) -> str:
    """Counts, a table of the measures over clients, and the partition's digest."""
    rows: list[tuple[str, ...]] = [("per client", "min", "median", "mean", "max")]
    for name, values in named_measures(summary).items():
        rows.append((name, *(f"{it:,.0f}" if it == int(it) else f"{it:,.3f}" for it in spread(values).values())))
    about = f"{len(summary.client_index.sizes):,} clients, {len(summary.client_index.whole.rows):,} training rows"
    if (unseen := summary.client_index.unseen) is not None:
        about += f", {len(unseen.sizes):,} unseen clients with {len(unseen.whole.rows):,}"
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
        write(chart(summary, title(run_spec, summary)), table_of(summary), out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--out: {out} cannot be written: {error}; give the path of a .png, .svg, .pdf or .html file"
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


def write(figure: Any, table: str, out: Path) -> None:
    """Write a figure to a file of the kind that its name says. A page has the table too."""
    if out.suffix != ".html":
        figure.savefig(out)
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Partition</title><style>body { font: 15px '
        "sans-serif; margin: 1.5em; color: #222; background: #fff } svg { max-width: 100%; height: auto } pre "
        f"{{ overflow-x: auto }}</style><pre>{html.escape(table)}</pre>{svg[svg.index('<svg') :]}</html>\n"
    )
    out.write_text(page, encoding="utf-8")


def chart(summary: PartitionSummary, title: str) -> Any:
    """The figure. Its first panels, which share the axis of clients, are the number of rows of each client, the share
    of each class in them, and what the workload makes different; of a large population a sample is drawn, see MOST."""
    counts, clients, order = summary.counts, len(summary.client_index.sizes), shown(summary)
    drifts, pictures = summary.client_index.drift is not None and counts is not None, summary.pictures is not None
    heights = [1.0, *([] if counts is None else [2.6]), *(0.6 for _ in summary.differences)]
    below = [2.2] * drifts + [1.6] * pictures
    size = (10, 1.5 * sum((*heights, *below)) + 0.9)
    whole = load_matplotlib().figure.Figure(figsize=size, dpi=120, layout="constrained")
    parts = iter(whole.subfigures(1 + len(below), 1, height_ratios=[sum(heights) + 0.4, *below], squeeze=False)[:, 0])
    panels = next(parts).subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    rows_of(panels[0], summary.client_index.whole.sizes[order])
    panels[0].set_title(title, loc="left", fontsize=11)
    if counts is not None:
        classes_of(panels[1], shares(counts[order]).T)
    for panel, name in zip(panels[len(panels) - len(summary.differences) :], summary.differences, strict=True):
        rows_of(panel, summary.differences[name][order])
        panel.set_ylabel(name.replace(", ", "\n").replace(" of ", "\nof "), rotation=0, ha="right", va="center")
    panels[-1].set_xlabel(axis_label(clients, counts is not None))
    if clients <= FEW:
        panels[-1].set_xticks(range(clients))
    if drifts:
        drift_of(next(parts).subplots(), summary, order)
    if pictures:
        images_of(next(parts).subplots(), summary, order)
    return whole


def rows_of(panel: Any, sizes: np.ndarray) -> None:
    """Bars of the clients' rows, or of another number. sizes: (N,), in the order of the chart."""
    if len(sizes) <= FEW:
        panel.bar(range(len(sizes)), sizes, width=0.9, color=BLUE)
    else:  # bars of less than a pixel would vanish here and there
        panel.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=BLUE)
    panel.set(ylabel="rows", xlim=(-0.5, len(sizes) - 0.5), ylim=(min(0, sizes.min()), None))
    if sizes.dtype.kind in "iu":
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


def some(count: int, most: int) -> np.ndarray:
    """All of 0 … count - 1, or `most` of them at even distances."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def drift_of(panel: Any, summary: PartitionSummary, order: np.ndarray) -> None:
    """A colour map of rounds and clients: the commonest class in each window."""
    clients, rounds = order[some(len(order), DRIFTING)], 1 + some(summary.rounds, ROUNDS)
    indices, label = (summary.client_index.at(round) for round in rounds.tolist()), summary.train["label"]
    commonest = np.stack([class_counts(index, label)[clients].argmax(1) for index in indices], 1)
    last = float(rounds[-1]) if len(rounds) > 1 else 1.5
    image = panel.imshow(
        commonest,
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        extent=(0.5, last + 0.5, len(clients) - 0.5, -0.5),
    )
    panel.set(xlabel="round", ylabel="client", yticks=range(len(clients)))
    panel.set_yticklabels([str(number) for number in clients], fontsize=7)
    panel.figure.colorbar(image, ax=panel, label="commonest class of the round", pad=0.01)


def images_of(panel: Any, summary: PartitionSummary, order: np.ndarray) -> None:
    """The first images of some clients, one column for each of them."""
    clients, index, images = order[some(len(order), PICTURED)], summary.client_index, summary.train["input"]
    _, channels, height, width = images.shape
    colours = 3 if channels == 3 else 1
    sheet = np.full((EACH * (height + 1), len(clients) * (width + 1), colours), np.nan)
    for column, client in enumerate(clients.tolist()):
        for row, number in enumerate(index.rows[index.offsets[client] : index.offsets[client + 1]][:EACH].tolist()):
            top, left = row * (height + 1), column * (width + 1)
            sheet[top : top + height, left : left + width] = images[number, :colours].transpose(1, 2, 0)
    low, high = (0, 255) if images.dtype == np.uint8 else (np.nanmin(sheet), np.nanmax(sheet))
    sheet = np.nan_to_num((sheet - low) / max(high - low, 1e-12), nan=1.0)
    panel.imshow(
        sheet if colours == 3 else sheet[..., 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal"
    )
    panel.set(xticks=(np.arange(len(clients)) + 0.5) * (width + 1) - 1, yticks=[], xlabel="what clients see")
    panel.set_xticklabels([str(number) for number in clients])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def title(run_spec: RunSpec, summary: PartitionSummary) -> str:
    """The workload, with those that it is around, and the partition."""
    asked, built, names = run_spec.experiment.workload, run_spec.workload, list[str]()
    while isinstance(asked, dict) and "of" in asked:
        names, asked, built = [*names, str(asked["name"])], asked["of"], getattr(built, "of", built)
    named, part = (asked["name"], asked.get("partition")) if isinstance(asked, dict) else (asked, None)
    part = words(part or getattr(built, "partition", "clients of its own"))
    clients, seed = len(summary.client_index.sizes), run_spec.experiment.seed
    return "\n".join(wrap(f"{' of '.join([*names, str(named)])}: {part}; {clients:,} clients, seed {seed}", WIDE))


def words(part: Any) -> str:
    """A part of an experiment: its name and its arguments, those of parts within it in parentheses."""
    if not isinstance(part, dict):
        return str(part)
    more = [f"{k} ({words(v)})" if isinstance(v, dict) else f"{k} {v}" for k, v in part.items() if k != "name"]
    return ", ".join([str(part["name"]), *more])
