"""The charts of the pages of methods, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

import io

from fedfleet.tune.page.style import COLOURS

from . import measured

GREY = "#808080"
STEP = 20
"""Rounds between two evaluations of the measured runs."""


def learning_curves(name: str) -> str:
    """An SVG with the test accuracy of a method at both levels, and with that of FedAvg as thin lines."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "text.color": GREY, "axes.edgecolor": GREY}
    with matplotlib.rc_context({**style, "xtick.color": GREY, "ytick.color": GREY, "axes.labelcolor": GREY}):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for label, width in (("fedavg", 0.8), (name, 2.2)):
            for colour, (level, accuracy) in zip(COLOURS, measured.curves(label).items(), strict=False):
                rounds = [STEP * (i + 1) for i in range(len(accuracy))]
                legend = f"{label}, Dirichlet({level:g})" if label == name else None
                axes.plot(rounds, [100 * a for a in accuracy], color=colour, linewidth=width, label=legend)
        axes.set(xlabel="round", ylabel="test accuracy, %")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return drawn.getvalue()
