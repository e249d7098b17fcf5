"""The fleet as the driver sees it, and the one that runs in the driver's own process: no Ray, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from .host import Data, Host, Shared, Sums
from .job import Job

Call = Literal["train", "evaluate"]


class Fleet(Protocol):
    def map(self, call: Call, tasks: Sequence[Any], shared: Shared) -> Iterator[Sums]:
        """Run all tasks, results in any order."""
        ...

    def close(self) -> None: ...


class InProcess:
    """One host, here."""

    def __init__(self, job: Job, data: Data, store: tuple[str, int]) -> None:
        self.host = Host(job, data, store)

    def map(self, call: Call, tasks: Sequence[Any], shared: Shared) -> Iterator[Sums]:
        for task in tasks:
            yield getattr(self.host, call)(task, shared)

    def close(self) -> None:
        """Nothing was started."""
