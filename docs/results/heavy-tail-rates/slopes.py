"""Fits the slopes of `fedfleet study heavy-tail-rates` and draws them.

    python docs/results/heavy-tail-rates/slopes.py runs/studies/heavy-tail-rates

For every method of which all cells have ended, every tail index s and number of clients N, the log of the mean norm of
the gradient over a run is fitted as a line in log T. A seed has a slope of its own; the mean of these slopes has a
confidence interval from Student's t, and a band is that of the mean over seeds at each T. Prints a table in Markdown
and writes charts/slopes.svg beside this file.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pyarrow.parquet as parquet
import yaml
from scipy import stats

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "slopes"
import matplotlib.pyplot as plt  # noqa: E402

COLUMN = "eval/gradient_norm2"


class Line(NamedTuple):
    """What is one line of the chart."""

    method: str
    clients: int
    tail: float


def runs(folder: Path) -> dict[Line, dict[int, dict[int, float]]]:
    """line -> seed -> T -> mean norm of the gradient over the evaluations of the run."""
    found: dict[Line, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("cells/*/rounds.parquet")):
        config = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
        federation = config["federation"]
        line = Line(config["name"].split(",")[0], federation["clients"], config["workload"]["tail"])
        squares = parquet.read_table(path, columns=[COLUMN])[COLUMN].drop_null().to_numpy()
        found[line][config["seed"]][federation["rounds"] * federation["local"]["steps"]] = float(
            np.sqrt(squares).mean()
        )
    return found


def interval(values: np.ndarray) -> np.ndarray:
    """Half the width of the 95 % confidence interval of the mean over the first axis, the seeds."""
    count = len(values)
    return stats.t.ppf(0.975, count - 1) * values.std(0, ddof=1) / count**0.5


def main(folder: Path, charts: Path) -> None:
    """Print the table of the slopes and write the chart."""
    found = runs(folder)
    clients, tails = (sorted({line[place] for line in found}) for place in (1, 2))
    sizes = {
        n: max(len(by_time) for line in found if line.clients == n for by_time in found[line].values()) for n in clients
    }
    complete = {line for line in found if all(len(by_time) == sizes[line.clients] for by_time in found[line].values())}
    methods = [
        m
        for m in sorted({line.method for line in found})
        if {Line(m, n, s) for n in clients for s in tails} <= complete
    ]
    figure, axes = plt.subplots(len(clients), len(tails), figsize=(3 * len(tails), 3 * len(clients)), squeeze=False)
    print("| N | s | bound | " + " | ".join(methods) + " |\n| --- | --- | --- |" + " --- |" * len(methods))
    for row, n in enumerate(clients):
        for column, tail in enumerate(tails):
            bound, cells = -(tail - 1) / (2 * tail), []
            panel = axes[row][column]
            for number, method in enumerate(methods):
                seeds = found[Line(method, n, tail)]
                times = np.array(sorted(next(iter(seeds.values()))))
                logs = np.log([[by_time[t] for t in times] for by_time in seeds.values()])
                slopes = np.array([np.polyfit(np.log(times), each, 1)[0] for each in logs])
                cells.append(f"{slopes.mean():.3f} ± {interval(slopes):.3f}")
                middle, half = logs.mean(0), interval(logs)
                panel.plot(times, np.exp(middle), marker="o", color=f"C{number}", label=method)
                panel.fill_between(times, np.exp(middle - half), np.exp(middle + half), color=f"C{number}", alpha=0.2)
                if number == 0:
                    panel.plot(times, np.exp(middle[0]) * (times / times[0]) ** bound, "k--", label="the bound's slope")
            panel.set(xscale="log", yscale="log", title=f"s = {tail}, N = {n}", xlabel="T", ylabel="mean gradient norm")
            panel.set_xticks(times, [f"{time:,}" for time in times])
            panel.xaxis.set_minor_formatter("")
            print(f"| {n} | {tail} | {bound:.3f} | " + " | ".join(cells) + " |")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    charts.mkdir(exist_ok=True)
    figure.savefig(charts / "slopes.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent / "charts")
