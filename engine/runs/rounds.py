"""An iterator over the rounds of a run, while it runs."""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import weakref
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor

from ..errors import FedFleetError, Interrupted
from ..records.history import Record
from ..rounds.under_way import UnderWay
from ..run_spec import RunSpec
from ..stopping import Stop, exit_between_rounds, stopping
from .launch import play
from .observer import Observer
from .result import Result


class Rounds(Iterator[Record]):
    """The rounds of a run as they end. Each is a dictionary, column -> number, in which `round` counts from 1.

    The run begins when the first round is asked for. With `engine.backend=local` a round is computed when it is asked
    for, and on Ray too the run waits for its caller. A resumed run yields the rounds after the checkpoint.

    Between two rounds, `model` is the model, and `stop` ends the run with the rounds so far. After the last round,
    `result` is the Result. `close` and the end of a `with` block, of the object or of the process
    end the run early, with a checkpoint if the run has a folder. The same happens on SIGINT (Ctrl-C, or a notebook's
    stop button), SIGTERM, SIGHUP and SIGUSR1 while a round is awaited; then the iterator raises Interrupted. Between
    two rounds SIGINT has its usual effect, so that a loop which was left by KeyboardInterrupt can be taken up again.
    The others raise SystemExit where the system would end the process without a word to Python, so that its end leaves
    a checkpoint too.
    """

    def __init__(self, run_spec: RunSpec, directory: Any, observers: list[Observer]) -> None:
        """directory: the RunDirectory, or None for a run without files. `fedfleet.rounds` makes these objects."""
        self.run_spec = run_spec
        self._stop, self._under_way = Stop(), UnderWay(waited_for=True)
        self._rounds: Generator[Record, None, Result] | None = play(
            run_spec, directory, observers, self._stop, under_way=self._under_way
        )
        self._begun, self._process = False, 0
        self._last = 0
        self._result: Result | None = None

    def __next__(self) -> Record:
        """Wait for the next round. Raises what `fedfleet.run` raises."""
        if self._rounds is None:
            raise StopIteration
        if not self._begun:
            self._begun, self._process = True, os.getpid()
            _open.add(self)
        try:
            with stopping(self._stop):
                record = next(self._rounds)
        except StopIteration as end:
            self._rounds, self._result = None, end.value
            raise StopIteration from None
        except BaseException:
            self._rounds = None
            raise
        if not self._last:
            _close_at_exit()
            exit_between_rounds()
        self._last = int(record["round"])
        return record

    @property
    def result(self) -> Result:
        """The result of the run. Raises FedFleetError if the run has not ended, or if it ended without a result."""
        if self._result is None:
            remedy = "ask for the other rounds, or call finish()" if self._rounds is not None else "resume it"
            raise FedFleetError(f"the run has no result after round {self._last}; {remedy}")
        return self._result

    def finish(self) -> Result:
        """Run the rounds that are left. Returns the result."""
        for _ in self:
            pass
        return self.result

    @property
    def model(self) -> dict[str, Tensor]:
        """The model after the last round, name -> tensor. Raises FedFleetError if there is none now."""
        return self._result.model if self._result is not None else self._under_way.model

    def stop(self, reason: str = "its caller has ended it") -> Result:
        """End the run after the last round, and return its result: the run is complete then. reason: why, as a clause,
        for the result and the log. Raises FedFleetError before the first round."""
        if self._rounds is not None:
            if not self._last:
                raise FedFleetError("the run has no round that it could end after; ask for the first one")
            self._check_waiting()
            self._under_way.stop(reason)
        return self.finish()

    def _check_waiting(self) -> None:
        if self._rounds is not None and inspect.getgeneratorstate(self._rounds) == inspect.GEN_RUNNING:
            raise FedFleetError("a thread waits for the next round of this run; close it there")

    def close(self) -> None:
        """End the run early, and write a checkpoint of its last round if the run has a folder.

        A run that has ended, or has not begun, is not changed. If all rounds had ended, `result` exists afterwards.
        """
        if not self._begun:
            self._rounds = None
        if self._rounds is None or os.getpid() != self._process:  # a process that was forked has only a copy
            return
        self._check_waiting()
        self._stop.number = self._stop.number or signal.SIGINT
        try:
            self.finish()  # raises Interrupted, unless all rounds have ended
        except Interrupted:
            return

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_rounds"):
            self.close()

    def __repr__(self) -> str:
        state = "ended" if self._rounds is None else "running" if self._begun else "not begun"
        total = self.run_spec.experiment.federation.rounds
        return f"Rounds({self.run_spec.experiment.title}: {self._last} of {total} rounds, {state})"


_open: weakref.WeakSet[Rounds] = weakref.WeakSet()
"""The objects whose run has begun and which Python has not destroyed."""


def _close_at_exit() -> None:
    """End the open runs at the end of the process: when Python destroys their objects, after all exit functions, it is
    too late for a checkpoint. Exit functions run in reverse order, and Ray's are registered before a first round ends,
    so that this one, registered after it, runs before them."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for rounds in list(_open):
        try:
            rounds.close()
        except Exception as error:
            print(f"{rounds!r} has no checkpoint of its last round: {error}", file=sys.stderr)
