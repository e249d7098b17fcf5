"""A plug-in of timeline.py that times functions of the engine inside the process of a worker.

After every round the worker writes its times to a file in the folder $FEDFLEET_INSIDE.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfleet.engine.backends.ray import shared_memory, wakeup, worker_process
from fedfleet.engine.clients import local_training, worker
from fedfleet.engine.kernels import fused_chain
from fedfleet.engine.kernels.fused_chain import Chain
from fedfleet.engine.reduction import accumulator

WORKLOADS: dict[str, Any] = {}
WARMUP = 10

WATCHED = (
    *((wakeup.Listener, name) for name in ("wait", "done")),
    *((shared_memory.SharedMemory, name) for name in ("claim", "posted", "put")),
    *((worker_process.pickle, name) for name in ("loads", "dumps")),
    *((accumulator.Accumulator, name) for name in ("__init__", "add_one", "end_block", "result")),
    *((worker, "stream"), (local_training.LocalTrainer, "alone"), (fused_chain.Chain, "_call")),
)
spent: dict[str, list[float]] = {}  # function -> seconds, calls
rounds = 0


def timed(where: Any, name: str) -> None:
    """Replace a function by one that adds its time and its calls to `spent`."""
    function: Callable[..., Any] = getattr(where, name)
    seen = spent.setdefault(f"{where.__name__.rpartition('.')[2]}.{name}", [0.0, 0])

    def noted(*args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            seen[0] += time.perf_counter() - began
            seen[1] += 1

    setattr(where, name, noted)


def counted(done: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function that ends a round of a worker; afterwards it writes the times to the file."""

    def noted(self: Any) -> None:
        global rounds
        done(self)
        rounds += 1
        if rounds == WARMUP:
            for seen in spent.values():
                seen[:] = [0.0, 0]
        elif rounds > WARMUP:
            Path(folder, str(os.getpid())).write_text(json.dumps({"rounds": rounds - WARMUP, "spent": spent}))

    return noted


folder = os.environ.get("FEDFLEET_INSIDE")
if folder and not hasattr(Chain, "watched"):
    Chain.watched = True  # pyright: ignore[reportAttributeAccessIssue]  once per process, even if this is loaded again
    for each in WATCHED:
        timed(*each)
    wakeup.Listener.done = counted(wakeup.Listener.done)
