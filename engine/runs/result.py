"""The outcome of a finished run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..config.schema import Experiment
from ..records.history import History
from ..rounds.driver import Record
from ..storage.sha256 import sha256

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Result:
    """The result of a finished run.

    `rows`: a dictionary for each round; `records`: the same as a table of Arrow. `model`: name -> tensor of the final
    model. `seconds`: the duration of the whole run. `directory`: the run's folder, None for a run without files.
    """

    run_id: str
    experiment: Experiment
    rows: History
    model: dict[str, Tensor]
    seconds: float
    directory: Path | None = None

    @property
    def records(self) -> pa.Table:
        from ..records.parquet import to_table

        return to_table(self.rows)

    @property
    def model_sha256(self) -> str:
        return model_digest(self.model)

    @property
    def metrics(self) -> Record:
        """The metrics of the final evaluation, and the training loss of the last round."""
        return {key: value for key, value in self.rows[-1].items() if key.startswith(("eval/", "train/"))}

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
            "directory": str(self.directory) if self.directory else None,
        }


def model_digest(model: dict[str, Tensor]) -> str:
    """The SHA-256 of the names and bytes of a model's tensors, in the order of names."""
    return sha256(
        piece
        for name in sorted(model)
        for piece in (name.encode() + b"\0", model[name].detach().cpu().contiguous().numpy().tobytes())
    )
