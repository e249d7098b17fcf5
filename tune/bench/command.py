"""The lines, tables and chart of `fedfleet bench`."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...algorithms.table import METHODS
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, nearest
from ...workloads.processors import processors
from ..files import override
from ..listing import columns
from ..page import svg
from ..page.content import NO_STYLE, Axis, Chart, Marks
from .measure import METHODS as OTHER_ARGUMENTS
from .measure import PARTS, Candidate, Measurement, Peer, alternate
from .works import FEDERATIONS

WORKS = tuple(FEDERATIONS)
FIRST = ("w1", "w2", "w3")
"""The works that are measured if none is named."""
OTHERS = ("scaffold", "fedmuon_bc")
ALONE = {"block": 1, "kernels": "torch"}

Found = dict[str, tuple[Candidate, list[Measurement]]]
"""The line's name -> the line and its measurements."""


def lines_of(asked: Sequence[str], methods: Sequence[str], peers: Sequence[str] = ()) -> list[Candidate]:
    """The lines to measure. Raises ConfigError.

    Each work has FedAvg with one client at a time, FedAvg with the plan that the engine chooses, and the peers; the
    first work has the other methods too. A line is measured once in each repeat, however often it is named. asked:
    works and settings `engine.a=b`; peers: NAME=COMMAND.
    """
    works = [word for word in asked if "=" not in word]
    for kind, words, valid in (("work", works, WORKS), ("method", methods, tuple({**METHODS, **OTHER_ARGUMENTS}))):
        if unknown := sorted(set(words) - set(valid)):
            raise ConfigError(f"bench has no {kind} {unknown[0]}; {nearest(unknown[0], valid)}")
    data = override({"workload": "w1", "method": "fedavg", "engine": {}}, [word for word in asked if "=" in word])
    experiment(data)  # raises ConfigError for an invalid setting
    engine, lines, others = data["engine"], [], [peer_of(word) for word in peers]
    for number, work in enumerate(works or FIRST):
        lines += [Candidate(work, "fedavg", {**engine, **ALONE}), Candidate(work, "fedavg", engine)]
        lines += [Candidate(work, method, engine) for method in methods or OTHERS if number == 0]
        lines += [Candidate(work, peer=peer) for peer in others]
    named: dict[str, Candidate] = {}
    for line in lines:
        if named.setdefault(line.name, line) != line:
            raise ConfigError(f"--peer: two lines would be called {line.name!r}; give the peer another name")
    return list(named.values())


def peer_of(word: str) -> Peer:
    """The peer of an option NAME=COMMAND; ConfigError if there is no command."""
    name, _, command = word.partition("=")
    try:
        if name and shlex.split(command.format(work="w1", rounds=1)):
            return Peer(name, command)
    except (ValueError, KeyError, IndexError):
        pass
    raise ConfigError(
        f"--peer must be NAME=COMMAND, got {word!r}; give a command that prints a JSON line with clients_per_s; "
        "{work} and {rounds} in it are replaced"
    )


def bench(
    lines: list[Candidate],
    how: dict[str, int],
    out: Path | None,
    log: Callable[[str], None],
    show: Callable[[Found], None],
) -> None:
    """Measure the lines. how: repeats, rounds and workers; out: file of the chart; log: receives a line of progress;
    show: receives what was measured, also if a later measurement fails or is interrupted."""
    found: Found = {}
    try:
        for line, pair in alternate(lines, **how, log=log):
            found.setdefault(line.name, (line, []))[1].append(pair)
    finally:
        if found:
            show(found)
    if out is not None:
        draw(found, out)


def text_of(found: Found) -> str:
    """Tables of the ratios to the plain loop, the parts of a round's time, the methods' costs, and the machine."""
    rows: list[tuple[str, ...]] = [("line", "ratio to plain loop", "clients/s", "first round, s", *PARTS)]
    for name, (line, pairs) in found.items():
        shares = [f"{100 * median(p.parts[part] for p in pairs):.1f} %" for part in PARTS if not line.peer]
        shares = shares or [""] * len(PARTS)
        seconds = [p.first for p in pairs if p.first is not None]
        first = f"{median(seconds):.1f}" if seconds else ""
        rows.append((name, spread([p.ratio for p in pairs]), f"{median(p.ours for p in pairs):.0f}", first, *shares))
    return "\n".join([columns(rows), *(f"\n{line}" for line in costs(found)), "", machine()])


def costs(found: Found) -> list[str]:
    """The other methods' time relative to FedAvg's with the same settings, compared within each repeat; the last repeat
    may be incomplete."""
    lines = []
    for name, (line, pairs) in found.items():
        base = found.get(line._replace(method="fedavg").name)
        if line.method != "fedavg" and base:
            times = [a.ratio / b.ratio for a, b in zip(base[1], pairs, strict=False)]
            lines.append(f"{name}: {spread(times)} times the time of fedavg")
    return lines


def spread(values: Sequence[float]) -> str:
    """The median, and in brackets the minimum and the maximum."""
    return f"{median(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def machine() -> str:
    """Versions, processors and load of this machine."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {processors()} processors "
        f"({processor()}), load {load}"
    )


def processor() -> str:
    """The processor's model as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def summary(found: Found) -> dict[str, Any]:
    """What `--json` prints."""
    lines = [{**line._asdict(), "pairs": [pair._asdict() for pair in pairs]} for line, pairs in found.values()]
    return {"lines": lines, "machine": machine()}


def draw(found: Found, path: Path) -> None:
    """Draw the median ratios, lines from the smallest to the largest ratio, and the plain loop as a line at 1."""
    series = [Marks("", NO_STYLE, [1, 1], [-0.5, len(found) - 0.5], line=True, markers=False)]
    labels = []
    for place, (name, (line, pairs)) in enumerate(found.items()):
        ratios, style = [pair.ratio for pair in pairs], WORKS.index(line.work)
        series.append(Marks("", style, [min(ratios), max(ratios)], [place, place], line=True, markers=False))
        series.append(Marks("", style, [median(ratios)], [place]))
        labels.append(f"{name}: {median(ratios):.2f}")
    title = "clients per second, relative to a plain two-process PyTorch loop"
    svg.save(Chart("marks", "", Axis(title, zero=True), Axis("", labels=tuple(labels)), series), path)
