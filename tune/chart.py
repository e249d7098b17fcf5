"""Learning curves as an image file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish; markers distinguish the lines in print."""
MARKERS = "os^DvPX"


def accuracies(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds that were evaluated. rows: the records of a run."""
    return [(int(row["round"]), row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def curves(runs: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str) -> None:
    """Draw one line per run. runs: label -> (round, accuracy) points, accuracy in [0, 1]; path: file to write."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for i, (label, points) in enumerate(runs.items()):
        rounds, values = [p[0] for p in points], [100 * p[1] for p in points]
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
        axes.plot(rounds, values, label=f"{label} ({values[-1]:.1f} %)", linewidth=1.8, **style)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
