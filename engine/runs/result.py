"""The outcome of a finished run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, uint8

from ..config.schema import Experiment, experiment
from ..errors import ConfigError, first_line
from ..records.best_model import Best
from ..records.history import UNTRAINED, History
from ..rounds.driver import Record
from ..storage.expanded import expanded
from ..storage.plain_files import refuse_unusual
from ..storage.sha256 import sha256
from .chart import Horizontal, draw, optional
from .client_states import ClientStates
from .evaluation import evaluate
from .saved_files import NAMES, read_result, require_kind, saved_config

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.axes import Axes

SHOWN_METRICS = 3
"""The largest number of metrics in the representation of a result."""


@dataclass(frozen=True)
class Result:
    """The result of a finished run.

    `rows`: a dictionary for each round; `records`: the same as a table of Arrow. `model`: name -> tensor of the final
    model. `total_seconds`: from the call to its end, with everything around the rounds, such as the start of Ray; of a
    run that was resumed, and of a fork, with the seconds of the rounds before that. `directory`: the run's folder, None
    for a run without files. `stopped`: why the run ended before its last round, as a clause, "" if it did not. `best`:
    the best model, with its round and value, if `checkpoint.best` names a metric.
    """

    run_id: str
    experiment: Experiment
    rows: History
    model: dict[str, Tensor]
    total_seconds: float
    directory: Path | None = None
    stopped: str = ""
    best: Best | None = None

    @staticmethod
    def load(folder: str | Path) -> Result:
        """The result in the folder of a finished run.

        `experiment` is read from config.yaml: a workload or a method that was an object is its representation, a text.
        Raises ConfigError if the folder holds no run, a run that has not finished, or damaged files.
        """
        path = expanded(folder).resolve()
        require_kind(path, "run", "run.json")
        refuse_unusual(path, NAMES)
        if not (path / "result.json").is_file():
            raise ConfigError(f"{path}: the run has not finished; resume it first")
        configuration = experiment(saved_config(path))
        try:
            summary, rows, (model, stopped, best) = read_result(path)
            seconds = summary["total_seconds"]
            return Result(summary["run_id"], configuration, History(rows), model, seconds, path, stopped, best)
        except Exception as error:  # damage shows itself in any kind of error
            raise ConfigError(
                f"{path}: the result is damaged or incomplete ({first_line(error)}); remove the folder to run it again"
            ) from error

    @property
    def records(self) -> pa.Table:
        """The numbers of all rounds, one row per round; a column is empty in rounds that did not measure it."""
        from ..records.parquet import to_table

        return to_table(self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """`records` as a data frame of pandas. Raises ConfigError if pandas is not installed."""
        optional("pandas", "or use records, a table of Arrow")
        return self.records.to_pandas()

    def plot(
        self,
        *columns: str,
        x: Horizontal = "round",
        ax: Axes | None = None,
        label: str | None = None,
        **style: Any,
    ) -> Axes:
        """Draw columns of the records over the rounds, with matplotlib. Returns the axes.

        columns: by default eval/accuracy or eval/own/test_accuracy, or else the first column of the evaluations. x: the
        horizontal axis; `bytes` are all bytes sent in both directions so far, `seconds` the durations of the rounds so
        far, `clock` the virtual clock of a run with a section `systems`. ax: axes to draw into, which may have the
        lines of other results; new ones by default. label: of the line in the legend, by default the method and the
        workload; if there are several columns, it is followed by the name of the column.
        style: arguments of `Axes.plot`. Raises ConfigError if a column is missing or matplotlib is not installed.
        """
        return draw(self.rows, columns, x, ax, label or self.experiment.title, style)

    def evaluate(
        self,
        test: Mapping[str, Any] | None = None,
        *,
        clients: bool = False,
        model: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float]:
        """Evaluate the final model in this process. Returns the columns eval/… of an evaluation.

        test: the columns of other test rows, name -> array or tensor (n, …), as the workload's own test set has them;
        None for the workload's test set. clients: whether to evaluate on each client's own training rows too, as
        `evaluate.fairness` does. model: another model, such as `best.model`; None for the final one. The numbers of the
        last round are repeated to the bit if the run had kernels of torch on a processor, and within rounding
        otherwise. Raises ConfigError for unsuitable rows, and for a workload that cannot be built here.
        """
        return evaluate(self.experiment, self.model if model is None else model, test, clients)

    def client_model(self, client: int, adapt: int = 0) -> dict[str, Tensor]:
        """The model of its own that a client is served with after the last round: name -> tensor. `fedfleet export`
        writes such models to files. adapt: the number of the adaptation after which it is served, from 1; 0 for none.
        Raises ConfigError if clients have no models, or if their states were not kept."""
        return self.client_states(adapt).model(client)

    def client_states(self, adapt: int = 0) -> ClientStates:
        """What the clients of the run have kept, for the models of many clients; errors as of `client_model`."""
        if self.directory is None:
            raise ConfigError("the run has no folder, so no states of clients were kept; run it with out")
        return ClientStates(self.directory, self.run_id, self.experiment, len(self.rows), adapt)

    @property
    def seconds(self) -> float:
        """The sum of the column time/seconds: the duration of all rounds, also of those before the run was resumed."""
        return float(sum(row["time/seconds"] for row in self.rows))

    @property
    def model_sha256(self) -> str:
        """The SHA-256 of the names and bytes of the final model's tensors."""
        return model_digest(self.model)

    @property
    def metrics(self) -> Record:
        """The metrics of the final evaluation, and the training loss of the last round."""
        return {key: value for key, value in self.rows[-1].items() if key.startswith(("eval/", "train/"))}

    @property
    def warnings(self) -> list[str]:
        """What makes the result doubtful, a sentence each: no client took a local step in any round; a metric of the
        last evaluation is not a number."""
        found = [UNTRAINED] if self.rows.untrained else []
        if lost := [name for name, value in self.metrics.items() if math.isnan(value)]:
            found.append(f"{', '.join(lost)}: not a number at the end, see the log of the run")
        return found

    def summary(self) -> dict[str, Any]:
        """The summary that `--json` prints and result.json has."""
        return {
            "run_id": self.run_id,
            "rounds": len(self.rows),
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "model_sha256": self.model_sha256,
            "bytes_down": int(sum(row["comm/bytes_down"] for row in self.rows)),
            "bytes_up": int(sum(row["comm/bytes_up"] for row in self.rows)),
            "seconds": round(self.seconds, 3),
            "total_seconds": round(self.total_seconds, 3),
            "directory": str(self.directory) if self.directory else None,
            "stopped": self.stopped or None,
            "best": self.best and self.best.facts,
            "warnings": self.warnings,
        }

    def __repr__(self) -> str:
        names = [name for name in self.metrics if name.startswith("eval/") and not name.startswith("eval/clients/")]
        names = [name for name in names if name.count("/") == 1] or names  # those of clients' own models are many
        metrics = [f"{name} {self.metrics[name]:.4g}" for name in names[:SHOWN_METRICS]]
        folder = [str(self.directory)] if self.directory else []
        facts = [f"{len(self.rows)} rounds", *metrics, f"{self.seconds:.1f} s", *folder]
        return f"Result({self.experiment.title}: {', '.join(facts)})"


def model_digest(model: dict[str, Tensor]) -> str:
    """The SHA-256 of the names and bytes of a model's tensors, in the order of names."""
    return sha256(
        piece
        for name in sorted(model)
        for piece in (name.encode() + b"\0", model[name].detach().cpu().contiguous().view(-1).view(uint8).numpy().data)
    )
