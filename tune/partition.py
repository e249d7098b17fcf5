"""How unlike an experiment's clients are: a table of measures, and a chart of clients by classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..engine.config.held_out import unused_rows
from ..engine.config.run_spec import RunSpec
from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.records.partition_file import partition_digest
from ..workloads.base import ClientIndex
from .listing import columns

SEVERAL = 100
"""Clients up to which the chart has them by their numbers; more are sorted by their commonest class."""
FEW = 40
"""Clients, or classes, up to which each has its number at the axis."""
BLUE = "#08519c"


class Dealt(NamedTuple):
    """`counts`: (N, C) rows of each class, None where rows have no labels; `tests`: rows of the test set."""

    client_index: ClientIndex
    counts: np.ndarray | None
    tests: int
    left: str = ""  # on training rows that no client has

    @staticmethod
    def of(run_spec: RunSpec) -> Dealt:
        run_spec.workload.check()
        split = run_spec.split()
        tests = len(next(iter(split.test.values())))
        label = split.train.get("label")
        if label is None or label.ndim != 1 or not np.issubdtype(label.dtype, np.integer):
            return Dealt(split.client_index, None, tests, unused_rows(split))
        sizes, classes = split.client_index.sizes, int(label.max()) + 1
        client = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(client * classes + label[split.client_index.rows], minlength=len(sizes) * classes)
        return Dealt(split.client_index, counts.reshape(len(sizes), classes), tests, unused_rows(split))


def measures(dealt: Dealt) -> dict[str, np.ndarray]:
    """What each client (N,) has; the law of its labels against that of all clients' rows together."""
    found: dict[str, np.ndarray] = {"rows": dealt.client_index.sizes}
    if dealt.counts is None:
        return found
    law = dealt.counts / dealt.counts.sum(1, keepdims=True)
    whole = dealt.counts.sum(0) / dealt.counts.sum()
    found["labels"] = (dealt.counts > 0).sum(1)
    found["label entropy, bits"] = -np.where(law > 0, law * np.log2(np.where(law > 0, law, 1)), 0).sum(1) + 0.0
    found["total variation to all"] = np.abs(law - whole).sum(1) / 2
    return found


def told(dealt: Dealt) -> str:
    rows: list[tuple[str, ...]] = [("of a client", "min", "median", "mean", "max")]
    for name, values in measures(dealt).items():
        numbers = (values.min(), np.median(values), values.mean(), values.max())
        rows.append((name, *(f"{number:,.0f}" if number == int(number) else f"{number:,.3f}" for number in numbers)))
    about = f"{len(dealt.client_index.sizes):,} clients, {len(dealt.client_index.rows):,} training rows"
    about += f", {dealt.tests:,} test rows"
    if dealt.client_index.held is not None:
        about += f", {len(dealt.client_index.held.rows):,} rows held out by clients"
    about += f"\n{dealt.left}" if dealt.left else ""
    return f"{about}\n{columns(rows)}\npartition sha256 {partition_digest(dealt.client_index)[:16]}…"


def describe(experiment: Experiment, out: Path) -> str:
    """The table; the chart goes to `out`."""
    run_spec = RunSpec.of("partition", experiment)
    try:
        dealt = Dealt.of(run_spec)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from error
    try:
        draw(dealt, run_spec, out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--out {out} cannot be written: {error}; give the path of a .png, .svg or .pdf file"
        ) from None
    return f"{told(dealt)}\nchart in {out}"


# --- the chart --------------------------------------------------------------------------------------------------------
def ordered(counts: np.ndarray) -> np.ndarray:
    """The clients, in the order of the chart."""
    if len(counts) <= SEVERAL:
        return np.arange(len(counts))
    law = counts / counts.sum(1, keepdims=True)
    return np.lexsort((-law.max(1), law.argmax(1)))


def draw(dealt: Dealt, run_spec: RunSpec, out: Path) -> None:
    """Above, each client's rows; below, what share of them each class has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts, clients = dealt.counts, len(dealt.client_index.sizes)
    order = np.arange(clients) if counts is None else ordered(counts)
    heights = [1] if counts is None else [1, 2.6]
    size = (10, 2.4 if counts is None else 6)
    figure, axes = plt.subplots(len(heights), 1, figsize=size, dpi=120, sharex=True, height_ratios=heights)
    panels = [axes] if counts is None else list(axes)
    rows_of(panels[0], dealt.client_index.sizes[order])
    panels[0].set_title(title(run_spec, dealt), loc="left", fontsize=11)
    if counts is not None:
        classes_of(panels[1], (counts / counts.sum(1, keepdims=True))[order].T)
    numbered = counts is None or clients <= SEVERAL
    panels[-1].set_xlabel("client" if numbered else "clients, sorted by their commonest class")
    if clients <= FEW:
        panels[-1].set_xticks(range(clients))
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def rows_of(panel: Any, sizes: np.ndarray) -> None:
    """sizes: (N,)"""
    if len(sizes) <= FEW:
        panel.bar(range(len(sizes)), sizes, width=0.9, color=BLUE)
    else:  # bars of less than a pixel would vanish here and there
        panel.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=BLUE)
    panel.set(ylabel="rows", xlim=(-0.5, len(sizes) - 0.5), ylim=(0, None))
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.spines[["top", "right"]].set_visible(False)


def classes_of(panel: Any, law: np.ndarray) -> None:
    """law: (C, N), the share that each class has in each client's rows."""
    image = panel.imshow(law, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest", origin="lower")
    panel.set_ylabel("class")
    if len(law) <= FEW:
        panel.set_yticks(range(len(law)))
        panel.set_yticks(np.arange(len(law) - 1) + 0.5, minor=True)
        panel.grid(which="minor", axis="y", color="0.85", linewidth=0.6)
        panel.tick_params(which="minor", length=0)
    inside = panel.inset_axes((1.015, 0.0, 0.015, 1.0))
    panel.figure.colorbar(image, cax=inside, label="share of the client's rows")


def title(run_spec: RunSpec, dealt: Dealt) -> str:
    workload = run_spec.experiment.workload
    named, part = (workload["name"], workload.get("partition")) if isinstance(workload, dict) else (workload, None)
    if isinstance(part, dict):
        part = ", ".join([str(part["name"]), *(f"{k} {v}" for k, v in part.items() if k != "name")])
    part = part or repr(getattr(run_spec.workload, "partition", "clients of its own"))
    return f"{named}: {part}; {len(dealt.client_index.sizes):,} clients, seed {run_spec.experiment.seed}"
