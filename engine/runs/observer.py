"""Who watches a run: progress bars, trackers, the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..records.history import Record

if TYPE_CHECKING:
    from ..config.run_spec import RunSpec
    from .result import Result


class Observer:
    """Watches a run. Every method does nothing here; a subclass overrides those that it needs.

    The calls come from the thread that runs the experiment, in this order: `begin`; perhaps `resumed`; `record` for
    every round and `event` for every line of the log; then either `end` or `failed`. A round may be recorded a second
    time with the same number, when the run went back to a checkpoint after it lost a node.
    """

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        """The run is about to start. facts: reserved, empty."""

    def resumed(self, records: list[Record]) -> None:
        """The run goes on after a checkpoint. records: all rounds up to the checkpoint."""

    def record(self, record: Record) -> None:
        """A round is over. record: column -> number; `round` counts from 1."""

    def event(self, text: str) -> None:
        """Something happened that is worth a line of the log."""

    def end(self, result: Result) -> None:
        """The run has finished."""

    def failed(self, error: BaseException) -> None:
        """The run ended without a result: it failed, diverged or was interrupted."""
