"""Differences of runs on common random numbers: `fedfleet compare --paired`.

Two runs with the same seed and the same way of drawing clients draw the same clients, batches and noise, so that their
difference is the effect of their settings alone. If one is a fork of the other, they are even the same run up to a
round. The runs of several seeds are several pairs, whose differences have a mean and a confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError
from ...engine.records.metrics import nearest_column
from ...engine.runs.result import Result
from ..listing import columns
from ..report.statistics import Paired, paired
from ..run_files import ADDED_UP, same
from ..study.kept_results import is_restored

DRAWS = ("clients", "cohort", "sampler")
"""Keys of the section federation that the cohorts of a run follow from, besides its seed."""
SHOWN = 40
"""The largest number of pairs that have a line of their own in the text."""


class Pair(NamedTuple):
    """Two runs of the same seed. base, value: the metric of both, in the last round that both have measured, which is
    `round`. equal: the last round up to which both had the same training loss, None if a record has no losses. apart:
    |x' - x| / |x| of the final models, NaN if their shapes differ or a model is missing."""

    label: str
    seed: int
    round: int
    base: float
    value: float
    equal: int | None
    apart: float


class Comparison(NamedTuple):
    """Pairs of runs with those of the first label."""

    metric: str
    base: str
    pairs: list[Pair]

    @property
    def labels(self) -> list[str]:
        """The labels of the runs that are compared with the first ones, in their order."""
        return list(dict.fromkeys(pair.label for pair in self.pairs))

    def of(self, label: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.label == label]

    def difference(self, label: str) -> Paired:
        """The mean difference of a label from the first one, with its 95 % interval over seeds."""
        pairs = self.of(label)
        return paired({pair.seed: pair.value for pair in pairs}, {pair.seed: pair.base for pair in pairs})


def compare_paired(labelled: Iterable[tuple[str, Result]], metric: str) -> Comparison:
    """Compare runs with those that have the label of the first run.

    labelled: results with their labels. Raises ConfigError if there are no pairs, if two runs have one label and seed,
    or if two runs of a pair draw other cohorts.
    """
    runs: dict[str, dict[int, Result]] = {}
    for label, result in labelled:
        own = runs.setdefault(label, {})
        if (seed := result.experiment.seed) in own:
            places = f"{own[seed].directory or own[seed].run_id} and {result.directory or result.run_id}"
            raise ConfigError(f"--paired: {places} have the same settings and the same seed {seed}; give one of them")
        own[seed] = result
    base, *others = runs
    pairs = [
        pair_of(label, seed, runs[base][seed], runs[label][seed], metric)
        for label in others
        for seed in sorted(runs[label].keys() & runs[base].keys())
    ]
    if not pairs:
        raise ConfigError(
            f"--paired: no run has a partner of the same seed with other settings than {base}; give the runs of two "
            "settings at least, the one to compare with first"
        )
    return Comparison(metric, base, pairs)


def pair_of(label: str, seed: int, base: Result, other: Result, metric: str) -> Pair:
    """The pair of two runs of the same seed."""
    check_draws(base.experiment, other.experiment)
    first, second = measured(base, metric), measured(other, metric)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(
            f"--paired: seed {seed}: the runs have measured {metric} in no common round; choose the same evaluate.every"
        )
    last = common[-1]
    return Pair(label, seed, last, first[last], second[last], equal_until(base, other), apart(base, other))


def check_draws(base: Experiment, other: Experiment) -> None:
    """Raise ConfigError if two runs of the same seed draw other cohorts."""
    for key in DRAWS:
        a, b = (getattr(each.federation, key) for each in (base, other))
        if a != b:
            raise ConfigError(
                f"--paired: runs with federation.{key} {a} and {b} draw other cohorts, so that their difference is not "
                "that of the settings alone; leave --paired out"
            )


def measured(result: Result, metric: str) -> dict[int, float]:
    """round -> value, where the metric was measured."""
    if lacks(result, metric):
        known = [name for name in result.rows.columns if name.startswith(("eval/", "train/"))]
        raise ConfigError(f"--metric: run {result.run_id} has no column {metric}; {nearest_column(metric, known)}")
    values, there = result.rows.column(metric)
    rounds = result.rows.column("round")[0]
    return dict(zip(rounds[there].astype(int).tolist(), values[there].tolist(), strict=True))


def lacks(result: Result, metric: str) -> bool:
    """Whether a result has no column with the values of single rounds; see `run_files.has_measured`."""
    rows = result.rows
    return metric not in rows.columns or (metric in ADDED_UP and len(rows) < rows.column("round")[0][-1])


def equal_until(base: Result, other: Result) -> int | None:
    """The last round up to which two runs had the same training loss; None if one of the records has no losses, as
    most of those that were restored from cells.jsonl. The others have twelve digits of them."""
    if any("train/loss" not in result.rows.columns for result in (base, other)):
        return None
    first, second = (result.rows.column("train/loss")[0] for result in (base, other))
    count = min(len(first), len(second))
    first, second = first[:count], second[:count]
    alike = same(first, second) if any(map(was_restored, (base, other))) else first == second
    alike |= np.isnan(first) & np.isnan(second)
    return count if alike.all() else int(np.argmin(alike))


def was_restored(result: Result) -> bool:
    return result.directory is not None and is_restored(result.directory)


def apart(base: Result, other: Result) -> float:
    """|x' - x| / |x| of two final models; NaN if their shapes differ, or if they are empty, as of runs that have left
    no model."""
    if {name: leaf.shape for name, leaf in base.model.items()} != {n: leaf.shape for n, leaf in other.model.items()}:
        return math.nan
    moved = sum(float((other.model[name].double() - leaf.double()).square().sum()) for name, leaf in base.model.items())
    size = sum(float(leaf.to(torch.float64).square().sum()) for leaf in base.model.values())
    return math.sqrt(moved / size) if size else math.nan


# --- output -----------------------------------------------------------------------------------------------------------
def text(found: Comparison) -> str:
    """The comparison as text: a line for each label, then one for each pair."""
    summary = [("run", "pairs", "difference", "95 % interval", "p", "models apart")]
    for label in found.labels:
        of, pairs = found.difference(label), found.of(label)
        p, interval = f"{of.p:.2g}", f"{of.low:+.4g} to {of.high:+.4g}"
        if math.isnan(of.p):
            p, interval = "", "needs two pairs" if of.n < 2 else "all pairs differ equally"
        moved = float(np.mean([pair.apart for pair in pairs]))
        distance = "–" if math.isnan(moved) else f"{moved:.3g}"
        summary.append((label, str(of.n), f"{of.difference:+.6g}", interval, p, distance))
    single = [("run", "seed", "round", "its value", "compared with", "difference", "equal up to round")]
    for pair in found.pairs[:SHOWN]:
        values = (f"{pair.value:.6g}", f"{pair.base:.6g}", f"{pair.value - pair.base:+.6g}")
        equal = "–" if pair.equal is None else str(pair.equal)
        single.append((pair.label, str(pair.seed), str(pair.round), *values, equal))
    more = [f"and {len(found.pairs) - SHOWN} more pairs"] if len(found.pairs) > SHOWN else []
    head = f"{found.metric}, differences from: {found.base}"
    return "\n".join([head, "", columns(summary), "", columns(single), *more])


def rows_of(found: Comparison) -> list[dict[str, float]]:
    """The comparison as a table, with a row for each label."""
    rows: list[dict[str, float]] = []
    for label in found.labels:
        of, pairs = found.difference(label), found.of(label)
        equal = [pair.equal for pair in pairs if pair.equal is not None]
        rows.append(
            {
                "pairs": of.n,
                found.metric: float(np.mean([pair.value for pair in pairs])),
                "difference": of.difference,
                "low": of.low,
                "high": of.high,
                "p": of.p,
                "equal rounds": min(equal) if len(equal) == len(pairs) else math.nan,
                "models apart": float(np.mean([pair.apart for pair in pairs])),
            }
        )
    return rows
