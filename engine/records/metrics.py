"""What follows from the values of a metric: which of two is better, and whether a run ends early."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Direction, EarlyStop

EVALUATION = "eval/"
"""The beginning of the columns of an evaluation."""
OWN = r"(own|adapted(@\d+)?|chosen)"
"""Matches the models of clients, beside `server`, whose numbers over the clients are under eval/."""
DETAIL = r"_(weighted|std|worst|decile|q\d\d|better|equal|worse|missing)"
"""Matches what is behind a metric of clients' own models, besides its mean."""

COUNTS = ("eval/own/never", "eval/gradients", "eval/gradients_statistics")
"""Columns of an evaluation that measure no model."""
USUAL = ("eval/accuracy", "eval/own/test_accuracy")
"""What is shown of runs if no column is named, in this order, before all others of the evaluations."""
OF_ONE_FOLDER = 8
"""A message names the columns that begin alike, up to the last /, one by one if there are at most so many."""


def better(metric: str, lower: Iterable[str] = ()) -> Literal["max", "min"]:
    """Whether larger or smaller values of a column are better, also of one over clients, such as
    eval/clients/loss_worst. lower: as the workload has it."""
    if metric.endswith(("_better", "_worse", "_std", "_missing")):  # shares and counts of clients, and the deviation
        return "max" if metric.endswith("_better") else "min"
    if metric.endswith("_gap"):  # that of seen clients minus that of unseen ones
        return "min" if better(metric.removesuffix("_gap"), lower) == "max" else "max"
    name = re.sub(rf"^eval/(unseen/)?(clients|server|{OWN})/", "eval/", metric)
    name = re.sub(r"_(worst|weighted|decile|q\d\d)$", "", name)
    name = re.sub(r"^eval/(test|validation|training)_", "eval/", name)
    return "min" if name.endswith("loss") or name in {f"eval/{each}" for each in lower} else "max"


def is_in_short(metric: str) -> bool:
    """Whether a metric is among those that one line has room for: not one of the many that say how the metrics of
    clients' own models are distributed, besides the mean and that of the worst, and no count."""
    if metric in COUNTS:
        return False
    if metric.startswith("eval/unseen/"):
        return not re.search(rf"^eval/unseen/(server/|adapted@)|{DETAIL}$", metric)
    if metric.startswith("eval/adapted@"):
        return False  # what is chosen among the adaptations is there
    return metric.endswith("_worst") or not re.search(rf"^eval/{OWN}/.*({DETAIL}|_gap)$", metric)


def default_column(names: Iterable[str], *others: Iterable[str]) -> str:
    """The column that is shown if none is named: an accuracy, or else the first one of the evaluations. names: of the
    columns of a record. others: of further records that are shown beside it, which have the column if one is in all."""
    measured = [name for name in names if name.startswith(EVALUATION) and name not in COUNTS]
    alike = set(measured).intersection(*others)
    measured = [name for name in measured if name in alike] or measured
    return next((name for name in USUAL if name in measured), [*measured, "train/loss"][0])


def nearest_column(name: str, names: Iterable[str]) -> str:
    """A clause for a message about a column that a record lacks: the columns with the most similar names, then all, of
    which those of one folder, such as eval/own/, are one entry with their number if they are many."""
    names, folders = list(names), dict[str, list[str]]()
    for each in names:
        folders.setdefault(each[: each.rfind("/") + 1], []).append(each)
    close = get_close_matches(name, names, 3, 0.8) or get_close_matches(name, names, 1, 0.5)
    some = [
        ", ".join(own) if len(own) <= OF_ONE_FOLDER else f"{folder}… ({len(own)})" for folder, own in folders.items()
    ]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}{'valid: ' if names else 'none is known'}{', '.join(some)}"


class Metric(NamedTuple):
    """A column of the records, and whether larger (`max`) or smaller values (`min`) of it are better."""

    name: str
    mode: Literal["max", "min"]

    @staticmethod
    def of(name: str, best: Direction, lower: Iterable[str]) -> Metric:
        """lower: as the workload has it."""
        return Metric(name, better(name, lower) if best == "auto" else best)

    def beats(self, value: float, other: float, margin: float = 0.0) -> bool:
        """Whether a value is better than another one by more than the margin. NaN is worse than any number."""
        if math.isnan(value) or math.isnan(other):
            return not math.isnan(value)
        return value > other + margin if self.mode == "max" else value < other - margin


def why_stop(stop: EarlyStop, metric: Metric, measured: Sequence[tuple[int, float]], last: int) -> str:
    """Why a run ends after round `last`, as a clause; "" if it goes on. metric: of `stop`. measured: (round, value) of
    all rounds so far that have the metric.

    It follows from the records alone, so that a run which was interrupted ends after the same round.
    """
    if not measured or measured[-1][0] != last or last < stop.after:
        return ""
    if stop.target is not None and not metric.beats(stop.target, measured[-1][1]):
        return f"{metric.name} has reached {stop.target:g} with {measured[-1][1]:.6g}"
    if stop.patience is None:
        return ""
    best, value = 0, math.nan
    for number, one in measured:
        if metric.beats(one, value, stop.margin):
            best, value = number, one
    since = sum(number > best for number, _ in measured)
    if since < stop.patience:
        return ""
    than = f"{value:.6g} of round {best}" if best else "no number"
    by = f" by more than {stop.margin:g}" if stop.margin else ""
    return f"{metric.name} has not been better than {than}{by} in {since} evaluations"


# --- choices ---------------------------------------------------------------------------------------------------------
def on_validation(metric: str) -> str | None:
    """The column of a metric of test rows on the rows for validation; None for any other column."""
    name = metric.removeprefix("eval/")
    if name == metric or name.startswith("validation_"):
        return None
    whose, _, own = name.rpartition("/")
    if not whose:
        return f"eval/validation_{name}"
    return f"eval/{whose}/validation_{own.removeprefix('test_')}" if own.startswith("test_") else None


def refuse_test_metric(key: str, metric: str) -> None:
    """Raise ConfigError for a metric of test rows by which something would be chosen. key: what names the metric."""
    if instead := on_validation(metric):
        raise ConfigError(f"{key}: choices are made on validation rows, got {metric}; choose {instead}")
