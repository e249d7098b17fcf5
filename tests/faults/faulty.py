"""A plug-in: digits whose clients fail as a plan says. The plan is a file, so that a test can change it between runs.

FOLDER/rules.json holds rules, {client, kind, skip, times}: after `skip` calls of the loss, the client does what `kind`
says in the next `times` calls. Calls are counted in files, because worker processes end and start. Client -1 means any
client, and evaluations too.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfleet.engine.planning import as_written
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.problems.auc import Auc
from fedfleet.workloads.workload import Split

ANYONE = -1
PATIENCE = 300
"""Seconds that a client waits at its gate."""


def asleep_in_the_client() -> None:
    while True:
        time.sleep(1)


def going_round_in_circles() -> None:
    while True:
        pass


def everyone(batch: Any) -> np.ndarray:
    """The numbers of the clients in a batch, vectorised or not."""
    column = batch["client"]
    while torch._C._functorch.is_functorch_wrapped_tensor(column):
        column = torch._C._functorch.get_unwrapped(column)
    return np.unique(column.numpy())


def counted(folder: Path, name: str) -> int:
    """How often any process has called this with the same name."""
    handle = os.open(folder / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(handle, b".")
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def fail(kind: str, client: int) -> None:
    if kind == "raise":
        raise RuntimeError(f"client {client} is broken")
    if kind == "memory":
        raise MemoryError(f"no room for client {client}")
    if kind == "device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if kind == "sleep":
        asleep_in_the_client()
    if kind == "loop":
        going_round_in_circles()


@dataclass(frozen=True)
class Failing:
    """A base class to put before a workload: it gives the workload clients that fail."""

    faults: str = ""

    def rules(self) -> list[dict[str, Any]]:
        try:
            return json.loads((Path(self.faults) / "rules.json").read_text())
        except FileNotFoundError:
            return []

    def due(self, number: int, rule: dict[str, Any]) -> bool:
        return 0 < counted(Path(self.faults), f"met-{number}") - rule["skip"] <= rule["times"]

    def init(self, seed: int) -> dict[str, torch.Tensor]:
        if any(rule["kind"] == "start" for rule in self.rules()):
            assert "WorkerProcess" not in Path("/proc/self/cmdline").read_text(), "no worker can start"
        return super().init(seed)

    def split(self, seed: int, clients: int) -> Split:
        split = super().split(seed, clients)
        who = np.zeros(len(split.train["label"]), dtype=np.int64)
        who[split.client_index.rows] = np.repeat(np.arange(clients), split.client_index.sizes)
        return Split({**split.train, "client": who}, split.test, split.client_index)

    def losses(self, p: Any, batch: Any) -> torch.Tensor:
        losses = super().losses(p, batch)
        rules = [] if as_written.under_way() else self.rules()  # for the clients of rounds, not for the trial step
        clients = everyone(batch) if rules else ()
        for number, rule in enumerate(rules):
            if rule["kind"] == "crowd" and len(clients) > rule["client"]:
                raise RuntimeError(f"no room for {len(clients)} clients")
            if rule["kind"] == "card" and len(clients) > rule["client"] and self.due(number, rule):
                raise torch.OutOfMemoryError(f"CUDA out of memory: {len(clients)} clients")
            if rule["client"] not in (*clients, ANYONE) or rule["kind"] in ("crowd", "card", "evaluate"):
                continue
            if self.due(number, rule):
                if rule["kind"] == "nan":
                    losses = losses * torch.where(batch["client"] == rule["client"], torch.nan, 1.0)
                if rule["kind"] == "gate":
                    self.wait_at(number)
                fail(rule["kind"], rule["client"])
        return losses

    def wait_at(self, number: int) -> None:
        """Report that the client is at its gate, and wait until the test, which is in another process, lets it go
        on."""
        (Path(self.faults) / f"at-{number}").touch()
        deadline = time.monotonic() + PATIENCE
        while not (Path(self.faults) / f"open-{number}").exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody opened gate {number} in {PATIENCE} s")
            time.sleep(0.02)

    def report(self, p: Any, batch: Any) -> dict[str, torch.Tensor]:
        for number, rule in enumerate(self.rules()):
            if rule["kind"] == "evaluate":
                raise RuntimeError("the report is broken")
            if rule["client"] == ANYONE and self.due(number, rule):
                fail(rule["kind"], ANYONE)
        return super().report(p, batch)


@dataclass(frozen=True)
class Faulty(Failing, Digits): ...


@dataclass(frozen=True)
class FaultyAuc(Failing, Auc): ...


WORKLOADS = {"faulty": Faulty, "faulty_auc": FaultyAuc}
