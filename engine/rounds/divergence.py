"""The divergence guard: a run ends at the first round whose outcome is not a number, or far from where it began."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...algorithms.contract import Server
from ...algorithms.tree import Tree
from ..errors import Diverged
from ..reduction.round_totals import RoundTotals

EXPLODES = 1e6
"""Times its first norm (or 1) that a model may grow before the run counts as diverged."""
NAMED = 3
FEW = 0.5
"""Share of a round's clients up to which those whose messages are not finite are named as the cause."""
LONGER = 10.0
"""The server is named as the cause where its step is so many times as long as a client's longest displacement."""

CLIENTS = "lower the step size"


def growth_limit(x: Tree) -> float:
    """The largest norm that is let pass, from the model before round 1."""
    return EXPLODES * max(1.0, float(x.norm()))


def check(number: int, server: Server, x: Tree, limit: float, totals: RoundTotals, before: Callable[[], Tree]) -> None:
    """Raise Diverged, naming the clients that moved furthest and the likely cause.

    x: the model after round `number`; before: gives the one before it; limit: see `growth_limit`.
    """
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in pytree.tree_leaves(server))
    if finite and float(x.norm()) <= limit:
        return
    moved = np.nan_to_num(totals.clients["norm2"], nan=np.inf, posinf=np.inf)
    worst = np.argsort(-moved, kind="stable")[:NAMED]
    named = ", ".join(f"client {totals.clients['id'][i]} moved {moved[i] ** 0.5:.3g}" for i in worst)
    what = f"the model's norm is over {limit:.3g}" if finite else "the server's state is not finite"
    why, remedy = cause(totals.clients, x, before, limit)
    raise Diverged(number, f"{what}; {named}{why}", remedy)


def cause(clients: Mapping[str, np.ndarray], x: Tree, before: Callable[[], Tree], limit: float) -> tuple[str, str]:
    """(a clause on the likely cause, "" where the step size of the clients is; the remedy)."""
    moved, loss, steps = np.sqrt(clients["norm2"]), clients["loss"], clients["steps"]
    lost = ~np.isfinite(moved)
    if not lost.any():
        longest = float(moved.max())
        if longest <= limit and not float((x - before()).norm()) <= LONGER * longest:
            return (
                "; every client's message is finite, the server's step made the model large",
                "lower the server's step size",
            )
        return "", CLIENTS
    if not np.isfinite(loss[steps == 1]).all():
        return (
            "; the loss is not finite at the model that the round began with, before any local step",
            "look at the workload's loss, its inputs and the initial weights",
        )
    if len(lost) > 1 and lost.mean() <= FEW:
        count, first = int(lost.sum()), clients["id"][lost][:NAMED]
        return (
            f"; {count} of {len(lost)} clients are not finite (client {', '.join(map(str, first))}"
            f"{', …' * (count > NAMED)}), the others are",
            "look at the rows of these clients, or lower the step size",
        )
    return "", CLIENTS
