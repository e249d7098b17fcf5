"""What runs, searches and studies write to MLflow alike: parameters, metrics and names of a run, which run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..engine.config.run_spec import RunSpec
from ..engine.config.schema import Experiment
from ..engine.rounds.driver import Record
from ..engine.storage.atomic_write import write
from ..engine.storage.secrets import redacted

BATCH = 100
"""Parameters a call at most (MLflow's own limit); metrics may be ten times as many."""

KEPT = "mlflow.json"
"""In the folder of a run, a search or a study: where its MLflow run is."""


# --- which run --------------------------------------------------------------------------------------------------------
def kept(folder: Path) -> dict[str, str]:
    """Store and id of the MLflow run that the folder names, or nothing."""
    try:
        found = json.loads((folder / KEPT).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: value for name, value in known.items() if isinstance(value, str)}


def keep(folder: Path, uri: str, run_id: str) -> None:
    write(folder / KEPT, json.dumps({"uri": redacted(uri), "run_id": run_id}) + "\n")


def again(client: Any, run_id: str) -> str:
    """The run, running again; "" where this store has none."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException:
        return ""
    client.update_run(run_id, status="RUNNING")
    return run_id


def nested(client: Any, experiment: str, parent: str) -> Iterator[Any]:
    """All runs below one."""
    below, token = f"tags.`mlflow.parentRunId` = '{parent}'", None
    while True:
        page = client.search_runs([experiment], below, max_results=500, page_token=token)
        yield from page
        if not (token := page.token):
            return


def not_tracked(error: Exception, what: str) -> None:
    """Say that a store has failed; what: run, search or study."""
    reason = " ".join(redacted(str(error) or type(error).__name__).split())
    print(f"warning: not tracked in MLflow: {reason}; the {what} itself goes on", file=sys.stderr)


# --- what is written --------------------------------------------------------------------------------------------------
def flatten(data: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; lists stay whole."""
    if isinstance(data, dict) and data:
        flat = {}
        for key, value in data.items():
            flat.update(flatten(value, f"{prefix}{key}."))
        return flat
    return {prefix[:-1]: str(data)}


def log_parameters(client: Any, run_id: str, experiment: Experiment) -> None:
    """The experiment's keys, flattened, in batches."""
    plain = experiment.plain()
    plain.pop("tracking")
    log_flat(client, run_id, plain)


def log_flat(client: Any, run_id: str, data: dict[str, Any]) -> None:
    """A tree of settings as parameters, cut to MLflow's longest."""
    from mlflow.entities import Param

    params = [Param(key, value[:6000]) for key, value in flatten(data).items()]
    for at in range(0, len(params), BATCH):
        client.log_batch(run_id, params=params[at : at + BATCH])


def log_metrics(
    client: Any, run_id: str, batch: Iterable[tuple[int, Record]], known: Collection[tuple[str, int]] = ()
) -> None:
    """(milliseconds, record) of each round, but for the (metric, round) in `known`; in batches."""
    from mlflow.entities import Metric

    metrics = [
        Metric(name, float(value), stamp, int(record["round"]))
        for stamp, record in batch
        for name, value in record.items()
        if name != "round" and (name, int(record["round"])) not in known
    ]
    for at in range(0, len(metrics), 10 * BATCH):
        client.log_batch(run_id, metrics=metrics[at : at + 10 * BATCH])


def steps(client: Any, run_id: str) -> set[tuple[str, int]]:
    """(metric, round) of all that is in the store."""
    names = client.get_run(run_id).data.metrics
    return {(name, metric.step) for name in names for metric in client.get_metric_history(run_id, name)}


def now() -> int:
    return int(time.time() * 1000)


# --- names ------------------------------------------------------------------------------------------------------------
def name_of(spec: Any) -> str:
    return spec["name"] if isinstance(spec, dict) else spec if isinstance(spec, str) else type(spec).__name__


def partition_of(run_spec: RunSpec) -> str:
    """By the name that was chosen, else the workload's default by its class."""
    spec = run_spec.experiment.workload
    if isinstance(spec, dict) and "partition" in spec:
        return name_of(spec["partition"])
    default = getattr(run_spec.workload, "partition", None)
    return "" if default is None else name_of(default).lower()


def commit() -> str:
    """Of the sources, where they are a git checkout; else of the current folder; else nothing."""
    for folder in (Path(__file__).parent, Path.cwd()):
        try:
            asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if asked.returncode == 0:
            return asked.stdout.strip()
    return ""
