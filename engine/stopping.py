"""Ending a run by the signals SIGNALS.

A signal sets a flag that the engine reads between local steps, so that the last round can be checkpointed. An exception
raised by the handler would interrupt whatever line is running, possibly in a destructor, where it is lost. Only where
nothing can be lost yet and another library is waiting, as while Ray starts, an exception is used because it is quick:
see `Stop.at_once`.

Batch systems, systemd and container runtimes send a signal to all processes of a job, perhaps several times. It is for
the process that the user has started, which ends the others. Those begin with the signals blocked (`blocked_signals`);
where they execute code of a user, the signals are delivered and do not end them (`on_signal`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from .errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that end a run: Ctrl-C, the end of a job, that of a terminal, and Slurm's warning of the end of a job."""
REPEAT_SECONDS = 1.0
"""The time after which a signal that should interrupt at once is sent again."""
PATIENCE = 10.0
"""The seconds in which a run should have ended after the first signal. Further signals change nothing in this time;
later ones end the process by an exception, because it hangs."""

_came = False
"""Whether a signal has ever set a flag in this process."""


def exit_now(number: int, frame: Any) -> None:
    """Signal handler of a command that has no run: it ends the process at once. It is for the time in which packages
    are imported, when there is nothing to lose: an exception in the middle of an import of C++ code may abort the
    process, and an exception in a destructor is lost. A command whose run a signal has ended is ending anyway, and the
    same signal again does not change how."""
    if _came:
        return
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


class Stop:
    """A callable that returns the number of the signal that has arrived, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.since = self.raised = -PATIENCE  # when the first signal came, when the handler last raised an exception
        self.interrupts = False  # whether the handler raises KeyboardInterrupt

    def __call__(self) -> int:
        return self.number

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler."""
        global _came
        now, is_first, _came = time.monotonic(), not self.number, True
        if is_first:
            self.number, self.since = number, now
        if self.interrupts:
            if now >= self.raised + REPEAT_SECONDS:  # else the exception of the signal before is under way
                self.raised = now
                self._repeat()
                raise KeyboardInterrupt
        elif not is_first and now > self.since + PATIENCE:
            raise KeyboardInterrupt

    def _repeat(self) -> None:
        """Send the signal again after a while, since the exception may be lost in a destructor or a callback."""

        def again() -> None:
            if self.interrupts:
                os.kill(os.getpid(), self.number)

        timer = threading.Timer(REPEAT_SECONDS, again)
        timer.daemon = True
        timer.start()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While it lasts, a signal raises Interrupted immediately."""
        self.interrupts = True
        try:
            if self.number:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self.interrupts = False
            raise Interrupted(self.number or signal.SIGINT) from None
        finally:
            self.interrupts = False
        if self.number:
            raise Interrupted(self.number)


def check(stop: Callable[[], int]) -> None:
    """Raise Interrupted if `stop` returns the number of a signal."""
    if number := stop():
        raise Interrupted(number)


@contextmanager
def stopping(stop: Stop | None = None) -> Iterator[Stop]:
    """While it lasts, the signals SIGNALS set a flag. Yields the function that returns the flag, see `Stop`.

    stop: the flag to set, a new one by default. SIGHUP and SIGUSR1 keep the meaning that the process has given them, as
    `nohup` does. Python delivers signals to the main thread only. In any other thread the flag stays as it is.
    """
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: handler for number, handler in before.items() if has_no_other_meaning(number, handler)}
    for number in ours:
        signal.signal(number, stop.handle)
    try:
        yield stop
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def exit_between_rounds() -> None:
    """Have the signals SIGNALS that would end this process by the system's default end it by SystemExit from now on.

    It is for programs that iterate over rounds: between two rounds their own code runs, and Python's exit leaves a
    checkpoint. Python delivers signals to the main thread only; in another thread nothing changes.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit)


def _exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def has_no_other_meaning(number: int, handler: Any) -> bool:
    """Whether a run may take a signal, whose handler this is, for itself."""
    if number in (signal.SIGINT, signal.SIGTERM):
        return handler is not None  # None: a handler that is not Python's cannot be put back
    return handler in (signal.SIG_DFL, exit_now, _exit) or isinstance(getattr(handler, "__self__", None), Stop)


def at_once(stop: Callable[[], int]) -> Any:
    """`Stop.at_once` if the function belongs to this process's own signals, else a context that does nothing."""
    return stop.at_once() if isinstance(stop, Stop) else nullcontext()


# --- the other processes of a run -------------------------------------------------------------------------------------
@contextmanager
def blocked_signals() -> Iterator[None]:
    """Processes that this thread starts within the context begin with the signals SIGNALS blocked, as do those that
    they start. The context must be short: in the main thread, a signal for this process waits for its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_act: Callable[[int], None] | None = None


def on_signal(act: Callable[[int], None] = lambda number: None) -> None:
    """Have the signals SIGNALS call `act` in this process, by default nothing, and no longer be blocked.

    Processes that a user's code starts from here have the defaults of the system: a mask or SIG_IGN would be inherited,
    and `multiprocessing` could not end its processes. It must be called by the main thread, else it changes nothing.
    """
    global _act
    if threading.current_thread() is not threading.main_thread():
        return
    if _act is None:
        os.register_at_fork(after_in_child=_defaults)
    _act = act
    for number in SIGNALS:
        signal.signal(number, _called)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _called(number: int, frame: Any) -> None:
    if _act is not None:
        _act(number)


def _defaults() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is _called:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
