"""Settings that do not go together: what a row of their table is, and how rows are checked.

The rows that a section can check by itself are in `conflicts` of its class (`schema.py`), those about the noise of a
private run in `privacy/privacy_plan.py`, and those about parts that must be built first in `runs/built_conflicts.py`.
The reference page of the configuration prints all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

from ..errors import ConfigError


class Conflict(NamedTuple):
    """Two settings that do not go together.

    key: the setting that is refused. other: the setting, or the part of the run, that it does not go with. why, remedy:
    what the message says. holds: whether a section, or a run, has this conflict; a text is the reason in this case.
    """

    key: str
    other: str
    why: str
    remedy: str
    holds: Callable[[Any], object]

    def sentence(self, settings: Any, reason: object) -> str:
        """The message. settings: the section that has both keys."""
        value, other = shown(settings, self.key), shown(settings, self.other)
        got = " with ".join(filter(None, [value, other and f"{self.other}={other}"]))
        why = f"{self.why}: {reason}" if isinstance(reason, str) else self.why
        return f"{self.key}: {why}{', got ' if got else ''}{got}; {self.remedy}"


def first_conflict(conflicts: Iterable[Conflict], subject: Any, settings: Any) -> str:
    """The message of the first conflict that a section or a run has, "" if there is none. settings: see `sentence`."""
    return next((each.sentence(settings, found) for each in conflicts if (found := each.holds(subject))), "")


def refuse(conflicts: Iterable[Conflict], subject: Any, settings: Any) -> None:
    """Raise ConfigError with the message of the first conflict that a run has. settings: its experiment."""
    if message := first_conflict(conflicts, subject, settings):
        raise ConfigError(message)


def shown(settings: Any, key: str) -> str:
    """The value of a dotted key, "" for a section and where there is no such value."""
    value = reduce(inner, key.split("."), settings)
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    simple = isinstance(value, str | int | float | list | tuple) or (isinstance(value, Mapping) and value)
    return str(list(value) if isinstance(value, tuple) else value) if simple else ""


def inner(value: Any, name: str) -> Any:
    """The value of a key in a section or in the arguments of a part; {} where it has none."""
    return value.get(name, {}) if isinstance(value, Mapping) else getattr(value, name, {})
