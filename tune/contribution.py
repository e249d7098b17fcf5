"""What each client contributes to a run: the run again without it, or without some of all clients.

The value of a set of clients is a metric at the end of a fork in which the others are drawn but not used
(`federation.without`), so that cohorts, batches and noise are those of the run. From such values follow

    leave one out   v(all) - v(all but i); a fork for each client
    Shapley         the mean over random orders of the clients of v(those before i, and i) - v(those before i);
                    Ghorbani, Zou, ICML 2019, arXiv:1904.02868, truncated Monte Carlo: an order ends where the value is
                    within a tolerance of v(all), and the clients behind have 0

Larger is better: values of metrics such as losses count with a minus. A fork from round 0 is the whole training again,
which is exact unlearning of the clients that are left out, and the yardstick of every method that approximates it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..engine.errors import ConfigError
from ..engine.records.metrics import better, nearest_column
from ..engine.run_spec import RunSpec
from ..engine.runs.result import Result
from ..engine.runs.saved_files import initial_model, require_kind
from ..engine.storage.atomic_write import write
from ..workloads import counted
from .forking import fork
from .listing import columns
from .report.statistics import paired
from .run_files import read_columns, read_config, read_json
from .streams import tell
from .units import evaluated_rows, factor, in_words, is_share

FILE = "values.json"
"""The values of sets of clients, in the folder of a contribution."""
QUIET = ("tracking=none",)
"""Settings in which forks differ from the run, without effect on their bits."""


@dataclass
class Coalitions:
    """The values of sets of clients of the run in the folder `run`, by forks after round `number`. out: the folder in
    which values are kept, so that a search that was interrupted goes on."""

    run: Path
    number: int
    metric: str
    out: Path
    clients: int = field(init=False)
    sign: int = field(init=False)  # of values: -1 for a metric of which lower values are better
    found: dict[str, dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        require_kind(self.run, "run", "result.json")
        federation = read_config(self.run)["federation"]
        self.clients = int(federation["clients"])
        run_id = read_json(self.run / "run.json").get("run_id")
        about = {"run": run_id, "rounds": federation["rounds"], "round": self.number}
        kept = read_json(self.out / FILE)
        if kept and kept.get("about") != about:
            raise ConfigError(f"--out: {self.out} has values of another run or round; give another folder")
        if not kept and self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise ConfigError(f"--out: {self.out} has files, but no values of a contribution; give another folder")
        lower = RunSpec.of("lower", Result.load(self.run).experiment).workload.lower
        self.about, self.sign = about, 1 if better(self.metric, lower) == "max" else -1
        self.found = kept.get("values", {})
        self.found[""] = last_values(read_columns(self.run))
        self.value(())

    def value(self, without: Iterable[int]) -> float:
        """The metric at the end without some clients; larger is better."""
        left_out = tuple(sorted(without))
        key = ",".join(map(str, left_out))
        if key not in self.found:
            self._keep()  # which says whose the folder is, before anything else lies there
            self.found[key] = self._forked(left_out) if len(left_out) < self.clients else self._before()
            self._keep()
        values = self.found[key]
        if self.metric not in values:
            known = [name for name in values if name.startswith(("eval/", "train/"))]
            where = f" without clients {key}" if key else ""
            raise ConfigError(
                f"--metric: the run has no column {self.metric}{where}; {nearest_column(self.metric, known)}"
            )
        return values[self.metric] * self.sign

    def _keep(self) -> None:
        """Write the values that are known."""
        self.out.mkdir(parents=True, exist_ok=True)
        write(self.out / FILE, json.dumps({"about": self.about, "values": self.found}, indent=1))

    def _before(self) -> dict[str, float]:
        """The metrics of the model that forks begin with, which is what is left without any client."""
        if self.number:
            record = read_columns(self.run)
            return last_values({name: values[record["round"] == self.number] for name, values in record.items()})
        result = Result.load(self.run)
        run_spec = RunSpec.of("before", result.experiment, initial_model=initial_model(self.run))
        model = {**dict(run_spec.initial_model().items()), **run_spec.frozen}
        return result.evaluate(model=model, clients=True)

    def _forked(self, without: tuple[int, ...]) -> dict[str, float]:
        folder = self.out / "fork"
        shutil.rmtree(folder, ignore_errors=True)  # of a search that was interrupted
        tell(f"fork {len(self.found)}: without {len(without)} of {self.clients} clients")
        fork(self.run, self.number, QUIET, folder, without_clients=without, progress=False)
        found = last_values(read_columns(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return found


def last_values(record: dict[str, np.ndarray]) -> dict[str, float]:
    """The last value of each metric that was measured."""
    there = {name: values[np.isfinite(values)] for name, values in record.items()}
    return {name: float(values[-1]) for name, values in there.items() if len(values) and name != "round"}


def leave_one_out(coalitions: Coalitions, players: Sequence[int]) -> dict[int, float]:
    """Client -> v(all) - v(all but this one)."""
    whole = coalitions.value(())
    return {client: whole - coalitions.value([client]) for client in players}


def shapley(
    value: Callable[[Iterable[int]], float], players: Sequence[int], permutations: int, seed: int, tolerance: float
) -> dict[int, list[float]]:
    """Client -> its marginal values in each of some random orders. value: of all clients without some; tolerance: of
    the difference from the value of all, from which on an order ends; 0 for whole orders."""
    whole, marginals = value(()), {client: list[float]() for client in players}
    for number in range(permutations):
        order = np.array(players)[counted.numpy_generator(seed, "contribution", number).permutation(len(players))]
        before = value(players)
        for place, client in enumerate(order.tolist()):
            near = tolerance > 0 and abs(whole - before) <= tolerance
            after = before if near else value(order[place + 1 :].tolist())
            marginals[client].append(after - before)
            before = after
    return marginals


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of independent samples: Student's interval of 95 %, nan for a single one."""
    own = dict(enumerate(samples))
    found = paired(own, dict.fromkeys(own, 0.0))
    return found.difference, found.low, found.high


@dataclass(frozen=True)
class Contributions:
    """Client -> samples, which are independent: of several runs their values, of one run those of its orders."""

    left_out: dict[int, list[float]]
    shapley: dict[int, list[float]]


def contributions(
    runs: Sequence[Coalitions], players: Sequence[int], permutations: int, seed: int, tolerance: float
) -> Contributions:
    """What clients contribute to runs that differ in their seeds. permutations: 0 for no Shapley values."""
    alone = [leave_one_out(run, players) for run in runs]
    orders = [shapley(run.value, players, permutations, seed, tolerance) for run in runs] if permutations else []
    of_orders = {client: [float(np.mean(each[client])) for each in orders] for client in players} if orders else {}
    if len(orders) == 1:
        of_orders = orders[0]
    return Contributions({client: [each[client] for each in alone] for client in players}, of_orders)


def text(found: Contributions, runs: Sequence[Coalitions]) -> str:
    """The table, the largest contributions first."""
    metric, number = runs[0].metric, runs[0].number
    scale, unit = factor(metric), " (points)" if is_share(metric) else ""

    def cells(samples: Sequence[float]) -> tuple[str, str]:
        mean, low, high = interval([value * scale for value in samples])
        return f"{mean:+.4g}", "–" if math.isnan(low) else f"{low:+.4g} to {high:+.4g}"

    decisive = found.shapley or found.left_out
    order = sorted(decisive, key=lambda client: -float(np.mean(decisive[client])))
    heads = ["client", "left out", "95 %", *(["Shapley", "95 %"] if found.shapley else [])]
    rows = [
        (str(client), *cells(found.left_out[client]), *(cells(found.shapley[client]) if found.shapley else ()))
        for client in order
    ]
    sign = "" if runs[0].sign > 0 else "minus "
    evaluated = evaluated_rows([read_config(runs[0].run).get("workload")])
    what = f"Contributions to {sign}{in_words(metric, evaluated)}{unit}, by forks after round {number}"
    forks = sum(len(run.found) - 1 for run in runs)
    return f"{what}: {forks} forks of {len(runs)} run{'s' * (len(runs) > 1)}\n{columns([tuple(heads), *rows])}"
