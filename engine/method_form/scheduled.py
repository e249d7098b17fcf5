"""A method whose local rule has other numbers in every local step, as schedules over steps say.

In step k of a visit the method's step runs with the numbers of this step in the places of its own, as tensors without
axes. So schedules serve every rule, and no rule knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...algorithms.contract import Algorithm, Around, Client, Local, Message, Oracle, Public, Round, Server
from .numbers import Path, with_numbers


class StepNumbers:
    """Numbers of a method by local step. rows: path -> the numbers of steps 0 … K - 1.

    It is one value, and not data of the method's form, so that only methods with the same numbers have one form.
    """

    def __init__(self, rows: Mapping[Path, Sequence[float]]) -> None:
        self.rows = {path: tuple(row) for path, row in rows.items()}
        self.steps = len(next(iter(self.rows.values())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepNumbers) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(tuple(self.rows.items()))

    def at(self, done: Tensor) -> dict[Path, Tensor]:
        """The numbers, (), of one step. done: (), the fraction of the visit's steps that are finished."""
        step = (done * self.steps).round().to(torch.int64)
        return {path: on_device(row, done.device)[step] for path, row in self.rows.items()}


@lru_cache(64)
def on_device(row: tuple[float, ...], device: torch.device) -> Tensor:
    """(K,) float64. It is made once, because a device would have to wait for each copy."""
    return torch.tensor(row, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Scheduled(Around):
    """`method`, with other numbers in every local step."""

    method: Algorithm
    step_numbers: StepNumbers

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        method = with_numbers(self.method, self.step_numbers.at(oracle.done))
        return method.client_step(public, client, local, oracle)

    # --- the method's own ---------------------------------------------------------------------------------------------
    def broadcast(self, server: Server) -> Public:
        return self.method.broadcast(server)

    def unpack(self, public: Public) -> Any:
        return self.method.unpack(public)

    def held(self, public: Public) -> Mapping[str, Tensor]:
        return self.method.held(public)

    def client_begin(self, public: Public, client: Client) -> Local:
        return self.method.client_begin(public, client)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        return self.method.client_finish(public, client, local)

    def decode(self, public: Public, message: Message) -> Message:
        return self.method.decode(public, message)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self._after_steps.server_update(server, mean, round)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self._after_steps.server_metrics(server, mean, round)

    @property
    def _after_steps(self) -> Algorithm:
        """The method with the numbers of the last local step. A method that has the rule on the server takes them."""
        return with_numbers(self.method, {path: row[-1] for path, row in self.step_numbers.rows.items()})

    @property
    def warm_start(self) -> Algorithm | None:
        return self.method.warm_start
