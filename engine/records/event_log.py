"""The events of a run, kept until another thread has read them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

STILL = "still "
"""The beginning of a line that says what goes on for long. Such lines are shown at once, not only logged."""
PLAN = "plan: "
"""The beginning of the line with the execution plan, which is logged and not shown."""

LOOK_SECONDS = 0.2
"""How often a writer that waits for its reader looks for a reason to end."""


class EventLog:
    """One thread appends events and another one reads them. Events that were read are deleted unless `keep` is true."""

    def __init__(self, keep: bool = False, gap: float = 0.0) -> None:
        """gap: the least number of seconds between two answers to a reader, so that it reads many events at once."""
        self.keep, self.gap, self.answered = keep, gap, -math.inf
        self.events: list[Any] = []
        self.deleted = 0  # the number of events that were read and deleted
        self.asked = 0  # the number of events that a reader is done with
        self.changed = threading.Condition()
        self.over = threading.Event()  # set at the end; events do not wake a reader that waits for the gap
        self.delivered = False  # whether a reader has learnt that the log has ended

    def append(self, event: Any) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def end(self) -> None:
        """No event follows."""
        with self.changed:
            self.over.set()
            self.changed.notify_all()

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    def since(self, seen: int) -> tuple[list[Any], bool]:
        """(the events after the first `seen`, whether the log has ended). Waits until there is an event or the end."""
        self.over.wait(max(0.0, self.answered + self.gap - time.monotonic()))
        with self.changed:
            self.asked = max(self.asked, seen)
            self.changed.notify_all()
            if not self.keep:
                del self.events[: seen - self.deleted]
                self.deleted = seen
            self.changed.wait_for(lambda: self.deleted + len(self.events) > seen or self.ended)
            self.answered = time.monotonic()
            if self.ended:
                self.delivered = True
                self.changed.notify_all()
            return self.events[seen - self.deleted :], self.ended

    def wait_until_done_with(self, check: Callable[[], None]) -> None:
        """Wait until a reader is done with all events so far, as far as it asks for those after them. check: called
        now and then, may raise an exception."""
        with self.changed:
            count = self.deleted + len(self.events)
            while self.asked < count:
                check()
                self.changed.wait(LOOK_SECONDS)

    def wait_until_delivered(self, seconds: float) -> None:
        """Wait until a reader has learnt that the log has ended, at most `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: self.delivered, seconds)
