"""The numbers of clients' own models over the clients, which the driver finds from those of each client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...workloads.client_index import ClientIndex
from .evaluation import WORST
from .own_models import WHO_HAS, Kind, rows_of

QUANTILES = (5, 10, 25, 50, 75, 90, 95)
CHOSEN = "chosen"
"""The model that a client chooses by its rows for validation."""


More = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Metrics of each client that follow from its others."""


class OfClients(NamedTuple):
    """What an evaluation has found of c clients. metrics: MODEL/KIND_METRIC -> (c,), NaN for a client without it.
    lacking: the names of those that clients with rows may lack. chosen: (c,) the number of the adaptation that each
    client has chosen, 0 for none; None where there is no choice. told: what the method tells of clients: name -> (c,).
    """

    clients: np.ndarray
    metrics: dict[str, np.ndarray]
    lacking: frozenset[str] = frozenset()
    chosen: np.ndarray | None = None
    told: Mapping[str, np.ndarray] = MappingProxyType({})

    @staticmethod
    def of(found: Mapping[str, np.ndarray]) -> OfClients:
        """found: `id`, and the arrays of a phase of OwnModels."""
        clients, metrics = found["id"], dict[str, np.ndarray]()
        for name in [name for name in found if "/" in name and not name.endswith(WHO_HAS)]:
            who = found.get(f"{name}{WHO_HAS}", found.get(f"{kind_of(name)}{WHO_HAS}", clients))
            metrics[name] = np.full(len(clients), np.nan)
            metrics[name][np.searchsorted(clients, who)] = found[name]
        lacking = frozenset(name for name in metrics if f"{name}{WHO_HAS}" in found)
        told = {name: values for name, values in found.items() if "/" not in name and name != "id"}
        return OfClients(clients, metrics, lacking, told=told)

    def columns(self, sizes: Mapping[str, np.ndarray], more: More) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name of a column of a table -> (its values, whether each client has one), (c,) both. sizes: (N,) the rows of
        each kind of all clients. more: `Workload.summary_of_clients`."""
        numbers = {**self.told, **({} if self.chosen is None else {CHOSEN: self.chosen})}
        found = {name: (values, np.ones(len(values), dtype=bool)) for name, values in numbers.items()}
        for name, values in self.metrics.items():
            there = sizes[kind_of(name)][self.clients] > 0
            found[name.replace("/", "_")] = values, there & ~np.isnan(values) if name in self.lacking else there
        for base, means in self._by_kind().items():
            first = f"{base}_{next(iter(means))}".replace("/", "_")
            found |= {
                f"{base.replace('/', '_')}_{name}": (column, found[first][1]) for name, column in more(means).items()
            }
        return found

    def _by_kind(self) -> dict[str, dict[str, np.ndarray]]:
        """MODEL/KIND -> metric -> (c,)."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, values in self.metrics.items():
            model, _, metric = name.partition("/")
            found.setdefault(f"{model}/{kind_of(name)}", {})[metric.partition("_")[2]] = values
        return found

    @property
    def models(self) -> list[str]:
        """The models that were evaluated, such as `own`, in their order."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.metrics))

    def with_choice(self, lower: Collection[str]) -> OfClients:
        """The same with the model `chosen`, for each client the one that is best on its rows for validation: by the
        loss, or by the first metric; of equal ones the earlier. lower: the metrics that are better when smaller."""
        models, kind = [name for name in self.models if name != "server"], "own/validation_"
        there = [name.removeprefix(kind) for name in self.metrics if name.startswith(kind)]
        metric = "loss" if "loss" in there else there[0]
        sign = 1 if metric in lower else -1
        values = np.stack([sign * self.metrics[f"{model}/validation_{metric}"] for model in models])
        best = np.where(np.isnan(values), np.inf, values).argmin(0)
        places, metrics = np.arange(len(best)), dict(self.metrics)
        for name in [name.removeprefix("own/") for name in self.metrics if name.startswith("own/")]:
            metrics[f"{CHOSEN}/{name}"] = np.stack([self.metrics[f"{model}/{name}"] for model in models])[best, places]
        lacking = {f"{CHOSEN}/{name.removeprefix('own/')}" for name in self.lacking if name.startswith("own/")}
        return self._replace(metrics=metrics, lacking=self.lacking | lacking, chosen=best)


def kind_of(name: str) -> str:
    """The kind of rows of a metric MODEL/KIND_METRIC."""
    return name.partition("/")[2].partition("_")[0]


def own_columns(
    found: OfClients,
    lower: Collection[str],
    client_index: ClientIndex,
    kinds: Sequence[Kind],
    populations: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """The columns of a round's record. lower: the metrics that are better when smaller. client_index: of all clients.
    populations: "" and "unseen/" -> (N,), which of all clients the numbers are of."""
    record: dict[str, float] = {}
    for kind in kinds:
        counts = rows_of(client_index, kind).sizes_of(found.clients)
        for name in (name for name in found.metrics if name.partition("/")[2].startswith(f"{kind}_")):
            model, _, metric = name.partition("/")
            base = found.metrics.get(f"server/{metric}") if model != "server" else None
            smaller = metric.removeprefix(f"{kind}_") in lower
            for population, members in populations.items():
                some = members[found.clients] & (counts > 0)
                if name in found.lacking:
                    lack = some & np.isnan(found.metrics[name])
                    some &= ~lack
                    record |= {f"eval/{population}{name}_missing": float(lack.sum())} if lack.any() else {}
                if some.any() and (population or model != "server"):  # it is evaluated on these rows already
                    server = None if base is None else base[some]
                    columns = distribution(found.metrics[name][some], counts[some], smaller, server)
                    record |= {f"eval/{population}{name}{suffix}": value for suffix, value in columns.items()}
    gaps = {}
    for name, value in record.items():
        whose = name.removeprefix("eval/unseen/")
        if whose != name and name.endswith("_weighted") and (mean := record.get(f"eval/{whose}")) is not None:
            gaps[f"eval/{whose.removesuffix('_weighted')}_gap"] = mean - value
    return record | gaps


def distribution(values: np.ndarray, counts: np.ndarray, lower: bool, server: np.ndarray | None) -> dict[str, float]:
    """How a metric (c,) is distributed over clients with `counts` (c,) rows. lower: whether lower values are better.
    server: (c,) the same of the server's model on the same rows, None without one."""
    worst_first = np.sort(values)[:: -1 if lower else 1]
    found = {
        "": values.mean(),
        "_weighted": (values * counts).sum() / counts.sum(),
        "_std": values.std(),
        "_worst": worst_first[: -(-len(values) // WORST)].mean(),
        "_decile": worst_first[len(values) // WORST],
    }
    found |= {f"_q{q:02}": np.quantile(values, q / 100) for q in QUANTILES}
    if server is not None:
        better, worse = (values < server, values > server) if lower else (values > server, values < server)
        found |= {"_better": better.mean(), "_equal": (values == server).mean(), "_worse": worse.mean()}
    return {suffix: float(value) for suffix, value in found.items()}
