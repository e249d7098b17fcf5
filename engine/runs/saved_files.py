"""The files in the folder of a run: their names, how they are read and written, and how folders of other commands are
told apart. The module is quick to import."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.earlier import today
from ..config.yaml_text import parse
from ..errors import ConfigError, first_line
from ..records.best_model import FILE as BEST
from ..records.best_model import Best
from ..records.client_models import FILE as CLIENT_MODELS
from ..records.lineage import FILE as FORK
from ..rounds.under_way import Outcome
from ..storage.atomic_write import RESERVE
from ..storage.lock import DRIVER, LAUNCHER
from ..storage.plain_files import read_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..records.history import Record

FILE_OF_KIND = {"run": "config.yaml", "study": "study.yaml", "search": "search.yaml"}
"""What a folder may hold, and the file that says so. The runs of studies and searches lie in folders below it."""
INITIAL = "initial.safetensors"
"""The model before round 1, if the caller gave one."""
FROZEN = "frozen.json"
"""Names, size and digest of the model's frozen tensors, if it has any."""
RESULT = ("rounds.parquet", "model.safetensors", BEST, "result.json")
"""The files of a result, in the order in which they get their names: with result.json the run is complete. Not every
result has a best model."""
FILES = (
    "config.yaml",
    "environment.json",
    "run.json",
    "run.log",
    "plan.json",
    FROZEN,
    "partition.json",
    "partition.arrow",
    CLIENT_MODELS,
    INITIAL,
    FORK,
    *RESULT,
)
"""The files that the launcher and the driver write into the folder itself."""
FOLDERS = ("state", "checkpoints", "clients", "client-models")
NAMES = (*FILES, *(f".{name}" for name in FILES), *FOLDERS, LAUNCHER, DRIVER, RESERVE)
"""Everything that a run may have in its folder."""


def refuse_other_kind(path: Path, kind: str) -> None:
    """Raise ConfigError if the folder holds something else than what shall be written into it, since both have files of
    the same names. kind: of FILE_OF_KIND."""
    for held, name in FILE_OF_KIND.items():
        if held != kind and (path / name).exists():
            raise ConfigError(
                f"--out {path} already holds a {held} ({name}), and a {kind} needs a folder of its own; choose another "
                "folder"
            )


def require_kind(path: Path, kind: str, file: str = "") -> None:
    """Raise ConfigError unless the folder holds what it is taken for. kind: of FILE_OF_KIND. file: that must be there
    (default: the file that says the kind)."""
    if not (path / (file or FILE_OF_KIND[kind])).is_file():
        raise ConfigError(f"{path} holds no {kind}; give the folder that `fedfleet {kind}` wrote")


class SavedResult(NamedTuple):
    """The files of a result. summary: of result.json."""

    summary: dict[str, Any]
    rows: list[Record]
    outcome: Outcome


def read_result(folder: Path, path_of: Callable[[Path], Path] = lambda path: path) -> SavedResult:
    """The files of the result in the folder of a run. path_of: where a file of this path lies in fact.

    Raises an exception of any kind if one of them is missing or damaged, and ValueError if they do not belong together.
    """
    rounds, model, best_model, result = (path_of(folder / name) for name in RESULT)
    summary, rows = json.loads(read_text(result)), read_rows(rounds)
    if len(rows) != summary["rounds"]:
        raise ValueError(f"rounds.parquet has {len(rows)} of {summary['rounds']} rounds")
    best = Best.loaded(best_model.read_bytes()) if summary.get("best") else None
    if best is not None and best.facts != summary["best"]:
        raise ValueError(f"{BEST} is of round {best.round}, and {RESULT[-1]} names another one")
    return SavedResult(summary, rows, Outcome(load_model(model), summary.get("stopped") or "", best))


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration that the run in a folder was started with. Raises ConfigError if the file is damaged."""
    file = folder / "config.yaml"
    try:
        found = parse(read_text(file), "it")
        found = "it is empty" if found is None else found
    except (OSError, ValueError) as error:
        found = first_line(error)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged ({found}); put the run's configuration back")
    return today(found)


def read_rows(path: Path) -> list[Record]:
    """The records of rounds.parquet. A record has only the columns that its round has."""
    import pyarrow.parquet as pq

    table = pq.read_table(path).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in table]


def load_model(path: Path) -> dict[str, Tensor]:
    """The tensors of a model in a file."""
    from safetensors.torch import load_file

    return load_file(path)


def initial_model(folder: Path) -> dict[str, Tensor] | None:
    """The model that the run in a folder was started with, or None. Raises ConfigError if the file is damaged."""
    if not (folder / INITIAL).is_file():
        return None
    try:
        return load_model(folder / INITIAL)
    except Exception as error:  # of whatever kind safetensors raises
        raise ConfigError(f"{folder / INITIAL} is damaged ({first_line(error)}); put the file back") from error


def save_model(model: dict[str, Tensor], path: Path, frozen: Sequence[str] = ()) -> None:
    """Write the tensors of a model. The file's metadata `frozen` has the names of the frozen ones, separated by
    commas, if there are any."""
    from safetensors.torch import save_file

    metadata = {"frozen": ",".join(frozen)} if frozen else None
    save_file({name: value.contiguous() for name, value in model.items()}, path, metadata)
