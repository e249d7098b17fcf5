"""Byzantine clients send nothing. They count as clients that were left out of the round, whatever engine.on_failure
is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contract import Attack


@dataclass(frozen=True, kw_only=True)
class Drop(Attack):
    """No message."""

    called: ClassVar[str] = "drop"

    @property
    def silent(self) -> bool:
        return True
