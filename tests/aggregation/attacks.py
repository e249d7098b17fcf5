"""Attacks applied to rows in memory, without workers, as the engine applies them to one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedfleet.algorithms.attacks.contract import CohortAttack, Columns, Plan, Seen
from fedfleet.engine.config.registry import Registry
from fedfleet.workloads import counted
from tests.aggregation.rules import stored

REGISTRY = Registry()


def built(name: str, **arguments: Any) -> Any:
    return REGISTRY.build("ATTACKS", {"name": name, "share": 0.2, **arguments}, "attack")


def columns(
    x: np.ndarray, begin: int = 0, end: int | None = None, byzantine: int = 1, numbers: tuple[float, ...] = ()
) -> Columns:
    """A piece of the known rows."""
    part, key = x[:, begin:end], counted.key(0, "attack", 1, 0)
    deviation = part.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(part.shape[1])
    return Columns(part, part.mean(axis=0), deviation, byzantine, numbers, begin, x.shape[1], key)


def plan(
    attack: CohortAttack, x: np.ndarray, byzantine: int, error: Callable[[np.ndarray], float] | None = None,
    remembered: np.ndarray | None = None, state: Any = None,
) -> tuple[Plan, np.ndarray]:  # fmt: skip
    """(the plan, the known rows and the extra vectors behind them). x: (h, P), the known rows. error: of a vector (P,)
    that is sent."""
    remembered = np.zeros((attack.remembers, x.shape[1])) if remembered is None else remembered
    full = np.vstack([x, remembered, *([attack.direction(columns(x))] if attack.directs else [])])
    asked = None if error is None else lambda weights: error(weights @ full)
    about, clients = stored(x, full, "attack", 1, 0), np.arange(len(x))
    seen = Seen(**about, weights=np.ones(len(x)), byzantine=byzantine, clients=clients, error=asked)
    return attack.plan(seen, attack.init() if state is None else state), full


def sent(name: str, x: np.ndarray, byzantine: int = 1, error: Any = None, **arguments: Any) -> np.ndarray:
    """(P,) or (B, P): what the Byzantine clients send. x: (h, P), the known rows."""
    attack = built(name, **arguments)
    decided, _ = plan(attack, x, byzantine, error)
    return attack.forge(columns(x, byzantine=byzantine, numbers=decided.numbers))


def own(name: str, x: np.ndarray, **arguments: Any) -> np.ndarray:
    """(P,): what a client with the message x, (P,), sends."""
    from fedfleet.algorithms.attacks.contract import Sender

    sender = Sender(10, 2, counted.key(0, "attack", 1, 3, 0))
    return built(name, **arguments).send(torch.from_numpy(x), sender).numpy()
