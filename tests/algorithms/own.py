"""Golden values of clients' own models: three tiny regressions, and what some methods make of them in three rounds.

They were computed from the methods' equations by a program that shares no code with the engine. Every local step is on
all rows of its client. `x` is flat, in the order of the shapes, running statistics last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfleet.algorithms.tree import Layout
from tests.algorithms.golden import Case
from tests.algorithms.problems import unflatten

_FOUND = json.loads(Path(__file__).with_name("own.json").read_text(encoding="utf-8"))
CASES = {name: (case["problem"], Case(*(case[key] for key in Case._fields))) for name, case in _FOUND["cases"].items()}


def losses(p: Any, rows: Tensor, train: bool) -> Tensor:
    """(n,) the losses of rows (n, 3) of two features and a target; in training with the term by which running
    statistics have their change as their gradient."""
    features, target = rows[:, :2], rows[:, 2]
    drift = torch.zeros((), dtype=rows.dtype)
    if "fc1.weight" in p:
        features = features @ p["fc1.weight"].T + p.get("fc1.bias", 0)
    if "norm1.weight" in p:
        mean, var = features.mean(0), features.var(0, correction=0)
        old = p["norm1.running_mean"], p["norm1.running_var"]
        new = mean, features.var(0) if len(rows) > 1 else var
        if train:
            changes = [0.1 * (o - n).detach() * (o - o.detach()) for o, n in zip(old, new, strict=True)]
            drift = torch.stack(changes).sum()
        else:
            mean, var = old
        features = (features - mean) / (var + 1e-5).sqrt() * p["norm1.weight"] + p["norm1.bias"]
    return (features @ p["out.weight"].T + p["out.bias"] - target[:, None]).square().sum(1) / 2 + drift


@dataclass(frozen=True)
class Problem:
    """`kind`: of the network. rows: of each client. at: the starting model."""

    kind: str
    rows: tuple[Tensor, ...]
    at: tuple[float, ...]

    @property
    def clients(self) -> int:
        return len(self.rows)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in _FOUND["shapes"][self.kind].items()}

    @property
    def layout(self) -> Layout:
        return Layout(tuple(self.shapes), tuple(self.shapes.values()))

    @cached_property
    def start(self) -> dict[str, Any]:
        return unflatten(np.array(self.at), self.shapes)

    @property
    def statistics(self) -> tuple[str, ...]:
        return tuple(name for name in self.shapes if "running" in name)

    def gradient(self, i: int, x: Any, r: int, k: int) -> dict[str, Any]:
        p = {name: torch.tensor(value, requires_grad=True) for name, value in x.items()}
        losses(p, self.rows[i], True).mean().backward()
        return {name: value.grad.numpy() for name, value in p.items()}

    def loss(self, i: int, x: Any) -> float:
        p = {name: torch.as_tensor(value) for name, value in x.items()}
        return float(losses(p, self.rows[i], False).mean())


PROBLEMS = {
    name: Problem(
        found["kind"],
        tuple(torch.tensor(rows, dtype=torch.float64) for rows in found["rows"]),
        tuple(map(float, found["x0"])),
    )
    for name, found in _FOUND["problems"].items()
}
