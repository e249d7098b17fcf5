"""Writes to MLflow: a single run, or the run of a search or study with one nested run for each trial or cell.

Whatever is resumed continues in its MLflow run, which the file mlflow.json in its folder names, and values that the
store has are not written again. The file has a token before the MLflow run has it as a tag, so that a process that is
killed in between leaves no second run.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError, first_line
from ...engine.records.metrics import EVALUATION, is_in_short
from ...engine.storage.atomic_write import write
from ...engine.storage.plain_files import read_text, unusual_kind
from ...engine.storage.secrets import redacted
from ...engine.storage.sha256 import sha256_of_json
from .stores import load_mlflow, open_store
from .writer import CLIENT_MODELS, FILES, REPORT, TOP, Batch, End, Writer

BATCH = 100
"""Largest number of parameters in a call (MLflow's limit); a call may have ten times as many metrics."""

KEPT = "mlflow.json"
"""File in the folder of a run, search or study that names its MLflow run."""

MODEL = "model"
"""Name of the logged model."""

TRAINING_PAGES = "workflowType=machine_learning"
"""Part of an address that makes MLflow's pages those for training runs; by default they are for language models."""

NOTE = "mlflow.note.content"
"""Tag of the description that MLflow's page of a run shows, in Markdown."""

OWN_NOTE = re.compile(r"|(\*\*.*\*\*\n\n)?\[Report with charts and tables\]\(\S*\)")
"""Matches a description that no reader has written."""

TABLES = "mlflow.loggedArtifacts"
"""Tag with the artifacts that MLflow's pages show as tables, also beside those of other runs."""

MOST_ROWS = 2000
"""Rows of a table on MLflow's pages, which read the whole of it."""

TOKEN = "fedfleet.token"
"""Tag of a top run with what its folder's file calls it before it has an id."""

OTHER_CHARACTERS, LONGEST_NAME = re.compile(r"[^/\w.\- :]"), 250
"""What MLflow does not allow in the names of metrics, parameters and tags, and the length that it allows."""

STATUS = {
    "finished": "FINISHED",
    "pruned": "KILLED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}
"""Value of the tag `status` -> MLflow's own status of a run. All other values mean FAILED."""


class MlflowWriter(Writer):
    """Writes to a store of MLflow."""

    tracker = "MLflow"

    def __init__(
        self,
        uri: str,
        experiment: str,
        folder: Path | None,
        what: str,
        child_tag: str = "",
        resumes: bool = True,
        system: bool = False,
    ) -> None:
        """Starts the thread.

        uri: of the store, as `stores.store` returns it. experiment: name of MLflow's experiment. folder: its file KEPT
        names the top run; or None. what: run, search or study, for the warning. child_tag: tag with the key of a nested
        run. resumes: whether to continue the MLflow run that the folder names, if it names one. system: whether to
        record the load of this machine in the top run. Raises ConfigError if that cannot be done.
        """
        if system and find_spec("psutil") is None:
            raise ConfigError("tracking.system needs the package psutil, got none; pip install psutil")
        self.uri, self.experiment, self.folder = uri, experiment, folder
        self.child_tag, self.resumes, self.system = child_tag, resumes, system
        self.is_local = uri.startswith("sqlite")
        self.mlflow: Any = None
        self.client: Any = None
        self.place = ""  # id of MLflow's experiment
        self.token = ""  # of the top run
        self.runs: dict[str, str] = {}  # key -> id of the MLflow run
        self.active: set[str] = set()  # keys of the runs that have not ended
        self.earlier: dict[str, Any] = {}  # key -> the MLflow run that an earlier process left
        self.known: dict[str, set[tuple[str, int]]] = {}  # key -> (metric, step) that the store has
        self.names: dict[str, str] = {}  # name of a metric, parameter or tag -> its name in MLflow
        self.refused: set[str] = set()  # metrics that the store refuses, by their names in MLflow
        self.monitor: Any = None  # of the machine's load
        super().__init__(what)

    def load(self) -> None:
        self.mlflow = load_mlflow()

    def open(self) -> None:
        self.client, self.place = open_store(self.uri, self.experiment)

    def stop(self) -> None:
        if self.monitor is not None:
            self.monitor.finish()
            self.monitor = None

    def is_refusal(self, error: Exception) -> bool:
        return getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"

    def begin_top(self) -> None:
        """Begin the top run, or continue the one that the folder names, with its nested runs."""
        before = kept(self.folder) if self.resumes else {}
        found = self._named(before)
        self.token = before.get("token") or uuid.uuid4().hex
        if found is not None:
            self.earlier[TOP] = found
            if self.child_tag:
                self.earlier.update((run.data.tags[self.child_tag], run) for run in self._below(found.info.run_id))
        else:
            self._keep("")
        run_id = self._run(TOP)
        self._keep(run_id)
        if self.system:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self.monitor = SystemMetricsMonitor(run_id, resume_logging=found is not None, tracking_uri=self.uri)
            self.monitor.start()

    def _named(self, before: dict[str, str]) -> Any:
        """The top run that an earlier process left, or None. before: what it kept."""
        run_id, token = before.get("run_id", ""), before.get("token", "")
        try:
            if run_id:
                return self.client.get_run(run_id)
            mine = self.client.search_runs([self.place], f"tags.`{TOKEN}` = '{token}'") if token.isalnum() else ()
        except self.mlflow.exceptions.MlflowException:  # the store has lost the run, or is another store
            return None
        return next(iter(mine), None)

    def _keep(self, run_id: str) -> None:
        """Write which run is the top run. run_id: empty if it is still to be created."""
        if self.folder is not None:
            names = {"uri": redacted(self.uri), "run_id": run_id, "token": self.token}
            write(self.folder / KEPT, json.dumps(names) + "\n")

    def _below(self, parent: str) -> Iterator[Any]:
        """All nested runs of a run."""
        below, token = f"tags.`mlflow.parentRunId` = '{parent}'", None
        while True:
            page = self.client.search_runs([self.place], below, max_results=500, page_token=token)
            yield from (run for run in page if self.child_tag in run.data.tags)
            if not (token := page.token):
                return

    def _run(self, key: str) -> str:
        """The MLflow id of a run. The MLflow run is created or continued at the first call."""
        if key in self.runs:
            return self.runs[key]
        (began, _), header = self.headers[key], self.header(key)
        if key == TOP:
            own = {} if self.folder is None else {TOKEN: self.token}
        else:
            own = {"mlflow.parentRunId": self.runs[TOP], self.child_tag: key}
        tags = {**self._allowed(header.tags), **own}
        before = self.earlier.get(key)
        if before is None:
            run = self.client.create_run(self.place, start_time=began, tags=tags, run_name=header.name)
            self.known[key] = set()
        else:
            run = before
            self.client.update_run(run.info.run_id, status="RUNNING")
            self.known[key] = self._steps(run)
            self._retag(run, tags)
            if key != TOP:
                self._rename(run, header.name)
            if "reason" in run.data.tags:
                self.client.delete_tag(run.info.run_id, "reason")
        self._parameters(run, header.parameters)
        if header.data_set and not (before and before.inputs and before.inputs.dataset_inputs):
            self._data_set(run.info.run_id, header.data_set)
        self.runs[key] = run.info.run_id
        self.active.add(key)
        return run.info.run_id

    def _retag(self, run: Any, tags: dict[str, str]) -> bool:
        """Set the tags that differ from those of an earlier process; returns whether there were any."""
        changed = {name: value for name, value in tags.items() if run.data.tags.get(name) != value}
        for name, value in changed.items():
            self.client.set_tag(run.info.run_id, name, value)
        return bool(changed)

    def _rename(self, run: Any, name: str) -> None:
        if run.info.run_name != name:
            self.client.update_run(run.info.run_id, name=name)

    def _allowed(self, values: dict[str, Any]) -> dict[str, Any]:
        """The same values, whose names are those in MLflow, so that different names stay different.

        Names that MLflow allows come first and stay as they are; another name that would be the same as an earlier one
        ends with digits of its own.
        """
        new = [name for name in values if name not in self.names]
        for name in sorted(new, key=lambda name: allowed(name) != name):
            made, taken = allowed(name), self.names.values()
            own = f"{made[: LONGEST_NAME - 7]}_{sha256_of_json(name)[:6]}"
            self.names[name] = own if made in taken else made
        return {self.names[name]: value for name, value in values.items()}

    def _steps(self, run: Any) -> set[tuple[str, int]]:
        """(metric, step) of all values that the store has of a run."""
        history = self.client.get_metric_history
        return {(name, metric.step) for name in run.data.metrics for metric in history(run.info.run_id, name)}

    def _parameters(self, run: Any, parameters: dict[str, Any]) -> None:
        """Write the parameters that the run does not have. MLflow refuses to change one: what a resumed run has
        changed, such as its number of rounds, is a tag `now.KEY`. Long values are cut."""
        flat = {key: value[:6000] for key, value in self._allowed(flatten(parameters)).items()} if parameters else {}
        before = run.data.params
        self._retag(run, {f"now.{key}": value for key, value in flat.items() if before.get(key, value) != value})
        params = [self.mlflow.entities.Param(key, value) for key, value in flat.items() if key not in before]
        for at in range(0, len(params), BATCH):
            self.client.log_batch(run.info.run_id, params=params[at : at + BATCH])

    def _data_set(self, run_id: str, arguments: dict[str, str]) -> None:
        entities = self.mlflow.entities
        used = entities.InputTag("mlflow.data.context", "training")
        self.client.log_inputs(run_id, [entities.DatasetInput(entities.Dataset(**arguments), [used])])

    def write_records(self, batch: Batch) -> None:
        run_id, known = self._run(batch.key), self.known.setdefault(batch.key, set())
        metric = self.mlflow.entities.Metric
        metrics = {
            (name, int(record["round"])): metric(name, float(value), stamp, int(record["round"]))
            for stamp, record in batch.records
            for name, value in self._allowed(record).items()
            if name != "round" and name not in self.refused and (name, int(record["round"])) not in known
        }
        steps = list(metrics)
        for at in range(0, len(steps), 10 * BATCH):
            part = steps[at : at + 10 * BATCH]
            self._log(run_id, [metrics[step] for step in part])
            known.update(part)

    def _log(self, run_id: str, metrics: list[Any]) -> None:
        """Write values. If the store refuses them, they are written metric by metric, and only those that it refuses
        alone are left out from then on."""
        try:
            self.client.log_batch(run_id, metrics=metrics)
        except Exception as error:
            names = {metric.key for metric in metrics}
            if len(names) == 1 or not self.is_refusal(error):
                self.tell_refused(error)
                self.refused |= names
                return
            for name in sorted(names):
                self._log(run_id, [metric for metric in metrics if metric.key == name])

    def is_written(self, end: End) -> bool:
        """The name of a run and its tags in `labels` are brought up to date. A run that has its tag `status` and that
        MLflow still calls running is written again: its process was killed between the two."""
        before = self.earlier.get(end.key)
        if not end.once or before is None:
            return False
        if (before.data.tags.get("status"), before.info.status) != (end.status, mlflow_status(end)):
            return False
        if self._retag(before, self._allowed(end.labels)):  # else a name may be one that a reader gave it in MLflow
            self._rename(before, end.name)
        return True

    def write_end(self, end: End) -> None:
        run_id = self._run(end.key)
        try:
            self._artifacts(run_id, end)
            if end.model is not None:
                self._model(end.key, run_id, end.model)
            if end.reason:
                self.client.set_tag(run_id, "reason", end.reason[:5000])
        finally:
            if end.key == TOP:
                self.stop()
            self.client.set_tag(run_id, "status", end.status)  # the tag comes late: it says that the run is complete
            self.client.set_terminated(run_id, mlflow_status(end))
            self.active.discard(end.key)
            for key in self.active if end.key == TOP else ():
                self.client.set_terminated(self.runs[key], "KILLED")
        self.known.pop(end.key, None)  # 100 bytes for each value of the run, of which none follows

    def _artifacts(self, run_id: str, end: End) -> None:
        paths = [end.folder / name for name in FILES] if end.folder is not None else []
        for path in (*paths, *end.files):
            if unusual_kind(path):
                continue  # the target of a link is not the run's
            if path.is_dir():
                self.client.log_artifacts(run_id, str(path), path.name)
            elif path.is_file():
                self.client.log_artifact(run_id, str(path))
        texts = end.texts()
        if end.folder is not None and (table := table_of_clients(end.folder)):
            texts = {**texts, **table}
            shown = [{"path": name, "type": "table"} for name in table]
            self.client.set_tag(run_id, TABLES, json.dumps(shown))
        for name, text in texts.items():
            self.client.log_text(run_id, text, name)
        if REPORT in texts or any(path.name == REPORT and path.is_file() for path in end.files):
            self._describe(run_id)

    def _describe(self, run_id: str) -> None:
        """Put two metrics and a link to the report into the run's description, unless a reader has written one. MLflow
        shows it above the table of all metrics, which, like its charts, has the order of the names."""
        found = self.client.get_run(run_id).data
        if OWN_NOTE.fullmatch(found.tags.get(NOTE, "")):
            place = f"#/experiments/{self.place}/runs/{run_id}/artifacts/{REPORT}?{TRAINING_PAGES}"
            lines = [in_front(found.metrics), f"[Report with charts and tables]({place})"]
            self.client.set_tag(run_id, NOTE, "\n\n".join(filter(None, lines)))

    def _model(self, key: str, run_id: str, export: Callable[[Path], Any]) -> None:
        """Log the final model, as `mlflow.pytorch.log_model` does, but without the global state of that function."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / MODEL
            try:
                described = export(folder)
            except Exception as error:  # torch raises many classes for what it cannot export
                self.warn(RuntimeError(first_line(error)), "the model is not logged in MLflow")
                return
            run = self.client.get_run(run_id)
            logged = self.client.create_logged_model(self.place, MODEL, run_id, params=run.data.params)
            described.artifact_path, described.run_id = logged.artifact_location, run_id
            described.model_uuid = described.model_id = logged.model_id
            described.save(str(folder / "MLmodel"))
            self.client.log_model_artifacts(logged.model_id, str(folder))
            self.client.finalize_logged_model(logged.model_id, "READY")
            last = max((step for _, step in self.known.get(key, ())), default=0)
            self.client.log_outputs(run_id, [self.mlflow.entities.LoggedModelOutput(logged.model_id, last)])


def mlflow_status(end: End) -> str:
    """MLflow's own status of a run that has ended."""
    return STATUS.get(end.status, "FAILED")


def flatten(data: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}. Lists are not flattened."""
    if isinstance(data, dict) and data:
        flat = {}
        for key, value in data.items():
            flat.update(flatten(value, f"{prefix}{key}."))
        return flat
    return {prefix[:-1]: str(data)}


def table_of_clients(folder: Path) -> dict[str, str]:
    """Name of an artifact -> the first rows of the run's table of clients, in the form of MLflow's tables; {} if there
    is none that can be read. The name says how many clients there are where some are left out."""
    path = folder / CLIENT_MODELS
    if unusual_kind(path) or not path.is_file():
        return {}
    from pyarrow import parquet

    try:
        found = parquet.read_table(path)
    except (OSError, ValueError):  # damaged
        return {}
    cut = f"-first-{MOST_ROWS}-of-{found.num_rows}" if found.num_rows > MOST_ROWS else ""
    columns = found.slice(0, MOST_ROWS).to_pydict().values()
    rows = [[None if each != each else each for each in row] for row in zip(*columns, strict=True)]
    return {f"clients{cut}.json": json.dumps({"columns": found.column_names, "data": rows})}


def in_front(metrics: dict[str, float]) -> str:
    """The two metrics of the last evaluation that come first, in Markdown; "" if there are none. Those over all clients
    come before those of a part, and losses last."""
    evaluated = [name for name in metrics if name.startswith(EVALUATION) and is_in_short(name)]
    evaluated.sort(key=lambda name: (name.count("/"), name.endswith("loss"), name))
    two = ", ".join(f"{name} {metrics[name]:.4f}" for name in evaluated[:2])
    return f"**{two}**" if two else ""


def allowed(name: str) -> str:
    """A name that MLflow allows: other characters become _, and so do the parts of a path that stand for no folder."""
    clean = OTHER_CHARACTERS.sub("_", name)[:LONGEST_NAME]
    if posixpath.normpath(clean) != clean or clean.startswith(("/", "..")) or clean == ".":
        clean = "/".join("_" if part in ("", ".", "..") else part for part in clean.split("/"))
        clean = f"_{clean[1:]}" if clean.startswith("..") else clean
    return clean[:LONGEST_NAME]


def kept(folder: Path | None) -> dict[str, str]:
    """`uri`, `run_id` and `token` of the MLflow run that the folder names, or {}."""
    try:
        found = json.loads(read_text(folder / KEPT)) if folder is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: value for name, value in known.items() if isinstance(value, str)}
