"""Draws the chart of the README: `python -m tools.readme_chart` writes docs/assets/digits.svg. It takes a minute.

Four methods on handwritten digits, on clients that have few classes each: the runs of `make demo`, with three seeds.
The runs use torch's kernels, one client at a time, so that the chart depends on no measurement of the machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.files import override
from fedfleet.tune.page.style import COLOURS
from fedfleet.tune.study.cells import cells
from fedfleet.tune.study.spec import load

PATH = Path(__file__).parents[1] / "docs/assets/digits.svg"
SEEDS = "[0, 1, 2]"
FIXED = ("engine.backend=local", "engine.block=1", "engine.kernels=torch", "tracking.uri=none")
GREY = "#808080"


def main() -> None:
    runs: dict[str, list[list[tuple[float, float]]]] = {}
    for cell in cells(load("demo", (f"seeds={SEEDS}",))):
        rows = run(experiment(override(cell.data, FIXED))).rows
        points = [(row["round"], 100 * row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
        runs.setdefault(cell.method, []).append(points)
    draw({label: np.array(points) for label, points in runs.items()}, PATH)
    print(f"{PATH} is drawn")


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """One line for each method, the mean over the seeds, and a band from the lowest to the highest seed.

    curves: label -> (seeds, evaluations, 2), each entry (round, accuracy in per cent).
    """
    import matplotlib
    from matplotlib.figure import Figure

    names = ("text.color", "axes.edgecolor", "xtick.color", "ytick.color", "axes.labelcolor")
    with matplotlib.rc_context({**dict.fromkeys(names, GREY), "svg.hashsalt": "digits"}):
        figure = Figure(figsize=(4.6, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for colour, (label, points) in zip(COLOURS, curves.items(), strict=False):
            rounds, values = points[0, :, 0], points[:, :, 1]
            final = values[:, -1].mean()
            axes.plot(rounds, values.mean(0), color=colour, linewidth=2, label=f"{label}, {final:.1f} %")
            axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(30, 100))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
