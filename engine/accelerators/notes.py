"""Sentences for the log of the run about what a worker found on its device. They travel with the sums of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIX = "note: "
"""The names of facts that begin with it are sentences; their values have no meaning."""


def as_facts(notes: Iterable[str]) -> dict[str, float]:
    """The notes as facts of a task."""
    return {PREFIX + note: 1.0 for note in notes}


def notes_in(facts: Mapping[str, float]) -> list[str]:
    """The notes among the facts of a phase, in alphabetical order."""
    return sorted(name.removeprefix(PREFIX) for name in facts if name.startswith(PREFIX))
