"""A run between two of its rounds, as those see it who use its model or end it early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..errors import FedFleetError
from ..records.best_model import Best

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(NamedTuple):
    """What a run ends with. model: name -> tensor. stopped: why it ended before its last round, as a clause, "" if it
    did not. best: the best model if the run keeps it."""

    model: dict[str, Tensor]
    stopped: str = ""
    best: Best | None = None


class UnderWay:
    """A run that goes on: its model, and the way to end it early.

    Both are for the code between two rounds: observers, and the caller of an iterator over the rounds. `waited_for`:
    whether the run waits for this code before its next round, which in the calling process it does in any case. On Ray
    the model would otherwise be that of a later round.
    """

    def __init__(self, waited_for: bool) -> None:
        self.waited_for = waited_for
        self.tensors: Callable[[], dict[str, Tensor]] | None = None  # of the model, while the run goes on
        self.reason: str = ""  # why somebody ends the run

    @property
    def model(self) -> dict[str, Tensor]:
        """The model after the last round, name -> tensor. Raises FedFleetError before the first round has begun."""
        self._check()
        if self.tensors is None:
            raise FedFleetError("the run has no model between two rounds now; ask for it after the first round")
        return self.tensors()

    def stop(self, reason: str = "its caller has ended it") -> None:
        """End the run after the last round. It is complete then, and has a result. reason: why, as a clause."""
        self._check()
        self.reason = self.reason or reason

    @contextmanager
    def going_on(self, tensors: Callable[[], dict[str, Tensor]]) -> Iterator[None]:
        """While it lasts, the run has a model. tensors: those of the model."""
        self.tensors = tensors
        try:
            yield
        finally:
            self.tensors = None

    def _check(self) -> None:
        if not self.waited_for:
            raise FedFleetError(
                "steers must be True for an observer that asks for the model or ends the run, so that the run waits "
                "for it; add `steers = True` to the class"
            )
