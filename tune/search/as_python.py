"""`fedfleet search --python`: the command line as a Python program."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def as_python(experiment: str, overrides: Iterable[str], **arguments: Any) -> str:
    """A program with the call of `search` that does what a command line does. arguments: its further arguments."""
    changes = "".join(f"\n        {quoted(text)}," for text in overrides)
    given = {name: value for name, value in arguments.items() if value not in (None, False, "auto")}
    further = "".join(f"\n    {name}={quoted(value)}," for name, value in given.items())
    listing = f"[{changes}\n    ]" if changes else "[]"
    call = f"fedfleet.search(\n    {quoted(experiment)},\n    {listing},{further}\n)"
    return (
        f"import fedfleet\n\nfound = {call}\nprint(found.values, found.best)\n"
        "print(found.to_pandas())  # one row for each trial\n"
        "# found.study: the study of Optuna; found.records(0): the rounds of a trial"
    )


def quoted(value: Any) -> str:
    """A value as Python code, texts in double quotes."""
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else repr(value)
