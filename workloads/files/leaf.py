"""The JSON files of LEAF, whose examples belong to users. Caldas et al. 2018, arXiv:1812.01097.

A file is `{"users": […], "user_data": {user: {"x": […], "y": […]}}}`; a split may consist of several files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .roots import damaged


class Examples(NamedTuple):
    """n examples: inputs x, labels y, and the user of each."""

    x: list[Any]
    y: list[Any]
    users: list[str]


def read(paths: list[Path]) -> Examples:
    """The examples of all files, in their order; ValueError if a file is damaged."""
    found = Examples([], [], [])
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            for user in data["users"]:
                own = data["user_data"][user]
                if len(own["x"]) != len(own["y"]):
                    raise ValueError(f"user {user} has {len(own['x'])} inputs and {len(own['y'])} labels")
                found.x.extend(own["x"])
                found.y.extend(own["y"])
                found.users.extend([user] * len(own["x"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
    return found
