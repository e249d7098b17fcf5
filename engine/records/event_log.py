"""What a run tells as it goes, kept until it has been heard."""

from __future__ import annotations

import threading
from typing import Any


class EventLog:
    """Told by one thread, heard by another. What was heard is forgotten, unless `keep` says so."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self.told: list[Any] = []
        self.gone = 0  # told, heard and forgotten
        self.changed = threading.Condition()
        self.over = False
        self.heard = False  # the end

    def tell(self, item: Any) -> None:
        with self.changed:
            self.told.append(item)
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def since(self, seen: int) -> tuple[list[Any], bool]:
        """What was told after the first `seen`, waiting for news; and whether that was all there will be."""
        with self.changed:
            if not self.keep:
                del self.told[: seen - self.gone]
                self.gone = seen
            self.changed.wait_for(lambda: self.gone + len(self.told) > seen or self.over)
            if self.over:
                self.heard = True
                self.changed.notify_all()
            return self.told[seen - self.gone :], self.over

    def until_heard(self, seconds: float) -> None:
        """Wait until somebody has heard the end, at most so long."""
        with self.changed:
            self.changed.wait_for(lambda: self.heard, seconds)
