"""What makes two runs the same run: the settings on which the numbers of a run depend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.config.differences import FREE_KEYS, flatten

WITHOUT_EFFECT = (
    "name",
    "tracking",
    "checkpoint.",
    "engine.keep_state",
    "engine.on_failure",
    "engine.store",
    "plugins",
)
"""Settings that influence no number of a run, as beginnings of dotted keys, beside FREE_KEYS."""


def effective_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an experiment that influence numbers of its run, by dotted key. So does the content of plug-ins.

    data: plain data of the experiment.
    """
    return {k: v for k, v in flatten(data).items() if k not in FREE_KEYS and not k.startswith(WITHOUT_EFFECT)}
