"""Observers of a run, such as progress bars, trackers and the run's folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Union

from ..errors import ConfigError
from ..records.history import Record
from ..rounds.under_way import UnderWay

if TYPE_CHECKING:
    from ..run_spec import RunSpec
    from .result import Result


class Observer:
    """Watches a run. Every method does nothing here; a subclass overrides those that it needs.

    The calls come from the thread that runs the experiment, in this order: `begin`; perhaps `resumed`; `record` for
    every round and `event` for every line of the log; then either `end` or `failed`. A round may be recorded a second
    time with the same number: when the run went back to a checkpoint after it lost a node, or with the last evaluation
    of a run that was ended early.

    An observer with `steers = True` may ask for the model, `under_way.model`, and end the run after the round that it
    was told of, `under_way.stop("why")`. On Ray each round then waits for it.
    """

    steers: bool = False
    """Whether it uses `under_way`."""
    under_way: UnderWay
    """The run that it watches, from `begin` on."""

    def begin(self, run_spec: RunSpec) -> None:
        """The run is about to start. run_spec: what it is; `run_spec.experiment` is its configuration,
        `run_spec.directory` its folder or None, `run_spec.resume` whether it goes on after a checkpoint."""

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


Watching = Union[Observer, Callable[[Record], Any], Callable[[Record, UnderWay], Any]]  # noqa: UP007 evaluated at import
"""What may watch a run: an Observer, or a function that is called with the record of every round. A function of two
arguments also gets the run, which it may ask for the model and may end, see `UnderWay`."""


class EachRound(Observer):
    """Calls a function with the record of every round, and with the run if it needs two arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.steers = function, needs_two(function)

    def record(self, record: Record) -> None:
        self.function(record, *([self.under_way] if self.steers else []))


def observers_of(watching: Iterable[Watching]) -> list[Observer]:
    """The observers. A function becomes one; an object with the methods of an Observer is taken as it is.

    Raises ConfigError for anything else.
    """
    found: list[Observer] = []
    for each in watching:
        if isinstance(each, Observer) or hasattr(each, "record"):
            check_begin(each)
            found.append(each)  # pyright: ignore[reportArgumentType] an object that is no Observer may act as one
        elif callable(each):
            found.append(EachRound(each))
        else:
            raise ConfigError(f"observers must be Observers or functions of a round's record, got {each!r}")
    return found


def needs_two(function: Callable[..., Any]) -> bool:
    """Whether a function must be called with two arguments."""
    try:
        arguments = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return False
    return not takes(arguments, 1) and takes(arguments, 2)


def takes(arguments: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with so many arguments by position."""
    try:
        arguments.bind(*[None] * count)
    except TypeError:
        return False
    return True


def check_begin(observer: Any) -> None:
    """Raise ConfigError for an observer whose `begin` does not take the run alone."""
    arguments = inspect.signature(observer.begin)
    if not takes(arguments, 1):
        raise ConfigError(
            f"observers: begin must take one argument, the run, got ({', '.join(arguments.parameters)}) in "
            f"{type(observer).__name__}; leave out the others"
        )
