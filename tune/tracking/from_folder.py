"""What trackers get from the folder of a run: its report, and the tensors of its final model. Neither needs torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ...engine.storage.plain_files import open_plain
from ..page.html import render
from ..run_report import page_of
from .stores import load_mlflow
from .writer import REPORT

TENSORS = "model.safetensors"
"""Name of the file with the tensors of a model."""


def report(run: Path) -> dict[str, str]:
    """The report of the run in a folder: name of the file -> text."""
    return {REPORT: render(page_of(run))}


def described(folder: Path) -> Any:
    """The mlflow.models.Model of a folder that has the file TENSORS."""
    model = load_mlflow().models.Model()
    model.add_flavor("safetensors", data=TENSORS)
    return model


def copied(run: Path, folder: Path) -> Any:
    """Copy the file TENSORS of a run into a new folder, and return the mlflow.models.Model of that."""
    folder.mkdir()
    with os.fdopen(open_plain(run / TENSORS, os.O_RDONLY), "rb") as file, open(folder / TENSORS, "xb") as copy:
        shutil.copyfileobj(file, copy)
    return described(folder)
