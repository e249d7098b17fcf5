"""LEAF's JSON files: users with examples of their own. Caldas et al. 2018, arXiv:1812.01097.

`{"users": […], "user_data": {user: {"x": […], "y": […]}}}`; a split may be cut into several files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .roots import damaged


class Examples(NamedTuple):
    x: list[Any]
    y: list[Any]
    users: list[str]  # whose each is


def read(paths: list[Path], train: bool = True) -> Examples:
    found = Examples([], [], [])
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            for user in data["users"]:
                own = data["user_data"][user]
                if len(own["x"]) != len(own["y"]):
                    raise ValueError(f"user {user} has {len(own['x'])} x and {len(own['y'])} y")
                found.x.extend(own["x"])
                found.y.extend(own["y"])
                found.users.extend([user] * len(own["x"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
    return found
