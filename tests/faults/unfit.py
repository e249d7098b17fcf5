"""A plug-in: digits on workers whose environment cannot run clients. The variable FF_UNFIT says what is wrong on a
machine. If it is not set, the file FOLDER/unfit says it for the first worker that reads it, because the workers of one
machine have equal environments."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedfleet.workloads.data.digits import Digits

UNFIT = os.environ.get("FF_UNFIT", "")
if UNFIT == "import":
    import a_package_that_is_not_here  # noqa: F401  # pyright: ignore[reportMissingImports]


def is_worker() -> bool:
    return any(name in Path("/proc/self/cmdline").read_text() for name in ("WorkerProcess",))


@dataclass(frozen=True)
class Unfit(Digits):
    folder: str = ""

    def way(self) -> str:
        if UNFIT or not self.folder or not is_worker():
            return UNFIT
        taken = Path(self.folder) / "taken"
        try:
            taken.touch(exist_ok=False)
            taken.write_text(str(os.getpid()))
        except FileExistsError:
            if taken.read_text() != str(os.getpid()):
                return ""
        return (Path(self.folder) / "unfit").read_text()

    def init(self, seed: int) -> dict[str, torch.Tensor]:
        way = self.way()
        if way == "memory":
            raise MemoryError("no room for the model")
        if way == "model":
            raise RuntimeError("the model cannot be built here")
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().init(seed)

    def losses(self, p: Any, batch: Any) -> torch.Tensor:
        if self.way() == "package":
            import another_package_that_is_not_here  # noqa: F401  # pyright: ignore[reportMissingImports]
        return super().losses(p, batch)


WORKLOADS = {"unfit": Unfit}
