"""Torch's kernels on a CUDA device, where the local steps of a block are replayed from CUDA graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .contract import Run
from .recorded_visit import VisitRecorder
from .tape import Tapes
from .torchs import Torch


@dataclass(frozen=True)
class Graph(Torch):
    """Torch's kernels on a CUDA device, with the steps of blocks replayed to the same bits."""

    name: ClassVar[str] = "graph"

    def why_not(self, run: Run) -> str:
        return "" if run.device.type == "cuda" else f"for CUDA devices, not for device={run.device.type}"

    def is_promising(self, run: Run) -> bool:
        return not self.why_not(run)

    def suits(self, block: int) -> bool:
        return block > 1

    def tapes(self, device: torch.device, most_bytes: float = math.inf) -> Tapes | None:
        return None

    def recorder(self) -> VisitRecorder | None:
        return VisitRecorder()
