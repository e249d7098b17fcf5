"""The divergence guard: it ends a run at the first round whose model is not finite or has become far too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Server
from ...algorithms.tree import Tree
from ..errors import Diverged
from ..reduction.tree import RoundTotals

EXPLODES = 1e6
"""A run has diverged if the model's norm is larger than its norm before round 1 (or 1) times this factor."""
NAMED = 3
"""The largest number of clients that a message names."""
FEW = 0.5
"""If at most this share of a round's clients sent messages that are not finite, these are named as the cause."""
LONGER = 10.0
"""The server is named as the cause if its step is longer than the longest step of a client times this factor."""

CLIENT_REMEDY = "lower the step size"
SERVER_REMEDY = "lower the server's step size"


def growth_limit(x: Tree) -> float:
    """The largest norm that a model may have. x: the model before round 1."""
    return EXPLODES * max(1.0, float(x.norm()))


def check(number: int, server: Server, x: Tree, limit: float, totals: RoundTotals, before: Callable[[], Tree]) -> None:
    """Raise Diverged if the run has diverged; the message names the clients that moved furthest and the likely cause.

    number: the round. server, x: the server's state and the model after the round. limit: see `growth_limit`. before:
    returns the model before the round.
    """
    finite = all(map(is_finite, pytree.tree_leaves(server)))
    if finite and float(x.norm()) <= limit:
        return
    moved = np.nan_to_num(totals.clients["norm2"], nan=np.inf, posinf=np.inf)
    worst = np.argsort(-moved, kind="stable")[:NAMED]
    movements = "; " * bool(len(worst)) + ", ".join(
        f"client {totals.clients['id'][i]} moved {moved[i] ** 0.5:.3g}" for i in worst
    )
    problem = f"the model's norm is over {limit:.3g}" if finite else "the server's state is not finite"
    clause, remedy = likely_cause(totals.clients, x, before, limit)
    raise Diverged(number, f"{problem}{movements}{clause}", remedy)


def check_personal(number: int, moved: Any) -> None:
    """Raise Diverged if tensors that clients keep are not finite. moved: the mean squared norm of their changes in the
    round."""
    if not math.isfinite(moved):
        raise Diverged(number, "the personal tensors of some client are not finite", CLIENT_REMEDY)


def is_finite(leaf: Tensor) -> bool:
    """Whether all numbers of a leaf, of any shape, are finite.

    A finite norm shows this in one pass over the memory. The norm may be infinite although all numbers are finite, if
    they are too large to be squared. Then the numbers are looked at one by one.
    """
    if leaf.is_floating_point() and bool(torch.isfinite(torch.linalg.vector_norm(leaf))):
        return True
    return bool(torch.isfinite(leaf).all())


def likely_cause(
    clients: Mapping[str, np.ndarray], x: Tree, before: Callable[[], Tree], limit: float
) -> tuple[str, str]:
    """(a clause about the likely cause, the remedy). The clause is "" if the clients' step size is the likely cause.

    clients: the columns of the round's clients, (S,) each. Other parameters: see `check`.
    """
    moved, loss, steps = np.sqrt(clients["norm2"]), clients["loss"], clients["steps"]
    not_finite = ~np.isfinite(moved)
    if not len(moved):  # a cohort without clients, or all of them are left out
        return "; no client took part, the server's step made the model large", SERVER_REMEDY
    if not not_finite.any():
        longest = float(moved.max())
        if longest <= limit and not float((x - before()).norm()) <= LONGER * longest:
            return "; every client's message is finite, the server's step made the model large", SERVER_REMEDY
        return "", CLIENT_REMEDY
    if not np.isfinite(loss[steps == 1]).all():
        return (
            "; the loss is not finite at the model that the round began with, before any local step",
            "look at the workload's loss, its inputs and the initial weights",
        )
    if len(not_finite) > 1 and not_finite.mean() <= FEW:
        count, first = int(not_finite.sum()), clients["id"][not_finite][:NAMED]
        return (
            f"; {count} of {len(not_finite)} clients are not finite (client {', '.join(map(str, first))}"
            f"{', …' * (count > NAMED)}), the others are",
            "look at the rows of these clients, or lower the step size",
        )
    return "", CLIENT_REMEDY
