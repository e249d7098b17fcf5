"""When a command that has no terminal prints its next line of progress."""

from __future__ import annotations

import time

SHORTEST, LONGEST = 10.0, 60.0
"""Seconds between two lines: at the beginning of a command, and after ten minutes."""


class Pulse:
    """Says when the next line is due: after a tenth of the time since the beginning, but at least after SHORTEST and at
    most after LONGEST seconds. So a short command prints none, and a log of a day has about 1,500 lines."""

    def __init__(self) -> None:
        self.began: float = time.monotonic()
        self.last: float = self.began

    def due(self) -> bool:
        """Whether a line is due now; the next one is then due later."""
        now = time.monotonic()
        if now - self.last < min(LONGEST, max(SHORTEST, (now - self.began) / 10)):
            return False
        self.last = now
        return True
