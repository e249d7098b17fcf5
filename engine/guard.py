"""The divergence guard: a run ends at the first round whose outcome is not a number, or far from where it began."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..algorithms.contract import Server
from ..algorithms.tree import Tree
from .errors import Diverged
from .totals import Totals

EXPLODES = 1e6
"""Times its first norm (or 1) that a model may grow before the run counts as diverged."""
NAMED = 3


def growth_limit(x: Tree) -> float:
    """The largest norm that is let pass, from the model before round 1."""
    return EXPLODES * max(1.0, float(x.norm()))


def check(number: int, server: Server, x: Tree, limit: float, totals: Totals) -> None:
    """Raise Diverged, naming the clients that moved furthest; x: the model after round `number`."""
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in pytree.tree_leaves(server))
    if finite and float(x.norm()) <= limit:
        return
    moved = np.nan_to_num(totals.clients["norm2"], nan=np.inf, posinf=np.inf)
    worst = np.argsort(-moved, kind="stable")[:NAMED]
    named = ", ".join(f"client {totals.clients['id'][i]} moved {moved[i] ** 0.5:.3g}" for i in worst)
    what = f"the model's norm is over {limit:.3g}" if finite else "the server's state is not finite"
    raise Diverged(number, f"{what}; {named}")
