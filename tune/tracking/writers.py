"""The kinds of trackers, by the names that `tracking` has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ...engine.errors import ConfigError, nearest
from .csv_writer import CsvWriter
from .mlflow_process import taken
from .mlflow_writer import MlflowWriter
from .stores import store
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter
from .writer import Inbox


class Target(NamedTuple):
    """What is tracked, and where.

    what: run, search or study. folder: of it, or None for a run without one. run_id: of a run. uri: the MLflow store,
    as in the section `tracking`. experiment: MLflow's experiment or W&B's project. child_tag: tag in MLflow with the
    key of a nested run. resumes: whether to continue the MLflow run that the folder names. system: whether to record
    the load of this machine.
    """

    what: str
    folder: Path | None
    run_id: str = ""
    uri: str = "auto"
    experiment: str = "fedfleet"
    child_tag: str = ""
    resumes: bool = True
    system: bool = False

    @property
    def place(self) -> Path:
        """The folder for files: the one of what is tracked, or a new one."""
        return Path("runs") / self.run_id if self.folder is None else self.folder


def mlflow(to: Target) -> Inbox:
    """A writer to MLflow, in the process that the command has begun for it, if there is one."""
    arguments = {
        "uri": store(to.uri),
        "experiment": to.experiment,
        "folder": to.folder,
        "what": to.what,
        "child_tag": to.child_tag,
        "resumes": to.resumes,
        "system": to.system,
    }
    process = taken()
    if process is None:
        return MlflowWriter(**arguments)
    process.open(**arguments)
    return process


WRITERS: dict[str, Callable[[Target], Inbox]] = {
    "mlflow": mlflow,
    "tensorboard": lambda to: TensorBoardWriter(to.place, to.what),
    "wandb": lambda to: WandbWriter(to.experiment, to.place, to.what, to.system),
    "csv": lambda to: CsvWriter(to.place, to.what),
}
"""Name of a tracker -> what makes its writer."""


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that no tracker of WRITERS has."""
    for name in names:
        if name not in WRITERS:
            raise ConfigError(f"tracking: no tracker is called {name}; {nearest(name, WRITERS)}")
